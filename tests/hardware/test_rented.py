"""Machines that are rented: what leaves a node, as their makers state it; and that each can be used."""

import json
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.hardware import load_cluster
from stepcast.hardware.catalog import data_names

pytestmark = pytest.mark.slow

# GPU, GPUs of a node, and Gb/s out of a node over all its NICs, as the provider's page has them.
RENTED = {
    "aws-p4d": ("a100-sxm-40gb", 8, 400),
    "aws-p4de": ("a100-sxm-80gb", 8, 400),
    "aws-p5": ("h100-sxm", 8, 3200),
    "aws-p5e": ("h200", 8, 3200),
    "aws-p5en": ("h200", 8, 3200),
    "aws-p6-b200": ("b200", 8, 3200),
    "gcp-a3-high": ("h100-sxm", 8, 800),
    "gcp-a3-mega": ("h100-sxm", 8, 1600),
    "gcp-a3-ultra": ("h200", 8, 3200),
    "gcp-a4": ("b200", 8, 3200),
    "gcp-a4x": ("gb200", 4, 1600),
    "gcp-a4x-max": ("gb300", 4, 3200),
    "azure-nd-a100-v4": ("a100-sxm-40gb", 8, 1600),
    "nd-a100-v4-healthy": ("a100-sxm-40gb", 8, 1600),
    "azure-ndm-a100-v4": ("a100-sxm-80gb", 8, 1600),
    "azure-nd-h100-v5": ("h100-sxm", 8, 3200),
    "azure-nd-h200-v5": ("h200", 8, 3200),
    "azure-nd-gb200-v6": ("gb200", 4, 1600),
    "azure-nd-gb300-v6": ("gb300", 4, 3200),
    "oci-b4-8": ("a100-sxm-40gb", 8, 1600),
    "oci-gm4-8": ("a100-sxm-80gb", 8, 1600),
    "oci-h100": ("h100-sxm", 8, 3200),
    "oci-h200": ("h200", 8, 3200),
    "oci-b200": ("b200", 8, 3200),
    "oci-b300": ("b300", 8, 6400),
    "oci-gb200": ("gb200", 4, 1600),
    "oci-gb200-v3": ("gb200", 4, 3200),
    "oci-gb300": ("gb300", 4, 3200),
    "oci-mi300x": ("mi300x", 8, 3200),
    "oci-mi355x": ("mi355x", 8, 3200),
    "coreweave-h100": ("h100-sxm", 8, 3200),
    "coreweave-gb200": ("gb200", 4, 1600),
    "lambda-h100": ("h100-sxm", 8, 3200),
    "lambda-b200": ("b200", 8, 3200),
    "gcp-tpu-7x": ("tpu-7x", 1, 4800),
    "gcp-tpu-v5p": ("tpu-v5p", 1, 4800),
    "gcp-tpu-v6e": ("tpu-v6e", 1, 3200),
    "aws-trn2": ("trainium2", 1, 4096),
    "mi325x-node": ("mi325x", 8, 3200),
    "mi355x-node": ("mi355x", 8, 3200),
}
PROVIDERS = ("aws-", "gcp-", "azure-", "oci-", "coreweave-", "lambda-")


@pytest.mark.parametrize("name", RENTED)
def test_what_leaves_a_node(name: str) -> None:
    cluster = load_cluster(name)
    nic = cluster.node.nic
    assert nic is not None
    rate = cluster.node.nics * nic.bandwidth_bytes_per_s * 8 / 1e9
    assert (cluster.gpu.name, cluster.node.gpus, round(rate)) == RENTED[name]
    assert cluster.topology.scale_up_nodes == (18 if cluster.node.gpus == 4 else 1)


def test_the_table_has_every_provider_s_machines() -> None:
    assert {name for name in data_names("clusters") if name.startswith(PROVIDERS)} <= set(RENTED)


@pytest.mark.parametrize("name", [name for name in RENTED if name.startswith(PROVIDERS)])
def test_what_leaves_a_node_names_an_address(name: str) -> None:
    if name != "azure-nd-a100-v4":  # measured, and described by what was
        sources = load_cluster(name).sources
        keys = ("node.nics", "node.nic.bandwidth", "network.in_network_reduction")
        assert any("https://" in sources.get(key, "") for key in keys)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("p5.48xlarge", "aws-p5"),
        ("a3-megagpu-8g", "gcp-a3-mega"),
        ("ND96isr_H100_v5", "azure-nd-h100-v5"),
        ("BM.GPU.H100.8", "oci-h100"),
        ("nd-a100-v4", "azure-nd-a100-v4"),
    ],
)
def test_names_as_providers_write_them(spelling: str, name: str) -> None:
    assert load_cluster(spelling).name == name


def test_the_fitted_machine_and_a_healthy_one_are_two() -> None:
    fitted, healthy = load_cluster("azure-nd-a100-v4"), load_cluster("nd-a100-v4-healthy")
    assert fitted.node.nic is not None
    assert healthy.node.nic is not None
    assert fitted.node.nic.bandwidth_bytes_per_s == healthy.node.nic.bandwidth_bytes_per_s
    assert fitted.node.nic.efficiency < 0.7 < 0.9 < healthy.node.nic.efficiency


@pytest.mark.parametrize("name", data_names("clusters"))
def test_every_cluster_predicts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = load_cluster(name)
    gpus = cluster.gpus or max(4, 2 * cluster.domain_gpus)
    words = ["--model", "llama-3.1-8b", "--cluster", name, "--gpus", str(gpus), "--tp", "4"]
    assert main(["predict", *words, "--seq", "1024", "--global-batch", str(gpus), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["step_s"] < 60


@pytest.mark.parametrize(
    ("name", "gib"), [("aws-p5", 2048), ("azure-nd-h200-v5", 1850), ("azure-nd-gb200-v6", 900), ("aws-p5e", 2048)]
)
def test_hosts_have_the_memory_that_their_page_states(name: str, gib: int) -> None:
    host = load_cluster(name).node.host
    assert host is not None
    assert host.memory_bytes == gib * 2**30


@pytest.mark.parametrize("name", data_names("clusters"))
def test_every_cluster_is_shown_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["name"]) == ("cluster", name)
    assert main(["show", name]) == 0
    assert name in capsys.readouterr().out


def test_constants_that_a_transport_gives_name_their_source() -> None:
    """A file that states them itself is believed; a NIC named by its transport alone has the transport's."""
    rented, own = load_cluster("aws-p4d"), load_cluster("dgx-h100")
    assert rented.node.transport == "efa"
    assert own.sources["node.nic.efficiency"].startswith("SimAI")
    for key in ("node.nic.latency", "node.nic.efficiency"):
        assert "aws-ofi-nccl" in rented.sources[key]


def test_a_file_is_shown_before_a_cluster_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "aws-p5").write_text("no cluster at all\n")
    assert main(["show", "aws-p5"]) == 2
    assert "aws-p5:" in capsys.readouterr().err
    assert main(["show", "aws-p6"]) == 2
    assert "aws-p6: cannot be read" in capsys.readouterr().err
