"""A training run as a renewal process: its expected time in closed form, and the spread of simulated runs around it.

Work runs for an interval and pauses for a checkpoint. An interruption returns it to the last safe checkpoint, and
the job restarts. A broken node is repaired; until then a spare replaces it, the job waits, or it continues with
fewer replicas.

Interruptions come at a constant rate, also during restarts and checkpoints. To run *x* seconds without one takes
(e^(rate x) - 1) / rate seconds of attempts, and a restart after each that failed (Daly 2006, equation 13; the
optimum below is his, and Young's of 1974 its first term). A checkpoint written in the background is safe only after
a lag: a failure before that returns to the previous one.

Nodes under repair are customers of a loss system with one more place than there are spares: with all places taken
the job stops and no other node breaks. In a long run Erlang's formula gives that share of time for any distribution of
repairs (Erlang 1917; Sevastyanov 1957). A run begins with all nodes in order: the exact share during the first repairs
is the inverse of a Laplace transform. A job that shrinks stops where no replica is complete.
"""

import math
from dataclasses import replace
from enum import StrEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stepcast.ir.arrays import FloatArray
from stepcast.ir.limits import INTERRUPTIONS
from stepcast.ir.types import Quantity, dataclass, require


class Shortage(StrEnum):
    """The reaction of a job when more nodes are under repair than it has spares."""

    WAIT = "wait"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True)
class RunProcess:
    """One phase of a run; times in seconds, rates per second of the whole job."""

    work_s: Quantity
    interval_s: float = math.inf  # work between two checkpoints
    pause_s: Quantity = 0.0  # a checkpoint stops the job
    lag_s: Quantity = 0.0  # from the end of the pause until the checkpoint is safe
    failures_per_s: Quantity = 0.0
    restart_s: Quantity = 0.0
    broken_share: float = 0.0  # share of failures after which a node is repaired
    repair_s: Quantity = 0.0  # mean time
    spares: int | None = None  # nodes beyond those in use; None: unlimited
    shortage: Shortage = Shortage.WAIT
    replicas: int = 1  # of the model
    nodes_per_replica: float = 1.0  # below 1 if a node holds several

    def __post_init__(self) -> None:
        require(self.interval_s > 0, "the interval between checkpoints must be above zero")
        require(0 <= self.broken_share <= 1, "the share of broken nodes must be from 0 to 1")
        require(self.spares is None or self.spares >= 0, "spares must be zero or more")
        require(self.replicas >= 1 and self.nodes_per_replica > 0, "a job has replicas, on nodes")

    @property
    def period_s(self) -> float:
        return self.interval_s + self.pause_s

    @property
    def checkpoints(self) -> int:
        """The number of checkpoints during the work; the last one is safe before its end."""
        if not math.isfinite(self.interval_s):
            return 0
        return max(0, math.ceil((self.work_s - self.lag_s) / self.interval_s) - 1)

    @property
    def last_s(self) -> float:
        """The work after the last checkpoint."""
        return self.work_s - self.checkpoints * self.interval_s if self.checkpoints else self.work_s

    @property
    def load(self) -> float:
        """The mean number of nodes under repair."""
        return self.failures_per_s * self.broken_share * self.repair_s

    @property
    def repairs(self) -> bool:
        """True if nodes can run short."""
        return self.spares is not None and self.load > 0

    @property
    def most_missing(self) -> int:
        """The number of nodes under repair that is next to never exceeded."""
        return math.ceil(self.load + 8 * math.sqrt(self.load) + 8)

    @property
    def places(self) -> int:
        """The nodes that can be under repair while the job runs; with one more it waits for the first to return."""
        lasting = self.replicas - 1 if self.shortage is Shortage.SHRINK else 0
        return (self.spares or 0) + math.floor(lasting * self.nodes_per_replica + 1e-9)

    def speed(self, missing: int) -> float:
        """Return the relative speed of a job that lacks *missing* nodes; the rest form complete replicas."""
        if missing <= 0:
            return 1.0
        lost = min(self.replicas, math.ceil(missing / self.nodes_per_replica - 1e-9))
        return (self.replicas - lost) / self.replicas


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """The time of a run by part; the parts sum to it."""

    work_s: float
    checkpoints_s: float = 0.0
    lost_s: float = 0.0
    restarts_s: float = 0.0
    waiting_s: float = 0.0
    shrunk_s: float = 0.0  # additional time because replicas were missing
    failures: float = 0.0

    @property
    def total_s(self) -> float:
        return self.work_s + self.checkpoints_s + self.lost_s + self.restarts_s + self.waiting_s + self.shrunk_s


