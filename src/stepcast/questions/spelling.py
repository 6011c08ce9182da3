"""Questions from names and values, as Python, files and sweeps give them, and questions as command lines."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from stepcast.frameworks.profile import DECISIONS, Profile, settle
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.strategy import ScheduleKind, Strategy
from stepcast.questions.choices import invert_words, option_of, read_choice
from stepcast.questions.question import CHOICES, DEFAULTS, NOUNS, PredictQuestion

# Choices that say the same in other terms: one that is given replaces the others of a file.
EXCLUSIVE = ({"gpus", "nodes", "dp"}, {"global_batch", "accumulation"}, {"shard", "replicate"})


@cache
def alias_names() -> Mapping[str, str]:
    """Return the other names of choices, as options spell them, with ours."""
    return invert_words({name.replace("_", "-"): choice.aliases for name, choice in CHOICES.items()})


@cache
def alias_flags() -> Mapping[str, tuple[str, str]]:
    """Return the flags that mean a value of a choice: its name, as options spell it, and that value."""
    return {
        flag: (name.replace("_", "-"), value)
        for name, choice in CHOICES.items()
        for flag, value in invert_words(choice.flags).items()
    }


def read_choices(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return *given*, Python values or text by name, as a question holds them; None leaves a choice open.

    Names may be those of other tools. A name that is none is a TypeError, a wrong value a ValueError.
    """
    found: dict[str, Any] = {}
    for word, value in given.items():
        if value is None:
            continue
        name, value = _resolve(word, value)
        if name in NOUNS and not isinstance(value, str | os.PathLike):
            found[name] = value
            continue
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        found[name] = read_choice(name, CHOICES[name], DEFAULTS[name], plain)
    return found


def build_question(choices: Mapping[str, Any]) -> PredictQuestion:
    """Return the question of *choices*, Python values or text by name."""
    return PredictQuestion(**read_choices(choices))


def _resolve(word: str, value: Any) -> tuple[str, Any]:
    """Return our name for a choice, and its value where the *word* implies one."""
    plain = word.rstrip("_").replace("_", "-").lower()
    if plain.replace("-", "_") in CHOICES:
        return plain.replace("-", "_"), value
    if plain in alias_flags() and value is True:
        ours, meant = alias_flags()[plain]
        return ours.replace("-", "_"), meant
    if plain in alias_names():
        return alias_names()[plain].replace("-", "_"), value
    denied = plain.removeprefix("no-").replace("-", "_")
    if plain.startswith("no-") and denied in CHOICES and CHOICES[denied].deniable and isinstance(value, bool):
        return denied, not value
    from difflib import get_close_matches

    near = get_close_matches(plain.replace("-", "_"), CHOICES, n=1)
    raise TypeError(f"unexpected choice {word!r}" + (f"; did you mean {near[0]}?" if near else ""))


def replaced_names(given: Iterable[str]) -> frozenset[str]:
    """Return the names of choices that those *given* replace, because they say the same in other terms."""
    return frozenset(name for names in EXCLUSIVE if names & set(given) for name in names)


def spell_choices(choices: Mapping[str, Any]) -> list[str]:
    """Return the options of a command line that make *choices*."""
    words: list[str] = []
    for name, value in choices.items():
        if isinstance(value, bool):
            words.append(option_of(name) if value else option_of(f"no-{name}"))
        elif isinstance(value, tuple):
            words += [f"{option_of(name)}={each}" for each in value]
        elif value is not None:
            words.append(f"{option_of(name)}={value}")
    return words


# ---- strategies as command lines -----------------------------------------------------------------------


class UnsaidError(ValueError):
    """A setting that no option says."""


# Field of a Framework or a Strategy -> the choice that sets it.
SETTERS = {choice.sets: name for name, choice in CHOICES.items() if choice.sets}
# What other words say: the layout and the batch, adapters by their rank, the profile by its name.
ELSEWHERE = {"layout", "micro_batch", "global_batch", "seq", "precision", "training", "name"}


def predict_words(profile: Profile, model: Model, gpu: str, strategy: Strategy, framework: Framework) -> list[str]:
    """Return the options of ``predict`` for a strategy: layout, batch, and what *profile* does otherwise."""
    layout = strategy.layout
    words = ["--framework", profile.name, "--gpus", str(layout.gpus)]
    for name in ("tp", "cp", "ep", "pp", "vpp"):
        if getattr(layout, name) > 1:
            words += [f"--{name}", str(getattr(layout, name))]
    for name in ("expert_tp", "shard"):
        if getattr(layout, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(layout, name))]
    for name in ("micro_batch", "global_batch", "seq"):
        words += [f"--{name.replace('_', '-')}", str(getattr(strategy, name))]
    if strategy.precision is not profile.defaults.precision:
        words += ["--precision", str(strategy.precision)]
    # Presets and formats depend on the precision, so what differs is told with it said.
    settled = settle(profile, model, gpu, layout, {"precision": strategy.precision})
    usual = settled.strategy(layout, strategy.micro_batch, strategy.global_batch, strategy.seq)
    usual = replace(usual, schedule=ScheduleKind.INTERLEAVED if layout.vpp > 1 else ScheduleKind.ONE_F_ONE_B)
    for wanted, known in ((strategy, usual), (framework, settled.framework)):
        for name in (field.name for field in fields(wanted) if field.name not in ELSEWHERE):
            if getattr(wanted, name) != getattr(known, name):
                words += _spelled(name, getattr(wanted, name))
    return words


def _spelled(name: str, value: object) -> list[str]:
    if name not in SETTERS or value is None or (name == "stage_layers" and not value):
        kind = "the framework" if name in DECISIONS else "the strategy"
        raise UnsaidError(f"no option sets {name} of {kind} to {value!r}")
    choice = CHOICES[SETTERS[name]]
    if choice.deniable:
        return [option_of(SETTERS[name] if value else f"no-{SETTERS[name]}")]
    option = option_of(SETTERS[name])
    return [option] if DEFAULTS[SETTERS[name]] is False else [option, choice.write(value)]
