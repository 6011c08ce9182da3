"""The critical path: the chain of tasks, each starting when the one before it ends, that ends last."""

from dataclasses import dataclass

import numpy as np

from stepcast.simulation.arrays import Program, Times
from stepcast.simulation.pieces import Floats, Ints


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """Tasks in the order of time. Their durations sum to the makespan: nothing on the path waits."""

    call: Ints
    op: Ints
    start_s: Floats
    end_s: Floats

    @property
    def duration_s(self) -> Floats:
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
