"""The load that an operator is part of, and the clock that a GPU can hold under it.

Dense matrix work can ask for more power than the board may draw. Power grows with clock and voltage together, so
a clock that must fall to save a share of power falls by less than that share. Energy per operation falls with the
process node; the table of the fit holds it per architecture and number format.
"""

import math
from functools import lru_cache

import numpy as np

from stepcast.cost.fits import ComputeFit, PowerFit
from stepcast.cost.price import Number, Rates
from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.ir.types import DType, dataclass, replace

LEAST_SLOWDOWN = 1.02  # the difference between two measurements of the same


@dataclass(frozen=True, slots=True)
class Load:
    """The work around an operator; it decides how hot the GPU is and whether launches queue up."""

    busy_s: float  # how long the work is kept up; 0: the operator by itself, cold caches, in short bursts
    duty: float = 1.0  # share of that time in matrix kernels, which draw the most power
    repeats: float = 1.0  # where busy_s is 0: how often in a row the operator runs
    # Power that all of it needs at full clock, over what the board may draw; None: it follows from duty.
    wanted: float | None = None

    def __post_init__(self) -> None:
        if not (self.busy_s >= 0 and 0 <= self.duty <= 1 and self.repeats >= 1):
            raise ValueError(f"a load needs busy_s >= 0, a duty within 0 and 1 and repeats >= 1, not {self}")

    @property
    def decisive(self) -> "Load":
        """The same as far as prices depend on it: less power than the board may draw slows nothing down, and where the
        power is known the duty says no more.
        """
        return self if self.wanted is None else replace(self, duty=1.0, wanted=max(1.0, self.wanted))


@lru_cache(maxsize=64)
def design_power_w(name: str, limit_w: float) -> float:
    """Return the default power limit of a GPU; its idle power stays a share of this when a lower limit is set."""
    try:
        return max(limit_w, load_gpu(name).power_w)
    except ValueError:  # a GPU of the user's own file
        return limit_w


ALONE = Load(0.0)
SUSTAINED = Load(math.inf)


def cool_load(gpu: Gpu, fit: ComputeFit) -> Load:
    """Return the load of a step that leaves the GPU at full clock."""
    return Load(math.inf, 0.0, wanted=0.0 if gpu.architecture in fit.power.measured else None)


def launch_s(rates: Rates, latency_s: float, fit: ComputeFit, load: Load) -> Number:
    """Return the seconds of a launch: by itself, or behind other kernels of a busy stream."""
    return fit.step_launch_s if load.busy_s > 0 else rates.launch_s + latency_s


def slowdown(flops_per_s: Number, joule_per_flop: float, power_w: Number, duty: float, fit: PowerFit) -> Number:
    """Return the factor of at least 1 by which sustained work is slower than at full clock.

    The limit holds for the average: kernels at *flops_per_s* run for a share *duty* of the time, kernels
    bound by memory for the rest.
    """
    power_share = duty * (fit.idle_share + flops_per_s * joule_per_flop / power_w) + (1.0 - duty) * fit.memory_share
    return np.maximum(1.0, power_share) ** fit.exponent


def energy_seen(cool_s: float, sustained_s: float, flops: float, power_w: float, fit: PowerFit) -> float:
    """Return the joule per operation that slow work kept up without a pause from *cool_s* to *sustained_s*.

    This is the inverse of ``slowdown``; 0 where the work is hardly slower, since it then wants less power than
    the board may draw, and how much less cannot be seen.
    """
    slower = sustained_s / cool_s
    if slower < LEAST_SLOWDOWN:
        return 0.0
    power_share: float = slower ** (1.0 / fit.exponent)
    return (power_share - fit.idle_share) * power_w * cool_s / flops


def limit_power(
    seconds: Number, flops: Number, gpu: Gpu, dtype: DType, fit: ComputeFit, load: Load, attention: bool = False
) -> Number:
    """Return *seconds* of products at the clock that *load* allows, and no faster than any product published.

    The longer the work is kept up, the more of the slowdown it sees.
    """
    power, is_one = fit.power.of(gpu.architecture), isinstance(seconds, float)  # numpy takes longer for a number
    energy = power.energy(gpu.architecture, gpu.runs_as(dtype)) * (power.attention if attention else 1.0)
    if energy > 0.0:
        if load.wanted is not None and not attention:
            # Products that want more than the board may draw were heated when the fit's were measured.
            heating = power.idle_share + flops / seconds * energy / gpu.power_w > 1.0
            cool = power.cool.get(gpu.name, 1.0)
            seconds = (cool if heating else 1.0) * seconds if is_one else np.where(heating, cool, 1.0) * seconds
        factor = (
            slowdown(flops / seconds, energy, gpu.power_w, load.duty, power)
            if load.wanted is None
            else max(1.0, load.wanted) ** power.exponent
        )
        busy_s = load.busy_s if load.busy_s > 0 else load.repeats * seconds
        seconds = seconds * (1.0 + (factor - 1.0) / (1.0 + power.warm_up_s / busy_s))
    best = gpu.best_product_flops(dtype)
    if best == math.inf:
        return seconds
    return max(seconds, flops / best) if is_one else np.maximum(seconds, flops / best)
