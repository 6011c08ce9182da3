"""Seconds of a matrix multiply: tiles, waves, operand and result traffic.

The output is cut into tiles; each streaming multiprocessor works on one tile at a time, so the tiles run in
waves. Libraries hold many kernels and pick by heuristic; the fastest of a short list of tile shapes, each
with and without splitting the reduction over idle multiprocessors, stands for that choice. For batched
products they hold fewer kernels, of other quality, so a fit may have constants of its own for these.

Rows that miss 16-byte boundaries must be loaded in narrow pieces: each operand byte costs more instructions,
and memory gives less.

The tile shapes are those seen in a PyTorch trace of an H200 (nvjet kernels) and the common smaller ones, and
for ordinary cores those that NeuSight recorded.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from stepcast.cost.rates import Number, Rates
from stepcast.ir.arrays import FloatArray

SMALLEST_SPLIT = 256  # a reduction is not cut into pieces shorter than this
CHUNK = 4096  # operators priced at once: the candidates of a chunk stay in the processor's cache


@dataclass(frozen=True, slots=True)
class MatmulFit:
    """What is learnt from measurements. Efficiencies are at most 1, so that no price beats the hardware."""

    efficiency: float  # of the peak, in the inner loop of a tile
    operand_clocks: float  # of a multiprocessor, to bring one operand byte from shared memory to its cores
    store_exposure: float  # share of writing a tile that nothing hides
    memory_efficiency: float  # of the memory bandwidth
    reread: float  # share of operand traffic that goes to memory once a wave's panels overflow the L2 cache
    unaligned_operands: float  # times the operand clocks when rows miss 16-byte boundaries
    odd_operands: float  # when they miss even 4-byte boundaries
    unaligned_memory: float  # of the memory efficiency when rows miss 16-byte boundaries
    odd_memory: float  # when they miss even 4-byte boundaries
    partial_wave: float  # 1: a partly filled last wave costs a whole one; 0: only what it holds
    split_s: float  # summing the pieces of a split reduction
    latency_s: float  # beyond the launch
    k_step: int  # a tile walks the reduction in steps of this length
    tiles: tuple[tuple[int, int], ...]
    batched: "MatmulFit | None" = None  # where batched products differ

    def __post_init__(self) -> None:
        for name in ("efficiency", "memory_efficiency", "reread", "unaligned_memory", "odd_memory", "partial_wave"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)!r}")
        if not 1 <= self.unaligned_operands <= self.odd_operands:
            raise ValueError("narrower loads must cost more: 1 <= unaligned_operands <= odd_operands")
        if not self.tiles:
            raise ValueError("a matmul fit needs at least one tile shape")


def products_s(
    m: FloatArray, n: Number, k: Number, batch: Number, element_bytes: Number, rates: Rates, fit: MatmulFit
) -> FloatArray:
    """Seconds of *batch* products (m, k) by (k, n), by the constants for batched ones where these differ."""
    own = fit.batched
    if own is None:
        return matmul_s(m, n, k, batch, element_bytes, rates, fit)
    batched = batch > 1.0
    if not isinstance(batched, np.ndarray) or batched.all() or not batched.any():
        return matmul_s(m, n, k, batch, element_bytes, rates, own if np.any(batched) else fit)
    seconds = np.empty(m.shape)
    for part, kind in ((batched, own), (~batched, fit)):
        columns, depth, count, size = (_part(each, part) for each in (n, k, batch, element_bytes))
        own_rates = _part_of_rates(rates, part)
        seconds[part] = matmul_s(m[part], columns, depth, count, size, own_rates, kind)
    return seconds


def matmul_s(
    m: FloatArray, n: Number, k: Number, batch: Number, element_bytes: Number, rates: Rates, fit: MatmulFit
) -> FloatArray:
    """Seconds of *batch* products (m, k) by (k, n), launch latency left out; all but m may be numbers."""
    if m.size <= CHUNK:
        return _fastest_s(m, n, k, batch, element_bytes, rates, fit)
    pieces = []
    for start in range(0, m.size, CHUNK):
        part = slice(start, start + CHUNK)
        columns, depth, count, size = (_part(each, part) for each in (n, k, batch, element_bytes))
        own_rates = _part_of_rates(rates, part)
        pieces.append(_fastest_s(m[part], columns, depth, count, size, own_rates, fit))
    return np.concatenate(pieces)


def _part(value: Number, part: Any) -> Number:
    return value[part] if isinstance(value, np.ndarray) else value


def _part_of_rates(rates: Rates, part: Any) -> Rates:
    return Rates(*(_part(rate, part) for rate in rates))


@lru_cache(maxsize=64)
def _candidates(tiles: tuple[tuple[int, int], ...]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Heights, widths, areas and half circumferences of the tiles, one row per candidate."""
    height, width = np.array(tiles, dtype=np.float64).T[:, :, None]
    return height, width, height * width, height + width


