"""Communication of a Megatron run by kind: how often, how long, how fast."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean, median

from stepcast.analyze.changes import bus_factor
from stepcast.analyze.megatron.events import Event, Operation
from stepcast.analyze.megatron.meetings import NOISE_S, OVERLAP_FACTOR
from stepcast.analyze.recording import Recording
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import members

# Traces tell hundredths of a millisecond; a time of one or two of them is no rate.
SHORTEST_S = 2e-5


@dataclass(frozen=True, slots=True)
class Traffic:
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

    def priced(self, cluster_busbw_bytes_per_s: float | None) -> "Traffic":
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


def traffic_of(operations: Mapping[int, list[Operation]], recording: Recording) -> tuple[Traffic, ...]:
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
            Traffic(
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


def _marked(rows: list[Traffic]) -> list[Traffic]:
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


def _plain_name(event: Event) -> str:
    if event.kind != "message":
        return event.name
    return event.name.replace("recv_", "").replace("send_", "")


def _set_size(rank: int, kind: str, group: str, layout: Layout) -> int:
    return 2 if kind == "message" else len(members(rank, group, layout))
