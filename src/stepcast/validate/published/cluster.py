"""The cluster a published run was measured on, from the words of its row."""

import re
from functools import lru_cache

from stepcast.hardware import Cluster, load_cluster
from stepcast.validate.published.run import NotComparableError, PublishedRun

# The first that the GPU's name contains decides; GB200 before B200, H100 before A100 does not matter.
CLUSTERS: tuple[tuple[str, str], ...] = (
    ("gb300", "gb300-nvl72"),
    ("gb200", "gb200-nvl72"),
    ("b300", "dgx-b300"),
    ("b200", "dgx-b200"),
    ("h200", "hgx-h200"),
    ("h800", "h800-node"),
    ("h100", "dgx-h100"),
    ("a800", "a800-node"),
    ("a100", "dgx-a100"),
    ("a40", "a40-pcie"),
    ("v100", "dgx-2"),
    ("mi300x", "mi300x-node"),
    ("mi325x", "mi300x-node"),
    ("mi355x", "mi300x-node"),
)
# H100 with HBM2e, 96 GB at 2.4 TB/s and 500 W: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md.
HBM2E = ('gpu.memory="96 GB"', 'gpu.memory_bandwidth="2400 GB/s"')
# A NIC on RoCE or Omni-Path whose rate is stated for the whole node.
PER_NODE = re.compile(r"(\d+)\s*gbps.*node|node.*?(\d+)\s*gbps", re.IGNORECASE)
COUNTED = re.compile(r"(\d+)\s*x\s*(\d+)\s*gb", re.IGNORECASE)
PER_GPU = re.compile(r"(\d+)\s*g(?:b(?:/s|ps)?)?\b[^,]*per gpu", re.IGNORECASE)
OMNI_PATH = re.compile(r"(\d+)\s*omni-path", re.IGNORECASE)
JEAN_ZAY_LINKS = 4
# Jobs on NVL72 racks take 16 of their 18 trays, so that groups of 64 GPUs stay inside one (NVIDIA DGX Cloud
# recipes: Slurm segments of 16 nodes).
TRAYS_PER_RACK = 16
OMNI_PATH_GBIT = 100
HDR_GBIT = 200


def cluster_of(run: PublishedRun, assumptions: list[str]) -> Cluster:
    """The catalogue's cluster of that GPU with the network that the row states."""
    name, changes = cluster_words(run)
    if not run.network and run.gpus > 8:
        assumptions.append(f"the network of {name}")
    return _cluster(name, changes)


def cluster_words(run: PublishedRun) -> tuple[str, tuple[str, ...]]:
    """Name and changes, as ``load_cluster`` and the command line take them."""
    word = run.gpu.lower()
    name = next((cluster for part, cluster in CLUSTERS if part in word), None)
    if name is None:
        raise NotComparableError(f"GPU {run.gpu!r} is not known")
    changes: list[str] = []
    if name == "dgx-a100" and (run.gpu_memory_gb == 40 or "40gb" in word):
        changes.append("gpu=a100-sxm-40gb")
    if name == "mi300x-node" and word != "mi300x":
        changes.append(f"gpu={word}")
    if "hbm2e" in word:
        changes += HBM2E
    if power := re.search(r"(\d+)\s*w\b", word):
        changes.append(f'gpu.power="{power[1]} W"')
    if name.endswith("nvl72"):
        changes.append(f"network.scale_up_nodes={TRAYS_PER_RACK}")
    nics = _nics(run.network)
    if nics is not None:
        changes += [f"node.nics={nics[0]}", f'node.nic.bandwidth="{nics[1]} Gb/s"']
    if _is_omni_path(run.network):
        changes.append("node.nic.transport=omni-path")
    return name, tuple(changes)


@lru_cache(maxsize=64)
def _cluster(name: str, changes: tuple[str, ...]) -> Cluster:
    return load_cluster(name, changes)


def _nics(network: str) -> tuple[int, int] | None:
    """Training NICs of a node and Gb/s of each; None where the text does not say."""
    if found := OMNI_PATH.search(network):
        return int(found[1]), OMNI_PATH_GBIT
    if _is_omni_path(network):
        return JEAN_ZAY_LINKS, OMNI_PATH_GBIT
    if found := COUNTED.search(network):
        return int(found[1]), int(found[2])
    if found := PER_GPU.search(network):
        return 8, int(found[1])
    if found := PER_NODE.search(network):
        total = int(found[1] or found[2])
        count = max(1, total // HDR_GBIT)
        return count, total // count
    return None


def _is_omni_path(network: str) -> bool:
    return "omni-path" in network.lower() or "jean zay" in network.lower()
