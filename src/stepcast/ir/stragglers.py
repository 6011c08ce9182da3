"""Operations of sampled steps, worker by worker: what a straggler analysis starts from.

One worker stands for its tensor-parallel group. Operations are known by their stage, their kind and their
turn among that kind; each has a start and a duration in every step and replica.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stepcast.ir.arrays import FloatArray
from stepcast.ir.check import require


class ReplicaOperation(NamedTuple):
    """One operation of every replica and step."""

    stage: int
    kind: str
    turn: int
    chunk: int = -1  # of the stage; -1: of none
    place: int = -1  # of the chunk in the model


@dataclass(frozen=True, eq=False)
class WorkerSteps:
    """Seconds by (step, replica, operation), in the order in which the first replica began them."""

    operations: tuple[ReplicaOperation, ...]
    steps: tuple[int, ...]
    ranks: npt.NDArray[np.int64]  # by (replica, stage)
    start_s: FloatArray
    duration_s: FloatArray
    source: str = ""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = (len(self.steps), self.replicas, len(self.operations))
        require(self.start_s.shape == self.duration_s.shape == shape, f"expected arrays of shape {shape}")
        require(len(self.operations) > 0 and len(self.steps) > 0, "expected operations of at least one step")

    @property
    def replicas(self) -> int:
        return int(self.ranks.shape[0])

    @property
    def stages(self) -> int:
        return int(self.ranks.shape[1])
