"""Each mistake in a description is one clear line that says where."""

from pathlib import Path

import pytest

from stepcast.hardware import load_cluster, load_gpu
from stepcast.hardware.catalog import CatalogError
from stepcast.units import Dimension, parse_quantity

GOOD = """base = "dgx-h100"

[node]
nics = 4

[node.nic]
bandwidth = "400 Gb/s"
"""


def problem(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    file = tmp_path / "my.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(CatalogError) as caught:
        load_cluster(str(file), overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("nics", "nisc", "my.toml:4: node.nisc: unknown key; did you mean node.nics"),
        ('"400 Gb/s"', "400", 'my.toml:7: node.nic.bandwidth: 400 has no unit; write it like "400 Gb/s" or "50 GB/s"'),
        ('"400 Gb/s"', '"400"', "my.toml:7: node.nic.bandwidth: '400' has no unit; write it like"),
        ('"400 Gb/s"', '"400 Gq/s"', "my.toml:7: node.nic.bandwidth: '400 Gq/s' has unknown unit 'Gq/s'; write it"),
        ('"400 Gb/s"', '"fast"', "my.toml:7: node.nic.bandwidth: 'fast' is not a number with a unit; write it like"),
        ('"400 Gb/s"', "true", "my.toml:7: node.nic.bandwidth: True is not a number with a unit; write it like"),
        ('"400 Gb/s"', '"-400 Gb/s"', "my.toml:7: node.nic.bandwidth: '-400 Gb/s' must not be negative or infinite"),
        ('"400 Gb/s"', '"0 Gb/s"', "my.toml:7: node.nic.bandwidth: must be above 0, not 0.0"),
        ("nics = 4", 'nics = "4"', "my.toml:4: node.nics: '4' is not a whole number"),
        ("nics = 4", "nics = 4.5", "my.toml:4: node.nics: 4.5 is not a whole number"),
        ("nics = 4", "gpus = 0", "my.toml:4: node.gpus: must be at least 1, not 0"),
        ("dgx-h100", "dgx-h1000", "my.toml:1: unknown cluster 'dgx-h1000'; did you mean dgx-h100"),
        ("dgx-h100", "my.toml", "my.toml:1: base: cyclic include: my.toml -> my.toml"),
        ("dgx-h100", "gone.toml", "my.toml:1: gone.toml cannot be read: no such file or directory"),
        ("[node]", 'gpu = "h1oo"\n[node]', "my.toml:3: unknown gpu 'h1oo'; did you mean h100"),
        ("[node]", "[sources]\nnod = 'x'\n[node]", "my.toml:4: sources.nod: names no key of a description"),
        ("[node]", "[node", "my.toml: not valid TOML: "),
        ("[node]", "[gpu]\nmemory = 80\n[node]", 'my.toml:4: gpu.memory: 80 has no unit; write it like "80 GB"'),
        ("[node]", "[network]\nkind = 'ring'\n[node]", "my.toml:4: network.kind: 'ring' is not known; expected one of"),
        (GOOD, "nodes = 4", "my.toml: gpu: is missing; name one of the catalogue or describe it in a [gpu] table"),
        (GOOD, 'gpu = "h100"', "my.toml: node.gpus: is missing"),
        ("[node]", "[gpu.matrix]\nfp32 = '0 TFLOP/s'\n[node]", "my.toml:4: gpu.matrix.fp32: must be above 0"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert problem(tmp_path, GOOD.replace(old, new)).startswith(expected)


def test_a_sheet_without_a_peak_names_its_key(tmp_path: Path) -> None:
    gpu = {
        **dict.fromkeys(("memory", "l2", "shared_memory_per_sm"), "1 GiB"),
        "memory_bandwidth": "1 TB/s",
        "clock": "1 GHz",
        "launch_overhead": "2 us",
    }
    lines = [f"{key} = {value!r}" for key, value in {**gpu, "power": "1 W", "vendor": "A", "architecture": "b"}.items()]
    text = "\n".join(["[gpu]", "sms = 8", *lines, "[gpu.matrix]", "bf16 = '9 TFLOP/s'"])
    assert problem(tmp_path, text) == "my.toml: gpu: matrix.fp32 is missing, the peak of fp32"


def test_no_nics_are_the_nodes_of_a_base_without_its_nic(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(GOOD + "\n[network]\nleaf_nodes = 4\n", encoding="utf-8")
    assert load_cluster(str(tmp_path / "my.toml"), ["node.nics=0", "nodes=1"]).node.nic is None


def test_a_cycle_over_two_files(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('base = "my.toml"\n', encoding="utf-8")
    line = problem(tmp_path, 'base = "other.toml"\n')
    assert line == "other.toml:1: base: cyclic include: my.toml -> other.toml -> my.toml"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("node.nics", "--set: 'node.nics' is not of the form key=value, such as node.nics=4"),
        ("node.nic=4", "--set: node.nic: unknown key; did you mean node.nics"),
        ("node.nic.efficiency=1.5", "--set: node.nic.efficiency: must be at most 1, not 1.5"),
        ("network.oversubscription=0.5", "--set: network.oversubscription: must be at least 1, not 0.5"),
        ("network.shape=[4]", "--set: network.shape: shape is for a torus, and a torus needs one"),
        ("node.fabric.kind=nvlink-pairs", "my.toml: node.fabric: nvlink-pairs needs host_link"),
        ("node.nics=0", "my.toml: a cluster of several nodes needs node.nics and node.nic; nodes = 1 needs neither"),
        ("gpu=v1oo", "--set: unknown gpu 'v1oo'; did you mean v100"),
        ("nodes=none", "--set: nodes: 'none' is not a whole number"),
    ],
)
def test_a_wrong_override_is_one_line(tmp_path: Path, override: str, expected: str) -> None:
    assert problem(tmp_path, GOOD, (override,)).startswith(expected)


def test_a_file_builds_on_a_file_in_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "site.toml").write_text('base = "../gpus.toml"\nnodes = 3\n', encoding="utf-8")
    (tmp_path / "gpus.toml").write_text('base = "dgx-h100"\ngpu = "mine.toml"\n', encoding="utf-8")
    (tmp_path / "mine.toml").write_text('base = "h200"\nmemory = "100 GiB"\n', encoding="utf-8")
    cluster = load_cluster(str(tmp_path / "shared" / "site.toml"))
    assert (cluster.name, cluster.gpus, cluster.gpu.name) == ("site", 24, "mine")
    assert cluster.gpu.memory_bytes == 100 * 2**30
    assert cluster.sources["nodes"].endswith("site.toml")
    assert load_gpu(str(tmp_path / "mine.toml")).sms == 132


def test_another_gpu_drops_the_values_of_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('base = "dgx-h100"\n[gpu]\nmemory = "64 GiB"\n', encoding="utf-8")
    assert load_cluster(str(tmp_path / "base.toml")).gpu.memory_bytes == 64 * 2**30
    (tmp_path / "new.toml").write_text('base = "base.toml"\ngpu = "a40"\n', encoding="utf-8")
    assert load_cluster(str(tmp_path / "new.toml")).gpu == load_gpu("a40")
    assert load_cluster(str(tmp_path / "base.toml"), ["gpu=a40"]).gpu == load_gpu("a40")


def test_a_binary_file(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CatalogError, match="is not UTF-16-LE text"):
        load_cluster(str(tmp_path / "x.toml"))


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("400 Gb/s", Dimension.RATE, 50e9),
        ("400 Gbit/s", Dimension.RATE, 50e9),
        ("50GB/s", Dimension.RATE, 50e9),
        ("1.5 TB/s", Dimension.RATE, 1.5e12),
        ("80 GiB", Dimension.SIZE, 80 * 2**30),
        ("80 GB", Dimension.SIZE, 80e9),
        ("2 us", Dimension.TIME, 2e-6),
        ("2 µs", Dimension.TIME, 2e-6),
        ("989.4 TFLOP/s", Dimension.FLOPS, 989.4e12),
        ("1980 MHz", Dimension.FREQUENCY, 1.98e9),
        ("1.2 kW", Dimension.POWER, 1200.0),
    ],
)
def test_quantities(text: str, dimension: Dimension, value: float) -> None:
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-12)
