"""Tables of plain values, as TOML gives them: checked and converted by msgspec, with problems in plain words."""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

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
LIMITS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}


class TableError(ValueError):
    """A table that does not fit its type: the keys that lead to the problem, and the problem."""

    def __init__(self, path: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{'.'.join(path)}: {problem}" if path else problem)
        self.path, self.problem = path, problem


def convert_table(values: Mapping[str, object], kind: type[Built]) -> Built:
    """Return *values* as a *kind*, a dataclass or a msgspec struct; a TableError says what does not fit."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), values, kind) from None


def _explain(text: str, values: Mapping[str, object], kind: type) -> TableError:
    message, _, place = text.partition(" - at `$")
    path = tuple(re.findall(r"[\w-]+", place))
    if match := re.fullmatch(r"Object (missing required|contains unknown) field `(.+)`", message):
        return TableError((*path, match[2]), "is missing" if match[1].startswith("missing") else "unknown key")
    value: object = values
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence):
            value = value[int(part)]
    shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:60]}..."
    if message.startswith("Invalid enum value"):
        return TableError(path, f"{shown} is not known; expected one of {', '.join(_choices(kind, path))}")
    if match := re.fullmatch(r"Expected `(\w+).*`, got `.*`", message):
        return TableError(path, f"{shown} is not {TYPE_NAMES.get(match[1], 'a table')}")
    if match := re.fullmatch(r"Expected `\w+.*` ([<>]=?) (\S+)", message):
        return TableError(path, f"must be {LIMITS[match[1]]} {float(match[2]):,g}, not {shown}")
    return TableError(path, message)


def _choices(kind: type, path: tuple[str, ...]) -> list[str]:
    """Return the words that the field at *path* may hold."""
    for part in path:
        hint = get_type_hints(kind).get(part)
        kind = next((inner for inner in (*get_args(hint), hint) if isinstance(inner, type)), str)
    return list(kind) if issubclass(kind, StrEnum) else []
