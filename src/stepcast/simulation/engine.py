"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

A segment is a small matrix (``fold``), built once however often it is called; a call is one matrix-vector product in
(max, +). Compiled kernels compute one call after the other; numpy, which gives the same bits, the calls at the same
level of the dependency graph together. The times of single tasks are computed afterwards, and only when asked for.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.types import cached_property, dataclass
from stepcast.simulation.kernels import Kernel, find_kernel, fold_chains, run_calls
from stepcast.simulation.program import Program, Times
from stepcast.simulation.seconds import TICK_S, WorkSeconds
from stepcast.simulation.segments import fold_chain, fold_piece, widen

Prices = FloatArray | WorkSeconds
"""The seconds of each op of the pieces of a program, or those of works from which they follow."""

EXACT_S = 2.0**53 * TICK_S
"""Sums of ticks are exact up to here, two minutes; ``kernels.run_calls`` has the same number."""
ROUNDING = 2.0**-40
"""The share of later times by which those that should be equal may differ: below a nanosecond in a step of an hour."""


class RepeatedCalls(NamedTuple):
    """Calls that were run several times, in the order of the plan: from the first to the second of *calls* for the last
    time but one, from there to the third for the last time.
    """

    calls: tuple[int, int, int]
    repeats: int  # beyond those two
    before_s: FloatArray  # what they left behind when each had run once


class Repetition(NamedTuple):
    """The calls of the last period of a program, and how many times more they run."""

    size: int
    repeats: int


@dataclass(frozen=True, eq=False)
class Run:
    """The result of the folded engine. Calls that were repeated have the times of their last run."""

    program: Program
    prices: Prices
    maps: FloatArray  # rows x columns x chains: the matrix of every chain
    values: FloatArray  # (1 + calls) x rows: what each call leaves behind, in the order of the plan
    makespan_s: float
    repeated: "RepeatedCalls | None" = None  # None: each call runs once

    @cached_property
    def runs(self) -> IntArray | None:
        """The runs of each call; None where each runs once."""
        if self.repeated is None:
            return None
        (first, middle, end), order = self.repeated.calls, self.program.table.plan.order
        runs = np.ones(self.program.calls, np.int64)
        # The period before the last one was moved away from what its calls waited for.
        runs[order[first:middle]] = 0
        runs[order[middle:end]] = 2 + self.repeated.repeats
        return runs

    @cached_property
    def is_settled(self) -> bool:
        """Whether all runs of a call take and wait the same."""
        if self.repeated is None:
            return True
        _, middle, end = self.repeated.calls
        first_s, second_s = np.split(self.repeated.before_s, 2)
        last_s = np.maximum(self.values[1 + middle : 1 + end], 0.0)
        return _moves_together(first_s, second_s) and _moves_together(second_s, last_s)

    @cached_property
    def seconds(self) -> FloatArray:
        """The seconds of each op of the program's pieces."""
        return spread_seconds(self.program, self.prices)

    @cached_property
    def left_s(self) -> FloatArray:
        """(1 + calls) x rows: what each call leaves behind; row 0 is the start of the step."""
        left_s = np.zeros_like(self.values)
        left_s[1 + self.program.table.plan.order] = self.values[1:]
        return left_s

    @cached_property
    def entry_s(self) -> FloatArray:
        """calls x (lanes + inputs): the time of each lane and input when the call begins; 0 for registers that
        nothing reads.
        """
        entry_s = np.zeros((self.program.calls, len(self.program.lanes) + self.program.inputs))
        if self.program.calls:
            read, lanes = self.program.limits[0], len(self.program.lanes)
            entries = np.concatenate([read, np.arange(lanes, entry_s.shape[1])])
            entry_s[:, entries] = self.program.table.entries(self.left_s, len(read))
        return entry_s


def spread_seconds(program: Program, prices: Prices) -> FloatArray:
    """Return the seconds of each op of the pieces of *program*."""
    return prices.spread(program.pieces) if isinstance(prices, WorkSeconds) else prices


