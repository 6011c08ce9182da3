"""The verb ``validate``."""

import csv
import json
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.validate import h200 as h200
from tests.shared import DATA, needs_data

KEYS = ("rows", "skipped", "mean_abs_error", "median_abs_error", "p90_abs_error", "worst_abs_error", "mean_error")


def small(folder: Path) -> Path:
    """Ten rows of the h200 set."""
    lines = (h200.shipped_folder() / "ops.csv").read_text().splitlines()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ops.csv").write_text("\n".join([lines[0], *lines[1:200:20]]) + "\n")
    return folder


def test_json_has_what_the_contract_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--set", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sets"]
    assert list(found) == ["h200"]
    for key in KEYS:
        assert key in found["h200"], key
    assert found["h200"]["rows"] == 1792
    assert 0 < found["h200"]["mean_abs_error"] < 0.1
    assert len(found["h200"]["worst"]) == 10


def test_text_shows_groups_reasons_and_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--set", "h200"]) == 0
    text = capsys.readouterr().out
    for word in ("linear bf16 over 50 us", "by kind", "by model", "by time", "skipped 1", "worst 10", "signed"):
        assert word in text


def test_other_rows_and_a_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    line = ["validate", "--set", "h200", "--data", str(small(tmp_path / "mine")), "-o", str(out), "--json"]
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out)["sets"]["h200"]["rows"] == 10
    with out.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 10
    for row in rows:
        error = float(row["predicted_s"]) / float(row["measured_s"]) - 1
        assert float(row["error"]) == pytest.approx(error, abs=1e-5)
        assert row["set"] == "h200"


def test_a_folder_of_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small(tmp_path / "h200")
    for words in ([], ["--set", "h200"]):
        assert main(["validate", "--data", str(tmp_path), *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["sets"]["h200"]["rows"] == 10


@needs_data("nccl-tests")
def test_the_cluster_of_logs_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    errors = []
    for words in ([], ["--cluster", "dgx-a100"]):
        assert main(["validate", "--set", "nccl-tests", "--data", str(DATA / "nccl-tests"), *words, "--json"]) == 0
        errors.append(json.loads(capsys.readouterr().out)["sets"]["nccl-tests"]["mean_abs_error"])
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "h2000"], "known are h200, neusight"),
        (["--set", "h200", "--data", "nowhere"], "no such file or folder"),
        (["--data", "."], "say which set it is with --set"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["validate", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
