"""Timelines: columns, views, and self-checks."""

import numpy as np
import pytest

from stepcast.inputs.documents import timeline_facts
from stepcast.ir.timeline import SpanKind, TimelineBuilder


def test_rows_come_back_as_they_went_in() -> None:
    builder = TimelineBuilder()
    lane = builder.lane(3, "compute")
    outer = builder.add("step", lane, 100.0, 2.0, kind=SpanKind.STEP, micro_batch=1)
    builder.add("inner", lane, 100.5, 1.0, parent=outer, details=[("why", "test")])
    timeline = builder.build(measured=True)
    first, second = timeline.spans()
    assert (first.name, first.lane.rank, first.start_s, first.end_s, first.micro_batch) == ("step", 3, 0.0, 2.0, 1)
    assert (second.parent, second.details) == (outer, {"why": "test"})
    assert timeline.span_s == 2.0
    assert timeline.ranks == (3,)
    assert timeline.top_level.tolist() == [True, False]


def test_an_empty_timeline_has_no_span() -> None:
    timeline = TimelineBuilder().build(measured=False)
    assert (len(timeline), timeline.span_s, timeline.ranks) == (0, 0.0, ())
    assert timeline_facts(timeline)["operations"] == []


@pytest.mark.parametrize(("start", "duration"), [(np.nan, 1.0), (0.0, -1.0), (0.0, np.inf)])
def test_impossible_times_are_refused(start: float, duration: float) -> None:
    builder = TimelineBuilder()
    builder.add("x", builder.lane(0, "a"), start, duration)
    with pytest.raises(ValueError, match="finite"):
        builder.build(measured=True, rebase=False)
