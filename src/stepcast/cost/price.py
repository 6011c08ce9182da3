"""The price of an operator: its seconds, and where the number came from."""

import math
from enum import StrEnum

from stepcast.ir.dataclass import dataclass


class PriceSource(StrEnum):
    """From the most to the least trusted."""

    MEASURED = "measured"  # this very operator, on this GPU
    CALIBRATED = "calibrated"  # the model, with constants measured on this GPU
    FITTED = "fitted"  # the model, with constants learnt from measurements on this GPU or its kind
    SCALED = "scaled"  # the model, with constants of other GPUs: nobody measured such work on this one
    ROOFLINE = "roofline"  # peaks alone


class Bound(StrEnum):
    """The resource that limits the operator."""

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
    efficiency: float  # share of the peak rate of the bounding resource; at most 1
    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"a price must be a finite number of seconds, zero or more, not {self.seconds!r}")
        if not 0 <= self.low_s <= self.seconds <= self.high_s:
            raise ValueError(f"a price of {self.seconds} s cannot be outside {self.low_s} to {self.high_s} s")

    @classmethod
    def spread(
        cls, seconds: float, source: PriceSource, bound: Bound, half_width: float, efficiency: float = 1.0
    ) -> "Price":
        """Return a price whose range reaches from seconds / (1 + half_width) to seconds * (1 + half_width)."""
        return cls(seconds, source, bound, efficiency, seconds / (1.0 + half_width), seconds * (1.0 + half_width))

    def times(self, factor: float) -> "Price":
        """Return the price of the same work on a GPU that is *factor* times as slow."""
        low_s, high_s = self.low_s * factor, self.high_s * factor
        return Price(self.seconds * factor, self.source, self.bound, self.efficiency / factor, low_s, high_s)
