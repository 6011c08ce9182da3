"""The dense MLP: norm, first matmul, activation, second matmul."""

from collections.abc import Sequence
from dataclasses import replace

from stepcast.ir.architecture import Architecture, Split, Weight, WeightPart, linear
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Kernels
from stepcast.ir.layers import norms
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kind import AdaptedLinear, LayerKind, SavedTensor
from stepcast.ir.layers.operators import Linear
from stepcast.ir.layers.ops import FP32, K, Ops, cast_op, stream_op
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.model_parts import Activation, LayerParts
from stepcast.ir.strategy import RecomputeModule as M
from stepcast.ir.work import ElementwiseKind
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
# transformers' NewGELUActivation (activations.py): 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); tensors
# that each operation reads. Of its backward: both factors of the product, tanh, the scales, cube and sums.
GELU_READS = (1, 1, 2, 1, 1, 1, 1, 2)
GELU_GRADIENT_READS = (2, 2, 1, 2, 1, 1, 1, 1, 2, 2, 2)
# bloom_gelu_forward and bloom_gelu_back (models/bloom/modeling_bloom.py), likewise.
BLOOM_READS = (1, 1, 1, 2, 1, 2, 1, 1, 2)
BLOOM_GRADIENT_READS = (1, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 2, 2, 1, 1, 2, 2)


def mlp_weights(model: Architecture, name: str, part: WeightPart, ffn: int) -> list[Weight]:
    weights: list[Weight] = []
    for side in ("gate", "up") if model.gated else ("up",):
        weights += linear(f"{name}.{side}", part, model.hidden, ffn, model.biases.mlp, Split.TENSOR)
    return weights + linear(f"{name}.down", part, ffn, model.hidden, model.biases.mlp, Split.TENSOR, by_rows=True)


def mlp_adapters(model: Architecture, ffn: int, width: int, prefix: str = "", experts: int = 0) -> list[AdaptedLinear]:
    """Return the linear layers that LoRA can adapt."""
    sides = ("gate", "up") if model.gated else ("up",)
    firsts = [AdaptedLinear(side, f"{prefix}up", width, ffn, experts=experts) for side in sides]
    return [*firsts, AdaptedLinear("down", f"{prefix}down", ffn, width, by_rows=True, experts=experts)]


def mlp_saved(
    sizes: Sizes, rows: float, inner: float, freed_by: tuple[M, ...], activation_freed_by: tuple[M, ...]
) -> list[SavedTensor]:
    """Return the inputs of the activation, and its result, which the second matmul needs.

    A gated activation of plain PyTorch saves gate, up, the activated gate and the product; torch.compile
    computes the activated gate again.
    """
    model, elements, element = sizes.model, rows * inner, sizes.stored.bytes
    sides = 2 if model.gated else 1
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


def mlp_transient(sizes: Sizes, rows: float, inner: float) -> float:
    return rows * inner * sizes.stored.bytes * (2 if sizes.model.gated else 1)


def mlp_layers(sizes: Sizes, roles: tuple[Role, Role], ffn: int, ends: bool) -> tuple[Layer, Layer]:
    """Return both linear layers and the activation between them; *ends*: the branch joins the stream here."""
    inner, model, bias = ffn // sizes.tp, sizes.model, sizes.model.biases.mlp
    up = Linear("up", sizes.tokens, model.hidden, (2 if model.gated else 1) * inner, sizes.dtype, bias=bias)
    down = Linear("down", sizes.tokens, inner, model.hidden, sizes.dtype, bias=bias)
    firsts: tuple[Linear, ...] = (up,)
    if sizes.separate_projections and model.gated:
        firsts = (replace(up, name="gate", outputs=inner), replace(up, outputs=inner))
    first = build.column_layer(sizes, roles[0], firsts, *activation_ops(sizes, sizes.tokens, inner))
    return build.sum_input_gradients(sizes, first, len(firsts)), build.row_layer(sizes, roles[1], down, ends)


def _operators(sizes: Sizes, block: LayerParts) -> tuple[Layer, ...]:
    products = 2 if sizes.model.gated else 1
    layers = mlp_layers(sizes, (Role.MLP_UP, Role.MLP_DOWN), sizes.model.ffn, ends=True)
    waits, roles = build.column_waits(sizes, Role.MLP_UP), (Role.MLP_NORM, Role.MLP_POST_NORM)
    return norms.surround_with_norms(sizes, *roles, *layers, waits=waits, products=products)


def _saved(sizes: Sizes, block: LayerParts) -> list[SavedTensor]:
    model, tokens, inner = sizes.model, sizes.tokens, sizes.model.ffn / sizes.tp
    if sizes.alternates_matmuls:
        widths = inner + model.hidden / sizes.strategy.outer_ways
        return [SavedTensor("outputs of gate and down", tokens * widths * sizes.stored.bytes)]
    return mlp_saved(sizes, tokens, inner, (M.MLP,), (M.MLP,))


MLP = LayerKind(
    lambda model: mlp_weights(model, "mlp", WeightPart.MLP, model.ffn),
    None,
    _operators,
    _saved,
    lambda sizes, block: mlp_transient(sizes, sizes.tokens, sizes.model.ffn / sizes.tp),
    lambda model: mlp_adapters(model, model.ffn, model.hidden),
)


