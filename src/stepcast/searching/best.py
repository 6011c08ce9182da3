"""Predict candidates in the order of their bounds until no remaining bound can beat the best ones."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import chain
from operator import attrgetter

import numpy as np

from stepcast.forecast.options import TooManySlotsError
from stepcast.forecast.predict import predict_many, stage_memory
from stepcast.forecast.prediction import Prediction
from stepcast.hardware import Cluster
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.children import WorkerPool
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import dataclass
from stepcast.searching import result
from stepcast.searching.bounds import BoundedCandidates
from stepcast.searching.space import SpacePart
from stepcast.units import GIB

MEMORY_RESERVE = 0.07
"""Share of a GPU's memory that a search leaves free unless a limit is given. With it, a candidate also fits
at the upper end of the 90 % interval of its memory (data/fits/memory.toml: 1 - 1 / 1.077).
"""
ROUND = 16  # candidates simulated between two decisions, whatever the number of workers
FEWEST_FOR_SEVERAL = 64  # fewer are simulated before other processes have started
KINDS_AT_ONCE = 128  # kinds of layers whose bounds are tightened together
# A few candidates are bounded and the best of them simulated before the bounds of all others are computed; with a time
# limit, PROBING of the time goes to each of the two.
PROBES, FIRST_BOUNDED, PROBED_KINDS, MOST_BOUNDED, PROBING = 8, 4, 64, 512, 0.2
REPORTED = 2.0  # a row of the answer takes this many times as long as its trial
NEAR = 2.0  # candidates that do not fit are examined up to this multiple of the memory limit
# The Pareto frontier: each step needs LESS of the memory of the one before, and none is slower than SLOWEST.
LESS, MOST_OF_FRONT, SLOWEST = 0.8, 6, 2.0
FRONT_ROUND = 4
SLOWEST_FAMILY = 1.5  # times the best, up to which families are ranked
MOST_TRIED = 32  # simulations for each step of the frontier; loose bounds would ask for many more
MORE_BYTES = 16 * GIB  # additional memory whose benefit is reported
MOST_ROOMIER = 32


def usable_memory_bytes(gpu_bytes: float, most_bytes: float | None, reserve: float | None) -> float:
    """Return the memory that a candidate may use on a GPU.

    At most *most_bytes*, and all but the share *reserve*, which is MEMORY_RESERVE if neither is given.
    """
    if reserve is None:
        reserve = MEMORY_RESERVE if most_bytes is None else 0.0
    return min(gpu_bytes * (1 - reserve), np.inf if most_bytes is None else most_bytes)


Improve = Callable[[result.SimulatedCandidate, Callable[[], bool]], result.SimulatedCandidate]
"""(a candidate, whether time is up) -> its best variant."""


def search_parts(
    parts: Sequence[SpacePart],
    cluster: Cluster,
    top: int = 10,
    objective: str = "step",
    most_bytes: float | None = None,
    watch: result.SearchWatch | None = None,
    workers: int = 1,
    looks_around: bool = True,
    most_s: float | None = None,
    by_family: bool = False,
    first: result.SimulatedCandidate | None = None,
    improve: Improve | None = None,
) -> result.SearchResult:
    """Return the *top* best candidates of *parts* that fit, exactly as if all had been simulated.

    With *by_family*, each is the best of its family: of all with the same degrees of parallelism on as many GPUs, as
    far as these are not much slower than the best. The result does not depend on the number of *workers*.
    *looks_around* also examines the Pareto frontier, what memory rules out and what more memory would allow. After
    *most_s* seconds the best so far is returned, which may be *first*, a candidate that is known already, or what
    *improve* makes of an early one.
    """
    if objective not in result.OBJECTIVES:
        raise ValueError(f"objective {objective!r} is not known; expected one of {', '.join(result.OBJECTIVES)}")
    capacity = cluster.gpu.memory_bytes if most_bytes is None else min(most_bytes, cluster.gpu.memory_bytes)
    run = _SearchRun(parts, cluster, capacity, top, objective, most_s)
    run.first, run.improve, run.watch, run.workers = first, improve, watch, workers
    run.families = {} if by_family else None
    return run.run(looks_around)


def guess_candidate(
    parts: Sequence[SpacePart], cluster: Cluster, goal: str, capacity: float, watch: result.SearchWatch, most_s: float
) -> result.SimulatedCandidate | None:
    """Return and report the first of *parts* that fits, in the order in which candidates promise to be fast."""
    run = _SearchRun(parts, cluster, capacity, 1, goal, most_s)
    try:
        run.bounded = BoundedCandidates(parts, cluster, capacity, capacity, tick=run._tick)
        for number in run.bounded.promising().tolist():
            run._simulate(WorkerPool(run._try, 1), [number])
            if run.best:
                watch(replace(run._counts(), complete=False), run.best[0])
                return run.best[0]
    except SearchTimeoutError:
        pass
    return None


class BoundQueue:
    """Hand out the candidates 0, 1, ... in the order of their tight bounds, computed as rough ones come near.

    Rough bounds never exceed tight ones, so everything below the first remaining rough bound is in its final
    order. Candidates of the same kind are cheap to bound after the first; *tighten* returns the bounds of some
    candidates. Of equal bounds the lower rank comes first.
    """

    def __init__(
        self, rough: FloatArray, ranks: IntArray, kinds: IntArray, tighten: Callable[[IntArray], FloatArray]
    ) -> None:
        self.tighten, self.ranks = tighten, ranks
        self.order = np.lexsort((ranks, rough))
        self.rough = rough[self.order]
        begins = np.sort(np.unique(kinds[self.order], return_index=True)[1])
        self.cuts = [*begins[KINDS_AT_ONCE::KINDS_AT_ONCE].tolist(), len(self.order)]
        self.seen = 0  # length of the part of the order that has tight bounds
        self.ready: IntArray = np.zeros(0, dtype=np.int64)  # tight and not handed out, the lowest bound first
        self.tight: FloatArray = np.zeros(0)

    @property
    def frontier(self) -> float:
        """The lower bound of all candidates with rough bounds."""
        return float(self.rough[self.seen]) if self.seen < len(self.order) else np.inf

    @property
    def least(self) -> float:
        """The lower bound of all remaining candidates."""
        return min(self.frontier, float(self.tight[0]) if len(self.tight) else np.inf)

    def __len__(self) -> int:
        return len(self.order) - self.seen + len(self.ready)

    def below(self, worst: float) -> int:
        """Return how many remaining candidates have known bounds up to *worst*."""
        rough = int(np.searchsorted(self.rough[self.seen :], worst, "right"))
        return rough + int(np.searchsorted(self.tight, worst, "right"))

    def next(self, most: int, worst: float) -> IntArray:
        """Return up to *most* of the next candidates with bounds up to *worst*."""
        while self.seen < len(self.order) and self.frontier <= worst:
            if len(self.tight) >= most and self.tight[most - 1] < self.frontier:
                break
            batch = self.order[self.seen : self.cuts[0]]
            tight = self.tighten(batch)
            self.seen = self.cuts.pop(0)
            ready, tight = np.concatenate([self.ready, batch]), np.concatenate([self.tight, tight])
            order = np.lexsort((self.ranks[ready], tight))
            self.ready, self.tight = ready[order], tight[order]
        count = min(most, int(np.searchsorted(self.tight, worst, "right")))
        taken, self.ready, self.tight = self.ready[:count], self.ready[count:], self.tight[count:]
        return taken


@dataclass(frozen=True, slots=True)
class CandidateTrial:
    """The outcome for one candidate; without step_s it was not worth a simulation."""

    memory_bytes: float
    step_s: float | None = None
    score: float = np.inf
    refused: bool = False  # it has more micro-batches than are simulated one by one


TrialPool = WorkerPool[tuple[list[int], float], list[CandidateTrial]]


class SearchTimeoutError(Exception):
    """The search has used up its time."""


class _SearchRun:
    """One search: its candidates by number, the best so far, and counts of the outcomes."""

    def __init__(
        self, parts: Sequence[SpacePart], cluster: Cluster, capacity: float, top: int, goal: str, most_s: float | None
    ) -> None:
        self.parts, self.cluster, self.capacity, self.top = parts, cluster, capacity, top
        self.objective, self.objective_name, self.workers = result.OBJECTIVES[goal], goal, 1
        self.watch: result.SearchWatch | None = None
        self.deadline = np.inf if most_s is None else time.monotonic() + most_s
        self.considered = self.left = sum(len(part.space) for part in parts)
        self.simulated: list[result.SimulatedCandidate] = []
        self.best: Sequence[result.SimulatedCandidate] = ()
        self.illegal = self.too_large = self.pruned = 0
        self.trials_s = 0.0
        self.families: dict[tuple[int, ...], result.SimulatedCandidate] | None = None  # the best of each, if asked
        self.tried: set[int] = set()
        self.unfit: list[int] = []  # tried, and more memory than their lower bound said
        self.pending: list[int] = []  # candidates of this round that might be better
        self.bounded: BoundedCandidates | None = None
        self.queue: BoundQueue | None = None
        self.first: result.SimulatedCandidate | None = None  # known before all bounds are
        self.improve: Improve | None = None

    def run(self, looks_around: bool) -> result.SearchResult:
        complete, out_of_time, missed, roomier = True, False, None, None
        try:
            self._tick()
            near = NEAR * self.capacity if looks_around else self.capacity
            self.bounded = BoundedCandidates(self.parts, self.cluster, self.capacity, near, self.workers, self._tick)
            self.left, self.illegal = self.bounded.fitting, self.considered - self.bounded.legal
            self.too_large = self.bounded.legal - self.bounded.fitting
            self._probe()
            numbers = np.setdiff1d(np.arange(self.bounded.fitting), list(self.tried))
            rough = self.objective.least(self.space.bound(numbers, rough=True), self.space.gpus[numbers])
            self.queue = self._queue(numbers, rough, self.objective.least)
            workers = self.workers if self.left > FEWEST_FOR_SEVERAL else 1
            with WorkerPool(self._try, workers) as pool:
                # Rounds have one size, so that the same candidates are simulated with any number of workers.
                while len(indices := self.queue.next(ROUND, self._worst())):
                    self.pending = self._select_promising(numbers[indices]).tolist()
                    self._simulate(pool, self.pending)
                if looks_around and self.best:
                    self._explore_frontier(pool)
            if looks_around and self.best:
                missed, roomier = self._explore_memory()
        except KeyboardInterrupt:
            complete = False
        except SearchTimeoutError:
            complete, out_of_time = False, True
        if self.first is not None and not complete:
            self._rank(self.first)
        best, simulated, deadline = tuple(self.best), tuple(self.simulated), self.deadline - self._reporting_s()
        counts = replace(self._counts(), complete=complete, out_of_time=out_of_time)
        smallest_bytes = self.bounded.smallest_bytes if self.bounded else None
        beyond = (missed, smallest_bytes, roomier, self._least_s(complete))
        return result.SearchResult(best, simulated, counts, *beyond, deadline)

    @property
    def space(self) -> BoundedCandidates:
        assert self.bounded is not None
        return self.bounded

    # ---- simulating candidates -----------------------------------------------------------------------

    def _probe(self) -> None:
        """Simulate a few promising candidates before all bounds are computed, which takes long.

        So there is a good answer early, also in a search that runs out of time.
        """
        began, space = time.monotonic(), self.space
        is_limited = self.deadline < np.inf
        until = began + PROBING * (self.deadline - began) if is_limited else np.inf
        promising = space.promising()[: MOST_BOUNDED if is_limited else PROBED_KINDS]
        scores: list[FloatArray] = []
        start, end = 0, FIRST_BOUNDED
        while start < len(promising) and (not start or time.monotonic() < until):
            rows = promising[start:end]
            scores.append(self.objective.least(space.bound(rows, rough=True), space.gpus[rows]))
            start, end = end, 2 * end
        ranked = promising[np.argsort(np.concatenate(scores), kind="stable")] if scores else promising[:0]
        until += PROBING * (self.deadline - began) if is_limited else 0.0
        for number in ranked.tolist():
            if len(self.simulated) == PROBES or (self.best and time.monotonic() >= until):
                break
            space.bound(np.array([number]))
            self._simulate(WorkerPool(self._try, 1), [number])
        if self.improve and self.best and (self.watch or is_limited):
            better = self.improve(self.best[0], lambda: time.monotonic() > self.deadline)
            self.first = min(better, self.first or better, key=attrgetter("rank"))
            self._tick()

    def _queue(
        self, numbers: IntArray, rough: FloatArray, least: Callable[..., FloatArray] | None = None
    ) -> BoundQueue:
        """Return a queue of the indices of *numbers*, by the bound *least*, or by time without it."""

        def tighten(indices: IntArray) -> FloatArray:
            self._tick()
            rows = numbers[indices]
            bounds = self.space.bound(rows)
            return bounds.time_s if least is None else least(bounds, self.space.gpus[rows])

        return BoundQueue(rough, self.space.ranks[numbers], self.space.kinds[numbers], tighten)

    def _simulate(self, pool: TrialPool, numbers: Sequence[int]) -> None:
        """Try those of *numbers* that were not tried yet."""
        asked, share = [number for number in numbers if number not in self.tried], -(-ROUND // pool.workers)
        shares = [asked[start : start + share] for start in range(0, len(asked), share)]
        worst, began = self._worst(), time.monotonic()
        trials = chain.from_iterable(pool.answers([(part, worst) for part in shares]))
        for number, trial in zip(asked, trials, strict=True):
            self.trials_s, began = self.trials_s + pool.workers * (time.monotonic() - began), time.monotonic()
            self.left -= 1
            self.tried.add(number)
            self.pending = self.pending[1:]
            if trial.step_s is not None:
                candidate = self._candidate(number, trial)
                self.simulated.append(candidate)
                self._rank(candidate)
            elif trial.refused:
                self.illegal += 1
            elif trial.memory_bytes > self.capacity:
                self.too_large += 1
                self.unfit.append(number)
                self.space.memory_bytes[number] = trial.memory_bytes
            else:
                self.pruned += 1
            self._tick()

    def _rank(self, candidate: result.SimulatedCandidate) -> None:
        """Add a candidate to the best, or let it replace the best of its family."""
        others: Iterable[result.SimulatedCandidate] = (*self.best, candidate)
        if self.families is not None:
            known = self.families.setdefault(candidate.family, candidate)
            self.families[candidate.family] = min(known, candidate, key=attrgetter("rank"))
            others = self.families.values()
        self.best = nsmallest(self.top, others, key=attrgetter("rank"))
        if self.families is not None:  # of slower families not all were simulated, so theirs may not be the best
            self.best = [other for other in self.best if other.score <= SLOWEST_FAMILY * self.best[0].score]

    def _select_promising(self, numbers: IntArray) -> IntArray:
        """Return those of *numbers* whose bound is below the best of their family; the others are pruned."""
        if self.families is None:
            return numbers
        scores = self.objective.least(self.space.known(numbers), self.space.gpus[numbers])
        limit = []
        for number in numbers.tolist():
            part, row = self.space.place(number)
            gpus, tp, cp, ep, pp = (int(part.space.columns[name][row]) for name in result.FAMILY)
            known = self.families.get((gpus, tp, cp, ep, pp))
            limit.append(known.score if known else np.inf)
        promising: BoolArray = scores <= np.array(limit)
        vain = {int(number) for number in numbers[~promising]} - self.tried
        self.tried |= vain
        self.left, self.pruned = self.left - len(vain), self.pruned + len(vain)
        return numbers[promising]

    def _try(self, asked: tuple[list[int], float], more_bytes: float = 0.0) -> list[CandidateTrial]:
        """Predict the candidates of *asked*: their numbers, and the score above which a candidate is of no use."""
        numbers, worst = asked
        trials: dict[int, CandidateTrial] = {}
        groups: dict[int, list[tuple[int, Strategy]]] = {}
        for number in numbers:
            part, row = self.space.place(number)
            strategy = part.space.strategy(row)
            stages = stage_memory(part.space.model, strategy, self.cluster.gpu, part.framework)
            largest = max(stage.total for stage in stages)
            trials[number] = CandidateTrial(largest)
            if largest <= self.capacity + more_bytes and not (self.objective_name == "memory" and largest > worst):
                groups.setdefault(int(self.space.part[number]), []).append((number, strategy))
        for which, group in groups.items():
            part = self.space.parts[which]
            predictions = self._predict(part, [strategy for _, strategy in group])
            for (number, strategy), prediction in zip(group, predictions, strict=True):
                largest = trials[number].memory_bytes
                if prediction is None:
                    trials[number] = CandidateTrial(largest, refused=True)
                    continue
                score = self.objective.score(result.ScoredPrediction(prediction, largest, strategy.layout.gpus))
                trials[number] = CandidateTrial(largest, prediction.step_s, score)
        return [trials[number] for number in numbers]

    def _predict(self, part: SpacePart, strategies: Sequence[Strategy]) -> list[Prediction | None]:
        """Return a prediction for each strategy; None of those with more slots than are simulated one by one."""
        try:
            return [*predict_many(part.space.model, self.cluster, strategies, part.framework)]
        except TooManySlotsError:
            if len(strategies) == 1:
                return [None]
            return [prediction for strategy in strategies for prediction in self._predict(part, [strategy])]

    def _candidate(self, number: int, trial: CandidateTrial) -> result.SimulatedCandidate:
        assert trial.step_s is not None
        part, row = self.space.place(number)
        strategy, bound_s = part.space.strategy(row), float(self.space.time_s[number])
        return result.SimulatedCandidate(
            int(part.rows[row]), strategy, part.framework, trial.step_s, trial.memory_bytes, trial.score, bound_s
        )

    # ---- beyond the best -----------------------------------------------------------------------------

    def _explore_frontier(self, pool: TrialPool) -> None:
        """Simulate the fastest of each number of GPUs, and the fastest with ever less memory."""
        space, fits = self.space, slice(0, self.space.fitting)
        gpus, needed = space.gpus[fits], space.memory_bytes[fits]
        numbers = np.unique(gpus).tolist()
        for number in numbers if len(numbers) > 1 else ():
            self._fastest(pool, gpus == number, gpus=number)
        best: result.SimulatedCandidate | None = self.best[0]
        slowest = SLOWEST * self.best[0].step_s
        for _ in range(MOST_OF_FRONT):
            if best is None:
                break
            limit = LESS * best.memory_bytes
            may = (needed <= limit) & (space.time_s[fits] <= slowest)
            best = self._fastest(pool, may, most_bytes=limit, most_tried=MOST_TRIED)

    def _fastest(
        self,
        pool: TrialPool,
        may: BoolArray,
        gpus: int | None = None,
        most_bytes: float = np.inf,
        most_tried: float = np.inf,
    ) -> result.SimulatedCandidate | None:
        """Return the fastest candidate, after about *most_tried* simulations at most.

        It is among those where *may* is True, has this number of *gpus* (None: any), and takes at most *most_bytes*.
        """
        before, numbers = len(self.simulated), np.flatnonzero(may)
        queue = self._queue(numbers, self.space.time_s[numbers])
        while True:
            fitting = (candidate for candidate in self.simulated if candidate.memory_bytes <= most_bytes)
            suitable = [candidate for candidate in fitting if gpus in (None, candidate.gpus)]
            best = min(suitable, key=attrgetter("step_s"), default=None)
            indices = queue.next(FRONT_ROUND, best.step_s if best else np.inf)
            if not len(indices) or len(self.simulated) - before >= most_tried:
                return best
            self._simulate(pool, numbers[indices].tolist())

    def _explore_memory(self) -> tuple[result.MissedCandidate | None, result.SimulatedCandidate | None]:
        """Return the candidate that lacks memory with the lowest bound, if that is below the bound of the best, and the
        best candidate that fits with MORE_BYTES, of the first few by their bounds.

        Both use as many GPUs as the best candidate.
        """
        space, bound_s = self.space, self.best[0].bound_s
        near = np.array([*self.unfit, *range(space.fitting, len(space.row))], np.int64)
        near = near[space.gpus[near] == self.best[0].gpus]
        space.bound(near, rough=True)
        missed, best = None, None
        indices = self._queue(near, space.time_s[near]).next(1, bound_s)
        if len(indices) and space.time_s[number := int(near[indices[0]])] < bound_s:
            part, row = space.place(number)
            time_s, memory_bytes = space.time_s[number], space.memory_bytes[number]
            missed = result.MissedCandidate(part.space.strategy(row), float(time_s), float(memory_bytes))

        numbers = near[space.memory_bytes[near] <= self.capacity + MORE_BYTES]
        queue = self._queue(numbers, space.time_s[numbers])
        for _ in range(MOST_ROOMIER):
            worst = best.step_s if best and self.objective_name == "step" else np.inf
            indices = queue.next(1, worst)
            if not len(indices):
                break
            number = int(numbers[indices[0]])
            trial = self._try(([number], np.inf), MORE_BYTES)[0]
            self._tick()
            if trial.step_s is not None:
                candidate = self._candidate(number, trial)
                best = candidate if best is None or candidate.rank < best.rank else best
        return missed, best

    # ---- progress ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Report progress to the watcher, which may end the search; raise an error when time is up."""
        if self.watch:
            known = [*self.best[:1], *([self.first] if self.first else ())]
            best = min(known, key=attrgetter("rank"), default=None)
            self.watch(replace(self._counts(), complete=False), best)
        if time.monotonic() + self._reporting_s() > self.deadline:
            raise SearchTimeoutError

    def _reporting_s(self) -> float:
        """Return the seconds that the answer itself takes: a prediction for each of its rows."""
        return REPORTED * len(self.best) * self.trials_s / max(1, len(self.simulated))

    def _worst(self) -> float:
        worst = self.best[-1].score if len(self.best) == self.top else np.inf
        return min(worst, SLOWEST_FAMILY * self.best[0].score) if self.best and self.families is not None else worst

    def _least_s(self, complete: bool) -> float | None:
        """Return the bound of all remaining candidates if the search ended early."""
        if complete or self.queue is None or self.objective_name != "step" or not self._counts().unseen:
            return None
        return float(min([self.queue.least, *self.space.time_s[self.pending]]))

    def _counts(self) -> result.SearchCounts:
        unseen = self.queue.below(self._worst()) + len(self.pending) if self.queue else self.left
        pruned, priced = self.pruned + self.left - unseen, self.bounded.priced if self.bounded else 0
        counts = (self.considered, self.illegal, self.too_large, pruned, len(self.simulated))
        return result.SearchCounts(*counts, unseen=unseen, priced=priced)
