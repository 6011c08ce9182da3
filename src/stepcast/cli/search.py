"""``stepcast search --model M --cluster C --gpus N --global-batch B ...``"""

import argparse
import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stepcast.cli.choices import GIVEN, allowed, gpu_counts, row_words
from stepcast.cli.interrupts import INTERRUPTED
from stepcast.cli.numbers import BINARY, MOST_SEQUENCES, MOST_TOKENS, count, positive, price
from stepcast.cli.output import new_file, print_json, terminal_width, write_file
from stepcast.cli.pages import add_page_argument, told_page, write_page
from stepcast.cli.predict import training
from stepcast.cli.streams import show_status
from stepcast.units import parse_count, parse_size_bytes

if TYPE_CHECKING:
    from types import FrameType

    from stepcast.frameworks.profile import Profile
    from stepcast.hardware import Cluster
    from stepcast.ir.model import Model
    from stepcast.ir.step import StepReport
    from stepcast.pages.document import About, Page
    from stepcast.searching.best import Counts, Found, Result, Watch

OBJECTIVES = ("step", "throughput", "cost", "memory", "energy")
MOST_ROWS = 1000
# Where nothing fits: so many times the GPUs.
MORE_GPUS = (2, 4, 8, 16)
EVERY_S = 0.1
SETTLED_ELSEWHERE = ("precision", "sharding", "sequence_parallel", "recompute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="name in the catalogue, or a config.json")
    parser.add_argument("--cluster", required=True, metavar="C", help="name in the catalogue, or a TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the cluster, as node.nics=4"
    )
    parser.add_argument(
        "--gpus",
        type=gpu_counts,
        required=True,
        metavar="N|A,B|A..B",
        help="GPUs in all; A..B doubles from A to B",
    )
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument(
        "--global-batch", type=count(1, MOST_SEQUENCES, BINARY), metavar="N", help="sequences in a step"
    )
    batch.add_argument(
        "--tokens-per-batch", type=positive(parse_count), metavar="N", help="tokens in a step, as 4M"
    )
    parser.add_argument("--seq", type=count(1, MOST_TOKENS, BINARY), metavar="N", help="tokens in a sequence")
    parser.add_argument(
        "--framework", default="megatron-core", metavar="F", help="whose habits fill the rest"
    )
    names = ", ".join(GIVEN)
    parser.add_argument(
        "--fix", action="append", default=[], metavar="NAME=VALUE", help=f"a choice that is made: {names}"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="NAME=A,B", help="the values that a choice may take"
    )
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default="step", help="what to make least (or most)"
    )
    parser.add_argument(
        "--max-memory", type=positive(parse_size_bytes), metavar="SIZE", help="of a GPU, such as 70GiB"
    )
    parser.add_argument(
        "--top", type=count(1, MOST_ROWS), default=10, metavar="K", help="strategies to rank (default 10)"
    )
    parser.add_argument(
        "--tokens", type=positive(parse_count), metavar="N", help="also tell days and GPU-hours, as 15T"
    )
    parser.add_argument("--price", type=price, metavar="X", help="with --tokens: of a GPU-hour")
    parser.add_argument(
        "-o", "--output", type=new_file, metavar="FILE", help="write the rows as .csv or .json"
    )
    add_page_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, read from the command line."""

    args: argparse.Namespace
    model: "Model"
    cluster: "Cluster"
    profile: "Profile"
    gpus: tuple[int, ...]
    global_batch: int
    seq: int
    axes: dict[str, tuple[Any, ...]]
    most_bytes: float | None

    def answer(self, top: int | None = None, watch: "Watch | None" = None) -> "Result":
        """What a search finds; *watch* is told how far it is in place of the terminal."""
        from stepcast.searching.best import search_parts
        from stepcast.searching.search import parts_of
        from stepcast.searching.space import Axes, space_of

        axes = {"precision": (self.profile.defaults.precision,), **self.axes}
        space = space_of(
            self.model, Axes(gpus=self.gpus, **axes), self.global_batch, self.seq, self.cluster.domain_gpus
        )
        if not len(space):
            raise ValueError("no candidates: tp x cp x pp divides the GPUs for none of the values allowed")
        if watch is None:
            show_status(f"bounding {len(space):,} candidates")
        try:
            with contextlib.nullcontext(watch) if watch else _Watching() as told:
                return search_parts(
                    parts_of(space, self._settle),
                    self.cluster,
                    top or self.args.top,
                    self.args.objective,
                    self.most_bytes,
                    told,
                )
        finally:
            show_status("")

    def _settle(self, layout: Any, precision: Any) -> Any:
        from stepcast.frameworks.profile import settle

        settled = settle(self.profile, self.model, self.cluster.gpu.name, layout, {"precision": precision})
        common = {name: each for name, each in settled.choices.items() if name not in SETTLED_ELSEWHERE}
        return settled.framework, common


def run(args: argparse.Namespace) -> int:
    from stepcast.report.search import search_text

    if args.price is not None and args.tokens is None:
        raise ValueError("--price has no effect: it is of a whole run; give --tokens as well, such as 1T")
    if args.output and not args.output.endswith((".csv", ".json")):
        raise ValueError(f"{args.output}: name a file that ends in .csv or .json")
    asked, assumptions = question_of(args)
    result = asked.answer()
    found = search_facts(asked, result, assumptions)
    if args.output:
        write_file(args.output, _document(args.output, found))
    write_page(args, lambda about: result_page(found, result, about))
    if args.json:
        print_json(found)
    else:
        print(search_text(found, terminal_width()))
        if args.html:
            print(f"\n{told_page(args)}")
    if not result.counts.complete:
        return INTERRUPTED
    return 0 if result.best else 1


def result_page(found: dict[str, Any], result: "Result", about: "About") -> "Page":
    from stepcast.ir.facts import CandidateFacts
    from stepcast.pages.search import search_page
    from stepcast.report.search import strategy_words

    simulated = [
        CandidateFacts(
            words=strategy_words(row_words(each.strategy)),
            step_s=each.step_s,
            memory_bytes=each.memory_bytes,
            gpus=each.gpus,
        )
        for each in result.simulated
    ]
    return search_page(found, about, simulated)


def question_of(args: argparse.Namespace) -> tuple[Question, list[str]]:
    from stepcast.frameworks.catalog import load_profile
    from stepcast.hardware import load_cluster
    from stepcast.models.catalog import load_model

    model = load_model(args.model) if isinstance(args.model, str) else args.model
    cluster = load_cluster(args.cluster, args.set) if isinstance(args.cluster, str) else args.cluster
    profile, assumptions = load_profile(args.framework), []
    seq = args.seq
    if seq is None:
        seq = min(model.max_seq, profile.defaults.seq)
        assumptions.append(f"sequences of {seq} tokens (--seq)")
    batch = args.global_batch
    if batch is None:
        batch, rest = divmod(int(args.tokens_per_batch), seq)
        if rest or not batch:
            near = max(1, round(args.tokens_per_batch / seq)) * seq
            raise ValueError(
                f"--tokens-per-batch {int(args.tokens_per_batch):,} are no whole sequences of {seq:,} "
                f"tokens; the nearest is {near}"
            )
    if cluster.gpus is not None and max(args.gpus) > cluster.gpus:
        raise ValueError(f"--gpus {max(args.gpus):,}: cluster {cluster.name} has {cluster.gpus:,}")
    axes = allowed(args.fix, args.allow)
    return Question(args, model, cluster, profile, args.gpus, batch, seq, axes, args.max_memory), assumptions


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

    def __call__(self, counts: "Counts", best: "Found | None") -> None:
        from stepcast.units import format_seconds

        if self.before is None:
            self._catch()
        if self.stopped:
            raise KeyboardInterrupt
        now = time.monotonic()
        if now - self.last >= EVERY_S:
            self.last = now
            rate = counts.simulated / max(now - self.began, EVERY_S)
            told = f"best {format_seconds(best.step_s)}" if best else "none fits yet"
            show_status(
                f"simulated {counts.simulated:,} of {counts.considered:,}, {rate:,.0f} a second; {told}"
            )

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


def search_facts(asked: Question, result: "Result", assumptions: Sequence[str]) -> dict[str, Any]:
    from stepcast.forecast.predict import predict
    from stepcast.searching.reasons import binding, differences_s, shares

    reports = [
        predict(asked.model, asked.cluster, each.strategy, each.framework).report for each in result.best
    ]
    rows = [
        _row(asked, rank, each, report, reports[0])
        for rank, (each, report) in enumerate(zip(result.best, reports, strict=True), 1)
    ]
    missed = result.missed
    capacity = asked.cluster.gpu.memory_bytes
    return {
        "model": asked.model.name,
        "cluster": asked.cluster.name,
        "objective": asked.args.objective,
        "global_batch": asked.global_batch,
        "seq": asked.seq,
        "capacity_bytes": min(capacity, asked.most_bytes or capacity),
        "counts": result.counts.facts(),
        "rows": rows,
        "binds": {"what": binding(reports[0], missed is not None), "shares": shares(reports[0])}
        if rows
        else None,
        "missed": {
            **row_words(missed.strategy),
            "bound_s": missed.bound_s,
            "memory_bytes": missed.memory_bytes,
        }
        if missed
        else None,
        "runner_up": {
            "slower_s": reports[1].step_s - reports[0].step_s,
            "parts_s": differences_s(reports[1], reports[0]),
        }
        if len(rows) > 1
        else None,
        "front": [
            {**row_words(each.strategy), "step_s": each.step_s, "memory_bytes": each.memory_bytes}
            for each in result.front
        ],
        "smallest_bytes": result.smallest_bytes,
        "change": None if rows or not result.counts.complete else _change(asked),
        "assumptions": list(assumptions),
    }


def _row(
    asked: Question, rank: int, found: "Found", report: "StepReport", best: "StepReport"
) -> dict[str, Any]:
    assert report.throughput is not None
    args = asked.args
    run = training(args.tokens, args.price, found.strategy, found.step_s) or {}
    return {
        "rank": rank,
        **row_words(found.strategy),
        "step_s": found.step_s,
        "low_s": report.low_s,
        "high_s": report.high_s,
        "equal": report.step_s <= best.high_s and report.step_s >= best.low_s,
        "tokens_per_s_per_gpu": report.throughput.tokens_per_s / found.gpus,
        "mfu": report.throughput.mfu,
        "memory_bytes": found.memory_bytes,
        "free_bytes": asked.cluster.gpu.memory_bytes - found.memory_bytes,
        "breakdown_s": dict(report.breakdown_s),
        "days": run.get("days"),
        "gpu_hours": run.get("gpu_hours"),
        "cost": run.get("cost"),
        "command": _command(asked, found),
    }


def _command(asked: Question, found: "Found") -> str:
    """The line that predicts this row alone."""
    args, row = asked.args, row_words(found.strategy)
    words = ["stepcast", "predict", "--model", args.model, "--cluster", args.cluster]
    for each in args.set:
        words += ["--set", each]
    if args.framework != "megatron-core":
        words += ["--framework", args.framework]
    words += ["--gpus", str(row["gpus"]), "--global-batch", str(asked.global_batch), "--seq", str(asked.seq)]
    for name in ("tp", "cp", "ep", "pp", "vpp", "micro_batch"):
        if row[name] > 1:
            words += [f"--{name.replace('_', '-')}", str(row[name])]
    if row["expert_tp"] not in (0, row["tp"]):
        words += ["--expert-tp", str(row["expert_tp"])]
    if row["pp"] > 1:
        words += ["--schedule", row["schedule"]]
    words += ["--recompute", row["recompute"], "--sharding", row["sharding"]]
    if row["precision"] != str(asked.profile.defaults.precision):
        words += ["--precision", row["precision"]]
    if row["tp"] > 1:
        words += ["--sequence-parallel" if row["sequence_parallel"] else "--no-sequence-parallel"]
    return shlex.join(words)


def _change(asked: Question) -> dict[str, Any] | None:
    """The smallest change that lets something fit: a choice left open again, or more GPUs."""
    tries: list[tuple[str, Question]] = []
    if asked.most_bytes is not None:
        tries.append(("all of a GPU's memory: leave --max-memory out", replace(asked, most_bytes=None)))
    for name in asked.axes:
        rest = {each: values for each, values in asked.axes.items() if each != name}
        tries.append((f"leave {name.replace('_', '-')} open", replace(asked, axes=rest)))
    for times in MORE_GPUS:
        more = tuple(each * times for each in asked.gpus)
        if asked.cluster.gpus is None or max(more) <= asked.cluster.gpus:
            told = ", ".join(f"{each:,}" for each in more)
            tries.append((f"{times} times the GPUs: --gpus {told}", replace(asked, gpus=more)))
    for words, question in tries:
        result = question.answer(top=1)
        if not result.counts.complete:
            return None
        if result.best:
            best = result.best[0]
            return {
                "words": words,
                **row_words(best.strategy),
                "step_s": best.step_s,
                "memory_bytes": best.memory_bytes,
                "command": _command(question, best),
            }
    return None


def _document(name: str, found: dict[str, Any]) -> bytes:
    if name.endswith(".json"):
        import msgspec

        return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
    import csv
    import io

    text = io.StringIO()
    rows = [{name: each for name, each in row.items() if name != "breakdown_s"} for row in found["rows"]]
    writer = csv.DictWriter(text, rows[0] if rows else ["rank"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
