"""Logs of nccl-tests beside a cluster: what is compared, and which fault a shortfall is put down to."""

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from stepcast.analyze.sweeps import SHORT, MeasuredSweep, Range, SweepCause, find_shortfalls, load_causes
from stepcast.cli.main import main
from stepcast.hardware import load_cluster
from stepcast.inputs.nccl_tests import read
from stepcast.inputs.source import Source
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.work import CollectiveKind
from stepcast.units import US
from tests.inputs.fuzz import mutations
from tests.shared import DATA, needs_data
from tests.sweep_logs import log_of

KNOWN = {*load_causes()}
MIDDLING = tuple(2**power for power in range(10, 21))


def causes(text: str, cluster: str) -> list[str]:
    log = MeasuredSweep(read(Source("made.log", text.encode())), load_cluster(cluster))
    return [finding.cause for finding in find_shortfalls(log)]


def analyze(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["analyze", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("cluster", "ranks", "nodes"),
    [("dgx-h100", 8, 1), ("dgx-h100", 32, 4), ("dgx-a100", 16, 2), ("gb200-nvl72", 144, 2), ("mi300x-node", 8, 1)],
)
@pytest.mark.parametrize("kind", [CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL])
def test_a_healthy_log_has_no_findings(cluster: str, ranks: int, nodes: int, kind: CollectiveKind) -> None:
    assert causes(log_of(load_cluster(cluster), ranks, nodes, kind, noise=0.03), cluster) == []


@pytest.mark.parametrize(
    ("cluster", "ranks", "nodes", "changes", "cause"),
    [
        ("dgx-h100", 32, 4, ["node.nics=1"], "one-nic"),
        ("dgx-h100", 16, 2, ["node.nics=4"], "half-of-nics"),
        ("dgx-a100", 64, 8, ["node.nics=2"], "quarter-of-nics"),
        ("dgx-a100", 16, 2, ["node.nic.bandwidth=140 Gb/s"], "slow-network"),
        ("dgx-h100", 8, 1, ["node.fabric.in_switch_reduction=false"], "no-in-switch-reduction"),
        (
            "dgx-h100",
            8,
            1,
            ["node.fabric.in_switch_reduction=false", "node.fabric.kind=pcie", "node.fabric.link.bandwidth=50 GB/s"],
            "no-nvlink",
        ),
        ("dgx-a100", 8, 1, ["node.fabric.link.efficiency=0.4"], "slow-fabric"),
        ("dgx-a100", 16, 2, ["node.nic.latency=35 us", "node.nic.efficiency=0.02"], "tcp"),
        ("dgx-a100", 16, 2, ["node.nic.latency=35 us"], "slow-start"),
    ],
)
def test_a_fault_is_named(cluster: str, ranks: int, nodes: int, changes: list[str], cause: str) -> None:
    text = log_of(load_cluster(cluster, changes), ranks, nodes, noise=0.03)
    assert causes(text, cluster) == [cause]


def test_what_is_faster_than_the_description_is_told() -> None:
    text = log_of(load_cluster("dgx-a100", ["node.nic.bandwidth=400 Gb/s"]), 32, 4)
    assert causes(text, "dgx-a100") == ["beyond-description"]


def test_ranges_follow_the_prediction_and_cover_every_size() -> None:
    log = MeasuredSweep(read(Source("a", log_of(load_cluster("dgx-h100"), 8).encode())), load_cluster("dgx-h100"))
    parts = [log.parts[part] for part in Range]
    assert np.sum(parts, axis=0).tolist() == [1] * len(log.sizes_bytes)
    small, middle, large = (log.sizes_bytes[part] for part in parts)
    assert small.max() < middle.min() < middle.max() < large.min()


def test_a_disturbed_size_is_marked_and_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log_of(load_cluster("dgx-h100"), 8).splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("  1024 "))
    fields = lines[at].split()
    fields[5] = fields[9] = "900"
    path = tmp_path / "spike.log"
    path.write_text("\n".join([*lines[:at], " ".join(fields), *lines[at + 1 :]]))
    found = analyze(capsys, str(path), "--cluster", "dgx-h100")
    assert [row["size_bytes"] for row in found["rows"] if row["spike"]] == [1024]
    assert found["findings"] == []


def test_the_numbers_agree_with_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.log"
    path.write_text(log_of(load_cluster("dgx-h100", ["node.nics=1"]), 16, 2))
    found = analyze(capsys, str(path), "--cluster", "dgx-h100")
    last = found["rows"][-1]
    assert last["measured_busbw_bytes_per_s"] == pytest.approx(last["size_bytes"] / last["measured_s"] * 30 / 16)
    assert last["reached"] == pytest.approx(last["predicted_s"] / last["measured_s"])
    (finding,) = found["findings"]
    assert finding["cause"] == "one-nic"
    assert f"{SHORT[Range.LARGE]:.0%}".rstrip("%") in finding["rule"]
    # Two nodes exchange the buffer at least once over one NIC of 50 GB/s.
    assert last["size_bytes"] / last["measured_s"] < 50e9


