"""The price of an operator: its seconds, where the number came from, and the few rates of a GPU that decide it.

Every rate may be a number or an array that broadcasts with the sizes, so that one function prices one
operator on one GPU and a million operators on many.
"""

import math
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from stepcast.cost.fits import ComputeFit
from stepcast.hardware.cluster import ORDINARY, Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.types import DType, dataclass
from stepcast.ir.work import Compute, Elementwise, Recorded


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


def require_seconds(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a price must be a finite number of seconds, zero or more, not {seconds!r}")
    return seconds


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
        require_seconds(self.seconds)
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


Number = float | FloatArray

TENSOR = "tensor"
SIMT = "simt"


class Rates(NamedTuple):
    """One GPU as a kernel that computes in one number format sees it."""

    peak_flops: Number
    bandwidth_bytes_per_s: Number
    sms: Number
    l2_bytes: Number
    clock_hz: Number
    shared_memory_bytes: Number
    launch_s: Number


def matrix_unit(gpu: Gpu, dtype: DType) -> str:
    """Return the unit that multiplies: fp32 and fp64 run on the ordinary cores, all else on tensor cores."""
    return SIMT if gpu.runs_as(dtype) in ORDINARY else TENSOR


def cached_fraction(moved: Number, gpu: Gpu, share: float, steepness: float = 6.0) -> Number:
    """Return the share of bytes that come from the L2 cache where *moved* bytes are used in turn."""
    return 1.0 / (1.0 + (moved / (share * gpu.l2_bytes)) ** steepness)


@lru_cache(maxsize=256)
def matrix_rates(gpu: Gpu, dtype: DType) -> Rates:
    return _rates(gpu, gpu.matrix_peak_flops(dtype))


def vector_rates(gpu: Gpu) -> Rates:
    return _rates(gpu, gpu.vector_flops["fp32"])


def _rates(gpu: Gpu, peak_flops: float) -> Rates:
    return Rates(
        peak_flops,
        gpu.memory_bandwidth_bytes_per_s,
        float(gpu.sms),
        gpu.l2_bytes,
        gpu.clock_hz,
        gpu.shared_memory_per_sm_bytes,
        gpu.launch_overhead_s,
    )


def scale_rates(rates: Rates, gpu: Gpu, fit: ComputeFit, peak_share: float = 1.0) -> Rates:
    """Return *rates* with the share of its memory bandwidth that the architecture reaches, and *peak_share*."""
    share = fit.memory_share(gpu.architecture)
    if share == 1.0 and peak_share == 1.0:
        return rates
    return rates._replace(
        peak_flops=rates.peak_flops * peak_share, bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s * share
    )


def price_seconds(seconds: float, work: Compute, kind: str, gpu: Gpu, fit: ComputeFit) -> Price:
    """Return the price of *work* that takes *seconds*, with its physical bound and the uncertainty of its *kind*."""
    if isinstance(work, Recorded):
        return Price.spread(seconds, PriceSource.MEASURED, Bound.COMPUTE, 0.0)
    if isinstance(work, Elementwise):
        flops, rates = float(work.elements), vector_rates(gpu)
    else:
        flops, rates = work.flops, matrix_rates(gpu, work.dtype)
    ideal_s = (flops / rates.peak_flops, work.moved_bytes / rates.bandwidth_bytes_per_s, rates.launch_s)
    longest_s = max(ideal_s)
    bound = (Bound.COMPUTE, Bound.MEMORY, Bound.LAUNCH)[ideal_s.index(longest_s)]
    source = PriceSource.FITTED if fit.is_measured(kind, gpu.architecture) else PriceSource.SCALED
    efficiency = min(1.0, float(longest_s) / seconds) if seconds > 0 else 1.0
    return Price.spread(seconds, source, bound, fit.half_width(kind, gpu.architecture), efficiency)
