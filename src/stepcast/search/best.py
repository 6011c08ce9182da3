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
from stepcast.search.bound import Bounds, bounds
from stepcast.search.space import Space


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate that was simulated."""

    at: int  # its row in the space
    strategy: Strategy
    step_s: float
    memory_bytes: float
    bound_s: float


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


@dataclass(frozen=True)
class Result:
    """The best candidates first, and all that were simulated."""

    best: tuple[Found, ...]
    simulated: tuple[Found, ...]
    counts: Counts


Watch = Callable[[Counts, Found | None], None]
"""Told how far the search is, with the best so far."""


def search(
    space: Space,
    cluster: Cluster,
    framework: Framework,
    top: int = 10,
    most_bytes: float | None = None,
    watch: Watch | None = None,
) -> Result:
    """The *top* fastest candidates of *space* that fit, exactly as if all had been simulated."""
    capacity = cluster.gpu.memory_bytes if most_bytes is None else min(most_bytes, cluster.gpu.memory_bytes)
    found = bounds(space, cluster, framework, capacity)
    return _Searching(space, cluster, framework, capacity, top, watch).all(found)


class _Searching:
    def __init__(
        self,
        space: Space,
        cluster: Cluster,
        framework: Framework,
        capacity: float,
        top: int,
        watch: Watch | None,
    ) -> None:
        self.space, self.cluster, self.framework = space, cluster, framework
        self.capacity, self.top, self.watch = capacity, top, watch
        self.simulated: list[Found] = []
        self.too_large = 0

    def all(self, limits: Bounds) -> Result:
        rows = np.flatnonzero(np.isfinite(limits.time_s))
        order = rows[np.lexsort((rows, limits.time_s[rows]))]
        self.too_large = int(limits.legal.sum()) - len(rows)
        left, complete = len(order), True
        try:
            for at in order:
                if limits.time_s[at] >= self._worst_kept():
                    break
                left -= 1
                self._try(int(at), float(limits.time_s[at]))
                if self.watch:
                    self.watch(self._counts(limits, left, False), self._kept()[0] if self.simulated else None)
        except KeyboardInterrupt:
            complete = False
        return Result(tuple(self._kept()), tuple(self.simulated), self._counts(limits, left, complete))

    def _try(self, at: int, bound_s: float) -> None:
        strategy = self.space.strategy(at)
        stages = memory(self.space.model, strategy, self.cluster.gpu, self.framework)
        largest = max(stage.total for stage in stages)
        if largest > self.capacity:
            self.too_large += 1
            return
        prediction = predict(self.space.model, self.cluster, strategy, self.framework)
        self.simulated.append(Found(at, strategy, prediction.step_s, largest, bound_s))
        self._kept_now: Sequence[Found] | None = None

    def _kept(self) -> Sequence[Found]:
        if getattr(self, "_kept_now", None) is None:
            self._kept_now = nsmallest(self.top, self.simulated, key=lambda each: (each.step_s, each.at))
        return self._kept_now or ()

    def _worst_kept(self) -> float:
        kept = self._kept()
        return kept[-1].step_s if len(kept) == self.top else np.inf

    def _counts(self, limits: Bounds, left: int, complete: bool) -> Counts:
        considered, legal = len(self.space), int(limits.legal.sum())
        return Counts(considered, considered - legal, self.too_large, left, len(self.simulated), complete)
