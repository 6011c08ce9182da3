"""What a search says beyond its rows: uneven splits, other placements, and what would change the answer."""

from dataclasses import replace

import numpy as np
import pytest

from stepcast.forecast.predict import predict
from stepcast.hardware import Place, load_cluster
from stepcast.ir.model import pieces
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import Sharding
from stepcast.searching.best import search_parts
from stepcast.searching.result import SearchCounts, SearchResult, SimulatedCandidate
from stepcast.searching.search import Refinement, measure_sensitivity, neighbour_splits, refine_best, scale_network
from stepcast.searching.space import SpacePart
from tests.searching.spaces import Case, case

FEW = {"sharding": (Sharding.ZERO_1,), "recompute": ("none",), "cp": (1,), "sequence_parallel": (True,)}


def piped(cluster: str = "dgx-h100", gpus: int = 32) -> Case:
    """A head that weighs as much as layers do, and layers that do not divide."""
    return case(
        "llama-3.1-8b", cluster, gpus, 32, 4096, tp=(1, 2), pp=(4,), vpp=(1,), micro_batch=(1,),
        schedule=(ScheduleKind.ONE_F_ONE_B,), **FEW,
    )  # fmt: skip


def found(one: Case, **options: object) -> SearchResult:
    part = SpacePart(one.space, one.framework, np.arange(len(one.space)))
    return search_parts([part], one.cluster, **options)  # type: ignore[arg-type]


def test_layers_move_where_that_helps() -> None:
    one = piped()
    even = found(one, top=2)
    better = refine_best(even, one.space.model, one.cluster)
    assert better.best[0].step_s < even.best[0].step_s
    strategy = better.best[0].strategy
    assert sum(strategy.stage_layers) == one.space.model.layers
    # The last stage has the head, so that it gets fewer.
    assert strategy.stage_layers[-1] < max(strategy.stage_layers)
    assert predict(one.space.model, one.cluster, strategy).step_s == better.best[0].step_s


def test_the_best_of_the_first_candidates_is_refined_at_once() -> None:
    """A watcher sees it long before the search ends; the result is that of the whole search."""
    one, seen = piped(), list[float]()
    improve = Refinement(one.space.model, one.cluster, "step", None).improve

    def watch(counts: SearchCounts, best: SimulatedCandidate | None) -> None:
        seen.extend([best.step_s] if best else [])

    result = found(one, top=2, watch=watch, improve=improve)
    assert result == replace(found(one, top=2), deadline=result.deadline)
    assert min(seen) == refine_best(result, one.space.model, one.cluster).best[0].step_s


def test_every_move_keeps_all_layers() -> None:
    one = piped()
    strategy = one.space.strategy(0)
    splits = list(neighbour_splits(one.space.model, strategy))
    assert len(splits) == len(set(splits)) > 2
    for split in splits:
        assert sum(split) == one.space.model.layers
        assert len(pieces(one.space.model, replace(strategy, stage_layers=split))) == 4


def test_racks_are_tried_with_both_placements() -> None:
    one = piped("gb200-nvl72", 72)._replace(
        space=case("llama-3.1-8b", "gb200-nvl72", 96, 96, 4096, tp=(8,), pp=(1, 2), vpp=(1,), micro_batch=(1,), **FEW).space
    )  # fmt: skip
    even = found(one, top=1)
    both = refine_best(even, one.space.model, one.cluster)
    tried = [
        predict(one.space.model, one.cluster, both.best[0].strategy, options=replace(both.best[0].options, place=place)).step_s
        for place in Place
    ]  # fmt: skip
    assert both.best[0].step_s == min(tried)


def test_what_would_change_the_answer() -> None:
    one = piped()
    result = found(one)
    changes = {each.words: each for each in measure_sensitivity(result, one.space.model, one.cluster)}
    assert list(changes) == ["2 x network", "+16.00 GiB", "2 x batch"]
    assert changes["2 x network"].speed_ratio >= 1
    assert changes["+16.00 GiB"].speed_ratio >= 1
    twice = changes["2 x batch"]
    assert twice.strategy.global_batch == 64
    assert twice.speed_ratio == pytest.approx(2 * result.best[0].step_s / twice.step_s)
    faster = scale_network(one.cluster, 2.0)
    assert faster is not None
    steps = [predict(one.space.model, faster, each.strategy).step_s for each in result.best[:5]]
    assert changes["2 x network"].step_s == min(steps)


def test_a_single_node_has_no_network() -> None:
    many = load_cluster("dgx-h100")
    single = replace(many, nodes=1, node=replace(many.node, nics=0, nic=None))
    assert scale_network(single, 2.0) is None
