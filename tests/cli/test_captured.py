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
    """Return the most that a stage needs; what the allocator leaves unused is replayed for captured programs only."""
    stages = found["memory_bytes"]["stages"]  # type: ignore[index]
    return float(max(stage["total"] - stage["fragmentation"] for stage in stages))


@pytest.mark.parametrize("format_name", ["optable", "chakra", "simai"])
def test_converted_it_takes_as_long(format_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "use --gpu NAME" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--kernels", "plain"], "--kernels"),
        (["--execution", "graphs"], "--execution"),
        (["--recompute", "full"], "--recompute"),
        (["--clipping"], "--clipping"),
        (["--bucket-mb", "50"], "--bucket-mb"),
        (["--bucket-mb", "50", "--gpus", "8", "--sharding", "fsdp"], "--bucket-mb"),
        (["--place", "packed"], "--place"),
    ],
)
def test_options_without_effect_are_refused(words: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--captured", str(EXAMPLE), "--cluster", "hgx-h200", *words]) == 2
    assert f"{option} has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["dualpipe", "zb-v", "interleaved"])
def test_schedules_of_several_pieces_are_refused(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "hgx-h200", "--gpus", "4", "--pp", "4", "--global-batch", "32"]
    assert main(["predict", "--captured", str(EXAMPLE), *words, "--schedule", schedule]) == 2
    assert "choose from gpipe, 1f1b, zb-h1, zb-h2" in capsys.readouterr().err


def test_one_bucket_is_summed_after_the_backward(capsys: pytest.CaptureFixture[str]) -> None:
    """DDP hides buckets behind the backward; one bucket of all gradients can hide behind nothing."""
    words = ["predict", "--captured", str(EXAMPLE), "--cluster", "hgx-h200", "--gpus", "8"]
    usual, one = (said(capsys, *words, *more) for more in ([], ["--bucket-mb", "0"]))
    dp = one["communication_s"]["dp"]  # type: ignore[index]
    assert dp["exposed"] == pytest.approx(dp["total"])
    assert usual["communication_s"]["dp"]["exposed"] < 0.5 * dp["exposed"]  # type: ignore[index]


def test_a_calibration_acts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Products that take twice as long make the step longer by their share of it."""
    path = tmp_path / "slow.toml"
    path.write_text('gpu = "h200"\n[class."matmul.bf16"]\nfactor = 2.0\n')
    words = ["predict", "--captured", str(EXAMPLE), "--cluster", "hgx-h200"]
    usual, slow = said(capsys, *words), said(capsys, *words, "--calibration", str(path))
    assert 1.3 < slow["step_s"] / usual["step_s"] < 2.0  # type: ignore[operator]


def test_nodes_and_replicas_count_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--captured", str(EXAMPLE), "--cluster", "hgx-h200", "--tp", "2"]
    found = [said(capsys, *words, *more) for more in (["--gpus", "16"], ["--nodes", "2"], ["--dp", "8"])]
    assert [each["gpus"] for each in found] == [16, 16, 16]
    assert main([*words, "--gpus", "8", "--dp", "8"]) == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    words = ["--captured", str(EXAMPLE), "--cluster", "hgx-h200", "--gpus", "8", "--html", str(page)]
    assert main(["predict", *words]) == 0
    assert f"{8 * BATCH} sequences of {SEQ:,} tokens" in page.read_text()


def test_older_captures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Version 5 counts the CPU's time of transformers' modules in other units."""
    older = tmp_path / "older.json"
    older.write_text(EXAMPLE.read_text().replace('"version":6', '"version":5', 1))
    assert main(["predict", "--captured", str(older), "--gpu", "h200"]) == 2
    assert "capture the program again" in capsys.readouterr().err


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
    with pytest.raises(ValueError, match=r"stepcast\[torch\]"), stepcast.record(str(tmp_path / "run")):
        pass


@pytest.mark.parametrize(
    "words", [["predict", str(EXAMPLE)], ["predict", "--model", str(EXAMPLE)], ["search", str(EXAMPLE)]]
)
def test_a_captured_program_given_as_another_file_names_its_option(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--gpu", "h200"]) == 2
    assert "'stepcast predict --captured' predicts its step" in capsys.readouterr().err


def test_the_captured_set_is_measured_when_it_is_named() -> None:
    from stepcast.validate.scoreboard import MEASUREMENT_SETS

    assert MEASUREMENT_SETS["captured"].when_named
    assert not MEASUREMENT_SETS["transformers"].when_named


def test_search_ranks_layouts_at_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "--captured", str(EXAMPLE), "--cluster", "hgx-h200", "--gpus", "2", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [row["step_s"] for row in found["rows"]]
    assert steps == sorted(steps)
    assert (found["rows"][0]["dp"], found["candidates"]) == (2, 4)
    assert main([*words, "--global-batch", str(BATCH)]) == 0  # too few sequences for two replicas
    found = json.loads(capsys.readouterr().out)
    assert {row["dp"] for row in found["rows"]} == {1}
    assert main([*words, "--global-batch", str(BATCH + 1)]) == 2
    assert f"--global-batch {BATCH + 1}" in capsys.readouterr().err
    assert main([*words, "--recompute", "full"]) == 2
    assert main(["plan", "--captured", str(EXAMPLE)]) == 2
