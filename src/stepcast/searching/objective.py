"""What a search makes least: of a candidate's bounds, and of its prediction, so that the first never exceeds
the second.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepcast.forecast.prediction import Prediction
from stepcast.goodput.operation import COMPUTING, IDLE, node_watts
from stepcast.hardware import Cluster
from stepcast.ir.arrays import FloatArray
from stepcast.searching.bound import Bounds


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one that was simulated."""

    prediction: Prediction
    memory_bytes: float
    gpus: int
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Objective:
    """*least* of the bounds and the GPUs of many candidates, *score* of one."""

    least: Callable[[Bounds, NDArray[np.int64]], FloatArray]
    score: Callable[[Candidate], float]


def _least_energy(limits: Bounds, gpus: NDArray[np.int64]) -> FloatArray:
    """Every second draws what an idle GPU does, and those of computing more; in units of a GPU's limit."""
    with np.errstate(invalid="ignore"):
        energy: FloatArray = gpus * (IDLE * limits.time_s + (COMPUTING - IDLE) * limits.computing_s)
    return np.where(np.isfinite(limits.time_s), energy, np.inf)


def _energy(candidate: Candidate) -> float:
    report = candidate.prediction.report
    return candidate.gpus * report.step_s * node_watts(1.0, 1, 0.0, report.breakdown_s)


def _gpu_seconds(limits: Bounds, gpus: NDArray[np.int64]) -> FloatArray:
    return limits.time_s * gpus


_PER_GPU = Objective(_gpu_seconds, lambda each: each.prediction.step_s * each.gpus)

OBJECTIVES: dict[str, Objective] = {
    "step": Objective(lambda limits, _: limits.time_s, lambda each: each.prediction.step_s),
    "throughput": _PER_GPU,  # tokens per second and GPU, of one batch: the fewest GPU-seconds
    "cost": _PER_GPU,  # GPU-hours are what is paid
    "memory": Objective(
        lambda limits, _: np.where(np.isfinite(limits.time_s), limits.memory_bytes, np.inf),
        lambda each: each.memory_bytes,
    ),
    "energy": Objective(_least_energy, _energy),
}
