"""The rows that experts get, and the seconds of the fused experts of inference engines.

Rows are equal, a power law, or the shares of a measured histogram. The slowest rank decides how long a layer takes: the
one whose experts get most rows. A power law draws the load of each expert independently from a density that falls as
load^-alpha between 1 and 0.8 of the tokens, as aiconfigurator's collector does for its tables (``power_law_1.2``);
ranks hold neighbouring experts, and the draws are repeated.

Fused experts are permutation, two grouped products, activation and weighted sum:

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

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from stepcast.cost.price import Number, cached_fraction
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.cluster import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.tables import Amount, Positive, constants, convert_table
from stepcast.ir.types import DType, require

DRAWS = 6
MOST_SHARE = 0.8  # of the tokens that one expert gets before all are scaled to their sum
BLOCK_ROWS = 256  # rows of two tiles that run as one cluster in PyTorch's grouped products on Hopper (GroupMM.cu)
TILES = (16, 64, 128)  # rows of the tiles that fused kernels choose from


class RankLoad(NamedTuple):
    """The busiest expert rank, or columns of such: its rows, the experts that have any, its rows where each expert
    fills tiles of each size, and the experts that it holds.
    """

    rows: Number
    active: Number
    padded: tuple[float, ...] | FloatArray
    held: Number


def balanced_load(tokens: float, experts: float, top_k: float, ranks: float) -> RankLoad:
    groups = max(1.0, experts / ranks)
    rows = max(1.0, tokens * top_k / ranks)
    active = min(groups, rows)
    padded = tuple(float(np.ceil(rows / active / tile) * tile * active) for tile in TILES)
    return RankLoad(rows, active, padded, groups)


@lru_cache(maxsize=8192)
def power_law_shares(experts: int, alpha: float, most: float, draw: int) -> FloatArray:
    """Return the share of each expert in one draw of a power law between 1 and *most*."""
    uniform: FloatArray = np.random.default_rng(draw).random(experts)
    power = 1.0 - alpha if alpha != 1.0 else 1e-9
    loads = ((most**power - 1.0) * uniform + 1.0) ** (1.0 / power)
    shares: FloatArray = loads / loads.sum()
    return shares


@lru_cache(maxsize=8192)
def power_law_load(tokens: float, experts: int, top_k: int, ranks: int, alpha: float) -> RankLoad:
    """Return the mean over draws of the busiest of *ranks* that share *experts*."""
    # Where there are fewer rows than experts, loads differ by a factor of up to 200 around one row.
    largest = max(2.0, MOST_SHARE * tokens) if tokens * top_k > experts else 200.0
    groups = max(1, experts // ranks)
    loads = []
    for draw in range(DRAWS):
        shares = power_law_shares(experts, alpha, largest, draw)[: groups * ranks]
        rows = np.round(np.minimum(shares * tokens * top_k, tokens)).reshape(ranks, groups)
        rest = max(0.0, (tokens * top_k - rows.sum()) // ranks)
        busiest = fill_smallest(rows[rows.sum(axis=1).argmax()], rest, tokens)
        loads.append([busiest.sum(), (busiest > 0).sum(), *(np.ceil(busiest / tile).sum() * tile for tile in TILES)])
    total, active, *padded = np.mean(loads, axis=0).tolist()
    return RankLoad(total, active, tuple(padded), float(groups))


def fill_smallest(rows: FloatArray, rest: float, most: float) -> FloatArray:
    """Return *rows* of experts after the *rest* ones went one by one to the expert that has fewest, up to *most*."""
    order = np.argsort(rows)
    ascending = rows[order]
    levels = (ascending.cumsum() + rest) / np.arange(1, len(rows) + 1)
    level = np.floor(levels[np.append(ascending[1:] >= levels[:-1], True).argmax()])
    filled: FloatArray = np.maximum(rows, level)
    filled[order[: int(rows.sum() + rest - filled.sum())]] += 1.0
    return np.minimum(filled, most)


def busiest_share(shares: Sequence[float] | FloatArray, ranks: int, replicas: int = 0) -> float:
    """Return the rows of the busiest of *ranks* over their mean, for the *shares* of experts in the order of ranks.

    The *replicas* hottest experts have a second copy, which takes half of their rows, on the rank that has fewest then.
    """
    loads = np.asarray(shares, dtype=np.float64)
    if len(loads) % ranks:
        raise ValueError(f"{len(loads)} loads cannot be spread evenly over {ranks} expert-parallel ranks")
    groups = len(loads) // ranks
    totals = loads.reshape(ranks, groups).sum(axis=1)
    for expert in np.argsort(-loads)[:replicas].tolist():
        totals[expert // groups] -= loads[expert] / 2.0
        totals[totals.argmin()] += loads[expert] / 2.0
    return float(totals.max() / totals.mean())


def power_law_draws(experts: int, top_k: int, alpha: float, tokens: float) -> list[list[float]]:
    """Return the rows of each expert in several draws of a power law."""
    largest, rows = max(2.0, MOST_SHARE * tokens), tokens * top_k
    shares = (power_law_shares(experts, alpha, largest, draw) for draw in range(DRAWS))
    return [_cap_rows(share, rows, tokens).tolist() for share in shares]


def _cap_rows(loads: FloatArray, total: float, most: float) -> FloatArray:
    """Return *loads* scaled to *total* rows, at most *most* for each expert; the other experts get the rest."""
    for _ in range(9):
        loads = np.minimum(loads * (total / loads.sum()), most)
    return loads


def skew_of(shares: Sequence[float], top_k: int, ranks: int, tokens: float, replicas: int = 0) -> tuple[float, float]:
    """Return the rows of the largest expert over the mean, and the blocks of rows that experts of the busiest rank
    fill over those of equal ones. An expert gets each token once at most.
    """
    rows = _cap_rows(np.asarray(shares, dtype=np.float64), tokens * top_k, tokens)
    rows[np.argsort(-rows)[:replicas]] /= 2.0
    by_rank = np.round(rows).reshape(ranks, -1)
    busiest = by_rank[by_rank.sum(axis=1).argmax()]
    blocks = np.ceil(busiest / BLOCK_ROWS).mean() / max(1.0, np.ceil(np.round(busiest.mean()) / BLOCK_ROWS))
    return max(1.0, float(rows.max() * len(rows) / (tokens * top_k))), max(1.0, float(blocks))


WIDEST = 2**20  # above any inner width
REREAD_ROWS = 64.0  # of an expert that a pass over its weights serves, where TensorRT-LLM's kernels read them again

# The format in which rows are multiplied, and the bytes of a weight with its scales.
EXPERT_FORMATS: dict[str, tuple[str, float]] = constants("expert_formats")
# Recipe of linear layers (``cost.serving``) -> the kernels of experts that engines choose, each after its format.
SERVED: dict[str, list[tuple[str, str]]] = constants("served_experts")


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
    known = fused_experts_fits()
    for measured_on in (architecture, "hopper", "blackwell"):
        for word, kernel in SERVED.get(recipe, SERVED["fp8"]):
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
        require((kernel, gpu.architecture) in known, f"no constants of {kernel} on {gpu.architecture}")
        fit = known[kernel, gpu.architecture]
    require(word in EXPERT_FORMATS, f"unknown format {word!r}; known are {', '.join(EXPERT_FORMATS)}")
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
