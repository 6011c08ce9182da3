"""The keys of a configuration: used, without effect, not modelled, or unknown.

``data/configs/*.toml`` list the keys of each tool. A key that a reader does not use belongs to exactly one of
three lists: it has no effect on time or memory, it is understood but not modelled, or it is not recognised.
``[keys]`` has the spellings of each meaning. ``[options]`` has the options of ``predict`` that one key each states,
which ``outputs/configs.py`` writes by the same table.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from stepcast.inputs.expression import Expression
from stepcast.inputs.source import FormatError, expect, read_toml
from stepcast.ir.types import FactDict, Facts, dataclass

DATA = Path(__file__).parents[2] / "data" / "configs"
# A variable that the file does not set, or a value that a tool works out by itself.
UNSET = re.compile(r"\$\{?[A-Za-z_][^}]*\}?|\$\d|<[^>]*>|auto|\?\?\?", re.IGNORECASE)
MOST_KEYS, MOST_DEPTH = 20_000, 20
NO = ("false", "no", "off", "none", "null", "")
DEFAULT_TAKEN = ", so that the default is taken"
OFF = (*NO, "0", "0.0", "-1", "[]", "{}", "disabled", "default", "auto")

EXPLAINED = ("not_modelled", "unknown")  # lists of keys that have a text

OptionValue = str | int | float | bool
Options = dict[str, OptionValue]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A run as a configuration describes it, in the options of ``predict``."""

    format: str
    framework: str
    # Sizes and parts of the model as its tables spell them (layers, hidden, norm, ...), or a name it goes by.
    sizes: Facts = field(default_factory=dict)
    model: str = ""
    # Option -> value; True is a flag, False the flag with no- before it.
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    understood: tuple[str, ...] = ()
    # Keys without effect on step time or memory.
    ignored: tuple[str, ...] = ()
    # Key -> what is predicted instead.
    not_modelled: Mapping[str, str] = field(default_factory=dict)
    # Key that the tool does not have -> the nearest one that it has, or nothing.
    unknown: Mapping[str, str] = field(default_factory=dict)
    # Keys that matter and whose value is a variable of somewhere else.
    unset: tuple[str, ...] = ()
    # Values that the file leaves to the tool or to its caller, and the values assumed for them.
    assumed: tuple[str, ...] = ()
    # Choices by whether there is a pipeline, for degrees that are given beside the file.
    by_pipeline: Mapping[bool, Facts] = field(default_factory=dict)

    @property
    def unread(self) -> list[str]:
        """The keys whose values cannot be read, each with what is wrong with it."""
        reasons = self.not_modelled.items()
        return [f"{key}: {why.removesuffix(DEFAULT_TAKEN)}" for key, why in reasons if why.endswith(DEFAULT_TAKEN)]

    def add_inner(self, name: str, inner: "RunConfig") -> "RunConfig":
        """Return this run with the keys of *inner*, the configuration that its key *name* holds or names a file of."""
        return replace(
            self,
            understood=(*self.understood, *(f"{name}.{key}" for key in inner.understood)),
            ignored=(*self.ignored, *(f"{name}.{key}" for key in inner.ignored)),
            not_modelled={**self.not_modelled, **{f"{name}.{key}": why for key, why in inner.not_modelled.items()}},
            unknown={**self.unknown, **{f"{name}.{key}": nearest for key, nearest in inner.unknown.items()}},
        )


@dataclass(frozen=True, slots=True)
class NotModelled:
    """Keys that are not modelled, with what is predicted if one is switched on, or (*off*) switched off.

    A key with a value in *unless* is predicted as it is.
    """

    keys: str
    why: str
    unless: str = ""
    off: bool = False

    def concerns(self, value: object) -> bool:
        text = str(value).strip().lower()
        if self.off:
            return value is not None and text in NO
        return text not in OFF and text not in self.unless.split()


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The keys a tool has: without effect, or not modelled. ``*`` in a name matches any text."""

    no_effect: frozenset[str]
    not_modelled: Mapping[str, NotModelled]
    table: FactDict = field(default_factory=dict)  # of the file

    def find(self, name: str) -> str:
        """Return the listed name or pattern that *name* matches, or nothing."""
        if name in self.not_modelled or name in self.no_effect:
            return name
        patterns = (listed for listed in (*self.not_modelled, *self.no_effect) if "*" in listed)
        return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")


@lru_cache
def known_keys(tool: str) -> KnownKeys:
    """Return the keys of ``data/configs/TOOL.toml``; ``extends`` there adds those of another tool, their meanings and
    words.
    """
    table = dict(read_toml(DATA / f"{tool}.toml"))
    no_effect = {*table["no_effect"].split(), *table.get("read", "").split()}
    reasons: dict[str, NotModelled] = {}
    for base in map(known_keys, table.get("extends", [])):
        no_effect |= base.no_effect
        reasons |= base.not_modelled
        for part in {"keys", "words", "options", "acting"} & base.table.keys():
            table[part] = {**base.table[part], **table.get(part, {})}
    for reason in (NotModelled(**entry) for entry in table.get("not_modelled", [])):
        reasons |= dict.fromkeys(reason.keys.split(), reason)
    return KnownKeys(frozenset(no_effect), reasons, table)


@dataclass(frozen=True, slots=True)
class OptionKey:
    """The spellings of the key that states an option, how it is read, and our value for each of the tool's words."""

    names: tuple[str, ...]
    kind: str = "number"
    words: Mapping[str, OptionValue] = field(default_factory=dict)
    # The value that is predicted for words that are not listed.
    otherwise: str = ""


