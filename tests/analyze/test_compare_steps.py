"""Comparing two accounts of a step."""

import pytest

from stepcast.analyze.compare import compare
from stepcast.views.compare import compare_view
from stepcast.views.terminal import render_text

PREDICTED = {
    "step_s": 1.1,
    "breakdown_s": {"compute": 0.6, "dp": 0.2, "bubble": 0.2, "other": 0.1},
    "stages": [{"stage": 0, "busy_s": 0.6, "bubble_s": 0.2}, {"stage": 1, "busy_s": 0.6, "bubble_s": 0.2}],
}
MEASURED = {
    "step_s": 1.0,
    "breakdown_s": {
        "compute": 0.5,
        "dp": 0.1,
        "embedding": 0.1,
        "bubble": 0.2,
        "host": 0.06,
        "wait": 0.04,
        "other": 0.0,
    },
    "stages": [{"stage": 0, "busy_s": 0.5, "bubble_s": 0.25}],
    "operations_s": {"forward": 0.3},
}


def test_errors_are_signed_shares_of_the_measured() -> None:
    found = compare(PREDICTED, MEASURED)
    assert found.error == pytest.approx(0.1)
    rows = {row.name: row for row in found.parts}
    assert rows["compute"].error == pytest.approx(0.2)
    assert rows["compute"].difference_s == pytest.approx(0.1)


def test_parts_that_one_side_lacks_are_counted_where_the_other_has_them() -> None:
    rows = {row.name: row for row in compare(PREDICTED, MEASURED).parts}
    assert rows["dp"].measured_s == pytest.approx(0.2)
    assert rows["other"].measured_s == pytest.approx(0.1)
    assert sum(row.measured_s for row in rows.values()) == pytest.approx(1.0)
    assert "embedding" in {row.name for row in compare(MEASURED, MEASURED).parts}


def test_a_prediction_and_a_trace_have_three_parts_in_common() -> None:
    parts = {"compute": 5.0, "tp": 1.0, "dp": 0.5, "bubble": 1.5, "optimizer": 1.0, "other": 1.0}
    trace = {"step_s": 8.0, "format": "kineto", "compute_s": 5.0, "exposed_comm_s": 2.0, "bubble_s": 1.0, "copy_s": 0.0}
    for first, second in (
        ({"step_s": 10.0, "breakdown_s": parts}, trace),
        (trace, {"step_s": 10.0, "breakdown_s": parts}),
    ):
        found = {row.name: {row.predicted_s, row.measured_s} for row in compare(first, second).parts}
        assert found == {"computation": {6.0, 5.0}, "exposed communication": {1.5, 2.0}, "idle": {2.5, 1.0}}


def test_what_cannot_be_compared_is_told() -> None:
    found = compare(PREDICTED, MEASURED)
    assert [stage.stage for stage in found.stages] == [0]
    assert any("stages differ: 2 in the first, 1 in the second" in text for text in found.warnings)
    assert "one side has no list of operations: operations are not compared" in found.warnings
    both = compare({"step_s": 1.0}, {"step_s": 2.0})
    assert "both sides have no breakdown of the step: parts are not compared" in both.warnings
    with pytest.raises(ValueError, match="second file does not say how long a step takes"):
        compare(PREDICTED, {"breakdown_s": {}})


def test_two_predictions_have_cpu_launch_overhead_in_common() -> None:
    eager = {"step_s": 1.0, "breakdown_s": {"compute": 0.6, "other": 0.4}, "stages": [{"stage": 0, "host_s": 0.3}]}
    graphs = {"step_s": 0.7, "breakdown_s": {"compute": 0.6, "other": 0.1}, "stages": [{"stage": 0, "host_s": 0.0}]}
    found = compare(eager, graphs)
    rows = {row.name: row.predicted_s - row.measured_s for row in found.parts}
    assert rows == pytest.approx({"compute": 0.0, "host": 0.3, "other": 0.0})
    assert not any("operations" in text for text in found.warnings)
    text = render_text(compare_view(found.facts()), 100)
    assert "CPU launch overhead" in text
    assert "stage 0: CPU launch overhead" in text


def test_only_what_both_say_tells_two_runs_apart() -> None:
    found = compare(PREDICTED, MEASURED)
    assert found.same_run
    assert any("no common fact" in text for text in found.warnings)
    run = {"model": "one", "parameters": 7, "layers": 2, "hidden": 4, "precision": "tf32", "pp": 2}
    named = compare(
        PREDICTED | {"run": run}, MEASURED | {"pp": 2, "configuration": {**run, "model": "two", "dtype": "fp32"}}
    )
    assert named.same_run
    assert not any("no common fact" in text for text in named.warnings)
    other = compare(PREDICTED | {"run": run}, MEASURED | {"pp": 3, "configuration": {"parameters": {"0": 5}}})
    assert [(one.name, one.predicted, one.measured) for one in other.differences] == [("pp", 2, 3)]
    assert other.facts()["error"] is None


def test_nothing_measured_has_no_error() -> None:
    rows = {row.name: row for row in compare({"step_s": 1, "breakdown_s": {"tp": 1}}, MEASURED).parts}
    assert rows["tp"].error is None
