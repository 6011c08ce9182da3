"""The Ultra-Scale sweep: how strategies of one cell are ranked, and which failures count against memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepcast.cost.memory import memory
from stepcast.cost.memory.stages import StageMemory
from stepcast.frameworks.catalog import balanced_stages, load_profile, settle
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import StrategyError
from stepcast.models.catalog import model_of_columns
from stepcast.validate.published.comparison import measure_ultrascale, rank_cell
from stepcast.validate.published.setup import Setup, read_setup
from tests.shared import DATA, needs_data
from tests.validate.csv_rows import write

RUN = {
    "id": "u1",
    "model": "nanotron-1.34b",
    "params_b": "1.342",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "8192",
    "vocab": "131072",
    "seq": "4096",
    "gpu": "H100",
    "gpu_mem_gb": "80",
    "num_gpus": "8",
    "network": "AWS EFA, 8 x H100 per node",
    "framework": "nanotron (Feb 2025)",
    "precision": "bf16",
    "tp": "1",
    "pp": "1",
    "dp": "8",
    "zero_fsdp": "zero1",
    "micro_batch": "1",
    "global_batch": "256",
    "recompute": "none",
    "iter_time_s": "3.4",
    "mfu_pct": "38",
    "peak_mem_gib": "24",
    "status": "measured",
}


def test_a_parameter_count_tells_gated_models_from_gpts() -> None:
    model = model_of_columns(RUN["model"], RUN)
    assert model.gated
    assert model.tied
    assert model.parameters == pytest.approx(1.342e9, rel=1e-3)


def test_stages_are_balanced_with_the_head() -> None:
    model = model_of_columns(RUN["model"], RUN)  # its head weighs four layers
    assert balanced_stages(model, 1) == ()
    assert balanced_stages(model, 2) == (11, 5)
    assert sum(balanced_stages(model, 8)) == 16
    with pytest.raises(StrategyError, match="without any part of the model"):  # blocks end on the 15th stage
        balanced_stages(model, 16)
    layout = Layout(pp=4, dp=2)
    assert settle(load_profile("nanotron"), model, "h100-sxm", layout).choices["stage_layers"] == (6, 5, 5, 0)


def test_tensors_of_collectives_are_held_while_memory_is_free() -> None:
    sizes = {"tp": "4", "sp": "1", "dp": "2", "memory_of": "first stage"}
    holding, full = (read_setup({**RUN, **sizes, "micro_batch": number}) for number in ("4", "32"))

    def peaks(setup: Setup, tensors: float = 2.0) -> StageMemory:
        overhead = replace(setup.framework.overhead, exchanged_tensors=tensors)
        framework = replace(setup.framework, overhead=overhead)
        return memory(setup.model, setup.strategy, setup.cluster.gpu, framework)[0]

    # Two tensors of all tokens for each of 16 layers, less the quarter that each rank saves anyway.
    more = peaks(holding).allocated - peaks(holding, 0.0).allocated
    assert more == 2 * 16 * 0.75 * 4 * 4096 * 2048 * 2
    assert peaks(full).fits == peaks(full, 0.0).fits
    assert peaks(full).allocated == peaks(full, 0.0).allocated


def test_the_first_choice_is_measured_against_the_best() -> None:
    regret, correlation = rank_cell(np.array([2.0, 1.0, 4.0]), np.array([1.0, 1.5, 3.0]))
    assert regret == pytest.approx(1.0)
    assert correlation == pytest.approx(0.5)


def test_failures_count_unless_something_else_failed(tmp_path: Path) -> None:
    failed = {**RUN, "iter_time_s": "", "peak_mem_gib": "", "mfu_pct": "", "status": "failed (OOM or other)"}
    rows = [
        RUN,
        {**RUN, "id": "u2", "micro_batch": "2", "iter_time_s": "3.3"},
        {**failed, "id": "u3", "micro_batch": "16"},  # out of memory
        {**failed, "id": "u4", "pp": "8", "dp": "1", "micro_batch": "128"},  # nanotron refuses two micro-batches
        {**failed, "id": "u5"},  # micro-batches of two ran
    ]
    write(tmp_path / "runs.csv", *rows)
    measured = measure_ultrascale(str(tmp_path))
    assert measured.figures["ran, predicted to fit"] == 1.0
    assert measured.figures["failed, predicted not to fit"] == 1.0
    assert measured.figures["failed, not for lack of memory"] == pytest.approx(2 / 3)
    assert measured.skipped["failed: compared for memory alone"] == 3
    assert abs(measured.columns.error).max() < 0.2


@needs_data("ultrascale")
def test_the_best_strategies_are_ranked_first(tmp_path: Path) -> None:
    lines = (DATA / "ultrascale" / "runs.csv").read_text().splitlines()
    chosen = [line for line in lines[1:] if ",nanotron-3.57b," in line and ",H100,80,8," in line]
    (tmp_path / "runs.csv").write_text("\n".join([lines[0], *chosen]))
    measured = measure_ultrascale(str(tmp_path))
    assert measured.figures["regret: median of cells"] < 0.05
    assert measured.figures["rank correlation: mean of cells"] > 0.9
