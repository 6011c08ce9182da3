"""The slowdown of computation by overlapping communication, against a stand-in measured on an H200."""

import csv
from pathlib import Path
from statistics import mean

import pytest

from stepcast.cost.collectives.route import Route, lost_share, uneven_warning
from stepcast.hardware import load_cluster
from stepcast.hardware.path import Place
from stepcast.ir.work import CollectiveKind

FILE = Path(__file__).parent.parent / "data" / "h200" / "overlap.csv"
SMS = 132
GATHER = CollectiveKind.ALL_GATHER


def measured(blocks: int) -> float:
    with FILE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "copying"]
    found = [float(row["lost_per_second"]) for row in rows if int(row["blocks"]) == blocks]
    assert len(found) == 9
    return mean(found)


@pytest.mark.parametrize("blocks", [8, 16, 24])
def test_each_channel_costs_a_multiprocessor(blocks: int) -> None:
    route = Route(8, channels=blocks)
    assert lost_share(GATHER, route, SMS) == blocks / SMS
    assert lost_share(GATHER, route, SMS) == pytest.approx(measured(blocks), abs=0.035)


def test_fewer_channels_leave_a_node_than_work_inside() -> None:
    assert lost_share(GATHER, Route(8), SMS) == 24 / SMS
    assert lost_share(GATHER, Route(64, 8), SMS) == 16 / SMS
    assert lost_share(GATHER, Route(8, 8), SMS) == 2 / SMS
    assert lost_share(GATHER, Route(1), SMS) == 0.0


def test_dispatch_of_tokens_keeps_blocks_of_its_own() -> None:
    assert lost_share(CollectiveKind.ALL_TO_ALL, Route(8), SMS) == 20 / SMS


def test_threads_of_ll_are_slower_on_two_nodes_and_on_more() -> None:
    """NCCL's llMaxBws has a limit for one node, for two and for all above."""
    limits = [Route(8 * nodes, nodes).ll_limit_bytes_per_s for nodes in (1, 2, 3, 4)]
    assert limits[0] > limits[1] > limits[2] == limits[3]


def test_a_node_with_half_the_ranks_of_another_is_warned_of() -> None:
    cluster = load_cluster("dgx-h100")
    assert uneven_warning("dp", Route(3, 2), cluster, Place.PACKED) != []
    assert uneven_warning("dp", Route(5, 2), cluster, Place.PACKED) == []
