"""Map each dispatched operator to the kernels that a GPU runs for it.

Products, attention and convolutions are described by their shapes. Every other operator moves memory: it reads and
writes each element that is in memory once. A view, whose result is in the storage of its operand, runs no kernel.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import torch

from stepcast.ir import work as ops
from stepcast.ir.layout import HostWay
from stepcast.ir.recurrent import RecurrentCells
from stepcast.ir.types import DType
from stepcast.ir.work import Compute, Elementwise, ElementwiseKind, GroupedMatmul, HostCopy, Matmul
from stepcast.pytorch.capture.emulation import FIT, MEASURED, RecurrentSizes
from stepcast.pytorch.capture.tracer import Event, Moment, TracedTensor, is_channels_last, round_up

K, P = ElementwiseKind, ops.ConvolutionPass
KINDS = {name: K(kind) for kind, names in FIT["kinds"].items() for name in names}
ZEROED = frozenset(FIT["zeroed"]["names"])
LOOKUPS, WRITE_INTO, ADD_INTO = (frozenset(FIT["memory"][name]) for name in ("lookups", "write_into", "add_into"))
# Kernels of PyTorch's TensorIterator: one output for as many inputs, element by element.
POINTWISE = (K.ADD, K.MUL, K.SILU, K.GELU, K.COPY, K.CAST, K.MASK)
# Kinds whose gradient is a kernel of its own.
GRADIENT_KINDS = (K.SILU, K.GELU, K.SOFTMAX, K.LAYER_NORM, K.RMS_NORM, K.DROPOUT)
NEAREST = 1  # mode of an interpolation between the points of a grid (torch/nn/functional.py, grid_sample)
# Bytes at whose multiples rows have to begin for the widest loads, for narrower ones, and for any.
LOAD_BYTES = (16, 4, 1)
# The most by which sizes may grow to express an alignment: a product of few columns would become other work.
MOST_GROWTH = 0.01
ELEMENTS_PER_LOAD = 8  # of two bytes
FLOATS = ("fp32", "bf16", "fp16", "fp64", "fp8")
Works = tuple[Compute | HostCopy, ...]


def works_of(event: Event) -> Works:
    """Return the kernels of *event*, in order; events that differ in storages and modules alone run equal kernels."""
    storages = {tensor.storage for tensor in event.reads}
    is_view = bool(event.reads and event.writes) and not event.name.endswith("_")
    if is_view and all(tensor.storage in storages for tensor in event.writes):
        return ()
    reads, writes = (tuple(tensor._replace(storage=0) for tensor in side) for side in (event.reads, event.writes))
    moment = Moment.FORWARD if event.moment is Moment.FORWARD or event.recomputed else Moment.BACKWARD
    return _works_of_call(Event(event.name, reads, writes, event.options, moment, "", False, is_tf32=event.is_tf32))


@lru_cache(maxsize=65536)
def _works_of_call(call: Event) -> Works:
    name = call.name
    if name.startswith(("empty", "new_empty")) or not any(tensor.numel for tensor in call.writes):
        return ()
    is_listed = name.startswith(("_foreach_", "_fused_", "_amp_foreach"))
    works = HANDLERS.get(name, _describe_listed if is_listed else _describe_stream)(call)
    return (*_describe_fill(call), *works) if name in ZEROED else works


def bytes_of(*tensors: TracedTensor) -> float:
    """Return the bytes that *tensors* take in memory."""
    return sum(tensor.elements * DType(tensor.dtype).bytes for tensor in tensors)


def pass_over(
    kind: ElementwiseKind, tensor: TracedTensor, read: float, write: float, backward: bool = False, times: float = 1.0
) -> Elementwise:
    """Return a kernel with *times* the rows of *tensor*, and its columns, that moves *read* and *write* bytes."""
    columns = max(1, tensor.shape[-1] if tensor.shape else 1)
    rows = max(1, round(times * (tensor.numel // columns)))
    return Elementwise(kind, rows, columns, read, write, backward, DType(tensor.dtype))


def _copy(kind: ElementwiseKind, tensor: TracedTensor) -> Elementwise:
    return pass_over(kind, tensor, bytes_of(tensor), bytes_of(tensor))


# ---- products ------------------------------------------------------------------------------------------------------


def _product_dtype(call: Event, operand: TracedTensor) -> DType:
    """Return the format in which the call multiplies *operand*."""
    return DType.TF32 if call.is_tf32 else DType(operand.dtype)


def _describe_product(call: Event) -> Works:
    """Multiply the last two operands; an operand before them is added by the same kernel."""
    left, right = call.reads[-2:]
    if not all((*left.shape, *right.shape)):
        return ()
    batch = math.prod(left.shape[:-2])
    swapped = (left.stride[-1] != 1) + (right.stride[-2] != 1) if batch == 1 else 0
    work = Matmul(left.shape[-2], right.shape[-1], left.shape[-1], batch, _product_dtype(call, left), swapped)
    # cuBLAS reads rows or columns that are contiguous; others are copied (ATen/native/cuda/Blas.cpp, prepare_matrix).
    spread = [side for side in (left, right) if all(step > 1 for step, size in zip(side.stride[-2:], side.shape[-2:],
              strict=True) if size > 1)]  # fmt: skip
    return (*_copy_swapped(spread), express_alignment(work, (left, right, call.writes[0])))


def _describe_baddbmm(call: Event) -> Works:
    """Copy what is added to the result first (aten/src/ATen/native/cuda/Blas.cpp, baddbmm)."""
    added, out = call.reads[0], call.writes[0]
    copy = pass_over(kind_by_layout(K.COPY, (added, out), mixed=True), out, bytes_of(added), bytes_of(out))
    return (copy, *_describe_product(call))


def _describe_linear(call: Event) -> Works:
    left, right = call.reads[:2]
    return (Matmul(math.prod(left.shape[:-1]), right.shape[0], right.shape[1], 1, _product_dtype(call, left)),)


def _describe_grouped_mm(call: Event) -> Works:
    (left, right), out = call.reads[:2], call.writes[0]
    dtype = DType(left.dtype)
    if len(right.shape) == 3:
        return (GroupedMatmul(left.numel // left.shape[-1], right.shape[-1], right.shape[-2], right.shape[0], dtype),)
    # The gradient of a weight sums over the rows of each expert, which are contiguous. Their number is rounded to
    # full loads: other sizes would describe rows that are not aligned.
    groups, tokens = out.shape[0], left.shape[-1]
    rows = max(1, round(tokens / groups / ELEMENTS_PER_LOAD)) * ELEMENTS_PER_LOAD
    return (GroupedMatmul(round(left.shape[-2] * tokens / rows), right.shape[-1], rows, groups, dtype),)


def _describe_attention(call: Event) -> Works:
    is_gradient = call.name == "attention_backward"
    query, key, value = call.reads[1:4] if is_gradient else call.reads[:3]
    masked, causal, drops = map(bool, call.options)
    (batch, heads, length, width), dtype = query.shape, DType(query.dtype)
    sizes = batch, length, key.shape[2], heads, key.shape[1], width, value.shape[-1]
    return (ops.Attention(*sizes, causal, is_gradient, dtype, masked=masked, drops=drops),)


def _describe_convolution(call: Event) -> Works:
    """Describe each pass of a convolution that is asked for, and the kernels of a bias: its sum, or its gradient."""
    is_gradient = call.name == "convolution_backward"
    out, data, weight = call.reads[:3] if is_gradient else (call.writes[0], *call.reads[:2])
    transformed, transposed, groups = call.options
    taps, positions = math.prod(weight.shape[2:]), math.prod(data.shape[2:])
    last = is_channels_last(data) or is_channels_last(weight)
    copied = (data,) if last and len(data.shape) == 4 and not is_channels_last(data) and data.shape[1] > 1 else ()
    swapped = () if last else _copy_swapped((data, out) if is_gradient else (data,))
    last = last or (taps == 1 and positions % ELEMENTS_PER_LOAD == 0)
    sides = [(tensor.numel // tensor.shape[1], tensor.shape[1]) for tensor in (data, out)]
    (inputs, inner), (outputs, outer) = reversed(sides) if transposed else sides
    dtype = _product_dtype(call, data)
    if len(data.shape) == 5 and groups == 1 < data.shape[1] and (is_gradient or dtype.bytes < DType.FP32.bytes):
        inner, outer = max(MEASURED["volume_channels"], inner), max(MEASURED["volume_channels"], outer)
    passes = [P.DATA, P.FORWARD] if transposed else [P.FORWARD, P.DATA]
    wanted = [passes[0]]
    if is_gradient:
        shapes = [tensor.shape for tensor in call.writes]
        wanted = [of for of, own in ((passes[1], data), (P.WEIGHT, weight)) if own.shape in shapes]
    sizes = inputs, outputs, inner, outer, taps, int(groups)
    works: Works = tuple(ops.Convolution(*sizes, of, last, dtype) for of in wanted)
    copies = (_copy(K.TRANSPOSED, tensor) for tensor in copied)
    if transformed:  # the gradient of the weight
        works = (*works[:-1], Elementwise(K.SPECTRUM, 1, round(transformed / 8), transformed, transformed, dtype=dtype))
    works = (*copies, *swapped, *works)
    if is_gradient and any(len(tensor.shape) == 1 for tensor in call.writes):
        kind, shape = (K.COLUMN_SUM, (outputs, outer)) if is_channels_last(out) else (K.ROW_SUM, (outer, outputs))
        read = bytes_of(out) * (1.0 if kind is K.COLUMN_SUM else MEASURED["summed_apart"])
        works += (pass_over(kind, TracedTensor(shape, (shape[1], 1), out.dtype, 0), read, 0.0),)
    elif not is_gradient and len(call.reads) > 2 and not (inner == groups > 1):
        works += (pass_over(K.BROADCAST, out, bytes_of(out), bytes_of(out)),)
    return works


def _describe_recurrent(call: Event) -> Works:
    """Describe a recurrent network of cuDNN: for each layer and direction one product with all inputs, and the
    cells step after step; in the backward the cells, the gradient of the inputs, and those of both weights. Cells whose
    steps the CPU launches are in parts, since the GPU runs the first while the CPU launches others.
    """
    dtype, data_dtype = _product_dtype(call, call.reads[0]), DType(call.reads[0].dtype)
    sizes = RecurrentSizes(*call.options)
    rows, wide = sizes.steps * sizes.batch, sizes.gates * sizes.hidden
    works: list[Compute] = []
    cells = RecurrentCells(sizes.steps, sizes.batch, sizes.hidden, sizes.width, sizes.gates, call.is_backward, dtype)
    parts = 1 if cells.is_persistent else min(sizes.steps, MEASURED["cell_parts"])
    steps = [replace(cells, steps=round(sizes.steps / parts))] * parts
    size = data_dtype.bytes
    for layer in range(sizes.layers):
        inputs = sizes.directions * sizes.width if layer else sizes.inputs
        if not call.is_backward:
            works += [Matmul(rows, wide, inputs, 1, dtype), *steps] * sizes.directions
            continue
        bias = Elementwise(K.COLUMN_SUM, rows, wide, rows * wide * size, wide * size, dtype=data_dtype)
        products = [(rows, inputs, wide), (wide, inputs, rows), (wide, sizes.width, rows)]
        works += [*steps, *(Matmul(*shape, 1, dtype) for shape in products), bias] * sizes.directions
    return tuple(works)


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


# ---- norms, losses and gradients that fill memory ------------------------------------------------------------------


def _describe_norm(call: Event) -> Works:
    """Normalise rows after copies of swapped operands; another kernel sums weight gradients (layer_norm_kernel.cu)."""
    kind, is_gradient = K.RMS_NORM if call.name.startswith("rms") else K.LAYER_NORM, "backward" in call.name
    data = call.reads[1 if is_gradient else 0]
    rows = [tensor for tensor in call.reads[: 2 if is_gradient else 1] if tensor.numel == data.numel]
    read = bytes_of(*rows)
    works = (*_copy_swapped(rows), pass_over(kind, data, read, bytes_of(data), is_gradient))
    if not is_gradient or not any(tensor.numel for tensor in call.writes[1:]):
        return works
    columns = max(1, data.shape[-1])
    if columns < MEASURED["wide_norm"] and data.numel // columns < MEASURED["many_rows"]:
        return (*works, pass_over(K.NORM_WEIGHT, data, read, 8.0 * columns))
    # Otherwise it is summed in parts; the time of narrow layer norms was fitted with it.
    if kind is K.LAYER_NORM:
        return (*works, pass_over(K.ADD, data, read, 8.0 * columns)) if data.dtype == "fp32" else works
    return (*works, pass_over(K.COLUMN_SUM, data, read, 4.0 * columns))


def _copy_swapped(tensors: Sequence[TracedTensor]) -> Works:
    """Return the copies of those *tensors* that are neither contiguous nor have channels last."""
    swapped = [tensor for tensor in tensors if not is_channels_last(tensor) and not _is_contiguous(tensor)]
    return tuple(_copy(K.STRIDED if tensor.stride[-1] == 1 else K.TRANSPOSED, tensor) for tensor in swapped)


def _is_contiguous(tensor: TracedTensor) -> bool:
    sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride, strict=True) if size > 1]
    return all(stride == math.prod(size for size, _ in sizes[place + 1 :]) for place, (_, stride) in enumerate(sizes))


def _describe_along(call: Event) -> Works:
    """Describe a softmax, or a sum of all elements before each one, along a dimension.

    A thread block has the neighbours of a row. Along other dimensions each thread walks by itself through memory,
    several times (aten/src/ATen/native/cuda/SoftMax.cu, ScanUtils.cuh).
    """
    name, out = call.name, call.writes[0]
    axes = [option % max(1, len(out.shape)) for option in call.options]
    length, inner = (out.shape[axes[0]], math.prod(out.shape[axes[0] + 1 :])) if axes and out.shape else (1, 1)
    read, written = bytes_of(*call.reads[:2]), bytes_of(*call.writes)
    along_rows, along_others, along_few = FIT["along"][name]
    if inner > 1:
        threads = out.numel // max(1, length)
        if inner <= MEASURED["half_block"] and "softmax" in name:  # several threads of a block share the way
            threads, along_others = threads * min(length, MEASURED["block_threads"] // inner), along_few
        return (_walk(out, read, written, along_others, threads),)
    if "log_softmax" in name:
        is_gradient = "backward" in name
        read = read if is_gradient else MEASURED["entropy_reads"] * bytes_of(call.reads[0])
        return (pass_over(K.CROSS_ENTROPY, out, read, written, is_gradient),)
    if "softmax" in name:
        return _describe_stream(call)
    work = pass_over(K.ROW_SCAN, out, read, written)
    return (replace(work, columns=round(along_rows * work.columns)),)


def _walk(tensor: TracedTensor, read: float, written: float, times: float, threads: int) -> Elementwise:
    """Return a kernel whose *threads* walk through memory alone; few do not fill a GPU, and wait less for its cache."""
    share = MEASURED["cached_share"] if read + written < MEASURED["cached_bytes"] else 1.0
    times *= max(1.0, MEASURED["walkers"] / max(1, threads)) * share
    return pass_over(K.IRREGULAR, tensor, read, written, times=times)


def _describe_counted(call: Event) -> Works:
    """Describe an operator that runs a measured number of instructions for each element of one of its tensors."""
    counted, *instructions = FIT["counted"][call.name]
    tensors = {"out": call.writes[0], "in": call.reads[0]}
    tensor = tensors.get(counted) or max((*call.reads, *call.writes), key=lambda tensor: tensor.numel)
    times = instructions[-1 if DType(tensor.dtype).bytes < DType.FP32.bytes else 0]
    read = bytes_of(*call.reads)
    written = bytes_of(call.reads[0]) if call.name in ZEROED else bytes_of(*call.writes)
    if call.name in FIT["walks"]["names"]:  # a thread takes one position of all images
        return (_walk(tensor, read, written, times, math.prod(tensor.shape[2:])),)
    if call.name.startswith("grid_sampler") and call.options[:1] == (NEAREST,):
        times *= FIT["walks"]["nearest"]["backward" in call.name]
    return (pass_over(K.IRREGULAR, tensor, read, written, times=times),)


def _describe_fill(call: Event) -> Works:
    return (pass_over(K.FILL, call.writes[0], 0.0, bytes_of(call.writes[0])),)


def _describe_host_copy(call: Event) -> Works:
    return (HostCopy(HostWay.IN, round(bytes_of(*call.writes))),)


def _describe_embedding_backward(call: Event) -> Works:
    """Fill the gradient with zeros and sum the rows of each id: one after another where ids are few, else sorted by all
    their digits, a thread block for each id and part of a row (aten/src/ATen/native/cuda/Embedding.cu).
    """
    ids = next(tensor for tensor in call.reads if "int" in tensor.dtype)
    table, width = call.writes[0], call.writes[0].shape[-1]
    size, dtype = ids.numel * width * DType(call.reads[0].dtype).bytes, DType(table.dtype)
    if ids.numel <= MEASURED["few_ids"] and call.name == "embedding_dense_backward":
        return (*_describe_fill(call), Elementwise(K.ID_GRADIENT, ids.numel, width, size, size, dtype=dtype))
    entries = table.numel // width
    distinct = max(1, round(entries * -math.expm1(-ids.numel / entries)))
    parts = distinct * -(-width // MEASURED["gradient_columns"])
    rows = Elementwise(K.ROW_GRADIENT, parts, width, size, distinct / ids.numel * size, dtype=dtype)
    return (*_describe_fill(call), *(_copy(K.DIGIT, ids),) * MEASURED["id_digits"], *_sort_keys(ids, 1.0)[1:], rows)


def _describe_sort(call: Event) -> Works:
    keys = call.reads[0]
    return _sort_keys(keys, bytes_of(*call.writes) / max(1.0, bytes_of(keys)))


def _describe_choice(call: Event) -> Works:
    """Choose the largest of each row by radix: passes over the keys, and for each row as long as for some more."""
    keys = call.reads[0]
    columns = max(1, keys.shape[-1] if keys.shape else 1)
    more = keys.numel // columns * min(MEASURED["choice_bytes"], 7.0 * columns)
    return (pass_over(K.CHOICE, keys, bytes_of(keys) + more, bytes_of(*call.writes)),)


def _describe_sequence_loss(call: Event) -> Works:
    is_gradient = call.name.endswith("backward")
    chances = call.reads[is_gradient]
    shape, moved = (chances.shape[0], math.prod(chances.shape[1:])), (bytes_of(chances), bytes_of(*call.writes))
    return (Elementwise(K.SEQUENCE_LOSS, *shape, *moved, is_gradient, DType(chances.dtype)),)


def _sort_keys(keys: TracedTensor, written: float) -> Works:
    """Sort by radix: several passes that write *written* times the keys, and a few kernels that count and place."""
    few = pass_over(K.OTHER, TracedTensor((1,), (1,), keys.dtype, 0), 8.0, 8.0)
    return (pass_over(K.SORT, keys, bytes_of(keys), written * bytes_of(keys)), *(few,) * MEASURED["sort_kernels"])


def _describe_bag(call: Event) -> Works:
    table, ids = call.reads[:2]
    read = ids.numel * table.shape[-1] * DType(table.dtype).bytes
    summed = TracedTensor((ids.numel, table.shape[-1]), (table.shape[-1], 1), table.dtype, 0)
    return (pass_over(K.BAG, summed, read, bytes_of(call.writes[0])),)


def _describe_batch_norm(call: Event) -> Works:
    """Normalise channels: a thread block sums each of them, unless channels are last."""
    data = max(call.reads, key=lambda tensor: tensor.numel)
    channels = data.shape[1] if len(data.shape) > 1 else 1
    positions = max(1, data.numel // channels)
    last = len(data.shape) == 2 or is_channels_last(data)
    kind, rows, columns = (K.LAST_NORM, positions, channels) if last else (K.BATCH_NORM, channels, positions)
    size, dtype, is_gradient = bytes_of(data), DType(data.dtype), "backward" in call.name
    if len(call.reads) == 1:  # PyTorch's own kernels, not cuDNN's, where there are no weights; in fp32 as in bf16
        size, dtype = data.elements * DType.BF16.bytes, DType.BF16
    if not last and not is_gradient and dtype is DType.BF16:
        few = max(0.0, 1.0 - channels * data.shape[0] / MEASURED["norm_blocks"])
        columns = round(columns * (1.0 + few * MEASURED["norm_samples"] / data.shape[0]))
    return (Elementwise(kind, rows, columns, (4 if is_gradient else 2) * size, size, is_gradient, dtype),)


def _describe_image_norm(call: Event) -> Works:
    """Normalise groups of channels, after copies of what has channels last."""
    largest = max(tensor.numel for tensor in call.reads)
    images = [tensor for tensor in call.reads if tensor.numel == largest]
    copies = [_copy(K.TRANSPOSED, tensor) for tensor in images if is_channels_last(tensor)]
    image, read, written = images[0], bytes_of(*call.reads), bytes_of(*call.writes)
    rows = max(1, image.shape[0] * (image.shape[1] if len(image.shape) > 2 else 1))
    is_gradient, dtype = "backward" in call.name, DType(image.dtype)
    norm = Elementwise(K.IMAGE_NORM, rows, image.numel // rows, read, written, is_gradient, dtype)
    if is_gradient:
        return (*copies, norm)
    # A thread block goes through each group first (aten/src/ATen/native/cuda/group_norm_kernel.cu).
    groups = call.writes[1].numel
    return (*copies, Elementwise(K.GROUP_MOMENTS, groups, image.numel // groups, 0.0, 0.0, dtype=dtype), norm)


# The function ``_describe_product`` handles the operators that the data file lists as ``product``, and so on.
HANDLERS: dict[str, Callable[[Event], Works]] = {
    name: globals()[f"_describe_{kind}"] for kind, names in FIT["operators"].items() for name in names
}
HANDLERS |= dict.fromkeys(FIT["counted"], _describe_counted)


# ---- operators that move memory ------------------------------------------------------------------------------------


def _describe_listed(call: Event) -> Works:
    """Describe one pass of an optimizer over lists of tensors."""
    name, reads = call.name, call.reads
    ends = [sum(call.options[:count]) for count in range(5)]  # options are the lengths of its lists
    first = reads[: ends[1]] if call.options else reads
    changed = first if name.endswith("_") else call.writes
    if name.startswith(("_fused_adam", "_fused_sgd")):  # parameters and, after the gradients, moments
        changed = (*first, *reads[ends[2] : ends[4] if name.startswith("_fused_adam") else None])
    elements = max(1, sum(tensor.elements for tensor in first))
    kind = K.OPTIMIZER if name.startswith("_fused_") else K.LISTED_OPTIMIZER
    return (Elementwise(kind, 1, elements, bytes_of(*reads), bytes_of(*changed), dtype=DType.FP32),)


def _describe_stream(call: Event) -> Works:
    inplace = call.name.endswith("_")
    name, reads = call.name.rstrip("_"), call.reads
    out = reads[:1] if inplace else call.writes
    if name in WRITE_INTO:
        # Rows that a gradient adds to are found by sorting numbers and their places (aten/.../cuda/Indexing.cu).
        ids = [tensor for tensor in reads[1:] if tensor.dtype == "int64"] if call.is_backward and "put" in name else []
        sorts = _sort_keys(ids[0], MEASURED["sorted_twice"]) if ids else ()
        return (*sorts, _describe_write_into(name, reads, out[0]))
    largest = out[0] if name in LOOKUPS else max((*reads, *call.writes), key=lambda tensor: tensor.elements)
    read, written = bytes_of(*reads), bytes_of(*out)
    if name in LOOKUPS or name == "nll_loss_forward":
        read = min(written, bytes_of(reads[0])) + bytes_of(*reads[1:])
    elif name == "copy" or KINDS.get(name) is K.FILL:
        read = bytes_of(*reads[1:])  # the first operand only determines the size
    kind = _kind_of_stream(name, reads, out[0])
    if kind in (K.ADD, K.MUL) and read < MEASURED["row_operand_share"] * written:
        kind = K.MASK  # a number for each row, written over it
    columns = max(1, largest.shape[-1] if largest.shape else 1)
    rows = max(1, largest.elements // columns)
    if kind is K.GATHER:
        rows = max(1, *(tensor.elements for tensor in reads[1:]))
        columns = max(1, out[0].numel // rows)
    if kind is K.ROW_SUM:
        rows, columns = out[0].numel, max(1, largest.elements // max(1, out[0].numel))
        over_columns = bool(call.options) and not {-1, len(largest.shape) - 1} & {*call.options}
        read *= FIT["sums"].get(name, (1.0, 1.0))[over_columns]  # over neighbours and over others
        if over_columns:
            kind, rows, columns = K.COLUMN_SUM, columns, rows
    is_gradient = call.is_backward and kind in GRADIENT_KINDS and "backward" in name
    dtype = DType((reads[-1] if kind is K.CAST and reads else largest).dtype)
    return (Elementwise(kind, rows, columns, read, written, is_gradient, dtype),) * int(FIT["kernels"].get(name, 1))


def _kind_of_stream(name: str, reads: Sequence[TracedTensor], out: TracedTensor) -> ElementwiseKind:
    """Return the class of an operator: that of its name, or a sum or an element-wise one by PyTorch's word for it."""
    if name in LOOKUPS and out.numel > 1 and (name != "embedding" or out.shape[-1] < MEASURED["wide_row"]):
        # Rows of full loads are copied by a thread block each (aten/src/ATen/native/cuda/IndexKernelUtils.cu).
        is_repeated = name == "gather" and reads[-1].elements < out.numel
        is_row = is_repeated or (*reads[-1].shape, *reads[0].shape[1:]) == out.shape
        row_bytes = math.prod(reads[0].shape[1:]) * DType(out.dtype).bytes
        return K.GATHER if is_row and row_bytes % LOAD_BYTES[0] == 0 else K.IRREGULAR
    if name in ("cat", "stack") and reads:
        tensors = [tensor for tensor in (*reads, out) if tensor.numel]
        if all(map(_is_contiguous, tensors)) or all(map(is_channels_last, tensors)):
            return K.COPY  # by the kernel for contiguous tensors (aten/src/ATen/native/cuda/Shape.cu)
    if name == "embedding":
        return K.EMBEDDING
    is_pointwise, is_sum = _tags_of(name)
    if is_sum and reads and (out.numel < reads[0].numel or not is_pointwise):
        return K.ROW_SUM
    kind = KINDS.get(name, K.MUL if is_pointwise else K.OTHER)
    if name in ("_to_copy", "copy", "clone"):
        kind = K.CAST if reads and reads[-1].dtype != out.dtype else K.COPY
    if kind in POINTWISE:
        return kind_by_layout(kind, (*(reads[1:] if name == "copy" else reads), out), mixed=kind is not K.CAST)
    return kind


