"""Files that tell how nodes and networks are wired, and the cluster descriptions they become."""

import json
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.hardware import Cluster, load_cluster
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import format_named, read_sources, recognise
from stepcast.inputs.topologies import expand_hostlist
from stepcast.ir.measured import Wiring
from tests.inputs.topologies import SLURM_BLOCKS, SLURM_THREE_TIERS, SLURM_TWO_TIERS, gpu_matrix, nccl_topo


def wired(text: str) -> Wiring:
    source = Source("topology", text.encode())
    found = read_sources([source], recognise(source))
    assert isinstance(found, Wiring)
    return found


def test_nccl_tells_gpus_switches_and_nics() -> None:
    found = wired(nccl_topo())
    assert (found.gpu, found.gpus, found.sockets) == ("h100-sxm", 8, 2)
    assert (found.fabric, found.fabric_links, found.fabric_bytes_per_s) == ("nvswitch", 18, 450e9)
    assert (found.nics, found.nic_bytes_per_s) == (8, 50e9)
    assert found.warnings == ()


def test_nccl_tells_meshes_bridges_and_slots() -> None:
    edges = ["".join(f'<nvlink target="0000:{other}b:00.0" count="4" tclass="0x030200"/>' for other in range(4))]
    mesh = wired(nccl_topo(4, "0x20b2", "80", edges[0]))
    assert (mesh.gpu, mesh.fabric, mesh.fabric_bytes_per_s) == ("a100-sxm-80gb", "nvlink-mesh", 100e9)
    slots = wired(nccl_topo(8, "0x26b9", "89", ""))
    assert (slots.gpu, slots.fabric) == ("l40s", "pcie")
    assert slots.fabric_bytes_per_s == pytest.approx(63.0e9, rel=0.001)


def test_a_gpu_that_lost_its_links_is_told() -> None:
    text = nccl_topo(links='<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>')
    before, _, after = text.rpartition('<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>')
    assert "GPU 7 has 0 NVLinks to the switch, others 18" in wired(before + after).warnings[0]


def test_the_matrix_tells_nvlinks_sockets_and_nics_beside_gpus() -> None:
    found = wired(gpu_matrix())
    assert (found.gpus, found.fabric, found.fabric_links, found.sockets) == (8, "nvswitch", 18, 2)
    assert found.nics == 8
    assert found.warnings == ("1 of 9 NICs are near no GPU: not counted",)
    assert wired(gpu_matrix(4, "NV4", 4)).fabric == "nvlink-mesh"
    plain = wired(gpu_matrix(8, "", 2))
    assert (plain.fabric, plain.sockets, plain.nics) == ("pcie", 2, 2)
    assert wired(gpu_matrix(2, "NV12", 1)).fabric == "nvlink-mesh"
    assert wired(gpu_matrix().replace("SYS", "NODE")).sockets == 1
    far = wired(gpu_matrix().replace("PIX", "SYS").replace("PXB", "SYS"))
    assert (far.nics, far.warnings) == (9, ())


def test_bridges_between_pairs() -> None:
    text = gpu_matrix(4, "", 1).replace("GPU0\t X \tNODE", "GPU0\t X \tNV4").replace("\t X \tNODE", "\t X \tNV4")
    found = wired(text.replace("NODE\t X ", "NV4\t X "))
    assert (found.fabric, found.fabric_links) == ("nvlink-pairs", 4)


def test_a_matrix_may_follow_other_lines() -> None:
    assert wired("\n$ nvidia-smi topo -m\n" + gpu_matrix()) == wired(gpu_matrix())


def test_slurm_tells_leaves_and_pods() -> None:
    two = wired(SLURM_TWO_TIERS)
    assert (two.nodes, two.leaf_nodes, two.pod_nodes) == (18, 6, None)
    three = wired(SLURM_THREE_TIERS)
    assert (three.nodes, three.leaf_nodes, three.pod_nodes) == (16, 4, 8)
    assert not [warning for warning in three.warnings if "leaf switches" in warning]
    uneven = wired("SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[5-7]\nSwitchName=c Switches=a,b\n")
    assert "leaf switches have 3 to 4 nodes: taken as 4" in uneven.warnings
    twice = wired("SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[4-7]\nSwitchName=c Switches=a,b\n")
    assert twice.warnings == ("1 nodes are on several switches: counted on each, as a leaf has them",)
    blocks = wired(SLURM_BLOCKS)
    assert (blocks.nodes, blocks.scale_up_nodes) == (36, 18)


