"""Options of verbs: the choices of questions, and tables that read like their help (``data/options.txt``).

Values of one name are read by the same reader in every verb, listed in ``TYPES``.
"""

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepcast.cli.output import new_file, print_notes, print_warnings
from stepcast.inputs.source import DATA, Source, read_words
from stepcast.ir import limits
from stepcast.ir.limits import DESCRIPTION, SEQUENCES
from stepcast.ir.types import FactDict, require
from stepcast.questions import choices as readers
from stepcast.questions.choices import Choice, Question, alias_flags, alias_names, choices_of, defaults_of, invert_words
from stepcast.questions.choices import option_of as option_of
from stepcast.questions.question import CHOICES, DEFAULTS, SCHEDULES, WHAT, PredictQuestion, check_rules
from stepcast.units import parse_size_bytes

if TYPE_CHECKING:
    from stepcast.questions.runs import RunFile


def _read_collective(text: str) -> str:
    """Read ``AllReduce``, ``all_reduce`` and ``allreduce`` as one."""
    plain = text.lower().replace("_", "-")
    kinds = {kind.replace("-", ""): kind for kind in LISTS["collectives"]()}
    return {**kinds, "a2a": "all-to-all", "sendreceive": plain}.get(plain.replace("-", ""), plain)


def _read_host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"expected a host name, such as box.lan, not {text!r}")
    return text


TYPES: Mapping[str, Callable[[str], object]] = {
    **{name.replace("_", "-"): choice.read for name, choice in CHOICES.items() if choice.read is not str},
    **{
        name: kind
        for names, kind in (
            ("output trace html save to-file to-workload history markdown junit", new_file),
            ("gpus-per-server nics-per-server ranks ranks-per-node ranks-per-thread", readers.gpu_count),
            ("steps", readers.count(1, limits.STEPS.most)),
            ("imbalance", readers.amount),
            ("nvlink-gb-per-s nic-gb-per-s", readers.rate),
            ("backward-factor idle", readers.amount),
            ("min-change", readers.share),
            ("jitter", readers.deviation),
            ("size", parse_size_bytes),
        )
        for name in names.split()
    },
}
# Readers of arguments that a verb reads in its own way.
OWN_TYPES: Mapping[str, Callable[[str], object]] = {
    # A number of sequences, or the shapes of a batch as they are.
    "capture --batch": lambda text: text if "x" in text or ":" in text else readers.count(1, SEQUENCES.most)(text),
    "collective kind": _read_collective,
    "op --seq": readers.count(1, limits.ELEMENTS.most, readers.BINARY),
    "serve --name": _read_host,
    # Folders, a file, and what may be a prefix or standard output.
    **dict.fromkeys(("demo --output", "sweep --output", "simulate --schedule", "convert --output"), str),
}
MATRIX_KINDS = ("matmul", "bmm", "grouped", "attention")
# Values that rows name instead of listing them.
LISTS: Mapping[str, Callable[[], Sequence[str]]] = {
    "collectives": lambda: [*map(str, import_module("stepcast.ir.work").CollectiveKind), "send-receive"],
    "dtypes": lambda: [*map(str, import_module("stepcast.ir.types").DType)],
    "formats": lambda: [entry.name for entry in import_module("stepcast.inputs.table").FORMATS],
    "operators": lambda: [*MATRIX_KINDS, *map(str, import_module("stepcast.ir.work").ElementwiseKind)],
    "schedules": lambda: SCHEDULES,
    "targets": lambda: [target.name for target in import_module("stepcast.outputs.table").TARGETS],
}
NAMES = re.compile(r"-[^\s,]+(?:, -[^\s,]+)*|[a-z_]+")
LIMITS = re.compile(r"(\d+)\.\.(\w+)")


