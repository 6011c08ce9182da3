"""Chakra execution traces (protobuf, schema 0.0.4) from a Workload.

Micro-batches and repeated layers are written out as nodes, one micro-batch after another, so that other
simulators can run them. Each op depends on the blocking one before, on the one before it in its lane (its
group's communication), and on those it must come after; a non-blocking op is waited for by nothing else.
"""

from collections.abc import Iterator
from functools import lru_cache

import msgspec

from stepcast.inputs.chakra.nodes import NodeType
from stepcast.inputs.chakra.plan import (
    AFTER,
    BLOCKING,
    BODY,
    DURATION_S,
    EPILOGUE,
    LAYER,
    MICRO_BATCH,
    OP,
    PHASE,
    PLAN,
    PLAN_VERSION,
    PROLOGUE,
    SCHEMA_VERSION,
    SECTION,
    STAGE,
    TYPE_OF_COLLECTIVE,
    WORK,
    BlockPlan,
    LayerPlan,
    StagePlan,
    WorkloadPlan,
    work_text,
)
from stepcast.inputs.chakra.protobuf import Kind, attribute, bytes_field, delimited, number_field, varint
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.scan import Scan
from stepcast.ir.work import (
    Attention,
    Collective,
    CollectiveKind,
    Direction,
    Elementwise,
    GroupedMatmul,
    Matmul,
    Recorded,
    Transfer,
    Work,
)
from stepcast.ir.workload import Layer, Op, Phase, Stage, Workload
from stepcast.units import US

ATTRIBUTE_FIELD = 10
DATA_DEPENDENCIES_FIELD = 5
# ASTRA-sim turns pg_name into a number and takes none for all ranks.
GROUP_NUMBERS = {group: str(number) for number, group in enumerate(Group, 1) if group is not Group.WORLD}
BACKWARD = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)


def write(workload: Workload) -> bytes:
    """The trace of one step. Stages stand one after another, each a chain of its own."""
    return b"".join(_messages(workload))


def losses(workload: Workload) -> tuple[str, ...]:
    """What of *workload* the trace does not hold, or holds only in attributes that stepcast alone reads."""
    lost = ["phases, layers and repeats: other programs see the nodes written out"]
    works = {type(op.work) for layer in _layers(workload) for phase in Phase for op in layer.ops(phase)}
    if len(workload.stages) > 1:
        lost.append("which stage a node belongs to: other programs would run all stages on each rank")
    if works & {Matmul, GroupedMatmul, Attention, Scan, Elementwise}:
        lost.append("shapes: other programs see FLOPs and bytes (num_ops, tensor_size)")
    if works & {Recorded}:
        lost.append("times below a microsecond: duration_micros is whole; stepcast.duration_s is exact")
    if works & {Collective, Transfer}:
        lost.append("group names: pg_name numbers the kind of group, and ranks are not listed")
    if Transfer in works:
        lost.append("peers of transfers: comm_src and comm_dst need one trace per rank")
    if any(layer.process_s for layer in _layers(workload)):
        lost.append("process times, layout, notes: other programs do not read them")
    if any(_unseen(stage, workload.micro_batches) for stage in workload.stages):
        lost.append("layers that no micro-batch runs: dropped")
    if workload.warnings:
        lost.append("warnings: dropped")
    return tuple(lost)


def _layers(workload: Workload) -> Iterator[Layer]:
    for stage in workload.stages:
        yield from stage.prologue
        for block in stage.body:
            yield from block.layers
        yield from (variation.layer for variation in stage.variations)
        yield from stage.epilogue


def _unseen(stage: Stage, micro_batches: int) -> bool:
    """Some layer of the body is varied wherever it would run, or some variation never runs."""
    varied = {(variation.micro_batch, variation.position) for variation in stage.variations}
    if len(varied) < len(stage.variations) or any(index >= micro_batches for index, _ in varied):
        return True
    start = 0
    for block in stage.body:
        size = len(block.layers)
        for place in range(size):
            inside = sum(
                start <= position < start + size * block.repeat and (position - start) % size == place
                for _, position in varied
            )
            if inside == micro_batches * block.repeat:
                return True
        start += size * block.repeat
    return False


