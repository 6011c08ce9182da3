"""Bytes that the kernels of delta nets and of Mamba's selective scan read and write, from their sources; and
the kernels of LSTM, GRU and RNN cells.
"""

from stepcast.ir.recurrent import DeltaRule, RecurrentCells, SelectiveScan
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul

# One step of a cell with its weights on chip: 518 us forward and 477 backward for 256 of an LSTM of 128 on an
# H200 (cuDNN 9.19).
PERSISTENT_STEP_S = 2.0e-6
# The host launches the product and the rest of every other cell one by one: on the host of an H200 (PyTorch
# 2.11, nine networks) 21 to 31 us forward and 30 to 40 backward of gated cells, 22 and 23 of plain ones.
CELL_LAUNCH_S = {False: 26e-6, True: 35e-6}
PLAIN_CELL_LAUNCH_S = 22e-6


def cell_kernels(work: RecurrentCells) -> tuple[Matmul, Elementwise]:
    """The product of one step and the kernel that makes its gates and states, which stay in the cache."""
    wide = work.gates * work.hidden
    product = Matmul(work.batch, work.width, wide, 1, work.dtype) if work.backward else Matmul(
        work.batch, wide, work.width, 1, work.dtype)  # fmt: skip
    size = work.batch * work.hidden * work.dtype.bytes
    moved = (2 * work.gates + 2) * size
    rest = Elementwise(ElementwiseKind.ADD, work.batch, work.hidden, moved / 2, moved / 2, dtype=work.dtype)
    return product, rest


def cell_launch_s(work: RecurrentCells) -> float:
    """Seconds of the host to launch one cell."""
    return PLAIN_CELL_LAUNCH_S if work.gates == 1 else CELL_LAUNCH_S[work.backward]


def delta_bytes(work: DeltaRule) -> float:
    """Of flash-linear-attention's chain of kernels (ops/gated_delta_rule/chunk.py), norms of queries and keys
    included; counted in tensors as large as the keys, as the values, as all states and as all solved systems.

    Forward: norms; the system with what it makes of keys and values; states; the result. Backward: the last
    two of the system again and the states; gradients within chunks; of states; of queries, keys and read
    keys; of the system; their sum; norms.
    """
    keys, values, states, systems = (26, 15, 4, 2) if work.backward else (10, 6, 2, 1)
    elements = keys * work.keys + values * work.inputs + states * work.states
    return (elements + systems * work.rows * work.chunk) * work.dtype.bytes


def selective_bytes(work: SelectiveScan) -> float:
    """Of one kernel (mamba_ssm, csrc/selective_scan): input, time steps and gate in, the result before and
    after the gate out; backward the gradient and the result in, three gradients out. B and C are read again
    for every channel, but from the cache.
    """
    whole = 8 if work.backward else 5
    return (whole * work.inputs + (4 if work.backward else 2) * work.shared) * work.dtype.bytes
