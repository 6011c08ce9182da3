"""Residuals fitted to rows, and what they are worth on sources that they have not seen."""

import numpy as np
import pytest

from stepcast.validate.residual import correct_s, fit_residuals, leave_out_s, residual_figures
from stepcast.validate.scoreboard import MeasuredColumns, ScoredRow, columns_of


def table(*groups: tuple[str, str, str, list[float]]) -> MeasuredColumns:
    """Rows of (source, profile, kind) with these ratios of measured over predicted."""
    return columns_of(
        [
            ScoredRow(f"{source} {at}", ratio, 1.0, {"source": source, "profile": profile, "kind": kind})
            for source, profile, kind, ratios in groups
            for at, ratio in enumerate(ratios)
        ]
    )


SLOW = [1.18, 1.19, 1.2, 1.21, 1.22]


def test_the_median_of_a_framework_on_a_generation() -> None:
    rows = table(
        ("one", "nemo", "dense on hopper", SLOW),
        ("one", "nemo", "experts on hopper", [2.0] * 4),  # too few
        ("one", "nemo", "dense on ampere", [0.5, 0.7, 1.0, 1.6, 2.5]),  # nothing in common
    )
    (found,) = fit_residuals(rows).values()
    assert (found.generation, found.experts, found.factor) == ("hopper", False, 1.2)
    assert (found.rows, found.sources) == (5, 1)
    assert found.spread == pytest.approx(0.008, abs=1e-3)


def test_nothing_applies_elsewhere() -> None:
    rows = table(("one", "nemo", "dense on hopper", SLOW), ("two", "mine", "dense on hopper", [1.5]))
    corrected = correct_s(rows, fit_residuals(rows))
    assert corrected.tolist() == [1.2] * 5 + [1.0]


def test_a_source_is_judged_by_the_others_alone() -> None:
    """What one source knows of itself flatters; without it, nothing is left to correct by."""
    alone = table(("one", "nemo", "dense on hopper", SLOW))
    assert leave_out_s(alone).tolist() == [1.0] * 5
    two = table(("one", "nemo", "dense on hopper", SLOW), ("two", "nemo", "dense on hopper", [1.0] * 5))
    assert leave_out_s(two).tolist() == [1.0] * 5 + [1.2] * 5


def test_figures_show_both() -> None:
    found = dict(residual_figures(table(("one", "mine-too", "dense on hopper", []))))
    assert found == {}
    rows = table(("one", "nemo", "dense on volta", SLOW))
    found = dict(residual_figures(rows))
    assert found["with residuals fitted without the row's source: mean_abs_error"] == pytest.approx(
        float(np.mean([1 - 1 / ratio for ratio in SLOW]))
    )
    assert "with --residual: mean_abs_error" in found
