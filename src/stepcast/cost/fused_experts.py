"""Seconds of the fused experts of inference engines: permutation, two grouped products, activation, weighted sum.

    seconds = start + per routed row + per active expert + longest(computing, moving) + permuting

Computing takes the cheapest tile for the rows of each expert; moving reads the weights of active experts and the rows.
Constants are in data/fits/experts.toml by kernel and GPU architecture, fitted to public tables of vLLM's kernels
(tools/fit_experts.py), whose weights are constant and whose runs are short: a training step is slower.
"""

from functools import lru_cache

import numpy as np
from msgspec import Struct

from stepcast.cost.expert_loads import RankLoad
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.gpu import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dtype import DType
from stepcast.ir.tables import Amount, convert_table

# The format in which rows are multiplied, and the bytes of a weight with its scales.
EXPERT_FORMATS = {
    "bfloat16": (DType.BF16, 2.0),
    "fp8": (DType.FP8, 1.0),
    "fp8_block": (DType.FP8, 1.0),
    "int4_wo": (DType.BF16, 0.5),
    "nvfp4": (DType.NVFP4, 0.5625),
    "w4a16_mxfp4": (DType.BF16, 0.53),
    "w4a8_mxfp4_mxfp8": (DType.MXFP8, 0.53),
}


class FusedExpertsFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of one kernel on one architecture; the efficiencies of small tiles are over that of the largest."""

    start_s: Amount
    row_s: Amount
    efficiency: Amount
    memory_efficiency: Amount
    expert_s: Amount
    permute_passes: Amount
    tile_16: Amount
    tile_64: Amount
    sharpness: Amount


@lru_cache(maxsize=1)
def fused_experts_fits() -> dict[tuple[str, str], FusedExpertsFit]:
    """Return the constants by kernel and architecture."""
    tables = load_fit("experts")["kernels"]
    return {
        (kernel, architecture): convert_table(values, FusedExpertsFit)
        for kernel, of_kernel in tables.items()
        for architecture, values in of_kernel.items()
    }


def fused_experts_s(
    kernel: str,
    word: str,
    tokens: FloatArray,
    top_k: FloatArray,
    hidden: FloatArray,
    inner: FloatArray,
    matrices: FloatArray,
    loads: list[RankLoad],
    gpu: Gpu,
    fit: FusedExpertsFit | None = None,
) -> FloatArray:
    """Return the seconds of experts of *matrices* weights (2, or 3 with a gate) on the rank with these *loads*."""
    if fit is None:
        known = fused_experts_fits()
        if (kernel, gpu.architecture) not in known:
            raise ValueError(f"no constants of {kernel} on {gpu.architecture}")
        fit = known[kernel, gpu.architecture]
    if word not in EXPERT_FORMATS:
        raise ValueError(f"unknown format {word!r}; known are {', '.join(EXPERT_FORMATS)}")
    dtype, weight_bytes = EXPERT_FORMATS[word]
    peak = gpu.matrix_flops.get(dtype, gpu.matrix_flops[DType.BF16])
    rows, active = (np.array([getattr(load, name) for load in loads]) for name in ("rows", "active"))
    padded = np.array([load.padded for load in loads])
    tiled = np.min(padded / np.array([fit.tile_16, fit.tile_64, 1.0]), axis=1)
    compute_s = 2.0 * matrices * hidden * inner * tiled / (fit.efficiency * peak)
    row_bytes = rows * (2.0 * hidden + matrices * inner) * DType.BF16.bytes
    bandwidth = gpu.memory_bandwidth_bytes_per_s
    memory_s = (active * matrices * hidden * inner * weight_bytes + row_bytes) / (fit.memory_efficiency * bandwidth)
    longest_s = (compute_s**fit.sharpness + memory_s**fit.sharpness) ** (1.0 / fit.sharpness)
    permute_s = fit.permute_passes * (4.0 * tokens * hidden + row_bytes) / bandwidth
    seconds: FloatArray = fit.start_s + fit.row_s * tokens * top_k + fit.expert_s * active + longest_s + permute_s
    return seconds
