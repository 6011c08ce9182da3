"""Compute prices: limits of the hardware, agreement of scalar and array use, what changes them and what may not."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from stepcast.cost.attention import AttentionSizes, attention_seconds
from stepcast.cost.compute import compute_price, step_load
from stepcast.cost.fits import FitError, compute_fit, default_fit, neusight_fit
from stepcast.cost.matmul import Products, matmul_seconds
from stepcast.cost.memory_bound import stream_key, stream_seconds
from stepcast.cost.power import ALONE, SUSTAINED, Load
from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.hardware.catalog import data_names, load_fit, load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul, Recorded

FIT = default_fit()
H200 = load_gpu("h200")
sizes = st.integers(1, 40_000)
DTYPES = (DType.FP32, DType.TF32, DType.FP16, DType.BF16, DType.FP8)  # those of an H200
dtypes = st.sampled_from(DTYPES)


def has_units(gpu: Gpu, dtype: DType) -> bool:
    """Return whether products in *dtype* run on *gpu*, in that format or a wider one."""
    try:
        return bool(gpu.matrix_peak_flops(dtype))
    except ValueError:
        return False


supported = st.sampled_from(
    [
        (gpu, dtype)
        for gpu in map(load_gpu, data_names("gpus"))
        for dtype in (*DTYPES, DType.NVFP4)
        if has_units(gpu, dtype)
    ]
)
loads = st.sampled_from([ALONE, SUSTAINED, Load(1e-2, 0.5)])


@given(m=sizes, n=sizes, k=sizes, on=supported, load=loads)
@settings(deadline=None)
def test_no_matmul_beats_the_hardware(m: int, n: int, k: int, on: tuple[Gpu, DType], load: Load) -> None:
    gpu, dtype = on
    work = Matmul(m, n, k, 1, dtype)
    price = compute_price(work, gpu, FIT, load)
    moved = (m * k + k * n + m * n) * dtype.bytes
    assert price.seconds >= work.flops / gpu.matrix_peak_flops(dtype)
    assert price.seconds >= moved / gpu.memory_bandwidth_bytes_per_s
    assert 0 < price.efficiency <= 1
    assert price.low_s < price.seconds < price.high_s


@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64))
@settings(deadline=None)
def test_more_rows_never_take_less_time(m: int, n: int, k: int, batch: int) -> None:
    small = compute_price(Matmul(m, n, k, batch), H200, FIT).seconds
    assert compute_price(Matmul(m + 1, n, k, batch), H200, FIT).seconds >= small * (1 - 1e-9)
    if batch > 1:  # one product runs in other kernels than several
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


@given(rows=st.integers(1, 100_000), columns=st.integers(1, 100_000), kind=st.sampled_from(list(ElementwiseKind)))
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


products = st.one_of(
    st.builds(Matmul, sizes, sizes, sizes, st.integers(1, 3), dtypes),
    st.builds(GroupedMatmul, sizes, sizes, sizes, st.integers(1, 64), dtypes),
)


@given(st.lists(products, min_size=1, max_size=20))
@settings(deadline=None)
def test_products_cost_the_same_in_any_company(works: list[Matmul | GroupedMatmul]) -> None:
    """Those of a step are priced in columns: to the last bit what each of them is priced alone."""
    together = Products(H200, FIT)
    together.learn(works)
    assert [together.seconds(work) for work in works] == [Products(H200, FIT).seconds(work) for work in works]


def test_long_arrays_are_priced_in_pieces_without_a_seam() -> None:
    m = np.arange(1.0, 20_001.0)
    all_at_once = np.asarray(matmul_seconds(m, m, m, np.ones_like(m), DType.BF16, H200, FIT))
    tail = matmul_seconds(m[4090:4100], m[4090:4100], m[4090:4100], np.ones(10), DType.BF16, H200, FIT)
    np.testing.assert_array_equal(all_at_once[4090:4100], tail)


def test_attention_and_streams_take_arrays() -> None:
    ones = np.ones(3)
    lengths = np.array([512.0, 4096.0, 32768.0])
    shape = (lengths, lengths, 32 * ones, 8 * ones, 128 * ones, 128 * ones)
    many = attention_seconds(AttentionSizes(ones, *shape), True, False, DType.BF16, H200, FIT)
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
    alone = step_load([matrix], H200, FIT)
    assert (alone.busy_s, alone.duty) == (SUSTAINED.busy_s, SUSTAINED.duty)
    assert 0.5 < step_load([matrix, stream], H200, FIT).duty < 1
    assert step_load([stream], H200, FIT).duty == 0


def test_rows_that_miss_16_byte_boundaries_are_slow() -> None:
    # Measured on an H200: 8192 x 50257 x 1280 takes 10.8 ms, 8192 x 50304 x 1280 takes 1.5 ms.
    odd = compute_price(Matmul(8192, 50257, 1280), H200, FIT, Load(0.1)).seconds
    padded = compute_price(Matmul(8192, 50304, 1280), H200, FIT, Load(0.1)).seconds
    assert odd == pytest.approx(10.82e-3, rel=0.25)
    assert padded == pytest.approx(1.512e-3, rel=0.13)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_one_array_may_hold_single_and_batched_products(dtype: DType) -> None:
    batch = np.array([1.0, 8.0, 1.0, 96.0])
    m, n, k = (np.array(values) for values in ([64.0, 2048, 4096, 1024], [512.0, 64, 4096, 1024], [96.0] * 4))
    together = np.asarray(matmul_seconds(m, n, k, batch, dtype, H200, FIT))
    alone = [
        compute_price(Matmul(int(a), int(b), int(c), int(d), dtype), H200, FIT).seconds
        for a, b, c, d in zip(m, n, k, batch, strict=True)
    ]
    np.testing.assert_allclose(together, alone)


def test_batched_products_stream_faster_than_the_constants_of_one_would_let_them() -> None:
    """The scores of 96 heads move 838 MB: 3.3 TB/s on an H200, not the 3.0 of a lone product's constants."""
    scores = Matmul(2048, 2048, 64, 96)
    lone = structs.replace(FIT, tensor=structs.replace(FIT.tensor, batched=None))
    assert compute_price(scores, H200, FIT).seconds == pytest.approx(250e-6, rel=0.1)
    assert compute_price(scores, H200, lone).seconds > 1.15 * compute_price(scores, H200, FIT).seconds


