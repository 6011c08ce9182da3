"""The feed-forward half of a block: a dense MLP or a mixture of experts."""

from dataclasses import replace

from stepcast.generate.by_operation import (
    bloom_gelu,
    clamped_gate,
    expert_bias,
    grouped_masks,
    written_gate,
    written_gelu,
)
from stepcast.generate.expert_bias import clamped, weighted_bias
from stepcast.generate.parts import K, Linear, Ops, add, collective, layer, norm_layer, with_sums
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import column_layer, column_waits, row_layer
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Kernels, Modules
from stepcast.ir.group import Group
from stepcast.ir.model_parts import Activation, Experts
from stepcast.ir.work import CollectiveKind, Elementwise, ElementwiseKind, elementwise
from stepcast.ir.workload import Layer, Op, OpPart, Role

ACTIVATIONS: dict[Activation, ElementwiseKind] = {
    Activation.SILU: K.SILU,
    Activation.GELU: K.GELU,
    Activation.GELU_NEW: K.GELU,
    Activation.GELU_BLOOM: K.GELU,
    Activation.RELU: K.OTHER,
    Activation.SQUARED_RELU: K.OTHER,
}

# Megatron-Core has a compiler make one kernel of a gate's backward, which joins the gradients of both sides,
# and one of the sum over each row that the router's gradient needs: together 12.7 to 14.1 passes over the
# inner width on an H200 (tools/measure_experts.py), of which the second reads three. The forward is as fast
# as a product of two tensors.
GATE_BACKWARD_PASSES, GATE_WEIGHT_PASSES = 11, 3
# Of the fused router with the counts that an exchange needs: "Optimizing DeepSeek-V3 Training Performance on
# NVIDIA GB200 NVL72" (Megatron-LM, docs/discussions, sections 2.1.4 and 2.2.1).
ROUTER_KERNELS = 17


def dense_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """Norm, MLP and residual of a dense block."""
    layers = [
        norm_layer(
            sizes,
            Role.MLP_NORM,
            sizes.outer_tokens,
            column_waits(sizes, Role.MLP_UP),
            products=2 if sizes.model.gated else 1,
        ),
        *_mlp(sizes, (Role.MLP_UP, Role.MLP_DOWN), sizes.model.ffn, ends=True),
    ]
    if sizes.model.post_norms:
        layers.append(norm_layer(sizes, Role.MLP_POST_NORM, sizes.outer_tokens, branches=False))
    return tuple(layers)


def _mlp(sizes: Sizes, roles: tuple[Role, Role], ffn: int, ends: bool) -> tuple[Layer, Layer]:
    inner, model = ffn // sizes.tp, sizes.model
    sides = 2 if model.gated else 1
    bias = model.biases.mlp
    up = Linear("up", sizes.tokens, model.hidden, sides * inner, sizes.dtype, bias=bias)
    down = Linear("down", sizes.tokens, inner, model.hidden, sizes.dtype, bias=bias)
    forward, backward = _activation(sizes, sizes.tokens, inner)
    firsts: tuple[Linear, ...] = (up,)
    if sizes.separate and model.gated:
        firsts = (replace(up, name="gate", outputs=inner), replace(up, outputs=inner))
    first = column_layer(sizes, roles[0], firsts, forward, backward)
    return (with_sums(sizes, first, len(firsts)), row_layer(sizes, roles[1], down, ends))


def _activation(sizes: Sizes, rows: int, inner: int, weighted: bool = False) -> tuple[Ops, Ops]:
    """The non-linearity and, where gated, the product with the other side; and their gradients.

    *weighted*: times the router's probability, as Megatron-Core does inside its activation.
    """
    dtype, kind = sizes.stored, ACTIVATIONS[sizes.model.activation]
    if sizes.by_operation and sizes.model.activation is Activation.GELU_NEW:
        return written_gelu(sizes, rows, inner)
    if sizes.by_operation and sizes.model.activation is Activation.GELU_BLOOM:
        return bloom_gelu(sizes, rows, inner)
    if not sizes.model.gated:
        return (
            (_activated("activation", elementwise(kind, rows, inner, 1, 1, dtype)),),
            (Op("activation gradient", elementwise(kind, rows, inner, 2, 1, dtype, backward=True)),),
        )
    if not sizes.fused:
        if sizes.by_operation and weighted and sizes.model.biases.mlp:
            return clamped_gate(rows, inner, dtype)
        return written_gate(kind, rows, inner, dtype, sliced=weighted or sizes.model.joined)
    if sizes.framework.kernels is Kernels.FUSED:
        passes = GATE_BACKWARD_PASSES + (GATE_WEIGHT_PASSES if weighted else 0)
        return (
            (_activated("activation", elementwise(K.MUL, rows, inner, 2, 1, dtype)),),
            (Op("activation gradient", elementwise(K.MUL, rows, inner, passes - 2, 2, dtype)),),
        )
    return (
        (_activated("activation", elementwise(K.SWIGLU, rows, inner, 2, 1, dtype)),),
        (Op("activation gradient", elementwise(K.SWIGLU, rows, inner, 3, 2, dtype, backward=True)),),
    )


