"""Captured programs (``stepcast capture -o FILE``): JSON of our own."""

from dataclasses import fields
from typing import Any

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.captured import Captured, CapturedMemory, LayerPart, Tie
from stepcast.ir.dtype import DType
from stepcast.ir.limits import CAPTURED, LAYERS
from stepcast.ir.recurrent import RecurrentCells
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul, Recorded, Work
from stepcast.ir.workload import Block, Layer, Op, Phase, Role, Stage, Workload

FORMAT, VERSION = "stepcast-captured", 3
WORKS = {
    each.__name__.lower(): each for each in (Matmul, GroupedMatmul, Attention, RecurrentCells, Elementwise, Recorded)
}
ENUMS: dict[str, Any] = {"dtype": DType, "kind": ElementwiseKind}


Row = list[Any]  # name, number of its work, its kernels, and 1 where the host waits for them


class _Layer(msgspec.Struct):
    name: str
    forward: list[Row]
    input_gradient: list[Row] = msgspec.field(name="input-gradient")
    weight_gradient: list[Row] = msgspec.field(name="weight-gradient")


class _File(msgspec.Struct):
    format: str
    version: int
    name: str
    parameters: int
    tokens: int
    batch: int
    precision: DType
    compiled: bool
    memory: dict[str, int]
    works: list[list[Any]]
    layers: list[_Layer]
    body: list[tuple[list[int], int]]
    epilogue: list[int]
    parts: list[list[int | str]]
    ties: list[tuple[list[int], int, int]] = []
    facts: dict[str, str] = {}
    warnings: list[str] = []


def looks_like(head: str) -> bool:
    return head.lstrip().startswith("{") and f'"{FORMAT}"' in head[:200]


def read(source: Source) -> Captured:
    try:
        found = msgspec.json.decode(source.data(CAPTURED), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"no captured program: {error}", source.path) from None
    if found.version != VERSION:
        raise FormatError(
            f"version {found.version}; this stepcast reads version {VERSION}: capture the program again", source.path
        )
    LAYERS.check(sum(len(numbers) * max(1, times) for numbers, times in found.body) // 100)
    works = [_work(row) for row in found.works]
    layers = [_layer(each, works) for each in found.layers]
    body = tuple(Block(tuple(_at(layers, at) for at in numbers), times) for numbers, times in found.body)
    epilogue = tuple(_at(layers, at) for at in found.epilogue)
    workload = Workload(
        (Stage(body, epilogue=epilogue),), name=found.name, source="captured", warnings=tuple(found.warnings)
    )
    try:
        memory = CapturedMemory(**found.memory)
        parts = tuple(LayerPart(*row) for row in found.parts)  # type: ignore[arg-type]
    except TypeError as error:
        raise FormatError(f"no captured program: {error}", source.path) from None
    return Captured(
        workload=workload,
        parts=parts,
        memory=memory,
        parameters=found.parameters,
        tokens=found.tokens,
        batch=found.batch,
        precision=found.precision,
        compiled=found.compiled,
        facts=tuple(found.facts.items()),
        ties=tuple(Tie(tuple(parts), size, split) for parts, size, split in found.ties),
    )


def _work(row: list[Any]) -> Work:
    kind = WORKS.get(row[0]) if row and isinstance(row[0], str) else None
    if kind is None:
        raise FormatError(f"unknown work {row[:1]}; known: {', '.join(WORKS)}")
    names = [each.name for each in fields(kind)]
    if len(row) - 1 > len(names):
        raise FormatError(f"a {row[0]} has {len(names)} numbers, not {len(row) - 1}")
    values = dict(zip(names, row[1:], strict=False))
    try:
        return kind(**{name: ENUMS.get(name, lambda value: value)(value) for name, value in values.items()})
    except TypeError as error:
        raise FormatError(f"no {row[0]}: {error}") from None


def _layer(found: _Layer, works: list[Work]) -> Layer:
    ops = {
        Phase.FORWARD: found.forward,
        Phase.INPUT_GRADIENT: found.input_gradient,
        Phase.WEIGHT_GRADIENT: found.weight_gradient,
    }
    forward, inputs, weights = (tuple(_op(row, works) for row in rows) for rows in ops.values())
    role = Role.OPTIMIZER if found.name == Role.OPTIMIZER else None
    return Layer(found.name, forward, inputs, weights, role=role)


def _op(row: list[Any], works: list[Work]) -> Op:
    if len(row) not in (2, 3, 4) or not isinstance(row[0], str) or not all(type(each) is int for each in row[1:]):
        raise FormatError(f"no op: {row}")
    kernels, *reads = row[2:] or [1]
    return Op(row[0], _at(works, row[1]), kernels=kernels, host_reads=reads == [1])


def _at(values: list[Any], at: int) -> Any:
    if not 0 <= at < len(values):
        raise FormatError(f"number {at} of {len(values)}")
    return values[at]
