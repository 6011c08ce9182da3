"""The seconds of lists of ops: of their works, of the host that issues them, and of what computing loses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.ir.layout import Channel, Group
from stepcast.ir.types import ByIdentity, dataclass
from stepcast.ir.work import CollectiveKind, Work
from stepcast.simulation.lowering import OpList, Seconds
from stepcast.simulation.segments import Cost

IssueSeconds = Callable[[Work, bool], float]
"""(work, whether in a backward) -> seconds the host needs to issue it."""
TakenShare = Callable[[CollectiveKind, Group], float]
"""Seconds of computing that a collective of a group takes for each second of overlap."""
TableSeconds = Callable[[Sequence[OpList]], FloatArray]
"""The seconds of each work of the lists of a plan."""
_ISSUES: ByIdentity[FloatArray] = ByIdentity(2**15)
NO_GROUPS: frozenset[Channel] = frozenset()


@dataclass(frozen=True)
class Prices:
    """The seconds of every work."""

    seconds: Seconds
    issue_s: IssueSeconds | None = None
    takes: TakenShare | None = None  # by computing that overlaps them
    slow_groups: Mapping[Group, float] = field(default_factory=dict)
    ahead: bool = False  # hosts go on to the next step without waiting for the end of one
    table: TableSeconds | None = None  # seconds of many works, where that is faster than one by one

    def __reduce__(self) -> tuple[type["Prices"], tuple[object, ...]]:
        """Return the arguments of a copy without the table, which cannot be pickled."""
        return Prices, (self.seconds, self.issue_s, self.takes, self.slow_groups, self.ahead)

    def message_s(self, message: Cost) -> float:
        """Return the seconds of one message between stages."""
        if isinstance(message, float | int):
            return message
        return self.seconds(message) * self.slow_groups.get(Group.PP, 1.0)  # type: ignore[arg-type]

    def works_s(self, lists: Sequence[OpList], alone: frozenset[Channel] = NO_GROUPS) -> FloatArray:
        """Return the seconds of each work of *lists* by itself; 0 for communication of no bytes or of groups that are
        *alone*.
        """
        if self.table:
            return self.table(lists)
        every = [pair for ops in lists for pair in zip(ops.works, ops.sequence.ops, strict=True)]
        seconds = [self.seconds(work) if op.runs and op.group not in alone else 0.0 for work, op in every]
        return np.array(seconds, np.float64)

    def issues_s(self, lists: Sequence[OpList]) -> list[FloatArray]:
        """Return the seconds of the host for issuing each op."""
        issue_s = self.issue_s
        assert issue_s is not None

        def price(layer: OpList) -> FloatArray:
            seconds = [issue_s(entry.op.work, entry.backward) * entry.op.kernels for entry in layer.issued]
            return np.array(seconds, np.float64)

        layers = [layer for ops in lists for layer in ops.lists or (ops,)]
        return [_ISSUES.get((layer, issue_s), partial(price, layer)) for layer in layers]

    def spend_s(self, ops: OpList, works_s: FloatArray, factor: float) -> FloatArray:
        """Return how long each of *ops* takes, whose works take *works_s* by themselves, on a stage that computes
        *factor* times slower; with the delays of communication.
        """
        if factor != 1.0:
            works_s = np.where(ops.sequence.is_computing, works_s * factor, works_s)
        if self.slow_groups:
            factors = [self.slow_groups.get(op.group, 1.0) for op in ops.sequence.ops]  # type: ignore[arg-type]
            works_s = works_s * np.array(factors)
        return works_s if ops.delays_s is None else works_s + ops.delays_s
