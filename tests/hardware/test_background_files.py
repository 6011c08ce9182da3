"""Files that describe other traffic on the network."""

from pathlib import Path

import pytest

from stepcast.hardware.background import parse_nodes, read_background
from stepcast.inputs.source import FormatError
from stepcast.ir.flows import FlowSpread, OtherJob, Pattern

GOOD = """
[[flows]]
name = "checkpoints"
nodes = "2-4,7"
spread = "incast"
bytes = "2 GB"
period = "500 ms"
start = "0.1 s"

[[job]]
nodes = [8, 9]
predict = { model = "llama-2-7b", tp = 8 }
"""


def written(folder: Path, text: str) -> str:
    (folder / "job.toml").write_text(text)
    return str(folder / "job.toml")


def test_patterns_and_jobs_are_read(tmp_path: Path) -> None:
    pattern, job = read_background(written(tmp_path, GOOD))
    assert pattern == Pattern("checkpoints", (2, 3, 4, 7), FlowSpread.INCAST, 2e9, 0.5, 0.1)
    assert job == OtherJob("[[job]] 1", (8, 9), {"model": "llama-2-7b", "tp": 8})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no other job"),
        ("jobs = 1", "jobs: unknown key; expected [[flows]] and [[job]]"),
        ("flows = 1", "flows: expected tables, each headed [[flows]]"),
        ("[[flows]]\nbytes = '1 GB'\nperiod = '1 s'", "[[flows]] 1: nodes: is missing"),
        ("[[flows]]\nnodes = '0'\nbytes = '1 GB'\nperiod = '1 s'", "a pattern needs at least two"),
        ("[[flows]]\nnodes = '3-1'\nbytes = '1 GB'\nperiod = '1 s'", "3-1 counts down"),
        ("[[flows]]\nnodes = '0-x'\nbytes = '1 GB'\nperiod = '1 s'", "'0-x' is no range"),
        ("[[flows]]\nnodes = [1, 1]\nbytes = '1 GB'\nperiod = '1 s'", "one is named twice"),
        ("[[flows]]\nnodes = '0-9999999'\nbytes = '1 GB'\nperiod = '1 s'", "more than 1,000,000"),
        ("[[flows]]\nnodes = '0-1'\nbytes = '1'\nperiod = '1 s'", "has no unit"),
        ("[[flows]]\nnodes = '0-1'\nbytes = '1 GB'\nperiod = '0 s'", "period: must be above zero"),
        ("[[flows]]\nnodes = '0-1'\nbytes = '1 GB'\nperiod = '1 s'\nspread = 'x'", "spread: 'x' is not known"),
        ("[[flows]]\nnodes = '0-1'\nbytes = '1 GB'\nperiod = '1 s'\nrate = 1", "rate: unknown key"),
        ("[[job]]\nnodes = '0-1'\npredict = 'x'", "predict: 'x' is not a table"),
        ("[[job]]\nnodes = []\npredict = {}", "nodes: none is named"),
    ],
)
def test_wrong_files_are_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as found:
        read_background(written(tmp_path, text))
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_nodes_are_ranges_or_lists() -> None:
    assert parse_nodes("0-2, 8") == (0, 1, 2, 8)
    assert parse_nodes([3, 1]) == (3, 1)