def option_keys(tool: str) -> dict[str, OptionKey]:
    """Return the keys of ``[options]``: the spellings of a number, or a table with their kind, words and otherwise."""
    known = known_keys(tool).table
    entries: FactDict = known.get("options", {})
    tables = {name: {"number": entry} if isinstance(entry, str) else dict(entry) for name, entry in entries.items()}
    for table in tables.values():
        if isinstance(words := table.get("words"), str):  # the name of a table
            table["words"] = known["words"].get(words, {})
    return {
        name: OptionKey(tuple(table.pop(kind).split()), kind, **table)
        for name, table in tables.items()
        for kind in [next(iter(table))]
    }


class Keys:
    """Flat keys with their values; reading one marks it as understood."""

    def __init__(self, values: Mapping[str, object], tool: str) -> None:
        check_key_count(len(values))
        self.values = dict(values)
        self.tool, self.known = tool, known_keys(tool)
        self._read_names: set[str] = set()
        # Key that was read -> whether it had a value.
        self._is_set: dict[str, bool] = {}
        self._reasons: dict[str, str] = {}
        self._without_effect: set[str] = set()
        self._assumed: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def spell(self, *names: str) -> tuple[str, ...]:
        """Return the keys that *names* stand for: a tool with ``[keys]`` is asked by meaning, or by dotted key."""
        meanings: Mapping[str, str] | None = self.known.table.get("keys")
        if meanings is None:
            return names
        return tuple(key for name in names for key in meanings.get(name, name if "." in name else "").split())

    def raw(self, *names: str) -> object:
        """Return the value of the first of *names* that is there and set."""
        result, names = None, self.spell(*names)
        self._read_names.update(names)
        for name in names:
            if name in self.values:
                self._is_set[name] = not self.is_unset(name)
                if result is None and self._is_set[name]:
                    result = self.values[name]
        return result

    def share(self, *names: str) -> float | None:
        """Return a number; what follows it on a command line is no part of it."""
        return self._float(names)

    def number(self, *names: str) -> int | None:
        """Return a whole number; commas may separate its digits."""
        number = self._float(names, separators="_,")
        if number is None or number.is_integer():
            return None if number is None else int(number)
        self._report_unreadable("no whole number", self.raw(*names), *names)
        return None

    def _float(self, names: Sequence[str], separators: str = "") -> float | None:
        value = self.raw(*names)
        word = next(iter(str(value).split()), "").translate(str.maketrans("", "", separators))
        try:
            return None if value is None else float(word)
        except ValueError:
            self._report_unreadable("no number", value, *names)
            return None

    def _report_unreadable(self, why: str, value: object, *names: str) -> None:
        """Report the keys whose *value* cannot be what they hold, unless it means no choice."""
        if str(value).strip().lower() not in OFF and "<" not in str(value):
            unread = (name for name in self.own_names(*names) if self.values[name] == value)
            self._reasons |= dict.fromkeys(unread, f"{str(value)[:40]!r} is {why}{DEFAULT_TAKEN}")

    def count(self, *names: str) -> int | None:
        """Return a whole number above zero; 0 and -1 leave the choice to the tool."""
        value = self.number(*names)
        if value is not None and value < -1:
            self._report_unreadable("below zero", self.raw(*names), *names)
        return value if value is not None and value > 0 else None

    def size(self, *names: str, least: int = 1) -> int | None:
        """Return a whole number; refuse one below *least*, with which no tool trains."""
        value = self.number(*names)
        if value is not None and value < least:
            name = next(name for name in self.own_names(*names) if not self.is_unset(name))
            raise FormatError(f"{name} {value}: expected a whole number from {least}")
        return value

    def text(self, *names: str) -> str:
        value = self.raw(*names)
        return "" if value is None else str(value).strip()

    def word(self, *names: str) -> str:
        """Return the text in lower case."""
        return self.text(*names).lower()

    def last_word(self, *names: str) -> str:
        """Return the last part of a dotted name in lower case."""
        return self.word(*names).rpartition(".")[2]

    def flag(self, *names: str) -> bool | None:
        """Return whether it is switched on; None where the file leaves it out."""
        value = self.raw(*names)
        return None if value is None else is_on(value)

    def options(self) -> Options:
        """Return the options that one key each states."""
        options: Options = {}
        for name, key in option_keys(self.tool).items():
            value = getattr(self, key.kind)(*key.names)
            if key.words and value not in (None, ""):
                text = str(value).lower()
                if key.otherwise and text not in {*key.words, *NO}:
                    self.report(f"predicted as {key.otherwise}", *key.names)
                value = key.words.get(text)
            if value not in (None, ""):
                options[name] = value
        return options

    def is_unset(self, name: str) -> bool:
        """Return whether the file names it and leaves its value open, as ``auto`` or a variable."""
        value = self.values.get(name)
        return isinstance(value, str) and UNSET.fullmatch(value.strip()) is not None

    def own_names(self, *names: str) -> Iterator[str]:
        """Yield the keys of the file that go by *names*."""
        yield from (name for name in self.spell(*names) if name in self.values)

    def report(self, why: str, *names: str) -> None:
        """Report keys as understood but not modelled, with what is predicted instead."""
        self._read_names.update(self.spell(*names))
        self._reasons |= dict.fromkeys(self.own_names(*names), why)

    def report_without_effect(self, *names: str) -> None:
        """Report keys as having no effect in this configuration."""
        self._read_names.update(self.spell(*names))
        self._without_effect.update(self.own_names(*names))

    def assume(self, text: str) -> None:
        self._assumed.append(text)

    def config(
        self, format_name: str, framework: str, options: Options, sizes: Facts | None = None, model: str = ""
    ) -> RunConfig:
        """Return the run, with every key of the file in one list."""
        # The keys of [acting] have no effect where their condition on the options and the sizes does not hold.
        facts = {name.replace("-", "_"): value for name, value in {**(sizes or {}), **options}.items()}
        for condition, idle in self.known.table.get("acting", {}).items():
            if not Expression(condition)(facts):
                self.report_without_effect(*idle.split())
        lists: dict[str, dict[str, str]] = {name: {} for name in ("understood", "ignored", "unset", *EXPLAINED)}
        for name in self.values:
            part, text = self._place(name)
            lists[part][name] = text
        names: FactDict = {part: texts if part in EXPLAINED else tuple(texts) for part, texts in lists.items()}
        return RunConfig(format_name, framework, sizes or {}, model, options, **names, assumed=tuple(self._assumed))

    def _place(self, name: str) -> tuple[str, str]:
        """Return the list of a RunConfig that a key belongs to, and the text that it has there."""
        listed = self.listed_as(name)
        not_modelled = self.known.not_modelled.get(listed)
        if name in self._reasons:
            return "not_modelled", self._reasons[name]
        if name in self._without_effect:
            return "ignored", ""
        if name in self._is_set:
            return "understood" if self._is_set[name] else "unset", ""
        if not_modelled and not_modelled.concerns(self.values[name]):
            return "not_modelled", not_modelled.why
        return ("ignored", "") if listed or name in self._read_names else ("unknown", self.nearest(name))

    def listed_as(self, name: str) -> str:
        """Return the entry of the tool's list that *name* matches, or nothing."""
        return self.known.find(name)

    def nearest(self, name: str) -> str:
        """Return the key of the tool that is spelt most like *name*, or nothing."""
        return closest(name, self.all_names())

    def all_names(self) -> set[str]:
        return {*self.known.no_effect, *self.known.not_modelled, *self._read_names}


