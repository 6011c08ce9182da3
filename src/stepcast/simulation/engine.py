"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

A segment is a small matrix (``fold``), built once however often it is called; a call is one matrix-vector
product in (max, +), and calls at the same level of the dependency graph are done together (``plan``). The
times of single tasks are computed afterwards, and only when asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stepcast.simulation.fold import Chain, Fold, read_by
from stepcast.simulation.program import CallPlan, Program, Times, level_bounds, order_of, plan_of
from stepcast.simulation.segments import Floats, Form, Ints, Piece


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


# Many programs run in one pass, for when they end alone: a level of one has too few calls to keep a
# processor busy, so that calls of the same level of all programs are done together.
#
# Each is run exactly as ``engine.simulate`` runs it by itself. Programs of fewer lanes, inputs or outputs have
# columns and rows of minus infinity beside their own.

MOST_CALLS = 2**18
"""Calls that are run together at most, unless one program has more: tens of megabytes."""

NOTHING: Mapping[int, Ints] = {}
Priced = tuple[Program, Floats]
"""A program with the price of each of its costs."""


def makespans_together(
    programs: Sequence[Priced], watched: Mapping[int, Ints] = NOTHING
) -> tuple[list[float], dict[int, float]]:
    """When each program ends; and of those that are *watched*, by how much later some calls leave everything
    than some others, where that is one number: 2 x places of calls in the program's order.
    """
    found, moves_s = [0.0] * len(programs), dict[int, float]()
    for part in _parts([program.calls for program, _ in programs]):
        own = {at: watched[number] for at, number in enumerate(part) if number in watched}
        ends_s, moved_s = _makespans_s([programs[at] for at in part], own)
        for at, number in enumerate(part):
            found[number] = ends_s[at]
            if at in moved_s:
                moves_s[number] = moved_s[at]
    return found, moves_s