def test_older_libraries_cut_batched_fp32_products_into_large_tiles_alone() -> None:
    """A 16 x 16 result then costs as much as a 128 x 128 one."""
    a100 = load_gpu("a100-pcie-40gb")
    small, large = (
        compute_price(Matmul(size, size, 512, 1024, DType.FP32), a100, FIT, SUSTAINED).seconds for size in (16, 128)
    )
    assert small > 0.8 * large


def test_boards_of_little_power_fall_back_when_kept_busy() -> None:
    """NeuSight's T4 multiplies in fp32 at 0.35 to 0.5 of its peak, its V100 at 0.8 to 0.99."""
    work = Matmul(8192, 8192, 4096, 1, DType.FP32)
    for name, low, high in (("t4", 0.35, 0.5), ("v100-pcie-32gb", 0.8, 0.99), ("h200", 0.7, 0.8)):
        gpu = load_gpu(name)
        reached = work.flops / compute_price(work, gpu, FIT, SUSTAINED).seconds / gpu.matrix_peak_flops(DType.FP32)
        assert low <= reached <= high, name
    repeated = [compute_price(work, load_gpu("t4"), FIT, Load(0.0, repeats=n)).seconds for n in (1, 25, 1e6)]
    assert repeated == sorted(repeated)
    with pytest.raises(ValueError, match="a load needs"):
        Load(0.0, repeats=0.5)


def test_what_bounds_an_operator() -> None:
    assert compute_price(Matmul(8192, 8192, 8192), H200, FIT).bound is Bound.COMPUTE
    assert compute_price(Matmul(16, 8192, 8192), H200, FIT).bound is Bound.MEMORY
    assert compute_price(Matmul(16, 16, 16), H200, FIT).bound is Bound.LAUNCH
    grouped = GroupedMatmul(8 * 64, 14336, 4096, 8)
    assert compute_price(grouped, H200, FIT).bound is Bound.MEMORY


def test_unseen_architectures_are_less_certain() -> None:
    work = Matmul(4096, 4096, 4096)
    names = ("h100-sxm", "b200", "mi300x")
    seen, published, unseen = (compute_price(work, load_gpu(name), FIT) for name in names)
    assert unseen.high_s / unseen.seconds > published.high_s / published.seconds > seen.high_s / seen.seconds
    assert seen.source is published.source is PriceSource.FITTED
    assert unseen.source is PriceSource.SCALED


