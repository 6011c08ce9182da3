"""What a dispatched operator costs a GPU: the kernels behind it, as works.

Products, attention and convolutions by their shapes; all else moves memory: what it reads and writes, each
element that is there once. A view, whose result lies in its operand's storage, runs no kernel.
"""

import math
from collections.abc import Callable
from functools import lru_cache

from stepcast.ir.dtype import DType
from stepcast.ir.recurrent import RecurrentCells
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.pytorch.capture.events import TF32, Event, Moment, Tensor
from stepcast.pytorch.capture.layouts import as_aligned, laid_out
from stepcast.pytorch.capture.library import Recurrent

K = ElementwiseKind
KINDS: dict[str, ElementwiseKind] = {
    **dict.fromkeys(("add", "sub", "rsub", "_foreach_add"), K.ADD),
    **dict.fromkeys(
        (
            *("mul", "div", "pow", "neg", "rsqrt", "sqrt", "tanh", "tanh_backward", "exp"),
            *("sin", "cos", "abs", "sigmoid", "sigmoid_backward", "reciprocal", "square", "clamp", "relu"),
            "threshold_backward",
            *("addcmul", "addcdiv", "lerp", "log", "softplus", "maximum", "minimum", "erf", "bitwise_not"),
        ),
        K.MUL,
    ),
    "silu": K.SILU, "silu_backward": K.SILU, "gelu": K.GELU, "gelu_backward": K.GELU,
    "_softmax": K.SOFTMAX, "_softmax_backward_data": K.SOFTMAX, "_safe_softmax": K.SOFTMAX,
    "native_layer_norm": K.LAYER_NORM, "native_layer_norm_backward": K.LAYER_NORM,
    "rms_norm": K.RMS_NORM,
    "native_group_norm": K.GROUP_NORM, "native_group_norm_backward": K.GROUP_NORM,
    "native_dropout": K.DROPOUT, "native_dropout_backward": K.DROPOUT,
    **dict.fromkeys(("masked_fill", "where", "tril", "triu"), K.MASK),
    **dict.fromkeys(
        ("clone", "copy", "repeat", "index", "index_select", "gather", "flip", "roll"), K.COPY
    ),
    "cat": K.JOIN, "stack": K.JOIN,
    **dict.fromkeys(
        ("fill", "zero", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros",
         "new_full", "new_ones", "arange", "scalar_tensor"),
        K.FILL,
    ),
}  # fmt: skip
# Rows taken out of a table that is not read whole.
LOOKUPS = ("embedding", "index", "index_select", "gather")
# Values written into something that is otherwise as it was.
WRITES_INTO = ("index_put", "_index_put_impl", "index_add", "scatter", "scatter_add", "index_copy", "scatter_reduce")
ADDS_UP = ("index_put", "_index_put_impl", "index_add", "scatter_add")
SUMS = ("sum", "mean")
# Kernels of PyTorch's TensorIterator: one output for as many inputs, element by element.
POINTWISE = (K.ADD, K.MUL, K.SILU, K.GELU, K.COPY, K.CAST, K.MASK)
FILLS_FIRST = ("slice_backward", "select_backward", "constant_pad_nd")
# What the library sorts or scans takes several kernels (radix sort: a histogram, a scan, a pass per digit).
SEVERAL = {"sort": 4, "topk": 4, "argsort": 4, "cumsum": 2, "nonzero": 3, "_unique2": 6, "histc": 2}
WHOLE_LOAD = 8  # elements of two bytes
ENTROPY_READS = 3  # of a log-softmax over rows longer than a block keeps: maximum, sum, result
NEXT_TO_NOTHING = 0.02  # of what is written: read from rows, not from a tensor as large


def works_of(event: Event) -> tuple[Compute, ...]:
    """The kernels of *event*, in order."""
    return _works(
        event.name, tuple(_seen(each) for each in event.reads), tuple(_seen(each) for each in event.writes),
        event.options, _is_view(event), event.moment is not Moment.FORWARD and not event.again,
    )  # fmt: skip


def _seen(tensor: Tensor) -> Tensor:
    """Without its storage: equal operands make equal works."""
    return tensor._replace(storage=0)


def _is_view(event: Event) -> bool:
    if event.name.endswith("_") or not event.reads or not event.writes:
        return False
    read = {each.storage for each in event.reads}
    return all(each.storage in read for each in event.writes)


Handler = Callable[..., tuple[Compute, ...]]


