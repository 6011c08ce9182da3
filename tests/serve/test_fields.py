"""A form means a command line, and can mean nothing else."""

import pytest

pytest.importorskip("starlette", reason="needs the extra web: pip install 'stepcast[web]'")

from stepcast.cli.served import predict
from stepcast.questions.choices import build_question, choices_of
from stepcast.questions.question import CHOICES, PredictQuestion
from stepcast.questions.search import SearchQuestion
from stepcast.serve.fields import FORMS, PREDICT, Field, FieldError, form_command, join_others, name_fields, read_form

SEARCH, PLAN, COMPARE = (FORMS[name] for name in ("search", "plan", "alternatives"))
GPUS = next(field for field in PREDICT if field.name == "gpus")
GIVEN = {
    "model": "llama-3.1-8b",
    "cluster": "dgx-h100",
    "gpus": "16",
    "tp": "2",
    "pp": "1",
    "micro_batch": "",
    "seq": "2048",
}


def test_a_form_makes_choices_and_leaves_out_defaults() -> None:
    choices = read_form(PREDICT, GIVEN)
    assert dict(choices) == {"model": "llama-3.1-8b", "cluster": "dgx-h100", "gpus": "16", "tp": "2", "seq": "2048"}
    command = "stepcast predict --model llama-3.1-8b --cluster dgx-h100 --gpus 16 --tp 2 --seq 2048"
    assert form_command("predict", choices) == command


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
        read_form(PREDICT, {**GIVEN, name: value})


@pytest.mark.parametrize("name", ["trace", "html", "set", "calibration", "to_workload", "output", "o", "--html", ""])
def test_what_a_form_does_not_have_is_refused(name: str) -> None:
    for known in (PREDICT, SEARCH):
        with pytest.raises(FieldError, match="no field"):
            read_form(known, {**{field.name: field.initial for field in known}, name: "x"})


def test_every_value_of_every_field_is_one_of_its_choice() -> None:
    assert {field.name for field in SEARCH} <= set(choices_of(SearchQuestion))
    for field in PREDICT:
        assert set(field.choices) <= set(CHOICES[field.name].values or field.choices)
        for value in field.choices:
            build_question(PredictQuestion, {field.name: value})


def test_the_initial_form_is_answered() -> None:
    choices = read_form(PREDICT, {field.name: field.initial for field in PREDICT})
    answer = predict(choices, None)
    assert "per step" in answer.page.title
    assert answer.page.about.command == form_command("predict", choices)


@pytest.mark.parametrize(
    "field", [field for field in PREDICT + SEARCH if not field.choices], ids=lambda field: field.name
)
def test_a_number_is_read_at_its_limits_and_refused_beyond(field: Field) -> None:
    low, high = field.limits
    assert low >= 0
    for value in (low, high):
        assert field.read(str(value)) in (str(value), f"{value}{field.unit}")
    for text in (str(high + 1), str(low - 1), "-1", "1e3", "0x10", "", " 1", "one"):
        with pytest.raises(FieldError):
            field.read(text)


def test_the_app_takes_as_many_gpus_as_the_command_line() -> None:
    assert [GPUS.read(text) for text in ("1", "16777216", "000000000064")] == ["1", "16777216", "64"]
    for text in ("0", "16777217", "0000000000064"):
        with pytest.raises(FieldError):
            GPUS.read(text)


def test_limits_of_the_forms() -> None:
    """The app takes what the command line takes, within what a form needs."""
    known = {
        "tp": (1, 4096), "pp": (1, 4096), "cp": (1, 4096), "ep": (1, 4096), "micro_batch": (1, 100_000),
        "global_batch": (1, 10_000_000), "seq": (1, 10_000_000), "top": (1, 50), "time": (1, 3600),
        "tokens": (1, 1_000_000), "price": (0, 100_000), "spares": (0, 100_000), "vpp": (1, 512), "lora_rank": (0, 4096),
        "gpus": (1, 2**24),
    }  # fmt: skip
    for form in (PREDICT, SEARCH, PLAN):
        found = {field.name: field.limits for field in form if field.name in known}
        assert found == {name: known[name] for name in found}
    assert {field.name for field in PREDICT if field.powers} == {"gpus", "tp", "pp", "cp", "ep", "micro_batch"}


def test_several_values_of_a_comparison_are_joined() -> None:
    names = {field.name for field in COMPARE}
    assert {"cluster", "cluster_2", "cluster_3", "framework_2", "framework_3", "tokens", "price"} <= names
    assert not {"cluster_1", "cluster_4", "framework_4", "currency", "spares", "model_2"} & names
    given = (("model", "llama-3.1-8b"), ("cluster", "dgx-h100"), ("cluster_2", "dgx-h200"), ("cluster_3", "dgx-b200"))
    assert join_others(given) == {"model": "llama-3.1-8b", "cluster": "dgx-h100,dgx-h200,dgx-b200"}


def test_a_decimal_is_read_where_the_field_has_one() -> None:
    price = Field("price", "Price", limits=(0, 10), decimals=True)
    assert [price.read(text) for text in ("0", "2.5", "10")] == ["0", "2.5", "10"]
    for text in ("10.5", "-1", "nan", "inf", "1e1", ""):
        with pytest.raises(FieldError):
            price.read(text)
    with pytest.raises(FieldError):
        Field("tp", "Ways", limits=(1, 8)).read("2.5")


def test_a_required_field_is_named_after_what_is_wrong() -> None:
    for form, name in ((PREDICT, "model"), (PREDICT, "gpus"), (SEARCH, "global_batch"), (PLAN, "tokens")):
        field = next(field for field in form if field.name == name)
        given = {each.name: each.initial for each in form} | {name: " "}
        with pytest.raises(FieldError, match=rf"^{field.label}: "):
            read_form(form, given)
        with pytest.raises(FieldError, match=r"^Tensor parallel: "):
            read_form(form, {**given, "tp": "0"})
    assert read_form(FORMS["dropped"], {}) == ()


def test_a_misspelt_name_gets_the_nearest_ones() -> None:
    with pytest.raises(FieldError, match=r"Model: unrecognised value 'llama-3\.1-7b'; did you mean .*llama-3\.1-70b"):
        read_form(PREDICT, {**GIVEN, "model": "llama-3.1-7b"})


def test_errors_name_the_fields_of_a_form() -> None:
    for said, shown in (
        ("16 GPUs are not a multiple of 3: use --gpus 15 or 18, or --tp 2", "use GPUs 15 or 18, or Tensor parallel 2"),
        ("--schedule has no effect: pp is 1; use --pp 2", "Schedule has no effect: pp is 1; use Pipeline parallel 2"),
        ("or do not split experts (--expert-tp 1)", "(--expert-tp 1) (on the command line: --expert-tp)"),
        ("trace--tp.json is a--b", "trace--tp.json is a--b"),
    ):
        assert name_fields(PREDICT, said).endswith(shown)
    assert name_fields(FORMS["dropped"], "use --cluster") == "use Cluster it ran on"
