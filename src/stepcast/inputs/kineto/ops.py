"""Operators of a profiler trace: the work of each GPU kernel, from the call that launched it.

A kernel carries the id of the innermost operator that launched it ("External id"; in older traces its launch
does, by "correlation"), and with ``record_shapes=True`` that operator carries the shapes of its inputs.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import msgspec

from stepcast.inputs.kineto.reader import WORDS, EventRole, decode_args, dtype_named, role_of, role_of_kernel
from stepcast.inputs.kineto.stream import EventStream, TraceEvent
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.measured import OperatorTime, OperatorTimes
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.units import US

# fp32 tensors multiplied on tensor cores: names of cuBLAS, CUTLASS and the kernels of Hopper and later.
TF32_KERNEL = re.compile(r"tf32|s1688|s16816|tensorop|nvjet", re.IGNORECASE)
TRUE, FALSE = ("True", "1"), ("False", "0")


class KernelArgs(msgspec.Struct):
    """``args`` of a kernel or of its launch."""

    new_id: int | None = msgspec.field(name="External id", default=None)
    old_id: int | None = msgspec.field(name="external id", default=None)
    correlation: int | None = None

    @property
    def operator(self) -> int | None:
        return self.old_id if self.new_id is None else self.new_id


class OperatorArgs(KernelArgs):
    """``args`` of an operator."""

    shapes: object = msgspec.field(name="Input Dims", default=None)
    types: object = msgspec.field(name="Input type", default=None)
    values: object = msgspec.field(name="Concrete Inputs", default=None)


KERNEL_ARGS = msgspec.json.Decoder(KernelArgs, strict=False)
OPERATOR_ARGS = msgspec.json.Decoder(OperatorArgs, strict=False)
NO_KERNEL_ARGS, NO_OPERATOR_ARGS = KernelArgs(), OperatorArgs()
CALL = msgspec.json.Decoder(tuple[str, object, object, object])
Shapes = Sequence[Sequence[int]]
Words = Sequence[str]


def _matmul(first: int, shapes: Shapes, dtype: DType, values: Words) -> Compute | None:
    """Return a product of the inputs *first* and after it, matrices or batches of them."""
    left, right = shapes[first], shapes[first + 1]
    if len(left) != len(right) or len(left) not in (2, 3):
        return None
    return Matmul(left[-2], right[-1], left[-1], left[0] if len(left) == 3 else 1, dtype)


def _grouped_matmul(shapes: Shapes, dtype: DType, values: Words) -> Compute | None:
    """Return rows of all experts by one weight each; the weights' gradient has another shape and is left out."""
    left, right = shapes[0], shapes[1]
    if len(left) != 2 or len(right) != 3:
        return None
    return GroupedMatmul(left[0], right[2], left[1], right[0], dtype)


def _attention(
    first: int, flag: int, backward: int, heads: int, shapes: Shapes, dtype: DType, values: Words
) -> Compute | None:
    """Return attention of the query that is input *first*, key and value behind it, causal by input *flag*.

    *heads*: the dimension that counts heads, 1 in (batch, heads, length, width) or 2.
    """
    if values[flag] not in (*TRUE, *FALSE):
        return None
    length = 3 - heads
    query, key, value = shapes[first : first + 3]
    if not len(query) == len(key) == len(value) == 4:
        return None
    is_causal = values[flag] in TRUE
    sizes = (query[0], query[length], key[length], query[heads], key[heads], query[3], value[3])
    return Attention(*sizes, is_causal, bool(backward), dtype)


def _norm(kind: ElementwiseKind, shapes: Shapes, dtype: DType, values: Words) -> Compute | None:
    """Return a norm over the last dimension."""
    rows, columns = math.prod(shapes[0][:-1]), shapes[0][-1]
    size_bytes = rows * columns * dtype.bytes
    return Elementwise(kind, rows, columns, size_bytes, size_bytes, False, dtype)


MAKERS: dict[str, Callable[..., Compute | None]] = {
    "matmul": _matmul,
    "grouped-matmul": _grouped_matmul,
    "attention": _attention,
    **{kind: partial(_norm, kind) for kind in (ElementwiseKind.RMS_NORM, ElementwiseKind.LAYER_NORM)},
}
OPERATORS = {
    name: partial(MAKERS[kind], *map(int, arguments))
    for name, (kind, *arguments) in ((name, words.split()) for name, words in WORDS["operators"].items())
}