def add_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the arguments of a verb, which its table in ``data/options.txt`` declares."""
    place: argparse._ActionsContainer = parser
    for row in _rows(verb):
        if row.startswith("="):
            place = parser.add_argument_group(row[2:]) if row[2:] else parser
        elif not row.startswith("@"):
            add_row(place, row, verb)
        elif ":" not in row:
            for included in _rows(row[1:]):
                add_row(place, included, verb)
        else:
            name, *left_out = row[1:].split(" -")
            module, _, question = name.partition(":")
            kind: type[Question] = getattr(import_module(f"stepcast.{module}"), question)
            parser.set_defaults(asks=kind)
            groups: dict[str, argparse._ArgumentGroup] = {}
            for name, choice in choices_of(kind).items():
                if name in left_out:
                    continue
                if choice.group not in groups:
                    groups[choice.group] = parser.add_argument_group(choice.group)
                    if choice.group == WHAT and issubclass(kind, PredictQuestion):
                        for included in _rows("config"):
                            add_row(groups[WHAT], included)
                # Absent unless given, so that read_question can tell it from one given with its default.
                add_choice(groups[choice.group], name, choice, defaults_of(kind)[name], default=argparse.SUPPRESS)


def add_choice(
    parser: argparse._ActionsContainer, name: str, choice: Choice, usual: object, default: object = None
) -> None:
    """Add the option of a choice whose default is *usual*, or to argparse *default*."""
    known: FactDict = {"help": choice.help.replace("%", "%%") or None, "default": default or usual}
    if choice.deniable:
        known["action"] = argparse.BooleanOptionalAction
    elif usual is False:
        known["action"] = "store_true"
    else:
        known |= {"metavar": choice.metavar} if choice.metavar else {}
        known |= {"choices": choice.values} if choice.values else {}
        known |= {"type": choice.parse} if choice.several else {"type": choice.read} if choice.read is not str else {}
        known |= {"action": "append"} if usual == () else {}
        known |= {"default": []} if usual == () and known["default"] == () else {}
    parser.add_argument(option_of(name), dest=name, **known)


def read_question(args: argparse.Namespace) -> "tuple[Any, RunFile | None]":
    """Return the question that parsed *args* ask, and the file with a run that they name."""
    kind: type[Question] = args.asks
    given = {name: getattr(args, name) for name in choices_of(kind) if hasattr(args, name)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if not issubclass(kind, PredictQuestion):
        return kind(**given), None
    from stepcast.questions.runs import ask_with_file, read_run_file

    run, config = getattr(args, "run", None), getattr(args, "config", None)
    file = None
    if run is not None or config is not None or args.ignore_unknown:
        known = {"model": given.get("model"), "ignore_unknown": args.ignore_unknown}
        file = read_run_file(run, config, **known, takes_workloads=args.verb == "network")
    return ask_with_file(kind, given, file), file


def parse_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line, with the *question* that they ask and the choices of that."""
    args = parser.parse_args(words)
    if hasattr(args, "asks"):
        names = choices_of(args.asks)
        args.stated = frozenset(name for name in names if hasattr(args, name))
        args.question, args.run_file = read_question(args)
        args.given = (args.given - names.keys()) | args.question.given
        for name in names:
            setattr(args, name, getattr(args.question, name))
        if args.run_file and args.verb not in ("predict", "plan"):  # these have warnings in their answers
            print_warnings(args.run_file.warnings)
    return args


def check_applicable(args: argparse.Namespace, **facts: object) -> None:
    """Raise a ValueError for the first option of a verb without effect; print notes for the harmless ones.

    A verb calls it once it knows its input, which *facts* describe.
    """
    name = "forecast" if args.verb == "predict" else args.verb  # the rules of its question are checked with it
    print_notes(check_rules(name, args.given, {**vars(args), **facts}))


def has_racks(args: argparse.Namespace) -> bool:
    """Return True if nodes of the cluster share a scale-up domain; load it only if --place is given."""
    from stepcast.hardware import load_cluster

    if "place" not in args.given or args.cluster is None:
        return False
    return load_cluster(args.cluster, args.set).topology.scale_up_nodes > 1


def cluster_question(args: argparse.Namespace) -> PredictQuestion:
    """Return the question of *args* about the cluster alone, for runs whose program a file describes."""
    names = ("cluster", "set", "place", "background", "engine")
    values: FactDict = {name: getattr(args, name, DEFAULTS[name]) for name in names}
    return PredictQuestion(**{**values, "set": tuple(values["set"])})


