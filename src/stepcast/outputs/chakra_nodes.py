"""The nodes of one pipeline stage in the order in which it runs them, each after those it waits for.

A node waits for the blocking one before, for the one before it in its lane (its group's communication) and
for those it must come after; a non-blocking op is waited for by nothing else. What differs between the ranks
of a stage, its communicator and its peers, is added for each rank.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from stepcast.inputs.chakra.nodes import TYPE_OF_COLLECTIVE, NodeType
from stepcast.inputs.chakra.protobuf import AttributeKind, attribute, bytes_field, number_field, varint
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.recurrent import DeltaRule, RecurrentCells, Scan, SelectiveScan
from stepcast.ir.work import (
    GATHERS,
    Attention,
    Collective,
    Direction,
    Elementwise,
    GroupedMatmul,
    HostCopy,
    HostUpdate,
    Matmul,
    Recorded,
    Transfer,
    Work,
)
from stepcast.ir.workload import Layer, Op, Phase, Workload
from stepcast.simulation.schedule import ChunkPlace, Schedule, Slot, SlotAction
from stepcast.simulation.step import model_copies
from stepcast.units import US

ATTRIBUTE_FIELD = 10
DATA_DEPENDENCIES_FIELD = 5
# Tags below are those of messages between stages.
FIRST_TAG = 2**24
SENDS = ("activations", "gradients")


class NodeExchange(NamedTuple):
    """With whom a node communicates: all of its group, or the peer *offset* places away."""

    group: Group
    offset: int | None = None
    receives: bool = False


class SharedNode(NamedTuple):
    """A node's fields that are the same on every rank of a stage."""

    message: bytes
    exchange: NodeExchange | None


