"""Chakra execution traces (protobuf, schema 0.0.4) from a Workload, a file per rank as ASTRA-sim reads them.

PREFIX.0.et, PREFIX.1.et ... hold what each rank runs, in the order of the pipeline's schedule and with the
messages between stages; PREFIX.comm_group.json lists the ranks of each communicator that they name.

A node waits for the blocking one before, for the one before it in its lane (its group's communication) and
for those it must come after; a non-blocking op is waited for by nothing else. What differs between the ranks
of a stage, its communicator and its peers, is added for each rank.
"""

from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import msgspec

from stepcast.inputs.chakra.nodes import TYPE_OF_COLLECTIVE, NodeType
from stepcast.inputs.chakra.protobuf import AttributeKind, attribute, bytes_field, delimit, number_field, varint
from stepcast.inputs.chakra.reader import prefix_of
from stepcast.inputs.chakra.record import encode_workload, write_head
from stepcast.ir.layout import Group, Layout, members, neighbour
from stepcast.ir.limits import CHAKRA_SET, NODES
from stepcast.ir.types import require
from stepcast.ir.work import (
    COMPUTING,
    GATHERS,
    Collective,
    Direction,
    Elementwise,
    HostCopy,
    HostUpdate,
    Recorded,
    Transfer,
    Work,
)
from stepcast.ir.workload import Layer, Op, Phase, Workload
from stepcast.simulation.chunks import model_copies
from stepcast.simulation.schedule import ChunkPlace, Schedule, Slot, SlotAction
from stepcast.simulation.schedules import schedule_for
from stepcast.units import US, format_bytes

ATTRIBUTE_FIELD = 10
DATA_DEPENDENCIES_FIELD = 5
# Tags below are those of messages between stages.
FIRST_TAG = 2**24
SENDS = ("activations", "gradients")
ON_DEVICE = attribute("is_cpu_op", AttributeKind.BOOL, False)


class NodePeers(NamedTuple):
    """With whom a node communicates: all of its group, or the peer *offset* places away."""

    group: Group
    offset: int | None = None
    receives: bool = False


class SharedNode(NamedTuple):
    """A node's fields that are the same on every rank of a stage."""

    message: bytes
    peers: NodePeers | None


