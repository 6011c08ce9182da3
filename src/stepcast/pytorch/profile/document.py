"""The calibration file that ``profile`` writes: corrections for the prices, and the points they came from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stepcast.cost.calibration import LOOKS, CalibrationError, Correction
from stepcast.inputs.toml import parse_toml
from stepcast.pytorch.profile.measure import Points


@dataclass(frozen=True, slots=True)
class Document:
    """One GPU as measured."""

    gpu: str  # its name in the catalogue
    device: str  # the name its driver gives
    software: str
    points: Points
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
        values = {
            key: _text(value) if isinstance(value, str) else _number(value) for key, value in row.items()
        }
        lines += ["", "[[collective]]", *(f"{key} = {value}" for key, value in values.items())]
    lines += _section(
        "points", {_text(name): _number(value) for name, value in document.points.seconds.items()}
    )
    lines += _section(
        "sustained", {_text(name): _number(value) for name, value in document.points.sustained.items()}
    )
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
            points=Points(points, failed, sustained=sustained),
            corrections={
                kind: Correction(**{key: float(value) for key, value in entry.items()})
                for kind, entry in table.get("class", {}).items()
            },
            launch={
                name: int(value) if name == LOOKS else float(value)
                for name, value in table.get("launch", {}).items()
            },
            collectives=tuple(table.get("collective", ())),
            power={name: float(value) for name, value in table.get("power", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CalibrationError(
            f"{where}: {problem}; expected a file that 'stepcast profile' wrote, or none"
        ) from None


def _text(value: str) -> str:
    import json

    return json.dumps(value, ensure_ascii=True)


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else f"{value:.6g}" if value else "0.0"
