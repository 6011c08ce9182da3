"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

A segment is a small matrix (``fold``), built once however often it is called; a call is one matrix-vector product in
(max, +). Compiled kernels compute one matrix and one call after the other; numpy, which gives the same bits, all
matrices and the calls at the same level of the dependency graph together. The times of single tasks are computed
afterwards, and only when asked for.
"""

from functools import cached_property
from itertools import pairwise

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.simulation.program import Program, Times, compile_function
from stepcast.simulation.segments import Piece


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
    sweep = _Sweep(program, prices, maps)
    sweep.run(0, len(sweep.plan.bounds) - 1)
    left_s = np.zeros_like(sweep.values)
    left_s[1 + sweep.plan.order] = sweep.values[1:]
    return Run(program, prices, sweep.maps, left_s, float(left_s.max(initial=0.0)))


class _Sweep:
    """Runs the calls of a program level by level. ``values`` is (1 + calls) x rows: what each call leaves behind in the
    order of the plan; row 0 is the start of the step.
    """

    def __init__(self, program: Program, seconds: FloatArray, maps: FloatArray | None = None) -> None:
        _counted[0] += program.calls + PREPARING
        is_worth_it = _counted[0] > WORTH_COMPILING
        fold = compile_function(_fold_chains) if is_worth_it else None
        self.kernel = compile_function(_run_calls) if is_worth_it else None
        if maps is None and fold is not None:
            outputs = max([segment.outputs for segment in program.segments], default=0)
            maps = fold(*program.packed, seconds, len(program.lanes), program.inputs, outputs).transpose(2, 1, 0)
        self.maps = program.fold.maps(seconds) if maps is None else maps  # rows x columns x chains
        lanes = self.maps.shape[1] - program.inputs
        self.plan = program.table.plan(lanes, len(self.maps) - lanes)
        self.chain = program.call_chains[self.plan.order]
        self.values = np.zeros((program.calls + 1, len(self.maps)))
        self.by_chain = np.ascontiguousarray(self.maps.transpose((2, 1, 0) if self.kernel else (1, 2, 0)))

    def run(self, first: int, last: int) -> None:
        """Run the levels from *first* to *last*."""
        bounds, entries = self.plan.bounds, self.plan.entries
        if self.kernel is not None:
            self.kernel(bounds[first], 0, bounds[last], 0, entries, self.chain, self.by_chain, self.values)
            return
        take_map, take_value, latest = self.by_chain.take, self.values.reshape(-1).take, np.maximum.reduce
        done = self.values[1:]
        for start, stop in pairwise(bounds[first : last + 1]):
            terms = take_map(self.chain[start:stop], 1)
            terms += take_value(entries[:, start:stop, None])
            latest(terms, 0, out=done[start:stop])

    def repeat(self, period: tuple[int, int], count: int) -> None:
        """Run everything up to the calls of *period*, and those *count* times more.

        Where each time has moved on as far as in the period before, it does so again until something that it waits for
        is overtaken by something that moves on by more: that many periods are leaped over at once.
        """
        bounds, rows = self.plan.bounds, self.plan.rows
        middle, end = bounds[period[0]], bounds[period[1]]
        if self.kernel is not None:
            self.kernel(0, middle, end, count, self.plan.entries, self.chain, self.by_chain, self.values)
            return
        self.run(0, period[1])
        start, size = 2 * middle - end, end - middle
        times_s = self.values.reshape(-1)
        earlier, later = np.split(times_s[(1 + start) * rows : (1 + end) * rows], 2)
        # The finite terms of all maxima: what each adds to which entry, and the time that it may decide.
        terms = self.maps[:, :, self.chain[middle:end]]
        row, column, call = np.nonzero(terms > -np.inf)
        added_s, decides, entry = terms[row, column, call], call * rows + row, self.plan.entries[column, middle + call]
        follows = np.where(entry < rows, size * rows, (entry - (1 + start) * rows) % (size * rows))
        is_used, speeds = np.zeros(size * rows, bool), np.zeros(size * rows + 1)
        is_used[decides] = True
        while count > 0:
            last_speeds, speeds = speeds, np.zeros(size * rows + 1)
            np.subtract(later, earlier, out=speeds[:-1], where=is_used)
            if speeds.tobytes() == last_speeds.tobytes():
                gains = speeds.take(follows) - speeds.take(decides)
                faster = np.flatnonzero(gains > 0)
                gaps = later[decides[faster]] - (added_s[faster] + times_s[entry[faster]])
                leap = int(min(np.floor_divide(gaps, gains[faster]).min(initial=count), count))
                earlier += leap * speeds[:-1]
                later += leap * speeds[:-1]
                count -= leap
            if count > 0:
                earlier[:] = later
                self.run(*period)
                count -= 1


def extend_makespan_s(program: Program, seconds: FloatArray, size: int, count: int) -> float | None:
    """Return when *program* would end with *count* periods of *size* calls more; None where it has no such periods."""
    sweep = _Sweep(program, seconds)
    period = sweep.plan.find_period(size)
    if period is None:
        return None
    sweep.repeat(period, count)
    sweep.run(period[1], len(sweep.plan.bounds) - 1)
    return float(sweep.values.max())


WORTH_COMPILING, PREPARING = 2**16, 2**11
"""Calls that numpy runs before the kernels are loaded: that takes 0.3 s, as long as numpy does for them and for
preparing each program, which takes as long as so many calls."""
_counted = [0]


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
    first: int,
    middle: int,
    end: int,
    count: int,
    entries: IntArray,
    chain: IntArray,
    maps: FloatArray,
    values: FloatArray,
) -> None:
    """Fill *values* for the calls from *first* to *end*, then those from *middle* *count* times more, as
    ``_Sweep.repeat`` does; *maps* are chains x columns x rows.
    """
    columns, rows = maps.shape[1], maps.shape[2]
    flat = values.reshape(-1)
    size = (end - middle) * rows
    later = (1 + middle) * rows
    earlier = later - size
    speeds = np.zeros(size + 1)
    while True:
        for call in range(first, end):
            matrix, left = maps[chain[call]], flat[(1 + call) * rows : (2 + call) * rows]
            left[:] = -np.inf
            for column in range(columns):
                time = flat[entries[column, call]]
                for row in range(rows):
                    value = matrix[column, row] + time
                    left[row] = value if value > left[row] else left[row]
        leap = count
        for place in range(size if count else 0):
            speed = flat[later + place] - flat[earlier + place] if flat[later + place] > -np.inf else 0.0
            if speed != speeds[place]:
                speeds[place], leap = speed, 0
        for call in range(middle, end if leap else 0):
            for column in range(columns):
                entry = entries[column, call]
                speed = speeds[(entry - earlier) % size] if entry >= rows else 0.0
                for row in range(rows):
                    place = (1 + call) * rows + row
                    gain = speed - speeds[place - later]
                    if gain > 0 and maps[chain[call], column, row] > -np.inf:
                        gap_s = flat[place] - (maps[chain[call], column, row] + flat[entry])
                        leap = min(leap, int(gap_s // gain))
        if leap:
            flat[earlier : later + size] += leap * np.concatenate((speeds[:-1], speeds[:-1]))
        if count == leap:
            return
        flat[earlier:later] = flat[later : later + size]
        first, count = middle, count - leap - 1


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


def find_shift_s(run: Run, size: int, slack_s: float = 0.0) -> float:
    """Return by how much later the last period of *size* calls leaves everything than the one before; 0 without such
    periods or if that is not one number but for *slack_s*. A lane that a call does not touch may stay where it is: if
    it does, it did for all calls of its rank.
    """
    lanes = run.maps.shape[1] - run.program.inputs
    plan = run.program.table.plan(lanes, len(run.maps) - lanes)
    period = plan.find_period(size)
    if period is None:
        return 0.0
    end = plan.bounds[period[1]]
    calls = plan.order[end - 2 * size : end].reshape(2, -1)
    first, second = run.left_s[1 + calls]
    untouched = np.where(np.eye(lanes, run.maps.shape[1], dtype=bool), 0.0, -np.inf)
    stays = (run.maps[:lanes] == untouched[:, :, None]).all(axis=1).T[run.program.call_chains[calls[0]]]
    shift_s = float(second[0, 0] - first[0, 0])
    with np.errstate(invalid="ignore"):  # outputs that a call does not have
        moves = (second == first + shift_s) | (np.abs(second - (first + shift_s)) <= slack_s)
    moves[:, :lanes] |= stays & (second == first)[:, :lanes]
    return shift_s if shift_s > 0 and moves.all() else 0.0
