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

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stepcast.cost.fits import ComputeFit, ScanFit
from stepcast.cost.host import HOST_PACES
from stepcast.cost.matmul import price_matmul
from stepcast.cost.memory_bound import price_stream
from stepcast.cost.power import Load, launch_s
from stepcast.cost.price import Bound, Number, Price, Rates, matrix_rates, price_kernel, scale_rates, vector_rates
from stepcast.hardware.cluster import Gpu
from stepcast.ir.recurrent import DeltaRule, RecurrentCells, Scan, SelectiveScan
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul

FLOAT = 4.0
Scanned = Scan | DeltaRule | SelectiveScan
BLOCK_COLUMNS, BLOCKS_PER_SM = 64, 2
# One step of a cell with its weights on chip: 518 us forward and 477 backward for 256 of an LSTM of 128 on an
# H200 (cuDNN 9.19).
PERSISTENT_STEP_S = 2.0e-6
# The host launches the product and the rest of every other cell one by one: on the host of an H200 (PyTorch 2.11,
# data/captured/operators.csv) 13 to 19 us forward and 16 to 27 backward of gated cells; on a slower day, when plain
# ones took 22 us, 21 to 31 and 30 to 40.
CELL_LAUNCH_S = {False: 15.5e-6, True: 19.5e-6}
PLAIN_CELL_LAUNCH_S = 13e-6


def price_scan(work: Scanned, gpu: Gpu, fit: ComputeFit, load: Load) -> Price:
    """Each kernel is launched by itself; they are too far from the peak to heat the GPU."""
    kind = scan_kind(work)
    own, rates = fit.scan(kind, work.backward), matrix_rates(gpu, work.dtype)
    seconds = scan_s(work, rates.peak_flops, scale_rates(vector_rates(gpu), gpu, fit), own)
    seconds = seconds + own.kernels * launch_s(rates, 0.0, fit, load)
    return price_kernel(kind, float(seconds), work.flops, scanned_bytes(work), rates, gpu, fit)


def scan_kind(work: Scanned) -> str:
    """Return the name under which *work* is fitted and calibrated."""
    return SCANS[type(work)][0]


def scan_s(work: Scanned, peak_flops: Number, rates: Rates, fit: ScanFit) -> Number:
    """Return the seconds of one pass without launches; *peak_flops* is that of its products, which no kernel beats."""
    memory_s = scanned_bytes(work) / (rates.bandwidth_bytes_per_s * fit.bandwidth_efficiency)
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


def scanned_bytes(work: Scanned) -> float:
    """Return the bytes that the kernels of one pass read and write."""
    return SCANS[type(work)][1](work)


def scan_bytes(work: Scan) -> float:
    """Return the bytes of Mamba-2's kernels, from the shapes in mamba_ssm's ops/triton.

    Chunk states and C B^T are in fp32 where they are summed, in the training format where they multiply.
    """
    element = work.dtype.bytes
    inputs, shared = work.inputs * element, work.shared * element
    states, squares = float(work.states), work.squares * FLOAT
    steps = work.batch * work.seq * work.heads * FLOAT  # dt and its sums along a chunk
    sums = steps / FLOAT * element + 2 * steps
    products = 2 * shared + squares
    chunk_states = inputs + shared + states * FLOAT + 2 * steps
    if not work.backward:
        passing = states * (FLOAT + element)
        output = 4 * inputs + shared + states * element + squares + 2 * steps
        return sums + products + chunk_states + passing + output
    passing = states * 2 * FLOAT
    gate = 5 * inputs
    state_gradients = inputs + shared + states * FLOAT
    passing_back = states * 2 * (FLOAT + element)
    input_gradients = 3 * inputs + shared + states * element + squares
    of_shared = 2 * (inputs + states * element + shared + shared / element * FLOAT)
    of_products = 2 * (2 * inputs + squares)  # of C B^T, and of the decay
    to_shared = 2 * (squares + 2 * shared + shared / element * FLOAT)
    again = sums + products + chunk_states + passing
    own = gate + state_gradients + passing_back + input_gradients + of_shared + of_products + to_shared
    return again + own


def _delta_bytes(work: DeltaRule) -> float:
    """Return the bytes of flash-linear-attention's chain of kernels (ops/gated_delta_rule/chunk.py), norms of queries
    and keys included; counted in tensors as large as the keys, as the values, as all states and as all solved systems.

    Forward: norms; the system with what it makes of keys and values; states; the result. Backward: the last
    two of the system again and the states; gradients within chunks; of states; of queries, keys and read
    keys; of the system; their sum; norms.
    """
    keys, values, states, systems = (26, 15, 4, 2) if work.backward else (10, 6, 2, 1)
    elements = keys * work.keys + values * work.inputs + states * work.states
    return (elements + systems * work.rows * work.chunk) * work.dtype.bytes


def _selective_bytes(work: SelectiveScan) -> float:
    """Return the bytes of one kernel (mamba_ssm, csrc/selective_scan): input, time steps and gate in, the result
    before and after the gate out; backward the gradient and the result in, three gradients out. B and C are read again
    for every channel, but from the cache.
    """
    tensors = 8 if work.backward else 5
    return (tensors * work.inputs + (4 if work.backward else 2) * work.shared) * work.dtype.bytes


SCANS: dict[type[Scanned], tuple[str, Callable[..., float]]] = {
    Scan: ("scan", scan_bytes), DeltaRule: ("delta", _delta_bytes), SelectiveScan: ("selective", _selective_bytes),
}  # fmt: skip


def price_cells(work: RecurrentCells, gpu: Gpu, fit: ComputeFit, load: Load) -> Price:
    """Price LSTM, GRU and RNN cells: a persistent kernel, or one product and one small kernel for each step, launched
    by the host.
    """
    rates = matrix_rates(gpu, work.dtype)
    product, gates = _cell_kernels(work)
    kernels_s = price_matmul(product, gpu, fit, load).seconds + price_stream(gates, gpu, fit, load).seconds
    host_s = PLAIN_CELL_LAUNCH_S if work.gates == 1 else CELL_LAUNCH_S[work.backward]
    step_s = PERSISTENT_STEP_S if work.is_persistent else max(kernels_s, host_s)
    seconds = work.steps * step_s
    price = price_kernel("stream", seconds, work.flops, cells_bytes(work), rates, gpu, fit)
    waits = seconds > 1.01 * work.steps * kernels_s or work.is_persistent
    low_s, high_s = min(price.low_s, seconds * HOST_PACES[0]), max(price.high_s, seconds * HOST_PACES[1])
    return replace(price, bound=Bound.LAUNCH if waits else price.bound, low_s=low_s, high_s=high_s)


def cells_bytes(work: RecurrentCells) -> float:
    gates = _cell_kernels(work)[1]
    weights = work.gates * work.hidden * work.width * work.dtype.bytes
    return weights + work.steps * (gates.read_bytes + gates.write_bytes)


def _cell_kernels(work: RecurrentCells) -> tuple[Matmul, Elementwise]:
    """Return the product of one step and the kernel that makes its gates and states, which stay in the cache."""
    wide = work.gates * work.hidden
    columns, depth = (work.width, wide) if work.backward else (wide, work.width)
    size = work.batch * work.hidden * work.dtype.bytes
    moved = (2 * work.gates + 2) * size
    gates = Elementwise(ElementwiseKind.ADD, work.batch, work.hidden, moved / 2, moved / 2, dtype=work.dtype)
    return Matmul(work.batch, columns, depth, 1, work.dtype), gates