@lru_cache(maxsize=65536)
def _works(
    name: str,
    reads: tuple[Tensor, ...],
    writes: tuple[Tensor, ...],
    options: tuple[object, ...],
    view: bool,
    backward: bool,
) -> tuple[Compute, ...]:
    if view or name.startswith(("empty", "new_empty")) or not any(each.numel for each in writes):
        return ()
    handler = HANDLERS.get(name)
    if handler is not None:
        return handler(reads, writes, options, backward)
    if name.startswith(("_foreach_", "_fused_")):
        return _listed(name, reads, writes, options)
    return _streamed(name, reads, writes, backward)


def _dtype(tensor: Tensor) -> DType:
    return DType(tensor.dtype)


def _bytes(tensor: Tensor) -> float:
    return tensor.elements * _dtype(tensor).bytes


def _multiplied(operand: Tensor, options: tuple[object, ...]) -> DType:
    """The format that products of *operand* run in."""
    return DType.TF32 if TF32 in options else _dtype(operand)


def _product(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], options: tuple[object, ...], _: bool
) -> tuple[Compute, ...]:
    """The last two operands: what is added before them is part of the kernel."""
    left, right = reads[-2:]
    if not all((*left.shape, *right.shape)):
        return ()
    batch = math.prod(left.shape[:-2])
    made = Matmul(left.shape[-2], right.shape[-1], left.shape[-1], batch, _multiplied(left, options))
    return (as_aligned(made, (left, right, writes[0])),)


def _added_product(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], options: tuple[object, ...], backward: bool
) -> tuple[Compute, ...]:
    """What is added is copied to the result first (aten/src/ATen/native/cuda/Blas.cpp, baddbmm)."""
    added, out = reads[0], writes[0]
    kind = laid_out(K.COPY, (added, out), mixed=True)
    return (_over(kind, out, _bytes(added), _bytes(out)), *_product(reads, writes, options, backward))


def _linear(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], options: tuple[object, ...], _: bool
) -> tuple[Compute, ...]:
    left, right = reads[:2]
    dtype = _multiplied(left, options)
    return (Matmul(math.prod(left.shape[:-1]), right.shape[0], right.shape[1], 1, dtype),)


def _grouped(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], _: object, __: bool) -> tuple[Compute, ...]:
    left, right, out = reads[0], reads[1], writes[0]
    dtype = _dtype(left)
    if len(right.shape) == 3:
        groups = right.shape[0]
        return (GroupedMatmul(left.numel // left.shape[-1], right.shape[-1], right.shape[-2], groups, dtype),)
    # A weight's gradient: each expert's rows are summed over, which lie together, however many they are; a
    # size that is none of whole loads would tell of rows that do not.
    groups, tokens = out.shape[0], left.shape[-1]
    rows = max(1, round(tokens / groups / WHOLE_LOAD)) * WHOLE_LOAD
    return (GroupedMatmul(round(left.shape[-2] * tokens / rows), right.shape[-1], rows, groups, dtype),)


def _attention(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], options: tuple[bool, bool, bool], backward: bool
) -> tuple[Compute, ...]:
    gradient = len(writes) == 3
    query, key, value = reads[1:4] if gradient else reads[:3]
    masked, causal, drops = options
    batch, heads, length, width = query.shape
    return (
        Attention(
            batch, length, key.shape[2], heads, key.shape[1], width, value.shape[-1], causal=causal,
            backward=gradient, dtype=_dtype(query), masked=masked, drops=drops,
        ),
    )  # fmt: skip


def _convolved(data: Tensor, weight: Tensor, out: Tensor, groups: int, dtype: DType) -> Compute:
    """As a product over the window of each place; one by one where each channel is by itself."""
    if groups > 1 and weight.shape[1] == 1:
        rows, columns = out.numel // out.shape[-1], out.shape[-1]
        return Elementwise(K.CONVOLUTION, rows, columns, _bytes(data) + _bytes(weight), _bytes(out),
                           dtype=_dtype(data))  # fmt: skip
    places = out.numel // out.shape[1]
    return Matmul(places, max(1, out.shape[1] // groups), math.prod(weight.shape[1:]), groups, dtype)


def _groups(options: tuple[object, ...]) -> int:
    found = options[-1]
    return found if isinstance(found, int) and not isinstance(found, bool) else 1


def _convolution(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], options: tuple[object, ...], _: bool
) -> tuple[Compute, ...]:
    return (_convolved(reads[0], reads[1], writes[0], _groups(options), _multiplied(reads[0], options)),)


def _convolution_backward(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], options: tuple[object, ...], _: bool
) -> tuple[Compute, ...]:
    """As many products as gradients of data and weight; each multiplies as often as the forward."""
    gradient, data, weight = reads[:3]
    integers = [each for each in options if isinstance(each, int) and not isinstance(each, bool)]
    groups = integers[-1] if integers else 1
    one = _convolved(data, weight, gradient, groups, _multiplied(data, options))
    products = sum(1 for each in writes if len(each.shape) > 1)
    return (one,) * max(1, products)


def _rms_norm_backward(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], _: object, __: bool
) -> tuple[Compute, ...]:
    """The gradient of the input and, where there is a weight, in a second kernel that of the weight."""
    gradient, data = reads[:2]
    read = _bytes(gradient) + _bytes(data)
    own = _over(K.RMS_NORM, data, read, _bytes(data), backward=True)
    if not writes[1].numel:
        return (own,)
    return own, _over(K.COLUMN_SUM, data, read, _bytes(writes[1]))


