"""The figures that measurement sets are summed up in."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.validate.scoreboard import (
    MEASUREMENT_SETS,
    MeasuredColumns,
    Measurements,
    ScoredRow,
    build_scoreboard,
    columns_of,
    interval_figures,
    summarise,
)

ROWS = [
    ScoredRow("exact", 1e-3, 1e-3, {"kind": "linear"}),
    ScoredRow("slow", 2e-3, 3e-3, {"kind": "linear"}),
    ScoredRow("fast", 10e-6, 8e-6, {"kind": "add"}),
    ScoredRow("other", 4e-3, 4e-3),
]


def test_known_answers() -> None:
    board = build_scoreboard(Measurements(columns_of(ROWS), {"no time": 2}))
    assert board.summary is not None
    assert board.summary.rows == 4
    assert board.summary.mean_abs_error == pytest.approx(0.7 / 4)
    assert board.summary.mean_error == pytest.approx(0.3 / 4)
    assert board.summary.median_abs_error == pytest.approx(0.1)
    assert board.summary.worst_abs_error == pytest.approx(0.5)
    assert board.summary.time_weighted_error == pytest.approx(1.002e-3 / 7.01e-3)
    assert board.groups["kind"]["linear"].mean_abs_error == pytest.approx(0.25)
    assert set(board.groups["kind"]) == {"add", "linear"}
    assert list(board.groups["time"]) == ["under 20 us", "1 to 10 ms"]
    assert [row.name for row in board.worst] == ["slow", "fast", "exact", "other"]
    assert board.skipped == {"no time": 2}


def test_selections_are_summed_up_alone() -> None:
    table = columns_of(ROWS)
    chosen = {"long": table.measured_s > 1e-4, "none": table.measured_s > 1}
    board = build_scoreboard(Measurements(table, {}, chosen))
    assert board.selections["long"].rows == 3
    assert "none" not in board.selections


def test_labels_are_in_the_order_people_count() -> None:
    rows = [ScoredRow(str(n), 1.0, 1.0, {"ranks": f"{n} ranks"}) for n in (16, 2, 64, 8)]
    assert list(build_scoreboard(Measurements(columns_of(rows), {})).groups["ranks"]) == [
        "2 ranks",
        "8 ranks",
        "16 ranks",
        "64 ranks",
    ]
    asked = Measurements(columns_of(rows), {}, orders={"ranks": ["64 ranks", "2 ranks"]})
    assert list(build_scoreboard(asked).groups["ranks"]) == ["64 ranks", "2 ranks"]


def test_an_empty_set_has_no_summary() -> None:
    board = build_scoreboard(Measurements(columns_of([]), {"all of them": 3}))
    assert board.summary is None
    assert board.worst == ()


def test_only_the_ten_worst_are_named() -> None:
    table = MeasuredColumns(np.ones(50), np.linspace(1, 2, 50), {}, lambda at: f"row {at}")
    worst = build_scoreboard(Measurements(table, {})).worst
    assert [row.name for row in worst] == [f"row {at}" for at in range(49, 39, -1)]


@given(st.lists(st.tuples(st.floats(1e-7, 1e3), st.floats(0, 1e3)), min_size=1, max_size=40))
def test_figures_are_ordered(times: list[tuple[float, float]]) -> None:
    found = summarise(*(np.array(column) for column in zip(*times, strict=True)))
    assert found is not None
    assert 0 <= found.median_abs_error <= found.worst_abs_error
    assert found.median_abs_error <= found.p90_abs_error * (1 + 1e-9) + 1e-12
    assert abs(found.mean_error) <= found.mean_abs_error * (1 + 1e-9)


@pytest.mark.parametrize(("measured", "predicted"), [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_rows_check_themselves(measured: float, predicted: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        ScoredRow("bad", measured, predicted)
    with pytest.raises(ValueError, match="above zero"):
        MeasuredColumns(np.array([measured]), np.array([predicted]), {}, str)


def test_columns_are_of_one_length() -> None:
    with pytest.raises(ValueError, match="as many entries"):
        MeasuredColumns(np.ones(2), np.ones(3), {}, str)


def test_coverage_counts_the_rows_with_a_band() -> None:
    rows = [
        ScoredRow("inside", 1.0, 1.1, {"kind": "a"}, (0.9, 1.3)),
        ScoredRow("below", 1.0, 1.4, {"kind": "a"}, (1.1, 1.6)),
        ScoredRow("at its end", 1.0, 1.2, {"kind": "b"}, (1.0, 1.5)),
        ScoredRow("without", 1.0, 2.0, {"kind": "b"}),
    ]
    board = build_scoreboard(Measurements(columns_of(rows), {}))
    assert board.summary is not None
    assert board.summary.coverage == pytest.approx(2 / 3)
    assert board.groups["kind"]["b"].coverage == 1.0
    assert build_scoreboard(Measurements(columns_of(ROWS), {})).summary.coverage is None  # type: ignore[union-attr]


def test_without_comparable_rows_there_are_no_interval_figures() -> None:
    assert dict(interval_figures(columns_of([]))) == {}


def test_a_kind_of_two_sources_is_as_uncertain_as_its_family() -> None:
    """Two sources that are both 5 % too fast say little of a third, which others of the family put at either side."""
    rng = np.random.default_rng(1)
    fast = [("dense on new", name, 1.05) for name in ("a", "b") for _ in range(10)]
    third = [("dense on new", "c", 0.93)] * 5
    others = [("dense on old", f"s{at % 6}", float(np.exp(rng.normal(0.0, 0.1)))) for at in range(60)]
    kinds, sources, ratios = map(np.array, zip(*fast, *third, *others, strict=True))
    tags = {"kind": kinds, "source": sources}
    figures = dict(interval_figures(MeasuredColumns(ratios, np.ones(len(ratios)), tags, str)))
    assert figures["inside the 90 % interval of other sources, dense on new"] == 1.0


@pytest.mark.parametrize(("name", "file"), [("rl", "rl_runs.csv"), ("serving", "serving_runs.csv")])
def test_a_set_without_rows_has_no_figures(name: str, file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("id,mode\n")
    board = build_scoreboard(MEASUREMENT_SETS[name].measure(str(tmp_path)))
    assert board.summary is None
    assert not board.selections
