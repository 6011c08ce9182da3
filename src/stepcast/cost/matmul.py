"""Seconds of a matrix multiply: tiles, waves, operand and result traffic.

The output is cut into tiles; each streaming multiprocessor works on one tile at a time, so the tiles run in
waves. Libraries hold many kernels and pick by heuristic; the fastest of a short list of tile shapes, each
with and without splitting the reduction over idle multiprocessors, represents that choice. For batched
products they hold fewer kernels, of other quality, so a fit may have constants of its own for these.

Rows that miss 16-byte boundaries must be loaded in narrow pieces: each operand byte costs more instructions,
and memory gives less.

The tile shapes are those seen in a PyTorch trace of an H200 (nvjet kernels) and the common smaller ones, and
for ordinary cores those that NeuSight recorded.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from stepcast.cost.fits import ComputeFit, MatmulFit
from stepcast.cost.power import ALONE, Load, launch_s, limit_power
from stepcast.cost.price import SIMT, Number, Rates, matrix_rates, matrix_unit, scale_rates
from stepcast.hardware.cluster import Gpu
from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.tables import constants
from stepcast.ir.types import DType, group_by_key
from stepcast.ir.work import Compute, GroupedMatmul, Matmul

LARGE = 8192.0  # rows, columns and depth of a product that fills any GPU
SMALLEST_SPLIT = 256  # a reduction is not cut into pieces shorter than this
CHUNK = 4096  # operators priced at once: the candidates of a chunk stay in the processor's cache
MOST_PRODUCTS = 65536  # remembered for each GPU


Product = Matmul | GroupedMatmul
MEASURED = constants("matmul")


def time_product(work: Product, gpu: Gpu, fit: ComputeFit, load: Load) -> float:
    seconds = _add_load(products_of(gpu, fit).seconds(work), work.flops, work.dtype, gpu, fit, load)
    if isinstance(work, Matmul) and work.swapped and work.dtype is DType.TF32 and gpu.architecture == "hopper":
        least_s = MEASURED["swapped_tf32"][min(work.swapped, 2)] * work.flops / gpu.matrix_peak_flops(work.dtype)
        seconds = np.maximum(seconds, least_s)
    if isinstance(work, GroupedMatmul):
        family = gpu.architecture.partition("-")[0]
        separate_s = MEASURED["separate_s"].get(family, 0.0) if work.separate else 0.0
        seconds = seconds * work.skew + (fit.grouped_s + separate_s) * work.groups
    return float(seconds)


def _sizes(work: Product) -> tuple[float, int, int, int]:
    """Return rows, columns, depth and number of products; those of experts share their rows."""
    if isinstance(work, Matmul):
        return work.m, work.n, work.k, work.batch
    return work.m / work.groups, work.n, work.k, work.groups


def matmul_seconds(
    m: Number,
    n: Number,
    k: Number,
    batch: Number,
    dtype: DType,
    gpu: Gpu,
    fit: ComputeFit,
    load: Load = ALONE,
    grouped: bool = False,
) -> Number:
    """Return the seconds of *batch* products (m, k) by (k, n), *grouped* into one kernel of several weights.

    Sizes are numbers or arrays of one length.
    """
    seconds = _unloaded_s(m, n, k, batch, dtype, gpu, fit, grouped)
    seconds = _add_load(seconds, 2.0 * m * n * k * batch, dtype, gpu, fit, load)
    return seconds + fit.grouped_s * batch if grouped else seconds


def _add_load(seconds: Number, flops: Number, dtype: DType, gpu: Gpu, fit: ComputeFit, load: Load) -> Number:
    """Return *seconds* of products under the power that *load* leaves, and with their launch."""
    seconds = limit_power(seconds, flops, gpu, dtype, fit, load)
    return seconds + launch_s(matrix_rates(gpu, dtype), _unit_fit(gpu, dtype, fit).latency_s, fit, load)


def _unit_fit(gpu: Gpu, dtype: DType, fit: ComputeFit, grouped: bool = False) -> MatmulFit:
    """Return the constants of the units that multiply this format; grouped products have none of a format."""
    if matrix_unit(gpu, dtype) == SIMT:
        return fit.simt_of.get(gpu.architecture, fit.simt)
    format_fit = None if grouped else fit.tensor_of.get(f"{gpu.architecture}-{gpu.runs_as(dtype)}")
    return format_fit or fit.tensor_of.get(gpu.architecture, fit.tensor)


def _peak_share(gpu: Gpu, dtype: DType, fit: ComputeFit, unit_fit: MatmulFit) -> float:
    """Return the factor on the peak of a format.

    Where no product was measured, a large one takes as long as the fastest one published; smaller ones reach less.
    """
    share, best = fit.efficiency_of(gpu.architecture, gpu.runs_as(dtype)), gpu.best_product_flops(dtype)
    if best == math.inf or fit.is_measured("tensor", gpu.architecture):
        return share
    rates = scale_rates(matrix_rates(gpu, dtype), gpu, fit)
    large_s = float(products_s(np.array([LARGE]), LARGE, LARGE, 1.0, dtype.bytes, rates, unit_fit)[0])
    return min(share, best * large_s / (2.0 * LARGE**3))


def _unloaded_s(
    m: Number, n: Number, k: Number, batch: Number, dtype: DType, gpu: Gpu, fit: ComputeFit, grouped: bool = False
) -> Number:
    """Return the seconds of *batch* products, or of one kernel for all of them, without power limit and launch."""
    unit_fit = _unit_fit(gpu, dtype, fit, grouped)
    share = _peak_share(gpu, dtype, fit, unit_fit)
    reached = scale_rates(matrix_rates(gpu, dtype), gpu, fit, share * (fit.grouped_efficiency if grouped else 1.0))
    seconds_of = matmul_s if grouped else products_s
    if isinstance(m, np.ndarray):
        return seconds_of(m, n, k, batch, dtype.bytes, reached, unit_fit)
    column: FloatArray = np.array([m], dtype=np.float64)
    return float(seconds_of(column, n, k, batch, dtype.bytes, reached, unit_fit)[0])


class Products:
    """The products of one GPU under one fit, without power limit and launch: each distinct one is priced once.

    Those of a step are priced together, a column for each size; one alone is a column of one.
    """

    def __init__(self, gpu: Gpu, fit: ComputeFit) -> None:
        self._gpu, self._fit = gpu, fit
        self._seconds: dict[Product, float] = {}

    def seconds(self, work: Product) -> float:
        if work not in self._seconds:
            self.learn((work,))
        return self._seconds[work]

    def learn(self, works: Iterable[Compute]) -> None:
        """Price those of *works* that are not known yet, all of a kind and format at once."""
        if len(self._seconds) >= MOST_PRODUCTS:
            self._seconds.clear()
        unknown = (work for work in works if isinstance(work, Product) and work not in self._seconds)
        for (kind, dtype), products in group_by_key(((type(work), work.dtype), work) for work in unknown).items():
            m, n, k, count = np.array([_sizes(work) for work in products], dtype=np.float64).T
            seconds = _unloaded_s(m, n, k, count, dtype, self._gpu, self._fit, kind is GroupedMatmul)
            assert isinstance(seconds, np.ndarray)
            self._seconds.update(zip(products, seconds.tolist(), strict=True))


@lru_cache(maxsize=64)
def products_of(gpu: Gpu, fit: ComputeFit) -> Products:
    return Products(gpu, fit)


def products_s(
    m: FloatArray, n: Number, k: Number, batch: Number, element_bytes: Number, rates: Rates, fit: MatmulFit
) -> FloatArray:
    """Return the seconds of *batch* products (m, k) by (k, n), by the constants for batched ones where these differ."""
    batched_fit = fit.batched
    if batched_fit is None:
        return matmul_s(m, n, k, batch, element_bytes, rates, fit)
    batched = batch > 1.0
    if not isinstance(batched, np.ndarray) or batched.all() or not batched.any():
        return matmul_s(m, n, k, batch, element_bytes, rates, batched_fit if np.any(batched) else fit)
    seconds = np.empty(m.shape)
    for part, kind in ((batched, batched_fit), (~batched, fit)):
        columns, depth, count, size, *own_rates = _take(part, n, k, batch, element_bytes, *rates)
        seconds[part] = matmul_s(m[part], columns, depth, count, size, Rates(*own_rates), kind)
    return seconds


def matmul_s(
    m: FloatArray, n: Number, k: Number, batch: Number, element_bytes: Number, rates: Rates, fit: MatmulFit
) -> FloatArray:
    """Return the seconds of *batch* products (m, k) by (k, n) without launch latency; all but m may be numbers."""
    if m.size <= CHUNK:
        return fastest_s(m, n, k, batch, element_bytes, rates, fit)
    pieces = []
    for start in range(0, m.size, CHUNK):
        part = slice(start, start + CHUNK)
        columns, depth, count, size, *own_rates = _take(part, n, k, batch, element_bytes, *rates)
        pieces.append(fastest_s(m[part], columns, depth, count, size, Rates(*own_rates), fit))
    return np.concatenate(pieces)


def _take(part: slice | BoolArray, *values: Number) -> list[Number]:
    return [value[part] if isinstance(value, np.ndarray) else value for value in values]


@lru_cache(maxsize=64)
def _candidates(tiles: tuple[tuple[int, int], ...]) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return heights, widths, areas and half circumferences of the tiles, one row per candidate."""
    height, width = np.array(tiles, dtype=np.float64).T[:, :, None]
    return height, width, height * width, height + width


