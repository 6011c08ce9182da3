"""Corrections by class of operator, from measured operators: the constants that ``profile`` fits."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import numpy as np

from stepcast.cost.compute import compute_price, work_class
from stepcast.cost.fits import default_fit
from stepcast.cost.power import ALONE, Load
from stepcast.hardware import Gpu, load_gpu
from stepcast.ir.measured import OperatorTimes
from stepcast.ir.types import group_by_key
from stepcast.ir.work import Compute
from stepcast.pytorch.profile.cases import Case
from stepcast.pytorch.profile.measure import Document, FittedClass, MeasuredPoints, fit_class, to_toml

Facts = dict[str, object]


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


def calibrate_operators(measured: Sequence[OperatorTimes], gpu_name: str | None, source: str) -> tuple[Facts, str]:
    """Return facts and file of the corrections that *measured* give."""
    where = measured[0].source
    devices = [times.device for times in measured]
    gpu = gpu_of(gpu_name, devices, where)
    in_step = measured[0].matrix_share is not None
    # Operators that are one kernel, by the name of their case: the mean logarithm of its times. A kernel of a step also
    # takes the pause before it, which prices include and traces do not.
    pause_s = default_fit().step_launch_s if in_step else 0.0
    every = (operator for times in measured for operator in times.operators if len(operator.works) == 1)
    named = [(Case(operator.works[0]).name, operator) for operator in every]  # type: ignore[arg-type]
    logarithms = group_by_key((name, math.log(operator.seconds + pause_s)) for name, operator in named)
    works = {name: operator.works[0] for name, operator in named}
    points = MeasuredPoints({name: math.exp(sum(values) / len(values)) for name, values in logarithms.items()})
    fitted = _fit_classes(works, points, gpu, measured[0].matrix_share)
    if not fitted:
        raise ValueError(f"{where}: no operator of a known kind; expected matmuls, attention or others")
    software = f"stepcast calibrate on {', '.join(os.path.basename(times.source) for times in measured)}"
    used = {entry.kind: entry.correction for entry in fitted if entry.helps}
    document = Document(gpu.name, next(filter(None, devices), ""), software, points, used)
    classes = {}
    for entry in fitted:
        row = asdict(entry)
        kind, correction = row.pop("kind"), row.pop("correction")
        classes[kind] = {**correction, **row, "used": entry.helps}
    facts: Facts = {
        "kind": "calibration",
        "source": source,
        "gpu": gpu.name,
        "points": len(points.seconds),
        "classes": classes,
        **overall_errors([(entry.points, entry.before, entry.after, entry.left_out) for entry in fitted]),
        "warnings": _warnings(measured, fitted, in_step),
    }
    return facts, to_toml(document, "calibrate")


def _fit_classes(
    works: dict[str, Compute], points: MeasuredPoints, gpu: Gpu, matrix_share: float | None
) -> list[FittedClass]:
    fit, load = default_fit(), ALONE if matrix_share is None else Load(math.inf, matrix_share)
    classes = group_by_key(
        (work_class(work), (compute_price(work, gpu, fit, load).seconds, points.seconds[name]))
        for name, work in works.items()
    )
    fitted = []
    for kind, pairs in classes.items():
        predicted, seconds = np.array(pairs).T
        entry = fit_class(kind, predicted, seconds, matrix_share is not None)
        if "least_s" in entry.unidentified:
            # A least time that no point shows would raise smaller operators to that of the smallest.
            entry = replace(entry, correction=replace(entry.correction, least_s=0.0))
        fitted.append(entry)
    return fitted


def overall_errors(errors: Sequence[tuple[int, float, float, float | None]]) -> dict[str, float | None]:
    """Return the mean errors of all points, of fits given as their points and errors before, after and left out."""

    def mean(column: int) -> float | None:
        known = [(row[column] or 0.0, row[0]) for row in errors if row[column] is not None]
        count = sum(points for _, points in known)
        return sum(error * points for error, points in known) / count if count else None

    return {"before": mean(1), "after": mean(2), "left_out": mean(3)}


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
        reasons.update(times.left_out)
        for operator in times.operators:
            if len(operator.works) > 1:
                reasons[f"{operator.name} is {len(operator.works)} kernels in one time"] += 1
    return texts + [f"{count} rows left out: {reason}" for reason, count in reasons.items()]
