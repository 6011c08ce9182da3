"""The meetings of a Megatron-LM run: when they really began, what they took, and the work they hide."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import NamedTuple

from stepcast.analyze.changes import bus_factor
from stepcast.analyze.clocks import SAME_CLOCK_S
from stepcast.analyze.megatron.events import Key, RankEvent, TraceOperation
from stepcast.analyze.recording import Meeting, Recording
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import members

# A member may seem to leave this much before the last one came: launch delays on both clocks.
NOISE_S = 1e-4
# A collective that never comes near the time its size takes elsewhere has computation beside it.
OVERLAP_FACTOR = 1.5
# Whoever arrives within this share of its stay came last, or together with the last.
LAST_SHARE = 0.1
PART_KEY_LENGTH = 6


@dataclass(frozen=True, slots=True)
class Member:
    """How a rank takes part in a meeting."""

    meeting: int
    waits: bool
    own_s: float


class MeetingTable:
    """Every meeting, and how each event takes part in it."""

    def __init__(self, matched_events: Mapping[Key, list[RankEvent]]) -> None:
        self.meetings: list[Meeting] = []
        self.impossible = 0
        self._member: dict[int, Member] = {}
        shortest_s = _shortest_transfers(matched_events)
        alone_s = _overlapped(matched_events, shortest_s)
        own_s = _own_work_s(matched_events, alone_s)
        for events in sorted(matched_events.values(), key=lambda events: max(one.start_s for one in events)):
            if not _possible(events):
                self.impossible += events[0].kind != "sync"
                continue
            number = len(self.meetings)
            meeting = _meeting(events, alone_s.get(_family(events[0])))
            self.meetings.append(meeting)
            for event in events:
                waits = not (event.is_source and event.end_s < meeting.start_s - NOISE_S)
                self._member[id(event)] = Member(number, waits, own_s.get(id(event), 0.0))

    def member(self, event: RankEvent) -> Member | None:
        return self._member.get(id(event))


def _possible(events: Sequence[RankEvent]) -> bool:
    """Whether nobody left before everybody came. An optimizer that does not clip gradients does not meet."""
    noise_s = 0.0 if events[0].kind == "sync" else SAME_CLOCK_S
    last_s = max(event.start_s for event in events)
    return all(event.end_s >= last_s - noise_s for event in events if not event.is_source)


class Family(NamedTuple):
    """Collectives of the same call in the code; two in a layer (attention, MLP) alternate."""

    operation: Hashable
    name: str
    turn: int
    size: tuple[str, str, int | None]


def _family(event: RankEvent) -> Family:
    number = event.key[-1]
    turn = number % 2 if isinstance(number, int) else 0
    return Family(event.key[2], event.name, turn, (event.kind, event.group, event.size_bytes))


def _span(events: Sequence[RankEvent]) -> tuple[float, float]:
    """The last arrival, and the first end of those who waited for it."""
    start_s = max(event.start_s for event in events)
    ends_s = [event.end_s for event in events if not (event.is_source and event.end_s < start_s - NOISE_S)]
    return start_s, max([start_s, min(ends_s, default=start_s)])


def _is_part(event: RankEvent) -> bool:
    """Whether the event lies within an operation; an operation that is a collective hides no work."""
    return len(event.key) == PART_KEY_LENGTH


def _shortest_transfers(matched_events: Mapping[Key, list[RankEvent]]) -> dict[Family, float]:
    """The shortest time of each family of collectives within operations."""
    shortest_s: dict[Family, float] = {}
    for events in matched_events.values():
        start_s, end_s = _span(events)
        # A transfer of no time at all is noise of two clocks.
        if _is_part(events[0]) and end_s > start_s:
            family = _family(events[0])
            shortest_s[family] = min(shortest_s.get(family, end_s - start_s), end_s - start_s)
    return shortest_s


def _overlapped(
    matched_events: Mapping[Key, list[RankEvent]], shortest_s: Mapping[Family, float]
) -> dict[Family, float]:
    """The families that contain computation (launched, then awaited after other work), each with the time
    that the transfer alone takes: the shortest of the same size elsewhere."""
    spans_s: dict[Family, list[float]] = {}
    for events in matched_events.values():
        if _is_part(events[0]):
            start_s = max(one.start_s for one in events)
            spans_s.setdefault(_family(events[0]), []).append(median(one.end_s - start_s for one in events))
    found: dict[Family, float] = {}
    for family, times_s in spans_s.items():
        same = [other_s for other, other_s in shortest_s.items() if other.size == family.size]
        alone_s = min(same, default=0.0)
        slow = median(times_s) > OVERLAP_FACTOR * alone_s + NOISE_S and len(same) > 1
        if slow or family.name.endswith("_async"):
            found[family] = alone_s
    return found


def _own_work_s(matched_events: Mapping[Key, list[RankEvent]], alone_s: Mapping[Family, float]) -> dict[int, float]:
    """The overlapped work of each event. It shows where a rank comes last and still leaves after the
    transfer; elsewhere it ended unseen, and is taken as long as it usually is, but no longer than the rank
    was there."""
    beside = [events for events in matched_events.values() if _family(events[0]) in alone_s]
    seen_s: dict[Family, dict[int, list[float]]] = {}
    own_s: dict[int, float] = {}
    for events in beside:
        last_s = max(one.start_s for one in events)
        for event in events:
            there_s = event.end_s - event.start_s
            came_last = last_s - event.start_s <= LAST_SHARE * there_s
            if came_last and event.end_s > last_s + alone_s[_family(event)]:
                own_s[id(event)] = there_s
                seen_s.setdefault(_family(event), {}).setdefault(event.rank, []).append(there_s)
    for events in beside:
        for event in events:
            by_rank = seen_s.get(_family(event), {})
            times_s = by_rank.get(event.rank) or [median(times) for times in by_rank.values()]
            there_s = event.end_s - event.start_s
            own_s.setdefault(id(event), min(median(times_s) if times_s else there_s, there_s))
    return own_s


def _meeting(events: Sequence[RankEvent], alone_s: float | None) -> Meeting:
    """*alone_s*: what the transfer takes where nothing runs beside it."""
    first = events[0]
    start_s, end_s = _span(events)
    transfer_s = 0.0 if first.kind == "sync" else end_s - start_s
    if alone_s is not None:
        transfer_s = min(transfer_s, alone_s)
    name = first.name.replace("recv_", "").replace("send_", "") if first.kind == "message" else first.name
    return Meeting(
        group=first.group,
        kind=first.kind,
        name=name,
        members=tuple(sorted(event.rank for event in events)),
        size_bytes=first.size_bytes,
        transfer_s=transfer_s,
        start_s=start_s,
        end_s=start_s + transfer_s,
        overlapped=alone_s is not None,
        uneven=first.uneven,
    )


# Communication of a Megatron run by kind: how often, how long, how fast.

# Traces tell hundredths of a millisecond; a time of one or two of them is no rate.
SHORTEST_S = 2e-5


@dataclass(frozen=True, slots=True)
class MeetingTraffic:
    """All collectives of one name and size within one operation, or all messages of one direction."""

    operation: str
    name: str
    kind: str
    group: str
    size_bytes: int | None  # where ranks hand in different sizes: the largest, mean over the collectives
    ranks: int  # in one set of the group
    count: int  # per rank that takes part
    total_s: float  # per rank that takes part, waiting included
    shortest_s: float
    transfer_s: float | None  # median from the last arrival on; None where peers were not given
    overlapped: bool  # computation runs beside it, so its time is no time of a transfer
    cluster_busbw_bytes_per_s: float | None = None

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """Of the median transfer; without peers of the shortest of several, since the others also waited.
        None where nothing passes a link, work runs beside, or waiting cannot be told from transferring."""
        if not self.size_bytes or self.ranks < 2 or self.overlapped:
            return None
        seconds = self.transfer_s if self.transfer_s is not None else self.shortest_s
        if seconds < SHORTEST_S or (self.transfer_s is None and self.count < 2):
            return None
        return self.size_bytes * bus_factor(self.kind, self.ranks) / seconds

    def priced(self, cluster_busbw_bytes_per_s: float | None) -> "MeetingTraffic":
        return replace(self, cluster_busbw_bytes_per_s=cluster_busbw_bytes_per_s)

    def facts(self) -> dict[str, object]:
        return {
            "operation": self.operation,
            "name": self.name,
            "kind": self.kind,
            "group": self.group,
            "size_bytes": self.size_bytes,
            "ranks": self.ranks,
            "count": self.count,
            "total_s": self.total_s,
            "shortest_s": self.shortest_s,
            "transfer_s": self.transfer_s,
            "overlapped": self.overlapped,
            "busbw_bytes_per_s": self.busbw_bytes_per_s,
            "cluster_busbw_bytes_per_s": self.cluster_busbw_bytes_per_s,
        }


def traffic_of(operations: Mapping[int, list[TraceOperation]], recording: Recording) -> tuple[MeetingTraffic, ...]:
    """Every kind of communication, the longest first."""
    met: dict[tuple[str, str, int | None], list[float]] = {}
    beside: set[tuple[str, str, int | None]] = set()
    for meeting in recording.meetings:
        key = (meeting.name, meeting.group, None if meeting.uneven else meeting.size_bytes)
        met.setdefault(key, []).append(meeting.transfer_s)
        if meeting.overlapped:
            beside.add(key)
    grouped: dict[tuple[str, str, str, str, int | None], dict[int, list[float]]] = {}
    uneven_bytes: dict[tuple[str, str, str, str, int | None], list[int]] = {}
    for rank, listed in operations.items():
        for operation in listed:
            for event in (*operation.events, *operation.parts):
                if event.kind != "sync":
                    name = _plain_name(event)
                    size_bytes = None if event.uneven else event.size_bytes
                    key5 = (operation.name, name, event.kind, event.group, size_bytes)
                    if event.uneven and event.size_bytes is not None:
                        uneven_bytes.setdefault(key5, []).append(event.size_bytes)
                    grouped.setdefault(key5, {}).setdefault(rank, []).append(event.end_s - event.start_s)
    rows = []
    for (operation_name, name, kind, group, size_bytes), by_rank in grouped.items():
        times_s = [time_s for listed_s in by_rank.values() for time_s in listed_s]
        transfers = met.get((name, group, size_bytes))
        sizes = uneven_bytes.get((operation_name, name, kind, group, size_bytes))
        rows.append(
            MeetingTraffic(
                operation_name,
                name,
                kind,
                group,
                round(mean(sizes)) if sizes else size_bytes,
                _set_size(next(iter(by_rank)), kind, group, recording.layout),
                round(len(times_s) / len(by_rank)),
                sum(times_s) / len(by_rank),
                min((time_s for time_s in times_s if time_s > 0), default=0.0),
                median(transfers) if transfers else None,
                (name, group, size_bytes) in beside or name.endswith("_async"),
            )
        )
    return tuple(sorted(_marked(rows), key=lambda row: -row.total_s))


def _marked(rows: list[MeetingTraffic]) -> list[MeetingTraffic]:
    """Without peers, too: a collective that never comes near the time of its size elsewhere holds work."""
    fastest: dict[tuple[str, str, int | None], float] = {}
    for row in rows:
        key = (row.kind, row.group, row.size_bytes)
        fastest[key] = min(fastest.get(key, row.shortest_s), row.shortest_s)
    return [
        replace(row, overlapped=True)
        if row.kind != "message"
        and row.name != row.operation
        and row.shortest_s > OVERLAP_FACTOR * fastest[row.kind, row.group, row.size_bytes] + NOISE_S
        else row
        for row in rows
    ]


def _plain_name(event: RankEvent) -> str:
    if event.kind != "message":
        return event.name
    return event.name.replace("recv_", "").replace("send_", "")


def _set_size(rank: int, kind: str, group: str, layout: Layout) -> int:
    return 2 if kind == "message" else len(members(rank, group, layout))
