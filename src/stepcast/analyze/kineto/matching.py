"""Collectives of several ranks matched with each other: transfers, waits, who came last, clocks.

A collective moves data only once its last member has arrived. That member waits for nobody, so the shortest of the
members' times is the transfer, and the rest of a member's time is its wait. This compares durations, not starts: it
holds whatever the clocks of the hosts say.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from stepcast.ir.arrays import BoolArray, FloatArray, Int32Array, IntArray
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.work import Collective, Transfer, bus_factor

TOP_WAITS = 20
CommunicationKinds = dict[tuple[str, str, str], int]  # the members of each collective, group and list of ranks


class CollectiveRow(msgspec.Struct, frozen=True):
    """All runs of one collective of one size over one group; times are sums over ranks and runs."""

    kind: str
    group: str
    ranks: int
    size_bytes: int | None
    count: int
    total_s: float
    matched: int  # runs whose members are all in the trace
    transfer_s: float | None  # median of the matched runs
    wait_s: float  # in matched runs
    busbw_bytes_per_s: float | None


class RankWait(msgspec.Struct, frozen=True):
    """The time that a rank waited for another that came last to their collectives."""

    rank: int
    waits_for: int
    collectives: int
    wait_s: float


class MatchedCollectives:
    """The communication of several ranks, each run of a collective matched with those of its other members."""

    def __init__(self, timeline: Timeline) -> None:
        rows = np.flatnonzero(timeline.kind_of == SpanKind.COMMUNICATION).astype(np.int64)
        self.timeline = timeline
        self.spans = rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
        self.kinds, key_of, sequence_of = _find_kinds(timeline)
        detail = timeline.detail_of[rows]
        self.key = np.where(detail == NONE, len(self.kinds), key_of[detail])
        self.rank, self.duration_s = timeline.rank_of[rows], timeline.duration_s[rows]
        # Buffers of another size are another collective: streams may run two at once, in either order.
        sized = (self.key * (len(timeline.works) + 1) + timeline.work_of[rows] + 1).astype(np.int64)
        ordinal = _ordinals(self.rank, sized, sequence_of[detail])
        _, first, self.run_of, counts = np.unique(
            np.stack([sized, ordinal]), axis=1, return_index=True, return_inverse=True, return_counts=True
        )
        self.run_of = self.run_of.reshape(-1).astype(np.int64)
        self.shortest_s = np.full(len(counts), np.inf)
        np.minimum.at(self.shortest_s, self.run_of, self.duration_s)
        # Gloo names no group: then it is assumed to be all ranks, if all are in the trace.
        everyone = 0 if timeline.facts.get("missing_ranks") else len(timeline.ranks)
        members = np.array([*self.kinds.values(), 0], dtype=np.int64)[self.key]
        unnamed = np.array([*(not any(names[1:]) for names in self.kinds), True])[self.key]
        self.members = np.where((members == 0) & unnamed, everyone, members)
        message = np.array([isinstance(work, Transfer) for work in timeline.works] + [False])[timeline.work_of[rows]]
        self.complete: BoolArray = (self.members > 1) & (counts[self.run_of] == self.members) & ~message
        self.waited_s = np.where(self.complete, self.duration_s - self.shortest_s[self.run_of], 0.0)
        self.matched = int(self.complete[first].sum())
        self.unmatched = len(counts) - self.matched
        longest_s = np.zeros(len(counts))
        np.maximum.at(longest_s, self.run_of, self.duration_s)
        is_late = self.complete & (longest_s > self.shortest_s)[self.run_of]
        is_last = is_late & (self.duration_s == self.shortest_s[self.run_of])
        last, times = np.unique(self.rank[is_last], return_counts=True)
        self.last: dict[int, int] = dict(zip(last.tolist(), times.tolist(), strict=True))  # how often a rank came last
        last_of = np.full(len(counts), NONE, np.int64)
        last_of[self.run_of[is_last]] = self.rank[is_last]
        # By row of the timeline: the matched run of a collective, and its transfer in place of its time.
        self.meeting_of = np.full(len(timeline), NONE, np.int64)
        self.meeting_of[rows[self.complete]] = self.run_of[self.complete]
        self.transfers_s = timeline.duration_s.copy()
        self.transfers_s[rows] -= self.waited_s
        rank, run_of, waited_s = (column[self.complete] for column in (self.rank, self.run_of, self.waited_s))
        self.wait_s = _sum_by_rank(rank, waited_s)  # in matched collectives, as the three below
        self.transfer_s = _sum_by_rank(rank, self.shortest_s[run_of])
        self.waits = _rank_waits(rank, last_of[run_of], waited_s)
        # Of each rank's clock against that of the first.
        self.clock_offset_s = _clock_offsets(rank, run_of, timeline.end_s[rows][self.complete])
        self.rows = self._rows()

    def delay_s(self, ranks: Sequence[int]) -> float:
        """Return how much earlier matched collectives would have begun in total without waiting for *ranks*."""
        others_s = np.full(len(self.shortest_s), np.inf)
        others = self.complete & ~np.isin(self.rank, ranks)
        np.minimum.at(others_s, self.run_of[others], self.duration_s[others])
        has_others = np.isfinite(others_s)
        return float((others_s - self.shortest_s)[has_others].sum())

    def _rows(self) -> list[CollectiveRow]:
        groups, inverse = np.unique(
            np.stack([self.key, self.timeline.work_of[self.spans]]), axis=1, return_inverse=True
        )
        inverse = inverse.reshape(-1)
        table, names = [], [*self.kinds, ("unknown", "", "")]
        for number, (kind, work_index) in enumerate(groups.T.tolist()):
            mine = inverse == number
            work = self.timeline.works[work_index] if work_index != NONE else None
            matched = np.unique(self.run_of[mine & self.complete])
            transfer_s = float(np.median(self.shortest_s[matched])) if len(matched) else None
            members, seconds = int(self.members[mine][0]), self.duration_s[mine]
            table.append(
                CollectiveRow(
                    kind=str(work.kind) if isinstance(work, Collective) else names[kind][0],
                    group=names[kind][1],
                    ranks=members,
                    size_bytes=work.size_bytes if isinstance(work, Collective | Transfer) else None,
                    count=int(mine.sum()),
                    total_s=float(seconds.sum()),
                    matched=len(matched),
                    transfer_s=transfer_s,
                    wait_s=float(self.waited_s[mine].sum()),
                    # On one rank alone, the shortest run waited least.
                    busbw_bytes_per_s=_busbw(work, members, transfer_s or float(seconds.min())),
                )
            )
        return sorted(table, key=lambda row: -row.total_s)


def _rank_waits(rank: Int32Array, last: IntArray, wait_s: FloatArray) -> list[RankWait]:
    """Return who waits for whom in matched collectives, the longest first."""
    pairs, inverse, counts = np.unique(np.stack([rank, last]), axis=1, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse.reshape(-1), weights=wait_s, minlength=pairs.shape[1])
    rows = [
        RankWait(waiter, late, int(number), float(seconds))
        for (waiter, late), number, seconds in zip(pairs.T.tolist(), counts, sums, strict=True)
        if seconds > 0
    ]
    return sorted(rows, key=lambda row: -row.wait_s)[:TOP_WAITS]


def _clock_offsets(rank: Int32Array, instance: IntArray, end_s: FloatArray) -> dict[int, float]:
    """Return how much later each rank's clock shows the end of a collective, which all members reach together."""
    ranks = np.unique(rank)
    if len(ranks) < 2:
        return {}
    offset_s, fresh = {int(ranks[0]): 0.0}, [int(ranks[0])]
    reference = np.full(int(instance.max()) + 1, np.nan)
    while fresh:  # those that share a collective with the ones before
        for placed in fresh:
            own = rank == placed
            reference[instance[own]] = end_s[own] - offset_s[placed]
        later_s = end_s - reference[instance]
        known = ~np.isnan(later_s)
        fresh = [other for other in np.unique(rank[known]).tolist() if other not in offset_s]
        offset_s |= {other: float(np.median(later_s[known & (rank == other)])) for other in fresh}
    return offset_s


