"""Write ``docs/json.md``: the JSON of every verb, described from the types in ``stepcast.results``.

``tests/results/test_json.py`` compares the page with the types, and real answers with both.
"""

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from stepcast.analyze.compare import Comparison
from stepcast.analyze.gate import GateResult
from stepcast.results import answers, costs, documents, generation


def describe_struct(name: str, struct: type[msgspec.Struct], **more: type) -> type:
    """Return the JSON of a struct as a typed dictionary, with the keys that its ``facts()`` adds."""
    hints = {key: _plain_type(hint) for key, hint in get_type_hints(struct).items()}
    kind = TypedDict(name, {**hints, **more})  # type: ignore[misc]
    kind.__doc__ = struct.__doc__
    return kind


def _plain_type(hint: Any) -> Any:
    """Return a type with typed dictionaries in the place of structs."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return describe_struct(hint.__name__, hint)
    if arguments := tuple(map(_plain_type, get_args(hint))):
        return Union[arguments] if get_origin(hint) is types.UnionType else get_origin(hint)[arguments]  # noqa: UP007
    return hint


GATE = describe_struct("GateResult", GateResult, failed=bool)
COMPARISON = describe_struct("Comparison", Comparison, sides=list[dict[str, str]])
ANSWERS: Mapping[str, tuple[type, ...]] = {
    "predict, simulate": (answers.StepAnswer,),
    "search": (answers.SearchAnswer,),
    "plan": (answers.PlanAnswer,),
    "predict, search or plan with several values": (answers.AlternativesAnswer,),
    "generate": (generation.GenerationAnswer,),
    "rl": (generation.RlAnswer, generation.RlSearchAnswer),
    "network": (answers.NetworkAnswer,),
    "compare": (COMPARISON,),
    "gate": (GATE,),
    "op": (costs.OperatorAnswer, costs.OperatorSweepAnswer),
    "collective": (costs.CollectiveAnswer, costs.CollectiveSweepAnswer, costs.SharedCollectiveAnswer),
    "show": (
        documents.WorkloadFacts,
        documents.TimelineFacts,
        documents.RunLogFacts,
        documents.SweepFacts,
        documents.OperatorTimesFacts,
        documents.ModelFacts,
    ),
    "list": (answers.ListAnswer,),
    "validate": (costs.ValidateAnswer,),
    "calibrate": (costs.FitFacts,),
    "run": (answers.RunAnswer,),
    "sweep": (answers.SweepCountsAnswer, answers.SweepRowsAnswer),
}


def find_mismatches(value: object, kind: Any, where: str = "answer") -> Iterator[str]:
    """Yield the keys of *value* that its type lacks, the keys that are missing, and values of another type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is object or kind is Any:
        return
    if is_typeddict(kind):
        if not isinstance(value, dict):
            yield f"{where}: expected an object, not {value!r:.60}"
            return
        hints = get_type_hints(kind)
        yield from (f"{where}.{name}: not in {kind.__name__}" for name in value.keys() - hints.keys())
        yield from (f"{where}.{name}: missing" for name in kind.__required_keys__ - value.keys())
        for name in value.keys() & hints.keys():
            yield from find_mismatches(value[name], hints[name], f"{where}.{name}")
    elif origin in (Union, types.UnionType):
        problems = [list(find_mismatches(value, option, where)) for option in arguments]
        if all(problems):
            yield from min(problems, key=len)
    elif origin is Literal:
        if value not in arguments:
            yield f"{where}: {value!r} is not one of {arguments}"
    elif origin in (dict, Mapping) or kind is dict:
        items = value.items() if isinstance(value, dict) else ()
        if not isinstance(value, dict):
            yield f"{where}: expected an object, not {value!r:.60}"
        for name, item in items:
            yield from find_mismatches(item, arguments[1] if arguments else object, f"{where}.{name}")
    elif origin is list:
        items_of = value if isinstance(value, list) else ()
        if not isinstance(value, list):
            yield f"{where}: expected a list, not {value!r:.60}"
        for index, item in enumerate(items_of):
            yield from find_mismatches(item, arguments[0], f"{where}[{index}]")
    elif kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            yield f"{where}: expected a number, not {value!r:.60}"
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{where}: expected {kind.__name__}, not {value!r:.60}"


def describe_answers() -> str:
    """Return the page that describes the JSON of every verb, made from the types."""
    lines = [
        "# What is in the JSON?",
        "",
        "Every verb prints one JSON object with `--json`: the answer itself, from which its text and page are made.",
        "This page is made from the types of answers (`src/stepcast/results`); a test compares real answers with them.",
        "Names end in their unit: `_s` seconds, `_bytes` bytes, `_per_s` per second; shares and errors are fractions.",
        "Keys marked `?` may be absent. `analyze` and `replay` are described on [their page](analyze.md).",
        "",
        "```bash",
        "stepcast predict --model llama-3.1-8b --cluster dgx-h100 --gpus 8 --json | jq .step_s",
        "```",
        "",
    ]
    described: dict[str, type] = {}
    for verb, kinds in ANSWERS.items():
        lines += [f"## {verb}", ""]
        for kind in kinds:
            lines += _describe(kind, described)
    lines += ["## Parts of answers", ""]
    for kind in sorted(_closure(described.values()) - set(described.values()), key=lambda part: part.__name__):
        lines += _describe(kind, described)
    return "\n".join(lines).rstrip() + "\n"


def _describe(kind: type, described: dict[str, type]) -> list[str]:
    described[kind.__name__] = kind
    hints, required = get_type_hints(kind), kind.__required_keys__  # type: ignore[attr-defined]
    summary = (kind.__doc__ or "").strip().splitlines() or [""]
    fields = [f"| `{name}{'' if name in required else '?'}` | {_words(hint)} |" for name, hint in hints.items()]
    return [f"### {kind.__name__}", "", summary[0], "", "| key | value |", "|---|---|", *fields, ""]


def _words(kind: Any) -> str:
    """Return a type in the words of JSON."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, arguments)))
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin is list:
        return f"list of {_words(arguments[0])}"
    if origin in (dict, Mapping):
        return f"object of {_words(arguments[1])}"
    if is_typeddict(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
    return names.get(kind, "any value")


def _closure(kinds: Any) -> set[type]:
    """Return the typed dictionaries that *kinds* are made of, themselves included."""
    found: set[type] = set()
    todo = list(kinds)
    while todo:
        kind = todo.pop()
        if get_origin(kind) is NotRequired or get_args(kind):
            todo += get_args(kind)
        elif is_typeddict(kind) and kind not in found:
            found.add(kind)
            todo += get_type_hints(kind).values()
    return found


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "json.md").write_text(describe_answers(), encoding="utf-8")
