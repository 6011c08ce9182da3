"""Computation that takes longer because of what runs beside it.

A collective of share k takes k seconds of computing for each second that both run: k times their time side by
side in the run without any loss is added to each computation, averaged over the calls of its segment, so that
durations stay fixed. A computation grows by the shares of what covers it at most, and by nothing where it is
alone; so does the step, whose length is a longest path. Where communication and not computing sets the pace,
a slower computation stays beside it for longer still: that second-order loss, k squared of computing that
nobody waits for, is left out. So is what an op runs ahead of its own call, beside an earlier one's end.
"""

from dataclasses import replace

import numpy as np

from stepcast.simulation.alike import alike, op_times
from stepcast.simulation.arrays import Floats, Program, Segment
from stepcast.simulation.engine import Run
from stepcast.simulation.segments import COMPUTE


def slowed(run: Run) -> Program:
    """The program of *run* with its computations as much longer as they lose to what ran beside them."""
    program = run.program
    lane_takes = _lane_takes(program)
    if not lane_takes.any():
        return program
    patterns = alike(run)
    calls = np.bincount(patterns.of_call, minlength=len(patterns.first))
    longer = {}
    for segment, rows, begins_s in patterns.by_segment():
        lost_s = _lost_s(segment, begins_s, lane_takes)
        if lost_s.any():
            mean_s = np.average(lost_s, axis=1, weights=calls[rows])
            longer[int(patterns.segment[rows[0]])] = segment.duration_s + mean_s
    if not longer:
        return program
    segments = tuple(
        replace(segment, duration_s=longer[same]) if same in longer else segment
        for segment, same in zip(program.segments, patterns.same.tolist(), strict=True)
    )
    return replace(program, segments=segments)


def _lane_takes(program: Program) -> Floats:
    """For each lane the most that an op in it takes."""
    most = np.zeros(len(program.lanes))
    for segment in program.segments:
        beside = segment.takes > 0
        np.maximum.at(most, segment.shape.lane[beside], segment.takes[beside])
    return most


def _lost_s(segment: Segment, begins_s: Floats, lane_takes: Floats) -> Floats:
    """ops x beginnings: what each computation of *segment* loses."""
    shape = segment.shape
    lost = np.zeros((shape.ops, len(begins_s)))
    computing = np.flatnonzero(shape.lane == COMPUTE)
    used = [
        lane
        for lane in np.flatnonzero(lane_takes).tolist()
        if begins_s[:, lane].max() > 0 or segment.takes[shape.lane == lane].any()
    ]
    if not used or not len(computing):
        return lost
    starts, ends = op_times(segment, begins_s)
    for lane in used:
        members = np.flatnonzero(shape.lane == lane)
        for row in range(len(begins_s)):
            # What all of the lane took up to any moment is piecewise linear. What is still busy when the
            # call begins was issued by an earlier one, whose share is taken as the lane's largest.
            before_s = max(0.0, begins_s[row, lane])
            edges = np.stack([starts[members, row], ends[members, row]], axis=1).ravel().clip(before_s)
            taken = np.zeros_like(edges)
            taken[1::2] = (edges[1::2] - edges[::2]) * segment.takes[members]
            corners = np.concatenate([[0.0, before_s], edges])
            so_far = np.cumsum(np.concatenate([[0.0, before_s * lane_takes[lane]], taken]))
            begun, ended = (np.interp(times[computing, row], corners, so_far) for times in (starts, ends))
            lost[computing, row] += ended - begun
    return lost
