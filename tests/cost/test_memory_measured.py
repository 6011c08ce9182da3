"""Predicted memory against measured peaks."""

import csv
from pathlib import Path
from statistics import mean

import pytest

from stepcast.cost.memory import StageMemory, memory
from stepcast.hardware.catalog import load_gpu
from stepcast.inputs.optimus.beside import read_logs
from stepcast.models.columns import model_of_columns
from stepcast.units import GIB
from stepcast.validate.optimus import peaks
from tests.cost.memory_rows import (
    Row,
    eager_framework,
    eager_model,
    eager_strategy,
    published_framework,
    published_strategy,
)
from tests.shared import DATA, needs_shared

OURS = Path(__file__).parents[1] / "data" / "h200"
GPUS = {"A100-SXM-80GB": "a100-sxm-80gb", "B200-SXM": "b200", "H200-SXM": "h200"}
# Ran out of memory for a reason the arithmetic does not show: docs/memory.md has the count, and the runs beside
# it that needed as much or more and ran.
UNEXPLAINED = {"gt0174"}


def read_rows(path: Path) -> list[Row]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


EAGER = [
    (name, row)
    for name in ("models.csv", "models_compiled_moe.csv", "eager_memory.csv")
    for row in read_rows(OURS / name)
]


@pytest.mark.parametrize(
    "row", [row for _, row in EAGER], ids=[f"{name}:{index}" for index, (name, _) in enumerate(EAGER)]
)
def test_peaks_of_eager_training_steps_on_one_h200(row: Row) -> None:
    model = eager_model(row)
    assert model.parameters == int(row["params"])
    found = memory(model, eager_strategy(row), load_gpu("h200"), eager_framework(row))[0]
    assert found.allocated == pytest.approx(float(row["peak_alloc"]), rel=0.025)


def published(status: str) -> list[tuple[Row, StageMemory, float]]:
    """Row, fullest stage, and the figure that the row's framework reports."""
    found = []
    for row in read_rows(DATA / "published" / "training_runs.csv"):
        if row["status"] != status or (status == "measured" and not row["peak_mem_gib"]):
            continue
        model = model_of_columns(row["model"], row)
        gpu = load_gpu(GPUS.get(row["gpu"], "h100-sxm"))
        stages = memory(model, published_strategy(row, model), gpu, published_framework(row))
        stage = max(stages, key=lambda each: each.total)
        # torchtitan prints what its allocator reserved, SimuMax what was allocated, BLOOM's team nvidia-smi.
        reports = {"torchtitan": stage.reserved, "Megatron-DeepSpeed": stage.total}
        found.append((row, stage, reports.get(row["framework"], stage.allocated)))
    return found


@needs_shared
def test_peaks_of_published_runs() -> None:
    errors = [bytes_ / GIB / float(row["peak_mem_gib"]) - 1 for row, _, bytes_ in published("measured")]
    assert len(errors) >= 70
    assert mean(abs(error) for error in errors) < 0.05
    assert abs(mean(errors)) < 0.02


@needs_shared
def test_published_runs_that_ran_out_of_memory_do_not_fit() -> None:
    failed = [(row["id"], stage.fits) for row, stage, _ in published("OOM")]
    assert len(failed) >= 3
    assert [name for name, fitted in failed if fitted] in ([], sorted(UNEXPLAINED))


@needs_shared
def test_published_runs_with_room_to_spare_fit() -> None:
    spare = 0.9
    rows = [
        (row["id"], stage.fits)
        for row, stage, _ in published("measured")
        if row["gpu"] in GPUS and float(row["peak_mem_gib"]) * GIB < spare * stage.capacity
    ]
    assert len(rows) >= 50
    assert [name for name, fitted in rows if not fitted] == []


@needs_shared
def test_stages_of_the_optimus_sweep() -> None:
    """Pipelines of 2, 4 and 8 stages, with and without tensor parallelism, micro-batches of 1 to 32."""
    logs = read_logs([str(path) for path in sorted((DATA / "optimus-sweep").glob("*_log.txt"))], print)
    found = peaks(logs)
    assert len(found) >= 30
    assert [peak for peak in found if abs(peak.error) > 0.10] == []
    assert mean(abs(peak.error) for peak in found) < 0.03
