"""Corrections by class of operator, fitted to measured operators: those of ``profile``, a table or a trace.

Points that were left out of a fit show how much it helps.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

import numpy as np

from stepcast.cost.calibration import PLAUSIBLE, CalibrationError, Correction, fit_correction, shows_slope
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import ATTENTION, ComputeFit, default_fit
from stepcast.cost.power import ALONE, Load, energy_seen
from stepcast.hardware import Gpu, load_gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.measured import OperatorTimes
from stepcast.ir.types import FactDict, dataclass, group_by_key, require
from stepcast.ir.work import Attention, Matmul
from stepcast.pytorch.profile import Case, Document, MeasuredPoints, to_toml

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
    law, seen = fit.power.of(gpu.architecture), list[tuple[str, float]]()
    for case in cases:
        work = case.work
        if case.name in points.sustained and isinstance(work, Matmul | Attention):
            energy = energy_seen(points.seconds[case.name], points.sustained[case.name], work.flops, gpu.power_w, law)
            seen.append((ATTENTION if isinstance(work, Attention) else gpu.runs_as(work.dtype), energy))
    by_format = group_by_key((name, energy) for name, energy in seen if energy > 0)
    energies = {name: float(np.exp(np.mean(np.log(values)))) for name, values in by_format.items()}
    half = energies.get("bf16") or energies.get("fp16")
    attention = energies.pop(ATTENTION, None)
    return energies if attention is None or half is None else {**energies, ATTENTION: attention / half}


def fit_classes(
    cases: Iterable[Case],
    seconds: Mapping[str, float],
    gpu: Gpu,
    fit: ComputeFit,
    load: Load = ALONE,
    least: int = FEWEST,
) -> list[FittedClass]:
    """Return a correction for every class with at least *least* points.

    With a *load* other than ``ALONE`` the points are of operators within a step, not of each by itself.
    """
    classes = group_by_key(
        (case.kind, (compute_price(case.work, gpu, fit, load).seconds, seconds[case.name]))
        for case in cases
        if case.name in seconds
    )
    return [
        fit_class(kind, points, in_step=load is not ALONE) for kind, points in classes.items() if len(points) >= least
    ]


def fit_class(kind: str, points: Sequence[tuple[float, float]], in_step: bool) -> FittedClass:
    """Return the correction of one class by its *points*, predicted and measured; for one or two only a factor."""
    predicted, measured = np.array(points).T
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
    place, folds = np.argsort(np.argsort(predicted, kind="stable")), min(FOLDS, predicted.size)
    result = predicted.copy()
    for held_out in (place % folds == fold for fold in range(folds)):
        rest = predicted[~held_out], measured[~held_out]
        own = fit_correction(*rest, in_step) if rest[0].size > 1 else _fit_factor(*rest)
        result[held_out] = own.applied_s(predicted[held_out])
    return result


def _mean_error(predicted: FloatArray, measured: FloatArray) -> float:
    return float(np.mean(np.abs(predicted / measured - 1.0)))


def overall_errors(fits: Iterable[FittedClass]) -> dict[str, float | None]:
    """Return the mean errors of the points of all *fits*: before, after and left out. Points of a class whose
    correction is not used keep their error.
    """
    fits, means = list(fits), dict[str, float | None]()
    fits = [fit if fit.helps else replace(fit, after=fit.before, left_out=fit.before) for fit in fits]
    for name in ("before", "after", "left_out"):
        known = [(error, fit.points) for fit in fits if (error := getattr(fit, name)) is not None]
        count = sum(points for _, points in known)
        means[name] = sum(error * points for error, points in known) / count if count else None
    return means


def gpu_of(name: str | None, devices: Iterable[str], where: str) -> Gpu:
    """Return the GPU that the user names, or that the runs name."""
    if name is not None:
        return load_gpu(name)
    device = next((device for device in devices if device), None)
    if device is None:
        raise ValueError(f"{where}: does not tell the GPU; say which one with --gpu, such as --gpu h200")
    try:
        return load_gpu(device)
    except ValueError:
        raise ValueError(
            f"{where}: {device} is not in the catalogue; name a GPU or a TOML file that describes it "
            "(docs/clusters.md) with --gpu"
        ) from None


def calibrate_operators(measured: Sequence[OperatorTimes], gpu_name: str | None, source: str) -> tuple[FactDict, str]:
    """Return facts and file of the corrections that *measured* give."""
    where = measured[0].source
    devices = [times.device for times in measured]
    gpu = gpu_of(gpu_name, devices, where)
    share = measured[0].matrix_share
    load = ALONE if share is None else Load(math.inf, share)
    # Operators that are one kernel, by the name of their case: the mean logarithm of its times. A kernel of a step also
    # takes the pause before it, which prices include and traces do not.
    pause_s = 0.0 if share is None else default_fit().step_launch_s
    every = (operator for times in measured for operator in times.operators if len(operator.works) == 1)
    timed = [(Case(operator.works[0]), operator.seconds + pause_s) for operator in every]  # type: ignore[arg-type]
    logarithms = group_by_key((case.name, math.log(seconds)) for case, seconds in timed)
    points = MeasuredPoints({name: math.exp(sum(values) / len(values)) for name, values in logarithms.items()})
    cases = {case.name: case for case, _ in timed}.values()
    # A least time that no point shows would raise smaller operators to that of the smallest.
    fitted = [
        replace(entry, correction=replace(entry.correction, least_s=0.0)) if "least_s" in entry.unidentified else entry
        for entry in fit_classes(cases, points.seconds, gpu, default_fit(), load, least=1)
    ]
    require(bool(fitted), f"{where}: no operator of a known kind; expected matmuls, attention or others")
    warnings = _warnings(measured, fitted, in_step=share is not None)
    with suppress(ValueError):  # no device, or one that is not in the catalogue
        if (named := gpu_of(None, devices, where).name) != gpu.name:
            warnings.insert(0, f"{where}: was measured on {named}, and is compared with estimates of {gpu.name}")
    software = f"stepcast calibrate on {', '.join(os.path.basename(times.source) for times in measured)}"
    used = {entry.kind: entry.correction for entry in fitted if entry.helps}
    document = Document(gpu.name, next(filter(None, devices), ""), software, points, used)
    classes = {}
    for entry in fitted:
        row = asdict(entry)
        kind, correction = row.pop("kind"), row.pop("correction")
        classes[kind] = {**correction, **row, "used": entry.helps}
    facts: FactDict = {
        "kind": "calibration",
        "source": source,
        "gpu": gpu.name,
        "points": len(points.seconds),
        "classes": classes,
        **overall_errors(fitted),
        "warnings": warnings,
    }
    return facts, to_toml(document, "calibrate")


def _warnings(measured: Sequence[OperatorTimes], fitted: Sequence[FittedClass], in_step: bool) -> list[str]:
    texts = [warning for times in measured for warning in times.warnings]

    def doubt(entries: Iterable[FittedClass], text: str) -> None:
        kinds = [entry.kind for entry in entries]
        if kinds:
            more = f" and {len(kinds) - 6} more" if len(kinds) > 6 else ""
            texts.append(text.format(", ".join(kinds[:6]) + more))

    several = [entry for entry in fitted if entry.points > 1]
    doubt(
        (entry for entry in fitted if entry.points == 1),
        "{}: one size gives a factor, not how it changes with size, and leaves no point to check it on; add runs of "
        "other sizes",
    )
    doubt(
        (entry for entry in several if "slope" in entry.unidentified),
        "slope not identified for {}, left at 0: it takes 8 sizes whose times span a factor of 10",
    )
    if in_step:
        texts.append(
            "least times are not identified: kernels of a step queue behind one another, and only an "
            "operator by itself shows it (stepcast profile)"
        )
    else:
        unseen = (entry for entry in several if "least_s" in entry.unidentified)
        doubt(unseen, "least time not identified for {}, left at 0: no operator is small enough")
    useless = (entry for entry in fitted if not entry.helps)
    doubt(useless, "{}: not corrected: points left out of the fit come no closer with it")
    reasons: Counter[str] = Counter()
    for times in measured:
        several_kernels = (operator for operator in times.operators if len(operator.works) > 1)
        reasons.update(times.left_out)
        reasons.update(f"{operator.name} is {len(operator.works)} kernels in one time" for operator in several_kernels)
    return texts + [f"{count} rows left out: {reason}" for reason, count in reasons.items()]
