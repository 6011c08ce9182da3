"""The verb ``collective``."""

import json

import pytest

from stepcast.cli.main import main

COMMON = ["--ranks", "64", "--cluster", "dgx-h100"]


def test_json_has_what_the_contract_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "all-reduce", "--size", "1GiB", *COMMON, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["size_bytes"] == 2**30
    assert result["algbw_bytes_per_s"] == pytest.approx(2**30 / result["time_s"])
    assert result["busbw_bytes_per_s"] == pytest.approx(result["algbw_bytes_per_s"] * 126 / 64)
    assert result["algorithm"] == "nvls-tree"
    assert result["nodes"] == 8


def test_forced_algorithm_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "all-reduce", "--size", "1GiB", *COMMON, "--algorithm", "ring"]) == 0
    text = capsys.readouterr().out
    assert "ring" in text
    assert "bus bandwidth" in text


def test_sweep_runs_up_to_the_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "all-gather", "--sweep", "--size", "1MiB", *COMMON, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["size_bytes"] for row in rows] == [2**power for power in range(3, 21)]
    times = [row["time_s"] for row in rows]
    assert times == sorted(times)
    assert main(["collective", "all-gather", "--sweep", *COMMON]) == 0
    assert "16.00 GiB" in capsys.readouterr().out


def test_the_cluster_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for nics in (8, 4):
        main(["collective", "all-gather", "--size", "1GiB", *COMMON, "--json", "--set", f"node.nics={nics}"])
        times.append(json.loads(capsys.readouterr().out)["time_s"])
    assert times[1] > 1.8 * times[0]


def test_a_message_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["collective", "send-receive", "--size", "1GiB", "--cluster", "dgx-h100", "--json"]
    assert main([*line, "--ranks", "2", "--ranks-per-node", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["busbw_bytes_per_s"] == pytest.approx(48.5e9, rel=0.01)
    assert main([*line, "--ranks", "3"]) == 2
    assert "--ranks must be 2" in capsys.readouterr().err


def test_a_barrier_has_no_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """A size without effect gave it one: 42 TB/s for 1 GiB."""
    assert main(["collective", "barrier", *COMMON, "--size", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert "time" in text
    assert "bandwidth" not in text
    assert "GiB" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--size"),
        (["--size", "1GiB", "--cluster", "h100"], "clusters of any size: --cluster dgx-h100"),
        (["--size", "1GiB", "--algorithm", "pairwise"], "cannot use pairwise"),
        (["--size", "1GiB", "--ranks-per-node", "9"], "between 1 and 8"),
        (["--sweep", "--size", "4"], "at least that"),
        (["--size", "1GiB", "--set", "node.nics=x"], "node.nics"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "all-reduce", *COMMON, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("stepcast: ")
    assert error.count("\n") == 1
