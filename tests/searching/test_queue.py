"""Candidates come in the order of their tight bounds, whatever the rough ones are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.searching import best as queue
from stepcast.searching.best import BoundQueue

SEED = 3


@given(
    candidates=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 8)), max_size=60),
    most=st.integers(1, 7),
    worst=st.integers(0, 30),
    at_once=st.integers(1, 4),
)
def test_the_order_is_that_of_tight_bounds(
    candidates: list[tuple[int, int, int]], most: int, worst: int, at_once: int
) -> None:
    rough = np.array([each for each, _, _ in candidates], dtype=np.float64)
    tight = rough + np.array([more for _, more, _ in candidates], dtype=np.float64)
    kinds = np.array([kind for _, _, kind in candidates], dtype=np.int64)
    ranks = np.random.default_rng(SEED).permutation(len(candidates))
    asked: list[int] = []

    def tighten(some: IntArray) -> FloatArray:
        asked.extend(some.tolist())
        return tight[some]

    before, queue.KINDS_AT_ONCE = queue.KINDS_AT_ONCE, at_once
    try:
        made = BoundQueue(rough, ranks, kinds, tighten)
    finally:
        queue.KINDS_AT_ONCE = before
    found: list[int] = []
    while len(some := made.next(most, worst)):
        assert len(some) <= most
        found += some.tolist()
        rest = np.setdiff1d(np.arange(len(candidates)), found)
        assert made.least <= tight[rest].min(initial=np.inf)
        assert made.below(worst) >= (tight[rest] <= worst).sum()
    order = np.lexsort((ranks, tight))
    assert found == [at for at in order.tolist() if tight[at] <= worst]
    assert len(asked) == len(set(asked))
    assert made.below(worst) == 0
    assert len(made) == len(candidates) - len(found)


def test_what_lies_beyond_the_worst_is_not_made_tight() -> None:
    rough = np.arange(1000.0)
    asked: list[int] = []

    def tighten(some: IntArray) -> FloatArray:
        asked.extend(some.tolist())
        return rough[some]

    made = BoundQueue(rough, np.arange(1000), np.arange(1000), tighten)
    assert made.next(16, 9.0).tolist() == list(range(10))
    assert len(asked) == queue.KINDS_AT_ONCE
