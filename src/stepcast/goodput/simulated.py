"""Runs simulated with random failures, many at once: the spread around the mean of the closed form."""

import math

import numpy as np
from numpy.typing import NDArray

from stepcast.goodput.process import RunProcess, Shortage, check_progress, expect_split
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import INTERRUPTIONS

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
    if not process.failures_per_s:
        none = np.zeros(runs)
        pauses_s = process.checkpoints * process.pause_s
        return SimulatedRuns(
            np.full(runs, process.work_s + pauses_s), process.work_s, pauses_s, none, none, none, none, none
        )
    check_progress(process)
    failures = expect_split(process).failures
    if failures > MOST_FAILURES or failures * runs > INTERRUPTIONS.most:
        raise ValueError(
            f"{failures:.3g} interruptions in each of {runs:,} runs are too many to simulate; "
            "lower --runs, or find out why the job is interrupted so often"
        )
    return _RunSimulation(process, runs, generator).run()


class _RunSimulation:
    """All runs in parallel from interruption to interruption; finished runs drop out."""

    def __init__(self, process: RunProcess, runs: int, generator: np.random.Generator) -> None:
        self.process, self.runs, self.generator = process, runs, generator
        self.now_s = np.zeros(runs)
        self.saved = np.zeros(runs, dtype=np.int64)  # safe checkpoints
        self.fresh = np.ones(runs, dtype=bool)  # not started yet
        self.lost_s, self.restarts_s, self.waiting_s = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self.failures = np.zeros(runs)
        self.shrinks = process.repairs and process.shortage is Shortage.SHRINK
        # The time each node under repair returns; a place with a past time is free.
        self.back_s = np.zeros((runs, _repair_places(process) if process.repairs else 0))
        most = self.back_s.shape[1]
        spares = process.spares or 0
        self.speeds = np.array([process.speed(count - spares) for count in range(most + 1)])
        # Nodes that must return to complete another replica.
        slower = np.array([(self.speeds > speed).sum() for speed in self.speeds])
        self.needed = np.maximum(np.arange(most + 1) - slower + 1, 1)

    def run(self) -> SimulatedRuns:
        active = np.arange(self.runs)
        while active.size:
            active = active[~self._attempt(active)]
        process = self.process
        pauses_s = process.checkpoints * process.pause_s
        spent_s = process.work_s + pauses_s + self.lost_s + self.restarts_s + self.waiting_s
        shrunk_s = np.maximum(0.0, self.now_s - spent_s) if self.shrinks else np.zeros(self.runs)
        return SimulatedRuns(
            self.now_s, process.work_s, pauses_s, self.lost_s, self.restarts_s, self.waiting_s, shrunk_s, self.failures
        )

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
        safe = np.floor((up_s - process.lag_s) / period_s).clip(0, left).astype(np.int64)
        safe = np.where(failed & ~in_restart, safe, np.where(ended, left, regrown))
        ran_s = np.where(
            in_restart, 0.0, np.where(ended, need_s, np.where(failed, up_s, regrown * period_s + process.lag_s))
        )
        self.saved[active] += safe
        restarting_s = np.where(in_restart, until_s, restart_s)
        self.restarts_s[active] += restarting_s
        self.lost_s[active] += np.where(failed & ~in_restart, up_s - safe * period_s, 0.0)
        self.now_s[active] += restarting_s + ran_s
        self.failures[active] += failed
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
        self.waiting_s[waiting] += first_s - self.now_s[waiting]
        self.now_s[waiting] = first_s


def _repair_places(process: RunProcess) -> int:
    """Return how many nodes can be under repair at once: one more than the spares stops a waiting job."""
    spares = process.spares or 0
    if process.shortage is Shortage.WAIT:
        return spares + 1
    load = process.failures_per_s * process.broken_share * process.repair_s
    nodes = math.ceil(process.replicas * process.nodes_per_replica)
    return min(spares + nodes, math.ceil(load + 8 * math.sqrt(load) + 8)) + 1