def _activated(name: str, work: Elementwise) -> Op:
    return Op(name, work, part=OpPart.ACTIVATION)


def expert_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """Norm, router, dispatch, experts, combine; shared experts beside them; residual.

    Tokens stay split over tp on their way to the experts (Megatron-Core's all-to-all dispatcher); experts
    that are themselves split gather the tokens of their expert-tp group.
    """
    experts = sizes.model.experts
    assert experts is not None
    layers = [
        norm_layer(sizes, Role.EXPERTS_NORM, sizes.outer_tokens),
        _router(sizes, experts),
        _dispatch(sizes, experts),
        *_routed(sizes, experts),
        _combine(sizes, experts),
    ]
    if experts.shared_ffn:
        layers += _mlp(sizes, (Role.SHARED_UP, Role.SHARED_DOWN), experts.shared_ffn, ends=False)
        layers.append(_sum(sizes))
    if sizes.model.post_norms:
        layers.append(norm_layer(sizes, Role.EXPERTS_POST_NORM, sizes.outer_tokens, branches=False))
    return tuple(layers)


def routed_rows(sizes: Sizes) -> int:
    """Rows that arrive at the busiest expert rank."""
    experts = sizes.model.experts
    assert experts is not None
    return max(1, round(sizes.outer_tokens * experts.top_k * sizes.strategy.busiest_share))


def expert_width(sizes: Sizes) -> int:
    experts = sizes.model.experts
    assert experts is not None
    return experts.latent or sizes.model.hidden


def dispatch_bytes(sizes: Sizes) -> int:
    return routed_rows(sizes) * expert_width(sizes) * sizes.element


def _router(sizes: Sizes, experts: Experts) -> Layer:
    """Scores in fp32, their softmax and the choice of the best."""
    rows = sizes.outer_tokens
    wide = not sizes.by_operation or sizes.model.latent is not None
    dtype = DType.FP32 if wide else sizes.stored
    linear = Linear("router", rows, sizes.model.hidden, experts.count, dtype, adapted=False)
    forward, backward, weight = (
        _router_products(sizes, linear)
        if sizes.fused
        else (linear.forward(sizes), linear.input_gradient(sizes), linear.weight_gradient(sizes))
    )
    if experts.latent:
        down = Linear("latent down", rows, sizes.model.hidden, experts.latent, sizes.dtype, adapted=False)
        forward += down.forward(sizes)
        backward += down.input_gradient(sizes)
        weight += down.weight_gradient(sizes)
    choice = elementwise(K.SOFTMAX, rows, experts.count, 2, 1, DType.FP32)
    back = elementwise(K.SOFTMAX, rows, experts.count, 2, 1, DType.FP32, backward=True)
    return layer(
        Role.ROUTER,
        (*forward, Op("choice", choice, kernels=ROUTER_KERNELS, host_reads=experts_counted(sizes))),
        (Op("choice gradient", back), *backward),
        weight,
    )


def experts_counted(sizes: Sizes) -> bool:
    """Whether the host reads how many tokens each expert got, which sizes all that follows.

    It does unless the experts' capacity fixes that, or the matmuls take their sizes from the GPU.
    """
    counted = sizes.strategy.expert_capacity is None and not sizes.framework.fused_experts
    return counted and sizes.framework.modules is not Modules.TRANSFORMERS


