"""A measured Megatron-LM step: time by part, communication, waits, stragglers and the critical path."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

import msgspec

from stepcast.analyze import play as playing
from stepcast.analyze.changes import heal_rank
from stepcast.analyze.megatron import meetings as traced
from stepcast.analyze.megatron import stragglers as straggling
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.recording import Meeting, Recording, TimePart
from stepcast.analyze.result import AnalysisResult, list_ranks
from stepcast.ir.facts import FactDict, pick
from stepcast.ir.grouping import group_by_key, sum_by_key
from stepcast.ir.layout import members
from stepcast.ir.timeline import Timeline
from stepcast.ir.work import bus_factor
from stepcast.views.declared import phrases

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


BusBandwidth = Callable[[MeetingTraffic], float | None]
"""Return the bus bandwidth that a cluster reaches for the same communication, in bytes per second."""


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
    layers: list[straggling.StageLayers]
    stages: list[dict[str, float]]
    imbalance: float  # how much longer the busiest stage computes than the mean stage, as a share
    expert_imbalance: list[straggling.ExpertLoad]
    rank_times: list[RankBreakdown]
    stragglers: list[straggling.Straggler]
    straggler_cost_s: float | None
    critical_path: list[playing.CriticalStep]
    critical_path_s: float | None  # the longest chain of durations alone; None if ranks are missing
    warnings: list[str]


class MegatronAnalysis(NamedTuple):
    """A recording with the result of its analysis."""

    recording: Recording
    result: MegatronResult


def analyze_megatron(timeline: Timeline, busbw: BusBandwidth | None = None) -> MegatronAnalysis:
    """Explain *timeline*; *busbw* says what a cluster should reach."""
    recording = record_megatron(timeline)
    layout, step_s = recording.layout, recording.measured_step_s
    operations = traced.operations_of(timeline, layout)
    parts = playing.rank_parts(playing.measured(recording))
    alone = len(recording.ranks) == 1 and layout.gpus > 1  # nothing can be matched
    # On one rank alone, waiting for other stages is the time in receives.
    receives = [operation for operation in operations[parts[0].rank] if operation.name.startswith("recv_")]
    bubble_s = sum(each.duration_s for each in receives) if alone else mean(rank.bubble_s for rank in parts)
    stragglers = [] if alone else straggling.find_stragglers(recording, parts)
    rank_times = [_rank_breakdown(rank, operations[rank.rank]) for rank in parts]
    stages = playing.stage_rows(parts)
    compute_s = [stage[f"{TimePart.COMPUTE}_s"] for stage in stages]
    totals_s = _sum_operations([operation for listed in operations.values() for operation in listed])
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
        breakdown_s=playing.mean_parts(parts),
        waits_s=_means([rank.waits_s for rank in parts]),
        communication_s=_exposure(parts),
        communication=_find_traffic(operations, recording, busbw),
        layers=straggling.stage_layers(operations, recording),
        stages=stages,
        imbalance=max(compute_s) / mean(compute_s) - 1 if mean(compute_s) else 0.0,
        expert_imbalance=straggling.expert_loads(operations, parts, layout),
        rank_times=rank_times,
        stragglers=stragglers,
        straggler_cost_s=_straggler_cost_s(recording, [straggler.rank for straggler in stragglers]),
        critical_path=[] if alone else playing.critical_steps(recording),
        critical_path_s=None if alone else playing.play(playing.at_shortest(recording)).step_s,
        warnings=_warnings(recording, alone),
    )
    return MegatronAnalysis(recording, result)


def _sum_operations(operations: Sequence[traced.TraceOperation]) -> dict[str, float]:
    return sum_by_key((operation.name, operation.duration_s) for operation in operations)


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    keys = sorted({key for table in tables for key in table})
    return {key: sum(table.get(key, 0.0) for table in tables) / len(tables) for key in keys}


def _exposure(parts: Sequence[playing.RankParts]) -> dict[str, dict[str, float]]:
    exposed = _means([rank.exposed_s for rank in parts])
    overlapped = _means([rank.overlapped_s for rank in parts])
    groups = {}
    for group in sorted({*exposed, *overlapped}):
        own_s, hidden_s = exposed.get(group, 0.0), overlapped.get(group, 0.0)
        groups[group] = {"total": own_s + hidden_s, "exposed": own_s, "overlapped": hidden_s}
    return groups


def _rank_breakdown(parts: playing.RankParts, operations: Sequence[traced.TraceOperation]) -> RankBreakdown:
    inside: dict[str, dict[str, float]] = {}
    for operation in operations:
        for event in operation.parts:
            groups = inside.setdefault(operation.name, {})
            groups[event.group] = groups.get(event.group, 0.0) + event.end_s - event.start_s
    span_s = operations[-1].end_s - operations[0].start_s
    return RankBreakdown(
        rank=parts.rank,
        stage=parts.stage,
        span_s=span_s,
        operations_s=_sum_operations(operations),
        inside_operations_s=inside,
        gaps_s=max(0.0, span_s - sum(operation.duration_s for operation in operations)),
        breakdown_s={str(part): seconds for part, seconds in parts.parts_s.items()},
        waits_s=parts.waits_s,
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
    return max(0.0, playing.play(recording).step_s - playing.play(healed).step_s)


def _warnings(recording: Recording, alone: bool) -> list[str]:
    gpus, given = recording.layout.gpus, {record.rank for record in recording.ranks}
    missing = sorted(set(range(gpus)) - given)
    ranks = FactDict(gpus=gpus, rank=recording.ranks[0].rank, missing=missing, listed=list_ranks(missing))
    words = "only-rank" if alone else "some-ranks" if missing else ""
    return [*(text for text in recording.warnings if not text.startswith("only ")), *phrases(words, ranks)]


def _find_traffic(
    operations: Mapping[int, list[traced.TraceOperation]], recording: Recording, busbw: BusBandwidth | None
) -> list[MeetingTraffic]:
    """Return every kind of communication, the longest first."""
    keyed = [((meeting.name, meeting.group, _even_bytes(meeting)), meeting) for meeting in recording.meetings]
    transfers_s = group_by_key((key, meeting.transfer_s) for key, meeting in keyed)
    overlapped = {key for key, meeting in keyed if meeting.overlapped}
    every = (operation for listed in operations.values() for operation in listed)
    sites = group_by_key(
        ((operation.name, traced.plain_name(event), event.kind, event.group, _even_bytes(event)), event)
        for operation in every
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
    rows = [_add_rates(row, busbw) for row in _mark_overlapped(rows)]
    return sorted(rows, key=lambda row: -row.total_s)


def _even_bytes(sent: Meeting | traced.RankEvent) -> int | None:
    """Return the size that all members contribute; None where they differ."""
    return None if sent.uneven else sent.size_bytes


def _mark_overlapped(rows: list[MeetingTraffic]) -> list[MeetingTraffic]:
    """Mark collectives that never come near the time of their size elsewhere, also without peers."""
    fastest: dict[tuple[str, str, int | None], float] = {}
    for row in rows:
        key = (row.kind, row.group, row.size_bytes)
        fastest[key] = min(fastest.get(key, row.shortest_s), row.shortest_s)
    marked = []
    for row in rows:
        most_s = traced.OVERLAP_FACTOR * fastest[row.kind, row.group, row.size_bytes] + traced.NOISE_S
        is_overlapped = row.kind != "message" and row.name != row.operation and row.shortest_s > most_s
        marked.append(msgspec.structs.replace(row, overlapped=True) if is_overlapped else row)
    return marked


def _add_rates(row: MeetingTraffic, busbw: BusBandwidth | None) -> MeetingTraffic:
    """Add the bandwidth of the median transfer; without peers that of the shortest, since the others also waited.

    None if nothing passes a link, work overlaps, or waiting cannot be separated from transferring.
    """
    rate, seconds = None, row.transfer_s if row.transfer_s is not None else row.shortest_s
    is_timed = seconds >= SHORTEST_S and (row.transfer_s is not None or row.count >= 2)
    if row.size_bytes and row.ranks >= 2 and not row.overlapped and is_timed:
        rate = row.size_bytes * bus_factor(row.kind, row.ranks) / seconds
    cluster_rate = busbw(row) if busbw is not None else None
    return msgspec.structs.replace(row, busbw_bytes_per_s=rate, cluster_busbw_bytes_per_s=cluster_rate)
