"""A measured Megatron-LM step: time by part, communication, waits, layers, experts, stragglers and the critical path.

Stragglers are found by the work that ranks do alone: pieces of the same role are the same work on every rank, except
for experts, whose work depends on the tokens that they receive.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from statistics import mean, median
from typing import NamedTuple

import msgspec

from stepcast.analyze import recording as recordings
from stepcast.analyze.changes import heal_rank, scale_to_tokens, seconds_per_token
from stepcast.analyze.megatron.record import (
    NOISE_S,
    OPTIMIZER,
    OVERLAP_FACTOR,
    RankEvent,
    TraceOperation,
    exchanges,
    operations_of,
    plain_name,
    record_megatron,
)
from stepcast.analyze.recording import BlockKind, Meeting, RankParts, RankRecord, Recording, TimePart
from stepcast.analyze.result import AnalysisResult, list_ranks
from stepcast.cost.collectives.sweep import reached_busbw
from stepcast.hardware import Cluster
from stepcast.ir.layout import Group, Layout, members
from stepcast.ir.timeline import Timeline
from stepcast.ir.types import FactDict, group_by_key, pick, sum_by_key
from stepcast.ir.work import bus_factor
from stepcast.views.declared import phrase, phrases

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
        ends_s = [event.end_s for event in marks[COLLECTIVES_PER_LAYER - 1 :: COLLECTIVES_PER_LAYER]]
        first_s = before[-1].end_s if before else operation.start_s
        rows.append([end_s - start_s for start_s, end_s in pairwise([first_s, *ends_s])])
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


def find_stragglers(recording: Recording, parts: Sequence[RankParts]) -> list[Straggler]:
    """Return the ranks that need clearly longer than others for the same work, the slowest first."""
    slopes_s = seconds_per_token(recording.ranks)
    by_rank = {record.rank: _role_times(record) for record in recording.ranks}
    stage_of = {record.rank: record.stage for record in recording.ranks}
    stragglers = []
    for rank in by_rank:
        works = _compare_roles(rank, by_rank, stage_of, slopes_s)
        total = _sum_works(work for _, _, work in works)
        if total.reference_s <= 0:
            continue
        # Work of every stage has most ranks to compare with; with little of it, all compared work counts.
        shared = [(operation, work) for operation, is_shared, work in works if is_shared]
        basis = _sum_works(work for _, work in shared)
        basis = basis if 2 * basis.reference_s > total.reference_s else total
        is_slow = min(basis.own_s / basis.reference_s, total.own_s / total.reference_s) >= SLOW_FACTOR
        if not is_slow or total.own_s - total.reference_s < SLOW_SHARE * recording.measured_step_s:
            continue
        waits = [(other.rank, other.waits_for_s[rank]) for other in parts if other.waits_for_s.get(rank, 0.0) > 0]
        waits.sort(key=lambda pair: -pair[1])
        every, common = (
            {operation: _sum_works(listed) for operation, listed in group_by_key(pairs).items()}
            for pairs in (((operation, work) for operation, _, work in works), shared)
        )
        straggler = Straggler(
            rank=rank,
            factor=basis.own_s / basis.reference_s,
            **pick(total, "own_s reference_s"),
            operations=every,
            shared_operations=common,
            waits_caused_s={str(other): seconds for other, seconds in waits},
            evidence=_evidence(recording, rank, common or every, total.reference_s, waits),
        )
        stragglers.append(straggler)
    return sorted(stragglers, key=lambda straggler: -straggler.factor)


def _sum_works(works: Iterable[ComparedWork]) -> ComparedWork:
    listed = list(works)
    return ComparedWork(sum(work.own_s for work in listed), sum(work.reference_s for work in listed))


class _RoleTime(NamedTuple):
    """The computations of a rank in one role: how many, their seconds, and the mean of their tokens."""

    runs: int
    total_s: float
    tokens: float


def _role_times(record: RankRecord) -> dict[tuple[str, str], _RoleTime]:
    """Return the computation of a rank by (operation, role)."""
    ran: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for piece in record.pieces():
        is_alone = not piece.meetings and piece.part in (TimePart.COMPUTE, TimePart.OPTIMIZER)
        if is_alone or (piece.own_s and piece.waits):
            ran[piece.operation, piece.role].append((piece.own_s, piece.tokens or 0))
    return {
        role: _RoleTime(len(times), sum(seconds for seconds, _ in times), mean(tokens for _, tokens in times))
        for role, times in ran.items()
    }


def _compare_roles(
    rank: int,
    by_rank: Mapping[int, Mapping[tuple[str, str], _RoleTime]],
    stage_of: Mapping[int, int],
    slopes_s: Mapping[str, float],
) -> list[tuple[str, bool, ComparedWork]]:
    """Return the work of *rank* that others do too: its operation, whether ranks of other stages do it, its times."""
    works = []
    for (operation, role), own in by_rank[rank].items():
        if operation == OPTIMIZER:
            continue  # its work depends on the parameters of the stage, and its sync hides part of it
        key, slope_s = (operation, role), slopes_s.get(role, 0.0)
        others = {other: times[key] for other, times in by_rank.items() if other != rank and key in times}
        means_s = ((time.total_s / time.runs, time.tokens) for time in others.values())
        scaled_s = [scale_to_tokens(*pair, own.tokens, slope_s) for pair in means_s]
        reference_s = own.runs * median(scaled_s) if others else 0
        if reference_s:
            elsewhere = any(stage_of[other] != stage_of[rank] for other in others)
            works.append((operation, elsewhere, ComparedWork(own.total_s, reference_s)))
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
        if piece.meetings and piece.part in (TimePart.TP, TimePart.DP, TimePart.EP) and not piece.own_s:
            total_s, count = stays.get(piece.role, (0.0, 0))
            stays[piece.role] = total_s + piece.end_s - piece.start_s, count + 1
    return stays


# ---- the whole step ----------------------------------------------------------------------------------------

SHORTEST_S = 2e-5  # traces have hundredths of a millisecond: a time of one or two of them gives no rate


class MeetingTraffic(msgspec.Struct, frozen=True):
    """All collectives of one name and size within one operation, or all messages of one direction."""

    operation: str
    name: str
    kind: str
    group: str
    size_bytes: int | None  # if ranks contribute different sizes: the largest, mean over the collectives
    ranks: int  # in one set of the group
    count: int  # per rank that takes part
    total_s: float  # per rank that takes part, with waiting
    shortest_s: float
    transfer_s: float | None  # median from the last arrival on; None if peers were not given
    overlapped: bool  # with computation, so that its time is not that of a transfer
    busbw_bytes_per_s: float | None = None
    cluster_busbw_bytes_per_s: float | None = None


class RankBreakdown(msgspec.Struct, frozen=True):
    rank: int
    stage: int
    span_s: float
    operations_s: dict[str, float]
    inside_operations_s: dict[str, dict[str, float]]  # communication by operation and group
    gaps_s: float
    breakdown_s: dict[str, float]
    waits_s: dict[str, float]  # by group
    waits_for_s: dict[str, float]  # by rank


class MegatronResult(AnalysisResult, frozen=True, kw_only=True):
    """A measured step; times without a rank are means over the ranks."""

    view = "measured.megatron_view"
    kind: str
    step_s: float
    ranks: list[int]
    tp: int
    dp: int
    pp: int
    ep: int
    gpus: int
    configuration: dict[str, object]
    configuration_basis: object
    operations_s: dict[str, float]
    gaps_s: float
    bubble_s: float
    bubble_share: float
    exposed_comm_s: float
    breakdown_s: dict[str, float]
    waits_s: dict[str, float]
    communication_s: dict[str, dict[str, float]]
    communication: list[MeetingTraffic]
    layers: list[StageLayers]
    stages: list[dict[str, float]]
    imbalance: float  # how much longer the busiest stage computes than the mean stage, as a share
    expert_imbalance: list[ExpertLoad]
    rank_times: list[RankBreakdown]
    stragglers: list[Straggler]
    straggler_cost_s: float | None
    critical_path: list[recordings.CriticalStep]
    critical_path_s: float | None  # the longest chain of durations alone; None if ranks are missing
    warnings: list[str]


class MegatronAnalysis(NamedTuple):
    """A recording with the result of its analysis."""

    recording: Recording
    result: MegatronResult


def analyze_megatron(timeline: Timeline, cluster: Cluster | None = None) -> MegatronAnalysis:
    """Explain *timeline*, next to the bandwidth that *cluster* should reach over as many adjacent ranks."""
    recording = record_megatron(timeline)
    layout, step_s = recording.layout, recording.measured_step_s
    operations = operations_of(timeline, layout)
    parts = recordings.rank_parts(recordings.play_measured(recording))
    alone = len(recording.ranks) == 1 and layout.gpus > 1  # nothing can be matched
    # On one rank alone, waiting for other stages is the time in receives.
    receives = [operation for operation in operations[parts[0].rank] if operation.name.startswith("recv_")]
    bubble_s = sum(receive.duration_s for receive in receives) if alone else mean(rank.bubble_s for rank in parts)
    stragglers = [] if alone else find_stragglers(recording, parts)
    rank_times = [_rank_breakdown(rank, operations[rank.rank]) for rank in parts]
    stages = recordings.stage_rows(parts)
    compute_s = [stage[f"{TimePart.COMPUTE}_s"] for stage in stages]
    every = chain.from_iterable(operations.values())
    totals_s = sum_by_key((operation.name, operation.duration_s) for operation in every)
    result = MegatronResult(
        kind="megatron run",
        step_s=step_s,
        ranks=[record.rank for record in recording.ranks],
        **pick(layout, "tp dp pp ep gpus"),
        configuration=recording.configuration,
        configuration_basis=recording.facts.get("basis", {}),
        operations_s={
            name: total_s / len(operations) for name, total_s in sorted(totals_s.items(), key=lambda pair: -pair[1])
        },
        gaps_s=mean(rank.gaps_s for rank in rank_times),
        bubble_s=bubble_s,
        bubble_share=bubble_s / step_s if step_s else 0.0,
        exposed_comm_s=mean(sum(rank.exposed_s.values()) for rank in parts),
        breakdown_s=recordings.mean_parts(parts),
        waits_s=_means([rank.waits_s for rank in parts]),
        communication_s=_exposure(parts),
        communication=_find_traffic(operations, recording, cluster),
        layers=stage_layers(operations, recording),
        stages=stages,
        imbalance=max(compute_s) / mean(compute_s) - 1 if mean(compute_s) else 0.0,
        expert_imbalance=expert_loads(operations, parts, layout),
        rank_times=rank_times,
        stragglers=stragglers,
        straggler_cost_s=_straggler_cost_s(recording, [straggler.rank for straggler in stragglers]),
        critical_path=[] if alone else recordings.critical_steps(recording),
        critical_path_s=None if alone else recordings.play(recordings.at_shortest(recording)).step_s,
        warnings=_warnings(recording, alone),
    )
    return MegatronAnalysis(recording, result)


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    keys = sorted({key for table in tables for key in table})
    return {key: sum(table.get(key, 0.0) for table in tables) / len(tables) for key in keys}


def _exposure(parts: Sequence[RankParts]) -> dict[str, dict[str, float]]:
    exposed_s, hidden_s = _means([rank.exposed_s for rank in parts]), _means([rank.overlapped_s for rank in parts])
    groups = ((group, exposed_s.get(group, 0.0), hidden_s.get(group, 0.0)) for group in sorted({*exposed_s, *hidden_s}))
    return {group: {"total": own + hidden, "exposed": own, "overlapped": hidden} for group, own, hidden in groups}


def _rank_breakdown(parts: RankParts, operations: Sequence[TraceOperation]) -> RankBreakdown:
    inside: dict[str, dict[str, float]] = {}
    for operation in operations:
        for event in operation.parts:
            groups = inside.setdefault(operation.name, {})
            groups[event.group] = groups.get(event.group, 0.0) + event.end_s - event.start_s
    span_s = operations[-1].end_s - operations[0].start_s
    return RankBreakdown(
        **pick(parts, "rank stage waits_s"),
        span_s=span_s,
        operations_s=sum_by_key((operation.name, operation.duration_s) for operation in operations),
        inside_operations_s=inside,
        gaps_s=max(0.0, span_s - sum(operation.duration_s for operation in operations)),
        breakdown_s={str(part): seconds for part, seconds in parts.parts_s.items()},
        waits_for_s={str(rank): seconds for rank, seconds in parts.waits_for_s.items()},
    )


def _straggler_cost_s(recording: Recording, slow: Sequence[int]) -> float | None:
    """Return how much shorter the replayed step is with all *slow* ranks at the pace of their peers.

    None if no healthy rank does the same work.
    """
    if not slow:
        return 0.0
    healed = recording
    try:
        for rank in slow:
            healed = heal_rank(healed, rank, frozenset(slow))
    except ValueError:
        return None
    return max(0.0, recordings.play(recording).step_s - recordings.play(healed).step_s)


def _warnings(recording: Recording, alone: bool) -> list[str]:
    gpus, given = recording.layout.gpus, {record.rank for record in recording.ranks}
    missing = sorted(set(range(gpus)) - given)
    ranks = FactDict(gpus=gpus, rank=recording.ranks[0].rank, missing=missing, listed=list_ranks(missing))
    words = "only-rank" if alone else "some-ranks" if missing else ""
    return [*(text for text in recording.warnings if not text.startswith("only ")), *phrases(words, ranks)]


def _find_traffic(
    operations: Mapping[int, list[TraceOperation]], recording: Recording, cluster: Cluster | None
) -> list[MeetingTraffic]:
    """Return every kind of communication, the longest first."""
    keyed = [((meeting.name, meeting.group, _even_bytes(meeting)), meeting) for meeting in recording.meetings]
    transfers_s = group_by_key((key, meeting.transfer_s) for key, meeting in keyed)
    overlapped = {key for key, meeting in keyed if meeting.overlapped}
    sites = group_by_key(
        ((operation.name, plain_name(event), event.kind, event.group, _even_bytes(event)), event)
        for operation in chain.from_iterable(operations.values())
        for event in operation.all_events
        if event.kind != "sync"
    )
    rows = []
    for (operation_name, name, kind, group, size_bytes), events in sites.items():
        times_s, ranks = [event.duration_s for event in events], len({event.rank for event in events})
        transfers = transfers_s.get((name, group, size_bytes))
        sizes = [event.size_bytes for event in events if event.uneven and event.size_bytes is not None]
        what = operation_name, name, kind, group, round(mean(sizes)) if sizes else size_bytes
        together = 2 if kind == "message" else len(members(events[0].rank, group, recording.layout))
        shortest_s = min((time_s for time_s in times_s if time_s > 0), default=0.0)
        seconds = sum(times_s) / ranks, shortest_s, median(transfers) if transfers else None
        hidden = (name, group, size_bytes) in overlapped or name.endswith("_async")
        rows.append(MeetingTraffic(*what, together, round(len(times_s) / ranks), *seconds, hidden))
    return sorted(_add_rates(rows, cluster), key=lambda row: -row.total_s)


def _even_bytes(sent: Meeting | RankEvent) -> int | None:
    """Return the size that all members contribute; None where they differ."""
    return None if sent.uneven else sent.size_bytes


def _add_rates(rows: list[MeetingTraffic], cluster: Cluster | None) -> Iterator[MeetingTraffic]:
    """Mark collectives that never come near the time of their size elsewhere, also without peers, and add rates.

    The rate is that of the median transfer; without peers that of the shortest, since the others also waited. None if
    nothing passes a link, work overlaps, or waiting cannot be separated from transferring.
    """
    times_s = group_by_key(((row.kind, row.group, row.size_bytes), row.shortest_s) for row in rows)
    for row in rows:
        most_s = OVERLAP_FACTOR * min(times_s[row.kind, row.group, row.size_bytes]) + NOISE_S
        if row.kind != "message" and row.name != row.operation and row.shortest_s > most_s:
            row = msgspec.structs.replace(row, overlapped=True)
        rate = cluster_rate = None
        if row.size_bytes and row.ranks >= 2 and not row.overlapped:
            seconds = row.transfer_s if row.transfer_s is not None else row.shortest_s
            if seconds >= SHORTEST_S and (row.transfer_s is not None or row.count >= 2):
                rate = row.size_bytes * bus_factor(row.kind, row.ranks) / seconds
            cluster_rate = reached_busbw(row.kind, row.size_bytes, row.ranks, cluster) if cluster else None
        yield msgspec.structs.replace(row, busbw_bytes_per_s=rate, cluster_busbw_bytes_per_s=cluster_rate)
