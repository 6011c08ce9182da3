"""Descriptions in TOML: nested tables as dotted keys, the line and the source of each key."""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from stepcast.inputs.source import FormatError, parse_toml
from stepcast.ir.dataclass import dataclass
from stepcast.ir.facts import FactDict


class CatalogError(ValueError):
    """A description that is wrong; says where, under which key, and what was expected."""

    def __init__(self, where: str, key: str, problem: str) -> None:
        super().__init__(": ".join(part for part in (where, key, problem) if part))
        self.where, self.key, self.problem = where, key, problem


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` where something known is close, else nothing."""
    from difflib import get_close_matches  # needed for mistakes alone

    close = get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def flat(table: object, prefix: str = "") -> dict[str, object]:
    """Return nested tables as one level of dotted keys."""
    if not isinstance(table, Mapping):
        return {prefix: table}
    keys: dict[str, object] = {}
    for key, value in table.items():
        keys |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return keys


@dataclass(frozen=True, slots=True)
class Description:
    """A TOML file: its tables, less ``[sources]``, and what those say of its keys."""

    text: str
    file: str
    table: FactDict
    sources: Mapping[str, object]

    @classmethod
    def parse(cls, text: str, file: str) -> "Description":
        try:
            table = parse_toml(text)
        except FormatError as error:
            raise CatalogError(file, "", error.message) from None
        return cls(text, file, table, flat(table.pop("sources", {})))

    def source(self, key: str) -> str:
        """Return the source of *key*, or of the closest table around it, else the file."""
        while key not in self.sources and "." in key:
            key = key.rpartition(".")[0]
        return str(self.sources.get(key, self.file))

    def where(self, key: str) -> str:
        """Return ``file:line`` of a dotted key, found in the text: the TOML parser keeps no positions."""
        places = _key_lines(self.text)
        parts = key.split(".")
        prefixes = (".".join(parts[: count + 1]) for count in range(len(parts)))
        lines = [places[prefix] for prefix in prefixes if prefix in places]
        return f"{self.file}:{min(lines)}" if lines else self.file

    def error(self, key: str, problem: str) -> CatalogError:
        return CatalogError(self.where(key), key, problem)

    def check_keys(self, keys: Iterable[str], known: Collection[str]) -> None:
        for key in keys:
            if key not in known:
                raise self.error(key, f"unknown key{nearest(key, known)}")

    def check_sources(self, known: Collection[str], what: str) -> None:
        for key in self.sources:
            if not any(name == key or name.startswith(f"{key}.") for name in known):
                raise self.error(f"sources.{key}", f"names no key of a {what}")


@lru_cache(maxsize=4)
def _key_lines(text: str) -> dict[str, int]:
    """Return the line of each dotted key that *text* sets, the first where it is set twice."""
    section, lines = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = header[1].strip() + "."
        elif match := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            lines.setdefault(section + re.sub(r"[\"']", "", match[1]), number)
    return lines