def test_slurm_tells_tiers_that_are_left_out() -> None:
    leaves = "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\nSwitchName=c Switches=a,b\n"
    assert not wired(leaves).warnings
    assert not wired(leaves + "SwitchName=d Switches=c\n").warnings
    deep = wired(leaves + "SwitchName=d Switches=c\nSwitchName=e Switches=d\n")
    assert deep.warnings == ("more than three tiers of switches: those above the third are left out",)
    uneven = "SwitchName=z Nodes=n[5-6]\nSwitchName=d Switches=c,z\nSwitchName=e Switches=d\n"
    assert wired(leaves + uneven).warnings == (
        "leaf switches lie at different depths: pods are those of the lowest",
        "more than three tiers of switches: those above the third are left out",
    )


@pytest.mark.parametrize(
    ("device", "sm", "gpu", "rate"),
    [("0x20b5", "80", "a100-pcie-80gb", 25e9), ("0x2330", "90", "h100-sxm", 25e9), ("0x2901", "100", "b200", 50e9)],
)
def test_nccl_tells_the_rate_of_links(device: str, sm: str, gpu: str, rate: float) -> None:
    """All 18 links of a GPU together."""
    found = wired(nccl_topo(device=device, sm=sm))
    assert (found.gpu, found.fabric_bytes_per_s) == (gpu, 18 * rate)
    assert wired(nccl_topo(device=device, sm="86")).fabric_bytes_per_s == 18 * 14.0625e9
    assert wired(nccl_topo(device=device, sm="70")).fabric_bytes_per_s == 18 * 25e9


def test_nccl_tells_of_several_hosts() -> None:
    """Two hosts of one NVLink domain: what a node has is half of what is listed."""
    one = nccl_topo(gpus=4)
    inside = one.partition("\n")[2].rpartition("</system>")[0]
    two = wired(f'<system version="1">\n{inside}{inside.replace("0x1", "0x2")}</system>\n')
    alone = wired(one)
    assert (two.gpus, two.nics, two.sockets, two.scale_up_nodes) == (alone.gpus, alone.nics, alone.sockets, 2)


def test_names_of_hosts_are_written_out() -> None:
    assert expand_hostlist("tux[0-3,12],x") == ["tux0", "tux1", "tux2", "tux3", "tux12", "x"]
    assert expand_hostlist("r[0-1]n[08-10]") == ["r0n08", "r0n09", "r0n10", "r1n08", "r1n09", "r1n10"]
    assert expand_hostlist("n[99999998-99999999]") == ["n99999998", "n99999999"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "switch a is below itself"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,b\n", "switch b is below itself"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\n", "no switch joins a and b"),
        ("SwitchName=a Switches=c\n", "switch a names c, which no line describes"),
        ("SwitchName=a Nodes=n[1-\n", "has a bracket without its other"),
        ("SwitchName=a Nodes=n[3-1]\n", "3-1 counts down"),
        ("SwitchName=a Nodes=n[0-999999999]\n", "more than 1,000,000"),
        ("SwitchName=a\n", "no switch has nodes"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", "switch a is described twice"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", "has switches and blocks"),
        ('<system version="1"><cpu numaid="0"></cpu></system>', "holds no GPU"),
        ('<system version="1"><cpu numaid="0">', "is not XML"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><system version="1"><cpu></cpu></system>', "declares a document type"),
        (nccl_topo(links='<nvlink target="x" count="many"/>'), "count of an nvlink is 'many'"),
        (gpu_matrix().replace("NV18", "LINK", 1), "'LINK' is no way between devices"),
        (gpu_matrix().replace("\nGPU7", "\nGPX7"), "lacks the row of GPU7"),
    ],
)
def test_wrong_files_are_told_in_one_line(text: str, message: str) -> None:
    with pytest.raises(FormatError) as found:
        wired(text)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def converted(text: str, folder: Path, *more: str) -> Cluster:
    (folder / "in.txt").write_text(text)
    assert main(["convert", str(folder / "in.txt"), str(folder / "out.toml"), *more]) == 0
    return load_cluster(str(folder / "out.toml"))


