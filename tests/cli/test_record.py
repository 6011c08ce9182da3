"""``stepcast record`` says before a job starts what it lacks."""

import importlib.util
import sys
from pathlib import Path

import pytest

from stepcast.cli.main import main

without_pytorch = pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="needs no PyTorch")


@without_pytorch
@pytest.mark.parametrize("launched", [False, True], ids=["python", "a script of python's"])
def test_a_python_without_pytorch_is_refused_before_the_job_starts(
    launched: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, launcher = tmp_path / "ran", tmp_path / "launch"
    job = f"open({str(ran)!r}, 'w')"
    launcher.write_text(f"#!{sys.executable}\n{job}\n")
    launcher.chmod(0o755)
    words = [str(launcher)] if launched else [sys.executable, "-c", job]
    assert main(["record", "-o", str(tmp_path / "run"), "--", *words]) == 2
    assert "record needs PyTorch in the Python that runs the job" in capsys.readouterr().err
    assert not ran.exists()


def test_a_program_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "-o", str(tmp_path / "run"), "--", "no-such-launcher", "train.py"]) == 2
    assert "no-such-launcher: no such program" in capsys.readouterr().err


def test_a_job_that_records_nothing_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "-o", str(tmp_path / "run"), "--", "true"]) == 1
    assert "nothing was recorded" in capsys.readouterr().err
