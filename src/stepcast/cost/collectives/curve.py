"""Time as a function of size: what every algorithm of every collective comes down to.

    t(S) = start + S * s_per_byte + sum of ramps,   ramp(S) = s_per_byte * min(S, until)

The start is latency, the slope is bandwidth, and a ramp is an effect that grows with the size up to a point:
channels that open one by one, a pipeline that fills. All terms are non-negative, so a curve never falls.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Size = TypeVar("Size", float, NDArray[float64])
else:
    Size = TypeVar("Size")


@dataclass(frozen=True, slots=True)
class Ramp:
    s_per_byte: float
    until_bytes: float

    def __post_init__(self) -> None:
        if not (self.s_per_byte >= 0 and self.until_bytes >= 0):
            raise ValueError(f"a ramp must not fall, not {self}")


@dataclass(frozen=True, slots=True)
class Curve:
    start_s: float
    s_per_byte: float
    ramps: tuple[Ramp, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.start_s < math.inf and 0 <= self.s_per_byte < math.inf):
            raise ValueError(f"a curve starts at zero or above and does not fall, not {self}")

    def seconds(self, size_bytes: Size) -> Size:
        """Time of one size, or of an array of sizes."""
        total = self.start_s + size_bytes * self.s_per_byte
        for ramp in self.ramps:
            total = total + ramp.s_per_byte * _lesser(size_bytes, ramp.until_bytes)
        return total

    def of_share(self, share: float) -> "Curve":
        """The curve over the whole size, of a phase that handles *share* of it."""
        ramps = tuple(Ramp(ramp.s_per_byte * share, ramp.until_bytes / share) for ramp in self.ramps)
        return Curve(self.start_s, self.s_per_byte * share, ramps)


ZERO = Curve(0.0, 0.0)


def one_after_another(phases: Sequence[Curve]) -> Curve:
    """The sum: each phase starts when the one before has ended."""
    return Curve(
        sum(phase.start_s for phase in phases),
        sum(phase.s_per_byte for phase in phases),
        tuple(ramp for phase in phases for ramp in phase.ramps),
    )


def _lesser(size_bytes: Size, limit: float) -> Size:
    """The only step that a number and an array take differently."""
    if isinstance(size_bytes, (int, float)):
        return min(size_bytes, limit)
    import numpy

    return numpy.minimum(size_bytes, limit)
