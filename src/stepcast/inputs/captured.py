"""Captured programs (``stepcast capture -o FILE``): JSON of our own."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, TypeVar

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.captured import Captured, CapturedMemory, LayerPart, Tie
from stepcast.ir.dtype import DType
from stepcast.ir.limits import CAPTURED, LAYERS
from stepcast.ir.recurrent import RecurrentCells
from stepcast.ir.work import (
    Attention,
    Convolution,
    ConvolutionPass,
    Elementwise,
    ElementwiseKind,
    GroupedMatmul,
    Matmul,
    Recorded,
    Work,
)
from stepcast.ir.workload import Block, Layer, Op, Role, Stage, Workload

FORMAT, VERSION = "stepcast-captured", 3
WORKS: dict[str, Callable[..., Work]] = {
    kind.__name__.lower(): kind
    for kind in (Matmul, GroupedMatmul, Convolution, Attention, RecurrentCells, Elementwise, Recorded)
}
ENUMS: dict[str, type[DType | ElementwiseKind | ConvolutionPass]] = {
    "dtype": DType, "kind": ElementwiseKind, "of": ConvolutionPass,
}  # fmt: skip

# Its name, the number of its work, its kernels, and 1 where the host waits for them.
OpRow = Annotated[list[str | int], msgspec.Meta(min_length=2, max_length=4)]
Item = TypeVar("Item")


class _CapturedLayer(msgspec.Struct):
    name: str
    forward: list[OpRow]
    input_gradient: list[OpRow] = msgspec.field(name="input-gradient")
    weight_gradient: list[OpRow] = msgspec.field(name="weight-gradient")


class _CapturedFile(msgspec.Struct):
    format: str
    version: int
    name: str
    parameters: int
    tokens: int
    batch: int
    precision: DType
    compiled: bool
    memory: dict[str, int]
    works: list[list[object]]
    layers: list[_CapturedLayer]
    body: list[tuple[list[int], int]]
    epilogue: list[int]
    parts: list[list[int | str]]
    ties: list[tuple[tuple[int, ...], int, int]] = []
    facts: dict[str, str] = {}
    warnings: list[str] = []


def looks_like(head: str) -> bool:
    return head.lstrip().startswith("{") and f'"{FORMAT}"' in head[:200]


def read(source: Source) -> Captured:
    try:
        file = msgspec.json.decode(source.data(CAPTURED), type=_CapturedFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"no captured program: {error}", source.path) from None
    if file.version != VERSION:
        raise FormatError(
            f"version {file.version}; this stepcast reads version {VERSION}: capture the program again", source.path
        )
    LAYERS.check(sum(len(numbers) * max(1, times) for numbers, times in file.body) // 100)
    works = [_read_work(row) for row in file.works]
    layers = [_read_layer(layer, works) for layer in file.layers]
    body = tuple(Block(tuple(_item(layers, number) for number in numbers), times) for numbers, times in file.body)
    stage = Stage(body, epilogue=tuple(_item(layers, number) for number in file.epilogue))
    try:
        memory = CapturedMemory(**file.memory)
        parts = tuple(LayerPart(*row) for row in file.parts)  # type: ignore[arg-type]
    except TypeError as error:
        raise FormatError(f"no captured program: {error}", source.path) from None
    return Captured(
        workload=Workload((stage,), name=file.name, source="captured", warnings=tuple(file.warnings)),
        parts=parts,
        memory=memory,
        parameters=file.parameters,
        tokens=file.tokens,
        batch=file.batch,
        precision=file.precision,
        compiled=file.compiled,
        facts=tuple(file.facts.items()),
        ties=tuple(Tie(*tie) for tie in file.ties),
    )


def _read_work(row: list[object]) -> Work:
    name = row[0] if row and isinstance(row[0], str) else ""
    if name not in WORKS:
        raise FormatError(f"unknown work {row[:1]}; known: {', '.join(WORKS)}")
    names = [field.name for field in fields(WORKS[name])]  # type: ignore[arg-type]
    if len(row) - 1 > len(names):
        raise FormatError(f"a {name} has {len(names)} numbers, not {len(row) - 1}")
    values = dict(zip(names, row[1:], strict=False))
    try:
        return WORKS[name](**{key: ENUMS[key](str(value)) if key in ENUMS else value for key, value in values.items()})
    except TypeError as error:
        raise FormatError(f"no {name}: {error}") from None


def _read_layer(layer: _CapturedLayer, works: Sequence[Work]) -> Layer:
    rows = (layer.forward, layer.input_gradient, layer.weight_gradient)
    forward, inputs, weights = (tuple(_read_op(row, works) for row in phase) for phase in rows)
    role = Role.OPTIMIZER if layer.name == Role.OPTIMIZER else None
    return Layer(layer.name, forward, inputs, weights, role=role)


def _read_op(row: OpRow, works: Sequence[Work]) -> Op:
    match row:
        case [str(name), int(number), *rest] if all(type(value) is int for value in rest):
            kernels, *host_reads = rest or [1]
            return Op(name, _item(works, number), kernels=int(kernels), host_reads=host_reads == [1])
    raise FormatError(f"no op: {row}")


def _item(values: Sequence[Item], number: int) -> Item:
    if not 0 <= number < len(values):
        raise FormatError(f"number {number} of {len(values)}")
    return values[number]
