"""Steps of Hugging Face models: what their settings mean, and how far predictions lie from them."""

from pathlib import Path

import pytest

from stepcast.forecast.predict import predict
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.ir.framework import Kernels
from stepcast.ir.strategy import RecomputeKind
from stepcast.ir.types import DType
from stepcast.validate.h200 import shipped_folder
from stepcast.validate.scoreboard import Measurements, split_phases_s
from stepcast.validate.transformers import COMMAND, Setting, measure_transformers
from tests.validate.csv_rows import write
from tests.validate.test_published_commands import typed_s

FOLDER = shipped_folder().parent / "transformers"
ROW = {"model": "llama-3.2-1b", "layers": "", "batch": "4", "seq": "1024", "setting": "fused", "step_ms": "90"}


def setting(**columns: str) -> Setting:
    return Setting({**ROW, **columns}, FOLDER)


def test_words_of_a_setting() -> None:
    eager = setting()
    assert eager.framework.kernels is Kernels.PLAIN
    assert eager.framework.optimizer.moment_dtype is DType.BF16
    assert eager.framework.optimizer.fused
    assert not setting(setting="").framework.optimizer.fused
    assert setting(setting="compile").framework.kernels is Kernels.COMPILED
    assert setting(setting="autocast").strategy.autocast
    assert setting(setting="autocast").framework.optimizer.moment_dtype is DType.FP32
    assert setting(setting="checkpoint").strategy.recompute.kind is RecomputeKind.FULL
    assert not setting(setting="attn-eager").framework.flash_attention
    assert setting(layers="4").model.layers == 4
    assert setting(model="gpt2-xl").framework.dropout
    with pytest.raises(ValueError, match="no word"):
        setting(setting="quick")


def test_a_row_is_what_its_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("fused", "autocast fused", "checkpoint fused", "compile fused"):
        found = setting(setting=words, layers="2")
        step_s = predict(found.model, load_cluster("hgx-h200"), found.strategy, found.framework).step_s
        assert typed_s(found.command, capsys) == pytest.approx(step_s, rel=1e-9), words


def test_rows_without_a_model_are_counted(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(FOLDER / "configs")
    write(tmp_path / "steps_eager.csv", ROW, {**ROW, "model": "none"}, {**ROW, "setting": "experts-eager"})
    found = measure_transformers(str(tmp_path))
    assert len(found.columns) == 1
    assert sum(found.skipped.values()) == 2
    assert COMMAND in found.details


def test_a_row_that_was_visited_again_counts_once_by_its_medians(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(FOLDER / "configs")
    write(tmp_path / "steps_eager.csv", ROW, {**ROW, "batch": "8"})
    again = [{**ROW, "step_ms": step_ms} for step_ms in ("100", "70", "120")]
    write(tmp_path / "steps_again.csv", *again)
    found = measure_transformers(str(tmp_path)).columns
    assert sorted(found.measured_s.tolist()) == pytest.approx([0.09, 0.095])


def test_bloom_runs_the_kernels_that_a_trace_shows() -> None:
    """tools/trace_hf_steps.py: its own GELU, three copies out of one product, a bias over the whole square."""
    found = setting(model="bloom-1b1", layers="2")
    layers = generate(found.model, found.strategy, found.framework).stages[0].body_layers()
    names = [op.name for layer in layers for op in layer.all_ops]
    assert names.count("bias") == 2
    assert sum(name.endswith(" apart") for name in names) == 2 * 3
    assert sum(name.startswith("activation gradient") for name in names) == 2 * 18
    assert sum(name.startswith("activation") for name in names) == 2 * (9 + 18)
    assert sum(name.startswith("join gradients") for name in names) == 2 * 8
    assert not [name for name in names if name.startswith("scale gradient")]


def test_attention_that_no_kernel_takes_runs_in_fp32() -> None:
    """Falcon does not say that its heads share keys; in fp32 no kernel takes any that do."""
    for row in ({"model": "falcon-7b", "layers": "1"}, {"setting": "fp32", "layers": "1"}):
        found = setting(**row)
        layers = generate(found.model, found.strategy, found.framework).stages[0].body_layers()
        scores = [op.work for layer in layers for op in layer.forward if op.name == "scores"]
        assert [getattr(work, "dtype", None) for work in scores] == [DType.FP32]
        asked = setting(**{**row, "setting": f"attn-eager {row.get('setting', '')}"})
        eager = generate(asked.model, asked.strategy, asked.framework).stages[0].body_layers()
        assert not [op for layer in eager for op in layer.forward if op.name.startswith("rows of nothing")]


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return measure_transformers(str(FOLDER))


def test_measured_steps_and_peaks(measured: Measurements) -> None:
    table = measured.columns
    steps = measured.selections["step"]
    assert int(steps.sum()) >= 100
    assert abs(table.error[steps]).mean() <= 0.03
    assert abs(table.error[steps]).max() <= 0.15
    for phase in ("backward", "optimizer"):
        assert abs(table.error[measured.selections[phase]]).mean() <= 0.05, phase
    assert measured.figures["peak memory: mean_abs_error"] <= 0.02


def test_steps_with_a_profile_of_their_gpu(measured: Measurements) -> None:
    profiled = measure_transformers(str(FOLDER), calibration="examples/calibrations/h200.toml")
    errors, without = (abs(found.columns.error[found.selections["step"]]) for found in (profiled, measured))
    assert errors.mean() <= without.mean() + 0.002


def test_a_profile_of_another_gpu_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('gpu = "h100-sxm"\n[class."matmul.bf16"]\nfactor = 1.0\n')
    with pytest.raises(ValueError, match="measured on h100-sxm"):
        measure_transformers(str(FOLDER), calibration=str(other))


def test_the_phases_of_a_step_make_up_the_step() -> None:
    found = setting(layers="2")
    prediction = predict(found.model, load_cluster("hgx-h200"), found.strategy, found.framework)
    phases = split_phases_s(prediction)
    assert list(phases) == ["forward", "backward", "optimizer"]
    assert all(seconds > 0 for seconds in phases.values())
    assert sum(phases.values()) == pytest.approx(prediction.step_s)
    assert phases["backward"] > phases["forward"]
