"""A user's own measurements, which turn a fitted price into a calibrated one.

For each class of operators (``matmul.bf16``, ``attention.backward``, ``stream.add`` ...) there are three constants: a
factor, a slope with size, and the least time any operator of the class takes. They are few, so that twenty
points are enough and cannot be followed one by one.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache

import numpy as np
from msgspec.structs import replace

from stepcast.cost.compute import compute_price, work_class
from stepcast.cost.fits import ATTENTION, ComputeFit
from stepcast.cost.power import ALONE, Load
from stepcast.cost.price import Number, Price, PriceSource
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.cluster import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.types import dataclass
from stepcast.ir.work import Compute

PIVOT_S = 1e-3  # the slope turns around this time, where only the factor counts
# Readings of a host that are as certain as the assumption that hosts are equal: one host took 0.75 to 1.5 times as
# long from minute to minute (tools/measure_pace.py), those of other machines may be half or twice as fast.
LOOKS, UNSURE_LOOKS = "looks", 3
STEP = "step_host_s"  # of a small training step
SHARPNESS = 8  # of the smooth maximum of the model and the least time
# Ranges far beyond the corrections of real measurements: seconds, and ratios of measured to predicted ones.
ENERGIES = (1e-9, 10.0)  # the most joule per operation, and multiple of it in attention
PLAUSIBLE = {"factor": (1e-3, 1e3), "least_s": (0.0, 10.0), "spread": (0.0, 100.0)}
LARGEST = 1e300  # number of a file: larger whole numbers may not fit a float
MOST_FITTED = 4_000  # operators of a class, evenly over their sizes: three constants need no more


class CalibrationError(ValueError):
    """A calibration that the model cannot use."""


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

    def check_plausible(self) -> "Correction":
        """Return this correction; a CalibrationError if no measurement can give its values: more is of other work."""
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
    alone: bool = False  # whether operators ran by themselves, as ``profile`` runs them, or within steps
    # Joule per operation by format, and of attention's as a multiple; where sustained work was measured.
    power: Mapping[str, float] = field(default_factory=dict, hash=False)
    pace: float = 1.0  # host seconds over those of the fit's host; where they were measured

    def adapt_fit(self, gpu: Gpu, fit: ComputeFit) -> ComputeFit:
        """Return *fit* with the clock that this GPU holds: corrections are those of cool operators."""
        if not self.power:
            return fit
        reference = _profile_table("power") if self.alone else {}
        energies = {name: energy / reference.get(name, 1.0) for name, energy in self.power.items()}
        return _with_energies(fit, gpu.architecture, tuple(energies.items()))

    def price(self, work: Compute, gpu: Gpu, fit: ComputeFit, load: Load = ALONE) -> Price:
        """Return the corrected price, or the fitted one where the class was not measured.

        The least time is that of an operator by itself; inside a step launches overlap, and it does not hold.
        There operators also differ from those by themselves as they do on the GPU of the fit.
        """
        price = compute_price(work, gpu, self.adapt_fit(gpu, fit), load)
        correction = self.corrections.get(work_class(work))
        if correction is None:
            return price
        if load.busy_s > 0:
            factor, slope = reference().get(work_class(work), (1.0, 0.0)) if self.alone else (1.0, 0.0)
            slope = min(0.5, max(-0.5, correction.slope - slope))
            correction = Correction(correction.factor / factor, slope, 0.0, correction.spread)
        seconds = float(correction.applied_s(price.seconds))
        efficiency = min(1.0, price.efficiency * price.seconds / seconds) if seconds > 0 else 1.0
        return Price.spread(seconds, PriceSource.CALIBRATED, price.bound, correction.spread, efficiency)


@lru_cache(maxsize=4)
def _profile_table(name: str) -> dict[str, float]:
    """Return a table of the profile of the GPU, and its host, whose steps prices are right for."""
    return {key: float(value) for key, value in load_fit("profile")[name].items()}


@lru_cache(maxsize=1)
def reference() -> dict[str, tuple[float, float]]:
    """Return factor and slope of each class by itself on the GPU whose steps prices are right for."""
    return {name: (float(pair[0]), float(pair[1])) for name, pair in load_fit("profile")["class"].items()}


@lru_cache(maxsize=8)
def _with_energies(fit: ComputeFit, architecture: str, energies: tuple[tuple[str, float], ...]) -> ComputeFit:
    return replace(fit, power=fit.power.with_energies(architecture, dict(energies)))


def shows_slope(predicted_s: FloatArray) -> bool:
    """Return whether the operators are many and far enough apart in size to identify a slope."""
    return bool(predicted_s.size >= 8 and np.max(predicted_s) > 10 * np.min(predicted_s))


def fit_correction(predicted_s: FloatArray, measured_s: FloatArray, in_step: bool = False) -> Correction:
    """Return the correction that brings *predicted_s* closest to *measured_s*, by mean absolute logarithm.

    A grid refined three times: no start value, no random numbers, the same answer every time. Operators
    *in_step* show no least time, which is that of one by itself.
    """
    if predicted_s.size < 2 or predicted_s.size != measured_s.size:
        raise CalibrationError("a correction needs at least two measured operators of its class")
    if not (np.all(predicted_s > 0) and np.all(measured_s > 0)):
        raise CalibrationError("measured times must be above zero")
    every = predicted_s, measured_s
    if predicted_s.size > MOST_FITTED:
        sample = np.argsort(predicted_s, kind="stable")[:: -(-predicted_s.size // MOST_FITTED)]
        predicted_s, measured_s = predicted_s[sample], measured_s[sample]
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
        lower = np.array([float(np.exp(least)) ** SHARPNESS for least in leasts])
        for factor in factors:
            # This is Correction.applied_s, of all slopes and least times at once.
            scaled = float(np.exp(factor)) * predicted_s * bent
            tried = (scaled[:, None] ** SHARPNESS + lower[:, None]) ** (1.0 / SHARPNESS)
            costs = np.mean(np.abs(np.log(tried / measured_s)), axis=-1) + (0.1 * slopes * slopes)[:, None]
            index = int(np.argmin(costs))
            if costs.flat[index] < best[0]:
                slope, least = divmod(index, len(leasts))
                best = (float(costs.flat[index]), float(factor), float(slopes[slope]), float(leasts[least]))
        centre, reach = list(best[1:]), [width / 5 for width in reach]
    result = Correction(float(np.exp(best[1])), float(np.clip(best[2], -0.5, 0.5)), float(np.exp(best[3])))
    error = np.abs(result.applied_s(every[0]) / every[1] - 1.0)
    return Correction(result.factor, result.slope, result.least_s, float(np.quantile(error, 0.9)))


def calibration(table: Mapping[str, object], where: str = "calibration") -> Calibration:
    """Return the Calibration of a parsed file: ``gpu = "..."`` and one table per class under ``[class]``."""
    classes, constants = table.get("class", {}), table.get("constants", {})
    power, launch = table.get("power", {}), table.get("launch")
    if not isinstance(classes, Mapping) or "gpu" not in table:
        raise CalibrationError(f'{where}: expected gpu = "NAME" and a [class."KIND"] table per measured class')
    corrections = {}
    for name, entry in classes.items():
        try:
            correction = Correction(**{key: float(value) for key, value in entry.items()})
            corrections[str(name)] = correction.check_plausible()
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CalibrationError(f"{where}: class {name!r}: {error}") from None
    if not isinstance(constants, Mapping) or not all(
        isinstance(value, int | float) and abs(value) < LARGEST for value in constants.values()
    ):
        raise CalibrationError(f"{where}: [constants] holds names and finite numbers alone")
    if not isinstance(power, Mapping) or not all(
        isinstance(value, int | float) and 0 < value <= ENERGIES[name == ATTENTION] for name, value in power.items()
    ):
        problem = "[power] holds joule per operation of number formats, and of attention as a multiple"
        raise CalibrationError(f"{where}: {problem}")
    alone = isinstance(launch, Mapping)  # which only a profile has
    pace = _host_pace(launch, where) if isinstance(launch, Mapping) else 1.0
    energies = {str(name): float(value) for name, value in power.items()}
    return Calibration(str(table["gpu"]), corrections, dict(constants), alone, energies, pace)


def _host_pace(launch: Mapping[str, object], where: str) -> float:
    """Return the time of this host to issue operators over that of the host that host times were fitted on.

    One reading of a profile says little of a host that others use too: the more readings, the more it counts. A
    training step says more than calls in a loop, whose code stays in the caches.
    """
    looks, ratios = launch.get(LOOKS, 1), []
    if not isinstance(looks, int) or not 1 <= looks <= LARGEST:
        raise CalibrationError(f"{where}: [launch] {LOOKS} = {looks!r} is no count")
    for name, reference_s in _profile_table("launch").items():
        seconds = launch.get(name, reference_s)
        if not isinstance(seconds, int | float) or not 1e-8 < seconds < 0.1:
            raise CalibrationError(f"{where}: [launch] holds seconds of a host; {name} = {seconds!r} is none")
        if name in launch:
            ratios.append(seconds / reference_s)
    ratios = ratios[:1] if STEP in launch else ratios or [1.0]
    return float(math.prod(ratios) ** (looks / (looks + UNSURE_LOOKS) / len(ratios)))
