"""Express in the sizes of a product how well the rows of its operands are aligned in memory."""

from collections.abc import Sequence
from dataclasses import replace

from stepcast.ir.work import Matmul
from stepcast.pytorch.capture.tracer import TracedTensor, round_up

# Bytes at whose multiples rows have to begin for the widest loads, for narrower ones, and for any.
LOAD_BYTES = (16, 4, 1)
# The most by which sizes may grow to express an alignment: a product of few columns would become other work.
MOST_GROWTH = 0.01


def express_alignment(work: Matmul, tensors: Sequence[TracedTensor]) -> Matmul:
    """Return *work* with sizes that express how well the rows of its operands and its result are aligned.

    The sizes n and k determine that for operands stored row by row. Where an operand is transposed or a slice,
    another size determines it (the gradient of a weight of odd width): then n or k is changed by a few elements, if
    that adds next to no work.
    """
    size_bytes = work.dtype.bytes
    actual = max(_widest_load(_row_pitch(tensor) * size_bytes) for tensor in tensors)
    expressed = max(_widest_load(size * size_bytes) for size in (work.n, work.k))
    elements = max(1, round(LOAD_BYTES[actual] / size_bytes))
    if actual == expressed:
        return work
    if actual > expressed:
        changed = replace(work, n=work.n + elements) if work.n > work.k else replace(work, k=work.k + elements)
    else:
        changed = replace(work, n=round_up(work.n, elements), k=round_up(work.k, elements))
    return changed if changed.flops <= (1 + MOST_GROWTH) * work.flops else work


def _widest_load(row_bytes: float) -> int:
    """Return the index of the widest load that fits rows of this many bytes."""
    return next(index for index, load in enumerate(LOAD_BYTES) if row_bytes % load == 0 or load == 1)


def _row_pitch(tensor: TracedTensor) -> int:
    """Return the elements from one row to the next, or between columns where these are contiguous."""
    (rows, columns), (row_stride, column_stride) = tensor.shape[-2:], tensor.stride[-2:]
    if row_stride == 1 and rows > 1:
        return column_stride if columns > 1 else 0
    return row_stride if rows > 1 else 0
