"""Modules of transformers that are written out in PyTorch, a kernel for each operation of their source."""

from collections.abc import Sequence
from dataclasses import replace

from stepcast.generate.sizes import Sizes
from stepcast.ir.dtype import DType
from stepcast.ir.work import Elementwise, ElementwiseKind, elementwise
from stepcast.ir.workload import Op, OpPart

K = ElementwiseKind
# NewGELUActivation (activations.py): 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); tensors that each
# operation reads. Of its backward: both factors of the product, tanh, the scales, the cube and the sums.
GELU_READS = (1, 1, 2, 1, 1, 1, 1, 2)
GELU_GRADIENT_READS = (2, 2, 1, 2, 1, 1, 1, 1, 2, 2, 2)
# bloom_gelu_forward and bloom_gelu_back (models/bloom/modeling_bloom.py), likewise.
BLOOM_READS = (1, 1, 1, 2, 1, 2, 1, 1, 2)
BLOOM_GRADIENT_READS = (1, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 2, 2, 1, 1, 2, 2)


def written_gelu(sizes: Sizes, rows: int, inner: int) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Autocast computes powers in fp32, and so all that follows one, until the next product."""
    if sizes.casts:
        return _cast_gelu(rows, inner, sizes.stored)
    return _activations(sizes, rows, inner, GELU_READS, GELU_GRADIENT_READS)


def bloom_gelu(sizes: Sizes, rows: int, inner: int) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Products alone, which autocast leaves as they are."""
    return _activations(sizes, rows, inner, BLOOM_READS, BLOOM_GRADIENT_READS)


