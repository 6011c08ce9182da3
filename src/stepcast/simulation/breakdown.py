"""Where the time of a step went, stage by stage, summing exactly to the step.

On each stage every moment is one of: computing; waiting while a communication of some group runs (its exposed
part); or waiting for another stage (the bubble). Pieces that begin alike spend their time alike, so each
distinct beginning is looked at once: a layer that repeats comes to the same beginning after one or two times.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepcast.ir.group import Channel, Group
from stepcast.ir.limits import OPS_TOLD
from stepcast.simulation.engine import Run, piece_maps
from stepcast.simulation.fold import distinct_rows
from stepcast.simulation.lanes import COMPUTE, Lanes
from stepcast.simulation.segments import Floats, Ints, Piece, Segment
from stepcast.simulation.step import Step

COMPUTING, OPTIMIZING, HOST, EXPOSED = 0, 1, 2, 3
"""Columns of what a call spends; exposed is one column for each group, the pipeline's first."""
LONG = 4096
"""Ops of a piece beyond what layers have; each beginning of one takes milliseconds."""


@dataclass(frozen=True)
class StageTime:
    """The seconds of one stage; all of them together are the step."""

    stage: int
    compute_s: float
    optimizer_s: float
    exposed_s: Mapping[Channel, float]
    host_s: float
    """Waiting for an eager host to issue the next computation."""
    bubble_s: float
    communication_s: Mapping[Channel, float]
    """Of each group, exposed or not."""

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.optimizer_s

    @property
    def total_s(self) -> float:
        return self.busy_s + sum(self.exposed_s.values()) + self.host_s + self.bubble_s


def stage_times(step: Step, run: Run) -> tuple[StageTime, ...]:
    """The breakdown of every stage of *run*, the simulation of *step*."""
    program, lanes = run.program, step.lanes
    groups = tuple(dict.fromkeys([Group.PP, *lanes.groups]))
    spending = _Spending(run, lanes, groups)
    calls, pattern_of = _patterns(run, spending)
    OPS_TOLD.check(sum(_long_ops(program.segments[program.segment[call]]) for call, _ in calls))
    found = [spending.of_call(program.segments[program.segment[call]], begins) for call, begins in calls]
    spent, idle_s = np.array([each[0] for each in found]), np.array([each[1] for each in found])
    per_call = spent[pattern_of]
    # What a stage does itself while a message is under way counts as that, not as waiting for it.
    per_call[:, EXPOSED] += np.minimum(_message_waits_s(step, run), idle_s[pattern_of])
    busy = program.lane_busy_s(run.seconds)
    stages = []
    for stage in range(step.schedule.stages):
        totals = per_call[program.rank_start[stage] : program.rank_start[stage + 1]].sum(axis=0)
        communication = _totals(busy[stage], lanes, groups)
        # A lane is taken, too, where its op waits for its host or for another rank: that is bubble. Messages
        # in their sender's lane are left out, for a stage waits for those of others.
        own = EXPOSED + (not lanes.receives)
        totals[own:] = np.minimum(totals[own:], [communication[group] for group in groups[own - EXPOSED :]])
        exposed = dict(zip(groups, totals[EXPOSED:].tolist(), strict=True))
        bubble = run.makespan_s - float(totals.sum())
        stages.append(
            StageTime(
                stage=stage,
                compute_s=float(totals[COMPUTING]),
                optimizer_s=float(totals[OPTIMIZING]),
                host_s=float(totals[HOST]),
                exposed_s=exposed,
                # Rounding must not make a stage without bubbles show a negative one.
                bubble_s=0.0 if abs(bubble) < 1e-12 * run.makespan_s else bubble,
                communication_s=communication,
            )
        )
    return tuple(stages)


def _totals(busy_s: Floats, lanes: Lanes, groups: tuple[Channel, ...]) -> dict[Channel, float]:
    totals = dict.fromkeys(groups, 0.0)
    for lane, seconds in enumerate(busy_s[: len(lanes.lanes)].tolist()):
        group = lanes.group(lane)
        if group is not None:
            totals[group] += seconds
    return totals


def _long_ops(segment: Segment) -> int:
    return sum(piece.shape.ops for piece, _ in segment.chain if piece.shape.ops > LONG)


def _patterns(run: Run, spending: "_Spending") -> tuple[list[tuple[int, Floats]], Ints]:
    """One call with its beginning for each distinct one, and the beginning of every call.

    A beginning is when each lane is free and each input there, counted from the compute lane's turn. What
    happens beside computation before that turn cannot take longer than all of it together, so how much
    earlier than that a lane is free or an input there makes no difference.
    """
    program = run.program
    known: dict[object, int] = {}
    same = np.array([known.setdefault(each.chain, len(known)) for each in program.segments], np.int64)
    floor_s = np.array([spending.floor_s(each) for each in program.segments])
    begins = run.entry_s - run.entry_s[:, COMPUTE : COMPUTE + 1]
    begins = np.maximum(begins, floor_s[program.segment, None])
    keys = np.concatenate([same[program.segment][:, None].astype(np.float64), begins], axis=1)
    found = distinct_rows(keys)
    return [(call, begins[call]) for call in found.first.tolist()], found.inverse


