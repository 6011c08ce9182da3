"""The verb ``calibrate`` on nccl-tests logs: constants found again, what logs cannot tell, sizes left out."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepcast.analyze.sweeps import MeasuredSweep
from stepcast.calibrate.collectives import CONSTANTS, fit_collectives, with_constants
from stepcast.cli.main import main
from stepcast.hardware import load_cluster
from stepcast.hardware.catalog import data_names
from stepcast.inputs.nccl_tests import read
from stepcast.inputs.source import Source
from stepcast.ir.work import CollectiveKind
from tests.shared import DATA, needs_data
from tests.sweep_logs import log_of

# Further from the description than any measured cluster is.
CHANGES = ("node.nic.efficiency=0.6", "node.nic.latency=9 us", "node.fabric.link.efficiency=0.65")


def logs(
    folder: Path, base: str, changes: tuple[str, ...], shapes: list[tuple[int, int]], noise: float = 0.02
) -> list[str]:
    paths = []
    for ranks, nodes in shapes:
        path = folder / f"{ranks}.log"
        path.write_text(log_of(load_cluster(base, changes), ranks, nodes, noise=noise))
        paths.append(str(path))
    return paths


def calibrate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["calibrate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("base", ["dgx-a100", "dgx-h100"])
def test_changed_constants_are_found_again(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = logs(tmp_path, base, CHANGES, [(8, 1), (16, 2), (64, 8)])
    found = calibrate(capsys, *paths, "--cluster", base)
    values = {key: one["value"] for key, one in found["constants"].items()}
    assert values["node.nic.efficiency"] == pytest.approx(0.6, rel=0.1)
    assert values["node.fabric.link.efficiency"] == pytest.approx(0.65, rel=0.1)
    assert found["left_out"] < 0.05 < found["before"]
    assert found["used"]


def test_the_file_builds_on_the_cluster_and_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = logs(tmp_path, "dgx-a100", CHANGES, [(8, 1), (16, 2), (32, 4)])
    written = tmp_path / "mine.toml"
    found = calibrate(capsys, *paths, "--cluster", "dgx-a100", "-o", str(written))
    described = tomllib.loads(written.read_text())
    assert described["base"] == "dgx-a100"
    cluster = load_cluster(str(written))
    for constant in CONSTANTS:
        if constant.key in found["constants"]:
            assert constant.of(cluster) == pytest.approx(found["constants"][constant.key]["value"], rel=1e-3)
            assert "stepcast calibrate" in cluster.sources[constant.key]
        else:
            assert constant.of(cluster) == constant.of(load_cluster("dgx-a100"))
    assert main(["analyze", paths[1], "--cluster", str(written), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_abs_error"] < 0.05
    assert main(["show", str(written)]) == 0


def test_a_file_builds_on_a_file_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site.toml").write_text('base = "dgx-a100"\nnodes = 8\n')
    (path,) = logs(tmp_path, "dgx-a100", CHANGES, [(16, 2)])
    (tmp_path / "out").mkdir()
    written = tmp_path / "out" / "mine.toml"
    calibrate(capsys, path, "--cluster", str(tmp_path / "site.toml"), "-o", str(written))
    assert load_cluster(str(written)).gpus == 64


def test_one_node_tells_nothing_of_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = logs(tmp_path, "dgx-h100", CHANGES, [(8, 1)])
    found = calibrate(capsys, path, "--cluster", "dgx-h100")
    for key in ("node.nic.latency", "node.nic.efficiency"):
        assert "no log crosses nodes" in found["unidentified"][key]
        assert key not in found["constants"]
        assert any(key in warning for warning in found["warnings"])
    assert found["unidentified"]["communication.exchange_share"] == "no log times an all-to-all"


def test_an_all_to_all_tells_its_share() -> None:
    described = load_cluster("dgx-h100")
    text = log_of(load_cluster("dgx-h100", ["communication.exchange_share=0.6"]), 8, kind=CollectiveKind.ALL_TO_ALL)
    ring = log_of(described, 8)
    sweeps = [read(Source("made.log", one.encode())) for one in (text, ring)]
    fitted = fit_collectives([MeasuredSweep(sweep, described) for sweep in sweeps])
    assert fitted.values["communication.exchange_share"] == pytest.approx(0.6, rel=0.05)


def test_a_log_that_fits_already_changes_nothing_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = logs(tmp_path, "dgx-a100", (), [(8, 1), (16, 2)], noise=0.0)
    found = calibrate(capsys, *paths, "--cluster", "dgx-a100")
    assert found["before"] < 1e-4
    for constant in CONSTANTS:
        if constant.key in found["constants"]:
            described = constant.of(load_cluster("dgx-a100"))
            assert found["constants"][constant.key]["value"] == pytest.approx(described, rel=0.01)


@pytest.mark.parametrize("name", data_names("clusters"))
def test_every_constant_can_be_set_where_a_cluster_has_it(name: str) -> None:
    cluster = load_cluster(name)
    for constant in CONSTANTS:
        value = constant.of(cluster)
        if value is not None:
            changed = with_constants(cluster, [constant], [value / 2])
            assert constant.of(changed) == value / 2
            assert constant.of(with_constants(changed, [constant], [value])) == value


@needs_data("nccl-tests")
@pytest.mark.parametrize("names", [("2", "8", "16", "64"), ("8",), ("16",)])
def test_sizes_left_out_of_measured_logs_come_closer(
    names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(DATA / "nccl-tests" / f"nccl_{name}.log") for name in names]
    found = calibrate(capsys, *paths, "--cluster", "dgx-a100")
    assert found["used"]
    assert found["left_out"] < 0.1
    assert found["left_out"] < found["before"] / 1.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "use --cluster"),
        (["--cluster", "a40-pcie"], "16 ranks on a node"),
        (["--cluster", "dgx-h100", "--gpu", "h100"], "--gpu has no effect"),
        (["--cluster", "dgx-h100", "--sequence", "1,2"], "--sequence has no effect"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.log"
    path.write_text(log_of(load_cluster("gb200-nvl72"), 16))
    assert main(["calibrate", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
