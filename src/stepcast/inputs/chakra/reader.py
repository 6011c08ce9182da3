"""Chakra execution traces (protobuf, schema 0.0.4): stepcast's own, and other programs' as a Workload with one layer
for each node that does work, in an order that runs.

The files of a set are named as ASTRA-sim names them: PREFIX.RANK.et, and a list of each communicator's ranks.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from stepcast.inputs.chakra.nodes import COLLECTIVE_OF_TYPE, NONE, WORDS, ChakraTrace, NodeType, decode, order_nodes
from stepcast.inputs.chakra.protobuf import Value, WireError, fields, read_attribute, read_varint, text
from stepcast.inputs.chakra.record import RECORD, decode_workload, read_record
from stepcast.inputs.kineto.reader import ProcessGroup, group_named
from stepcast.inputs.source import FormatError, Source, expect, prefix_errors
from stepcast.ir.arrays import BoolArray, IntArray
from stepcast.ir.layout import Group, Layout
from stepcast.ir.limits import GROUPS, TRACE
from stepcast.ir.types import dataclass
from stepcast.ir.work import GATHERS, Collective, Direction, Recorded, Transfer, Work
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload
from stepcast.units import US

TRANSFERS = (NodeType.COMM_SEND, NodeType.COMM_RECV)
MOST_RANK = 2**24


class ChakraProcessGroup(ProcessGroup, frozen=True):
    """An entry of the list that PyTorch puts into its process_group:init node."""

    pg_size: int = 0
    group_size: int = 0

    @property
    def size(self) -> int:
        return len(self.ranks) or self.pg_size or self.group_size


PROCESS_GROUPS = msgspec.json.Decoder(list[ChakraProcessGroup])


@dataclass(frozen=True, slots=True)
class KnownRanks:
    """The ranks of a run, as far as its files state them."""

    layout: Layout
    sizes: Mapping[str, int]
    families: Mapping[str, Group]
    # Whether the files state which ranks there are; else as few as can be are assumed.
    stated: bool

    def group(self, name: Value) -> Group:
        known = self.families.get(str(name))
        return group_named(name if isinstance(name, str) else "") if known is None else known

    def size(self, name: Value) -> int:
        return self.sizes.get(str(name)) or self.layout.size(self.group(name))


def find_ranks(
    traces: Sequence[ChakraTrace], listed: Mapping[str, tuple[int, ...]], files: Sequence[int | None]
) -> KnownRanks:
    """Return the ranks of a run, from the ranks of its *files*, the groups *listed* with them, and those in traces."""
    groups = {name: ChakraProcessGroup(name, ranks=ranks) for name, ranks in listed.items()}
    for nodes in traces:
        groups |= _process_groups(nodes)
    messages = [content.attributes for nodes in traces for content in nodes.contents if content.type in TRANSFERS]
    pairs = [
        {end for end in map(attributes.get, ("comm_src", "comm_dst")) if type(end) is int and 0 <= end < MOST_RANK}
        for attributes in messages
    ]
    numbers = {rank for group in groups.values() for rank in group.ranks if 0 <= rank < MOST_RANK}.union(*pairs)
    numbers |= {rank for rank in files if rank is not None} if len(files) > 1 else set()
    sizes = {name: min(group.size, MOST_RANK) for name, group in groups.items()}
    world = max([max(numbers, default=0) + 1, *sizes.values()])
    if world == 1 and messages:
        world = 2
    families = {name: group_named(group.pg_desc, name) for name, group in groups.items()}
    families |= _families_by_stride(groups, families, world)
    # A pipeline shows in how far messages go.
    distances = [max(pair) - min(pair) for pair in pairs if len(pair) == 2] if len(files) > 1 else []
    layout = _layout(families, sizes, world, min(distances, default=0))
    return KnownRanks(layout, sizes, families, stated=bool(groups) or len(files) > 1)


def _families_by_stride(
    groups: Mapping[str, ChakraProcessGroup], families: Mapping[str, Group], world: int
) -> dict[str, Group]:
    """Return the kinds of groups that only list evenly spaced ranks: neighbours are tensor parallel."""
    strides: dict[str, int] = {}
    tp = 1
    for name, group in groups.items():
        ordered = sorted(group.ranks)
        steps = {after - before for before, after in pairwise(ordered)}
        if families[name] is Group.WORLD and len(steps) == 1 and len(ordered) < world:
            strides[name] = steps.pop()
            tp = max(tp, len(ordered)) if strides[name] == 1 else tp
    kinds = {1: Group.TP, tp: Group.DP} if tp > 1 else {1: Group.DP}
    return {name: kinds.get(step, Group.PP) for name, step in strides.items()}


def _layout(families: Mapping[str, Group], listed: Mapping[str, int], world: int, per_stage: int) -> Layout:
    """Return degrees from the groups that the traces list; a pipeline also from how far messages go."""
    sizes: dict[Group, int] = {}
    for name, family in families.items():
        sizes[family] = max(sizes.get(family, 1), listed[name])
    tp, cp, pp = (sizes.get(group, 1) for group in (Group.TP, Group.CP, Group.PP))
    if per_stage and not world % per_stage and not per_stage % (tp * cp):
        pp = world // per_stage
    if world % (tp * cp * pp):
        return Layout(dp=world)
    return Layout(tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp), ep=sizes.get(Group.EP, 1))


def _process_groups(nodes: ChakraTrace) -> dict[str, ChakraProcessGroup]:
    """Return PyTorch's groups by name, from its metadata nodes: a list in JSON, quoted as a list of one."""
    groups: dict[str, ChakraProcessGroup] = {}
    for values in nodes.inputs:
        text = values[values.find("[{") : values.rfind("}]") + 2] if "[{" in values else ""
        for form in (text, text.replace('\\"', '"'), text.replace("'", '"')):
            with suppress(msgspec.DecodeError):
                groups |= {str(group.pg_name): group for group in PROCESS_GROUPS.decode(form)}
                break
    return groups


