"""Tables of options: what a row says, and that an option is read alike wherever it stands."""

import argparse
import tempfile

import pytest

from stepcast.cli.main import VERBS, build_parser
from stepcast.cli.options import TYPES, add_options
from stepcast.questions.choices import choices_of


def parsed(table: str, words: str, **further: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, table, **further)
    return parser.parse_args(words.split())


def test_a_row_is_an_option_the_word_of_its_value_and_what_it_does() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "--far KM  how far,\n          and further")
    (far,) = parser._actions[1:]
    assert (far.metavar, far.help, far.default) == ("KM", "how far, and further", None)


def test_switches_denials_and_repeats() -> None:
    table = """
        --loud          a switch
        --[no-]polite   may be denied
        --word W ...    given several times
        """
    found = parsed(table, "--loud --no-polite --word a --word b")
    assert (found.loud, found.polite, found.word) == (True, False, ["a", "b"])
    quiet = parsed(table, "")
    assert (quiet.loud, quiet.polite, quiet.word) == (False, None, [])


def test_what_a_table_cannot_say_follows_by_name() -> None:
    found = parsed("--how H\n--many-times N\n-k, --kept K", "--how far", how=("far", "near"), many_times=3)
    assert (found.how, found.many_times, found.kept) == ("far", 3, None)
    assert parsed("--size N", "--size 4", size=int).size == 4
    with pytest.raises(SystemExit):
        parsed("--how H", "--how up", how=("far", "near"))


@pytest.mark.parametrize("table", ["--Two  words  are fine", "NO OPTION"])
def test_a_mistake_in_a_table_is_seen_when_it_is_read(table: str) -> None:
    with pytest.raises(AssertionError):
        add_options(argparse.ArgumentParser(), table, other=int)


def test_names_that_several_verbs_have_are_read_by_one_type() -> None:
    """Except the choices of questions, which have their own readers, and those that a verb reads in its own way."""
    own = {"capture --global-batch", "capture --seq", "capture --sharding", "run --steps"}
    own |= {
        "simulate --schedule",
        "op --seq",
        "record --steps",
        "run --repeat-layers",
        "sweep --output",
        "demo --output",
    }
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
        parsed("--trace FILE", f"--trace {folder}/none/trace.json")
