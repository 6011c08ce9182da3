"""Words that people use for our options and their values: of other tools, longer or shorter, in any case.

``renamed`` turns them into ours before arguments are read; what is neither is left for the error to name.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache


def _by_word(words: Mapping[str, str]) -> dict[str, str]:
    """Each of the words behind ours, which blanks separate, as the key of ours."""
    return {other: ours for ours, others in words.items() for other in others.split()}


# Other names of options that belong to answers; choices of a question have theirs in its table.
OTHER = _by_word(
    {
        "trace": "timeline perfetto chrome-trace",
        "output": "out outfile output-file",
        "what-if": "whatif",
        "failures": "failure-profile failure-model",
        "checkpoint-every": "checkpoint-interval save-interval",
        "top": "top-k limit best",
        "objective": "minimize optimize-for goal",
        "data": "data-dir rows",
        "size": "bytes message-size",
        "ranks": "nranks num-ranks",
        "explain-memory": "memory why-memory",
        "require-fit": "check-fit must-fit fail-if-oom",
    }
)


@cache
def other_names() -> Mapping[str, str]:
    """Return the other names of options with ours."""
    from stepcast.questions.spelling import alias_names

    return {**OTHER, **alias_names()}


# Verbs that are spelt in two ways.
SPELT: Mapping[str, str] = {"analyse": "analyze"}
# Verbs of other tools and of everyday speech.
VERBS: Mapping[str, str] = _by_word(
    {
        "predict": "estimate forecast run-model",
        "search": "optimize optimise tune autotune find best recommend",
        "plan": "cost budget",
        "show": "inspect info describe cat",
        "compare": "diff",
        "replay": "what-if whatif",
        "convert": "export",
        "validate": "accuracy verify",
        "profile": "measure benchmark",
        "list": "ls models gpus clusters",
        "collective": "allreduce nccl",
        "op": "matmul gemm",
        "demo": "example quickstart",
    }
)

# Choices that 'search' makes; a value given to one is fixed.
SEARCHED = ("tp", "cp", "ep", "expert-tp", "pp", "vpp", "micro-batch", "schedule", "recompute", "sharding")
FIX = "--fix"
WORDS = ("precision", "schedule", "sharding", "recompute")


def renamed(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """*arguments* with other words for *options* replaced by those."""
    found: list[str] = []
    for at, word in enumerate(arguments):
        if word == "--":
            return [*found, *arguments[at:]]
        found += _renamed(word, options) if _is_option(word) and word not in options else [word]
    return _fixed(found) if FIX in options else found


def _fixed(arguments: Sequence[str]) -> list[str]:
    """``--tp 8`` as ``--fix tp=8``."""
    from stepcast.questions.question import CHOICES

    found: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in (*SEARCHED, "precision"):
            found.append(word)
            continue
        value = value if equals else next(words, "")
        meant = CHOICES[name].read(value) if name in WORDS else value
        found += [FIX, f"{name}={meant}"] if "," not in meant else ["--allow", f"{name}={meant}"]
    return found


def _is_option(word: str) -> bool:
    return len(word) > 2 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def _renamed(word: str, options: Collection[str]) -> list[str]:
    from stepcast.questions.spelling import alias_flags

    names, flags = other_names(), alias_flags()
    name, equals, value = word.partition("=")
    plain = name.lstrip("-").lower().replace("_", "-")
    rest = [value] if equals else []
    if FIX in options:
        options = {*options, *(f"--{name}" for name in (*SEARCHED, "precision"))}
    if f"--{plain}" in options:
        return [f"--{plain}", *rest]
    if plain in names and f"--{names[plain]}" in options:
        return [f"--{names[plain]}", *rest]
    if plain in flags and f"--{flags[plain][0]}" in options and not rest:
        ours, meant = flags[plain]
        return [f"--{ours}", meant]
    return [word]


def known_words(options: Collection[str]) -> list[str]:
    """Everything that could have been meant by a word that is nothing here."""
    from stepcast.questions.spelling import alias_flags

    others = {f"--{other}" for other, ours in other_names().items() if f"--{ours}" in options}
    meant = {f"--{other}" for other, (ours, _) in alias_flags().items() if f"--{ours}" in options}
    return [*options, *sorted(others | meant)]