# Traces of several ranks as one Workload: ranks of one stage must agree, stages may differ.

# Ranks that take longer than others by less than this share are taken for noise.
NOISE = 0.01


def join_workloads(workloads: Mapping[str, Workload], ranks: Sequence[int | None]) -> Workload:
    """Join the traces of *ranks*, by path; the rank of a stage that computes longest represents all of its stage."""
    paths = list(workloads)
    first = workloads[paths[0]]
    if len(paths) == 1:
        return first
    layout = first.layout
    paths_of: dict[int, list[str]] = {}  # by stage
    structures: dict[int, list[tuple[str, Work | None]]] = {}
    seconds: dict[str, float] = {}
    for path, rank in zip(paths, ranks, strict=True):
        stage = (rank or 0) // (layout.gpus // layout.pp)
        structure, seconds[path] = _structure(workloads[path])
        others = paths_of.setdefault(stage, [])
        if structures.setdefault(stage, structure) != structure:
            longest = max(others, key=seconds.__getitem__)
            raise FormatError(
                f"runs other ops than {longest}, and neither is a stage of its own; expected ranks that do the "
                "same, or the stages of a pipeline that send to each other",
                path,
            )
        others.append(path)
    chosen = {stage: max(others, key=seconds.__getitem__) for stage, others in sorted(paths_of.items())}
    if missing := sorted(set(range(layout.pp)) - chosen.keys()):
        raise FormatError(
            f"no file is of stage {missing[0]} of {layout.pp}; name all files of the run, or their folder", paths[0]
        )
    warnings = [text for workload in workloads.values() for text in workload.warnings]
    if len(paths) < layout.gpus:
        warnings.append(f"{len(paths)} of {layout.gpus} ranks' traces were given: the others are taken to do the same")
    for stage, path in chosen.items():
        if min(map(seconds.__getitem__, paths_of[stage])) < (1 - NOISE) * seconds[path]:
            warnings.append(f"ranks of one stage compute for different times: {path}, the longest, represents all")
    if layout.pp > 1:
        warnings.append("stages wait for the time of a message, not for its sender: the step may take longer")
    # Equal stages are one object; one alone where all are equal.
    distinct: dict[Stage, Stage] = {}
    stages = tuple(distinct.setdefault(stage, stage) for path in chosen.values() for stage in workloads[path].stages)
    stages = stages[:1] if len(distinct) == 1 else stages
    return replace(first, stages=stages, name=first.name.rsplit(".", 1)[0], warnings=tuple(dict.fromkeys(warnings)))