def _activations(
    sizes: Sizes, rows: int, inner: int, forward: Sequence[int], backward: Sequence[int]
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    def ops(name: str, tensors: Sequence[int]) -> tuple[Op, ...]:
        return tuple(
            Op(f"{name} {at}", elementwise(K.MUL, rows, inner, reads, 1, sizes.stored))
            for at, reads in enumerate(tensors)
        )

    return ops("activation", forward), ops("activation gradient", backward)


def _cast_gelu(rows: int, inner: int, narrow: DType) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The same with operands of two formats, which find their elements one by one, and casts between them."""
    wide, elements = DType.FP32, float(rows * inner)

    def cast(before: DType, after: DType) -> Elementwise:
        return Elementwise(K.CAST, rows, inner, before.bytes * elements, after.bytes * elements, False, before)

    def work(reads: int, dtype: DType = wide, kind: ElementwiseKind = K.MUL) -> Elementwise:
        return elementwise(kind, rows, inner, reads, 1, dtype)

    widen, cut, mixed = cast(narrow, wide), cast(wide, narrow), work(2, wide, K.STRIDED)
    forward = (work(1, narrow), widen, work(1), work(1), mixed, work(1), work(1), work(1), mixed, cut)
    backward = (
        *(widen, mixed, work(2), cut, work(2), work(1), cut, work(1), work(1), work(1), work(2), cut),
        *(work(2, narrow), work(1, narrow), work(2, narrow)),
    )
    return (
        tuple(Op(f"activation {at}", each) for at, each in enumerate(forward)),
        tuple(Op(f"activation gradient {at}", each) for at, each in enumerate(backward)),
    )


# cap * tanh(x / cap): tensors that each operation reads, and of the backward.
CAP_READS, CAP_GRADIENT_READS = (1, 1, 1), (1, 2, 1)


def capped(name: str, rows: int, columns: int, dtype: DType) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """A soft cap of *rows* x *columns* numbers, and its gradient."""
    return (
        tuple(
            Op(f"{name} cap {at}", elementwise(K.MUL, rows, columns, reads, 1, dtype))
            for at, reads in enumerate(CAP_READS)
        ),
        tuple(
            Op(f"{name} cap gradient {at}", elementwise(K.MUL, rows, columns, reads, 1, dtype))
            for at, reads in enumerate(CAP_GRADIENT_READS)
        ),
    )


def written_gate(
    kind: ElementwiseKind, rows: int, inner: int, dtype: DType, sliced: bool
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The activation of one side times the other; *sliced*: both are halves of one product's result, which
    their kernels have to find, and whose gradients are joined.
    """

    def op(name: str, kind: ElementwiseKind, reads: float, backward: bool = False) -> Op:
        return Op(name, elementwise(kind, rows, inner, reads, 1, dtype, backward))

    if not sliced:
        return (
            (
                replace(op("activation", kind, 1), part=OpPart.ACTIVATION),
                replace(op("gate", K.MUL, 2), part=OpPart.ACTIVATION),
            ),
            (
                op("gate gradient", K.MUL, 2),
                op("up gradient", K.MUL, 2),
                op("activation gradient", kind, 2, backward=True),
            ),
        )
    return (
        (
            replace(op("activation", K.BROADCAST, 1), part=OpPart.ACTIVATION),
            replace(op("gate", K.BROADCAST, 2), part=OpPart.ACTIVATION),
        ),
        (
            op("gate gradient", K.BROADCAST, 2),
            op("up gradient", K.MUL, 2),
            op("activation gradient", K.STRIDED, 2),
            Op("join gradients", elementwise(K.COPY, rows, 2 * inner, 1, 1, dtype)),
        ),
    )


def clamped_gate(rows: int, inner: int, dtype: DType) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """GptOssExperts (models/gpt_oss/modeling_gpt_oss.py): both sides are every second column of the product;
    they are clamped, (up + 1) * gate * sigmoid(alpha * gate).
    """

    def op(name: str, kind: ElementwiseKind, reads: float, columns: int = inner) -> Op:
        return Op(name, elementwise(kind, rows, columns, reads, 1, dtype))

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


def expert_bias(name: str, rows: int, width: int, groups: int, dtype: DType) -> tuple[tuple[Op, ...], Op]:
    """A bias looked up for each row and added; its gradient is summed over the rows of an expert in turn."""
    forward = (
        Op(f"{name} bias rows", elementwise(K.COPY, rows, width, 0, 1, dtype)),
        Op(f"{name} bias", elementwise(K.ADD, rows, width, 2, 1, dtype)),
    )
    summed = elementwise(K.SCATTER_SUM, max(1, rows // groups), width * groups, 1, 0, dtype)
    return forward, Op(f"{name} bias gradient", summed)


Parts = tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]


def grouped_masks(sizes: Sizes, rows: int, width: int, inner: int, wide: bool) -> tuple[Parts, Parts]:
    """What stands before, between and after the experts' grouped products, and what their gradients add.

    grouped_mm_experts_forward (integrations/moe.py) fills rows of no expert with zeros three times, twice in
    a copy, weighs the results, brings them back into the tokens' order and sums those of one token. *wide*:
    weights are in fp32, and so is all from there on.
    """
    dtype, weighed = sizes.stored, DType.FP32 if wide else sizes.stored
    tokens = sizes.outer_tokens
    each = max(1, rows // tokens)

    def op(name: str, kind: ElementwiseKind, columns: int, reads: float, writes: float = 1) -> Op:
        return Op(name, elementwise(kind, rows, columns, reads, writes, dtype))

    def late(name: str, kind: ElementwiseKind, reads: float, writes: float = 1) -> Op:
        return Op(name, elementwise(kind, rows, width, reads, writes, weighed))

    def cast(name: str, before: DType, after: DType, count: int = tokens) -> tuple[Op, ...]:
        elements = float(count * width)
        read, write = before.bytes * elements, after.bytes * elements
        return (Op(name, Elementwise(K.CAST, count, width, read, write, False, before)),) if wide else ()

    forward = (
        (op("mask input", K.MASK, width, 1),),
        (op("mask up copy", K.COPY, inner, 1), op("mask up", K.MASK, inner, 1)),
        (
            op("mask down copy", K.COPY, width, 1),
            op("mask down", K.MASK, width, 1),
            late("weigh", K.STRIDED if wide else K.BROADCAST, 1),
            late("unsort", K.COPY, 1),
            Op("sum", elementwise(K.ROW_SUM, tokens, each * width, 1, 1 / each, weighed)),
            *cast("sum narrow", weighed, dtype),
        ),
    )
    backward = (
        (op("mask input gradient copy", K.COPY, width, 1), op("mask input gradient", K.MASK, width, 1)),
        (op("mask up gradient copy", K.COPY, inner, 1), op("mask up gradient", K.MASK, inner, 1)),
        (
            *cast("sum gradient widen", dtype, weighed),
            late("sum gradient", K.BROADCAST, 0),
            late("unsort gradient fill", K.FILL, 0),
            late("unsort gradient", K.BROADCAST, 1),
            late("weigh product", K.STRIDED if wide else K.MUL, 2),
            late("weigh gradient", K.BROADCAST, 1),
            *cast("weigh gradient narrow", weighed, dtype, rows),
            late("weight gradient sum", K.ROW_SUM, 1, 0),
            op("mask down gradient copy", K.COPY, width, 1),
            op("mask down gradient", K.MASK, width, 1),
        ),
    )
    return forward, backward
