"""Interval arithmetic against sets of single points of time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepcast.analyze.intervals import Intervals, union_of

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=25)


def made(spans: list[tuple[int, int]]) -> tuple[Intervals, set[int]]:
    """The union, and the whole numbers k for which k to k + 1 is in it."""
    starts = np.array([start for start, _ in spans], dtype=np.float64)
    lengths = np.array([length for _, length in spans], dtype=np.float64)
    points = {point for start, length in spans for point in range(start, start + length)}
    return union_of(starts, starts + lengths), points


def points_of(intervals: Intervals) -> set[int]:
    pairs = zip(intervals.start_s.tolist(), intervals.end_s.tolist(), strict=True)
    return {point for start, end in pairs for point in range(int(start), int(end))}


def check_order(intervals: Intervals) -> None:
    assert (intervals.end_s > intervals.start_s).all()
    assert (intervals.start_s[1:] > intervals.end_s[:-1]).all()


@given(SPANS)
def test_union_is_disjoint_and_covers_the_same(spans: list[tuple[int, int]]) -> None:
    union, points = made(spans)
    check_order(union)
    assert points_of(union) == points
    assert union.length_s == len(points)


@given(SPANS, SPANS)
def test_two_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    (a, in_a), (b, in_b) = made(one), made(other)
    assert points_of(a.union(b)) == in_a | in_b
    assert points_of(a.intersection(b)) == in_a & in_b
    assert points_of(a.without(b)) == in_a - in_b


@given(SPANS, st.integers(0, 50), st.integers(0, 50))
def test_gaps(spans: list[tuple[int, int]], start: int, length: int) -> None:
    union, points = made(spans)
    window = set(range(start, start + length))
    assert points_of(union.gaps(start, start + length)) == window - points
