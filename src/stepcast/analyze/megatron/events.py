"""The operations of a Megatron-LM timeline, each with its communication, matched by name.

Matching needs no clock: the k-th collective of an operation meets the k-th of the same operation on the other members
of its group, and a send meets the receive of the same micro-batch on the next stage.
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import field

import numpy as np

from stepcast.ir.dataclass import dataclass
from stepcast.ir.layout import MODEL, Group, Layout, members, neighbour
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.work import Collective, CollectiveKind, Work

OPERATIONS_LANE = "ops"
OPTIMIZER = "optimizer_step"
SENDS = {"send_forward": 1, "send_backward": -1}
RECEIVES = {"recv_forward": 1, "recv_backward": -1}
# The groups of reductions whose lines do not name one.
REDUCTIONS = {
    "dp_allreduce": Group.DP,
    "ep_allreduce": Group.EMBEDDING,
    "pep_allreduce": Group.EMBEDDING,
    "ep_dp_allreduce": Group.EXPERT_DP,
    "exp_dp_allreduce": Group.EXPERT_DP,
}

TOKENS = re.compile(r"\[([0-9]+), [0-9]+\]", re.ASCII)

Key = tuple[Hashable, ...]


@dataclass(slots=True)
class RankEvent:
    """One rank in one collective or message; all members have the same *key*."""

    rank: int
    name: str
    group: str
    kind: str
    size_bytes: int | None
    start_s: float
    end_s: float
    key: Key
    is_source: bool = False  # of a message or broadcast: it may leave before the others arrive
    rows: int | None = None  # tokens that this rank contributes to an all-to-all between experts
    uneven: bool = False  # members contribute different sizes; size_bytes is then the largest

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True)
class TraceOperation:
    """One line of the trace, or two of a fused send and receive."""

    rank: int
    name: str
    micro_batch: int
    start_s: float
    end_s: float
    events: list[RankEvent] = field(default_factory=list)  # the operation itself
    parts: list[RankEvent] = field(default_factory=list)  # within the operation

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def all_events(self) -> list[RankEvent]:
        return [*self.events, *self.parts]


def operations_of(timeline: Timeline, layout: Layout) -> dict[int, list[TraceOperation]]:
    """Return the operations of every rank in the order of their ends."""
    operations: dict[int, list[TraceOperation]] = {rank: [] for rank in timeline.ranks}
    ranks = timeline.rank_of.tolist()
    names = [timeline.names[number] for number in timeline.name_of.tolist()]
    starts, ends = timeline.start_s.tolist(), timeline.end_s.tolist()
    batches, parents = timeline.micro_batch_of.tolist(), timeline.parent_of.tolist()
    on_lane = np.array([lane.name == OPERATIONS_LANE for lane in timeline.lanes])[timeline.lane_of].tolist()
    operation_at: dict[int, TraceOperation] = {}
    seen: dict[Key, int] = {}
    for row, parent in enumerate(parents):
        if parent != NONE or not on_lane[row]:
            continue  # a part, or a gradient bucket, which overlaps the operations
        rank, batch = ranks[row], batches[row]
        if "fused_with" in _details(timeline, row) and operations[rank]:
            operation = operations[rank][-1]
        else:
            operation = TraceOperation(rank, names[row], batch, starts[row], ends[row])
            operations[rank].append(operation)
        operation_at[row] = operation
        if (event := _operation_event(timeline, row, names[row], layout, seen)) is not None:
            operation.events.append(event)
    for row, parent in enumerate(parents):
        if parent != NONE and parent in operation_at and timeline.kind_of[row] == SpanKind.COMMUNICATION:
            operation_at[parent].parts.append(
                _part_event(timeline, row, operation_at[parent], names[row], layout, seen)
            )
    for events in match_events(operations).values():
        sizes = {event.size_bytes for event in events}
        if len(sizes) > 1:  # an uneven exchange lasts as long as its largest share
            largest = max(size for size in sizes if size is not None)
            for event in events:
                event.size_bytes, event.uneven = largest, True
    for listed in operations.values():
        listed.sort(key=lambda operation: operation.end_s)
        for operation in listed:
            operation.parts.sort(key=lambda event: event.end_s)
    return operations


def _details(timeline: Timeline, row: int) -> Mapping[str, str]:
    detail = int(timeline.detail_of[row])
    return {} if detail == NONE else timeline.details[detail]


def _work(timeline: Timeline, row: int) -> Work | None:
    work = int(timeline.work_of[row])
    return None if work == NONE else timeline.works[work]


def _count(seen: dict[Key, int], rank: int, key: Key) -> int:
    """Return how often *rank* has had *key* before."""
    number = seen.get((rank, *key), 0)
    seen[(rank, *key)] = number + 1
    return number


def _operation_event(timeline: Timeline, row: int, name: str, layout: Layout, seen: dict[Key, int]) -> RankEvent | None:
    rank, batch = int(timeline.rank_of[row]), int(timeline.micro_batch_of[row])
    start_s, end_s = float(timeline.start_s[row]), float(timeline.end_s[row])
    work = _work(timeline, row)
    size_bytes = getattr(work, "size_bytes", None)
    if name in SENDS or name in RECEIVES:
        way = SENDS.get(name) or RECEIVES[name]
        source = rank if name in SENDS else neighbour(rank, -way, layout)
        key: Key = ("message", source, way, batch, _count(seen, rank, (name, batch)))
        return RankEvent(rank, name, Group.PP, "message", size_bytes, start_s, end_s, key, name in SENDS)
    if name == OPTIMIZER:
        key = (MODEL, members(rank, MODEL, layout), name, _count(seen, rank, (name,)))
        return RankEvent(rank, "gradient norm", MODEL, "sync", None, start_s, end_s, key)
    group = work.group if isinstance(work, Collective) else REDUCTIONS.get(name)
    if group is None:
        return None
    kind = work.kind if isinstance(work, Collective) else CollectiveKind.ALL_REDUCE
    key = (group, members(rank, group, layout), name, batch, _count(seen, rank, (name, batch)))
    return RankEvent(rank, name, group, kind, size_bytes, start_s, end_s, key)


def _part_event(
    timeline: Timeline, row: int, operation: TraceOperation, name: str, layout: Layout, seen: dict[Key, int]
) -> RankEvent:
    rank = operation.rank
    work = _work(timeline, row)
    lane = timeline.lanes[int(timeline.lane_of[row])].name
    group = str(work.group) if isinstance(work, Collective) else lane
    together = members(rank, group, layout)
    number = _count(seen, rank, (operation.name, operation.micro_batch, group, name))
    key = (group, together, operation.name, operation.micro_batch, name, number)
    broadcast = isinstance(work, Collective) and work.kind is CollectiveKind.BROADCAST
    return RankEvent(
        rank,
        name,
        group,
        str(work.kind) if isinstance(work, Collective) else "collective",
        getattr(work, "size_bytes", None),
        float(timeline.start_s[row]),
        float(timeline.end_s[row]),
        key,
        is_source=broadcast and rank == together[0],
        rows=_rows(timeline, row, work),
    )


def _rows(timeline: Timeline, row: int, work: Work | None) -> int | None:
    """Return the tokens of a shape such as [tokens, hidden]."""
    if not isinstance(work, Collective) or (work.kind, work.group) != (CollectiveKind.ALL_TO_ALL, Group.EP):
        return None
    match = TOKENS.fullmatch(_details(timeline, row).get("shape", ""))
    return int(match[1]) if match else None


def exchanges(operation: TraceOperation) -> list[tuple[RankEvent, RankEvent]]:
    """Return pairs of all-to-alls: tokens (or gradients) sent to the experts and back.

    The contribution to the second is what the experts of its rank worked on. Empty if they do not form pairs.
    """
    events = [event for event in operation.parts if event.rows is not None]
    return [] if len(events) % 2 else list(zip(events[::2], events[1::2], strict=True))


def match_events(operations: Mapping[int, list[TraceOperation]]) -> dict[Key, list[RankEvent]]:
    """Return the events that met at least one other rank, by key."""
    by_key: dict[Key, list[RankEvent]] = {}
    for listed in operations.values():
        for operation in listed:
            for event in operation.all_events:
                by_key.setdefault(event.key, []).append(event)
    return {key: events for key, events in by_key.items() if len(events) > 1}
