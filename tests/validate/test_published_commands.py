"""What the scoreboard predicts is what a user types: every row has its command."""

import csv
import json
import shlex
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.validate.published.comparison import COMMAND, compare_records, predict_step, records_of
from stepcast.validate.published.setup import complete_heads, correct_records, load_corrections, read_setup
from tests.shared import DATA, needs_data
from tests.validate.csv_rows import write
from tests.validate.test_published import LLAMA

SAMPLED = 20


def typed_s(command: str, capsys: pytest.CaptureFixture[str]) -> float:
    """Seconds of a step as the command prints it, times the factor in its comment."""
    line, _, factor = command.partition("  # times ")
    assert main([*shlex.split(line)[1:], "--json"]) == 0
    step_s = json.loads(capsys.readouterr().out)["step_s"]
    ran, _, of = factor.partition("/")
    return float(step_s * int(ran) / int(of)) if of else float(step_s)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"framework": "torchtitan", "compile": "0", "recompute": "selective AC"},
        {"framework": "Megatron-LM 2023 (285068c8)", "flash_attn": "1"},
        {"framework": "llm-foundry", "zero_fsdp": "fsdp-full(zero3)/PURE", "tp": "1", "dp": "16"},
        {"model": "mine-3b", "hidden": "2560", "layers": "30", "heads": "20", "vocab": "50000"},
        {"global_batch": "127"},
    ],
    ids=str,
)
def test_a_row_is_what_its_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str]
) -> None:
    path = write(tmp_path / "runs.csv", {**LLAMA, "cp": "1", "dp": "8", **changes})
    compared = compare_records(records_of(str(path)))
    found, skipped = compared.rows, compared.skipped
    assert not skipped
    assert typed_s(found[0].tags[COMMAND], capsys) == pytest.approx(found[0].predicted_s, rel=1e-9)


def test_the_output_has_a_column_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path / "runs.csv", LLAMA), tmp_path / "out.csv"
    assert main(["validate", "--set", "published", "--data", str(path), "-o", str(out)]) == 0
    header, row = out.read_text().splitlines()
    assert "command" in header.split(",")
    assert "stepcast predict --model" in row
    assert "by command" not in capsys.readouterr().out


@needs_data("published")
def test_published_rows_are_what_their_commands_say(capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "published" / "training_runs.csv"
    with open(path, encoding="utf-8", newline="") as file:
        records = list(complete_heads(list(correct_records(csv.DictReader(file), load_corrections()))))
    usable = []
    for record in records:
        try:
            usable.append(read_setup(record))
        except ValueError:
            continue
    commands = [setup.command for setup in usable]
    assert all(command.startswith("stepcast predict ") for command in commands)
    for setup, command in list(zip(usable, commands, strict=True))[:: len(usable) // SAMPLED]:
        assert typed_s(command, capsys) == pytest.approx(predict_step(setup)[0], rel=1e-9), command
