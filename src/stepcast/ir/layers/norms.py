"""Norms of a layer: one fused kernel, or each operation of PyTorch's code, with their gradients."""

from stepcast.ir.dtype import DType
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.ops import FP32, K, Ops, cast_op, make_layer, stream_op
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.model_parts import NormKind
from stepcast.ir.work import ElementwiseKind
from stepcast.ir.workload import Layer, Role

# Kernels of an eager RMS norm over one number for each row: the mean's epsilon and its root; of the backward,
# the root's gradient (two products and a power). On a weight that multiplies in fp32: a cast, and Gemma's 1.
NORM_ROW_KERNELS, NORM_ROW_GRADIENT_KERNELS, NORM_WEIGHT_KERNELS = 2, 3, 2


def norm_layer(
    sizes: Sizes, role: Role, after: tuple[str, ...] = (), branches: bool = True, products: int = 1
) -> Layer:
    """Return a norm over the hidden width; *after* names what its backward waits for.

    *products* read its result. Where the stream *branches* before it, its backward ends with the sum of both
    gradients: the norm's and the residual's. Models without norms before their halves branch there, too.
    """
    rows, width = sizes.outer_tokens, sizes.model.hidden
    forward: Ops = ()
    gradient: Ops = ()
    if sizes.model.pre_norms or not branches:
        forward, gradient = norm_forward(sizes, "norm", rows, width), norm_backward(sizes, "norm", rows, width)
    if sizes.casts_activations:
        # The input of each product is cast by itself, and each gradient back before they are added up.
        copies = products if sizes.separate_projections else 1
        numbers = [f" {number}" if copies > 1 else "" for number in range(copies)]
        stream, stored = sizes.stream, sizes.stored
        forward += tuple(cast_op(f"norm cast{number}", rows, width, stream, stored, stored) for number in numbers)
        widen = tuple(cast_op(f"norm gradient cast{number}", rows, width, stored, stream, stored) for number in numbers)
        gradient = widen + gradient
    if branches:
        gradient += (build.add_op(sizes, "residual gradient", rows, width),)
    return make_layer(role, forward, build.wait_for(gradient, after))


def surround_with_norms(
    sizes: Sizes, before: Role, after: Role, *layers: Layer, waits: tuple[str, ...] = (), products: int = 1
) -> tuple[Layer, ...]:
    """Return the *layers* of one half with its norms: see norm_layer for *waits* and *products*."""
    first = norm_layer(sizes, before, waits, products=products)
    last = (norm_layer(sizes, after, branches=False),) if sizes.model.post_norms else ()
    return (first, *layers, *last)


def norm_kind(sizes: Sizes) -> ElementwiseKind:
    return K.RMS_NORM if sizes.model.norm.kind is NormKind.RMS else K.LAYER_NORM


def norm_forward(sizes: Sizes, name: str, rows: int, width: int, heads: bool = False) -> Ops:
    """Norm the stream, or *heads*, which are as narrow as products make them."""
    if sizes.eager_modules and norm_kind(sizes) is K.RMS_NORM and not sizes.framework.runs_liger:
        return eager_norm(sizes, name, rows, width, sizes.stored if heads else sizes.stream)
    return (stream_op(name, norm_kind(sizes), rows, width, 1, 1, sizes.stream),)


def norm_backward(sizes: Sizes, name: str, rows: int, width: int, heads: bool = False) -> Ops:
    """Return the backward of a norm; plain PyTorch reads input and gradient again for the weight's gradient."""
    if sizes.eager_modules and norm_kind(sizes) is K.RMS_NORM and not sizes.framework.runs_liger:
        narrow = sizes.stored if heads else sizes.stream
        return eager_norm_gradient(sizes, name, rows, width, narrow, swapped=heads)
    ops: Ops = (stream_op(f"{name} gradient", norm_kind(sizes), rows, width, 2, 1, sizes.stream, True),)
    if sizes.framework.runs_liger:  # the weight's gradient, always: sums of each multiprocessor, then their sum
        return (*ops, stream_op(f"{name} weight gradient", K.OTHER, 1, width, 1, 1, sizes.stream, True, kernels=3))
    if sizes.fused or not sizes.trains_norms:
        return ops
    vectors = sizes.model.norm.elements(width) // width
    weight = stream_op(f"{name} weight gradient", K.OTHER, rows, width, 2, 0, sizes.stream, True)
    return (*ops, weight, *build.accumulate_vectors(sizes, name, *(width,) * vectors))


