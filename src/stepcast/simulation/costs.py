"""What the ops of pieces cost, as far as that is more than their work, and the prices of it all."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stepcast.ir.group import Group
from stepcast.ir.work import COMMUNICATING, COMPUTING, Collective, Communication, HostCopy, HostUpdate, Work
from stepcast.simulation.segments import Cost

Seconds = Callable[[Work], float]
IssueSeconds = Callable[[Work, bool], float]
"""(work, whether in a backward) -> seconds the host needs to issue it."""


@dataclass(frozen=True, slots=True)
class Issue:
    """The cost of the host for issuing the kernels of a work."""

    work: Work
    backward: bool
    kernels: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Less than nothing: how long before the step the host began to issue it."""


@dataclass(frozen=True, slots=True)
class Delayed:
    """The cost of a communication whose result may be used only after a while."""

    work: Communication
    delay_s: float


@dataclass(frozen=True, slots=True)
class Slowed:
    """The cost of a computation on a stage that is *factor* times as slow as it should be."""

    work: Work
    factor: float


@dataclass(frozen=True, eq=False)
class Beside:
    """What the computing of a piece loses to collectives that run beside it.

    A collective of share k takes k seconds of computing for each second that both run: as long as it lasts,
    or as long as that computes which stands between it and what waits for it. What nothing of the piece waits
    for outlasts it, and runs beside the next piece, which is taken to be like this one. Those of one lane
    follow one another, so that all of them run beside what the piece computes at most.
    """

    windows: tuple[tuple[Collective, tuple[int, ...]], ...]
    """Each collective with the places of the computing that may run beside it; none stand for all."""
    computing: tuple[Work, ...]
    factor: float


@dataclass(frozen=True)
class Prices:
    """Seconds of every cost that pieces are made of."""

    seconds: Seconds
    issue_s: IssueSeconds | None = None
    takes: Seconds | None = None
    """Seconds of computing that a work takes for each second beside it."""
    slow_groups: Mapping[Group, float] = field(default_factory=dict)
    ahead: bool = False
    """Whether hosts go on to the next step without waiting for the end of one."""
    _known: dict[int, tuple[Work, float]] = field(default_factory=dict, init=False, compare=False)
    """What computing takes, by the identity of works: each is named beside many collectives."""

    def __call__(self, cost: Cost) -> float:
        kind = type(cost)
        if kind in COMPUTING or kind is HostUpdate:
            return self._work_s(cost)  # type: ignore[arg-type]
        if kind in COMMUNICATING:
            return self._communication_s(cost)  # type: ignore[arg-type]
        match cost:
            case float() | int():
                return cost
            case Issue(work, backward, kernels):
                assert self.issue_s is not None
                return self.issue_s(work, backward) * kernels
            case Lead():
                return 0.0
            case Delayed(work, delay_s):
                return self._communication_s(work) + delay_s
            case Slowed(work, factor):
                return self.seconds(work) * factor
            case Beside():
                return self._lost_s(cost)
        raise TypeError(f"{kind.__name__} is no cost")

    def _lost_s(self, beside: Beside) -> float:
        assert self.takes is not None
        known = self._known
        for work in beside.computing:
            if id(work) not in known:
                self._work_s(work)
        each_s = [known[id(work)][1] for work in beside.computing]
        computing_s = sum(each_s) * beside.factor
        together_s: dict[Group, float] = defaultdict(float)
        taken_s: dict[Group, float] = defaultdict(float)
        for collective, window in beside.windows:
            window_s = sum([each_s[at] for at in window]) * beside.factor if window else computing_s
            side_by_side_s = min(self._communication_s(collective), window_s)
            together_s[collective.group] += side_by_side_s
            taken_s[collective.group] += self.takes(collective) * side_by_side_s
        return sum(
            taken * min(1.0, computing_s / together_s[group])
            for group, taken in taken_s.items()
            if together_s[group] > 0
        )

    def _work_s(self, work: Work) -> float:
        known = self._known.get(id(work))
        if known is None:
            known = self._known[id(work)] = work, self.seconds(work)
        return known[1]

    def _communication_s(self, work: Communication) -> float:
        slowed = 1.0 if isinstance(work, HostCopy) else self.slow_groups.get(work.group, 1.0)
        return self.seconds(work) * slowed
