"""The keys of a configuration, and which of them were understood."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepcast.inputs.errors import FormatError

# A variable that the file does not set, or what a tool works out by itself.
UNSET = re.compile(r"\$\{?[A-Za-z_][^}]*\}?|\$\d|<[^>]*>|auto|\?\?\?", re.IGNORECASE)
MOST_KEYS = 20_000
NO = ("false", "no", "off", "none", "null", "")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What a file says of a run, in the words of ``predict``."""

    format: str
    framework: str
    # Sizes of the model as its tables spell them (layers, hidden, ...), or a name it goes by.
    sizes: Mapping[str, int] = field(default_factory=dict)
    model: str = ""
    # Option -> value; True is a flag, False the flag with no- before it.
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    understood: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    # Keys that matter and whose value is a variable of somewhere else.
    unset: tuple[str, ...] = ()


class Keys:
    """Flat keys with their values; taking one marks it as understood."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        if len(values) > MOST_KEYS:
            raise FormatError(f"more than {MOST_KEYS:,} keys; is it a configuration of a run?")
        self.values = dict(values)
        self.taken: dict[str, bool] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def raw(self, *names: str) -> Any:
        """The value of the first of *names* that is there and set."""
        found = None
        for name in names:
            if name in self.values:
                value = self.values[name]
                unset = isinstance(value, str) and UNSET.fullmatch(value.strip()) is not None
                self.taken[name] = not unset
                found = value if found is None and not unset else found
        return found

    def number(self, *names: str) -> int | None:
        value = self.raw(*names)
        if value is None or isinstance(value, bool | list | dict):
            return None
        try:
            number = float(_first(value).replace("_", "").replace(",", ""))
        except ValueError:
            return None
        return int(number) if number.is_integer() else None

    def share(self, *names: str) -> float | None:
        value = self.raw(*names)
        try:
            return None if value is None else float(_first(value))
        except ValueError:
            return None

    def text(self, *names: str) -> str:
        value = self.raw(*names)
        return "" if value is None else str(value).strip()

    def flag(self, *names: str) -> bool | None:
        """Whether it is switched on; None where nobody says."""
        value = self.raw(*names)
        if value is None:
            return None
        return value if isinstance(value, bool) else str(value).strip().lower() not in NO

    def config(self, format_name: str, framework: str, **found: Any) -> RunConfig:
        """What was found, with the lists of keys that were used, that were not, and that are not set."""
        return RunConfig(
            format_name,
            framework,
            understood=tuple(name for name, known in self.taken.items() if known),
            unset=tuple(name for name, known in self.taken.items() if not known),
            ignored=tuple(name for name in self.values if name not in self.taken),
            **found,
        )


def _first(value: Any) -> str:
    """What follows a number on a command line is no part of it."""
    return next(iter(str(value).split()), "")


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted keys; lists stay values. Parts that YAML shares count each time."""
    found: dict[str, Any] = {}
    for key, value in _walk(table, ""):
        if len(found) > MOST_KEYS:
            raise FormatError(f"more than {MOST_KEYS:,} keys; is it a configuration of a run?")
        found[key] = value
    return found


def _walk(table: Mapping[Any, Any], prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > 20:
        raise FormatError("its tables nest too deeply to be read")
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _walk(value, f"{name}.", depth + 1)
        else:
            yield name, value


def said(**options: Any) -> dict[str, Any]:
    """Options that have a value, by their names on the command line."""
    return {name.rstrip("_").replace("_", "-"): value for name, value in options.items() if value is not None}
