"""Compute prices: limits of the hardware, agreement of scalar and array use, what changes them and what may not."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cost.compute import (
    ALONE,
    SUSTAINED,
    Load,
    attention_seconds,
    compute_price,
    matmul_seconds,
    step_load,
    stream_key,
    stream_seconds,
)
from stepcast.cost.compute_fit import FitError, compute_fit
from stepcast.cost.fits import default_fit, neusight_fit
from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.hardware.catalog import gpu_names, load_fit, load_gpu
from stepcast.ir.dtype import DType
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul, Recorded

FIT = default_fit()
H200 = load_gpu("h200")
sizes = st.integers(1, 40_000)
dtypes = st.sampled_from([DType.FP32, DType.TF32, DType.FP16, DType.BF16, DType.FP8, DType.NVFP4])
gpus = st.sampled_from([load_gpu(name) for name in gpu_names()])
loads = st.sampled_from([ALONE, SUSTAINED, Load(1e-2, 0.5)])


@given(m=sizes, n=sizes, k=sizes, dtype=dtypes, gpu=gpus, load=loads)
@settings(deadline=None)
def test_no_matmul_beats_the_hardware(m: int, n: int, k: int, dtype: DType, gpu: object, load: Load) -> None:
    work = Matmul(m, n, k, 1, dtype)
    price = compute_price(work, gpu, FIT, load)  # type: ignore[arg-type]
    moved = (m * k + k * n + m * n) * dtype.bytes
    assert price.seconds >= work.flops / gpu.matrix_peak_flops(dtype)  # type: ignore[attr-defined]
    assert price.seconds >= moved / gpu.memory_bandwidth_bytes_per_s  # type: ignore[attr-defined]
    assert 0 < price.efficiency <= 1
    assert price.low_s < price.seconds < price.high_s


@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64))
@settings(deadline=None)
def test_more_rows_never_take_less_time(m: int, n: int, k: int, batch: int) -> None:
    small = compute_price(Matmul(m, n, k, batch), H200, FIT).seconds
    assert compute_price(Matmul(m + 1, n, k, batch), H200, FIT).seconds >= small * (1 - 1e-9)
    assert compute_price(Matmul(m, n, k, batch + 1), H200, FIT).seconds >= small * (1 - 1e-9)


@given(
    batch=st.integers(1, 16),
    length=st.integers(1, 65_536),
    heads=st.sampled_from([(4, 1), (12, 12), (32, 8), (128, 8)]),
    dim=st.sampled_from([64, 128, 192]),
    causal=st.booleans(),
    backward=st.booleans(),
)
@settings(deadline=None)
def test_no_attention_beats_the_hardware(
    batch: int, length: int, heads: tuple[int, int], dim: int, causal: bool, backward: bool
) -> None:
    work = Attention(batch, length, length, *heads, dim, dim, causal, backward)
    price = compute_price(work, H200, FIT)
    assert price.seconds >= work.flops / H200.matrix_peak_flops(DType.BF16)
    whole = replace(work, causal=False)
    assert compute_price(whole, H200, FIT).seconds >= price.seconds * (1 - 1e-9)


@given(
    rows=st.integers(1, 100_000), columns=st.integers(1, 100_000), kind=st.sampled_from(list(ElementwiseKind))
)
@settings(deadline=None)
def test_no_memory_bound_kernel_beats_the_memory(rows: int, columns: int, kind: ElementwiseKind) -> None:
    moved = 2.0 * rows * columns
    price = compute_price(Elementwise(kind, rows, columns, moved, moved), H200, FIT)
    assert price.seconds >= 2 * moved / H200.memory_bandwidth_bytes_per_s


@given(st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=40), dtypes)
@settings(deadline=None)
def test_arrays_and_numbers_give_the_same_seconds(shapes: list[tuple[int, int, int]], dtype: DType) -> None:
    m, n, k = (np.array(column, dtype=float) for column in zip(*shapes, strict=True))
    many = matmul_seconds(m, n, k, np.ones_like(m), dtype, H200, FIT)
    one = [compute_price(Matmul(*shape, 1, dtype), H200, FIT).seconds for shape in shapes]
    np.testing.assert_allclose(many, one, rtol=1e-12)


def test_long_arrays_are_priced_in_pieces_without_a_seam() -> None:
    m = np.arange(1.0, 20_001.0)
    all_at_once = np.asarray(matmul_seconds(m, m, m, np.ones_like(m), DType.BF16, H200, FIT))
    tail = matmul_seconds(m[4090:4100], m[4090:4100], m[4090:4100], np.ones(10), DType.BF16, H200, FIT)
    np.testing.assert_array_equal(all_at_once[4090:4100], tail)


def test_attention_and_streams_take_arrays() -> None:
    ones = np.ones(3)
    lengths = np.array([512.0, 4096.0, 32768.0])
    shape = (lengths, lengths, 32 * ones, 8 * ones, 128 * ones, 128 * ones)
    many = attention_seconds(ones, *shape, True, False, DType.BF16, H200, FIT)
    work = Attention(1, 4096, 4096, 32, 8, 128, 128)
    assert np.asarray(many)[1] == pytest.approx(compute_price(work, H200, FIT).seconds)
    stream = stream_seconds("add", lengths, lengths, 4 * lengths**2, 2 * lengths**2, H200, FIT)
    assert np.all(np.diff(np.asarray(stream)) > 0)


def test_a_busy_gpu_is_slower_the_more_matrix_work_it_does() -> None:
    work = Matmul(8192, 8192, 8192)
    seconds = [compute_price(work, H200, FIT, Load(inf, duty)).seconds for duty in (0.2, 0.8, 1.0)]
    assert seconds[0] < seconds[1] < seconds[2]
    # Measured: about 670 TFLOP/s when the GPU has been busy for seconds, against 790 in bursts.
    assert work.flops / seconds[2] == pytest.approx(670e12, rel=0.04)
    assert work.flops / seconds[0] > 740e12


def test_the_duty_of_a_step_is_its_share_of_matrix_time() -> None:
    matrix, stream = Matmul(8192, 8192, 8192), Elementwise(ElementwiseKind.ADD, 8192, 8192, 1e9, 1e9)
    assert step_load([matrix], H200, FIT) == SUSTAINED
    assert 0.5 < step_load([matrix, stream], H200, FIT).duty < 1
    assert step_load([stream], H200, FIT).duty == 0


def test_rows_that_miss_16_byte_boundaries_are_slow() -> None:
    # Measured on an H200: 8192 x 50257 x 1280 takes 10.8 ms, 8192 x 50304 x 1280 takes 1.5 ms.
    odd = compute_price(Matmul(8192, 50257, 1280), H200, FIT, Load(0.1)).seconds
    padded = compute_price(Matmul(8192, 50304, 1280), H200, FIT, Load(0.1)).seconds
    assert odd == pytest.approx(10.82e-3, rel=0.25)
    assert padded == pytest.approx(1.512e-3, rel=0.1)


def test_what_bounds_an_operator() -> None:
    assert compute_price(Matmul(8192, 8192, 8192), H200, FIT).bound is Bound.COMPUTE
    assert compute_price(Matmul(16, 8192, 8192), H200, FIT).bound is Bound.MEMORY
    assert compute_price(Matmul(16, 16, 16), H200, FIT).bound is Bound.LAUNCH
    grouped = GroupedMatmul(8 * 64, 14336, 4096, 8)
    assert compute_price(grouped, H200, FIT).bound is Bound.MEMORY


def test_unseen_architectures_are_less_certain() -> None:
    work = Matmul(4096, 4096, 4096)
    seen, unseen = (compute_price(work, load_gpu(name), FIT) for name in ("h100-sxm", "b200"))
    assert unseen.high_s / unseen.seconds > seen.high_s / seen.seconds
    assert seen.source is PriceSource.FITTED


def test_a_recorded_time_is_its_own_price() -> None:
    price = compute_price(Recorded(0.25), H200, FIT)
    assert (price.seconds, price.source) == (0.25, PriceSource.MEASURED)


@pytest.mark.parametrize(
    ("kind", "columns", "read", "write", "dtype", "key"),
    [
        (ElementwiseKind.CAST, 8, 2.0, 4.0, DType.BF16, "cast-up"),
        (ElementwiseKind.CAST, 8, 4.0, 2.0, DType.BF16, "cast"),
        (ElementwiseKind.CAST, 8, 4.0, 1.0, DType.FP8, "quantize"),
        (ElementwiseKind.SOFTMAX, 1024, 1.0, 1.0, DType.BF16, "softmax"),
        (ElementwiseKind.SOFTMAX, 1025, 1.0, 1.0, DType.BF16, "softmax-registers"),
        (ElementwiseKind.SOFTMAX, 9217, 1.0, 1.0, DType.BF16, "softmax-shared"),
    ],
)
def test_stream_keys(
    kind: ElementwiseKind, columns: int, read: float, write: float, dtype: DType, key: str
) -> None:
    assert stream_key(Elementwise(kind, 8, columns, read, write, False, dtype)) == key


def test_every_stream_of_the_fit_is_efficient_at_most_once() -> None:
    for fit in (FIT, neusight_fit()[0]):
        for stream in fit.streams.values():
            assert 0 < stream.bandwidth_efficiency <= 1


def test_a_fit_names_what_is_wrong_with_it() -> None:
    table = load_fit("compute")
    table["matmul"]["tensor"]["speed"] = 1.0
    with pytest.raises(FitError, match=r"matmul\.tensor\.speed is not known"):
        compute_fit(table)
    table = load_fit("compute")
    del table["power"]
    with pytest.raises(FitError, match="'power' is missing"):
        compute_fit(table)
    table = load_fit("compute")
    table["matmul"]["tensor"]["efficiency"] = 1.2
    with pytest.raises(ValueError, match="between 0 and 1"):
        compute_fit(table)


def test_a_price_checks_itself() -> None:
    with pytest.raises(ValueError, match="finite"):
        Price(-1.0, PriceSource.FITTED, Bound.COMPUTE, 1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="cannot lie outside"):
        Price(1.0, PriceSource.FITTED, Bound.COMPUTE, 1.0, 2.0, 3.0)