class Chain:
    """Writes the nodes of one stage."""

    def __init__(self, layout: Layout, coordinate: int, answered: bool) -> None:
        """*answered*: sends of the workload have receives of their own; else each rank gets what it sends."""
        self._layout = layout
        self._coordinate = coordinate
        self._answered = answered
        self._next_id = 1
        self._next_tag = FIRST_TAG
        self._last_blocking = 0
        self._last_of_lane: dict[str, int] = {}
        self._last_called: dict[str, int] = {}
        self._finishing = False
        # By identity: hashing a layer at each of its nodes would cost more than encoding it.
        self._known: dict[tuple[int, int], tuple[bytes, bytes, bytes]] = {}

    def layer(self, layer: Layer, phase: Phase) -> Iterator[SharedNode]:
        """Yield the ops of one phase."""
        for op in layer.ops(phase):
            exchange = self._exchange(op.work)
            key = (id(op), id(layer))
            parts = self._known.get(key)
            if parts is None:
                parts = self._known[key] = self._encoded(op, layer, exchange is not None)
            head, duration, attributes = parts
            tag = b""
            if isinstance(op.work, Transfer):
                tag = _attributes([attribute("comm_tag", AttributeKind.INT32, self._next_tag)])
                self._next_tag += 1
            lane = str(op.work.group) if isinstance(op.work, Collective | Transfer) else "compute"
            named = {self._last_called.get(name, 0) for name in op.after}
            waits = _dependencies({self._last_of_lane.get(lane, 0)}) if op.early else self._waits(lane, named)
            node = self._number(head, waits, duration + attributes + tag, lane)
            yield SharedNode(node, exchange)
            if not self._answered and isinstance(op.work, Transfer) and self._reaches(op.work, -1):
                yield self._answer(op.work, tag, lane)
            if op.blocking:
                self._last_blocking = self._next_id - 1
            else:
                self._last_called[op.name] = self._next_id - 1

    def receive(self, direction: int, source: int, size_bytes: int, tag: int) -> SharedNode:
        """What *source* sends, which all that follows waits for; after our own sends, which it may need."""
        sent = {self._last_of_lane.get(lane, 0) for lane in SENDS}
        waits = self._waits(f"receive {SENDS[direction]}", sent)
        exchange = NodeExchange(Group.PP, source - self._coordinate, receives=True)
        node = self._message("receive", direction, size_bytes, tag, waits, NodeType.COMM_RECV)
        self._last_blocking = self._next_id - 1
        return SharedNode(node, exchange)

    def send(self, direction: int, target: int, size_bytes: int, tag: int) -> SharedNode:
        """What runs beside all that follows."""
        waits = self._waits(SENDS[direction], set())
        exchange = NodeExchange(Group.PP, target - self._coordinate)
        return SharedNode(self._message("send", direction, size_bytes, tag, waits, NodeType.COMM_SEND), exchange)

    def finish(self) -> None:
        """What comes next waits for all communication."""
        self._finishing = True

    def _message(self, verb: str, direction: int, size_bytes: int, tag: int, waits: bytes, kind: NodeType) -> bytes:
        lane = SENDS[direction] if verb == "send" else f"receive {SENDS[direction]}"
        head = bytes_field(2, f"{verb} {SENDS[direction]}".encode()) + number_field(3, kind)
        attributes = [
            attribute("is_cpu_op", AttributeKind.BOOL, False),
            message_size(size_bytes),
            attribute("comm_tag", AttributeKind.INT32, tag),
        ]
        return self._number(head, waits, _attributes(attributes), lane)

    def _answer(self, work: Transfer, tag: bytes, lane: str) -> SharedNode:
        """The receive of what the peer on the other side sends at the same time."""
        head = bytes_field(2, f"receive {lane}".encode()) + number_field(3, NodeType.COMM_RECV)
        attributes = [attribute("is_cpu_op", AttributeKind.BOOL, False), message_size(work.size_bytes)]
        waits = _dependencies({self._next_id - 1})
        node = self._number(head, waits, _attributes(attributes) + tag, lane)
        return SharedNode(node, NodeExchange(work.group, -work.peer_offset, receives=True))

    def _number(self, head: bytes, waits: bytes, rest: bytes, lane: str) -> bytes:
        message = number_field(1, self._next_id) + head + waits + rest
        self._last_of_lane[lane] = self._next_id
        self._next_id += 1
        return message

    def _waits(self, lane: str, others: set[int]) -> bytes:
        """The data dependencies of the node about to be written."""
        before = {self._last_blocking, self._last_of_lane.get(lane, 0)} | others
        if self._finishing:
            before |= set(self._last_of_lane.values())
            self._finishing = False
        return _dependencies(before)

    def _exchange(self, work: Work) -> NodeExchange | None:
        """With whom *work* communicates; None where it computes, or has nobody to communicate with."""
        if not isinstance(work, Collective | Transfer) or self._layout.size(work.group) == 1:
            return None
        if self._absent(work):
            return None
        if isinstance(work, Collective):
            return NodeExchange(work.group)
        if not self._reaches(work, 1):
            return None
        return NodeExchange(work.group, work.peer_offset, work.direction is Direction.RECEIVE)

    def _reaches(self, work: Transfer, side: int) -> bool:
        """Whether there is a peer on that side; a pipeline does not close into a ring, other groups do."""
        if work.group is Group.PP:
            return work.peer_offset != 0 and 0 <= self._coordinate + side * work.peer_offset < self._layout.pp
        return not self._absent(work) and work.peer_offset % self._layout.size(work.group) != 0

    def _absent(self, work: Collective | Transfer) -> bool:
        """Stages between the first and the last take no part in what those two do."""
        ends = (0, self._layout.pp - 1)
        return work.group is Group.EMBEDDING and self._coordinate not in ends

    def _encoded(self, op: Op, layer: Layer, communicates: bool) -> tuple[bytes, bytes, bytes]:
        """Fields before the dependencies, the duration, and attributes: the same in each micro-batch."""
        kind = _node_type(op.work) if communicates else NodeType.COMP
        head = bytes_field(2, layer.op_name(op).encode()) + number_field(3, kind)
        duration_us = round(op.work.duration_s / US) if isinstance(op.work, Recorded) else 0
        attributes = [attribute("is_cpu_op", AttributeKind.BOOL, False), *work_attributes(op.work, self._layout)]
        duration = number_field(7, duration_us) if duration_us else b""
        return head, duration, _attributes(attributes)


