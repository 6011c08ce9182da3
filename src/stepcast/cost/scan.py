"""Seconds of what runs along the sequence: a Mamba-2 block's chunked scan, a delta net's rule in chunks, the
selective scan of Mamba's first version.

Mamba-2's scan is a chain of kernels that hand states and chunk products to each other through memory.
Measured on an H200 (tools/measure_mamba.py), none comes near the tensor cores' peak, and those with products
inside move a quarter to a half of what the memory could: they wait for their own instructions. So, as for
element-wise kernels of ``memory_bound``, the time is the longer of moving the bytes and of issuing on all
multiprocessors; issuing is counted per element of the input and per element of the states. Other GPUs were
not measured. A delta net's rule moves its bytes and then waits for its states, handed from chunk to chunk of
a sequence by one kernel, as long as heads are too few to fill the GPU.
"""

from dataclasses import dataclass

import numpy as np

from stepcast.cost.rates import Number, Rates
from stepcast.cost.recurrent import delta_bytes, selective_bytes
from stepcast.ir.recurrent import DeltaRule, Scan, SelectiveScan

FLOAT = 4.0
Scanned = Scan | DeltaRule | SelectiveScan
SCANS = ("scan", "delta", "selective")
BLOCK_COLUMNS, BLOCKS_PER_SM = 64, 2


@dataclass(frozen=True, slots=True)
class ScanFit:
    """Learnt separately for forward and backward."""

    kernels: int  # that one pass launches
    bandwidth_efficiency: float  # of the memory bandwidth
    input_clocks: float  # of a multiprocessor, for each element of the input
    state_clocks: float  # and for each element of the chunks' states
    fixed_s: float  # what the kernels of one pass take however little there is to do
    chunk_clocks: float = 0.0  # of one chunk after another of a sequence, where a kernel hands on its state

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_efficiency <= 1:
            raise ValueError(f"bandwidth_efficiency must lie between 0 and 1, not {self.bandwidth_efficiency!r}")
        if min(self.input_clocks, self.state_clocks, self.fixed_s, self.chunk_clocks) < 0:
            raise ValueError(f"clocks and seconds of a scan must be zero or more, not {self}")


def scan_kind(work: Scanned) -> str:
    """Under which *work* is fitted and calibrated."""
    match work:
        case DeltaRule():
            return "delta"
        case SelectiveScan():
            return "selective"
    return "scan"


def scanned_bytes(work: Scanned) -> float:
    """What the kernels of one pass read and write."""
    match work:
        case DeltaRule():
            return delta_bytes(work)
        case SelectiveScan():
            return selective_bytes(work)
    return scan_bytes(work)


def scan_bytes(work: Scan) -> float:
    """What the kernels of one pass read and write, from the shapes in mamba_ssm's ops/triton.

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


def chunk_steps(work: Scanned, sms: Number) -> Number:
    """Chunks that a delta net's states pass through one by one. A block of such a kernel holds 64 columns of
    one head's state; two blocks to a multiprocessor run side by side, not measured beyond one each.
    """
    if not isinstance(work, DeltaRule):
        return 0.0
    blocks = work.batch * work.heads * max(1.0, work.value_dim / BLOCK_COLUMNS)
    return -(-work.seq // work.chunk) * np.maximum(1.0, blocks / (BLOCKS_PER_SM * sms))


def scan_s(work: Scanned, peak_flops: Number, rates: Rates, fit: ScanFit) -> Number:
    """Seconds of one pass, launches left out; *peak_flops* is that of its products, which no kernel beats."""
    memory_s = scanned_bytes(work) / (rates.bandwidth_bytes_per_s * fit.bandwidth_efficiency)
    clocks = fit.input_clocks * work.inputs + fit.state_clocks * work.states
    issue_s = clocks / (rates.sms * rates.clock_hz)
    longer_s = np.sqrt(np.sqrt(memory_s**4 + issue_s**4))
    chain_s = fit.chunk_clocks * chunk_steps(work, rates.sms) / rates.clock_hz
    return np.maximum(longer_s, work.flops / peak_flops) + chain_s + fit.fixed_s
