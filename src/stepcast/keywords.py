"""The keywords of the functions in ``library``, derived from the choices of their questions.

Type checkers read ``keywords.pyi``, which ``python -m tools.write_keywords`` writes after a choice has changed.
"""

import datetime as datetime
import os as os
import re
from collections.abc import Mapping
from collections.abc import Sequence as Sequence
from functools import partial
from inspect import get_annotations, signature
from types import new_class
from typing import TypedDict

import stepcast
from stepcast.questions.choices import Choice, Question, choices_of
from stepcast.questions.generation import GenerateQuestion
from stepcast.questions.plan import PlanQuestion
from stepcast.questions.question import AnalyzeQuestion, PredictQuestion, ReplayQuestion
from stepcast.questions.search import SearchQuestion
from stepcast.rl.question import RlQuestion

FILE, TEXTS = "str | os.PathLike[str]", "list[str] | tuple[str, ...] | str"
# Choices that Python functions take otherwise than a question holds them.
OWN = {
    **dict.fromkeys(("background", "calibration", "config", "engine", "failures", "trace"), FILE),
    **dict.fromkeys(("overlap", "lora_targets"), TEXTS),
    **dict.fromkeys(("lora", "prompt_length", "response_length", "sharding"), "int | str"),
    **dict.fromkeys(("carbon", "reward_latency"), "float | str"),
    **dict.fromkeys(("node_write", "store_write"), "str"),  # with a unit
    "stage_layers": "list[int] | tuple[int, ...] | str",
}
# Type -> the function that takes these keywords, its question, and keywords that are no choices.
FUNCTIONS: Mapping[str, tuple[str, type[Question], Mapping[str, str]]] = {
    "PredictChoices": ("predict", PredictQuestion, {}),
    "SearchChoices": ("search", SearchQuestion, {}),
    "PlanChoices": ("plan", PlanQuestion, {"config": FILE, "ignore_unknown": "bool"}),
    "GenerateChoices": ("predict_generation", GenerateQuestion, {}),
    "RlChoices": ("predict_rl", RlQuestion, {}),
    "AnalyzeChoices": ("analyze", AnalyzeQuestion, {"trace": FILE}),
    "ReplayChoices": ("replay", ReplayQuestion, {"trace": FILE}),
}
LEFT_OUT = {"search"}  # of RL, which has another answer


def describe_keywords(function: str, kind: type[Question], others: Mapping[str, str]) -> dict[str, str]:
    """Return the type of each keyword of *function*; None leaves a choice open."""
    taken = LEFT_OUT | signature(getattr(stepcast, function)).parameters.keys()
    held = {name: own for base in reversed(kind.__mro__) for name, own in get_annotations(base).items()}
    types = {name: _describe(name, choice, str(held[name])) for name, choice in choices_of(kind).items()}
    return {name: f"{text} | None" for name, text in {**types, **others}.items() if name not in taken}


def _describe(name: str, choice: Choice, held: str) -> str:
    """Return the type of a choice that its question holds as *held*; text is read as on the command line."""
    words = re.findall(r"\w+", held.partition("Choice(")[0])
    if choice.sets == "axis":  # one value, or several
        own = "int" if "int" in words else "str"
        single = "bool | str" if choice.listed == ("yes", "no") else f"{own} | str" if own == "int" else own
        return f"{'int | ' if name == 'sharding' else ''}{single} | Sequence[{own}]"
    if name in OWN and not (choice.values and OWN[name] is FILE):
        return OWN[name]
    if "tuple" in words:
        return TEXTS
    if "Any" in words:
        return "str" if choice.values or choice.read is str else "int | str"
    for word, text in {"bool": "bool", "date": "datetime.date | str", "float": "float | str"}.items():
        if word in words:
            return text
    return "int | str" if "int" in words else "str"


TYPES = {name: describe_keywords(*function) for name, function in FUNCTIONS.items()}
for _name, _types in TYPES.items():
    _body = {"__module__": __name__, "__annotations__": _types}
    globals()[_name] = new_class(_name, (TypedDict,), {"total": False}, partial(dict.update, **_body))
