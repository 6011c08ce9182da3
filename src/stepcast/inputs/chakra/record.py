"""The record from which stepcast reads its own Chakra traces back.

The GlobalMetadata of each file holds `stepcast.workload`, the folded Workload as compressed JSON in which
every distinct work, op and layer occurs once, and `stepcast.nodes`, the CRC-32 of the nodes that follow. The
nodes are for other programs; the checksum shows when one of those changed them.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from types import GenericAlias
from typing import Annotated, Any, get_args

import msgspec

from stepcast.inputs.chakra.nodes import has_metadata, read_metadata
from stepcast.inputs.chakra.protobuf import AttributeKind, WireError, attribute, bytes_field, delimit, read_varint
from stepcast.inputs.source import FormatError, prefix_errors
from stepcast.ir.limits import MICRO_BATCHES, NODES, UNPACKED
from stepcast.ir.types import require
from stepcast.ir.work import Work
from stepcast.ir.workload import FIRST, LAST, Block, Layer, Op, Stage, Workload, count_layers

SCHEMA_VERSION = "0.0.4"
RECORD_VERSION = 3
RECORD, CHECKSUM, RANK = "stepcast.workload", "stepcast.nodes", "stepcast.rank"
WORK_TYPES: dict[str, type[Work]] = {kind.__name__: kind for kind in get_args(Work)}
PHASES = ("forward", "input_gradient", "weight_gradient")

Index = Annotated[int, msgspec.Meta(ge=0)]
Indices = tuple[Index, ...]
Blocks = tuple[tuple[Indices, int], ...]
"""The layers of each block, and its repeats."""


def _record_type(described: type, changed: Mapping[str, object], **first: object) -> type[Any]:
    """Return a struct type with the fields *first*, then those of a dataclass; *changed* replaces the types of some."""
    record_fields = ((field.name, changed.get(field.name, field.type), field.default) for field in fields(described))
    every = [field[:2] if field[2] is MISSING else field for field in record_fields]
    name = f"{described.__name__}Record"
    return msgspec.defstruct(name, [*first.items(), *every], frozen=True, omit_defaults=True)


# Works, ops, layers and stages are named by their index in the record's tables; a work is the name of its type and its
# fields.
OpRecord = _record_type(Op, {"work": Index})
LayerRecord = _record_type(Layer, dict.fromkeys(PHASES, Indices))
RUNS = {"body": Blocks, "prologue": Indices, "epilogue": Indices, "varied": tuple[tuple[int, Blocks], ...]}
StageRecord = _record_type(Stage, RUNS)
TABLES: dict[str, Any] = {"works": tuple[str, msgspec.Raw], "ops": OpRecord}
TABLES |= {"layers": LayerRecord, "stages": StageRecord}
WorkloadTables = msgspec.defstruct(
    "WorkloadTables", [(name, GenericAlias(tuple, (kind, ...))) for name, kind in TABLES.items()]
)
WorkloadRecord = _record_type(Workload, {"stages": Indices}, version=int, tables=WorkloadTables)


def record_workload(workload: Workload) -> Any:
    """Return *workload* as a WorkloadRecord, with every distinct work, op, layer and stage once."""
    works, ops, layers, stages = (dict[Any, int]() for _ in TABLES)

    def number_op(op: Op) -> int:
        record = _copy(OpRecord, Op, op, work=works.setdefault(op.work, len(works)))
        return ops.setdefault(record, len(ops))

    def number_layers(run: Sequence[Layer]) -> Indices:
        rows = ({phase: tuple(map(number_op, getattr(layer, phase))) for phase in PHASES} for layer in run)
        records = (_copy(LayerRecord, Layer, layer, **row) for layer, row in zip(run, rows, strict=True))
        return tuple(layers.setdefault(record, len(layers)) for record in records)

    def number_blocks(blocks: Iterable[Block]) -> Blocks:
        return tuple((number_layers(block.layers), block.repeat) for block in blocks)

    order: Indices = ()
    for stage in workload.stages:
        ends = number_layers(stage.prologue), number_layers(stage.epilogue)
        varied = tuple((which, number_blocks(blocks)) for which, blocks in stage.varied)
        order += (stages.setdefault(StageRecord(number_blocks(stage.body), *ends, varied), len(stages)),)
    written = tuple((type(work).__name__, msgspec.Raw(msgspec.json.encode(work))) for work in works)
    tables = WorkloadTables(written, tuple(ops), tuple(layers), tuple(stages))
    return _copy(WorkloadRecord, Workload, workload, version=RECORD_VERSION, tables=tables, stages=order)


def encode_workload(workload: Workload) -> bytes:
    """Return *workload* without its warnings as compressed JSON."""
    return zlib.compress(msgspec.json.encode(record_workload(replace(workload, warnings=()))), 9)


def _copy(build: Callable[..., Any], described: type, source: object, **changed: object) -> Any:
    """Build a copy of *source* with the fields of the *described* dataclass, some of them *changed*."""
    same = (field.name for field in fields(described) if field.name not in changed)
    return build(**{name: getattr(source, name) for name in same}, **changed)


def decode_workload(packed: bytes) -> Workload:
    """Return the workload that *packed* records; ValueError where it is damaged or too large."""
    unpacker = zlib.decompressobj()
    with prefix_errors(f"{RECORD} is damaged", kinds=(zlib.error,)):
        content = unpacker.decompress(packed, UNPACKED.most)
    require(unpacker.eof and not unpacker.unconsumed_tail, f"{RECORD} is damaged: cut off, or {UNPACKED.message}")
    try:
        return build_workload(msgspec.json.decode(content, type=WorkloadRecord))
    except msgspec.MsgspecError as error:  # no ValueError in older versions of msgspec
        raise ValueError(str(error)) from None


def build_workload(record: Any) -> Workload:
    """Return the workload of a WorkloadRecord; equal layers and stages are one object: a simulation folds those."""
    if record.version != RECORD_VERSION:
        raise ValueError(f"{RECORD} is of version {record.version}; expected {RECORD_VERSION}: write it again")
    MICRO_BATCHES.check(record.micro_batches)
    tables = record.tables
    with prefix_errors(f"{RECORD} is damaged", kinds=(LookupError,)):
        works = [msgspec.json.decode(values, type=WORK_TYPES[kind]) for kind, values in tables.works]
        ops = [_copy(Op, Op, op, work=works[op.work]) for op in tables.ops]
        phases = (
            {phase: tuple(map(ops.__getitem__, getattr(layer, phase))) for phase in PHASES} for layer in tables.layers
        )
        layers = [_copy(Layer, Layer, layer, **own) for layer, own in zip(tables.layers, phases, strict=True)]
        stages = [_build_stage(stage, layers) for stage in tables.stages]
        order = tuple(stages[index] for index in record.stages)
    workload: Workload = _copy(Workload, Workload, record, stages=order)
    return workload


def _build_stage(record: Any, layers: Sequence[Layer]) -> Stage:
    def run(indices: Indices) -> tuple[Layer, ...]:
        return tuple(layers[index] for index in indices)

    @cache
    def blocks(parts: Blocks) -> tuple[Block, ...]:
        return tuple(Block(run(indices), repeat) for indices, repeat in parts)

    varied = tuple((which, blocks(parts)) for which, parts in record.varied)
    stage = Stage(blocks(record.body), run(record.prologue), run(record.epilogue), varied)
    NODES.check(stage.body_layer_count)
    if any(which < 0 and which not in (FIRST, LAST) for which, _ in stage.varied):
        raise ValueError(f"{RECORD} is damaged: a micro-batch has a negative number")
    if any(count_layers(body) != stage.body_layer_count for _, body in stage.varied):
        raise ValueError(f"{RECORD} is damaged: micro-batches of a stage differ in their number of layers")
    return stage


def write_head(record: bytes, rank: int, nodes: bytes) -> bytes:
    """Return the GlobalMetadata message that precedes the *nodes* of a rank in its file."""
    attributes = (
        attribute("schema", AttributeKind.STRING, SCHEMA_VERSION),
        attribute(RANK, AttributeKind.UINT64, rank),
        attribute(CHECKSUM, AttributeKind.UINT32, zlib.crc32(nodes)),
        attribute(RECORD, AttributeKind.BYTES, record),
    )
    body = b"".join(bytes_field(2, content) for content in attributes)
    return delimit(bytes_field(1, SCHEMA_VERSION.encode()) + body)


def read_record(data: bytes, path: str) -> bytes | None:
    """Return the record in a trace that stepcast wrote and nobody changed, None in another program's."""
    try:
        length, start = read_varint(data, 0)
        end = start + length
        metadata = read_metadata(data[start:end])[1] if has_metadata(data[start:end]) else {}
    except WireError:
        return None  # decoding the trace reports the damage
    record = metadata.get(RECORD)
    if record is None:
        return None
    if not isinstance(record, bytes):
        raise FormatError("was written by an earlier version of stepcast, which is not read; write it again", path)
    if metadata.get(CHECKSUM) != zlib.crc32(memoryview(data)[end:]):
        raise FormatError(
            f"its nodes were changed after stepcast wrote it; remove the attribute {RECORD} to read them", path
        )
    return record
