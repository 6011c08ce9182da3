"""Random noise on computation: how much a step varies when every kernel does."""

from dataclasses import dataclass

import numpy as np

from stepcast.ir.limits import JITTERED
from stepcast.simulation.lanes import COMPUTE
from stepcast.simulation.step import Step
from stepcast.simulation.unfolded import simulate_unfolded

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class StepSpread:
    """Step times of many runs."""

    runs: int
    mean_s: float
    deviation_s: float
    percentiles_s: dict[int, float]


def jittered(step: Step, jitter: float, runs: int, seed: int = 0) -> StepSpread:
    """*runs* steps in which each computation takes a log-normal factor of mean 1 and deviation *jitter*.

    The same seed gives the same runs.
    """
    if not (0 <= jitter < 10 and runs >= 1):
        raise ValueError(f"jitter must be within 0 and 10 and runs at least 1, not {jitter} and {runs}")
    JITTERED.check(step.program.written_tasks * runs)
    program = step.program.written_out
    base_s = program.task_durations_s(program.priced(step.prices))
    computing = program.task_lanes() == COMPUTE
    sigma = np.sqrt(np.log1p(jitter**2))
    noise = np.random.default_rng(seed)
    steps_s = np.empty(runs)
    for run in range(runs):
        durations_s = base_s.copy()
        durations_s[computing] *= np.exp(noise.normal(-(sigma**2) / 2, sigma, int(computing.sum())))
        steps_s[run] = simulate_unfolded(program, durations_s).makespan_s
    ranks = np.percentile(steps_s, PERCENTILES).tolist()
    return StepSpread(runs, float(steps_s.mean()), float(steps_s.std()), dict(zip(PERCENTILES, ranks, strict=True)))
