"""Chakra execution traces (protobuf, schema 0.0.4): stepcast's own and other programs'.

The files of a set are named as ASTRA-sim names them: PREFIX.RANK.et, and a list of each communicator's ranks.
"""

import re
from collections.abc import Sequence

import msgspec

from stepcast.inputs.chakra.foreign import MOST_RANK, find_ranks, join_workloads, read_workload
from stepcast.inputs.chakra.nodes import decode, dependency_indices, execution_order
from stepcast.inputs.chakra.protobuf import WireError, fields, read_attribute, read_varint, text
from stepcast.inputs.chakra.record import RECORD, decode_workload, read_record
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import GROUPS, TRACE
from stepcast.ir.workload import Workload

RANK_FILE = re.compile(r"(.*)\.([0-9]{1,7})\.et(?:\.gz)?", re.DOTALL)
# {"1": [0, 1], ...}: the list that --comm-group-configuration takes.
GROUPS_HEAD = re.compile(rb'\s*\{\s*"[0-9]{1,9}"\s*:\s*\[[0-9,\s]*(?:\]|\Z)')
VERSION = re.compile(r"v?\d{1,4}(?:\.\d{1,6}){0,3}(?:[-+.][\w.+-]{1,40})?")
ATTRIBUTE_NAME = re.compile(rb"\x0a[\x01-\x60][A-Za-z_][ -~]*")
# Wire types of Node's fields 1 to 10; dependencies may be packed.
NODE_WIRES = {1: {0}, 2: {2}, 3: {0}, 4: {0, 2}, 5: {0, 2}, 6: {0}, 7: {0}, 8: {2}, 9: {2}, 10: {2}}
LAST_NODE_TYPE = 7
VERSION_TAG, ATTRIBUTE_TAG = 0x0A, 0x12


def prefix_of(path: str) -> str:
    """Return the prefix of a set's files, where *path* is a name for all of them."""
    return re.sub(r"(\.et)?(\.gz)?\Z", "", path)


def rank_of(path: str) -> int | None:
    match = RANK_FILE.fullmatch(path)
    return int(match[2]) if match else None


def run_of(path: str) -> str:
    """Return what the files of one set have in common; a file that names no rank is a set of its own."""
    match = RANK_FILE.fullmatch(path)
    return match[1] if match else path.removesuffix(".comm_group.json")


def looks_like(head: bytes) -> bool:
    """Return whether a GlobalMetadata, or an empty one and a node, or a list of groups comes first."""
    if GROUPS_HEAD.match(head):
        return True
    try:
        message, rest, is_cut = _first_message(head)
        if message:
            return _is_metadata(message, is_cut) or (not is_cut and _is_node(message))
        message, rest, is_cut = _first_message(rest)
        return bool(message) and not is_cut and _is_node(message)
    except WireError:
        return False


def _first_message(data: bytes) -> tuple[bytes, bytes, bool]:
    """Return the first message, what follows it, and whether *data* ends within it."""
    length, start = read_varint(data, 0)
    return data[start : start + length], data[start + length :], start + length > len(data)


def _is_metadata(message: bytes, is_cut: bool) -> bool:
    """Return whether it holds a version and attributes with proper names; the last may be cut off with the head."""
    position = 0
    while position < len(message):
        tag = message[position]
        length, start = read_varint(message, position + 1)
        content, position = message[start : start + length], start + length
        if position > len(message) and not is_cut:
            return False
        if tag == VERSION_TAG:
            if content and not VERSION.fullmatch(text(content)):
                return False
        elif tag != ATTRIBUTE_TAG or not ATTRIBUTE_NAME.match(content):
            return False
        elif position <= len(message):
            read_attribute(content)
    return True


def _is_node(message: bytes) -> bool:
    """Return whether it has a node's fields alone, with a known type and a name that can be read."""
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


def read_run(sources: Sequence[Source]) -> Workload:
    """Return the workload in the traces of ranks: as it was written, if by stepcast, else their nodes in order."""
    groups: dict[str, tuple[int, ...]] = {}
    files: list[Source] = []
    for source in sources:
        if GROUPS_HEAD.match(source.head_bytes):
            groups |= read_groups(source)
        else:
            files.append(source)
    if not files:
        raise FormatError("lists communicators and holds no trace; name the .et files with it", sources[0].path)
    paths = [source.path for source in files]
    ranks = _ranks_of_set(paths) if len(files) > 1 else (rank_of(paths[0]),)
    if any(RECORD.encode() in source.head_bytes for source in files):
        workload = _read_own(files)
        if workload is not None:
            return workload
    traces, orders = [], []
    for source in files:
        # Not source.data(), which would take some lengths for the mark of UTF-16 text.
        trace = decode(source.raw(TRACE), source.path)
        dependencies = dependency_indices(trace.nodes, source.path)
        traces.append(trace)
        orders.append((dependencies, execution_order(trace.nodes, dependencies, source.path)))
    known = find_ranks([trace.nodes for trace in traces], groups, ranks)
    workloads = {
        path: read_workload(trace, *order, path, known)
        for trace, order, path in zip(traces, orders, paths, strict=True)
    }
    return join_workloads(workloads, ranks)


def read_groups(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each communicator by its number."""
    try:
        groups = msgspec.json.decode(source.raw(GROUPS), type=dict[str, tuple[int, ...]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{error}; expected a list of ranks for each communicator", source.path) from None
    for name, ranks in groups.items():
        if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < MOST_RANK:
            raise FormatError(f"communicator {name!r} is {ranks[:4]!r}...; expected different ranks", source.path)
    return groups


def _ranks_of_set(paths: Sequence[str]) -> tuple[int, ...]:
    ranks: dict[int, str] = {}
    for path in paths:
        rank = rank_of(path)
        if rank is None:
            raise FormatError("names no rank; the files of one run are PREFIX.0.et, PREFIX.1.et, ...", path)
        if rank in ranks:
            raise FormatError(f"is of rank {rank}, as is {ranks[rank]}; name the files of one run", path)
        ranks[rank] = path
    return tuple(ranks)


def _read_own(files: Sequence[Source]) -> Workload | None:
    """Return the workload that all *files* record, None where another program wrote them."""
    first = read_record(files[0].raw(TRACE), files[0].path)
    for source in files[1:]:
        if read_record(source.raw(TRACE), source.path) != first:
            raise FormatError(f"is of another set than {files[0].path}", source.path)
    try:
        return None if first is None else decode_workload(first)
    except ValueError as error:
        raise FormatError(f"{error}; expected a trace as stepcast writes it", files[0].path) from None