MOST_ROUNDS = 50  # until the length of a shrinking run agrees with its mean speed
HOPELESS = 20.0  # expected failures of one attempt: e^20 attempts are five hundred million
EXHAUSTED = 300  # intervals tried one by one: the length of the last one makes their times uneven


def expect_split(process: RunProcess) -> TimeSplit:
    """Return the expected time by part."""
    if not process.failures_per_s:
        return TimeSplit(process.work_s, process.checkpoints * process.pause_s)
    split = _split_at_speed(process)
    if not process.repairs:
        return split
    # The longer the run, the more nodes are missing on average, and the longer it takes.
    for _ in range(MOST_ROUNDS if process.shortage is Shortage.SHRINK else 0):
        shorter_s = split.total_s
        split = _split_at_speed(process, *_mean_speed(process, shorter_s))
        if split.total_s <= shorter_s * (1 + 1e-6):
            break
    return replace(split, waiting_s=_expect_waiting(process, split.total_s))


def _expect_waiting(process: RunProcess, running_s: float) -> float:
    """Return the time in which a job waits for a node, which otherwise takes *running_s*."""
    load, places = process.load, process.places
    if places > process.most_missing:
        return 0.0
    # Failures until a segment is complete are geometric, which spreads them more than at a constant rate.
    segments = _list_failures(process)
    spread = sum(number * mean**2 for number, mean in segments) / sum(number * mean for number, mean in segments) ** 2
    # A node that breaks while as many as the job can spare are under repair stops it until the first is back.
    return running_s * share_without_spare(places, load, running_s / process.repair_s, spread) * load / (places + 1)


def _split_at_speed(process: RunProcess, speed: float = 1.0, regrowths_per_s: float = 0.0) -> TimeSplit:
    """Return the expected time by part of a run at this mean speed that gets replicas back so often."""
    rate = process.failures_per_s
    pauses_s = process.checkpoints * process.pause_s
    # Fewer replicas take longer for the work between two checkpoints, while failures come at the same rate.
    slower = replace(process, work_s=process.work_s / speed, interval_s=process.interval_s / speed)
    check_progress(slower)
    failures = sum(number * mean for number, mean in _list_failures(slower))
    # Failed attempts to restart.
    tried = math.expm1(rate * process.restart_s)
    lost_s, restarts_s = max(0.0, failures / rate - slower.work_s - pauses_s), failures * tried / rate
    shrunk_s, attempts = slower.work_s - process.work_s, failures * (1 + tried)
    split = TimeSplit(process.work_s, pauses_s, lost_s, restarts_s, shrunk_s=shrunk_s, failures=attempts)
    # The job restarts with each replica that it gets back, from a checkpoint that took a while to be safe.
    regrown = split.total_s * regrowths_per_s
    return replace(split, restarts_s=restarts_s + regrown * tried / rate, shrunk_s=shrunk_s + regrown * process.lag_s)


def check_progress(process: RunProcess) -> None:
    """Raise a ValueError for a run that never ends."""
    rate = process.failures_per_s
    longest_s = min(process.work_s, process.period_s) + process.lag_s + process.restart_s
    if rate * longest_s > HOPELESS:
        raise ValueError(
            f"the run makes no progress: it is interrupted every {1 / rate:.4g} s on average, and restart, work "
            f"and checkpoint need {longest_s:.4g} s without an interruption; save more often, restart faster or use "
            "fewer GPUs"
        )


def _list_failures(process: RunProcess) -> list[tuple[int, float]]:
    """Return how many segments between safe points there are of each length, and the expected failures in one.

    A first attempt at x seconds fails with probability 1 - e^-rx; completing y seconds takes e^ry - 1 more failures.
    """
    rate, period_s, lag_s = process.failures_per_s, process.period_s, process.lag_s
    # Segments between safe points: their number, the length of the first attempt and of each later one.
    segments = [(1, process.work_s, process.work_s)]
    if process.checkpoints:
        segments = [
            (1, period_s + lag_s, period_s + lag_s),
            (process.checkpoints - 1, period_s, period_s + lag_s),
            (1, max(0.0, process.last_s - lag_s), process.last_s),
        ]
    return [(number, -math.expm1(-rate * first_s) * math.exp(rate * later_s)) for number, first_s, later_s in segments]


