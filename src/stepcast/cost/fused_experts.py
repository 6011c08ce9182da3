"""Seconds of the fused experts of inference engines: permutation, two grouped products, activation, weighted sum.

    seconds = start + per active expert + longest(computing, moving) + permuting + passes over all routed rows

Computing takes the cheapest tile for the rows of each expert, or the tile that the kernel chooses by the number of
tokens (*default_tiles*); it is slower where the inputs do not stay in the L2 cache between experts (*cold*). Moving
reads the weights of active experts and the rows.
Activation and sum also pass over rows that belong to experts of other ranks (*hidden_passes*, *inner_passes*).
Constants are in data/fits/experts.toml by kernel and GPU architecture, fitted to public tables of vLLM's kernels
(tools/fit_experts.py), whose weights are constant and whose runs are short: a training step is slower.
"""

from functools import lru_cache

import numpy as np
from msgspec import Struct

from stepcast.cost.expert_loads import RankLoad
from stepcast.cost.price import Number
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.cluster import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dtype import DType
from stepcast.ir.tables import Amount, Positive, convert_table

WIDEST = 2**20  # above any inner width

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


# The kernels that engines choose for a recipe of linear layers (``cost.serving``), the fastest first.
SERVED = {
    "bf16": ("bfloat16", ("vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts", "vllm_fused_moe",
                          "vllm_unquantizedfusedmoe_triton_tritonexperts", "vllm_xpu_moe")),
    "fp8": ("fp8", ("vllm_fp8moe_flashinfer_trtllm_trtllmfp8expertsmodular", "vllm_fp8moe_triton_tritonexperts",
                    "vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts")),
    "nvfp4": ("nvfp4", ("vllm_compressedtensorsw4a4nvfp4moe_flashinfer_trtllm_trtllmnvfp4expertsmonolithic",
                        "vllm_compressedtensorsw4a4nvfp4moe_flashinfer_cutlass_flashinferexperts",
                        "vllm_compressedtensorswna16marlinmoe_marlin_marlinexperts")),
    "int4-weights": ("int4_wo", ("vllm_compressedtensorswna16marlinmoe_marlin_marlinexperts",)),
}  # fmt: skip


class FusedExpertsFit(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of one kernel on one architecture; the efficiencies of small tiles are over that of the largest."""

    start_s: Amount
    hidden_passes: Amount
    inner_passes: Amount
    efficiency: Amount
    memory_efficiency: Amount
    expert_s: Amount
    permute_passes: Amount
    tile_16: Amount
    tile_64: Amount
    sharpness: Amount
    cold: Amount = 0.0  # more time to compute rows of inputs that are not in the L2 cache
    cached_share: Positive = 1.0  # of the L2 cache that inputs may fill
    # Tiles of 16 rows for up to as many tokens as experts, of 64 for more: vLLM's get_default_config. Shapes (experts
    # of a rank, inner width) that vLLM ships tuned tiles for have the cheapest.
    default_tiles: bool = False
    tuned: tuple[tuple[int, int], ...] = ()


@lru_cache(maxsize=1)
def fused_experts_fits() -> dict[tuple[str, str], FusedExpertsFit]:
    """Return the constants by kernel and architecture."""
    tables = load_fit("experts")["kernels"]
    return {
        (kernel, architecture): convert_table(values, FusedExpertsFit)
        for kernel, of_kernel in tables.items()
        for architecture, values in of_kernel.items()
    }


def served_kernel(recipe: str, architecture: str) -> tuple[str, FusedExpertsFit]:
    """Return the format and the constants of the experts that engines run for a *recipe* of linear layers: the first
    of its kernels that was measured on *architecture*, or on Hopper.
    """
    word, kernels = SERVED.get(recipe, SERVED["fp8"])
    known = fused_experts_fits()
    for own in (architecture, "hopper", "blackwell"):
        for kernel in kernels:
            if (kernel, own) in known:
                return word, known[kernel, own]
    raise ValueError(f"no constants of experts in {recipe}")


def fused_experts_s(
    kernel: str,
    word: str,
    tokens: Number,
    top_k: Number,
    hidden: Number,
    inner: Number,
    matrices: Number,
    load: RankLoad,
    gpu: Gpu,
    fit: FusedExpertsFit | None = None,
) -> FloatArray:
    """Return the seconds of experts of *matrices* weights (2, or 3 with a gate) on ranks with these *load*s, whose
    fields are arrays with an entry for each of *tokens*.
    """
    if fit is None:
        known = fused_experts_fits()
        if (kernel, gpu.architecture) not in known:
            raise ValueError(f"no constants of {kernel} on {gpu.architecture}")
        fit = known[kernel, gpu.architecture]
    if word not in EXPERT_FORMATS:
        raise ValueError(f"unknown format {word!r}; known are {', '.join(EXPERT_FORMATS)}")
    dtype, weight_bytes = EXPERT_FORMATS[word]
    peak = gpu.matrix_flops.get(dtype, gpu.matrix_flops[DType.BF16])
    rows, active, padded, held = (np.asarray(column) for column in load)
    by_tile = padded / np.array([fit.tile_16, fit.tile_64, 1.0])
    tiled = np.min(by_tile, axis=1)
    if fit.default_tiles:
        tuned = np.isin(held * WIDEST + inner, [experts * WIDEST + width for experts, width in fit.tuned])
        tiled = np.where(tuned, tiled, np.where(tokens <= held, by_tile[:, 0], by_tile[:, 1]))
    inputs = np.minimum(tokens, rows) * hidden * DType.BF16.bytes / (fit.cached_share * gpu.l2_bytes)
    slower = 1.0 + fit.cold * inputs**2 / (1.0 + inputs**2)
    compute_s = 2.0 * matrices * hidden * inner * tiled * slower / (fit.efficiency * peak)
    row_bytes = rows * (2.0 * hidden + matrices * inner) * DType.BF16.bytes
    bandwidth = gpu.memory_bandwidth_bytes_per_s
    memory_s = (active * matrices * hidden * inner * weight_bytes + row_bytes) / (fit.memory_efficiency * bandwidth)
    longest_s = (compute_s**fit.sharpness + memory_s**fit.sharpness) ** (1.0 / fit.sharpness)
    moved_bytes = fit.permute_passes * (4.0 * tokens * hidden + row_bytes)
    moved_bytes += DType.BF16.bytes * tokens * top_k * (fit.hidden_passes * hidden + fit.inner_passes * inner)
    seconds: FloatArray = fit.start_s + fit.expert_s * active + longest_s + moved_bytes / bandwidth
    return seconds
