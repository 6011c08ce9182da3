"""Seconds of kernels that mostly move memory: element-wise, norms, softmax, embedding, optimizer, copies.

A streaming kernel takes the longer of moving its bytes and issuing its instructions (fused into one smooth
maximum). A kernel that normalises rows gives each row to one thread block: a row takes time in proportion
to its length however few rows there are, and a row too long to stay in the cache between the passes over
it is read once more.
"""

from dataclasses import dataclass

import numpy as np

from stepcast.cost.rates import Number, Rates

BLOCKS_PER_SM = 16  # resident thread blocks of 128 threads, one row each (2,048 threads per multiprocessor)


@dataclass(frozen=True, slots=True)
class StreamFit:
    """One kind of memory-bound kernel."""

    bandwidth_efficiency: float  # of the memory bandwidth
    elements_per_clock: float = 0.0  # instruction limit per multiprocessor; 0: memory is the only limit
    row_clocks: float = 0.0  # cost of starting a row, per multiprocessor
    column_clocks: float = 0.0  # time of one element of a row within its thread block
    passes: float = 0.0  # further reads of a row that does not stay in the cache between passes
    latency_s: float = 0.0  # beyond the launch
    serial_clocks: float = 0.0  # of each of the first serial_rows rows, which follow one another
    serial_rows: float = float("inf")

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_efficiency <= 1:
            raise ValueError(f"bandwidth_efficiency must lie between 0 and 1, not {self.bandwidth_efficiency!r}")


def stream_s(
    rows: Number, columns: Number, read_bytes: Number, write_bytes: Number, rates: Rates, fit: StreamFit
) -> Number:
    """Seconds of one kernel, launch latency left out."""
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
