"""What slots issue of layers: their ops in order, how these look, and what they cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

from stepcast.ir.group import Channel
from stepcast.ir.identity import ByIdentity
from stepcast.ir.work import COMMUNICATING, Collective
from stepcast.ir.workload import Layer, Op, Phase, Role
from stepcast.simulation.costs import Delayed, Slowed
from stepcast.simulation.lanes import HANDED_ON
from stepcast.simulation.outline import Look
from stepcast.simulation.pieces import Cost
from stepcast.simulation.schedule import SlotAction


class Issued(NamedTuple):
    """An op with the layer it belongs to."""

    layer: Layer
    op: Op
    backward: bool = False


def phase_ops(layers: Sequence[Layer], kind: SlotAction) -> list[Issued]:
    """The ops of one slot in the order in which they are issued."""
    return [issued for part in _in_order(layers, kind) for issued in part.issued]


def once_ops(layers: Iterable[Layer], phases: Sequence[Phase]) -> list[Issued]:
    """The ops of layers that run once per step, all their *phases* together."""
    return [Issued(layer, op) for layer in layers for phase in phases for op in layer.ops(phase)]


@dataclass(frozen=True, eq=False)
class Looks:
    """How some ops look; one object for those that look the same."""

    each: tuple[Look, ...]

    @cached_property
    def groups(self) -> frozenset[Channel]:
        """Those that communicate."""
        return frozenset([look.group for look in self.each if look.group is not None])

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset([look.name for look in self.each])

    @cached_property
    def awaited(self) -> frozenset[str]:
        """What ops wait for that was issued before all of these."""
        found: set[str] = set()
        issued: set[str] = set()
        for look in self.each:
            found.update([name for name in look.after if name not in issued])
            issued.add(look.name)
        return frozenset(found)


class _Part(NamedTuple):
    """What slots of one kind issue of a layer, how that looks, and what its ops cost at full speed."""

    issued: list[Issued]
    looks: Looks
    costs: list[Cost]


def _in_order(layers: Sequence[Layer], kind: SlotAction) -> list[_Part]:
    """Layer by layer: many blocks have most of their layers in common."""
    ordered = layers if kind is SlotAction.FORWARD else reversed(layers)
    return [_ISSUED.of(layer, _issued_by, kind) for layer in ordered]


_ISSUED: ByIdentity[_Part] = ByIdentity(32768)


def _issued_by(layer: Layer, kind: SlotAction) -> _Part:
    backward = kind is not SlotAction.FORWARD
    issued = [Issued(layer, op, backward) for phase in HANDED_ON[kind] for op in layer.ops(phase)]
    return _Part(issued, looks_of(issued), [own_cost(each, 1.0) for each in issued])


@dataclass(frozen=True, eq=False)
class IssueRow:
    """What slots of one kind issue of layers that follow one another."""

    issued: list[Issued]
    looks: tuple[Looks, ...]
    costs: list[Cost]

    @cached_property
    def groups(self) -> frozenset[Channel]:
        """Those that communicate."""
        return frozenset().union(*[looks.groups for looks in self.looks])

    @cached_property
    def awaited(self) -> frozenset[str]:
        """What ops wait for that was issued before all of these."""
        found: set[str] = set()
        issued: set[str] = set()
        for looks in self.looks:
            if looks.awaited:
                found |= looks.awaited - issued
            issued |= looks.names
        return frozenset(found)


def row_of(layers: Sequence[Layer], kind: SlotAction) -> IssueRow:
    return _ROWS.of(layers, _row, kind)


_ROWS: ByIdentity[IssueRow] = ByIdentity(8192)


def _row(layers: Sequence[Layer], kind: SlotAction) -> IssueRow:
    parts = _in_order(layers, kind)
    issued = list(chain.from_iterable([part.issued for part in parts]))
    costs = list(chain.from_iterable([part.costs for part in parts]))
    return IssueRow(issued, tuple([part.looks for part in parts]), costs)


def own_cost(issued: Issued, factor: float) -> Cost:
    layer, op, _ = issued
    work = op.work
    if type(work) in COMMUNICATING:
        return Delayed(work, layer.process_s) if layer.process_s else work  # type: ignore[arg-type]
    return work if factor == 1.0 else Slowed(work, factor)


def looks_of(issued: Sequence[Issued]) -> Looks:
    return _looks(tuple([_look(layer, op) for layer, op, _ in issued]))


def _look(layer: Layer, op: Op) -> tuple[Any, ...]:
    """What a Look is made of."""
    work = op.work
    moves = type(work) in COMMUNICATING
    return (
        layer.name,
        op.name,
        work.group if moves else None,  # type: ignore[union-attr]
        not moves or work.size_bytes > 0,  # type: ignore[union-attr]
        type(work) is Collective,
        op.after,
        op.blocking,
        op.early,
        op.host_reads,
        layer.captured,
        layer.role is Role.OPTIMIZER,
    )


@lru_cache(maxsize=8192)
def _looks(each: tuple[tuple[Any, ...], ...]) -> Looks:
    return Looks(tuple([Look(*one) for one in each]))
