"""Seconds of kernels that mostly move memory: element-wise, norms, softmax, embedding, optimizer, copies.

A streaming kernel takes the longer of moving its bytes and issuing its instructions (fused into one smooth
maximum). A kernel that normalises rows gives each row to one thread block: a row takes time in proportion
to its length however few rows there are, and a row too long to stay in the cache between the passes over
it is read once more.
"""

from collections.abc import Mapping

import numpy as np

from stepcast.cost.fits import ComputeFit, StreamFit
from stepcast.cost.power import ALONE, Load, launch_s
from stepcast.cost.price import Number, Rates, scale_rates, vector_rates
from stepcast.hardware.cluster import Gpu
from stepcast.ir.tables import constants
from stepcast.ir.types import DType
from stepcast.ir.work import Elementwise, ElementwiseKind

BLOCKS_PER_SM = 16  # resident thread blocks of 128 threads, one row each (2,048 threads per multiprocessor)
# Elements per clock of a multiprocessor that plain element-wise kernels issue at most, and the bytes that each reads.
ISSUED = constants("memory_bound")
PLAIN = frozenset({"add", "mul", "silu", "cast", "copy", "other"})
# Formats with a kernel of their own: fp32 with two elements a thread, narrower ones have four; batch norms of cuDNN.
WIDE, HALF = "-wide", "-half"
OWN_KERNELS: Mapping[ElementwiseKind, Mapping[DType, str]] = {
    ElementwiseKind.BROADCAST: {DType.FP32: WIDE},
    ElementwiseKind.STRIDED: {DType.FP32: WIDE},
    ElementwiseKind.LAYER_NORM: {DType.FP32: WIDE},
    ElementwiseKind.LAST_NORM: {DType.FP32: WIDE, DType.FP16: WIDE},
    ElementwiseKind.BATCH_NORM: {DType.FP32: WIDE, DType.FP16: HALF},
}


def time_stream(work: Elementwise, gpu: Gpu, fit: ComputeFit, load: Load) -> float:
    sizes = work.rows, work.columns, work.read_bytes, work.write_bytes
    return float(stream_seconds(stream_key(work), *sizes, gpu, fit, load))


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
    """Return the seconds of a memory-bound kernel of the kind *key* (see ``stream_key``)."""
    rates = vector_rates(gpu)
    stream_fit = fit.stream(key)
    seconds = stream_s(rows, columns, read_bytes, write_bytes, scale_rates(rates, gpu, fit), stream_fit)
    if key in PLAIN:
        issued = np.minimum(rows * columns, np.maximum(read_bytes, write_bytes) / ISSUED["issued_bytes"])
        seconds = np.maximum(seconds, issued / (ISSUED["issued_per_clock"] * rates.sms * rates.clock_hz))
    return seconds + launch_s(rates, stream_fit.latency_s, fit, load)


def stream_key(work: Elementwise) -> str:
    """Return the kind of a memory-bound kernel in the fit.

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
    kernel = OWN_KERNELS.get(work.kind, {}).get(work.dtype, "")
    return f"{work.kind}{kernel}-backward" if work.backward else f"{work.kind}{kernel}"


def softmax_key(columns: int) -> str:
    """Return the kind of a softmax kernel.

    Up to 2,048 columns a warp keeps the row, beyond 1,024 at a lower rate; up to 9,216 the registers of a block, then
    its shared memory. Source: PyTorch 2.11, aten/src/ATen/native/cuda/SoftMax.cu, and where the times of the h200 set
    jump.
    """
    if columns <= 2048:
        return "softmax" if columns <= 1024 else "softmax-wide"
    return "softmax-registers" if columns <= 9216 else "softmax-shared"


def stream_s(
    rows: Number, columns: Number, read_bytes: Number, write_bytes: Number, rates: Rates, fit: StreamFit
) -> Number:
    """Return the seconds of one kernel without launch latency."""
    moved: Number = read_bytes + write_bytes
    if fit.passes:
        row_bytes = read_bytes / rows
        overflow = row_bytes * BLOCKS_PER_SM / rates.shared_memory_bytes
        moved = moved + read_bytes * fit.passes * np.clip(2.0 * overflow - 1.0, 0.0, 1.0)
    memory_s = moved / (rates.bandwidth_bytes_per_s * fit.bandwidth_efficiency)
    if fit.elements_per_clock:
        issue_s = rows * columns / (fit.elements_per_clock * rates.sms * rates.clock_hz)
        memory_2, issue_2 = memory_s * memory_s, issue_s * issue_s
        memory_s = np.sqrt(np.sqrt(memory_2 * memory_2 + issue_2 * issue_2))
    if fit.serial_clocks:
        return memory_s + np.minimum(rows, fit.serial_rows) * fit.serial_clocks / rates.clock_hz
    if fit.row_clocks or fit.column_clocks:
        resident = np.ceil(rows / (rates.sms * BLOCKS_PER_SM))
        clocks = fit.column_clocks * columns * resident + fit.row_clocks * rows / rates.sms
        rows_s = clocks / rates.clock_hz
        return np.sqrt(memory_s * memory_s + rows_s * rows_s)
    return memory_s
