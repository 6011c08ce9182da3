"""A cluster as links: their names, their capacities, and that every route leads from its start to its end."""

import re

import numpy as np
import pytest

from stepcast.hardware import load_cluster
from stepcast.hardware.catalog import data_names
from stepcast.hardware.graph import Network, network_of, routes, seats_of, seats_on
from stepcast.hardware.graph.routes import sum_shares
from stepcast.ir.layout import Layout

pytestmark = pytest.mark.slow

CLOS = ["network.kind=fat-tree", "network.leaf_nodes=2"]
PODS = [*CLOS, "network.pod_nodes=4", "network.pod_oversubscription=2"]
KINDS = {
    "rails": [],
    "leaf and spine": [*CLOS, "network.oversubscription=4"],
    "rails of leaves": ["network.leaf_nodes=2", "network.oversubscription=2"],
    "three tiers": PODS,
    "rail-only": ["network.kind=rail-only"],
    "torus": ["network.kind=torus", "network.shape=[4,2,2]"],
    "dragonfly": ["network.kind=dragonfly", "network.leaf_nodes=2", "network.pod_nodes=8", "nodes=16"],
    "NVL72": ["network.scale_up_nodes=4", "network.leaf_nodes=8"],
}
ROUTINGS = ("spray", "ecmp", "adaptive")


def made(*sets: str, nodes: int = 16) -> Network:
    return network_of(load_cluster("dgx-h100", sets), nodes)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_message_leaves_once_and_arrives_once(kind: str, routing: str) -> None:
    network = made(*KINDS[kind], f"network.routing={routing}", "network.queue_pairs=3")
    random = np.random.default_rng(7)
    source, target = random.integers(0, network.gpus, (2, 500))
    ways = routes(network, source, target, np.arange(500))
    first, link, share = sum_shares(*ways, 500, len(network.links))
    tiers = network.links.tiers
    domain = network.cluster.domain_gpus
    for message in range(500):
        on = slice(first[message], first[message + 1])
        by_tier = {tier: share[on][network.links.tier[link[on]] == number].sum() for number, tier in enumerate(tiers)}
        if source[message] == target[message]:
            assert first[message] == first[message + 1]
        elif source[message] // domain == target[message] // domain:
            assert by_tier["NVLink"] == pytest.approx(2)  # its port and its peer's
        elif kind != "torus":
            assert by_tier["NIC"] == pytest.approx(2)
            assert by_tier.get("leaf to spine", 0) == pytest.approx(by_tier.get("spine to leaf", 0))
            assert by_tier.get("spine to core", 0) == pytest.approx(by_tier.get("core to spine", 0))
            assert by_tier.get("leaf to spine", 0) >= by_tier.get("spine to core", 0) - 1e-12


def chain(network: Network, source: int, target: int) -> list[str]:
    """The names of the links between two GPUs."""
    ways = routes(network, np.array([source]), np.array([target]))
    return [network.links.name(int(link)) for link in sum_shares(*ways, 1, len(network.links))[1]]


def test_links_are_called_what_people_call_them() -> None:
    assert chain(made(), 0, 9) == [
        "node 0 GPU 0 to NVSwitch",  # over the fabric to the rail of its peer
        "NVSwitch to node 0 GPU 1",
        "node 0 NIC 1 up",
        "node 1 NIC 1 down",
    ]
    named = ["network.routing=ecmp", "network.seed=1"]
    far = chain(made(*PODS, "network.spines=2", "network.cores=2", *named), 0, 127)
    assert far[:2] == ["node 0 NIC 0 up", "node 15 NIC 7 down"]
    spine = far[2].rpartition(" ")[2]
    assert far[2] == f"leaf 0 to spine {spine}"
    assert far[3] == f"spine {spine} to leaf 7"
    core = far[4].rpartition(" ")[2]
    assert far[4] == f"pod 0 spine {spine} to core {core}"
    assert far[5] == f"core {core} to pod 3 spine {spine}"
    torus = made(*KINDS["torus"])
    assert chain(torus, 0, 8) == ["cell (0, 0, 0) along +x"]
    assert chain(torus, 0, 24) == ["cell (0, 0, 0) along -x"]  # the shorter way round
    dragonfly = made(*KINDS["dragonfly"], "network.routing=ecmp")
    assert chain(dragonfly, 0, 127) == [
        "node 0 NIC 0 up",
        "node 15 NIC 7 down",
        "pod 0 switch 0 to switch 1",
        "pod 1 switch 1 to switch 3",
        "pod 0 switch 1 to pod 1",
    ]


def test_pairs_have_a_bridge_and_sockets_a_link_between_them() -> None:
    """The A40 node has four bridged pairs of GPUs, two of them at each socket."""
    node = network_of(load_cluster("a40-pcie"), 1)
    assert chain(node, 0, 1) == ["node 0 GPU 0 to GPU 1"]
    assert chain(node, 0, 2) == ["node 0 GPU 0 PCIe up", "node 0 GPU 2 PCIe down"]
    assert chain(node, 0, 4)[2:] == ["node 0 socket 0 to socket 1"]


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_a_leaf_sends_up_its_share(factor: int) -> None:
    network = made(*CLOS, f"network.oversubscription={factor}")
    nic = network.cluster.node.nic
    assert nic is not None
    up = network.links.capacity_bytes_per_s[network["leaf up"].links_at(0, 0)[0]]
    assert up == pytest.approx(2 * 8 * nic.effective_bytes_per_s / factor)