def _structure(workload: Workload) -> tuple[list[tuple[str, Work | None]], float]:
    """Return what a rank runs, whatever time its computation takes, and that time."""
    stage = workload.stages[0]
    ran = [(layer.name, op.work) for layer in (*stage.prologue, *stage.body_layers()) for op in layer.forward]
    recorded_s = sum(work.duration_s for _, work in ran if isinstance(work, Recorded))
    return [(name, None if isinstance(work, Recorded) else work) for name, work in ran], recorded_s


COMM_TYPES = (*TRANSFERS, NodeType.COMM_COLL)
IDLE, COMPUTES, COMMUNICATES = 0, 1, 2


def read_workload(
    nodes: ChakraTrace, dependencies: IntArray, order: IntArray, path: str, known: KnownRanks
) -> Workload:
    """Return nodes as layers of one micro-batch. Host ops are left out where the trace has device ops."""
    warnings: list[str] = []
    runs = nodes.matching(lambda content: content.type not in (NodeType.INVALID, NodeType.METADATA))
    computed = (content.attributes for content in nodes.contents if content.type == NodeType.COMP)
    if any(attributes.get("is_cpu_op") is False for attributes in computed):
        on_host = nodes.matching(lambda content: content.attributes.get("is_cpu_op") is True)
        if left_out := int((runs & on_host).sum()):
            warnings.append(f"{left_out} host ops were left out: they run at the same time as the device's")
        runs &= ~on_host
    expect(runs.any(), "has no nodes that compute or communicate; expected a Chakra execution trace", path)
    waits = _find_waits(nodes, dependencies, order, runs)
    layers = _read_layers(nodes, known, path, order[runs[order]], *waits)
    if not known.stated and bool(nodes.matching(lambda content: content.type in COMM_TYPES)[runs].any()):
        count = "one rank is" if known.layout.gpus == 1 else f"{known.layout.gpus} ranks are"
        warnings.append(f"the trace does not say which ranks communicate; {count} assumed, and --gpus N states others")
    facts = {"nodes": str(len(nodes)), "version": nodes.version or None, "schema": nodes.metadata.get("schema")}
    # A trace holds all of its rank's step: with other stages it shares no slots, only messages.
    is_pipelined = known.layout.pp > 1
    return Workload(
        stages=(Stage(body=(), prologue=layers) if is_pipelined else Stage(body=(Block(layers),)),),
        layout=known.layout,
        boundary_bytes=0 if is_pipelined else None,
        name=re.split(r"[\\/]", path)[-1].rsplit(".", 1)[0],
        source="chakra",
        notes=tuple((f"chakra.{name}", fact) for name, fact in facts.items() if isinstance(fact, str)),
        warnings=tuple(warnings),
        shares=True,
    )


