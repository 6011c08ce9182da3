"""A Workload from another program's trace: one layer for each node that does work, in an order that runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stepcast.inputs.chakra.nodes import COLLECTIVE_OF_TYPE, NONE, Nodes, NodeType, Trace, owners
from stepcast.inputs.chakra.protobuf import Value, row_hashes
from stepcast.inputs.chakra.rank_files import MOST_RANK, strides
from stepcast.inputs.kineto.process_groups import group_named
from stepcast.inputs.source import FormatError
from stepcast.ir.arrays import BoolArray, IntArray
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.work import GATHERS, Collective, Direction, Recorded, Transfer, Work
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload
from stepcast.units import US

# What traces and the list beside them say of the ranks: how many, and which communicate.

TRANSFERS = (NodeType.COMM_SEND, NodeType.COMM_RECV)


class ChakraProcessGroup(msgspec.Struct, frozen=True):
    """An entry of the list that PyTorch puts into its process_group:init node."""

    pg_name: str | int = ""
    pg_desc: str = ""
    ranks: tuple[int, ...] = ()
    pg_size: int = 0
    group_size: int = 0

    @property
    def size(self) -> int:
        return len(self.ranks) or self.pg_size or self.group_size


GROUPS = msgspec.json.Decoder(list[ChakraProcessGroup])


@dataclass(frozen=True, slots=True)
class KnownRanks:
    """The ranks of a run, as far as its files tell."""

    layout: Layout
    sizes: Mapping[str, int]
    families: Mapping[str, Group]
    stated: bool
    """Whether they say which ranks there are; else as few as can be are assumed."""

    def group(self, name: Value) -> Group:
        known = self.families.get(str(name))
        return group_named(name if isinstance(name, str) else "") if known is None else known

    def size(self, name: Value) -> int:
        return self.sizes.get(str(name)) or self.layout.size(self.group(name))

    def transfer_group(self, name: Value) -> Group:
        """Transfers of no group that has peers pass along the pipeline, or else between any two ranks."""
        group = self.group(name)
        if group in (Group.WORLD, Group.PP) or self.layout.size(group) == 1:
            return Group.PP if self.layout.pp > 1 else Group.WORLD
        return group

    def stages(self, ranks: int) -> int:
        """How many stages further *ranks* ranks further is."""
        per_stage = self.layout.gpus // self.layout.pp
        whole = abs(ranks) // per_stage or 1
        return whole if ranks > 0 else -whole


def known_ranks(
    traces: Sequence[Nodes], listed: Mapping[str, tuple[int, ...]], files: Sequence[int | None]
) -> KnownRanks:
    """From the ranks of the *files* (of several), the groups *listed* beside them, and those in traces."""
    groups = {name: ChakraProcessGroup(name, ranks=ranks) for name, ranks in listed.items()}
    for nodes in traces:
        groups |= _process_groups(nodes)
    spans = [_transfer_ranks(nodes) for nodes in traces]
    numbers = {rank for group in groups.values() for rank in group.ranks if 0 <= rank < MOST_RANK}
    numbers |= {rank for rank in files if rank is not None} if len(files) > 1 else set()
    stated = bool(groups) or len(files) > 1
    numbers |= {rank for highest, _ in spans for rank in (highest,) if rank >= 0}
    sizes = {name: min(group.size, MOST_RANK) for name, group in groups.items()}
    world = max([max(numbers, default=0) + 1, *sizes.values()])
    if world == 1 and any(bool(np.isin(nodes.types, TRANSFERS).any()) for nodes in traces):
        world = 2
    families = {name: group_named(group.pg_desc, name) for name, group in groups.items()}
    families |= _by_stride(groups, families, world)
    steps = [step for _, step in spans if step] if len(files) > 1 else []
    layout = _layout(families, sizes, world, min(steps, default=0))
    return KnownRanks(layout, sizes, families, stated)


def _transfer_ranks(nodes: Nodes) -> tuple[int, int]:
    """The highest rank that messages name (-1: none), and the shortest way they go (0: none)."""
    highest, ways = -1, []
    columns = [nodes.attributes.get(name) for name in ("comm_src", "comm_dst")]
    for node in np.flatnonzero(np.isin(nodes.types, TRANSFERS)).tolist():
        ends = [
            end
            for column in columns
            if column is not None and type(end := column.value(node)) is int and 0 <= end < MOST_RANK
        ]
        highest = max([highest, *ends])
        if len(set(ends)) == 2:
            ways.append(abs(ends[1] - ends[0]))
    return highest, min(ways, default=0)


def _by_stride(groups: Mapping[str, ChakraProcessGroup], families: Mapping[str, Group], world: int) -> dict[str, Group]:
    """Kinds of groups that only list their ranks: neighbours tensor parallel, their like data parallel."""
    unnamed = {name: group.ranks for name, group in groups.items() if families[name] is Group.WORLD}
    spaced = {name: span for name, span in strides(unnamed).items() if span[1] < world}
    tp = max((size for step, size in spaced.values() if step == 1), default=1)
    kinds = {1: Group.TP, tp: Group.DP} if tp > 1 else {1: Group.DP}
    return {name: kinds.get(step, Group.PP) for name, (step, _) in spaced.items()}


def _layout(families: Mapping[str, Group], listed: Mapping[str, int], world: int, per_stage: int) -> Layout:
    """Degrees from the groups that the traces list; a pipeline also from how far messages go."""
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
    """PyTorch's groups by name, from its metadata nodes: a list in JSON, quoted as a list of one."""
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


