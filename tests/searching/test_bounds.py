"""No step is faster, and no stage smaller, than the bounds of its candidate."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.frameworks.catalog import load_framework
from stepcast.hardware import load_cluster
from stepcast.ir.legality import is_legal
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import Offload, Overlap, Sharding, StrategyError
from stepcast.searching.bounds import CandidateBounds, TimeBounds, bound_memory
from stepcast.searching.space import SpaceColumns
from tests.searching.spaces import Case, bound_candidates, case

ROUNDING = 1 + 1e-9
EVERY = {
    "schedule": (ScheduleKind.GPIPE, *(kind for kind in ScheduleKind if kind is not ScheduleKind.GPIPE)),
    "sharding": tuple(each for each in Sharding if each is not Sharding.HYBRID_FSDP),
    "vpp": (1, 2, 3, 4),
    "micro_batch": (1, 4),
}
SEED = 7


def varied() -> dict[str, Case]:
    """Models, clusters and software that differ in what they do."""
    few = {"pp": (1, 2, 4, 8), **EVERY}
    fewer = {**few, "tp": (1, 4), "ep": (1, 2, 8), "vpp": (1, 2, 3)}
    paired = case("qwen3-30b-a3b", "dgx-h100", 64, 64, 4096, cp=(1, 2), **fewer)
    common = {"overlap": Overlap(experts=True)}
    every = {**EVERY, "vpp": (1, 2), "micro_batch": (1,), "recompute": ("none",)}
    slow = case("llama-3.2-1b", "dgx-h100", 32, 64, 2048, tp=(1, 2), cp=(1,), pp=(1, 2, 4), **every)
    return {
        # Gathered weights and gradients take longer than computation; a fifth of the weights is the tied embedding.
        "one NIC": slow._replace(cluster=load_cluster("dgx-h100", ["node.nics=1"])),
        "dense": case("llama-3.1-8b", "dgx-h100", 32, 64, 8192, cp=(1, 2, 4), **few),
        "learned": case("gpt3-13b", "dgx-a100", 64, 128, 2048, **few),
        "experts": case("mixtral-8x7b", "dgx-h100", 64, 64, 4096, cp=(1, 2), **fewer),
        "latent": case("deepseek-v2-lite", "h800-node", 32, 64, 4096, **fewer),
        "paired": paired._replace(space=paired.space.having(common)),
        "eager": case("llama-2-7b", "dgx-a100", 16, 32, 4096, **few)._replace(framework=load_framework("torchtitan")),
        "plain": case("gpt2-xl", "dgx-a100", 16, 32, 1024, **few)._replace(framework=load_framework("pytorch")),
        "hybrid": case("jamba-v0.1", "dgx-h100", 32, 32, 4096, cp=(1,), **fewer),
        "delta": case(
            "qwen3-next-80b-a3b", "dgx-h100", 64, 64, 4096, cp=(1,), **{**fewer, "ep": (4, 16), "tp": (1, 2)}
        ),
        "racks": case("llama-3.1-70b", "gb200-nvl72", 72, 72, 8192, tp=(1, 2, 4, 8), **{**few, "pp": (1, 2, 3, 6)}),
    }


CASES = varied()
BOUNDS: dict[str, CandidateBounds] = {}


def bounds_of(name: str) -> CandidateBounds:
    if name not in BOUNDS:
        BOUNDS[name] = bound_candidates(*CASES[name], np.inf)
    return BOUNDS[name]


def check_row(name: str, at: int) -> None:
    space, cluster, framework = CASES[name]
    strategy, limits = space.strategy(at), bounds_of(name)
    largest = max(stage.total for stage in memory(space.model, strategy, cluster.gpu, framework))
    assert 0 < limits.memory_bytes[at] <= largest * ROUNDING, strategy
    report = predict(space.model, cluster, strategy, framework).report
    assert 0 < limits.time_s[at] <= report.step_s * ROUNDING, strategy
    assert 0 < limits.computing_s[at] <= report.breakdown_s["compute"] * ROUNDING, strategy


@pytest.mark.parametrize("name", CASES)
def test_bounds_hold_of_rows_drawn_once(name: str) -> None:
    legal = np.flatnonzero(np.isfinite(bounds_of(name).memory_bytes))
    for at in np.random.default_rng(SEED).choice(legal, 5, replace=False):
        check_row(name, int(at))


@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), share=st.floats(0, 1, exclude_max=True))
def test_bounds_hold_of_any_row(name: str, share: float) -> None:
    legal = np.flatnonzero(np.isfinite(bounds_of(name).memory_bytes))
    check_row(name, int(legal[int(share * len(legal))]))


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        *((name, Offload()) for name in CASES),
        ("one NIC", Offload(optimizer=1.0)),
        ("one NIC", Offload(activations=1.0)),
    ],
)
def test_memory_bounds_hold_of_many_rows(name: str, offload: Offload) -> None:
    space, cluster, framework = CASES[name]
    space = space.having({**space.common, "offload": offload})
    legal, sizes = bound_memory(SpaceColumns(space), cluster, framework)
    for at in np.random.default_rng(SEED).choice(np.flatnonzero(legal), 60):
        strategy = space.strategy(int(at))
        largest = max(stage.total for stage in memory(space.model, strategy, cluster.gpu, framework))
        assert 0 < sizes[at] <= largest * ROUNDING, strategy


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_rows_are_legal_by_the_rules_for_strategies(name: str) -> None:
    space, _, framework = CASES[name]
    rows = np.random.default_rng(SEED).choice(len(space), 300, replace=False)
    for at in rows:
        try:
            legal = is_legal(space.model, space.strategy(int(at)), framework)
        except StrategyError:
            legal = False
        assert legal == np.isfinite(bounds_of(name).memory_bytes[at]), space.values(int(at))


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_rough_bounds_are_below_tight_ones(name: str) -> None:
    space, cluster, framework = CASES[name]
    limits = bounds_of(name)
    rows = np.random.default_rng(SEED).choice(np.flatnonzero(np.isfinite(limits.memory_bytes)), 200, replace=False)
    timing = TimeBounds(SpaceColumns(space), cluster, framework, np.sort(rows))
    time_s, computing_s = timing.times(np.sort(rows), rough=True)
    assert timing.priced < len(np.unique(timing.hot.kind[rows]))
    assert (time_s <= limits.time_s[np.sort(rows)] * ROUNDING).all()
    assert (computing_s <= limits.computing_s[np.sort(rows)] * ROUNDING).all()
    # Asked for later, tight ones are those that were worked out at once.
    assert (timing.times(np.sort(rows))[0] == limits.time_s[np.sort(rows)]).all()


def test_bounds_of_dense_layers_are_near_the_step() -> None:
    """Loose bounds are no error, but a search then simulates many more candidates. What is above a bound is the heat of
    the GPUs, the start of the pipeline and messages that meet on a link.
    """
    axes: dict[str, Any] = {"tp": (1, 2, 4), "cp": (1, 2), "pp": (1, 2), "vpp": (1,), "micro_batch": (1,)}
    axes |= {"recompute": ("none", "full"), "sharding": (Sharding.ZERO_1,), "schedule": (ScheduleKind.ONE_F_ONE_B,)}
    space, cluster, framework = case("llama-3.1-8b", "dgx-h100", 8, 16, 8192, **axes)
    limits = bound_candidates(space, cluster, framework)
    rows = np.flatnonzero(np.isfinite(limits.memory_bytes))
    steps_s = [predict(space.model, cluster, space.strategy(int(row)), framework).report.step_s for row in rows]
    assert len(rows) > 10
    assert (limits.time_s[rows] / steps_s).min() > 0.9
