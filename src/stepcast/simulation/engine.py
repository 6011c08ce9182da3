"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

A segment is a small matrix (``fold``), built once however often it is called; a call is one matrix-vector
product in (max, +), and calls at the same level of the dependency graph are done together (``plan``). The
times of single tasks are computed afterwards, and only when asked for.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepcast.simulation.arrays import Program, Times
from stepcast.simulation.pieces import Floats, Ints, Piece
from stepcast.simulation.plan import CallPlan, plan_of


@dataclass(frozen=True, eq=False)
class Run:
    """What the folded engine found."""

    program: Program
    seconds: Floats
    """The price of each of the program's costs."""
    plan: CallPlan
    left_s: Floats
    """What the calls leave behind, in the order of the plan."""
    makespan_s: float

    @cached_property
    def entry_s(self) -> Floats:
        """calls x (lanes + inputs): where each lane stands and when each input is there as the call begins;
        0 for registers that nothing reads."""
        entry_s = np.zeros((self.program.calls, len(self.program.lanes) + self.program.inputs))
        if self.program.calls:
            entry_s[:, self.program.fold.begins[:, 0]] = self.plan.entries(self.left_s)
        return entry_s


def simulate(program: Program, seconds: Floats | None = None) -> Run:
    """Run *program* with *seconds*, one for each of its costs; without, its costs are seconds.

    ProgramError if calls wait for each other in a circle.
    """
    prices = program.priced() if seconds is None else seconds
    fold = program.fold
    maps = fold.maps(prices[program.op_costs])
    plan = plan_of(program, fold.read, fold.given)
    left_s = plan.sweep(np.ascontiguousarray(maps.transpose(1, 2, 0)), program.chain_of[program.segment])
    return Run(program, prices, plan, left_s, float(left_s.max(initial=0.0)))


def makespans_s(program: Program, seconds: Floats) -> Floats:
    """When *program* ends under each row of *seconds*: price lists x costs."""
    return np.array([simulate(program, prices).makespan_s for prices in seconds])


def piece_maps(program: Program, seconds: Floats) -> dict[Piece, Floats]:
    """(lanes + outputs) x (lanes + inputs): the matrix of each piece."""
    fold = program.fold
    pieces = fold.pieces(seconds[program.op_costs])
    return {piece: fold.dense(pieces, number) for number, piece in enumerate(program.pieces)}


def _latest(nodes: Floats, before: tuple[int, ...]) -> Floats:
    """The maximum over the nodes *before*."""
    latest: Floats = nodes[before[0]]
    for node in before[1:]:
        latest = np.maximum(latest, nodes[node])
    return latest


def task_times(run: Run) -> Times:
    """The start and end of every task of the program written out, from the entry times of its call."""
    program, entry_s = run.program.written_out, _written_out(run)
    seconds = program.segment_seconds(run.seconds[_renumbered(run.program, program)])
    shapes, shape_of = program.shapes
    start_s, end_s = np.empty(program.tasks), np.empty(program.tasks)
    call_shape = shape_of[program.segment]
    for number, shape in enumerate(shapes):
        calls = np.flatnonzero(call_shape == number)
        if not len(calls):
            continue
        members = np.flatnonzero(shape_of == number)
        durations = np.stack([seconds[member] for member in members], axis=1)
        row = np.searchsorted(members, program.segment[calls])
        nodes = np.empty((shape.first_op + shape.ops, len(calls)))
        nodes[: shape.first_op] = entry_s[calls, : shape.first_op].T
        starts = np.empty((shape.ops, len(calls)))
        for op, before in enumerate(shape.waits):
            starts[op] = _latest(nodes, before)
            np.add(starts[op], durations[op][row], out=nodes[shape.first_op + op])
        tasks = program.task_start[calls][:, None] + np.arange(shape.ops)
        start_s[tasks] = starts.T
        end_s[tasks] = nodes[shape.first_op :].T
    return Times(start_s, end_s)


def _renumbered(program: Program, flat: Program) -> Ints:
    """Where each cost of *flat* stands among those of *program*."""
    number = {cost: at for at, cost in enumerate(program.costs)}
    return np.array([number[cost] for cost in flat.costs], np.int64)


def _written_out(run: Run) -> Floats:
    """The entry times of the calls of the program whose every piece is a call of its own."""
    program, flat = run.program, run.program.written_out
    if program.flat:
        return run.entry_s
    lanes, maps = len(program.lanes), piece_maps(program, run.seconds)
    entry_s = np.zeros((flat.calls, lanes + flat.inputs))
    for number, segment in enumerate(program.segments):
        calls = np.flatnonzero(program.segment == number)
        at, state = program.flat_start[calls], run.entry_s[calls]
        for piece, repeat in segment.chain:
            matrix = maps[piece]
            for _ in range(repeat):
                entry_s[at, : state.shape[1]] = state
                columns = state[:, None, : matrix.shape[1]]
                state = np.maximum.reduce(matrix[:lanes] + columns, 2)
                at = at + 1
    return entry_s
