"""A Workload from another program's trace: one layer for each node that does work, in an order that runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from stepcast.inputs.chakra.nodes import COLLECTIVE_OF_TYPE, NONE, ChakraTrace, Nodes, NodeType, owners
from stepcast.inputs.chakra.protobuf import Value
from stepcast.inputs.kineto.columns import ProcessGroup, group_named
from stepcast.inputs.source import FormatError
from stepcast.ir.arrays import BoolArray, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.layout import Group, Layout
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


GROUPS = msgspec.json.Decoder(list[ChakraProcessGroup])


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
    traces: Sequence[Nodes], listed: Mapping[str, tuple[int, ...]], files: Sequence[int | None]
) -> KnownRanks:
    """Return the ranks of a run, from the ranks of its *files*, the groups *listed* with them, and those in traces."""
    groups = {name: ChakraProcessGroup(name, ranks=ranks) for name, ranks in listed.items()}
    for nodes in traces:
        groups |= _process_groups(nodes)
    spans = [_transfer_ranks(nodes) for nodes in traces]
    numbers = {rank for group in groups.values() for rank in group.ranks if 0 <= rank < MOST_RANK}
    numbers |= {rank for rank in files if rank is not None} if len(files) > 1 else set()
    numbers |= {highest for highest, _ in spans}
    sizes = {name: min(group.size, MOST_RANK) for name, group in groups.items()}
    world = max([max(numbers, default=0) + 1, 1, *sizes.values()])
    if world == 1 and any(bool(np.isin(nodes.types, TRANSFERS).any()) for nodes in traces):
        world = 2
    families = {name: group_named(group.pg_desc, name) for name, group in groups.items()}
    families |= _families_by_stride(groups, families, world)
    steps = [step for _, step in spans if step] if len(files) > 1 else []
    layout = _layout(families, sizes, world, min(steps, default=0))
    return KnownRanks(layout, sizes, families, stated=bool(groups) or len(files) > 1)


def _transfer_ranks(nodes: Nodes) -> tuple[int, int]:
    """Return the highest rank that messages name (-1: none), and the shortest distance they go (0: none)."""
    highest, distances = -1, []
    columns = [nodes.attributes[name] for name in ("comm_src", "comm_dst") if name in nodes.attributes]
    for node in np.flatnonzero(np.isin(nodes.types, TRANSFERS)).tolist():
        ends = [end for column in columns if type(end := column.value(node)) is int and 0 <= end < MOST_RANK]
        highest = max([highest, *ends])
        if len(set(ends)) == 2:
            distances.append(abs(ends[1] - ends[0]))
    return highest, min(distances, default=0)


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


def _process_groups(nodes: Nodes) -> dict[str, ChakraProcessGroup]:
    """Return PyTorch's groups by name, from its metadata nodes: a list in JSON, quoted as a list of one."""
    groups: dict[str, ChakraProcessGroup] = {}
    for values in nodes.inputs.values():
        start, end = values.find("[{"), values.rfind("}]")
        if start < 0 or end < start:
            continue
        text = values[start : end + 2]
        for form in (text, text.replace('\\"', '"'), text.replace("'", '"')):
            try:
                groups |= {str(group.pg_name): group for group in GROUPS.decode(form)}
                break
            except msgspec.DecodeError:
                continue
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
    per_stage = layout.gpus // layout.pp
    chosen: dict[int, str] = {}
    shortest: dict[int, float] = {}
    structures: dict[int, list[tuple[str, Work | None]]] = {}
    seconds: dict[str, float] = {}
    for path, rank in zip(paths, ranks, strict=True):
        stage = (rank or 0) // per_stage
        best = chosen.setdefault(stage, path)
        structure, seconds[path] = _structure(workloads[path])
        if structures.setdefault(stage, structure) != structure:
            raise FormatError(
                f"runs other ops than {best}, and neither is a stage of its own; expected ranks that do the "
                "same, or the stages of a pipeline that send to each other",
                path,
            )
        shortest[stage] = min(shortest.get(stage, seconds[path]), seconds[path])
        if seconds[path] > seconds[best]:
            chosen[stage] = path
    if missing := sorted(set(range(layout.pp)) - chosen.keys()):
        raise FormatError(
            f"no file is of stage {missing[0]} of {layout.pp}; name all files of the run, or their folder", paths[0]
        )
    warnings = [text for workload in workloads.values() for text in workload.warnings]
    if len(paths) < layout.gpus:
        warnings.append(f"{len(paths)} of {layout.gpus} ranks' traces were given: the others are taken to do the same")
    for stage, path in sorted(chosen.items()):
        if shortest[stage] < (1 - NOISE) * seconds[path]:
            warnings.append(f"ranks of one stage compute for different times: {path}, the longest, represents all")
    if layout.pp > 1:
        warnings.append("stages wait for the time of a message, not for its sender: the step may take longer")
    # Equal stages are one object; one alone where all are equal.
    distinct: dict[Stage, Stage] = {}
    stages = [workloads[chosen[stage]].stages[0] for stage in range(layout.pp)]
    stages = [distinct.setdefault(stage, stage) for stage in stages]
    return replace(
        first,
        stages=tuple(stages[:1] if len(distinct) == 1 else stages),
        name=first.name.rsplit(".", 1)[0],
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _structure(workload: Workload) -> tuple[list[tuple[str, Work | None]], float]:
    """Return what a rank runs, whatever time its computation takes, and that time."""
    stage = workload.stages[0]
    ran = [(layer.name, op.work) for layer in (*stage.prologue, *stage.body_layers()) for op in layer.forward]
    recorded_s = sum(work.duration_s for _, work in ran if isinstance(work, Recorded))
    return [(name, None if isinstance(work, Recorded) else work) for name, work in ran], recorded_s


IDLE_TYPES = (NodeType.INVALID, NodeType.METADATA)
COMM_TYPES = (NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)
IDLE, COMPUTES, COMMUNICATES = 0, 1, 2
# Noted with the layer, as the trace has them.
NOTED = ("num_ops", "tensor_size", "pg_name", "comm_tag", "involved_dim")
USED = (*NOTED, "comm_type", "comm_size", "comm_src", "comm_dst")
# The communication that the next op waits for (blocking), and the nodes that wait for others by name.
NodeWaits = tuple[bytearray, dict[int, tuple[int, ...]]]


def read_workload(
    trace: ChakraTrace, dependencies: IntArray, order: IntArray, path: str, known: KnownRanks
) -> Workload:
    """Return nodes as layers of one micro-batch. Host ops are left out where the trace has device ops."""
    nodes = trace.nodes
    warnings: list[str] = []
    runs = _find_running(nodes, warnings)
    if not runs.any():
        raise FormatError("has no nodes that compute or communicate; expected a Chakra execution trace", path)
    layers = _LayerReader(nodes, known, path).layers(order[runs[order]], _find_waits(nodes, dependencies, order, runs))
    if not known.stated and bool(np.isin(nodes.types[runs], COMM_TYPES).any()):
        count = "one rank is" if known.layout.gpus == 1 else f"{known.layout.gpus} ranks are"
        warnings.append(f"the trace does not say which ranks communicate; {count} assumed, and --gpus N states others")
    notes = [("chakra.nodes", str(len(nodes)))]
    if trace.version:
        notes.append(("chakra.version", trace.version))
    if isinstance(schema := trace.metadata.get("schema"), str):
        notes.append(("chakra.schema", schema))
    # A trace holds all of its rank's step: with other stages it shares no slots, only messages.
    is_pipelined = known.layout.pp > 1
    return Workload(
        stages=(Stage(body=(), prologue=layers) if is_pipelined else Stage(body=(Block(layers),)),),
        layout=known.layout,
        boundary_bytes=0 if is_pipelined else None,
        name=re.split(r"[\\/]", path)[-1].rsplit(".", 1)[0],
        source="chakra",
        notes=tuple(notes),
        warnings=tuple(warnings),
        shares=True,
    )


def _find_running(nodes: Nodes, warnings: list[str]) -> BoolArray:
    """Return which nodes do work on the device, or on the host where the trace has nothing else."""
    works: BoolArray = ~np.isin(nodes.types, IDLE_TYPES)
    host = nodes.attributes.get("is_cpu_op")
    if host is None:
        return works
    on_host = np.array([value is True for value in host.values] + [False])[host.of]
    on_device = np.array([value is False for value in host.values] + [False])[host.of]
    if not (works & on_device & (nodes.types == NodeType.COMP)).any():
        return works
    left_out = int((works & on_host).sum())
    if left_out:
        warnings.append(f"{left_out} host ops were left out: they run at the same time as the device's")
    works &= ~on_host
    return works


def _find_waits(nodes: Nodes, dependencies: IntArray, order: IntArray, runs: BoolArray) -> NodeWaits:
    """Return the waits of nodes.

    Computation runs in order; so what one computation has waited for, no later one need wait for.
    """
    kinds = np.where(runs, np.where(np.isin(nodes.types, COMM_TYPES), COMMUNICATES, COMPUTES), IDLE)
    blocking, after = bytearray(len(nodes)), dict[int, tuple[int, ...]]()
    is_done = bytearray(len(nodes))
    # Communication that a node which is left out waits for.
    behind: dict[int, set[int]] = {}
    running = order[runs[order]]
    before = np.full(len(nodes), NONE)
    before[running[1:]] = running[:-1]
    # A node that waits for computation alone needs no look: computation runs in order.
    is_checked = np.zeros(len(nodes), dtype=bool)
    is_checked[owners(nodes)[kinds[dependencies] != COMPUTES]] = True
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
            last = int(before[index])
            if last in pending:
                blocking[last] = 1
                pending.discard(last)
        if pending:
            after[index] = tuple(sorted(pending))
    return blocking, after


class _LayerReader:
    """Turns nodes into layers; equal nodes become one object."""

    def __init__(self, nodes: Nodes, known: KnownRanks, path: str) -> None:
        self._nodes = nodes
        self._known = known
        self._path = path
        self._noted = [(name, nodes.attributes[name]) for name in NOTED if name in nodes.attributes]

    def layers(self, order: IntArray, waits: NodeWaits) -> tuple[Layer, ...]:
        """Return a layer for each node of *order*; those that wait, or are waited for, by name are their own."""
        nodes, after_of = self._nodes, waits[1]
        blocking = np.frombuffer(waits[0], dtype=np.uint8)
        columns: list[npt.NDArray[np.generic]] = [nodes.name_of, nodes.types, nodes.durations_us, blocking]
        columns += [nodes.attributes[name].of for name in USED if name in nodes.attributes]
        known: dict[tuple[object, ...], Layer] = {}
        layers = []
        for index, *key in zip(order.tolist(), *(column[order].tolist() for column in columns), strict=True):
            if (row := tuple(key)) not in known:
                known[row] = self._layer(index, bool(blocking[index]))
            layers.append(known[row])
        if after_of:
            awaited = {node for pending in after_of.values() for node in pending}
            position_of = {node: position for position, node in enumerate(order.tolist())}
            for node in awaited | after_of.keys():
                position = position_of[node]
                (op,) = layers[position].forward
                name = f"node {nodes.ids[node]}" if node in awaited else op.name
                after = tuple(f"node {nodes.ids[other]}" for other in after_of.get(node, ()))
                layers[position] = replace(layers[position], forward=(replace(op, name=name, after=after),))
        return tuple(layers)

    def _layer(self, node: int, blocking: bool) -> Layer:
        nodes = self._nodes
        kind = int(nodes.types[node])  # numpy's own numbers are slow to compare with those of an enum
        work: Work
        if kind == NodeType.COMM_COLL:
            work = self._collective(node)
        elif kind in COMM_TYPES:
            work = self._transfer(node)
        else:
            work = Recorded(int(nodes.durations_us[node]) * US)
        values = ((name, column.value(node)) for name, column in self._noted)
        notes = tuple((name, _plain(value)) for name, value in values if value is not None)
        op = Op("", work, blocking or kind not in COMM_TYPES)
        return Layer(nodes.names[nodes.name_of[node]], (op,), notes=notes)

    def _value(self, name: str, node: int) -> Value:
        column = self._nodes.attributes.get(name)
        return None if column is None else column.value(node)

    def _collective(self, node: int) -> Collective:
        number = self._value("comm_type", node)
        number = 0 if number is None else number
        kind = COLLECTIVE_OF_TYPE.get(number) if type(number) is int else None
        if kind is None:
            raise FormatError(
                f"node {self._nodes.ids[node]} has collective type {number!r}; expected 0 to 9", self._path
            )
        size_bytes, name = self._size_bytes(node), self._value("pg_name", node)
        if kind in GATHERS:
            # Chakra counts the share of a rank (its converter: the input tensors; ASTRA-sim: Ring.cc).
            size_bytes *= self._known.size(name)
        return Collective(kind, size_bytes, self._known.group(name))

    def _transfer(self, node: int) -> Transfer:
        direction = Direction.SEND if int(self._nodes.types[node]) == NodeType.COMM_SEND else Direction.RECEIVE
        source, destination = self._value("comm_src", node), self._value("comm_dst", node)
        offset = 1 if direction is Direction.SEND else -1
        if type(source) is int and type(destination) is int and source != destination:
            offset *= destination - source
        group, layout = self._known.group(self._value("pg_name", node)), self._known.layout
        if group in (Group.WORLD, Group.PP) or layout.size(group) == 1:  # no group with peers
            group = Group.PP if layout.pp > 1 else Group.WORLD
        if group is Group.PP:
            stages = abs(offset) // (layout.gpus // layout.pp) or 1
            offset = stages if offset > 0 else -stages
        return Transfer(direction, self._size_bytes(node), group, offset)

    def _size_bytes(self, node: int) -> int:
        size_bytes = self._value("comm_size", node)
        if size_bytes is None:
            return 0
        if type(size_bytes) is not int or size_bytes < 0:
            raise FormatError(f"node {self._nodes.ids[node]} has comm_size {size_bytes!r}; expected bytes", self._path)
        return size_bytes


def _plain(value: Value) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
