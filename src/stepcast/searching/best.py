"""Predictions in the order of their bounds, until no bound that is left can beat those that are kept."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

import numpy as np

from stepcast.cost.memory import memory
from stepcast.forecast.options import TooManySlotsError
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.searching.bounded import Bounded
from stepcast.searching.crew import Crew
from stepcast.searching.objective import OBJECTIVES, Candidate
from stepcast.searching.queue import Queue
from stepcast.searching.result import Counts as Counts
from stepcast.searching.result import Missed, SimulatedCandidate
from stepcast.searching.result import Result as Result
from stepcast.searching.result import SpacePart as Part
from stepcast.searching.result import Watch as Watch
from stepcast.units import GIB

# What a search says beside its best: what fewer GPUs and less memory cost, and what more memory gives.

MORE_BYTES = 16 * GIB
MOST_ROOMIER = 32
# The front: each with so much less memory than the one before, so many, and none slower than that.
LESS = 0.8
MOST_OF_FRONT = 6
SLOWEST = 2.0
FEW = 4
# Simulations for each step of the front: bounds of what recomputes or gathers are loose.
MOST_TRIED = 32


class Around:
    """Looks at more candidates of a search that has its best."""

    def __init__(self, searching: "Searching", crew: Crew) -> None:
        self.searching, self.crew, self.space = searching, crew, searching.space

    def look(self) -> None:
        """The fastest of each number of GPUs, and those that do with ever less memory, so that the front
        knows what fewer and less cost.
        """
        space, fits = self.space, slice(0, self.space.fitting)
        gpus, room = space.gpus[fits], space.memory_bytes[fits]
        numbers = np.unique(gpus).tolist()
        for number in numbers if len(numbers) > 1 else ():
            self._fastest(gpus == number, _having(number))
        best: SimulatedCandidate | None = self.searching.kept[0]
        slowest = SLOWEST * self.searching.kept[0].step_s
        for _ in range(MOST_OF_FRONT):
            if best is None:
                break
            most = LESS * best.memory_bytes
            may = (room <= most) & (space.time_s[fits] <= slowest)
            best = self._fastest(may, _within(most), MOST_TRIED)

    def _fastest(
        self, may: BoolArray, suits: Callable[[SimulatedCandidate], bool], most_tried: float = np.inf
    ) -> SimulatedCandidate | None:
        """The fastest that *suits*, of those that *may*; of those that were tried where that takes more."""
        searching, before = self.searching, len(self.searching.simulated)
        queue = _Named(self, np.flatnonzero(may))
        while True:
            best = min(filter(suits, searching.simulated), key=lambda each: each.step_s, default=None)
            some = queue.next(FEW, best.step_s if best else np.inf)
            if not len(some) or len(searching.simulated) - before >= most_tried:
                return best
            searching.round(self.crew, queue.names(some))

    def beyond(self) -> tuple[Missed | None, SimulatedCandidate | None]:
        """Return the fastest of what does not fit, at best, and the best that more memory would let in; both
        on as many GPUs as the best uses.
        """
        near = np.arange(self.space.fitting, len(self.space.row))
        near = near[self.space.gpus[near] == self.searching.kept[0].gpus]
        self.space.bound(near, rough=True)
        return self._missed(near), self._roomier(near)

    def _missed(self, near: IntArray) -> Missed | None:
        """What memory keeps out that might be faster than the best: bound beside bound."""
        bound_s = self.searching.kept[0].bound_s
        queue = _Named(self, near)
        some = queue.next(1, bound_s)
        if not len(some) or self.space.time_s[number := queue.names(some)[0]] >= bound_s:
            return None
        part, at = self.space.place(number)
        time_s, memory_bytes = self.space.time_s[number], self.space.memory_bytes[number]
        return Missed(part.space.strategy(at), float(time_s), float(memory_bytes))

    def _roomier(self, near: IntArray) -> SimulatedCandidate | None:
        """The best of those that MORE_BYTES would let in, of the first few by their bounds."""
        searching, capacity = self.searching, self.searching.capacity + MORE_BYTES
        queue = _Named(self, near[self.space.memory_bytes[near] <= capacity])
        best: SimulatedCandidate | None = None
        for _ in range(MOST_ROOMIER):
            worst = best.step_s if best and searching.name == "step" else np.inf
            some = queue.next(1, worst)
            if not len(some):
                break
            number = queue.names(some)[0]
            trial = searching.trial(number, np.inf, capacity)
            searching.tick()
            if trial.step_s is not None:
                found = searching.found(number, trial)
                best = found if best is None or found.rank < best.rank else best
        return best


class _Named(Queue):
    """A queue of some of the candidates, by their times, whatever the search makes least."""

    def __init__(self, around: Around, numbers: IntArray) -> None:
        space, tick = around.space, around.searching.tick

        def tighten(some: IntArray) -> FloatArray:
            tick()
            return space.bound(numbers[some]).time_s

        self.numbers = numbers
        super().__init__(space.time_s[numbers], space.ranks[numbers], space.kinds[numbers], tighten)

    def names(self, some: IntArray) -> list[int]:
        named: list[int] = self.numbers[some].tolist()
        return named


def _having(gpus: int) -> Callable[[SimulatedCandidate], bool]:
    return lambda each: each.gpus == gpus


def _within(most_bytes: float) -> Callable[[SimulatedCandidate], bool]:
    return lambda each: each.memory_bytes <= most_bytes


MEMORY_RESERVE = 0.07
"""Share of a GPU's memory that a search leaves free unless a limit is given. With it, a candidate also fits
at the upper end of the 90 % interval of its memory (data/fits/memory.toml: 1 - 1 / 1.077).
"""
ROUND = 16
FEWEST_FOR_SEVERAL = 64  # fewer are simulated before other processes have begun
# With a time limit, some are bounded first, for that share of the time, and as long the best of them are
# simulated, before the bounds of all others are worked out.
PROBES, FIRST_BOUNDED, MOST_BOUNDED, PROBING = 8, 4, 512, 0.2
REPORTED = 2.0  # times as long as its trial takes a row of the answer
NEAR = 2.0  # times the memory: what a search says of those that do not fit


def room_bytes(gpu_bytes: float, most_bytes: float | None, reserve: float | None) -> float:
    """Return what a candidate may take of a GPU: *most_bytes*, where given, and all but the share *reserve*,
    which is MEMORY_RESERVE where neither is given.
    """
    if reserve is None:
        reserve = MEMORY_RESERVE if most_bytes is None else 0.0
    return min(gpu_bytes * (1 - reserve), np.inf if most_bytes is None else most_bytes)


def search_parts(
    parts: Sequence[Part],
    cluster: Cluster,
    top: int = 10,
    objective: str = "step",
    most_bytes: float | None = None,
    watch: Watch | None = None,
    workers: int = 1,
    looks_around: bool = True,
    most_s: float | None = None,
) -> Result:
    """The *top* best candidates of *parts* that fit, exactly as if all had been simulated; the answer is the
    same with any number of *workers*. It *looks around*: at what memory keeps out, and what more of it would
    let in. After *most_s* seconds it ends with the best so far.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r} is not known; expected one of {', '.join(OBJECTIVES)}")
    capacity = cluster.gpu.memory_bytes if most_bytes is None else min(most_bytes, cluster.gpu.memory_bytes)
    searching = Searching(parts, cluster, capacity, top, objective, watch, workers, most_s)
    return searching.all(looks_around)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a worker finds of one candidate; nothing where it is not worth a simulation."""

    memory_bytes: float
    step_s: float | None = None
    score: float = np.inf
    refused: bool = False  # of more micro-batches than are run one by one
    took_s: float = 0.0


class OutOfTimeError(Exception):
    """A search has used up its time."""


class Searching:
    """Candidates by their numbers, and what became of them."""

    def __init__(
        self,
        parts: Sequence[Part],
        cluster: Cluster,
        capacity: float,
        top: int,
        objective: str,
        watch: Watch | None,
        workers: int,
        most_s: float | None,
    ) -> None:
        self.parts, self.cluster, self.capacity, self.top, self.watch = parts, cluster, capacity, top, watch
        self.objective, self.name, self.workers = OBJECTIVES[objective], objective, workers
        self.deadline = np.inf if most_s is None else time.monotonic() + most_s
        self.considered = self.left = sum(len(part.space) for part in parts)
        self.simulated: list[SimulatedCandidate] = []
        self.kept: Sequence[SimulatedCandidate] = ()
        self.illegal = self.too_large = self.pruned = 0
        self.trials_s = 0.0
        self.tried: set[int] = set()
        self.pending: list[int] = []  # of this round, those that might be better
        self.bounded: Bounded | None = None
        self.queue: Queue | None = None
        self.numbers: IntArray = np.zeros(0, dtype=np.int64)  # of the candidates in the queue

    def all(self, looks_around: bool) -> Result:
        complete, out_of_time, missed, roomier = True, False, None, None
        try:
            self.tick()
            near = NEAR * self.capacity if looks_around else self.capacity
            self.bounded = Bounded(self.parts, self.cluster, self.capacity, near, self.workers, self.tick)
            self._count()
            self._probe()
            self.queue = self._queue()
            workers = self.workers if self.left > FEWEST_FOR_SEVERAL else 1
            with Crew(self.attempt, workers) as crew:
                # In rounds of one size, so that the same are simulated whoever does it.
                while len(some := self.queue.next(ROUND, self._worst())):
                    self.pending = self.numbers[some].tolist()
                    self.round(crew, self.pending)
                around = Around(self, crew)
                if looks_around and self.kept:
                    around.look()
            if looks_around and self.kept:
                missed, roomier = around.beyond()
        except KeyboardInterrupt:
            complete = False
        except OutOfTimeError:
            complete, out_of_time = False, True
        counts = replace(self.counts(), complete=complete, out_of_time=out_of_time)
        smallest = self.bounded.smallest_bytes if self.bounded else None
        kept, simulated = tuple(self.kept), tuple(self.simulated)
        ends = self.deadline - self._reporting_s()
        return Result(kept, simulated, counts, missed, smallest, roomier, self._least_s(complete), ends)

    @property
    def space(self) -> Bounded:
        assert self.bounded is not None
        return self.bounded

    def _least_s(self, complete: bool) -> float | None:
        """What no candidate that is left can be below, where the search has ended early."""
        if complete or self.queue is None or self.name != "step" or not self.counts().unseen:
            return None
        return float(min([self.queue.least, *self.space.time_s[self.pending]]))

    def _count(self) -> None:
        space = self.space
        self.left, self.illegal = space.fitting, self.considered - space.legal
        self.too_large = space.legal - space.fitting

    def _probe(self) -> None:
        """Simulate a few before the bounds, which take long, so that a search out of time has an answer."""
        if self.deadline == np.inf:
            return
        began, space = time.monotonic(), self.space
        until = began + PROBING * (self.deadline - began)
        some = space.promising()[:MOST_BOUNDED]
        scores: list[FloatArray] = []
        start, end = 0, FIRST_BOUNDED
        while start < len(some) and (not start or time.monotonic() < until):
            rows = some[start:end]
            scores.append(self.objective.least(space.bound(rows, rough=True), space.gpus[rows]))
            start, end = end, 2 * end
        ranked = some[np.argsort(np.concatenate(scores), kind="stable")] if scores else some[:0]
        until += PROBING * (self.deadline - began)
        for number in ranked.tolist():
            if len(self.simulated) == PROBES or (self.kept and time.monotonic() >= until):
                break
            space.bound(np.array([number]))
            self.round(Crew(self.attempt, 1), [number])

    def _queue(self) -> Queue:
        space = self.space
        rows = self.numbers = np.setdiff1d(np.arange(space.fitting), list(self.tried))
        rough = self.objective.least(space.bound(rows, rough=True), space.gpus[rows])
        return Queue(rough, space.ranks[rows], space.kinds[rows], self._tighten)

    def _tighten(self, some: IntArray) -> FloatArray:
        self.tick()
        rows = self.numbers[some]
        return self.objective.least(self.space.bound(rows), self.space.gpus[rows])

    def round(self, crew: Crew, some: Sequence[int]) -> None:
        """Those of *some* that were not tried yet."""
        worst = self._worst()
        asked = [(number, worst) for number in some if number not in self.tried]
        for (number, _), trial in zip(asked, crew.answers(asked), strict=True):
            self.left -= 1
            self.tried.add(number)
            self.pending = self.pending[1:]
            self._keep(number, trial)
            self.tick()

    def tick(self) -> None:
        """Say how far it is; out of time, or where the one who is told wants so, the search ends."""
        if self.watch:
            self.watch(replace(self.counts(), complete=False), self.kept[0] if self.kept else None)
        if time.monotonic() + self._reporting_s() > self.deadline:
            raise OutOfTimeError

    def _reporting_s(self) -> float:
        """Return the seconds that the answer itself takes: a prediction of each of its rows."""
        trials = max(1, len(self.simulated))
        return REPORTED * len(self.kept) * self.trials_s / trials

    def attempt(self, asked: tuple[int, float]) -> Trial:
        number, worst = asked
        began = time.monotonic()
        return replace(self.trial(number, worst, self.capacity), took_s=time.monotonic() - began)

    def trial(self, number: int, worst: float, capacity: float) -> Trial:
        """One candidate, which is of use where its score is below *worst*."""
        part, at = self.space.place(number)
        strategy = part.space.strategy(at)
        stages = memory(part.space.model, strategy, self.cluster.gpu, part.framework)
        largest = max(stage.total for stage in stages)
        if largest > capacity or (self.name == "memory" and largest > worst):
            return Trial(largest)  # known without a simulation
        try:
            prediction = predict(part.space.model, self.cluster, strategy, part.framework)
        except TooManySlotsError:
            return Trial(largest, refused=True)
        score = self.objective.score(Candidate(prediction, largest, strategy.layout.gpus, self.cluster))
        return Trial(largest, prediction.step_s, score)

    def _keep(self, number: int, trial: Trial) -> None:
        if trial.step_s is None:
            if trial.refused:
                self.illegal += 1
            elif trial.memory_bytes > self.capacity:
                self.too_large += 1
            else:
                self.pruned += 1
            return
        found = self.found(number, trial)
        self.simulated.append(found)
        self.trials_s += trial.took_s
        self.kept = nsmallest(self.top, (*self.kept, found), key=lambda each: each.rank)

    def found(self, number: int, trial: Trial) -> SimulatedCandidate:
        assert trial.step_s is not None
        part, at = self.space.place(number)
        return SimulatedCandidate(
            int(part.rows[at]),
            part.space.strategy(at),
            part.framework,
            trial.step_s,
            trial.memory_bytes,
            trial.score,
            float(self.space.time_s[number]),
        )

    def _worst(self) -> float:
        return self.kept[-1].score if len(self.kept) == self.top else np.inf

    def counts(self) -> Counts:
        unseen = self.queue.below(self._worst()) + len(self.pending) if self.queue else self.left
        return Counts(
            self.considered,
            self.illegal,
            self.too_large,
            self.pruned + self.left - unseen,
            len(self.simulated),
            unseen=unseen,
            priced=self.bounded.priced if self.bounded else 0,
        )
