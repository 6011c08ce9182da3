"""Effects that others measured on real networks, asked of the command line and the library."""

import json
from statistics import mean
from typing import Any

import pytest

import stepcast
from stepcast.cli.main import main
from stepcast.forecast.fluid import shared_collective
from stepcast.hardware import load_cluster
from stepcast.ir.layout import Group, Layout
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.units import GB

pytestmark = pytest.mark.slow

Capsys = pytest.CaptureFixture[str]


def collective(capsys: Capsys, kind: str, ranks: int, *sets: str, cluster: str = "dgx-h100") -> dict[str, Any]:
    words = ["collective", kind, "--size", "4GiB", "--ranks", str(ranks), "--cluster", cluster]
    if kind == "all-reduce":
        words += ["--algorithm", "ring"]
    assert main([*words, *(f"--set={each}" for each in sets), "--engine", "fluid", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_queue_pairs_spread_what_a_hash_piles_up(capsys: Capsys) -> None:
    """Meta (SIGCOMM 2024, RDMA over Ethernet for Distributed AI Training at Meta Scale): with more queue pairs
    and a hash over them all-reduce gained up to 40 %. Racks there hold two hosts of 8 H100.

    NCCL opens two channels for each NIC, so two queue pairs without scaling.
    """
    racks = ("network.kind=fat-tree", "network.leaf_nodes=2", "network.spines=16")
    whole = collective(capsys, "all-reduce", 128, *racks)["busbw_bytes_per_s"]

    def reached(pairs: int) -> list[float]:
        hashed = (*racks, "network.routing=ecmp", f"network.queue_pairs={pairs}")
        return [
            collective(capsys, "all-reduce", 128, *hashed, f"network.seed={seed}")["busbw_bytes_per_s"]
            for seed in range(10)
        ]

    two, four, sixteen = reached(2), reached(4), reached(16)
    assert 0.2 < mean(four) / mean(two) - 1 < 0.45
    assert max(*two, *four) <= whole
    assert mean(two) < 0.75 * whole
    assert mean(sixteen) > 0.98 * whole


@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_an_exchange_between_nodes_sees_one_nic(ranks: int, capsys: Capsys) -> None:
    """Multi-node all-to-all of nccl-tests on ConnectX-7 of 400 Gb/s: 48 to 49 GB/s leave each GPU's NIC."""
    found = collective(capsys, "all-to-all", ranks)
    leaving = found["algbw_bytes_per_s"] * (ranks - 8) / ranks
    assert 47.5 * GB < leaving < 49 * GB


# DeepEP: GPUs, nodes that a token may go to, GB/s of dispatch and combine, and what was used. Bandwidths are
# logical: they count what stays on a token's own node (docs/legacy.md of V1, README.md of V2).
DEEPEP = [
    ("h800-node", 16, 2, (43, 43), 0.12),
    ("h800-node", 32, 4, (58, 57), 0.15),
    ("h800-node", 64, 4, (51, 50), 0.12),
    ("dgx-h100", 16, 2, (90, 81), 0.2),
    ("dgx-h100", 32, 4, (61, 61), 0.1),
]
# DeepEP's kernels reach 153 GB/s over NVLink within a node of H800, what stays on the GPU included: 134 of 200.
KERNELS = {"h800-node": ["node.fabric.link.efficiency=0.669"], "dgx-h100": []}


@pytest.mark.parametrize(("cluster", "gpus", "nodes", "published", "within"), DEEPEP)
def test_tokens_that_cross_once_reach_what_deepep_does(
    cluster: str, gpus: int, nodes: int, published: tuple[float, float], within: float
) -> None:
    tokens, token_bytes, experts = 4096, 7168, 8
    met = nodes * (1 - (1 - 1 / nodes) ** experts)  # nodes that a token's experts are on
    ranks = 8 * nodes * (1 - (1 - 1 / (8 * nodes)) ** experts)
    work = Collective(CollectiveKind.ALL_TO_ALL, int(tokens * ranks * token_bytes), Group.EP)
    layout = Layout(ep=gpus, dp=gpus, expert_tp=1)
    found = shared_collective(load_cluster(cluster, KERNELS[cluster]), layout, work, crossing=met / ranks)
    busiest = max(found.busy) * found.seconds  # the links alone: kernels have their own start
    logical = tokens * met * token_bytes / busiest / GB
    for measured in published:
        assert abs(logical / measured - 1) < within


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_oversubscription_costs_its_factor_where_it_binds(factor: int, capsys: Capsys) -> None:
    """Between 2 leaves of 4 nodes an exchange sends 4/7 of what leaves a node up."""
    sets = ("network.kind=fat-tree", "network.leaf_nodes=4", f"network.oversubscription={factor}")
    found = collective(capsys, "all-to-all", 64, *sets)
    assert found["slowdown"] == pytest.approx(max(1, factor * 4 / 7), rel=0.02)
    # Rings cross between leaves once for 4 nodes: up to 4 to 1 there is enough.
    ring = collective(capsys, "all-reduce", 64, *sets)
    assert ring["slowdown"] <= max(1, factor / 4) * 1.001


def test_rails_keep_exchanges_below_the_leaves(capsys: Capsys) -> None:
    """32 nodes on switches of 32 ports down: eight rails, or eight leaves of four nodes. NVIDIA joins NICs of
    one rail to one leaf, and messages to other rails first go over NVLink (PXN, NCCL 2.12).
    """
    thin = "network.oversubscription=4"
    rails = collective(capsys, "all-to-all", 256, "network.leaf_nodes=32", thin)
    plain = collective(capsys, "all-to-all", 256, "network.kind=fat-tree", "network.leaf_nodes=4", thin)
    assert rails["slowdown"] == 1
    assert plain["slowdown"] == pytest.approx(4 * 28 / 31, rel=0.03)
    assert "leaf" in plain["links"][0]["link"]


@pytest.mark.parametrize("algorithm", ["ring", "nvls"])
def test_a_switch_less_leaves_its_share_of_nvlinks(algorithm: str, capsys: Capsys) -> None:
    """Of the four NVSwitches of an H100 host three carry all: 4/3 of the time, where links were the bound."""
    words = ["collective", "all-reduce", "--size", "4GiB", "--ranks", "8", "--cluster", "dgx-h100", "--json"]
    words += ["--engine", "fluid", "--algorithm", algorithm]
    failed = "--set=network.failed=['node 0 GPU * to NVSwitch 1', 'NVSwitch 1 to node 0 GPU *']"
    assert main(words) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*words, failed]) == 0
    less = json.loads(capsys.readouterr().out)
    busy = max(link["busy"] for link in whole["links"])
    # Latency does not grow with what links lack.
    assert less["time_s"] == pytest.approx(max(1, busy * 4 / 3) * whole["time_s"], rel=5e-3)
    assert less["slowdown"] > 1.05
    assert "NVSwitch 0" in less["links"][0]["link"]


