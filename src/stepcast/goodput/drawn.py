"""The course of a run drawn at random, many runs at once: what the closed form averages, with its spread."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepcast.goodput.closed import check_progress, expected
from stepcast.goodput.process import Process, Shortage
from stepcast.ir.arrays import FloatArray
from stepcast.ir.limits import INTERRUPTIONS

# A run that has more interruptions is known by its mean well enough.
MOST_FAILURES = 100_000  # of one run


@dataclass(frozen=True, slots=True)
class Courses:
    """One value for each run, in seconds but for *failures*; the parts sum to *total_s*."""

    total_s: FloatArray
    work_s: float
    checkpoints_s: float
    lost_s: FloatArray
    restarts_s: FloatArray
    waiting_s: FloatArray
    shrunk_s: FloatArray
    failures: FloatArray

    def then(self, other: "Courses") -> "Courses":
        """Those of a further phase after these."""
        return Courses(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def error_s(self) -> float:
        """Standard error of the mean of *total_s*."""
        return float(self.total_s.std(ddof=1) / math.sqrt(len(self.total_s))) if len(self.total_s) > 1 else 0.0


def draw(process: Process, runs: int, generator: np.random.Generator) -> Courses:
    """*runs* courses of *process*."""
    if not process.failures_per_s:
        none = np.zeros(runs)
        pauses_s = process.checkpoints * process.pause_s
        return Courses(np.full(runs, process.work_s + pauses_s), process.work_s, pauses_s, none, none, none, none, none)
    check_progress(process)
    failures = expected(process).failures
    if failures > MOST_FAILURES or failures * runs > INTERRUPTIONS.most:
        raise ValueError(
            f"{failures:.3g} interruptions in each of {runs:,} runs are too many to draw; "
            "lower --runs, or look at why the job is interrupted so often"
        )
    return _Drawing(process, runs, generator).all()


class _Drawing:
    """From interruption to interruption, all runs abreast; those at their end drop out."""

    def __init__(self, process: Process, runs: int, generator: np.random.Generator) -> None:
        self.process, self.runs, self.generator = process, runs, generator
        self.now_s = np.zeros(runs)
        self.saved = np.zeros(runs, dtype=np.int64)  # checkpoints that are safe
        self.fresh = np.ones(runs, dtype=bool)  # nothing to restart yet
        self.lost_s, self.restarts_s, self.waiting_s = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self.failures = np.zeros(runs)
        self.shrinks = process.repairs and process.shortage is Shortage.SHRINK
        # When each node under repair comes back; a place in the past is free.
        self.back_s = np.zeros((runs, _places(process) if process.repairs else 0))
        most = self.back_s.shape[1]
        spares = process.spares or 0
        self.speeds = np.array([process.speed(count - spares) for count in range(most + 1)])
        # Nodes that must come back until a replica more is whole.
        slower = np.array([(self.speeds > speed).sum() for speed in self.speeds])
        self.wanted = np.maximum(np.arange(most + 1) - slower + 1, 1)

    def all(self) -> Courses:
        going = np.arange(self.runs)
        while going.size:
            going = going[~self._attempt(going)]
        process = self.process
        pauses_s = process.checkpoints * process.pause_s
        spent_s = process.work_s + pauses_s + self.lost_s + self.restarts_s + self.waiting_s
        shrunk_s = np.maximum(0.0, self.now_s - spent_s) if self.shrinks else np.zeros(self.runs)
        return Courses(
            self.now_s, process.work_s, pauses_s, self.lost_s, self.restarts_s, self.waiting_s, shrunk_s, self.failures
        )

    def _attempt(self, going: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Restart, and work until the next interruption or the end; whether it was the end."""
        process = self.process
        speed, next_back_s = self._standing(going)
        until_s = self.generator.exponential(1 / process.failures_per_s, going.size)
        restart_s = np.where(self.fresh[going], 0.0, process.restart_s)
        self.fresh[going] = False
        in_restart = until_s < restart_s
        up_s = until_s - restart_s
        left = process.checkpoints - self.saved[going]
        period_s = process.interval_s / speed + process.pause_s if process.checkpoints else np.ones(going.size)
        need_s = left * period_s + process.last_s / speed
        regrown = np.zeros(going.size, dtype=np.int64)
        if self.shrinks:
            # Enough nodes are back: after the checkpoint that follows, the job starts again with them.
            wanted = np.ceil((next_back_s - self.now_s[going] - restart_s) / period_s).clip(1)
            fits = (speed < 1) & (wanted <= left) & (wanted * period_s + process.lag_s < up_s)
            regrown = np.where(fits, np.nan_to_num(wanted, posinf=0), 0).astype(np.int64)
        ended = ~in_restart & (up_s >= need_s) & (regrown == 0)
        failed = ~ended & (regrown == 0)
        safe = np.floor((up_s - process.lag_s) / period_s).clip(0, left).astype(np.int64)
        safe = np.where(failed & ~in_restart, safe, np.where(ended, left, regrown))
        ran_s = np.where(
            in_restart, 0.0, np.where(ended, need_s, np.where(failed, up_s, regrown * period_s + process.lag_s))
        )
        self.saved[going] += safe
        restarting_s = np.where(in_restart, until_s, restart_s)
        self.restarts_s[going] += restarting_s
        self.lost_s[going] += np.where(failed & ~in_restart, up_s - safe * period_s, 0.0)
        self.now_s[going] += restarting_s + ran_s
        self.failures[going] += failed
        if process.repairs:
            self._break(going[failed])
        return np.asarray(ended, dtype=np.bool_)

    def _standing(self, going: NDArray[np.intp]) -> tuple[FloatArray, FloatArray]:
        """The speed of each run with the nodes it has, and when enough are back for another replica."""
        if not self.shrinks:
            return np.ones(going.size), np.full(going.size, np.inf)
        while (standing := self.speeds[self._away(going)] == 0).any():
            self._wait(going, standing)
        away = self._away(going)
        back_s = np.where(self.back_s[going] > self.now_s[going, None], self.back_s[going], np.inf)
        back_s.sort(axis=1)
        return self.speeds[away], back_s[np.arange(going.size), np.minimum(self.wanted[away], back_s.shape[1]) - 1]

    def _away(self, going: NDArray[np.intp]) -> NDArray[np.intp]:
        return np.asarray((self.back_s[going] > self.now_s[going, None]).sum(axis=1), dtype=np.intp)

    def _break(self, failed: NDArray[np.intp]) -> None:
        """Send nodes to repair; with no spare left, wait for the first to come back."""
        process = self.process
        broken = failed[self.generator.random(failed.size) < process.broken_share]
        place = self.back_s[broken].argmin(axis=1)
        repair_s = self.generator.exponential(process.repair_s, broken.size)
        self.back_s[broken, place] = self.now_s[broken] + repair_s
        if not self.shrinks:
            self._wait(broken, self._away(broken) == self.back_s.shape[1])

    def _wait(self, going: NDArray[np.intp], short: NDArray[np.bool_]) -> None:
        waiting = going[short]
        back_s = self.back_s[waiting]
        first_s = np.where(back_s > self.now_s[waiting, None], back_s, np.inf).min(axis=1)
        self.waiting_s[waiting] += first_s - self.now_s[waiting]
        self.now_s[waiting] = first_s


def _places(process: Process) -> int:
    """Nodes that can be under repair at once: one more than spares stops a job that waits."""
    spares = process.spares or 0
    if process.shortage is Shortage.WAIT:
        return spares + 1
    load = process.failures_per_s * process.broken_share * process.repair_s
    nodes = math.ceil(process.replicas * process.nodes_per_replica)
    return min(spares + nodes, math.ceil(load + 8 * math.sqrt(load) + 8)) + 1
