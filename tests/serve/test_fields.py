"""A form means a command line, and can mean nothing else."""

import pytest

pytest.importorskip("starlette", reason="needs the extra web: pip install 'stepcast[web]'")

from stepcast.cli.served import Verbs
from stepcast.questions.question import CHOICES, PRECISIONS
from stepcast.serve import fields
from stepcast.serve.fields import PREDICT, SEARCH, FieldError, command_words

GIVEN = {
    "model": "llama-3.1-8b",
    "cluster": "dgx-h100",
    "gpus": "16",
    "tp": "2",
    "pp": "1",
    "micro_batch": "",
    "seq": "2048",
}


def test_a_form_is_a_command_line_without_what_goes_without_saying() -> None:
    words = command_words("predict", PREDICT, GIVEN)
    assert words == [
        "predict",
        "--model",
        "llama-3.1-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "16",
        "--tp",
        "2",
        "--seq",
        "2048",
    ]


@pytest.mark.parametrize("name", [field.name for field in PREDICT])
@pytest.mark.parametrize(
    "value",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "--trace",
        "-1",
        "1e9",
        "99999999999999",
        "x" * 300,
        "1;ls",
        "<b>",
        "\x1b[31m",
        "१",
        "1 --trace x",
    ],
)
def test_nothing_else_gets_through(name: str, value: str) -> None:
    with pytest.raises(FieldError):
        command_words("predict", PREDICT, {**GIVEN, name: value})


@pytest.mark.parametrize("name", ["trace", "html", "set", "calibration", "to_workload", "output", "o", "--html", ""])
def test_what_a_form_does_not_have_is_refused(name: str) -> None:
    for verb, known in (("predict", PREDICT), ("search", SEARCH)):
        with pytest.raises(FieldError, match="no field"):
            command_words(verb, known, {**{each.name: each.usual for each in known}, name: "x"})


def test_every_choice_of_every_field_is_an_option_of_its_verb() -> None:
    options = {option for action in Verbs().searching._actions for option in action.option_strings}
    assert {field.option for field in SEARCH} <= options
    assert {field.name for field in PREDICT} <= set(CHOICES)
    assert set(fields.PRECISIONS) == set(PRECISIONS)


def test_what_a_form_usually_says_is_answered() -> None:
    words = command_words("predict", PREDICT, {each.name: each.usual for each in PREDICT})
    found = Verbs().predict(words, None)
    assert "per step" in found.page.title
    assert found.page.about.command == "stepcast " + " ".join(words)