def joined_workload(found: Mapping[str, Workload], ranks: Sequence[int | None]) -> Workload:
    """The traces of *ranks*, by path; of each stage the rank that computes longest stands for all."""
    paths = list(found)
    if len(paths) == 1:
        return found[paths[0]]
    first = found[paths[0]]
    layout = first.layout
    per_stage = layout.gpus // layout.pp
    chosen: dict[int, str] = {}
    shortest: dict[int, float] = {}
    spent: dict[str, float] = {path: _spent_s(workload) for path, workload in found.items()}
    structures: dict[int, list[tuple[str, Work | None]]] = {}
    for path, rank in zip(paths, ranks, strict=True):
        stage = (rank or 0) // per_stage
        best, structure = chosen.setdefault(stage, path), _structure(found[path])
        if structures.setdefault(stage, structure) != structure:
            raise FormatError(
                f"runs other ops than {best}, and neither is a stage of its own; expected ranks that do the "
                "same, or the stages of a pipeline that send to each other",
                path,
            )
        shortest[stage] = min(shortest.get(stage, spent[path]), spent[path])
        if spent[path] > spent[best]:
            chosen[stage] = path
    if missing := sorted(set(range(layout.pp)) - chosen.keys()):
        raise FormatError(
            f"no file is of stage {missing[0]} of {layout.pp}; name all files of the run, or their folder", paths[0]
        )
    warnings = dict.fromkeys(text for workload in found.values() for text in workload.warnings)
    if len(paths) < layout.gpus:
        warnings[f"{len(paths)} of {layout.gpus} ranks' traces were given: the others are taken to do the same"] = None
    for stage, path in sorted(chosen.items()):
        if shortest[stage] < (1 - NOISE) * spent[path]:
            warnings[f"ranks of one stage compute for different times: {path}, the longest, stands for all"] = None
    if layout.pp > 1:
        warnings["stages wait for the time of a message, not for its sender: the step may take longer"] = None
    return replace(
        first,
        stages=_shared([found[chosen[stage]].stages[0] for stage in range(layout.pp)]),
        name=first.name.rsplit(".", 1)[0],
        warnings=tuple(warnings),
    )


def _layers(workload: Workload) -> tuple[Layer, ...]:
    stage = workload.stages[0]
    return (*stage.prologue, *stage.body_layers())


