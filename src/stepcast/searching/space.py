"""Every strategy that could be asked for, as columns of numbers: an object only where it may win."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from stepcast.ir.arrays import IntArray
from stepcast.ir.coded import recomputes_in_vain
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Framework
from stepcast.ir.layout import Layout
from stepcast.ir.limits import CANDIDATES
from stepcast.ir.model import Model
from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.ir.strategy import NO_RECOMPUTE, USUAL_OVERLAP, Overlap, Recompute, RecomputeKind, Sharding, Strategy

RECOMPUTES: Mapping[str, Recompute] = {
    "none": NO_RECOMPUTE,
    "selective": Recompute(RecomputeKind.SELECTIVE),
    "full": Recompute(RecomputeKind.FULL),
}


def useful_recomputes(model: Model, framework: Framework) -> tuple[str, ...]:
    """Return the kinds of recomputation that can free memory."""
    probe = Strategy(Layout(), 1, 1, 1, recompute=RECOMPUTES["selective"])
    vain = recomputes_in_vain(model, probe, framework)
    return tuple(name for name in RECOMPUTES if not (vain and name == "selective"))


SHARDINGS = (Sharding.NONE, Sharding.ZERO_1, Sharding.ZERO_2, Sharding.FSDP)
MOST_CHUNKS = 16
LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True)
class Axes:
    """The values that each choice may take; empty ones are filled from model and cluster."""

    gpus: tuple[int, ...]
    tp: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    expert_tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    vpp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    schedule: tuple[ScheduleKind, ...] = ()
    recompute: tuple[str, ...] = tuple(RECOMPUTES)
    sharding: tuple[Sharding, ...] = SHARDINGS
    sequence_parallel: tuple[bool, ...] = (True, False)
    precision: tuple[DType, ...] = (DType.BF16,)
    overlap: tuple[str, ...] = ("usual",)  # words of OVERLAPS


COLUMNS = (
    "gpus",
    "tp",
    "cp",
    "ep",
    "expert_tp",
    "pp",
    "vpp",
    "schedule",
    "micro_batch",
    "recompute",
    "sharding",
    "sequence_parallel",
    "precision",
    "overlap",
)
# Fields of a Strategy on which the pieces of a pipeline depend.
PLACED = ("stage_layers", "further_tokens")
# How communication overlaps with computation, from what the software does.
OVERLAPS: Mapping[str, Mapping[str, bool]] = {
    "usual": {},
    "none": dict.fromkeys(Overlap.__dataclass_fields__, False),
    "tensor": {"tensor": True},
    "experts": {"experts": True},
}


@dataclass(frozen=True)
class Space:
    """Candidates, a row each. Columns of words hold their place in the axis."""

    model: Model
    axes: Axes
    global_batch: int
    seq: int
    # What every candidate has in common, by fields of a Strategy.
    common: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, IntArray] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.columns["gpus"])

    @cached_property
    def dp(self) -> IntArray:
        c = self.columns
        return c["gpus"] // (c["tp"] * c["cp"] * c["pp"])

    @cached_property
    def micro_batches(self) -> IntArray:
        """0 where the batch does not divide."""
        per_round = self.columns["micro_batch"] * np.maximum(self.dp, 1)
        whole = self.global_batch % per_round == 0
        return np.where(whole, self.global_batch // per_round, 0)

    def values(self, at: int) -> dict[str, Any]:
        """Row *at* in the words of the axes."""
        axes = self.axes
        row = {name: int(self.columns[name][at]) for name in COLUMNS}
        return {
            **row,
            "schedule": axes.schedule[row["schedule"]],
            "recompute": axes.recompute[row["recompute"]],
            "sharding": axes.sharding[row["sharding"]],
            "precision": axes.precision[row["precision"]],
            "overlap": axes.overlap[row["overlap"]],
            "sequence_parallel": bool(row["sequence_parallel"]),
        }

    def strategy(self, at: int) -> Strategy:
        """Row *at* as a Strategy; a StrategyError where it is none."""
        row = self.values(at)
        layout = Layout(
            tp=row["tp"],
            cp=row["cp"],
            ep=row["ep"],
            dp=row["gpus"] // (row["tp"] * row["cp"] * row["pp"]),
            pp=row["pp"],
            vpp=row["vpp"],
            expert_tp=row["expert_tp"],
        )
        common = {**self.common}
        common["overlap"] = replace(common.get("overlap", USUAL_OVERLAP), **OVERLAPS[row["overlap"]])
        return Strategy(
            layout,
            row["micro_batch"],
            self.global_batch,
            self.seq,
            sequence_parallel=row["sequence_parallel"],
            schedule=row["schedule"],
            sharding=row["sharding"],
            recompute=RECOMPUTES[row["recompute"]],
            precision=row["precision"],
            **common,
        )

    @property
    def placed(self) -> dict[str, Any]:
        """What all candidates have in common of the fields that place layers on stages."""
        return {name: self.common[name] for name in PLACED if name in self.common}

    def having(self, common: Mapping[str, Any]) -> "Space":
        """The same candidates, all of them with *common* fields of a Strategy."""
        return replace(self, common={**self.common, **common})

    def only(self, rows: IntArray) -> "Space":
        """Those candidates alone."""
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def column(self, name: str) -> IntArray:
        """A column of the table, or one that follows from others."""
        if name == "dp":
            return self.dp
        return self.micro_batches if name == "micro_batches" else self.columns[name]


def space_of(
    model: Model, axes: Axes, global_batch: int, seq: int, domain_gpus: int, common: Mapping[str, Any] | None = None
) -> Space:
    """All combinations of *axes* that fill their GPUs; whether they are legal is asked later."""
    axes = _filled(model, axes, global_batch, seq, domain_gpus)
    _check_many(math.prod(map(len, (axes.gpus, axes.tp, axes.cp, axes.pp, axes.ep))))
    layouts = [
        (gpus, tp, cp, ep, expert_tp, pp)
        for gpus, tp, cp, pp in product(axes.gpus, axes.tp, axes.cp, axes.pp)
        if gpus % (tp * cp * pp) == 0
        for ep in axes.ep
        for expert_tp in sorted({each or tp for each in axes.expert_tp} if model.experts else {0})
    ]
    parts: list[IntArray] = []
    many = 0
    for gpus, tp, cp, ep, expert_tp, pp in layouts:
        shared = gpus // (tp * pp) > 1  # there are several to split states among
        pipelines = np.array(_pipelines(axes, pp, model.layers), dtype=np.int64)
        parallel = [int(each) for each in axes.sequence_parallel if tp > 1 or not each] or [0]
        sizes = (
            len(pipelines),
            len(axes.micro_batch),
            len(axes.recompute),
            len(axes.sharding) if shared else 1,
            len(parallel),
            len(axes.precision),
            len(axes.overlap),
        )
        many += math.prod(sizes)
        _check_many(many)
        indices = np.indices(sizes).reshape(len(sizes), -1)
        pipeline, batch, recompute, sharding, sp, precision, overlap = indices
        layout = np.tile((gpus, tp, cp, ep, expert_tp, pp), (len(pipeline), 1))
        batches = np.array(axes.micro_batch, dtype=np.int64)[batch]
        rest = (batches, recompute, sharding, np.array(parallel)[sp], precision, overlap)
        parts.append(np.column_stack((layout, pipelines[pipeline], *rest)))
    table = np.concatenate(parts) if parts else np.zeros((0, len(COLUMNS)), dtype=np.int64)
    columns = {name: np.ascontiguousarray(table[:, at]) for at, name in enumerate(COLUMNS)}
    return Space(model, axes, global_batch, seq, dict(common or {}), columns)


def _check_many(candidates: int) -> None:
    if candidates > CANDIDATES.most:
        raise ValueError(f"{CANDIDATES.said}: fix some choices, or allow fewer values")


def _pipelines(axes: Axes, pp: int, layers: int) -> list[tuple[int, int]]:
    """(chunks, schedule) of *pp* stages: schedules that order chunks with as many as divide the layers."""
    found = []
    for at, kind in enumerate(axes.schedule):
        facts = SCHEDULES[kind]
        if pp == 1:
            if kind is ScheduleKind.ONE_F_ONE_B:
                found.append((1, at))
            continue
        for vpp in axes.vpp:
            fits = facts.fewest_chunks <= vpp <= (facts.most_chunks or vpp)
            if fits and (vpp == facts.fewest_chunks or facts.most_chunks is None) and pp * vpp <= layers + 2:
                found.append((vpp, at))
    return found or [(1, 0)]


def _filled(model: Model, axes: Axes, global_batch: int, seq: int, domain_gpus: int) -> Axes:
    most = max(axes.gpus)
    doubled = tuple(2**power for power in range(most.bit_length()) if 2**power <= most)
    experts = model.experts
    filled: dict[str, Any] = {
        "tp": tuple(each for each in doubled if each <= domain_gpus and each <= model.heads),
        "cp": tuple(each for each in doubled if 2 * each <= seq and each <= max(1, seq // 2048)),
        "ep": tuple(each for each in doubled if each <= experts.count) if experts else (1,),
        "expert_tp": (1, 0),
        "pp": tuple(sorted({each for gpus in axes.gpus for each in _divisors(gpus) if each <= model.layers})),
        "vpp": tuple(range(1, MOST_CHUNKS + 1)),
        "micro_batch": tuple(each for each in _divisors(global_batch) if each <= LARGEST_MICRO_BATCH),
        "schedule": (
            ScheduleKind.ONE_F_ONE_B,
            ScheduleKind.INTERLEAVED,
            ScheduleKind.ZB_H1,
            ScheduleKind.ZB_V,
            ScheduleKind.DUALPIPE,
        ),
    }
    given = {name: getattr(axes, name) or filled.get(name, ()) for name in Axes.__dataclass_fields__}
    return Axes(**given)


def _divisors(number: int) -> Sequence[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
