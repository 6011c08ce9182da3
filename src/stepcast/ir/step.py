"""StepReport: the result of simulating one training step, and the Band in which its measured time is expected."""

from collections.abc import Mapping
from dataclasses import asdict, field

from stepcast.ir.types import FactDict, Facts, dataclass, pick, require

LEVEL = 0.9
"""The share of the runs that a band was fitted to inside it; also of the range of a single cost estimate."""


@dataclass(frozen=True, slots=True)
class Band:
    """Measured over predicted: from *low* to *high* for a share *level* of runs *of* that kind.

    The band may be wider on one side of 1. *widened* names the parts of this prediction without measurements.
    """

    low: float
    high: float
    of: str
    rows: int
    level: float = LEVEL
    widened: tuple[str, ...] = ()
    # False where no run on such GPUs was measured.
    measured: bool = True
    # Seconds that a step may take longer, whatever its length.
    late_s: float = 0.0

    def around(self, step_s: float) -> tuple[float, float]:
        """Return the ends in seconds; the prediction itself is always inside."""
        return step_s * min(1.0, self.low), step_s * max(1.0, self.high) + self.late_s

    def facts(self) -> FactDict:
        """Return the level of the interval and the runs that it comes from."""
        return {**pick(self, "level of rows"), "widened": list(self.widened)}


# Parts of a step, in the order in which they are shown.
PARTS = ("compute", "tp", "cp", "ep", "dp", "pp", "bubble", "optimizer", "other")
# The part of a step that the exposed communication of a group counts as.
GROUPS_OF_PART = {
    "tp": ("tp", "expert-tp"),
    "cp": ("cp",),
    "ep": ("ep",),
    "dp": (*("dp", "expert-dp", "shard", "replica", "expert-shard", "expert-replica"), "mirror", "embedding"),
    "pp": ("pp",),
    "other": ("world", "to-host", "from-host"),
}
PART_OF_GROUP = {group: part for part, groups in GROUPS_OF_PART.items() for group in groups}
SUM_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class StageReport:
    """One pipeline stage; busy, exposed communication, waiting for the host and bubble sum to the step."""

    stage: int
    busy_s: float
    exposed_s: float
    host_s: float
    bubble_s: float
    peak_in_flight: int


@dataclass(frozen=True, slots=True)
class Exposure:
    """Communication of one group on an average stage."""

    total_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """The throughput of a step. *mfu* is of the GPU's dense peak in the format it trains in, or in those
    that a captured program multiplies in.
    """

    tokens_per_s: float
    tflops_per_gpu: float
    mfu: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """The breakdown is that of an average stage and sums to the step."""

    step_s: float
    breakdown_s: Mapping[str, float]
    communication_s: Mapping[str, Exposure]
    stages: tuple[StageReport, ...]
    low_s: float
    high_s: float
    gpus: int
    schedule: str
    micro_batches: int
    # The runs that *low_s* and *high_s* come from; None: every cost estimate at the end of its own range.
    band: Band | None = None
    # The run, for comparisons with another one.
    run: Facts = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    throughput: Throughput | None = None
    memory_bytes: Facts | None = None
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        total_s = sum(self.breakdown_s.values())
        is_sum = abs(total_s - self.step_s) <= SUM_TOLERANCE * max(self.step_s, 1e-12)
        require(is_sum, f"the parts sum to {total_s} s, not to the step of {self.step_s} s")

    @property
    def bubble_share(self) -> float:
        return self.breakdown_s["bubble"] / self.step_s if self.step_s else 0.0

    def facts(self) -> FactDict:
        """Return the step as the JSON contract spells it."""
        band = self.band.facts() if self.band else {"level": LEVEL, "of": "prices"}
        return {
            "step_s": self.step_s,
            "breakdown_s": {part: self.breakdown_s[part] for part in PARTS},
            "communication_s": {
                group: {"total": exposure.total_s, "exposed": exposure.exposed_s}
                for group, exposure in self.communication_s.items()
            },
            "stages": [asdict(stage) for stage in self.stages],
            "run": dict(self.run),
            **pick(self, "gpus schedule micro_batches bubble_fraction=bubble_share"),
            **{name: getattr(self.throughput, name, None) for name in ("tokens_per_s", "tflops_per_gpu", "mfu")},
            "tokens_per_s_per_gpu": self.throughput and self.throughput.tokens_per_s / self.gpus,
            "memory_bytes": self.memory_bytes,
            "uncertainty": {**pick(self, "low_s high_s"), **band},
            "sources": dict(self.sources),
            "warnings": list(self.warnings),
            "assumptions": list(self.assumptions),
        }