def closest(name: str, known: Iterable[str]) -> str:
    """Return the name in *known* that is spelt most like *name*, or nothing."""
    plain = [candidate for candidate in known if "*" not in candidate and not candidate.startswith("$")]
    return next(iter(get_close_matches(name, sorted(plain), n=1, cutoff=0.75)), "")


def is_on(value: object) -> bool:
    """Return whether the value of a switch turns it on."""
    return value if isinstance(value, bool) else str(value).strip().lower() not in NO


def check_key_count(count: int) -> None:
    expect(count <= MOST_KEYS, f"more than {MOST_KEYS:,} keys; is it a configuration of a run?")


def flat(table: Mapping[str, object]) -> dict[str, object]:
    """Return nested tables as dotted keys; lists stay values. Parts that YAML shares count each time."""
    values: dict[str, object] = {}

    def walk(inner: Mapping[str, object], prefix: str, depth: int) -> None:
        expect(depth <= MOST_DEPTH, "its tables nest too deeply to be read")
        for key, value in inner.items():
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{key}.", depth + 1)
            else:
                check_key_count(len(values))
                values[f"{prefix}{key}"] = value

    walk(table, "", 0)
    return values


def given_options(**options: OptionValue | None) -> Options:
    """Return the options that have a value, by their names on the command line."""
    return {name.rstrip("_").replace("_", "-"): value for name, value in options.items() if value is not None}