def _find_waits(
    nodes: ChakraTrace, dependencies: IntArray, order: IntArray, runs: BoolArray
) -> tuple[bytearray, dict[int, tuple[int, ...]]]:
    """Return the communication that the next op waits for (blocking), and the nodes that wait for others by name.

    Computation runs in order; so what one computation has waited for, no later one need wait for.
    """
    communicates = nodes.matching(lambda content: content.type in COMM_TYPES)
    kinds = np.where(runs, np.where(communicates, COMMUNICATES, COMPUTES), IDLE)
    blocking, waits_for = bytearray(len(nodes)), dict[int, tuple[int, ...]]()
    is_done = bytearray(len(nodes))
    # Communication that a node which is left out waits for.
    behind: dict[int, set[int]] = {}
    running = order[runs[order]]
    previous = np.full(len(nodes), NONE)
    previous[running[1:]] = running[:-1]
    # A node that waits for computation alone needs no look: computation runs in order.
    is_checked = np.zeros(len(nodes), dtype=bool)
    is_checked[nodes.owners[kinds[dependencies] != COMPUTES]] = True
    # Memory views: lists of numbers would take several times the file.
    ends, named, kind_of = nodes.dependency_ends.data, dependencies.data, kinds.astype(np.uint8).data
    for index in order[is_checked[order]].data:
        pending: set[int] = set()
        for position in range(ends[index - 1] if index else 0, ends[index]):
            node = named[position]
            if kind_of[node] == COMMUNICATES:
                pending.add(node)
            else:
                pending |= behind.get(node, set())
        pending = {node for node in pending if not is_done[node]}
        if not pending:
            continue
        if kind_of[index] == IDLE:
            behind[index] = pending
            continue
        if kind_of[index] == COMPUTES:
            for node in pending:
                is_done[node] = 1
            last = int(previous[index])
            if last in pending:
                blocking[last] = 1
                pending.discard(last)
        if pending:
            waits_for[index] = tuple(sorted(pending))
    return blocking, waits_for


def _read_layers(
    nodes: ChakraTrace,
    known: KnownRanks,
    path: str,
    order: IntArray,
    blocking: bytearray,
    after_of: Mapping[int, tuple[int, ...]],
) -> tuple[Layer, ...]:
    """Return a layer for each node of *order*: one object for equal nodes, but for those that wait for others, or are
    waited for, by name.
    """
    blocks = np.frombuffer(blocking, dtype=np.uint8)
    columns: tuple[npt.NDArray[np.generic], ...] = (nodes.content_of, nodes.durations_us, blocks)
    layer_of: dict[tuple[object, ...], Layer] = {}
    layers = []
    for index, *key in zip(order.tolist(), *(column[order].tolist() for column in columns), strict=True):
        if (row := tuple(key)) not in layer_of:
            content = nodes.content(index)
            op = Op("", _read_work(nodes, index, known, path), bool(blocks[index]) or content.type not in COMM_TYPES)
            values = ((name, content.attributes.get(name)) for name in WORDS["noted"].split())
            words = ((name, value if isinstance(value, tuple) else (value,)) for name, value in values)
            notes = tuple((name, ",".join(map(str, items))) for name, items in words if items != (None,))
            layer_of[row] = Layer(content.name, (op,), notes=notes)
        layers.append(layer_of[row])
    if after_of:
        awaited = {node for pending in after_of.values() for node in pending}
        position_of = {node: position for position, node in enumerate(order.tolist())}
        for node in awaited | after_of.keys():
            position = position_of[node]
            (op,) = layers[position].forward
            name = f"node {nodes.ids[node]}" if node in awaited else op.name
            after = tuple(f"node {nodes.ids[predecessor]}" for predecessor in after_of.get(node, ()))
            layers[position] = replace(layers[position], forward=(replace(op, name=name, after=after),))
    return tuple(layers)


def _read_work(nodes: ChakraTrace, node: int, known: KnownRanks, path: str) -> Work:
    content = nodes.content(node)
    if content.type not in COMM_TYPES:
        return Recorded(int(nodes.durations_us[node]) * US)
    sizes = (content.attributes.get(key) for key in ("comm_type", "comm_size"))
    number, size_bytes = (0 if size is None else size for size in sizes)
    kind = COLLECTIVE_OF_TYPE.get(number) if type(number) is int else None
    if content.type == NodeType.COMM_COLL and kind is None:
        raise FormatError(f"node {nodes.ids[node]} has collective type {number!r}; expected 0 to 9", path)
    if type(size_bytes) is not int or size_bytes < 0:
        raise FormatError(f"node {nodes.ids[node]} has comm_size {size_bytes!r}; expected bytes", path)
    source, destination, name = (content.attributes.get(key) for key in ("comm_src", "comm_dst", "pg_name"))
    group, layout = known.group(name), known.layout
    if content.type == NodeType.COMM_COLL and kind is not None:
        # Chakra counts the share of a rank (its converter: the input tensors; ASTRA-sim: Ring.cc).
        return Collective(kind, size_bytes * (known.size(name) if kind in GATHERS else 1), group)

    direction = Direction.SEND if content.type == NodeType.COMM_SEND else Direction.RECEIVE
    offset = 1 if direction is Direction.SEND else -1
    if type(source) is int and type(destination) is int and source != destination:
        offset *= destination - source
    if group in (Group.WORLD, Group.PP) or layout.size(group) == 1:  # no group with peers
        group = Group.PP if layout.pp > 1 else Group.WORLD
    if group is Group.PP:
        stages = abs(offset) // (layout.gpus // layout.pp) or 1
        offset = stages if offset > 0 else -stages
    return Transfer(direction, size_bytes, group, offset)


