"""Nodes of a Chakra execution trace, decoded into columns.

Messages and field numbers are those of schema 0.0.4 (mlcommons/chakra, schema/protobuf/et_def.proto). Equal attributes
are decoded once.
"""

import heapq
from array import array
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from stepcast.inputs.chakra.protobuf import Value, WireError, bytes_in, fields, read_attribute, read_varint, text
from stepcast.inputs.source import FormatError, read_words
from stepcast.ir.arrays import BoolArray, Int32Array, IntArray, UIntArray
from stepcast.ir.types import dataclass
from stepcast.ir.work import CollectiveKind

NONE = -1

WORDS = read_words("traces")["chakra"]
KNOWN_ATTRIBUTES = WORDS["attributes"].split()
COLLECTIVE_OF_TYPE = dict(enumerate(map(CollectiveKind, WORDS["collectives"].split())))
TYPE_OF_COLLECTIVE = {kind: number for number, kind in reversed(COLLECTIVE_OF_TYPE.items())}

NodeType = IntEnum("NodeType", "INVALID METADATA MEM_LOAD MEM_STORE COMP COMM_SEND COMM_RECV COMM_COLL", start=0)


class NodeContent(NamedTuple):
    """A node without its id, its duration and its dependencies; equal ones are stored once."""

    name: str
    type: int
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class ChakraTrace:
    """A decoded file: its GlobalMetadata, and columns of all nodes in file order."""

    version: str
    metadata: Mapping[str, Value]
    ids: UIntArray
    durations_us: UIntArray
    content_of: Int32Array
    contents: list[NodeContent]
    # Dependencies of node i are those before ``dependency_ends[i]`` and from ``dependency_ends[i - 1]`` on.
    dependencies: UIntArray
    dependency_ends: IntArray
    # Values of metadata nodes' inputs, where PyTorch lists its process groups.
    inputs: tuple[str, ...]

    @property
    def owners(self) -> IntArray:
        """Return the node that each dependency belongs to, as an index."""
        return np.repeat(np.arange(len(self)), np.diff(self.dependency_ends, prepend=0))

    def content(self, node: int) -> NodeContent:
        return self.contents[int(self.content_of[node])]

    def matching(self, test: Callable[[NodeContent], bool]) -> BoolArray:
        """Return which nodes have a content for which *test* holds."""
        return np.array([test(content) for content in self.contents], dtype=bool)[self.content_of]

    def __len__(self) -> int:
        return len(self.ids)


def read_metadata(message: bytes) -> tuple[str, dict[str, Value]]:
    """Return version and attributes of a GlobalMetadata message."""
    versions = [text(content) for content in bytes_in(message, 1)]
    return "".join(versions[-1:]), dict(map(read_attribute, bytes_in(message, 2)))


def _node_error(message: int, position: int, reason: object, path: str) -> FormatError:
    return FormatError(f"message {message + 1} at byte {position}: {reason}; expected a Chakra node", path)


def read_messages(data: bytes, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield each length-delimited message of the file and where it begins."""
    position, size, number = 0, len(data), 0
    while position < size:
        try:
            length, start = read_varint(data, position)
        except WireError as error:
            raise _node_error(number, position, error, path) from None
        if start + length > size:
            raise _node_error(number, start, f"needs {length} bytes but the file has {size - start} more", path)
        position = start + length
        number += 1
        yield start, data[start:position]


def has_metadata(message: bytes) -> bool:
    """Return whether a file's first message is its GlobalMetadata; old traces begin with a node instead."""
    # A node begins with its id, a varint, or, where that is 0, has its type after its name.
    numbers = [(number, wire) for number, wire, _ in fields(message)]
    return not numbers or not (numbers[0] == (1, 0) or any(number > 2 for number, _ in numbers))


def order_nodes(nodes: ChakraTrace, path: str) -> tuple[IntArray, IntArray]:
    """Return the nodes that ``nodes.dependencies`` names, and all nodes, each after those it depends on, as indices.

    Each id must be there, and once. Kahn's algorithm: of the nodes that may run, the first in the file runs first.
    """
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
            f"node {nodes.ids[owner]} depends on node {nodes.dependencies[missing[0]]}, which is not there", path
        )
    dependencies, owners = order[places], nodes.owners
    if bool((dependencies < owners).all()):
        return dependencies, np.arange(len(nodes))
    waiting = np.diff(nodes.dependency_ends, prepend=0).tolist()
    dependents: list[list[int]] = [[] for _ in waiting]
    for dependency, node in zip(dependencies.tolist(), owners.tolist(), strict=True):
        dependents[dependency].append(node)
    ready = [index for index, count in enumerate(waiting) if not count]
    indices = []
    while ready:
        index = heapq.heappop(ready)
        indices.append(index)
        for dependent in dependents[index]:
            waiting[dependent] -= 1
            if not waiting[dependent]:
                heapq.heappush(ready, dependent)
    if len(indices) < len(nodes):
        stuck = next(index for index, count in enumerate(waiting) if count)
        raise FormatError(f"node {nodes.ids[stuck]} depends on itself by way of others; expected no cycle", path)
    return dependencies, np.array(indices, dtype=np.int64)


