"""Questions from names and values, as Python, files and sweeps give them, and questions as command lines."""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

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
