"""The command ``stepcast``: find the verb, load only that verb's module, report errors in one line.

Verbs have a summary, a paragraph, two examples and a page in the docs each (``data/verbs.txt``).
"""

import argparse
import gc
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from stepcast.cli import streams
from stepcast.cli.interrupts import INTERRUPTED, end_on_interrupt
from stepcast.units import nearest
from stepcast.version import __version__
from stepcast.views.text import message as one_line
from stepcast.views.text import wrap

# Modules of several verbs.
KINDS = {"costs": "op collective", "show": "show list convert", "forecasts": "predict search plan generate rl"}
KINDS |= {"simulate": "simulate network", "compare": "compare gate watch", "capture": "capture run"}
MODULES = {verb: module for module, verbs in KINDS.items() for verb in verbs.split()}
# Verbs with a second spelling.
SPELLINGS = {"analyse": "analyze"}
FEW_OPTIONS = 8
DESCRIPTION = "Forecast a distributed LLM training step before you rent the cluster, and explain one after it ran."


class Verb(NamedTuple):
    """A verb of the command line; its module in ``cli`` has its name unless it is one of MODULES."""

    name: str
    summary: str
    page: str = ""
    about: str = ""
    examples: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # verbs of other tools and of everyday language that mean it

    def run(self, args: argparse.Namespace) -> int:
        """Run the verb, whose module is loaded now."""
        if self.name not in MODULES:
            return int(import_module(f"stepcast.cli.{self.name}").run(args))
        return int(getattr(import_module(f"stepcast.cli.{MODULES[self.name]}"), f"run_{self.name}")(args))

    @property
    def sentence(self) -> str:
        return f"{self.summary[:1].upper()}{self.summary[1:]}."

    @property
    def epilog(self) -> str | None:
        """Two example commands; of a verb without a page, what there is to say about it."""
        examples = "\n".join(["examples:", *(f"  stepcast {example}" for example in self.examples)])
        return examples if self.page else self.about or None


