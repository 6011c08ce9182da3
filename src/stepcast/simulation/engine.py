"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

Each end time in a segment is the maximum, over what the segment begins with (the times its lanes are free and
its inputs arrive), of that time plus a constant. So a segment is a small matrix: columns for lanes and
inputs, rows for lanes and outputs, built once however often the segment is called. A call is one
matrix-vector product in (max, +); calls at the same level of the dependency graph are done together. The
times of single tasks are computed afterwards, and only when asked for.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepcast.simulation.arrays import Floats, Ints, Program, ProgramError, Shape, Times


@dataclass(frozen=True, eq=False)
class Run:
    """What the folded engine found."""

    program: Program
    entry_s: Floats
    """calls x (lanes + inputs): when each lane is free and each input is there as the call begins."""
    lane_end_s: Floats
    """ranks x lanes: when each lane ends its last op; 0 for a lane without any."""
    makespan_s: float


def simulate(program: Program) -> Run:
    """Run *program*. ProgramError if calls wait for each other in a circle."""
    lanes = len(program.lanes)
    maps = fold(program)
    columns, rows = maps.shape[1:]
    order, bounds, gather = _plan(program, columns, rows)
    # Row 0 is the start of the step: every lane free at 0, and inputs that nobody sends.
    values = np.zeros((program.calls + 1, rows))
    flat = values.reshape(-1)
    segment, entries, done = program.segment[order], gather[:, :, None], values[1:]
    for start, stop in pairwise(bounds):
        terms = maps.take(segment[start:stop], 0)
        terms += flat.take(entries[start:stop])
        np.maximum.reduce(terms, 1, out=done[start:stop])
    entry_s = np.empty((program.calls, columns))
    entry_s[order] = flat[gather]
    place = np.empty(program.calls + 1, np.int64)
    place[order] = np.arange(1, program.calls + 1)
    place[-1] = 0
    last = np.where(np.diff(program.rank_start) > 0, program.rank_start[1:] - 1, program.calls)
    return Run(program, entry_s, values[place[last], :lanes], float(values.max(initial=0.0)))


def fold(program: Program) -> Floats:
    """segments x (lanes + inputs) x (lanes + outputs): the max-plus matrix of every segment."""
    shapes, shape_of = program.shapes
    lanes, columns = len(program.lanes), len(program.lanes) + program.inputs
    rows = lanes + max((len(shape.outputs) for shape in shapes), default=0)
    maps = np.full((len(program.segments), columns, rows), -np.inf)
    for number, shape in enumerate(shapes):
        members = np.flatnonzero(shape_of == number)
        durations = np.stack([program.segments[member].duration_s for member in members], axis=1)
        nodes = np.full((shape.first_op + shape.ops, columns, len(members)), -np.inf)
        nodes[np.arange(shape.first_op), np.arange(shape.first_op)] = 0.0
        for op, before in enumerate(shape.waits):
            np.add(latest(nodes, before), durations[op], out=nodes[shape.first_op + op])
        kept = np.concatenate([_exits(shape), shape.first_op + shape.outputs])
        maps[members, :, : len(kept)] = nodes[kept].transpose(2, 1, 0)
    return maps


def _exits(shape: Shape) -> Ints:
    """The node that says when each lane is free after the segment."""
    last = shape.last_in_lane
    return np.where(last < 0, np.arange(shape.lanes), shape.first_op + last)


def latest(nodes: Floats, before: tuple[int, ...]) -> Floats:
    """The maximum over the nodes *before*."""
    found: Floats = nodes[before[0]]
    for node in before[1:]:
        found = np.maximum(found, nodes[node])
    return found


