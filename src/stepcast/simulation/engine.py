"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

A segment is a small matrix (``fold``), built once however often it is called; a call is one matrix-vector product in
(max, +). A compiled kernel runs one call after the other; numpy, which gives the same bits, computes calls at the same
level of the dependency graph together, of one program or of many. The times of single tasks are computed afterwards,
and only when asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.simulation.fold import Chain, Fold, lanes_read
from stepcast.simulation.program import CallTable, Program, Times
from stepcast.simulation.segments import Piece, Shape


@dataclass(frozen=True, eq=False)
class Run:
    """The result of the folded engine."""

    program: Program
    seconds: FloatArray  # the price of each of the program's costs
    maps: FloatArray  # rows x columns x chains: the matrix of every chain
    left_s: FloatArray  # (1 + calls) x rows: what each call leaves behind; row 0 is the start of the step
    makespan_s: float

    @cached_property
    def entry_s(self) -> FloatArray:
        """calls x (lanes + inputs): the time of each lane and input when the call begins; 0 for registers that
        nothing reads.
        """
        entry_s = np.zeros((self.program.calls, len(self.program.lanes) + self.program.inputs))
        if self.program.calls:
            fold = self.program.fold
            entry_s[:, fold.begins[:, 0]] = self.program.table.entries(self.left_s, fold.read)
        return entry_s


def simulate(program: Program, seconds: FloatArray | None = None, maps: FloatArray | None = None) -> Run:
    """Run *program* with *seconds*, one for each op of its pieces; without, its costs are seconds. *maps* are those of
    a run of the same segments with the same seconds.

    ProgramError if calls wait for each other in a circle.
    """
    prices = program.price_costs() if seconds is None else seconds
    fold = program.fold
    if maps is None:
        maps = fold.maps(prices)
    left_s = _run(program.table, maps, program.call_chains, fold.read)
    return Run(program, prices, maps, left_s, float(left_s.max(initial=0.0)))


def _run(table: CallTable, maps: FloatArray, chain: IntArray, lanes: int) -> FloatArray:
    """Return (1 + calls) x rows: what each call leaves behind, whose *chain* has one of the *maps*."""
    kernel = compile_function(_run_calls) if _is_worth_compiling(table.calls) else None
    _counted[0] += table.calls
    if kernel is None:
        by_column = np.ascontiguousarray(maps.transpose(1, 2, 0))
        return table.plan(lanes, len(maps) - lanes).sweep(by_column, chain)
    left_s = np.zeros((table.calls + 1, len(maps)))
    waiting = np.full((2, max(table.calls, table.ranks)), -1, np.int64)
    state = np.stack([table.rank_start[:-1], np.arange(table.ranks)])
    arrays = (table.rank_start, table.rank, table.previous, table.source_call, table.source_port)
    by_chain = np.ascontiguousarray(maps.transpose(2, 1, 0))
    if kernel(*arrays, chain, by_chain, lanes, left_s, waiting, state) < table.calls:
        _ = table.levels  # names the calls that wait for each other
    return left_s


WORTH_COMPILING = 2**17
"""Calls that numpy runs before the kernel is loaded: that takes 0.3 s, as long as numpy does for them."""
_counted = [0]


def _is_worth_compiling(calls: int) -> bool:
    """Return whether the compiled kernel runs so many *calls*, after those that were run before."""
    return _counted[0] + calls > WORTH_COMPILING and compile_function(_run_calls) is not None


@cache
def compile_function(function: Callable[..., int]) -> Callable[..., int] | None:
    """Return *function* compiled by numba, which is imported only here; None where it is not installed."""
    try:
        import numba
    except ImportError:
        return None
    uncached: Callable[..., int] = numba.njit(function)
    try:
        cached: Callable[..., int] = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder for the cache, as in a container whose folders are read-only
        return uncached

    def kernel(*arguments: object) -> int:
        try:
            return cached(*arguments)
        except OSError:  # compiled but not cached, as on a full disk; it has not run yet
            return uncached(*arguments)

    return kernel


