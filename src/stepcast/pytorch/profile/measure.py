"""The loop that measures: cases in order, what is known already left out, failures noted, time kept."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from stepcast.cost.calibration import LOOKS, CalibrationError, Correction
from stepcast.inputs.source import parse_toml
from stepcast.pytorch.profile.cases import Case, Operator

Clock = Callable[[], float]
Report = Callable[["MeasuringProgress"], None]


class Backend(Protocol):
    """What can time an operator on this machine."""

    def seconds(self, work: Operator) -> float:
        """The median of repeated runs with cold caches; any exception is a failed case."""

    def sustained_s(self, work: Operator) -> float:
        """The same of runs without a pause, once the clock has settled."""


@dataclass(frozen=True, slots=True)
class MeasuringProgress:
    """How far the measuring is, after one more case."""

    done: int
    total: int
    case: Case
    seconds: float | None  # None: failed
    elapsed_s: float
    points: "MeasuredPoints"  # all so far


@dataclass(frozen=True, slots=True)
class MeasuredPoints:
    """What was measured, by the name of the case."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)  # name -> reason
    left: tuple[str, ...] = ()  # not reached in time; a rerun measures them
    sustained: Mapping[str, float] = field(default_factory=dict)  # run again and again


def measure_sustained(cases: Sequence[Case], backend: Backend, known: MeasuredPoints) -> MeasuredPoints:
    """*known* with the time of each case by itself, all of these first, and then without a pause."""
    points = measure(cases, backend, known, math.inf, lambda: 0.0)
    sustained, failed = dict(known.sustained), dict(points.failed)
    for case in cases:
        if case.name in sustained or case.name not in points.seconds:
            continue
        try:
            found = backend.sustained_s(case.work)
            if not found > 0:
                raise ValueError(f"measured {found} s")
            sustained[case.name] = found
        except Exception as error:  # as below
            failed[f"{case.name} sustained"] = " ".join(str(error).split())[:200] or type(error).__name__
    return MeasuredPoints(points.seconds, {**known.failed, **failed}, known.left, sustained)


def measure(
    cases: Sequence[Case],
    backend: Backend,
    known: MeasuredPoints,
    limit_s: float,
    clock: Clock,
    report: Report = lambda progress: None,
) -> MeasuredPoints:
    """The points of *known* and those of every case that is not among them, until *limit_s* have passed.

    A case that failed before is tried again: memory may be free now.
    """
    start = clock()
    seconds, failed, left = dict(known.seconds), {}, []
    todo = [case for case in cases if case.name not in seconds]
    for done, case in enumerate(todo, start=1):
        if clock() - start >= limit_s:
            left.append(case.name)
            continue
        found: float | None = None
        try:
            found = backend.seconds(case.work)
            if not found > 0:
                raise ValueError(f"measured {found} s")
            seconds[case.name] = found
        except Exception as error:  # whatever a driver or library raises, the other cases go on
            failed[case.name] = " ".join(str(error).split())[:200] or type(error).__name__
        so_far = MeasuredPoints(dict(seconds), dict(failed), sustained=known.sustained)
        report(MeasuringProgress(done, len(todo), case, found, clock() - start, so_far))
    return MeasuredPoints(seconds, failed, tuple(left), known.sustained)


# The calibration file that ``profile`` writes: corrections for the prices, and the points they came from.


@dataclass(frozen=True, slots=True)
class Document:
    """One GPU as measured."""

    gpu: str  # its name in the catalogue
    device: str  # the name its driver gives
    software: str
    points: MeasuredPoints
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    launch: Mapping[str, float] = field(default_factory=dict)  # seconds of the host and of an empty kernel
    collectives: Sequence[Mapping[str, Any]] = ()
    power: Mapping[str, float] = field(default_factory=dict)  # see Calibration


def to_toml(document: Document, verb: str = "profile") -> str:
    lines = [
        f"# Written by 'stepcast {verb}'; give it to predict or op with --calibration.",
        f"gpu = {_text(document.gpu)}",
        f"device = {_text(document.device)}",
        f"software = {_text(document.software)}",
    ]
    for kind, correction in document.corrections.items():
        lines += ["", f"[class.{_text(kind)}]"]
        lines += [f"{key} = {_number(value)}" for key, value in asdict(correction).items()]
    lines += _section("power", {name: _number(value) for name, value in document.power.items()})
    lines += _section("launch", {name: _number(value) for name, value in document.launch.items()})
    for row in document.collectives:
        values = {key: _text(value) if isinstance(value, str) else _number(value) for key, value in row.items()}
        lines += ["", "[[collective]]", *(f"{key} = {value}" for key, value in values.items())]
    lines += _section("points", {_text(name): _number(value) for name, value in document.points.seconds.items()})
    lines += _section("sustained", {_text(name): _number(value) for name, value in document.points.sustained.items()})
    lines += _section("failed", {_text(name): _text(why) for name, why in document.points.failed.items()})
    return "\n".join(lines) + "\n"


def _section(name: str, entries: Mapping[str, str]) -> list[str]:
    return ["", f"[{name}]", *(f"{key} = {value}" for key, value in entries.items())] if entries else []


def read_document(text: str, where: str) -> Document:
    """What an earlier run wrote; CalibrationError where it is something else."""
    try:
        table = parse_toml(text)
        points = {str(name): float(value) for name, value in table.get("points", {}).items()}
        sustained = {str(name): float(value) for name, value in table.get("sustained", {}).items()}
        failed = {str(name): str(why) for name, why in table.get("failed", {}).items()}
        return Document(
            gpu=str(table["gpu"]),
            device=str(table["device"]),
            software=str(table["software"]),
            points=MeasuredPoints(points, failed, sustained=sustained),
            corrections={
                kind: Correction(**{key: float(value) for key, value in entry.items()})
                for kind, entry in table.get("class", {}).items()
            },
            launch={
                name: int(value) if name == LOOKS else float(value) for name, value in table.get("launch", {}).items()
            },
            collectives=tuple(table.get("collective", ())),
            power={name: float(value) for name, value in table.get("power", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CalibrationError(f"{where}: {problem}; expected a file that 'stepcast profile' wrote, or none") from None


def _text(value: str) -> str:
    import json

    return json.dumps(value, ensure_ascii=True)


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else f"{value:.6g}" if value else "0.0"
