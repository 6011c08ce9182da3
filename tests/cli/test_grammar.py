"""One grammar: every verb on measured runs takes files, folders and patterns, and says which is which."""

import shutil
from pathlib import Path

import pytest

from tests.cli.test_main import EXAMPLES, run, run_json

NCCL = ("nccl-32-h100.txt", "nccl-8-h100.txt")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in NCCL:
        shutil.copy(EXAMPLES / name, folder)
    return folder


def test_a_folder_of_logs_is_analysed_one_by_one(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "analyze", str(logs), "--cluster", "dgx-h100")
    assert [Path(each["file"]).name for each in found["runs"]] == list(NCCL)
    alone = run_json(capsys, "analyze", str(EXAMPLES / NCCL[0]), "--cluster", "dgx-h100")
    assert {**found["runs"][0], "format": "nccl-tests"} == {**alone, "file": str(logs / NCCL[0])}
    _, out, _ = run(capsys, "analyze", str(logs), "--cluster", "dgx-h100")
    assert all(str(logs / name) in out for name in NCCL)


def test_a_folder_of_logs_is_calibrated(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "calibrate", str(logs), "--cluster", "dgx-h100", "-o", str(tmp_path / "mine.toml"))
    assert status == 0
    assert "of 2 logs" in out
    assert (tmp_path / "mine.toml").is_file()


def test_patterns_that_the_shell_left_alone(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "analyze", str(logs / "nccl-*.txt"), "--cluster", "dgx-h100")
    assert len(found["runs"]) == 2
    status, _, err = run(capsys, "analyze", str(logs / "none-*.txt"), "--cluster", "dgx-h100")
    assert status == 2
    assert "none-*.txt" in err


def test_a_chakra_set_by_pattern_folder_and_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", "--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "4", "--tp", "2", "--seq", "512")
    assert run(capsys, *words, "--global-batch", "4", "--to-workload", str(tmp_path / "ar.et"))[0] == 0
    assert len(list(tmp_path.glob("ar.*.et"))) >= 2
    steps = {
        run_json(capsys, "simulate", str(place), "--cluster", "dgx-h100")["step_s"]
        for place in (tmp_path, tmp_path / "ar.et", tmp_path / "ar.*.et")
    }
    assert len(steps) == 1


def test_compare_names_its_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(EXAMPLES / "megatron-rank7.txt")
    words = ("predict", "--model", "llama-3.2-1b", "--gpu", "h200", "--seq", "512")
    _, out, _ = run(capsys, *words, "--json")
    predicted = tmp_path / "predicted.json"
    predicted.write_text(out)
    status, out, _ = run(capsys, "compare", str(predicted), trace)
    assert status == 1  # not the same run
    told = " ".join(out.split())
    assert f"predicted {predicted} (predicted: llama-3.2-1b)" in told
    assert f"measured {trace} (measured, megatron)" in told
    _, out, _ = run(capsys, "compare", trace, trace)
    assert f"first {trace} (measured, megatron) second {trace} (measured, megatron)" in " ".join(out.split())