def eager_norm(sizes: Sizes, name: str, rows: int, width: int, narrow: DType) -> Ops:
    """Return an RMS norm as transformers runs it, with a kernel for each operation of this code:

        x = x.to(float32); x = x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps); return weight * x.to(input_dtype)

    (models/llama/modeling_llama.py, LlamaRMSNorm). *narrow* is the format of the input and of the result.
    """
    weighted = FP32 if sizes.model.wide_norms else narrow
    ops = [
        stream_op(f"{name} square", K.MUL, rows, width, 1, 1, FP32),
        stream_op(f"{name} mean", K.ROW_SUM, rows, width, 1, 0, FP32),
        stream_op(f"{name} root", K.OTHER, rows, 1, 1, 1, FP32, kernels=NORM_ROW_KERNELS),
        stream_op(f"{name} scale", K.BROADCAST, rows, width, 1, 1, FP32),
        stream_op(f"{name} weight", K.BROADCAST, rows, width, 1, 1, weighted),
    ]
    if weighted is FP32:
        ops.insert(-1, stream_op(f"{name} weight widen", K.MUL, 1, width, 1, 1, FP32, kernels=NORM_WEIGHT_KERNELS))
    if narrow is not FP32:
        ops.insert(0, cast_op(f"{name} widen", rows, width, narrow, FP32))
        ops.insert(len(ops) if weighted is FP32 else -1, cast_op(f"{name} narrow", rows, width, FP32, narrow))
    return tuple(ops)


def eager_norm_gradient(sizes: Sizes, name: str, rows: int, width: int, narrow: DType, swapped: bool = False) -> Ops:
    """Return what autograd makes of it. Of the weight: a product, summed over all rows. Of the input: through
    the scale, and through the root of the mean of squares, whose gradient each element gets a share of; the
    two added up. *swapped*: the gradient arrives with tokens and heads in another order than the input.
    """
    weighted, product = FP32 if sizes.model.wide_norms else narrow, K.STRIDED if swapped else K.MUL
    ops = [
        stream_op(f"{name} gradient weighted", K.BROADCAST, rows, width, 1, 1, weighted),
        stream_op(f"{name} weight product", product, rows, width, 2, 1, weighted),
        stream_op(f"{name} weight gradient", K.COLUMN_SUM, rows, width, 1, 0, weighted),
        stream_op(f"{name} root product", product, rows, width, 2, 1, FP32),
        stream_op(f"{name} gradient scaled", K.BROADCAST, rows, width, 1, 1, FP32),
        stream_op(f"{name} root gradient", K.ROW_SUM, rows, width, 1, 0, FP32),
        stream_op(f"{name} root gradient rows", K.OTHER, rows, 1, 1, 1, FP32, kernels=NORM_ROW_GRADIENT_KERNELS),
        stream_op(f"{name} mean gradient", K.MASK, rows, width, 0, 1, FP32),
        # The square's own power, 1, is a copy.
        stream_op(f"{name} square gradient power", K.COPY, rows, width, 1, 1, FP32),
        stream_op(f"{name} square gradient", K.MUL, rows, width, 1, 1, FP32),
        stream_op(f"{name} square gradient product", K.MUL, rows, width, 2, 1, FP32),
        stream_op(f"{name} gradient sum", K.STRIDED if swapped else K.ADD, rows, width, 2, 1, FP32),
    ]
    if not sizes.trains_norms:
        del ops[1:3]
    if narrow is not FP32:
        ops.insert(
            0 if weighted is FP32 else 3 if sizes.trains_norms else 1,
            cast_op(f"{name} gradient widen", rows, width, narrow, FP32),
        )
        ops.append(cast_op(f"{name} gradient narrow", rows, width, FP32, narrow))
    return tuple(ops)
