"""Hosts that go on to the next step before one has ended, and updates of gradients that are zero."""

from dataclasses import replace

import pytest

from stepcast.forecast.predict import predict, predict_many
from stepcast.frameworks.catalog import load_profile
from stepcast.hardware import load_cluster
from stepcast.ir.framework import Execution, Framework, Kernels, Modules, Optimizer
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import DType
from stepcast.models.catalog import load_model
from stepcast.validate.scoreboard import split_phases_s, unseen_share

BF16 = DType.BF16
H200 = load_cluster("hgx-h200")
MODEL = load_model("llama-3.2-1b")
WAITING = Framework(
    gradient_dtype=BF16,
    optimizer=Optimizer(moment_dtype=BF16, master_weights=False, clips=False),
    kernels=Kernels.PLAIN,
    execution=Execution.EAGER,
)
AHEAD = replace(WAITING, runs_ahead=True)
GRAPHS = replace(WAITING, execution=Execution.GRAPHS)


def step_s(framework: Framework, seq: int, model: Model = MODEL, **further: float) -> float:
    return predict(model, H200, Strategy(Layout(), 1, 1, seq, **further), framework).step_s  # type: ignore[arg-type]


def test_a_host_ahead_hides_behind_a_gpu_that_has_more_to_do() -> None:
    """With much work a step takes what its kernels take; a host that waits adds what it needs at the start."""
    assert step_s(AHEAD, 8192) == pytest.approx(step_s(GRAPHS, 8192), rel=0.002)
    assert step_s(WAITING, 2048) > 1.05 * step_s(AHEAD, 2048)


def test_a_host_that_decides_issues_without_a_pause() -> None:
    """Beside the update of the step before, which one that waits for the GPU has to let pass."""
    few, many = (step_s(AHEAD, 64, replace(MODEL, layers=layers)) for layers in (40, 80))
    host_s = (many - few) / 40
    assert host_s > 1.5 * (step_s(GRAPHS, 64, replace(MODEL, layers=80)) / 80)
    waits = [step_s(WAITING, 64, replace(MODEL, layers=layers)) for layers in (40, 80)]
    updated_s = 5.2e-12 * (replace(MODEL, layers=80).parameters - replace(MODEL, layers=40).parameters) / 40
    assert (waits[1] - waits[0]) / 40 == pytest.approx(host_s + updated_s, rel=0.01)


def test_steps_ahead_are_the_same_together_and_by_themselves() -> None:
    strategies = [Strategy(Layout(), 1, 1, seq) for seq in (128, 1024, 4096)]
    found = [each.step_s for each in predict_many(MODEL, H200, strategies, AHEAD)]
    assert found == [predict(MODEL, H200, each, AHEAD).step_s for each in strategies]


def test_who_runs_ahead() -> None:
    """Traced steps: transformers reads a mask in each forward, but not where it is compiled."""
    ahead = {
        name: load_profile(name).framework.runs_ahead for name in ("pytorch", "transformers", "transformers-compiled")
    }
    assert ahead == {"pytorch": True, "transformers": False, "transformers-compiled": True}
    assert load_profile("transformers").framework.modules is Modules.TRANSFORMERS


def test_updates_of_zero_gradients_take_as_long_as_measured() -> None:
    """tools/measure_updates.py on an H200: 5.2 and 8.4 ps for each weight in bf16, 10.0 in fp32."""

    def update_s(zeros: float, dtype: DType) -> float:
        optimizer = replace(WAITING.optimizer, moment_dtype=dtype)
        framework = replace(WAITING, gradient_dtype=dtype, optimizer=optimizer)
        strategy = Strategy(Layout(), 1, 1, 8192, precision=dtype, zero_gradients=zeros)
        return split_phases_s(predict(MODEL, H200, strategy, framework))["optimizer"] / MODEL.parameters

    assert update_s(0, BF16) == pytest.approx(5.2e-12, rel=0.03)
    assert update_s(1, BF16) == pytest.approx(8.45e-12, rel=0.03)
    assert update_s(1, DType.FP32) == pytest.approx(9.9e-12, rel=0.05)
    assert update_s(0, BF16) < update_s(0.25, BF16) < update_s(1, BF16)


def test_products_of_zeros_leave_the_clock_alone() -> None:
    """The toy that learns nothing drew 320 W and had its backward in 0.89 of the time."""
    strategy = Strategy(Layout(), 4, 4, 4096)
    usual, idle = (
        split_phases_s(predict(MODEL, H200, each, WAITING))["backward"]
        for each in (strategy, replace(strategy, zero_gradients=1.0))
    )
    assert 0.88 <= idle / usual <= 0.98


def test_rows_of_an_embedding_that_no_batch_had() -> None:
    untied = replace(MODEL, tied=False)
    assert unseen_share(MODEL, 4096) == 0
    rows = untied.vocab * untied.hidden / untied.parameters
    assert unseen_share(untied, 1) == pytest.approx(rows, abs=1e-3)
    assert unseen_share(untied, untied.vocab) == pytest.approx(rows / 2.718, abs=1e-3)


def test_more_than_all_gradients_cannot_be_zero() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1\.5"):
        Strategy(Layout(), 1, 1, 128, zero_gradients=1.5)
