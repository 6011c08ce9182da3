"""Chakra execution traces (protobuf, schema 0.0.4): stepcast's own and other programs'."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stepcast.inputs.chakra.protobuf import WireError, fields, read_attribute, read_varint, text
from stepcast.inputs.chakra.rank_files import lists_groups, rank_of, ranks_of_set, read_groups, run_of
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import MIB, TRACE

if TYPE_CHECKING:
    from stepcast.ir.workload import Workload

__all__ = ["looks_like", "read", "read_run", "run_of"]

VERSION = re.compile(r"v?\d{1,4}(?:\.\d{1,6}){0,3}(?:[-+.][\w.+-]{1,40})?")
ATTRIBUTE_NAME = re.compile(rb"\x0a[\x01-\x60][A-Za-z_][ -~]*")
# Wire types of Node's fields 1 to 10; dependencies may be packed.
NODE_WIRES = {1: {0}, 2: {2}, 3: {0}, 4: {0, 2}, 5: {0, 2}, 6: {0}, 7: {0}, 8: {2}, 9: {2}, 10: {2}}
LAST_NODE_TYPE = 7
VERSION_TAG, ATTRIBUTE_TAG = 0x0A, 0x12
# Small files are decoded together up to so much.
TOGETHER_BYTES = 8 * MIB


def looks_like(head: bytes) -> bool:
    """The first message is a GlobalMetadata, or after an empty one comes a node; or a list of groups."""
    if lists_groups(head):
        return True
    try:
        message, rest, cut = _message(head)
        if message:
            return _is_metadata(message, cut) or (not cut and _is_node(message))
        message, rest, cut = _message(rest)
        return bool(message) and not cut and _is_node(message)
    except WireError:
        return False


def _message(data: bytes) -> tuple[bytes, bytes, bool]:
    """The first message, what follows it, and whether *data* ends within it."""
    length, start = read_varint(data, 0)
    return data[start : start + length], data[start + length :], start + length > len(data)


def _is_metadata(message: bytes, cut: bool) -> bool:
    """A version and attributes with proper names, nothing else; the last may be cut off with the head."""
    at = 0
    while at < len(message):
        tag = message[at]
        length, start = read_varint(message, at + 1)
        content, at = message[start : start + length], start + length
        if at > len(message) and not cut:
            return False
        if tag == VERSION_TAG:
            if content and not VERSION.fullmatch(text(content)):
                return False
        elif tag != ATTRIBUTE_TAG or not ATTRIBUTE_NAME.match(content):
            return False
        elif at <= len(message):
            read_attribute(content)
    return True


def _is_node(message: bytes) -> bool:
    """Only a node's fields, with a known type and a name that can be read."""
    kind = name = None
    for number, wire, content in fields(message):
        if wire not in NODE_WIRES.get(number, ()):
            return False
        if number == 3:
            kind = content
        elif number == 2 and isinstance(content, bytes):
            name = text(content)
        elif number == 10 and isinstance(content, bytes):
            read_attribute(content)
    return isinstance(kind, int) and 0 < kind <= LAST_NODE_TYPE and name is not None and (name + "_").isprintable()


def read(source: Source) -> "Workload":
    """The workload in one trace."""
    return read_run([source])


def read_run(sources: Sequence[Source]) -> "Workload":
    """The workload in the traces of ranks: as it was written, if by stepcast, else their nodes in order."""
    # Here, so that recognising other formats does not load them.
    from stepcast.inputs.chakra.foreign import foreign_workload, joined_workload, known_ranks
    from stepcast.inputs.chakra.nodes import decode_together, dependency_indices, execution_order
    from stepcast.inputs.chakra.record import RECORD

    groups: dict[str, tuple[int, ...]] = {}
    files: list[Source] = []
    for source in sources:
        if lists_groups(source.head_bytes):
            groups |= read_groups(source)
        else:
            files.append(source)
    if not files:
        raise FormatError("lists communicators and holds no trace; name the .et files with it", sources[0].path)
    paths = [source.path for source in files]
    ranks = ranks_of_set(paths) if len(files) > 1 else (rank_of(paths[0]),)
    if any(RECORD.encode() in source.head_bytes for source in files):
        workload = _own_workload(files)
        if workload is not None:
            return workload
    traces, orders = [], []
    for some in _handfuls(files):
        for trace, (_, path) in zip(decode_together(some), some, strict=True):
            dependencies = dependency_indices(trace.nodes, path)
            traces.append(trace)
            orders.append((dependencies, execution_order(trace.nodes, dependencies, path)))
    known = known_ranks([trace.nodes for trace in traces], groups, ranks)
    found = {
        path: foreign_workload(trace, *order, path, known)
        for trace, order, path in zip(traces, orders, paths, strict=True)
    }
    return joined_workload(found, ranks)


def _own_workload(files: Sequence[Source]) -> "Workload | None":
    """Return the workload that all *files* record, None where another program wrote them."""
    from stepcast.inputs.chakra.record import decode_workload, read_record

    first: bytes | None = None
    for source in files:
        record = read_record(source.raw(TRACE), source.path)
        if source is files[0]:
            first = record
        if record != first:
            raise FormatError(f"is of another set than {files[0].path}", source.path)
    try:
        return None if first is None else decode_workload(first)
    except ValueError as error:
        raise FormatError(f"{error}; expected a trace as stepcast writes it", files[0].path) from None


def _handfuls(files: Sequence[Source]) -> Iterator[list[tuple[bytes, str]]]:
    """What is in *files*, and their paths, as many at a time as are decoded together."""
    some: list[tuple[bytes, str]] = []
    size = 0
    for source in files:
        # Not source.data(), which would take some lengths for the mark of UTF-16 text.
        data = source.raw(TRACE)
        if some and size + len(data) > TOGETHER_BYTES:
            yield some
            some, size = [], 0
        some.append((data, source.path))
        size += len(data)
    if some:
        yield some
