"""``compare`` of predictions, searches and plans: figures beyond the step, with their sign and ratio."""

import json
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from stepcast.cli.main import main

pytestmark = pytest.mark.slow

STEP = "llama-3.2-1b --gpus 4 --seq 2048 --global-batch 8"


@cache
def answer(words: str) -> str:
    """Return the JSON of a command, which several tests ask for."""
    with redirect_stdout(StringIO()) as out:
        assert main([*words.split(), "--json"]) == 0
    return out.getvalue()


@pytest.fixture
def answers(tmp_path: Path) -> dict[str, str]:
    """Return the files with the JSON of three verbs on two clusters."""
    files = {}
    for verb, more in (("predict", ""), ("search", "--workers 1"), ("plan", "--tokens 1B --price 2 --runs 20")):
        for cluster in ("dgx-h100", "dgx-b200"):
            file = tmp_path / f"{verb}-{cluster}.json"
            file.write_text(answer(f"{verb} {STEP} --cluster {cluster} {more}"))
            files[f"{verb} {cluster}"] = str(file)
    return files


def test_any_two_answers_compare(answers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for first in answers:
        for second in answers:
            assert main(["compare", answers[first], answers[second], "--json"]) == 0
            facts = json.loads(capsys.readouterr().out)
            figures = {figure["name"]: figure for figure in facts["figures"]}
            assert {"mfu", "tokens_per_s", "memory_bytes"} <= figures.keys()
            for figure in figures.values():
                assert figure["difference"] == figure["predicted"] - figure["measured"]
                assert figure["ratio"] == pytest.approx(figure["predicted"] / figure["measured"])
            both_plans = first.startswith("plan") and second.startswith("plan")
            assert ("cost" in figures and "days" in figures) == both_plans


def test_the_text_names_both_sides_and_the_sign(answers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", answers["plan dgx-b200"], answers["plan dgx-h100"]]) == 0
    text = capsys.readouterr().out
    cost = next(line for line in text.splitlines() if line.startswith("cost"))
    days = next(line for line in text.splitlines() if line.startswith("days"))
    assert "-" in cost
    assert "-" in days
    assert "cluster dgx-b200 vs dgx-h100" in text


def test_costs_in_two_currencies_do_not_compare(answers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(answers["plan dgx-b200"])
    facts: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "currency": "EUR"}))
    assert main(["compare", answers["plan dgx-b200"], answers["plan dgx-h100"], "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert "cost" not in {figure["name"] for figure in compared["figures"]}
    assert any("$ and EUR" in text for text in compared["warnings"])


def test_a_search_that_found_nothing_has_no_step_to_compare(
    answers: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, one = tmp_path / "nothing.json", ["--gpu", "h100-sxm", "--gpus", "1", "--global-batch", "1"]
    asked = ["search", "llama-3.1-8b", *one, "--fix", "recompute=full"]
    assert main([*asked, "--workers", "1", "--json"]) == 1
    path.write_text(capsys.readouterr().out)
    assert main(["compare", answers["plan dgx-h100"], str(path)]) == 2
    assert "the search found no strategy" in capsys.readouterr().err
