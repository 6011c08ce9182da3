"""Fit the corrections of a calibration to measured points, and measure how much they help."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepcast.cost.calibration import PLAUSIBLE, CalibrationError, Correction, fit_correction, shows_slope
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import ATTENTION, ComputeFit
from stepcast.cost.power import ALONE, energy_seen
from stepcast.hardware.cluster import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.types import dataclass
from stepcast.ir.work import Attention, Matmul
from stepcast.pytorch.profile.cases import Case
from stepcast.pytorch.profile.measure import MeasuredPoints

FEWEST = 3  # points that a class needs for a correction with all constants
FOLDS = 4
# The points do not show a least time that reduces the mean error by less than this.
VISIBLE_ERROR = 0.002


@dataclass(frozen=True, slots=True)
class FittedClass:
    """One class of operators: its correction, and the mean errors without it and with it."""

    kind: str
    points: int
    correction: Correction
    before: float
    after: float
    left_out: float | None  # each point by a correction that was not fitted to it; None if there is one point
    unidentified: tuple[str, ...] = ()  # constants that the points do not show

    @property
    def helps(self) -> bool:
        """Return True if the correction brings other points closer; for one point that is not known."""
        return self.left_out is None or self.left_out < self.before


def fit_energies(cases: Sequence[Case], points: MeasuredPoints, gpu: Gpu, fit: ComputeFit) -> dict[str, float]:
    """Return joule per operation by format, and attention's as a multiple, from cases that slowed when sustained."""
    law = fit.power.of(gpu.architecture)
    seen: dict[str, list[float]] = {}
    for case in cases:
        work = case.work
        if case.name not in points.sustained or not isinstance(work, Matmul | Attention):
            continue
        energy = energy_seen(points.seconds[case.name], points.sustained[case.name], work.flops, gpu.power_w, law)
        if energy > 0:
            name = ATTENTION if isinstance(work, Attention) else gpu.runs_as(work.dtype)
            seen.setdefault(name, []).append(energy)
    energies = {name: float(np.exp(np.mean(np.log(values)))) for name, values in seen.items()}
    half = energies.get("bf16") or energies.get("fp16")
    attention = energies.pop(ATTENTION, None)
    return energies if attention is None or half is None else {**energies, ATTENTION: attention / half}


def fit_classes(
    cases: Sequence[Case], seconds: Mapping[str, float], gpu: Gpu, fit: ComputeFit
) -> tuple[FittedClass, ...]:
    """Return a correction for every class with enough points."""
    fitted, measured = [], [case for case in cases if case.name in seconds]
    for kind in dict.fromkeys(case.kind for case in measured):
        own = [case for case in measured if case.kind == kind]
        if len(own) >= FEWEST:
            predicted = np.array([compute_price(case.work, gpu, fit, ALONE).seconds for case in own])
            fitted.append(fit_class(kind, predicted, np.array([seconds[case.name] for case in own])))
    return tuple(fitted)


def fit_class(kind: str, predicted: FloatArray, measured: FloatArray, in_step: bool = False) -> FittedClass:
    """Return the correction of one class; for one or two points only a factor.

    *in_step*: the points are of operators within a step, not of each by itself.
    """
    few = predicted.size < FEWEST
    correction = _fit_factor(predicted, measured) if few else fit_correction(predicted, measured, in_step)
    after = np.asarray(correction.applied_s(predicted))
    spread, left_out = max(correction.spread, Correction(1.0).spread if few else 0.0), None
    if predicted.size > 1:
        unseen = _predict_left_out(predicted, measured, in_step)
        # The range must hold for operators that were not measured, so errors on points left out set it.
        spread = max(spread, float(np.quantile(np.abs(unseen / measured - 1.0), 0.9)))
        left_out = _mean_error(unseen, measured)
    try:
        correction = replace(correction, spread=min(spread, PLAUSIBLE["spread"][1])).check_plausible()
    except CalibrationError as error:
        raise CalibrationError(f"class {kind!r}: {error}; are its times in the unit their file says?") from None
    without_least = np.asarray(replace(correction, least_s=0.0).applied_s(predicted))
    errors = _mean_error(predicted, measured), _mean_error(after, measured)
    hides_least = _mean_error(without_least, measured) - errors[1] < VISIBLE_ERROR
    unidentified = {"slope": not shows_slope(predicted), "least_s": hides_least}
    hidden = tuple(name for name, is_hidden in unidentified.items() if is_hidden)
    return FittedClass(kind, int(predicted.size), correction, *errors, left_out, hidden)


def _fit_factor(predicted: FloatArray, measured: FloatArray) -> Correction:
    return Correction(float(np.exp(np.mean(np.log(measured / predicted)))))


def _predict_left_out(predicted: FloatArray, measured: FloatArray, in_step: bool) -> FloatArray:
    """Return every point as corrected by a fit to the other folds."""
    order = np.argsort(predicted, kind="stable")
    folds = min(FOLDS, order.size)
    result = predicted.copy()
    for fold in range(folds):
        held_out = np.zeros(order.size, dtype=bool)
        held_out[order[fold::folds]] = True
        rest = predicted[~held_out], measured[~held_out]
        own = fit_correction(*rest, in_step) if rest[0].size > 1 else _fit_factor(*rest)
        result[held_out] = own.applied_s(predicted[held_out])
    return result


def _mean_error(predicted: FloatArray, measured: FloatArray) -> float:
    return float(np.mean(np.abs(predicted / measured - 1.0)))