def _messages(workload: Workload) -> Iterator[bytes]:
    yield delimited(
        bytes_field(1, SCHEMA_VERSION.encode())
        + bytes_field(2, attribute("schema", Kind.STRING, SCHEMA_VERSION))
        + bytes_field(2, attribute(PLAN, Kind.STRING, msgspec.json.encode(_plan(workload)).decode()))
    )
    first = 1
    for index, stage in enumerate(workload.stages):
        chain = _Chain(index, workload.layout, first)
        yield from chain.section(stage.prologue, PROLOGUE)
        usual, varied = stage.body_layers(), stage.varied_bodies()
        for micro_batch in range(workload.micro_batches):
            yield from chain.body(varied.get(micro_batch, usual), micro_batch)
        yield from chain.section(stage.epilogue, EPILOGUE)
        first = chain.next_id


def _plan(workload: Workload) -> WorkloadPlan:
    table: dict[LayerPlan, int] = {}

    def number(layer: Layer) -> int:
        return table.setdefault(LayerPlan(layer.name, layer.process_s, layer.notes), len(table))

    stages = tuple(
        StagePlan(
            body=tuple(
                BlockPlan(tuple(number(layer) for layer in block.layers), block.repeat)
                for block in stage.body
            ),
            prologue=tuple(number(layer) for layer in stage.prologue),
            epilogue=tuple(number(layer) for layer in stage.epilogue),
            variations=tuple(
                (variation.micro_batch, variation.position, number(variation.layer))
                for variation in stage.variations
            ),
            in_turn=stage.in_turn,
        )
        for stage in workload.stages
    )
    return WorkloadPlan(
        version=PLAN_VERSION,
        layers=tuple(table),
        stages=stages,
        layout=workload.layout,
        micro_batches=workload.micro_batches,
        boundary_bytes=workload.boundary_bytes,
        name=workload.name,
        source=workload.source,
        notes=workload.notes,
    )


class _Chain:
    """Writes one stage's nodes, each after those it waits for."""

    def __init__(self, stage: int, layout: Layout, first_id: int) -> None:
        self.next_id = first_id
        self._stage = stage
        self._layout = layout
        self._last_blocking = 0
        self._last_of_lane: dict[str, int] = {}
        self._last_called: dict[str, int] = {}
        # By identity: hashing a layer at each of its nodes would cost more than encoding it.
        self._known: dict[tuple[int, int, Phase, int, str], tuple[bytes, bytes, bytes]] = {}

    def section(self, layers: tuple[Layer, ...], section: str) -> Iterator[bytes]:
        """Layers that run once, each with all its phases."""
        for position, layer in enumerate(layers):
            for phase in Phase:
                yield from self._ops(layer, position, phase, section, b"")

    def body(self, layers: tuple[Layer, ...], micro_batch: int) -> Iterator[bytes]:
        """One micro-batch: forward in order, backward in reverse."""
        mark = bytes_field(ATTRIBUTE_FIELD, attribute(MICRO_BATCH, Kind.UINT64, micro_batch))
        for position, layer in enumerate(layers):
            yield from self._ops(layer, position, Phase.FORWARD, BODY, mark)
        for position in range(len(layers) - 1, -1, -1):
            for phase in BACKWARD:
                yield from self._ops(layers[position], position, phase, BODY, mark)

    def _ops(self, layer: Layer, position: int, phase: Phase, section: str, mark: bytes) -> Iterator[bytes]:
        for op in layer.ops(phase):
            key = (id(op), id(layer), phase, position, section)
            parts = self._known.get(key)
            if parts is None:
                parts = self._known[key] = self._encoded(op, layer, position, phase, section)
            head, duration, attributes = parts
            yield delimited(
                number_field(1, self.next_id) + head + self._waits(op) + duration + mark + attributes
            )
            self.next_id += 1

    def _waits(self, op: Op) -> bytes:
        """The data dependencies of the node about to be written."""
        lane = op.work.group if isinstance(op.work, Collective | Transfer) else "compute"
        before = {self._last_blocking, self._last_of_lane.get(lane, 0)}
        before |= {self._last_called.get(name, 0) for name in op.after}
        before.discard(0)
        self._last_of_lane[lane] = self.next_id
        if op.blocking:
            self._last_blocking = self.next_id
        else:
            self._last_called[op.name] = self.next_id
        packed = b"".join(varint(node) for node in sorted(before))
        return bytes_field(DATA_DEPENDENCIES_FIELD, packed) if packed else b""

    def _encoded(
        self, op: Op, layer: Layer, position: int, phase: Phase, section: str
    ) -> tuple[bytes, bytes, bytes]:
        """Fields before the dependencies, the duration, and attributes: the same in each micro-batch."""
        head = bytes_field(2, layer.op_name(op).encode()) + number_field(3, _node_type(op.work))
        duration_us = round(op.work.duration_s / US) if isinstance(op.work, Recorded) else 0
        attributes = [
            attribute("is_cpu_op", Kind.BOOL, False),
            *_work_attributes(op.work, self._layout),
            attribute(STAGE, Kind.UINT64, self._stage),
            attribute(SECTION, Kind.STRING, section),
            attribute(LAYER, Kind.UINT64, position),
            attribute(PHASE, Kind.STRING, str(phase)),
            attribute(OP, Kind.STRING, op.name),
        ]
        if not op.blocking:
            attributes.append(attribute(BLOCKING, Kind.BOOL, False))
        if op.after:
            attributes.append(attribute(AFTER, Kind.STRING, op.after))
        duration = number_field(7, duration_us) if duration_us else b""
        return head, duration, b"".join(bytes_field(ATTRIBUTE_FIELD, message) for message in attributes)