def activation_ops(sizes: Sizes, rows: int, inner: int, weighted: bool = False) -> tuple[Ops, Ops]:
    """Return the non-linearity and, where gated, the product with the other side; and their gradients.

    *weighted*: times the router's probability, as Megatron-Core does inside its activation.
    """
    model, dtype, kind = sizes.model, sizes.stored, ACTIVATIONS[sizes.model.activation]
    if sizes.eager_modules and model.activation is Activation.GELU_NEW:
        # Autocast computes powers in fp32, and so all that follows one, until the next product.
        if sizes.casts_activations:
            return _autocast_gelu(rows, inner, dtype)
        return _product_chains(rows, inner, dtype, GELU_READS, GELU_GRADIENT_READS)
    if sizes.eager_modules and model.activation is Activation.GELU_BLOOM:
        return _product_chains(rows, inner, dtype, BLOOM_READS, BLOOM_GRADIENT_READS)
    if model.gated and not sizes.fused:
        if sizes.eager_modules and weighted and model.biases.mlp:
            return _clamped_gate(rows, inner, dtype)
        return _eager_gate(kind, rows, inner, dtype, sliced=weighted or model.joined)
    if not model.gated:
        kinds, passes, backward_passes = (kind, kind), (1, 1), (2, 1)
    elif sizes.fused_by_hand and not sizes.framework.op_fuser:
        reads = GATE_BACKWARD_PASSES + (GATE_WEIGHT_PASSES if weighted else 0) - 2
        kinds, passes, backward_passes = (K.MUL, K.MUL), (2, 1), (reads, 2)
    else:
        kinds, passes, backward_passes = (K.SWIGLU, K.SWIGLU), (2, 1), (3, 2)
    backward = kinds[1] is not K.MUL
    return (
        (stream_op("activation", kinds[0], rows, inner, *passes, dtype, part=OpPart.ACTIVATION),),
        (stream_op("activation gradient", kinds[1], rows, inner, *backward_passes, dtype, backward),),
    )


def _product_chains(
    rows: int, inner: int, dtype: DType, forward: Sequence[int], backward: Sequence[int]
) -> tuple[Ops, Ops]:
    """Return an activation of one kernel per operation, each reading that many tensors."""

    def chain(name: str, reads: Sequence[int]) -> Ops:
        return tuple(stream_op(f"{name} {at}", K.MUL, rows, inner, count, 1, dtype) for at, count in enumerate(reads))

    return chain("activation", forward), chain("activation gradient", backward)


def _autocast_gelu(rows: int, inner: int, narrow: DType) -> tuple[Ops, Ops]:
    """Return the same with operands of two formats, which find their elements one by one, and casts between."""

    def op(reads: int, dtype: DType = FP32, kind: ElementwiseKind = K.MUL) -> Op:
        return stream_op("", kind, rows, inner, reads, 1, dtype)

    widen, cut = cast_op("", rows, inner, narrow, FP32), cast_op("", rows, inner, FP32, narrow)
    mixed = op(2, FP32, K.STRIDED)
    forward = (op(1, narrow), widen, op(1), op(1), mixed, op(1), op(1), op(1), mixed, cut)
    backward = (
        *(widen, mixed, op(2), cut, op(2), op(1), cut, op(1), op(1), op(1), op(2), cut),
        *(op(2, narrow), op(1, narrow), op(2, narrow)),
    )
    return (
        tuple(replace(step, name=f"activation {at}") for at, step in enumerate(forward)),
        tuple(replace(step, name=f"activation gradient {at}") for at, step in enumerate(backward)),
    )


def _eager_gate(kind: ElementwiseKind, rows: int, inner: int, dtype: DType, sliced: bool) -> tuple[Ops, Ops]:
    """Return the activation of one side times the other; *sliced*: both are halves of one product's result,
    which their kernels have to find, and whose gradients are joined.
    """
    first, second = (K.BROADCAST, K.BROADCAST) if sliced else (kind, K.MUL)
    forward = (
        stream_op("activation", first, rows, inner, 1, 1, dtype, part=OpPart.ACTIVATION),
        stream_op("gate", second, rows, inner, 2, 1, dtype, part=OpPart.ACTIVATION),
    )
    backward: Ops = (
        stream_op("gate gradient", second, rows, inner, 2, 1, dtype),
        stream_op("up gradient", K.MUL, rows, inner, 2, 1, dtype),
        stream_op("activation gradient", K.STRIDED if sliced else kind, rows, inner, 2, 1, dtype, not sliced),
    )
    if sliced:
        backward += (stream_op("join gradients", K.COPY, rows, 2 * inner, 1, 1, dtype),)
    return forward, backward


def _clamped_gate(rows: int, inner: int, dtype: DType) -> tuple[Ops, Ops]:
    """Return the gate of GptOssExperts (models/gpt_oss/modeling_gpt_oss.py): both sides are every second
    column of the product; they are clamped, (up + 1) * gate * sigmoid(alpha * gate).
    """

    def op(name: str, kind: ElementwiseKind, reads: float, columns: int = inner) -> Op:
        return stream_op(name, kind, rows, columns, reads, 1, dtype)

    forward = (
        op("clamp gate", K.BROADCAST, 1),
        op("clamp up", K.BROADCAST, 1),
        op("alpha", K.MUL, 1),
        op("sigmoid", K.MUL, 1),
        op("gate", K.MUL, 2),
        op("up and one", K.MUL, 1),
        op("product", K.MUL, 2),
    )
    backward = (
        *(op(f"product gradient {at}", K.MUL, 2) for at in range(4)),
        op("sigmoid gradient", K.MUL, 2),
        op("alpha gradient", K.MUL, 1),
        op("gate gradient", K.ADD, 2),
        *(op(f"within bounds {at}", K.BROADCAST, 1) for at in range(3)),
        *(op(f"clamp gradient {at}", K.BROADCAST, 2) for at in range(2)),
        *(op(f"side fill {at}", K.FILL, 0, 2 * inner) for at in range(2)),
        *(op(f"side {at}", K.BROADCAST, 1) for at in range(2)),
        op("sides", K.ADD, 2, 2 * inner),
    )
    return forward, backward