def _fastest_s(
    m: FloatArray, n: Number, k: Number, batch: Number, element_bytes: Number, rates: Rates, fit: MatmulFit
) -> FloatArray:
    """The fastest candidate, one result per size."""
    height, width, area, side = _candidates(fit.tiles)
    sms = rates.sms
    tiles = np.ceil(m / height) * np.ceil(n / width) * batch
    operands, memory = _alignment(n, k, element_bytes, fit)
    rate = rates.peak_flops * fit.efficiency / sms
    # Seconds of one step along the reduction: per element of the tile, and per element of its operands.
    per_area_s = 2.0 * fit.k_step / rate
    per_side_s = fit.k_step * fit.operand_clocks * operands * element_bytes / rates.clock_hz
    store_s = fit.store_exposure * element_bytes * sms / rates.bandwidth_bytes_per_s
    memory_rate = rates.bandwidth_bytes_per_s * fit.memory_efficiency * memory
    moved = (m * k + k * n + m * n) * batch * element_bytes
    if fit.reread:
        panels = tiles * side * (k * element_bytes)  # operand bytes all tiles ask the L2 cache for
        wave = panels / np.sqrt(np.maximum(1.0, np.minimum(tiles, sms))) / np.maximum(1.0, tiles / sms)
        moved = moved + fit.reread * panels * wave / (wave + 2.0 * rates.l2_bytes)

    steps = np.ceil(k / fit.k_step)
    compute_s = _waves(tiles / sms, fit) * (area * (steps * per_area_s + store_s) + side * (steps * per_side_s))
    # Without rereads the traffic is the same for every tile shape, so the choice needs no square roots.
    if not fit.reread:
        compute_s = compute_s.min(axis=0, keepdims=True)
    seconds: FloatArray = _either_s(compute_s, moved / memory_rate).min(axis=0)

    idle = tiles.min(axis=0) <= sms / 2.0
    if not idle.any():
        return seconds
    pieces = np.clip(np.floor(sms / tiles), 1.0, np.maximum(1.0, k // SMALLEST_SPLIT))
    steps = np.ceil(k / (fit.k_step * pieces))
    compute_s = _waves(tiles * pieces / sms, fit) * (
        area * (steps * per_area_s + store_s) + side * (steps * per_side_s)
    )
    partial = pieces * (8.0 * m * n * batch)  # fp32 partial sums, written and read
    split_s = _either_s(compute_s, (moved + partial) / memory_rate) + fit.split_s
    fastest_split: FloatArray = np.where(pieces > 1.0, split_s, np.inf).min(axis=0)
    return np.minimum(seconds, fastest_split)


def _waves(waves: FloatArray, fit: MatmulFit) -> FloatArray:
    """How many tiles one multiprocessor works through."""
    if fit.partial_wave:
        waves = waves + fit.partial_wave * (np.ceil(waves) - waves)
    return np.maximum(1.0, waves)


def _either_s(compute_s: FloatArray, memory_s: Number) -> FloatArray:
    """A smooth maximum: computing and moving overlap except where they take equally long."""
    compute_2, memory_2 = compute_s * compute_s, memory_s * memory_s
    longer: FloatArray = np.sqrt(np.sqrt(compute_2 * compute_2 + memory_2 * memory_2))
    return longer


def _alignment(n: Number, k: Number, element_bytes: Number, fit: MatmulFit) -> tuple[Number, Number]:
    """Factors on operand clocks and memory rate: the result's rows have n elements, an operand's k."""
    result, operand = n * element_bytes % 16, k * element_bytes % 16
    if not (np.any(result) or np.any(operand)):
        return 1.0, 1.0
    aligned, narrow = (result == 0) & (operand == 0), (result % 4 == 0) & (operand % 4 == 0)
    operands = np.where(aligned, 1.0, np.where(narrow, fit.unaligned_operands, fit.odd_operands))
    return operands, np.where(aligned, 1.0, np.where(narrow, fit.unaligned_memory, fit.odd_memory))


def matmul_bytes(m: Number, n: Number, k: Number, batch: Number, element_bytes: Number) -> Number:
    """Operands read once and the result written once."""
    return (m * k + k * n + m * n) * batch * element_bytes
