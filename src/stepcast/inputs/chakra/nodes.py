"""Nodes of a Chakra execution trace, decoded into columns.

Messages and field numbers are those of schema 0.0.4 (mlcommons/chakra, schema/protobuf/et_def.proto).
`chakra_walk` decodes the nodes that have their fields in order, as every protobuf library writes them; the
rest, and those that are damaged, are decoded one by one here.
"""

import heapq
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stepcast.inputs.chakra.protobuf import Value, WireError, fields, read_attribute, read_varint, text
from stepcast.inputs.errors import FormatError
from stepcast.ir.arrays import Int32Array, IntArray, UIntArray
from stepcast.ir.work import CollectiveKind

NONE = -1

# Attributes that are used or kept; others (rf_id, tid, op_schema ...) are passed over.
KNOWN_ATTRIBUTES = (
    "comm_type",
    "comm_size",
    "comm_src",
    "comm_dst",
    "comm_tag",
    "pg_name",
    "involved_dim",
    "is_cpu_op",
    "num_ops",
    "tensor_size",
)


COLLECTIVE_OF_TYPE = {
    0: CollectiveKind.ALL_REDUCE,
    1: CollectiveKind.REDUCE,
    2: CollectiveKind.ALL_GATHER,
    3: CollectiveKind.GATHER,
    4: CollectiveKind.SCATTER,
    5: CollectiveKind.BROADCAST,
    6: CollectiveKind.ALL_TO_ALL,
    7: CollectiveKind.REDUCE_SCATTER,
    8: CollectiveKind.REDUCE_SCATTER,  # MPI's Reduce_scatter_block
    9: CollectiveKind.BARRIER,
}
TYPE_OF_COLLECTIVE = {kind: number for number, kind in reversed(COLLECTIVE_OF_TYPE.items())}


class NodeType(IntEnum):
    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


@dataclass(slots=True)
class Column:
    """One attribute of every node: an index into its distinct values, -1 where a node lacks it."""

    of: Int32Array
    values: list[Value]

    def value(self, node: int) -> Value:
        index = self.of[node]
        return None if index == NONE else self.values[index]


