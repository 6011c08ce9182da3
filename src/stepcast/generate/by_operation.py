"""Modules of transformers that are written out in PyTorch, a kernel for each operation of their source."""

from stepcast.generate.sizes import Sizes
from stepcast.ir.dtype import DType
from stepcast.ir.work import ElementwiseKind, streamed
from stepcast.ir.workload import Op

K = ElementwiseKind
# NewGELUActivation (activations.py): 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); tensors that each
# operation reads. Of its backward: both factors of the product, tanh, the scales, the cube and the sums.
GELU_READS = (1, 1, 2, 1, 1, 1, 1, 2)
GELU_GRADIENT_READS = (2, 2, 1, 2, 1, 1, 1, 1, 2, 2, 2)


def written_gelu(sizes: Sizes, rows: int, inner: int) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Autocast computes powers in fp32, and so all that follows one."""
    dtype = sizes.stream
    return (
        tuple(
            Op(f"activation {at}", streamed(K.MUL, rows, inner, reads, 1, dtype))
            for at, reads in enumerate(GELU_READS)
        ),
        tuple(
            Op(f"activation gradient {at}", streamed(K.MUL, rows, inner, reads, 1, dtype))
            for at, reads in enumerate(GELU_GRADIENT_READS)
        ),
    )


# cap * tanh(x / cap): tensors that each operation reads, and of the backward.
CAP_READS, CAP_GRADIENT_READS = (1, 1, 1), (1, 2, 1)


def capped(name: str, rows: int, columns: int, dtype: DType) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """A soft cap of *rows* x *columns* numbers, and its gradient."""
    return (
        tuple(
            Op(f"{name} cap {at}", streamed(K.MUL, rows, columns, reads, 1, dtype))
            for at, reads in enumerate(CAP_READS)
        ),
        tuple(
            Op(f"{name} cap gradient {at}", streamed(K.MUL, rows, columns, reads, 1, dtype))
            for at, reads in enumerate(CAP_GRADIENT_READS)
        ),
    )


Parts = tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]


def grouped_masks(sizes: Sizes, rows: int, width: int, inner: int) -> tuple[Parts, Parts]:
    """What stands before, between and after the experts' grouped products, and what their gradients add.

    grouped_mm_experts_forward (integrations/moe.py) fills rows of no expert with zeros three times, twice in
    a copy, weighs the results, brings them back into the tokens' order and sums those of one token.
    """
    dtype = sizes.stored

    def op(name: str, kind: ElementwiseKind, columns: int, reads: float, writes: float) -> Op:
        return Op(name, streamed(kind, rows, columns, reads, writes, dtype))

    forward = (
        (op("mask input", K.MASK, width, 1, 1),),
        (op("mask up copy", K.COPY, inner, 1, 1), op("mask up", K.MASK, inner, 1, 1)),
        (
            op("mask down copy", K.COPY, width, 1, 1),
            op("mask down", K.MASK, width, 1, 1),
            op("weigh", K.MUL, width, 1, 1),
            op("sum", K.OTHER, width, 1, 0),
        ),
    )
    backward = (
        (op("mask input gradient copy", K.COPY, width, 1, 1), op("mask input gradient", K.MASK, width, 1, 1)),
        (op("mask up gradient copy", K.COPY, inner, 1, 1), op("mask up gradient", K.MASK, inner, 1, 1)),
        (
            op("sum gradient", K.COPY, width, 0, 1),
            op("weigh product", K.MUL, width, 2, 1),
            op("weight gradient sum", K.OTHER, width, 1, 0),
            op("weigh gradient", K.MUL, width, 1, 1),
            op("mask down gradient copy", K.COPY, width, 1, 1),
            op("mask down gradient", K.MASK, width, 1, 1),
        ),
    )
    return forward, backward
