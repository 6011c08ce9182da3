"""Layers and ops as all kinds of layers build them: memory-bound kernels, casts and collectives."""

from typing import NamedTuple

from stepcast.ir.dtype import DType
from stepcast.ir.layout import Group
from stepcast.ir.work import Collective, CollectiveKind, Elementwise, ElementwiseKind, elementwise
from stepcast.ir.workload import Layer, Op, OpPart, Role

K = ElementwiseKind
C = CollectiveKind
FP32 = DType.FP32
Ops = tuple[Op, ...]


class PhaseOps(NamedTuple):
    """The ops of a forward, of its input gradient and of its weight gradient."""

    forward: Ops = ()
    input_gradient: Ops = ()
    weight_gradient: Ops = ()


def make_layer(role: Role, forward: Ops = (), input_gradient: Ops = (), weight_gradient: Ops = ()) -> Layer:
    """Return the layer of that *role*, which is its name."""
    return Layer(str(role), forward, input_gradient, weight_gradient, role=role)


def collective(
    name: str, kind: CollectiveKind, size_bytes: int, group: Group, blocking: bool = True, times: int = 1
) -> Op:
    return Op(name, Collective(kind, size_bytes, group, times), blocking, kernels=times)


def stream_op(
    name: str,
    kind: ElementwiseKind,
    rows: int,
    columns: int,
    reads: float,
    writes: float,
    dtype: DType,
    backward: bool = False,
    *,
    kernels: int = 1,
    part: OpPart | None = None,
) -> Op:
    """Return an op that reads and writes *reads* and *writes* tensors of *rows* x *columns*."""
    return Op(name, elementwise(kind, rows, columns, reads, writes, dtype, backward), kernels=kernels, part=part)


def moved_op(
    name: str, kind: K, rows: int, columns: int, read: float, write: float, dtype: DType, kernels: int = 1
) -> Op:
    """Return an op that reads and writes so many bytes for each of *rows* x *columns* elements."""
    elements = float(rows * columns)
    return Op(name, Elementwise(kind, rows, columns, read * elements, write * elements, dtype=dtype), kernels=kernels)


def cast_op(name: str, rows: int, columns: int, before: DType, after: DType, counted_as: DType | None = None) -> Op:
    """Return the cast of *rows* x *columns* elements from one format to another."""
    return moved_op(name, K.CAST, rows, columns, before.bytes, after.bytes, counted_as or before)
