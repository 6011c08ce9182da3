"""Tables of options: what a row says, and that an option is read alike wherever it stands."""

import argparse
import tempfile

import pytest

from stepcast.cli.completion import SCRIPTS
from stepcast.cli.main import VERBS, build_parser
from stepcast.cli.options import OWN_TYPES, TYPES, add_arguments, add_row
from stepcast.cli.show import LISTED
from stepcast.cost.collectives.choose import Algorithm
from stepcast.forecast.options import Engine
from stepcast.questions.choices import choices_of
from stepcast.simulation.messages import Send
from stepcast.sweep.engines import ENGINES


def parsed(words: str, *rows: str, verb: str = "") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for row in rows:
        add_row(parser, row, verb)
    return parser.parse_args(words.split())


def choices_in(verb: str, dest: str) -> list[str]:
    """Return the values that an argument of a verb may have."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, verb)
    return next(list(action.choices) for action in parser._actions if action.dest == dest and action.choices)


def test_a_row_is_an_option_the_word_of_its_value_and_what_it_does() -> None:
    parser = argparse.ArgumentParser()
    add_row(parser, "--far KM  how far, and further")
    (far,) = parser._actions[1:]
    assert (far.metavar, far.help, far.default) == ("KM", "how far, and further", None)


def test_switches_and_repeats() -> None:
    rows = "--loud  a switch", "--word W ...  given several times", "--flight [DIR]  may have a value"
    found = parsed("--loud --word a --word b --flight", *rows)
    assert (found.loud, found.word, found.flight) == (True, ["a", "b"], "")
    quiet = parsed("", *rows)
    assert (quiet.loud, quiet.word, quiet.flight) == (False, [], None)


def test_values_limits_and_defaults() -> None:
    rows = (
        "--how H {far,near}  {values}",
        "--many-times N 1..9 =3  how often",
        "-k, --kept K  a word",
        "what W ?  a word",
    )
    found = parsed("--how far", *rows)
    assert (found.how, found.many_times, found.kept, found.what) == ("far", 3, None, None)
    assert parsed("this --many-times 4", *rows).many_times == 4
    for words in ("--how up", "--many-times 10"):
        with pytest.raises(SystemExit):
            parsed(words, *rows)


def test_a_mistake_in_a_row_is_seen_when_it_is_read() -> None:
    with pytest.raises(AssertionError):
        add_row(argparse.ArgumentParser(), "NO OPTION")


def test_listed_values_are_those_of_the_engines() -> None:
    """They are written out, so that help does not load the cost model and the engines."""
    assert set(choices_in("collective", "algorithm")) == {str(kind) for kind in Algorithm}
    assert set(choices_in("simulate", "all_reduce")) < {str(kind) for kind in Algorithm}
    assert set(choices_in("simulate", "messages")) == {str(send) for send in Send}
    assert set(choices_in("simulate", "engine")) == {*map(str, Engine), "simai"}
    assert set(choices_in("sweep", "engine")) == {*ENGINES}
    assert choices_in("list", "what") == [*LISTED]
    assert choices_in("completion", "shell") == [*SCRIPTS]


def test_names_that_several_verbs_have_are_read_by_one_type() -> None:
    """Except the choices of questions, which have their own readers, and those that a verb reads in its own way."""
    own = {*OWN_TYPES, "capture --sharding", "run --steps", "record --steps"}
    other = set()
    for verb in VERBS:
        chosen = build_parser([verb])._subparsers._group_actions[0].choices[verb.name]  # type: ignore[union-attr,index]
        kind = chosen.get_default("asks")
        for action in chosen._actions:
            if kind is not None and action.dest in choices_of(kind):
                continue
            name = (action.option_strings or [""])[-1]
            if action.nargs != 0 and name[2:] in TYPES and action.type is not TYPES[name[2:]]:
                other.add(f"{verb.name} {name}")
    assert other <= own


def test_files_to_write_are_looked_at_before_the_work_is_done() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(SystemExit):
        parsed(f"--trace {folder}/none/trace.json", "--trace")
