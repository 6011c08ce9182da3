"""Groups of one shape are looked at once, wherever racks hold other numbers of ranks: the same slowest path."""

from dataclasses import replace

import pytest

from stepcast.hardware import load_cluster
from stepcast.hardware.cluster import Cluster
from stepcast.hardware.path import GroupPath, Place, group_path, neighbour_path, place_ranks, resolve
from stepcast.ir.layout import Copies, Layout

pytestmark = pytest.mark.slow


def slowness(path: GroupPath) -> tuple[object, ...]:
    inter = path.inter.effective_bytes_per_s if path.inter else float("inf")
    return path.nodes, -inter, path.hops, -path.fewest_per_node


def slowest(cluster: Cluster, layout: Layout, groups: list[Copies], place: Place) -> tuple[object, ...]:
    """Of every group, one by one."""
    whole = (layout.tp, layout.expert_tp_size * layout.ep, layout.tp * layout.cp)
    placement = place_ranks(place, cluster, layout.gpus, whole)
    each = [tuple(first + offset for offset in offsets) for firsts, offsets in groups for first in firsts]
    return max(slowness(resolve(cluster, ranks, placement=placement)) for ranks in each)


@pytest.mark.parametrize(("leaf_racks", "oversubscription"), [(None, 1.0), (1, 2.0), (2, 4.0), (3, 2.0)])
@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4, pp=5, dp=7),  # 140 ranks: 72 and 68
        Layout(tp=8, cp=2, pp=3, dp=5),  # 240: four racks of 64 and less
        Layout(tp=2, pp=8, dp=20),  # 320
        Layout(tp=4, cp=3, pp=2, dp=12),
        Layout(tp=1, pp=3, dp=100),
    ],
    ids=str,
)
def test_the_slowest_group_is_that_of_all(
    layout: Layout, place: Place, leaf_racks: int | None, oversubscription: float
) -> None:
    cluster = load_cluster("gb200-nvl72")
    topology = cluster.topology
    leaf = None if leaf_racks is None else leaf_racks * topology.scale_up_nodes
    cluster = replace(cluster, topology=replace(topology, leaf_nodes=leaf, oversubscription=oversubscription))
    for family in ("tp", "cp", "dp", "pp", "embedding"):
        found = group_path(cluster, layout, family, place)
        assert slowness(found) == slowest(cluster, layout, layout.group_copies(family), place)
    found = neighbour_path(cluster, layout, "pp", place)
    assert slowness(found) == slowest(cluster, layout, layout.neighbours("pp"), place)


@pytest.mark.parametrize("kind", ["rail-optimised", "fat-tree", "dragonfly"])
@pytest.mark.parametrize(
    "layout", [Layout(tp=4, pp=4, dp=12), Layout(tp=2, cp=3, pp=2, dp=16), Layout(tp=8, pp=3, dp=8)], ids=str
)
def test_the_slowest_group_is_that_of_all_with_pods(layout: Layout, kind: str) -> None:
    pods = ["network.leaf_nodes=2", "network.pod_nodes=6", "network.pod_oversubscription=3", "nodes=36"]
    cluster = load_cluster("dgx-h100", [f"network.kind={kind}", *pods, "network.oversubscription=2"])
    for family in ("tp", "cp", "dp", "pp", "embedding"):
        found = group_path(cluster, layout, family)
        assert slowness(found) == slowest(cluster, layout, layout.group_copies(family), Place.EVEN)


def test_a_large_job_on_uneven_racks_is_resolved_shape_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0

    def counted(*args: object, **more: object) -> GroupPath:
        nonlocal looked_at
        looked_at += 1
        return resolve(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("stepcast.hardware.path.resolve", counted)
    layout = Layout(tp=8, pp=16, dp=1000)
    neighbour_path(load_cluster("gb200-nvl72"), layout, "pp")
    assert looked_at < 2000  # of 120,000 pairs
