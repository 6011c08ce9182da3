"""Layers, expert loads and stragglers of a Megatron run.

Stragglers are found by the work that ranks do alone: pieces of the same role are the same work on every rank, except
for experts, whose work depends on the tokens that they receive.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

import msgspec

from stepcast.analyze.changes import scale_to_tokens, seconds_per_token
from stepcast.analyze.megatron.meetings import OPTIMIZER, TraceOperation, exchanges
from stepcast.analyze.play import RankParts
from stepcast.analyze.recording import BlockKind, Join, Local, RankRecord, Recording, TimePart
from stepcast.ir.dataclass import dataclass
from stepcast.ir.facts import FactDict
from stepcast.ir.layout import Group, Layout, members
from stepcast.views.declared import phrase

COLLECTIVES_PER_LAYER = 2  # tensor-parallel collectives mark the end of a layer, two in each direction
SLOW_FACTOR = 1.15  # ranks of a healthy run differ by a few per cent
SLOW_SHARE = 0.01  # the additional time of a straggler is at least this share of the step
SMALL_SHARE = 0.05  # work below this share of a rank is not mentioned


class StageLayers(msgspec.Struct, frozen=True):
    """The layers of one stage."""

    stage: int
    layers: int
    forward_s: float  # computation only, mean over the layers
    backward_s: float
    each_forward_s: list[float]  # wall time from layer to layer; empty if nothing marks them
    each_backward_s: list[float]


def stage_layers(operations: Mapping[int, list[TraceOperation]], recording: Recording) -> list[StageLayers]:
    """Return one entry per stage whose number of layers is known."""
    stages = []
    for stage in sorted({record.stage for record in recording.ranks}):
        layers = recording.layers_on(stage)
        if not layers:
            continue
        mine = [record for record in recording.ranks if record.stage == stage]
        forward_s, backward_s = (
            mean(recording.compute_s(record, kind) for record in mine) / layers / max(1, recording.micro_batches)
            for kind in (BlockKind.FORWARD, BlockKind.BACKWARD)
        )
        listed = [operation for record in mine for operation in operations[record.rank]]
        each_forward_s = _layer_times(listed, "forward_step", layers)
        each_backward_s = _layer_times(listed, "backward_step", layers)[::-1]
        stages.append(StageLayers(stage, layers, forward_s, backward_s, each_forward_s, each_backward_s))
    return stages


def _layer_times(operations: list[TraceOperation], name: str, layers: int) -> list[float]:
    """Return the mean wall time of each layer in the order of running, over ranks and micro-batches."""
    rows = []
    for operation in operations:
        if operation.name != name or not operation.parts:
            continue
        usual, count = Counter(event.name for event in operation.parts).most_common(1)[0]
        if count != COLLECTIVES_PER_LAYER * layers:
            continue
        marks = [event for event in operation.parts if event.name == usual]
        before = [event for event in operation.parts if event.end_s <= marks[0].start_s]
        cursor_s = before[-1].end_s if before else operation.start_s
        row = []
        for event in marks[COLLECTIVES_PER_LAYER - 1 :: COLLECTIVES_PER_LAYER]:
            row.append(event.end_s - cursor_s)
            cursor_s = event.end_s
        rows.append(row)
    return [mean(column) for column in zip(*rows, strict=True)]


class ExpertLoad(msgspec.Struct, frozen=True):
    """Tokens that the ranks of one expert-parallel group worked on in all forward passes."""

    busiest_rank: int
    factor: float  # the busiest rank divided by the mean
    exchange_factor: float  # the same for each all-to-all, mean of all
    mean_tokens: float
    tokens: dict[str, int]  # by rank
    waits_caused_s: dict[str, float]  # by the rank that waited for the busiest


def expert_loads(
    operations: Mapping[int, list[TraceOperation]], parts: Sequence[RankParts], layout: Layout
) -> list[ExpertLoad]:
    """Return the load of each expert-parallel group with all its ranks given, the most uneven first."""
    tokens_of = {}
    for rank, listed in operations.items():
        forwards = (operation for operation in listed if operation.name == "forward_step")
        back = (event for operation in forwards for _, event in exchanges(operation))
        tokens_of[rank] = [event.rows for event in back if event.rows is not None]
    waits_s = {rank.rank: rank.waits_for_s for rank in parts}
    loads = []
    for ranks in sorted({members(rank, Group.EP, layout) for rank in operations}):
        columns = list(zip(*(tokens_of.get(rank, []) for rank in ranks), strict=False))
        even = len({len(tokens_of.get(rank, [])) for rank in ranks}) == 1
        if len(ranks) < 2 or not even or not any(map(any, columns)):
            continue
        tokens = {rank: sum(tokens_of[rank]) for rank in ranks}
        busiest = max(tokens, key=lambda rank: tokens[rank])
        mean_tokens = mean(tokens.values())
        factors = tokens[busiest] / mean_tokens, mean(max(column) / mean(column) for column in columns if any(column))
        named = {str(rank): count for rank, count in tokens.items()}
        waits = {str(rank): waits_s[rank].get(busiest, 0.0) for rank in ranks if rank != busiest}
        loads.append(ExpertLoad(busiest, *factors, mean_tokens, named, waits))
    return sorted(loads, key=lambda load: -load.factor)


class ComparedWork(msgspec.Struct, frozen=True):
    """Seconds of a rank, and of other ranks for the same work."""

    own_s: float
    reference_s: float


class Straggler(msgspec.Struct, frozen=True):
    """A rank that needs *factor* times as long as others for the same work."""

    rank: int
    factor: float
    own_s: float
    reference_s: float
    operations: dict[str, ComparedWork]
    shared_operations: dict[str, ComparedWork]  # work of every stage: layers, without embedding or loss
    waits_caused_s: dict[str, float]  # by the rank that waited, the longest first
    evidence: list[str]


@dataclass(frozen=True, slots=True)
class _RoleWork:
    """One kind of work of a rank compared with the same work on the other ranks."""

    operation: str
    own_s: float
    reference_s: float
    other_stages: bool  # ranks of other stages do the same


def find_stragglers(recording: Recording, parts: Sequence[RankParts]) -> list[Straggler]:
    """Return the ranks that need clearly longer than others for the same work, the slowest first."""
    slopes_s = seconds_per_token(recording.ranks)
    by_rank = {record.rank: _role_times(record) for record in recording.ranks}
    stage_of = {record.rank: record.stage for record in recording.ranks}
    stragglers = []
    for rank in by_rank:
        works = _compare_roles(rank, by_rank, stage_of, slopes_s)
        own_s, reference_s = sum(work.own_s for work in works), sum(work.reference_s for work in works)
        if reference_s <= 0:
            continue
        # Work of every stage has most ranks to compare with; with little of it, all compared work counts.
        shared = [work for work in works if work.other_stages]
        basis = shared if 2 * sum(work.reference_s for work in shared) > reference_s else works
        factor = sum(work.own_s for work in basis) / sum(work.reference_s for work in basis)
        is_slow = min(factor, own_s / reference_s) >= SLOW_FACTOR
        if not is_slow or own_s - reference_s < SLOW_SHARE * recording.measured_step_s:
            continue
        waits = [(other.rank, other.waits_for_s[rank]) for other in parts if other.waits_for_s.get(rank, 0.0) > 0]
        waits.sort(key=lambda pair: -pair[1])
        totals = _sum_operations(works), _sum_operations(shared)
        evidence = _evidence(recording, rank, totals[1] or totals[0], reference_s, waits)
        caused_s = {str(other): seconds for other, seconds in waits}
        stragglers.append(Straggler(rank, factor, own_s, reference_s, *totals, caused_s, evidence))
    return sorted(stragglers, key=lambda straggler: -straggler.factor)


def _sum_operations(works: Sequence[_RoleWork]) -> dict[str, ComparedWork]:
    totals: dict[str, ComparedWork] = {}
    for work in works:
        before = totals.get(work.operation, ComparedWork(0.0, 0.0))
        totals[work.operation] = ComparedWork(before.own_s + work.own_s, before.reference_s + work.reference_s)
    return totals


class _RoleTime(NamedTuple):
    """The computations of a rank in one role: how many, their seconds, and the mean of their tokens."""

    runs: int
    total_s: float
    tokens: float


def _role_times(record: RankRecord) -> dict[tuple[str, str], _RoleTime]:
    """Return the computation of a rank by (operation, role)."""
    ran: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for piece in record.pieces():
        if isinstance(piece, Local) and piece.part in (TimePart.COMPUTE, TimePart.OPTIMIZER):
            ran[piece.operation, piece.role].append((piece.duration_s, piece.tokens or 0))
        elif isinstance(piece, Join) and piece.own_s and piece.waits:
            ran[piece.operation, piece.role].append((piece.own_s, 0))
    return {
        role: _RoleTime(len(times), sum(seconds for seconds, _ in times), mean(tokens for _, tokens in times))
        for role, times in ran.items()
    }


def _compare_roles(
    rank: int,
    by_rank: Mapping[int, Mapping[tuple[str, str], _RoleTime]],
    stage_of: Mapping[int, int],
    slopes_s: Mapping[str, float],
) -> list[_RoleWork]:
    """Return the work of *rank* that other ranks do too."""
    works = []
    for (operation, role), own in by_rank[rank].items():
        if operation == OPTIMIZER:
            continue  # its work depends on the parameters of the stage, and its sync hides part of it
        key, slope_s = (operation, role), slopes_s.get(role, 0.0)
        others = {other: times[key] for other, times in by_rank.items() if other != rank and key in times}
        means_s = ((time.total_s / time.runs, time.tokens) for time in others.values())
        each_s = [scale_to_tokens(*pair, own.tokens, slope_s) for pair in means_s]
        reference_s = own.runs * median(each_s) if others else 0
        if reference_s:
            elsewhere = any(stage_of[other] != stage_of[rank] for other in others)
            works.append(_RoleWork(operation, own.total_s, reference_s, elsewhere))
    return works


def _evidence(
    recording: Recording,
    rank: int,
    operations: Mapping[str, ComparedWork],
    reference_s: float,
    waits: Sequence[tuple[int, float]],
) -> list[str]:
    """Return sentences that say why *rank* is called slow."""
    texts = [
        phrase("slow-operation", {"rank": rank, "name": name, "own_s": work.own_s, "reference_s": work.reference_s})
        for name, work in operations.items()
        if work.reference_s > SMALL_SHARE * reference_s
    ]
    own = recording.record_of(rank)
    own_stays = _stays_s(own)
    near = [(other, seconds) for other, seconds in waits if recording.record_of(other).stage == own.stage]
    for other, seconds in (near or waits)[:2]:
        theirs = _stays_s(recording.record_of(other))
        role = max(theirs, key=lambda role: theirs[role][0], default="")
        times = FactDict(other=other, rank=rank, wait_s=seconds, role=role)
        if role in own_stays:
            times |= {"own_s": own_stays[role][0], "their_s": theirs[role][0], "count": theirs[role][1]}
        texts.append(phrase("waits-for-it", times))
    return texts


def _stays_s(record: RankRecord) -> dict[str, tuple[float, int]]:
    """Return by role the time in collectives without overlapped work, and how many."""
    stays: dict[str, tuple[float, int]] = {}
    for piece in record.pieces():
        if isinstance(piece, Join) and piece.part in (TimePart.TP, TimePart.DP, TimePart.EP) and not piece.own_s:
            total_s, count = stays.get(piece.role, (0.0, 0))
            stays[piece.role] = total_s + piece.end_s - piece.start_s, count + 1
    return stays
