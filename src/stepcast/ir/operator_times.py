"""Measured operators: what ran and how long it took, without when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepcast.ir.check import require
from stepcast.ir.work import Compute


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator of one size. *works* are its kernels, where it is several that were timed together."""

    name: str
    works: tuple[Compute, ...]
    seconds: float  # of one run; the median where it ran often
    runs: int = 1

    def __post_init__(self) -> None:
        require(len(self.works) > 0, f"{self.name}: an operator needs at least one kernel")
        require(0 < self.seconds < float("inf"), f"{self.name}: a time must be above zero")


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Operators of one GPU. *matrix_share* says what they are part of: None where each was timed by itself,
    else the share of a step's kernel time that matrix kernels take."""

    operators: Sequence[OperatorTime]
    source: str = ""
    device: str = ""  # the name that the driver gives the GPU; empty where the file does not tell
    matrix_share: float | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)  # reason -> how many measurements
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.matrix_share is None or 0 <= self.matrix_share <= 1, "a share must lie within 0 and 1")
