"""MLPerf runs: what their own columns mean, and that each row is what its command says."""

from pathlib import Path

import pytest

from stepcast.ir.framework import Execution
from stepcast.ir.strategy import RecomputeKind, Sharding, TrainingKind
from stepcast.validate.published.comparison import COMMAND, measure_mlperf
from stepcast.validate.published.setup import Setup, read_setup
from tests.shared import DATA, needs_data
from tests.validate.csv_rows import write
from tests.validate.test_published_commands import typed_s

LORA = {
    "id": "m1",
    "round": "v5.0",
    "bench": "llama2_70b_lora",
    "model": "llama-2-70b",
    "gpu": "h200",
    "gpu_in_catalogue": "1",
    "num_gpus": "8",
    "framework": "NGC Pytorch 24.09, NVIDIA Nemo 24.09",
    "parallel_from": "config",
    "precision": "fp8",
    "fp8_params": "1",
    "lora_rank": "16",
    "tp": "1",
    "sp": "0",
    "pp": "1",
    "cp": "2",
    "dp": "4",
    "zero_fsdp": "distributed optimizer",
    "micro_batch": "1",
    "global_batch": "8",
    "seq": "8192",
    "recompute": "none",
    "tp_comm_overlap": "0",
    "overlap_grad_reduce": "1",
    "overlap_param_gather": "0",
    "cuda_graphs": "none",
    "iter_time_s": "3.1",
}


def changed(**columns: str) -> Setup:
    return read_setup({**LORA, **columns})


def test_own_columns_are_taken_up() -> None:
    setup = changed()
    assert setup.strategy.training is TrainingKind.LORA
    assert setup.strategy.lora_rank == 16
    assert setup.strategy.fp8_parameters
    assert setup.strategy.sharding is Sharding.ZERO_1
    assert setup.strategy.overlap.gradients
    assert not setup.strategy.overlap.parameters
    assert not setup.strategy.overlap.tensor
    assert setup.framework.execution is Execution.EAGER
    assert changed(cuda_graphs="full iteration").framework.execution is Execution.GRAPHS
    assert changed(tp_comm_overlap="1").strategy.overlap.tensor
    assert not changed(precision="nvfp4", fp8_params="1").strategy.fp8_parameters


def test_a_block_of_layers_is_recomputed() -> None:
    recompute = changed(recompute="full block 21 layers").strategy.recompute
    assert (recompute.kind, recompute.layers) == (RecomputeKind.BLOCK, 21)


def test_ends_of_a_pipeline_have_a_layer_less() -> None:
    columns = {"model": "llama-3.1-405b", "pp": "8", "vpp": "8", "tp": "4", "cp": "2", "num_gpus": "512"}
    columns |= {"dp": "8", "global_batch": "1152", "lora_rank": "", "bench": "llama31_405b"}
    setup = changed(**columns, flags="asym_pp_embed asym_pp_loss sharp")
    assert setup.strategy.stage_layers == (1, *[2] * 62, 1)


def test_gpus_that_the_catalogue_lacks_are_counted_and_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "training_runs.csv",
        LORA,
        {**LORA, "id": "m2", "gpu": "h200-nvl", "gpu_in_catalogue": "0"},
        {**LORA, "id": "m3", "parallel_from": "inferred from batch and accumulation"},
    )
    found = measure_mlperf(str(path))
    assert len(found.columns) == 2
    assert dict(found.skipped) == {"the GPU is not in the catalogue": 1}
    assert found.selections["layout stated"].tolist() == [True, False]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cuda_graphs": "mcore", "precision": "nvfp4", "gpu": "b200"},
        {"gpu": "mi325x", "recompute": "full block 21 layers"},
        {"framework": "NGC PyTorch Release 24.01 Deepspeed N8", "precision": "bf16", "zero_fsdp": "zero-3",
         "fp8_params": "", "cuda_graphs": "", "cp": "1", "dp": "8"},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_is_what_its_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str]
) -> None:
    found = measure_mlperf(str(write(tmp_path / "runs.csv", {**LORA, **changes})))
    row = found.columns.row(0)
    assert typed_s(row.tags[COMMAND], capsys) == pytest.approx(row.predicted_s, rel=1e-9)


@needs_data("mlperf")
def test_most_runs_are_compared() -> None:
    found = measure_mlperf(str(DATA / "mlperf"))
    assert len(found.columns) >= 110
    assert sum(found.skipped.values()) + len(found.columns) == 118
    assert all(command.startswith("stepcast predict") for command in found.columns.tags[COMMAND])