def test_small_products_reach_less_than_the_fastest_one_published() -> None:
    """On a GPU without measured products, as on one with them: 85 % of the fastest for experts of 512 rows."""

    def share(work: Matmul | GroupedMatmul, name: str) -> float:
        gpu = load_gpu(name)
        return work.flops / compute_price(work, gpu, FIT, SUSTAINED).seconds / gpu.best_product_flops(work.dtype)

    for name in ("mi300x", "mi355x"):
        assert share(Matmul(16384, 16384, 16384), name) == pytest.approx(1.0, abs=0.01)
        assert share(GroupedMatmul(16 * 512, 2816, 2048, 16), name) < 0.9
        assert share(Matmul(512, 2816, 2048), name) < share(Matmul(2048, 3072, 4096), name) < 0.99


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
        (ElementwiseKind.SOFTMAX, 2048, 1.0, 1.0, DType.BF16, "softmax-wide"),
        (ElementwiseKind.SOFTMAX, 2050, 1.0, 1.0, DType.BF16, "softmax-registers"),
        (ElementwiseKind.SOFTMAX, 9218, 1.0, 1.0, DType.BF16, "softmax-shared"),
        (ElementwiseKind.SOFTMAX, 2049, 1.0, 1.0, DType.BF16, "softmax-odd"),
        (ElementwiseKind.BROADCAST, 2048, 1.0, 1.0, DType.BF16, "broadcast"),
        (ElementwiseKind.BROADCAST, 2048, 1.0, 1.0, DType.FP32, "broadcast-wide"),
    ],
)
def test_stream_keys(kind: ElementwiseKind, columns: int, read: float, write: float, dtype: DType, key: str) -> None:
    assert stream_key(Elementwise(kind, 8, columns, read, write, False, dtype)) == key


def test_every_stream_of_the_fit_is_efficient_at_most_once() -> None:
    for fit in (FIT, neusight_fit()[0]):
        for stream in fit.streams.values():
            assert 0 < stream.bandwidth_efficiency <= 1


def test_a_fit_names_what_is_wrong_with_it() -> None:
    table = load_fit("compute")
    table["matmul"]["tensor"]["speed"] = 1.0
    with pytest.raises(FitError, match=r"tensor\.speed: unknown key"):
        compute_fit(table)
    table = load_fit("compute")
    del table["power"]
    with pytest.raises(FitError, match="power: is missing"):
        compute_fit(table)
    table = load_fit("compute")
    table["matmul"]["tensor"]["efficiency"] = 1.2
    with pytest.raises(ValueError, match=r"tensor\.efficiency: must be at most 1, not 1\.2"):
        compute_fit(table)
    table = load_fit("compute")
    table["matmul"]["tensor"]["odd_operands"] = 1.0
    with pytest.raises(ValueError, match="narrower loads must cost more"):
        compute_fit(table)
    table = load_fit("compute")
    table["matmul"]["simt_of"]["ampere"]["batched"]["tile"] = [[64, 64]]
    with pytest.raises(FitError, match=r"simt_of\.batched\.tile: unknown key"):
        compute_fit(table)


def test_a_price_checks_itself() -> None:
    with pytest.raises(ValueError, match="finite"):
        Price(-1.0, PriceSource.FITTED, Bound.COMPUTE, 1.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="cannot be outside"):
        Price(1.0, PriceSource.FITTED, Bound.COMPUTE, 1.0, 2.0, 3.0)
    assert Price.spread(3.0, PriceSource.FITTED, Bound.COMPUTE, 0.5).times(2.0) == Price(
        6.0, PriceSource.FITTED, Bound.COMPUTE, 0.5, 4.0, 9.0
    )


def test_masks_and_dropout_slow_each_pass_by_its_own_factor() -> None:
    forward = structs.replace(FIT.attention_forward, masked=2.0, dropping=3.0)
    backward_fit = structs.replace(FIT.attention_backward, masked=1.0, dropping=1.0)
    fit = structs.replace(FIT, attention_forward=forward, attention_backward=backward_fit)
    for backward, masked, drops, factor in ((False, True, False, 2), (False, True, True, 6), (True, True, True, 1)):
        work = Attention(8, 4096, 4096, 32, 32, 128, 128, backward=backward)
        changed = replace(work, masked=masked, drops=drops)
        plain_s, changed_s = (compute_price(each, H200, fit, ALONE).seconds for each in (work, changed))
        assert changed_s == pytest.approx(factor * plain_s, rel=0.01)


def test_element_wise_kernels_of_blackwell_wait_for_their_instructions() -> None:
    copy = Elementwise(ElementwiseKind.COPY, 65536, 4096, 2.0 * 65536 * 4096, 2.0 * 65536 * 4096, False, DType.BF16)
    moved_s = copy.read_bytes + copy.write_bytes
    for name, bound in (("h200", False), ("b200", True)):
        gpu = load_gpu(name)
        seconds = compute_price(copy, gpu, default_fit(), SUSTAINED).seconds
        assert (seconds > 1.3 * moved_s / gpu.memory_bandwidth_bytes_per_s) is bound
