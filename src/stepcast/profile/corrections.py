"""From measured points to the corrections of a calibration, and how much they help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepcast.cost.calibration import Correction, fit_correction
from stepcast.cost.compute import ALONE, compute_price
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.rates import Array
from stepcast.hardware.gpu import Gpu
from stepcast.profile.cases import Case

FEWEST = 3  # points that a class needs for a correction of its own


@dataclass(frozen=True, slots=True)
class Fitted:
    """One class of operators: its correction, and the mean errors without it and with it."""

    kind: str
    points: int
    correction: Correction
    before: float
    after: float
    left_out: float  # each point by a correction that half of the points, without it, were fitted to


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
        errors = [
            _mean_error(values, measured) for values in (predicted, after, _halves(predicted, measured))
        ]
        found.append(Fitted(kind, len(own), correction, *errors))
    return tuple(found)


def _halves(predicted: Array, measured: Array) -> Array:
    """Each half corrected by what was fitted to the other; halves alternate over the sizes."""
    order = np.argsort(predicted, kind="stable")
    result = predicted.copy()
    for part in range(2):
        own, other = order[part::2], order[1 - part :: 2]
        if other.size >= 2:
            result[own] = fit_correction(predicted[other], measured[other]).applied_s(predicted[own])
    return result


def _mean_error(predicted: Array, measured: Array) -> float:
    return float(np.mean(np.abs(predicted / measured - 1.0)))