def add_row(parser: argparse._ActionsContainer, row: str, verb: str = "") -> None:
    """Add the argument that a *row* of a table declares, as the head of ``data/options.txt`` explains."""
    row = _shared_rows().get(row, row)
    name = row[2:].replace("-", "_")
    if name in CHOICES:
        add_choice(parser, name, replace(CHOICES[name], several=False), DEFAULTS[name])
        return
    head, _, text = row.partition("  ")
    match = NAMES.match(head)
    assert match, f"no argument: {row!r}"
    names, known = match[0].split(", "), FactDict()
    is_option, read, default = names[0].startswith("-"), None, None
    for word in head[match.end() :].split():
        if word.startswith("{") and word.endswith("}"):
            values = word[1:-1]
            known["choices"] = LISTS[values]() if values in LISTS else values.split(",")
        elif match := LIMITS.fullmatch(word):
            read = readers.count(int(match[1]), int(match[2]) if match[2].isdigit() else getattr(limits, match[2]).most)
        elif word.startswith("="):
            default = word[1:]
        elif word in ("?", "+", "*"):
            known["nargs"] = word
        elif word == "...":
            known |= {"action": "append", "default": []}
        elif word == "!":
            known["required"] = True
        else:
            known["metavar"] = word.strip("[]") if word.startswith("[") else word
            known |= {"nargs": "?", "const": ""} if word.startswith("[") else {}
    plain = names[-1].lstrip("-")
    if is_option and not known and default is None:
        known["action"] = "store_true"
    elif reader := OWN_TYPES.get(f"{verb} {names[-1]}", read):
        known["type"] = reader
    elif is_option and "choices" not in known and plain in TYPES:
        known["type"] = TYPES[plain]
    if default is not None:
        known["default"] = known.get("type", str)(default)
    if is_option:
        known["dest"] = plain.replace("-", "_")
    text = text.replace("{values}", ", ".join(known.get("choices", ()))).replace("{schedules}", ", ".join(SCHEDULES))
    parser.add_argument(*names, help=argparse.SUPPRESS if text == "hidden" else text.replace("%", "%%"), **known)


@cache
def _read_tables() -> dict[str, str]:
    _, *parts = re.split(r"^\[(.+)\]\n", Source(DATA / "options.txt").text(DESCRIPTION), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@cache
def _shared_rows() -> Mapping[str, str]:
    """Return the rows that several verbs share; tables name them alone."""
    return {row.partition(" ")[0]: row for row in _rows("shared")}


def _rows(table: str) -> Iterator[str]:
    """Yield each row of a table on one line."""
    row = ""
    for line in _read_tables()[table].strip().splitlines():
        if line.startswith(" "):
            row = f"{row}{' ' if '  ' in row else '  '}{line.strip()}"
        else:
            if row:
                yield row
            row = line
    yield row


# ---- other words for options: of other tools, longer or shorter ones, in any letter case ------------------------

# Other names of options that are no choices of a question.
OTHER = invert_words(read_words("choices")["options"])


def rename_options(arguments: Sequence[str], options: Collection[str], kind: type[Question] | None = None) -> list[str]:
    """Return *arguments* with other words for *options* replaced; *kind* is the question that they ask."""
    words: list[str] = []
    meanings: dict[str, tuple[str, str]] = {}  # option -> the flag that set it, and the value
    names, flags = other_names(kind), alias_flags(kind or PredictQuestion)
    for index, word in enumerate(arguments):
        if word == "--":
            return [*words, *arguments[index:]]
        is_option = len(word) > 2 and word[0] == "-" and not word[1].isdigit() and word[1] != "."
        name, equals, value = word.partition("=")
        plain = name.lstrip("-").lower().replace("_", "-")
        ours = plain if f"--{plain}" in options else names.get(plain)
        flag, meant = flags.get(plain, ("", ""))
        if not is_option or word in options:
            words.append(word)
        elif ours and f"--{ours}" in options:
            words += [f"--{ours}", *([value] if equals else [])]
        elif f"--{flag}" in options and not equals:
            other, value = meanings.setdefault(flag, (word, meant))
            require(value == meant, f"{other} and {word} both set --{flag}; leave one of them out")
            words += [f"--{flag}", meant]
        else:
            words.append(word)
    return words


def other_names(kind: type[Question] | None = None) -> Mapping[str, str]:
    """Return the other names of options with ours."""
    return {**OTHER, **alias_names(PredictQuestion), **(alias_names(kind) if kind else {})}


def known_words(options: Collection[str], kind: type[Question] | None) -> list[str]:
    """Return everything that could have been meant by an unknown word."""
    others = {f"--{other}" for other, ours in other_names(kind).items() if f"--{ours}" in options}
    flags = alias_flags(kind or PredictQuestion).items()
    return [*options, *sorted(others | {f"--{other}" for other, (ours, _) in flags if f"--{ours}" in options})]