def fastest_s(
    m: FloatArray,
    n: Number,
    k: Number,
    batch: Number,
    element_bytes: Number,
    rates: Rates,
    fit: MatmulFit,
    moved: Number | None = None,
) -> FloatArray:
    """Return the seconds of the fastest candidate, one result per size; *moved* are the bytes of operands and result
    where these are not stored as matrices (the windows of a convolution overlap).
    """
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
    if moved is None:
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
    """Return the number of tiles that one multiprocessor processes in turn."""
    if fit.partial_wave:
        waves = waves + fit.partial_wave * (np.ceil(waves) - waves)
    return np.maximum(1.0, waves)


def _either_s(compute_s: FloatArray, memory_s: Number) -> FloatArray:
    """Return a smooth maximum: computing and moving overlap except where they take equally long."""
    compute_2, memory_2 = compute_s * compute_s, memory_s * memory_s
    longer: FloatArray = np.sqrt(np.sqrt(compute_2 * compute_2 + memory_2 * memory_2))
    return longer


def _alignment(n: Number, k: Number, element_bytes: Number, fit: MatmulFit) -> tuple[Number, Number]:
    """Return factors on operand clocks and memory rate: the result's rows have n elements, an operand's k."""
    result, operand = n * element_bytes % 16, k * element_bytes % 16
    if not (np.any(result) or np.any(operand)):
        return 1.0, 1.0
    aligned, narrow = (result == 0) & (operand == 0), (result % 4 == 0) & (operand % 4 == 0)
    operands = np.where(aligned, 1.0, np.where(narrow, fit.unaligned_operands, fit.odd_operands))
    return operands, np.where(aligned, 1.0, np.where(narrow, fit.unaligned_memory, fit.odd_memory))
