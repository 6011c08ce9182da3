"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

A segment is a small matrix (``fold``), built once however often it is called; a call is one matrix-vector product in
(max, +). Compiled kernels compute one call after the other; numpy, which gives the same bits, the calls at the same
level of the dependency graph together. The times of single tasks are computed afterwards, and only when asked for.
"""

from itertools import pairwise

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.ir.dataclass import cached_property, dataclass
from stepcast.simulation.kernels import Kernel, find_kernel, fold_chains, run_calls
from stepcast.simulation.program import Program, Times
from stepcast.simulation.segments import fold_chain, fold_piece, widen


@dataclass(frozen=True, eq=False)
class Run:
    """The result of the folded engine."""

    program: Program
    seconds: FloatArray  # the price of each of the program's costs
    maps: FloatArray  # rows x columns x chains: the matrix of every chain
    values: FloatArray  # (1 + calls) x rows: what each call leaves behind, in the order of the plan
    makespan_s: float

    @cached_property
    def left_s(self) -> FloatArray:
        """(1 + calls) x rows: what each call leaves behind; row 0 is the start of the step."""
        left_s = np.zeros_like(self.values)
        left_s[1 + self.program.table.plan(self.maps).order] = self.values[1:]
        return left_s

    @cached_property
    def entry_s(self) -> FloatArray:
        """calls x (lanes + inputs): the time of each lane and input when the call begins; 0 for registers that
        nothing reads.
        """
        entry_s = np.zeros((self.program.calls, len(self.program.lanes) + self.program.inputs))
        if self.program.calls:
            read, lanes = self.program.piece_set.read, len(self.program.lanes)
            entries = np.concatenate([read, np.arange(lanes, entry_s.shape[1])])
            entry_s[:, entries] = self.program.table.entries(self.left_s, len(read))
        return entry_s


def simulate(program: Program, seconds: FloatArray | None = None, maps: FloatArray | None = None) -> Run:
    """Run *program* with *seconds*, one for each op of its pieces; without, its costs are seconds. *maps* are those of
    a run of the same segments with the same seconds.

    ProgramError if calls wait for each other in a circle.
    """
    prices = program.price_costs() if seconds is None else seconds
    sweep = _Sweep(program, prices, maps)
    sweep.run(0, len(sweep.plan.bounds) - 1)
    return Run(program, prices, sweep.maps, sweep.values, float(sweep.values.max(initial=0.0)))


class _Sweep:
    """Runs the calls of a program level by level. ``values`` is (1 + calls) x rows: what each call leaves behind in the
    order of the plan; row 0 is the start of the step.
    """

    def __init__(self, program: Program, seconds: FloatArray, maps: FloatArray | None = None) -> None:
        compiled, self.kernel = find_kernel(fold_chains, program.calls + PREPARING), find_kernel(run_calls)
        if maps is None:
            maps = _fold_compiled(program, seconds, compiled) if compiled else _fold(program, seconds)
        self.maps = maps  # rows x columns x chains
        self.plan = program.table.plan(maps)
        self.chain = program.segment[self.plan.order]
        self.values = np.zeros((program.calls + 1, len(self.maps)))
        self.by_chain = np.ascontiguousarray(self.maps.transpose((2, 0, 1) if self.kernel else (1, 2, 0)))

    def _run_compiled(self, kernel: Kernel, calls: tuple[int, int, int], count: int) -> None:
        """Run from the first to the last of *calls*, then *count* times more from the second."""
        first, middle, end = calls
        entries, rows = self.plan.entries, self.plan.rows
        sizes = entries.shape[1], len(entries), rows
        times_s, speeds = np.empty(len(entries)), np.zeros((end - middle) * rows)
        kernel(first, middle, end, count, *sizes, entries, self.chain, self.by_chain, self.values, times_s, speeds)

    def run(self, first: int, last: int) -> None:
        """Run the levels from *first* to *last*."""
        bounds, entries = self.plan.bounds, self.plan.entries
        if self.kernel is not None:
            self._run_compiled(self.kernel, (bounds[first], bounds[last], bounds[last]), 0)
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
            self._run_compiled(self.kernel, (0, middle, end), count)
            return
        self.run(0, period[1])
        start, size = 2 * middle - end, (end - middle) * rows
        times_s = self.values.reshape(-1)
        both = times_s[(1 + start) * rows : (1 + end) * rows]
        np.maximum(both, 0.0, out=both)  # from -inf for outputs that a call does not have
        earlier, later = np.split(both, 2)
        # The terms of each maximum, finite ones first: what they add to which entries.
        terms = self.by_chain.take(self.chain[middle:end], 1)
        is_finite = terms > -np.inf
        order = np.argsort(~is_finite, axis=0, kind="stable")[: is_finite.sum(0).max()]
        added_s = np.take_along_axis(terms, order, 0).reshape(-1, size)
        entry = self.plan.entries[order, np.arange(middle, end)[:, None]].reshape(-1, size)
        places = pairwise([(bound - middle) * rows for bound in bounds[period[0] : period[1] + 1]])
        levels = [(entry[:, i:j].copy(), added_s[:, i:j].copy(), later[i:j]) for i, j in places]
        is_finite = added_s > -np.inf
        added_s, entry, decides = added_s[is_finite], entry[is_finite], np.nonzero(is_finite)[1]
        follows = np.where(entry < rows, size, (entry - (1 + start) * rows) % size)
        speeds, last_speeds = np.zeros((2, size + 1))
        while count > 0:
            last_speeds, speeds = speeds, last_speeds
            np.subtract(later, earlier, out=speeds[:-1])
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
                for sources, seconds, times in levels:
                    np.maximum.reduce(times_s.take(sources) + seconds, 0, out=times, initial=0.0)
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


PREPARING = 2**11
"""Calls that numpy runs in the time that it takes to prepare a program."""


def _fold_compiled(program: Program, seconds: FloatArray, kernel: Kernel) -> FloatArray:
    """Return what ``_fold`` does."""
    sizes, shapes, first, lengths, _, read, limits = program.piece_set.packed
    lanes, (inputs, outputs), (width, nodes) = len(program.lanes), program.piece_set.ports, limits.tolist()
    counts, columns = (len(sizes), len(lengths), lanes, inputs, outputs, len(read), width, nodes), len(read) + inputs
    size = (len(sizes) + 3) * width * width + nodes * width + (lanes + inputs + width) * columns
    maps = np.full((len(lengths), len(read) + outputs, columns), -np.inf)
    kernel(*counts, sizes, shapes, first, lengths, program.parts, read, seconds, np.full(size, -np.inf), maps)
    return maps.transpose(1, 2, 0)


def _fold(program: Program, seconds: FloatArray) -> FloatArray:
    """Return rows x columns x chains: the matrix of every chain."""
    lanes, read, ports = len(program.lanes), tuple(program.piece_set.read.tolist()), program.piece_set.ports
    durations_s = tuple(seconds.tolist())
    pieces = [(piece.shape, durations_s[ops]) for (piece, _), ops in zip(program.pieces, program.ops_of, strict=True)]
    chains = [tuple([(*pieces[number], repeat) for number, repeat in chain]) for chain in program.chains]
    maps = np.array([fold_chain(lanes, chain, read, ports) for chain in chains])
    return maps.reshape(len(chains), len(read) + ports[1], len(read) + ports[0]).transpose(1, 2, 0)


def makespans_s(program: Program, seconds: FloatArray) -> FloatArray:
    """Return when *program* ends under each row of *seconds*: price lists x costs."""
    return np.array([simulate(program, prices).makespan_s for prices in seconds])


def piece_maps(program: Program, seconds: FloatArray) -> list[FloatArray]:
    """Return (lanes + outputs) x (lanes + inputs): the matrix of each piece."""
    durations_s = tuple(seconds.tolist())
    shapes = [piece.shape for piece, _ in program.pieces]
    return [
        widen(fold_piece(shape, durations_s[ops]), shape) for shape, ops in zip(shapes, program.ops_of, strict=True)
    ]


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
    for segment, chain in enumerate(program.chains):
        calls = np.flatnonzero(program.segment == segment)
        index, state = program.flat_start[calls], run.entry_s[calls]
        for number, repeat in chain:
            matrix = maps[number]
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
    lanes, plan = run.maps.shape[1] - run.program.inputs, run.program.table.plan(run.maps)
    period = plan.find_period(size)
    if period is None:
        return 0.0
    end = plan.bounds[period[1]]
    calls = plan.order[end - 2 * size : end].reshape(2, -1)
    first, second = run.left_s[1 + calls]
    untouched = np.where(np.eye(lanes, run.maps.shape[1], dtype=bool), 0.0, -np.inf)
    stays = (run.maps[:lanes] == untouched[:, :, None]).all(axis=1).T[run.program.segment[calls[0]]]
    shift_s = float(second[0, 0] - first[0, 0])
    with np.errstate(invalid="ignore"):  # outputs that a call does not have
        moves = (second == first + shift_s) | (np.abs(second - (first + shift_s)) <= slack_s)
    moves[:, :lanes] |= stays & (second == first)[:, :lanes]
    return shift_s if shift_s > 0 and moves.all() else 0.0
