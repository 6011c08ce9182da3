"""How the operands of one kernel lie in memory: all alike, or so that it has to find each element."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from stepcast.ir.work import ElementwiseKind, Matmul
from stepcast.pytorch.capture.events import Tensor

K = ElementwiseKind
FLOATS = ("fp32", "bf16", "fp16", "fp64", "fp8")
# Bytes at whose multiples rows have to begin for the widest loads, for narrower ones, and for any at all.
LOADS_BYTES = (16, 4, 1)
# By how much sizes may grow to show that: a product of few columns would no longer be the same work.
MOST_GROWTH = 0.01


def laid_out(kind: ElementwiseKind, tensors: tuple[Tensor, ...], mixed: bool) -> ElementwiseKind:
    """*kind* where all operands lie alike, one after another; else kernels that work out each place.

    PyTorch's TensorIterator joins dimensions that all operands step through alike; one that is left over has
    vector loads and no arithmetic for places (aten/src/ATen/native/cuda/CUDALoops.cuh).
    """
    large = [each for each in tensors if each.numel > 1]
    if len(large) < 2:
        return kind
    shape = max((each.shape for each in large), key=lambda each: (len(each), math.prod(each)))
    steps = [_steps(each, shape) for each in large]
    formats = {each.dtype for each in large if each.dtype in FLOATS}
    if all(each == steps[0] for each in steps) and _dense(shape, steps[0]):
        return K.STRIDED if mixed and len(formats) > 1 else kind
    if any(not _in_order(shape, each) for each in steps) or (mixed and len(formats) > 1):
        return K.STRIDED
    return kind if kind is K.CAST else K.BROADCAST


def _steps(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of *tensor* along *shape*: none where it is repeated, or where there is one element."""
    missing = len(shape) - len(tensor.shape)
    own = [0] * missing + [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride, strict=True)]
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, own, strict=True))


def _dense(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(steps, shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _in_order(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether later dimensions are nearer in memory."""
    real = [stride for stride in steps if stride]
    return all(earlier >= later for earlier, later in pairwise(real))


def as_aligned(work: Matmul, tensors: Sequence[Tensor]) -> Matmul:
    """*work* with sizes that show how well the rows of its operands and its result are aligned.

    Sizes n and k say that of a product whose operands lie row by row. Where one is transposed or a slice,
    another size or none says it (the gradient of a weight of odd width): then one is larger by an element,
    where that is next to nothing.
    """
    shown = _shown(work, tensors)
    return shown if shown.flops <= (1 + MOST_GROWTH) * work.flops else work


def _shown(work: Matmul, tensors: Sequence[Tensor]) -> Matmul:
    size_bytes = work.dtype.bytes
    lies = max(_loads(_pitch(each) * size_bytes) for each in tensors)
    shows = max(_loads(size * size_bytes) for size in (work.n, work.k))
    if lies == shows:
        return work
    if lies > shows:
        further = max(1, round(LOADS_BYTES[lies] / size_bytes))
        wider = "n" if work.n > work.k else "k"
        return replace(work, **{wider: getattr(work, wider) + further})
    whole = max(1, round(LOADS_BYTES[lies] / size_bytes))
    return replace(work, n=-(-work.n // whole) * whole, k=-(-work.k // whole) * whole)


def _loads(row_bytes: float) -> int:
    """Which of the loads fit rows so long."""
    return next(at for at, load in enumerate(LOADS_BYTES) if row_bytes % load == 0 or load == 1)


def _pitch(tensor: Tensor) -> int:
    """From one row to the next, or from one column where those lie together."""
    (rows, columns), (along, across) = tensor.shape[-2:], tensor.stride[-2:]
    if along == 1 and rows > 1:
        return across if columns > 1 else 0
    return along if rows > 1 else 0
