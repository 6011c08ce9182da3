"""The catalogue: what is in it, that every number names its source, and values anyone can check."""

import tomllib
from pathlib import Path

import pytest

import stepcast.hardware
from stepcast.hardware import Gpu, load_cluster, load_gpu
from stepcast.hardware.catalog import CLUSTER_KEYS, GPU_KEYS, CatalogError, data_names, known_transports

DATA = Path(stepcast.hardware.__file__).parents[1] / "data"
FILES = sorted((*DATA.glob("gpus/*.toml"), *DATA.glob("clusters/*.toml")))

# One row each: bf16 (or its replacement) and fp32 vector peak in TFLOP/s, GB/s of memory, SMs.
KNOWN = {
    "p4": (5.5, 5.5, 192, 20),
    "p100-pcie": (9.3, 9.3, 732, 56),
    "t4": (8.1, 8.1, 320, 40),
    "v100-sxm-32gb": (15.7, 15.7, 900, 80),
    "v100-pcie-32gb": (14.0, 14.0, 900, 80),
    "a100-sxm-40gb": (312, 19.5, 1555, 108),
    "a100-sxm-80gb": (312, 19.5, 2039, 108),
    "a100-pcie-40gb": (312, 19.5, 1555, 108),
    "a100-pcie-80gb": (312, 19.5, 1935, 108),
    "a800-sxm-80gb": (312, 19.5, 2039, 108),
    "a40": (149.7, 37.4, 696, 84),
    "l4": (121, 30.3, 300, 58),
    "h100-sxm": (989.4, 66.9, 3350, 132),
    "h100-pcie": (756, 51.2, 2000, 114),
    "h100-nvl": (835.5, 60, 3900, 132),
    "h800-sxm": (989.4, 66.9, 3350, 132),
    "h20": (148, 44, 4000, 78),
    "h200": (989.4, 66.9, 4800, 132),
    "b200": (2250, 75, 7672, 148),
    "b300": (2250, 75, 7700, 148),
    "gb200": (2500, 80, 8000, 152),
    "gb300": (2500, 80, 8000, 152),
    "mi210": (181, 22.6, 1638, 104),
    "mi250x": (191.5, 23.9, 1638.4, 110),
    "mi300x": (1307.4, 163.4, 5325, 304),
    "mi325x": (1307.4, 163.4, 6000, 304),
    "mi355x": (2516.6, 157.3, 8000, 256),
    "a10": (125, 31.2, 600, 72),
    "a10g": (70, 35, 600, 80),
    "a30": (165, 10.3, 933, 56),
    "l40": (181.05, 90.5, 864, 142),
    "l40s": (366.5, 91.6, 864, 142),
    "rtx-3090": (71, 35.6, 936, 82),
    "rtx-4090": (165.2, 82.6, 1008, 128),
    "rtx-5090": (209.5, 104.8, 1792, 170),
    "rtx-a6000": (154.8, 38.7, 768, 84),
    "rtx-6000-ada": (364.2, 91.1, 960, 142),
    "rtx-pro-6000": (503.8, 126, 1792, 188),
    "gh200": (989.4, 66.9, 4000, 132),
    "gh200-144gb": (989.4, 66.9, 4900, 132),
    "tpu-v5p": (459, 14.3, 2765, 64),
    "tpu-v6e": (918, 7.2, 1640, 32),
    "trainium2": (667, 11.5, 2900, 64),
}
CLUSTERS = {
    *("dgx-a100", "azure-nd-a100-v4", "a800-node", "a40-pcie", "dgx-h100", "hgx-h200", "h800-node"),
    *("dgx-b200", "gb200-nvl72", "mi300x-node", "generic"),
}

