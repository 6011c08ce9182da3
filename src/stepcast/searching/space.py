"""Every strategy that a search considers, as columns of numbers; an object is built only where it may win."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import numpy as np

from stepcast.ir.arrays import BoolArray, FloatArray, IntArray, distinct_rows
from stepcast.ir.children import map_parallel
from stepcast.ir.framework import Framework
from stepcast.ir.layers.attention_core import recomputes_in_vain
from stepcast.ir.layout import Layout
from stepcast.ir.legality import find_problems, is_legal
from stepcast.ir.limits import CANDIDATES
from stepcast.ir.model import Model
from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.ir.strategy import USUAL_OVERLAP, Overlap, Recompute, RecomputeKind, Sharding, Strategy, StrategyError
from stepcast.ir.types import DType, dataclass

StrategyFields = Mapping[str, Any]
"""Fields of a Strategy by name."""
SettleSoftware = Callable[[Layout, DType, Sharding], tuple[Framework, StrategyFields]]
"""Return the software that runs a layout in a precision, sharded so, and the fields of a Strategy that it decides."""
Tick = Callable[[], None]
Answer = TypeVar("Answer")

RECOMPUTES: Mapping[str, Recompute] = {
    "none": Recompute(),
    "selective": Recompute(RecomputeKind.SELECTIVE),
    "full": Recompute(RecomputeKind.FULL),
}
SHARDINGS = (Sharding.NONE, Sharding.ZERO_1, Sharding.ZERO_2, Sharding.FSDP)
SEARCHED_SCHEDULES = (
    ScheduleKind.ONE_F_ONE_B,
    ScheduleKind.INTERLEAVED,
    ScheduleKind.ZB_H1,
    ScheduleKind.ZB_V,
    ScheduleKind.DUALPIPE,
)
MOST_CHUNKS = 16
LARGEST_MICRO_BATCH = 64
# How communication overlaps with computation, as changes to the defaults of the software.
OVERLAPS: Mapping[str, Mapping[str, bool]] = {
    "usual": {},
    "none": dict.fromkeys(Overlap.__dataclass_fields__, False),
    "tensor": {"tensor": True},
    "experts": {"experts": True},
}

# Columns on which quantities depend.
LAYOUT = ("gpus", "tp", "cp", "ep", "expert_tp", "pp")
SAVED = ("tp", "cp", "ep", "expert_tp", "micro_batch", "recompute", "sequence_parallel", "precision")
LAYER = ("gpus", *SAVED, "overlap")
PIECES = ("pp", "vpp", "schedule")
STATES = (*LAYOUT, "sharding", "precision")
SOFTWARE = ("pp", "vpp", "ep", "precision", "sharding")
LEGALITY = (*LAYOUT, "sequence_parallel", "sharding", "recompute", "precision", "overlap")
# Fields of a Strategy on which the pieces of a pipeline depend.
PIECE_FIELDS = ("stage_layers", "mtp_layers")


def useful_recomputes(model: Model, framework: Framework) -> tuple[str, ...]:
    """Return the kinds of recomputation that can free memory."""
    probe = Strategy(Layout(), 1, 1, 1, recompute=RECOMPUTES["selective"])
    vain = recomputes_in_vain(model, probe, framework)
    return tuple(name for name in RECOMPUTES if not (vain and name == "selective"))


@dataclass(frozen=True)
class SearchAxes:
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
    recompute: tuple[str | Recompute, ...] = tuple(RECOMPUTES)
    sharding: tuple[Sharding, ...] = SHARDINGS
    sequence_parallel: tuple[bool, ...] = (True, False)
    precision: tuple[DType, ...] = (DType.BF16,)
    overlap: tuple[str, ...] = ("usual",)  # keys of OVERLAPS


CandidateRow = dict[str, Any]
"""One candidate in the values of the axes."""
# The columns of a space: degrees of a Layout after the GPUs, then choices of a Strategy; WORDS are text.
DEGREES = ("tp", "cp", "ep", "expert_tp", "pp", "vpp")
WORDS = ("schedule", "recompute", "sharding", "precision", "overlap")
CHOICES = ("schedule", "micro_batch", "recompute", "sharding", "sequence_parallel", "precision")
COLUMNS = ("gpus", *DEGREES, *CHOICES, "overlap")


@dataclass(frozen=True)
class CandidateSpace:
    """A table of candidates, one row each. Columns of words hold indices into the values of their axis."""

    model: Model
    axes: SearchAxes
    global_batch: int
    seq: int
    common: StrategyFields = field(default_factory=dict)  # shared by all candidates
    columns: Mapping[str, IntArray] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.columns["gpus"])

    @cached_property
    def dp(self) -> IntArray:
        return self.columns["gpus"] // (self.columns["tp"] * self.columns["cp"] * self.columns["pp"])

    @cached_property
    def micro_batches(self) -> IntArray:
        """Micro-batches of each candidate; 0 if the batch does not divide."""
        per_round = self.columns["micro_batch"] * np.maximum(self.dp, 1)
        return np.where(self.global_batch % per_round == 0, self.global_batch // per_round, 0)

    def values(self, row: int) -> CandidateRow:
        """Return a candidate in the values of the axes."""
        values: CandidateRow = {name: int(column[row]) for name, column in self.columns.items()}
        for name in WORDS:
            values[name] = getattr(self.axes, name)[values[name]]
        values["sequence_parallel"] = bool(values["sequence_parallel"])
        return values

    def strategy(self, row: int) -> Strategy:
        """Return a candidate as a Strategy; raise a StrategyError if it is none."""
        values = self.values(row)
        layout = Layout(dp=int(self.dp[row]), **{name: values[name] for name in DEGREES})
        choices = {name: values[name] for name in CHOICES}
        overlap = replace(self.common.get("overlap", USUAL_OVERLAP), **OVERLAPS[values["overlap"]])
        common = {**self.common, "overlap": overlap}
        return Strategy(layout, global_batch=self.global_batch, seq=self.seq, **choices, **common)

    def having(self, common: StrategyFields) -> "CandidateSpace":
        """Return the same candidates, all of them with *common* fields of a Strategy."""
        return replace(self, common={**self.common, **common})

    def only(self, rows: IntArray) -> "CandidateSpace":
        """Return the candidates of *rows* alone."""
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def column(self, name: str) -> IntArray:
        """Return a column of the table, or one derived from others."""
        if name == "dp":
            return self.dp
        return self.micro_batches if name == "micro_batches" else self.columns[name]


@dataclass(frozen=True, slots=True)
class SpacePart:
    """Candidates that one setting of the software runs; *rows* are their numbers among all."""

    space: CandidateSpace
    framework: Framework
    rows: IntArray


def build_space(
    model: Model, axes: SearchAxes, global_batch: int, seq: int, domain_gpus: int, common: StrategyFields | None = None
) -> CandidateSpace:
    """Return all combinations of *axes* that use all their GPUs; legality is checked later."""
    axes = _fill_axes(model, axes, global_batch, seq, domain_gpus)
    _check_count(math.prod(map(len, (axes.gpus, axes.tp, axes.cp, axes.pp, axes.ep))))
    layouts = [
        (gpus, tp, cp, ep, expert_tp, pp)
        for gpus, tp, cp, pp in product(axes.gpus, axes.tp, axes.cp, axes.pp)
        if gpus % (tp * cp * pp) == 0
        for ep in axes.ep
        for expert_tp in sorted({ways or tp for ways in axes.expert_tp} if model.experts else {0})
    ]
    tables: list[IntArray] = [np.zeros((0, len(COLUMNS)), dtype=np.int64)]
    count = 0
    for gpus, tp, cp, ep, expert_tp, pp in layouts:
        pipelines = np.array(_pipelines(axes, pp, model.layers), dtype=np.int64)
        parallel = [int(value) for value in axes.sequence_parallel if tp > 1 or not value] or [0]
        sizes = (
            len(pipelines),
            len(axes.micro_batch),
            len(axes.recompute),
            len(axes.sharding) if gpus // (tp * pp) > 1 else 1,  # several ranks can share states
            len(parallel),
            len(axes.precision),
            len(axes.overlap),
        )
        count += math.prod(sizes)
        _check_count(count)
        pipeline, batch, recompute, sharding, sp, precision, overlap = np.indices(sizes).reshape(len(sizes), -1)
        layout = np.tile((gpus, tp, cp, ep, expert_tp, pp), (len(pipeline), 1))
        batches = np.array(axes.micro_batch, dtype=np.int64)[batch]
        rest = (batches, recompute, sharding, np.array(parallel)[sp], precision, overlap)
        tables.append(np.column_stack((layout, pipelines[pipeline], *rest)))
    table = np.concatenate(tables)
    columns = {name: np.ascontiguousarray(table[:, index]) for index, name in enumerate(COLUMNS)}
    return CandidateSpace(model, axes, global_batch, seq, dict(common or {}), columns)


def _check_count(candidates: int) -> None:
    if candidates > CANDIDATES.most:
        raise ValueError(f"{CANDIDATES.message}: fix some choices, or allow fewer values")


def _pipelines(axes: SearchAxes, pp: int, layers: int) -> list[tuple[int, int]]:
    """Return (chunks, schedule) for *pp* stages: the schedules with every number of chunks that the layers fill."""
    pipelines = []
    for index, kind in enumerate(axes.schedule):
        facts = SCHEDULES[kind]
        if pp == 1:
            if kind is ScheduleKind.ONE_F_ONE_B:
                pipelines.append((1, index))
            continue
        for vpp in axes.vpp:
            fits = facts.fewest_chunks <= vpp <= (facts.most_chunks or vpp)
            if fits and (vpp == facts.fewest_chunks or facts.most_chunks is None) and pp * vpp <= layers + 2:
                pipelines.append((vpp, index))
    return pipelines or [(1, 0)]


def _fill_axes(model: Model, axes: SearchAxes, global_batch: int, seq: int, domain_gpus: int) -> SearchAxes:
    most, experts = max(axes.gpus), model.experts
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    stages = {pp for gpus in axes.gpus for pp in _divisors(gpus) if pp <= model.layers}
    return replace(
        axes,
        tp=axes.tp or tuple(ways for ways in powers if ways <= domain_gpus and ways <= model.heads),
        cp=axes.cp or tuple(ways for ways in powers if 2 * ways <= seq and ways <= max(1, seq // 2048)),
        ep=axes.ep or (tuple(ways for ways in powers if ways <= experts.count) if experts else (1,)),
        expert_tp=axes.expert_tp or (1, 0),
        pp=axes.pp or tuple(sorted(stages)),
        vpp=axes.vpp or tuple(range(1, MOST_CHUNKS + 1)),
        micro_batch=axes.micro_batch or tuple(n for n in _divisors(global_batch) if n <= LARGEST_MICRO_BATCH),
        schedule=axes.schedule or SEARCHED_SCHEDULES,
        recompute=tuple(RECOMPUTES[kind] if isinstance(kind, str) else kind for kind in axes.recompute),
    )


def _divisors(number: int) -> Sequence[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


class SpaceColumns:
    """The columns of a space and others derived from them, to compute quantities once for each distinct row.

    *tick* is called during long computations.
    """

    def __init__(self, space: CandidateSpace, workers: int = 1, tick: Tick | None = None) -> None:
        self.space, self.workers, self.tick = space, workers, tick
        self.derived: dict[str, IntArray] = {}

    def distinct(self, rows: IntArray, names: tuple[str, ...]) -> tuple[IntArray, IntArray]:
        """Return the first candidate of each distinct row of *names* among *rows*, and to which each belongs."""
        columns = (self.derived[name] if name in self.derived else self.space.column(name) for name in names)
        first, member = distinct_rows(column[rows] for column in columns)
        return rows[first], member

    def spread(self, rows: IntArray, names: tuple[str, ...], compute: Callable[[int], FloatArray | bool]) -> FloatArray:
        """Return for each of *rows* what *compute* gives for the first candidate with the same *names*."""
        first, member = self.distinct(rows, names)
        return np.array(self.compute_all(compute, first))[member]

    def compute_all(self, compute: Callable[[int], Answer], rows: IntArray) -> Sequence[Answer]:
        """Return *compute* of each of *rows*, over all workers."""
        return map_parallel(compute, rows.tolist(), self.workers, self.tick)

    def several(self, rows: IntArray, names: tuple[str, ...]) -> list[tuple[int, IntArray]]:
        """Return the first candidate of each distinct row of *names*, and the indices in *rows* of all of them."""
        if not len(rows):
            return []
        first, member = self.distinct(rows, names)
        order = np.argsort(member, kind="stable")
        cuts = np.searchsorted(member[order], np.arange(1, len(first)))
        return list(zip(first.tolist(), np.split(order, cuts), strict=True))


class LazyColumn:
    """An array for each of some rows, computed when first asked for, once for rows that agree in *names*."""

    def __init__(
        self, columns: SpaceColumns, rows: IntArray, names: tuple[str, ...], compute: Callable[[int], FloatArray]
    ) -> None:
        self.columns, self.compute = columns, compute
        self.first, member = columns.distinct(rows, names)
        self.kind = np.full(len(columns.space), -1)
        self.kind[rows] = member
        self.known = np.zeros(len(self.first), dtype=np.bool_)
        self.values: FloatArray | None = None

    def get(self, row: int) -> FloatArray | None:
        """Return the array of *row* if it is known."""
        kind = int(self.kind[row])
        return self.values[kind] if self.values is not None and self.known[kind] else None

    def look_up(self, rows: IntArray) -> FloatArray:
        """Return the arrays of *rows*; those that are not known yet are computed."""
        kinds = self.kind[rows]
        if len(new := np.unique(kinds[~self.known[kinds]])):
            computed = np.stack(self.columns.compute_all(self.compute, self.first[new]))
            if self.values is None:
                self.values = np.zeros((len(self.first), *computed.shape[1:]))
            self.values[new] = computed
            self.known[new] = True
        assert self.values is not None
        values: FloatArray = self.values[kinds]
        return values


def split_by_software(space: CandidateSpace, settle: SettleSoftware) -> list[SpacePart]:
    """Split *space* by the software settings that run it: recipes differ between layouts."""
    distinct, member = SpaceColumns(space).distinct(np.arange(len(space)), SOFTWARE)
    settings: list[tuple[Framework, StrategyFields]] = []
    setting_of = np.zeros(len(distinct), dtype=np.int64)
    for number, row in enumerate(distinct.tolist()):
        values = space.values(row)
        try:
            layout = Layout(pp=values["pp"], vpp=values["vpp"], ep=values["ep"])
            setting = settle(layout, values["precision"], values["sharding"])
        except StrategyError:
            setting_of[number] = -1  # in no part: the software refuses these degrees
            continue
        if setting not in settings:
            settings.append(setting)
        setting_of[number] = settings.index(setting)
    parts = []
    for number, (framework, common) in enumerate(settings):
        rows = np.flatnonzero(setting_of[member] == number)
        parts.append(SpacePart(space.only(rows).having(common), framework, rows))
    return parts


def find_legal(columns: SpaceColumns, framework: Framework) -> BoolArray:
    """Return which candidates are legal; each rule is asked once for the columns that it reads."""
    space = columns.space

    def is_pipeline_legal(row: int) -> bool:
        try:
            return not any(find_problems(space.model, pipeline_strategy(space, row)))
        except ValueError:
            return False

    def is_layout_legal(row: int) -> bool:
        try:
            return is_legal(space.model, space.strategy(row), framework)
        except StrategyError:
            return False

    legal: BoolArray = space.micro_batches > 0
    for names, holds in (((*PIECES, "micro_batches"), is_pipeline_legal), (LEGALITY, is_layout_legal)):
        if len(rows := np.flatnonzero(legal)):
            legal[rows] = columns.spread(rows, names, holds)
    return legal


def pipeline_strategy(space: CandidateSpace, row: int) -> Strategy:
    """Return a candidate reduced to its pipeline: one replica with one rank for each stage."""
    values = space.values(row)
    layout, batch = Layout(pp=values["pp"], vpp=values["vpp"]), max(1, int(space.micro_batches[row]))
    common = {name: space.common[name] for name in PIECE_FIELDS if name in space.common}
    return Strategy(layout, 1, batch, space.seq, schedule=values["schedule"], **common)
