"""The rows that experts get: equal ones, a power law, or the shares of a measured histogram.

The slowest rank decides how long a layer takes: the one whose experts get most rows. A power law draws the load of each
expert independently from a density that falls as load^-alpha between 1 and 0.8 of the tokens, as aiconfigurator's
collector does for its tables (``power_law_1.2``); ranks hold neighbouring experts, and the draws are repeated.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stepcast.cost.price import Number
from stepcast.ir.arrays import FloatArray

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
    return [np.minimum(share * rows, tokens).tolist() for share in shares]


def skew_of(shares: Sequence[float], top_k: int, ranks: int, tokens: float, replicas: int = 0) -> tuple[float, float]:
    """Return the rows of the largest expert over the mean, and the blocks of rows that experts of the busiest rank
    fill over those of equal ones. An expert gets each token once at most; others get what it cannot.
    """
    rows = np.asarray(shares, dtype=np.float64)
    for _ in range(9):
        rows = np.minimum(rows * (tokens * top_k / rows.sum()), tokens)
    rows[np.argsort(-rows)[:replicas]] /= 2.0
    by_rank = np.round(rows).reshape(ranks, -1)
    busiest = by_rank[by_rank.sum(axis=1).argmax()]
    blocks = np.ceil(busiest / BLOCK_ROWS).mean() / max(1.0, np.ceil(np.round(busiest.mean()) / BLOCK_ROWS))
    return max(1.0, float(rows.max() * len(rows) / (tokens * top_k))), max(1.0, float(blocks))
