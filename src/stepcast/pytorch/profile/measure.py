"""Measure cases in order: skip what is known, note failures, and stop when the time is up."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from typing import Protocol

from stepcast.cost.calibration import LOOKS, CalibrationError, Correction
from stepcast.inputs.source import parse_toml
from stepcast.ir.types import dataclass
from stepcast.pytorch.profile.cases import Case, Operator

CollectiveRow = Mapping[str, str | int | float]  # kind, ranks, size_bytes, seconds


class Backend(Protocol):
    """A way to time an operator on this machine; any exception is a failed case."""

    def seconds(self, work: Operator) -> float:
        """Return the median seconds of runs with cold caches."""

    def sustained_s(self, work: Operator) -> float:
        """Return the median seconds of runs without a pause, once the clock has settled."""


@dataclass(frozen=True, slots=True)
class MeasuringProgress:
    """The progress of the measurement after one more case."""

    done: int
    total: int
    case: Case
    seconds: float | None  # None: failed
    elapsed_s: float
    points: "MeasuredPoints"  # all so far


@dataclass(frozen=True, slots=True)
class MeasuredPoints:
    """Measured seconds by the name of the case."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)  # reason by name
    left: tuple[str, ...] = ()  # not reached in time; a rerun measures them
    sustained: Mapping[str, float] = field(default_factory=dict)  # without a pause


def measure_sustained(cases: Sequence[Case], backend: Backend, known: MeasuredPoints) -> MeasuredPoints:
    """Return *known* with the seconds of each case, measured by itself first and then without a pause."""
    points = measure(cases, backend, known, math.inf, lambda: 0.0)
    sustained, failed = dict(known.sustained), {**known.failed, **points.failed}
    for case in cases:
        if case.name not in sustained and case.name in points.seconds:
            _try_to_measure(backend.sustained_s, case, sustained, failed, f"{case.name} sustained")
    return MeasuredPoints(points.seconds, failed, known.left, sustained)


def measure(
    cases: Sequence[Case], backend: Backend, known: MeasuredPoints, limit_s: float, clock: Callable[[], float],
    report: Callable[[MeasuringProgress], None] = lambda progress: None,
) -> MeasuredPoints:  # fmt: skip
    """Return *known* with the points of all other cases, until *limit_s* have passed.

    A case that failed before is tried again: memory may be free now.
    """
    start = clock()
    seconds, failed, left = dict(known.seconds), dict[str, str](), list[str]()
    unknown = [case for case in cases if case.name not in seconds]
    for done, case in enumerate(unknown, start=1):
        if clock() - start >= limit_s:
            left.append(case.name)
            continue
        _try_to_measure(backend.seconds, case, seconds, failed, case.name)
        so_far = MeasuredPoints(dict(seconds), dict(failed), sustained=known.sustained)
        report(MeasuringProgress(done, len(unknown), case, seconds.get(case.name), clock() - start, so_far))
    return MeasuredPoints(seconds, failed, tuple(left), known.sustained)


def _try_to_measure(
    measure_s: Callable[[Operator], float], case: Case, seconds: dict[str, float], failed: dict[str, str], key: str
) -> None:
    """Add the seconds of *case* to *seconds*, or to *failed* the reason of a failure as *key*."""
    try:
        if (result := measure_s(case.work)) > 0:
            seconds[case.name] = result
        else:
            failed[key] = f"measured {result} s"
    except Exception as error:  # after any error of a driver or library, the other cases go on
        failed[key] = " ".join(str(error).split())[:200] or type(error).__name__


@dataclass(frozen=True, slots=True)
class Document:
    """One measured GPU."""

    gpu: str  # its name in the catalogue
    device: str  # the name its driver gives
    software: str
    points: MeasuredPoints
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    launch: Mapping[str, float] = field(default_factory=dict)  # seconds of the host and of an empty kernel
    collectives: Sequence[CollectiveRow] = ()
    power: Mapping[str, float] = field(default_factory=dict)  # see Calibration


def to_toml(document: Document, verb: str = "profile") -> str:
    points = document.points
    lines = [f"# Written by 'stepcast {verb}'; give it to predict or op with --calibration."]
    lines += [f"{name} = {_format(getattr(document, name))}" for name in ("gpu", "device", "software")]
    for kind, correction in document.corrections.items():
        lines += _section(f"[class.{_format(kind)}]", asdict(correction))
    lines += _section("[power]", document.power)
    lines += _section("[launch]", document.launch)
    for row in document.collectives:
        lines += _section("[[collective]]", row)
    for name, values in (("points", points.seconds), ("sustained", points.sustained), ("failed", points.failed)):
        lines += _section(f"[{name}]", {_format(case): value for case, value in values.items()})
    return "\n".join(lines) + "\n"


def _section(header: str, entries: Mapping[str, str | int | float]) -> list[str]:
    return ["", header, *(f"{key} = {_format(value)}" for key, value in entries.items())] if entries else []


def _format(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=True)
    return repr(value) if isinstance(value, int) else f"{value:.6g}" if value else "0.0"


def read_document(text: str, where: str) -> Document:
    """Return what an earlier run wrote; raise CalibrationError for any other file."""
    try:
        table = parse_toml(text)
        points, sustained, power = (
            {str(name): float(value) for name, value in table.get(key, {}).items()}
            for key in ("points", "sustained", "power")
        )
        failed = {str(name): str(reason) for name, reason in table.get("failed", {}).items()}
        return Document(
            gpu=str(table["gpu"]),
            device=str(table["device"]),
            software=str(table["software"]),
            points=MeasuredPoints(points, failed, sustained=sustained),
            corrections={
                kind: Correction(**{key: float(value) for key, value in entry.items()})
                for kind, entry in table.get("class", {}).items()
            },
            launch={name: (int if name == LOOKS else float)(value) for name, value in table.get("launch", {}).items()},
            collectives=tuple(table.get("collective", ())),
            power=power,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CalibrationError(f"{where}: {problem}; expected a file that 'stepcast profile' wrote, or none") from None
