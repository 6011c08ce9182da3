"""Bytes a Mamba-2 block keeps and needs for a moment, between its projections.

mamba_ssm's training path keeps what the in-projection gave (z, x, B, C, dt) and the scan's result before its
gate; the convolution's result, chunk products and chunk states are computed again backward. The norm by
groups keeps its input and one root per group, the out-projection its own. On an H200 the sum is what PyTorch
reports to within a thousandth, and the backward's peak to within 4 % unless the block is too small to fill
the GPU (tests/cost/test_memory_mamba.py).
Megatron-LM's selective recomputation takes none of it unless told.
"""

from stepcast.ir.dtype import FP32_BYTES
from stepcast.ir.model import Model
from stepcast.ir.scan import Scan, scan_of


def mamba_shape(model: Model, tokens: int, batch: int, tp: int, cp: int) -> Scan:
    """The scan on one rank: *tokens* are those of a micro-batch before ranks exchange them for heads."""
    hybrid = model.hybrid
    assert hybrid is not None
    return scan_of(hybrid, batch, max(1, tokens * cp // batch), tp * cp, backward=True)


def mamba_kept(scan: Scan, element: float, matmul: float) -> float:
    """From the in-projection's result to the out-projection's input, which is kept in *matmul* bytes."""
    tokens = scan.batch * scan.seq
    projected = 2 * scan.inputs + 2 * scan.shared + tokens * scan.heads
    scanned = 2 * scan.inputs  # before the gate, and after it: the norm's input
    return (projected + scanned) * element + scan.inputs * matmul + tokens * scan.groups * FP32_BYTES


def mamba_transient(scan: Scan, element: float) -> float:
    """Gradient of the projection; the convolution's result and its gradient; that of the scan's result. On
    top, whichever is more: states and their gradients, in fp32 and rounded, while they run backward, or
    both rounded while gradients of chunk products (before and after their sum over heads), B and C are made.
    """
    tokens = scan.batch * scan.seq
    projected = 2 * scan.inputs + 2 * scan.shared + tokens * scan.heads
    convolved = 2 * (scan.inputs + 2 * scan.shared)
    running = scan.states * 2 * (FP32_BYTES + element) + scan.squares * FP32_BYTES
    products = scan.states * 2 * element + (3 * scan.squares + 2 * scan.shared) * FP32_BYTES
    return (projected + convolved + scan.inputs) * element + max(running, products)