@lru_cache(maxsize=1024)
def _tags_of(name: str) -> tuple[bool, bool]:
    """Return whether PyTorch says that an operator works element by element, and that it sums or the like."""
    packet = getattr(torch.ops.aten, name, None)
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags} if packet else set()
    return torch.Tag.pointwise in tags, name in FIT["sums"] or getattr(torch.Tag, "reduction", None) in tags


def _describe_write_into(name: str, reads: Sequence[TracedTensor], target: TracedTensor) -> Compute:
    """Write values to positions of *target*; those that are added at one position run one after another."""
    values = max(reads[1:], key=bytes_of) if len(reads) > 1 else reads[0]
    size, width, dtype = bytes_of(values), max(1, values.shape[-1] if values.shape else 1), DType(values.dtype)
    rows, positions = max(1, values.numel // width), max(1, target.numel // width)
    if name not in ADD_INTO:
        return Elementwise(K.COPY, rows, width, size, size, dtype=dtype)
    if name in ("index_put", "_index_put_impl"):
        rows = max(1, values.numel // width // positions)
        return Elementwise(K.SCATTER_SUM, rows, width * positions, size, bytes_of(target), dtype=dtype)
    if "scatter" in name and len(values.shape) > 1:
        is_repeated = any(tensor.elements < tensor.numel for tensor in reads[1:] if tensor.dtype == "int64")
        rows = max(1, round(rows * MEASURED["repeated_index" if is_repeated else "own_index"]))
    return Elementwise(K.ATOMIC_SUM, rows, width, size, 2 * size, dtype=dtype)


# ---- memory layout of operands -------------------------------------------------------------------------------------


def kind_by_layout(kind: ElementwiseKind, tensors: Sequence[TracedTensor], mixed: bool) -> ElementwiseKind:
    """Return *kind* where all operands are contiguous in the same order, else the kind that computes each address.

    PyTorch's TensorIterator joins dimensions with the same strides in all operands; where one dimension is left, it
    uses vector loads and computes no addresses (aten/src/ATen/native/cuda/CUDALoops.cuh). *mixed* says that
    operands of several formats need conversions.
    """
    large = [tensor for tensor in tensors if tensor.numel > 1]
    if len(large) < 2:
        return kind
    shape = max((tensor.shape for tensor in large), key=lambda sizes: (len(sizes), math.prod(sizes)))
    strides = [_strides_along(tensor, shape) for tensor in large]
    converts = mixed and len({tensor.dtype for tensor in large if tensor.dtype in FLOATS}) > 1
    if all(own == strides[0] for own in strides) and _is_dense(shape, strides[0]):
        return K.STRIDED if converts else kind
    # Where later dimensions are nearer in memory, an operand is only repeated.
    in_order = all(earlier >= later for own in strides for earlier, later in pairwise(filter(None, own)))
    repeated = [place for place, size in enumerate(shape) if size > 1]
    nearest = {own.index(1) for own in strides if 1 in own and all(own[place] for place in repeated)}
    if len(nearest) > 1:
        return K.TRANSPOSED
    if converts or not in_order:
        return K.STRIDED
    return kind if kind is K.CAST else K.BROADCAST


def _strides_along(tensor: TracedTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of *tensor* along *shape*: 0 where it is repeated, or where there is one element."""
    missing = len(shape) - len(tensor.shape)
    own = [0] * missing + [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride, strict=True)]
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, own, strict=True))


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if the elements fill one stretch of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