@dataclass(slots=True)
class Nodes:
    """Columns of all nodes in file order."""

    ids: UIntArray
    types: npt.NDArray[np.uint8]
    durations_us: UIntArray
    name_of: Int32Array
    names: list[str]
    # Dependencies of node i are those before ``dependency_ends[i]`` and from ``dependency_ends[i - 1]`` on.
    dependencies: UIntArray
    dependency_ends: IntArray
    attributes: Mapping[str, Column]
    # Values of metadata nodes' inputs, where PyTorch lists its process groups.
    inputs: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def between(self, first: int, stop: int) -> "Nodes":
        """The nodes from *first* up to *stop*; names and values stay those of all."""
        begin, end = (int(self.dependency_ends[at - 1]) if at else 0 for at in (first, stop))
        columns = ((name, Column(each.of[first:stop], each.values)) for name, each in self.attributes.items())
        return Nodes(
            ids=self.ids[first:stop],
            types=self.types[first:stop],
            durations_us=self.durations_us[first:stop],
            name_of=self.name_of[first:stop],
            names=self.names,
            dependencies=self.dependencies[begin:end],
            dependency_ends=self.dependency_ends[first:stop] - begin,
            attributes={name: each for name, each in columns if (each.of != NONE).any()},
            inputs={row - first: text for row, text in self.inputs.items() if first <= row < stop},
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """A decoded file."""

    version: str
    metadata: Mapping[str, Value]
    nodes: Nodes


@dataclass(slots=True)
class Node:
    """One node as decoded on its own; attributes as their bytes, so that equal ones are decoded once."""

    number: int = 0
    name: bytes = b""
    kind: int = 0
    duration_us: int = 0
    dependencies: list[int] = field(default_factory=list)
    attributes: dict[str, bytes] = field(default_factory=dict)


def read_node(message: bytes) -> Node:
    """A node whose fields may stand in any order."""
    node = Node()
    for number, wire, content in fields(message):
        if isinstance(content, int):
            if number == 1:
                node.number = content
            elif number == 3:
                node.kind = content
            elif number == 5:
                node.dependencies.append(content)
            elif number == 7:
                node.duration_us = content
            elif number in (2, 8, 9, 10):
                raise WireError(f"field {number} has wire type {wire}")
        elif number == 2:
            node.name = content
        elif number == 5:
            at = 0
            while at < len(content):
                value, at = read_varint(content, at)
                node.dependencies.append(value)
        elif number == 10:
            node.attributes[read_attribute(content)[0]] = content
        elif number in (1, 3, 7):
            raise WireError(f"field {number} has wire type {wire}")
    if node.kind > NodeType.COMM_COLL:
        raise WireError(f"node {node.number} has type {node.kind}, which schema 0.0.4 does not know")
    return node


def read_inputs(message: bytes) -> str:
    """The values of a node's inputs."""
    for number, _, content in fields(message):
        if number == 8 and isinstance(content, bytes):
            for inner, _, value in fields(content):
                if inner == 1 and isinstance(value, bytes):
                    return text(value)
    return ""


def read_metadata(message: bytes) -> tuple[str, dict[str, Value]]:
    """Version and attributes of a GlobalMetadata message."""
    version, attributes = "", {}
    for number, _, content in fields(message):
        if number == 1 and isinstance(content, bytes):
            version = text(content)
        elif number == 2 and isinstance(content, bytes):
            name, value = read_attribute(content)
            attributes[name] = value
    return version, attributes


def failure(message: int, at: int, reason: str, path: str) -> FormatError:
    return FormatError(f"message {message + 1} at byte {at}: {reason}; expected a Chakra node", path)


def message_bounds(data: bytes, path: str) -> tuple[IntArray, IntArray]:
    """Where each length-delimited message of the file begins and ends."""
    starts, ends = array("q"), array("q")
    at, size = 0, len(data)
    add_start, add_end = starts.append, ends.append
    while at < size:
        length = data[at]
        at += 1
        if length > 127:
            # Lengths of two bytes are the usual ones.
            if at < size and data[at] < 128:
                length += (data[at] - 1) * 128
                at += 1
            else:
                try:
                    length, at = read_varint(data, at - 1)
                except WireError as error:
                    raise failure(len(starts), at - 1, str(error), path) from None
        if at + length > size:
            short = f"needs {length} bytes but the file has {size - at} more"
            raise failure(len(starts), at, short, path)
        add_start(at)
        at += length
        add_end(at)
    return np.frombuffer(starts, dtype=np.int64), np.frombuffer(ends, dtype=np.int64)


def has_metadata(message: bytes) -> bool:
    """Whether a file's first message is its GlobalMetadata; old traces begin with a node instead."""
    # A node begins with its id, a varint, or, where that is 0, has its type after its name.
    numbers = [(number, wire) for number, wire, _ in fields(message)]
    return not numbers or not (numbers[0] == (1, 0) or any(number > 2 for number, _ in numbers))


# The order in which a trace's nodes can run.


def dependency_indices(nodes: Nodes, path: str) -> IntArray:
    """The nodes that ``nodes.dependencies`` names, as indices; each id must be there, and once."""
    order = np.argsort(nodes.ids, kind="stable")
    ids = nodes.ids[order]
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        first, second = sorted(order[twice[0] : twice[0] + 2].tolist())
        raise FormatError(
            f"node {second + 1} has the id {ids[twice[0]]} of node {first + 1}; expected each id once", path
        )
    places = np.searchsorted(ids, nodes.dependencies)
    missing = np.flatnonzero(ids[np.minimum(places, len(ids) - 1)] != nodes.dependencies)
    if len(missing):
        owner = int(np.searchsorted(nodes.dependency_ends, missing[0], side="right"))
        raise FormatError(
            f"node {nodes.ids[owner]} depends on node {nodes.dependencies[missing[0]]}, which is not there",
            path,
        )
    return order[places]


def owners(nodes: Nodes) -> IntArray:
    """The node that each dependency belongs to, as an index."""
    return np.repeat(np.arange(len(nodes)), np.diff(nodes.dependency_ends, prepend=0))


def execution_order(nodes: Nodes, dependencies: IntArray, path: str) -> IntArray:
    """Indices of the nodes, each after those it depends on; file order where that does."""
    if bool((dependencies < owners(nodes)).all()):
        return np.arange(len(nodes))
    return np.array(_sorted(nodes, dependencies, path), dtype=np.int64)


def _sorted(nodes: Nodes, dependencies: IntArray, path: str) -> list[int]:
    """Kahn's algorithm; of the nodes that may run, the first in the file runs first."""
    waiting = np.diff(nodes.dependency_ends, prepend=0).tolist()
    dependents: list[list[int]] = [[] for _ in waiting]
    for dependency, owner in zip(dependencies.tolist(), owners(nodes).tolist(), strict=True):
        dependents[dependency].append(owner)
    ready = [index for index, count in enumerate(waiting) if not count]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for dependent in dependents[index]:
            waiting[dependent] -= 1
            if not waiting[dependent]:
                heapq.heappush(ready, dependent)
    if len(order) < len(nodes):
        stuck = next(index for index, count in enumerate(waiting) if count)
        raise FormatError(
            f"node {nodes.ids[stuck]} depends on itself by way of others; expected no cycle", path
        )
    return order
