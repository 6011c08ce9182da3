"""From measured points to the corrections of a calibration, and how much they help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepcast.cost.calibration import PLAUSIBLE, CalibrationError, Correction, fit_correction, shows_slope
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import ATTENTION, ComputeFit
from stepcast.cost.power import ALONE, energy_seen
from stepcast.hardware.gpu import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.work import Attention, Matmul
from stepcast.pytorch.profile.cases import Case
from stepcast.pytorch.profile.measure import MeasuredPoints

FEWEST = 3  # points that a class needs for a correction with all its constants
PARTS = 4
# A least time that brings the mean error down by less than this is not seen in the points.
SEEN = 0.002


@dataclass(frozen=True, slots=True)
class FittedClass:
    """One class of operators: its correction, and the mean errors without it and with it."""

    kind: str
    points: int
    correction: Correction
    before: float
    after: float
    left_out: float | None  # each point by a correction that has not seen it; None where there is one point
    unidentified: tuple[str, ...] = ()  # constants that the points do not show

    @property
    def helps(self) -> bool:
        """Whether points that a correction has not seen come closer with it; of one point it is not known."""
        return self.left_out is None or self.left_out < self.before


def fit_energies(cases: Sequence[Case], points: MeasuredPoints, gpu: Gpu, fit: ComputeFit) -> dict[str, float]:
    """Joule per operation by format, and attention's as a multiple, of what was slower without a pause."""
    law = fit.power.of(gpu.architecture)
    seen: dict[str, list[float]] = {}
    for case in cases:
        work = case.work
        if case.name not in points.sustained or not isinstance(work, Matmul | Attention):
            continue
        times = points.seconds[case.name], points.sustained[case.name]
        energy = energy_seen(*times, work.flops, gpu.power_w, law)
        if energy > 0:
            own = ATTENTION if isinstance(work, Attention) else gpu.runs_as(work.dtype)
            seen.setdefault(own, []).append(energy)
    found = {name: float(np.exp(np.mean(np.log(energies)))) for name, energies in seen.items()}
    if ATTENTION in found:
        half = next((found[name] for name in ("bf16", "fp16") if name in found), 0.0)
        attention = found.pop(ATTENTION)
        if half:
            found[ATTENTION] = attention / half
    return found


def fit_classes(
    cases: Sequence[Case], seconds: Mapping[str, float], gpu: Gpu, fit: ComputeFit
) -> tuple[FittedClass, ...]:
    """A correction for every class with enough points."""
    classes: dict[str, list[Case]] = {}
    for case in cases:
        if case.name in seconds:
            classes.setdefault(case.kind, []).append(case)
    found = []
    for kind, own in classes.items():
        if len(own) < FEWEST:
            continue
        predicted = np.array([compute_price(case.work, gpu, fit, ALONE).seconds for case in own])
        measured = np.array([seconds[case.name] for case in own])
        found.append(fit_class(kind, predicted, measured))
    return tuple(found)


def fit_class(kind: str, predicted: FloatArray, measured: FloatArray, in_step: bool = False) -> FittedClass:
    """The correction of one class; of one or two points a factor alone.

    *in_step*: the points are of operators within a step, not of each by itself.
    """
    few = predicted.size < FEWEST
    correction = _factor(predicted, measured) if few else fit_correction(predicted, measured, in_step)
    after = np.asarray(correction.applied_s(predicted))
    spread, left_out = max(correction.spread, Correction(1.0).spread if few else 0.0), None
    if predicted.size > 1:
        unseen = _left_out(predicted, measured, in_step)
        # The range must hold for operators that were not measured, so errors on points left out set it.
        spread = max(spread, float(np.quantile(np.abs(unseen / measured - 1.0), 0.9)))
        left_out = _mean_error(unseen, measured)
    try:
        correction = replace(correction, spread=min(spread, PLAUSIBLE["spread"][1])).check_plausible()
    except CalibrationError as error:
        raise CalibrationError(f"class {kind!r}: {error}; are its times in the unit their file says?") from None
    return FittedClass(
        kind,
        int(predicted.size),
        correction,
        _mean_error(predicted, measured),
        _mean_error(after, measured),
        left_out,
        _unidentified(correction, predicted, measured),
    )


def _factor(predicted: FloatArray, measured: FloatArray) -> Correction:
    return Correction(float(np.exp(np.mean(np.log(measured / predicted)))))


def _unidentified(correction: Correction, predicted: FloatArray, measured: FloatArray) -> tuple[str, ...]:
    without = np.asarray(replace(correction, least_s=0.0).applied_s(predicted))
    after = np.asarray(correction.applied_s(predicted))
    seen = _mean_error(without, measured) - _mean_error(after, measured) >= SEEN
    missing = ("slope", not shows_slope(predicted)), ("least_s", not seen)
    return tuple(name for name, unseen in missing if unseen)


def _left_out(predicted: FloatArray, measured: FloatArray, in_step: bool) -> FloatArray:
    """Every point by a correction that has not seen it: one fit per part of the sizes."""
    order = np.argsort(predicted, kind="stable")
    parts = min(PARTS, order.size)
    result = predicted.copy()
    for part in range(parts):
        held = np.zeros(order.size, dtype=bool)
        held[order[part::parts]] = True
        rest = predicted[~held], measured[~held]
        own = fit_correction(*rest, in_step) if rest[0].size > 1 else _factor(*rest)
        result[held] = own.applied_s(predicted[held])
    return result


def _mean_error(predicted: FloatArray, measured: FloatArray) -> float:
    return float(np.mean(np.abs(predicted / measured - 1.0)))
