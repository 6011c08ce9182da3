"""The objectives of a search, its result, and the reasons why rank 1 wins."""

import math
import time
from collections.abc import Callable, Mapping
from operator import attrgetter

import numpy as np

from stepcast.forecast.options import DEFAULTS, Options
from stepcast.forecast.prediction import Prediction
from stepcast.goodput.plan import COMPUTING, IDLE, node_watts
from stepcast.hardware import Gpu
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.framework import Framework
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import FactDict, dataclass
from stepcast.searching.bounds import CandidateBounds
from stepcast.units import format_seconds
from stepcast.views.answer import Answer

# Parts of a step by what would make them shorter.
CAUSES: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute", "optimizer"),
    "network": ("tp", "cp", "ep", "dp", "pp"),
    "bubble": ("bubble",),
    "host": ("other",),
}
# The choices that candidates of one family share.
FAMILY = ("gpus", "tp", "cp", "ep", "pp")


@dataclass(frozen=True, slots=True)
class SimulatedCandidate:
    """A candidate that was simulated."""

    number: int  # its number among all
    strategy: Strategy
    framework: Framework
    step_s: float
    memory_bytes: float
    score: float  # the value that the search minimises
    bound_s: float  # lower bound of the step with an even split of layers
    options: Options = DEFAULTS
    kinds: tuple[Gpu, ...] = ()  # of each stage in a cluster with two kinds

    @property
    def gpus(self) -> int:
        return self.strategy.layout.gpus

    @property
    def family(self) -> tuple[int, ...]:
        """The number of GPUs and the degrees of parallelism."""
        layout = self.strategy.layout
        return tuple(int(getattr(layout, name)) for name in FAMILY)

    @property
    def rank(self) -> tuple[float, float, int]:
        return self.score, self.step_s, self.number


@dataclass(frozen=True, slots=True)
class SearchCounts:
    """The number of candidates by outcome."""

    considered: int
    illegal: int
    too_large: int  # by the bound of their memory, or by the memory itself
    pruned: int  # by their bound
    simulated: int
    complete: bool = True
    unseen: int = 0  # candidates of a search that ended early which may be better than its best
    priced: int = 0  # kinds of layers priced for the bounds
    out_of_time: bool = False

    def facts(self) -> dict[str, int | bool]:
        return {name: getattr(self, name) for name in self.__slots__}


SearchWatch = Callable[[SearchCounts, SimulatedCandidate | None], None]
"""Receives the progress and the best so far; a KeyboardInterrupt from it ends the search."""


@dataclass(frozen=True, slots=True)
class MissedCandidate:
    """The candidate with the lowest bound that lacks memory; both numbers are lower bounds."""

    strategy: Strategy
    bound_s: float
    memory_bytes: float


CLEARLY = 0.97  # two strategies closer than 3 % are within what predictions of one model differ by


@dataclass(frozen=True)
class SearchResult(Answer):
    """The best candidates first, and all that were simulated."""

    best: tuple[SimulatedCandidate, ...]
    simulated: tuple[SimulatedCandidate, ...]
    counts: SearchCounts
    missed: MissedCandidate | None = None  # it lacks memory, and its bound is below that of the best
    smallest_bytes: float | None = None  # lower bound of the memory of the smallest legal candidate
    roomier: SimulatedCandidate | None = None  # the best that would fit into 16 GiB more
    least_s: float | None = None  # lower bound of what a search that ended early has not seen
    deadline: float = math.inf  # of time.monotonic(), for what follows from this result
    describe: Callable[["SearchResult"], FactDict] | None = None

    def facts(self) -> FactDict:
        best = [
            {**candidate.strategy.facts(), "step_s": candidate.step_s, "memory_bytes": candidate.memory_bytes}
            for candidate in self.best
        ]
        return {"counts": self.counts.facts(), "rows": best}

    @property
    def is_late(self) -> bool:
        """True if the time for the search is over."""
        return time.monotonic() > self.deadline

    def __repr__(self) -> str:
        if self.best:
            best = f"best {format_seconds(self.best[0].step_s)} a step"
        elif self.counts.complete:
            best = "nothing fits"
        else:
            best = "nothing found: out of time" if self.counts.out_of_time else "nothing found: interrupted"
        return f"SearchResult({self.counts.considered:,} candidates, {self.counts.simulated:,} simulated, {best})"

    def _repr_html_(self) -> str:
        from stepcast.views.html import render_notebook
        from stepcast.views.search import strategies_view

        best, front = (
            [(candidate.strategy, candidate.step_s, candidate.memory_bytes) for candidate in some]
            for some in (self.best, self.front)
        )
        return render_notebook(strategies_view(self.counts.facts(), best, front), "search")

    @property
    def front(self) -> tuple[SimulatedCandidate, ...]:
        """The simulated candidates that are Pareto-optimal in step time, memory and GPUs; fastest first."""
        front: list[SimulatedCandidate] = []
        for candidate in sorted(self.simulated, key=attrgetter("step_s", "memory_bytes", "gpus", "number")):
            memory_bytes, gpus = candidate.memory_bytes, candidate.gpus
            if not any(faster.memory_bytes <= memory_bytes and faster.gpus <= gpus for faster in front):
                front.append(candidate)
        return tuple(front)


