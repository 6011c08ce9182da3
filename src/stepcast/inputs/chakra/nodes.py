"""Nodes of a Chakra execution trace, decoded into columns.

Messages and field numbers are those of schema 0.0.4 (mlcommons/chakra, schema/protobuf/et_def.proto).
numpy decodes the nodes that have their fields in order, as every protobuf library writes them; the rest, and
those that are damaged, are decoded one by one.
"""

import heapq
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stepcast.inputs.chakra.protobuf import (
    ByteView,
    Value,
    WireError,
    fields,
    name_hashes,
    read_attribute,
    read_varint,
    text,
)
from stepcast.inputs.source import FormatError
from stepcast.ir.arrays import Int32Array, IntArray, UIntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.work import CollectiveKind

NONE = -1

# Attributes that are used or noted; others (rf_id, tid, op_schema ...) are passed over.
KNOWN_ATTRIBUTES = (
    *("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag"),
    *("pg_name", "involved_dim", "is_cpu_op", "num_ops", "tensor_size"),
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
class AttributeColumn:
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
    attributes: Mapping[str, AttributeColumn]
    # Values of metadata nodes' inputs, where PyTorch lists its process groups.
    inputs: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def between(self, first: int, stop: int) -> "Nodes":
        """Return the nodes from *first* up to *stop*; names and values stay those of all."""
        begin, end = (int(self.dependency_ends[node - 1]) if node else 0 for node in (first, stop))
        attributes = {
            name: AttributeColumn(column.of[first:stop], column.values) for name, column in self.attributes.items()
        }
        return Nodes(
            ids=self.ids[first:stop],
            types=self.types[first:stop],
            durations_us=self.durations_us[first:stop],
            name_of=self.name_of[first:stop],
            names=self.names,
            dependencies=self.dependencies[begin:end],
            dependency_ends=self.dependency_ends[first:stop] - begin,
            attributes={name: column for name, column in attributes.items() if (column.of != NONE).any()},
            inputs={row - first: text for row, text in self.inputs.items() if first <= row < stop},
        )


@dataclass(frozen=True, slots=True)
class ChakraTrace:
    """A decoded file."""

    version: str
    metadata: Mapping[str, Value]
    nodes: Nodes


@dataclass(slots=True)
class TraceNode:
    """One node as decoded on its own; attributes as their bytes, so that equal ones are decoded once."""

    number: int = 0
    name: bytes = b""
    kind: int = 0
    duration_us: int = 0
    dependencies: list[int] = field(default_factory=list)
    attributes: dict[str, bytes] = field(default_factory=dict)


def read_node(message: bytes) -> TraceNode:
    """Read a node whose fields may come in any order."""
    node = TraceNode()
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
            position = 0
            while position < len(content):
                value, position = read_varint(content, position)
                node.dependencies.append(value)
        elif number == 10:
            node.attributes[read_attribute(content)[0]] = content
        elif number in (1, 3, 7):
            raise WireError(f"field {number} has wire type {wire}")
    if node.kind > NodeType.COMM_COLL:
        raise WireError(f"node {node.number} has type {node.kind}, which schema 0.0.4 does not know")
    return node


def read_inputs(message: bytes) -> str:
    """Return the values of a node's inputs."""
    for number, _, content in fields(message):
        if number == 8 and isinstance(content, bytes):
            for inner, _, value in fields(content):
                if inner == 1 and isinstance(value, bytes):
                    return text(value)
    return ""


def read_metadata(message: bytes) -> tuple[str, dict[str, Value]]:
    """Return version and attributes of a GlobalMetadata message."""
    version, attributes = "", {}
    for number, _, content in fields(message):
        if number == 1 and isinstance(content, bytes):
            version = text(content)
        elif number == 2 and isinstance(content, bytes):
            name, value = read_attribute(content)
            attributes[name] = value
    return version, attributes


def _node_error(message: int, position: int, reason: object, path: str) -> FormatError:
    return FormatError(f"message {message + 1} at byte {position}: {reason}; expected a Chakra node", path)


def message_bounds(data: bytes, path: str) -> tuple[IntArray, IntArray]:
    """Return where each length-delimited message of the file begins and ends."""
    starts, ends = array("q"), array("q")
    position, size = 0, len(data)
    add_start, add_end = starts.append, ends.append
    while position < size:
        length = data[position]
        position += 1
        if length > 127:
            # Lengths of two bytes are the usual ones.
            if position < size and data[position] < 128:
                length += (data[position] - 1) * 128
                position += 1
            else:
                try:
                    length, position = read_varint(data, position - 1)
                except WireError as error:
                    raise _node_error(len(starts), position - 1, error, path) from None
        if position + length > size:
            reason = f"needs {length} bytes but the file has {size - position} more"
            raise _node_error(len(starts), position, reason, path)
        add_start(position)
        position += length
        add_end(position)
    return np.frombuffer(starts, dtype=np.int64), np.frombuffer(ends, dtype=np.int64)


def has_metadata(message: bytes) -> bool:
    """Return whether a file's first message is its GlobalMetadata; old traces begin with a node instead."""
    # A node begins with its id, a varint, or, where that is 0, has its type after its name.
    numbers = [(number, wire) for number, wire, _ in fields(message)]
    return not numbers or not (numbers[0] == (1, 0) or any(number > 2 for number, _ in numbers))


# The order in which a trace's nodes can run.


def dependency_indices(nodes: Nodes, path: str) -> IntArray:
    """Return the nodes that ``nodes.dependencies`` names, as indices; each id must be there, and once."""
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
    return order[places]


def owners(nodes: Nodes) -> IntArray:
    """Return the node that each dependency belongs to, as an index."""
    return np.repeat(np.arange(len(nodes)), np.diff(nodes.dependency_ends, prepend=0))


def execution_order(nodes: Nodes, dependencies: IntArray, path: str) -> IntArray:
    """Return indices of the nodes, each after those it depends on; file order where that does.

    Kahn's algorithm: of the nodes that may run, the first in the file runs first.
    """
    if bool((dependencies < owners(nodes)).all()):
        return np.arange(len(nodes))
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
        raise FormatError(f"node {nodes.ids[stuck]} depends on itself by way of others; expected no cycle", path)
    return np.array(order, dtype=np.int64)


# Decodes all nodes of a trace at once: numpy walks their fields side by side.
#
# Protobuf libraries write fields in the order of their numbers, so each step looks at the same field in
# every node. A node that is not at its end after the walk has fields in another order, unknown ones, or is
# damaged; it is decoded again on its own, which also finds the error to report.

# Field tags (number << 3 | wire type) of Node.
ID, NAME, TYPE, CONTROL, DATA, START, DURATION, INPUTS, OUTPUTS, ATTRIBUTE = (
    *(0x08, 0x12, 0x18, 0x22, 0x2A, 0x30, 0x38, 0x42, 0x4A, 0x52),
)
ATTRIBUTE_NAME = 0x0A
# Nodes with more dependencies or attributes than this are decoded one by one.
MOST_STEPS = 64
HIGH_BITS = np.uint64(0x8080808080808080)


class _TraceHead(NamedTuple):
    """A file before its nodes are read: its version and metadata, and where its nodes are."""

    version: str
    metadata: dict[str, Value]
    starts: IntArray
    ends: IntArray
    first: int  # messages before the nodes


def decode(data: bytes, path: str) -> ChakraTrace:
    """Decode every message of a file: GlobalMetadata, then nodes."""
    return decode_together([(data, path)])[0]


def decode_together(files: Sequence[tuple[bytes, str]]) -> list[ChakraTrace]:
    """Decode several files in one walk, which takes no longer to begin for many than for one.

    Values that they have in common are one object.
    """
    heads = [_read_head(data, path) for data, path in files]
    offsets = np.cumsum([0, *(len(data) for data, _ in files)])[:-1].tolist()
    starts = np.concatenate([head.starts + offset for head, offset in zip(heads, offsets, strict=True)])
    ends = np.concatenate([head.ends + offset for head, offset in zip(heads, offsets, strict=True)])
    data = b"".join(data for data, _ in files)
    walk = _Walk(ByteView(data), starts, ends)
    walk.run()
    if len(files) == 1:
        nodes = _read_nodes(data, walk, heads[0].first, files[0][1])
        return [ChakraTrace(heads[0].version, heads[0].metadata, nodes)]
    try:
        nodes = _read_nodes(data, walk, 0, "")
    except FormatError:
        return [decode(data, path) for data, path in files]  # one by one, so that the error names the file
    stops = np.cumsum([len(head.starts) for head in heads]).tolist()
    return [
        ChakraTrace(head.version, head.metadata, nodes.between(stop - len(head.starts), stop))
        for head, stop in zip(heads, stops, strict=True)
    ]


def _read_head(data: bytes, path: str) -> _TraceHead:
    starts, ends = message_bounds(data, path)
    try:
        if len(starts) and has_metadata(data[starts[0] : ends[0]]):
            version, metadata = read_metadata(data[starts[0] : ends[0]])
            return _TraceHead(version, metadata, starts[1:], ends[1:], 1)
    except WireError as error:
        raise _node_error(0, int(starts[0]), error, path) from None
    return _TraceHead("", {}, starts, ends, 0)


class _Walk:
    """Positions in all nodes, moved field by field."""

    def __init__(self, view: ByteView, starts: IntArray, ends: IntArray) -> None:
        self.view = view
        self.starts, self.ends = starts, ends
        self.at = starts.copy()
        count = len(starts)
        self.regular = np.ones(count, dtype=bool)
        self.ids, self.types, self.durations_us = (np.zeros(count, dtype=np.uint64) for _ in range(3))
        self.name_starts, self.name_ends = starts.copy(), starts.copy()
        self.dependency_rows: list[IntArray] = []
        self.dependencies: list[UIntArray] = []
        # Row, start and end of each attribute, by its index in KNOWN_ATTRIBUTES.
        self.attributes: dict[int, list[tuple[IntArray, IntArray, IntArray]]] = {}

    def run(self) -> None:
        self._number(ID, self.ids)
        self._span(NAME, self.name_starts, self.name_ends)
        self._number(TYPE, self.types)
        self._span(CONTROL)
        self._dependencies()
        self._number(START)
        self._number(DURATION, self.durations_us)
        self._span(INPUTS)
        self._span(OUTPUTS)
        self._attributes()
        self.regular &= (self.at == self.ends) & (self.types <= NodeType.COMM_COLL)

    def _rows(self, tag: int) -> IntArray:
        """Return the nodes whose next field has *tag*."""
        return np.flatnonzero((self.view.bytes(self.at) == tag) & (self.at < self.ends))

    def _varints(self, at: IntArray, rows: IntArray) -> tuple[UIntArray, IntArray]:
        """Return the numbers at *at*, and where they end. Those of nine bytes and more make their node irregular."""
        words = self.view.words(at)
        stops = ~words & HIGH_BITS
        long = stops == 0
        if long.any():
            self.regular[rows[long]] = False
            stops[long] = np.uint64(0x80)
        lowest = stops & (~stops + np.uint64(1))
        words &= lowest - np.uint64(1)
        lengths = np.frexp(lowest.astype(np.float64))[1].astype(np.int64) >> 3
        # Close the gaps between the seven-bit groups, pairwise.
        words &= np.uint64(0x7F7F7F7F7F7F7F7F)
        for mask, shift in ((0x007F007F007F007F, 1), (0x00003FFF00003FFF, 2), (0x000000000FFFFFFF, 4)):
            low = np.uint64(mask)
            words = (words & low) | ((words & ~low) >> np.uint64(shift))
        return words, at + lengths

    def _number(self, tag: int, column: UIntArray | None = None) -> None:
        rows = self._rows(tag)
        values, self.at[rows] = self._varints(self.at[rows] + 1, rows)
        if column is not None:
            column[rows] = values

    def _span(self, tag: int, starts: IntArray | None = None, ends: IntArray | None = None) -> IntArray:
        """Pass over a length-delimited field, noting where its content is."""
        rows = self._rows(tag)
        lengths, begin = self._varints(self.at[rows] + 1, rows)
        stop = begin + lengths.astype(np.int64)
        bad = (stop > self.ends[rows]) | (stop < begin)
        self.regular[rows[bad]] = False
        stop[bad] = begin[bad]
        self.at[rows] = stop
        if starts is not None and ends is not None:
            starts[rows], ends[rows] = begin, stop
        return rows

    def _dependencies(self) -> None:
        begin, stop = self.starts.copy(), self.starts.copy()
        rows = self._span(DATA, begin, stop)
        at = begin[rows]
        for _ in range(MOST_STEPS):
            inside = at < stop[rows]
            rows, at = rows[inside], at[inside]
            if not len(rows):
                return
            values, at = self._varints(at, rows)
            self.regular[rows[at > stop[rows]]] = False
            self.dependency_rows.append(rows)
            self.dependencies.append(values)
        self.regular[rows[at < stop[rows]]] = False

    def _attributes(self) -> None:
        keys = name_hashes(KNOWN_ATTRIBUTES)
        order = np.argsort(keys)
        keys = keys[order]
        for _ in range(MOST_STEPS):
            begin, stop = self.starts.copy(), self.starts.copy()
            rows = self._span(ATTRIBUTE, begin, stop)
            if not len(rows):
                return
            begin, stop = begin[rows], stop[rows]
            self.regular[rows[self.view.bytes(begin) != ATTRIBUTE_NAME]] = False
            name_at = begin + 2
            hashes = self.view.hashes(name_at, name_at + self.view.bytes(begin + 1))
            indices = np.searchsorted(keys, hashes)
            matches = np.flatnonzero(keys[np.minimum(indices, len(keys) - 1)] == hashes)
            for index in np.unique(indices[matches]):
                chosen = matches[indices[matches] == index]
                self.attributes.setdefault(int(order[index]), []).append((rows[chosen], begin[chosen], stop[chosen]))


def _read_nodes(data: bytes, walk: _Walk, first: int, path: str) -> Nodes:
    """Return the walk's results as columns, with irregular nodes put in."""
    count = len(walk.starts)
    names: dict[bytes, int] = {}
    name_of = _intern(data, walk.view, walk.name_starts, walk.name_ends, names)
    columns: dict[str, tuple[Int32Array, dict[bytes, int]]] = {}
    for index, parts in walk.attributes.items():
        rows, begin, stop = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        bodies: dict[bytes, int] = {}
        of = np.full(count, NONE, dtype=np.int32)
        of[rows] = _intern(data, walk.view, begin, stop, bodies)
        columns[KNOWN_ATTRIBUTES[index]] = of, bodies
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *walk.dependency_rows])
    values = np.concatenate([np.zeros(0, dtype=np.uint64), *walk.dependencies])
    is_regular = walk.regular[rows]
    rows, values = rows[is_regular], values[is_regular]
    more_rows, more_values = [], []
    for row in np.flatnonzero(~walk.regular).tolist():
        try:
            node = read_node(data[walk.starts[row] : walk.ends[row]])
        except WireError as error:
            raise _node_error(first + row, int(walk.starts[row]), error, path) from None
        walk.ids[row], walk.types[row], walk.durations_us[row] = node.number, node.kind, node.duration_us
        name_of[row] = names.setdefault(node.name, len(names))
        more_rows += [row] * len(node.dependencies)
        more_values += node.dependencies
        for name in {*node.attributes, *columns} & {*KNOWN_ATTRIBUTES}:
            of, bodies = columns.setdefault(name, (np.full(count, NONE, dtype=np.int32), {}))
            body = node.attributes.get(name)
            of[row] = NONE if body is None else bodies.setdefault(body, len(bodies))
    rows = np.concatenate([rows, np.array(more_rows, dtype=np.int64)])
    values = np.concatenate([values, np.array(more_values, dtype=np.uint64)])
    try:
        return Nodes(
            ids=walk.ids,
            types=walk.types.astype(np.uint8),
            durations_us=walk.durations_us,
            name_of=name_of,
            names=[text(name) for name in names],
            dependencies=values[np.argsort(rows, kind="stable")],
            dependency_ends=np.cumsum(np.bincount(rows, minlength=count)).astype(np.int64),
            attributes=dict(_decode_columns(columns)),
            inputs={
                int(row): read_inputs(data[walk.starts[row] : walk.ends[row]])
                for row in np.flatnonzero(walk.types == NodeType.METADATA)
            },
        )
    except WireError as error:
        raise _node_error(first, 0, f"in a node from here on, {error}", path) from None


def _decode_columns(columns: dict[str, tuple[Int32Array, dict[bytes, int]]]) -> Iterator[tuple[str, AttributeColumn]]:
    for name, (of, bodies) in columns.items():
        values = []
        for body in bodies:
            own_name, value = read_attribute(body)
            if own_name != name:
                raise WireError(f"attribute {own_name!r} is not {name}")
            values.append(value)
        yield name, AttributeColumn(of, values)


def _intern(data: bytes, view: ByteView, starts: IntArray, ends: IntArray, known: dict[bytes, int]) -> Int32Array:
    """Return an index for each distinct run of bytes."""
    _, firsts, inverse = np.unique(view.hashes(starts, ends), return_index=True, return_inverse=True)
    indices = [
        known.setdefault(data[start:end], len(known))
        for start, end in zip(starts[firsts].tolist(), ends[firsts].tolist(), strict=True)
    ]
    return np.array(indices, dtype=np.int32)[inverse]