def test_a_dump_becomes_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = nccl_topo(4, nics_per_gpu=2, speed=200000)
    cluster = converted(text, tmp_path)
    assert "cluster description (TOML)" in capsys.readouterr().out
    assert (cluster.gpu.name, cluster.node.gpus, cluster.node.nics) == ("h100-sxm", 4, 8)
    assert cluster.node.nic is not None
    assert cluster.node.nic.bandwidth_bytes_per_s == 25e9
    assert cluster.sources["node.nics"] == "nccl-topo"


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (nccl_topo(8, "0x20b2", "80"), [], {"kind": "nvswitch", "gpu": "a100-sxm-80gb", "rate": 450e9}),
        (nccl_topo(8, "0x26b9", "89", ""), [], {"kind": "pcie", "gpu": "l40s"}),
        (nccl_topo(8, "0xffff", "90"), ["--gpu", "h200"], {"kind": "nvswitch", "gpu": "h200"}),
        (gpu_matrix(), ["--gpu", "h100"], {"kind": "nvswitch", "gpu": "h100-sxm"}),
        (gpu_matrix(4, "NV4", 4), ["--gpu", "a100-sxm-80gb"], {"kind": "nvlink-mesh", "gpu": "a100-sxm-80gb"}),
        (gpu_matrix(8, "", 2), ["--gpu", "l40s"], {"kind": "pcie", "gpu": "l40s"}),
        (SLURM_TWO_TIERS, ["--gpu", "h100"], {"leaf": 6, "nodes": 18}),
        (SLURM_THREE_TIERS, ["--gpu", "mi300x"], {"leaf": 4, "pod": 8, "nodes": 16}),
        (SLURM_BLOCKS, ["--gpu", "gb200"], {"domain": 18, "nodes": 36}),
    ],
)
def test_every_file_becomes_a_cluster_that_loads(
    text: str, more: list[str], said: dict[str, object], tmp_path: Path
) -> None:
    cluster = converted(text, tmp_path, *more)
    found = {
        "kind": str(cluster.node.fabric.kind),
        "gpu": cluster.gpu.name,
        "rate": cluster.node.fabric.link.bandwidth_bytes_per_s,
        "leaf": cluster.topology.leaf_nodes,
        "pod": cluster.topology.pod_nodes,
        "nodes": cluster.nodes,
        "domain": cluster.topology.scale_up_nodes,
    }
    assert {key: found[key] for key in said} == said


def test_show_tells_what_is_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "any-name").write_text(nccl_topo())
    assert main(["show", "--json", str(tmp_path / "any-name")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["kind"], found["gpus"]) == ("nccl-topo", "wiring", 8)
    (tmp_path / "topology.conf").write_text(SLURM_THREE_TIERS)
    assert main(["show", str(tmp_path / "topology.conf")]) == 0
    assert "in a pod      8 nodes" in capsys.readouterr().out


def test_a_network_alone_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "topology.conf").write_text(SLURM_TWO_TIERS)
    assert main(["convert", str(tmp_path / "topology.conf"), str(tmp_path / "out.toml")]) == 2
    assert "does not say which GPUs its nodes have: add --gpu" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "topology.conf"), str(tmp_path / "out.txt")]) == 2
    assert "use --to with one of" in capsys.readouterr().err


def test_a_system_without_processors_is_no_topology() -> None:
    matches = format_named("nccl-topo").matches
    assert not matches(Source("file", b'<system version="1"><gpu/></system>'))
    assert not matches(Source("file", b'<system name="1"><cpu/></system>'))
    assert matches(Source("file", b'<system version="1"><cpu/></system>'))


def test_empty_lines_after_a_head_are_no_topology() -> None:
    assert not format_named("simai-topology").matches(Source("file", b"9 8 1 0 9 H100" + b"\n" * 65_000))
