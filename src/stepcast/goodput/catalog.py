"""Failure profiles by name, data/failures/*.toml, or in a user's own file of the same form."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepcast.goodput.operation import NO_FAILURES, Failures, Restart
from stepcast.hardware.described import CatalogError, Description, flat, nearest
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import DESCRIPTION
from stepcast.units import parse_duration_s

DATA = Path(__file__).parents[1] / "data" / "failures"
NONE = "none"


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is not a share from 0 to 1")
    return float(value)


def _duration_s(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} has no unit; write it like "500 h"')
    return parse_duration_s(value.replace("_", ""))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


# Key -> the field it sets, and how its value is read.
FAILURES: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "description": ("description", _text),
    "between.gpu": ("gpu_s", _duration_s),
    "between.node": ("node_s", _duration_s),
    "between.link": ("link_s", _duration_s),
    "repair.share": ("broken_share", _share),
    "repair.takes": ("repair_s", _duration_s),
}
RESTART: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "restart.detect": ("detect_s", _duration_s),
    "restart.reschedule": ("reschedule_s", _duration_s),
    "restart.warm_up": ("warm_up_s", _duration_s),
}


def failure_names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in DATA.iterdir()))


def load_failures(name_or_path: str) -> tuple[Failures, Restart]:
    """How often parts fail and, where the source says so, how long the job takes to come back."""
    if name_or_path.lower() == NONE:
        return NO_FAILURES, Restart()
    if name_or_path.endswith(".toml"):
        return _opened(Path(name_or_path), name_or_path)
    name, known = name_or_path.lower(), failure_names()
    if name not in known:
        problem = f"failure profile {name_or_path!r} is not known{nearest(name, [*known, NONE])}"
        raise CatalogError("", "", problem)
    return _opened(DATA / f"{name}.toml", f"{name}.toml")


def _opened(path: Path, file: str) -> tuple[Failures, Restart]:
    try:
        described = Description.parse(Source(path).text(DESCRIPTION), file)
    except FormatError as error:
        raise CatalogError(file, "", error.message) from None
    values = flat(described.table)
    described.check_keys(values, [*FAILURES, *RESTART])
    fields: dict[str, Any] = {}
    restart: dict[str, Any] = {}
    for key, value in values.items():
        name, read = FAILURES.get(key) or RESTART[key]
        try:
            (fields if key in FAILURES else restart)[name] = read(value)
        except ValueError as error:
            raise described.error(key, str(error)) from None
    sources = {key: str(value) for key, value in described.sources.items()}
    try:
        failures = replace(NO_FAILURES, name=path.stem, sources=sources, **fields)
    except ValueError as error:
        raise CatalogError(file, "", str(error)) from None
    return failures, Restart(**restart)