EULER_TERMS = 12  # of the inversion of a Laplace transform: seven digits


@cache
def _find_summands() -> tuple[NDArray[np.complex128], FloatArray]:
    """Return the points and the weights of Euler's summation (Abate and Whitt 2006, equations 33 to 35)."""
    terms = EULER_TERMS
    index = np.arange(2 * terms + 1)
    tail = np.cumsum([math.comb(terms, term) for term in range(terms)])[::-1] / 2**terms
    weights = np.concatenate([[0.5], np.ones(terms), tail]) * (-1.0) ** index * 10 ** (terms / 3)
    points = np.empty(len(index), dtype=np.complex128)
    points.real, points.imag = terms * math.log(10) / 3, math.pi * index
    return points, weights


def share_without_spare(spares: int, load: float, repairs: float, spread: float = 0.0) -> float:
    """Return the mean share of a run in which each of *spares* replaces a node under repair.

    *repairs* is the length of the run without waiting, in mean repair times; *load* is the mean number of nodes that
    break in one of them. The run begins with all nodes in order. *spread* is the variance of the number of failures
    beyond that of a constant rate, over its squared mean: 1 is a geometric number, as in a run of exponential length,
    whose share is the Laplace transform itself.
    """
    points, weights = _find_summands()
    rates = np.append(points, 1.0) / repairs
    taken = np.ones_like(rates)  # transform of the time until so many nodes are under repair
    last = np.zeros_like(rates)  # that of the time until one more is, from the one before
    for count in range(spares):
        last = load / (rates + load + count * (1 - last))
        taken = taken * last
    chances = taken / (rates + spares * (1 - last))
    fixed = float(weights @ (chances[:-1] / rates[:-1]).real) / repairs**2
    return min(1.0, max(0.0, fixed + spread * (float(chances[-1].real) / repairs - fixed)))


SETTLED = 8.0  # mean times of repair after which the number of nodes under repair no longer depends on the start


_find_points = cache(lambda: np.polynomial.legendre.leggauss(16))  # whose module NumPy loads when it is asked


def _loads(process: RunProcess, total_s: float) -> tuple[FloatArray, FloatArray]:
    """Return mean numbers of nodes under repair during a run that begins with none, and the shares of its time."""
    first_s = min(total_s, SETTLED * process.repair_s)
    points, weights = _find_points()
    grown = -np.expm1(-first_s * (points + 1) / 2 / process.repair_s)
    shares = weights / 2 * first_s / total_s if total_s else weights / 2
    return process.load * np.append(grown, 1.0), np.append(shares, 1 - shares.sum())


