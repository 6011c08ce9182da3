"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

A segment is a small matrix (``fold``), built once however often it is called; a call is one matrix-vector product in
(max, +), and calls at the same level of the dependency graph are computed together, of one program or of many. The
times of single tasks are computed afterwards, and only when asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.simulation.fold import Chain, Fold, lanes_read
from stepcast.simulation.program import CallPlan, Program, Times, level_bounds
from stepcast.simulation.segments import Piece, Shape


@dataclass(frozen=True, eq=False)
class Run:
    """The result of the folded engine."""

    program: Program
    seconds: FloatArray  # the price of each of the program's costs
    maps: FloatArray  # columns x chains x rows: the matrix of every chain
    plan: CallPlan
    left_s: FloatArray  # what the calls leave behind, in the order of the plan
    makespan_s: float

    @cached_property
    def entry_s(self) -> FloatArray:
        """calls x (lanes + inputs): the time of each lane and input when the call begins; 0 for registers that
        nothing reads.
        """
        entry_s = np.zeros((self.program.calls, len(self.program.lanes) + self.program.inputs))
        if self.program.calls:
            entry_s[:, self.program.fold.begins[:, 0]] = self.plan.entries(self.left_s)
        return entry_s


def simulate(program: Program, seconds: FloatArray | None = None) -> Run:
    """Run *program* with *seconds*, one for each op of its pieces; without, its costs are seconds.

    ProgramError if calls wait for each other in a circle.
    """
    prices = program.price_costs() if seconds is None else seconds
    fold = program.fold
    maps = np.ascontiguousarray(fold.maps(prices).transpose(1, 2, 0))
    plan = program.table.plan(fold.read, fold.chain_outputs)
    left_s = plan.sweep(maps, program.chain_of[program.segment])
    return Run(program, prices, maps, plan, left_s, float(left_s.max(initial=0.0)))


def shift_s_of(run: Run, watched: IntArray, slack_s: float = 0.0) -> float:
    """Return the shift of the *watched* calls of one run, as ``makespans_together`` does of many."""
    chain = run.program.chain_of[run.program.segment][run.plan.order[watched[0]]]
    first, second = run.left_s[1 + watched]
    return _shift_s(first, second, run.maps[:, chain], run.program.fold.read, slack_s)


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
    fold = _fold_programs([program for program, _ in programs])
    maps = fold.maps(np.concatenate([seconds for _, seconds in programs]))
    maps, lanes = _drop_idle_lanes(maps, fold.read, [len(program.chains) for program, _ in programs])
    columns, _, rows = maps.shape
    order = _JoinedOrder([program for program, _ in programs], columns - lanes)
    entries = np.empty((columns, len(order.chain)), np.int64)
    entries[:lanes] = order.previous * rows + np.arange(lanes)[:, None]
    entries[lanes:] = np.where(order.sources > 0, order.sources * rows + lanes + order.ports, 0)
    # What each call leaves behind, in this order; the first row is the start of the step.
    values = np.zeros((len(order.chain) + 1, rows))
    done, chain, latest = values[1:], order.chain, np.maximum.reduce
    take_map, take_value = maps.take, values.take
    for start, stop in pairwise(level_bounds(order.level)):
        terms = take_map(chain[start:stop], 1)
        terms += take_value(entries[:, start:stop, None])
        latest(terms, 0, out=done[start:stop])
    last_s = np.empty(len(chain))
    last_s[order.calls] = latest(done, 1)
    ends_s: list[float] = np.maximum(np.maximum.reduceat(last_s, order.starts), 0.0).tolist()
    shifts_s = {}
    for number, places in watched.items():
        first, second = order.place[1 + order.starts[number] + places]
        shift_s = _shift_s(values[first], values[second], maps[:, chain[first - 1]], lanes)
        if shift_s:
            shifts_s[number] = shift_s
    return ends_s, shifts_s


