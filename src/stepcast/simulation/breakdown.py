"""The time breakdown of a step, stage by stage, summing exactly to the step.

On each stage every moment is one of: computing; waiting while a communication of some group runs (its exposed part);
waiting for the host; or waiting for another stage (the bubble). Calls with equal entry times spend their time equally,
so each distinct entry is computed once: a layer that repeats comes to the same entry after one or two times.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.layout import Channel, Group
from stepcast.ir.limits import OPS_DESCRIBED
from stepcast.ir.types import dataclass
from stepcast.simulation.engine import Run, piece_maps
from stepcast.simulation.lanes import COMPUTE, Lanes
from stepcast.simulation.step import Step

COMPUTING, OPTIMIZING, HOST, EXPOSED = 0, 1, 2, 3
"""Columns of the seconds of a call; exposed is one column for each group, the pipeline's first."""
LONG = 4096
"""Ops of a piece beyond what layers have; each entry of one takes milliseconds."""


@dataclass(frozen=True)
class StageTime:
    """The seconds of one stage; all of them together are the step."""

    stage: int
    compute_s: float
    optimizer_s: float
    exposed_s: Mapping[Channel, float]
    host_s: float  # waiting for an eager host to issue the next computation
    bubble_s: float
    communication_s: Mapping[Channel, float]  # of each group, exposed or not

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.optimizer_s

    @property
    def total_s(self) -> float:
        return self.busy_s + sum(self.exposed_s.values()) + self.host_s + self.bubble_s


def round_bubble_s(bubble_s: float, step_s: float) -> float:
    """Return *bubble_s*, or zero where it is rounding: a stage without bubbles must not show a negative one."""
    return 0.0 if abs(bubble_s) < 1e-12 * step_s else bubble_s


def stage_times(step: Step, run: Run) -> tuple[StageTime, ...]:
    """Return the breakdown of every stage of *run*, the simulation of *step*."""
    program, lanes = run.program, step.lanes
    groups = tuple(dict.fromkeys([Group.PP, *lanes.groups]))
    calculator = _CallTimes(run, lanes, groups)
    calls, entry_of = _find_entries(run, calculator)
    chains = [program.chains[program.segment[call]] for call, _ in calls]
    ops = [program.pieces[number][0].shape.ops for chain in chains for number, _ in chain]
    OPS_DESCRIBED.check(sum(count for count in ops if count > LONG))
    parts = [calculator.split_call(chain, entry) for chain, (_, entry) in zip(chains, calls, strict=True)]
    spent, idle_s = np.array([part[0] for part in parts]), np.array([part[1] for part in parts])
    per_call = spent[entry_of]
    # What a stage does itself while a message is under way counts as that, not as waiting for it.
    per_call[:, EXPOSED] += np.minimum(_message_waits_s(step, run), idle_s[entry_of])
    if run.runs is not None:
        per_call *= run.runs[:, None]
    busy = program.lane_busy_s(run.seconds, run.runs)
    stages = []
    for stage in range(step.schedule.stages):
        totals = per_call[program.table.rank_start[stage] : program.table.rank_start[stage + 1]].sum(axis=0)
        communication = dict.fromkeys(groups, 0.0)
        for lane, seconds in enumerate(busy[stage][: len(lanes.lanes)].tolist()):
            group = lanes.group(lane)
            if group is not None:
                communication[group] += seconds
        # A lane is taken, too, where its op waits for another rank, which is bubble, or for its host (one stage waits
        # for nothing else). Messages in their sender's lane are left out: a stage waits for those of others.
        own = EXPOSED + (not lanes.receives)
        totals[own:] = np.minimum(totals[own:], [communication[group] for group in groups[own - EXPOSED :]])
        unassigned_s = round_bubble_s(run.makespan_s - float(totals.sum()), run.makespan_s)
        has_pipeline = step.schedule.stages > 1
        stages.append(
            StageTime(
                stage=stage,
                compute_s=float(totals[COMPUTING]),
                optimizer_s=float(totals[OPTIMIZING]),
                host_s=float(totals[HOST]) + (0.0 if has_pipeline else unassigned_s),
                exposed_s=dict(zip(groups, totals[EXPOSED:].tolist(), strict=True)),
                bubble_s=unassigned_s if has_pipeline else 0.0,
                communication_s=communication,
            )
        )
    return tuple(stages)


def _find_entries(run: Run, calculator: "_CallTimes") -> tuple[list[tuple[int, FloatArray]], IntArray]:
    """Return one call with its entry for each distinct entry, and the index of the entry of every call.

    An entry is when each lane is free and each input there, counted from the compute lane's turn. What happens outside
    computation before that turn cannot take longer than all of it together, so how much earlier than that a lane is
    free or an input there makes no difference.
    """
    program = run.program
    # What segments spend outside computation.
    other_s = [[repeat * calculator.other_s[number] for number, repeat in chain] for chain in program.chains]
    earliest_s = -np.array(list(map(sum, other_s)), np.float64)
    entries = run.entry_s - run.entry_s[:, COMPUTE : COMPUTE + 1]
    entries = np.maximum(entries, earliest_s[program.segment, None])
    rows = np.ascontiguousarray(np.concatenate([program.segment[:, None], entries], axis=1))
    keys: list[bytes] = rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel().tolist()
    known = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    entry_of = np.fromiter(map(known.__getitem__, keys), np.int64, len(keys))
    first = np.flatnonzero(np.diff(np.maximum.accumulate(entry_of), prepend=-1)).tolist()
    return [(call, entries[call]) for call in first], entry_of


