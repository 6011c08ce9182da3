"""Predictions in the order of their bounds, until no bound that is left can beat those that are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

import numpy as np

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster
from stepcast.searching.bound import Bounding
from stepcast.searching.columns import Bools
from stepcast.searching.crew import Crew
from stepcast.searching.objective import OBJECTIVES, Candidate, Floats
from stepcast.searching.result import Counts as Counts
from stepcast.searching.result import Found as Found
from stepcast.searching.result import Missed as Missed
from stepcast.searching.result import Part as Part
from stepcast.searching.result import Result as Result
from stepcast.searching.result import Watch as Watch
from stepcast.searching.space import Ints
from stepcast.units import GIB

ROUND = 16
FEWEST_FOR_SEVERAL = 64  # fewer are simulated before other processes have begun
MISSED = 2.0
MORE_BYTES = 16 * GIB
MOST_ROOMIER = 32
# The front: each with so much less memory than the one before, so many, and none slower than that.
LESS = 0.8
MOST_OF_FRONT = 6
SLOWEST = 2.0
FEW = 4


def search_parts(
    parts: Sequence[Part],
    cluster: Cluster,
    top: int = 10,
    objective: str = "step",
    most_bytes: float | None = None,
    watch: Watch | None = None,
    workers: int = 1,
    looks_around: bool = True,
) -> Result:
    """The *top* best candidates of *parts* that fit, exactly as if all had been simulated; the answer is the
    same with any number of *workers*. It *looks around*: at what memory keeps out, and what more of it would
    let in.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is not known; expected one of {', '.join(OBJECTIVES)}")
    capacity = cluster.gpu.memory_bytes if most_bytes is None else min(most_bytes, cluster.gpu.memory_bytes)
    return _Searching(parts, cluster, capacity, top, objective, watch, workers, looks_around).all()


@dataclass(frozen=True, slots=True)
class _Trial:
    """What a worker finds of one candidate; nothing where it is not worth a simulation."""

    memory_bytes: float
    step_s: float | None = None
    score: float = np.inf


class _Looking(NamedTuple):
    """Candidates in the order of their least time."""

    part: Ints
    row: Ints
    least: Floats


