"""Decodes all nodes of a trace at once: numpy walks their fields side by side.

Protobuf libraries write fields in the order of their numbers, so each step looks at the same field in
every node. A node that is not at its end after the walk has fields in another order, unknown ones, or is
damaged; it is decoded again on its own, which also finds the error to report.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepcast.inputs.chakra.nodes import (
    KNOWN_ATTRIBUTES,
    NONE,
    Column,
    Nodes,
    NodeType,
    Trace,
    failure,
    has_metadata,
    message_bounds,
    read_inputs,
    read_metadata,
    read_node,
)
from stepcast.inputs.chakra.protobuf import ByteView, Value, WireError, name_hashes, read_attribute, text
from stepcast.inputs.errors import FormatError
from stepcast.ir.arrays import Int32Array, IntArray, UIntArray

# Field tags (number << 3 | wire type) of Node.
ID, NAME, TYPE, CONTROL, DATA, START, DURATION, INPUTS, OUTPUTS, ATTRIBUTE = (
    *(0x08, 0x12, 0x18, 0x22, 0x2A, 0x30, 0x38, 0x42, 0x4A, 0x52),
)
ATTRIBUTE_NAME = 0x0A
# Nodes with more dependencies or attributes than this are decoded one by one.
MOST_STEPS = 64
HIGH_BITS = np.uint64(0x8080808080808080)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file before its nodes are read: what it says of itself, and where its nodes are."""

    version: str
    metadata: dict[str, Value]
    starts: IntArray
    ends: IntArray
    first: int  # messages before the nodes


def decode(data: bytes, path: str) -> Trace:
    """Every message of a file: GlobalMetadata, then nodes."""
    opened = _opened(data, path)
    walk = _Walk(ByteView(data), opened.starts, opened.ends)
    walk.run()
    return Trace(opened.version, opened.metadata, _nodes(data, walk, opened.first, path))


def decode_together(files: Sequence[tuple[bytes, str]]) -> list[Trace]:
    """Several files in one walk, which takes no longer to begin for many than for one; values that they have
    in common are one object.
    """
    if len(files) == 1:
        return [decode(*files[0])]
    opened = [_opened(data, path) for data, path in files]
    offsets = np.cumsum([0, *(len(data) for data, _ in files)])[:-1].tolist()
    starts, ends = (
        np.concatenate([getattr(each, name) + offset for each, offset in zip(opened, offsets, strict=True)])
        for name in ("starts", "ends")
    )
    data = b"".join(data for data, _ in files)
    walk = _Walk(ByteView(data), starts, ends)
    walk.run()
    try:
        nodes = _nodes(data, walk, 0, "")
    except FormatError:
        return [decode(data, path) for data, path in files]  # one by one, which tells whose fault it is
    stops = np.cumsum([len(each.starts) for each in opened]).tolist()
    return [
        Trace(each.version, each.metadata, nodes.between(stop - len(each.starts), stop))
        for each, stop in zip(opened, stops, strict=True)
    ]


def _opened(data: bytes, path: str) -> _Opened:
    starts, ends = message_bounds(data, path)
    version, metadata = "", dict[str, Value]()
    first = 0
    if len(starts):
        try:
            if has_metadata(data[starts[0] : ends[0]]):
                version, metadata = read_metadata(data[starts[0] : ends[0]])
                first = 1
        except WireError as error:
            raise failure(0, int(starts[0]), str(error), path) from None
    return _Opened(version, metadata, starts[first:], ends[first:], first)


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
        # Row, start and end of each attribute found, by its place in KNOWN_ATTRIBUTES.
        self.found: dict[int, list[tuple[IntArray, IntArray, IntArray]]] = {}

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
        """Nodes whose next field has *tag*."""
        return np.flatnonzero((self.view.bytes(self.at) == tag) & (self.at < self.ends))

    def _varints(self, at: IntArray, rows: IntArray) -> tuple[UIntArray, IntArray]:
        """Numbers at *at*, and where they end. Those of nine bytes and more make their node irregular."""
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
            found = self.view.hashes(name_at, name_at + self.view.bytes(begin + 1))
            places = np.searchsorted(keys, found)
            matches = np.flatnonzero(keys[np.minimum(places, len(keys) - 1)] == found)
            for place in np.unique(places[matches]):
                chosen = matches[places[matches] == place]
                self.found.setdefault(int(order[place]), []).append(
                    (rows[chosen], begin[chosen], stop[chosen])
                )


def _nodes(data: bytes, walk: _Walk, first: int, path: str) -> Nodes:
    """The walk's findings as columns, with irregular nodes put in."""
    count = len(walk.starts)
    names: dict[bytes, int] = {}
    name_of = _interned(data, walk.view, walk.name_starts, walk.name_ends, names)
    columns: dict[str, tuple[Int32Array, dict[bytes, int]]] = {}
    for place, parts in walk.found.items():
        rows, begin, stop = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        bodies: dict[bytes, int] = {}
        of = np.full(count, NONE, dtype=np.int32)
        of[rows] = _interned(data, walk.view, begin, stop, bodies)
        columns[KNOWN_ATTRIBUTES[place]] = of, bodies
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *walk.dependency_rows])
    values = np.concatenate([np.zeros(0, dtype=np.uint64), *walk.dependencies])
    kept = walk.regular[rows]
    rows, values = rows[kept], values[kept]
    more_rows, more_values = [], []
    for row in np.flatnonzero(~walk.regular).tolist():
        try:
            node = read_node(data[walk.starts[row] : walk.ends[row]])
        except WireError as error:
            raise failure(first + row, int(walk.starts[row]), str(error), path) from None
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
            attributes=dict(_decoded(columns)),
            inputs={
                int(row): read_inputs(data[walk.starts[row] : walk.ends[row]])
                for row in np.flatnonzero(walk.types == NodeType.METADATA)
            },
        )
    except WireError as error:
        raise failure(first, 0, f"in a node from here on, {error}", path) from None


def _decoded(columns: dict[str, tuple[Int32Array, dict[bytes, int]]]) -> Iterator[tuple[str, Column]]:
    for name, (of, bodies) in columns.items():
        values = []
        for body in bodies:
            found, value = read_attribute(body)
            if found != name:
                raise WireError(f"attribute {found!r} is not {name}")
            values.append(value)
        yield name, Column(of, values)


def _interned(
    data: bytes, view: ByteView, starts: IntArray, ends: IntArray, known: dict[bytes, int]
) -> Int32Array:
    """An index for each distinct run of bytes."""
    _, firsts, inverse = np.unique(view.hashes(starts, ends), return_index=True, return_inverse=True)
    indices = [
        known.setdefault(data[start:end], len(known))
        for start, end in zip(starts[firsts].tolist(), ends[firsts].tolist(), strict=True)
    ]
    return np.array(indices, dtype=np.int32)[inverse]
