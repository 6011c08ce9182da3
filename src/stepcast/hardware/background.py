"""What others send over the network meanwhile, as a TOML file tells it.

[[flows]]                      # a plain pattern
nodes = "16-31"
spread = "ring"
bytes = "2 GB"
period = "0.5 s"

[[job]]                        # another training job
nodes = "32-63"
predict = { model = "llama-2-7b", tp = 8 }
"""

import re
from collections.abc import Iterator
from typing import Any

from stepcast.hardware.quantity import Dimension, parse_quantity
from stepcast.inputs.source import FormatError, read_toml
from stepcast.ir.flows import FlowSpread, OtherJob, Others, Pattern
from stepcast.ir.limits import BACKGROUND, GPUS

OF_FLOWS = ("name", "nodes", "spread", "bytes", "period", "start")
OF_JOBS = ("name", "nodes", "start", "predict")
RANGE = re.compile(r"\s*([0-9]{1,7})\s*(?:-\s*([0-9]{1,7})\s*)?")


def read_background(path: str) -> Others:
    """The jobs and patterns of the file at *path*; a FormatError says what is wrong with it."""
    found = read_toml(path)
    unknown = sorted(set(found) - {"flows", "job"})
    if unknown:
        raise FormatError(f"{unknown[0]}: unknown key; expected [[flows]] and [[job]]", path)
    try:
        others = (*_listed(found, "flows"), *_listed(found, "job"))
        BACKGROUND.check(len(others))
    except ValueError as error:
        raise FormatError(str(error), path) from None
    if not others:
        raise FormatError("names no other job; expected [[flows]] or [[job]]", path)
    return others


def _listed(found: dict[str, Any], key: str) -> Iterator[Pattern | OtherJob]:
    entries = found.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{key}: expected tables, each headed [[{key}]]")
    for number, entry in enumerate(entries, 1):
        where = f"[[{key}]] {number}"
        try:
            yield _pattern(entry, where) if key == "flows" else _job(entry, where)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _pattern(entry: dict[str, Any], where: str) -> Pattern:
    _check(entry, OF_FLOWS, ("nodes", "bytes", "period"))
    spread = entry.get("spread", FlowSpread.RING)
    if spread not in list(FlowSpread):
        raise ValueError(f"spread: unknown {spread!r}, expected one of {', '.join(FlowSpread)}")
    nodes = nodes_told(entry["nodes"])
    if len(nodes) < 2:
        raise ValueError("nodes: a pattern needs two at least")
    period_s = _time(entry, "period")
    if period_s == 0:
        raise ValueError("period: must be above zero")
    size_bytes = parse_quantity(entry["bytes"], Dimension.SIZE)
    return Pattern(
        str(entry.get("name", where)), nodes, FlowSpread(spread), size_bytes, period_s, _time(entry, "start")
    )


def _job(entry: dict[str, Any], where: str) -> OtherJob:
    _check(entry, OF_JOBS, ("nodes", "predict"))
    words = entry["predict"]
    if not isinstance(words, dict):
        raise ValueError('predict: expected a table of its options, such as { model = "llama-2-7b", tp = 8 }')
    return OtherJob(str(entry.get("name", where)), nodes_told(entry["nodes"]), words, _time(entry, "start"))


def _check(entry: dict[str, Any], known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown key; expected {', '.join(known)}")
    absent = [key for key in needed if key not in entry]
    if absent:
        raise ValueError(f"{absent[0]}: is missing")


def _time(entry: dict[str, Any], key: str) -> float:
    return parse_quantity(entry[key], Dimension.TIME) if key in entry else 0.0


def nodes_told(value: object) -> tuple[int, ...]:
    """Nodes, counted from 0: ``"0-3,8"``, or a list of numbers."""
    if isinstance(value, list) and all(type(node) is int and 0 <= node < GPUS.most for node in value):
        nodes = list(value)
    elif isinstance(value, str):
        nodes = []
        for part in value.split(","):
            found = RANGE.fullmatch(part)
            if found is None:
                raise ValueError(f"nodes: {part[:40]!r} is no range of nodes; expected such as 0-3,8")
            first, last = int(found[1]), int(found[2] or found[1])
            if last < first:
                raise ValueError(f"nodes: {part.strip()} counts down")
            GPUS.check(last)
            nodes += range(first, last + 1)
            GPUS.check(len(nodes))
    else:
        raise ValueError('nodes: expected a text such as "0-3,8", or a list of whole numbers')
    if len(set(nodes)) != len(nodes):
        raise ValueError("nodes: one is named twice")
    if not nodes:
        raise ValueError("nodes: none is named")
    return tuple(nodes)
