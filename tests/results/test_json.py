"""The JSON of every verb has the keys and types that ``docs/json.md`` describes."""

import json
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.results import answers, costs, documents, generation
from tests.pages.test_pages import VERBS
from tests.shared import ROOT
from tools.describe_json import ANSWERS, COMPARISON, GATE, describe_answers, find_mismatches

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
PREDICT = VERBS["predict"]
COMMANDS: dict[str, tuple[type, list[str]]] = {
    "predict": (answers.StepAnswer, [*PREDICT, "--jitter", "0.1", "--runs", "5", "--critical-path", "--tokens", "1e9"]),
    "simulate": (answers.StepAnswer, VERBS["simulate"]),
    "search": (answers.SearchAnswer, VERBS["search"]),
    "plan": (answers.PlanAnswer, VERBS["plan"]),
    "alternatives": (answers.AlternativesAnswer, VERBS["alternatives"]),
    "generate": (generation.GenerationAnswer, VERBS["generate"]),
    "rl": (generation.RlAnswer, VERBS["rl"]),
    "rl search": (generation.RlSearchAnswer, VERBS["rl search"]),
    "network": (answers.NetworkAnswer, VERBS["network"]),
    "compare": (COMPARISON, VERBS["compare"]),
    "gate": (GATE, VERBS["gate"]),
    "op": (costs.OperatorAnswer, VERBS["op"]),
    "op sweep": (costs.OperatorSweepAnswer, VERBS["op sweep"]),
    "collective": (costs.CollectiveAnswer, VERBS["collective"]),
    "collective sweep": (costs.CollectiveSweepAnswer, VERBS["collective sweep"]),
    "collective on links": (costs.SharedCollectiveAnswer, VERBS["collective on links"]),
    "show a workload": (documents.WorkloadFacts, ["show", str(EXAMPLES / "simai-gpt-13b.txt")]),
    "show a sweep": (documents.SweepFacts, ["show", str(EXAMPLES / "nccl-one-nic.txt")]),
    "show operators": (documents.OperatorTimesFacts, ["show", str(EXAMPLES / "operators-h200.csv")]),
    "list": (answers.ListAnswer, ["list", "failures"]),
    "validate": (costs.ValidateAnswer, VERBS["validate"]),
    "calibrate": (costs.FitFacts, VERBS["calibrate"]),
    "calibrate a trace": (
        costs.FitFacts, ["calibrate", str(EXAMPLES / "megatron-rank7.txt"), "--gpu", "a800-sxm-80gb"],
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    head = (ROOT / "tests" / "data" / "h200" / "ops.csv").read_text().splitlines(keepends=True)[:30]
    Path("rows", "ops.csv").write_text("".join(head))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("folder")
def test_json_has_the_keys_and_types_of_its_description(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, words = COMMANDS[name]
    assert main([*words, "--json"]) in (0, 1)
    assert list(find_mismatches(json.loads(capsys.readouterr().out), kind)) == []


def test_a_mismatch_is_found() -> None:
    row = {"link": "leaf 0", "busy": "much", "new": 1}
    assert sorted(find_mismatches(row, costs.BusyLinkFacts)) == [
        "answer.busy: expected a number, not 'much'",
        "answer.new: not in BusyLinkFacts",
    ]
    assert list(find_mismatches({"link": "leaf 0"}, costs.BusyLinkFacts)) == ["answer.busy: missing"]


def test_the_page_describes_the_types() -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    assert page == describe_answers(), "run python -m tools.describe_json"
    checked = {kind for kind, _ in COMMANDS.values()}
    assert {kind for kinds in ANSWERS.values() for kind in kinds} - checked == {
        answers.RunAnswer,  # needs PyTorch
        answers.SweepCountsAnswer,
        answers.SweepRowsAnswer,
        documents.TimelineFacts,  # and what the trace says of the run
        documents.RunLogFacts,
        documents.ModelFacts,
    }
