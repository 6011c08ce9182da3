"""Operators of a profiler trace: what each GPU kernel did, from the call that launched it.

A kernel carries the id of the innermost operator that launched it ("External id"; in older traces its launch
does, by "correlation"), and with ``record_shapes=True`` that operator carries the shapes of its inputs.
"""

import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeVar

import msgspec

from stepcast.inputs.kineto.columns import EventRole, role_of, role_of_kernel
from stepcast.inputs.kineto.process_groups import dtype_named
from stepcast.inputs.kineto.stream import EventStream, TraceEvent
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.dtype import DType
from stepcast.ir.measured import OperatorTime, OperatorTimes
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.units import US

# fp32 tensors multiplied on tensor cores: names of cuBLAS, CUTLASS and the kernels of Hopper and later.
TF32_KERNEL = re.compile(r"tf32|s1688|s16816|tensorop|nvjet", re.IGNORECASE)
TRUE, FALSE = ("True", "1"), ("False", "0")


class KernelArgs(msgspec.Struct):
    """``args`` of a kernel or of its launch."""

    operator: int | None = msgspec.field(name="External id", default=None)
    old_operator: int | None = msgspec.field(name="external id", default=None)
    correlation: int | None = None


class OperatorArgs(msgspec.Struct):
    """``args`` of an operator."""

    operator: int | None = msgspec.field(name="External id", default=None)
    old_operator: int | None = msgspec.field(name="external id", default=None)
    shapes: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    values: Any = msgspec.field(name="Concrete Inputs", default=None)


KERNEL_ARGS = msgspec.json.Decoder(KernelArgs, strict=False)
OPERATOR_ARGS = msgspec.json.Decoder(OperatorArgs, strict=False)
NO_KERNEL_ARGS, NO_OPERATOR_ARGS = KernelArgs(), OperatorArgs()
Args = TypeVar("Args")
CALL = msgspec.json.Decoder(tuple[str, Any, Any, Any])
Shapes = Sequence[Sequence[int]]
Make = Callable[[Shapes, DType, Sequence[str]], Compute | None]


def _matmul(at: int) -> Make:
    """A product of the inputs at *at* and after it, matrices or batches of them."""

    def make(shapes: Shapes, dtype: DType, values: Sequence[str]) -> Compute | None:
        left, right = shapes[at], shapes[at + 1]
        if len(left) != len(right) or len(left) not in (2, 3):
            return None
        return Matmul(left[-2], right[-1], left[-1], left[0] if len(left) == 3 else 1, dtype)

    return make


def _grouped(shapes: Shapes, dtype: DType, values: Sequence[str]) -> Compute | None:
    """Rows of all experts by one weight each; the weights' gradient has another shape and is left out."""
    left, right = shapes[0], shapes[1]
    if len(left) != 2 or len(right) != 3:
        return None
    return GroupedMatmul(left[0], right[2], left[1], right[0], dtype)


def _attention(query: int, causal: int, heads_second: bool, backward: bool = False) -> Make:
    """Attention whose query is input *query*, key and value behind it, and whose flag is input *causal*.

    *heads_second*: shapes are (batch, heads, length, width), else (batch, length, heads, width).
    """

    def make(shapes: Shapes, dtype: DType, values: Sequence[str]) -> Compute | None:
        flag = values[causal]
        if flag not in (*TRUE, *FALSE):
            return None
        length, heads = (2, 1) if heads_second else (1, 2)
        of_query, of_key, of_value = shapes[query : query + 3]
        if not len(of_query) == len(of_key) == len(of_value) == 4:
            return None
        return Attention(
            of_query[0],
            of_query[length],
            of_key[length],
            of_query[heads],
            of_key[heads],
            of_query[3],
            of_value[3],
            flag in TRUE,
            backward,
            dtype,
        )

    return make


