"""The verb ``profile``, with a fake GPU; without PyTorch it says what is missing."""

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepcast.cli import profile
from stepcast.cli.main import main
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.power import SUSTAINED
from stepcast.hardware import load_gpu
from stepcast.ir.types import DType
from stepcast.pytorch import profile as measuring
from stepcast.pytorch.profile import Operator


class FakeBackend:
    device, software, formats = "NVIDIA H200", "torch 9", (DType.BF16, DType.FP32)
    asked = 0

    def __init__(self, torch: object) -> None:
        pass

    def seconds(self, work: Operator) -> float:
        type(self).asked += 1
        return 2.0 * compute_price(work, load_gpu("h200"), default_fit()).seconds

    def sustained_s(self, work: Operator) -> float:
        return 2.0 * compute_price(work, load_gpu("h200"), default_fit(), SUSTAINED).seconds

    def launch(self) -> dict[str, float]:
        return {"kernel_s": 3e-6}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with one fake H200."""
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 1))
    monkeypatch.setattr(profile, "load_torch_with_gpu", lambda: torch)
    monkeypatch.setattr(profile, "TorchBackend", FakeBackend)
    monkeypatch.setattr(FakeBackend, "asked", 0)
    return torch


def test_without_pytorch_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["profile", "-o", str(tmp_path / "mine.toml")]) == 2
    error = capsys.readouterr().err
    assert "PyTorch, which is not installed" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert main(["profile", "-o", str(tmp_path / "mine.toml")]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_it_writes_a_calibration_that_other_verbs_take(
    gpus: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.toml"
    assert main(["profile", "-o", str(out), "--quick"]) == 0
    text = capsys.readouterr().out
    assert "matmul.bf16" in text
    assert "error before" in text
    table = tomllib.loads(out.read_text())
    assert table["class"]["matmul.bf16"]["factor"] == pytest.approx(2.0, rel=0.05)
    assert len(table["points"]) == FakeBackend.asked
    line = ["op", "matmul", "--m", "4096", "--n", "4096", "--k", "4096", "--json"]
    main([*line, "--gpu", "h200"])
    plain = json.loads(capsys.readouterr().out)
    main([*line, "--calibration", str(out)])
    own = json.loads(capsys.readouterr().out)
    assert own["source"] == "calibrated"
    assert own["time_s"] == pytest.approx(2 * plain["time_s"], rel=0.03)


def test_a_rerun_measures_only_what_is_missing(
    gpus: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.toml"
    main(["profile", "-o", str(out), "--quick"])
    first, FakeBackend.asked = FakeBackend.asked, 0
    assert main(["profile", "-o", str(out), "--quick"]) == 0
    assert FakeBackend.asked == 0
    lines = out.read_text().splitlines()
    kept = [line for line in lines if not line.startswith('"matmul.fp32')]
    out.write_text("\n".join(kept) + "\n")
    assert main(["profile", "-o", str(out), "--quick"]) == 0
    assert FakeBackend.asked == len(lines) - len(kept)
    capsys.readouterr()
    assert main(["profile", "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"] > first
    assert found["classes"]["matmul.bf16"]["points"] > 12


def test_points_of_another_gpu_are_not_mixed_in(
    gpus: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.toml"
    main(["profile", "-o", str(out), "--quick"])
    monkeypatch.setattr(FakeBackend, "device", "NVIDIA B200")
    capsys.readouterr()
    assert main(["profile", "-o", str(out), "--quick"]) == 2
    assert "another GPU (NVIDIA H200, not NVIDIA B200)" in capsys.readouterr().err


def test_an_unknown_gpu_must_be_described(
    gpus: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeBackend, "device", "NVIDIA Q1000")
    assert main(["profile", "-o", str(tmp_path / "mine.toml")]) == 2
    assert "NVIDIA Q1000 is not in the catalogue" in capsys.readouterr().err
    assert main(["profile", "-o", str(tmp_path / "mine.toml"), "--quick", "--gpu", "h100-sxm"]) == 0


def test_several_gpus_are_timed_together(
    gpus: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus.cuda.device_count = lambda: 4
    point = {"kind": "all-reduce", "ranks": 4, "size_bytes": 2**30, "seconds": 4e-3}
    monkeypatch.setattr(measuring, "all_reduce_points", lambda torch, ranks: [point])
    out = tmp_path / "mine.toml"
    assert main(["profile", "-o", str(out), "--quick"]) == 0
    assert "402.65 GB/s" in capsys.readouterr().out
    assert tomllib.loads(out.read_text())["collective"] == [point]


def test_a_broken_fabric_is_noted(
    gpus: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus.cuda.device_count = lambda: 4

    def broken(torch: object, ranks: int) -> None:
        raise RuntimeError("no route")

    monkeypatch.setattr(measuring, "all_reduce_points", broken)
    out = tmp_path / "mine.toml"
    assert main(["profile", "-o", str(out), "--quick"]) == 0
    assert tomllib.loads(out.read_text())["failed"] == {"all-reduce over 4 GPUs": "no route"}
    assert "no route" in capsys.readouterr().err
