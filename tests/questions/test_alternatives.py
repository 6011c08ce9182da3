"""Several clusters, frameworks or numbers of GPUs in one question: the answers of the single questions, side by side."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import stepcast
from stepcast.cli.main import main

pytestmark = pytest.mark.slow

STEP = ["--model", "llama-3.1-8b", "--tp", "2", "--seq", "4096", "--global-batch", "256"]
TWO = ["--cluster", "dgx-h100,dgx-h200", "--gpus", "64"]
MONEY = ["--tokens", "1T", "--price", "2,3"]


Ask = Callable[..., Any]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that runs a command line and returns its JSON."""

    def ask(*words: str) -> Any:
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


def test_rows_are_the_answers_of_the_single_questions(answer: Ask) -> None:
    for verb in ("predict", "plan"):
        rows = answer(verb, *STEP, *TWO, *MONEY)["rows"]
        for row, cluster, price in zip(rows, ("dgx-h100", "dgx-h200"), ("2", "3"), strict=True):
            single = answer(verb, *STEP, "--cluster", cluster, "--gpus", "64", "--tokens", "1T", "--price", price)
            cost = single["cost"] if verb == "plan" else single["training"]["cost"]
            step_s = single["phases"][0]["step_s"] if verb == "plan" else single["step_s"]
            assert (row["name"], row["step_s"], row["cost"], row["price"]) == (cluster, step_s, cost, float(price))


def test_the_commands_of_rows_ask_for_the_same(answer: Ask) -> None:
    search = ["search", "--model", "llama-3.2-1b", "--gpus", "4", "--global-batch", "8", "--workers", "1"]
    for words in (["predict", *STEP, *TWO], [*search, "--cluster", "dgx-h100,dgx-a100"]):
        for row in answer(*words)["rows"]:
            assert answer(*row["command"].split()[1:])["step_s"] == row["step_s"]


def test_commas_between_the_overrides_of_a_name_do_not_separate_clusters(answer: Ask) -> None:
    named = "dgx-h100:node.gpus=4,node.nics=4"
    words = ["predict", *STEP, "--gpus", "64", "--cluster"]
    single = answer(*words, "dgx-h100", "--set", "node.gpus=4", "--set", "node.nics=4")
    assert answer(*words, named)["step_s"] == single["step_s"]
    torus = "gcp-tpu-v5p:network.shape=[4,4,4]"
    assert [row["name"] for row in answer(*words, f"{torus},{named}, dgx-a100")["rows"]] == [torus, named, "dgx-a100"]


def test_winners_and_break_even_prices(answer: Ask) -> None:
    facts = answer("plan", *STEP, *TWO, *MONEY)
    rows = {row["name"]: row for row in facts["rows"]}
    winners = {winner["objective"]: winner for winner in facts["winners"]}
    assert winners["cost"]["name"] == min(rows, key=lambda name: rows[name]["cost"])
    assert winners["throughput per GPU"]["name"] == max(rows, key=lambda name: rows[name]["tokens_per_s_per_gpu"])
    assert winners["days"]["name"] == min(rows, key=lambda name: rows[name]["days"])
    for entry in facts["break_even"]:
        row = rows[entry["name"]]
        assert entry["break_even_price"] * row["gpu_hours"] == pytest.approx(rows[entry["against"]]["cost"])


def test_a_small_advantage_is_within_our_error_and_a_large_one_is_not(answer: Ask) -> None:
    clear = {name: answer("predict", *STEP, "--cluster", f"dgx-h100,{name}", "--gpus", "64")["winners"][0]["clear"]
             for name in ("dgx-h200", "dgx-b200")}  # fmt: skip
    assert clear == {"dgx-h200": False, "dgx-b200": True}


def test_steps_of_different_batches_are_not_ranked_by_time(answer: Ask) -> None:
    words = ["--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8,16", "--framework", "torchtitan,nemo"]
    facts = answer("predict", *words)
    assert facts["rows"][0]["name"] == "torchtitan, 8 GPUs"
    assert len(facts["rows"]) == 4
    assert "step time" not in {winner["objective"] for winner in facts["winners"]}
    assert "different global batches (--global-batch): compare" in facts["warnings"][0]