# fp32 operations one multiprocessor starts per clock: cores x 2 (AMD: packed fp32 from CDNA 3 on doubles it)
FP32_PER_CLOCK = {
    **dict.fromkeys(("p100-pcie", "p100-sxm", "t4", "mi210", "mi250x"), 128),
    **{name: 128 for name in data_names("gpus") if name.startswith(("v100", "a100", "a800", "a30", "tpu", "trainium"))},
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_values(name: str) -> None:
    gpu = load_gpu(name)
    seen = (
        gpu.matrix_peak_flops("bf16") / 1e12,
        gpu.vector_flops["fp32"] / 1e12,
        gpu.memory_bandwidth_bytes_per_s / 1e9,
        gpu.sms,
    )
    assert seen == pytest.approx(KNOWN[name])


def test_the_catalogue_is_complete() -> None:
    assert set(KNOWN) <= set(data_names("gpus"))
    assert set(data_names("clusters")) >= CLUSTERS


@pytest.mark.parametrize("name", data_names("gpus"))
def test_peaks_agree_with_cores_and_clock(name: str) -> None:
    """Catches a sparse figure, a swapped column or a wrong multiprocessor count."""
    gpu = load_gpu(name)
    assert gpu.vector_flops["fp32"] == pytest.approx(
        gpu.sms * gpu.clock_hz * FP32_PER_CLOCK.get(name, 256), rel=0.12 if name == "h20" else 0.04
    )
    order = [gpu.matrix_flops[dtype] for dtype in ("nvfp4", "fp8", "bf16") if dtype in gpu.matrix_flops]
    assert order == sorted(order, reverse=True)
    if {"tf32", "bf16"} <= set(gpu.matrix_flops):
        assert gpu.matrix_flops["bf16"] == pytest.approx(2 * gpu.matrix_flops["tf32"], rel=0.01)
    if {"fp8", "bf16"} <= set(gpu.matrix_flops) and name != "rubin":  # announced with 4.4 times as much in fp8
        assert gpu.matrix_flops["fp8"] == pytest.approx(2 * gpu.matrix_flops["bf16"], rel=0.03)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_number_names_its_source(path: Path) -> None:
    """In the catalogue every number names a source; falling back on the file's name is for users."""
    loaded = load_gpu(path.stem) if path.parent.name == "gpus" else load_cluster(path.stem)
    keys = GPU_KEYS if isinstance(loaded, Gpu) else CLUSTER_KEYS
    assert len(loaded.sources) >= 10
    for key, source in loaded.sources.items():
        assert key in keys
        assert len(source) > 8, f"{key} has no source"
        assert not source.endswith(".toml"), f"{key} has no source"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_source_is_left_over(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    table = tomllib.loads(text)
    assert table.get("sources") or set(table) <= {"base", "aliases", "gpu", "description"}
    assert "description" in table or path.parent.name == "gpus"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100", "h100-sxm"),
        ("h100-sxm", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb"),
        ("Tesla P100-PCIE-16GB", "p100-pcie"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("A100", "a100-sxm-80gb"),
        ("NVIDIA H200", "h200"),
        ("B200-SXM", "b200"),
    ],
)
def test_names_as_drivers_and_papers_write_them(spelling: str, name: str) -> None:
    assert load_gpu(spelling).name == name


def test_formats_a_gpu_lacks_run_in_another() -> None:
    assert load_gpu("v100").runs_as("bf16") == "fp32"
    assert load_gpu("b200").runs_as("nvfp4") == "nvfp4"
    with pytest.raises(ValueError, match="p4 has no int4 matrix units; it has fp32"):
        load_gpu("p4").matrix_peak_flops("int4")


def test_memory_is_what_fits() -> None:
    assert load_gpu("a100-40gb").memory_bytes == 42_298_834_944
    assert load_gpu("mi250x").memory_bytes == 65_520 * 2**20  # of a GCD
    assert load_gpu("h200").memory_bytes == 150_109_880_320
    assert load_gpu("a40").memory_bytes == 45_416 * 2**20


def test_clusters_inherit_and_override() -> None:
    a800, a100 = load_cluster("a800-node"), load_cluster("dgx-a100")
    assert a800.node.fabric.link.bandwidth_bytes_per_s == 200e9
    assert a800.node.nic == a100.node.nic
    assert a800.sources["node.nics"] == a100.sources["node.nics"]
    assert a800.description != a100.description
    assert load_cluster("DGX-H200").name == "hgx-h200"


def test_a_name_carries_parameters() -> None:
    cluster = load_cluster("generic:gpu=mi325x,node.gpus=4,network.kind=torus,network.shape=[4,4],nodes=16")
    assert (cluster.gpu.name, cluster.node.gpus, cluster.topology.shape) == ("mi325x", 4, (4, 4))
    assert cluster.sources["node.gpus"] == "--set node.gpus"


def test_catalogue_values_hash_and_compare() -> None:
    assert load_cluster("dgx-h100") == load_cluster("hgx-h100")
    assert hash(load_cluster("dgx-h100")) == hash(load_cluster("dgx-h100"))
    assert load_cluster("dgx-h100") != load_cluster("dgx-h100", ["node.nics=4"])


def test_a_transport_brings_its_latency_and_efficiency() -> None:
    """What a description states itself wins; another transport drops what the base says of its own."""
    usual = known_transports()
    roce = load_cluster("dgx-h100", ["node.nic.transport=roce"]).node.nic
    assert roce is not None
    assert (roce.latency_s, roce.efficiency) == (usual["roce"].latency_s, usual["roce"].efficiency)
    stated = load_cluster("dgx-h100", ["node.nic.transport=tcpx", "node.nic.efficiency=0.5"]).node.nic
    assert stated is not None
    assert (stated.latency_s, stated.efficiency) == (usual["tcpx"].latency_s, 0.5)
    with pytest.raises(CatalogError, match="unknown transport 'ether', expected one of infiniband"):
        load_cluster("dgx-h100", ["node.nic.transport=ether"])


def test_every_transport_says_where_it_comes_from() -> None:
    for name, transport in known_transports().items():
        assert transport.latency_s > 0, name
        assert 0 < transport.efficiency <= 1, name
        assert len(transport.source) > 20, name
