"""Medians of a job's log."""

import numpy as np
import pytest

from stepcast.ir.layout import Layout
from stepcast.ir.measured import BatchTime, LayerTimes, RunLog

# rank, stage, step, layer, block, ops, seconds: two stages, three steps, four micro-batches.
ROWS = [
    (0, 0, 1, 0, 0, 4, 9.0),
    (1, 1, 1, 1, 1, 4, 9.0),
    (0, 0, 2, 0, 2, 4, 4.0),
    (1, 1, 2, 0, 3, 2, 1.0),
    (1, 1, 2, 1, 3, 4, 7.0),
    (0, 0, 3, 0, 4, 4, 8.0),
    (1, 1, 3, 0, 5, 2, 3.0),
    (1, 1, 3, 1, 5, 4, 5.0),
]


def columns(rows: list[tuple[int, int, int, int, int, int, float]]) -> LayerTimes:
    ints = [np.array([row[place] for row in rows], dtype=np.int32) for place in range(6)]
    rank, stage, step, layer, block, ops = ints
    return LayerTimes(("0", "head"), rank, stage, step, layer, block, ops, np.array([row[6] for row in rows]))


def log(rows: list[tuple[int, int, int, int, int, int, float]], *batches: BatchTime) -> RunLog:
    return RunLog(
        layout=Layout(pp=2),
        micro_batch=1,
        micro_batches=4,
        global_batch=4,
        parameters=0,
        layer_times=columns(rows),
        batches=batches,
        blocks=6,
    )


def test_layer_times_are_a_view_of_columns() -> None:
    times = columns(ROWS)
    assert len(times) == 8
    row = (times.rank_of[4], times.stage_of[4], times.step_of[4], times.total_s[4], times.ops_of[4])
    assert row == (1, 1, 2, 7.0, 4)
    assert times.layers[times.layer_of[4]] == "head"


def test_stage_medians_sum_a_reports_layers_and_skip_the_first_step() -> None:
    medians = log(ROWS).stage_forward()
    assert {stage: median.seconds for stage, median in medians.items()} == {0: 1.5, 1: 2.0}
    assert (medians[0].first, medians[0].last, medians[0].count) == (2, 3, 2)


def test_one_layer_may_lie_on_two_stages() -> None:
    medians = log(ROWS).layer_forward("0")
    assert {stage: median.seconds for stage, median in medians.items()} == {0: 1.5, 1: 0.5}


def test_batch_median_names_its_range() -> None:
    batches = [BatchTime(1, index, seconds, 2.0) for index, seconds in ((1, 9.0), (2, 1.0), (3, 2.0), (5, 6.0))]
    median = log(ROWS, *batches).batch_time()
    assert median is not None
    assert (median.seconds, median.first, median.last, median.count) == (2.0, 2, 5, 3)
    assert log(ROWS, batches[0]).batch_time() is None


def test_no_layer_times_give_no_medians() -> None:
    assert log([]).stage_forward() == {}
    assert log([]).steps == ()


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("inf")])
def test_impossible_times_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        columns([(0, 0, 1, 0, 0, 4, seconds)])
    with pytest.raises(ValueError, match="batch_s must be"):
        BatchTime(1, 1, seconds, 0.0)
