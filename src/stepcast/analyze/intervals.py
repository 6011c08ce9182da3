"""Sets of times: unions, overlaps and gaps of intervals, as array operations."""

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.ir.types import dataclass


@dataclass(frozen=True, eq=False)
class Intervals:
    """Disjoint intervals in order of time, none of them empty; `union_of` builds them from any."""

    start_s: FloatArray
    end_s: FloatArray

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def length_s(self) -> float:
        return float((self.end_s - self.start_s).sum())

    @property
    def durations_s(self) -> FloatArray:
        return self.end_s - self.start_s

    def union(self, other: "Intervals") -> "Intervals":
        return union_of(np.concatenate([self.start_s, other.start_s]), np.concatenate([self.end_s, other.end_s]))

    def intersection(self, other: "Intervals") -> "Intervals":
        # The intervals of the other set that end after an own one starts and start before it ends.
        first = np.searchsorted(other.end_s, self.start_s, side="right")
        last = np.searchsorted(other.start_s, self.end_s, side="left")
        count = np.maximum(last - first, 0)
        own = np.repeat(np.arange(len(self)), count)
        offset = np.arange(len(own)) - np.repeat(np.cumsum(count) - count, count)
        theirs = first[own] + offset
        return Intervals(
            np.maximum(self.start_s[own], other.start_s[theirs]), np.minimum(self.end_s[own], other.end_s[theirs])
        )

    def gaps(self, start_s: float, end_s: float) -> "Intervals":
        """Return the times between two times that the set does not cover."""
        starts = np.concatenate([[start_s], np.clip(self.end_s, start_s, end_s)])
        ends = np.concatenate([np.clip(self.start_s, start_s, end_s), [end_s]])
        free = ends > starts
        return Intervals(starts[free], ends[free])

    def without(self, other: "Intervals") -> "Intervals":
        if not len(self):
            return self
        return self.intersection(other.gaps(float(self.start_s[0]), float(self.end_s[-1])))


def union_of(start_s: FloatArray, end_s: FloatArray) -> Intervals:
    """Return the union of any intervals, without empty ones."""
    filled = end_s > start_s
    start_s, end_s = start_s[filled], end_s[filled]
    if not len(start_s):
        return Intervals(start_s, end_s)
    order = np.argsort(start_s, kind="stable")
    start_s, latest_s = start_s[order], np.maximum.accumulate(end_s[order])
    first = np.flatnonzero(np.concatenate([[True], start_s[1:] > latest_s[:-1]]))
    return Intervals(start_s[first], latest_s[np.append(first[1:], len(start_s)) - 1])
