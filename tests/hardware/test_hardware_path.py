"""Which links a group crosses, on every topology."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.hardware import Cluster, group_path, load_cluster, resolve
from stepcast.hardware.catalog import data_names
from stepcast.hardware.path import neighbour_path
from stepcast.ir.layout import Layout

GB = 1e9
H100 = load_cluster("dgx-h100")
MANY = [name for name in data_names("clusters") if load_cluster(name).gpus is None]

clusters = st.sampled_from(
    [load_cluster(name) for name in MANY]
    + [
        load_cluster("dgx-h100", overrides)
        for overrides in (
            ["network.kind=fat-tree", "network.leaf_nodes=2", "network.oversubscription=3"],
            ["network.kind=rail-only", "node.nics=4"],
            ["network.kind=torus", "network.shape=[4,3,2]", "node.nics=6"],
        )
    ]
)
rank_sets = st.lists(st.integers(0, 191), min_size=1, max_size=24, unique=True)


@given(clusters, rank_sets)
def test_a_path_counts_its_ranks_and_nodes(cluster: Cluster, ranks: list[int]) -> None:
    path = resolve(cluster, ranks)
    nodes = {rank // cluster.domain_gpus for rank in ranks}
    assert path.ranks == len(ranks)
    assert path.nodes == len(nodes)
    assert path.fewest_per_node <= path.ranks / path.nodes <= path.ranks_per_node
    assert (path.inter is None) == (path.exchange_bytes_per_s is None) == (path.nodes == 1) == (path.hops == 0)
    assert (path.intra is None) == (path.ranks_per_node == 1)
    assert path == resolve(cluster, list(reversed(ranks)))


@given(clusters, rank_sets)
def test_no_group_gets_more_than_its_node_has(cluster: Cluster, ranks: list[int]) -> None:
    path = resolve(cluster, ranks)
    if path.inter is None or path.exchange_bytes_per_s is None:
        return
    assert cluster.node.nic is not None
    line_rate = cluster.node.nics * cluster.topology.scale_up_nodes * cluster.node.nic.bandwidth_bytes_per_s
    assert path.inter.bandwidth_bytes_per_s * path.ranks_per_node <= line_rate * (1 + 1e-12)
    assert path.exchange_bytes_per_s <= path.inter.bandwidth_bytes_per_s * (1 + 1e-12)
    assert path.inter.latency_s >= cluster.node.nic.latency_s


@given(rank_sets, st.integers(1, 8), st.floats(1, 8))
def test_bandwidth_is_monotone_in_nics_and_oversubscription(ranks: list[int], nics: int, ratio: float) -> None:
    topology = replace(H100.topology, leaf_nodes=2)
    few = replace(H100, node=replace(H100.node, nics=nics), topology=replace(topology, oversubscription=ratio))
    more_nics = replace(few, node=replace(H100.node, nics=nics + 1))
    less_shared = replace(few, topology=replace(topology, oversubscription=max(1.0, ratio - 0.5)))
    slow = resolve(few, ranks)
    for better in (resolve(more_nics, ranks), resolve(less_shared, ranks)):
        if slow.inter and better.inter and slow.exchange_bytes_per_s and better.exchange_bytes_per_s:
            assert better.inter.bandwidth_bytes_per_s >= slow.inter.bandwidth_bytes_per_s
            assert better.exchange_bytes_per_s >= slow.exchange_bytes_per_s


@given(rank_sets, st.integers(1, 8))
def test_fewer_active_gpus_never_slow_a_group_down(ranks: list[int], active: int) -> None:
    cluster = load_cluster("dgx-h100", ["node.nics=4"])
    alone, crowded = resolve(cluster, ranks, active), resolve(cluster, ranks)
    if alone.inter and crowded.inter:
        assert alone.inter.bandwidth_bytes_per_s >= crowded.inter.bandwidth_bytes_per_s


def test_one_gpu_per_node_uses_its_own_rail() -> None:
    path = resolve(H100, range(0, 64, 8))
    assert path.inter is not None
    assert path.inter.bandwidth_bytes_per_s == 50 * GB
    assert (path.nodes, path.ranks_per_node, path.hops) == (8, 1, 1)


def test_whole_nodes_use_all_nics() -> None:
    path = resolve(H100, range(16))
    assert path.inter is not None
    assert path.inter.bandwidth_bytes_per_s * path.fewest_per_node == 400 * GB
    assert path.intra is not None
    assert path.intra.bandwidth_bytes_per_s == 450 * GB
    assert path.in_switch_reduction


def test_a_lone_group_on_shared_nics_gets_a_whole_nic() -> None:
    half = load_cluster("dgx-h100", ["node.nics=4"])
    crowded, alone = resolve(half, (0, 8)), resolve(half, (0, 8), active_per_node=1)
    assert crowded.inter is not None
    assert alone.inter is not None
    assert crowded.inter.bandwidth_bytes_per_s == 25 * GB
    assert alone.inter.bandwidth_bytes_per_s == 50 * GB


def test_a_straddling_group_is_the_slow_one() -> None:
    """Tensor groups of 6 on nodes of 8: the first fits a node, the second does not."""
    layout = Layout(tp=6, dp=4)
    assert resolve(H100, layout.groups("tp")[0]).nodes == 1
    slow = group_path(H100, layout, "tp")
    assert (slow.nodes, slow.fewest_per_node, slow.ranks_per_node) == (2, 2, 4)


def test_a_change_of_rail_costs_a_hop_over_the_fabric() -> None:
    straight, bent = resolve(H100, (0, 8)), resolve(H100, (0, 9))
    assert straight.inter is not None
    assert bent.inter is not None
    assert bent.inter.latency_s == pytest.approx(straight.inter.latency_s + H100.node.fabric.link.latency_s)


def test_spines_are_crossed_above_a_leaf_and_oversubscription_bites() -> None:
    tree = load_cluster("generic", ["network.leaf_nodes=4", "network.oversubscription=4"])
    near, spread, full = resolve(tree, (0, 8)), resolve(tree, (0, 32)), resolve(tree, range(64))
    assert near.inter is not None
    assert spread.inter is not None
    assert full.inter is not None
    assert (near.hops, spread.hops, full.hops) == (1, 3, 3)
    assert near.inter.bandwidth_bytes_per_s == 50 * GB
    assert spread.inter.bandwidth_bytes_per_s == 12.5 * GB
    assert full.inter.bandwidth_bytes_per_s == 50 * GB  # a ring leaves a leaf of four nodes once
    assert full.exchange_bytes_per_s == pytest.approx(50 * GB / (4 * 4 / 7))


def test_an_nvl72_is_one_domain() -> None:
    rack = load_cluster("gb200-nvl72")
    path = resolve(rack, range(72))
    assert (path.nodes, path.inter, path.in_switch_reduction) == (1, None, True)
    assert resolve(rack, range(144)).nodes == 2
    assert resolve(rack, range(0, 144, 72)).ranks_per_node == 1


def test_a_torus_shares_links_between_distant_neighbours() -> None:
    torus = load_cluster("generic", ["network.kind=torus", "network.shape=[8,4]", "node.nics=8"])
    assert torus.gpus == 8 * 32
    row, column, strided = (resolve(torus, ranks) for ranks in (range(0, 64, 8), range(0, 256, 64), range(0, 64, 16)))
    every = resolve(torus, range(0, 256, 8))
    assert row.inter is not None
    assert column.inter is not None
    assert strided.inter is not None
    assert every.inter is not None
    assert row.inter.bandwidth_bytes_per_s == column.inter.bandwidth_bytes_per_s == 25 * GB
    assert strided.inter.bandwidth_bytes_per_s == 12.5 * GB
    assert (strided.hops, every.inter.bandwidth_bytes_per_s) == (2, 50 * GB)
    assert row.exchange_bytes_per_s == pytest.approx(25 * GB / (16 / 7))  # 16 links to reach 7 others on a ring of 8


def test_pairs_use_their_bridge_and_others_the_slowest_way() -> None:
    host = load_cluster("a40-pcie")
    rates = [resolve(host, ranks).intra for ranks in ((0, 1), (1, 2), (0, 1, 2, 3), (3, 4), range(8))]
    assert [link and round(link.effective_bytes_per_s / GB, 1) for link in rates] == [46.9, 22.8, 22.8, 16.5, 16.5]
    with pytest.raises(ValueError, match="rank 8 is outside a40-pcie, which has 8 GPUs"):
        resolve(host, (0, 8))


def test_a_mesh_adds_up_the_links_inside_the_group() -> None:
    host = load_cluster("mi300x-node")
    rates = [resolve(host, range(size)).intra for size in (2, 4, 8)]
    assert [link and link.bandwidth_bytes_per_s / GB for link in rates] == [64, 192, 448]


def test_pipeline_neighbours() -> None:
    assert neighbour_path(H100, Layout(tp=4, pp=2), "pp").nodes == 1
    assert neighbour_path(H100, Layout(tp=4, pp=4), "pp").nodes == 2
    with pytest.raises(ValueError, match="pp has a single rank"):
        neighbour_path(H100, Layout(tp=4), "pp")


@pytest.mark.parametrize("ranks", [(), (1, 1), (-1, 0)])
def test_bad_groups(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a group needs|is outside"):
        resolve(H100, ranks)


@given(st.sampled_from([H100, load_cluster("generic:network.leaf_nodes=3,network.oversubscription=2")]), st.data())
def test_the_slowest_group_is_found_among_all(cluster: Cluster, data: st.DataObject) -> None:
    tp, dp, pp = (data.draw(st.sampled_from([1, 2, 3, 4, 6, 12])) for _ in range(3))
    layout = Layout(tp=tp, dp=dp, pp=pp)
    family = data.draw(st.sampled_from(["tp", "dp", "pp", "world"]))
    slowest = group_path(cluster, layout, family)
    every = [resolve(cluster, ranks) for ranks in layout.groups(family)]
    assert slowest in every
    assert slowest.nodes == max(path.nodes for path in every)
    rates = [path.inter.bandwidth_bytes_per_s for path in every if path.inter and path.nodes == slowest.nodes]
    assert not rates or (slowest.inter is not None and slowest.inter.bandwidth_bytes_per_s == min(rates))