def _recurrent(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], options: tuple[object, ...], backward: bool
) -> tuple[Compute, ...]:
    """cuDNN's recurrent networks: for each layer and direction one product with all inputs, and the cells
    step after step; backward the cells, the gradient of the inputs, and those of both weights.
    """
    dtype = _multiplied(reads[0], options)
    own = Recurrent(*(each for each in options if each != TF32))  # type: ignore[arg-type]
    rows, wide, size = own.steps * own.batch, own.gates * own.hidden, _dtype(reads[0]).bytes
    works: list[Compute] = []
    for layer in range(own.layers):
        inputs = own.directions * own.width if layer else own.inputs
        cells = RecurrentCells(own.steps, own.batch, own.hidden, own.width, own.gates, backward, dtype)
        if not backward:
            works += [Matmul(rows, wide, inputs, 1, dtype), cells] * own.directions
            continue
        bias = Elementwise(K.COLUMN_SUM, rows, wide, rows * wide * size, wide * size, dtype=_dtype(reads[0]))
        products = [(rows, inputs, wide), (wide, inputs, rows), (wide, own.width, rows)]
        works += [cells, *(Matmul(*sizes, 1, dtype) for sizes in products), bias] * own.directions
    return tuple(works)


def _cross_entropy(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], _: object, __: bool) -> tuple[Compute, ...]:
    return (_over(K.CROSS_ENTROPY, writes[0], ENTROPY_READS * _bytes(reads[0]), _bytes(writes[0])),)


def _cross_entropy_backward(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], _: object, __: bool
) -> tuple[Compute, ...]:
    read = _bytes(reads[0]) + _bytes(reads[1])
    return (_over(K.CROSS_ENTROPY, writes[0], read, _bytes(writes[0]), backward=True),)


def _filled(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], _: object, __: bool) -> tuple[Compute, ...]:
    return (_over(K.FILL, writes[0], 0.0, _bytes(writes[0])),)


def _filled_then_copied(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], _: object, __: bool
) -> tuple[Compute, ...]:
    return (
        _over(K.FILL, writes[0], 0.0, _bytes(writes[0])),
        _over(K.COPY, reads[0], _bytes(reads[0]), _bytes(reads[0])),
    )


def _embedding_backward(
    reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], _: object, __: bool
) -> tuple[Compute, ...]:
    rows = reads[0]
    return (
        _over(K.FILL, writes[0], 0.0, _bytes(writes[0])),
        _over(K.EMBEDDING, rows, 2 * _bytes(rows), _bytes(rows), backward=True),
    )


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "_scaled_mm"), _product),
    "baddbmm": _added_product,
    "linear": _linear,
    "_grouped_mm": _grouped,
    "attention": _attention,
    "attention_backward": _attention,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "rms_norm_backward": _rms_norm_backward,
    "recurrent": _recurrent,
    "recurrent_backward": _recurrent,
    "_log_softmax": _cross_entropy,
    "_log_softmax_backward_data": _cross_entropy_backward,
    "nll_loss_backward": _filled,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(FILLS_FIRST, _filled_then_copied),
}


