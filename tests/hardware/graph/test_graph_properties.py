"""Any network that can be described: every message leaves once, arrives once, and takes links that exist."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.hardware import load_cluster
from stepcast.hardware.graph import network_of, routes
from stepcast.hardware.graph.routes import RouteError

NODES = 24


@st.composite
def networks(draw: st.DrawFn) -> list[str]:
    kind = draw(st.sampled_from(["rail-optimised", "fat-tree", "rail-only", "dragonfly", "torus"]))
    sets = [
        f"network.kind={kind}",
        f"node.nics={draw(st.sampled_from([1, 3, 4, 8, 12, 16]))}",
        f"node.fabric.kind={draw(st.sampled_from(['nvswitch', 'nvlink-mesh', 'pcie']))}",
        "node.fabric.in_switch_reduction=false",
        f"network.routing={draw(st.sampled_from(['spray', 'ecmp', 'adaptive']))}",
        f"network.queue_pairs={draw(st.integers(1, 3))}",
        f"network.seed={draw(st.integers(0, 99))}",
    ]
    if kind == "torus":
        return [*sets, f"network.shape={draw(st.sampled_from(['[24]', '[6,4]', '[4,3,2]']))}"]
    leaf = draw(st.sampled_from([1, 2, 3, 4]))
    sets += ["nodes=24"] if kind == "dragonfly" else []
    sets += [f"network.leaf_nodes={leaf}", f"network.oversubscription={draw(st.sampled_from([1, 2.5, 8]))}"]
    if draw(st.booleans()):
        sets += [f"network.pod_nodes={leaf * draw(st.integers(1, 4))}", "network.pod_oversubscription=2"]
    if draw(st.booleans()) and kind != "dragonfly":
        sets += [f"network.spines={draw(st.integers(1, 5))}", f"network.cores={draw(st.integers(1, 3))}"]
    return sets


@settings(max_examples=60, deadline=None)
@given(networks(), st.integers(0, 10**6), st.booleans())
def test_messages_leave_once_and_arrive_once(sets: list[str], seed: int, faults: bool) -> None:
    network = network_of(load_cluster("dgx-h100", sets), NODES)
    random = np.random.default_rng(seed)
    if faults:
        apart = network_of(load_cluster("dgx-h100", [*sets, "network.slow=['*: 1']"]), NODES).links
        names = [apart.name(int(link)) for link in random.integers(0, len(apart), 3)]
        network = network_of(load_cluster("dgx-h100", [*sets, f"network.failed={names!r}"]), NODES)
    source, target = random.integers(0, network.gpus, (2, 40))
    try:
        ways = routes(network, source, target, np.arange(40))
    except RouteError:
        assert faults
        return
    again = routes(network, source, target, np.arange(40))
    assert all((a == b).all() for a, b in zip(ways, again, strict=True))
    assert (ways.share > 0).all()
    assert ((ways.link >= 0) & (ways.link < len(network.links))).all()
    if network.alive is not None:
        assert network.alive[ways.link].all()
    tiers = network.links.tiers
    carried = {
        tier: np.bincount(ways.row, ways.share * (network.links.tier[ways.link] == number), 40)
        for number, tier in enumerate(tiers)
    }
    apart = source // network.cluster.domain_gpus != target // network.cluster.domain_gpus
    if "NIC" in carried:
        assert np.allclose(carried["NIC"], 2.0 * apart)
    for up, down in (("leaf to spine", "spine to leaf"), ("spine to core", "core to spine")):
        if up in carried:
            assert np.allclose(carried[up], carried[down])
            assert (carried[up] <= 1 + 1e-9).all()
    if "spine to core" in carried:
        assert (carried["spine to core"] <= carried["leaf to spine"] + 1e-9).all()