def _attributes(messages: Iterable[bytes]) -> bytes:
    return b"".join(bytes_field(ATTRIBUTE_FIELD, message) for message in messages)


def _dependencies(nodes: set[int]) -> bytes:
    packed = b"".join(varint(node) for node in sorted(nodes - {0}))
    return bytes_field(DATA_DEPENDENCIES_FIELD, packed) if packed else b""


def _node_type(work: Work) -> NodeType:
    match work:
        case Collective():
            return NodeType.COMM_COLL
        case Transfer(direction=Direction.SEND):
            return NodeType.COMM_SEND
        case Transfer():
            return NodeType.COMM_RECV
    return NodeType.COMP


def work_attributes(work: Work, layout: Layout) -> list[bytes]:
    """Return the attributes by which Chakra describes *work*."""
    match work:
        case Recorded():
            return []
        case Collective():
            size_bytes = work.total_bytes
            if work.kind in GATHERS:
                # Chakra counts what a rank brings (ASTRA-sim, Ring.cc), stepcast the whole buffer.
                size_bytes = -(-size_bytes // layout.size(work.group))
            kind = attribute("comm_type", AttributeKind.INT64, TYPE_OF_COLLECTIVE[work.kind])
            return [kind, message_size(size_bytes)]
        case Transfer():
            return [message_size(work.size_bytes)]
        case HostCopy():
            return [attribute("tensor_size", AttributeKind.UINT64, work.size_bytes)]
        case HostUpdate():
            return [attribute("tensor_size", AttributeKind.UINT64, round(work.read_bytes + work.write_bytes))]
    flops, touched_bytes = _amounts(work)
    return [
        attribute("num_ops", AttributeKind.INT64, flops),
        attribute("tensor_size", AttributeKind.UINT64, touched_bytes),
    ]


def message_size(size_bytes: int) -> bytes:
    return attribute("comm_size", AttributeKind.INT64, size_bytes)


@lru_cache(maxsize=4096)
def _amounts(
    work: Matmul | GroupedMatmul | Attention | Scan | DeltaRule | SelectiveScan | RecurrentCells | Elementwise,
) -> tuple[int, int]:
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
        case DeltaRule():
            touched = (2 * work.keys + 2 * work.inputs) * size
            return round(work.flops), round(touched * (2 if work.backward else 1))
        case SelectiveScan():
            touched = (4 * work.inputs + 2 * work.shared) * size
            return round(work.flops), round(touched * (2 if work.backward else 1))
        case RecurrentCells():
            states = 2 * work.steps * work.batch * (work.gates * work.hidden + work.width)
            return round(work.flops), round((work.gates * work.hidden * work.width + states) * size)
        case Elementwise():
            return work.elements, round(work.read_bytes + work.write_bytes)


# Slots of a stage in the order of the schedule, with their messages.

ACTIVATIONS, GRADIENTS = 0, 1
BACKWARD = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
PHASES = {
    SlotAction.FORWARD: (Phase.FORWARD,),
    SlotAction.BACKWARD: BACKWARD,
    SlotAction.INPUT: (Phase.INPUT_GRADIENT,),
    SlotAction.WEIGHT: (Phase.WEIGHT_GRADIENT,),
}
# A piece of the workload: its stage, and the first and last layer of the body.
Piece = tuple[int, int, int]


class StageNodes:
    """The nodes of the ranks at one place of the pipeline."""

    def __init__(self, workload: Workload, schedule: Schedule, coordinate: int, answered: bool) -> None:
        self._workload, self._schedule, self._coordinate = workload, schedule, coordinate
        self._chain = Chain(workload.layout, coordinate, answered)
        self._pieces = _pieces(workload, schedule, coordinate)
        self._held = tuple(sorted({piece[0] for piece in self._pieces.values()}))
        stated = workload.boundary_bytes
        self._size_bytes = workload.largest_activation_bytes if stated is None else stated
        self._usual = {stage: workload.stages[stage].body_layers() for stage in self._held}

    def nodes(self) -> Iterator[SharedNode]:
        stages = [self._workload.stages[index] for index in self._held]
        for stage in stages:
            yield from self._once(stage.prologue, (Phase.FORWARD,))
        for slot in self._schedule.orders[self._coordinate]:
            yield from self._slot(slot)
        self._chain.finish()
        for stage in stages:
            yield from self._once(reversed(stage.prologue), BACKWARD)
            yield from self._once(stage.epilogue, tuple(Phase))

    def _once(self, layers: Iterable[Layer], phases: tuple[Phase, ...]) -> Iterator[SharedNode]:
        for layer in layers:
            for phase in phases:
                yield from self._chain.layer(layer, phase)

    def _slot(self, slot: Slot) -> Iterator[SharedNode]:
        place = ChunkPlace(self._coordinate, slot.chunk)
        before, after = self._schedule.previous(place), self._schedule.following(place)
        if slot.kind is SlotAction.FORWARD:
            yield from self._received(slot, before, ACTIVATIONS)
            yield from self._ops(slot)
            yield from self._sent(slot, after, ACTIVATIONS)
        else:
            if slot.kind is not SlotAction.WEIGHT:
                yield from self._received(slot, after, GRADIENTS)
            yield from self._ops(slot)
            if slot.kind is not SlotAction.WEIGHT:
                yield from self._sent(slot, before, GRADIENTS)

    def _ops(self, slot: Slot) -> Iterator[SharedNode]:
        index, start, stop = self._pieces[ChunkPlace(self._coordinate, slot.chunk)]
        layers = self._layers(index, slot.micro_batch)
        positions = range(start, stop)
        for position in positions if slot.kind is SlotAction.FORWARD else reversed(positions):
            for phase in PHASES[slot.kind]:
                yield from self._chain.layer(layers[position], phase)

    def _layers(self, index: int, micro_batch: int) -> tuple[Layer, ...]:
        stage = self._workload.stages[index]
        if any(variation.micro_batch == micro_batch for variation in stage.variations):
            return stage.body_layers(micro_batch)
        return self._usual[index]

    def _received(self, slot: Slot, source: ChunkPlace | None, direction: int) -> Iterator[SharedNode]:
        if source is not None and source.stage != self._coordinate:
            tag = self._tag(slot, source, direction)
            yield self._chain.receive(direction, source.stage, self._size_bytes, tag)

    def _sent(self, slot: Slot, target: ChunkPlace | None, direction: int) -> Iterator[SharedNode]:
        if target is not None and target.stage != self._coordinate:
            tag = self._tag(slot, ChunkPlace(self._coordinate, slot.chunk), direction)
            yield self._chain.send(direction, target.stage, self._size_bytes, tag)

    def _tag(self, slot: Slot, source: ChunkPlace, direction: int) -> int:
        """The same on both sides: the micro-batch, and the chunk it comes from."""
        return (slot.micro_batch * self._schedule.chunks + source.chunk) * 2 + direction


def _pieces(workload: Workload, schedule: Schedule, coordinate: int) -> dict[ChunkPlace, Piece]:
    """What of the workload each chunk runs; a stage given once for all is cut into its chunks."""
    copies = model_copies(schedule)
    if workload.uniform:
        count = workload.stages[0].body_layer_count
        parts = schedule.chunks // len(copies)
        if count < parts > 1:
            raise ValueError(f"{count} layers cannot be split into {parts} chunks; use fewer chunks")
        cuts = [round(count * part / parts) for part in range(parts + 1)]
        return {
            ChunkPlace(coordinate, chunk): (0, cuts[chunk % parts], cuts[chunk % parts + 1])
            for chunk in range(schedule.chunks)
        }
    if len(workload.stages) != len(copies[0]):
        raise ValueError(f"the workload has {len(workload.stages)} pieces, schedule {schedule.name} {len(copies[0])}")
    return {
        place: (index, 0, workload.stages[index].body_layer_count)
        for copy in copies
        for index, place in enumerate(copy)
        if place.stage == coordinate
    }
