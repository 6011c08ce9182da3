"""The tasks of a simulated step as a Timeline, and its critical path."""

from collections.abc import Sequence

import numpy as np

from stepcast.ir.arrays import FloatArray, Int32Array, IntArray, distinct
from stepcast.ir.layout import Layout
from stepcast.ir.timeline import NONE, Lane, SpanKind, Timeline
from stepcast.ir.types import dataclass
from stepcast.simulation.lanes import COMPUTE, COMPUTE_NAME, HOST_NAME
from stepcast.simulation.program import Program, Times
from stepcast.simulation.segments import NO_LANE
from stepcast.simulation.step import Step

# Other lanes communicate.
KINDS = {COMPUTE_NAME: SpanKind.COMPUTE, HOST_NAME: SpanKind.HOST}


def timeline_of(step: Step, times: Times, layout: Layout, place: int = 0) -> Timeline:
    """Return every task that takes time, on the lanes of the rank at *place* of its stage, which was simulated for all.

    Details name the slot of a task.
    """
    program = step.program.written_out
    names = list(dict.fromkeys(name for segment in program.segments for name in segment.names))
    number = {name: index for index, name in enumerate(names)}
    slots = [segment.name or "once" for segment in program.segments]
    details = list(dict.fromkeys(slots))
    calls, lanes = program.task_calls(), program.task_lanes()
    durations_s = times.end_s - times.start_s
    shown = np.flatnonzero((durations_s > 0) & (lanes != NO_LANE))
    calls, lanes = calls[shown], lanes[shown]
    numbers = [np.array([number[name] for name in segment.names], np.int64) for segment in program.segments]
    slot_of = np.array([details.index(slot) for slot in slots], np.int64)
    used, _, lane_of = distinct(program.rank[calls] * len(program.lanes) + lanes)
    stages = range(step.schedule.stages)
    ranks = [layout.rank_of_stage(stage, place) for stage in stages]
    micro_batches = program.table.micro_batches
    batch = np.full(len(shown), NONE) if micro_batches is None else micro_batches[calls, 0]
    return Timeline(
        names=tuple(names),
        lanes=tuple(_find_lane(program, ranks, *divmod(key, len(program.lanes))) for key in used.tolist()),
        works=(),
        details=tuple({"slot": slot} for slot in details),
        name_of=program.per_task(numbers)[shown].astype(np.int32),
        lane_of=lane_of.astype(np.int32),
        kind_of=np.array([KINDS.get(name, SpanKind.COMMUNICATION) for name in program.lanes], np.int32)[lanes],
        work_of=np.full(len(shown), NONE, np.int32),
        detail_of=slot_of[program.segment[calls]].astype(np.int32),
        micro_batch_of=batch.astype(np.int32),
        parent_of=np.full(len(shown), NONE, np.int32),
        start_s=times.start_s[shown],
        duration_s=durations_s[shown],
        measured=False,
        layout=layout,
        stage_of_rank=dict(zip(ranks, stages, strict=True)),
        flows=_find_flows(step.program, shown, lanes),
    )


def _find_lane(program: Program, ranks: Sequence[int], number: int, lane: int) -> Lane:
    """Return a lane of a stage; messages that wait for their receiver have one of their own on the sending rank."""
    if number < len(ranks):
        return Lane(ranks[number], program.lanes[lane])
    sender = program.rank[program.table.source_call[program.table.rank_start[number], 0]]
    return Lane(ranks[sender], program.table.rank_names[number])


def _find_flows(folded: Program, shown: IntArray, lanes: IntArray) -> Int32Array:
    """Return messages between ranks: the row that sends, and the first row that computes once it has arrived."""
    program = folded.written_out
    row = np.full(program.tasks, -1, np.int64)
    row[shown] = np.arange(len(shown))
    # Inputs are those of a slot's first piece; what it computes may be in a later one.
    first = folded.flat_start[:-1]
    begins, ends = program.task_start[first], program.task_start[folded.flat_start[1:]]
    computing = np.flatnonzero(lanes == COMPUTE)
    index = np.searchsorted(shown[computing], begins)
    computes = np.append(shown[computing], program.tasks)[index] < ends
    waits = np.where(computes, np.append(computing, -1)[index], -1)
    pairs = []
    for port in range(program.inputs):
        sources = program.table.source_call[first, port]
        calls = np.flatnonzero((sources >= 0) & (waits >= 0))
        between = program.rank[first[calls]] != program.rank[sources[calls]]
        calls = calls[between]
        rows = np.stack([row[program.source_tasks[first[calls], port]], waits[calls]], axis=1)
        pairs.append(rows[(rows >= 0).all(axis=1)])
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs]).astype(np.int32)


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The chain of tasks, each starting when the one before it ends, that ends last. Nothing on it waits, so its
    durations sum to the makespan.
    """

    call: IntArray
    op: IntArray
    start_s: FloatArray
    end_s: FloatArray

    @property
    def duration_s(self) -> FloatArray:
        return self.end_s - self.start_s

    def __len__(self) -> int:
        return len(self.call)


def critical_path(program: Program, times: Times) -> CriticalPath:
    """Walk back from the task that ends last to the start of the step.

    The one rule for ties: of the tasks that end last, the first by number; of the things a task waited for that ended
    at the same time, the op before it in its lane, then the others in the order in which it names them.
    """
    program = program.written_out
    starts = program.task_start
    outside = _OutsideTasks(program)
    path: list[tuple[int, int]] = []
    task = int(times.end_s.argmax()) if program.tasks else 0
    call = int(np.searchsorted(starts, task, side="right")) - 1 if program.tasks else -1
    op = task - int(starts[call])
    while call >= 0:
        # One call at a time: plain floats are several times faster to walk than array elements.
        ends = times.end_s[starts[call] : starts[call + 1]].tolist()
        shape = program.segments[program.segment[call]].shape
        waits, first_op, here = shape.waits, shape.first_op, call
        while call == here:
            path.append((call, op))
            latest, call = 0.0, -1
            for node in waits[op]:
                from_call, from_op = (here, node - first_op) if node >= first_op else outside.find(here, node)
                if from_call < 0:
                    continue
                end = ends[from_op] if from_call == here else times.end_s[starts[from_call] + from_op]
                if end > latest:
                    latest, call, op = end, from_call, from_op
    path.reverse()
    calls, ops = np.array(path, np.int64).reshape(-1, 2).T
    tasks = starts[calls] + ops
    return CriticalPath(calls, ops, times.start_s[tasks], times.end_s[tasks])


class _OutsideTasks:
    """The tasks of other calls that an op waits for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        last = np.array([segment.shape.last for segment in program.segments])
        self.last = last[program.segment] if program.calls else last
        self.users = [np.flatnonzero(column >= 0) for column in self.last.T]

    def find(self, call: int, node: int) -> tuple[int, int]:
        """Return call and op of the lane or input *node* of *call*; (-1, -1) for the start of the step."""
        program, lanes = self.program, len(self.program.lanes)
        if node < lanes:
            users = self.users[node]
            index = int(np.searchsorted(users, call)) - 1
            if index < 0 or users[index] < program.table.rank_start[program.rank[call]]:
                return -1, -1
            return int(users[index]), int(self.last[users[index], node])
        source = int(program.table.source_call[call, node - lanes])
        task = int(program.source_tasks[call, node - lanes])
        return (source, task - int(program.task_start[source])) if source >= 0 else (-1, -1)
