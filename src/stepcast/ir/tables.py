"""Tables of plain values, as TOML gives them: checked and converted by msgspec, with problems in plain words; and the
package's own files, parsed five times as fast as tomllib does, which takes a twentieth of a first forecast.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Annotated, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from stepcast.ir.types import FactDict

Built = TypeVar("Built")

# Beyond these limits no time or share is a number to go by.
LARGEST = 10_000_000
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Whole = Annotated[int, Meta(ge=0, le=LARGEST)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Ratio = Annotated[float, Meta(ge=1, le=LARGEST)]
Portion = Annotated[float, Meta(ge=1e-4, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]

TYPE_NAMES = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list"}
BOUNDS = {">=": ("at least", ge), ">": ("above", gt), "<=": ("at most", le), "<": ("below", lt)}


class TableError(ValueError):
    """A table that does not fit its type: the keys that lead to the problem, and the problem."""

    def __init__(self, path: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{'.'.join(path)}: {problem}" if path else problem)
        self.path, self.problem = path, problem


def convert_table(values: object, kind: type[Built]) -> Built:
    """Return a table as a *kind*, a dataclass or a msgspec struct, or a value; a TableError says what does not fit."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), values, kind) from None


def _explain(text: str, values: object, kind: type) -> TableError:
    message, _, place = text.partition(" - at `$")
    path = tuple(re.findall(r"[\w-]+", place))
    if match := re.fullmatch(r"Object (missing required|contains unknown) field `(.+)`", message):
        return TableError((*path, match[2]), "is missing" if match[1].startswith("missing") else "unknown key")
    value = values
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence):
            value = value[int(part)]
    value_text = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:60]}..."
    if message.startswith("Invalid enum value"):
        return TableError(path, f"{value_text} is not known; expected one of {', '.join(_choices(kind, path))}")
    if match := re.fullmatch(r"Expected `(\w+).*`, got `.*`", message):
        return TableError(path, f"{value_text} is not {TYPE_NAMES.get(match[1], 'a table')}")
    if match := re.fullmatch(r"Expected `\w+.*` ([<>]=?) (\S+)", message):
        (words, holds), bound = BOUNDS[match[1]], float(match[2])
        if isinstance(value, Mapping):  # msgspec does not say which of its values
            path, value_text = next(((*path, key), repr(own)) for key, own in value.items() if not holds(own, bound))
        return TableError(path, f"must be {words} {bound:,g}, not {value_text}")
    return TableError(path, message)


def _choices(kind: type, path: tuple[str, ...]) -> list[str]:
    """Return the words that the field at *path* may hold."""
    for part in path:
        hint = kind if part.isdigit() else get_type_hints(kind).get(part)
        kind = next((inner for inner in (*get_args(hint), hint) if isinstance(inner, type)), str)
    return list(kind) if issubclass(kind, StrEnum) else []


# ---- the package's own files -----------------------------------------------------------------------------

_STATEMENT = re.compile(r'\n(?=[\w"\[])')  # statements begin a line, the lines of a long value do not
_NAME = re.compile(r'"([^"]*)"|([\w-]+)')
_PAIR = re.compile(r"([\w-]+) = ")


def parse_tables(text: str) -> FactDict:
    """Return the tables of *text*, a file of the package. Text of users is checked (``inputs.source.parse_toml``).

    Most values are JSON as well, which msgspec parses in next to no time, or almost; tomllib parses the others.
    """
    if '"""' in text or "'''" in text:
        return tomllib.loads(text)
    tables: FactDict = {}
    current = tables
    for statement in _STATEMENT.split("\n" + re.sub(r"(?m)^#.*\n", "", text))[1:]:
        key, _, value = statement.partition(" = ")
        is_header = key.startswith("[")
        *path, name = [quoted or bare for quoted, bare in _NAME.findall(key.partition("#")[0])]
        table = tables if is_header else current
        for step in path:
            table = table.setdefault(step, {})
            table = table[-1] if isinstance(table, list) else table
        if key.startswith("[["):
            current = {}
            table.setdefault(name, []).append(current)
        elif is_header:
            current = table.setdefault(name, {})
        else:
            try:
                table[name] = msgspec.json.decode(value)
            except msgspec.DecodeError:
                table[name] = _parse_other(value)
    return tables


@cache
def _read_constants() -> dict[str, FactDict]:
    return parse_tables((Path(__file__).parents[1] / "data" / "fits" / "constants.toml").read_text(encoding="utf-8"))


def constants(topic: str) -> FactDict:
    """Return single measured constants of a *topic*: ``data/fits/constants.toml`` has the source of each."""
    return _read_constants()[topic]


def _parse_other(text: str) -> object:
    try:  # an inline table; where a string contains such a pair, this is no JSON either
        return msgspec.json.decode(_PAIR.sub(r'"\1": ', text))
    except msgspec.DecodeError:
        value: object = tomllib.loads(f"value = {text}")["value"]
        return value