def _find_kinds(timeline: Timeline) -> tuple[CommunicationKinds, IntArray, IntArray]:
    """Return the distinct kinds of communication; for each detail its kind and sequence number (-1: none)."""
    kinds: CommunicationKinds = {}
    key_of, sequence_of = [], []
    for detail in timeline.details:
        ranks, name = detail.get("ranks", ""), detail.get("group", "")
        # Long lists of ranks are truncated in the trace; then the group's name identifies it.
        key = detail.get("collective", ""), detail.get("description") or name, ranks or name
        size, sequence = detail.get("group_size", ""), detail.get("sequence", "")
        members = int(size) if size.isdecimal() and len(size) < 9 else len(ranks.split(",")) if ranks else 0
        kinds.setdefault(key, members)
        key_of.append(key)
        sequence_of.append(int(sequence) if sequence.isdecimal() and len(sequence) < 18 else -1)
    numbers = {key: number for number, key in enumerate(kinds)}
    # One more, for rows without details: index -1.
    number_of = np.array([*(numbers[key] for key in key_of), len(kinds)], np.int64)
    return kinds, number_of, np.array([*sequence_of, -1], np.int64)


def _ordinals(rank: Int32Array, key: IntArray, sequence: IntArray) -> IntArray:
    """Return the sequence number, or without one the ordinal of a row among its kind on its rank."""
    order = np.lexsort((np.arange(len(key)), key, rank))
    fresh = np.ones(len(key), dtype=bool)
    fresh[1:] = (rank[order][1:] != rank[order][:-1]) | (key[order][1:] != key[order][:-1])
    ordinal = np.empty(len(key), np.int64)
    ordinal[order] = np.arange(len(key)) - np.maximum.accumulate(np.where(fresh, np.arange(len(key)), 0))
    # Negative, to differ from real sequence numbers.
    return np.where(sequence >= 0, sequence, -1 - ordinal)


def _sum_by_rank(rank: Int32Array, seconds: FloatArray) -> dict[int, float]:
    ranks, inverse = np.unique(rank, return_inverse=True)
    sums = np.bincount(inverse, weights=seconds, minlength=len(ranks))
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))


def _busbw(work: object, ranks: int, seconds: float) -> float | None:
    if seconds <= 0 or not isinstance(work, Collective | Transfer) or not work.size_bytes:
        return None
    if isinstance(work, Transfer):
        return work.size_bytes / seconds
    return None if ranks < 2 else bus_factor(work.kind, ranks) * work.size_bytes / seconds
