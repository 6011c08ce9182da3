"""The keys of a configuration: used, without effect, not modelled, or unknown.

``data/configs/*.toml`` list the keys of each tool. A key that a reader does not use belongs to exactly one of
three lists: it has no effect on time or memory, it is understood but not modelled, or it is not recognised.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepcast.inputs.errors import FormatError
from stepcast.inputs.toml import read_toml

DATA = Path(__file__).parents[2] / "data" / "configs"
# A variable that the file does not set, or a value that a tool works out by itself.
UNSET = re.compile(r"\$\{?[A-Za-z_][^}]*\}?|\$\d|<[^>]*>|auto|\?\?\?", re.IGNORECASE)
MOST_KEYS = 20_000
NO = ("false", "no", "off", "none", "null", "")
OFF = (*NO, "0", "0.0", "-1", "[]", "{}", "disabled", "default", "auto")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A run as a configuration describes it, in the options of ``predict``."""

    format: str
    framework: str
    # Sizes of the model as its tables spell them (layers, hidden, ...), or a name it goes by.
    sizes: Mapping[str, int] = field(default_factory=dict)
    model: str = ""
    # Option -> value; True is a flag, False the flag with no- before it.
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    understood: tuple[str, ...] = ()
    # Keys without effect on step time or memory.
    ignored: tuple[str, ...] = ()
    # Key -> what is predicted instead.
    not_modelled: Mapping[str, str] = field(default_factory=dict)
    # Key that the tool does not have -> the nearest one that it has, or nothing.
    unknown: Mapping[str, str] = field(default_factory=dict)
    # Keys that matter and whose value is a variable of somewhere else.
    unset: tuple[str, ...] = ()
    # Values that the file leaves to the tool or to its caller, and what they were taken for.
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotModelled:
    """What is predicted instead of a key: of one that is switched on, or (*off*) of one that is switched off.

    A key with a value in *unless* is predicted as it is.
    """

    why: str
    unless: frozenset[str] = frozenset()
    off: bool = False

    def concerns(self, value: Any) -> bool:
        text = str(value).strip().lower()
        if self.off:
            return value is not None and text in NO
        return text not in OFF and text not in self.unless


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The keys a tool has: without effect, or not modelled. ``*`` in a name matches any text."""

    no_effect: frozenset[str]
    not_modelled: Mapping[str, NotModelled]

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.not_modelled, *self.no_effect) if "*" in name)

    def find(self, name: str) -> str:
        """Return the listed name or pattern that *name* matches, or nothing."""
        if name in self.not_modelled or name in self.no_effect:
            return name
        return next((pattern for pattern in self.patterns if fnmatchcase(name, pattern)), "")


@lru_cache
def known_keys(tool: str) -> KnownKeys:
    """Return the keys of ``data/configs/TOOL.toml``; ``extends`` there adds those of another tool."""
    table = read_toml(DATA / f"{tool}.toml")
    bases = [known_keys(name) for name in table.get("extends", [])]
    reasons = {name: why for base in bases for name, why in base.not_modelled.items()}
    for entry in table.get("not_modelled", []):
        values = frozenset(entry.get("unless", "").split())
        reason = NotModelled(entry["why"], values, entry.get("off", False))
        reasons |= dict.fromkeys(entry["keys"].split(), reason)
    own = {*table["no_effect"].split(), *table.get("read", "").split()}
    return KnownKeys(frozenset(own.union(*(base.no_effect for base in bases))), reasons)


class Keys:
    """Flat keys with their values; taking one marks it as understood."""

    def __init__(self, values: Mapping[str, Any], tool: str) -> None:
        if len(values) > MOST_KEYS:
            raise FormatError(f"more than {MOST_KEYS:,} keys; is it a configuration of a run?")
        self.values = dict(values)
        self.taken: dict[str, bool] = {}
        self.known = known_keys(tool)
        self.asked: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.without_effect: set[str] = set()
        self.assumed: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def raw(self, *names: str) -> Any:
        """Return the value of the first of *names* that is there and set."""
        found = None
        self.asked.update(names)
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
        """Return whether it is switched on; None where the file leaves it out."""
        value = self.raw(*names)
        if value is None:
            return None
        return value if isinstance(value, bool) else str(value).strip().lower() not in NO

    def is_unset(self, name: str) -> bool:
        """Return whether the file names it and leaves its value open, as ``auto`` or a variable."""
        value = self.values.get(name)
        return isinstance(value, str) and UNSET.fullmatch(value.strip()) is not None

    def own_names(self, *names: str) -> Iterator[str]:
        """Yield the keys of the file that go by *names*."""
        yield from (name for name in names if name in self.values)

    def report(self, why: str, *names: str) -> None:
        """Report keys as understood but not modelled, with what is predicted instead."""
        self.asked.update(names)
        self.reasons |= dict.fromkeys(self.own_names(*names), why)

    def report_without_effect(self, *names: str) -> None:
        """Report keys as having no effect in this configuration."""
        self.asked.update(names)
        self.without_effect.update(self.own_names(*names))

    def assume(self, text: str) -> None:
        self.assumed.append(text)

    def config(self, format_name: str, framework: str, **found: Any) -> RunConfig:
        """Return what was found, with every key of the file in one list."""
        lists: dict[str, list[str]] = {"understood": [], "ignored": [], "unset": []}
        reasons: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for name, value in self.values.items():
            listed = self.listed_as(name)
            if name in self.reasons:
                reasons[name] = self.reasons[name]
            elif name in self.without_effect:
                lists["ignored"].append(name)
            elif name in self.taken:
                lists["understood" if self.taken[name] else "unset"].append(name)
            elif listed in self.known.not_modelled and self.known.not_modelled[listed].concerns(value):
                reasons[name] = self.known.not_modelled[listed].why
            elif listed or name in self.asked:
                lists["ignored"].append(name)
            else:
                unknown[name] = self.nearest(name)
        return RunConfig(
            format_name,
            framework,
            understood=tuple(lists["understood"]),
            unset=tuple(lists["unset"]),
            ignored=tuple(lists["ignored"]),
            not_modelled=reasons,
            unknown=unknown,
            assumed=tuple(self.assumed),
            **found,
        )

    def listed_as(self, name: str) -> str:
        """Return the entry of the tool's list that *name* matches, or nothing."""
        return self.known.find(name)

    def nearest(self, name: str) -> str:
        """Return the key of the tool that is spelt most like *name*, or nothing."""
        return closest(name, {*self.known.no_effect, *self.known.not_modelled, *self.asked})


def closest(name: str, known: Iterable[str]) -> str:
    """Return the name in *known* that is spelt most like *name*, or nothing."""
    plain = [each for each in known if "*" not in each and not each.startswith("$")]
    return next(iter(get_close_matches(name, sorted(plain), n=1, cutoff=0.75)), "")


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
    """Return the options that have a value, by their names on the command line."""
    return {name.rstrip("_").replace("_", "-"): value for name, value in options.items() if value is not None}
