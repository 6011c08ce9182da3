"""The marked steps of each rank: which rows belong to them, and when each began and ended.

The profiler marks what the host did in a step. The host runs ahead of its GPU, so a kernel belongs to the
step in which it was launched, whenever it runs, and a step lasts until the last of its kernels has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepcast.ir.arrays import IntArray
from stepcast.ir.timeline import NONE, Floats, Ints, SpanKind, Timeline

STREAM = "stream "
STEPS = "steps"


def is_stream(lane_name: str) -> bool:
    """Annotations of streams repeat their work and are none."""
    return STREAM in lane_name and not lane_name.startswith("annotations")


@dataclass(frozen=True, slots=True)
class MarkedSteps:
    """When the steps of one rank began and ended, in order; they do not overlap."""

    start_s: Floats
    end_s: Floats

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.end_s - self.start_s))


def marked_steps(timeline: Timeline) -> tuple[Timeline, Mapping[int, MarkedSteps]]:
    """The timeline without what no marked step launched, and the steps of each rank that marks any."""
    order = np.argsort(timeline.lane_of, kind="stable")
    bounds = np.searchsorted(timeline.lane_of[order], np.arange(len(timeline.lanes) + 1))
    lanes_of: dict[int, list[tuple[str, IntArray]]] = {}
    for at, lane in enumerate(timeline.lanes):
        rows = order[bounds[at] : bounds[at + 1]]
        lanes_of.setdefault(lane.rank, []).append((lane.name, rows))
    called_s = launch_s(timeline)
    kept = np.ones(len(timeline), dtype=bool)
    found = {}
    for rank, lanes in lanes_of.items():
        marks = [rows for name, rows in lanes if name == STEPS and len(rows)]
        if marks:
            found[rank] = _of_rank(timeline, np.concatenate(marks), lanes, called_s, kept)
    return timeline.only(kept), found


def launch_s(timeline: Timeline) -> Floats:
    """When each row was launched; not a number where the trace does not tell."""
    found = np.full(len(timeline), np.nan)
    calls, rows = timeline.flows[:, 0], timeline.flows[:, 1]
    host = timeline.kind_of[calls] == SpanKind.HOST
    found[rows[host]] = timeline.start_s[calls[host]]
    return found


def _of_rank(
    timeline: Timeline,
    marks: IntArray,
    lanes: list[tuple[str, IntArray]],
    called_s: Floats,
    kept: npt.NDArray[np.bool_],
) -> MarkedSteps:
    """The steps that *marks* are the host's part of; *kept* loses the rows of *lanes* outside them."""
    marks = marks[np.argsort(timeline.start_s[marks], kind="stable")]
    first_s, last_s = timeline.start_s[marks], timeline.end_s[marks]
    until_s = last_s.copy()
    streams: list[tuple[IntArray, Floats]] = []
    for name, rows in lanes:
        if name == STEPS:
            continue
        when_s = _when(timeline, rows, called_s) if is_stream(name) else timeline.start_s[rows]
        step = _step_at(when_s, first_s, last_s)
        kept[rows] = inside = step != NONE
        if is_stream(name):
            streams.append((rows, when_s))
        if is_stream(name) or name.startswith("cpu thread"):
            np.maximum.at(until_s, step[inside], timeline.end_s[rows[inside]])
    start_s, end_s = first_s.copy(), until_s
    start_s[0] = max(first_s[0], _backlog_s(timeline, streams, kept, float(first_s[0])))
    for at in range(len(marks)):
        if at:
            start_s[at] = max(start_s[at], end_s[at - 1])
        end_s[at] = max(end_s[at], start_s[at])
    return MarkedSteps(start_s, end_s)


def _when(timeline: Timeline, rows: IntArray, called_s: Floats) -> Floats:
    """When the host launched each row of one stream.

    A stream runs in the order of its launches: a row of unknown launch goes with the one before it, and
    those before the first known one were launched before the trace began. Where none is known, a row counts
    when it starts.
    """
    order = np.argsort(timeline.start_s[rows], kind="stable")
    launched_s = called_s[rows[order]]
    known = ~np.isnan(launched_s)
    if not known.any():
        return timeline.start_s[rows]
    before = np.maximum.accumulate(np.where(known, np.arange(len(rows)), NONE))
    when_s = np.empty(len(rows))
    when_s[order] = np.where(before == NONE, -np.inf, launched_s[before])
    return when_s


def _step_at(when_s: Floats, first_s: Floats, last_s: Floats) -> Ints:
    step = np.searchsorted(first_s, when_s, side="right").astype(np.int32) - 1
    outside = (step < 0) | (when_s > last_s[step])
    return np.where(outside, np.int32(NONE), step)


def _backlog_s(
    timeline: Timeline, streams: list[tuple[IntArray, Floats]], kept: npt.NDArray[np.bool_], first_s: float
) -> float:
    """When the busiest stream had run what was launched before the first mark: the step begins no sooner."""
    if not streams:
        return first_s
    rows, when_s = max(streams, key=lambda one: float(timeline.duration_s[one[0][kept[one[0]]]].sum()))
    earlier, own = rows[when_s < first_s], rows[kept[rows]]
    if not len(earlier) or not len(own):
        return first_s
    return float(min(timeline.end_s[earlier].max(), timeline.start_s[own].min()))
