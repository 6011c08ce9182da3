"""A Megatron-LM timeline as a Recording: its communication matched by name, on one clock, without waits.

Matching needs no clock: the k-th collective of an operation meets the k-th of the same operation on the other members
of its group, and a send meets the receive of the same micro-batch on the next stage.

Hosts count time from their own start; matched communication relates their clocks. Nobody leaves a meeting before
everybody has come: with true time = own time + offset, each pair of members gives
end_i + offset_i >= start_j + offset_j and the same with i and j exchanged. These bound the difference of two offsets
from both sides; within the bounds the ends of a meeting, which nearly coincide, determine it.
"""

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import field
from itertools import chain
from statistics import median
from typing import NamedTuple

from stepcast.analyze.recording import BlockKind, Meeting, RankPiece, RankRecord, RecordedBlock, Recording, TimePart
from stepcast.analyze.result import list_ranks
from stepcast.ir.layout import MODEL, Group, Layout, members, neighbour
from stepcast.ir.timeline import NONE, Span, SpanKind, Timeline
from stepcast.ir.types import dataclass, group_by_key
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.views.declared import phrases

OPERATIONS_LANE = "ops"
OPTIMIZER = "optimizer_step"
SENDS = {"send_forward": 1, "send_backward": -1}
RECEIVES = {"recv_forward": 1, "recv_backward": -1}
# The groups of reductions whose lines do not name one.
REDUCTIONS = {
    "dp_allreduce": Group.DP,
    **dict.fromkeys(("ep_allreduce", "pep_allreduce"), Group.EMBEDDING),
    **dict.fromkeys(("ep_dp_allreduce", "exp_dp_allreduce"), Group.EXPERT_DP),
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
    key = (group, members(rank, group, layout), name, batch, _count(seen, rank, name, batch))
    return _event(span, name, group, kind, key)


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
    every = chain.from_iterable(operations.values())
    by_key = group_by_key((event.key, event) for operation in every for event in operation.all_events)
    return {key: events for key, events in by_key.items() if len(events) > 1}


# Host clocks differ by the uptime of their machines. Anything below this is the delay of a launch.
SAME_CLOCK_S = 5e-3
NOISE_S = 1e-4  # a member may seem to leave this much before the last one came: launch delays
OVERLAP_FACTOR = 1.5  # a collective that always takes longer than this elsewhere overlaps computation
LAST_SHARE = 0.1  # who arrives within this share of its stay came last
PART_KEY_LENGTH = 6


def hold_meetings(matched_events: Mapping[Key, list[RankEvent]]) -> tuple[list[Meeting], int]:
    """Return the meetings, to which their events then refer, and the number of those that cannot have been any."""
    # Within operations: one that is a collective overlaps no work.
    parts = [events for events in matched_events.values() if len(events[0].key) == PART_KEY_LENGTH]
    calls = group_by_key((_call_site(events[0]), events) for events in parts)
    overlapped_s = _find_overlapped(calls)
    for site, alone_s in overlapped_s.items():
        _set_own_work(calls[site], alone_s)
    meetings: list[Meeting] = []
    impossible = 0
    for events in sorted(matched_events.values(), key=lambda events: max(event.start_s for event in events)):
        # Nobody leaves before everybody came; optimizers that do not clip gradients do not meet.
        first, (start_s, end_s) = events[0], _span(events)
        is_sync, transfer_s = first.kind == "sync", end_s - start_s
        noise_s = 0.0 if is_sync else SAME_CLOCK_S
        if any(event.end_s < start_s - noise_s for event in events if not event.is_source):
            impossible += not is_sync
            continue
        site = _call_site(first)
        transfer_s = 0.0 if is_sync else min(transfer_s, overlapped_s.get(site, transfer_s))
        for event in events:
            event.meeting = len(meetings)
            event.waits = not (event.is_source and event.end_s < start_s - NOISE_S)
        ranks = tuple(sorted(event.rank for event in events))
        what = first.group, first.kind, plain_name(first), ranks, first.size_bytes
        times_s = transfer_s, start_s, start_s + transfer_s
        meetings.append(Meeting(*what, *times_s, overlapped=site in overlapped_s, uneven=first.uneven))
    return meetings, impossible


class CallSite(NamedTuple):
    """A collective call in the code; two in a layer (attention, MLP) alternate."""

    operation: Hashable
    name: str
    turn: int
    size: tuple[str, str, int | None]


def _call_site(event: RankEvent) -> CallSite:
    number = event.key[-1]
    turn = number % 2 if isinstance(number, int) else 0
    return CallSite(event.key[2], event.name, turn, (event.kind, event.group, event.size_bytes))


def _span(events: Sequence[RankEvent]) -> tuple[float, float]:
    """Return the last arrival, and the first end of those who waited for it."""
    start_s = max(event.start_s for event in events)
    ends_s = [event.end_s for event in events if not (event.is_source and event.end_s < start_s - NOISE_S)]
    return start_s, max([start_s, min(ends_s, default=start_s)])


def _find_overlapped(calls: Mapping[CallSite, Sequence[Sequence[RankEvent]]]) -> dict[CallSite, float]:
    """Return the calls that overlap computation (launched, then awaited after other work) with the transfer alone.

    That is the shortest time of the same size elsewhere.
    """
    shortest_s: dict[CallSite, float] = {}
    for site, meetings in calls.items():
        # A transfer without any time is noise of two clocks.
        times_s = [end_s - start_s for start_s, end_s in map(_span, meetings) if end_s > start_s]
        if times_s:
            shortest_s[site] = min(times_s)
    overlapped: dict[CallSite, float] = {}
    for site, meetings in calls.items():
        spans_s = [median(event.end_s - _span(events)[0] for event in events) for events in meetings]
        same = [other_s for other, other_s in shortest_s.items() if other.size == site.size]
        alone_s = min(same, default=0.0)
        slow = median(spans_s) > OVERLAP_FACTOR * alone_s + NOISE_S and len(same) > 1
        if slow or site.name.endswith("_async"):
            overlapped[site] = alone_s
    return overlapped


def _set_own_work(meetings: Sequence[Sequence[RankEvent]], alone_s: float) -> None:
    """Set the overlapped work of each event of one call, whose transfer takes *alone_s*.

    It shows if a rank comes last and still leaves after the transfer; elsewhere its typical time is assumed, but
    not longer than the rank was there.
    """
    seen_s: dict[int, list[float]] = {}
    unseen: list[RankEvent] = []
    for events in meetings:
        last_s = max(event.start_s for event in events)
        for event in events:
            event.own_s = event.duration_s
            if last_s - event.start_s <= LAST_SHARE * event.duration_s and event.end_s > last_s + alone_s:
                seen_s.setdefault(event.rank, []).append(event.duration_s)
            else:
                unseen.append(event)
    for event in unseen if seen_s else ():
        times_s = seen_s.get(event.rank) or [median(times) for times in seen_s.values()]
        event.own_s = min(median(times_s), event.duration_s)


def plain_name(event: RankEvent) -> str:
    """Return the name of a collective, or the direction of a message."""
    return event.name.replace("recv_", "").replace("send_", "") if event.kind == "message" else event.name


ClockBounds = tuple[float, float, Sequence[float]]
"""The least and the most of the difference of two clocks, and that of the ends of their meetings."""


@dataclass(frozen=True, slots=True)
class ClockAlignment:
    """Seconds to add to the times of each rank; ranks of one clock share a set."""

    offset_s: Mapping[int, float]
    clocks: tuple[tuple[int, ...], ...]
    uncertainty_s: float
    unplaced: tuple[int, ...] = ()


def align_clocks(meetings: Sequence[Sequence[RankEvent]], ranks: Sequence[int]) -> ClockAlignment:
    """Return the offset of every rank's clock to that of the lowest rank."""
    pairs = _pairs(meetings)
    clock_of = _clocks(pairs, ranks)
    clocks = group_by_key((clock_of[rank], rank) for rank in ranks)
    first, *waiting = clocks
    offset_s, uncertainty_s, number = {first: 0.0}, 0.0, 0
    while number < len(waiting):
        # Does the clock share meetings with those that are placed?
        clock, low_s, high_s = waiting[number], float("-inf"), float("inf")
        ends_s: list[float] = []
        for (rank, other), (pair_low_s, pair_high_s, pair_ends_s) in pairs.items():
            if clock_of[other] == clock and clock_of[rank] in offset_s:
                base_s = offset_s[clock_of[rank]]
                low_s, high_s = max(low_s, base_s + pair_low_s), min(high_s, base_s + pair_high_s)
                ends_s += [base_s + end_s for end_s in pair_ends_s]
        number += 1
        if ends_s:
            # Noise may make the bounds cross; then only the ends count.
            guess_s = median(ends_s)
            offset_s[clock] = min(max(guess_s, low_s), high_s) if low_s <= high_s else guess_s
            uncertainty_s = max(uncertainty_s, high_s - low_s)
            waiting.remove(clock)
            number = 0
    unplaced = tuple(rank for clock in waiting for rank in clocks[clock])
    placed = {rank: offset_s[clock_of[rank]] for rank in ranks if clock_of[rank] in offset_s}
    return ClockAlignment(placed, tuple(map(tuple, clocks.values())), uncertainty_s, unplaced)


def _pairs(meetings: Sequence[Sequence[RankEvent]]) -> dict[tuple[int, int], ClockBounds]:
    """Return bounds between the lowest rank of each meeting and every other, in both directions."""
    bounds = []
    for meeting in meetings:
        first = min(meeting, key=lambda event: event.rank)
        others = [event for event in meeting if event is not first]
        for event, other in [*((first, other) for other in others), *((other, first) for other in others)]:
            low_s = float("-inf") if other.is_source else event.start_s - other.end_s
            high_s = float("inf") if event.is_source else event.end_s - other.start_s
            bounds.append(((event.rank, other.rank), (low_s, high_s, event.end_s - other.end_s)))
    columns = {ranks: tuple(zip(*rows, strict=True)) for ranks, rows in group_by_key(bounds).items()}
    return {ranks: (max(low_s), min(high_s), ends_s) for ranks, (low_s, high_s, ends_s) in columns.items()}


def _clocks(pairs: Mapping[tuple[int, int], ClockBounds], ranks: Sequence[int]) -> dict[int, int]:
    """Return the clock of each rank, named after its lowest rank; ranks without correction share one."""
    clock_of = {rank: rank for rank in ranks}
    for (rank, other), (low_s, high_s, _) in pairs.items():
        first, second = sorted((clock_of[rank], clock_of[other]))
        if first != second and low_s - SAME_CLOCK_S <= 0 <= high_s + SAME_CLOCK_S:
            clock_of |= {rank: first for rank, clock in clock_of.items() if clock == second}
    return clock_of


# ---- operations and meetings as the pieces of each rank ----------------------------------------------------

BLOCK_OF = {
    **dict.fromkeys(("get_batch", "forward_step", "loss_func"), BlockKind.FORWARD),
    "backward_step": BlockKind.BACKWARD,
    **dict.fromkeys((*SENDS, *RECEIVES), BlockKind.MESSAGE),
}
PART_OF = {
    "get_batch": TimePart.HOST,
    **dict.fromkeys(("forward_step", "loss_func", "backward_step"), TimePart.COMPUTE),
    # A reduction of gradients within one rank scales and copies them, which prepares the update.
    **dict.fromkeys((OPTIMIZER, *REDUCTIONS), TimePart.OPTIMIZER),
}
GROUP_PARTS = {str(part): part for part in TimePart}


def record_megatron(timeline: Timeline) -> Recording:
    """Return *timeline* as a Recording with all ranks on one clock."""
    if timeline.layout is None:
        raise ValueError(f"{timeline.source}: no layout is known, so ranks cannot be matched")
    layout = timeline.layout
    operations = operations_of(timeline, layout)
    matched, ranks = match_events(operations), sorted(operations)
    alignment = align_clocks([events for events in matched.values() if events[0].kind != "sync"], ranks)
    _align_times(operations, alignment)
    origin_s = min(listed[0].start_s for listed in operations.values())
    end_s = max(operation.end_s for operation in chain.from_iterable(operations.values()))
    meetings, impossible = hold_meetings(matched)
    stage_of = {rank: timeline.stage_of_rank.get(rank, 0) for rank in ranks}
    records = tuple(RankRecord(rank, stage_of[rank], _blocks(operations[rank], origin_s, meetings)) for rank in ranks)
    gradient_bytes = {  # that the ranks of each stage reduce between replicas
        stage_of[event.rank]: event.size_bytes
        for operation in chain.from_iterable(operations.values())
        for event in operation.events
        if event.name == "dp_allreduce" and event.size_bytes is not None
    }
    facts = {**timeline.facts, "gradient_bytes": gradient_bytes}
    measured = records, tuple(meetings), end_s - origin_s, int(timeline.facts.get("micro_batches", 1))
    return Recording(layout, *measured, facts, warnings=tuple(_warnings(timeline, alignment, impossible)))


def _warnings(timeline: Timeline, alignment: ClockAlignment, impossible: int) -> list[str]:
    moved = [clock for clock in alignment.clocks[1:] if clock[0] in alignment.offset_s]
    clocks = [f"ranks {list_ranks(clock)} moved by {alignment.offset_s[clock[0]]:.6f} s" for clock in moved]
    facts = {"count": len(moved) + 1, "first": list_ranks(alignment.clocks[0]), "clocks": "; ".join(clocks)}
    facts |= {"uncertainty_ms": alignment.uncertainty_s * 1e3, "unplaced": list_ranks(alignment.unplaced)}
    # The reader's warning about clocks is resolved by aligning them.
    warnings = [text for text in timeline.warnings if "clocks are not one" not in text]
    return warnings + phrases("aligned-clocks unplaced-clocks impossible-meetings", facts, impossible=impossible)


def _align_times(operations: Mapping[int, list[TraceOperation]], alignment: ClockAlignment) -> None:
    """Move every time to the clock of the first rank, and starts to the end of the operation before: a rank does one
    thing after the other.
    """
    placed = [rank for rank in operations if rank in alignment.offset_s]
    start_s = min(operations[rank][0].start_s + alignment.offset_s[rank] for rank in placed)
    for rank, listed in operations.items():
        offset_s = alignment.offset_s.get(rank, start_s - listed[0].start_s)
        cursor_s = float("-inf")
        for operation in listed:
            operation.end_s += offset_s
            operation.start_s = min(max(operation.start_s + offset_s, cursor_s), operation.end_s)
            inner_s = operation.start_s
            for event in operation.parts:
                event.end_s = min(max(event.end_s + offset_s, inner_s), operation.end_s)
                event.start_s = min(max(event.start_s + offset_s, inner_s), event.end_s)
                inner_s = event.end_s
            for event in operation.events:
                event.start_s, event.end_s = operation.start_s, operation.end_s
            cursor_s = operation.end_s


def _blocks(
    operations: Sequence[TraceOperation], origin_s: float, meetings: Sequence[Meeting]
) -> tuple[RecordedBlock, ...]:
    """Return the blocks of one rank."""
    cursor_s = operations[0].start_s
    late = TraceOperation(operations[0].rank, "start", -1, origin_s, cursor_s)
    blocks = [RecordedBlock(BlockKind.START, -1, (_local(late, TimePart.HOST, "start", origin_s, cursor_s),))]
    for operation in operations:
        gap = TraceOperation(operation.rank, "gap", operation.micro_batch, cursor_s, operation.start_s)
        idle = _local(gap, TimePart.HOST, f"before {operation.name}", cursor_s, operation.start_s)
        pieces = (idle, *_pieces(operation, meetings))
        kind = BLOCK_OF.get(operation.name, BlockKind.FINISH)
        if blocks[-1].kind is kind and blocks[-1].micro_batch == operation.micro_batch:
            # get_batch, forward and loss are one forward.
            blocks[-1] = RecordedBlock(kind, operation.micro_batch, (*blocks[-1].pieces, *pieces))
        else:
            blocks.append(RecordedBlock(kind, operation.micro_batch, pieces))
        cursor_s = operation.end_s
    return tuple(blocks)


def _pieces(operation: TraceOperation, meetings: Sequence[Meeting]) -> list[RankPiece]:
    present = [event for event in operation.events if event.meeting is not None]
    if present and operation.name == OPTIMIZER:  # the synchronisation on the gradient norm, then the update
        number = operation.events[0].meeting
        assert number is not None
        name, together_s = OPTIMIZER, meetings[number].start_s
        when = operation.micro_batch, operation.start_s, together_s
        join = RankPiece(TimePart.OPTIMIZER, name, f"{name}: {MODEL}", *when, 0.0, (number,), (number,))
        return [join, _local(operation, TimePart.OPTIMIZER, name, together_s, operation.end_s)]
    if present:
        return [_join(operation, operation.name, present, meetings)]
    if operation.events and operation.name != OPTIMIZER:
        part = _part_of(operation.events[0], operation)
        return [_local(operation, part, operation.name, operation.start_s, operation.end_s)]
    return _inner_pieces(operation, meetings)


def _inner_pieces(operation: TraceOperation, meetings: Sequence[Meeting]) -> list[RankPiece]:
    """Return the collectives within an operation and the computation between them."""
    part = PART_OF.get(operation.name, TimePart.OTHER)
    pieces: list[RankPiece] = []
    cursor_s, before = operation.start_s, "start"
    turns = Counter[tuple[str, str]]()
    tokens: int | None = None
    tokens_after = {id(out): back.rows for out, back in exchanges(operation)}
    tokens_after |= {id(back): None for _, back in exchanges(operation)}
    for event in [*operation.parts, None]:
        after, until_s = ("end", operation.end_s) if event is None else (event.name, event.start_s)
        turns[before, after] += 1
        role = f"{operation.name}: {before} to {after}, {'odd' if turns[before, after] % 2 else 'even'}"
        if tokens is not None:
            role += ", experts"
        pieces.append(_local(operation, part, role, cursor_s, until_s, tokens))
        if event is None:
            break
        if event.meeting is not None:
            pieces.append(_join(operation, event.name, [event], meetings))
        else:
            role = f"{operation.name}: {event.name}"
            pieces.append(_local(operation, _part_of(event, operation), role, event.start_s, event.end_s))
        cursor_s, before = event.end_s, event.name
        tokens = tokens_after.get(id(event), tokens)
    return pieces


def _part_of(event: RankEvent, operation: TraceOperation) -> TimePart:
    """Return the part of communication that met nobody: that of its operation where its group is one rank."""
    if event.key[1] == (event.rank,):
        return PART_OF.get(operation.name, TimePart.OTHER)
    return GROUP_PARTS.get(event.group, TimePart.OTHER)


def _local(
    operation: TraceOperation, part: TimePart, role: str, start_s: float, end_s: float, tokens: int | None = None
) -> RankPiece:
    """Return work that needs no other rank."""
    own_s = max(0.0, end_s - start_s)
    what = part, operation.name, role, operation.micro_batch
    return RankPiece(*what, start_s, start_s + own_s, own_s, tokens=tokens)


def _join(operation: TraceOperation, name: str, events: Sequence[RankEvent], meetings: Sequence[Meeting]) -> RankPiece:
    own_s, start_s, end_s = max(event.own_s for event in events), events[0].start_s, events[0].end_s
    attended = [(event.meeting, event.waits) for event in events if event.meeting is not None]
    waits = tuple(number for number, is_awaited in attended if is_awaited)
    free_s = max([start_s + own_s, *(meetings[number].end_s for number in waits)])
    if not waits:
        own_s = end_s - start_s
    role = f"{operation.name}: in {name}" if name != operation.name else name
    what = GROUP_PARTS.get(events[0].group, TimePart.OTHER), operation.name, role, operation.micro_batch
    numbers, tail_s = tuple(number for number, _ in attended), max(0.0, end_s - free_s) if waits else 0.0
    return RankPiece(*what, start_s, end_s, own_s, numbers, waits, tail_s)
