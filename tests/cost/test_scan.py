"""Prices of Mamba-2's scan, convolution and norm by groups: measured ones, and what must hold of any."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stepcast.cost.compute import compute_price, work_class
from stepcast.cost.fits import FitError, ScanFit, compute_fit, default_fit
from stepcast.cost.memory_bound import stream_s
from stepcast.cost.power import ALONE, SUSTAINED
from stepcast.cost.price import PriceSource, vector_rates
from stepcast.cost.scan_and_convolution import scan_s
from stepcast.hardware.catalog import load_fit, load_gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.recurrent import Scan
from stepcast.ir.tables import convert_table
from stepcast.ir.types import DType
from tests.cost.mamba_rows import cases

H200 = load_gpu("h200")
SMALL = Scan(batch=1, seq=1024, heads=16, head_dim=64, state=128, groups=2, chunk=128)


def error(predicted: list[float], measured: list[float]) -> FloatArray:
    off: FloatArray = np.abs(np.array(predicted) / np.array(measured) - 1)
    return off


# What the fit reaches, with a little room: mean and largest error of 40 cases.
@pytest.mark.parametrize(("backward", "mean", "most"), [(False, 0.085, 0.19), (True, 0.047, 0.12)])
def test_scan_times_are_those_of_the_h200(backward: bool, mean: float, most: float) -> None:
    fit, rates = default_fit().scan("scan", backward), vector_rates(H200)
    peak = H200.matrix_peak_flops(DType.BF16)
    predicted = [float(scan_s(case.scan(backward), peak, rates, fit)) for case in cases()]
    off = error(predicted, [case.scan_s(backward) for case in cases()])
    assert len(off) == 40
    assert off.mean() < mean
    assert off.max() < most


@pytest.mark.parametrize(
    ("key", "phase", "kernel", "mean"),
    [
        ("convolution", "forward", "causal_conv1d_channellast_fwd_kernel", 0.06),
        ("convolution-backward", "both", "causal_conv1d_channellast_bwd_kernel", 0.07),
        ("group-norm", "forward", "_layer_norm_fwd_1pass_kernel", 0.10),
        ("group-norm-backward", "both", "_layer_norm_bwd_kernel", 0.17),
    ],
)
def test_kernels_around_the_scan(key: str, phase: str, kernel: str, mean: float) -> None:
    fit, rates = default_fit(), vector_rates(H200)
    assert key in fit.streams
    predicted = []
    for case in cases():
        tokens, inner = (case.sizes["batch"] * case.sizes["seq"], case.sizes["heads"] * case.sizes["head_dim"])
        groups = case.sizes["groups"]
        rows, columns = tokens, inner + 2 * groups * case.sizes["state"]
        if key.startswith("group"):
            rows, columns = tokens * groups, inner // groups
        moved = rows * columns * 2.0
        read = moved * (2 if key.endswith("backward") else 1)
        predicted.append(float(stream_s(rows, columns, read, moved, rates, fit.stream(key))))
    measured = [case.kernel_s[phase, kernel] for case in cases()]
    assert error(predicted, measured).mean() < mean


def test_flops_are_those_of_the_chunked_form() -> None:
    """Written out product by product, chunk by chunk: (rows, columns, inner length) each."""
    scan = Scan(batch=2, seq=512, heads=8, head_dim=64, state=32, groups=2, chunk=128)
    chunks, q, p, n, heads, groups = 8, 128, 64, 32, 8, 2
    forward = chunks * (groups * 2 * q * q * n + heads * (2 * p * n * q + 2 * q * p * n + q * q * p))
    assert scan.flops == forward
    again = chunks * (groups * 2 * q * q * n + heads * 2 * p * n * q)
    through_states = 4 * 2 * q * p * n  # gradients of states, x, B and C
    within = 3 * q * q * p  # half a square each: x, C B^T, decay
    own = chunks * (heads * (through_states + within) + groups * 2 * 2 * q * q * n)
    assert replace(scan, backward=True).flops == again + own


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_more_work_takes_longer(batch: int, chunks: int, grown: int, backward: bool) -> None:
    small = replace(SMALL, batch=batch, seq=128 * chunks, backward=backward)
    fit = default_fit()
    least = compute_price(small, H200, fit, SUSTAINED).seconds
    for change in (
        {"seq": small.seq * (1 + grown)},
        {"heads": small.heads * (1 + grown)},
        {"state": small.state * (1 + grown)},
    ):
        assert compute_price(replace(small, **change), H200, fit, SUSTAINED).seconds > least  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", ["h200", "h100-sxm", "b200", "a100-sxm-80gb", "mi300x"])
@pytest.mark.parametrize("backward", [False, True])
def test_no_price_beats_the_hardware(gpu: str, backward: bool) -> None:
    found = load_gpu(gpu)
    price = compute_price(replace(SMALL, backward=backward), found, default_fit(), SUSTAINED)
    work = replace(SMALL, backward=backward)
    assert price.seconds >= work.moved_bytes / found.memory_bandwidth_bytes_per_s
    assert price.seconds >= work.flops / found.matrix_peak_flops(DType.BF16)
    assert price.source is (PriceSource.FITTED if found.architecture == "hopper" else PriceSource.SCALED)
    assert price.low_s < price.seconds < price.high_s


def test_unmeasured_architectures_are_less_sure() -> None:
    def width(name: str) -> float:
        price = compute_price(SMALL, load_gpu(name), default_fit(), SUSTAINED)
        return price.high_s / price.low_s

    assert width("b200") > width("h200")


def test_backward_takes_several_times_the_forward() -> None:
    big = replace(SMALL, seq=8192)
    forward = compute_price(big, H200, default_fit(), SUSTAINED).seconds
    backward = compute_price(replace(big, backward=True), H200, default_fit(), SUSTAINED).seconds
    assert 2.5 < backward / forward < 5


def test_alone_its_kernels_are_launched_one_by_one() -> None:
    alone = compute_price(SMALL, H200, default_fit(), ALONE).seconds
    within = compute_price(SMALL, H200, default_fit(), SUSTAINED).seconds
    kernels = default_fit().scan("scan", False).kernels
    launch = H200.launch_overhead_s - default_fit().step_launch_s
    assert alone - within == pytest.approx(kernels * launch)


def test_bytes_count_what_chunks_hand_on() -> None:
    """Half the chunk length: twice the states, half the chunk products; all else stays."""
    longer, shorter = SMALL.moved_bytes, replace(SMALL, chunk=64).moved_bytes
    states = SMALL.states * (4 + 4 + 2 + 2)  # made, read, handed on rounded, read
    products = SMALL.squares * (4 + 4)
    assert shorter - longer == pytest.approx(states - products / 2)


def test_a_fit_without_the_scan_says_so() -> None:
    with pytest.raises(FitError, match="scan is missing"):
        compute_price(SMALL, H200, compute_fit(load_fit("compute")))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="heads 3 is not a multiple of groups 2"):
        replace(SMALL, heads=3)
    with pytest.raises(ValueError, match="chunk"):
        replace(SMALL, chunk=0)
    good = structs.asdict(ScanFit(1, 0.5, 1.0, 1.0, 0.0))
    with pytest.raises(ValueError, match="must be at most 1"):
        convert_table({**good, "bandwidth_efficiency": 1.5}, ScanFit)
    with pytest.raises(ValueError, match="must be at least 0"):
        convert_table({**good, "input_clocks": -1.0}, ScanFit)


def test_it_is_calibrated_as_a_class_of_its_own() -> None:
    assert work_class(SMALL) == "scan.forward"
    assert work_class(replace(SMALL, backward=True)) == "scan.backward"


def test_bytes_of_states_and_of_inputs() -> None:
    """Of each state forward: written in fp32, read and rounded by the pass, read by the output (4 + 4 + 2 + 2 bytes).
    Backward: made again (4 + 8), its gradient written (4), passed back with it (2 x 6), read for three gradients (6).

    Of tensors like the input forward: read for states and output, with the gate and two results (5). Backward: for
    states (1), the gate (5), gradients of states (1), inputs (3), B and C (2) and of products and decays (4).
    """
    states = replace(SMALL, state=10_000, groups=1, chunk=1)
    inputs = replace(SMALL, heads=256, head_dim=2048, state=1, groups=1, chunk=64)
    for backward, of_states, of_inputs in ((False, 12, 5), (True, 34, 16)):
        assert replace(states, backward=backward).moved_bytes / states.states == pytest.approx(of_states, rel=0.01)
        assert replace(inputs, backward=backward).moved_bytes / inputs.inputs == pytest.approx(2 * of_inputs, rel=0.03)
