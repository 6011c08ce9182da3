"""Predictions in the order of their bounds, until no bound that is left can beat those that are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster
from stepcast.ir.framework import Framework
from stepcast.ir.strategy import Strategy
from stepcast.searching.bound import Bounding
from stepcast.searching.objective import OBJECTIVES, Candidate, Floats
from stepcast.searching.space import Ints, Space
from stepcast.units import format_seconds


@dataclass(frozen=True, slots=True)
class Part:
    """Candidates that one setting of the software runs; *rows* are their numbers among all."""

    space: Space
    framework: Framework
    rows: Ints


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate that was simulated."""

    at: int  # its number among all
    strategy: Strategy
    framework: Framework
    step_s: float
    memory_bytes: float
    score: float  # what the search makes least
    bound_s: float  # which the step cannot be below

    @property
    def gpus(self) -> int:
        return self.strategy.layout.gpus

    @property
    def rank(self) -> tuple[float, float, int]:
        return self.score, self.step_s, self.at


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the candidates."""

    considered: int
    illegal: int
    too_large: int  # by the bound of their memory, or by the count
    pruned: int  # their bound is no better than what is kept
    simulated: int
    complete: bool = True

    def facts(self) -> dict[str, int | bool]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Missed:
    """The fastest that lacks memory might take so long, at best."""

    strategy: Strategy
    bound_s: float
    memory_bytes: float  # at least


@dataclass(frozen=True)
class Result:
    """The best candidates first, and all that were simulated."""

    best: tuple[Found, ...]
    simulated: tuple[Found, ...]
    counts: Counts
    missed: Missed | None = None  # with a lower bound than the best has
    smallest_bytes: float | None = None  # what the smallest legal candidate needs, at least

    def __repr__(self) -> str:
        best = f"best {format_seconds(self.best[0].step_s)} a step" if self.best else "nothing fits"
        return f"Result({self.counts.considered:,} candidates, {self.counts.simulated:,} simulated, {best})"

    def _repr_html_(self) -> str:
        from stepcast.pages.notebook import found_html

        best, front = (
            [(each.strategy, each.step_s, each.memory_bytes) for each in some]
            for some in (self.best, self.front)
        )
        return found_html(self.counts.facts(), best, front)

    @property
    def front(self) -> tuple[Found, ...]:
        """Of those simulated, each that no other beats in step, memory and GPUs; fastest first."""
        kept: list[Found] = []
        for each in sorted(self.simulated, key=lambda one: (one.step_s, one.memory_bytes, one.gpus, one.at)):
            if not any(one.memory_bytes <= each.memory_bytes and one.gpus <= each.gpus for one in kept):
                kept.append(each)
        return tuple(kept)


Watch = Callable[[Counts, Found | None], None]
"""Told how far the search is, with the best so far; a KeyboardInterrupt from it ends the search."""


def search_parts(
    parts: Sequence[Part],
    cluster: Cluster,
    top: int = 10,
    objective: str = "step",
    most_bytes: float | None = None,
    watch: Watch | None = None,
) -> Result:
    """The *top* best candidates of *parts* that fit, exactly as if all had been simulated."""
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is not known; expected one of {', '.join(OBJECTIVES)}")
    capacity = cluster.gpu.memory_bytes if most_bytes is None else min(most_bytes, cluster.gpu.memory_bytes)
    return _Searching(parts, cluster, capacity, top, objective, watch).all()


class _Searching:
    def __init__(
        self,
        parts: Sequence[Part],
        cluster: Cluster,
        capacity: float,
        top: int,
        objective: str,
        watch: Watch | None,
    ) -> None:
        self.parts, self.cluster, self.capacity, self.top, self.watch = parts, cluster, capacity, top, watch
        self.objective, self.name = OBJECTIVES[objective], objective
        self.boundings = [Bounding(part.space, cluster, part.framework) for part in parts]
        self.limits = [bounding.all(capacity) for bounding in self.boundings]
        self.considered = sum(len(part.space) for part in parts)
        self.legal = sum(int(limits.legal.sum()) for limits in self.limits)
        self.simulated: list[Found] = []
        self.kept: Sequence[Found] = ()
        self.too_large = self.pruned = self.left = 0

    def all(self) -> Result:
        least, part, row = self._ordered()
        self.left, complete = len(least), True
        self.too_large = self.legal - len(least)
        try:
            for bound, which, at in zip(least.tolist(), part.tolist(), row.tolist(), strict=True):
                if bound > self._worst():
                    break
                self.left -= 1
                self._try(which, at)
                if self.watch:
                    self.watch(self._counts(False), self.kept[0] if self.kept else None)
        except KeyboardInterrupt:
            complete = False
        return Result(
            tuple(self.kept), tuple(self.simulated), self._counts(complete), self._missed(), self._smallest()
        )

    def _ordered(self) -> tuple[Floats, Ints, Ints]:
        """The bounds of what may fit, least first, each with its part and its row there."""
        found: list[tuple[Floats, Ints, Ints, Ints]] = []
        for number, (part, limits) in enumerate(zip(self.parts, self.limits, strict=True)):
            least = self.objective.least(limits, part.space.columns["gpus"])
            rows = np.flatnonzero(np.isfinite(least))
            found.append((least[rows], np.full(len(rows), number), rows, part.rows[rows]))
        least, which, rows, numbers = (np.concatenate(each) for each in zip(*found, strict=True))
        order = np.lexsort((numbers, least))
        return least[order], which[order], rows[order]

    def _try(self, which: int, at: int) -> None:
        part, bound_s = self.parts[which], float(self.limits[which].time_s[at])
        strategy = part.space.strategy(at)
        stages = memory(part.space.model, strategy, self.cluster.gpu, part.framework)
        largest = max(stage.total for stage in stages)
        if largest > self.capacity:
            self.too_large += 1
            return
        if self.name == "memory" and largest > self._worst():
            self.pruned += 1  # known without a simulation
            return
        prediction = predict(part.space.model, self.cluster, strategy, part.framework)
        score = self.objective.score(Candidate(prediction, largest, strategy.layout.gpus, self.cluster))
        number = int(part.rows[at])
        found = Found(number, strategy, part.framework, prediction.step_s, largest, score, bound_s)
        self.simulated.append(found)
        self.kept = nsmallest(self.top, (*self.kept, found), key=lambda each: each.rank)

    def _worst(self) -> float:
        return self.kept[-1].score if len(self.kept) == self.top else np.inf

    def _counts(self, complete: bool) -> Counts:
        return Counts(
            self.considered,
            self.considered - self.legal,
            self.too_large,
            self.pruned + self.left,
            len(self.simulated),
            complete,
        )

    def _missed(self) -> Missed | None:
        """What memory keeps out that might be faster than the best: bound beside bound."""
        if not self.kept:
            return None
        fastest = self.kept[0].bound_s
        found: Missed | None = None
        for part, bounding, limits in zip(self.parts, self.boundings, self.limits, strict=True):
            large = np.flatnonzero(limits.legal & ~np.isfinite(limits.time_s))
            if not len(large):
                continue
            times = bounding.time(large)
            at = int(large[np.argmin(times)])
            if times.min() < min(fastest, found.bound_s if found else np.inf):
                found = Missed(part.space.strategy(at), float(times.min()), float(limits.memory_bytes[at]))
        return found

    def _smallest(self) -> float | None:
        least = [float(limits.memory_bytes.min(initial=np.inf)) for limits in self.limits]
        return min(least) if self.legal else None
