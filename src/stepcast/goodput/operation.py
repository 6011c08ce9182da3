"""How a run is operated: what fails how often, what is saved where, how it comes back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepcast.goodput.process import Shortage
from stepcast.ir.check import require
from stepcast.units import DAY, GB, MINUTE


@dataclass(frozen=True, slots=True)
class Failures:
    """Mean times between the interruptions that one GPU, node or link causes."""

    name: str = "none"
    gpu_s: float = math.inf
    node_s: float = math.inf
    link_s: float = math.inf
    # Share of interruptions after which a node is taken out, and how long its repair lasts.
    broken_share: float = 0.0
    repair_s: float = DAY
    description: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("gpu_s", "node_s", "link_s"):
            require(getattr(self, name) > 0, f"a time between failures must be above zero ({name})")

    def per_s(self, gpus: int, nodes: int, links: int) -> float:
        """Interruptions of a job on so many parts: any one of them stops it."""
        return gpus / self.gpu_s + nodes / self.node_s + links / self.link_s


NO_FAILURES = Failures()


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint: its size, and how fast it leaves the GPUs and reaches the store."""

    size_bytes: float = 0.0
    node_bytes_per_s: float = 1 * GB
    store_bytes_per_s: float = math.inf
    # Whether training goes on while the copy in the host's memory is written.
    background: bool = True
    # From a GPU to its host; and what a pause takes besides, to plan who writes what (PyTorch 2024, "Reducing
    # Model Checkpointing Times by Over 10x": of 148.8 s, a pause of 6.3 s is left with the rest deferred).
    copy_bytes_per_s: float = 25 * GB
    planning_s: float = 6.3

    def __post_init__(self) -> None:
        for name in ("node_bytes_per_s", "store_bytes_per_s", "copy_bytes_per_s"):
            require(getattr(self, name) > 0, f"{name} must be above zero")
        require(self.size_bytes >= 0, "a checkpoint has a size of zero or more")

    def write_s(self, nodes: int) -> float:
        return self.size_bytes / min(nodes * self.node_bytes_per_s, self.store_bytes_per_s)

    def pause_s(self, nodes: int, gpus: int) -> float:
        if not self.size_bytes:
            return 0.0
        copied_s = self.size_bytes / (gpus * self.copy_bytes_per_s)
        return self.planning_s + (copied_s if self.background else self.write_s(nodes))

    def lag_s(self, nodes: int) -> float:
        return self.write_s(nodes) if self.background else 0.0


@dataclass(frozen=True, slots=True)
class Restart:
    """From an interruption to the first step; reading the checkpoint comes on top.

    MegaScale's, for want of another that was published: detected and diagnosed within ten minutes, at work
    within fifteen (Jiang et al. 2024, section 6.3).
    """

    detect_s: float = 10 * MINUTE
    reschedule_s: float = 4 * MINUTE
    warm_up_s: float = 1 * MINUTE

    @property
    def total_s(self) -> float:
        return self.detect_s + self.reschedule_s + self.warm_up_s


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Slow spells: how many a node has in a day, how long one lasts and how much longer a step takes."""

    per_node_day: float = 0.0
    spell_s: float = 0.0
    slowdown: float = 0.0

    def factor(self, nodes: int) -> float:
        """A step waits for its slowest rank: one slow node is enough, and a second makes it no slower."""
        active = nodes * self.per_node_day * self.spell_s / DAY
        return 1 + self.slowdown * -math.expm1(-active)


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause that is planned, as for an evaluation."""

    every_steps: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Operation:
    failures: Failures = NO_FAILURES
    saving: Saving = Saving()
    restart: Restart = Restart()
    stragglers: Stragglers = Stragglers()
    pause: Pause | None = None
    # Seconds of work between checkpoints; None: the best.
    interval_s: float | None = None
    spares: int | None = None
    shortage: Shortage = Shortage.WAIT


# What a node draws, by what its GPUs do.

# Of a GPU's power limit. Measured on an H200 (tools/measure_hf_steps.py, measure_power.py): 653 W of 700 over
# 56 training steps that kept it busy, 121 W with a kernel that only waits. What communication draws that
# computation waits for was not measured: a third is taken, between waiting and moving memory (560 W).
COMPUTING, EXCHANGING, IDLE = 0.93, 0.33, 0.17
BUSY_PARTS = ("compute", "optimizer")
IDLE_PARTS = ("bubble",)


def node_watts(gpu_power_w: float, gpus: int, host_w: float, breakdown_s: Mapping[str, float]) -> float:
    """The mean over a step that spends its time as *breakdown_s* tells."""
    total_s = sum(breakdown_s.values())
    busy_s = sum(breakdown_s.get(part, 0.0) for part in BUSY_PARTS)
    idle_s = sum(breakdown_s.get(part, 0.0) for part in IDLE_PARTS)
    share = (COMPUTING * busy_s + IDLE * idle_s + EXCHANGING * (total_s - busy_s - idle_s)) / (total_s or 1)
    return host_w + gpus * gpu_power_w * share


def idle_node_watts(gpu_power_w: float, gpus: int, host_w: float) -> float:
    return host_w + gpus * gpu_power_w * IDLE
