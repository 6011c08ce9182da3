"""Collectives of several ranks matched with each other: who came last, and what the others waited.

A collective moves data only once its last member has come. The member that came last waits for nobody, so the
shortest of the members' times is the transfer, and what a member took longer is its wait. That compares
durations, not starts: it holds whatever the clocks of the hosts say.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stepcast.ir.arrays import IntArray
from stepcast.ir.timeline import NONE, Floats, SpanKind, Timeline
from stepcast.ir.work import Collective, CollectiveKind, Transfer

# Bus bytes over buffer bytes, as nccl-tests defines bus bandwidth (doc/PERFORMANCE.md).
RING = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """All runs of one collective of one size over one group; times are sums over ranks and runs."""

    kind: str
    group: str
    ranks: int
    size_bytes: int | None
    count: int
    total_s: float
    matched: int  # runs of which every member is in the trace
    transfer_s: float | None  # median of the matched runs
    wait_s: float  # in matched runs
    busbw_bytes_per_s: float | None

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Matching:
    rows: tuple[CollectiveRow, ...]
    wait_s: dict[int, float]  # by rank, in matched collectives
    transfer_s: dict[int, float]
    last: dict[int, int]  # how often a rank came last
    matched: int
    unmatched: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a detail of the timeline says of its rows."""

    key: tuple[str, str, str]  # collective, group, members
    members: int


def match_collectives(timeline: Timeline) -> Matching:
    rows = np.flatnonzero(timeline.kind_of == SpanKind.COMMUNICATION).astype(np.int64)
    rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
    kinds, key_of, sequence_of = _keys(timeline)
    if not len(rows):
        return Matching((), {}, {}, {}, 0, 0)
    detail = timeline.detail_of[rows]
    key = np.where(detail == NONE, len(kinds), key_of[detail])
    rank = timeline.rank_of[rows]
    # Buffers of another size are another collective: streams may run two at once, in either order.
    sized = (key * (len(timeline.works) + 1) + timeline.work_of[rows] + 1).astype(np.int64)
    instance, duration_s = (
        _instances(sized, _ordinals(rank, sized, sequence_of[detail])),
        timeline.duration_s[rows],
    )
    count = np.bincount(instance)
    shortest = np.full(len(count), np.inf)
    np.minimum.at(shortest, instance, duration_s)
    # Gloo names no group: then it is taken to be all ranks, where all are in the trace.
    everyone = 0 if timeline.facts.get("missing_ranks") else len(timeline.ranks)
    members = np.array([*(kind.members for kind in kinds), 0], dtype=np.int64)[key]
    unnamed = np.array([*(not any(kind.key[1:]) for kind in kinds), True])[key]
    members = np.where((members == 0) & unnamed, everyone, members)
    message = np.array([isinstance(work, Transfer) for work in timeline.works] + [False])[
        timeline.work_of[rows]
    ]
    whole = (members > 1) & (count[instance] == members) & ~message
    wait_s = np.where(whole, duration_s - shortest[instance], 0.0)
    first_of = np.zeros(len(count), dtype=np.int64)
    first_of[instance[::-1]] = np.arange(len(rows))[::-1]
    last = whole & (duration_s == shortest[instance])
    return Matching(
        rows=_table(timeline, rows, kinds, key, members, whole, instance, shortest, wait_s),
        wait_s=_by_rank(rank[whole], wait_s[whole]),
        transfer_s=_by_rank(rank[whole], shortest[instance][whole]),
        last={
            int(one): int(times)
            for one, times in zip(*np.unique(rank[last], return_counts=True), strict=True)
        },
        matched=int(whole[first_of].sum()),
        unmatched=int((~whole)[first_of].sum()),
    )