def simulate(program: Program, seconds: Prices | None = None) -> Run:
    """Run *program* with *seconds*; without, its costs are seconds.

    ProgramError if calls wait for each other in a circle.
    """
    prices = program.price_costs() if seconds is None else seconds
    sweep = _Sweep(program, prices)
    sweep.run(0, len(sweep.plan.bounds) - 1)
    return sweep.finish()


def simulate_repeated(program: Program, seconds: Prices, repetition: Repetition) -> Run | None:
    """Run *program* with a period that is repeated; None where it has no such period."""
    size, count = repetition
    sweep = _Sweep(program, seconds)
    period = sweep.plan.find_period(size)
    if period is None:
        return None
    sweep.run(0, period[1])
    end = sweep.plan.bounds[period[1]]
    # From -inf for outputs that a call does not have.
    before_s = np.maximum(sweep.values[1 + end - 2 * size : 1 + end], 0.0)
    sweep.repeat(period, count)
    sweep.run(period[1], len(sweep.plan.bounds) - 1)
    return sweep.finish(RepeatedCalls((end - 2 * size, end - size, end), count, before_s))


def _moves_together(before_s: FloatArray, after_s: FloatArray) -> bool:
    """Whether everything is later by one time, but for lanes that no call touches, which stay where they are."""
    passed_s = after_s - before_s
    differs_s = np.abs(passed_s - passed_s[0, 0])[passed_s != 0]
    return bool(passed_s[0, 0] > 0) and not (differs_s > _round_s(float(after_s.max()))).any()


def _round_s(latest_s: float) -> float:
    """Return by how much times up to *latest_s* that should be equal may differ."""
    return 0.0 if latest_s < EXACT_S else latest_s * ROUNDING


class _Sweep:
    """Runs the calls of a program level by level. ``values`` is (1 + calls) x rows: what each call leaves behind in the
    order of the plan; row 0 is the start of the step.
    """

    def __init__(self, program: Program, prices: Prices) -> None:
        self.program, self.prices = program, prices
        compiled, self.kernel = find_kernel(fold_chains, program.calls + PREPARING), find_kernel(run_calls)
        # rows x columns x chains
        self.maps = _fold_compiled(program, prices, compiled) if compiled else _fold(program, prices)
        self.plan = program.table.plan
        self.chain = program.find_segments(self.plan)
        self.values = np.empty((program.calls + 1, len(self.maps)))
        self.values[0] = 0.0
        self.by_chain = np.ascontiguousarray(self.maps.transpose((2, 1, 0) if self.kernel else (1, 2, 0)))

    def _run_compiled(self, kernel: Kernel, calls: tuple[int, int, int], count: int) -> None:
        """Run from the first to the last of *calls*, then *count* times more from the second."""
        first, middle, end = calls
        waits, ports, (rows, columns, _) = self.plan.waits, self.plan.ports, self.maps.shape
        sizes = waits.shape[1], columns - len(ports), columns, rows
        times_s, speeds = np.empty(columns), np.zeros((end - middle) * rows)
        terms = waits, ports, self.chain, self.by_chain, self.values, times_s, speeds
        kernel(first, middle, end, count, *sizes, *terms)

    def _find_entries(self) -> IntArray:
        rows, columns, _ = self.maps.shape
        return self.plan.find_entries(columns - len(self.plan.ports), rows)

    def finish(self, repeated: RepeatedCalls | None = None) -> Run:
        """Return the result when all calls have run."""
        makespan_s = float(np.maximum.reduce(self.values, None, initial=0.0))
        return Run(self.program, self.prices, self.maps, self.values, makespan_s, repeated)

    def run(self, first: int, last: int) -> None:
        """Run the levels from *first* to *last*."""
        bounds = self.plan.bounds
        if self.kernel is not None:
            self._run_compiled(self.kernel, (bounds[first], bounds[last], bounds[last]), 0)
            return
        entries = self._find_entries()
        take_map, take_value, latest = self.by_chain.take, self.values.reshape(-1).take, np.maximum.reduce
        done = self.values[1:]
        for start, stop in pairwise(bounds[first : last + 1]):
            terms = take_map(self.chain[start:stop], 1)
            terms += take_value(entries[:, start:stop, None])
            latest(terms, 0, out=done[start:stop])

    def repeat(self, period: tuple[int, int], count: int) -> None:
        """Run the calls of *period*, which have run, *count* times more.

        Where each time has moved on as far as in the period before, it does so again until something that it waits for
        is overtaken by something that moves on by more: that many periods are leaped over at once.
        """
        bounds, rows = self.plan.bounds, len(self.maps)
        middle, end = bounds[period[0]], bounds[period[1]]
        if self.kernel is not None:
            self._run_compiled(self.kernel, (end, middle, end), count)
            return
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
        entry = self._find_entries()[order, np.arange(middle, end)[:, None]].reshape(-1, size)
        places = pairwise([(bound - middle) * rows for bound in bounds[period[0] : period[1] + 1]])
        levels = [(entry[:, i:j].copy(), added_s[:, i:j].copy(), later[i:j]) for i, j in places]
        is_finite = added_s > -np.inf
        added_s, entry, decides = added_s[is_finite], entry[is_finite], np.nonzero(is_finite)[1]
        follows = np.where(entry < rows, size, (entry - (1 + start) * rows) % size)
        speeds, last_speeds = np.zeros((2, size + 1))
        while count > 0:
            last_speeds, speeds = speeds, last_speeds
            np.subtract(later, earlier, out=speeds[:-1])
            slack_s = _round_s(float(later.max()))
            if (np.abs(speeds - last_speeds) <= slack_s).all():
                gains = speeds.take(follows) - speeds.take(decides)
                faster = np.flatnonzero(gains > slack_s)
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


