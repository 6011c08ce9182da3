"""Norms of a layer: one fused kernel, or each operation of PyTorch's code, with their gradients."""

from stepcast.ir.dtype import DType
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kernels import FP32, K, Ops, cast_op, list_phases, make_layer, stream_op
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.model_parts import NormKind
from stepcast.ir.workload import Layer, Role


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
        forward, gradient = norm_ops(sizes, "norm", rows, width)
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


def norm_ops(sizes: Sizes, name: str, rows: int, width: int, heads: bool = False) -> tuple[Ops, Ops]:
    """Return a norm of the stream, or of *heads*, which are as narrow as products make them, and its backward; plain
    PyTorch reads input and gradient again for the weight's gradient.
    """
    if sizes.writes_out_norms:
        return eager_norm(sizes, name, rows, width, sizes.stored if heads else sizes.stream, swapped=heads)
    kind = K.RMS_NORM if sizes.model.norm.kind is NormKind.RMS else K.LAYER_NORM
    backward: Ops = (stream_op(f"{name} gradient", kind, rows, width, 2, 1, sizes.stream, True),)
    if sizes.framework.runs_liger:  # the weight's gradient, always: sums of each multiprocessor, then their sum
        backward += (stream_op(f"{name} weight gradient", K.OTHER, 1, width, 1, 1, sizes.stream, True, kernels=3),)
    elif not sizes.fused and sizes.trains_norms:
        weight = stream_op(f"{name} weight gradient", K.OTHER, rows, width, 2, 0, sizes.stream, True)
        backward += (weight, *build.accumulate_vectors(sizes, name, *(width,) * sizes.model.norm.vectors))
    return (stream_op(name, kind, rows, width, 1, 1, sizes.stream),), backward


def eager_norm(sizes: Sizes, name: str, rows: int, width: int, narrow: DType, swapped: bool = False) -> tuple[Ops, Ops]:
    """Return an RMS norm as transformers runs it, and its gradient; *narrow* is the format of the input and of the
    result. *swapped*: the gradient arrives with tokens and heads in another order than the input.
    """
    weighted = FP32 if sizes.model.wide_norms else narrow
    return list_phases(
        "norm",
        sizes,
        rows,
        width,
        FP32,
        name,
        narrow=narrow,
        narrows=narrow is not FP32,
        weighted=weighted,
        wide=weighted is FP32,
        product=K.STRIDED if swapped else K.MUL,
        total=K.STRIDED if swapped else K.ADD,
    )