def _router_products(sizes: Sizes, linear: Linear) -> tuple[Ops, Ops, Ops]:
    """Megatron-Core's ``RouterGatingLinearFunction``.

    The forward multiplies what is stored and writes fp32. The backward widens its operands, which Transformer
    Engine then multiplies as TF32, and narrows the result.
    """
    if sizes.stored is DType.FP32:
        return linear.forward(sizes), linear.input_gradient(sizes), linear.weight_gradient(sizes)
    elements = float(linear.rows * linear.inputs)
    narrow, wide = sizes.element * elements, DType.FP32.bytes * elements
    back = replace(linear, dtype=DType.TF32)
    widened = Elementwise(K.CAST, linear.rows, linear.inputs, narrow, wide, dtype=sizes.stored)
    narrowed = Elementwise(K.CAST, linear.rows, linear.inputs, wide, narrow, dtype=sizes.stored)
    weight = back.weight_gradient(sizes)
    return (
        replace(linear, dtype=sizes.stored).forward(sizes),
        (*back.input_gradient(sizes), Op("router narrow", narrowed)),
        (Op("router widen", widened), *weight) if weight else (),
    )


def _exchange(sizes: Sizes, name: str) -> Ops:
    layout = sizes.strategy.layout
    if layout.ep == 1:
        return ()
    return (collective(name, CollectiveKind.ALL_TO_ALL, dispatch_bytes(sizes), Group.EP),)


def _split_experts(sizes: Sizes, name: str, kind: CollectiveKind) -> Ops:
    ways = sizes.strategy.layout.expert_tp_size
    if ways == 1:
        return ()
    return (collective(f"{name} {kind}", kind, dispatch_bytes(sizes) * ways, Group.EXPERT_TP),)


def _permute(sizes: Sizes, name: str, backward: bool = False) -> Op:
    return Op(name, elementwise(K.COPY, routed_rows(sizes), expert_width(sizes), 1, 1, sizes.stored, backward))


def _permute_gradient(sizes: Sizes) -> Ops:
    """Rows of a token summed; plain PyTorch finds their places in zeros, and adds the router's gradient."""
    if not sizes.by_operation:
        return (_permute(sizes, "permute gradient", backward=True),)
    tokens, width, rows = sizes.outer_tokens, expert_width(sizes), routed_rows(sizes)
    return (
        Op("permute gradient fill", elementwise(K.FILL, tokens, width, 0, 1, sizes.stored)),
        Op("permute gradient", elementwise(K.BROADCAST, rows, width, 1, 1, sizes.stored)),
        Op("router gradient sum", elementwise(K.ADD, tokens, width, 2, 1, sizes.stored)),
    )


def _sort(sizes: Sizes, experts: Experts, name: str, backward: bool = False) -> Ops:
    """What arrives from each rank is brought into the order of this rank's experts, where it has several."""
    ep = sizes.strategy.layout.ep
    return (_permute(sizes, name, backward),) if ep > 1 and experts.count > ep else ()


def _dispatch(sizes: Sizes, experts: Experts) -> Layer:
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    return layer(
        Role.DISPATCH,
        (
            _permute(sizes, "permute"),
            *_exchange(sizes, "ep all-to-all dispatch"),
            *_split_experts(sizes, "dispatch expert-tp", gather),
            *_sort(sizes, experts, "sort"),
        ),
        (
            *_sort(sizes, experts, "sort gradient", backward=True),
            *_split_experts(sizes, "dispatch gradient expert-tp", scatter),
            *_exchange(sizes, "ep all-to-all dispatch gradient"),
            *_permute_gradient(sizes),
        ),
    )


