"""The timeline as text: what fills a column is drawn, and what is too short to fill one is marked."""

import pytest

from stepcast.ir.timeline import TimelineBuilder
from stepcast.views.timeline import gantt

COLUMNS = 20
LABEL = "stage 0 "


def drawn(*phases: tuple[str, float]) -> tuple[str, str]:
    """The row of one rank that runs *phases*, each a slot and seconds, a second a column, and the legend."""
    builder = TimelineBuilder()
    lane = builder.lane(0, "compute")
    at_s = 0.0
    for slot, seconds in phases:
        if slot != "wait":
            builder.add("work", lane, at_s, seconds, details=(("slot", slot),))
        at_s += seconds
    assert at_s == pytest.approx(COLUMNS)
    lines = gantt(builder.build(measured=False, stage_of_rank={0: 0}), len(LABEL) + COLUMNS).splitlines()
    assert lines[0].startswith(LABEL)
    return lines[0].removeprefix(LABEL), " ".join(lines[2:])


def test_what_fills_a_column_is_drawn() -> None:
    row, legend = drawn(("F.0", 5.0), ("wait", 5.0), ("B.0", 9.0), ("after", 1.0))
    assert row == "FFFFF.....BBBBBBBBBo"
    assert "shorter" not in legend
    assert "several" not in legend


def test_a_phase_shorter_than_its_column_is_marked() -> None:
    row, legend = drawn(("B.0", 9.7), ("F.0", 0.2), ("B.0", 10.1))
    assert row == "BBBBBBBBBfBBBBBBBBBB"
    assert "f, b, w: shorter than its column" in legend


def test_a_short_phase_shows_amid_waiting() -> None:
    row, _ = drawn(
        ("F.0", 1.0), ("wait", 9.2), ("B.0", 0.1), ("wait", 4.7), ("after", 0.1), ("wait", 4.0), ("F.0", 0.9)
    )
    assert row == "F.........b....o...F"


def test_many_phases_in_a_column_are_several() -> None:
    """More micro-batches than columns: neither forward nor backward is left out."""
    steady = (("F.0", 0.1), ("B.0", 0.2)) * 60
    row, legend = drawn(("F.0", 1.0), *steady, ("B.0", 1.0))
    assert row[0] == "F"
    assert set(row[2:-2]) == {"*"}
    assert row[-1] == "B"
    assert "* several in one column" in legend


def test_single_nanoseconds_are_no_phase() -> None:
    row, _ = drawn(("before", 1e-9), ("F.0", 10.0), ("B.0", 10.0 - 1e-9))
    assert row == "F" * 10 + "B" * 10
