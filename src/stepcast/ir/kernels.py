"""Memory-bound kernels as libraries write them: how many tensors each reads and writes."""

from stepcast.ir.dtype import DType
from stepcast.ir.work import Elementwise, ElementwiseKind, streamed

K = ElementwiseKind
# Tensors of rows x columns that the kernel reads and writes; all others read one and write one, and backward
# read the gradient too.
TENSORS: dict[ElementwiseKind, tuple[float, float]] = {
    K.ADD: (2, 1),
    K.MUL: (2, 1),
    K.SWIGLU: (2, 1),
    K.CROSS_ENTROPY: (3, 1),
    K.OPTIMIZER: (4, 3),
    K.FILL: (0, 1),
}
TENSORS_BACKWARD: dict[ElementwiseKind, tuple[float, float]] = {K.SWIGLU: (3, 2)}


def usual_kernel(kind: ElementwiseKind, rows: int, columns: int, dtype: DType, backward: bool = False) -> Elementwise:
    """A kernel of *kind* that does nothing else."""
    reads, writes = TENSORS_BACKWARD.get(kind, (2, 1)) if backward else TENSORS.get(kind, (1, 1))
    return streamed(kind, rows, columns, reads, writes, dtype, backward)


def cast(rows: int, columns: int, dtype: DType, to: DType, backward: bool = False) -> Elementwise:
    """From *dtype* to *to*; a format with scales reads twice, once for the largest magnitude."""
    reads = 2 if to.scaled else 1
    elements = rows * columns
    return Elementwise(
        K.CAST,
        rows,
        columns,
        read_bytes=reads * dtype.bytes * elements,
        write_bytes=to.bytes * elements,
        backward=backward,
        dtype=to if to.scaled else dtype,
    )