def _run_calls(
    rank_start: Any,
    rank_of: Any,
    previous: Any,
    source_call: Any,
    source_port: Any,
    chain: Any,
    maps: Any,
    lanes: int,
    left_s: Any,
    waiting: Any,
    state: Any,
) -> int:
    """Fill *left_s*, rank by rank as far as each can run; return the number of calls that could.

    *maps* are chains x columns x rows; *state* has the next call of each rank and the ranks that are ready; *waiting*
    the first rank that waits for each call, and for each rank the next one that waits for the same.
    """
    rows, inputs = maps.shape[2], source_call.shape[1]
    height, finished = state.shape[1], 0
    while height > 0:
        height -= 1
        rank = state[1, height]
        call = state[0, rank]
        while call < rank_start[rank + 1]:
            blocker = -1
            for port in range(inputs):
                source = source_call[call, port]
                if source >= 0 and state[0, rank_of[source]] <= source:
                    blocker = source
            if blocker >= 0:
                waiting[1, rank] = waiting[0, blocker]
                waiting[0, blocker] = rank
                break
            matrix, before, left = maps[chain[call]], left_s[previous[call]], left_s[1 + call]
            left[:] = -np.inf
            for column in range(lanes + inputs):
                time = before[column] if column < lanes else 0.0
                if column >= lanes and source_call[call, column - lanes] >= 0:
                    time = left_s[1 + source_call[call, column - lanes], lanes + source_port[call, column - lanes]]
                for row in range(rows):
                    left[row] = max(left[row], matrix[column, row] + time)
            finished += 1
            waiter = waiting[0, call]
            while waiter >= 0:
                state[1, height] = waiter
                height += 1
                waiter = waiting[1, waiter]
            call += 1
            state[0, rank] = call
    return finished


def makespans_s(program: Program, seconds: FloatArray) -> FloatArray:
    """Return when *program* ends under each row of *seconds*: price lists x costs."""
    return np.array([simulate(program, prices).makespan_s for prices in seconds])


def piece_maps(program: Program, seconds: FloatArray) -> dict[Piece, FloatArray]:
    """Return (lanes + outputs) x (lanes + inputs): the matrix of each piece."""
    fold = program.fold
    pieces = fold.pieces(seconds)
    return {piece: fold.dense(pieces, number) for number, piece in enumerate(program.pieces)}


def task_times(run: Run) -> Times:
    """Return the start and end of every task of the program written out, from the entry times of its call."""
    program, entry_s = run.program.written_out, _unfold_entries(run)
    seconds = program.segment_seconds(run.program.write_out_seconds(run.seconds))
    shapes, shape_of = program.segment_shapes
    start_s, end_s = np.empty(program.tasks), np.empty(program.tasks)
    call_shape = shape_of[program.segment]
    for number_of_shape, shape in enumerate(shapes):
        calls = np.flatnonzero(call_shape == number_of_shape)
        if not len(calls):
            continue
        members = np.flatnonzero(shape_of == number_of_shape)
        durations = np.stack([seconds[member] for member in members], axis=1)
        row = np.searchsorted(members, program.segment[calls])
        nodes = np.empty((shape.first_op + shape.ops, len(calls)))
        nodes[: shape.first_op] = entry_s[calls, : shape.first_op].T
        starts = np.empty((shape.ops, len(calls)))
        for op, before in enumerate(shape.waits):
            latest: FloatArray = nodes[before[0]]
            for node in before[1:]:
                latest = np.maximum(latest, nodes[node])
            starts[op] = latest
            np.add(latest, durations[op][row], out=nodes[shape.first_op + op])
        tasks = program.task_start[calls][:, None] + np.arange(shape.ops)
        start_s[tasks] = starts.T
        end_s[tasks] = nodes[shape.first_op :].T
    return Times(start_s, end_s)


def _unfold_entries(run: Run) -> FloatArray:
    """Return the entry times of the calls of the program written out."""
    program, flat = run.program, run.program.written_out
    if program.is_unfolded:
        return run.entry_s
    lanes, maps = len(program.lanes), piece_maps(program, run.seconds)
    entry_s = np.zeros((flat.calls, lanes + flat.inputs))
    for number, segment in enumerate(program.segments):
        calls = np.flatnonzero(program.segment == number)
        index, state = program.flat_start[calls], run.entry_s[calls]
        for piece, repeat in segment.chain:
            matrix = maps[piece]
            for _ in range(repeat):
                entry_s[index, : state.shape[1]] = state
                state = np.maximum.reduce(matrix[:lanes] + state[:, None, : matrix.shape[1]], 2)
                index = index + 1
    return entry_s


# Many programs in one pass, for their ends alone. A level of one program has too few calls to keep a processor busy, so
# calls of the same level of all programs are computed together. Each program ends as if run by itself; those of fewer
# lanes, inputs or outputs are padded with columns and rows of minus infinity.

MOST_CALLS = 2**18
"""The most calls that are run together, unless one program has more: tens of megabytes."""
PricedProgram = tuple[Program, FloatArray]
"""A program with the price of each of its costs."""
NOTHING: Mapping[int, IntArray] = {}


def makespans_together(
    programs: Sequence[PricedProgram], watched: Mapping[int, IntArray] = NOTHING
) -> tuple[list[float], dict[int, float]]:
    """Return when each program ends, and the shifts of those *watched* (2 x places of calls in the program's order):
    by how much later the second calls leave everything than the first, where that is one number.
    """
    ends_s, shifts_s = [0.0] * len(programs), dict[int, float]()
    for part in _split_programs([program.calls for program, _ in programs]):
        own = {index: watched[number] for index, number in enumerate(part) if number in watched}
        part_ends_s, part_shifts_s = _makespans_s([programs[number] for number in part], own)
        for index, number in enumerate(part):
            ends_s[number] = part_ends_s[index]
            if index in part_shifts_s:
                shifts_s[number] = part_shifts_s[index]
    return ends_s, shifts_s


