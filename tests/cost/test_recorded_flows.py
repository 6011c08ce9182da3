"""The bytes that collectives put on the links of each tier are recorded, so that no rule of routing changes unnoticed.

They are not known to be right: ``test_flows.py`` compares with formulas. After a change that is meant,
``python -m tests.cost.test_recorded_flows`` records them again.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stepcast.cost.collectives.choose import Algorithm
from stepcast.cost.collectives.flows import collective_flows, transfer_flows
from stepcast.hardware import load_cluster
from stepcast.hardware.graph import Network, network_of, seats_of
from stepcast.ir.flows import FlowSet
from stepcast.ir.layout import Group, Layout
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[1] / "data" / "recorded_flows.jsonl"
KIND = CollectiveKind
CLUSTERS = {
    "leaves": ("dgx-h100", ["network.leaf_nodes=2", "network.in_network_reduction=true"]),
    "pods": ("dgx-h100", ["network.leaf_nodes=2", "network.pod_nodes=4", "network.in_network_reduction=true"]),
    "slow link": ("dgx-h100", ["network.slow=['node 1 NIC 2 up: 0.25']"]),
    "failed link": ("dgx-h100", ["node.nics=16", "node.nic.bandwidth=200 Gb/s", "network.failed=['node 1 NIC 4 *']"]),
    "torus": (
        "dgx-h100",
        ["network.kind=torus", "network.shape=[8,8]", "node.gpus=1", "node.nics=6", "network.leaf_nodes=1"],
    ),
    "cells": ("dgx-h100", ["network.kind=torus", "network.shape=[2,4,2]", "node.gpus=4", "node.nics=6"]),
    "mesh": ("mi300x-node", []),
    "domains": ("gb200-nvl72", []),
}
LAYOUTS = (Layout(tp=8, pp=2, dp=4), Layout(tp=2, dp=32, ep=16), Layout(tp=4, cp=4, dp=4))
EXCHANGES = (Algorithm.PAIRWISE, Algorithm.HIERARCHICAL)
SUMS = (Algorithm.RING, Algorithm.TREE, Algorithm.HIERARCHICAL)
SIZE = 10**8
# All ranks with a price that limits what ports carry, and one stage with a price that does not.
CASES = ((None, 1e-3), (0, 1e3))


def describe(network: Network, flows: FlowSet) -> list[float]:
    """Return the number of flows and, for each tier, all bytes on its links, those of the fullest link, how many links
    carry any, and the bytes weighted by the number of the link, which tells which ones do.
    """
    load = flows.on_links(len(network.links))
    found = [float(len(flows))]
    for tier in range(len(network.links.tiers)):
        here = load[network.links.tier == tier]
        weighted = here @ np.arange(1.0, len(here) + 1)
        figures = here.sum(), here.max(initial=0.0), np.count_nonzero(here), weighted
        found += [float(f"{value:.9g}") for value in figures]
    return found


def record(name: str) -> Iterator[tuple[str, list[float]]]:
    """Yield each collective of a cluster with its traffic."""
    cluster = load_cluster(*CLUSTERS[name])
    between = (Algorithm.IN_NETWORK,) if cluster.topology.in_network_reduction else ()
    for layout in LAYOUTS:
        network = network_of(cluster, -(-layout.gpus // cluster.node.gpus))
        seats = seats_of(cluster, layout)
        within = (Algorithm.NVLS, Algorithm.NVLS_TREE) if "port up" in network.blocks else ()
        works = [(KIND.ALL_REDUCE, group, SUMS + within + between) for group in (Group.TP, Group.DP)]
        works += [
            (KIND.ALL_GATHER, Group.DP, (Algorithm.RING, Algorithm.HIERARCHICAL)),
            (KIND.BROADCAST, Group.DP, SUMS[:2]),
            (KIND.REDUCE, Group.DP, SUMS[:2]),
        ]
        works += [(KIND.GATHER, Group.DP, (Algorithm.DIRECT,)), (KIND.SCATTER, Group.TP, (Algorithm.DIRECT,))]
        works += [(kind, Group.TP, within[:1]) for kind in (KIND.ALL_GATHER, KIND.REDUCE_SCATTER)]
        works += [(KIND.ALL_TO_ALL, group, EXCHANGES) for group in (Group.DP, Group.EP)]
        for kind, group, algorithms in works:
            for algorithm in algorithms:
                for stage, seconds in CASES:
                    work = Collective(kind, SIZE, group)
                    flows = collective_flows(
                        network, seats, layout, work, algorithm, seconds, stage=stage, crossing=0.7
                    )
                    label = f"{name} tp{layout.tp} ep{layout.ep} {kind} {group} {algorithm} {stage}"
                    yield label, describe(network, flows)
        if layout.pp > 1:
            work_on = Transfer(Direction.SEND, SIZE, Group.PP)
            yield f"{name} send", describe(network, transfer_flows(network, seats, layout, work_on, 1e3, stage=0))


@pytest.mark.parametrize("name", CLUSTERS)
def test_traffic_is_the_recorded_one(name: str) -> None:
    known = dict(json.loads(line) for line in FILE.read_text().splitlines() if line.startswith(f'["{name} '))
    found = dict(record(name))
    assert found.keys() == known.keys()
    for label, figures in found.items():
        assert figures == pytest.approx(known[label], rel=1e-8), label


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(entry) + "\n" for name in CLUSTERS for entry in record(name)))