@dataclass(frozen=True, slots=True)
class ScoredPrediction:
    """The facts of a simulated candidate that an objective uses."""

    prediction: Prediction
    memory_bytes: float
    gpus: int


@dataclass(frozen=True, slots=True)
class SearchObjective:
    """A value to minimise: *least* bounds it for many candidates, *score* is that of one; least <= score."""

    least: Callable[[CandidateBounds, IntArray], FloatArray]
    score: Callable[[ScoredPrediction], float]


def _least_energy(limits: CandidateBounds, gpus: IntArray) -> FloatArray:
    """Return idle power for all of the time plus the rest for computing; in units of a GPU's power limit."""
    with np.errstate(invalid="ignore"):
        energy: FloatArray = gpus * (IDLE * limits.time_s + (COMPUTING - IDLE) * limits.computing_s)
    return np.where(np.isfinite(limits.time_s), energy, np.inf)


_GPU_SECONDS = SearchObjective(
    lambda limits, gpus: limits.time_s * gpus, lambda candidate: candidate.prediction.step_s * candidate.gpus
)


def _energy(candidate: ScoredPrediction) -> float:
    """Return the energy of a step in the units of `_least_energy`."""
    step = candidate.prediction
    return candidate.gpus * step.step_s * node_watts(1.0, 1, 0.0, step.breakdown_s)


def _high_s(candidate: ScoredPrediction) -> float:
    band, step_s = candidate.prediction.band, candidate.prediction.step_s
    return band.around(step_s)[1] if band else step_s


OBJECTIVES: dict[str, SearchObjective] = {
    "step": SearchObjective(lambda limits, _: limits.time_s, lambda candidate: candidate.prediction.step_s),
    "robust": SearchObjective(lambda limits, _: limits.time_s, _high_s),  # the upper end of the 90 % interval
    "throughput": _GPU_SECONDS,  # tokens per second and GPU of one batch: the fewest GPU-seconds
    "cost": _GPU_SECONDS,  # GPU-hours are paid for
    "memory": SearchObjective(
        lambda limits, _: np.where(np.isfinite(limits.time_s), limits.memory_bytes, np.inf),
        lambda candidate: candidate.memory_bytes,
    ),
    "energy": SearchObjective(_least_energy, _energy),
}


def cause_shares(report: StepReport) -> dict[str, float]:
    """Return the shares of the step by cause; they sum to 1."""
    return {cause: sum(report.breakdown_s[name] for name in names) / report.step_s for cause, names in CAUSES.items()}


def find_bottleneck(report: StepReport, result: SearchResult) -> str:
    """Return memory if 16 GiB more would make rank 1 of *result* clearly better, else the largest cause of *report*."""
    if result.roomier and result.roomier.score < CLEARLY * result.best[0].score:
        return "memory"
    shares = cause_shares(report)
    return max(shares, key=lambda cause: shares[cause])


def breakdown_differences(report: StepReport, best: StepReport) -> dict[str, float]:
    """Return by part of the step the seconds that *report* spends beyond *best*, the largest loss first."""
    parts = {name: seconds - best.breakdown_s[name] for name, seconds in report.breakdown_s.items()}
    return dict(sorted(parts.items(), key=lambda pair: -pair[1]))
