"""What a search is asked and what it finds: frozen records."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from stepcast.forecast.options import DEFAULTS, Options
from stepcast.ir.arrays import IntArray
from stepcast.ir.framework import Framework
from stepcast.ir.strategy import Strategy
from stepcast.searching.space import Space
from stepcast.units import format_seconds


@dataclass(frozen=True, slots=True)
class SpacePart:
    """Candidates that one setting of the software runs; *rows* are their numbers among all."""

    space: Space
    framework: Framework
    rows: IntArray


@dataclass(frozen=True, slots=True)
class SimulatedCandidate:
    """A candidate that was simulated."""

    at: int  # its number among all
    strategy: Strategy
    framework: Framework
    step_s: float
    memory_bytes: float
    score: float  # what the search makes least
    bound_s: float  # which the step of its even split cannot be below
    options: Options = DEFAULTS
    kinds: tuple[str, ...] = ()  # the GPU of each stage, where there are two kinds

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
    unseen: int = 0  # of a search that ended early: they may be better than what is kept
    priced: int = 0  # kinds of layers, for the bounds
    out_of_time: bool = False

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

    best: tuple[SimulatedCandidate, ...]
    simulated: tuple[SimulatedCandidate, ...]
    counts: Counts
    missed: Missed | None = None  # with a lower bound than the best has
    smallest_bytes: float | None = None  # what the smallest legal candidate needs, at least
    roomier: SimulatedCandidate | None = None  # the best of those that would fit into 16 GiB more
    least_s: float | None = None  # of a search that ended early: no step that is left can be below
    deadline: float = math.inf  # of time.monotonic(): when to end what follows from this answer

    @property
    def is_late(self) -> bool:
        """True if the time for the search is over."""
        return time.monotonic() > self.deadline

    def __repr__(self) -> str:
        best = f"best {format_seconds(self.best[0].step_s)} a step" if self.best else self._nothing
        return f"Result({self.counts.considered:,} candidates, {self.counts.simulated:,} simulated, {best})"

    @property
    def _nothing(self) -> str:
        if self.counts.complete:
            return "nothing fits"
        return "nothing found: out of time" if self.counts.out_of_time else "nothing found: interrupted"

    def _repr_html_(self) -> str:
        from stepcast.views.notebook import found_html

        best, front = (
            [(each.strategy, each.step_s, each.memory_bytes) for each in some] for some in (self.best, self.front)
        )
        return found_html(self.counts.facts(), best, front)

    @property
    def front(self) -> tuple[SimulatedCandidate, ...]:
        """Of those simulated, each that no other beats in step, memory and GPUs; fastest first."""
        kept: list[SimulatedCandidate] = []
        for each in sorted(self.simulated, key=lambda one: (one.step_s, one.memory_bytes, one.gpus, one.at)):
            if not any(one.memory_bytes <= each.memory_bytes and one.gpus <= each.gpus for one in kept):
                kept.append(each)
        return tuple(kept)


Watch = Callable[[Counts, SimulatedCandidate | None], None]
"""Told how far the search is, with the best so far; a KeyboardInterrupt from it ends the search."""
