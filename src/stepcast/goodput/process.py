"""The course of a run as a renewal process, in plain numbers.

Work goes on for an interval, pauses for a checkpoint, goes on. An interruption throws it back to the last
checkpoint that was safe, and the job restarts. A node that broke is repaired; until then a spare stands in,
or the job waits, or it goes on with fewer replicas.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from stepcast.ir.check import require


class Shortage(StrEnum):
    """What a job does while more nodes are under repair than it has spares."""

    WAIT = "wait"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True)
class Process:
    """One phase of a run; times in seconds, rates per second of the whole job."""

    work_s: float
    # Work between two checkpoints.
    interval_s: float = math.inf
    # How long a checkpoint stops the job, and how long after that it is safe.
    pause_s: float = 0.0
    lag_s: float = 0.0
    failures_per_s: float = 0.0
    restart_s: float = 0.0
    # Share of failures after which a node is repaired, for so long on average.
    broken_share: float = 0.0
    repair_s: float = 0.0
    # Nodes beyond those the job runs on; None: there is always another.
    spares: int | None = None
    shortage: Shortage = Shortage.WAIT
    # Replicas of the model, and how many nodes one takes (a part where a node holds several).
    replicas: int = 1
    nodes_per_replica: float = 1.0

    def __post_init__(self) -> None:
        for name in ("work_s", "pause_s", "lag_s", "failures_per_s", "restart_s", "repair_s"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"{name} must be a number, zero or more: {value}")
        require(self.interval_s > 0, "the interval between checkpoints must be above zero")
        require(0 <= self.broken_share <= 1, "the share of broken nodes must be from 0 to 1")
        require(self.spares is None or self.spares >= 0, "spares must be zero or more")
        require(self.replicas >= 1 and self.nodes_per_replica > 0, "a job has replicas, on nodes")

    @property
    def period_s(self) -> float:
        return self.interval_s + self.pause_s

    @property
    def checkpoints(self) -> int:
        """Taken in the course of the work: none that would not be safe before its end."""
        if not math.isfinite(self.interval_s):
            return 0
        return max(0, math.ceil((self.work_s - self.lag_s) / self.interval_s) - 1)

    @property
    def last_s(self) -> float:
        """Work after the last checkpoint."""
        return self.work_s - self.checkpoints * self.interval_s if self.checkpoints else self.work_s

    @property
    def repairs(self) -> bool:
        """Whether a shortage of nodes can come about."""
        return self.spares is not None and self.failures_per_s * self.broken_share * self.repair_s > 0

    def speed(self, missing: int) -> float:
        """Of a job that lacks *missing* nodes, against the whole one: those left form whole replicas."""
        if missing <= 0:
            return 1.0
        lost = min(self.replicas, math.ceil(missing / self.nodes_per_replica - 1e-9))
        return (self.replicas - lost) / self.replicas


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the time of a run goes; the parts sum to it."""

    work_s: float
    checkpoints_s: float = 0.0
    lost_s: float = 0.0
    restarts_s: float = 0.0
    waiting_s: float = 0.0
    # Work that took longer because replicas were missing.
    shrunk_s: float = 0.0
    failures: float = 0.0

    @property
    def total_s(self) -> float:
        return self.work_s + self.checkpoints_s + self.lost_s + self.restarts_s + self.waiting_s + self.shrunk_s

    def __add__(self, other: "TimeSplit") -> "TimeSplit":
        return TimeSplit(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))
