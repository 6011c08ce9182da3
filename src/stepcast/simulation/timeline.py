"""The tasks of a simulated step as a Timeline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.layout import Layout
from stepcast.ir.timeline import NONE, Lane, SpanKind, Timeline
from stepcast.simulation.fold import distinct
from stepcast.simulation.lanes import COMPUTE
from stepcast.simulation.program import Program, Times
from stepcast.simulation.segments import NO_LANE
from stepcast.simulation.step import Step


def timeline_of(step: Step, times: Times, layout: Layout, place: int = 0) -> Timeline:
    """Every task that takes time, on the lanes of the rank at *place* of its stage, which was simulated for
    all.

    Details say which slot a task belongs to.
    """
    program = step.program.written_out
    names = list(dict.fromkeys(name for segment in program.segments for name in segment.names))
    number = {name: at for at, name in enumerate(names)}
    slots = [segment.name or "once" for segment in program.segments]
    details = list(dict.fromkeys(slots))
    calls, lanes = program.task_calls(), program.task_lanes()
    durations_s = times.end_s - times.start_s
    kept = np.flatnonzero((durations_s > 0) & (lanes != NO_LANE))
    calls, lanes = calls[kept], lanes[kept]
    name_of = program.per_task(
        [np.array([number[name] for name in segment.names], np.int64) for segment in program.segments]
    )[kept]
    slot_of = np.array([details.index(slot) for slot in slots], np.int64)
    used, _, lane_of = distinct(program.rank[calls] * len(program.lanes) + lanes)
    stages = range(step.schedule.stages)
    ranks = [layout.rank_of_stage(stage, place) for stage in stages]
    micro_batches = program.micro_batches
    batch = np.full(len(kept), NONE) if micro_batches is None else micro_batches[calls, 0]
    return Timeline(
        names=tuple(names),
        lanes=tuple(_lane(program, ranks, *divmod(key, len(program.lanes))) for key in used.tolist()),
        works=(),
        details=tuple({"slot": slot} for slot in details),
        name_of=name_of.astype(np.int32),
        lane_of=lane_of.astype(np.int32),
        kind_of=np.where(lanes == COMPUTE, SpanKind.COMPUTE, SpanKind.COMMUNICATION).astype(np.int32),
        work_of=np.full(len(kept), NONE, np.int32),
        detail_of=slot_of[program.segment[calls]].astype(np.int32),
        micro_batch_of=batch.astype(np.int32),
        parent_of=np.full(len(kept), NONE, np.int32),
        start_s=times.start_s[kept],
        duration_s=durations_s[kept],
        measured=False,
        layout=layout,
        stage_of_rank=dict(zip(ranks, stages, strict=True)),
        flows=_flows(step.program, kept, lanes),
    )


def _lane(program: Program, ranks: Sequence[int], number: int, lane: int) -> Lane:
    """A lane of a stage; messages that wait for their receiver lie apart, on the rank that sends them."""
    if number < len(ranks):
        return Lane(ranks[number], program.lanes[lane])
    sender = program.rank[program.source_call[program.rank_start[number], 0]]
    return Lane(ranks[sender], program.rank_names[number])


def _flows(whole: Program, kept: IntArray, lanes: IntArray) -> npt.NDArray[np.int32]:
    """Messages between ranks: the row that sends, and the first row that computes once it has arrived."""
    program = whole.written_out
    row = np.full(program.tasks, -1, np.int64)
    row[kept] = np.arange(len(kept))
    most = max((len(segment.shape.outputs) for segment in program.segments), default=0)
    output_op = np.full((len(program.segments), max(most, 1)), -1, np.int64)
    for number, segment in enumerate(program.segments):
        output_op[number, : len(segment.shape.outputs)] = segment.shape.outputs
    # Inputs are those of a slot's first piece; what it computes may stand in a later one.
    first = whole.flat_start[:-1]
    begins, ends = program.task_start[first], program.task_start[whole.flat_start[1:]]
    computing = np.flatnonzero(lanes == COMPUTE)
    at = np.searchsorted(kept[computing], begins)
    found = np.append(kept[computing], program.tasks)[at] < ends
    waits = np.where(found, np.append(computing, -1)[at], -1)
    pairs = []
    for port in range(program.inputs):
        sources = program.source_call[first, port]
        calls = np.flatnonzero((sources >= 0) & (waits >= 0))
        sources = sources[calls]
        between = program.rank[first[calls]] != program.rank[sources]
        calls, sources = calls[between], sources[between]
        sent = output_op[program.segment[sources], program.source_port[first[calls], port]]
        rows = np.stack([row[program.task_start[sources] + sent], waits[calls]], axis=1)
        pairs.append(rows[(rows >= 0).all(axis=1)])
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs]).astype(np.int32)


# The critical path: the chain of tasks, each starting when the one before it ends, that ends last.


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """Tasks in the order of time. Their durations sum to the makespan: nothing on the path waits."""

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

    The one rule for ties: of the tasks that end last, the first by number; of the things a task waited for
    that ended at the same time, the op before it in its lane, then the others in the order in which it names
    them.
    """
    program = program.written_out
    starts = program.task_start
    outside = _Outside(program)
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
                from_call, from_op = (here, node - first_op) if node >= first_op else outside.task(here, node)
                if from_call < 0:
                    continue
                end = ends[from_op] if from_call == here else times.end_s[starts[from_call] + from_op]
                if end > latest:
                    latest, call, op = end, from_call, from_op
    path.reverse()
    calls, ops = np.array(path, np.int64).reshape(-1, 2).T
    tasks = starts[calls] + ops
    return CriticalPath(calls, ops, times.start_s[tasks], times.end_s[tasks])


class _Outside:
    """The task of another call that an op waits for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        last = np.array([segment.shape.last for segment in program.segments])
        self.last = last[program.segment] if program.calls else last
        self.users = [np.flatnonzero(column >= 0) for column in self.last.T]

    def task(self, call: int, node: int) -> tuple[int, int]:
        """Call and op of the lane or input *node* of *call*; (-1, -1) for the start of the step."""
        lanes = len(self.program.lanes)
        return self.lane(call, node) if node < lanes else self.source(call, node - lanes)

    def lane(self, call: int, lane: int) -> tuple[int, int]:
        users = self.users[lane]
        found = int(np.searchsorted(users, call)) - 1
        if found < 0 or users[found] < self.program.rank_start[self.program.rank[call]]:
            return -1, -1
        return int(users[found]), int(self.last[users[found], lane])

    def source(self, call: int, port: int) -> tuple[int, int]:
        program = self.program
        source = int(program.source_call[call, port])
        if source < 0:
            return -1, -1
        outputs = program.segments[program.segment[source]].shape.outputs
        return source, int(outputs[program.source_port[call, port]])
