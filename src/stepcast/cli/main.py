"""The command ``stepcast``: finds the verb, loads only that verb's module, reports errors in one line."""

import argparse
import gc
import shlex
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from stepcast.cli.interrupts import INTERRUPTED, end_on_interrupt
from stepcast.cli.streams import discard_output, open_closed_streams, show_status, shown_streams, terminal_width
from stepcast.cli.verbs import VERBS as VERBS
from stepcast.cli.verbs import Verb
from stepcast.cli.words import SPELT, known_words, renamed
from stepcast.cli.words import VERBS as OTHER_VERBS
from stepcast.version import __version__
from stepcast.views.text import message as one_line

FEW_OPTIONS = 8
DESCRIPTION = "Forecast a distributed LLM training step before you rent the cluster, and explain one after it ran."


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        shown = one_line(message)
        end = "" if shown.endswith("?") else ";"
        self.exit(2, f"stepcast: {shown}{end} usage: {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print without hiding that the output cannot be written, as argparse does."""
        (file or sys.stderr).write(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As ever, and in *given* the options of the verb that were set to something else than usual."""
        options = [option for action in self._actions for option in action.option_strings]
        given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(renamed(given, options), namespace)
        if rest:
            self.error(f"{rest[0]} is not known here{_nearest(rest[0], known_words(options))}")
        if not hasattr(found, "given"):
            unusual = (name for name, value in vars(found).items() if value != self.get_default(name))
            found.given = frozenset(unusual)
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = _nearest(str(value), known) or f"; expected one of {', '.join(known)}"
            if action.dest == "verb" and str(value).lower() in OTHER_VERBS:
                hint = f"; did you mean {OTHER_VERBS[str(value).lower()]}?"
            raise argparse.ArgumentError(action, f"{value!r} is not known{hint}")


def _nearest(word: str, known: Sequence[str]) -> str:
    """``; did you mean ...?``, or nothing where no word is close."""
    from difflib import get_close_matches

    near = get_close_matches(word.partition("=")[0], known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def build_parser(verbs: Sequence[Verb] = VERBS, load: bool = True) -> argparse.ArgumentParser:
    """The parser of *verbs*; without *load* their own arguments are left out, which starts faster."""
    parser = Parser(prog="stepcast", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"stepcast {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
    parser.add_argument("--plain", action="store_true", help="no colour on a terminal, as NO_COLOR")
    chosen = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in verbs:
        sub = chosen.add_parser(
            verb.name,
            help=verb.summary,
            description=verb.sentence,
            epilog=verb.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if load:
            import_module(verb.module).add_arguments(sub)
            sub.usage = _usage(sub, verb.name)
    return parser


def _usage(parser: argparse.ArgumentParser, verb: str) -> str | None:
    """One line where there are more options than one would read in brackets."""
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
    """Run one verb; 0 on success, 2 for bad input, 130 when interrupted."""
    if argv is None:
        end_on_interrupt()
        gc.disable()  # a command makes no reference cycles that matter, and looking for them takes a tenth
        open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    plain = "--plain" in arguments
    with shown_streams(plain):
        return _answered([word for word in arguments if word != "--plain"])


def _answered(arguments: list[str]) -> int:
    """The status of a verb; what goes wrong is told in one line."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where what goes wrong can be told, and not when Python ends
    except BrokenPipeError:
        discard_output()  # the reader has gone, as ``head`` does, and needs no more
        return 0
    except KeyboardInterrupt:
        print("stepcast: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, MemoryError, ArithmeticError, RuntimeWarning, RecursionError) as error:
        show_status("")
        if "--debug" in arguments:
            import traceback

            traceback.print_exc()
        else:
            print(f"stepcast: {one_line(_said(error))}", file=sys.stderr)
        if isinstance(error, OSError) and not error.filename:
            discard_output()
        return getattr(error, "status", 2)


def _run(arguments: list[str]) -> int:
    if arguments[:1] in ([], ["help"]):
        return _help(arguments[1:])
    at = next((at for at, word in enumerate(arguments) if not word.startswith("-")), None)
    if at is not None:
        arguments = [*arguments[:at], SPELT.get(arguments[at], arguments[at]), *arguments[at + 1 :]]
    named = [verb for verb in VERBS if at is not None and verb.name == arguments[at]]
    parser = build_parser(named or VERBS, load=bool(named))
    if not named:
        parser.parse_args(arguments)  # prints help, the version, or what is wrong with the verb
        return 2
    words = [word for word in arguments if word != "--debug"]
    args = with_files(parser, words)
    args.command = shlex.join(["stepcast", *(word for word in arguments if word != "--debug")])
    from stepcast.cli.output import check_files

    check_files(args)
    with warnings.catch_warnings():
        # An array that overflowed is a wrong answer: stop instead of printing it.
        warnings.simplefilter("error", RuntimeWarning)
        return int(import_module(named[0].module).run(args))


def _help(words: Sequence[str]) -> int:
    """Of one verb its summary; of none, or of what is none, what the parser says."""
    named = [verb for verb in VERBS if [verb.name] == list(words[:1])]
    if not named:
        build_parser(load=False).parse_args(words[:1] or ["--help"])
        return 2
    print(named[0].help(terminal_width()))
    return 0


def with_files(parser: argparse.ArgumentParser, words: Sequence[str]) -> Any:
    """Read *words* as arguments; the choices of a file that they name are defaults for them."""
    args = parser.parse_args(words)
    if not hasattr(args, "described"):  # other verbs have words of their own for files
        return args
    found = None
    if args.config is not None or getattr(args, "run", None) is not None:
        from stepcast.cli.configured import described

        found = described(args)
    if args.ignore_unknown and (found is None or found.config is None):
        raise ValueError(
            "--ignore-unknown has no effect: it is for keys of a configuration; give --config as well, or leave it out"
        )
    if found is None:
        return args
    from stepcast.questions.spelling import replaced_names

    typed, own = args.given, args.own
    if missing := [name for name in found.choices if not hasattr(args, name)]:
        raise ValueError(f"{found.file}: {missing[0]} is not a choice of 'stepcast {args.verb}'")
    filed = {name: value for name, value in found.choices.items() if name not in replaced_names(typed)}
    defaults = {name: own.get_default(name) for name in filed}
    own.set_defaults(**filed)  # so that typed options win over them
    try:
        args = parser.parse_args(words)
    finally:
        own.set_defaults(**defaults)
    args.described, args.given = found, typed  # what a file says in vain is no mistake of the user's
    if getattr(args, "verb", "predict") not in ("predict", "plan"):  # these have warnings in their answers
        from stepcast.cli.output import print_warnings

        print_warnings(found.warnings)
    return args


def _said(error: BaseException) -> str:
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
