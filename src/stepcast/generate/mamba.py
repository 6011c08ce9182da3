"""Mamba-2 blocks: norm, in-projection, convolution, chunked scan, norm by groups, out-projection.

Tensor ranks share heads and groups, the projections are split like those of an MLP, and with sequence
parallelism they gather and scatter like them (Megatron-LM, core/ssm/mamba_mixer.py). Context-parallel ranks
exchange positions for heads before the convolution and back after the scan, whatever attention does, because
both run along the whole sequence (core/ssm/mamba_context_parallel.py).

The kernels are mamba_ssm's and causal_conv1d's, which every framework calls: the gate z is applied inside the
scan, and the backward runs the convolution and the chunk states again instead of keeping them.
"""

from dataclasses import dataclass
from functools import partial

from stepcast.generate.parts import K, Linear, layer, norm_layer
from stepcast.generate.sequence import arranged_in, arranged_out, core_tokens
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import column_layer, column_waits, row_layer
from stepcast.ir.model_parts import Hybrid
from stepcast.ir.role import Role
from stepcast.ir.scan import Scan, scan_of
from stepcast.ir.work import streamed
from stepcast.ir.workload import Layer, Op


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
    projected = Linear("in", sizes.tokens, model.hidden, own.projected, sizes.dtype)
    output = Linear("out", sizes.tokens, own.inner, model.hidden, sizes.dtype)
    layers = [
        norm_layer(sizes, Role.MAMBA_NORM, sizes.outer_tokens, column_waits(sizes, Role.MAMBA_IN)),
        column_layer(sizes, Role.MAMBA_IN, (projected,)),
        _core(own),
        _group_norm(own),
        row_layer(sizes, Role.MAMBA_OUT, output),
    ]
    if model.post_norms:
        layers.append(norm_layer(sizes, Role.MAMBA_POST_NORM, sizes.outer_tokens, branches=False))
    return tuple(layers)


def _core(own: MambaSizes) -> Layer:
    """Convolution with its activation, and the scan."""
    rows, columns, dtype = core_tokens(own.sizes), own.channels, own.sizes.stored
    forward = streamed(K.CONVOLUTION, rows, columns, 1, 1, dtype)
    backward = streamed(K.CONVOLUTION, rows, columns, 2, 1, dtype, backward=True)
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
        (Op("group norm", streamed(K.GROUP_NORM, rows, columns, 1, 1, dtype)),),
        (Op("group norm gradient", streamed(K.GROUP_NORM, rows, columns, 2, 1, dtype, backward=True)),),
    )
