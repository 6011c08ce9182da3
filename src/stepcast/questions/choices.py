"""Choices of questions, declared once: how each is read, explained, named elsewhere and written back.

``data/choices.txt`` describes the fields of a question: headings, help, other names and rules. A field carries a Choice
in its annotation where text alone does not say how it is read.
Command-line options, Python keywords, saved runs, axes of sweeps, fields of the app and printed commands all follow
from it. A reader takes text and raises a ValueSpellingError.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from inspect import get_annotations
from typing import Self, TypeVar

import msgspec

from stepcast.inputs.source import DATA, Source, prefix_errors, read_words
from stepcast.ir.limits import DESCRIPTION, GPUS
from stepcast.ir.types import FactDict, Facts, dataclass, replace, require
from stepcast.units import format_short_count, nearest, parse_count


class ValueSpellingError(argparse.ArgumentTypeError, ValueError):
    """A value that cannot be read; a ValueError whose message argparse shows as it is."""


def count(least: int, most: int, kilo: int = 0) -> Callable[[str], int]:
    """Return a reader of whole numbers from *least* to *most*; ``16,384`` is one.

    With *kilo*, a k after the number multiplies it by that and an m by its square: 8k tokens are 8,192.
    """
    sizes = {"": 1} | ({"k": kilo, "m": kilo**2} if kilo else {})

    def parse(text: str) -> int:
        value = least - 1
        if text.isascii() and (match := COUNT.fullmatch(text.strip().lower())) and match[2] in sizes:
            number = float(match[1].replace(",", "").replace("_", "")) * sizes[match[2]]
            value = int(number) if number.is_integer() else value
        if not least <= value <= most:
            raise ValueSpellingError(f"expected a whole number from {least:,} to {most:,}, not {text!r}")
        return value

    return parse


# 1024, 16,384 or 1_024, 1.5k; an exact number of digits where it has no letter.
COUNT = re.compile(r"([+-]?[0-9]{1,3}(?:,[0-9]{3})+|[+-]?[0-9][0-9_]{0,30}(?:\.[0-9]+(?=[km]))?)\s?([km]?)")
BINARY = 1024
gpu_count = count(1, GPUS.most, BINARY)


def number_reader(
    expected: str, is_right: Callable[[float], bool], parse: Callable[[str], float] = float
) -> Callable[[str], float]:
    """Return a reader of numbers that *is_right* accepts; *expected* describes them in errors."""

    def read(text: str) -> float:
        try:
            value = parse(text)
        except ValueError:
            value = math.nan
        if not is_right(value):
            raise ValueSpellingError(f"expected {expected}, not {text!r}")
        return value

    return read


amount = number_reader("a number, zero or more", lambda value: 0 <= value < math.inf)
rate = number_reader("a number above zero", lambda value: 0 < value < math.inf)


def positive(meaning: Callable[[str], float]) -> Callable[[str], float]:
    """Return a reader of values above zero that reads them by *meaning*."""

    def read(text: str) -> float:
        try:
            value = meaning(text)
        except ValueError as error:
            raise ValueSpellingError(str(error)) from None
        if not value > 0:
            raise ValueSpellingError(f"{text!r} is not above zero")
        return value

    return read


def _parse_share(text: str) -> float:
    return float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)


share = number_reader("a share from 0 to below 1, such as 10% or 0.1", lambda value: 0 <= value < 1, _parse_share)
deviation = number_reader("a share from 0 to below 10, such as 5% or 0.05", lambda value: 0 <= value < 10, _parse_share)


PRICED = re.compile(r"\s*(usd|\$)?\s*(/|per)?\s*((gpu|accelerator)?[-/ ]*(hour|hr|h))?$")
LONGEST_CURRENCY = 8
FOREIGN = re.compile(r"eur|gbp|\u20ac|\u00a3")


def price(text: str) -> float | str:
    """Read the price of a GPU-hour: ``2.5``, ``2.5/gpu-hour``, or ``auto`` for that of the catalogue."""
    if text.strip().lower() == "auto":
        return "auto"
    if match := FOREIGN.search(text.lower()):
        raise ValueSpellingError(f"{text!r}: give the number here and --currency {match[0].upper()}")
    return amount(PRICED.sub("", text.strip().lower().lstrip("$")))


def currency(text: str) -> str:
    """Read a currency: a symbol or a short code, such as ``$`` or ``EUR``."""
    name = text.strip()
    if not 0 < len(name) <= LONGEST_CURRENCY or re.search(r"[\d\s]", name):
        raise ValueSpellingError(f"expected a symbol or a code, such as $ or EUR, not {text!r}")
    return name


def check_multiple(gpus: int, model_gpus: int, others: Sequence[str] = (), splits: bool = True) -> None:
    """Raise a ValueError unless the GPUs are a multiple of tp x cp x pp; suggest *others*.

    Without *splits*, the model cannot be split as asked for, and the suggestions are *others* alone.
    """
    if gpus % model_gpus:
        below, above = gpus // model_gpus * model_gpus, -(-gpus // model_gpus) * model_gpus
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        tries = [f"--gpus {near}", *(others or ["other sizes of --tp, --cp or --pp"])][not splits and bool(others) :]
        raise ValueError(
            f"{gpus:,} GPUs are not a multiple of tp x cp x pp = {model_gpus:,}: use {', or '.join(tries)}"
        )


AUTO = "auto"
# The commas between values, not those of one name's overrides (dgx-h100:node.gpus=4,node.nics=4) or inside brackets.
BETWEEN_VALUES = re.compile(r",(?!\s*[a-z_.0-9]+\s*=)(?![^\[]*\])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Description of one choice; its name and its default are those of the question's field."""

    help: str = ""
    group: str = ""  # the heading under which the help lists it
    metavar: str = ""
    read: Callable[[str], object] = str
    values: tuple[str, ...] = ()
    # Words that the help lists where it lists no values.
    listed: tuple[str, ...] = ()
    # A flag with a negation: --NAME and --no-NAME.
    deniable: bool = False
    # Other names, separated by blanks: of other tools, and former ones of ours.
    aliases: str = ""
    # Value -> names of flags that mean it, separated by blanks.
    flags: Mapping[str, str] = field(default_factory=dict)
    # The field of a Strategy, a Framework or the axes of a search that it sets, the value there for a value of the
    # choice, and the text for that value.
    sets: str = ""
    means: Callable[..., object] = lambda value: value
    write: Callable[..., str] = str
    # Several values, separated by commas, ask for one answer each.
    several: bool = False
    # The text of an answer where the choice has its default.
    stated: str = ""

    def parse(self, text: str) -> object:
        """Read the text of a value, or of several values as a tuple."""
        words = BETWEEN_VALUES.split(text) if self.several else ()
        if len(words) > 1 and not os.path.exists(text):
            return tuple(self.read(word.strip()) for word in words)
        return self.read(text)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the questions; a choice with its default is left to the verb that answers."""

    file: str = ""  # that describes the run, if one does
    # Choices that may have no effect: a file made them, or the framework makes them anyway.
    unchecked: frozenset[str] = frozenset()

    @property
    def choices(self) -> FactDict:
        """The choices that differ from their defaults, in the order of the help."""
        defaults = defaults_of(type(self)).items()
        return {name: value for name, default in defaults if (value := getattr(self, name)) != default}

    @property
    def given(self) -> frozenset[str]:
        """The choices that differ from their defaults and must have an effect."""
        return frozenset(self.choices) - self.unchecked

    def change(self, choices: Mapping[str, object]) -> Self:
        """Return the question with other *choices*, as the question holds them."""
        other = {name: default for name, default in defaults_of(type(self)).items() if name in replaced_names(choices)}
        return msgspec.structs.replace(self, **{**other, **choices}, unchecked=self.unchecked - set(choices))

    def leave_unchecked(self, names: "frozenset[str]") -> Self:
        """Return the question with choices that may have no effect."""
        return msgspec.structs.replace(self, unchecked=self.unchecked | names) if names else self


AnyQuestion = TypeVar("AnyQuestion", bound=Question)
ALSO = re.compile(r"(?:also ?(\S*)|stated): (.*)")
RULE = re.compile(r"(needs|note) (?:as (\S+)|(.*?): (.*))")
STATED = "stated"
AS_PREDICT = "as predict"


@cache
def choices_of(kind: type[Question]) -> Mapping[str, Choice]:
    """Return the choices of a kind of question by name, in the order of its help."""
    choices: dict[str, Choice] = {}
    predicting = _read_texts()["PredictQuestion"]
    for base in reversed(kind.__mro__):
        described = _read_texts().get(base.__name__, {})
        for name, annotation in get_annotations(base).items():
            if hasattr(annotation, "__metadata__"):
                choices[name] = annotation.__metadata__[0]
            elif name in described:
                choices[name] = Choice()
        for name, texts in described.items():  # without help there, with that of predict
            texts = {key: text for key, text in texts.items() if key != "rules"}
            choice, usual = choices[name], predicting.get(name, {})
            words = ", ".join(choice.listed or choice.values)
            help_text = str(texts.get("help") or usual.get("help", choice.help)).replace("{values}", words)
            aliases = (usual if texts.get("aliases") == AS_PREDICT else texts).get("aliases", choice.aliases)
            choices[name] = replace(choice, **{**texts, "help": help_text, "aliases": aliases})
    return choices


@cache
def _read_texts() -> Mapping[str, Mapping[str, FactDict]]:
    """Return the heading, the help and the other names of each choice, by kind of question."""
    texts_of: dict[str, dict[str, FactDict]] = {}
    _, *tables = Source(DATA / "choices.txt").text(DESCRIPTION).split("\n[")
    for table in tables:
        question, _, rows = table.partition("]\n")
        group, texts_of[question] = "", {}
        for row in rows.replace("\n        ", " ").replace("\n    ", "\t").split("\n"):
            head, *lines = row.split("\t")
            name, _, metavar = head.partition(" ")
            if name in ("", "="):
                group = metavar
                continue
            rules = [match.groups() for line in lines if (match := RULE.fullmatch(line))]
            marked = [match for line in lines if (match := ALSO.fullmatch(line))]
            others = {STATED if match[1] is None else match[1]: match[2] for match in marked}
            words = " ".join(line for line in lines if not ALSO.fullmatch(line) and not RULE.fullmatch(line))
            texts: FactDict = {"group": group, "metavar": metavar, "help": words, "aliases": others.pop("", "")}
            texts |= {STATED: others.pop(STATED, ""), "flags": others, "rules": rules}
            texts_of[question][name] = {key: text for key, text in texts.items() if text}
    return texts_of


def read_rules(question: str) -> list[tuple[str, str, str, str]]:
    """Return the rules of the choices of a kind of question: the choice, needs or note, the condition and why."""
    texts_of = _read_texts().get(question, {})

    def follow(name: str) -> Iterable[tuple[str, str, str]]:
        for kind, other, condition, why in texts_of[name].get("rules", ()):
            yield from follow(other) if other else [(kind, condition, why)]

    return [(name, *rule) for name in texts_of for rule in follow(name)]


@cache
def defaults_of(kind: type[Question]) -> Facts:
    """Return the default of each choice of a kind of question."""
    defaults = dict(zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True))
    return {name: defaults[name] for name in choices_of(kind)}


def several_of(question: Question) -> list[str]:
    """Return the choices of *question* that have several values; each value asks for an answer."""
    choices = choices_of(type(question)).items()
    return [name for name, choice in choices if choice.several and isinstance(getattr(question, name), tuple)]


def refuse_several(question: Question) -> None:
    """Raise a ValueError if *question* asks for several answers where one is given."""
    why = "has several values: only predict, search and plan compare them, in Python stepcast.alternatives"
    refuse_options(several_of(question), why)


# Choices that state one quantity in different terms: one that is given replaces the others.
EXCLUSIVE: tuple[set[str], ...] = ({"global_batch", "accumulation"}, {"gpus", "nodes", "dp"}, {"shard", "replicate"})
EXCLUSIVE += ({"tokens", "samples", "steps"}, {"cluster", "gpu"})


def replaced_names(given: Iterable[str], groups: Iterable[set[str]] = EXCLUSIVE[:1]) -> frozenset[str]:
    """Return the names of choices that those *given* replace."""
    names = set(given)
    return frozenset(name for group in groups if group & names for name in group - names)


def state_defaults(question: Question, unset: Collection[str]) -> list[str]:
    """Return what an answer states of the choices that are *unset*, with the options that change them."""
    stated = {name: choice.stated for name, choice in choices_of(type(question)).items() if choice.stated}
    named = {name: text.format(getattr(question, name)) for name, text in stated.items() if name in unset}
    return [f"{text} ({option_of(name)})" for name, text in named.items()]


# ---- reading ----------------------------------------------------------------------------------------------


class UnknownChoiceError(TypeError):
    """A name that is no choice of a question, with a *hint* at the nearest one that is."""

    def __init__(self, name: str, hint: str) -> None:
        self.name, self.hint = name, hint
        super().__init__(f"unrecognised option {name!r}{hint}")


# Choices whose values may be Python objects instead of names.
NOUNS = ("model", "cluster", "framework", "calibration")


def build_question(kind: type[AnyQuestion], choices: Mapping[str, object]) -> AnyQuestion:
    """Return the question that *choices* ask, Python values or text by name."""
    return kind(**read_choices(kind, choices))


def read_choices(kind: type[Question], given: Mapping[str, object]) -> FactDict:
    """Return *given*, Python values or text by name, as a question holds them; None leaves a choice open.

    Names may be those of other tools. An unknown name is an UnknownChoiceError, a wrong value a ValueError.
    """
    values: FactDict = {}
    for word, value in given.items():
        if value is None:
            continue
        name, value = resolve_name(kind, word, value)
        if name in NOUNS and isinstance(value, int | float | dict):
            raise TypeError(f"{name} must be a name, a file or a value of stepcast, not {type(value).__name__}")
        if name in NOUNS and not isinstance(value, str | os.PathLike):
            values[name] = tuple(value) if isinstance(value, list) else value
            continue
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        values[name] = read_choice(name, choices_of(kind)[name], defaults_of(kind)[name], plain)
    return values


def read_choice(name: str, choice: Choice, default: object, value: object) -> object:
    """Return *value*, text or a Python value, as the question holds it; raise a ValueError that names it."""
    if choice.deniable or default is False:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{name}: expected True or False, not {value!r}")
    if default == ():
        return tuple(value) if isinstance(value, list | tuple) else (str(value),)
    require(not isinstance(value, bool) or choice.sets == "axis", f"{name}: expected a value, not {value!r}")
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    with prefix_errors(name, kinds=(ValueSpellingError,)):
        read = choice.parse(text)
    if choice.values and not isinstance(read, tuple):
        check_known(str(read), choice.values, f"{name}: ")
    return read


def resolve_name(kind: type[Question], word: str, value: object = None) -> tuple[str, object]:
    """Return our name for a choice, and its value where the *word* implies one."""
    known, plain = choices_of(kind), word.rstrip("_").replace("_", "-").lower()
    name = plain.replace("-", "_")
    for own in (name, f"{name}_"):  # Python reserves some names
        if own in known:
            return own, value
    if plain in alias_flags(kind) and value is True:
        ours, meant = alias_flags(kind)[plain]
        return ours.replace("-", "_"), meant
    if plain in alias_names(kind):
        return alias_names(kind)[plain].replace("-", "_"), value
    denied = name.removeprefix("no_")
    if denied != name and denied in known and known[denied].deniable and isinstance(value, bool):
        return denied, not value
    raise UnknownChoiceError(word, nearest(name, known, 1, 0.6))


def check_known(word: str, known: Iterable[str], where: str = "") -> None:
    """Raise a ValueError that suggests the nearest of the *known* words unless *word* is one of them."""
    words = tuple(known)
    if word not in words:
        hint = nearest(str(word), words, 2, 0.6) or f"; expected one of {', '.join(words)}"
        raise ValueSpellingError(f"{where}{word!r} is not known{hint}")


@cache
def alias_names(kind: type[Question]) -> Mapping[str, str]:
    """Return the other names of choices, as options spell them, with ours."""
    return invert_words({name.replace("_", "-"): choice.aliases for name, choice in choices_of(kind).items()})


@cache
def alias_flags(kind: type[Question]) -> Mapping[str, tuple[str, str]]:
    """Return the flags that mean a value of a choice: its name, as options spell it, and that value."""
    return {
        flag: (name.replace("_", "-"), value)
        for name, choice in choices_of(kind).items()
        for flag, value in invert_words(choice.flags).items()
    }


def invert_words(words: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping from each of the words, which blanks separate, to its key."""
    return {other: ours for ours, others in words.items() for other in others.split()}


