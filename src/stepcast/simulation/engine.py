"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

A segment is a small matrix (``fold``), built once however often it is called; a call is one matrix-vector product in
(max, +). Compiled kernels compute one matrix and one call after the other; numpy, which gives the same bits, all
matrices and the calls at the same level of the dependency graph together. The times of single tasks are computed
afterwards, and only when asked for.
"""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.simulation.program import Program, Times
from stepcast.simulation.segments import Piece

Result = TypeVar("Result")


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
    table = program.table
    _counted[0] += table.calls + PREPARING
    is_worth_it = _counted[0] > WORTH_COMPILING
    fold = compile_function(_fold_chains) if is_worth_it else None
    run = compile_function(_run_calls) if is_worth_it else None
    if fold is None or run is None:
        if maps is None:
            maps = program.fold.maps(prices)
        by_column = np.ascontiguousarray(maps.transpose(1, 2, 0))
        lanes = maps.shape[1] - program.inputs
        left_s = table.plan(lanes, len(maps) - lanes).sweep(by_column, program.call_chains)
    else:
        if maps is None:
            outputs = max([segment.outputs for segment in program.segments], default=0)
            by_chain = fold(*program.packed, prices, len(program.lanes), program.inputs, outputs)
        else:
            by_chain = np.ascontiguousarray(maps.transpose(2, 1, 0))
        left_s = np.zeros((table.calls + 1, by_chain.shape[2]))
        waiting = np.full((2, max(table.calls, table.ranks)), -1, np.int64)
        state = np.stack([table.rank_start[:-1], np.arange(table.ranks)])
        arrays = (table.rank_start, table.rank, table.previous, table.source_call, table.source_port)
        if run(*arrays, program.call_chains, by_chain, left_s, waiting, state) < table.calls:
            _ = table.levels  # names the calls that wait for each other
        maps = by_chain.transpose(2, 1, 0)
    return Run(program, prices, maps, left_s, float(left_s.max(initial=0.0)))


WORTH_COMPILING, PREPARING = 2**17, 2**11
"""Calls that numpy runs before the kernels are loaded: that takes 0.3 s, as long as numpy does for them and for
preparing each program, which takes as long as so many calls."""
_counted = [0]


@cache
def compile_function(function: Callable[..., Result]) -> Callable[..., Result] | None:
    """Return *function* compiled by numba, which is imported only here; None where it is not installed."""
    try:
        import numba
    except ImportError:
        return None
    uncached: Callable[..., Result] = numba.njit(function)
    try:
        cached: Callable[..., Result] = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder for the cache, as in a container whose folders are read-only
        return uncached

    def kernel(*arguments: object) -> Result:
        try:
            return cached(*arguments)
        except OSError:  # compiled but not cached, as on a full disk; it has not run yet
            return uncached(*arguments)

    return kernel


def _fold_chains(
    sizes: IntArray,
    shapes: IntArray,
    lengths: IntArray,
    parts: IntArray,
    read: IntArray,
    seconds: FloatArray,
    lanes: int,
    inputs: int,
    outputs: int,
) -> FloatArray:
    """Return chains x columns x rows: what ``Fold.maps`` computes.

    *sizes* are pieces x (touched lanes, inputs, outputs, ops), *shapes* their ``Shape.packed`` end to end, *lengths*
    the number of pieces of each chain, *parts* those pieces with their repeats, and *read* the lanes of ``lanes_read``.
    """

    def multiply(two: FloatArray, one: FloatArray, size: int) -> None:
        """Replace *one* by itself followed by *two*."""
        product = np.full((size, size), -np.inf)
        for row in range(size):
            for middle in range(size):
                if two[row, middle] > -np.inf:
                    for column in range(size):
                        product[row, column] = max(product[row, column], two[row, middle] + one[middle, column])
        one[:size, :size] = product

    width, most_nodes = 1, 1
    for piece in range(len(sizes)):
        width = max(width, sizes[piece, 0] + max(sizes[piece, 1], sizes[piece, 2]))
        most_nodes = max(most_nodes, sizes[piece, 0] + sizes[piece, 1] + sizes[piece, 3])
    matrices = np.full((len(sizes), width, width), -np.inf)
    first_lane = np.zeros(len(sizes), np.int64)
    values = np.zeros((most_nodes, width))
    place, first_op = 0, 0
    for piece in range(len(sizes)):
        touched, entries, ops = sizes[piece, 0], sizes[piece, 0] + sizes[piece, 1], sizes[piece, 3]
        first_lane[piece] = place
        counts = place + touched
        place = counts + ops
        values[:entries, :entries] = -np.inf
        for entry in range(entries):
            values[entry, entry] = 0.0
        for op in range(ops):
            latest = values[entries + op]
            latest[:entries] = -np.inf
            for _ in range(shapes[counts + op]):
                node = shapes[place]
                place += 1
                for entry in range(entries):
                    latest[entry] = max(latest[entry], values[node, entry])
            for entry in range(entries):
                latest[entry] += seconds[first_op + op]
        for row in range(touched + sizes[piece, 2]):
            matrices[piece, row, :entries] = values[shapes[place], :entries]
            place += 1
        first_op += ops
    columns = len(read) + inputs
    maps = np.full((len(lengths), columns, len(read) + outputs), -np.inf)
    state, after = np.zeros((lanes + inputs, columns)), np.zeros((width, columns))
    power, result = np.zeros((width, width)), np.zeros((width, width))
    start = 0
    for chain in range(len(lengths)):
        state[:] = -np.inf
        for column in range(columns):
            state[read[column] if column < len(read) else lanes + column - len(read), column] = 0.0
        given = len(read)
        for part in range(start, start + lengths[chain]):
            piece, repeat = parts[part, 0], parts[part, 1]
            touched, rows = sizes[piece, 0], sizes[piece, 0] + sizes[piece, 2]
            matrix = matrices[piece]
            if repeat > 1:
                power[:] = matrix
                matrix, has_begun = result, False
                while repeat > 0:
                    if repeat & 1 and has_begun:
                        multiply(power, result, touched)
                    elif repeat & 1:
                        result[:], has_begun = power, True
                    repeat >>= 1
                    if repeat > 0:
                        multiply(power, power, touched)
            after[:rows] = -np.inf
            for entry in range(touched + sizes[piece, 1]):
                lane = shapes[first_lane[piece] + entry] if entry < touched else lanes + entry - touched
                for row in range(rows):
                    if matrix[row, entry] > -np.inf:
                        for column in range(columns):
                            after[row, column] = max(after[row, column], matrix[row, entry] + state[lane, column])
            for row in range(rows):
                if row < touched:
                    state[shapes[first_lane[piece] + row]] = after[row]
                else:
                    maps[chain, :, given] = after[row]
                    given += 1
        for row in range(len(read)):
            maps[chain, :, row] = state[read[row]]
        start += lengths[chain]
    return maps


def _run_calls(
    rank_start: Any,
    rank_of: Any,
    previous: Any,
    source_call: Any,
    source_port: Any,
    chain: Any,
    maps: Any,
    left_s: Any,
    waiting: Any,
    state: Any,
) -> int:
    """Fill *left_s*, rank by rank as far as each can run; return the number of calls that could.

    *maps* are chains x columns x rows; *state* has the next call of each rank and the ranks that are ready; *waiting*
    the first rank that waits for each call, and for each rank the next one that waits for the same.
    """
    rows, inputs = maps.shape[2], source_call.shape[1]
    lanes = maps.shape[1] - inputs
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
