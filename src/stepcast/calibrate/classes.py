"""Corrections by class of operator, from measured operators: the constants that ``profile`` fits."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from stepcast.cost.compute import compute_price, work_class
from stepcast.cost.fits import default_fit
from stepcast.cost.power import ALONE, Load
from stepcast.hardware import load_gpu
from stepcast.ir.measured import OperatorTimes
from stepcast.pytorch.profile.cases import Case
from stepcast.pytorch.profile.corrections import FittedClass, fit_class
from stepcast.pytorch.profile.measure import Document, MeasuredPoints, to_toml

if TYPE_CHECKING:
    from stepcast.hardware import Gpu

Facts = dict[str, Any]


def gpu_of(name: str | None, devices: Iterable[str], where: str) -> "Gpu":
    """The GPU that the user names, or that the runs do."""
    if name is not None:
        return load_gpu(name)
    device = next((device for device in devices if device), None)
    if device is None:
        raise ValueError(f"{where}: does not tell the GPU; say which one with --gpu, such as --gpu h200")
    try:
        return load_gpu(device)
    except ValueError:
        raise ValueError(
            f"{where}: ran on {device}, which is not in the catalogue; name a GPU or a TOML file that "
            "describes it (docs/clusters.md) with --gpu"
        ) from None


def calibrate_operators(measured: Sequence[OperatorTimes], gpu_name: str | None, source: str) -> tuple[Facts, str]:
    """Facts and file of the corrections that *measured* give."""
    where = measured[0].source
    gpu = gpu_of(gpu_name, (one.device for one in measured), where)
    in_step = measured[0].matrix_share is not None
    points = MeasuredPoints(_points(measured, gpu, in_step))
    fitted = _fitted(measured, points, gpu, in_step)
    if not fitted:
        raise ValueError(f"{where}: no operator of a known kind; expected matmuls, attention or others")
    device = next((one.device for one in measured if one.device), "")
    named = f"stepcast calibrate on {', '.join(os.path.basename(one.source) for one in measured)}"
    document = Document(
        gpu.name, device, named, points, {entry.kind: entry.correction for entry in fitted if entry.helps}
    )
    found = {
        "kind": "calibration",
        "source": source,
        "gpu": gpu.name,
        "points": len(points.seconds),
        "classes": {entry.kind: _class_facts(entry) for entry in fitted},
        **_overall(fitted),
        "warnings": _warnings(measured, fitted, in_step),
    }
    return found, to_toml(document, "calibrate") + quality_toml(fitted)


def _points(measured: Sequence[OperatorTimes], gpu: "Gpu", in_step: bool) -> dict[str, float]:
    """Seconds by the name of the case: the mean logarithm where a case is there several times."""
    listed: dict[str, list[float]] = {}
    # A kernel of a step also takes the pause before it, which prices include and traces do not.
    pause_s = default_fit().step_launch_s if in_step else 0.0
    for one in measured:
        for operator in one.operators:
            if len(operator.works) == 1:
                name = Case(operator.works[0]).name  # type: ignore[arg-type]
                listed.setdefault(name, []).append(operator.seconds + pause_s)
    return {name: math.exp(sum(map(math.log, seconds)) / len(seconds)) for name, seconds in listed.items()}


def _fitted(
    measured: Sequence[OperatorTimes], points: MeasuredPoints, gpu: "Gpu", in_step: bool
) -> tuple[FittedClass, ...]:
    import numpy as np

    fit = default_fit()
    share = measured[0].matrix_share
    load = ALONE if share is None else Load(math.inf, share)
    works = {
        Case(operator.works[0]).name: operator.works[0]  # type: ignore[arg-type]
        for one in measured
        for operator in one.operators
        if len(operator.works) == 1
    }
    classes: dict[str, list[tuple[float, float]]] = {}
    for name, work in works.items():
        pair = compute_price(work, gpu, fit, load).seconds, points.seconds[name]
        classes.setdefault(work_class(work), []).append(pair)
    found = []
    for kind, pairs in classes.items():
        predicted, seconds = np.array(pairs).T
        entry = fit_class(kind, predicted, seconds, in_step)
        if "least_s" in entry.unidentified:
            # A least time that no point shows would hold smaller operators up to that of the smallest.
            entry = replace(entry, correction=replace(entry.correction, least_s=0.0))
        found.append(entry)
    return tuple(found)


def _class_facts(entry: FittedClass) -> Facts:
    facts = {key: value for key, value in asdict(entry).items() if key not in ("kind", "correction")}
    return {**asdict(entry.correction), **facts, "used": entry.helps}


def _overall(fitted: Sequence[FittedClass]) -> Facts:
    """Mean errors over all points."""
    known = [entry for entry in fitted if entry.left_out is not None]
    return {
        "before": _mean([(entry.before, entry.points) for entry in fitted]),
        "after": _mean([(entry.after, entry.points) for entry in fitted]),
        "left_out": _mean([(entry.left_out or 0.0, entry.points) for entry in known]),
    }


def _mean(weighted: Sequence[tuple[float, int]]) -> float | None:
    count = sum(points for _, points in weighted)
    return sum(error * points for error, points in weighted) / count if count else None


def _warnings(measured: Sequence[OperatorTimes], fitted: Sequence[FittedClass], in_step: bool) -> list[str]:
    texts = [warning for one in measured for warning in one.warnings]
    alone = [entry.kind for entry in fitted if entry.points == 1]
    if alone:
        texts.append(
            f"{_named(alone)}: one size gives a factor, not how it changes with size, and leaves no point "
            "to check it on; add runs of other sizes"
        )
    level = [entry.kind for entry in fitted if "slope" in entry.unidentified and entry.points > 1]
    if level:
        texts.append(
            f"slope not identified for {_named(level)}, left at 0: it takes 8 sizes whose times span a factor of 10"
        )
    if in_step:
        texts.append(
            "least times are not identified: kernels of a step queue behind one another, and only an "
            "operator by itself shows it (stepcast profile)"
        )
    else:
        unseen = [entry.kind for entry in fitted if "least_s" in entry.unidentified and entry.points > 1]
        if unseen:
            texts.append(f"least time not identified for {_named(unseen)}, left at 0: no operator is small enough")
    useless = [entry.kind for entry in fitted if not entry.helps]
    if useless:
        texts.append(f"{_named(useless)}: not corrected: points left out of the fit come no closer with it")
    texts += _left_out(measured)
    return texts


def _left_out(measured: Sequence[OperatorTimes]) -> list[str]:
    reasons: dict[str, int] = {}
    for one in measured:
        for reason, count in one.left_out.items():
            reasons[reason] = reasons.get(reason, 0) + count
        for operator in one.operators:
            if len(operator.works) > 1:
                reason = f"{operator.name} is {len(operator.works)} kernels in one time"
                reasons[reason] = reasons.get(reason, 0) + 1
    return [f"{count} rows left out: {reason}" for reason, count in reasons.items()]


def _named(kinds: Sequence[str]) -> str:
    return ", ".join(kinds[:6]) + (f" and {len(kinds) - 6} more" if len(kinds) > 6 else "")


def quality_toml(fitted: Sequence[FittedClass]) -> str:
    """How good each correction is; nothing reads it back, but whoever opens the file."""
    lines = []
    for entry in fitted:
        lines += ["", f'[fit."{entry.kind}"]  # mean errors', f"points = {entry.points}"]
        errors = {"before": entry.before, "after": entry.after, "left_out": entry.left_out}
        lines += [f"{name} = {error:.4g}" for name, error in errors.items() if error is not None]
        if not entry.helps:
            lines.append("used = false")
        if entry.unidentified:
            listed = ", ".join(f'"{name}"' for name in entry.unidentified)
            lines.append(f"unidentified = [{listed}]")
    return "\n".join(lines) + "\n"
