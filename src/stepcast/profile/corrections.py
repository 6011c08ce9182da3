"""From measured points to the corrections of a calibration, and how much they help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepcast.cost.calibration import Correction, fit_correction
from stepcast.cost.compute import ALONE, compute_price
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.rates import Array
from stepcast.hardware.gpu import Gpu
from stepcast.profile.cases import Case

FEWEST = 3  # points that a class needs for a correction of its own
PARTS = 4


@dataclass(frozen=True, slots=True)
class Fitted:
    """One class of operators: its correction, and the mean errors without it and with it."""

    kind: str
    points: int
    correction: Correction
    before: float
    after: float
    left_out: float  # each point by a correction that has not seen it


def fit_classes(
    cases: Sequence[Case], seconds: Mapping[str, float], gpu: Gpu, fit: ComputeFit
) -> tuple[Fitted, ...]:
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
        correction = fit_correction(predicted, measured)
        after = np.asarray(correction.applied_s(predicted))
        unseen = _left_out(predicted, measured)
        # The range must hold for operators that were not measured, so errors on points left out set it.
        spread = max(correction.spread, float(np.quantile(np.abs(unseen / measured - 1.0), 0.9)))
        errors = [_mean_error(values, measured) for values in (predicted, after, unseen)]
        found.append(Fitted(kind, len(own), replace(correction, spread=spread), *errors))
    return tuple(found)


def _left_out(predicted: Array, measured: Array) -> Array:
    """Every point by a correction that has not seen it: one fit per part of the sizes."""
    order = np.argsort(predicted, kind="stable")
    parts = min(PARTS, order.size)
    result = predicted.copy()
    for part in range(parts):
        held = np.zeros(order.size, dtype=bool)
        held[order[part::parts]] = True
        result[held] = fit_correction(predicted[~held], measured[~held]).applied_s(predicted[held])
    return result


def _mean_error(predicted: Array, measured: Array) -> float:
    return float(np.mean(np.abs(predicted / measured - 1.0)))