def test_what_differs_and_whose_default_it_is(answer: Ask) -> None:
    """Frameworks have other default lengths: a table of one global batch compared 4,096 with 8,192 tokens."""
    words = ("--cluster", "dgx-h100", "--gpus", "64", "--global-batch", "64", "--framework", "torchtitan,megatron-core")
    facts = answer("predict", "--model", "llama-3.1-8b", *words)
    assert facts["warnings"] == [
        "the alternatives have different sequence lengths (--seq): compare throughput or days, not step times"
    ]
    assert {"torchtitan: sequences of 8192 tokens (--seq)", "megatron-core: sequences of 4096 tokens (--seq)"} <= {
        *facts["assumptions"]
    }


def test_a_combination_that_cannot_run_says_why_and_the_others_are_answered(answer: Ask) -> None:
    facts = answer("predict", *STEP, "--cluster", "dgx-h100", "--gpus", "64,63")
    assert [row["name"] for row in facts["rows"]] == ["64 GPUs"]
    assert "63 GPUs are not a multiple" in facts["failed"]["63 GPUs"]


def test_what_does_not_fit_never_wins(answer: Ask) -> None:
    facts = answer("predict", "--model", "llama-3.1-8b", "--gpu", "h100-sxm,b300", "--sharding", "none")
    assert [row["fits"] for row in facts["rows"]] == [False, True]
    assert facts["winners"] == []


def test_the_price_of_the_catalogue_names_its_source(answer: Ask) -> None:
    facts = answer("predict", *STEP, "--cluster", "dgx-h100", "--gpus", "64", "--tokens", "1T", "--price", "auto")
    hours = facts["training"]["gpu_hours"]
    assert facts["training"]["cost"] == pytest.approx(3.0 * hours)
    assert any("2026-05" in note and "--price" in note for note in facts["assumptions"])


def test_a_gpu_without_a_known_price_has_all_but_a_cost(answer: Ask) -> None:
    priced = ("--gpus", "64", "--tokens", "1T", "--price", "auto")
    facts = answer("predict", *STEP, "--cluster", "dgx-h100,dgx-h200,gb200-nvl72", *priced)
    assert [row["cost"] is None for row in facts["rows"]] == [False, False, True]
    assert facts["failed"] == {}
    assert any(note.startswith("gb200-nvl72: no cost: no price of gb200") for note in facts["assumptions"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", *STEP, *TWO, "--tokens", "1T", "--price", "1,2,3"], "3 values for 2 cluster"),
        (["predict", *STEP, "--cluster", "dgx-h100", "--gpus", "64", "--tokens", "1T", "--price", "1,2"], "2 values"),
        (["predict", *STEP, *TWO, "--trace", "x.json"], "--trace is for a single answer"),
        (["network", *STEP, *TWO], "only predict, search and plan compare"),
        (
            ["predict", *STEP, "--cluster", "mi355x-node", "--gpus", "64", "--tokens", "1T", "--price", "auto"],
            "no price",
        ),
        (["predict", *STEP, "--cluster", "dgx-h100,nowhere", "--gpus", "63"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_python_gives_the_rows_of_the_command_line(answer: Ask) -> None:
    choices: dict[str, Any] = {"model": "llama-3.1-8b", "tp": 2, "seq": 4096, "global_batch": 256, "gpus": 64}
    result = stepcast.alternatives("predict", cluster=["dgx-h100", "dgx-h200"], **choices)
    assert [row["step_s"] for row in result.rows] == [row["step_s"] for row in answer("predict", *STEP, *TWO)["rows"]]
    assert "dgx-h200" in str(result._repr_html_())
    with pytest.raises(ValueError, match="only predict, search and plan compare"):
        stepcast.predict(cluster="dgx-h100,dgx-h200", **choices)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("llama-3.1-70b", "--gpus", "32", "--tp", "8"), "dgx-b200: "),
        (("llama-3.1-70b", "--gpus", "8", "--tp", "2"), "none of them fits"),
        (("llama-3.1-70b", "--gpus", "32", "--tp", "8", "--cluster", "dgx-b200,nowhere"), "s, the only answer"),
        (
            ("llama-3.1-8b", "--gpus", "8", "--tokens", "1T", "--price", "auto", "--tp", "2", "--cluster",
             "dgx-h100,dgx-h200,gb200-nvl72"),
            "lowest cost of 2 alternatives",
        ),
    ],
)  # fmt: skip
def test_the_answer_is_one_that_fits(capsys: pytest.CaptureFixture[str], words: Sequence[str], expected: str) -> None:
    main(["predict", "--cluster", "dgx-h100,dgx-b200", *words])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("answer"))
    assert expected in line
