"""What a search finds is what simulating everything finds."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from operator import attrgetter

import numpy as np
import pytest

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.searching.best import MORE_BYTES, search_parts, usable_memory_bytes
from stepcast.searching.result import (
    FAMILY,
    OBJECTIVES,
    ScoredPrediction,
    SearchCounts,
    SearchResult,
    SimulatedCandidate,
)
from stepcast.searching.space import SpacePart, build_space
from stepcast.units import GIB
from tests.searching.spaces import Case, bound_candidates, dense, experts, hybrid, sharded
from tests.searching.spaces import case as build_case


def simulate_all(case: Case, objectives: tuple[str, ...]) -> dict[str, list[tuple[float, int]]]:
    """Return the score by each objective, and the row, of all candidates that fit, the least first."""
    space, cluster, framework = case
    legal = np.isfinite(bound_candidates(space, cluster, framework).memory_bytes)
    scores: dict[str, list[tuple[float, int]]] = {name: [] for name in objectives}
    for at in np.flatnonzero(legal).tolist():
        strategy = space.strategy(at)
        stages = memory(space.model, strategy, cluster.gpu, framework)
        if all(stage.total <= cluster.gpu.memory_bytes for stage in stages):
            prediction = predict(space.model, cluster, strategy, framework)
            scored = ScoredPrediction(prediction, 0.0, strategy.layout.gpus)
            for name, rows in scores.items():
                rows.append((prediction.step_s if name == "step" else OBJECTIVES[name].score(scored), at))
    return {name: sorted(rows) for name, rows in scores.items()}


@cache
def dense_searched() -> SearchResult:
    """What several tests ask for."""
    return searched(dense())


@cache
def fastest_sharded() -> SimulatedCandidate:
    return searched(sharded(), top=1).best[0]


def searched(case: Case, **options: object) -> SearchResult:
    part = SpacePart(case.space, case.framework, np.arange(len(case.space)))
    return search_parts([part], case.cluster, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [dense, experts, sharded, hybrid])
def test_the_best_ten_are_those_of_exhaustion(made: Callable[[], Case]) -> None:
    case = made()
    objectives = ("step", "energy") if made is hybrid else ("step",)
    result, every = searched(case), simulate_all(case, objectives)
    all_of_them = every["step"]
    assert [(each.step_s, each.number) for each in result.best] == all_of_them[:10]
    counts = result.counts
    parts = counts.illegal + counts.too_large + counts.pruned + counts.simulated
    assert counts.complete
    assert counts.unseen == 0
    assert result.least_s is None
    assert counts.considered == len(case.space) == parts
    assert counts.simulated < len(all_of_them)
    assert all(each.bound_s <= each.step_s for each in result.simulated)
    if made is hybrid:
        found = searched(case, objective="energy", top=5)
        assert [(each.score, each.number) for each in found.best] == every["energy"][:5]
        assert found.counts.simulated < len(all_of_them)


def test_parts_are_searched_as_one() -> None:
    case = experts()
    rows = np.arange(len(case.space))
    halves = [SpacePart(case.space.only(half), case.framework, half) for half in (rows[::2], rows[1::2])]
    assert search_parts(halves, case.cluster).best == searched(case).best


@pytest.mark.parametrize("objective", ["throughput", "cost", "memory", "energy"])
def test_objectives_put_their_least_first(objective: str) -> None:
    case = sharded()
    best = searched(case, objective=objective, top=3).best
    scores = [each.score for each in best]
    assert scores == sorted(scores)
    fastest = fastest_sharded()
    if objective == "memory":
        assert best[0].memory_bytes <= fastest.memory_bytes
    if objective in ("throughput", "cost"):
        assert best[0].strategy == fastest.strategy  # as many GPUs each


def test_less_memory_leaves_fewer() -> None:
    case, whole = dense(), dense_searched()
    needed = whole.best[0].memory_bytes
    less = searched(case, top=1, most_bytes=needed - 1)
    assert less.best[0].memory_bytes < needed
    assert less.best[0].step_s >= whole.best[0].step_s
    assert less.missed is not None
    nothing = searched(case, most_bytes=1.0)
    assert not nothing.best
    assert nothing.smallest_bytes is not None
    assert nothing.smallest_bytes > 1


def test_a_search_that_is_stopped_keeps_its_best() -> None:
    def stop(counts: SearchCounts, best: SimulatedCandidate | None) -> None:
        if counts.simulated == 12:  # after those that are tried before all bounds are known
            raise KeyboardInterrupt

    result = searched(dense(), watch=stop)
    counts = result.counts
    assert not counts.complete
    assert not counts.out_of_time
    assert len(result.simulated) == 12
    assert result.best[0].step_s == min(each.step_s for each in result.simulated)
    # It says how much is left, and what that cannot be below.
    parts = counts.illegal + counts.too_large + counts.pruned + counts.simulated + counts.unseen
    assert parts == counts.considered
    assert counts.unseen > 0
    assert result.least_s is not None
    others = {each.number for each in result.simulated}
    assert result.least_s <= min(each.step_s for each in dense_searched().simulated if each.number not in others)


def test_a_search_ends_when_its_time_is_up() -> None:
    result = searched(dense(), most_s=0.0)
    assert result.counts.out_of_time
    assert not result.counts.complete
    assert not result.best
    assert result.counts.unseen == result.counts.considered == len(dense().space)
    assert searched(dense(), top=1, most_s=1e6).best == dense_searched().best[:1]


def test_a_search_can_be_stopped_while_it_bounds() -> None:
    told: list[SearchCounts] = []

    def stop(counts: SearchCounts, best: SimulatedCandidate | None) -> None:
        told.append(counts)
        if counts.priced:
            raise KeyboardInterrupt

    result = searched(dense(), watch=stop)
    assert not result.counts.complete
    assert len(result.simulated) <= 1
    assert result.counts.unseen > 0
    assert [each.priced for each in told[:2]] == [0, 0]


def test_only_kinds_of_layers_near_the_best_are_priced_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    every = searched(dense(), top=1, looks_around=False)
    monkeypatch.setattr("stepcast.searching.best.KINDS_AT_ONCE", 4)
    few = searched(dense(), top=1, looks_around=False)
    assert few.best == every.best
    assert few.simulated == every.simulated
    assert few.counts.priced < every.counts.priced


def test_the_front_has_none_that_another_beats() -> None:
    result = dense_searched()
    front = result.front
    assert front[0].step_s == result.best[0].step_s
    for faster, slower in pairwise(front):
        assert slower.step_s >= faster.step_s
        assert slower.memory_bytes < faster.memory_bytes
    more = replace(result, simulated=(*result.simulated, replace(front[0], memory_bytes=1.0)))
    assert len(more.front) == 1


def test_an_objective_that_is_not_known_is_told() -> None:
    with pytest.raises(ValueError, match="'speed' is not known; expected one of step"):
        searched(dense(), objective="speed")


def test_two_workers_answer_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the space were large enough for several processes.
    monkeypatch.setattr("stepcast.searching.best.FEWEST_FOR_SEVERAL", 1)
    monkeypatch.setattr("stepcast.ir.children.FEWEST_EACH", 1)
    assert searched(dense(), workers=2) == dense_searched()


def test_what_more_memory_gains_is_what_a_search_with_it_finds() -> None:
    """Also at 20 GiB: micro-batches of 2 need 26 GiB there, of which the lower bound has seen less than 20."""
    small = {"tp": (1,), "cp": (1,), "pp": (1,), "micro_batch": (1, 2, 4), "recompute": ("none",)}
    spaces = {(30, 36, 56): dense(), (20, 60): build_case("llama-3.2-1b", "dgx-h100", 8, 64, 4096, **small)}
    gains = []
    for sizes, space in spaces.items():
        for gib in sizes:
            less = searched(space, top=1, most_bytes=gib * GIB)
            more = searched(space, top=1, most_bytes=gib * GIB + MORE_BYTES).best[0]
            found = min(less.roomier or less.best[0], less.best[0], key=attrgetter("rank"))
            assert found.step_s == more.step_s
            gains.append(found.step_s < less.best[0].step_s)
    assert gains == [True, True, True, True, False]


def test_of_several_numbers_of_gpus_the_fastest_of_each_is_known() -> None:
    case = dense()
    both = build_space(case.space.model, replace(case.space.axes, gpus=(16, 32)), 32, 8192, 8)
    result = searched(case._replace(space=both), top=1)
    for number in (16, 32):
        rows = np.flatnonzero(both.columns["gpus"] == number)
        alone = searched(case._replace(space=both.only(rows)), top=1).best[0]
        fastest = min((each for each in result.simulated if each.gpus == number), key=lambda each: each.step_s)
        assert fastest.step_s == alone.step_s
        assert any(each.step_s == alone.step_s for each in result.front)


def test_each_row_is_the_best_of_its_family() -> None:
    """The fastest candidates of the Pareto frontier are no rows of a search for memory."""
    case = dense()
    both = case._replace(space=build_space(case.space.model, replace(case.space.axes, gpus=(8, 32)), 32, 8192, 8))
    for best in searched(both, top=20, objective="memory", by_family=True).best:
        rows = [row for row in range(len(both.space)) if _family(both, row) == best.family]
        alone = searched(both._replace(space=both.space.only(np.array(rows))), top=1, objective="memory").best[0]
        assert best.memory_bytes == alone.memory_bytes


def _family(case: Case, row: int) -> tuple[int, ...]:
    return tuple(int(case.space.columns[name][row]) for name in FAMILY)


@pytest.mark.parametrize(
    ("most_bytes", "reserve", "usable"),
    [(None, None, 93), (90, None, 90), (None, 0.2, 80), (90, 0.2, 80), (70, 0.2, 70)],
)
def test_a_search_leaves_memory_free_unless_a_limit_is_given(
    most_bytes: float | None, reserve: float | None, usable: float
) -> None:
    assert usable_memory_bytes(100, most_bytes, reserve) == pytest.approx(usable)