def _structure(workload: Workload) -> list[tuple[str, Work | None]]:
    """What a rank runs, whatever time its computation takes."""
    return [
        (layer.name, None if isinstance(op.work, Recorded) else op.work)
        for layer in _layers(workload)
        for op in layer.forward
    ]


def _spent_s(workload: Workload) -> float:
    works = (op.work for layer in _layers(workload) for op in layer.forward)
    return sum(work.duration_s for work in works if isinstance(work, Recorded))


def _shared(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Equal stages as one object; one alone where all are equal."""
    known: dict[Stage, Stage] = {}
    shared = tuple(known.setdefault(stage, stage) for stage in stages)
    return shared[:1] if len(known) == 1 else shared


IDLE_TYPES = (NodeType.INVALID, NodeType.METADATA)
COMM_TYPES = (NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)
IDLE, COMPUTES, COMMUNICATES = 0, 1, 2
# Kept with the layer, as the trace has them.
NOTED = ("num_ops", "tensor_size", "pg_name", "comm_tag", "involved_dim")
USED = (*NOTED, "comm_type", "comm_size", "comm_src", "comm_dst")


def foreign_workload(trace: Trace, dependencies: IntArray, order: IntArray, path: str, known: KnownRanks) -> Workload:
    """Nodes as layers of one micro-batch. Host ops are left out where the trace has device ops."""
    nodes = trace.nodes
    warnings: list[str] = []
    kept = _kept(nodes, warnings)
    if not kept.any():
        raise FormatError("has no nodes that compute or communicate; expected a Chakra execution trace", path)
    reader = _Reader(nodes, known, path)
    layers = reader.layers(order[kept[order]], _waits(nodes, dependencies, order, kept))
    if not known.stated and bool(np.isin(nodes.types[kept], COMM_TYPES).any()):
        count = "one rank is" if known.layout.gpus == 1 else f"{known.layout.gpus} ranks are"
        warnings.append(f"the trace does not say which ranks communicate; {count} assumed, and --gpus N states others")
    notes = [("chakra.nodes", str(len(nodes)))]
    if trace.version:
        notes.append(("chakra.version", trace.version))
    if isinstance(schema := trace.metadata.get("schema"), str):
        notes.append(("chakra.schema", schema))
    # A trace holds its rank's whole step: with other stages it shares no slots, only messages.
    piped = known.layout.pp > 1
    return Workload(
        stages=(Stage(body=(), prologue=layers) if piped else Stage(body=(Block(layers),)),),
        layout=known.layout,
        boundary_bytes=0 if piped else None,
        name=re.split(r"[\\/]", path)[-1].rsplit(".", 1)[0],
        source="chakra",
        notes=tuple(notes),
        warnings=tuple(warnings),
        shares=True,
    )


def _kept(nodes: Nodes, warnings: list[str]) -> BoolArray:
    """Nodes that do work on the device, or on the host where the trace has nothing else."""
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
        warnings.append(f"{left_out} host ops were left out: they run beside the device's")
    works &= ~on_host
    return works


@dataclass(slots=True)
class _Waits:
    """Which communication the next op waits for (blocking), and which nodes wait for others by name."""

    blocking: bytearray
    after: dict[int, tuple[int, ...]]


def _waits(nodes: Nodes, dependencies: IntArray, order: IntArray, kept: BoolArray) -> _Waits:
    """Computation runs in order; so what one computation has waited for, no later one need wait for."""
    kinds = np.where(kept, np.where(np.isin(nodes.types, COMM_TYPES), COMMUNICATES, COMPUTES), IDLE)
    waits = _Waits(bytearray(len(nodes)), {})
    settled = bytearray(len(nodes))
    # Communication that stands behind a node which is left out.
    behind: dict[int, set[int]] = {}
    runs = order[kept[order]]
    before = np.full(len(nodes), NONE)
    before[runs[1:]] = runs[:-1]
    # Waiting for computation only needs no look: that runs in order.
    looked_at = np.zeros(len(nodes), dtype=bool)
    owner_of = owners(nodes)
    looked_at[owner_of[kinds[dependencies] != COMPUTES]] = True
    # Computation that waits for the communication right before it, and no other, is settled at once.
    simple = (kinds[owner_of] == COMPUTES) & (kinds[dependencies] == COMMUNICATES)
    simple &= (dependencies == before[owner_of]) & (np.bincount(owner_of, minlength=len(nodes))[owner_of] == 1)
    looked_at[owner_of[simple]] = False
    for flags in (waits.blocking, settled):
        np.frombuffer(flags, dtype=np.uint8)[dependencies[simple]] = 1
    # Memory views: lists of numbers would take several times the file.
    ends, named, kind_of = nodes.dependency_ends.data, dependencies.data, kinds.astype(np.uint8).data
    for index in order[looked_at[order]].data:
        found: set[int] = set()
        for place in range(ends[index - 1] if index else 0, ends[index]):
            wanted = named[place]
            if kind_of[wanted] == COMMUNICATES:
                if not settled[wanted]:
                    found.add(wanted)
            elif wanted in behind:
                found |= {each for each in behind[wanted] if not settled[each]}
        if not found:
            continue
        if kind_of[index] == IDLE:
            behind[index] = found
            continue
        if kind_of[index] == COMPUTES:
            for each in found:
                settled[each] = 1
            last = int(before[index])
            if last in found:
                waits.blocking[last] = 1
                found.discard(last)
        if found:
            waits.after[index] = tuple(sorted(found))
    return waits


class _Reader:
    """Turns nodes into layers; equal nodes become one object."""

    def __init__(self, nodes: Nodes, known: KnownRanks, path: str) -> None:
        self._nodes = nodes
        self._known = known
        self._path = path
        self._noted = [(name, nodes.attributes[name]) for name in NOTED if name in nodes.attributes]

    def layers(self, order: IntArray, waits: _Waits) -> tuple[Layer, ...]:
        """One layer for each node of *order*; those that wait, or are waited for, by name are their own."""
        nodes = self._nodes
        blocking = np.frombuffer(waits.blocking, dtype=np.uint8)
        columns: list[npt.NDArray[Any]] = [nodes.name_of, nodes.types, nodes.durations_us, blocking]
        columns += [nodes.attributes[name].of for name in USED if name in nodes.attributes]
        hashes = row_hashes([column[order] for column in columns])
        _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        table = [self._layer(index, bool(blocking[index])) for index in order[firsts].tolist()]
        layers = [table[index] for index in inverse.tolist()]
        if waits.after:
            awaited = {each for found in waits.after.values() for each in found}
            places = {index: place for place, index in enumerate(order.tolist())}
            for index in awaited | waits.after.keys():
                place = places[index]
                (op,) = layers[place].forward
                name = self._called(index) if index in awaited else op.name
                after = tuple(self._called(each) for each in waits.after.get(index, ()))
                layers[place] = replace(layers[place], forward=(replace(op, name=name, after=after),))
        return tuple(layers)

    def _called(self, node: int) -> str:
        return f"node {self._nodes.ids[node]}"

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
            # Chakra counts what a rank brings (its converter: the input tensors; ASTRA-sim: Ring.cc).
            size_bytes *= self._known.size(name)
        return Collective(kind, size_bytes, self._known.group(name))

    def _transfer(self, node: int) -> Transfer:
        direction = Direction.SEND if int(self._nodes.types[node]) == NodeType.COMM_SEND else Direction.RECEIVE
        source, destination = self._value("comm_src", node), self._value("comm_dst", node)
        offset = 1 if direction is Direction.SEND else -1
        if type(source) is int and type(destination) is int and source != destination:
            offset *= destination - source
        group = self._known.transfer_group(self._value("pg_name", node))
        if group is Group.PP:
            offset = self._known.stages(offset)
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
