"""A host that waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING)."""

from dataclasses import replace

import pytest

from stepcast.forecast.predict import predict
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.framework import Execution, Framework
from stepcast.ir.layout import Layout
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import NO_OVERLAP, Strategy
from stepcast.models.catalog import load_model

MODEL, CLUSTER = load_model("gpt3-175b"), load_cluster("dgx-a100")


def report(execution: Execution, micro_batch: int = 1, micro_batches: int = 4, layers: int = 8) -> StepReport:
    model = replace(MODEL, layers=layers)
    batch = micro_batch * micro_batches
    strategy = Strategy(Layout(tp=8), micro_batch=micro_batch, global_batch=batch, seq=2048, overlap=NO_OVERLAP)
    return predict(model, CLUSTER, strategy, Framework(execution=execution)).report


def waits_s(**sizes: int) -> float:
    return report(Execution.BLOCKING, **sizes).step_s - report(Execution.EAGER, **sizes).step_s


def test_large_kernels_hide_a_host_that_runs_ahead_and_none_that_waits() -> None:
    ahead, waiting = report(Execution.EAGER), report(Execution.BLOCKING)
    assert ahead.stages[0].host_s < 0.02 * ahead.step_s
    assert 0.03 * waiting.step_s < waiting.stages[0].host_s


def test_waiting_costs_as_much_for_large_micro_batches_as_for_small_ones() -> None:
    assert waits_s(micro_batch=4) == pytest.approx(waits_s(micro_batch=1), rel=0.05)


def test_waiting_costs_as_often_as_kernels_are_issued() -> None:
    assert waits_s(micro_batches=8) == pytest.approx(2 * waits_s(micro_batches=4), rel=0.05)
    assert waits_s(layers=16) == pytest.approx(2 * waits_s(layers=8), rel=0.15)
