"""Where the time of a step went, from the start and end of every task.

As ``simulation.breakdown`` tells it of the folded engine: on each stage every moment is computing, waiting
while a communication of some group runs, waiting for the host, or the bubble.
"""

from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.group import Channel, Group
from stepcast.simulation.arrays import Times
from stepcast.simulation.breakdown import StageTime
from stepcast.simulation.fluid.system import Pairs
from stepcast.simulation.lanes import COMPUTE
from stepcast.simulation.step import Step


class _Gaps(NamedTuple):
    """Before each task that computes, in order: from when to when its stage did not."""

    tasks: IntArray
    from_s: FloatArray
    to_s: FloatArray


def stage_times_of(step: Step, times: Times, waits: Pairs) -> tuple[StageTime, ...]:
    """The breakdown of every stage of *step*, all of whose tasks took *times*."""
    program, lanes = step.program.written_out, step.lanes
    groups: tuple[Channel, ...] = tuple(dict.fromkeys([Group.PP, *lanes.groups]))
    lane_of, rank_of = program.task_lanes(), program.rank[program.task_calls()]
    apart = program.per_task(
        [
            np.isin(np.arange(segment.shape.ops), list(segment.shape.apart)).astype(np.int64)
            for segment in program.segments
        ]
    )
    message_s = np.zeros(0) if lanes.receives else _message_waits_s(times, waits, rank_of, lane_of, step)
    by_rank = np.split(np.arange(program.tasks), program.task_start[program.rank_start[1:-1]])
    found = []
    for stage in range(step.schedule.stages):
        own = by_rank[stage]
        computing = own[lane_of[own] == COMPUTE]
        gaps = _gaps(computing, times)
        left_s = gaps.to_s - gaps.from_s
        exposed = dict.fromkeys(groups, 0.0)
        total = dict.fromkeys(groups, 0.0)
        host_s = 0.0
        for lane in range(1, len(lanes.lanes)):
            tasks = own[lane_of[own] == lane]
            group = lanes.group(lane)
            if group is not None:
                total[group] += float((times.end_s[tasks] - times.start_s[tasks]).sum())
            if group is Group.PP and not lanes.receives:
                continue  # a message in the sender's own lane holds nobody up
            part = np.minimum(_busy_s(tasks, times, gaps), left_s)
            left_s = left_s - part
            if group is None:
                host_s += float(part.sum())
            else:
                exposed[group] += float(part.sum())
        if len(message_s):
            exposed[Group.PP] += float(np.minimum(message_s[computing], left_s).sum())
        for group in groups if lanes.receives else groups[1:]:
            exposed[group] = min(exposed[group], total[group])
        seconds = times.end_s[computing] - times.start_s[computing]
        optimizer_s = float(seconds[apart[computing] > 0].sum())
        compute_s = float(seconds.sum()) - optimizer_s
        bubble = times.makespan_s - compute_s - optimizer_s - host_s - sum(exposed.values())
        found.append(
            StageTime(
                stage=stage,
                compute_s=compute_s,
                optimizer_s=optimizer_s,
                exposed_s=exposed,
                host_s=host_s,
                bubble_s=0.0 if abs(bubble) < 1e-12 * times.makespan_s else bubble,
                communication_s=total,
            )
        )
    return tuple(found)


def _gaps(computing: IntArray, times: Times) -> _Gaps:
    before = np.concatenate([[0.0], times.end_s[computing[:-1]]]) if len(computing) else np.zeros(0)
    return _Gaps(computing, before, np.maximum(times.start_s[computing], before))


def _busy_s(tasks: IntArray, times: Times, gaps: _Gaps) -> FloatArray:
    """For how long of each gap one of *tasks*, which follow one another, runs."""
    if not len(tasks):
        return np.zeros(len(gaps.tasks))
    start_s, end_s = times.start_s[tasks], times.end_s[tasks]
    at_s = np.ravel(np.column_stack([start_s, end_s]))
    busy_s = np.concatenate([[0.0], np.cumsum(end_s - start_s)])
    before = np.ravel(np.column_stack([busy_s[:-1], busy_s[1:]]))
    until, since = (np.interp(each, at_s, before) for each in (gaps.to_s, gaps.from_s))
    return np.asarray(until - since, np.float64)


def _message_waits_s(times: Times, waits: Pairs, rank_of: IntArray, lane_of: IntArray, step: Step) -> FloatArray:
    """For each task that computes how long its stage did not because a message to it was under way."""
    sent, waiting = waits
    messages = (lane_of >= 1) & (lane_of <= len(step.lanes.messages))
    across = messages[sent] & (rank_of[sent] != rank_of[waiting]) & (rank_of[waiting] < step.schedule.stages)
    sent, waiting = sent[across], waiting[across]
    # The first task that computes after it, in the same rank; tasks of a rank follow one another.
    computing = np.flatnonzero(lane_of == COMPUTE)
    at = np.searchsorted(computing, waiting)
    known = at < len(computing)
    first = computing[np.minimum(at, len(computing) - 1)] if len(computing) else waiting
    known &= rank_of[first] == rank_of[waiting]
    sent, first = sent[known], first[known]
    place = np.searchsorted(computing, first)
    same = (place > 0) & (rank_of[computing[place - 1]] == rank_of[first])
    free_s = np.where(same, times.end_s[computing[place - 1]], 0.0)
    taken_s = np.minimum(times.end_s[sent] - free_s, times.end_s[sent] - times.start_s[sent])
    found = np.zeros(len(lane_of))
    np.maximum.at(found, first, np.clip(taken_s, 0.0, None))
    return found