PREPARING = 2**11
"""Calls that numpy runs in the time that it takes to prepare a program."""


NO_SECONDS, ONE_STAGE = np.zeros(1), np.zeros(1, np.int64)


def _fold_compiled(program: Program, prices: Prices, kernel: Kernel) -> FloatArray:
    """Return what ``_fold`` does."""
    records, layout = program.layout
    read, inputs, outputs, width, nodes = program.limits
    parts, columns = int(layout[1]), len(read) + inputs
    space = (2 * parts + 2) * width * width + (nodes + 2) * width + (len(program.lanes) + inputs + width) * columns
    maps = np.empty((len(program.segments), columns, len(read) + outputs))
    spaces = np.empty(2 * parts, np.int64), np.empty(space), maps
    if isinstance(prices, WorkSeconds):
        terms = prices.exact_s, prices.factors, prices.shares, prices.slows
        kernel(prices.works, records, layout, prices.starts, prices.seconds, *terms, *spaces)
    else:
        kernel(-1, records, layout, ONE_STAGE, prices, *[NO_SECONDS] * 4, *spaces)
    return maps.transpose(2, 1, 0)


def _fold(program: Program, prices: Prices) -> FloatArray:
    """Return rows x columns x chains: the matrix of every chain."""
    read, inputs, outputs, *_ = program.limits
    lanes, durations_s = tuple(read.tolist()), tuple(spread_seconds(program, prices).tolist())
    pieces = [(piece.shape, durations_s[ops]) for (piece, _), ops in zip(program.pieces, program.ops_of, strict=True)]
    chains = [tuple([(*pieces[number], repeat) for number, repeat in chain]) for chain in program.chains]
    maps = np.array([fold_chain(len(program.lanes), chain, lanes, (inputs, outputs)) for chain in chains])
    return maps.reshape(len(chains), len(read) + outputs, len(read) + inputs).transpose(1, 2, 0)


def makespans_s(program: Program, seconds: Iterable[Prices]) -> list[float]:
    """Return when *program* ends under each of some prices."""
    return [simulate(program, prices).makespan_s for prices in seconds]


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
