"""A command that is killed leaves no process behind, and nobody waits for what its workers would have printed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shared import ROOT

SEARCH = ("search", "--model", "llama-3.1-405b", "--cluster", "dgx-h100", "--gpus", "1024", "--global-batch", "1024")
SWEEP = '[fixed]\ncluster = "dgx-h100"\nglobal-batch = 1024\ngpus = 1024\n[[axis]]\nmodel = ["llama-3.1-405b", "gpt3-175b"]\n'
WAIT_S = 30.0


def children(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.subprocess
@pytest.mark.parametrize("verb", ["search", "sweep"])
def test_workers_end_when_their_parent_is_killed(verb: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('ask = "search"\n' + SWEEP)
    words = {"search": (*SEARCH, "--workers", "2"), "sweep": ("sweep", "s.toml", "-o", "answers", "--workers", "2")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "stepcast", *words[verb]]
    killed = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until, workers = time.monotonic() + WAIT_S, list[int]()
    while len(workers) < 2 and time.monotonic() < until and killed.poll() is None:
        workers = children(killed.pid)
        time.sleep(0.02)
    assert len(workers) >= 2, "no worker was started"
    time.sleep(0.5)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=WAIT_S)  # ends when no process holds the pipes any more
    until = time.monotonic() + WAIT_S
    while any(map(is_alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
