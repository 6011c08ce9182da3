"""Where the time of a step went, stage by stage, summing exactly to the step.

On each stage every moment is one of: computing; waiting while a communication of some group runs (its exposed
part); or waiting for another stage (the bubble). Calls of the same segment that begin alike spend their time
alike, so each distinct beginning is looked at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepcast.ir.group import Group
from stepcast.simulation.alike import alike, op_times
from stepcast.simulation.arrays import Floats, Ints, Segment
from stepcast.simulation.engine import Run
from stepcast.simulation.segments import COMPUTE, Lanes
from stepcast.simulation.step import Step

OPTIMIZER_WORD = "optimizer"


@dataclass(frozen=True)
class StageTime:
    """The seconds of one stage; all of them together are the step."""

    stage: int
    compute_s: float
    optimizer_s: float
    exposed_s: Mapping[Group, float]
    host_s: float
    """Waiting for an eager host to issue the next computation."""
    bubble_s: float
    communication_s: Mapping[Group, float]
    """Of each group, exposed or not."""

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.optimizer_s

    @property
    def total_s(self) -> float:
        return self.busy_s + sum(self.exposed_s.values()) + self.host_s + self.bubble_s


def stage_times(step: Step, run: Run) -> tuple[StageTime, ...]:
    """The breakdown of every stage of *run*, the simulation of *step*."""
    program, lanes = step.program, step.lanes
    groups = tuple(dict.fromkeys([Group.PP, *lanes.groups]))
    patterns = alike(run)
    calls, pattern_of = patterns.first, patterns.of_call
    spent = np.zeros((len(calls), 3 + len(groups)))  # computing, optimizer, host, exposed per group
    idle_s = np.zeros(len(calls))
    for segment, rows, begins in patterns.by_segment():
        spent[rows], idle_s[rows] = _spent(segment, begins, lanes, groups)
    per_call = spent[pattern_of]
    # What a stage does itself while a message is under way counts as that, not as waiting for it.
    per_call[:, 3] += np.minimum(_message_waits_s(step, run), idle_s[pattern_of])
    busy = program.lane_busy_s()
    found = []
    for stage in range(step.schedule.stages):
        totals = per_call[program.rank_start[stage] : program.rank_start[stage + 1]].sum(axis=0)
        communication = _totals(busy[stage], lanes, groups)
        # A lane is taken, too, where its op waits for its host or for another rank: that is bubble. Messages
        # in their sender's lane are left out, for a stage waits for those of others.
        own = 3 if lanes.receives else 4
        totals[own:] = np.minimum(totals[own:], [communication[group] for group in groups[own - 3 :]])
        exposed = dict(zip(groups, totals[3:].tolist(), strict=True))
        bubble = run.makespan_s - float(totals.sum())
        found.append(
            StageTime(
                stage=stage,
                compute_s=float(totals[0]),
                optimizer_s=float(totals[1]),
                host_s=float(totals[2]),
                exposed_s=exposed,
                # Rounding must not make a stage without bubbles show a negative one.
                bubble_s=0.0 if abs(bubble) < 1e-12 * run.makespan_s else bubble,
                communication_s=communication,
            )
        )
    return tuple(found)


def _totals(busy_s: Floats, lanes: Lanes, groups: tuple[Group, ...]) -> dict[Group, float]:
    totals = dict.fromkeys(groups, 0.0)
    for lane, seconds in enumerate(busy_s.tolist()):
        group = lanes.group(lane)
        if group is not None:
            totals[group] += seconds
    return totals


def _spent(
    segment: Segment, begins: Floats, lanes: Lanes, groups: tuple[Group, ...]
) -> tuple[Floats, Floats]:
    """rows x (computing, optimizer, host, exposed per group) of calls of *segment*, and what each waits while
    none of its own lanes is busy: for its inputs.
    """
    shape = segment.shape
    rows = len(begins)
    starts, ends = op_times(segment, begins)
    spent = np.zeros((rows, 3 + len(groups)))
    computing = np.flatnonzero(shape.lane == COMPUTE)
    optimizing = np.array([OPTIMIZER_WORD in shape.names[op] for op in computing.tolist()], bool)
    spent[:, 0] = segment.duration_s[computing[~optimizing]].sum()
    spent[:, 1] = segment.duration_s[computing[optimizing]].sum()
    gap_end = starts[computing]
    gap_begin = np.concatenate([np.zeros((1, rows)), ends[computing[:-1]]])[: len(computing)]
    left = gap_end - gap_begin
    for lane in range(1, len(lanes.names)):
        group = lanes.group(lane)
        # A message in the sender's own lane holds nobody up; whom it holds up is in _message_waits_s.
        in_own_lane = group is Group.PP and not lanes.receives
        if in_own_lane or not (left > 0).any():
            continue
        column = 2 if group is None else 3 + groups.index(group)
        members = np.flatnonzero(shape.lane == lane)
        for row in range(rows):
            busy = (begins[row, lane], starts[members, row], ends[members, row])
            part = np.minimum(_filled(gap_begin[:, row], gap_end[:, row], *busy), left[:, row])
            spent[row, column] += part.sum()
            left[:, row] -= part
    return spent, left.sum(axis=0)


def _filled(begin: Floats, end: Floats, busy_until: float, starts: Floats, ends: Floats) -> Floats:
    """How much of each wait from *begin* to *end* one lane is busy: until *busy_until*, and in its ops."""
    if not len(starts):
        filled: Floats = np.clip(np.minimum(end, busy_until) - begin, 0.0, None)
        return filled
    # The busy time of the lane up to any moment is piecewise linear, with corners where ops start and end.
    before = max(busy_until, 0.0)
    done = np.cumsum(ends - starts)
    corners = np.stack([starts, ends], axis=1).ravel()
    busy = np.stack([np.concatenate([[0.0], done[:-1]]), done], axis=1).ravel() + before
    if before > 0:
        corners, busy = np.concatenate([[0.0, before], corners]), np.concatenate([[0.0, before], busy])
    return np.interp(end, corners, busy) - np.interp(begin, corners, busy)


def _message_waits_s(step: Step, run: Run) -> Floats:
    """For each call how long it waited for a message on the way; the rest of the wait is bubble.

    A message that moves in its sender's lane is seen here only by its arrival: the last moments before it,
    as long as the message takes, are its transfer.
    """
    program = run.program
    waits_s = np.zeros(program.calls)
    if step.lanes.receives:
        return waits_s
    lanes = len(program.lanes)
    slots = _is_slot(step)
    for port in range(program.inputs):
        arrives = np.flatnonzero(program.source_call[:, port] >= 0)
        arrives = arrives[slots[arrives]]
        waited = run.entry_s[arrives, lanes + port] - run.entry_s[arrives, COMPUTE]
        sent_by = program.source_call[arrives, port]
        taken = np.clip(np.minimum(waited, _message_s(step, sent_by, program.rank[arrives])), 0.0, None)
        waits_s[arrives] = np.maximum(waits_s[arrives], taken)
    return waits_s


def _is_slot(step: Step) -> npt.NDArray[np.bool_]:
    """Calls that run a slot of the schedule: not the rounds of a stage, nor messages."""
    program = step.program
    place = np.arange(program.calls) - program.rank_start[program.rank]
    calls = np.diff(program.rank_start)[program.rank]
    return (
        (program.rank < step.schedule.stages)
        & (place >= step.rounds_before)
        & (place < calls - step.rounds_after)
    )


def _message_s(step: Step, sent_by: Ints, targets: Ints) -> Floats:
    """Seconds of the message that each call *sent_by* gives to the rank in *targets*."""
    program, stages = step.program, step.schedule.stages
    # Calls of the ranks after the stages are the messages themselves (rendezvous).
    whole = np.array([segment.duration_s.sum() for segment in program.segments])
    between = np.array(
        [
            [0.0 if source == target else step.message_s(source, target) for target in range(stages)]
            for source in range(stages)
        ]
    )
    sources = program.rank[sent_by]
    channel = sources >= stages
    direct = between[np.where(channel, 0, sources), targets]
    seconds: Floats = np.where(channel, whole[program.segment[sent_by]], direct)
    return seconds
