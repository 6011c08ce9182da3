"""Mamba-2 blocks: norm, in-projection, convolution, chunked scan, norm by groups, out-projection.

Tensor ranks share heads and groups, the projections are split like those of an MLP, and with sequence
parallelism they gather and scatter like them (Megatron-LM, core/ssm/mamba_mixer.py). Context-parallel ranks
exchange positions for heads before the convolution and back after the scan, whatever attention does, because
both run along the whole sequence (core/ssm/mamba_context_parallel.py).

The kernels are mamba_ssm's and causal_conv1d's, which every framework calls: the gate z is applied inside the
scan, and the backward runs the convolution and the chunk states again instead of keeping them. Where they are
not installed transformers runs PyTorch operations instead, and a product is written out for every pair of
tokens of a chunk and every state (models/mamba2/modeling_mamba2.py, Mamba2Mixer.torch_forward).
"""

from dataclasses import dataclass
from functools import partial

from stepcast.generate.norms import written_norm, written_norm_gradient
from stepcast.generate.parts import K, Linear, layer, norm_layer
from stepcast.generate.sequence import arranged_in, arranged_out, core_tokens
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import column_layer, column_waits, row_layer
from stepcast.ir.dtype import DType
from stepcast.ir.framework import SsmKernels
from stepcast.ir.model_parts import Hybrid
from stepcast.ir.recurrent import Scan, scan_of
from stepcast.ir.saved import padded_tokens
from stepcast.ir.work import ElementwiseKind, elementwise
from stepcast.ir.workload import Layer, Op, Role


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
        """Its width among context parallel ranks: B and C once for each that needs them."""
        repeated = max(1, self.sizes.cp // self.groups) * self.groups
        return self.projected + 2 * (repeated - self.groups) * self.hybrid.state

    @property
    def core_groups(self) -> int:
        return max(1, self.groups // self.sizes.cp)

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner // self.sizes.cp + 2 * self.core_groups * self.hybrid.state

    def scan(self, backward: bool) -> Scan:
        strategy, ways = self.sizes.strategy, self.sizes.tp * self.sizes.cp
        dtype = self.sizes.unquantised
        return scan_of(self.hybrid, strategy.micro_batch, strategy.seq, ways, backward=backward, dtype=dtype)


def mamba_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """The layers of one Mamba block, in the order of the forward."""
    hybrid, model = sizes.model.hybrid, sizes.model
    assert hybrid is not None
    own = MambaSizes(sizes, hybrid)
    eager = sizes.framework.ssm_kernels is SsmKernels.EAGER
    projected = Linear("in", sizes.tokens, model.hidden, own.projected, sizes.dtype)
    output = Linear("out", sizes.tokens, own.inner, model.hidden, sizes.dtype)
    layers = [
        norm_layer(sizes, Role.MAMBA_NORM, sizes.outer_tokens, column_waits(sizes, Role.MAMBA_IN)),
        column_layer(sizes, Role.MAMBA_IN, (projected,)),
        *((_eager_core(own), _eager_norm(own)) if eager else (_core(own), _group_norm(own))),
        row_layer(sizes, Role.MAMBA_OUT, output),
    ]
    if model.post_norms:
        layers.append(norm_layer(sizes, Role.MAMBA_POST_NORM, sizes.outer_tokens, branches=False))
    return tuple(layers)


def _core(own: MambaSizes) -> Layer:
    """Convolution with its activation, and the scan."""
    rows, columns, dtype = core_tokens(own.sizes), own.channels, own.sizes.stored
    forward = elementwise(K.CONVOLUTION, rows, columns, 1, 1, dtype)
    backward = elementwise(K.CONVOLUTION, rows, columns, 2, 1, dtype, backward=True)
    arranged = partial(arranged_in, own.sizes, own.exchanged)
    returned = partial(arranged_out, own.sizes, own.inner)
    return layer(
        Role.MAMBA_SCAN,
        (*arranged(""), Op("convolution", forward), Op("scan", own.scan(False)), *returned("")),
        (
            *returned(" gradient"),
            Op("convolution again", forward),
            Op("scan gradient", own.scan(True)),
            Op("convolution gradient", backward),
            *arranged(" gradient"),
        ),
    )


def _group_norm(own: MambaSizes) -> Layer:
    """An RMS norm of each group's heads by themselves."""
    rows, columns = own.sizes.tokens * own.groups, own.inner // own.groups
    dtype = own.sizes.stored
    return layer(
        Role.MAMBA_GROUP_NORM,
        (Op("group norm", elementwise(K.GROUP_NORM, rows, columns, 1, 1, dtype)),),
        (Op("group norm gradient", elementwise(K.GROUP_NORM, rows, columns, 2, 1, dtype, backward=True)),),
    )


def _eager_core(own: MambaSizes) -> Layer:
    """Convolution and scan as PyTorch operations in fp32.

    A contraction is a broadcast product and its sum; its backward makes both for either factor.
    Counts of kernels beyond the large ones are those of the source.
    """
    scan, stored, wide = own.scan(False), own.sizes.stored, DType.FP32
    (tokens, chunks), batch = padded_tokens(scan), scan.batch
    heads, width, state, chunk = scan.heads, scan.head_dim, scan.state, scan.chunk
    rows, pairs, cells = tokens * heads, tokens * chunk * heads, tokens * heads * width
    between = batch * (chunks + 1) ** 2 * heads * width

    def small(name: str, columns: int, reads: float, writes: float, kernels: int) -> Op:
        return Op(name, elementwise(K.BROADCAST, rows, columns, reads, writes, wide), kernels=kernels)

    def contract(name: str, outer: int, inner: int, kind: ElementwiseKind) -> tuple[Op, Op]:
        return (
            Op(f"{name} product", elementwise(K.BROADCAST, outer, inner, 0, 1, wide)),
            Op(f"{name} sum", elementwise(kind, outer, inner, 1, 0, wide)),
        )

    def convolve(name: str, kind: ElementwiseKind, reads: int, backward: bool = False) -> Op:
        return Op(name, elementwise(kind, tokens, own.channels, reads, 1, stored, backward))

    forward = (
        convolve("convolution", K.CONVOLUTION, 1),
        convolve("convolution activation", K.SILU, 1),
        small("repeated B and C", state, 0, 2, 4),
        small("time steps", width, 2, 3, 9),
        small("decays within chunks", chunk, 3, 4, 9),
        *contract("scores", pairs, state, K.ROW_SUM),
        small("decayed scores", chunk, 3, 2, 2),
        *contract("outputs within chunks", pairs, width, K.COLUMN_SUM),
        small("decayed B", state, 1, 1, 3),
        *contract("chunk states", cells, state, K.COLUMN_SUM),
        *contract("states between chunks", between, state, K.COLUMN_SUM),
        *contract("outputs of states", cells, state, K.ROW_SUM),
        small("outputs", width, 5, 3, 5),
    )
    backward = (
        small("outputs gradient", width, 6, 4, 7),
        *contract("C of states gradient", cells, state, K.COLUMN_SUM),
        *contract("states gradient", cells, state, K.COLUMN_SUM),
        *contract("states between chunks gradient", between, state, K.COLUMN_SUM),
        *contract("decays between chunks gradient", between, state, K.ROW_SUM),
        *contract("decayed B gradient", cells, state, K.COLUMN_SUM),
        *contract("x of states gradient", cells, state, K.ROW_SUM),
        small("decays of B gradient", state, 4, 3, 6),
        *contract("decayed scores gradient", pairs, width, K.ROW_SUM),
        *contract("x gradient", pairs, width, K.COLUMN_SUM),
        small("scores gradient", chunk, 4, 2, 3),
        *contract("C gradient", pairs, state, K.COLUMN_SUM),
        *contract("B gradient", pairs, state, K.COLUMN_SUM),
        small("decays within chunks gradient", chunk, 5, 4, 12),
        small("B and C gradient", state, 4, 2, 8),
        small("time steps gradient", width, 8, 5, 16),
        convolve("convolution activation gradient", K.SILU, 2, True),
        convolve("convolution gradient", K.CONVOLUTION, 2, True),
    )
    return layer(Role.MAMBA_SCAN, forward, backward)


def _eager_norm(own: MambaSizes) -> Layer:
    """The gate and an RMS norm, an operation a kernel."""
    sizes, wide = own.sizes, DType.FP32
    rows, columns = sizes.tokens * own.groups, own.inner // own.groups
    gated = Op("gate", elementwise(K.SILU, rows, columns, 2, 2, wide), kernels=3)
    gate = Op("gate gradient", elementwise(K.SILU, rows, columns, 4, 3, wide, backward=True), kernels=4)
    return layer(
        Role.MAMBA_GROUP_NORM,
        (gated, *written_norm(sizes, "group norm", rows, columns, wide)),
        (*written_norm_gradient(sizes, "group norm", rows, columns, wide), gate),
    )
