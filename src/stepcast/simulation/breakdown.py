"""Where the time of a step went, stage by stage, summing exactly to the step.

On each stage every moment is one of: computing; waiting while a communication of some group runs (its exposed
part); or waiting for another stage (the bubble). Calls of the same segment that begin alike spend their time
alike, so each distinct beginning is looked at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepcast.ir.group import Group
from stepcast.simulation.arrays import Floats, Ints, Program, Shape
from stepcast.simulation.distinct import distinct, distinct_rows
from stepcast.simulation.engine import Run
from stepcast.simulation.lanes import COMPUTE, Lanes
from stepcast.simulation.step import Step

# Two calls begin alike when their lanes and inputs differ by less than this.
ALIKE_S = 1e-11
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
    lanes, written = step.lanes, run.written_out
    program, seconds = written.program, written.program.segment_seconds(written.seconds)
    groups = tuple(dict.fromkeys([Group.PP, *lanes.groups]))
    same = _same_segments(program, seconds)
    calls, pattern_of = _patterns(written, seconds, same)
    spent = np.zeros((len(calls), 3 + len(groups)))  # computing, optimizer, host, exposed per group
    idle_s = np.zeros(len(calls))
    segments = same[program.segment[calls]]
    begins = _beginnings(written, seconds, calls)
    for number in distinct(segments).values:
        rows = np.flatnonzero(segments == number)
        shape = program.segments[number].shape
        spent[rows], idle_s[rows] = _spent(shape, seconds[number], begins[rows], lanes, groups)
    first = run.program.flat_start[:-1]
    per_call = np.add.reduceat(spent[pattern_of], first)
    # What a stage does itself while a message is under way counts as that, not as waiting for it.
    per_call[:, 3] += np.minimum(_message_waits_s(step, run), np.add.reduceat(idle_s[pattern_of], first))
    busy = run.program.lane_busy_s(run.seconds)
    found = []
    for stage in range(step.schedule.stages):
        totals = per_call[run.program.rank_start[stage] : run.program.rank_start[stage + 1]].sum(axis=0)
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
                communication_s=_totals(busy[stage], lanes, groups),
            )
        )
    return tuple(found)


def _totals(busy_s: Floats, lanes: Lanes, groups: tuple[Group, ...]) -> dict[Group, float]:
    totals = dict.fromkeys(groups, 0.0)
    for lane, seconds in enumerate(busy_s[: len(lanes.lanes)].tolist()):
        group = lanes.group(lane)
        if group is not None:
            totals[group] += seconds
    return totals


def _beginnings(run: Run, seconds: Sequence[Floats], calls: Ints) -> Floats:
    """When each lane is free and each input there, counted from the compute lane's turn.

    What happens beside computation before that turn cannot take longer than all of it together, so how much
    earlier than that a lane is free or an input there makes no difference.
    """
    program = run.program
    beside_s = np.array(
        [
            durations[segment.shape.lane != COMPUTE].sum()
            for segment, durations in zip(program.segments, seconds, strict=True)
        ]
    )
    entry_s = run.entry_s[calls]
    begins: Floats = np.maximum(
        entry_s - entry_s[:, COMPUTE : COMPUTE + 1], -beside_s[program.segment[calls], None]
    )
    return begins


def _same_segments(program: Program, seconds: Sequence[Floats]) -> Ints:
    """For each segment the first one that is equal to it: stages that do the same share their segments."""
    known: dict[tuple[object, ...], int] = {}
    same = [
        known.setdefault((segment.shape.key, segment.shape.names, durations.tobytes()), number)
        for number, (segment, durations) in enumerate(zip(program.segments, seconds, strict=True))
    ]
    return np.array(same, np.int64)


def _patterns(run: Run, seconds: Sequence[Floats], same: Ints) -> tuple[Ints, Ints]:
    """One call for each distinct beginning, and the beginning of every call."""
    begins = _beginnings(run, seconds, np.arange(run.program.calls))
    keys = np.concatenate(
        [same[run.program.segment][:, None], np.rint(begins / ALIKE_S).astype(np.int64)], axis=1
    )
    found = distinct_rows(keys)
    return found.first, found.inverse


def _spent(
    shape: Shape, duration_s: Floats, begins: Floats, lanes: Lanes, groups: tuple[Group, ...]
) -> tuple[Floats, Floats]:
    """rows x (computing, optimizer, host, exposed per group) of calls of one segment, and what each waits
    while none of its own lanes is busy: for its inputs.
    """
    rows = len(begins)
    nodes = np.empty((shape.first_op + shape.ops, rows))
    nodes[: shape.first_op] = begins[:, : shape.first_op].T
    starts = np.empty((shape.ops, rows))
    for op, before in enumerate(shape.waits):
        starts[op] = np.max(nodes[list(before)], axis=0)
        nodes[shape.first_op + op] = starts[op] + duration_s[op]
    ends = nodes[shape.first_op :]
    spent = np.zeros((rows, 3 + len(groups)))
    computing = np.flatnonzero(shape.lane == COMPUTE)
    optimizing = np.array([OPTIMIZER_WORD in shape.names[op] for op in computing.tolist()], bool)
    spent[:, 0] = duration_s[computing[~optimizing]].sum()
    spent[:, 1] = duration_s[computing[optimizing]].sum()
    gap_end = starts[computing]
    gap_begin = np.concatenate([np.zeros((1, rows)), ends[computing[:-1]]])[: len(computing)]
    left = gap_end - gap_begin
    for lane in range(1, len(lanes.lanes)):
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
        taken = np.clip(np.minimum(waited, _message_s(step, run, sent_by, program.rank[arrives])), 0.0, None)
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


def _message_s(step: Step, run: Run, sent_by: Ints, targets: Ints) -> Floats:
    """Seconds of the message that each call *sent_by* gives to the rank in *targets*."""
    sources = run.program.rank[sent_by]
    # Calls of the ranks after the stages are the messages themselves (rendezvous).
    seconds: Floats = np.where(sources == targets, 0.0, step.message_s)
    return seconds
