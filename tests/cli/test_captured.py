"""Captured programs without PyTorch: priced, spread, converted; and what says that it is missing."""

import json
import sys
from pathlib import Path

import pytest

import stepcast
from stepcast.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "captured" / "llama-3.2-1b.json"
CONFIG = Path(stepcast.__file__).parent / "data" / "transformers" / "configs" / "llama-3.2-1b.json"
BATCH, SEQ = 4, 4096  # that the example was captured with


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def memory_bytes(found: dict[str, object]) -> float:
    stages = found["memory_bytes"]["stages"]  # type: ignore[index]
    return float(max(stage["total"] for stage in stages))


@pytest.mark.parametrize("format_name", ["optable", "chakra", "simai"])
def test_converted_it_takes_as_long(
    format_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other formats hold its kernels' times: their sum is the step, but for what the host starts with."""
    target = tmp_path / {"optable": "out.tsv", "chakra": "out", "simai": "out.txt"}[format_name]
    assert main(["convert", str(EXAMPLE), str(target), "--to", format_name, "--gpu", "h200"]) == 0
    written = next(tmp_path.iterdir())
    capsys.readouterr()
    step_s = said(capsys, "predict", "--captured", str(EXAMPLE), "--gpu", "h200")["step_s"]
    again_s = said(capsys, "simulate", str(written), "--cluster", "hgx-h200", "--gpus", "1")["step_s"]
    assert again_s == pytest.approx(step_s, rel=0.005)


def test_conversion_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(EXAMPLE), str(tmp_path / "out.tsv"), "--to", "optable"]) == 2
    assert "give --gpu G" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "generated"),
    [
        (["--gpus", "1"], []),
        (["--gpus", "8"], []),
        (["--gpus", "16"], []),
        (["--gpus", "8", "--sharding", "fsdp"], ["--sharding", "fsdp"]),
    ],
)
def test_spread_like_the_generated_model(
    words: list[str], generated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Replicas and shards of it take as long, and as much memory, as the same model generated."""
    captured = said(capsys, "predict", "--captured", str(EXAMPLE), "--cluster", "hgx-h200", *words)
    sizes = ["--micro-batch", str(BATCH), "--global-batch", str(BATCH * int(words[1])), "--seq", str(SEQ)]
    model = ["--model", str(CONFIG), "--cluster", "hgx-h200", "--framework", "transformers", "--no-clipping"]
    expected = said(capsys, "predict", *model, "--gpus", words[1], *sizes, *generated)
    assert captured["step_s"] == pytest.approx(expected["step_s"], rel=0.04)
    assert memory_bytes(captured) == pytest.approx(memory_bytes(expected), rel=0.04)


def test_balanced_stages_beat_equal_numbers_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss over a large vocabulary is a stage's worth of work; cuts allow for it."""
    words = ["--gpus", "4", "--pp", "4", "--global-batch", str(8 * BATCH), "--cluster", "hgx-h200"]
    captured = said(capsys, "predict", "--captured", str(EXAMPLE), *words)
    model = ["--model", str(CONFIG), "--framework", "transformers", "--no-clipping"]
    sizes = ["--micro-batch", str(BATCH), "--seq", str(SEQ)]
    expected = said(capsys, "predict", *model, *words, *sizes)
    parts, others = captured["breakdown_s"], expected["breakdown_s"]
    assert parts["compute"] == pytest.approx(others["compute"], rel=0.02)  # type: ignore[index]
    assert parts["bubble"] < 0.6 * others["bubble"]  # type: ignore[index]


@pytest.mark.parametrize(
    "words",
    [
        ["capture", "config.json"],
        ["capture", "module:function", "--predict", "--gpu", "h200"],
        ["run", str(EXAMPLE), "--gpu", "h200"],
        ["validate", "--set", "captured"],
    ],
)
def test_without_torch_the_extra_is_named(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "pip install 'stepcast[torch]'" in said
    assert said.count("\n") == 1


def test_recording_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with (
        pytest.raises(ValueError, match=r"stepcast\[torch\]"),
        stepcast.record(str(tmp_path / "run")),
    ):
        pass


def test_the_captured_set_is_measured_when_it_is_named() -> None:
    from stepcast.validate.sets import measurement_sets

    assert measurement_sets()["captured"].when_named
    assert not measurement_sets()["transformers"].when_named
