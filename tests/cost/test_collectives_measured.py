"""Predicted all-reduces against nccl-tests of 2 to 64 GPUs (Azure ND A100 v4)."""

import pytest

from stepcast.cost.collectives.sweep import sweep_route
from stepcast.hardware import load_cluster
from stepcast.inputs.table import folder_files, read
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.work import CollectiveKind
from stepcast.validate.collectives import compare_sweep, measure_nccl_tests
from stepcast.validate.scoreboard import Scoreboard, build_scoreboard
from tests.shared import DATA, needs_data

FOLDER = DATA / "nccl-tests"
CLUSTER = "azure-nd-a100-v4"


def sweep(ranks: int, nodes: int, rows: tuple[SweepRow, ...] = (), ranks_per_thread: int = 1) -> CollectiveSweep:
    return CollectiveSweep(
        CollectiveKind.ALL_REDUCE, ranks, nodes, "A100", None, rows, "made.log", (), ranks_per_thread
    )


@pytest.fixture(scope="module")
def board() -> Scoreboard:
    return build_scoreboard(measure_nccl_tests(str(FOLDER)))


@needs_data("nccl-tests")
def test_all_world_sizes_together(board: Scoreboard) -> None:
    assert board.summary is not None
    assert board.summary.rows == 104
    assert board.summary.mean_abs_error <= 0.07
    assert board.selections["1 MiB and more"].mean_abs_error <= 0.04


@needs_data("nccl-tests")
@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_each_world_size(board: Scoreboard, ranks: int) -> None:
    assert board.groups["ranks"][f"{ranks} ranks"].mean_abs_error <= 0.125


@needs_data("nccl-tests")
def test_the_logs_tell_how_ranks_were_launched() -> None:
    """One process drove all GPUs of a node, or each had its own."""
    per_thread = {log.ranks: log.ranks_per_thread for log in map(read, folder_files(str(FOLDER)))}
    assert per_thread == {2: 2, 8: 8, 16: 1, 64: 1}


def test_ranks_are_spread_as_the_log_says() -> None:
    cluster = load_cluster(CLUSTER)
    packed, spread = sweep_route(sweep(8, 1), cluster), sweep_route(sweep(8, 4), cluster)
    assert (packed.nodes, packed.ranks_per_node) == (1, 8)
    assert (spread.nodes, spread.ranks_per_node) == (4, 2)
    with pytest.raises(ValueError, match="16 ranks on a node"):
        sweep_route(sweep(16, 1), cluster)


def test_measured_is_the_mean_of_the_variants_that_ran() -> None:
    cluster = load_cluster(CLUSTER)
    rows = (SweepRow(1024, 10e-6, 20e-6), SweepRow(2048, None, 30e-6), SweepRow(4096, None, None))
    compared = [row for _, row in compare_sweep(sweep(2, 1, rows), cluster)]
    assert [row.measured_s for row in compared] == pytest.approx([15e-6, 30e-6])
    assert compared[0].error == pytest.approx(compared[0].predicted_s / 15e-6 - 1)


def test_launching_from_one_thread_takes_longer() -> None:
    cluster = load_cluster(CLUSTER)
    rows = (SweepRow(1024, 10e-6, 10e-6),)
    own, shared = (next(compare_sweep(sweep(8, 1, rows, held), cluster))[1] for held in (1, 8))
    assert shared.predicted_s > 1.7 * own.predicted_s