def _plan(program: Program, columns: int, rows: int) -> tuple[Ints, list[int], NDArray[np.intp]]:
    """The calls by level, where each level begins, and where in the values each call finds its entry
    times."""
    level = levels(program)
    order = np.argsort(level, kind="stable")
    bounds = np.flatnonzero(np.diff(level[order], prepend=-1, append=program.calls + 1)).tolist()
    place = np.zeros(program.calls + 1, np.int64)
    place[order] = np.arange(1, program.calls + 1)
    lanes = len(program.lanes)
    previous = place[np.arange(-1, program.calls - 1)]
    previous[program.rank_start[:-1][np.diff(program.rank_start) > 0]] = 0
    gather = np.empty((program.calls, columns), np.intp)
    gather[:, :lanes] = (previous * rows)[:, None] + np.arange(lanes)
    gather[:, lanes:] = np.where(
        program.source_call >= 0, place[program.source_call] * rows + lanes + program.source_port, 0
    )
    return order, bounds, gather[order]


def levels(program: Program) -> Ints:
    """For each call the number of calls on the longest chain that leads to it."""
    several = (program.source_call >= 0).sum(axis=1) > 1
    many = {int(call): program.source_call[call].tolist() for call in np.flatnonzero(several)}
    sources = np.where(several, _MANY, program.source_call.max(axis=1, initial=-1)).tolist()
    at, stop = program.rank_start[:-1].tolist(), program.rank_start[1:].tolist()
    level, height_of = [-1] * program.calls, [-1] * program.ranks
    waiting: dict[int, list[int]] = {}
    ready = list(range(program.ranks))
    while ready:
        rank = ready.pop()
        height = height_of[rank]
        for call in range(at[rank], stop[rank]):
            source = sources[call]
            if source == _MANY:
                source = _latest_source(level, many[call])
            if source >= 0:
                other = level[source]
                if other < 0:
                    waiting.setdefault(source, []).append(rank)
                    at[rank] = call
                    break
                if other > height:
                    height = other
            height += 1
            level[call] = height
            if call in waiting:
                ready += waiting.pop(call)
        else:
            at[rank] = stop[rank]
        height_of[rank] = height
    if waiting:
        raise ProgramError(_deadlock(program, at))
    return np.array(level, np.int64)


_MANY = -2
"""Stands for a call with more than one source; most have one, and the loop over them should be short."""


def _latest_source(level: list[int], sources: list[int]) -> int:
    """A source that has not run, or the one with the highest level."""
    bound = [source for source in sources if source >= 0]
    return min(bound, key=lambda source: (level[source] >= 0, -level[source]))


def _deadlock(program: Program, at: list[int]) -> str:
    """Which call waits for which, given the call that every rank stands at."""

    def named(call: int) -> str:
        rank = int(program.rank[call])
        segment = program.segments[program.segment[call]].name
        name = program.rank_names[rank] if program.rank_names else f"rank {rank}"
        return f"call {call - program.rank_start[rank]} of {name} ({segment})"

    call = next(call for call, stop in zip(at, program.rank_start[1:], strict=True) if call < stop)
    sources = program.source_call[call].tolist()
    blocker = next(source for source in sources if source >= 0 and source >= at[program.rank[source]])
    return f"deadlock: {named(call)} waits for {named(blocker)}"


def task_times(run: Run) -> Times:
    """The start and end of every task, from the entry times of its call."""
    program = run.program
    shapes, shape_of = program.shapes
    start_s, end_s = np.empty(program.tasks), np.empty(program.tasks)
    call_shape = shape_of[program.segment]
    for number, shape in enumerate(shapes):
        calls = np.flatnonzero(call_shape == number)
        if not len(calls):
            continue
        members = np.flatnonzero(shape_of == number)
        durations = np.stack([program.segments[member].duration_s for member in members], axis=1)
        row = np.searchsorted(members, program.segment[calls])
        nodes = np.empty((shape.first_op + shape.ops, len(calls)))
        nodes[: shape.first_op] = run.entry_s[calls, : shape.first_op].T
        starts = np.empty((shape.ops, len(calls)))
        for op, before in enumerate(shape.waits):
            starts[op] = latest(nodes, before)
            np.add(starts[op], durations[op][row], out=nodes[shape.first_op + op])
        tasks = program.task_start[calls][:, None] + np.arange(shape.ops)
        start_s[tasks] = starts.T
        end_s[tasks] = nodes[shape.first_op :].T
    return Times(start_s, end_s)