def _split_programs(calls: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of programs that run together: long ones with long ones, which have as many levels."""
    part: list[int] = []
    total = 0
    for number in sorted(range(len(calls)), key=lambda number: -calls[number]):
        if part and total + calls[number] > MOST_CALLS:
            yield part
            part, total = [], 0
        if calls[number]:
            part.append(number)
            total += calls[number]
    if part:
        yield part


def _makespans_s(
    programs: Sequence[PricedProgram], watched: Mapping[int, IntArray]
) -> tuple[list[float], dict[int, float]]:
    # Programs of the same segments with the same seconds have the same matrices.
    known: dict[tuple[int, int], int] = {}
    which = [known.setdefault((id(program.chains), id(seconds)), len(known)) for program, seconds in programs]
    own = [programs[which.index(number)] for number in range(len(known))]
    fold = _fold_programs([program for program, _ in own])
    maps, lanes = fold.maps(np.concatenate([seconds for _, seconds in own])), fold.read
    first_chains = np.cumsum([0, *[len(program.chains) for program, _ in own]])[which].tolist()
    table = _join_tables([program for program, _ in programs], first_chains, maps.shape[1] - lanes)
    left_s = _run(table, maps, table.segment, lanes)
    starts = np.cumsum([0, *[program.calls for program, _ in programs[:-1]]])
    ends_s: list[float] = np.maximum(np.maximum.reduceat(left_s[1:].max(axis=1), starts), 0.0).tolist()
    shifts_s = {}
    for number, calls in watched.items():
        if shift_s := find_shift_s(left_s, starts[number] + calls, maps, table.segment, lanes):
            shifts_s[number] = shift_s
    return ends_s, shifts_s


def _join_tables(programs: Sequence[Program], first_chains: Sequence[int], inputs: int) -> CallTable:
    """Return the calls of all programs as one table, whose segments are the chains of all, with so many *inputs*."""
    tables = [program.table for program in programs]
    sizes = [table.calls for table in tables]
    starts: IntArray = np.cumsum([0, *sizes[:-1]])

    def pad(part: IntArray) -> IntArray:
        missing = inputs - part.shape[1]
        return np.pad(part, ((0, 0), (0, missing)), constant_values=-1) if missing else part

    sources = np.concatenate([pad(table.source_call) for table in tables])
    joined = CallTable(
        np.concatenate([[0], *[start + table.rank_start[1:] for start, table in zip(starts, tables, strict=True)]]),
        np.concatenate([program.call_chains + first for program, first in zip(programs, first_chains, strict=True)]),
        np.where(sources >= 0, sources + np.repeat(starts, sizes)[:, None], -1),
        np.concatenate([pad(table.source_port) for table in tables]),
    )
    if not _is_worth_compiling(joined.calls):
        joined.__dict__["levels"] = np.concatenate([table.levels for table in tables])
    return joined


def find_shift_s(
    left_s: FloatArray, watched: IntArray, maps: FloatArray, chain: IntArray, lanes: int, slack_s: float = 0.0
) -> float:
    """Return by how much later the second of the *watched* calls leave everything than the first; 0 if that is not one
    number but for *slack_s*. A lane that a call does not touch may stay where it is: if it does, it did for all calls
    of its rank.
    """
    first, second = left_s[1 + watched]
    untouched = np.full((lanes, maps.shape[1]), -np.inf)
    untouched[np.arange(lanes), np.arange(lanes)] = 0.0
    chains, which = np.unique(chain[watched[0]], return_inverse=True)
    stays = (maps[:lanes, :, chains] == untouched[:, :, None]).all(axis=1).T[which]
    shift_s = float(second[0, 0] - first[0, 0])
    moves = np.abs(second - (first + shift_s)) <= slack_s if slack_s else second == first + shift_s
    moves[:, :lanes] |= stays & (second == first)[:, :lanes]
    return shift_s if shift_s > 0 and moves.all() else 0.0


def _fold_programs(programs: Sequence[Program]) -> Fold:
    shapes: list[Shape] = []
    chains: list[Chain] = []
    reads: list[IntArray] = []
    for program in programs:
        first = len(shapes)
        shapes += program.shapes
        chains += [tuple([(first + piece, repeat) for piece, repeat in chain]) for chain in program.chains]
        read = lanes_read(len(program.lanes), program.shapes, program.chains, program.has_delays)
        reads += [read] * len(program.chains)
    return Fold(max(len(program.lanes) for program in programs), shapes, chains, reads)