# Fields of a node: its id, type and duration; name, inputs, outputs and attributes.
VARINTS, TEXTS = (1, 3, 7), (2, 8, 9, 10)


class _NodeColumns:
    """The columns of the nodes read so far."""

    def __init__(self) -> None:
        self.ids, self.durations_us, self.dependencies = array("Q"), array("Q"), array("Q")
        self.dependency_ends, self.content_of = array("q"), array("i")
        # Name, type and the numbers of the attributes' values.
        self.contents: dict[tuple[bytes, int, tuple[tuple[str, int], ...]], int] = {}
        self.values: list[Value] = []
        self.known: dict[bytes, tuple[str, int]] = {}  # attributes as they are encoded: name and number of the value
        self.inputs: list[str] = []

    def add(self, message: bytes) -> None:
        """Add a node, whose fields may come in any order."""
        numbers = {1: 0, 3: 0, 7: 0}
        name, attributes = b"", dict[str, int]()
        for number, wire, content in fields(message):
            if isinstance(content, int):
                if number in TEXTS:
                    raise WireError(f"field {number} has wire type {wire}")
                if number == 5:
                    self.dependencies.append(content)
                numbers[number] = content
            elif number == 10:
                known = self.known.get(content)
                if known is None:
                    key, value = read_attribute(content)
                    if key not in KNOWN_ATTRIBUTES:
                        continue
                    known = self.known[content] = key, len(self.values)
                    self.values.append(value)
                attributes[known[0]] = known[1]
            elif number == 2:
                name = content
            elif number == 5:
                position = 0
                while position < len(content):
                    dependency, position = read_varint(content, position)
                    self.dependencies.append(dependency)
            elif number in VARINTS:
                raise WireError(f"field {number} has wire type {wire}")
        if numbers[3] > NodeType.COMM_COLL:
            raise WireError(f"node {numbers[1]} has type {numbers[3]}, which schema 0.0.4 does not know")
        if numbers[3] == NodeType.METADATA:
            self.inputs.append(text(next((value for part in bytes_in(message, 8) for value in bytes_in(part, 1)), b"")))
        self.ids.append(numbers[1])
        self.durations_us.append(numbers[7])
        self.dependency_ends.append(len(self.dependencies))
        row = (name, numbers[3], tuple(attributes.items()))
        self.content_of.append(self.contents.setdefault(row, len(self.contents)))


def decode(data: bytes, path: str) -> ChakraTrace:
    """Decode every message of a file: GlobalMetadata, then nodes."""
    columns, version, metadata = _NodeColumns(), "", dict[str, Value]()
    number = start = 0
    try:
        for number, (start, message) in enumerate(read_messages(data, path)):  # noqa: B007  # where an error is
            if number == 0 and has_metadata(message):
                version, metadata = read_metadata(message)
            else:
                columns.add(message)
        number, start = 0, 0
        contents = [
            NodeContent(text(name), kind, {key: columns.values[number] for key, number in attributes})
            for name, kind, attributes in columns.contents
        ]
    except WireError as error:
        raise _node_error(number, start, error, path) from None
    return ChakraTrace(
        version=version,
        metadata=metadata,
        ids=np.array(columns.ids, np.uint64),
        durations_us=np.array(columns.durations_us, np.uint64),
        content_of=np.array(columns.content_of, np.int32),
        contents=contents,
        dependencies=np.array(columns.dependencies, np.uint64),
        dependency_ends=np.array(columns.dependency_ends, np.int64),
        inputs=tuple(columns.inputs),
    )
