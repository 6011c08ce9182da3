"""Other words for options and verbs: those of other tools, longer or shorter ones, in any letter case.

``rename_options`` replaces them by ours before arguments are read; unknown words stay for the error to name.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from stepcast.questions.choices import alias_flags, alias_names, invert_words
from stepcast.questions.question import PredictQuestion

if TYPE_CHECKING:
    from stepcast.questions.choices import Question

# Other names of options that are no choices of a question.
OTHER = invert_words(
    {
        "trace": "timeline perfetto chrome-trace",
        "output": "out outfile output-file",
        "what-if": "whatif",
        "top": "top-k limit best",
        "data": "data-dir rows",
        "size": "bytes message-size",
        "ranks": "nranks num-ranks",
        "explain-memory": "memory why-memory",
        "require-fit": "check-fit must-fit fail-if-oom",
    }
)


def rename_options(
    arguments: Sequence[str], options: Collection[str], kind: "type[Question] | None" = None
) -> list[str]:
    """Return *arguments* with other words for *options* replaced; *kind* is the question that they ask."""
    words: list[str] = []
    for index, word in enumerate(arguments):
        if word == "--":
            return [*words, *arguments[index:]]
        words += _rename(word, options, kind) if _is_option(word) and word not in options else [word]
    return words


def _is_option(word: str) -> bool:
    return len(word) > 2 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def _rename(word: str, options: Collection[str], kind: "type[Question] | None") -> list[str]:
    name, equals, value = word.partition("=")
    plain = name.lstrip("-").lower().replace("_", "-")
    rest = [value] if equals else []
    names, flags = other_names(kind), alias_flags(kind or PredictQuestion)
    if f"--{plain}" in options:
        return [f"--{plain}", *rest]
    if plain in names and f"--{names[plain]}" in options:
        return [f"--{names[plain]}", *rest]
    if plain in flags and f"--{flags[plain][0]}" in options and not rest:
        ours, meant = flags[plain]
        return [f"--{ours}", meant]
    return [word]


def other_names(kind: "type[Question] | None" = None) -> Mapping[str, str]:
    """Return the other names of options with ours."""
    return {**OTHER, **alias_names(PredictQuestion), **(alias_names(kind) if kind else {})}


def known_words(options: Collection[str], kind: "type[Question] | None") -> list[str]:
    """Return everything that could have been meant by an unknown word."""
    others = {f"--{other}" for other, ours in other_names(kind).items() if f"--{ours}" in options}
    flags = alias_flags(kind or PredictQuestion).items()
    return [*options, *sorted(others | {f"--{other}" for other, (ours, _) in flags if f"--{ours}" in options})]
