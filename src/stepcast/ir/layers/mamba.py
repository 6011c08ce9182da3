"""Mamba-2 blocks: norm, in-projection, convolution, chunked scan, norm by groups, out-projection.

Tensor ranks share heads and groups, the projections are split like those of an MLP, and with sequence
parallelism they gather and scatter like them (Megatron-LM, core/ssm/mamba_mixer.py). Context-parallel ranks
exchange positions for heads before the convolution and back after the scan, whatever attention does, because
both run along the whole sequence (core/ssm/mamba_context_parallel.py).

The kernels are mamba_ssm's and causal_conv1d's, which every framework calls: the gate z is applied inside the
scan, and the backward runs the convolution and the chunk states again instead of saving them. Where they are
not installed transformers runs PyTorch operations instead, and a product is written out for every pair of
tokens of a chunk and every state (models/mamba2/modeling_mamba2.py, Mamba2Mixer.torch_forward).

mamba_ssm saves the in-projection's result (z, x, B, C, dt) and the scan's result before its gate. The norm by
groups saves its input and one root per group, the out-projection its own. On an H200 the sum is what PyTorch
reports to within a thousandth, and the backward's peak to within 4 % unless the block is too small to fill
the GPU (tests/cost/test_memory_mamba.py). Megatron-LM's selective recomputation frees none of it by default.
"""

from functools import partial

from stepcast.ir.architecture import Architecture
from stepcast.ir.framework import SsmKernels
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kernels import FP32, K, list_phases, make_layer, stream_op
from stepcast.ir.layers.operators import Linear
from stepcast.ir.layers.sizes import SavedTensor, Sizes, present
from stepcast.ir.model_parts import Hybrid, LayerParts
from stepcast.ir.recurrent import Scan, scan_of
from stepcast.ir.types import FP32_BYTES, dataclass
from stepcast.ir.workload import Layer, Op, Role


