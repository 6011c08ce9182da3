"""Mamba blocks of the first version: norm, in-projection, convolution, time step with B and C, selective
scan, out-projection (Gu and Dao 2023, section 3.4; transformers' models/mamba and models/jamba).

No training software splits them among tensor or context-parallel ranks (``ir.legality``). The convolution is
causal_conv1d's, the scan mamba_ssm's with the gate inside, which saves its inputs, its result before the gate
and the states at every 2,048th token.
"""

from stepcast.ir.architecture import Architecture
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kernels import K, make_layer, stream_op
from stepcast.ir.layers.operators import Linear
from stepcast.ir.layers.sizes import SavedTensor, Sizes, present
from stepcast.ir.model_parts import LayerParts
from stepcast.ir.recurrent import Selective, SelectiveScan
from stepcast.ir.types import FP32_BYTES
from stepcast.ir.workload import Layer, Op, Role

# Tokens between those whose states the selective scan saves (csrc/selective_scan/selective_scan.cpp).
SCAN_CHUNK = 2048


def count_mixing_flops(model: Architecture, block: LayerParts, seq: int, batch: int, causal: bool) -> float:
    selective = present(model.selective)
    return SelectiveScan(batch, seq, selective.inner, selective.state).flops


def scan_saved(scan: SelectiveScan, element: float) -> float:
    """Return the bytes mamba_ssm saves: the result before its gate and after it, and in fp32 states in
    between, twice: what they were, and what they had been multiplied by.
    """
    states = scan.batch * -(-scan.seq // SCAN_CHUNK) * scan.channels * scan.state
    return 2 * scan.inputs * element + 2 * states * FP32_BYTES


def list_saved(sizes: Sizes, block: LayerParts) -> list[SavedTensor]:
    """Return the tensors from the in-projection's result to the out-projection's input, which is the scan's."""
    selective, tokens, element = present(sizes.model.selective), sizes.tokens, sizes.stored.bytes
    batch = sizes.strategy.micro_batch
    scan = SelectiveScan(batch, max(1, tokens // batch), selective.inner, selective.state)
    return [
        SavedTensor("in-projection, channels and their time steps", tokens * 4 * selective.inner * element),
        SavedTensor("time step, B and C", tokens * selective.steps * (2 if selective.normed else 1) * element),
        SavedTensor("selective scan", scan_saved(scan, element)),
    ]


def transient_bytes(sizes: Sizes, block: LayerParts) -> float:
    """Return the gradients of the channels, time steps, gate and the projection."""
    return sizes.tokens * 5.0 * present(sizes.model.selective).inner * sizes.stored.bytes


def list_operators(sizes: Sizes, block: LayerParts) -> tuple[Layer, ...]:
    selective, model, tokens, dtype = present(sizes.model.selective), sizes.model, sizes.tokens, sizes.stored
    into = Linear("in", tokens, model.hidden, 2 * selective.inner, sizes.dtype)
    out = Linear("out", tokens, selective.inner, model.hidden, sizes.dtype)
    convolution = stream_op("convolution", K.CONVOLUTION, tokens, selective.inner, 1, 1, dtype)
    gradient = stream_op("convolution gradient", K.CONVOLUTION, tokens, selective.inner, 2, 1, dtype, True)
    shape = (sizes.strategy.micro_batch, sizes.strategy.seq, selective.inner, selective.state)
    forward, backward = (SelectiveScan(*shape, backward, sizes.unquantised) for backward in (False, True))
    return build.surround_with_norms(
        sizes,
        Role.MAMBA_NORM,
        Role.MAMBA_POST_NORM,
        build.column_layer(sizes, Role.MAMBA_IN, (into,), (convolution,), (gradient,)),
        _steps_layer(sizes, selective),
        make_layer(Role.MAMBA_SCAN, (Op("scan", forward),), (Op("scan gradient", backward),)),
        build.row_layer(sizes, Role.MAMBA_OUT, out),
    )


def _steps_layer(sizes: Sizes, selective: Selective) -> Layer:
    """Return time step, B and C from the channels, and the time step of each channel from its low rank; the
    channels get back gradients from here and from the scan.
    """
    low = Linear("steps", sizes.tokens, selective.inner, selective.steps, sizes.dtype).phases(sizes)
    high = Linear("time step", sizes.tokens, selective.rank, selective.inner, sizes.dtype).phases(sizes)
    norm, norm_gradient = (
        build.norm_ops(sizes, "steps norm", sizes.tokens, selective.steps, heads=True) if selective.normed else ((), ())
    )
    channels = build.add_op(sizes, "channel gradient", sizes.tokens, selective.inner)
    return make_layer(
        Role.MAMBA_STEPS,
        (*low.forward, *norm, *high.forward),
        (*high.input_gradient, *norm_gradient, *low.input_gradient, channels),
        (*high.weight_gradient, *low.weight_gradient),
    )
