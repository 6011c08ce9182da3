"""The operations of a Megatron-LM timeline, each with its communication, matched by name.

Matching needs no clock: the k-th collective of an operation meets the k-th of the same operation on the other members
of its group, and a send meets the receive of the same micro-batch on the next stage.
"""

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import field

from stepcast.ir.dataclass import dataclass
from stepcast.ir.layout import MODEL, Group, Layout, members, neighbour
from stepcast.ir.timeline import NONE, Span, SpanKind, Timeline
from stepcast.ir.work import Collective, CollectiveKind

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

TOKENS = re.compile(r"\[([0-9]+), [0-9]+\]", re.ASCII)  # of a shape [tokens, hidden]

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
    meeting: int | None = None  # the number of the meeting that it is part of
    waits: bool = False  # for the others of its meeting
    own_s: float = 0.0  # computation that overlaps the meeting

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
    operation_at: dict[int | None, TraceOperation] = {}
    spans, seen = list(timeline.spans()), Counter[Key]()
    for span in spans:
        if span.parent is not None or span.lane.name != OPERATIONS_LANE:
            continue  # a part, or a gradient bucket, which overlaps the operations
        listed = operations[span.lane.rank]
        if "fused_with" not in span.details or not listed:
            batch = NONE if span.micro_batch is None else span.micro_batch
            listed.append(TraceOperation(span.lane.rank, span.name, batch, span.start_s, span.end_s))
        operation_at[span.index] = listed[-1]
        if (event := _operation_event(span, layout, seen)) is not None:
            listed[-1].events.append(event)
    for span in spans:
        if span.parent in operation_at and span.kind is SpanKind.COMMUNICATION:
            operation_at[span.parent].parts.append(_part_event(span, operation_at[span.parent], layout, seen))
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


def _count(seen: Counter[Key], *key: Hashable) -> int:
    """Return how often *key*, which begins with a rank, has come before."""
    seen[key] += 1
    return seen[key] - 1


def _event(span: Span, name: str, group: str, kind: str, key: Key, is_source: bool = False) -> RankEvent:
    size_bytes = getattr(span.work, "size_bytes", None)
    return RankEvent(span.lane.rank, name, group, kind, size_bytes, span.start_s, span.end_s, key, is_source)


def _operation_event(span: Span, layout: Layout, seen: Counter[Key]) -> RankEvent | None:
    rank, name, work, batch = span.lane.rank, span.name, span.work, span.micro_batch
    if name in SENDS or name in RECEIVES:
        way = SENDS.get(name) or RECEIVES[name]
        source = rank if name in SENDS else neighbour(rank, -way, layout)
        key: Key = ("message", source, way, batch, _count(seen, rank, name, batch))
        return _event(span, name, Group.PP, "message", key, name in SENDS)
    if name == OPTIMIZER:
        key = (MODEL, members(rank, MODEL, layout), name, _count(seen, rank, name))
        return _event(span, "gradient norm", MODEL, "sync", key)
    group = work.group if isinstance(work, Collective) else REDUCTIONS.get(name)
    if group is None:
        return None
    kind = work.kind if isinstance(work, Collective) else CollectiveKind.ALL_REDUCE
    return _event(
        span, name, group, kind, (group, members(rank, group, layout), name, batch, _count(seen, rank, name, batch))
    )


def _part_event(span: Span, operation: TraceOperation, layout: Layout, seen: Counter[Key]) -> RankEvent:
    rank, work, place = span.lane.rank, span.work, (operation.name, operation.micro_batch)
    group, kind = (str(work.group), str(work.kind)) if isinstance(work, Collective) else (span.lane.name, "collective")
    together = members(rank, group, layout)
    key = (group, together, *place, span.name, _count(seen, rank, *place, group, span.name))
    event = _event(span, span.name, group, kind, key, kind == CollectiveKind.BROADCAST and rank == together[0])
    shape = TOKENS.fullmatch(span.details.get("shape", ""))
    if shape and (kind, group) == (CollectiveKind.ALL_TO_ALL, Group.EP):
        event.rows = int(shape[1])
    return event


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
