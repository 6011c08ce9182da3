"""What collectives put on links: the known volumes of their algorithms, and never more than their price allows."""

import numpy as np
import pytest

from stepcast.cost.collectives.choose import Algorithm, price
from stepcast.cost.collectives.flows import (
    Groups,
    collective_flows,
    collective_traffic,
    double_tree,
    members_of,
    transfer_flows,
)
from stepcast.cost.pricing import Pricer
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import data_names
from stepcast.hardware.cluster import NetworkKind
from stepcast.hardware.graph import Network, network_of, seats_of
from stepcast.ir.flows import FlowSet
from stepcast.ir.layout import Group, Layout
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer

SIZE = 10**9
KIND = CollectiveKind
LONG = 1e6  # a price that holds nothing back


def groups_of(ranks: int, per_node: int, count: int = 1, mesh: bool = False) -> Groups:
    """*count* groups of *ranks*, *per_node* of each on nodes of 8."""
    rank = np.arange(ranks)
    gpu = rank // per_node * 8 + rank % per_node
    far = -(-ranks // per_node) * 8
    return Groups(gpu[None, :] + far * np.arange(count)[:, None], 8, mesh)


def between_nodes(kind: KIND, algorithm: Algorithm, groups: Groups, **how: float) -> np.ndarray:
    """Bytes that leave each node."""
    found = collective_traffic(kind, algorithm, SIZE, groups, **how)  # type: ignore[arg-type]
    out = found.messages.source // 8 != found.messages.target // 8
    total = np.bincount(found.messages.source[out] // 8, found.messages.size_bytes[out])
    sums = np.bincount(found.reduced.gpu // 8, found.reduced.sent_bytes)
    return total if len(total) else sums


@pytest.mark.parametrize(("ranks", "per_node"), [(16, 8), (32, 8), (8, 1), (24, 4), (6, 2)])
@pytest.mark.parametrize(("kind", "rounds"), [(KIND.ALL_REDUCE, 2), (KIND.ALL_GATHER, 1), (KIND.REDUCE_SCATTER, 1)])
def test_a_ring_passes_each_node_once_a_round(kind: KIND, rounds: int, ranks: int, per_node: int) -> None:
    left = between_nodes(kind, Algorithm.RING, groups_of(ranks, per_node))
    assert left == pytest.approx(np.full(ranks // per_node, rounds * (ranks - 1) / ranks * SIZE))


@pytest.mark.parametrize(("kind", "rounds"), [(KIND.ALL_REDUCE, 2), (KIND.ALL_GATHER, 1)])
def test_rings_in_and_between_nodes_share_the_buffer(kind: KIND, rounds: int) -> None:
    """Three nodes of 4 ranks send 3/4 of the buffer inside a node, then 2/3 of it between nodes."""
    groups = groups_of(12, 4)
    found = collective_traffic(kind, Algorithm.HIERARCHICAL, SIZE, groups).messages
    away = found.source // 8 != found.target // 8
    assert found.size_bytes[away].sum() == pytest.approx(3 * rounds * 2 / 3 * SIZE)
    assert np.bincount(found.source[~away], found.size_bytes[~away])[:4] == pytest.approx(rounds * 3 / 4 * SIZE)


@pytest.mark.parametrize("mesh", [False, True])
def test_a_ring_within_a_node_sends_the_least_possible(mesh: bool) -> None:
    found = collective_traffic(KIND.ALL_REDUCE, Algorithm.RING, SIZE, groups_of(8, 8, mesh=mesh)).messages
    sent = np.bincount(found.source, found.size_bytes)
    assert sent == pytest.approx(np.full(8, 2 * 7 / 8 * SIZE))
    assert np.bincount(found.target, found.size_bytes) == pytest.approx(sent)
    assert len(found.flow) == (56 if mesh else 8)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 31, 64])
def test_two_trees_move_the_buffer_along_every_edge(nodes: int) -> None:
    trees = double_tree(nodes)
    for parents in trees:
        assert (parents == -1).sum() == 1
        assert np.bincount(parents[parents >= 0], minlength=nodes).max() <= 2
        place = np.arange(nodes)
        for _ in range(nodes):
            place = np.where(parents[place] >= 0, parents[place], place)
        assert len(set(place.tolist())) == 1  # all end at the root
    inner = [set(parents[parents >= 0].tolist()) for parents in trees]
    assert len(inner[0] & inner[1]) <= 2  # who is inner in one is a leaf in the other, roots aside
    left = between_nodes(KIND.ALL_REDUCE, Algorithm.TREE, groups_of(nodes * 4, 4))
    assert left.sum() == pytest.approx(2 * (nodes - 1) * SIZE)
    assert left.max() <= 2 * SIZE * (1 + 1e-9)
    once = between_nodes(KIND.BROADCAST, Algorithm.TREE, groups_of(nodes * 4, 4))
    assert once.sum() == pytest.approx((nodes - 1) * SIZE)


def test_switches_that_add_save_half() -> None:
    inside = collective_traffic(KIND.ALL_REDUCE, Algorithm.NVLS, SIZE, groups_of(8, 8)).added
    assert inside.sent_bytes == pytest.approx(np.full(8, SIZE * (1 + 1 / 8)))
    assert inside.received_bytes == pytest.approx(inside.sent_bytes)
    scatter = collective_traffic(KIND.REDUCE_SCATTER, Algorithm.NVLS, SIZE, groups_of(8, 8)).added
    assert scatter.sent_bytes == pytest.approx(np.full(8, SIZE))
    assert scatter.received_bytes == pytest.approx(np.full(8, SIZE / 8))
    gather = collective_traffic(KIND.ALL_GATHER, Algorithm.NVLS, SIZE, groups_of(8, 8)).added
    assert gather.sent_bytes == pytest.approx(scatter.received_bytes)
    assert gather.received_bytes == pytest.approx(np.full(8, SIZE))
    assert between_nodes(KIND.ALL_REDUCE, Algorithm.IN_NETWORK, groups_of(64, 8)) == pytest.approx(np.full(8, SIZE))
    assert between_nodes(KIND.ALL_REDUCE, Algorithm.NVLS_TREE, groups_of(16, 8)) == pytest.approx(np.full(2, SIZE))
    assert between_nodes(KIND.ALL_REDUCE, Algorithm.NVLS_TREE, groups_of(64, 8)).sum() == pytest.approx(14 * SIZE)


@pytest.mark.parametrize("algorithm", [Algorithm.PAIRWISE, Algorithm.HIERARCHICAL])
def test_an_exchange_sends_what_is_meant_for_others(algorithm: Algorithm) -> None:
    left = between_nodes(KIND.ALL_TO_ALL, algorithm, groups_of(32, 8))
    assert left == pytest.approx(np.full(4, 8 * SIZE * 24 / 32))
    once = between_nodes(KIND.ALL_TO_ALL, algorithm, groups_of(32, 8), crossing=0.5)
    assert once == pytest.approx(left / 2)


@pytest.mark.parametrize("crossing", [0.25, 0.5])
def test_tokens_that_cross_once_are_handed_on_to_all_they_are_for(crossing: float) -> None:
    """Each of 32 ranks sends 7/32 of its buffer within its node, and of 24/32 that came from others 7/8 are handed on,
    however few bytes crossed the network.
    """
    groups = groups_of(32, 8)
    found = collective_traffic(KIND.ALL_TO_ALL, Algorithm.PAIRWISE, SIZE, groups, crossing=crossing).messages
    inside = found.source // 8 == found.target // 8
    assert found.size_bytes[inside].sum() == pytest.approx(32 * (7 + 24 * 7 / 8) / 32 * SIZE)


def test_flows_of_senders_and_of_groups_move_as_much() -> None:
    groups = groups_of(16, 8, count=3)
    whole = collective_traffic(KIND.ALL_TO_ALL, Algorithm.PAIRWISE, SIZE, groups).messages
    apart = collective_traffic(KIND.ALL_TO_ALL, Algorithm.PAIRWISE, SIZE, groups, by_sender=True).messages
    assert set(whole.flow.tolist()) == set(range(3))
    assert set(apart.flow.tolist()) == set(range(48))
    assert apart.size_bytes.sum() == pytest.approx(whole.size_bytes.sum()) == pytest.approx(3 * 15 * SIZE)


def test_the_root_of_a_gather_gets_all_but_its_own() -> None:
    found = collective_traffic(KIND.GATHER, Algorithm.DIRECT, SIZE, groups_of(16, 8)).messages
    assert set(found.target.tolist()) == {0}
    assert found.size_bytes.sum() == pytest.approx(15 / 16 * SIZE)
    back = collective_traffic(KIND.SCATTER, Algorithm.DIRECT, SIZE, groups_of(16, 8)).messages
    assert set(back.source.tolist()) == {0}


def test_a_broadcast_ring_is_not_closed() -> None:
    left = between_nodes(KIND.BROADCAST, Algorithm.RING, groups_of(32, 8))
    assert left == pytest.approx(np.full(3, SIZE))


def built(cluster: Cluster, layout: Layout) -> tuple[Network, np.ndarray]:
    seats = seats_of(cluster, layout)
    return network_of(cluster, -(-int(seats.max() + 1) // cluster.node.gpus)), seats


def test_siblings_are_all_groups_of_the_stage() -> None:
    layout = Layout(tp=8, pp=4, dp=16)
    assert members_of(layout, Group.DP).shape == (32, 16)
    assert members_of(layout, Group.DP, 1).tolist() == [list(range(128 + t, 256, 8)) for t in range(8)]
    network, seats = built(load_cluster("dgx-h100"), layout)
    flows = collective_flows(
        network, seats, layout, Collective(KIND.ALL_REDUCE, SIZE, Group.DP), Algorithm.RING, LONG, stage=1
    )
    assert len(flows) == 8
    assert flows.group.tolist() == list(range(8))
    names = {network.links.name(int(link)) for link in flows.link}
    assert names == {f"node {n} NIC {i} {way}" for n in range(16, 32) for i in range(8) for way in ("up", "down")}


def test_a_group_over_stages_counts_what_its_stage_sends() -> None:
    layout = Layout(tp=2, pp=4, dp=4)
    network, seats = built(load_cluster("dgx-h100"), layout)
    work = Collective(KIND.ALL_REDUCE, SIZE, Group.EMBEDDING)
    whole = collective_flows(network, seats, layout, work, Algorithm.RING, LONG)
    parts = [collective_flows(network, seats, layout, work, Algorithm.RING, LONG, stage=stage) for stage in range(4)]
    links = len(network.links)
    assert sum(part.on_links(links) for part in parts) == pytest.approx(whole.on_links(links))
    assert [len(part.link) > 0 for part in parts] == [True, False, False, True]


def test_a_transfer_is_a_flow_for_each_rank_of_the_stage() -> None:
    layout = Layout(tp=8, pp=4, dp=16)
    network, seats = built(load_cluster("dgx-h100"), layout)
    work = Transfer(Direction.SEND, SIZE, Group.PP)
    flows = transfer_flows(network, seats, layout, work, LONG, stage=1)
    assert len(flows) == 128
    assert flows.on_links(len(network.links)).sum() == pytest.approx(128 * 4 * SIZE)
    first = [network.links.name(int(link)) for link in flows.link[: flows.first[1]]]
    spines = ["rail 0 leaf 0 to spines", "spines to rail 0 leaf 1"]
    assert first == ["node 16 NIC 0 up", "node 32 NIC 0 down", *spines]


LAYOUTS = (Layout(tp=4, pp=4, dp=16, ep=8), Layout(tp=2, pp=2, cp=2, dp=8, ep=4), Layout(tp=16, pp=2, dp=4, ep=2))


def joined_by_switches(name: str) -> bool:
    cluster = load_cluster(name)
    return cluster.nodes != 1 and cluster.topology.kind is not NetworkKind.TORUS


@pytest.mark.parametrize("layout", [Layout(tp=4, pp=2, dp=8), Layout(tp=16, dp=4), Layout(tp=8, dp=8)])
@pytest.mark.parametrize("shape", ["[16,16]", "[4,4,4]", "[8,4,2]"])
def test_rings_on_a_torus_run_along_its_lines(shape: str, layout: Layout) -> None:
    """So that those of all groups of a family fit side by side, as the price takes them to."""
    sets = ["network.kind=torus", f"network.shape={shape}", "node.gpus=1", "node.nics=6", "network.leaf_nodes=1"]
    cluster = load_cluster("dgx-h100", sets)
    network, seats = built(cluster, layout)
    for group in (Group.TP, Group.DP):
        found = price(KIND.ALL_REDUCE, SIZE, Pricer(cluster, layout).route(group), Algorithm.RING)
        work = Collective(KIND.ALL_REDUCE, SIZE, group)
        flows = collective_flows(network, seats, layout, work, Algorithm.RING, found.seconds)
        load = flows.on_links(len(network.links)) / network.links.capacity_bytes_per_s
        assert load.max() <= found.seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name in data_names("clusters") if joined_by_switches(name)])
def test_what_a_price_counts_fits_the_links_in_its_time(name: str) -> None:
    """All groups of a stage at once, on networks that are not oversubscribed: nothing is ever short."""
    cluster = load_cluster(name)
    for layout in LAYOUTS:
        network, seats = built(cluster, layout)
        pricer = Pricer(cluster, layout)
        rate = network.links.capacity_bytes_per_s

        def fits(flows: FlowSet, seconds: float, network: Network = network, rate: np.ndarray = rate) -> bool:
            return bool((flows.on_links(len(network.links)) <= rate * seconds * (1 + 1e-9)).all())

        for group in (Group.TP, Group.DP, Group.EP, Group.EXPERT_DP):
            for kind in (KIND.ALL_REDUCE, KIND.ALL_GATHER, KIND.ALL_TO_ALL, KIND.BROADCAST):
                for size in (10**5, 10**9):
                    work = Collective(kind, size, group)
                    found = price(kind, size, pricer.route(group))
                    assert found.algorithm is not None
                    flows = collective_flows(network, seats, layout, work, found.algorithm, found.seconds, stage=0)
                    assert fits(flows, found.seconds), (layout, work, found)
        message = Transfer(Direction.SEND, SIZE, Group.PP)
        seconds = pricer.seconds(message)
        assert fits(transfer_flows(network, seats, layout, message, seconds, stage=0), seconds)


def test_oversubscription_bites_in_proportion() -> None:
    """32 GPUs under each of 4 leaves send to the next leaf: k : 1 takes k times as long."""
    layout, longest = Layout(tp=8, pp=4, dp=4), []
    work = Transfer(Direction.SEND, SIZE, Group.PP)
    for factor in (1, 2, 4, 8):
        cluster = load_cluster(
            "dgx-h100", ["network.kind=fat-tree", "network.leaf_nodes=4", f"network.oversubscription={factor}"]
        )
        network, seats = built(cluster, layout)
        flows = transfer_flows(network, seats, layout, work, LONG, stage=0)
        longest.append((flows.on_links(len(network.links)) / network.links.capacity_bytes_per_s).max())
    assert np.array(longest) / longest[0] == pytest.approx(np.array([1, 2, 4, 8]))


def test_a_switch_that_adds_sends_one_sum_up() -> None:
    sets = ["network.leaf_nodes=4", "network.in_network_reduction=true"]
    layout = Layout(tp=8, dp=8)
    network, seats = built(load_cluster("dgx-h100", sets), layout)
    work = Collective(KIND.ALL_REDUCE, SIZE, Group.DP)
    flows = collective_flows(network, seats, layout, work, Algorithm.IN_NETWORK, LONG)
    load = flows.on_links(len(network.links))
    assert load[network["nic up"].links_at(0, 3)[0]] == pytest.approx(SIZE)
    assert load[network["leaf up"].links_at(3, 0)[0]] == pytest.approx(SIZE)  # not that of its four nodes


def test_a_group_below_one_switch_is_added_up_there() -> None:
    sets = ["network.leaf_nodes=4", "network.in_network_reduction=true"]
    cluster, layout = load_cluster("dgx-h100", sets), Layout(tp=8, dp=4)
    network, work = network_of(cluster, 8), Collective(KIND.ALL_REDUCE, SIZE, Group.DP)
    flows = collective_flows(network, seats_of(cluster, layout), layout, work, Algorithm.IN_NETWORK, LONG)
    load, up = flows.on_links(len(network.links)), network["leaf up"]
    assert load[network["nic up"].links_at(0, 3)[0]] == pytest.approx(SIZE)
    assert not load[up.start : up.start + up.size].any()


def test_pods_send_one_sum_to_the_cores() -> None:
    tiers = ["network.leaf_nodes=2", "network.pod_nodes=4", "network.in_network_reduction=true"]
    layout = Layout(tp=8, dp=8)
    network, seats = built(load_cluster("dgx-h100", tiers), layout)
    work = Collective(KIND.ALL_REDUCE, SIZE, Group.DP)
    flows = collective_flows(network, seats, layout, work, Algorithm.IN_NETWORK, LONG)
    load = flows.on_links(len(network.links))
    for block, groups in (("leaf up", 1), ("leaf down", 1), ("core up", 8), ("core down", 8)):
        start, size = network[block].start, network[block].size
        assert load[start : start + size] == pytest.approx(np.full(size, groups * SIZE))


def test_slow_and_failed_links_are_not_in_the_price() -> None:
    layout = Layout(tp=8, dp=8)
    work = Collective(KIND.ALL_REDUCE, SIZE, Group.DP)

    def slowest(*sets: str) -> float:
        network, seats = built(load_cluster("dgx-h100", sets), layout)
        seconds = price(work.kind, SIZE, Pricer(load_cluster("dgx-h100"), layout).route(Group.DP)).seconds
        flows = collective_flows(network, seats, layout, work, Algorithm.RING, seconds)
        return float((flows.longest_s(network.links) / seconds).max())

    whole = slowest()
    assert whole <= 1
    assert slowest("network.slow=['node 3 NIC 2 up: 0.25']") == pytest.approx(4 * whole)
    two = slowest("node.nics=16", "node.nic.bandwidth=200 Gb/s")
    one = slowest("node.nics=16", "node.nic.bandwidth=200 Gb/s", "network.failed=['node 3 NIC 4 *']")
    assert one == pytest.approx(2 * two)


def test_flows_of_8192_gpus() -> None:
    cluster, layout = (load_cluster("dgx-h100", ["network.oversubscription=4"]), Layout(tp=8, pp=8, dp=128, ep=64))
    network, seats = built(cluster, layout)
    dp = collective_flows(
        network, seats, layout, Collective(KIND.ALL_REDUCE, SIZE, Group.DP), Algorithm.RING, LONG, stage=0
    )
    ep = collective_flows(
        network, seats, layout, Collective(KIND.ALL_TO_ALL, SIZE, Group.EP), Algorithm.PAIRWISE, LONG, stage=0
    )
    pp = transfer_flows(network, seats, layout, Transfer(Direction.SEND, SIZE, Group.PP), LONG, stage=0)
    assert (len(dp), len(ep), len(pp)) == (8, 16, 1024)