class _Spending:
    """What pieces spend, by what they begin with."""

    def __init__(self, run: Run, lanes: Lanes, groups: tuple[Channel, ...]) -> None:
        self.lanes, self.groups = lanes, groups
        self.maps = piece_maps(run.program, run.seconds)
        self.seconds: dict[Piece, list[float]] = {
            piece: run.seconds[cost].tolist() for piece, cost in run.program.cost_of.items()
        }
        self.beside_s = {
            piece: sum(seconds)
            - sum(each for each, lane in zip(seconds, piece.shape.lane.tolist(), strict=True) if lane == COMPUTE)
            for piece, seconds in self.seconds.items()
        }
        self.known: dict[tuple[Piece, bytes], tuple[Floats, float]] = {}
        self.ops_of: dict[Piece, list[list[int]]] = {}
        self.column = {
            lane: HOST if lane == lanes.host_lane else EXPOSED + groups.index(lanes.group(lane) or Group.PP)
            for lane in range(1, len(lanes.lanes))
        }

    def floor_s(self, segment: Segment) -> float:
        """Minus all that its pieces do beside computation."""
        return -sum(repeat * self.beside_s[piece] for piece, repeat in segment.chain)

    def of_call(self, segment: Segment, begins: Floats) -> tuple[Floats, float]:
        """Columns, and the wait for inputs, of a call of *segment*."""
        columns = np.zeros(EXPOSED + len(self.groups))
        idle_s, state = 0.0, begins
        for piece, repeat in segment.chain:
            matrix = self.maps[piece][: piece.shape.lanes]
            left = repeat
            while left:
                state = state[: piece.shape.first_op]
                spent, idle = self.of_piece(piece, np.maximum(state, -self.beside_s[piece]))
                after = np.maximum.reduce(matrix + state, 1)
                after -= after[COMPUTE]
                times = left if (after == state[: len(after)]).all() else 1
                columns += spent * times
                idle_s += idle * times
                left -= times
                state = after
        return columns, idle_s

    def of_piece(self, piece: Piece, begins: Floats) -> tuple[Floats, float]:
        key = (piece, begins.tobytes())
        if key not in self.known:
            self.known[key] = self._spent(piece, begins.tolist())
        return self.known[key]

    def _spent(self, piece: Piece, begins: list[float]) -> tuple[Floats, float]:
        """Columns of one piece, and what of it waits while none of its own lanes is busy: for its inputs."""
        shape, seconds = piece.shape, self.seconds[piece]
        nodes, starts = list(begins), []
        for before, duration_s in zip(shape.waits, seconds, strict=True):
            start = max(map(nodes.__getitem__, before))
            starts.append(start)
            nodes.append(start + duration_s)
        ends = nodes[shape.first_op :]
        if piece not in self.ops_of:
            lane_of = shape.lane.tolist()
            self.ops_of[piece] = [
                [op for op, own in enumerate(lane_of) if own == lane] for lane in range(len(self.lanes.lanes))
            ]
        ops_of = self.ops_of[piece]
        columns = [0.0] * (EXPOSED + len(self.groups))
        waits, free = [], 0.0
        for op in ops_of[COMPUTE]:
            columns[OPTIMIZING if op in shape.apart else COMPUTING] += seconds[op]
            if starts[op] > free:
                waits.append([free, starts[op], starts[op] - free])
            free = ends[op]
        for lane in range(1, len(self.lanes.lanes)) if waits else ():
            # A message in the sender's own lane holds nobody up; whom it holds up is in _message_waits_s.
            if self.lanes.group(lane) is Group.PP and not self.lanes.receives:
                continue
            busy = _Busy(begins[lane], [(starts[op], ends[op]) for op in ops_of[lane]])
            for wait in waits:
                if wait[2] > 0:
                    part = min(busy.within(wait[0], wait[1]), wait[2])
                    columns[self.column[lane]] += part
                    wait[2] -= part
        return np.array(columns), sum(wait[2] for wait in waits)


class _Busy:
    """When a lane is busy: until *until*, and in its ops."""

    def __init__(self, until: float, ops: Sequence[tuple[float, float]]) -> None:
        self.spans = ([(0.0, until)] if until > 0 else []) + [span for span in ops if span[1] > span[0]]
        self.starts = [start for start, _ in self.spans]

    def within(self, begin: float, end: float) -> float:
        """Busy seconds from *begin* to *end*."""
        first = max(0, bisect_right(self.starts, begin) - 1)
        total = 0.0
        for at in range(first, len(self.spans)):
            start, stop = self.spans[at]
            if start >= end:
                break
            total += max(0.0, min(stop, end) - max(start, begin))
        return total


def _message_waits_s(step: Step, run: Run) -> Floats:
    """For each call how long it waited for a message on the way; the rest of the wait is bubble.

    A message that moves in its sender's lane is seen here only by its arrival: the last moments before it,
    as long as the message takes, are its transfer.
    """
    program = run.program
    waits_s = np.zeros(program.calls)
    if step.lanes.receives or step.schedule.stages == 1:
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
    return (program.rank < step.schedule.stages) & (place >= step.rounds_before) & (place < calls - step.rounds_after)


def _message_s(step: Step, run: Run, sent_by: Ints, targets: Ints) -> Floats:
    """Seconds of the message that each call *sent_by* gives to the rank in *targets*."""
    sources = run.program.rank[sent_by]
    # Calls of the ranks after the stages are the messages themselves (rendezvous).
    seconds: Floats = np.where(sources == targets, 0.0, step.message_s)
    return seconds
