"""The costs of ops that are more than their work, and the prices of all costs."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import field

from stepcast.ir.dataclass import dataclass
from stepcast.ir.group import Group
from stepcast.ir.work import COMMUNICATING, COMPUTING, Collective, Communication, HostCopy, HostUpdate, Work
from stepcast.simulation.segments import Cost

Seconds = Callable[[Work], float]
IssueSeconds = Callable[[Work, bool], float]
"""(work, whether in a backward) -> seconds the host needs to issue it."""


@dataclass(frozen=True, slots=True)
class IssueCost:
    """The cost of the host for issuing the kernels of a work."""

    work: Work
    backward: bool
    kernels: int


@dataclass(frozen=True, slots=True)
class LeadCost:
    """A negative cost: how long before the step the host began to issue it."""


@dataclass(frozen=True, slots=True)
class DelayedCost:
    """The cost of a communication whose result may be used only after a delay."""

    work: Communication
    delay_s: float


@dataclass(frozen=True, slots=True)
class SlowedCost:
    """The cost of a computation on a stage that is *factor* times as slow as it should be."""

    work: Work
    factor: float


@dataclass(frozen=True, eq=False)
class ContentionCost:
    """The time that the computing of a piece loses to collectives that overlap it.

    A collective of share k takes k seconds of computing for each second that both run: as long as it lasts, or as long
    as the computing between it and the first op that waits for it. One that nothing in the piece waits for outlasts the
    piece and overlaps the next one, which is taken to be equal. Collectives of one lane follow one another, so together
    they overlap at most all that the piece computes.
    """

    windows: tuple[tuple[Collective, tuple[int, ...]], ...]
    """Each collective with the indices of the computing that may overlap it; an empty tuple means all."""
    computing: tuple[Work, ...]
    factor: float


@dataclass(frozen=True)
class Prices:
    """The seconds of every cost."""

    seconds: Seconds
    issue_s: IssueSeconds | None = None
    takes: Seconds | None = None  # seconds of computing that a work takes for each second of overlap
    slow_groups: Mapping[Group, float] = field(default_factory=dict)
    ahead: bool = False  # hosts go on to the next step without waiting for the end of one
    _known: dict[int, tuple[Work, float]] = field(default_factory=dict, init=False, compare=False)
    """Seconds of computing by the identity of works: each is part of many contention costs."""

    def __call__(self, cost: Cost) -> float:
        kind = type(cost)
        if kind in COMPUTING or kind is HostUpdate:
            return self._work_s(cost)  # type: ignore[arg-type]
        if kind in COMMUNICATING:
            return self._communication_s(cost)  # type: ignore[arg-type]
        match cost:
            case float() | int():
                return cost
            case IssueCost(work, backward, kernels):
                assert self.issue_s is not None
                return self.issue_s(work, backward) * kernels
            case LeadCost():
                return 0.0
            case DelayedCost(work, delay_s):
                return self._communication_s(work) + delay_s
            case SlowedCost(work, factor):
                return self.seconds(work) * factor
            case ContentionCost():
                return self._contention_s(cost)
        raise TypeError(f"{kind.__name__} is no cost")

    def _contention_s(self, cost: ContentionCost) -> float:
        assert self.takes is not None
        known = self._known
        for work in cost.computing:
            if id(work) not in known:
                self._work_s(work)
        seconds = [known[id(work)][1] for work in cost.computing]
        computing_s = sum(seconds) * cost.factor
        overlap_s: dict[Group, float] = defaultdict(float)
        taken_s: dict[Group, float] = defaultdict(float)
        for collective, window in cost.windows:
            window_s = sum([seconds[index] for index in window]) * cost.factor if window else computing_s
            both_s = min(self._communication_s(collective), window_s)
            overlap_s[collective.group] += both_s
            taken_s[collective.group] += self.takes(collective) * both_s
        return sum(
            taken * min(1.0, computing_s / overlap_s[group]) for group, taken in taken_s.items() if overlap_s[group] > 0
        )

    def _work_s(self, work: Work) -> float:
        known = self._known.get(id(work))
        if known is None:
            known = self._known[id(work)] = work, self.seconds(work)
        return known[1]

    def _communication_s(self, work: Communication) -> float:
        slowed = 1.0 if isinstance(work, HostCopy) else self.slow_groups.get(work.group, 1.0)
        return self.seconds(work) * slowed