class _Searching:
    def __init__(
        self,
        parts: Sequence[Part],
        cluster: Cluster,
        capacity: float,
        top: int,
        objective: str,
        watch: Watch | None,
        workers: int,
        looks_around: bool,
    ) -> None:
        self.parts, self.cluster, self.capacity, self.top, self.watch = parts, cluster, capacity, top, watch
        self.objective, self.name, self.workers = OBJECTIVES[objective], objective, workers
        self.looks_around = looks_around
        self.boundings = [Bounding(part.space, cluster, part.framework, workers) for part in parts]
        self.limits = [bounding.all(capacity) for bounding in self.boundings]
        self.considered = sum(len(part.space) for part in parts)
        self.legal = sum(int(limits.legal.sum()) for limits in self.limits)
        self.simulated: list[Found] = []
        self.kept: Sequence[Found] = ()
        self.too_large = self.pruned = self.left = 0
        self.tried: set[tuple[int, int]] = set()

    def all(self) -> Result:
        least, part, row = self._ordered()
        self.left, complete = len(least), True
        self.too_large = self.legal - len(least)
        workers = self.workers if len(least) > FEWEST_FOR_SEVERAL else 1
        try:
            with Crew(self._try, workers) as crew:
                # In rounds of one size, so that the same are simulated whoever does it.
                for start in range(0, len(least), ROUND):
                    stop = start + int(np.searchsorted(least[start : start + ROUND], self._worst(), "right"))
                    if stop == start:
                        break
                    self._round(crew, part[start:stop].tolist(), row[start:stop].tolist())
                if self.looks_around:
                    self._around(crew, part, row)
        except KeyboardInterrupt:
            complete = False
        counts, kept = self._counts(complete), tuple(self.kept)
        if not kept or not complete or not self.looks_around:
            return Result(kept, tuple(self.simulated), counts, smallest_bytes=self._smallest())
        near = self._near()
        missed, roomier = self._missed(near), self._roomier(near)
        return Result(kept, tuple(self.simulated), counts, missed, self._smallest(), roomier)

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

    def _around(self, crew: Crew, part: Ints, row: Ints) -> None:
        """The fastest of each number of GPUs, and those that do with ever less memory, so that the front
        knows what fewer and less cost.
        """
        gpus, least, room = np.zeros(len(row), dtype=np.int64), np.zeros(len(row)), np.zeros(len(row))
        for number, (each, limits) in enumerate(zip(self.parts, self.limits, strict=True)):
            here = part == number
            gpus[here], least[here] = each.space.columns["gpus"][row[here]], limits.time_s[row[here]]
            room[here] = limits.memory_bytes[row[here]]
        order = np.argsort(least, kind="stable")
        looking = _Looking(part[order], row[order], least[order])
        numbers = np.unique(gpus).tolist()
        for number in numbers if len(numbers) > 1 else ():
            self._fastest(crew, looking, gpus[order] == number, _having(number))
        best = self.kept[0] if self.kept else None
        for _ in range(MOST_OF_FRONT):
            if best is None:
                break
            most = LESS * best.memory_bytes
            may = (room[order] <= most) & (least[order] <= SLOWEST * self.kept[0].step_s)
            best = self._fastest(crew, looking, may, _within(most))

    def _fastest(
        self, crew: Crew, looking: "_Looking", may: Bools, suits: Callable[[Found], bool]
    ) -> Found | None:
        """The fastest that *suits*, of those that *may*."""
        own = np.flatnonzero(may)
        best: Found | None = None
        for start in range(0, len(own), FEW):
            best = min(filter(suits, self.simulated), key=lambda each: each.step_s, default=None)
            some = own[start : start + FEW]
            some = some[looking.least[some] <= (best.step_s if best else np.inf)]
            if not len(some):
                break
            asked = zip(looking.part[some].tolist(), looking.row[some].tolist(), strict=True)
            new = [each for each in asked if each not in self.tried]
            self._round(crew, [which for which, _ in new], [at for _, at in new])
        return best

    def _round(self, crew: Crew, parts: Sequence[int], rows: Sequence[int]) -> None:
        worst = self._worst()
        asked = [(which, at, worst) for which, at in zip(parts, rows, strict=True)]
        for (which, at, _), trial in zip(asked, crew.answers(asked), strict=True):
            self.left -= 1
            self.tried.add((which, at))
            self._keep(which, at, trial)
            if self.watch:
                self.watch(self._counts(False), self.kept[0] if self.kept else None)

    def _try(self, asked: tuple[int, int, float]) -> _Trial:
        return self._trial(*asked, self.capacity)

    def _trial(self, which: int, at: int, worst: float, capacity: float) -> _Trial:
        """One candidate, which is of use where its score is below *worst*."""
        part = self.parts[which]
        strategy = part.space.strategy(at)
        stages = memory(part.space.model, strategy, self.cluster.gpu, part.framework)
        largest = max(stage.total for stage in stages)
        if largest > capacity or (self.name == "memory" and largest > worst):
            return _Trial(largest)  # known without a simulation
        prediction = predict(part.space.model, self.cluster, strategy, part.framework)
        score = self.objective.score(Candidate(prediction, largest, strategy.layout.gpus, self.cluster))
        return _Trial(largest, prediction.step_s, score)

    def _keep(self, which: int, at: int, trial: _Trial) -> None:
        if trial.step_s is None:
            if trial.memory_bytes > self.capacity:
                self.too_large += 1
            else:
                self.pruned += 1
            return
        found = self._found(which, at, trial, float(self.limits[which].time_s[at]))
        self.simulated.append(found)
        self.kept = nsmallest(self.top, (*self.kept, found), key=lambda each: each.rank)

    def _found(self, which: int, at: int, trial: _Trial, bound_s: float) -> Found:
        assert trial.step_s is not None
        part = self.parts[which]
        return Found(
            int(part.rows[at]),
            part.space.strategy(at),
            part.framework,
            trial.step_s,
            trial.memory_bytes,
            trial.score,
            bound_s,
        )

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

    def _near(self) -> list[tuple[Ints, Floats]]:
        """Of each part what would fit into MISSED times the memory, but not into what there is, and its
        least time.
        """
        found = []
        for bounding, limits in zip(self.boundings, self.limits, strict=True):
            near = limits.memory_bytes <= MISSED * self.capacity
            rows = np.flatnonzero(limits.legal & near & ~np.isfinite(limits.time_s))
            found.append((rows, bounding.times(rows)[0]))
        return found

    def _missed(self, near: Sequence[tuple[Ints, Floats]]) -> Missed | None:
        """What memory keeps out that might be faster than the best: bound beside bound."""
        found: Missed | None = None
        for part, limits, (rows, times) in zip(self.parts, self.limits, near, strict=True):
            if len(rows) and times.min() < min(self.kept[0].bound_s, found.bound_s if found else np.inf):
                at = int(rows[np.argmin(times)])
                found = Missed(part.space.strategy(at), float(times.min()), float(limits.memory_bytes[at]))
        return found

    def _roomier(self, near: Sequence[tuple[Ints, Floats]]) -> Found | None:
        """The best of those that MORE_BYTES would let in, of the first few by their bounds."""
        few: list[tuple[float, int, int]] = []
        for which, (rows, times) in enumerate(near):
            enough = self.limits[which].memory_bytes[rows] <= self.capacity + MORE_BYTES
            order = np.flatnonzero(enough)[np.argsort(times[enough], kind="stable")[:MOST_ROOMIER]]
            few += [(float(times[at]), which, int(rows[at])) for at in order]
        best: Found | None = None
        for bound_s, which, at in sorted(few)[:MOST_ROOMIER]:
            if best and self.name == "step" and bound_s > best.step_s:
                break
            trial = self._trial(which, at, np.inf, self.capacity + MORE_BYTES)
            if trial.step_s is not None:
                found = self._found(which, at, trial, bound_s)
                best = found if best is None or found.rank < best.rank else best
        return best

    def _smallest(self) -> float | None:
        least = [float(limits.memory_bytes.min(initial=np.inf)) for limits in self.limits]
        return min(least) if self.legal else None


def _having(gpus: int) -> Callable[[Found], bool]:
    return lambda each: each.gpus == gpus


def _within(most_bytes: float) -> Callable[[Found], bool]:
    return lambda each: each.memory_bytes <= most_bytes