def _mean_speed(process: RunProcess, total_s: float) -> tuple[float, float]:
    """Return the mean speed in a run of *total_s* that continues with its remaining nodes, and how often in a second it
    gets a replica back; the number of nodes under repair is Poisson distributed, up to that with which it stops.
    """
    loads, shares = _loads(process, total_s)
    counts = np.arange(min(process.places, process.most_missing) + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    logarithms = np.log(loads)[:, None] * counts - factorials
    chances = np.exp(logarithms - logarithms.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    speeds = np.array([process.speed(count) for count in (counts - (process.spares or 0)).tolist()])
    backs = loads * (chances[:, :-1] @ (speeds[1:] < speeds[:-1])) / process.repair_s
    return float(shares @ (chances @ speeds)), float(shares @ backs)


def young_s(pause_s: float, failures_per_s: float) -> float:
    """Return Young's interval: sqrt(2 x checkpoint x time between failures)."""
    return math.sqrt(2 * pause_s / failures_per_s) if failures_per_s else math.inf


def daly_s(pause_s: float, failures_per_s: float) -> float:
    """Return Daly's interval of higher order (2006, equation 37)."""
    if not failures_per_s:
        return math.inf
    between_s = 1 / failures_per_s
    if pause_s >= 2 * between_s:
        return between_s
    ratio = math.sqrt(pause_s / (2 * between_s))
    return math.sqrt(2 * pause_s * between_s) * (1 + ratio / 3 + ratio * ratio / 9) - pause_s


def best_interval_s(process: RunProcess, step_s: float) -> float:
    """Return the interval, in full steps, with the least expected time of all that divide the work evenly."""
    if not process.failures_per_s:
        return math.inf
    steps = max(1, math.ceil(process.work_s / step_s))
    # A checkpoint begins when the one before is safe.
    least = min(steps, max(1, math.ceil(process.lag_s / step_s)))

    # Short intervals are tried step by step, long ones by the number of parts into which they divide the work.
    root = math.isqrt(steps)

    def interval_s(index: int) -> float:
        return max(least, index if index <= root else math.ceil(steps / (2 * root + 1 - index))) * step_s

    def total_s(index: int) -> float:
        try:
            return expect_split(replace(process, interval_s=interval_s(index))).total_s
        except ValueError:
            return math.inf

    # The time falls, then rises: its least is sought on a grid, then in thirds.
    grid = sorted({1, 2 * root, *(round((2 * root) ** (point / 60)) for point in range(61))})
    times_s = [total_s(index) for index in grid]
    best = times_s.index(min(times_s))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    while high - low > EXHAUSTED:
        third = (high - low) // 3
        left, right = low + third, high - third
        if total_s(left) <= total_s(right):
            high = right
        else:
            low = left
    return interval_s(min(range(low, high + 1), key=total_s))


# ---- many runs simulated at once, with random failures --------------------------------------------------------------

MOST_FAILURES = 100_000  # in one run; with more, its mean is known well enough


@dataclass(frozen=True, slots=True)
class SimulatedRuns:
    """One value for each run, in seconds except *failures*; the parts sum to *total_s*."""

    total_s: FloatArray
    work_s: float
    checkpoints_s: float
    lost_s: FloatArray
    restarts_s: FloatArray
    waiting_s: FloatArray
    shrunk_s: FloatArray
    failures: FloatArray

    def then(self, other: "SimulatedRuns") -> "SimulatedRuns":
        """Return the runs with another phase after this one."""
        return SimulatedRuns(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def error_s(self) -> float:
        """The standard error of the mean of *total_s*."""
        return float(self.total_s.std(ddof=1) / math.sqrt(len(self.total_s))) if len(self.total_s) > 1 else 0.0


def simulate_runs(process: RunProcess, runs: int, generator: np.random.Generator) -> SimulatedRuns:
    """Simulate *process* this many times."""
    pauses_s = process.checkpoints * process.pause_s
    simulated = SimulatedRuns(np.zeros(runs), process.work_s, pauses_s, *(np.zeros(runs) for _ in range(5)))
    if not process.failures_per_s:
        simulated.total_s[:] = process.work_s + pauses_s
        return simulated
    check_progress(process)
    failures = expect_split(process).failures
    if failures > MOST_FAILURES or failures * runs > INTERRUPTIONS.most:
        raise ValueError(
            f"{failures:.3g} interruptions in each of {runs:,} runs are too many to simulate; "
            "lower --runs, or find out why the job is interrupted so often"
        )
    _RunSimulation(process, simulated, generator).run()
    return simulated


class _RunSimulation:
    """All runs in parallel from interruption to interruption; finished runs drop out."""

    def __init__(self, process: RunProcess, simulated: SimulatedRuns, generator: np.random.Generator) -> None:
        self.process, self.simulated, self.generator = process, simulated, generator
        self.now_s = simulated.total_s
        runs = len(self.now_s)
        self.saved = np.zeros(runs, dtype=np.int64)  # safe checkpoints
        self.fresh = np.ones(runs, dtype=bool)  # not started yet
        self.shrinks = process.repairs and process.shortage is Shortage.SHRINK
        spares = process.spares or 0
        # How many nodes can be under repair at once: one more than the spares stops a waiting job.
        nodes = math.ceil(process.replicas * process.nodes_per_replica) if self.shrinks else 0
        most = min(spares + nodes, process.most_missing) + 1 if process.repairs else 0
        # The time each node under repair returns; a place with a past time is free.
        self.back_s = np.zeros((runs, most))
        self.speeds = np.array([process.speed(count - spares) for count in range(most + 1)])
        # Nodes that must return to complete another replica.
        slower = np.array([(self.speeds > speed).sum() for speed in self.speeds])
        self.needed = np.maximum(np.arange(most + 1) - slower + 1, 1)

    def run(self) -> None:
        active = np.arange(len(self.now_s))
        while active.size:
            active = active[~self._attempt(active)]
        if self.shrinks:
            runs = self.simulated
            spent_s = runs.work_s + runs.checkpoints_s + runs.lost_s + runs.restarts_s + runs.waiting_s
            np.maximum(0.0, runs.total_s - spent_s, out=runs.shrunk_s)

    def _attempt(self, active: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Restart and work until the next interruption or the end; return which runs have ended."""
        process = self.process
        speed, next_back_s = self._speeds(active)
        until_s = self.generator.exponential(1 / process.failures_per_s, active.size)
        restart_s = np.where(self.fresh[active], 0.0, process.restart_s)
        self.fresh[active] = False
        in_restart = until_s < restart_s
        up_s = until_s - restart_s
        left = process.checkpoints - self.saved[active]
        period_s = process.interval_s / speed + process.pause_s if process.checkpoints else np.ones(active.size)
        need_s = left * period_s + process.last_s / speed
        regrown = np.zeros(active.size, dtype=np.int64)
        if self.shrinks:
            # Enough nodes have returned: after the next checkpoint the job restarts with them.
            wanted = np.ceil((next_back_s - self.now_s[active] - restart_s) / period_s).clip(1)
            fits = (speed < 1) & (wanted <= left) & (wanted * period_s + process.lag_s < up_s)
            regrown = np.where(fits, np.nan_to_num(wanted, posinf=0), 0).astype(np.int64)
        ended = ~in_restart & (up_s >= need_s) & (regrown == 0)
        failed = ~ended & (regrown == 0)
        loses = failed & ~in_restart
        safe = np.floor((up_s - process.lag_s) / period_s).clip(0, left).astype(np.int64)
        safe = np.where(loses, safe, np.where(ended, left, regrown))
        ran_s = np.select([in_restart, ended, failed], [0.0, need_s, up_s], regrown * period_s + process.lag_s)
        self.saved[active] += safe
        restarting_s = np.where(in_restart, until_s, restart_s)
        self.simulated.restarts_s[active] += restarting_s
        self.simulated.lost_s[active] += np.where(loses, up_s - safe * period_s, 0.0)
        self.now_s[active] += restarting_s + ran_s
        self.simulated.failures[active] += failed
        if process.repairs:
            self._break(active[failed])
        return np.asarray(ended, dtype=np.bool_)

    def _speeds(self, active: NDArray[np.intp]) -> tuple[FloatArray, FloatArray]:
        """Return the speed of each run with its nodes, and when enough return for another replica."""
        if not self.shrinks:
            return np.ones(active.size), np.full(active.size, np.inf)
        while (stopped := self.speeds[self._away(active)] == 0).any():
            self._wait(active, stopped)
        away = self._away(active)
        back_s = np.where(self.back_s[active] > self.now_s[active, None], self.back_s[active], np.inf)
        back_s.sort(axis=1)
        return self.speeds[away], back_s[np.arange(active.size), np.minimum(self.needed[away], back_s.shape[1]) - 1]

    def _away(self, active: NDArray[np.intp]) -> NDArray[np.intp]:
        return np.asarray((self.back_s[active] > self.now_s[active, None]).sum(axis=1), dtype=np.intp)

    def _break(self, failed: NDArray[np.intp]) -> None:
        """Send nodes to repair; without a spare, wait for the first to return."""
        process = self.process
        broken = failed[self.generator.random(failed.size) < process.broken_share]
        place = self.back_s[broken].argmin(axis=1)
        repair_s = self.generator.exponential(process.repair_s, broken.size)
        self.back_s[broken, place] = self.now_s[broken] + repair_s
        if not self.shrinks:
            self._wait(broken, self._away(broken) == self.back_s.shape[1])

    def _wait(self, active: NDArray[np.intp], short: NDArray[np.bool_]) -> None:
        waiting = active[short]
        back_s = self.back_s[waiting]
        first_s = np.where(back_s > self.now_s[waiting, None], back_s, np.inf).min(axis=1)
        self.simulated.waiting_s[waiting] += first_s - self.now_s[waiting]
        self.now_s[waiting] = first_s
