"""Operators of inference engines: bounds that hold for every GPU, and known rows of the public tables."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cost.experts import RankLoad, fused_experts_s
from stepcast.cost.power import Load
from stepcast.cost.price import Number
from stepcast.cost.serving import (
    LINEAR_FORMATS,
    decode_s,
    fit_for,
    linear_s,
    mla_decode_s,
    mla_prefill_s,
    prefill_s,
    quantize_s,
    stand_in,
)
from stepcast.hardware import Gpu, load_gpu
from stepcast.ir.types import replace

GPUS = ("a100-sxm-80gb", "h200", "b200", "gb300", "l40s", "rtx-pro-6000")


@given(
    st.sampled_from(GPUS),
    st.sampled_from(tuple(LINEAR_FORMATS)),
    st.integers(1, 8192),
    st.integers(64, 16384),
    st.integers(64, 16384),
)
@settings(max_examples=60, deadline=None)
def test_no_linear_layer_beats_the_hardware(name: str, recipe: str, m: int, n: int, k: int) -> None:
    gpu, form = load_gpu(name), LINEAR_FORMATS[recipe]
    if recipe not in fit_for(gpu).linear:
        with pytest.raises(ValueError, match="were not measured"):
            linear_s(m, n, k, gpu, recipe)
        return
    seconds = linear_s(m, n, k, gpu, recipe)
    peak = gpu.matrix_peak_flops(form.product if form.product in gpu.matrix_flops else "bf16")
    assert seconds > 2.0 * m * n * k / peak
    assert seconds > n * k * form.weight_bytes / gpu.memory_bandwidth_bytes_per_s
    assert linear_s(2 * m, n, k, gpu, recipe) > 0.95 * seconds
    assert linear_s(m, n, k, gpu, recipe, copies=1.0) <= seconds * 1.000001


@pytest.mark.parametrize("name", GPUS)
def test_decoding_reads_the_cache(name: str) -> None:
    gpu = load_gpu(name)
    for batch, context in ((1, 131072), (64, 4096), (512, 512)):
        moved = batch * context * 8 * 2 * 128 * 2.0
        seconds = decode_s(batch, context, 32, 8, 128, gpu)
        assert seconds > moved / gpu.memory_bandwidth_bytes_per_s
        assert decode_s(batch, context, 32, 8, 128, gpu, window=128.0) <= seconds
        assert mla_decode_s(batch, context, 16, gpu) > batch * context * 1152 / gpu.memory_bandwidth_bytes_per_s


def test_arrays_give_what_numbers_give() -> None:
    gpu, sizes = load_gpu("b200"), np.array([1.0, 64.0, 4096.0])
    functions: tuple[Callable[[Number], Number], ...] = (
        lambda rows: linear_s(rows, 4096.0, 4096.0, gpu, "fp8"),
        lambda rows: quantize_s(rows, 4096.0, gpu, "scale"),
        lambda rows: prefill_s(1.0, rows, 32.0, 8.0, 128.0, gpu, window=128.0),
        lambda rows: decode_s(rows, 1024.0, 32.0, 8.0, 128.0, gpu, "fp8"),
        lambda rows: mla_prefill_s(1.0, rows, 16.0, gpu),
        lambda rows: mla_decode_s(rows, 1024.0, 16.0, gpu, "fp8"),
    )
    for function in functions:
        assert np.asarray(function(sizes)) == pytest.approx([float(function(float(rows))) for rows in sizes])


def test_experts_that_fit_into_the_cache_are_read_from_it_and_wide_ones_are_read_again() -> None:
    gpu, kernel = load_gpu("l40s"), "vllm_unquantizedfusedmoe_triton_tritonexperts"

    def seconds(inner: float, rows: float, recent: float = math.inf, name: str = kernel, on: Gpu = gpu) -> float:
        load = RankLoad(np.array([rows]), np.array([1.0]), np.array([[rows] * 3]), np.array([1.0]))
        sizes = (np.array([rows]), 1.0, 4096.0, inner, 3.0)
        return float(fused_experts_s(name, "bfloat16", *sizes, load, on, recent=recent)[0])

    read_s = 3 * 4096 * 2048 * 2 / gpu.memory_bandwidth_bytes_per_s
    assert seconds(2048, 16) > read_s
    assert seconds(2048, 16, recent=1.0) < seconds(2048, 16) - 0.4 * read_s
    assert seconds(2048, 16, recent=64.0) == pytest.approx(seconds(2048, 16), rel=0.01)
    blackwell = ("vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts", load_gpu("b200"))
    wide, narrow = (seconds(inner, 4096, math.inf, *blackwell) for inner in (16384, 2048))
    assert wide > 1.3 * 8 * narrow


def test_short_prompts_of_latent_attention_stay_in_the_cache() -> None:
    """Queries, keys of 192, values of 128 and results of 16 heads are read and written once, at the memory's rate where
    there is no cache; an L40S was measured to hold them.
    """
    gpu = load_gpu("l40s")
    fit, moved = fit_for(gpu).mla_prefill["bf16"], 2 * 256 * 16 * (192 + 128) * 2
    inside_s, outside_s = (mla_prefill_s(1, 256, 16, replace(gpu, l2_bytes=size)) for size in (1 << 50, 1))
    assert fit.cached_share > 0 < fit.memory_exposure
    assert outside_s - inside_s == pytest.approx(fit.memory_exposure * moved / gpu.memory_bandwidth_bytes_per_s)


def test_kept_up_work_is_slower_than_a_burst() -> None:
    gpu = load_gpu("b200")
    assert linear_s(8192, 8192, 8192, gpu, load=Load(math.inf)) > 1.03 * linear_s(8192, 8192, 8192, gpu)


def test_known_rows() -> None:
    """Rows of TensorRT-LLM 1.3.0rc20, measured: milliseconds of a product, a prefill and a decode."""
    assert linear_s(8192, 16384, 4096, load_gpu("b200"), copies=5.0) * 1e3 == pytest.approx(0.660, rel=0.2)
    assert linear_s(8192, 7168, 6144, load_gpu("h200"), copies=5.0) * 1e3 == pytest.approx(0.899, rel=0.1)
    assert prefill_s(4, 4096, 64, 1, 64, load_gpu("b200"), window=128.0) * 1e3 == pytest.approx(0.4073, rel=0.1)
    assert decode_s(256, 4096, 4, 4, 128, load_gpu("h200")) * 1e3 == pytest.approx(0.4999, rel=0.15)


def test_unmeasured_architectures_have_a_stand_in() -> None:
    assert stand_in("hopper") == "hopper"
    assert stand_in("volta") == "ampere"
    assert linear_s(16, 4096, 4096, load_gpu("mi300x")) > 0
    with pytest.raises(ValueError, match="choose from bf16"):
        linear_s(16, 4096, 4096, load_gpu("h200"), "fp6")