def _shift_s(first: FloatArray, second: FloatArray, maps: FloatArray, lanes: int, slack_s: float = 0.0) -> float:
    """Return by how much later the calls of the *second* of two periods leave everything than those of the *first*,
    whose matrices are *maps*; 0 if that is not one number but for *slack_s*. A lane that a call does not touch may stay
    where it is: if it does, it did for all calls of its rank.
    """
    untouched = np.full((len(maps), lanes), -np.inf)
    untouched[np.arange(lanes), np.arange(lanes)] = 0.0
    stays = (maps[:, :, :lanes] == untouched[:, None]).all(axis=0)
    shift_s = float(second[0, 0] - first[0, 0])
    moves = np.abs(second - (first + shift_s)) <= slack_s if slack_s else second == first + shift_s
    moves[:, :lanes] |= stays & (second == first)[:, :lanes]
    return shift_s if shift_s > 0 and moves.all() else 0.0


def _drop_idle_lanes(maps: FloatArray, lanes: int, chains: Sequence[int]) -> tuple[FloatArray, int]:
    """Return the matrices as columns x chains x rows without the lanes that decide nothing, and the number of lanes
    left; *chains* are those of each program.
    """
    idle = _find_idle_lanes(maps, lanes, np.cumsum([0, *chains[:-1]]))
    left = int((~idle).sum(axis=0).max())
    # For each program the lanes that are left, then some that are not.
    chosen = np.repeat(np.argsort(idle, axis=0, kind="stable")[:left], chains, axis=1)
    rows, columns = (
        np.concatenate([chosen, np.repeat(np.arange(lanes, ports)[:, None], chosen.shape[1], axis=1)])
        for ports in maps.shape[:2]
    )
    every_chain = np.arange(chosen.shape[1])
    return np.ascontiguousarray(maps[rows.T[None], columns[:, :, None], every_chain[:, None]]), left


def _find_idle_lanes(maps: FloatArray, lanes: int, starts: IntArray) -> BoolArray:
    """Return lanes x programs: the lanes that no call leaves later than the first lane and that hold up nothing for
    longer than the first does, such as lanes of what computation waits for in any case.
    """

    def ever(condition: BoolArray) -> BoolArray:
        """Return whether *condition* holds in some chain of each program."""
        return np.logical_or.reduceat(condition, starts, axis=2)

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
        decisive = np.ones((len(maps), len(starts)), bool)
        decisive[:lanes] = ~idle
        awaited = (holds_up & decisive[:, None]).any(axis=0)
        still_idle = idle & ~ahead & ~awaited
        if (still_idle == idle).all():
            return still_idle
        idle = still_idle


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


class _JoinedOrder:
    """The calls of all programs level by level, as ``CallOrder`` has those of one, with so many *inputs*."""

    def __init__(self, programs: Sequence[Program], inputs: int) -> None:
        orders = [program.table.order for program in programs]
        sizes = [len(order.calls) for order in orders]
        self.starts: IntArray = np.cumsum([0, *sizes[:-1]])
        first = np.repeat(self.starts, sizes)
        level = np.concatenate([order.level for order in orders])
        # By their place among all, program by program. Small integers are sorted faster.
        self.calls = np.argsort(level.astype(np.int16) if level.max() < 2**15 else level, kind="stable")
        self.level = level[self.calls]
        # The place here of each place of the single orders, program by program and counted from 1.
        place = self.place = np.zeros(len(level) + 1, np.int64)
        place[1 + self.calls] = np.arange(1, len(level) + 1)

        def renumber(places: Sequence[IntArray]) -> IntArray:
            joined = np.concatenate(places, axis=-1)
            renumbered: IntArray = place[np.where(joined > 0, joined + first, 0)][..., self.calls]
            return renumbered

        def pad(part: IntArray) -> IntArray:
            missing = inputs - len(part)
            return np.pad(part, ((0, missing), (0, 0))) if missing else part

        self.previous = renumber([order.previous for order in orders])
        self.sources = renumber([pad(order.sources) for order in orders])
        self.ports = np.concatenate([pad(order.ports) for order in orders], axis=1)[:, self.calls]
        chains = np.cumsum([0, *(len(program.chains) for program in programs)]).tolist()
        numbers = zip(programs, orders, chains, strict=False)
        chain = [program.table_chain_of[order.segment] + start for program, order, start in numbers]
        self.chain = np.concatenate(chain)[self.calls]
