"""Parameters that stages of a captured program share: each has a copy, and their gradients are summed."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from stepcast.ir.captured import Captured, LayerPart
from stepcast.ir.group import Group
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.ir.workload import Layer, Op, Role


def held_parts(captured: Captured, begins: Sequence[int]) -> list[LayerPart]:
    """The parts of *captured*; of a stage that shares parameters with one before, the first layer that reads
    them has a copy.
    """
    found = list(captured.parts)
    for tie in captured.ties:
        first = {bisect_right(begins, part): part for part in reversed(tie.parts)}
        for stage, part in first.items():
            if stage != bisect_right(begins, tie.parts[0]):
                own = found[part]
                found[part] = replace(
                    own,
                    parameter_bytes=own.parameter_bytes + tie.size_bytes,
                    gradient_bytes=own.gradient_bytes + tie.size_bytes,
                )
    return found


def summed(captured: Captured, begins: Sequence[int], ways: int) -> list[tuple[Layer, ...]]:
    """For each stage the sums over those that share parameters, each of which is split *ways*.

    The first and the last have a group of their own, as Megatron-LM's embedding group; others are summed
    over all stages.
    """
    last = len(begins)
    sizes: dict[Group, int] = {}
    for tie in captured.ties:
        stages = {bisect_right(begins, part) for part in tie.parts}
        if len(stages) > 1:
            group = Group.EMBEDDING if stages == {0, last} else Group.PP
            sizes[group] = sizes.get(group, 0) + tie.size_bytes // ways
    found: list[tuple[Layer, ...]] = []
    for stage in range(last + 1):
        taken = [group for group in sizes if group is Group.PP or stage in (0, last)]
        ops = tuple(
            Op(f"tied {group} all-reduce", Collective(CollectiveKind.ALL_REDUCE, sizes[group], group))
            for group in taken
        )
        found.append((Layer(str(Role.GRADIENTS), ops, role=Role.GRADIENTS),) if ops else ())
    return found
