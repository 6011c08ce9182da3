"""The nodes of one pipeline stage in the order in which it runs them, each after those it waits for.

A node waits for the blocking one before, for the one before it in its lane (its group's communication) and
for those it must come after; a non-blocking op is waited for by nothing else. What differs between the ranks
of a stage, its communicator and its peers, is left open.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stepcast.inputs.chakra.nodes import NodeType
from stepcast.inputs.chakra.plan import (
    AFTER,
    BLOCKING,
    EARLY,
    LAYER,
    MESSAGE,
    MICRO_BATCH,
    OP,
    PHASE,
    SECTION,
    STAGE,
)
from stepcast.inputs.chakra.protobuf import Kind, attribute, bytes_field, number_field, varint
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.work import Collective, Direction, Recorded, Transfer, Work
from stepcast.ir.workload import Layer, Op, Phase
from stepcast.outputs.chakra_attributes import message_size, work_attributes
from stepcast.units import US

ATTRIBUTE_FIELD = 10
DATA_DEPENDENCIES_FIELD = 5
# Tags below are those of messages between stages.
FIRST_TAG = 2**24
SENDS = ("activations", "gradients")


class Exchange(NamedTuple):
    """With whom a node communicates: all of its group, or the peer *offset* places away."""

    group: Group
    offset: int | None = None
    receives: bool = False


class Node(NamedTuple):
    """A node's fields that are the same on every rank of a stage."""

    message: bytes
    exchange: Exchange | None


