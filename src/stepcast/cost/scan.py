"""Seconds of what runs along the sequence: a Mamba-2 block's chunked scan, a delta net's rule in chunks, the
selective scan of Mamba's first version, and recurrent cells.

Mamba-2's scan is a chain of kernels that hand states and chunk products to each other through memory.
Measured on an H200 (tools/measure_mamba.py), none comes near the tensor cores' peak, and those with products
inside move a quarter to a half of what the memory could: they wait for their own instructions. So, as for
element-wise kernels of ``memory_bound``, the time is the longer of moving the bytes and of issuing on all
multiprocessors; issuing is counted per element of the input and per element of the states. Other GPUs were
not measured. A delta net's rule moves its bytes and then waits for its states, handed from chunk to chunk of
a sequence by one kernel, as long as heads are too few to fill the GPU.
"""

import numpy as np

from stepcast.cost.fits import ComputeFit, ScanFit
from stepcast.cost.matmul import price_matmul
from stepcast.cost.memory_bound import price_stream
from stepcast.cost.power import Load, launch_s
from stepcast.cost.price import Number, Price, Rates, matrix_rates, price_kernel, scale_rates, vector_rates
from stepcast.hardware.cluster import Gpu
from stepcast.ir.recurrent import FLOAT, DeltaRule, RecurrentCells, Scan, SelectiveScan
from stepcast.ir.tables import constants
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul

Scanned = Scan | DeltaRule | SelectiveScan
KINDS: dict[type[Scanned], str] = {Scan: "scan", DeltaRule: "delta", SelectiveScan: "selective"}
BLOCK_COLUMNS, BLOCKS_PER_SM = 64, 2
CELLS = constants("cells")


def price_scan(work: Scanned, gpu: Gpu, fit: ComputeFit, load: Load) -> Price:
    """Each kernel is launched by itself; they are too far from the peak to heat the GPU."""
    kind = scan_kind(work)
    scan_fit, rates = fit.scan(kind, work.backward), matrix_rates(gpu, work.dtype)
    seconds = scan_s(work, rates.peak_flops, scale_rates(vector_rates(gpu), gpu, fit), scan_fit)
    seconds = seconds + scan_fit.kernels * launch_s(rates, 0.0, fit, load)
    return price_kernel(kind, float(seconds), work.flops, work.moved_bytes, rates, gpu, fit)


def scan_kind(work: Scanned) -> str:
    """Return the name under which *work* is fitted and calibrated."""
    return KINDS[type(work)]


def scan_s(work: Scanned, peak_flops: Number, rates: Rates, fit: ScanFit) -> Number:
    """Return the seconds of one pass without launches; *peak_flops* is that of its products, which no kernel beats."""
    memory_s = work.moved_bytes / (rates.bandwidth_bytes_per_s * fit.bandwidth_efficiency)
    clocks = fit.input_clocks * work.inputs + fit.state_clocks * work.states
    issue_s = clocks / (rates.sms * rates.clock_hz)
    longer_s = np.sqrt(np.sqrt(memory_s**4 + issue_s**4))
    chain_s = fit.chunk_clocks * chunk_steps(work, rates.sms) / rates.clock_hz
    return np.maximum(longer_s, work.flops / peak_flops) + chain_s + fit.fixed_s


def chunk_steps(work: Scanned, sms: Number) -> Number:
    """Return the chunks that a delta net's states pass through one by one. A block of such a kernel holds 64 columns
    of one head's state; two blocks per multiprocessor run at once, not measured beyond one each.
    """
    if not isinstance(work, DeltaRule):
        return 0.0
    blocks = work.batch * work.heads * max(1.0, work.value_dim / BLOCK_COLUMNS)
    return -(-work.seq // work.chunk) * np.maximum(1.0, blocks / (BLOCKS_PER_SM * sms))


def price_cells(work: RecurrentCells, gpu: Gpu, fit: ComputeFit, load: Load) -> Price:
    """Price LSTM, GRU and RNN cells: one kernel that keeps its weights on chip, or for each step a product and a small
    kernel, which the host launches.
    """
    rates = matrix_rates(gpu, work.dtype)
    if work.is_persistent:
        weights = work.gates * work.hidden * work.width
        spills = CELLS["spilled"][work.backward] if weights * FLOAT > gpu.shared_memory_per_sm_bytes else 1.0
        step_s, weight_s = CELLS["persistent"][work.backward]
        step_s = (step_s + weight_s * weights * spills) * max(1.0, work.batch / CELLS["batch"])
    else:
        product, gates = _cell_kernels(work)
        step_s = price_matmul(product, gpu, fit, load).seconds + price_stream(gates, gpu, fit, load).seconds
        step_s *= CELLS["narrow" if work.dtype.bytes < FLOAT else "wide"][work.backward]
    return price_kernel("stream", work.steps * step_s, work.flops, work.moved_bytes, rates, gpu, fit)


def _cell_kernels(work: RecurrentCells) -> tuple[Matmul, Elementwise]:
    """Return the product of one step and the kernel that makes its gates and states, which stay in the cache."""
    wide = work.gates * work.hidden
    columns, depth = (work.width, wide) if work.backward else (wide, work.width)
    size = work.batch * work.hidden * work.dtype.bytes
    moved = (2 * work.gates + 2) * size
    gates = Elementwise(ElementwiseKind.ADD, work.batch, work.hidden, moved / 2, moved / 2, dtype=work.dtype)
    return Matmul(work.batch, columns, depth, 1, work.dtype), gates