def _node_type(work: Work) -> NodeType:
    match work:
        case Collective():
            return NodeType.COMM_COLL
        case Transfer(direction=Direction.SEND):
            return NodeType.COMM_SEND
        case Transfer():
            return NodeType.COMM_RECV
    return NodeType.COMP


def _work_attributes(work: Work, layout: Layout) -> list[bytes]:
    """Chakra's attributes of a node, and ours where they cannot say it exactly."""
    match work:
        case Recorded():
            return [attribute(DURATION_S, Kind.DOUBLE, work.duration_s)]
        case Collective():
            size_bytes = work.size_bytes
            if work.kind is CollectiveKind.ALL_GATHER:
                # Chakra counts what a rank brings (ASTRA-sim, Ring.cc), stepcast the whole buffer.
                size_bytes = -(-size_bytes // layout.size(work.group))
            kind = attribute("comm_type", Kind.INT64, TYPE_OF_COLLECTIVE[work.kind])
            return [kind, *_message(size_bytes, work.group), attribute(WORK, Kind.STRING, work_text(work))]
        case Transfer():
            return [*_message(work.size_bytes, work.group), attribute(WORK, Kind.STRING, work_text(work))]
    flops, touched_bytes = _amounts(work)
    return [
        attribute("num_ops", Kind.INT64, flops),
        attribute("tensor_size", Kind.UINT64, touched_bytes),
        attribute(WORK, Kind.STRING, work_text(work)),
    ]


def _message(size_bytes: int, group: Group) -> list[bytes]:
    size = attribute("comm_size", Kind.INT64, size_bytes)
    return (
        [size, attribute("pg_name", Kind.STRING, GROUP_NUMBERS[group])] if group in GROUP_NUMBERS else [size]
    )


@lru_cache(maxsize=4096)
def _amounts(work: Matmul | GroupedMatmul | Attention | Scan | Elementwise) -> tuple[int, int]:
    """FLOPs and bytes that an op must at least move, for other programs' rooflines."""
    size = work.dtype.bytes
    match work:
        case Matmul():
            touched = work.batch * (work.m * work.k + work.k * work.n + work.m * work.n) * size
            return round(work.flops), round(touched)
        case GroupedMatmul():
            touched = (work.m * work.k + work.groups * work.k * work.n + work.m * work.n) * size
            return round(work.flops), round(touched)
        case Attention():
            query = work.batch * work.query_len * work.heads * (work.head_dim + work.value_dim)
            key = work.batch * work.key_len * work.kv_heads * (work.head_dim + work.value_dim)
            return round(work.flops), round((query + key) * size * (2 if work.backward else 1))
        case Scan():
            # Input, gate and output, B and C; backward the gradients of all and the forward's result.
            touched = (3 * work.inputs + 2 * work.shared) * size
            return round(work.flops), round(touched * (2 if work.backward else 1))
        case Elementwise():
            return work.elements, round(work.read_bytes + work.write_bytes)
