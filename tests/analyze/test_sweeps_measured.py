"""Public tables of collectives as logs: faults that sources tell are named, others are few; fits hold."""

from collections import defaultdict

import pytest

from stepcast.analyze.sweeps import MeasuredSweep, find_shortfalls
from stepcast.calibrate.collectives import fit_collectives
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.work import CollectiveKind
from stepcast.validate.collectives import TableRow, match_hardware, read_rows, row_route
from tests.shared import DATA, needs_data

# What its source says is wrong with a table, as far as stepcast can see it: sockets; a ring where the switch
# could add; a network that its owner was asking about, or that is known to be far below its rate.
WRONG = {
    "aks-a100x16-ipoib": "tcp",
    "stas-b200-ring-x7": "no-in-switch-reduction",
    "stas-b200-ring-x8": "no-in-switch-reduction",
    "stas-h200-16g-all-reduce-ring": "no-in-switch-reduction",
    "dranet-h200x2-ag": "slow-network",
    "oci-gb300x128-a2a": "quarter-of-nics",
}


def log_of(rows: list[TableRow]) -> MeasuredSweep:
    first, cluster = rows[0], match_hardware(rows[0]).cluster
    route = row_route(first)
    timed = tuple(
        SweepRow(row.size_bytes, row.measured_s if row.out_of_place else None, row.measured_s if row.in_place else None)
        for row in rows
    )
    kind, held = CollectiveKind(first.collective), route.ranks_per_thread
    sweep = CollectiveSweep(kind, first.ranks, route.nodes, first.gpu, None, timed, first.table, (), held)
    return MeasuredSweep(sweep, cluster)


@pytest.fixture(scope="module")
def tables() -> dict[str, list[TableRow]]:
    found: dict[str, list[TableRow]] = defaultdict(list)
    for row in read_rows(str(DATA / "collectives" / "collectives.csv")):
        if row.collective in set(CollectiveKind) and row.ranks > 1 and "torch" not in row.notes:
            found[row.table].append(row)
    return found


def causes(rows: list[TableRow]) -> list[str]:
    return [finding.cause for finding in find_shortfalls(log_of(rows))]


@needs_data("collectives")
@pytest.mark.parametrize("name", WRONG)
def test_a_known_fault_is_named(name: str, tables: dict[str, list[TableRow]]) -> None:
    assert causes(tables[name]) == [WRONG[name]]


@needs_data("collectives")
def test_no_healthy_machine_is_accused(tables: dict[str, list[TableRow]]) -> None:
    healthy = {
        name: rows
        for name, rows in tables.items()
        if name not in WRONG and not any(row.problem for row in rows) and rows[0].nodes
    }
    accused = [name for name, rows in healthy.items() if causes(rows)]
    assert len(healthy) >= 50
    assert not accused


@needs_data("collectives")
@pytest.mark.parametrize(
    "name", ["superbench-a100x8-reducescatter", "gcp-a3mega-x16-ag", "oke-gb200x128", "vultr-mi355x-x8-a2a"]
)
def test_sizes_left_out_of_a_fit_come_closer(name: str, tables: dict[str, list[TableRow]]) -> None:
    fitted = fit_collectives([log_of(tables[name])])
    assert fitted.left_out < 0.95 * fitted.before
    assert fitted.left_out < 0.1
