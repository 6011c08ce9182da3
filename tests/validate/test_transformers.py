"""Steps of Hugging Face models: what their settings mean, and how far predictions lie from them."""

from pathlib import Path

import pytest

from stepcast.forecast.predict import predict
from stepcast.hardware import load_cluster
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Kernels
from stepcast.ir.strategy import RecomputeKind
from stepcast.validate.h200.comparison import shipped
from stepcast.validate.transformers import COMMAND, Setting, measure_folder
from tests.validate.csv_rows import write
from tests.validate.test_published_commands import typed_s

FOLDER = shipped().parent / "transformers"
ROW = {
    "model": "llama-3.2-1b",
    "layers": "",
    "batch": "4",
    "seq": "1024",
    "setting": "fused",
    "step_ms": "90",
}


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
    found = measure_folder(str(tmp_path))
    assert len(found.columns) == 1
    assert sum(found.skipped.values()) == 2
    assert COMMAND in found.details


def test_measured_steps_and_peaks() -> None:
    found = measure_folder(str(FOLDER))
    table = found.columns
    steps = found.selections["step"]
    assert int(steps.sum()) >= 70
    assert abs(table.error[steps]).mean() <= 0.09
    assert found.figures["peak memory: mean_abs_error"] <= 0.03