def _listed(
    name: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], options: tuple[object, ...]
) -> tuple[Compute, ...]:
    """One pass over lists of tensors, as an optimizer makes it."""
    lengths = [each for each in options if isinstance(each, int)]
    first = reads[: lengths[0]] if lengths else reads
    read = sum(_bytes(each) for each in reads)
    if name.startswith("_fused_adam"):
        ends = [sum(lengths[:at]) for at in range(5)]
        changed = [*reads[: ends[1]], *reads[ends[2] : ends[4]]]
        write = sum(_bytes(each) for each in changed)
    elif name.startswith("_fused_sgd"):  # parameters and, after the gradients, momentum
        changed = [*first, *reads[sum(lengths[:2]) :]]
        write = sum(_bytes(each) for each in changed)
    else:
        write = sum(_bytes(each) for each in (first if name.endswith("_") else writes))
    elements = max(1, sum(each.elements for each in first))
    kind = K.OPTIMIZER if name.startswith("_fused_") else K.LISTED_OPTIMIZER
    return (Elementwise(kind, 1, elements, read, write, dtype=DType.FP32),)


def _streamed(name: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], backward: bool) -> tuple[Compute, ...]:
    plain, inplace = name.rstrip("_") if name.endswith("_") else name, name.endswith("_")
    out = reads[:1] if inplace else writes
    if plain in WRITES_INTO:
        return (_written_into(plain, reads, out[0]),)
    largest = max((*reads, *writes), key=lambda each: each.elements)
    written = sum(_bytes(each) for each in out)
    read = sum(_bytes(each) for each in reads)
    if plain in LOOKUPS:
        read = written + sum(_bytes(each) for each in reads[1:])
    elif plain == "copy" or KINDS.get(plain) is K.FILL:
        read = sum(_bytes(each) for each in reads[1:])  # the first says how large it is
    kind = _kind(plain, reads, out[0], inplace)
    if kind in (K.ADD, K.MUL) and read < NEXT_TO_NOTHING * written:
        kind = K.MASK  # a number for each row, written over it
    dtype = _dtype(reads[-1] if kind is K.CAST and reads else largest)
    gradient = backward and kind in GRADIENT_KINDS and "backward" in name
    columns = max(1, largest.shape[-1] if largest.shape else 1)
    rows = max(1, largest.elements // columns)
    one = Elementwise(kind, rows, columns, read, written, gradient, dtype)
    return (one,) * SEVERAL.get(plain, 1)


def _kind(plain: str, reads: tuple[Tensor, ...], out: Tensor, inplace: bool) -> ElementwiseKind:
    if plain == "embedding":
        return K.EMBEDDING
    if plain in SUMS and reads:
        whole = len(out.shape) == 0 or out.numel == 1
        along = out.shape[-1:] == reads[0].shape[-1:] and reads[0].shape[-1:] != (1,)
        return K.OTHER if whole else K.COLUMN_SUM if along else K.ROW_SUM
    kind = KINDS.get(plain, K.OTHER)
    if plain in ("_to_copy", "copy", "clone"):
        kind = K.CAST if reads and reads[-1].dtype != out.dtype else K.COPY
    if kind in POINTWISE:
        sources = reads[1:] if plain == "copy" else reads
        return laid_out(kind, (*sources, out), mixed=kind is not K.CAST)
    return kind


def _written_into(plain: str, reads: tuple[Tensor, ...], target: Tensor) -> Compute:
    """Values to places of *target*; where many meet, each place takes its own in turn."""
    values = max(reads[1:], key=_bytes) if len(reads) > 1 else reads[0]
    size, width = _bytes(values), max(1, values.shape[-1] if values.shape else 1)
    if plain in ADDS_UP:
        places = max(1, target.numel // width)
        rows = max(1, values.numel // width // places)
        return Elementwise(K.SCATTER_SUM, rows, width * places, size, _bytes(target), dtype=_dtype(values))
    return Elementwise(K.COPY, max(1, values.numel // width), width, size, size, dtype=_dtype(values))


# Kinds whose gradient is a kernel of its own.
GRADIENT_KINDS = (K.SILU, K.GELU, K.SOFTMAX, K.LAYER_NORM, K.RMS_NORM, K.GROUP_NORM, K.DROPOUT)


def _over(kind: ElementwiseKind, tensor: Tensor, read: float, write: float, backward: bool = False) -> Elementwise:
    columns = max(1, tensor.shape[-1] if tensor.shape else 1)
    rows = max(1, tensor.numel // columns)
    return Elementwise(kind, rows, columns, read, write, backward, _dtype(tensor))
