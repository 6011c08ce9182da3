"""Host-bound execution, and calibration by a user's measurements."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cost.calibration import Calibration, CalibrationError, Correction, calibration, fit_correction
from stepcast.cost.compute import compute_price, work_class
from stepcast.cost.fits import default_dispatch, default_fit
from stepcast.cost.host import elapsed_s
from stepcast.cost.power import SUSTAINED
from stepcast.cost.price import PriceSource
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul

times = st.lists(st.floats(1e-7, 1e-2), min_size=1, max_size=30)


@given(times, st.floats(0, 1e-3))
def test_neither_the_gpu_nor_the_host_can_be_beaten(kernels: list[float], issue_s: float) -> None:
    elapsed = elapsed_s(kernels, [issue_s] * len(kernels))
    assert elapsed >= sum(kernels) * (1 - 1e-12)
    assert elapsed >= issue_s * len(kernels) * (1 - 1e-12)
    assert elapsed <= (sum(kernels) + issue_s * len(kernels)) * (1 + 1e-12)


def test_the_host_hides_behind_long_kernels_only() -> None:
    assert elapsed_s([1e-3] * 4, [1e-5] * 4) == pytest.approx(4e-3)
    assert elapsed_s([1e-6] * 4, [1e-5] * 4) == pytest.approx(4e-5)
    # Small kernels first leave the GPU idle: the long one starts when it is issued.
    assert elapsed_s([1e-6, 1e-6, 1e-6, 1e-3], [1e-5] * 4) == pytest.approx(3e-5 + 1e-3)
    assert elapsed_s([], []) == 0


def test_backward_is_issued_by_another_engine() -> None:
    fit = default_dispatch()
    assert fit.issue_s(Matmul(1, 1, 1), backward=False) == fit.heavy_s
    assert fit.issue_s(Matmul(1, 1, 1), backward=True) == fit.backward_heavy_s
    light = Elementwise(ElementwiseKind.ADD, 1, 1, 4, 2)
    assert fit.issue_s(light, backward=False) < fit.heavy_s


@given(st.floats(0.5, 3), st.floats(-0.15, 0.15), st.floats(5e-6, 5e-5))
@settings(deadline=None, max_examples=10)
def test_a_correction_finds_the_constants_behind_its_points(factor: float, slope: float, least_s: float) -> None:
    predicted = np.geomspace(1e-6, 1e-1, 20)
    truth = Correction(factor, slope, least_s)
    measured = np.asarray(truth.applied_s(predicted))
    found = fit_correction(predicted, measured)
    between = np.geomspace(3e-5, 5e-2, 50)
    error = np.asarray(found.applied_s(between)) / np.asarray(truth.applied_s(between)) - 1
    assert np.abs(error).mean() < 0.05


def test_a_calibrated_price_says_so() -> None:
    gpu, fit, work = load_gpu("a100-sxm-80gb"), default_fit(), Matmul(4096, 4096, 4096)
    plain = compute_price(work, gpu, fit)
    own = calibration({"gpu": "a100-sxm-80gb", "class": {"matmul.bf16": {"factor": 2.0, "spread": 0.1}}})
    price = own.price(work, gpu, fit)
    assert price.source is PriceSource.CALIBRATED
    assert price.seconds == pytest.approx(2 * plain.seconds)
    assert price.high_s == pytest.approx(1.1 * price.seconds)
    assert own.price(Matmul(4, 4, 4, 2), gpu, fit).source is PriceSource.FITTED
    assert work_class(Matmul(4, 4, 4, 2)) == "bmm.bf16"


def test_the_least_time_holds_for_a_lone_operator_only() -> None:
    gpu, fit, work = load_gpu("h200"), default_fit(), Matmul(64, 64, 64)
    own = Calibration("h200", {"matmul.bf16": Correction(1.0, 0.0, 1e-4)})
    assert own.price(work, gpu, fit).seconds >= 1e-4
    assert own.price(work, gpu, fit, SUSTAINED).seconds < 1e-5


def test_a_calibration_names_what_is_wrong_with_it() -> None:
    with pytest.raises(CalibrationError, match=r"my\.toml: expected gpu"):
        calibration({}, "my.toml")
    with pytest.raises(CalibrationError, match="class 'add'"):
        calibration({"gpu": "h200", "class": {"add": {"speed": 1.0}}}, "my.toml")
    with pytest.raises(CalibrationError, match="at least two"):
        fit_correction(np.array([1.0]), np.array([1.0]))
    with pytest.raises(CalibrationError, match="above zero"):
        fit_correction(np.array([1.0, 2.0]), np.array([1.0, 0.0]))
    with pytest.raises(CalibrationError, match="factor above 0"):
        Correction(-1.0)
    assert math.isfinite(Correction(1.0).applied_s(1e-3))
