"""The unfolded engine: a longest path over all tasks, each with its own duration.

For what cannot be folded: jitter, ranks that differ. It walks the same arrays call by call, so a task costs
its duration, its start and its end in memory and nothing more. Compiled by numba where it is installed; without
it the same function runs in Python.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.limits import JITTERED
from stepcast.ir.types import dataclass
from stepcast.simulation.engine import spread_seconds
from stepcast.simulation.kernels import compile_functions
from stepcast.simulation.lanes import COMPUTE
from stepcast.simulation.program import Program, Times
from stepcast.simulation.segments import ProgramError
from stepcast.simulation.step import Step


class UnfoldedTables(NamedTuple):
    """A program as flat tables. Shapes are laid end to end: ``first_op`` has where the ops of each begin.

    The last five change while it runs: the next call and the lanes of each rank, and which ranks wait for which calls.
    """

    lanes: int
    inputs: int
    rank_start: Sequence[int] | IntArray
    rank: Sequence[int] | IntArray
    shape: Sequence[int] | IntArray
    task_start: Sequence[int] | IntArray
    duration_start: Sequence[int] | IntArray
    source_call: Sequence[int] | IntArray
    source_task: Sequence[int] | IntArray
    first_op: Sequence[int] | IntArray
    before: Sequence[int] | IntArray
    before_start: Sequence[int] | IntArray
    shape_inputs: Sequence[int] | IntArray
    last_in_lane: Sequence[int] | IntArray
    next_call: list[int] | IntArray
    lane_free_s: list[float] | FloatArray
    first_waiting: list[int] | IntArray
    next_waiting: list[int] | IntArray
    ready: list[int] | IntArray


def simulate_unfolded(program: Program, duration_s: FloatArray | None = None, compiled: bool | None = None) -> Times:
    """Run *program* written out, with *duration_s* (one per task) in place of its costs if given.

    *compiled* asks for numba or forbids it; by default it is used when it is installed.
    """
    program = program.written_out
    if duration_s is not None and duration_s.shape != (program.tasks,):
        raise ProgramError(f"{program.tasks} tasks but {duration_s.size} durations")
    if duration_s is not None and not (np.isfinite(duration_s).all() and (duration_s >= 0).all()):
        raise ProgramError("a duration is negative or not finite")
    kernels = compile_functions((_longest_path,)) if compiled is not False else {}
    if compiled and not kernels:
        raise ProgramError("the compiled engine needs numba: pip install stepcast[compiled]")
    tables = _make_tables(program, per_task=duration_s is not None)
    if duration_s is None:
        duration_s = np.concatenate([np.zeros(0), *program.segment_seconds(program.price_costs())])
    start_s, end_s = np.empty(program.tasks), np.empty(program.tasks)
    if kernels:
        finished = kernels["_longest_path"](tables, duration_s, start_s, end_s)
    else:
        starts, ends = [0.0] * program.tasks, [0.0] * program.tasks
        finished = _longest_path(as_lists(tables), duration_s.tolist(), starts, ends)
        start_s[:], end_s[:] = starts, ends
    if finished < program.calls:
        _ = program.table.levels  # names the calls that wait for each other
    return Times(start_s, end_s)


Table = TypeVar("Table", bound=NamedTuple)


def as_lists(tables: Table) -> Table:
    """Return the same tables as plain lists, which Python indexes faster than arrays."""
    return type(tables)(*(part.tolist() if isinstance(part, np.ndarray) else part for part in tables))


def _make_tables(program: Program, per_task: bool) -> UnfoldedTables:
    shapes, shape_of = program.segment_shapes
    ops = np.array([segment.shape.ops for segment in program.segments], np.int64)
    before_start = [0]
    for shape in shapes:
        before_start.extend((before_start[-1] + shape.before_start[1:]).tolist())
    nothing = np.zeros(0, np.int64)
    return UnfoldedTables(
        lanes=len(program.lanes),
        inputs=program.inputs,
        rank_start=program.table.rank_start,
        rank=program.rank,
        shape=shape_of[program.segment],
        task_start=program.task_start,
        duration_start=program.task_start if per_task else (np.cumsum(ops) - ops)[program.segment],
        source_call=program.table.source_call.reshape(-1),
        source_task=program.source_tasks.reshape(-1),
        first_op=np.cumsum([0, *(shape.ops for shape in shapes)]).astype(np.int64),
        before=np.concatenate([nothing, *[shape.before for shape in shapes]]),
        before_start=np.array(before_start, np.int64),
        shape_inputs=np.array([shape.inputs for shape in shapes], np.int64),
        last_in_lane=np.concatenate([nothing, *[shape.last for shape in shapes]]),
        next_call=program.table.rank_start[:-1].copy(),
        lane_free_s=np.zeros(program.ranks * len(program.lanes)),
        first_waiting=np.full(program.calls, -1, np.int64),
        next_waiting=np.full(program.ranks, -1, np.int64),
        ready=np.arange(program.ranks),
    )


def _longest_path(tables: Any, duration_s: Any, start_s: Any, end_s: Any) -> int:
    """Fill *start_s* and *end_s*; return the number of calls that could run.

    Indexing only, so that it runs compiled over arrays and in Python over lists.
    """
    lanes, inputs = tables.lanes, tables.inputs
    ready, height, finished = tables.ready, len(tables.ready), 0
    while height > 0:
        height -= 1
        rank = ready[height]
        lane_base = rank * lanes
        call, stop = tables.next_call[rank], tables.rank_start[rank + 1]
        while call < stop:
            source_base = call * inputs
            blocker = -1
            for port in range(source_base, source_base + inputs):
                other = tables.source_call[port]
                if other >= 0 and tables.next_call[tables.rank[other]] <= other:
                    blocker = other
                    break
            if blocker >= 0:
                tables.next_waiting[rank] = tables.first_waiting[blocker]
                tables.first_waiting[blocker] = rank
                break
            shape, first_task = tables.shape[call], tables.task_start[call]
            first, last = tables.first_op[shape], tables.first_op[shape + 1]
            node_of_op = lanes + tables.shape_inputs[shape]
            # So that node + task_shift is a task and op + offset a duration.
            task_shift, op_shift = first_task - node_of_op, first_task - first
            duration_shift = tables.duration_start[call] - first
            for op in range(first, last):
                latest = 0.0
                for k in range(tables.before_start[op], tables.before_start[op + 1]):
                    node = tables.before[k]
                    if node >= node_of_op:
                        time = end_s[node + task_shift]
                    elif node < lanes:
                        time = tables.lane_free_s[lane_base + node]
                    else:
                        task = tables.source_task[source_base + node - lanes]
                        time = end_s[task] if task >= 0 else 0.0
                    if time > latest:
                        latest = time
                start_s[op + op_shift] = latest
                end_s[op + op_shift] = latest + duration_s[op + duration_shift]
            for lane in range(lanes):
                op = tables.last_in_lane[shape * lanes + lane]
                if op >= 0:
                    tables.lane_free_s[lane_base + lane] = end_s[first_task + op]
            finished += 1
            waiter = tables.first_waiting[call]
            while waiter >= 0:
                ready[height] = waiter
                height += 1
                waiter = tables.next_waiting[waiter]
            call += 1
            tables.next_call[rank] = call
    return finished


# Random noise on computation: how much a step varies when every kernel does.

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class StepSpread:
    """Step times of many runs."""

    runs: int
    mean_s: float
    deviation_s: float
    percentiles_s: dict[int, float]


def simulate_jitter(step: Step, jitter: float, runs: int, seed: int = 0) -> StepSpread:
    """Simulate *runs* steps in which each computation takes a log-normal factor of mean 1 and deviation *jitter*.

    The same seed gives the same runs.
    """
    if not (0 <= jitter < 10 and runs >= 1):
        raise ValueError(f"jitter must be within 0 and 10 and runs at least 1, not {jitter} and {runs}")
    JITTERED.check(step.program.written_tasks * runs)
    program = step.program.written_out
    base_s = program.task_durations_s(step.program.write_out_seconds(spread_seconds(step.program, step.base_seconds)))
    computing = program.task_lanes() == COMPUTE
    sigma = np.sqrt(np.log1p(jitter**2))
    noise = np.random.default_rng(seed)
    steps_s = np.empty(runs)
    for run in range(runs):
        durations_s = base_s.copy()
        durations_s[computing] *= np.exp(noise.normal(-(sigma**2) / 2, sigma, int(computing.sum())))
        steps_s[run] = simulate_unfolded(program, durations_s).makespan_s
    ranks = np.percentile(steps_s, PERCENTILES).tolist()
    return StepSpread(runs, float(steps_s.mean()), float(steps_s.std()), dict(zip(PERCENTILES, ranks, strict=True)))