class _CallTimes:
    """Splits the time of calls and pieces by what they begin with."""

    def __init__(self, run: Run, lanes: Lanes, groups: tuple[Channel, ...]) -> None:
        self.lanes, self.groups = lanes, groups
        self.pieces = [piece for piece, _ in run.program.pieces]
        self.maps = piece_maps(run.program, run.seconds)
        self.seconds: list[list[float]] = [run.seconds[ops].tolist() for ops in run.program.ops_of]
        self.other_s = [
            sum(seconds) - sum([seconds[op] for op in piece.shape.lane_ops[COMPUTE]])
            for piece, seconds in zip(self.pieces, self.seconds, strict=True)
        ]
        self.known: dict[tuple[int, bytes], tuple[FloatArray, float]] = {}
        # A message in the sender's own lane holds nobody up here; see _message_waits_s.
        self.column = {
            lane: HOST if lane == lanes.host_lane else EXPOSED + groups.index(lanes.group(lane) or Group.PP)
            for lane in range(1, len(lanes.lanes))
            if lanes.receives or lanes.group(lane) is not Group.PP
        }

    def split_call(self, chain: Sequence[tuple[int, int]], entry: FloatArray) -> tuple[FloatArray, float]:
        """Return the columns of a call of *chain*, and the time that it waits for inputs."""
        columns = np.zeros(EXPOSED + len(self.groups))
        idle_s, state = 0.0, entry
        for number, repeat in chain:
            shape = self.pieces[number].shape
            matrix, earliest_s = self.maps[number][: shape.lanes], -self.other_s[number]
            left = repeat
            while left:
                state = state[: shape.first_op]
                begins = np.maximum(state, earliest_s)
                key = (number, begins.tobytes())
                if key not in self.known:
                    self.known[key] = self._split_piece(number, begins.tolist())
                spent, idle = self.known[key]
                after = np.maximum.reduce(matrix + state, 1)
                passed_s = after[COMPUTE]
                after -= passed_s
                times = 1
                if left > 1:
                    # How far behind a lane is that the piece does not touch makes no difference here; later it may.
                    before = state[: len(after)]
                    behind = (after == before - passed_s) & (before <= earliest_s)
                    times = left if (behind | (after == before)).all() else 1
                    after[behind] -= (times - 1) * passed_s
                columns += spent * times
                idle_s += idle * times
                left -= times
                state = after
        return columns, idle_s

    def _split_piece(self, number: int, begins: list[float]) -> tuple[FloatArray, float]:
        """Return the columns of one piece, and the time it waits while none of its own lanes is busy: for inputs."""
        piece, seconds = self.pieces[number], self.seconds[number]
        shape, optimizer_ops = piece.shape, piece.optimizer_ops
        nodes, starts = list(begins), []
        for before, duration_s in zip(shape.waits, seconds, strict=True):
            start = nodes[before[0]] if len(before) == 1 else max([nodes[node] for node in before])
            starts.append(start)
            nodes.append(start + duration_s)
        ends = nodes[shape.first_op :]
        columns = [0.0] * (EXPOSED + len(self.groups))
        waits, free = [], 0.0
        for op in shape.lane_ops[COMPUTE]:
            columns[OPTIMIZING if op in optimizer_ops else COMPUTING] += seconds[op]
            if starts[op] > free:
                waits.append([free, starts[op], starts[op] - free])
            free = ends[op]
        for lane, column in self.column.items() if waits else ():
            if begins[lane] <= 0 and not shape.lane_ops[lane]:
                continue
            # When the lane is busy: until it is free for this piece, and in its ops.
            spans = [(0.0, begins[lane]), *[(starts[op], ends[op]) for op in shape.lane_ops[lane]]]
            spans = [(start, stop) for start, stop in spans if stop > start]
            span_starts = [start for start, _ in spans]
            for wait in waits:
                begin, end, left_s = wait
                if left_s > 0:
                    busy_s = 0.0
                    for start, stop in spans[max(0, bisect_right(span_starts, begin) - 1) :]:
                        if start >= end:
                            break
                        busy_s += max(0.0, min(stop, end) - max(start, begin))
                    part = min(busy_s, left_s)
                    columns[column] += part
                    wait[2] -= part
        return np.array(columns), sum(wait[2] for wait in waits)


def _message_waits_s(step: Step, run: Run) -> FloatArray:
    """Return for each call how long it waited for a message on the way; the rest of the wait is bubble.

    A message that moves in its sender's lane is seen here only by its arrival: the last moments before it, as long as
    the message takes, are its transfer.
    """
    program, stages = run.program, step.schedule.stages
    waits_s = np.zeros(program.calls)
    if step.lanes.receives or stages == 1:
        return waits_s
    lanes = len(program.lanes)
    # Calls that run a slot of the schedule: not the rounds of a stage, nor messages.
    place = np.arange(program.calls) - program.table.rank_start[program.rank]
    last = np.diff(program.table.rank_start)[program.rank] - step.plan.rounds[1]
    is_slot = (program.rank < stages) & (place >= step.plan.rounds[0]) & (place < last)
    for port in range(program.inputs):
        arrives = np.flatnonzero(is_slot & (program.table.source_call[:, port] >= 0))
        waited = run.entry_s[arrives, lanes + port] - run.entry_s[arrives, COMPUTE]
        # Calls of the ranks after the stages are the messages themselves (rendezvous).
        local = program.rank[program.table.source_call[arrives, port]] == program.rank[arrives]
        taken = np.clip(np.minimum(waited, np.where(local, 0.0, step.message_s)), 0.0, None)
        waits_s[arrives] = np.maximum(waits_s[arrives], taken)
    return waits_s