def _norm(kind: ElementwiseKind) -> Make:
    """A norm over the last dimension."""

    def make(shapes: Shapes, dtype: DType, values: Sequence[str]) -> Compute | None:
        shape = shapes[0]
        columns, rows = shape[-1], 1
        for size in shape[:-1]:
            rows *= size
        size_bytes = rows * columns * dtype.bytes
        return Elementwise(kind, rows, columns, size_bytes, size_bytes, False, dtype)

    return make


# Operators that launch kernels themselves, with their inputs in the order of PyTorch 2.13's
# native_functions.yaml (unchanged since 2.1). Norms' backward is two kernels of two kinds and is left out.
OPERATORS: dict[str, Make] = {
    "aten::mm": _matmul(0),
    "aten::addmm": _matmul(1),
    "aten::_addmm_activation": _matmul(1),
    "aten::bmm": _matmul(0),
    "aten::baddbmm": _matmul(1),
    "aten::_scaled_mm": _matmul(0),
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::_flash_attention_forward": _attention(0, 8, heads_second=False),
    "aten::_flash_attention_backward": _attention(1, 11, heads_second=False, backward=True),
    "aten::_efficient_attention_forward": _attention(0, 9, heads_second=False),
    "aten::_efficient_attention_backward": _attention(1, 14, heads_second=False, backward=True),
    "aten::_cudnn_attention_forward": _attention(0, 10, heads_second=True),
    "aten::_cudnn_attention_backward": _attention(1, 14, heads_second=True, backward=True),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 6, heads_second=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 14, heads_second=True, backward=True),
    "aten::_fused_rms_norm": _norm(ElementwiseKind.RMS_NORM),
    "aten::native_layer_norm": _norm(ElementwiseKind.LAYER_NORM),
}


def _read(decoder: "msgspec.json.Decoder[Args]", data: bytes | msgspec.Raw, none: Args) -> Args:
    """What an event says beside its times; *none* where that is not what the profiler writes."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return none


class _Collected:
    """Kernel times and operators by the operator's id."""

    def __init__(self) -> None:
        self.kernel_us: dict[int, float] = {}
        self.tf32: set[int] = set()
        # By correlation, until the launch names the operator: time, and whether on tensor cores.
        self.untied: dict[int, tuple[float, bool]] = {}
        self.launched_by: dict[int, int] = {}
        self.operators: dict[int, int] = {}  # to the number of its call
        self.calls: dict[bytes, int] = {}  # name and inputs: few, however often each is called
        self.without_shapes = 0
        self.total_us = 0.0

    def add(self, events: list[TraceEvent]) -> None:
        for event in events:
            if event.ph != "X" or not event.args:
                continue
            role = role_of(event.cat)
            if role is EventRole.KERNEL:
                self._add_kernel(event)
            elif role is EventRole.HOST and event.name in OPERATORS:
                self._add_operator(event)
            elif role is EventRole.CALL:
                args = _read(KERNEL_ARGS, event.args, NO_KERNEL_ARGS)
                operator = _first(args.operator, args.old_operator)
                if args.correlation is not None and operator is not None:
                    self.launched_by[args.correlation] = operator

    def _add_kernel(self, event: TraceEvent) -> None:
        duration = event.dur
        if duration is None or not duration > 0 or role_of_kernel(event.name) is not EventRole.KERNEL:
            return
        self.total_us += duration
        args = _read(KERNEL_ARGS, event.args, NO_KERNEL_ARGS)
        operator = _first(args.operator, args.old_operator)
        tensor_cores = TF32_KERNEL.search(event.name) is not None
        if operator is not None:
            self._spend(operator, duration, tensor_cores)
        elif args.correlation is not None:
            self.untied[args.correlation] = duration, tensor_cores

    def _spend(self, operator: int, duration_us: float, tensor_cores: bool) -> None:
        self.kernel_us[operator] = self.kernel_us.get(operator, 0.0) + duration_us
        if tensor_cores:
            self.tf32.add(operator)

    def _add_operator(self, event: TraceEvent) -> None:
        raw = bytes(event.args)
        if b'"Input Dims"' not in raw:
            self.without_shapes += 1
            return
        args = _read(OPERATOR_ARGS, raw, NO_OPERATOR_ARGS)
        operator = _first(args.operator, args.old_operator)
        if operator is not None:
            call = msgspec.json.encode((event.name, args.shapes, args.types, args.values))
            self.operators[operator] = self.calls.setdefault(call, len(self.calls))

    def tie(self) -> None:
        """Kernels that name no operator go to that of their launch."""
        for correlation, (duration_us, tensor_cores) in self.untied.items():
            operator = self.launched_by.get(correlation)
            if operator is not None:
                self._spend(operator, duration_us, tensor_cores)