def _routed(sizes: Sizes, experts: Experts) -> tuple[Layer, Layer]:
    layout = sizes.strategy.layout
    ways = layout.expert_tp_size
    rows, inner = routed_rows(sizes) * ways, experts.ffn // ways
    groups, width = max(1, experts.count // layout.ep), expert_width(sizes)
    sides = 2 if sizes.model.gated else 1
    # transformers' grouped products take the weights as they are: autocast leaves them in fp32.
    by_operation = sizes.framework.modules is Modules.TRANSFORMERS
    dtype = sizes.strategy.weights if by_operation and sizes.strategy.autocast else sizes.dtype
    up = Linear("up", rows, width, sides * inner, dtype, groups)
    down = Linear("down", rows, inner, width, dtype, groups)
    if sizes.framework.fused_experts:
        return _fused_experts(sizes, up, down)
    forward, backward = _activation(sizes, rows, inner, weighted=True)
    added: tuple[Ops, Ops] = ((), ())
    if sizes.by_operation:
        return _written_experts(sizes, experts, up, down, (forward, backward))
    if sizes.model.biases.mlp and sizes.fused:
        if sizes.model.gated:
            clamp, clamp_gradient = clamped(sizes, rows, inner)
            forward, backward = clamp + forward, backward + clamp_gradient
        added = weighted_bias(sizes, rows, width, groups)
    return (
        layer(
            Role.EXPERTS_UP, up.forward(sizes) + forward, backward + up.input_gradient(sizes), up.weight_gradient(sizes)
        ),
        layer(
            Role.EXPERTS_DOWN,
            down.forward(sizes) + added[0],
            added[1] + down.input_gradient(sizes),
            down.weight_gradient(sizes),
        ),
    )


def _written_experts(
    sizes: Sizes, experts: Experts, up: Linear, down: Linear, gate: tuple[Ops, Ops]
) -> tuple[Layer, Layer]:
    """transformers' grouped products, with what stands around them."""
    (before, between, after), gradients = grouped_masks(sizes, up.rows, up.inputs, up.outputs, experts.wide_weights)
    first, last = up.weight_gradient(sizes), down.weight_gradient(sizes)
    if sizes.model.biases.mlp:
        groups, dtype = up.groups, sizes.stored
        added, summed = expert_bias("up", up.rows, up.outputs, groups, dtype)
        between, first = (*added, *between), (*first, summed)
        added, summed = expert_bias("down", down.rows, down.outputs, groups, dtype)
        after, last = (*added, *after), (*last, summed)
    return (
        layer(
            Role.EXPERTS_UP,
            (*before, *up.forward(sizes), *between, *gate[0]),
            (*gate[1], *gradients[1], *up.input_gradient(sizes), *gradients[0]),
            first,
        ),
        layer(Role.EXPERTS_DOWN, (*down.forward(sizes), *after), (*gradients[2], *down.input_gradient(sizes)), last),
    )


def _fused_experts(sizes: Sizes, up: Linear, down: Linear) -> tuple[Layer, Layer]:
    """Biases, activation and its gradient at the end of the matmuls before them, which also quantise their
    results for the matmuls after them: what arrives from other ranks is left to be quantised
    (``ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8`` and its backward in Transformer Engine).
    """
    quantised = replace(down, quantises_input=False), replace(up, quantises_gradient=False)
    return (
        layer(Role.EXPERTS_UP, up.forward(sizes), quantised[1].input_gradient(sizes), up.weight_gradient(sizes)),
        layer(Role.EXPERTS_DOWN, quantised[0].forward(sizes), down.input_gradient(sizes), down.weight_gradient(sizes)),
    )


def _combine(sizes: Sizes, experts: Experts) -> Layer:
    """Back to the tokens' own ranks, weighted by the router and summed, and the residual."""
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    outer, hidden = sizes.outer_tokens, sizes.model.hidden
    up = Linear("latent up", outer, experts.latent, hidden, sizes.dtype, adapted=False) if experts.latent else None
    return layer(
        Role.COMBINE,
        (
            *_sort(sizes, experts, "unsort"),
            *_split_experts(sizes, "combine expert-tp", scatter),
            *_exchange(sizes, "ep all-to-all combine"),
            *(() if sizes.by_operation else (_permute(sizes, "unpermute"),)),
            *(up.forward(sizes) if up else ()),
            add(sizes, "residual", outer, hidden, OpPart.RESIDUAL),
        ),
        (
            *(up.input_gradient(sizes) if up else ()),
            *(() if sizes.by_operation else (_permute(sizes, "unpermute gradient", backward=True),)),
            *_exchange(sizes, "ep all-to-all combine gradient"),
            *_split_experts(sizes, "combine gradient expert-tp", gather),
            *_sort(sizes, experts, "unsort gradient", backward=True),
        ),
        up.weight_gradient(sizes) if up else (),
    )


def _sum(sizes: Sizes) -> Layer:
    """Shared and routed experts added up; the backward adds the gradients of both inputs."""
    outer, hidden = sizes.outer_tokens, sizes.model.hidden
    return layer(
        Role.EXPERTS_SUM,
        (add(sizes, "shared sum", outer, hidden, OpPart.SUM),),
        (add(sizes, "shared gradient sum", outer, hidden),),
    )