def files(workload: Workload, output: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of the set, named after *output* without its .et."""
    ranks = workload.layout.gpus
    require(output != "-" or ranks == 1, f"chakra is a file for each of {ranks} ranks; give a name to write them to")
    prefix, suffix = prefix_of(output), ".gz" if output.endswith(".gz") else ""
    # Nodes are written out, layer by layer and micro-batch by micro-batch.
    count = sum(
        len(layer.all_ops) * times
        for stage in workload.stages
        for layer, times in stage.counted_layers(workload.micro_batches)
    )
    NODES.check(count * (workload.layout.pp if workload.uniform else 1))
    works = [op.work for layer in _layers(workload) for op in layer.all_ops]
    communicators = _number_communicators(workload.layout, works)
    fields_of = cache(partial(_peer_fields, workload.layout, communicators))
    has_receives = any(isinstance(work, Transfer) and work.direction is Direction.RECEIVE for work in works)
    schedule = schedule_for(workload.layout, workload.micro_batches, workload.manner.schedule or None)
    record = encode_workload(workload)
    per_stage = ranks // workload.layout.pp
    for coordinate in range(workload.layout.pp):
        nodes, parts = StageNodes(workload, schedule, coordinate, has_receives).nodes(), list[SharedNode]()
        for is_shared, run in groupby(nodes, lambda node: node.peers is None):
            own = [*run]  # nodes that are the same on every rank become one piece
            parts += [SharedNode(b"".join(delimit(node.message) for node in own), None)] if is_shared else own
        file_bytes = len(record) + sum(len(message) for message, _ in parts)
        if file_bytes * ranks > CHAKRA_SET.most:
            raise ValueError(
                f"{ranks:,} ranks need a file of {format_bytes(file_bytes)} each; {CHAKRA_SET.message}: "
                "write one with fewer replicas or micro-batches"
            )
        for rank in range(coordinate * per_stage, (coordinate + 1) * per_stage):
            content = b"".join(
                message if peers is None else delimit(message + fields_of(peers, rank)) for message, peers in parts
            )
            yield "-" if output == "-" else f"{prefix}.{rank}.et{suffix}", write_head(record, rank, content) + content
    if communicators:  # the list that ASTRA-sim takes as --comm-group-configuration
        groups = {str(number): ranks for ranks, number in communicators.items()}
        yield f"{prefix}.comm_group.json", msgspec.json.encode(groups) + b"\n"


def _number_communicators(layout: Layout, works: Iterable[Work]) -> dict[tuple[int, ...], int]:
    """Number the sets of ranks that communicate from 1: ASTRA-sim takes 0 and none for all ranks."""
    used = {work.group for work in works if isinstance(work, Collective)}
    families = [family for family in Group if family in used and layout.size(family) > 1]
    groups = dict.fromkeys(ranks for family in families for ranks in layout.groups(family))
    smaller = (ranks for ranks in groups if 1 < len(ranks) < layout.gpus)
    return {ranks: number for number, ranks in enumerate(smaller, start=1)}


def _peer_fields(layout: Layout, communicators: dict[tuple[int, ...], int], peers: NodePeers, rank: int) -> bytes:
    """Return the attributes that a communicating node has on *rank* alone."""
    if peers.offset is None:
        number = communicators.get(members(rank, peers.group, layout))
        return _attribute_fields([attribute("pg_name", AttributeKind.STRING, str(number))] if number else [])
    peer = neighbour(rank, peers.offset, layout, peers.group)
    ends = (("comm_src", peer), ("comm_dst", rank)) if peers.receives else (("comm_src", rank), ("comm_dst", peer))
    return _attribute_fields(attribute(name, AttributeKind.INT32, end) for name, end in ends)


def losses(workload: Workload) -> tuple[str, ...]:
    """Name what of *workload* the trace does not hold, or holds where only stepcast reads it."""
    works = {type(op.work) for layer in _layers(workload) for op in layer.all_ops}
    is_unsized = workload.layout.pp > 1 and workload.boundary_bytes is None
    has_times = any(layer.process_s for layer in _layers(workload))
    lost = {
        "phases, layers and repeats: other programs see the nodes written out": True,
        "shapes: other programs see FLOPs and bytes (num_ops, tensor_size)": works & COMPUTING - {Recorded},
        "times below a microsecond: duration_micros is whole; stepcast.workload is exact": Recorded in works,
        "kinds of groups: other programs see the ranks of each": Collective in works,
        "that messages between stages have no stated size: they are written as large as activations": is_unsized,
        "process times, layout, notes: other programs do not read them": has_times,
        "warnings: dropped": workload.warnings,
    }
    return tuple(text for text, is_lost in lost.items() if is_lost)


def _layers(workload: Workload) -> Iterator[Layer]:
    for stage in workload.stages:
        yield from stage.prologue
        for blocks in (stage.body, *(blocks for _, blocks in stage.varied)):
            yield from (layer for block in blocks for layer in block.layers)
        yield from stage.epilogue


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
    """The nodes of the ranks at one place of the pipeline: slots in the order of the schedule, with their messages."""

    def __init__(self, workload: Workload, schedule: Schedule, coordinate: int, has_receives: bool) -> None:
        """*has_receives*: sends of the workload have receives of their own; else each rank gets what it sends."""
        self._schedule, self._coordinate = schedule, coordinate
        self._layout = workload.layout
        self._has_receives = has_receives
        self._pieces = _pieces(workload, schedule, coordinate)
        indices = sorted({index for index, _, _ in self._pieces.values()})
        self._stages = {index: workload.stages[index] for index in indices}
        stated = workload.boundary_bytes
        self._size_bytes = workload.largest_activation_bytes if stated is None else stated
        self._usual = {index: stage.body_layers() for index, stage in self._stages.items()}
        self._varied = {index: stage.numbered_bodies(workload.micro_batches) for index, stage in self._stages.items()}
        self._next_id = 1
        self._next_tag = FIRST_TAG
        self._last_blocking = 0
        self._last_of_lane: dict[str, int] = {}
        self._last_of_name: dict[str, int] = {}
        self._finishing = False
        # By identity: hashing a layer at each of its nodes would cost more than encoding it.
        self._known: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def nodes(self) -> Iterator[SharedNode]:
        for stage in self._stages.values():
            yield from self._ops(stage.prologue, (Phase.FORWARD,))
        for slot in self._schedule.orders[self._coordinate]:
            yield from self._slot(slot)
        self._finishing = True  # the next node waits for all communication
        for stage in self._stages.values():
            yield from self._ops(reversed(stage.prologue), BACKWARD)
            yield from self._ops(stage.epilogue, tuple(Phase))

    def _slot(self, slot: Slot) -> Iterator[SharedNode]:
        """Yield what a slot receives, computes and sends; weight gradients exchange nothing."""
        place = ChunkPlace(self._coordinate, slot.chunk)
        source, target = self._schedule.previous(place), self._schedule.following(place)
        is_forward, exchanges = slot.kind is SlotAction.FORWARD, slot.kind is not SlotAction.WEIGHT
        if not is_forward:
            source, target = target, source
        if exchanges and source is not None and source.stage != self._coordinate:
            yield self._message(slot, source.stage, source.chunk, receives=True)
        index, start, stop = self._pieces[place]
        layers = self._varied[index].get(slot.micro_batch, self._usual[index])[start:stop]
        yield from self._ops(layers if is_forward else reversed(layers), PHASES[slot.kind])
        if exchanges and target is not None and target.stage != self._coordinate:
            yield self._message(slot, target.stage, slot.chunk, receives=False)

    def _ops(self, layers: Iterable[Layer], phases: tuple[Phase, ...]) -> Iterator[SharedNode]:
        """Yield the node of each op, and of what the peer on the other side sends at the same time."""
        for op, layer in ((op, owner) for owner in layers for phase in phases for op in owner.ops(phase)):
            work, peers, tag = op.work, self._peers(op.work), b""
            key = (id(op), id(layer))
            if key not in self._known:
                self._known[key] = self._encode(op, layer, peers is not None)
            head, attributes = self._known[key]
            if isinstance(work, Transfer):
                tag = _attribute_fields([attribute("comm_tag", AttributeKind.INT32, self._next_tag)])
                self._next_tag += 1
            lane = str(work.group) if isinstance(work, Collective | Transfer) else "compute"
            awaited = {self._last_of_name.get(name, 0) for name in op.after}
            waits = _dependencies({self._last_of_lane.get(lane, 0)}) if op.early else self._waits(lane, awaited)
            yield SharedNode(self._number(head, waits, attributes + tag, lane), peers)
            if not self._has_receives and isinstance(work, Transfer) and self._has_peer(work, -1):
                head = bytes_field(2, f"receive {lane}".encode()) + number_field(3, NodeType.COMM_RECV)
                attributes = _attribute_fields([ON_DEVICE, _message_size(work.size_bytes)])
                node = self._number(head, _dependencies({self._next_id - 1}), attributes + tag, lane)
                yield SharedNode(node, NodePeers(work.group, -work.peer_offset, receives=True))
            if op.blocking:
                self._last_blocking = self._next_id - 1
            else:
                self._last_of_name[op.name] = self._next_id - 1

    def _message(self, slot: Slot, peer: int, chunk: int, receives: bool) -> SharedNode:
        """Return the exchange with the stage *peer*: all that follows waits for what is received, and not for a send.

        A receive comes after our own sends, which the peer may need. Both sides use the same tag: of the micro-batch,
        and of the *chunk* it comes from.
        """
        direction = int(slot.kind is not SlotAction.FORWARD)
        verb, kind, lane = "send", NodeType.COMM_SEND, SENDS[direction]
        if receives:
            verb, kind, lane = "receive", NodeType.COMM_RECV, f"receive {lane}"
        waits = self._waits(lane, {self._last_of_lane.get(send_lane, 0) for send_lane in SENDS} if receives else set())
        head = bytes_field(2, f"{verb} {SENDS[direction]}".encode()) + number_field(3, kind)
        tag = (slot.micro_batch * self._schedule.chunks + chunk) * 2 + direction
        attributes = [ON_DEVICE, _message_size(self._size_bytes), attribute("comm_tag", AttributeKind.INT32, tag)]
        node = self._number(head, waits, _attribute_fields(attributes), lane)
        if receives:
            self._last_blocking = self._next_id - 1
        return SharedNode(node, NodePeers(Group.PP, peer - self._coordinate, receives))

    def _number(self, head: bytes, waits: bytes, rest: bytes, lane: str) -> bytes:
        message = number_field(1, self._next_id) + head + waits + rest
        self._last_of_lane[lane] = self._next_id
        self._next_id += 1
        return message

    def _waits(self, lane: str, others: set[int]) -> bytes:
        """Return the data dependencies of the node about to be written."""
        awaited = {self._last_blocking, self._last_of_lane.get(lane, 0)} | others
        if self._finishing:
            awaited |= set(self._last_of_lane.values())
            self._finishing = False
        return _dependencies(awaited)

    def _peers(self, work: Work) -> NodePeers | None:
        """Return with whom *work* communicates; None where it computes, or has nobody to communicate with."""
        if not isinstance(work, Collective | Transfer) or self._layout.size(work.group) == 1 or self._is_absent(work):
            return None
        if isinstance(work, Collective):
            return NodePeers(work.group)
        if not self._has_peer(work, 1):
            return None
        return NodePeers(work.group, work.peer_offset, work.direction is Direction.RECEIVE)

    def _has_peer(self, work: Transfer, side: int) -> bool:
        """Return whether there is a peer on that side; a pipeline does not close into a ring, other groups do."""
        if work.group is Group.PP:
            return work.peer_offset != 0 and 0 <= self._coordinate + side * work.peer_offset < self._layout.pp
        return not self._is_absent(work) and work.peer_offset % self._layout.size(work.group) != 0

    def _is_absent(self, work: Collective | Transfer) -> bool:
        """Return whether this stage has no part in what the first and the last stage do."""
        return work.group is Group.EMBEDDING and self._coordinate not in (0, self._layout.pp - 1)

    def _encode(self, op: Op, layer: Layer, communicates: bool) -> tuple[bytes, bytes]:
        """Return the fields before the dependencies and those after: the same in each micro-batch."""
        kind = NodeType.COMP
        if communicates and isinstance(op.work, Collective):
            kind = NodeType.COMM_COLL
        elif communicates and isinstance(op.work, Transfer):
            kind = NodeType.COMM_SEND if op.work.direction is Direction.SEND else NodeType.COMM_RECV
        head = bytes_field(2, layer.op_name(op).encode()) + number_field(3, kind)
        duration_us = round(op.work.duration_s / US) if isinstance(op.work, Recorded) else 0
        duration = number_field(7, duration_us) if duration_us else b""
        return head, duration + _attribute_fields([ON_DEVICE, *_work_attributes(op.work, self._layout)])


def _attribute_fields(messages: Iterable[bytes]) -> bytes:
    return b"".join(bytes_field(ATTRIBUTE_FIELD, message) for message in messages)


def _dependencies(nodes: set[int]) -> bytes:
    packed = b"".join(varint(node) for node in sorted(nodes - {0}))
    return bytes_field(DATA_DEPENDENCIES_FIELD, packed) if packed else b""


def _work_attributes(work: Work, layout: Layout) -> list[bytes]:
    """Return the attributes by which Chakra describes *work*."""
    match work:
        case Recorded():
            return []
        case Collective():
            size_bytes = work.total_bytes
            if work.kind in GATHERS:
                # Chakra counts the share of a rank (ASTRA-sim, Ring.cc), stepcast the complete buffer.
                size_bytes = -(-size_bytes // layout.size(work.group))
            kind = attribute("comm_type", AttributeKind.INT64, TYPE_OF_COLLECTIVE[work.kind])
            return [kind, _message_size(size_bytes)]
        case Transfer():
            return [_message_size(work.size_bytes)]
        case HostCopy():
            return [attribute("tensor_size", AttributeKind.UINT64, work.size_bytes)]
        case HostUpdate():
            return [attribute("tensor_size", AttributeKind.UINT64, round(work.read_bytes + work.write_bytes))]
    flops = work.elements if isinstance(work, Elementwise) else round(work.flops)
    return [
        attribute("num_ops", AttributeKind.INT64, flops),
        attribute("tensor_size", AttributeKind.UINT64, round(work.moved_bytes)),
    ]


def _message_size(size_bytes: int) -> bytes:
    return attribute("comm_size", AttributeKind.INT64, size_bytes)


def _pieces(workload: Workload, schedule: Schedule, coordinate: int) -> dict[ChunkPlace, Piece]:
    """Return the piece of the workload that each chunk runs; a stage given once for all is cut into its chunks."""
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