@dataclass(frozen=True, slots=True)
class Where:
    """What an op of a layer stands for in the plan."""

    stage: int
    section: str
    position: int
    phase: Phase
    micro_batch: int | None = None


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
        self._known: dict[tuple[int, int, int, int, str, Phase], tuple[bytes, bytes, bytes]] = {}

    def layer(self, layer: Layer, where: Where) -> Iterator[Node]:
        """The ops of one phase."""
        mark = b""
        if where.micro_batch is not None:
            mark = _attributes([attribute(MICRO_BATCH, Kind.UINT64, where.micro_batch)])
        for op in layer.ops(where.phase):
            exchange = self._exchange(op.work)
            key = (id(op), id(layer), where.stage, where.position, where.section, where.phase)
            parts = self._known.get(key)
            if parts is None:
                parts = self._known[key] = self._encoded(op, layer, where, exchange is not None)
            head, duration, attributes = parts
            tag = b""
            if isinstance(op.work, Transfer):
                tag = _attributes([attribute("comm_tag", Kind.INT32, self._next_tag)])
                self._next_tag += 1
            lane = str(op.work.group) if isinstance(op.work, Collective | Transfer) else "compute"
            named = {self._last_called.get(name, 0) for name in op.after}
            waits = _dependencies({self._last_of_lane.get(lane, 0)}) if op.early else self._waits(lane, named)
            node = self._number(head, waits, duration + mark + attributes + tag, lane)
            yield Node(node, exchange)
            if not self._answered and isinstance(op.work, Transfer) and self._reaches(op.work, -1):
                yield self._answer(op.work, tag, lane)
            if op.blocking:
                self._last_blocking = self._next_id - 1
            else:
                self._last_called[op.name] = self._next_id - 1

    def receive(self, direction: int, source: int, size_bytes: int, tag: int) -> Node:
        """What *source* sends, which all that follows waits for; after our own sends, which it may need."""
        sent = {self._last_of_lane.get(lane, 0) for lane in SENDS}
        waits = self._waits(f"receive {SENDS[direction]}", sent)
        exchange = Exchange(Group.PP, source - self._coordinate, receives=True)
        node = self._message("receive", direction, size_bytes, tag, waits, NodeType.COMM_RECV)
        self._last_blocking = self._next_id - 1
        return Node(node, exchange)

    def send(self, direction: int, target: int, size_bytes: int, tag: int) -> Node:
        """What runs beside all that follows."""
        waits = self._waits(SENDS[direction], set())
        exchange = Exchange(Group.PP, target - self._coordinate)
        return Node(self._message("send", direction, size_bytes, tag, waits, NodeType.COMM_SEND), exchange)

    def finish(self) -> None:
        """What comes next waits for all communication."""
        self._finishing = True

    def _message(
        self, verb: str, direction: int, size_bytes: int, tag: int, waits: bytes, kind: NodeType
    ) -> bytes:
        lane = SENDS[direction] if verb == "send" else f"receive {SENDS[direction]}"
        head = bytes_field(2, f"{verb} {SENDS[direction]}".encode()) + number_field(3, kind)
        attributes = [
            attribute("is_cpu_op", Kind.BOOL, False),
            message_size(size_bytes),
            attribute("comm_tag", Kind.INT32, tag),
            attribute(SECTION, Kind.STRING, MESSAGE),
        ]
        return self._number(head, waits, _attributes(attributes), lane)

    def _answer(self, work: Transfer, tag: bytes, lane: str) -> Node:
        """The receive of what the peer on the other side sends at the same time."""
        head = bytes_field(2, f"receive {lane}".encode()) + number_field(3, NodeType.COMM_RECV)
        attributes = [
            attribute("is_cpu_op", Kind.BOOL, False),
            message_size(work.size_bytes),
            attribute(SECTION, Kind.STRING, MESSAGE),
        ]
        waits = _dependencies({self._next_id - 1})
        node = self._number(head, waits, _attributes(attributes) + tag, lane)
        return Node(node, Exchange(work.group, -work.peer_offset, receives=True))

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

    def _exchange(self, work: Work) -> Exchange | None:
        """With whom *work* communicates; None where it computes, or has nobody to communicate with."""
        if not isinstance(work, Collective | Transfer) or self._layout.size(work.group) == 1:
            return None
        if self._absent(work):
            return None
        if isinstance(work, Collective):
            return Exchange(work.group)
        if not self._reaches(work, 1):
            return None
        return Exchange(work.group, work.peer_offset, work.direction is Direction.RECEIVE)

    def _reaches(self, work: Transfer, side: int) -> bool:
        """Whether there is a peer on that side; a pipeline does not close into a ring, other groups do."""
        if work.group is Group.PP:
            return work.peer_offset != 0 and 0 <= self._coordinate + side * work.peer_offset < self._layout.pp
        return not self._absent(work) and work.peer_offset % self._layout.size(work.group) != 0

    def _absent(self, work: Collective | Transfer) -> bool:
        """Stages between the first and the last take no part in what those two do."""
        ends = (0, self._layout.pp - 1)
        return work.group is Group.EMBEDDING and self._coordinate not in ends

    def _encoded(self, op: Op, layer: Layer, where: Where, communicates: bool) -> tuple[bytes, bytes, bytes]:
        """Fields before the dependencies, the duration, and attributes: the same in each micro-batch."""
        kind = _node_type(op.work) if communicates else NodeType.COMP
        head = bytes_field(2, layer.op_name(op).encode()) + number_field(3, kind)
        duration_us = round(op.work.duration_s / US) if isinstance(op.work, Recorded) else 0
        attributes = [
            attribute("is_cpu_op", Kind.BOOL, False),
            *work_attributes(op.work, self._layout),
            attribute(STAGE, Kind.UINT64, where.stage),
            attribute(SECTION, Kind.STRING, where.section),
            attribute(LAYER, Kind.UINT64, where.position),
            attribute(PHASE, Kind.STRING, str(where.phase)),
            attribute(OP, Kind.STRING, op.name),
        ]
        if not op.blocking:
            attributes.append(attribute(BLOCKING, Kind.BOOL, False))
        if op.after:
            attributes.append(attribute(AFTER, Kind.STRING, op.after))
        if op.early:
            attributes.append(attribute(EARLY, Kind.BOOL, True))
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