def count_mixing_flops(model: Architecture, block: LayerParts, seq: int, batch: int, causal: bool) -> float:
    """Return the products of the chunked form (Dao and Gu 2024, section 6), as they are executed."""
    return scan_of(present(model.hybrid), batch, seq).flops


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Sizes of a Mamba block on one rank; the core is what runs along the whole sequence."""

    sizes: Sizes
    hybrid: Hybrid

    @property
    def inner(self) -> int:
        """Width of z, of x and of the result between the projections."""
        return self.hybrid.inner // self.sizes.tp

    @property
    def groups(self) -> int:
        return self.hybrid.groups // self.sizes.tp

    @property
    def projected(self) -> int:
        """Width of the in-projection: z, x, B, C and dt."""
        return 2 * self.inner + 2 * self.groups * self.hybrid.state + self.hybrid.mamba_heads // self.sizes.tp

    @property
    def exchanged(self) -> int:
        """Its width among context-parallel ranks: B and C once for each that needs them."""
        repeated = max(1, self.sizes.cp // self.groups) * self.groups
        return self.projected + 2 * (repeated - self.groups) * self.hybrid.state

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner // self.sizes.cp + 2 * max(1, self.groups // self.sizes.cp) * self.hybrid.state

    def scan(self, backward: bool) -> Scan:
        strategy, ways = self.sizes.strategy, self.sizes.tp * self.sizes.cp
        dtype = self.sizes.unquantised
        return scan_of(self.hybrid, strategy.micro_batch, strategy.seq, ways, backward=backward, dtype=dtype)


def saved_scan(sizes: Sizes) -> Scan:
    """Return the scan on one rank, of the tokens of a micro-batch after ranks exchanged them for heads."""
    batch = sizes.strategy.micro_batch
    seq = max(1, build.sequence_tokens(sizes) // batch)
    return scan_of(present(sizes.model.hybrid), batch, seq, sizes.tp * sizes.cp, backward=True)


def _is_eager(sizes: Sizes) -> bool:
    return sizes.framework.ssm_kernels is SsmKernels.EAGER and not sizes.alternates_matmuls


def list_saved(sizes: Sizes, block: LayerParts) -> list[SavedTensor]:
    scan, element = saved_scan(sizes), sizes.stored.bytes
    if not _is_eager(sizes):
        return fused_scan_saved(scan, element, element if sizes.alternates_matmuls else sizes.matmul_bytes)
    return [
        SavedTensor("in-projection", _projected(scan) * element),
        SavedTensor("convolution", (scan.inputs + 2 * scan.shared) * element),
        SavedTensor("eager scan", eager_scan_saved(scan)),
        SavedTensor("gate and norm", scan.inputs * 5 * FP32_BYTES),
        SavedTensor("norm result", scan.inputs * sizes.matmul_bytes),
    ]


def _projected(scan: Scan) -> int:
    """Return the elements of the in-projection: z, x, B, C and dt."""
    return 2 * scan.inputs + 2 * scan.shared + scan.batch * scan.seq * scan.heads


def fused_scan_saved(scan: Scan, element: float, matmul: float) -> list[SavedTensor]:
    """Return the tensors from the in-projection's result to the out-projection's input, of *matmul* bytes."""
    return [
        SavedTensor("in-projection", _projected(scan) * element),
        SavedTensor("scan before and after its gate", 2 * scan.inputs * element),
        SavedTensor("norm result", scan.inputs * matmul),
        SavedTensor("norm roots", scan.batch * scan.seq * scan.groups * FP32_BYTES),
    ]


def eager_scan_saved(scan: Scan) -> float:
    """Return the bytes that autograd saves where the scan runs as PyTorch operations.

    In fp32: for each pair of tokens of a chunk the decay, the score and their product; B, C and the decayed
    B of every head; x, x dt, what is read from the states; the states of chunks before and after they are
    summed. On an H200 this is what PyTorch reports to within 1 % (tests/generate/test_mamba_eager.py).
    """
    tokens, chunks = padded_tokens(scan)
    rows = tokens * scan.heads
    states = scan.batch * (2 * chunks + 1) * scan.heads * scan.head_dim * scan.state
    return FP32_BYTES * (rows * (3 * scan.chunk + 3 * scan.state + 3 * scan.head_dim) + states)


def padded_tokens(scan: Scan) -> tuple[int, int]:
    """Return the tokens of a micro-batch, with sequences padded to complete chunks, and their chunks."""
    chunks = -(-scan.seq // scan.chunk)
    return scan.batch * chunks * scan.chunk, chunks


def transient_bytes(sizes: Sizes, block: LayerParts) -> float:
    scan = saved_scan(sizes)
    return eager_scan_transient(scan) if _is_eager(sizes) else scan_transient(scan, sizes.stored.bytes)


def scan_transient(scan: Scan, element: float) -> float:
    """Return the gradient of the projection; the convolution's result and its gradient; that of the scan's result. On
    top, whichever is more: states and their gradients, in fp32 and rounded, while they run backward, or both rounded
    while gradients of chunk products (before and after their sum over heads), B and C are made.
    """
    convolved = 2 * (scan.inputs + 2 * scan.shared)
    running = scan.states * 2 * (FP32_BYTES + element) + scan.squares * FP32_BYTES
    products = scan.states * 2 * element + (3 * scan.squares + 2 * scan.shared) * FP32_BYTES
    return (_projected(scan) + convolved + scan.inputs) * element + max(running, products)


def eager_scan_transient(scan: Scan) -> float:
    """Return the bytes of the two largest products, one for each factor, that a backward makes at once."""
    rows = padded_tokens(scan)[0] * scan.heads
    pairs = scan.chunk * max(scan.state, scan.head_dim)
    return 2 * FP32_BYTES * rows * max(pairs, scan.head_dim * scan.state)


def list_operators(sizes: Sizes, block: LayerParts) -> tuple[Layer, ...]:
    model, mamba = sizes.model, MambaSizes(sizes, present(sizes.model.hybrid))
    eager = sizes.framework.ssm_kernels is SsmKernels.EAGER
    projected = Linear("in", sizes.tokens, model.hidden, mamba.projected, sizes.dtype)
    output = Linear("out", sizes.tokens, mamba.inner, model.hidden, sizes.dtype)
    return build.surround_with_norms(
        sizes,
        Role.MAMBA_NORM,
        Role.MAMBA_POST_NORM,
        build.column_layer(sizes, Role.MAMBA_IN, (projected,)),
        _eager_core(mamba) if eager else _core(mamba),
        _group_norm(mamba, eager),
        build.row_layer(sizes, Role.MAMBA_OUT, output),
        waits=build.column_waits(sizes, Role.MAMBA_IN),
    )


def _core(mamba: MambaSizes) -> Layer:
    """Return the convolution with its activation, and the scan."""
    rows, columns, dtype = build.sequence_tokens(mamba.sizes), mamba.channels, mamba.sizes.stored
    arrange = partial(build.exchange_sequence, mamba.sizes, mamba.exchanged)
    back = partial(build.exchange_sequence, mamba.sizes, mamba.inner, back=True)
    convolution = stream_op("convolution", K.CONVOLUTION, rows, columns, 1, 1, dtype)
    return make_layer(
        Role.MAMBA_SCAN,
        (*arrange(""), convolution, Op("scan", mamba.scan(False)), *back("")),
        (
            *back(" gradient"),
            stream_op("convolution again", K.CONVOLUTION, rows, columns, 1, 1, dtype),
            Op("scan gradient", mamba.scan(True)),
            stream_op("convolution gradient", K.CONVOLUTION, rows, columns, 2, 1, dtype, True),
            *arrange(" gradient"),
        ),
    )


def _group_norm(mamba: MambaSizes, eager: bool) -> Layer:
    """Return an RMS norm of each group's heads by themselves; *eager*: the gate and the norm, an operation a kernel."""
    sizes, rows, columns = mamba.sizes, mamba.sizes.tokens * mamba.groups, mamba.inner // mamba.groups
    if eager:
        gate = stream_op("gate", K.SILU, rows, columns, 2, 2, FP32, kernels=3)
        gate_gradient = stream_op("gate gradient", K.SILU, rows, columns, 4, 3, FP32, True, kernels=4)
        norm, norm_gradient = build.eager_norm(sizes, "group norm", rows, columns, FP32)
        return make_layer(Role.MAMBA_GROUP_NORM, (gate, *norm), (*norm_gradient, gate_gradient))
    forward = stream_op("group norm", K.GROUP_NORM, rows, columns, 1, 1, sizes.stored)
    gradient = stream_op("group norm gradient", K.GROUP_NORM, rows, columns, 2, 1, sizes.stored, True)
    return make_layer(Role.MAMBA_GROUP_NORM, (forward,), (gradient,))


def _eager_core(mamba: MambaSizes) -> Layer:
    """Return convolution and scan as PyTorch operations in fp32."""
    scan = mamba.scan(False)
    (tokens, chunks), heads, width, chunk = padded_tokens(scan), scan.heads, scan.head_dim, scan.chunk
    phases = list_phases(
        "eager scan",
        mamba.sizes,
        tokens * heads,
        width,
        FP32,
        tokens=tokens,
        channels=mamba.channels,
        width=width,
        state=scan.state,
        chunk=chunk,
        pairs=tokens * chunk * heads,
        cells=tokens * heads * width,
        between=scan.batch * (chunks + 1) ** 2 * heads * width,
    )
    return make_layer(Role.MAMBA_SCAN, *phases)
