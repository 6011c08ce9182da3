"""The clock a GPU can hold: dense matrix work can ask for more power than the board may draw.

Power grows with clock and voltage together, so a clock that must fall to save a share of power falls by less
than that share. Energy per operation falls with the process node; the table of the fit holds it per
architecture and number format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from stepcast.cost.rates import Number


@dataclass(frozen=True, slots=True)
class PowerFit:
    """How a GPU slows down under its power limit."""

    idle_share: float  # of the board's power that is spent whatever the cores do
    memory_share: float  # of the board's power that kernels bound by memory draw
    exponent: float  # slowdown = (power wanted / power allowed) ** exponent
    warm_up_s: float  # a burst much shorter than this runs at full clock
    joule_per_flop: Mapping[str, Mapping[str, float]] = field(hash=False)  # architecture -> format
    attention: float = 1.0  # energy of an operation of fused attention, as a multiple of a product's
    # By GPU: what products of a cool one take of the fit's, whose operators others had heated.
    cool: Mapping[str, float] = field(default_factory=dict, hash=False)
    # Architectures on which seconds of work were measured with their power, and their own constants.
    measured: "Mapping[str, PowerFit]" = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 0 <= self.idle_share < 1 or not 0 <= self.exponent <= 1 or self.warm_up_s <= 0:
            raise ValueError("power fit: idle_share in [0, 1), exponent in [0, 1] and warm_up_s above 0 expected")

    def of(self, architecture: str) -> "PowerFit":
        return self.measured.get(architecture, self)

    def energy(self, architecture: str, dtype: str) -> float:
        """Joule per operation; 0 (no limit known) where the table is silent."""
        return self.joule_per_flop.get(architecture, {}).get(dtype, 0.0)

    def told(self, architecture: str, energies: Mapping[str, float]) -> "PowerFit":
        """The same with the *energies* of one GPU: joule per operation, and ``attention``'s as a multiple."""
        own = self.of(architecture)
        known = {**own.joule_per_flop.get(architecture, {}), **energies}
        attention = known.pop(ATTENTION, own.attention)
        own = replace(own, joule_per_flop={architecture: known}, attention=attention, cool={})
        return replace(self, measured={**self.measured, architecture: own})


ATTENTION = "attention"


def energy_seen(cool_s: float, sustained_s: float, flops: float, power_w: float, fit: PowerFit) -> float:
    """Joule per operation that slow work kept up without a pause to *sustained_s* from *cool_s*.

    ``slowdown`` the other way round; 0 where the work is hardly slower, since it then wants less power than
    the board may draw, and how much less is not seen.
    """
    slower = sustained_s / cool_s
    if slower < LEAST_SLOWDOWN:
        return 0.0
    wanted: float = slower ** (1.0 / fit.exponent)
    return (wanted - fit.idle_share) * power_w * cool_s / flops


LEAST_SLOWDOWN = 1.02  # what two measurements of the same differ by


def slowdown(flops_per_s: Number, joule_per_flop: float, power_w: Number, duty: float, fit: PowerFit) -> Number:
    """Factor of at least 1 by which sustained work is slower than at full clock.

    The limit holds for the average: kernels at *flops_per_s* run for a share *duty* of the time, kernels
    bound by memory for the rest.
    """
    wanted = duty * (fit.idle_share + flops_per_s * joule_per_flop / power_w) + (1.0 - duty) * fit.memory_share
    return np.maximum(1.0, wanted) ** fit.exponent


def heated_s(seconds: Number, factor: Number, busy_s: Number, fit: PowerFit) -> Number:
    """Work that is part of *busy_s* seconds of it: the longer that is, the more of the slowdown it sees."""
    return seconds * (1.0 + (factor - 1.0) / (1.0 + fit.warm_up_s / busy_s))
