"""The claims of docs/accuracy.md, measured as a user would."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files

import pytest
from msgspec import structs

import stepcast
from stepcast.cli.main import build_parser
from stepcast.cli.options import read_question
from stepcast.hardware import load_cluster
from stepcast.questions.settle import settle
from stepcast.validate.h200 import measure_h200, row_framework, row_model, row_strategy, shipped_folder
from tests.shared import ROOT

Record = Mapping[str, str]
PLAIN_BF16 = (
    "--precision bf16 --gradients bf16 --optimizer adamw:bf16 --no-master-weights --no-clipping "
    "--kernels plain --execution eager --sharding none"
)


def steps() -> Iterator[Record]:
    """The training steps measured on one H200; experts in a Python loop are not predicted."""
    for name in ("models.csv", "models_compiled_moe.csv"):
        text = files("stepcast").joinpath(f"data/h200/{name}").read_text(encoding="utf-8")
        yield from (row for row in csv.DictReader(text.splitlines()) if row.get("experts", "0") == "0")


def test_training_steps_as_predict_has_them() -> None:
    cluster = load_cluster("hgx-h200")
    errors = []
    for step in steps():
        model, strategy, framework = row_model(step), row_strategy(step), row_framework(step)
        predicted_s = stepcast.predict(model, cluster, strategy, framework).report.step_s
        errors.append(abs(predicted_s / (float(step["step_ms"]) * 1e-3) - 1))
    assert len(errors) == 12
    mean, worst = sum(errors) / len(errors), max(errors)
    assert mean <= 0.045
    assert worst <= 0.12
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert f"{mean * 100:.1f} %, worst {worst * 100:.1f} %" in page


def test_the_scoreboard_says_what_predict_says() -> None:
    found = measure_h200(str(shipped_folder())).columns
    cluster, times = load_cluster("hgx-h200"), []
    for step in steps():
        model, strategy, framework = row_model(step), row_strategy(step), row_framework(step)
        times.append(stepcast.predict(model, cluster, strategy, framework).report.step_s)
    assert found.predicted_s[found.tags["kind"] == "step"].tolist() == times


def test_the_command_line_can_say_it() -> None:
    """Plain PyTorch with everything in bf16: the options that docs/predict.md names are the strategy's."""
    (row,) = (row for row in steps() if row["batch"] == "4" and row["seq"] == "4096" and row["recompute"] == "none")
    batch = "--micro-batch 4 --global-batch 4 --seq 4096"
    words = f"predict --model llama-3.2-1b --cluster hgx-h200 --gpus 1 {batch} {PLAIN_BF16} --zero-gradients 1"
    question, _ = read_question(build_parser().parse_args(words.split()))
    run = settle(structs.replace(question, model=row_model(row)))
    assert run.strategy == row_strategy(row)
    assert replace(run.framework, name="pytorch") == row_framework(row)
    text = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
    assert PLAIN_BF16 in " ".join(text.replace("\\\n", " ").split())


def test_peaks_of_memory_on_the_scoreboard() -> None:
    figures = measure_h200(str(shipped_folder())).figures
    assert figures["peak memory: mean_abs_error"] == pytest.approx(0.003, abs=0.002)
    assert figures["peak memory: worst_abs_error"] <= 0.025