@pytest.mark.parametrize("routing", ["ecmp", "adaptive"])
def test_distinct_ways_carry_as_much_together(routing: str) -> None:
    sets = (*PODS, "network.oversubscription=2", f"network.routing={routing}")
    together, apart = made(*sets[:-1]), made(*sets)
    for block in ("leaf up", "core up"):
        rates = [
            network.links.capacity_bytes_per_s[network[block].start :][: network[block].size].sum()
            for network in (together, apart)
        ]
        assert rates[0] == pytest.approx(rates[1])
    assert apart.spines == 8
    assert apart.cores == 1


def test_nics_are_spread_evenly_over_gpus() -> None:
    for nics, slots in ((4, 1), (8, 1), (32, 4), (12, 2), (3, 2)):
        network = made(f"node.nics={nics}")
        nic, share = network.nic_slots
        assert nic.shape == (8, slots)
        assert share.sum(axis=1) == pytest.approx(np.ones(8))
        # All GPUs together use every NIC equally.
        assert np.bincount(nic.ravel(), share.ravel()) == pytest.approx(np.full(nics, 8 / nics))


def test_spraying_and_adaptive_routing_use_all_ways_and_a_hash_collides() -> None:
    sets = (*CLOS, "network.spines=16")
    source, target = np.arange(16), np.arange(16, 32)

    def fullest(routing: str) -> float:
        network = made(*sets, f"network.routing={routing}", nodes=4)
        ways = routes(network, source, target, np.arange(16))
        load = np.bincount(ways.link, ways.share, len(network.links))
        rate = network.links.capacity_bytes_per_s
        return float((load / rate).max() * rate[network["nic up"].start])

    assert fullest("spray") == pytest.approx(1) == fullest("adaptive")
    assert fullest("ecmp") >= 2


def test_the_hash_is_the_same_again_and_another_seed_gives_others() -> None:
    source, target = np.arange(64), np.arange(64, 128)
    found = [
        routes(made(*CLOS, "network.routing=ecmp", f"network.seed={seed}"), source, target).link for seed in (1, 1, 2)
    ]
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).any()


def test_the_whole_catalogue_has_a_graph() -> None:
    for name in data_names("clusters"):
        cluster = load_cluster(name)
        network = network_of(cluster, min(cluster.nodes or 4, 4))
        ways = routes(network, np.zeros(network.gpus, np.int64), np.arange(network.gpus))
        assert set(ways.row.tolist()) == set(range(1, network.gpus)), name


def test_ranks_sit_where_the_path_says() -> None:
    rack = load_cluster("gb200-nvl72")
    seats = seats_of(rack, Layout(tp=8, dp=12))
    assert len(set(seats.tolist())) == 96
    assert np.bincount(seats // 72).tolist() == [48, 48]
    dgx = load_cluster("dgx-h100")
    assert seats_of(dgx, Layout(dp=24)).tolist() == list(range(24))
    assert seats_on(dgx, [5, 2], 12).tolist() == [*range(40, 48), *range(16, 20)]
    with pytest.raises(ValueError, match="12 ranks need 2 nodes of 8 GPUs, not 1"):
        seats_on(dgx, [5], 12)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["network.failed=['leaf 0 to spine 99']"], "failed: no link is called 'leaf 0 to spine 99'"),
        (["network.slow=['node 0 NIC 0 up']"], "is not a link and the share that is left"),
        (["network.slow=['node 0 NIC 0 up: 0']"], "is not a link and the share that is left"),
        (["network.failed=['leaf 0 to spine *']"], "no route is left from leaf 0 to leaf 1"),
        (["network.failed=['node 0 NIC 0 up']"], "node 0 NIC 0 up has failed, and messages have no other route"),
        (["node.nics=16", "network.failed=['node 0 NIC [01] up']"], "all NICs of one have failed"),
    ],
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_graphs_without_a_route_are_refused_in_one_line(sets: list[str], message: str, routing: str) -> None:
    def everywhere() -> None:
        network = made(*CLOS, *sets, f"network.routing={routing}", nodes=4)
        routes(network, np.zeros(31, np.int64), np.arange(1, 32))

    with pytest.raises(ValueError, match=re.escape(message)) as found:
        everywhere()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("kind", ["torus", "dragonfly"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_messages_go_round_links_that_failed(kind: str, routing: str) -> None:
    failed = {"torus": "cell (0, 0, 0) along +x", "dragonfly": "pod 0 switch 0 to switch 1"}[kind]
    network = made(*KINDS[kind], f"network.failed=['{failed}']", f"network.routing={routing}")
    ways = routes(network, np.zeros(127, np.int64), np.arange(1, 128))
    assert failed not in {network.links.name(int(link)) for link in ways.link}
    assert set(ways.row.tolist()) == set(range(127))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_messages_go_round_spines_that_failed(routing: str) -> None:
    failed = "leaf 0 to spine 3"
    network = made(*CLOS, f"network.failed=['{failed}']", f"network.routing={routing}")
    source = np.repeat(np.arange(16), 16)
    ways = routes(network, source, np.tile(np.arange(16, 32), 16), np.arange(256))
    used = {network.links.name(int(link)) for link in ways.link}
    assert failed not in used
    assert "leaf 0 to spine 2" in used
    on_nics = ways.share[np.isin(ways.link, network["nic up"].links_at(0, np.arange(8)))]
    assert on_nics.sum() == pytest.approx(128)
