"""Forecasts of mixtures whose experts a host issues, and of what is recomputed of them."""

from dataclasses import replace
from typing import Any

import pytest

from stepcast.forecast.predict import issue_s_of, predict
from stepcast.frameworks.catalog import load_framework
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.framework import Execution
from stepcast.ir.layout import Layout
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import Overlap, Recompute, RecomputeKind, RecomputeModule, ScheduleKind, Strategy
from stepcast.ir.types import DType
from stepcast.ir.work import GroupedMatmul
from stepcast.models.catalog import load_model
from stepcast.units import US
from tests.software import software

QWEN = load_model("qwen3-30b-a3b")
# Few tokens and many experts on each rank: what a host can hardly keep up with.
SMALL = Strategy(Layout(ep=2, dp=8, expert_tp=1), 1, 32, 1024, precision=DType.MXFP8)


def step(**changes: Any) -> StepReport:
    framework = software(changes)
    return predict(QWEN, load_cluster("dgx-b200"), replace(SMALL, **changes), framework).report


def test_the_less_is_captured_the_longer_a_step_takes() -> None:
    steps = [step(execution=how) for how in (Execution.GRAPHS, Execution.PARTIAL_GRAPHS, Execution.EAGER)]
    assert steps[0].step_s < steps[1].step_s < steps[2].step_s
    assert steps[0].breakdown_s["other"] < 1e-3 * steps[0].step_s
    assert steps[1].breakdown_s["other"] > 0.1 * steps[1].step_s


@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize("overlapped", [False, True])
def test_breakdowns_sum_to_the_step(execution: Execution, overlapped: bool) -> None:
    modules = (RecomputeModule.EXPERTS, RecomputeModule.NORMS)
    report = step(
        execution=execution,
        overlap=Overlap(experts=overlapped),
        recompute=Recompute(RecomputeKind.SELECTIVE, modules=modules),
    )
    assert sum(report.breakdown_s.values()) == pytest.approx(report.step_s, rel=1e-12)
    assert all(seconds >= 0 for seconds in report.breakdown_s.values())


def test_recomputed_modules_cost_their_share() -> None:
    def recomputing(*modules: RecomputeModule) -> float:
        return step(recompute=Recompute(RecomputeKind.SELECTIVE, modules=modules)).step_s

    none, full = step().step_s, step(recompute=Recompute(RecomputeKind.FULL)).step_s
    norms, activation, experts = (
        recomputing(module)
        for module in (RecomputeModule.NORMS, RecomputeModule.EXPERT_ACTIVATION, RecomputeModule.EXPERTS)
    )
    assert none < norms < activation < experts < full


def test_fused_experts_save_their_memory_bound_kernels() -> None:
    fused, plain = step(fused_experts=True), step()
    assert fused.breakdown_s["compute"] < 0.98 * plain.breakdown_s["compute"]
    assert fused.breakdown_s["ep"] == pytest.approx(plain.breakdown_s["ep"])


def exchanged(batches: int, overlapped: bool, **degrees: int) -> StepReport:
    layout = Layout(ep=16, dp=16, expert_tp=1, **degrees)
    schedule = ScheduleKind.INTERLEAVED if layout.vpp > 1 else ScheduleKind.ONE_F_ONE_B
    strategy = Strategy(layout, 1, 16 * batches, 4096, overlap=Overlap(experts=overlapped), schedule=schedule)
    return predict(QWEN, load_cluster("dgx-h100"), strategy).report


def test_one_micro_batch_has_no_other_to_exchange_beside() -> None:
    alone, beside = exchanged(1, False), exchanged(1, True)
    assert beside.step_s == alone.step_s
    assert beside.communication_s["ep"].exposed_s == alone.communication_s["ep"].exposed_s > 0


def test_a_stage_of_one_chunk_exchanges_beside_nothing() -> None:
    assert exchanged(8, True, pp=2).step_s == exchanged(8, False, pp=2).step_s


@pytest.mark.parametrize("batches", [2, 4, 16])
def test_exchanges_hide_behind_another_micro_batch_but_for_the_ends(batches: int) -> None:
    """The first forward and the last backward run alone: of n micro-batches the exchanges of one stay exposed,
    and those of the others hide behind as much computing as there is, which loses some of its rate.
    """
    alone, beside = exchanged(batches, False), exchanged(batches, True)
    exchange, computing = alone.communication_s["ep"].total_s, alone.breakdown_s["compute"]
    least = exchange / batches + max(0.0, (exchange - computing) * (batches - 1) / batches)
    assert least <= beside.communication_s["ep"].exposed_s < exchange
    saved_s = alone.step_s - beside.step_s
    assert saved_s <= min(exchange, computing) * (batches - 1) / batches
    assert saved_s > 0.3 * min(exchange, computing) * (batches - 1) / batches


def test_chunks_pair_their_micro_batches_too() -> None:
    alone, beside = (exchanged(16, overlapped, pp=2, vpp=4) for overlapped in (False, True))
    assert beside.communication_s["ep"].exposed_s < 0.5 * alone.communication_s["ep"].exposed_s
    assert beside.stages[0].peak_in_flight == alone.stages[0].peak_in_flight + 1
    assert beside.memory_bytes is not None
    assert alone.memory_bytes is not None
    for paired, single in zip(beside.memory_bytes["stages"], alone.memory_bytes["stages"], strict=True):
        assert paired["activations"] > single["activations"]


def test_a_host_takes_longer_over_scaled_products() -> None:
    """Transformer Engine's issue 445: half a millisecond more for each, which small products do not hide."""
    narrow, wide = (step(execution=Execution.EAGER, precision=each) for each in (DType.MXFP8, DType.BF16))
    products = 12 * QWEN.layers * SMALL.micro_batches  # four linear layers, forward and both gradients
    waited_s = narrow.breakdown_s["other"] - wide.breakdown_s["other"]
    assert 0.5 * products * 0.5e-3 < waited_s < 1.2 * products * 0.5e-3
    captured = (step(execution=Execution.GRAPHS, precision=each) for each in (DType.MXFP8, DType.BF16))
    assert max(each.breakdown_s["other"] for each in captured) < 1e-3


@pytest.mark.parametrize(("dtype", "expert_us"), [(DType.BF16, 42.0), (DType.MXFP8, 55.0)])
def test_the_cpu_issues_each_expert_by_itself(dtype: DType, expert_us: float) -> None:
    """Transformer Engine calls cuBLAS, and a quantiser for scaled formats, expert by expert; a joined product does not."""
    issue_s = issue_s_of(load_framework("megatron-core-eager"))
    one, many = (GroupedMatmul(4096, 1024, 1024, groups, dtype, separate=True) for groups in (1, 17))
    assert issue_s(many, False) - issue_s(one, False) == pytest.approx(16 * expert_us * US)
    assert issue_s(replace(many, separate=False), False) < issue_s(many, False)
    assert issue_s_of(load_framework("megatron-core-eager"), pace=1.5)(many, False) == 1.5 * issue_s(many, False)
