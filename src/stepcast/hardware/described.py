"""Descriptions in TOML: nested tables as dotted keys, and where each key stands and comes from."""

import re
from collections.abc import Mapping
from functools import lru_cache


def flat(table: object, prefix: str = "") -> dict[str, object]:
    """Nested tables as one level of dotted keys."""
    if not isinstance(table, Mapping):
        return {prefix: table}
    found: dict[str, object] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def source_of(key: str, sources: Mapping[str, object], file: str) -> str:
    """The source of *key*, or of the closest table around it."""
    while key not in sources and "." in key:
        key = key.rpartition(".")[0]
    return str(sources.get(key, file))


def line_of(text: str, file: str, key: str) -> str:
    """``file:line`` of a dotted key: the line that sets it, since the TOML parser keeps no positions."""
    places = _places(text)
    parts = key.split(".")
    lines = [places[name] for at in range(len(parts)) if (name := ".".join(parts[: at + 1])) in places]
    return f"{file}:{min(lines)}" if lines else file


@lru_cache(maxsize=4)
def _places(text: str) -> dict[str, int]:
    """The line of each dotted key that *text* sets, the first where it is set twice."""
    section, places = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = header[1].strip() + "."
        elif match := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            places.setdefault(section + re.sub(r"[\"']", "", match[1]), number)
    return places
