"""Forecasts of mixtures whose experts a host issues, and of what is recomputed of them."""

from dataclasses import replace

import pytest

from stepcast.forecast.predict import predict
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.dtype import DType
from stepcast.ir.layout import Layout
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import Execution, Overlap, Recompute, RecomputeKind, RecomputeModule, Strategy
from stepcast.models.catalog import load_model

QWEN = load_model("qwen3-30b-a3b")
# Few tokens and many experts on each rank: what a host can hardly keep up with.
SMALL = Strategy(Layout(ep=2, dp=8, expert_tp=1), 1, 32, 1024, precision=DType.MXFP8)


def step(**changes: object) -> StepReport:
    return predict(QWEN, load_cluster("dgx-b200"), replace(SMALL, **changes)).report  # type: ignore[arg-type]


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