def read_operators(sources: Sequence[Source]) -> OperatorTimes:
    """The matmuls, attentions and norms of a run's traces: each distinct one with the median of its runs."""
    times_us: dict[Compute, list[float]] = {}
    names: dict[Compute, str] = {}
    left_out: dict[str, int] = {}
    devices: dict[str, None] = {}
    matrix_us = total_us = 0.0
    without_shapes = 0
    warnings: list[str] = []
    for source in sources:
        stream, collected = EventStream(source), _Collected()
        for events in stream:
            collected.add(events)
        collected.tie()
        warnings += stream.warnings
        without_shapes += collected.without_shapes
        total_us += collected.total_us
        devices |= dict.fromkeys(_devices(stream))
        for name, work, spent_us in _calls(collected, left_out):
            times_us.setdefault(work, []).append(spent_us)
            names.setdefault(work, name)
            if not isinstance(work, Elementwise):
                matrix_us += spent_us
    if not times_us:
        raise FormatError(_nothing(total_us, without_shapes), sources[0].path)
    if len(devices) > 1:
        warnings.append(f"traces of several kinds of GPU ({', '.join(devices)}) are taken as one")
    operators = [
        OperatorTime(names[work], (work,), median(listed) * US, len(listed)) for work, listed in times_us.items()
    ]
    return OperatorTimes(
        tuple(operators),
        sources[0].path,
        next(iter(devices), ""),
        min(1.0, matrix_us / total_us),
        left_out,
        tuple(warnings),
    )


def _nothing(total_us: float, without_shapes: int) -> str:
    if not total_us:
        return "has no GPU kernels; calibrate needs a trace of a GPU"
    if without_shapes:
        return "does not tell the shapes of operators; record it with profile(record_shapes=True)"
    return "ties no kernel to a matmul, attention or norm of PyTorch; expected operators such as aten::mm"


def _calls(collected: _Collected, left_out: dict[str, int]) -> list[tuple[str, Compute, float]]:
    """Every operator that ran kernels, as name and work, with the time of its kernels."""
    inputs = [CALL.decode(call) for call in collected.calls]
    known: dict[tuple[int, bool], Compute | None] = {}
    found = []
    for operator, number in collected.operators.items():
        spent_us = collected.kernel_us.get(operator)
        if spent_us is None:
            continue
        key = number, operator in collected.tf32
        if key not in known:
            known[key] = _work(*inputs[number], tensor_cores=key[1])
        name, work = inputs[number][0], known[key]
        if work is None:
            reason = f"{name} with inputs that are not understood"
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            found.append((name, work, spent_us))
    return found


def _work(name: str, shapes: Any, types: Any, values: Any, *, tensor_cores: bool) -> Compute | None:
    """What the operator did; None where its inputs are not what they are known to be."""
    words = types if isinstance(types, list) else []
    named = (dtype_named(word) for word in words if isinstance(word, str))
    dtype = next((found for found in named if found is not None), None)
    if dtype is None:
        return None
    if dtype is DType.FP32 and tensor_cores:
        dtype = DType.TF32
    try:
        return OPERATORS[name](shapes, dtype, values if isinstance(values, list) else [])
    except (IndexError, TypeError, ValueError):
        return None


def _devices(stream: EventStream) -> list[str]:
    listed = stream.metadata.get("deviceProperties")
    entries = listed if isinstance(listed, list) else []
    return [str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry]


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)