def test_one_slow_link_slows_a_ring_and_hardly_an_adaptive_network(capsys: Capsys) -> None:
    racks = ("network.kind=fat-tree", "network.leaf_nodes=2", "network.spines=16", "network.queue_pairs=4")
    slow = "network.slow=['leaf 0 to spine 0: 0.1']"
    sprayed = collective(capsys, "all-reduce", 128, *racks, slow)
    adaptive = collective(capsys, "all-reduce", 128, *racks, slow, "network.routing=adaptive")
    assert sprayed["slowdown"] > 3
    assert adaptive["slowdown"] < 1.1
    assert sprayed["links"][0]["link"] == "leaf 0 to spine 0"


@pytest.mark.parametrize("tp", [2, 8])
def test_groups_that_share_a_nic_wait_for_its_latency_together(tp: int) -> None:
    """Four NICs for eight GPUs, 0.8 ms apart over TCP: what the fast engine says of groups that begin at once."""
    words: dict[str, Any] = {"model": "llama-2-7b", "cluster": "gcp-a3-high", "gpus": 32, "global_batch": 32}
    fast, fluid = (stepcast.predict(**words, tp=tp, engine=engine) for engine in ("fast", "fluid"))
    assert fluid.step_s == pytest.approx(fast.step_s, rel=2e-3)