# ---- writing ----------------------------------------------------------------------------------------------


def option_of(name: str) -> str:
    """Return the option of a command line that sets the choice *name*."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def refuse_options(names: Iterable[str], why: str) -> None:
    """Raise a ValueError for the first of the choices *names*; *why* follows its option in the message."""
    for name in names:
        raise ValueError(f"{option_of(name)} {why}")


def spell_option(name: str, value: object) -> list[str]:
    """Return the option that makes a choice, and its value unless it is a flag."""
    if isinstance(value, bool):
        return [option_of(name if value else f"no-{name}")]
    text = f"{value:.15g}" if isinstance(value, float) else str(value)
    if name == "tokens" and isinstance(value, float) and parse_count(short := format_short_count(value)) == value:
        text = short
    return [option_of(name), text]


def spell_choices(choices: Mapping[str, object]) -> list[str]:
    """Return the options of a command line that make *choices*, each in one word."""
    several = {name: value if isinstance(value, tuple | list) else [value] for name, value in choices.items()}
    pairs = [(name, value) for name, values in several.items() for value in values if value is not None]
    return ["=".join(spell_option(name, value)) for name, value in pairs]


# ---- readers of words -------------------------------------------------------------------------------------


def read_word(synonyms: Mapping[str, str]) -> Callable[[str], str]:
    """Return a reader of words in any letter case, with *synonyms* of our words, separated by blanks."""
    ours = invert_words(synonyms)

    def read(text: str) -> str:
        plain = plain_word(text)
        return ours.get(plain, plain)

    return read


def plain_word(text: str) -> str:
    return text.strip().lower().replace("_", "-").replace(" ", "-")


# Words of other tools for the values of choices, by choice.
WORDS = read_words("choices")
read_precision, read_schedule, read_dispatcher, read_cp_comm, _read_sharding_name = (
    read_word(WORDS[name]) for name in ("precision", "schedule", "dispatcher", "cp_comm", "sharding")
)
RECOMPUTES = invert_words(WORDS["recompute"])
ZERO_STAGE = re.compile(r"(?:zero|stage|zero-stage|z)?-?([123])")


def read_sharding(text: str) -> str:
    """Read ``ZeRO-3``, ``zero3``, ``stage 3`` and ``3`` as one word."""
    stage = ZERO_STAGE.fullmatch(plain_word(text))
    return f"zero-{stage[1]}" if stage else _read_sharding_name(text)


def read_recompute(text: str) -> str:
    """Read kinds in any letter case; the text after a colon is left as it is."""
    kind, colon, rest = text.strip().partition(":")
    plain = kind.lower()
    return RECOMPUTES.get(plain, plain) + colon + rest


# ---- LoRA -------------------------------------------------------------------------------------------------

TARGETS, TARGET_GROUPS = WORDS["lora_targets"], invert_words(WORDS["lora_groups"])
ALL_LINEAR = ("all-linear", "all_linear", "all", "")


def read_targets(text: str) -> str:
    """Read the linear layers that LoRA adapts, by our names or those of modules; all of them are ''."""
    names = invert_words(TARGETS)
    words = [word.strip().rpartition(".")[2] for word in text.replace("+", ",").split(",")]
    if any(word.lower() in ALL_LINEAR for word in words):
        return ""
    chosen: set[str] = set()
    for word in words:
        plain = word.replace("_", " ")
        group = TARGET_GROUPS.get(word.lower(), names.get(word, plain if plain in TARGETS else ""))
        if not group:
            hint = nearest(word, [*TARGETS, *names, *TARGET_GROUPS], 2, 0.6)
            known = f"; expected {', '.join(TARGETS)}, modules such as q_proj, attention, mlp, or all-linear"
            raise ValueSpellingError(f"lora target {word!r} is not known{hint or known}")
        chosen |= {group} if group in TARGETS else {name.replace("_", " ") for name in group.split()}
    return ",".join(name for name in TARGETS if name in chosen)


def read_lora(text: str) -> str:
    """Check RANK, ALPHA, TARGETS and DROPOUT; return them as they are."""
    split_lora(text)
    return text


def split_lora(text: str) -> FactDict:
    """Return the choices that ``--lora RANK,ALPHA,TARGETS,DROPOUT`` makes; targets may be named in any place."""
    words = [word.strip() for word in text.split(",")]
    numbers = [word for word in words if NUMBER.fullmatch(word)]
    targets = [word for word in words if word and not NUMBER.fullmatch(word)]
    if not (numbers and words[0] == numbers[0] and "." not in words[0] and len(numbers) <= 3):
        raise ValueSpellingError(f"{text!r}: expected RANK[,ALPHA[,TARGETS[,DROPOUT]]], such as 16,32,all-linear,0.05")
    named = read_targets(",".join(targets)) or None if targets else None
    dropout = float(numbers[2]) if len(numbers) > 2 else 0.0
    return {"lora_rank": int(words[0]), "lora_targets": named, "lora_dropout": dropout}


NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
