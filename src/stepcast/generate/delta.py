"""Gated delta nets: norm, in-projection, convolution, delta rule in chunks, gated norm, out-projection.

Tensor ranks share heads, the projections are split like those of an MLP, and context parallel ranks exchange
positions for heads (Megatron-LM, core/ssm/gated_delta_net.py; the same layers in transformers'
models/qwen3_next). The rule is flash-linear-attention's, which takes as many heads of queries and keys as of
values: where a model has fewer, they are repeated before it and their gradients added up after it.
"""

from functools import partial

from stepcast.generate.parts import K, Linear, Ops, gated, layer, norm_backward, norm_forward, norm_layer
from stepcast.generate.sequence import arranged_in, arranged_out, core_tokens
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import column_layer, column_waits, row_layer
from stepcast.ir.recurrent import Delta, delta_rule_of
from stepcast.ir.work import Elementwise, elementwise
from stepcast.ir.workload import Layer, Op, Role

# Kernels of flash-linear-attention's forward and backward, norms of queries and keys included.
RULE_KERNELS, RULE_GRADIENT_KERNELS = 8, 12


def delta_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """The layers of one gated delta net, in the order of the forward."""
    delta, model = sizes.model.delta, sizes.model
    assert delta is not None
    values = delta.values // sizes.tp
    into = Linear("in", sizes.tokens, model.hidden, delta.projected // sizes.tp, sizes.dtype, adapted=False)
    out = Linear("out", sizes.tokens, values, model.hidden, sizes.dtype, adapted=False)
    layers = [
        norm_layer(sizes, Role.DELTA_NORM, sizes.outer_tokens, column_waits(sizes, Role.DELTA_IN)),
        column_layer(sizes, Role.DELTA_IN, (into,)),
        _rule(sizes, delta),
        _gate_norm(sizes, delta),
        row_layer(sizes, Role.DELTA_OUT, out),
    ]
    if model.post_norms:
        layers.append(norm_layer(sizes, Role.DELTA_POST_NORM, sizes.outer_tokens, branches=False))
    return tuple(layers)


def _rule(sizes: Sizes, delta: Delta) -> Layer:
    """Convolution with its activation, decay and strength of each head, and the rule."""
    strategy, ways, dtype = sizes.strategy, sizes.tp * sizes.cp, sizes.stored
    rows, channels, heads = core_tokens(sizes), delta.channels // ways, max(1, delta.value_heads // ways)
    rule = partial(delta_rule_of, delta, strategy.micro_batch, strategy.seq, ways, dtype=sizes.unquantised)
    arranged = partial(arranged_in, sizes, delta.projected // sizes.tp)
    returned = partial(arranged_out, sizes, delta.values // sizes.tp)
    decay = elementwise(K.SILU, rows, 2 * heads, 1, 1.5, dtype)  # decays in fp32, strengths as they came
    decayed = elementwise(K.SILU, rows, 2 * heads, 2.5, 1, dtype, backward=True)
    convolved = elementwise(K.CONVOLUTION, rows, channels, 1, 1, dtype)
    back = elementwise(K.CONVOLUTION, rows, channels, 2, 1, dtype, backward=True)
    return layer(
        Role.DELTA_RULE,
        (
            *arranged(""),
            Op("convolution", convolved),
            *_repeated(sizes, delta, "repeat keys", summed=False),
            Op("decay", decay),
            Op("rule", rule(), kernels=RULE_KERNELS),
            *returned(""),
        ),
        (
            *returned(" gradient"),
            Op("rule gradient", rule(backward=True), kernels=RULE_GRADIENT_KERNELS),
            Op("decay gradient", decayed),
            *_repeated(sizes, delta, "sum key gradients", summed=True),
            Op("convolution gradient", back),
            *arranged(" gradient"),
        ),
    )


def _repeated(sizes: Sizes, delta: Delta, name: str, summed: bool) -> Ops:
    """Queries and keys for each head of values; backward the sum of theirs."""
    if delta.key_heads == delta.value_heads:
        return ()
    ways, rows, element = sizes.tp * sizes.cp, core_tokens(sizes), sizes.element
    few = 2 * max(1, delta.key_heads // ways) * delta.key_dim
    many = 2 * max(1, delta.value_heads // ways) * delta.key_dim
    read, write = (many, few) if summed else (few, many)
    kind = K.ADD if summed else K.COPY
    work = Elementwise(
        kind, rows, many, float(rows * read * element), float(rows * write * element), dtype=sizes.stored
    )
    return (Op(name, work),)


def _gate_norm(sizes: Sizes, delta: Delta) -> Layer:
    """An RMS norm of each head, times the activated gate."""
    rows, width = sizes.tokens * (delta.value_heads // sizes.tp), delta.value_dim
    gate, gate_gradient = gated(sizes, "gate", rows, width)
    return layer(
        Role.DELTA_GATE_NORM,
        (*norm_forward(sizes, "head norm", rows, width, heads=True), *gate),
        (*gate_gradient, *norm_backward(sizes, "head norm", rows, width, heads=True)),
    )
