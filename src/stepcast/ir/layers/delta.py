"""Gated delta nets: norm, in-projection, convolution, delta rule in chunks, gated norm, out-projection.

Tensor ranks share heads, the projections are split like those of an MLP, and context-parallel ranks exchange positions
for heads (Megatron-LM, core/ssm/gated_delta_net.py; the same layers in transformers' models/qwen3_next). The rule is
flash-linear-attention's, which takes as many heads of queries and keys as of values: where a model has fewer, they are
repeated before it and their gradients added up after it. It saves queries and keys as they are normed, values, decays
summed along a chunk and the solved system of each chunk, and computes states again.
"""

from functools import partial

from stepcast.ir.architecture import Architecture
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kernels import K, Ops, make_layer, stream_op
from stepcast.ir.layers.operators import Linear
from stepcast.ir.layers.sizes import SavedTensor, Sizes, present
from stepcast.ir.model_parts import LayerParts
from stepcast.ir.recurrent import Delta, DeltaRule, delta_rule_of
from stepcast.ir.types import FP32_BYTES
from stepcast.ir.work import Elementwise
from stepcast.ir.workload import Layer, Op, Role

# Kernels of flash-linear-attention's forward and backward, norms of queries and keys included.
RULE_KERNELS, RULE_GRADIENT_KERNELS = 8, 12


def count_mixing_flops(model: Architecture, block: LayerParts, seq: int, batch: int, causal: bool) -> float:
    return delta_rule_of(present(model.delta), batch, seq).flops


def _saved_rule(sizes: Sizes) -> DeltaRule:
    batch = sizes.strategy.micro_batch
    seq = max(1, build.sequence_tokens(sizes) // batch)
    return delta_rule_of(present(sizes.model.delta), batch, seq, sizes.tp * sizes.cp)


def rule_saved(rule: DeltaRule, element: float) -> float:
    """Return the bytes flash-linear-attention saves, its result included: queries and keys as they are normed,
    the solved systems, decays summed along a chunk, and the roots of both norms.
    """
    return (2 * rule.keys + rule.inputs + rule.rows * rule.chunk) * element + 3 * rule.rows * FP32_BYTES


def list_saved(sizes: Sizes, block: LayerParts) -> list[SavedTensor]:
    """Return the tensors from the in-projection's result to the out-projection's input."""
    rule, element = _saved_rule(sizes), sizes.stored.bytes
    convolved = rule.batch * rule.seq * present(sizes.model.delta).channels / (sizes.tp * sizes.cp)
    return [
        SavedTensor("convolution input", convolved * element),
        SavedTensor("gate and values", 2 * rule.inputs * element),
        SavedTensor("strengths", rule.rows * element),
        SavedTensor("delta rule", rule_saved(rule, element)),
        SavedTensor("inputs of decays and the norm's roots", 3 * rule.rows * FP32_BYTES),
        SavedTensor("out-projection input", rule.inputs * sizes.matmul_bytes),
    ]


def transient_bytes(sizes: Sizes, block: LayerParts) -> float:
    """Return the gradient of the projection; states of all chunks and their gradients; what the system solved
    and its gradients; gradients of queries, keys and values.
    """
    rule = _saved_rule(sizes)
    projected = rule.batch * rule.seq * present(sizes.model.delta).projected / (sizes.tp * sizes.cp)
    return (projected + 2 * rule.states + 5 * rule.keys + 4 * rule.inputs) * sizes.stored.bytes


def list_operators(sizes: Sizes, block: LayerParts) -> tuple[Layer, ...]:
    delta, model = present(sizes.model.delta), sizes.model
    into = Linear("in", sizes.tokens, model.hidden, delta.projected // sizes.tp, sizes.dtype)
    out = Linear("out", sizes.tokens, delta.values // sizes.tp, model.hidden, sizes.dtype)
    # An RMS norm of each head, times the activated gate.
    rows, width = sizes.tokens * (delta.value_heads // sizes.tp), delta.value_dim
    gate, gate_gradient = build.gate_ops(sizes, rows, width)
    norm, norm_gradient = build.norm_ops(sizes, "head norm", rows, width, heads=True)
    return build.surround_with_norms(
        sizes,
        Role.DELTA_NORM,
        Role.DELTA_POST_NORM,
        build.column_layer(sizes, Role.DELTA_IN, (into,)),
        _rule_layer(sizes, delta),
        make_layer(Role.DELTA_GATE_NORM, norm + gate, gate_gradient + norm_gradient),
        build.row_layer(sizes, Role.DELTA_OUT, out),
        waits=build.column_waits(sizes, Role.DELTA_IN),
    )


def _rule_layer(sizes: Sizes, delta: Delta) -> Layer:
    """Return the convolution with its activation, decay and strength of each head, and the rule."""
    strategy, ways, dtype = sizes.strategy, sizes.tp * sizes.cp, sizes.stored
    rows, channels, heads = build.sequence_tokens(sizes), delta.channels // ways, max(1, delta.value_heads // ways)
    rule = partial(delta_rule_of, delta, strategy.micro_batch, strategy.seq, ways, dtype=sizes.unquantised)
    arrange = partial(build.exchange_sequence, sizes, delta.projected // sizes.tp)
    back = partial(build.exchange_sequence, sizes, delta.values // sizes.tp, back=True)
    return make_layer(
        Role.DELTA_RULE,
        (
            *arrange(""),
            stream_op("convolution", K.CONVOLUTION, rows, channels, 1, 1, dtype),
            *_repeat_keys(sizes, delta, "repeat keys", backward=False),
            stream_op("decay", K.SILU, rows, 2 * heads, 1, 1.5, dtype),  # decays in fp32, strengths as they came
            Op("rule", rule(), kernels=RULE_KERNELS),
            *back(""),
        ),
        (
            *back(" gradient"),
            Op("rule gradient", rule(backward=True), kernels=RULE_GRADIENT_KERNELS),
            stream_op("decay gradient", K.SILU, rows, 2 * heads, 2.5, 1, dtype, True),
            *_repeat_keys(sizes, delta, "sum key gradients", backward=True),
            stream_op("convolution gradient", K.CONVOLUTION, rows, channels, 2, 1, dtype, True),
            *arrange(" gradient"),
        ),
    )


def _repeat_keys(sizes: Sizes, delta: Delta, name: str, backward: bool) -> Ops:
    """Repeat queries and keys for each head of values; backward add up the gradients of the copies."""
    if delta.key_heads == delta.value_heads:
        return ()
    ways, rows, element = sizes.tp * sizes.cp, build.sequence_tokens(sizes), sizes.element
    few = 2 * max(1, delta.key_heads // ways) * delta.key_dim
    many = 2 * max(1, delta.value_heads // ways) * delta.key_dim
    read, write = (float(rows * width * element) for width in ((many, few) if backward else (few, many)))
    return (Op(name, Elementwise(K.ADD if backward else K.COPY, rows, many, read, write, dtype=sizes.stored)),)
