"""The slowdown of computation by overlapping communication, against a stand-in measured on an H200."""

import csv
from pathlib import Path
from statistics import mean

import pytest

from stepcast.cost.collectives.route import Route, lost_share
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