def _keys(timeline: Timeline) -> tuple[list[_Kind], IntArray, IntArray]:
    """Distinct kinds of communication; for each detail its kind and its sequence number (-1: none)."""
    numbers: dict[tuple[str, str, str], int] = {}
    kinds: list[_Kind] = []
    key_of, sequence_of = [], []
    for detail in timeline.details:
        ranks, name = detail.get("ranks", ""), detail.get("group", "")
        # Long lists of ranks are cut short in the trace; the group's own name tells it apart then.
        key = detail.get("collective", ""), detail.get("description") or name, ranks or name
        number = numbers.setdefault(key, len(kinds))
        if number == len(kinds):
            size = detail.get("group_size", "")
            members = (
                int(size) if size.isdecimal() and len(size) < 9 else len(ranks.split(",")) if ranks else 0
            )
            kinds.append(_Kind(key, members))
        key_of.append(number)
        sequence = detail.get("sequence", "")
        sequence_of.append(int(sequence) if sequence.isdecimal() and len(sequence) < 18 else -1)
    # One more, for rows without details: index -1.
    return kinds, np.array([*key_of, len(kinds)], np.int64), np.array([*sequence_of, -1], np.int64)


def _ordinals(rank: npt.NDArray[np.int32], key: IntArray, sequence: IntArray) -> IntArray:
    """The sequence number, or where there is none, which of its kind a row is on its rank."""
    order = np.lexsort((np.arange(len(key)), key, rank))
    fresh = np.ones(len(key), dtype=bool)
    fresh[1:] = (rank[order][1:] != rank[order][:-1]) | (key[order][1:] != key[order][:-1])
    place = np.arange(len(key)) - np.maximum.accumulate(np.where(fresh, np.arange(len(key)), 0))
    ordinal = np.empty(len(key), np.int64)
    ordinal[order] = place
    # Apart from real sequence numbers, which are never negative.
    return np.where(sequence >= 0, sequence, -1 - ordinal)


def _instances(key: IntArray, order: IntArray) -> IntArray:
    _, instance = np.unique(np.stack([key, order]), axis=1, return_inverse=True)
    return instance.reshape(-1).astype(np.int64)


def _by_rank(rank: npt.NDArray[np.int32], seconds: Floats) -> dict[int, float]:
    ranks, inverse = np.unique(rank, return_inverse=True)
    sums = np.bincount(inverse, weights=seconds, minlength=len(ranks))
    return {int(one): float(total) for one, total in zip(ranks, sums, strict=True)}


def _table(
    timeline: Timeline,
    rows: IntArray,
    kinds: Sequence[_Kind],
    key: IntArray,
    members_of: IntArray,
    whole: npt.NDArray[np.bool_],
    instance: IntArray,
    shortest: Floats,
    wait_s: Floats,
) -> tuple[CollectiveRow, ...]:
    work = timeline.work_of[rows]
    groups, inverse = np.unique(np.stack([key, work]), axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    table = []
    for number, (kind, work_index) in enumerate(groups.T.tolist()):
        mine = inverse == number
        known = kinds[kind] if kind < len(kinds) else None
        done = timeline.works[work_index] if work_index != NONE else None
        matched = np.unique(instance[mine & whole])
        transfer_s = float(np.median(shortest[matched])) if len(matched) else None
        members = int(members_of[mine][0])
        size = done.size_bytes if isinstance(done, Collective | Transfer) else None
        table.append(
            CollectiveRow(
                kind=str(done.kind) if isinstance(done, Collective) else known.key[0] if known else "unknown",
                group=known.key[1] if known else "",
                ranks=members,
                size_bytes=size,
                count=int(mine.sum()),
                total_s=float(timeline.duration_s[rows[mine]].sum()),
                matched=len(matched),
                transfer_s=transfer_s,
                wait_s=float(wait_s[mine].sum()),
                busbw_bytes_per_s=_busbw(done, members, transfer_s or _fastest(timeline, rows[mine])),
            )
        )
    return tuple(sorted(table, key=lambda row: -row.total_s))


def _fastest(timeline: Timeline, rows: IntArray) -> float:
    """Of one rank alone the shortest run is the one that waited least."""
    return float(timeline.duration_s[rows].min())


def _busbw(work: object, ranks: int, seconds: float) -> float | None:
    if seconds <= 0 or not isinstance(work, Collective | Transfer) or not work.size_bytes:
        return None
    factor = 1.0
    if isinstance(work, Collective):
        if ranks < 2:
            return None
        if work.kind is CollectiveKind.ALL_REDUCE:
            factor = 2 * (ranks - 1) / ranks
        elif work.kind in RING:
            factor = (ranks - 1) / ranks
    return factor * work.size_bytes / seconds