class _TracedOperators:
    """Kernel times and operators by the operator's id."""

    def __init__(self) -> None:
        self.without_shapes = 0
        self.total_us = 0.0
        self._kernel_us: dict[int, float] = {}
        self._on_tensor_cores: set[int] = set()
        # By correlation, until the launch names the operator: time, and whether on tensor cores.
        self._untied: dict[int, tuple[float, bool]] = {}
        self._launched_by: dict[int, int] = {}
        self._call_of: dict[int, int] = {}  # operator -> the number of its call
        self._calls: dict[bytes, int] = {}  # name and inputs: few, however often each is called

    def add(self, events: list[TraceEvent]) -> None:
        for event in events:
            if event.ph != "X" or not event.args:
                continue
            role, duration = role_of(event.cat), event.dur
            if role is EventRole.KERNEL:
                if duration is None or not duration > 0 or role_of_kernel(event.name) is not EventRole.KERNEL:
                    continue
                self.total_us += duration
                args = decode_args(KERNEL_ARGS, event.args, NO_KERNEL_ARGS)
                on_tensor_cores = TF32_KERNEL.search(event.name) is not None
                if args.operator is not None:
                    self._spend(args.operator, duration, on_tensor_cores)
                elif args.correlation is not None:
                    self._untied[args.correlation] = duration, on_tensor_cores
            elif role is EventRole.HOST and event.name in OPERATORS:
                if b'"Input Dims"' not in bytes(event.args):
                    self.without_shapes += 1
                    continue
                inputs = decode_args(OPERATOR_ARGS, event.args, NO_OPERATOR_ARGS)
                if inputs.operator is not None:
                    call = msgspec.json.encode((event.name, inputs.shapes, inputs.types, inputs.values))
                    self._call_of[inputs.operator] = self._calls.setdefault(call, len(self._calls))
            elif role is EventRole.CALL:
                args = decode_args(KERNEL_ARGS, event.args, NO_KERNEL_ARGS)
                if args.correlation is not None and args.operator is not None:
                    self._launched_by[args.correlation] = args.operator

    def _spend(self, operator: int, duration_us: float, on_tensor_cores: bool) -> None:
        self._kernel_us[operator] = self._kernel_us.get(operator, 0.0) + duration_us
        if on_tensor_cores:
            self._on_tensor_cores.add(operator)

    def works(self) -> Iterator[tuple[str, Compute | None, float]]:
        """Yield every operator that ran kernels: its name, its work, and the time of its kernels."""
        # Kernels that name no operator belong to that of their launch.
        for correlation, (duration_us, on_tensor_cores) in self._untied.items():
            operator = self._launched_by.get(correlation)
            if operator is not None:
                self._spend(operator, duration_us, on_tensor_cores)
        inputs = [CALL.decode(call) for call in self._calls]
        known: dict[tuple[int, bool], Compute | None] = {}
        for operator, number in self._call_of.items():
            if operator in self._kernel_us:
                key = number, operator in self._on_tensor_cores
                if key not in known:
                    known[key] = _read_work(*inputs[number], on_tensor_cores=key[1])
                yield inputs[number][0], known[key], self._kernel_us[operator]


def read_operators(sources: Sequence[Source]) -> OperatorTimes:
    """Return the matmuls, attentions and norms of a run's traces: each distinct one with the median of its runs."""
    times_us, names = dict[Compute, list[float]](), dict[Compute, str]()
    left_out, devices, warnings = Counter[str](), dict[str, None](), list[str]()
    matrix_us = total_us = 0.0
    without_shapes = 0
    for source in sources:
        stream, operators = EventStream(source), _TracedOperators()
        for events in stream:
            operators.add(events)
        warnings += stream.warnings
        without_shapes += operators.without_shapes
        total_us += operators.total_us
        devices |= dict.fromkeys(stream.device_names())
        for name, work, kernel_us in operators.works():
            if work is None:
                left_out[f"{name} with inputs that are not understood"] += 1
                continue
            times_us.setdefault(work, []).append(kernel_us)
            names.setdefault(work, name)
            if not isinstance(work, Elementwise):
                matrix_us += kernel_us
    if not times_us:
        why = "ties no kernel to a matmul, attention or norm of PyTorch; expected operators such as aten::mm"
        if without_shapes:
            why = "does not state the shapes of operators; record it with profile(record_shapes=True)"
        if not total_us:
            why = "has no GPU kernels; calibrate needs a trace of a GPU"
        raise FormatError(why, sources[0].path)
    if len(devices) > 1:
        warnings.append(f"traces of several kinds of GPU ({', '.join(devices)}) are taken as one")
    return OperatorTimes(
        tuple(OperatorTime(names[work], (work,), median(us) * US, len(us)) for work, us in times_us.items()),
        sources[0].path,
        next(iter(devices), ""),
        min(1.0, matrix_us / total_us),
        dict(left_out),
        tuple(warnings),
    )


def _read_work(name: str, shapes: object, types: object, values: object, *, on_tensor_cores: bool) -> Compute | None:
    """Return the work of the operator; None where its inputs are not what they are known to be."""
    words = types if isinstance(types, list) else []
    formats = (dtype_named(word) for word in words if isinstance(word, str))
    dtype = next((known for known in formats if known is not None), None)
    if dtype is None:
        return None
    if dtype is DType.FP32 and on_tensor_cores:
        dtype = DType.TF32
    try:
        return OPERATORS[name](shapes, dtype, values if isinstance(values, list) else [])
    except (IndexError, TypeError, ValueError):
        return None
