"""A user's own measurements: what turns a fitted price into a calibrated one.

For each class of operators (``matmul.bf16``, ``attention.backward``, ``stream.add`` ...) three constants: a
factor, a slope with size, and the least time any operator of the class takes. Few constants, so that twenty
points are enough and cannot be followed one by one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from stepcast.cost.compute import ALONE, Load, compute_price, stream_key
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.power import ATTENTION
from stepcast.cost.price import Price, PriceSource
from stepcast.cost.rates import Number
from stepcast.cost.scan import scan_kind
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.gpu import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.recurrent import DeltaRule, RecurrentCells, Scan, SelectiveScan
from stepcast.ir.work import Attention, Compute, Elementwise, GroupedMatmul, Matmul

PIVOT_S = 1e-3  # the slope turns around this time, where factor alone counts
# Looks at a host that are as sure as it is that hosts are alike: one and the same took 0.75 to 1.5 times as
# long from minute to minute (tools/measure_pace.py), those of other machines may be half or twice as fast.
LOOKS, UNSURE_LOOKS = "looks", 3
SHARPNESS = 8  # of the smooth maximum of the model and the least time
# What corrections of real measurements lie far within: seconds, and ratios of measured to predicted ones.
ENERGIES = (1e-9, 10.0)  # the most joule per operation, and multiple of it in attention
PLAUSIBLE = {"factor": (1e-3, 1e3), "least_s": (0.0, 10.0), "spread": (0.0, 100.0)}


class CalibrationError(ValueError):
    """A calibration that is not what the model can use."""


# Of a class's operators, evenly over their sizes: three numbers need no more.
MOST_FITTED = 4_000


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured seconds of one class of operators as a function of predicted ones."""

    factor: float
    slope: float = 0.0  # measured grows as predicted ** (1 + slope)
    least_s: float = 0.0
    spread: float = 0.15  # relative half width of the 90 % range, from the measured points

    def __post_init__(self) -> None:
        if not (self.factor > 0 and self.least_s >= 0 and -0.5 <= self.slope <= 0.5 and self.spread >= 0):
            raise CalibrationError(f"a correction needs a factor above 0 and a slope within 0.5, not {self}")

    def checked(self) -> "Correction":
        """The same, if a measurement can have said so: a price that is off by more was of something else."""
        for name, (least, most) in PLAUSIBLE.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise CalibrationError(
                    f"{name} = {min(value, 1e300):.6g} is no measurement of this GPU; expected {least:g} to {most:,g}"
                )
        return self

    def applied_s(self, predicted_s: Number) -> Number:
        scaled = self.factor * predicted_s * (predicted_s / PIVOT_S) ** self.slope
        return (scaled**SHARPNESS + self.least_s**SHARPNESS) ** (1.0 / SHARPNESS)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections for one GPU, by class of operator."""

    gpu: str
    corrections: Mapping[str, Correction] = field(hash=False)
    # Named constants of a run (latencies, bandwidths, ...): shown, not used by prices.
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    # Whether operators ran by themselves, as ``profile`` runs them, or within steps.
    alone: bool = False
    # Joule per operation by format, and of attention's as a multiple; where sustained work was measured.
    power: Mapping[str, float] = field(default_factory=dict, hash=False)
    # Host seconds over those of the fit's host; where they were measured.
    pace: float = 1.0

    def told(self, gpu: Gpu, fit: ComputeFit) -> ComputeFit:
        """*fit* with the clock that this GPU holds: corrections are those of cool operators."""
        seen = _numbers("power") if self.alone else {}
        energies = {name: energy / seen.get(name, 1.0) for name, energy in self.power.items()}
        return _told(fit, gpu.architecture, tuple(energies.items()))

    def price(self, work: Compute, gpu: Gpu, fit: ComputeFit, load: Load = ALONE) -> Price:
        """The corrected price, or the fitted one where the class was not measured.

        The least time is that of an operator by itself; inside a step launches overlap, and it does not hold.
        There operators also differ from those by themselves as they do on the GPU of the fit.
        """
        price = compute_price(work, gpu, self.told(gpu, fit), load)
        correction = self.corrections.get(work_class(work))
        if correction is None:
            return price
        if load.busy_s > 0:
            factor, slope = reference().get(work_class(work), (1.0, 0.0)) if self.alone else (1.0, 0.0)
            slope = min(0.5, max(-0.5, correction.slope - slope))
            correction = Correction(correction.factor / factor, slope, 0.0, correction.spread)
        seconds = float(correction.applied_s(price.seconds))
        efficiency = min(1.0, price.efficiency * price.seconds / seconds) if seconds > 0 else 1.0
        low_s, high_s = seconds / (1.0 + correction.spread), seconds * (1.0 + correction.spread)
        return Price(seconds, PriceSource.CALIBRATED, price.bound, efficiency, low_s, high_s)


@lru_cache(maxsize=4)
def _numbers(name: str) -> dict[str, float]:
    """A table of the profile of the GPU, and its host, whose steps prices are right for."""
    return {key: float(value) for key, value in load_fit("profile")[name].items()}


@lru_cache(maxsize=1)
def reference() -> dict[str, tuple[float, float]]:
    """Factor and slope of each class by itself on the GPU whose steps prices are right for."""
    return {name: (float(pair[0]), float(pair[1])) for name, pair in load_fit("profile")["class"].items()}


@lru_cache(maxsize=8)
def _told(fit: ComputeFit, architecture: str, energies: tuple[tuple[str, float], ...]) -> ComputeFit:
    return replace(fit, power=fit.power.told(architecture, dict(energies)))


def work_class(work: Compute) -> str:
    """The class under which an operator is calibrated."""
    match work:
        case Matmul():
            return f"{'bmm' if work.batch > 1 else 'matmul'}.{work.dtype}"
        case GroupedMatmul():
            return f"grouped.{work.dtype}"
        case Attention():
            return "attention.backward" if work.backward else "attention.forward"
        case Scan() | DeltaRule() | SelectiveScan():
            return f"{scan_kind(work)}.{'backward' if work.backward else 'forward'}"
        case RecurrentCells():
            return "cells"
        case Elementwise():
            return f"stream.{stream_key(work)}"
    return "recorded"


def shows_slope(predicted_s: FloatArray) -> bool:
    """Whether the operators are many and far enough apart in size to tell a slope."""
    return bool(predicted_s.size >= 8 and np.max(predicted_s) > 10 * np.min(predicted_s))


def fit_correction(predicted_s: FloatArray, measured_s: FloatArray, in_step: bool = False) -> Correction:
    """The correction that brings *predicted_s* closest to *measured_s*, by mean absolute logarithm.

    A grid refined three times: no start value, no random numbers, the same answer every time. Operators
    *in_step* show no least time, which is that of one by itself.
    """
    if predicted_s.size < 2 or predicted_s.size != measured_s.size:
        raise CalibrationError("a correction needs at least two measured operators of its class")
    if not (np.all(predicted_s > 0) and np.all(measured_s > 0)):
        raise CalibrationError("measured times must be above zero")
    every = predicted_s, measured_s
    if predicted_s.size > MOST_FITTED:
        kept = np.argsort(predicted_s, kind="stable")[:: -(-predicted_s.size // MOST_FITTED)]
        predicted_s, measured_s = predicted_s[kept], measured_s[kept]
    log_ratio = np.log(measured_s / predicted_s)
    centre = [float(np.median(log_ratio)), 0.0, float(np.log(np.min(measured_s)))]
    wide = shows_slope(predicted_s)
    reach = [float(np.ptp(log_ratio)) / 2 + 0.1, 0.3 if wide else 0.0, 1.0]
    best = (float("inf"), *centre)

    for _ in range(4):
        factors = np.linspace(centre[0] - reach[0], centre[0] + reach[0], 15)
        slopes = np.linspace(centre[1] - reach[1], centre[1] + reach[1], 9 if wide else 1)
        leasts = np.array([-np.inf]) if in_step else np.linspace(centre[2] - reach[2], centre[2] + reach[2], 9)
        bent = np.array([(predicted_s / PIVOT_S) ** float(np.clip(slope, -0.5, 0.5)) for slope in slopes])
        floors = np.array([float(np.exp(least)) ** SHARPNESS for least in leasts])
        for factor in factors:
            # As Correction.applied_s has it, of all slopes and least times at once.
            scaled = float(np.exp(factor)) * predicted_s * bent
            tried = (scaled[:, None] ** SHARPNESS + floors[:, None]) ** (1.0 / SHARPNESS)
            costs = np.mean(np.abs(np.log(tried / measured_s)), axis=-1) + (0.1 * slopes * slopes)[:, None]
            at = int(np.argmin(costs))
            if costs.flat[at] < best[0]:
                slope, least = divmod(at, len(leasts))
                best = (float(costs.flat[at]), float(factor), float(slopes[slope]), float(leasts[least]))
        centre, reach = list(best[1:]), [width / 5 for width in reach]
    found = Correction(float(np.exp(best[1])), float(np.clip(best[2], -0.5, 0.5)), float(np.exp(best[3])))
    error = np.abs(found.applied_s(every[0]) / every[1] - 1.0)
    return Correction(found.factor, found.slope, found.least_s, float(np.quantile(error, 0.9)))


def calibration(table: Mapping[str, Any], where: str = "calibration") -> Calibration:
    """A Calibration from a parsed file: ``gpu = "..."`` and one table per class under ``[class]``."""
    corrections = {}
    classes = table.get("class", {})
    if not isinstance(classes, Mapping) or "gpu" not in table:
        raise CalibrationError(f'{where}: expected gpu = "NAME" and a [class."KIND"] table per measured class')
    for name, entry in classes.items():
        try:
            correction = Correction(**{key: float(value) for key, value in entry.items()})
            corrections[str(name)] = correction.checked()
        except (TypeError, ValueError, AttributeError) as error:
            raise CalibrationError(f"{where}: class {name!r}: {error}") from None
    constants = table.get("constants", {})
    if not isinstance(constants, Mapping) or not all(
        isinstance(value, int | float) and math.isfinite(value) for value in constants.values()
    ):
        raise CalibrationError(f"{where}: [constants] holds names and finite numbers alone")
    alone = isinstance(table.get("launch"), Mapping)  # which only a profile has
    pace = _pace(table["launch"], where) if alone else 1.0
    return Calibration(str(table["gpu"]), corrections, dict(constants), alone, _energies(table, where), pace)


def _pace(launch: Mapping[str, Any], where: str) -> float:
    """How much longer this host takes to issue operators than the one that host times were learnt on.

    What a profile saw in one moment says little of a host that others use too: it counts as much as the looks
    were many.
    """
    looks, ratios = launch.get(LOOKS, 1), []
    if not isinstance(looks, int) or looks < 1:
        raise CalibrationError(f"{where}: [launch] {LOOKS} = {looks!r} is no count")
    for name, usual_s in _numbers("launch").items():
        found = launch.get(name, usual_s)
        if not isinstance(found, int | float) or not 1e-8 < found < 1e-2:
            raise CalibrationError(f"{where}: [launch] holds seconds of a host; {name} = {found!r} is none")
        ratios.append(found / usual_s)
    return float(math.prod(ratios) ** (looks / (looks + UNSURE_LOOKS) / len(ratios)))


def _energies(table: Mapping[str, Any], where: str) -> dict[str, float]:
    """What ``[power]`` says; nothing where there is none."""
    power = table.get("power", {})
    good = isinstance(power, Mapping) and all(
        isinstance(value, int | float) and 0 < value <= ENERGIES[name == ATTENTION] for name, value in power.items()
    )
    if not good:
        raise CalibrationError(
            f"{where}: [power] holds joule per operation of number formats, and of attention as a multiple"
        )
    return {str(name): float(value) for name, value in power.items()}
