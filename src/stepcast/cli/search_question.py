"""What a command line asks to search, and how far the search is while it runs."""

import argparse
import contextlib
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepcast.cli.choices import allowed
from stepcast.cli.progress import moving_text
from stepcast.cli.streams import show_status
from stepcast.frameworks.catalog import load_profile
from stepcast.frameworks.profile import Profile, missing_features, settle
from stepcast.hardware import Cluster, load_cluster
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy
from stepcast.models.catalog import load_model
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import name_cluster
from stepcast.searching.best import MEMORY_RESERVE, search_parts, usable_memory_bytes
from stepcast.searching.crew import usable_workers
from stepcast.searching.mixed import join_gpu_kinds, search_mixed
from stepcast.searching.result import SearchCounts, SearchResult, SearchWatch, SimulatedCandidate
from stepcast.searching.search import refine_best
from stepcast.searching.space import (
    OVERLAPS,
    RECOMPUTES,
    CandidateSpace,
    SearchAxes,
    build_space,
    split_by_software,
    useful_recomputes,
)
from stepcast.units import format_seconds

if TYPE_CHECKING:
    from types import FrameType


EVERY_S = 0.1
FEW_COUNTS = 4  # numbers of GPUs that are told one by one
SETTLED_ELSEWHERE = ("precision", "sharding", "sequence_parallel", "recompute")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, read from the command line; *assumptions* are what it left open."""

    args: argparse.Namespace
    model: Model
    cluster: Cluster
    profile: Profile
    gpus: tuple[int, ...]
    global_batch: int
    seq: int
    axes: dict[str, tuple[Any, ...]]
    most_bytes: float | None
    reserve: float | None = None  # share of a GPU's memory that stays free
    assumptions: tuple[str, ...] = ()

    @property
    def usable_memory_bytes(self) -> float:
        """What a candidate may take of a GPU."""
        return usable_memory_bytes(self.cluster.gpu.memory_bytes, self.most_bytes, self.reserve)

    @property
    def most_gpus(self) -> int | None:
        """Of both kinds, where there are two."""
        return self.priced.gpus

    @property
    def mixed(self) -> bool:
        """Whether so many GPUs need both kinds."""
        mine = self.cluster.gpus
        return self.cluster.other is not None and mine is not None and max(self.gpus) > mine

    @property
    def priced(self) -> Cluster:
        """What predictions of the rows are made on."""
        return join_gpu_kinds(self.cluster)

    def answer(
        self, top: int | None = None, watch: SearchWatch | None = None, most_s: float = math.inf
    ) -> SearchResult:
        """The best *top*, or as many as asked for, which are refined then; *watch* is told how far it is in
        place of the terminal.
        """
        began = time.monotonic()
        args, precision = self.args, self.profile.defaults.precision
        framework, _ = self._settle(Layout(), precision)
        usual = {"precision": (precision,), "recompute": useful_recomputes(self.model, framework)}
        axes = usual | self.axes
        space = build_space(
            self.model, SearchAxes(gpus=self.gpus, **axes), self.global_batch, self.seq, self.cluster.domain_gpus
        )
        if not len(space):
            counts = [f"{each:,}" for each in self.gpus]
            said = " or ".join(counts) if len(counts) <= FEW_COUNTS else f"{counts[0]} to {counts[-1]}"
            raise ValueError(f"no candidates: tp x cp x pp divides {said} GPUs for none of the values allowed")
        if not getattr(args, "any_framework", False):
            space = supported(space, self.profile)
        try:
            with contextlib.nullcontext(watch) if watch else _Watching() as told:
                asked = (split_by_software(space, self._settle), self.cluster, top or args.top, args.objective)
                left_s = max(0.0, min(most_s, args.time or math.inf) - (time.monotonic() - began))
                if self.mixed:
                    return search_mixed(*asked, self.most_bytes, told, left_s, self.reserve)
                result = search_parts(
                    *asked,
                    self.usable_memory_bytes,
                    told,
                    args.workers or usable_workers(),
                    looks_around=top is None,
                    most_s=left_s,
                )
            if top is not None:
                return result
            return refine_best(result, self.model, self.cluster, args.objective, self.usable_memory_bytes)
        finally:
            show_status("")

    def _settle(self, layout: Any, precision: Any) -> Any:
        settled = settle(self.profile, self.model, self.cluster.gpu.name, layout, {"precision": precision})
        common = {name: each for name, each in settled.choices.items() if name not in SETTLED_ELSEWHERE}
        return settled.framework, common


# What decides whether software has all that a candidate uses, and how far degrees matter for that.
DEGREES = ("tp", "cp", "ep", "pp", "vpp")
CHOSEN = ("schedule", "recompute", "sharding", "overlap")


def supported(space: CandidateSpace, profile: Profile) -> CandidateSpace:
    """Return the candidates that the software of *profile* can run; raise a ValueError if there are none."""
    if not profile.supports:
        return space
    several = [np.minimum(space.columns[name], 2) for name in DEGREES]
    keys = np.column_stack([*several, np.clip(space.dp, 1, 2), *(space.columns[name] for name in CHOSEN)])
    _, first, member = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    why = [_missing(space, profile, int(at), keys[at, : len(DEGREES) + 1].tolist()) for at in first]
    rows = np.flatnonzero(np.array([not each for each in why])[member.reshape(-1)])
    if not len(rows):
        raise ValueError(f"no candidates: {min(why, key=len)[0]}; --any-framework searches them nevertheless")
    return space.only(rows)


def _missing(space: CandidateSpace, profile: Profile, at: int, degrees: list[int]) -> list[str]:
    """Return what the software lacks for candidates like that of row *at*."""
    row = space.values(at)
    tp, cp, ep, pp, vpp, dp = degrees
    overlap = replace(profile.defaults.overlap, **OVERLAPS[row["overlap"]])
    strategy = Strategy(
        Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, vpp=vpp),
        micro_batch=1,
        global_batch=2 * dp,
        seq=space.seq,
        schedule=row["schedule"],
        sharding=row["sharding"],
        recompute=RECOMPUTES[row["recompute"]],
        overlap=overlap,
        context=profile.defaults.context,
    )
    return missing_features(profile, strategy, profile.framework)


def question_of(args: argparse.Namespace) -> Question:
    if getattr(args, "name", None) is not None:
        if args.model is not None:
            raise ValueError(f"{args.name}: --model names the model already; leave one of them out")
        args.model = args.name
    gpu = getattr(args, "gpu", None)
    args.cluster = name_cluster(PredictQuestion(model=args.model, cluster=args.cluster, gpu=gpu))
    model = load_model(args.model) if isinstance(args.model, str) else args.model
    cluster = load_cluster(args.cluster, args.set) if isinstance(args.cluster, str) else args.cluster
    profile, assumptions = load_profile(args.framework), []
    seq = args.seq
    if seq is None:
        seq = min(model.max_seq, profile.defaults.seq)
        assumptions.append(f"sequences of {seq} tokens (--seq)")
    gpus = args.gpus
    if gpus is None:
        if cluster.gpus is None:
            raise ValueError("how many GPUs? give --gpus, such as 64 or 8..64")
        gpus = (cluster.gpus,)
        assumptions.append(f"all {cluster.gpus} GPUs of {cluster.name} (--gpus)")
    batch = args.global_batch
    if batch is None and args.tokens_per_batch is None:
        raise ValueError("how large is a step? give --global-batch, in sequences, or --tokens-per-batch, as 4M")
    if batch is None:
        batch, rest = divmod(int(args.tokens_per_batch), seq)
        if rest or not batch:
            near = max(1, round(args.tokens_per_batch / seq)) * seq
            raise ValueError(
                f"--tokens-per-batch {int(args.tokens_per_batch):,} are no whole sequences of {seq:,} "
                f"tokens; the nearest is {near}"
            )
    axes = allowed(args.fix, args.allow)
    if getattr(args, "any_framework", False):
        if not profile.supports:
            raise ValueError(f"--any-framework has no effect: {profile.name} does not list what it can run")
    elif profile.supports and not {"schedule", "sharding"} <= axes.keys():
        assumptions.append(f"schedules, shardings and overlaps that {profile.name} has (--any-framework)")
    if args.max_memory is None and args.memory_reserve is None:
        share = f"{MEMORY_RESERVE * 100:g} %"
        assumptions.append(f"a reserve of {share} of each GPU's memory (--memory-reserve)")
    limits = (args.max_memory, args.memory_reserve)
    asked = Question(args, model, cluster, profile, gpus, batch, seq, axes, *limits, tuple(assumptions))
    _check_gpus(asked)
    return asked


def _check_gpus(asked: Question) -> None:
    """All GPUs of both kinds, or some of the first."""
    cluster, most, wanted = asked.cluster, asked.most_gpus, max(asked.gpus)
    if most is not None and wanted > most:
        raise ValueError(f"--gpus {wanted:,}: cluster {cluster.name} has {most:,}")
    if asked.mixed and asked.gpus != (most,):
        raise ValueError(
            f"--gpus {wanted:,}: cluster {cluster.name} has two kinds; give all, {most:,}, or at most the "
            f"{cluster.gpus:,} of the first"
        )


class _Watching:
    """Shows how far a search is; the first Ctrl-C ends it with the best so far, another one ends all."""

    def __init__(self) -> None:
        self.stopped, self.last, self.began = False, 0.0, time.monotonic()
        self.before: Any = None

    def __enter__(self) -> "_Watching":
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            import signal

            signal.signal(signal.SIGINT, self.before)

    def __call__(self, counts: SearchCounts, best: SimulatedCandidate | None) -> None:
        if self.before is None:
            self._catch()
        if self.stopped:
            raise KeyboardInterrupt
        now = time.monotonic()
        if now - self.last >= EVERY_S:
            self.last = now
            if best is None:
                words = f"bounding {counts.considered:,} candidates, {counts.priced:,} kinds of layers priced"
            else:
                words = (
                    f"simulated {counts.simulated:,}, {counts.unseen:,} of {counts.considered:,} left; "
                    f"best {format_seconds(best.step_s)}"
                )
            show_status(moving_text("search", round((now - self.began) / EVERY_S), words))

    def _catch(self) -> None:
        import signal
        import threading

        if threading.current_thread() is threading.main_thread():
            self.before = signal.getsignal(signal.SIGINT)
            if self.before is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._stop)

    def _stop(self, number: int, frame: "FrameType | None") -> None:
        import signal

        self.stopped = True
        signal.signal(signal.SIGINT, self.before)