def _parts(calls: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of programs that run together, long ones with long ones, which have as many levels; those
    without calls have nothing to run.
    """
    part: list[int] = []
    total = 0
    for number in sorted(range(len(calls)), key=lambda number: -calls[number]):
        each = calls[number]
        if part and total + each > MOST_CALLS:
            yield part
            part, total = [], 0
        if each:
            part.append(number)
            total += each
    if part:
        yield part


def _makespans_s(programs: Sequence[Priced], watched: Mapping[int, Ints]) -> tuple[list[float], dict[int, float]]:
    fold = _fold([program for program, _ in programs])
    maps = fold.maps(np.concatenate([seconds[program.op_costs] for program, seconds in programs]))
    maps, lanes = _decisive(maps, fold.read, [len(program.chains) for program, _ in programs])
    columns, _, rows = maps.shape
    order = _Joined([program for program, _ in programs], columns - lanes)
    entries = np.empty((columns, len(order.chain)), np.int64)
    entries[:lanes] = order.previous * rows + np.arange(lanes)[:, None]
    entries[lanes:] = np.where(order.sources > 0, order.sources * rows + lanes + order.ports, 0)
    # What each call leaves behind, in this order, the first row being the start of the step.
    values = np.zeros((len(order.chain) + 1, rows))
    done, chain, latest = values[1:], order.chain, np.maximum.reduce
    matrices, found = maps.take, values.take
    for start, stop in pairwise(level_bounds(order.level)):
        terms = matrices(chain[start:stop], 1)
        terms += found(entries[:, start:stop, None])
        latest(terms, 0, out=done[start:stop])
    last_s = np.empty(len(chain))
    last_s[order.calls] = latest(done, 1)
    ends: list[float] = np.maximum(np.maximum.reduceat(last_s, order.starts), 0.0).tolist()
    moves_s = {}
    for number, places in watched.items():
        at = order.place[1 + order.starts[number] + places]
        moved_s = _moved_s(values[at[0]], values[at[1]], maps[:, chain[at[0] - 1]], lanes)
        if moved_s:
            moves_s[number] = moved_s
    return ends, moves_s


def _moved_s(first: Floats, second: Floats, maps: Floats, lanes: int) -> float:
    """By how much later calls, whose matrices are *maps*, leave everything in the *second* of two periods
    than in the *first*: 0 if that is not one number. A lane that a call leaves as it was may stay where it
    is: if it does, so it did for all calls of its rank.
    """
    untouched = np.full((len(maps), lanes), -np.inf)
    untouched[np.arange(lanes), np.arange(lanes)] = 0.0
    stays = (maps[:, :, :lanes] == untouched[:, None]).all(axis=0)
    moved_s = float(second[0, 0] - first[0, 0])
    moves = second == first + moved_s
    moves[:, :lanes] |= stays & (second == first)[:, :lanes]
    return moved_s if moved_s > 0 and moves.all() else 0.0


def _decisive(maps: Floats, lanes: int, chains: Sequence[int]) -> tuple[Floats, int]:
    """The matrices, columns x chains x rows, without the lanes that decide nothing, and how many are left;
    *chains* of each program.
    """
    idle = _idle(maps, lanes, np.cumsum([0, *chains[:-1]]))
    left = int((~idle).sum(axis=0).max())
    # Of each program the lanes that are left, then some that are not.
    kept = np.repeat(np.argsort(idle, axis=0, kind="stable")[:left], chains, axis=1)
    rows, columns = (
        np.concatenate([kept, np.repeat(np.arange(lanes, ports)[:, None], kept.shape[1], axis=1)])
        for ports in maps.shape[:2]
    )
    each = np.arange(kept.shape[1])
    return np.ascontiguousarray(maps[rows.T[None], columns[:, :, None], each[:, None]]), left


def _idle(maps: Floats, lanes: int, starts: Ints) -> NDArray[np.bool_]:
    """lanes x programs: those that no call leaves later than the first lane, and that hold up nothing for
    longer than the first does, as lanes of what computation waits for in any case.
    """

    def ever(what: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """In some chain of each program."""
        return np.logical_or.reduceat(what, starts, axis=2)

    first, from_first = maps[:1], maps[:, :1]
    later = ever(maps[:lanes] > first)
    later_than_both = ever(maps[:lanes] > np.maximum(first, first[:, :1]))
    holds_up = ever(maps[:, :lanes] > from_first)
    idle = np.ones((lanes, len(starts)), bool)
    idle[0] = False
    while True:
        # An idle lane is never ahead of the first: what waits for it waits for the first as well.
        ports = np.zeros((maps.shape[1], len(starts)), bool)
        ports[:lanes] = idle
        ahead = np.where(ports, later_than_both, later).any(axis=1)
        kept = np.ones((len(maps), len(starts)), bool)
        kept[:lanes] = ~idle
        awaited = (holds_up & kept[:, None]).any(axis=0)
        found = idle & ~ahead & ~awaited
        if (found == idle).all():
            return found
        idle = found


def _fold(programs: Sequence[Program]) -> Fold:
    """Of the pieces and chains of all of them."""
    forms: list[Form] = []
    chains: list[Chain] = []
    reads: list[Ints] = []
    for program in programs:
        first = len(forms)
        forms += program.forms
        chains += [tuple([(first + piece, repeat) for piece, repeat in chain]) for chain in program.chains]
        read = read_by(len(program.lanes), program.forms, program.chains, program.delays)
        reads += [read] * len(program.chains)
    return Fold(max(len(program.lanes) for program in programs), forms, chains, reads)


class _Joined:
    """The calls of all programs, level by level, as ``Order`` has those of one; *inputs* of the most."""

    def __init__(self, programs: Sequence[Program], inputs: int) -> None:
        orders = [order_of(program) for program in programs]
        sizes = [len(order.calls) for order in orders]
        self.starts: Ints = np.cumsum([0, *sizes[:-1]])
        first = np.repeat(self.starts, sizes)
        level = np.concatenate([order.level for order in orders])
        # Small numbers are sorted faster.
        self.calls = np.argsort(level.astype(np.int16) if level.max() < 2**15 else level, kind="stable")
        """By their place among all, one program after the other."""
        self.level = level[self.calls]
        place = self.place = np.zeros(len(level) + 1, np.int64)
        """Where each place of single orders, one program after the other and from 1 on, is in this one."""
        place[1 + self.calls] = np.arange(1, len(level) + 1)

        def places(own: Sequence[Ints]) -> Ints:
            """Places in the orders of single programs, as places here."""
            joined = np.concatenate(own, axis=-1)
            found: Ints = place[np.where(joined > 0, joined + first, 0)][..., self.calls]
            return found

        def padded(part: Ints) -> Ints:
            missing = inputs - len(part)
            return np.pad(part, ((0, missing), (0, 0))) if missing else part

        self.previous = places([order.previous for order in orders])
        self.sources = places([padded(order.sources) for order in orders])
        self.ports = np.concatenate([padded(order.ports) for order in orders], axis=1)[:, self.calls]
        chains = np.cumsum([0, *(len(program.chains) for program in programs)]).tolist()
        chain = [
            program.called_chain_of[order.segment] + start
            for program, order, start in zip(programs, orders, chains, strict=False)
        ]
        self.chain = np.concatenate(chain)[self.calls]
