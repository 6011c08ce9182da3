"""The dense MLP: norm, first matmul, activation, second matmul."""

from dataclasses import replace

from stepcast.ir.framework import Kernels
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kernels import K, Ops, list_phases
from stepcast.ir.layers.operators import Linear
from stepcast.ir.layers.sizes import SavedTensor, Sizes
from stepcast.ir.model_parts import Activation, LayerParts
from stepcast.ir.strategy import RecomputeModule as M
from stepcast.ir.types import DType
from stepcast.ir.work import ElementwiseKind
from stepcast.ir.workload import Layer, Role

ACTIVATIONS: dict[Activation, ElementwiseKind] = {
    Activation.SILU: K.SILU,
    Activation.GELU: K.GELU,
    Activation.GELU_NEW: K.GELU,
    Activation.GELU_BLOOM: K.GELU,
    Activation.RELU: K.OTHER,
    Activation.SQUARED_RELU: K.OTHER,
}


def mlp_saved(
    sizes: Sizes, rows: float, inner: float, freed_by: tuple[M, ...], activation_freed_by: tuple[M, ...]
) -> list[SavedTensor]:
    """Return the inputs of the activation, and its result, which the second matmul needs.

    A gated activation of plain PyTorch saves gate, up, the activated gate and the product; torch.compile
    computes the activated gate again.
    """
    model, elements, element = sizes.model, rows * inner, sizes.stored.bytes
    sides = model.sides
    if sizes.fused_by_hand:
        input_bytes = DType.FP8.bytes if sizes.framework.fp8_activations else element
        result_bytes = sizes.matmul_bytes
    elif model.activation is Activation.RELU and not model.gated:
        # Its own result, which the second matmul needs too, is enough.
        input_bytes, result_bytes = element, 0.0
    elif sizes.eager_modules and model.activation is Activation.GELU_NEW:
        # Its input, both factors of the last product and the tanh; autocast has them in fp32.
        input_bytes, result_bytes = element * sides, 4 * sizes.stream.bytes + element - element * sides
        sides = 1
    else:
        activated_gate = model.gated and sizes.framework.kernels is Kernels.PLAIN and not sizes.framework.runs_liger
        products = sizes.input_copies("down")  # the second matmul's input, unless its weights are frozen
        input_bytes, result_bytes = element, (products + (1 if activated_gate else 0)) * element
    return [
        SavedTensor("activation inputs", elements * sides * input_bytes, freed_by),
        SavedTensor("activation results", elements * result_bytes, activation_freed_by),
    ]


def mlp_layers(sizes: Sizes, roles: tuple[Role, Role], ffn: int, ends: bool) -> tuple[Layer, Layer]:
    """Return both linear layers and the activation between them; *ends*: the branch joins the stream here."""
    inner, model, bias = ffn // sizes.tp, sizes.model, sizes.model.biases.mlp
    up = Linear("up", sizes.tokens, model.hidden, model.sides * inner, sizes.dtype, bias=bias)
    down = Linear("down", sizes.tokens, inner, model.hidden, sizes.dtype, bias=bias)
    firsts: tuple[Linear, ...] = (up,)
    if sizes.separate_projections and model.gated:
        firsts = (replace(up, name="gate", outputs=inner), replace(up, outputs=inner))
    first = build.column_layer(sizes, roles[0], firsts, *activation_ops(sizes, sizes.tokens, inner))
    return build.sum_input_gradients(sizes, first, len(firsts)), build.row_layer(sizes, roles[1], down, ends)


def list_operators(sizes: Sizes, block: LayerParts) -> tuple[Layer, ...]:
    layers = mlp_layers(sizes, (Role.MLP_UP, Role.MLP_DOWN), sizes.model.ffn, ends=True)
    waits, roles = build.column_waits(sizes, Role.MLP_UP), (Role.MLP_NORM, Role.MLP_POST_NORM)
    return build.surround_with_norms(sizes, *roles, *layers, waits=waits, products=sizes.model.sides)


def list_saved(sizes: Sizes, block: LayerParts) -> list[SavedTensor]:
    model, tokens, inner = sizes.model, sizes.tokens, sizes.model.ffn / sizes.tp
    if sizes.alternates_matmuls:
        widths = inner + model.hidden / sizes.strategy.outer_ways
        return [SavedTensor("outputs of gate and down", tokens * widths * sizes.stored.bytes)]
    return mlp_saved(sizes, tokens, inner, (M.MLP,), (M.MLP,))


def transient_bytes(sizes: Sizes, block: LayerParts) -> float:
    return sizes.tokens * (sizes.model.ffn / sizes.tp) * sizes.stored.bytes * sizes.model.sides


def activation_ops(sizes: Sizes, rows: int, inner: int, weighted: bool = False) -> tuple[Ops, Ops]:
    """Return the non-linearity and, where gated, the product with the other side; and their gradients.

    *weighted*: times the router's probability, as Megatron-Core does inside its activation.
    """
    model, eager, name = sizes.model, sizes.eager_modules, "activation"
    if eager and model.activation is Activation.GELU_NEW:
        name = "autocast gelu" if sizes.casts_activations else "gelu-new"
    elif eager and model.activation is Activation.GELU_BLOOM:
        name = "gelu-bloom"
    elif model.gated and not sizes.fused:
        name = "clamped gate" if eager and weighted and model.biases.mlp else "plain gate"
    elif model.gated:
        name = "compiled gate" if sizes.fused_by_hand and not sizes.framework.op_fuser else "fused gate"
    kind, sliced = ACTIVATIONS[model.activation], weighted or model.joined
    return list_phases(name, sizes, rows, inner, sizes.stored, kind=kind, weighted=weighted, sliced=sliced)
