"""How long an operator takes on a GPU: the physical bound first, then what is learnt.

``compute_price`` prices one operator and says how sure it is; ``matmul_seconds``, ``attention_seconds`` and
``stream_seconds`` take arrays and price a million operators a second. All of them share the same formulas;
``products`` knows the matrix products that were priced before.

A ``Load`` says what the operator is part of: ALONE for one measured by itself, SUSTAINED for endless matrix
work, ``step_load(...)`` for a training step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from stepcast.cost.attention import AttentionFit, attention_s
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.dispatch import HOST_SPREAD
from stepcast.cost.memory_bound import stream_s
from stepcast.cost.moved import moved_bytes
from stepcast.cost.power import heated_s, slowdown
from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.cost.products import fit_of, matrix_of, product_s, products_of, scaled
from stepcast.cost.rates import Number, Rates, matrix_unit, vector_rates
from stepcast.cost.recurrent import PERSISTENT_STEP_S, cell_kernels, cell_launch_s
from stepcast.cost.scan import Scanned, scan_kind, scan_s, scanned_bytes
from stepcast.hardware.gpu import Gpu
from stepcast.ir.dtype import DType
from stepcast.ir.recurrent import DeltaRule, RecurrentCells, Scan, SelectiveScan
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul, Recorded


@dataclass(frozen=True, slots=True)
class Load:
    """What the operator is part of; it decides how hot the GPU is and whether launches queue up."""

    busy_s: float  # how long the work is kept up; 0: the operator by itself, cold caches, in short bursts
    duty: float = 1.0  # share of that time in matrix kernels, which draw the most power
    repeats: float = 1.0  # where busy_s is 0: how often in a row the operator runs
    # Power that all of it asks for at full clock, of what the board may draw; None: duty tells it.
    wanted: float | None = None

    def __post_init__(self) -> None:
        if not (self.busy_s >= 0 and 0 <= self.duty <= 1 and self.repeats >= 1):
            raise ValueError(f"a load needs busy_s >= 0, a duty within 0 and 1 and repeats >= 1, not {self}")


ALONE = Load(0.0)
SUSTAINED = Load(math.inf)


def step_load(works: Iterable[Compute], gpu: Gpu, fit: ComputeFit, busy_s: float = math.inf) -> Load:
    """The load that a sequence of operators makes: the share of its time that matrix kernels take."""
    return counted_load(Counter(works), gpu, fit, busy_s)


def counted_load(
    works: Mapping[Compute, int],
    gpu: Gpu,
    fit: ComputeFit,
    busy_s: float = math.inf,
    drawing: Mapping[Compute, int] | None = None,
) -> Load:
    """The same of operators that each run a number of times; of those *drawing* power alone, if given."""
    matrix_s, total_s, energy_s = cool_seconds(works, gpu, fit)
    if drawing is not None:
        energy_s = cool_seconds(drawing, gpu, fit)[2]
    return load_of(matrix_s, total_s, energy_s, gpu, fit, busy_s)


def cool_seconds(works: Mapping[Compute, int], gpu: Gpu, fit: ComputeFit) -> tuple[float, float, float]:
    """Seconds of a cool GPU in matrix kernels and in all, and those that the energy of the former would last
    at the power that the board may draw.
    """
    matrix_s = total_s = energy_s = 0.0
    products_of(gpu, fit).learn(works)
    price, power = priced_once(gpu, fit, cool_load(gpu, fit)), fit.power.of(gpu.architecture)
    for work, count in works.items():
        seconds = count * price(work).seconds
        total_s += seconds
        if isinstance(work, Matmul | GroupedMatmul | Attention):
            matrix_s += seconds
            energy = power.energy(gpu.architecture, gpu.runs_as(work.dtype))
            energy *= power.attention if isinstance(work, Attention) else 1.0
            energy_s += count * work.flops * energy / gpu.power_w
    return matrix_s, total_s, energy_s


def load_of(
    matrix_s: float, total_s: float, energy_s: float, gpu: Gpu, fit: ComputeFit, busy_s: float = math.inf
) -> Load:
    """The load of what ``cool_seconds`` told; to a thousandth, so that steps of much the same mix share their
    prices.
    """
    if total_s == 0:
        return Load(busy_s)
    duty, wanted = matrix_s / total_s, None
    if gpu.architecture in fit.power.measured:
        power = fit.power.of(gpu.architecture)
        wanted = duty * power.idle_share + energy_s / total_s + (1.0 - duty) * power.memory_share
    return Load(busy_s, round(duty, 3), wanted=None if wanted is None else round(wanted, 3))


def cool_load(gpu: Gpu, fit: ComputeFit) -> Load:
    """A step that leaves the GPU at full clock."""
    return Load(math.inf, 0.0, wanted=0.0 if gpu.architecture in fit.power.measured else None)


@lru_cache(maxsize=512)
def priced_once(gpu: Gpu, fit: ComputeFit, load: Load) -> Callable[[Compute], Price]:
    """Prices under one load that remember what they were asked, by the objects that they were asked of: to
    compare those takes longer. What draws little power is priced once for all steps.
    """
    known: dict[int, tuple[Compute, Price]] = {}
    cool = priced_once(gpu, fit, SUSTAINED) if load.busy_s > 0 and load != SUSTAINED else None

    @lru_cache(maxsize=65536)
    def equal(work: Compute) -> Price:
        return compute_price(work, gpu, fit, load)

    def price(work: Compute) -> Price:
        found = known.get(id(work))
        if found is None:
            if len(known) >= MOST_KNOWN:
                known.clear()
            found = known[id(work)] = (work, cool(work) if cool and isinstance(work, COOL) else equal(work))
        return found[1]

    return price


COOL = (Elementwise, Scan, Recorded)
"""Work that takes as long in one step as in another, however hot that makes the GPU."""
MOST_KNOWN = 65536


def compute_price(work: Compute, gpu: Gpu, fit: ComputeFit, load: Load = ALONE) -> Price:
    """The price of one operator."""
    match work:
        case Matmul() | GroupedMatmul():
            seconds = _loaded_s(products_of(gpu, fit).seconds(work), work.flops, work.dtype, gpu, fit, load)
            if isinstance(work, GroupedMatmul):
                seconds = seconds + fit.grouped_s * work.groups
            rates, unit = matrix_of(gpu, work.dtype), matrix_unit(gpu, work.dtype)
            return _priced(unit, float(seconds), work.flops, moved_bytes(work), rates, gpu, fit)
        case Attention():
            return _attention_price(work, gpu, fit, load)
        case Scan() | DeltaRule() | SelectiveScan():
            return _scan_price(work, gpu, fit, load)
        case RecurrentCells():
            return _cells_price(work, gpu, fit, load)
        case Elementwise():
            seconds = stream_seconds(
                stream_key(work), work.rows, work.columns, work.read_bytes, work.write_bytes, gpu, fit, load
            )
            moved, rates = moved_bytes(work), vector_rates(gpu)
            return _priced("stream", float(seconds), float(work.elements), moved, rates, gpu, fit)
        case Recorded():
            return Price(work.duration_s, PriceSource.MEASURED, Bound.COMPUTE, 1.0, work.duration_s, work.duration_s)


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
    seconds = product_s(m, n, k, batch, dtype, gpu, fit, grouped=grouped)
    seconds = _loaded_s(seconds, 2.0 * m * n * k * batch, dtype, gpu, fit, load)
    return seconds + fit.grouped_s * batch if grouped else seconds


def _loaded_s(seconds: Number, flops: Number, dtype: DType, gpu: Gpu, fit: ComputeFit, load: Load) -> Number:
    """*seconds* of products under the power that *load* leaves, and with their launch."""
    seconds = _under_power(seconds, flops, gpu, dtype, fit, load)
    return seconds + _launch_s(matrix_of(gpu, dtype), fit_of(gpu, dtype, fit).latency_s, fit, load)


# Heads wider than this run in kernels of other tiles.
USUAL_HEAD = 192


def attention_seconds(
    batch: Number,
    query_len: Number,
    key_len: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    value_dim: Number,
    causal: bool,
    backward: bool,
    dtype: DType,
    gpu: Gpu,
    fit: ComputeFit,
    load: Load = ALONE,
) -> Number:
    """Seconds of fused attention; sizes are numbers or arrays of one length."""
    rates = matrix_of(gpu, dtype)
    own: AttentionFit = fit.attention_backward if backward else fit.attention_forward
    if dtype.scaled:  # exponentials stay where they are: they cost as much as before, in more operations
        wider = gpu.matrix_peak_flops(dtype) / gpu.matrix_peak_flops(DType.BF16)
        own = replace(own, flops_per_score=own.flops_per_score * wider)
    sizes = (batch, query_len, key_len, heads, kv_heads, head_dim, value_dim)
    seconds = attention_s(*sizes, causal, backward, dtype.bytes, scaled(rates, gpu, fit), own)
    seconds = seconds * np.where(np.asarray(head_dim) > USUAL_HEAD, own.wide, 1.0)
    if load.busy_s > 0:
        seconds = seconds * own.in_step
    if not fit.measured("attention", gpu.architecture):
        seconds = seconds * _held_back(gpu, dtype)
    square = batch * heads * query_len * key_len * (0.5 if causal else 1.0)
    flops = square * (6.0 * head_dim + 4.0 * value_dim if backward else 2.0 * head_dim + 2.0 * value_dim)
    seconds = _under_power(seconds, flops, gpu, dtype, fit, load, attention=True)
    return seconds + _launch_s(rates, own.latency_s, fit, load)


# Of the peak that the best product published of an H200, on which attention was learnt, reaches.
BEST_SHARE = 794.5 / 989.4


def _held_back(gpu: Gpu, dtype: DType) -> float:
    """By how much less of its peak *gpu* reaches than the one that attention was learnt on, where that is
    known of its products: what holds those back, clocks under power first of all, holds attention back too.
    """
    return max(1.0, BEST_SHARE * gpu.matrix_peak_flops(dtype) / gpu.best_product_flops(dtype))


def stream_seconds(
    key: str,
    rows: Number,
    columns: Number,
    read_bytes: Number,
    write_bytes: Number,
    gpu: Gpu,
    fit: ComputeFit,
    load: Load = ALONE,
) -> Number:
    """Seconds of a memory-bound kernel of the kind *key* (see ``stream_key``)."""
    rates = vector_rates(gpu)
    own = fit.stream(key)
    seconds = stream_s(rows, columns, read_bytes, write_bytes, scaled(rates, gpu, fit), own)
    return seconds + _launch_s(rates, own.latency_s, fit, load)


def stream_key(work: Elementwise) -> str:
    """The kind by which the fit knows a memory-bound kernel.

    Widening casts run in a kernel without wide loads, and PyTorch has three softmax kernels by row length.
    """
    if work.kind is ElementwiseKind.CAST:
        if work.dtype.scaled:
            return "quantize"
        return "cast-up" if work.write_bytes > work.read_bytes else "cast"
    if work.kind is ElementwiseKind.SOFTMAX and not work.backward:
        # Rows of narrow formats that start anywhere, which no wide load can read: GPT-OSS's of 2,049.
        if work.columns > 1024 and work.columns % 2 and work.dtype.bytes < DType.FP32.bytes:
            return "softmax-odd"
        return softmax_key(work.columns)
    if work.kind in PLACED and work.dtype is DType.FP32:
        return f"{work.kind}-wide"
    return f"{work.kind}-backward" if work.backward else str(work.kind)


# Kernels with two elements a thread in fp32, and four in narrower formats.
PLACED = (ElementwiseKind.BROADCAST, ElementwiseKind.STRIDED)


def softmax_key(columns: int) -> str:
    """Up to 2,048 columns a warp keeps the row, beyond 1,024 at a lower rate; up to 9,216 the registers of a
    block, then its shared memory.

    Source: PyTorch 2.11, aten/src/ATen/native/cuda/SoftMax.cu, and where the times of the h200 set jump.
    """
    if columns <= 2048:
        return "softmax" if columns <= 1024 else "softmax-wide"
    return "softmax-registers" if columns <= 9216 else "softmax-shared"


def _attention_price(work: Attention, gpu: Gpu, fit: ComputeFit, load: Load) -> Price:
    sizes = (
        work.batch, work.query_len, work.key_len, work.heads, work.kv_heads, work.head_dim, work.value_dim
    )  # fmt: skip
    seconds = attention_seconds(*sizes, work.causal, work.backward, work.dtype, gpu, fit, load)
    own = fit.attention_backward if work.backward else fit.attention_forward
    seconds = seconds * (own.masked if work.masked else 1.0) * (own.dropping if work.drops else 1.0)
    rates = matrix_of(gpu, work.dtype)
    return _priced("attention", float(seconds), work.flops, moved_bytes(work), rates, gpu, fit)


def _cells_price(work: RecurrentCells, gpu: Gpu, fit: ComputeFit, load: Load) -> Price:
    """Of a persistent kernel, or of one product and one small kernel for each step, launched by the host."""
    rates = matrix_of(gpu, work.dtype)
    product, rest = cell_kernels(work)
    kernels_s = sum(compute_price(each, gpu, fit, load).seconds for each in (product, rest))
    step_s = PERSISTENT_STEP_S if work.is_persistent else max(kernels_s, cell_launch_s(work))
    seconds = work.steps * step_s
    weights = work.gates * work.hidden * work.width * work.dtype.bytes
    moved = weights + work.steps * (rest.read_bytes + rest.write_bytes)
    price = _priced("stream", seconds, work.flops, moved, rates, gpu, fit)
    waits = seconds > 1.01 * work.steps * kernels_s or work.is_persistent
    low_s, high_s = min(price.low_s, seconds / HOST_SPREAD), max(price.high_s, seconds * HOST_SPREAD)
    return replace(price, bound=Bound.LAUNCH if waits else price.bound, low_s=low_s, high_s=high_s)


def _scan_price(work: Scanned, gpu: Gpu, fit: ComputeFit, load: Load) -> Price:
    """Each of its kernels is launched by itself; they are too far from the peak to heat the GPU."""
    kind = scan_kind(work)
    own, rates = fit.scan(kind, work.backward), matrix_of(gpu, work.dtype)
    seconds = scan_s(work, rates.peak_flops, scaled(vector_rates(gpu), gpu, fit), own)
    seconds = seconds + own.kernels * _launch_s(rates, 0.0, fit, load)
    return _priced(kind, float(seconds), work.flops, scanned_bytes(work), rates, gpu, fit)


def _priced(kind: str, seconds: float, flops: float, moved: float, rates: Rates, gpu: Gpu, fit: ComputeFit) -> Price:
    ideal = {
        Bound.COMPUTE: flops / rates.peak_flops,
        Bound.MEMORY: moved / rates.bandwidth_bytes_per_s,
        Bound.LAUNCH: rates.launch_s,
    }
    bound = max(ideal, key=lambda name: ideal[name])
    spread = fit.half_width(kind, gpu.architecture)
    source = PriceSource.FITTED if fit.measured(kind, gpu.architecture) else PriceSource.SCALED
    efficiency = min(1.0, float(ideal[bound]) / seconds) if seconds > 0 else 1.0
    low_s, high_s = seconds / (1.0 + spread), seconds * (1.0 + spread)
    return Price(seconds, source, bound, efficiency, low_s, high_s)


def _under_power(
    seconds: Number, flops: Number, gpu: Gpu, dtype: DType, fit: ComputeFit, load: Load, attention: bool = False
) -> Number:
    """*seconds* of products as far as the power lasts, and no faster than anybody saw the GPU multiply."""
    power = fit.power.of(gpu.architecture)
    energy = power.energy(gpu.architecture, gpu.runs_as(dtype)) * (power.attention if attention else 1.0)
    if energy > 0.0:
        if load.wanted is not None and not attention:
            # Products that want more than the board may draw were heated when the fit's were measured.
            heating = power.idle_share + flops / seconds * energy / gpu.power_w > 1.0
            seconds = np.where(heating, power.cool.get(gpu.name, 1.0), 1.0) * seconds
        factor = (
            slowdown(flops / seconds, energy, gpu.power_w, load.duty, power)
            if load.wanted is None
            else max(1.0, load.wanted) ** power.exponent
        )
        busy_s = load.busy_s if load.busy_s > 0 else load.repeats * seconds
        seconds = heated_s(seconds, factor, busy_s, power)
    best = gpu.best_product_flops(dtype)
    return seconds if best == math.inf else np.maximum(seconds, flops / best)


def _launch_s(rates: Rates, latency_s: float, fit: ComputeFit, load: Load) -> Number:
    return fit.step_launch_s if load.busy_s > 0 else rates.launch_s + latency_s
