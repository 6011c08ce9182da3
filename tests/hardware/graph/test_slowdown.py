"""What the fast engine takes a network to slow groups down by, against the links of the same network."""

import numpy as np
import pytest

from stepcast.hardware import load_cluster, resolve
from stepcast.hardware.graph import network_of, routes

pytestmark = pytest.mark.slow

NODES = 32
PODS = ["network.leaf_nodes=2", "network.pod_nodes=8"]
CLOS = ["network.kind=fat-tree", *PODS]
FLY = ["network.kind=dragonfly", *PODS]
NETWORKS = {
    "leaf and spine": ["network.kind=fat-tree", "network.leaf_nodes=4", "network.oversubscription=4"],
    "three tiers": [*CLOS, "network.oversubscription=2", "network.pod_oversubscription=2"],
    "rails in three tiers": [*PODS, "network.pod_oversubscription=3"],
    "dragonfly": FLY,
    "thin dragonfly": [*FLY, "network.oversubscription=2", "network.pod_oversubscription=4"],
    "dragonfly of one pod": ["network.kind=dragonfly", "network.leaf_nodes=4"],
}
GROUPS = {
    "one of all": [list(range(32))],
    "one in each pod": [list(range(8 * pod, 8 * pod + 8)) for pod in range(4)],
    "one node of each pod": [[place, place + 8, place + 16, place + 24] for place in range(8)],
    "one node of each leaf of a pod": [
        [place + pod, place + pod + 2, place + pod + 4, place + pod + 6] for pod in range(0, 32, 8) for place in (0, 1)
    ],
}


def on_links(sets: list[str], groups: list[list[int]], exchange: bool) -> float:
    """The busiest link's time over a NIC's while all groups on all rails send at once."""
    network = network_of(load_cluster("dgx-h100", [*sets, f"nodes={NODES}"]), NODES)
    load = np.zeros(len(network.links))
    for group in groups:
        nodes, n = np.array(group), len(group)
        ahead = np.arange(1, n) if exchange else np.array([1])
        near = np.repeat(nodes, len(ahead))
        far = nodes[(np.repeat(np.arange(n), len(ahead)) + np.tile(ahead, n)) % n]
        source, target = ((end[:, None] * 8 + np.arange(8)).ravel() for end in (near, far))
        ways = routes(network, source, target, np.arange(len(source)))
        load += np.bincount(ways.link, ways.share / len(ahead), len(network.links))
    busy = load / network.links.capacity_bytes_per_s
    return float(busy.max() / busy[network["nic up"].start])


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("network", NETWORKS)
def test_prices_know_what_links_do(network: str, groups: str, exchange: bool) -> None:
    cluster = load_cluster("dgx-h100", [*NETWORKS[network], f"nodes={NODES}"])
    path = resolve(cluster, [node * 8 for node in GROUPS[groups][0]])
    nic = cluster.node.nic
    assert nic is not None
    assert path.inter is not None
    assert path.exchange_bytes_per_s is not None
    rate = path.exchange_bytes_per_s if exchange else path.inter.bandwidth_bytes_per_s
    found = nic.bandwidth_bytes_per_s / rate
    assert found == pytest.approx(on_links(NETWORKS[network], GROUPS[groups], exchange), rel=0.08)


def test_a_hash_that_only_goes_straight_overloads_a_dragonfly() -> None:
    sets = [*FLY, "network.routing=ecmp", "network.queue_pairs=16"]
    group = GROUPS["one node of each pod"]
    cluster = load_cluster("dgx-h100", [*sets, f"nodes={NODES}"])
    path = resolve(cluster, [node * 8 for node in group[0]])
    assert path.inter is not None
    slowed = 50e9 / path.inter.bandwidth_bytes_per_s
    assert slowed == pytest.approx(3)  # one of the three pods around has all of it
    assert on_links(sets, group, exchange=False) == pytest.approx(slowed, rel=0.25)
    adaptive = [*FLY, "network.routing=adaptive", "network.queue_pairs=16"]
    assert on_links(adaptive, group, exchange=False) < 0.8 * slowed
