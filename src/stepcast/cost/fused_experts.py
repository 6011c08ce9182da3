"""Seconds of the fused experts of inference engines: permutation, two grouped products, activation, weighted sum.

    seconds = start + sorting + per active expert + depth + longest(computing, moving) + permuting + passes over rows

Computing takes the cheapest tile for the rows of each expert, or the tile that the kernel chooses by the number of
tokens (*default_tiles*); it is slower where the inputs do not stay in the L2 cache between experts (*cold*). Moving
reads the rows and the weights of active experts, which tiles of more rows read again where a matrix does not fit into
the L2 cache (*reread*). A tile waits for its first operands and multiplies its last ones alone, the longer its sums
(*depth_s*). Activation and sum also pass over rows that belong to experts of other ranks (*hidden_passes*,
*inner_passes*). Tokens are counted and sorted by expert in one thread block while they are few, and in ever more steps
(*sort_s*). Rows that the kernel before wrote, and weights that a call before read, come from the L2 cache while they
fit. Constants are in data/fits/experts.toml by kernel and GPU architecture, fitted to public tables of vLLM's kernels
(tools/fit_experts.py), whose weights are constant and whose runs are short: a training step is slower.
"""

from functools import lru_cache

import numpy as np
from msgspec import Struct

from stepcast.cost.expert_loads import RankLoad
from stepcast.cost.price import Number, cached_fraction
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.cluster import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.tables import Amount, Positive, constants, convert_table
from stepcast.ir.types import DType

WIDEST = 2**20  # above any inner width
REREAD_ROWS = 64.0  # of an expert that a pass over its weights serves, where TensorRT-LLM's kernels read them again

# The format in which rows are multiplied, and the bytes of a weight with its scales.
EXPERT_FORMATS: dict[str, tuple[str, float]] = constants("expert_formats")
# Recipe of linear layers (``cost.serving``) -> the format of experts, and the kernels that engines choose.
SERVED: dict[str, tuple[str, list[str]]] = constants("served_experts")


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
    cached_share: Positive  # of the L2 cache that weights and rows may fill
    cached_speedup: Positive
    depth_s: Amount  # for each element of the sums
    reread: Amount  # share of the weights
    sort_s: Amount  # for each doubling of the tokens
    cold: Amount = 0.0  # more time to compute rows of inputs that are not in the L2 cache
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
    for measured_on in (architecture, "hopper", "blackwell"):
        for kernel in kernels:
            if (kernel, measured_on) in known:
                return word, known[kernel, measured_on]
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
    recent: Number = np.inf,
) -> FloatArray:
    """Return the seconds of experts of *matrices* weights (2, or 3 with a gate) on ranks with these *load*s, whose
    fields are arrays with an entry for each of *tokens*.

    *recent* are the experts that are used before the same ones are again: in a loop over one layer few, and few are
    then in the L2 cache.
    """
    if fit is None:
        known = fused_experts_fits()
        if (kernel, gpu.architecture) not in known:
            raise ValueError(f"no constants of {kernel} on {gpu.architecture}")
        fit = known[kernel, gpu.architecture]
    if word not in EXPERT_FORMATS:
        raise ValueError(f"unknown format {word!r}; known are {', '.join(EXPERT_FORMATS)}")
    dtype, element_bytes = EXPERT_FORMATS[word]
    peak = gpu.matrix_flops.get(dtype, gpu.matrix_flops[DType.BF16])
    rows, active, padded, experts_held = (np.asarray(column) for column in load)
    by_tile = padded / np.array([fit.tile_16, fit.tile_64, 1.0])
    tiled = np.min(by_tile, axis=1)
    if fit.default_tiles:
        tuned = np.isin(experts_held * WIDEST + inner, [experts * WIDEST + width for experts, width in fit.tuned])
        tiled = np.where(tuned, tiled, np.where(tokens <= experts_held, by_tile[:, 0], by_tile[:, 1]))
    inputs = np.minimum(tokens, rows) * hidden * DType.BF16.bytes
    slower = 1.0 + fit.cold * (1.0 - cached_fraction(inputs, gpu, fit.cached_share, 2.0))
    compute_s = 2.0 * matrices * hidden * inner * tiled * slower / (fit.efficiency * peak)

    def moving_s(moved: Number, together: Number) -> Number:
        hit = cached_fraction(together, gpu, fit.cached_share, 4.0)
        return moved * (1.0 - hit + hit / fit.cached_speedup) / gpu.memory_bandwidth_bytes_per_s

    expert_bytes = matrices * hidden * inner * element_bytes
    row_bytes = rows * (2.0 * hidden + matrices * inner) * DType.BF16.bytes
    routed_bytes = tokens * top_k * (hidden + inner) * DType.BF16.bytes
    missed = 1.0 - cached_fraction(expert_bytes * (matrices - 1.0) / matrices, gpu, fit.cached_share, 2.0)
    passes = active + fit.reread * missed * (padded[:, 1] / REREAD_ROWS - active)
    read_bytes = (passes * expert_bytes + row_bytes) / fit.memory_efficiency
    memory_s = moving_s(read_bytes, recent * expert_bytes + routed_bytes)
    longest_s = (compute_s**fit.sharpness + memory_s**fit.sharpness) ** (1.0 / fit.sharpness)
    moved_bytes = fit.permute_passes * (4.0 * tokens * hidden + row_bytes)
    moved_bytes += DType.BF16.bytes * tokens * top_k * (fit.hidden_passes * hidden + fit.inner_passes * inner)
    started_s = (
        fit.start_s + fit.sort_s * np.log2(1.0 + tokens) + fit.expert_s * active + fit.depth_s * (hidden + inner)
    )
    seconds: FloatArray = started_s + longest_s + moving_s(moved_bytes, routed_bytes)
    return seconds