RANK_FILE = re.compile(r"(.*)\.([0-9]{1,7})\.et(?:\.gz)?", re.DOTALL)
# {"1": [0, 1], ...}: the list that --comm-group-configuration takes.
GROUPS_HEAD = re.compile(rb'\s*\{\s*"[0-9]{1,9}"\s*:\s*\[[0-9,\s]*(?:\]|\Z)')
VERSION = re.compile(r"v?\d{1,4}(?:\.\d{1,6}){0,3}(?:[-+.][\w.+-]{1,40})?")
ATTRIBUTE_NAME = re.compile(rb"\x0a[\x01-\x60][A-Za-z_][ -~]*")
# Wire types of Node's fields 1 to 10; dependencies may be packed.
NODE_WIRES = {1: {0}, 2: {2}, 3: {0}, 4: {0, 2}, 5: {0, 2}, 6: {0}, 7: {0}, 8: {2}, 9: {2}, 10: {2}}
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
        for is_first in (True, False):
            length, start = read_varint(head, 0)
            message, head, is_cut = head[start : start + length], head[start + length :], start + length > len(head)
            if message:
                return (is_first and _is_metadata(message, is_cut)) or (not is_cut and _is_node(message))
    except WireError:
        pass
    return False


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
    return isinstance(kind, int) and 0 < kind <= NodeType.COMM_COLL and name is not None and (name + "_").isprintable()


def read_run(sources: Sequence[Source]) -> Workload:
    """Return the workload in the traces of ranks: as it was written, if by stepcast, else their nodes in order."""
    lists = [source for source in sources if GROUPS_HEAD.match(source.head_bytes)]
    files = [source for source in sources if source not in lists]
    groups = {name: ranks for source in lists for name, ranks in read_groups(source).items()}
    expect(files, "lists communicators and holds no trace; name the .et files with it", sources[0].path)
    path_of_rank: dict[int | None, str] = {}
    for source in files:
        rank = rank_of(source.path)
        if rank is None and len(files) > 1:
            raise FormatError("names no rank; the files of one run are PREFIX.0.et, PREFIX.1.et, ...", source.path)
        if rank in path_of_rank:
            raise FormatError(f"is of rank {rank}, as is {path_of_rank[rank]}; name the files of one run", source.path)
        path_of_rank[rank] = source.path
    if any(RECORD.encode() in source.head_bytes for source in files) and (workload := _read_own(files)) is not None:
        return workload
    traces, orders, ranks = [], [], tuple(path_of_rank)
    for source in files:
        # Not source.data(), which would take some lengths for the mark of UTF-16 text.
        traces.append(decode(source.raw(TRACE), source.path))
        orders.append(order_nodes(traces[-1], source.path))
    known = find_ranks(traces, groups, ranks)
    workloads = {
        source.path: read_workload(trace, *order, source.path, known)
        for source, trace, order in zip(files, traces, orders, strict=True)
    }
    return join_workloads(workloads, ranks)


def read_groups(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each communicator by its number."""
    with prefix_errors("is no list of ranks by communicator", source.path, (msgspec.DecodeError, UnicodeDecodeError)):
        groups = msgspec.json.decode(source.raw(GROUPS), type=dict[str, tuple[int, ...]])
    for name, ranks in groups.items():
        if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < MOST_RANK:
            raise FormatError(f"communicator {name!r} is {ranks[:4]!r}...; expected different ranks", source.path)
    return groups


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
