"""What traces and the list beside them say of the ranks: how many, and which communicate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from stepcast.inputs.chakra.nodes import Nodes, NodeType
from stepcast.inputs.chakra.protobuf import Value
from stepcast.inputs.chakra.rank_files import MOST_RANK, strides
from stepcast.inputs.kineto.process_groups import group_named
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout

TRANSFERS = (NodeType.COMM_SEND, NodeType.COMM_RECV)


class ProcessGroup(msgspec.Struct, frozen=True):
    """An entry of the list that PyTorch puts into its process_group:init node."""

    pg_name: str | int = ""
    pg_desc: str = ""
    ranks: tuple[int, ...] = ()
    pg_size: int = 0
    group_size: int = 0

    @property
    def size(self) -> int:
        return len(self.ranks) or self.pg_size or self.group_size


GROUPS = msgspec.json.Decoder(list[ProcessGroup])


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
    groups = {name: ProcessGroup(name, ranks=ranks) for name, ranks in listed.items()}
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


def _by_stride(
    groups: Mapping[str, ProcessGroup], families: Mapping[str, Group], world: int
) -> dict[str, Group]:
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


def _process_groups(nodes: Nodes) -> dict[str, ProcessGroup]:
    """PyTorch's groups by name, from its metadata nodes: a list in JSON, quoted as a list of one."""
    groups: dict[str, ProcessGroup] = {}
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
