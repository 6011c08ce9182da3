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


def eager_mamba_kept(scan: Scan, element: float, matmul: float) -> float:
    """Return the bytes that autograd saves where the scan runs as PyTorch operations.

    In fp32: for each pair of tokens of a chunk the decay, the score and their product; B, C and the decayed
    B of every head; x, x dt, what is read from the states, and five tensors of gate and norm; the states of
    chunks before and after they are summed. On an H200 the scan's share is what PyTorch reports to within
    1 % (tests/generate/test_mamba_eager.py).
    """
    return eager_scan_kept(scan) + _around_eager_scan(scan, element, matmul)


def eager_scan_kept(scan: Scan) -> float:
    tokens, chunks = padded_tokens(scan)
    rows = tokens * scan.heads
    states = scan.batch * (2 * chunks + 1) * scan.heads * scan.head_dim * scan.state
    return FP32_BYTES * (rows * (3 * scan.chunk + 3 * scan.state + 3 * scan.head_dim) + states)


def _around_eager_scan(scan: Scan, element: float, matmul: float) -> float:
    tokens = scan.batch * scan.seq
    projected = 2 * scan.inputs + 2 * scan.shared + tokens * scan.heads
    convolved = scan.inputs + 2 * scan.shared
    return (projected + convolved) * element + scan.inputs * (5 * FP32_BYTES + matmul)


def eager_mamba_transient(scan: Scan) -> float:
    """Return the bytes of the two largest products, one for each factor, that a backward makes at once."""
    tokens, _ = padded_tokens(scan)
    rows = tokens * scan.heads
    pairs = scan.chunk * max(scan.state, scan.head_dim)
    return 2 * FP32_BYTES * rows * max(pairs, scan.head_dim * scan.state)


def padded_tokens(scan: Scan) -> tuple[int, int]:
    """Return the tokens of a micro-batch, with sequences padded to complete chunks, and their chunks."""
    chunks = -(-scan.seq // scan.chunk)
    return scan.batch * chunks * scan.chunk, chunks