def test_the_text_names_cause_rule_and_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.log"
    path.write_text(log_of(load_cluster("dgx-h100", ["node.nics=1"]), 16, 2))
    assert main(["analyze", str(path), "--cluster", "dgx-h100"]) == 0
    text = capsys.readouterr().out
    for word in ("one-nic", "because large sizes reach", "look at NCCL_IB_HCA"):
        assert word in text


def test_logs_of_rccl_tests_are_read_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = log_of(load_cluster("mi300x-node"), 8, device="AMD Instinct MI300X")
    version = "# Using devices\nrccl-tests: Version develop:9f5a5dd\n"
    path = tmp_path / "rccl.log"
    path.write_text(text.replace("# Using devices\n", version).replace("all_reduce_perf", "./all_reduce_perf -g 1"))
    found = analyze(capsys, str(path), "--cluster", "mi300x-node")
    assert (found["collective"], found["ranks"], found["device"]) == ("all-reduce", 8, "AMD Instinct MI300X")
    assert found["mean_abs_error"] < 1e-3


def test_a_log_that_hides_its_collective_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = log_of(load_cluster("dgx-h100"), 8, kind=CollectiveKind.ALL_GATHER)
    path = tmp_path / "hidden.log"
    path.write_text(text.replace("all_gather_perf", "").replace(" sum ", " none "))
    assert main(["analyze", str(path), "--cluster", "dgx-h100"]) == 2
    assert "does not say which collective it timed; keep the line" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "use --cluster to name the cluster of the log"),
        (["--cluster", "a40-pcie"], "holds 8"),
        (["--cluster", "dgx-h100", "--trace", "x.json"], "--trace has no effect"),
        (["--cluster", "dgx-h1000"], "did you mean"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.log"
    path.write_text(log_of(load_cluster("gb200-nvl72"), 72, device="NVIDIA GB200"))
    assert main(["analyze", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_clusters_with_the_gpu_of_the_log_are_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.log"
    path.write_text(log_of(load_cluster("dgx-h100"), 8))
    assert main(["analyze", str(path)]) == 2
    assert "clusters with h100-sxm: " in capsys.readouterr().err


@needs_data("nccl-tests")
@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_measured_logs_are_healthy_where_they_were_fitted(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "nccl-tests" / f"nccl_{ranks}.log"
    found = analyze(capsys, str(path), "--cluster", "azure-nd-a100-v4")
    assert found["findings"] == []
    assert found["mean_abs_error"] < 0.2


@needs_data("nccl-tests")
def test_a_slow_network_shows_beside_a_healthy_description(capsys: pytest.CaptureFixture[str]) -> None:
    """The same logs beside what the parts should reach: 128 of 187 GB/s, which no count of NICs explains."""
    found = analyze(capsys, str(DATA / "nccl-tests" / "nccl_16.log"), "--cluster", "dgx-a100")
    assert [one["cause"] for one in found["findings"]] == ["slow-network"]


@needs_data("collectives")
def test_sockets_are_told_from_rdma() -> None:
    """A published sweep over IP over InfiniBand, on VMs whose NICs could do RDMA."""
    with (DATA / "collectives" / "collectives.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if "TCP sockets" in row["network"]]
    timed = tuple(SweepRow(int(row["size_bytes"]), float(row["time_us"]) * US, None) for row in rows)
    sweep = CollectiveSweep(CollectiveKind.ALL_REDUCE, 16, 2, "A100-SXM4-40GB", None, timed)
    log = MeasuredSweep(sweep, load_cluster("dgx-a100"))
    assert [finding.cause for finding in find_shortfalls(log)] == ["tcp"]


@pytest.mark.parametrize("fault", load_causes().values(), ids=lambda fault: str(fault.cause))
def test_faults_say_what_to_look_at(fault: SweepCause) -> None:
    assert fault.means
    assert fault.check
    assert 1 < fault.within < 2 or not fault.field


@pytest.mark.parametrize("digits", [30, 400])
def test_a_size_that_no_memory_holds_is_one_line(
    digits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "huge.log"
    path.write_text(log_of(load_cluster("dgx-h100"), 8).replace("  1024 256 ", f"  {'9' * digits} 256 "))
    for verb in ("analyze", "calibrate"):
        assert main([verb, str(path), "--cluster", "dgx-h100"]) == 2
        error = capsys.readouterr().err
        assert "fits no memory" in error
        assert error.count("\n") == 1


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(mutations(log_of(load_cluster("dgx-h100"), 16, 2, sizes=MIDDLING).encode()))
def test_damaged_logs_give_an_answer_or_one_line(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert set(causes(data.decode("utf-8", errors="replace"), "dgx-h100")) <= KNOWN
