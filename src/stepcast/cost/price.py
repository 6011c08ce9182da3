"""What an operator costs, and where the number came from."""

import math
from dataclasses import dataclass
from enum import StrEnum


class PriceSource(StrEnum):
    """From the most to the least trusted."""

    MEASURED = "measured"  # this very operator, on this GPU
    CALIBRATED = "calibrated"  # the model, with constants measured on this GPU
    FITTED = "fitted"  # the model, with constants learnt from measurements on this GPU or its kind
    SCALED = "scaled"  # the model, with constants of other GPUs: nobody measured such work on this one
    ROOFLINE = "roofline"  # peaks alone


class Bound(StrEnum):
    """What keeps the operator from being faster."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LAUNCH = "launch"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of one operator with a range that holds the true value about nine times in ten."""

    seconds: float
    source: PriceSource
    bound: Bound
    efficiency: float  # of what the bounding resource could do; at most 1
    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"a price must be a finite number of seconds, zero or more, not {self.seconds!r}")
        if not 0 <= self.low_s <= self.seconds <= self.high_s:
            raise ValueError(f"a price of {self.seconds} s cannot lie outside {self.low_s} to {self.high_s} s")

    def times(self, factor: float) -> "Price":
        """The same work on what is *factor* times as slow."""
        return Price(
            self.seconds * factor,
            self.source,
            self.bound,
            self.efficiency / factor,
            self.low_s * factor,
            self.high_s * factor,
        )
