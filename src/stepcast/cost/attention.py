"""Seconds of fused (flash) attention.

Work is counted in scores: each is a dot product of the head dimension, an exponential, and its share of the
weighted sum. The exponential runs on slower units, so it is charged as extra operations per score; that is
why small heads reach less of the peak. The multiprocessors take query tiles one by one, under a
causal mask of unequal length, and the last one to finish keeps the GPU waiting.

Operation counts: Dao, FlashAttention-2 (2023), section 3: two products forward, five backward.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from stepcast.cost.fits import AttentionFit, ComputeFit
from stepcast.cost.power import ALONE, Load, launch_s, limit_power
from stepcast.cost.price import Number, Rates, matrix_rates, scale_rates
from stepcast.hardware.cluster import Gpu
from stepcast.ir.tables import constants
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, attention_bytes

MEASURED = constants("attention")
QUERY_TILE: int = MEASURED["query_tile"]
FP32_TILE: int = MEASURED["fp32_tile"]
DEFAULT_HEAD: int = MEASURED["default_head"]  # wider heads run in kernels of other tiles
# Share of the peak that the best published product of an H200, on which attention was fitted, reaches.
BEST_SHARE: float = MEASURED["best_product"][0] / MEASURED["best_product"][1]


class AttentionSizes(NamedTuple):
    """Sizes of attention, each a number or an array of one length."""

    batch: Number
    query_len: Number
    key_len: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    value_dim: Number


def time_attention(work: Attention, gpu: Gpu, fit: ComputeFit, load: Load) -> float:
    sizes = AttentionSizes(*(getattr(work, name) for name in AttentionSizes._fields))
    seconds = attention_seconds(sizes, work.causal, work.backward, work.dtype, gpu, fit, load)
    pass_fit = fit.attention_backward if work.backward else fit.attention_forward
    if work.dtype.bytes < DType.FP32.bytes:  # in fp32 neither a mask nor dropout takes longer
        seconds = seconds * (pass_fit.masked if work.masked else 1.0) * (pass_fit.dropping if work.drops else 1.0)
    return float(seconds)


def attention_seconds(
    sizes: AttentionSizes, causal: bool, backward: bool, dtype: DType, gpu: Gpu, fit: ComputeFit, load: Load = ALONE
) -> Number:
    """Return the seconds of fused attention."""
    kind = causal, backward, dtype, gpu, fit, load.busy_s > 0
    unloaded = _unloaded_s if any(isinstance(size, np.ndarray) for size in sizes) else _unloaded_once_s
    seconds, flops = unloaded(sizes, *kind)
    seconds = limit_power(seconds, flops, gpu, dtype, fit, load, attention=True)
    pass_fit = fit.attention_backward if backward else fit.attention_forward
    return seconds + launch_s(matrix_rates(gpu, dtype), pass_fit.latency_s, fit, load)


def _unloaded_s(
    sizes: AttentionSizes, causal: bool, backward: bool, dtype: DType, gpu: Gpu, fit: ComputeFit, in_step: bool
) -> tuple[Number, Number]:
    """Return the seconds without power limit and launch, and the operations that draw power."""
    batch, query_len, key_len, heads, _, head_dim, value_dim = sizes
    rates = matrix_rates(gpu, dtype)
    pass_fit = fit.attention_backward if backward else fit.attention_forward
    if dtype.scaled:  # exponentials cost as much as before, which is more operations of the faster format
        wider = gpu.matrix_peak_flops(dtype) / gpu.matrix_peak_flops(DType.BF16)
        pass_fit = replace(pass_fit, flops_per_score=pass_fit.flops_per_score * wider)
        causal = causal and not (backward and gpu.architecture == "hopper")
    seconds = attention_s(sizes, causal, backward, dtype.bytes, scale_rates(rates, gpu, fit), pass_fit)
    seconds = seconds * np.where(np.asarray(head_dim) > DEFAULT_HEAD, pass_fit.wide, 1.0)
    if backward and gpu.architecture.startswith("blackwell"):
        seconds = seconds * np.where(np.asarray(head_dim) > QUERY_TILE, MEASURED["latent_backward"], 1.0)
    if dtype.scaled:
        seconds = seconds * MEASURED["scaled"].get(gpu.architecture, (1.0, 1.0))[backward]
    if in_step:
        seconds = seconds * pass_fit.in_step
    if not fit.is_measured("attention", gpu.architecture):
        # Where products are known to reach less of the peak than on the GPU that attention was fitted on, what
        # limits them, clocks under power first of all, limits attention too.
        seconds = seconds * max(1.0, BEST_SHARE * gpu.matrix_peak_flops(dtype) / gpu.best_product_flops(dtype))
    square = batch * heads * query_len * key_len * (0.5 if causal else 1.0)
    return seconds, square * (6.0 * head_dim + 4.0 * value_dim if backward else 2.0 * head_dim + 2.0 * value_dim)


_unloaded_once_s = lru_cache(maxsize=4096)(_unloaded_s)


def attention_s(
    sizes: AttentionSizes, causal: Number, backward: Number, element_bytes: Number, rates: Rates, fit: AttentionFit
) -> Number:
    """Return the seconds of one attention kernel (or the kernels of one backward) without launch latency."""
    batch, query_len, key_len, heads, _, head_dim, value_dim = sizes
    tile: Number = np.where(np.asarray(element_bytes) >= DType.FP32.bytes, FP32_TILE, QUERY_TILE)
    rows = np.ceil(query_len / tile) * tile
    keys = np.ceil(key_len / tile) * tile
    # A causal mask over as many queries as keys leaves half, and the tiles on the diagonal are complete.
    keys_attended = np.where(causal, np.maximum(keys - 0.5 * (rows - tile), 0.5 * (keys + tile)), keys)
    scores = batch * heads * rows * keys_attended
    # Those for fp32 compute 64 columns of a narrower head forward and 32 backward: heads of 8 took 1.9 and 1.5 times as
    # long as their width says.
    least: Number = np.where(tile == FP32_TILE, np.where(backward, 32, 64), 0)
    head, value = _tile_width(np.maximum(head_dim, least)), _tile_width(np.maximum(value_dim, least))
    flops = np.where(backward, 6.0 * head + 4.0 * value, 2.0 * head + 2.0 * value)
    rate = rates.peak_flops * fit.efficiency
    per_score_s = (flops + fit.flops_per_score) / rate
    longest_s = tile * keys * per_score_s * rates.sms
    memory_s: Number = attention_bytes(sizes, backward, element_bytes) / rates.bandwidth_bytes_per_s
    return scores * per_score_s + fit.tail * longest_s + fit.memory_exposure * memory_s


def _tile_width(width: Number) -> Number:
    """Return the effective width of heads: between 64 and 128 they run in tiles of 128, and half of the difference is
    time lost. Those of Phi-3, 96 wide, take 1.14 and 1.06 times as long as others of 128 for as many operations.
    """
    return np.where((np.asarray(width) > 64) & (np.asarray(width) < 128), (width + 128) / 2, width)