def _read_verbs(texts: str) -> Iterator[Verb]:
    for block in texts.replace("\n    ", "\t").splitlines():
        head, *lines = block.split("\t")
        name, _, rest = head.partition(": ")
        summary, _, page = rest.removesuffix("]").partition(" [")
        examples = tuple(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
        others = [word for line in lines if line.startswith("also: ") for word in line.split()[1:]]
        about = " ".join(line for line in lines if not line.startswith(("$", "also: ")))
        yield Verb(name, summary, page, about, examples, tuple(others))


VERBS = tuple(_read_verbs((Path(__file__).parents[1] / "data" / "verbs.txt").read_text(encoding="utf-8")))
OTHER_VERBS = {other: verb.name for verb in VERBS for other in verb.others}


if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """A parser that reports mistakes in one line, like every other error."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self._negative_number_matcher = re.compile("-[0-9]")  # -1T is a value of its option, and a wrong one

    def error(self, message: str) -> NoReturn:
        shown = one_line(message)
        end = "" if shown.endswith("?") else ";"
        self.exit(2, f"stepcast: {shown}{end} usage: {self.prog} --help\n")

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Print without hiding that the output cannot be written, as argparse does."""
        (file or sys.stderr).write(message)

    def parse_known_args(  # type: ignore[override]  # no parser of ours is given another kind of namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Also accept other words for options, and set *given*, the options that differ from their defaults."""
        words = list(sys.argv[1:] if args is None else args)
        known = [option for action in self._actions for option in action.option_strings]
        if self._subparsers is None:
            from stepcast.cli.options import known_words, rename_options

            kind = self.get_default("asks")
            words, known = rename_options(words, known, kind), known_words(known, kind)
        result, rest = super().parse_known_args(words, namespace)
        if rest:
            kind = "option" if rest[0].startswith("-") else "word"
            self.error(f"unrecognised {kind} {rest[0]!r}{_find_option(rest[0], known) or _suggest(rest[0], known)}")
        if not hasattr(result, "given"):
            result.given = frozenset(name for name, value in vars(result).items() if value != self.get_default(name))
        return result, rest

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Read a value; the message of a ValueError is shown as it is, where argparse names the reader."""
        read = self._registry_get("type", action.type, action.type)
        try:
            return read(arg_string)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = _suggest(str(value), known) or f"; choose from {', '.join(known)}"
            if action.dest == "verb" and str(value).lower() in OTHER_VERBS:
                hint = f"; did you mean {OTHER_VERBS[str(value).lower()]}?"
            raise argparse.ArgumentError(action, f"unrecognised value {value!r}{hint}")


def _suggest(word: str, known: Sequence[str]) -> str:
    """Return ``; did you mean ...?``, or nothing if no known word is close."""
    return nearest(word.partition("=")[0], known, 2, 0.6)


def _find_option(word: str, known: Sequence[str]) -> str:
    """Return what *word* is elsewhere: an option of ``predict``, or a name that one of the *known* options takes."""
    from stepcast.hardware.catalog import data_names
    from stepcast.questions.question import CHOICES

    if word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") in CHOICES:
        return "; it is an option of predict"
    nouns = (noun for noun in ("cluster", "gpu", "framework") if f"--{noun}" in known)
    noun = next((noun for noun in nouns if word.lower() in data_names(f"{noun}s")), "")
    return f"; did you mean --{noun} {word}?" if noun else ""


def build_parser(verbs: Sequence[Verb] = VERBS, load: bool = True) -> argparse.ArgumentParser:
    """Return the parser of *verbs*; without *load* it leaves out their own arguments, which is faster."""
    parser = Parser(prog="stepcast", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"stepcast {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
    parser.add_argument("--plain", action="store_true", help="print without colours, like NO_COLOR=1")
    chosen = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in verbs:
        about: dict[str, Any] = {"help": verb.summary, "description": verb.sentence, "epilog": verb.epilog}
        sub = chosen.add_parser(verb.name, **about, formatter_class=argparse.RawDescriptionHelpFormatter)
        if load:
            from stepcast.cli.options import add_arguments

            add_arguments(sub, verb.name)
            sub.usage = _usage(sub, verb.name)
    return parser


def _usage(parser: argparse.ArgumentParser, verb: str) -> str | None:
    """Return one line for verbs with many options, instead of all of them in brackets."""
    if len(parser._actions) <= FEW_OPTIONS:
        return None
    words = []
    for action in parser._actions:
        if not action.option_strings:
            name = str(action.metavar or action.dest)
            words.append({"?": f"[{name}]", "+": f"{name} ..."}.get(str(action.nargs), name))
        elif action.required:
            words.append(f"{action.option_strings[-1]} {action.metavar or action.dest.upper()}")
    return " ".join(["stepcast", verb, *words, "[options]"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return 0 on success, 2 for bad input, 130 when interrupted."""
    if argv is None:
        end_on_interrupt()
        gc.disable()  # a command makes few reference cycles, and the search for them takes a tenth of its time
        streams.open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    with streams.safe_streams("--plain" in arguments):
        status = _answer([word for word in arguments if word != "--plain"])
    if argv is None:
        gc.freeze()  # nor is the end of the process the time to search for them
    return status


def _answer(arguments: list[str]) -> int:
    """Return the exit status of a verb; report an error in one line."""
    streams.waiting_notes.clear()
    try:
        try:
            status = _run(arguments)
        finally:
            sys.stdout.flush()  # here, where an error can still be reported
        streams.print_waiting_notes()
        return status
    except BrokenPipeError:
        streams.discard_output()  # the reader, such as ``head``, has ended
        return 0
    except KeyboardInterrupt:
        streams.print_waiting_notes()
        print("stepcast: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, MemoryError, ArithmeticError, RuntimeWarning, RecursionError) as error:
        streams.show_status("")
        if "--debug" in arguments:
            import traceback

            traceback.print_exc()
        else:
            print(f"stepcast: {one_line(_describe(error))}", file=sys.stderr)
        if isinstance(error, OSError) and not error.filename:
            streams.discard_output()
        return getattr(error, "status", 2)


def _run(arguments: list[str]) -> int:
    if arguments[:1] in ([], ["help"]):
        return _help(arguments[1:])
    index = next((index for index, word in enumerate(arguments) if not word.startswith("-")), -1)
    name = SPELLINGS.get(arguments[index], arguments[index])
    named = [verb for verb in VERBS if verb.name == name]
    parser = build_parser(named or VERBS, load=bool(named))
    if not named:
        parser.parse_args(arguments)  # prints help, the version, or what is wrong with the verb
        return 2
    arguments[index] = name
    words = [word for word in arguments if word != "--debug"]
    from stepcast.cli.options import parse_arguments
    from stepcast.cli.output import check_files

    args = parse_arguments(parser, words)
    args.command = shlex.join(["stepcast", *words])
    check_files(args)
    with warnings.catch_warnings():
        # An array that overflowed is a wrong answer: stop instead of printing it.
        warnings.simplefilter("error", RuntimeWarning)
        return named[0].run(args)


def _help(words: Sequence[str]) -> int:
    """Print the help of one verb, or else of the command."""
    named = [verb for verb in VERBS if [verb.name] == list(words[:1])]
    if not named:
        build_parser(load=False).parse_args(words[:1] or ["--help"])
        return 2
    (verb,) = named
    options = f"All options: stepcast {verb.name} --help"
    if verb.page:
        about = "\n".join(wrap(verb.about, streams.terminal_width()))
        print(f"{about}\n\n{verb.epilog}\n\n{options}. Documentation: docs/{verb.page}.md")
    else:
        print(f"{verb.sentence}\n\n{options}")
    return 0


def _describe(error: BaseException) -> str:
    """Return the message of an error in the words of a user."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {(error.strerror or 'cannot be used').lower()}"
    if isinstance(error, OSError) and error.strerror:
        return f"standard output: {error.strerror.lower()}"
    if isinstance(error, UnicodeDecodeError):
        return f"a file is not UTF-8 text (byte {error.start + 1} is {error.object[error.start]:#04x})"
    if isinstance(error, ArithmeticError | RuntimeWarning):
        return f"a number is too large to compute with ({error}); look for a nonsense value in the input"
    if isinstance(error, MemoryError):
        return "out of memory; try a smaller input"
    if isinstance(error, RecursionError):
        return "a file nests its values too deeply to be read"
    return str(error) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
