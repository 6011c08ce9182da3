"""The folded engine: in-order lanes with fixed durations are a max-plus linear system.

Each end time in a piece is the maximum, over what the piece begins with (where its lanes and registers stand
and its inputs arrive), of that time plus a constant. So a piece is a small matrix: columns for lanes,
registers and inputs, rows for lanes, registers and outputs; a piece that repeats is a power of its matrix, a
chain of pieces a product, built once however often the segment is called. A call is one matrix-vector product
in (max, +); calls at the same level of the dependency graph are done together, for any number of price lists
at once. The times of single tasks are computed afterwards, and only when asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from stepcast.simulation.arrays import Calls, Program, Times
from stepcast.simulation.pieces import Floats, Ints, Piece, ProgramError, Segment


@dataclass(frozen=True, eq=False)
class Run:
    """What the folded engine found."""

    program: Program
    seconds: Floats
    """The price of each of the program's costs."""
    entry_s: Floats
    """calls x (lanes + inputs): where each lane stands and when each input is there as the call begins."""
    lane_end_s: Floats
    """ranks x lanes: when each lane ends its last op; 0 for a lane without any."""
    makespan_s: float

    @cached_property
    def written_out(self) -> "Run":
        """The same run of the program whose every piece is a call of its own."""
        program = self.program
        if program.flat:
            return self
        flat, maps = program.written_out, piece_maps(program, self.seconds[None])
        lanes = len(program.lanes)
        entry_s = np.zeros((flat.calls, lanes + flat.inputs))
        for number, segment in enumerate(program.segments):
            calls = np.flatnonzero(program.segment == number)
            at, state = program.flat_start[calls], self.entry_s[calls]
            for piece, repeat in segment.chain:
                matrix = maps[piece].once[0]
                for _ in range(repeat):
                    entry_s[at, : state.shape[1]] = state
                    columns = state[:, None, : matrix.shape[1]]
                    state = np.maximum.reduce(matrix[:lanes] + columns, 2)
                    at = at + 1
        return Run(flat, self.seconds[_renumbered(program, flat)], entry_s, self.lane_end_s, self.makespan_s)


def _renumbered(program: Program, flat: Program) -> Ints:
    """Where each cost of *flat* stands among those of *program*."""
    number = {cost: at for at, cost in enumerate(program.costs)}
    return np.array([number[cost] for cost in flat.costs], np.int64)


def simulate(program: Program, seconds: Floats | None = None) -> Run:
    """Run *program* with *seconds*, one for each of its costs; without, its costs are seconds.

    ProgramError if calls wait for each other in a circle.
    """
    prices = program.priced() if seconds is None else seconds
    values, order, gather = _values(program, prices[None])
    lanes = len(program.lanes)
    flat = values[0].reshape(-1)
    entry_s = np.empty((program.calls, gather.shape[1]))
    entry_s[order] = flat[gather]
    place = np.empty(program.calls + 1, np.int64)
    place[order] = np.arange(1, program.calls + 1)
    place[-1] = 0
    last = np.where(np.diff(program.rank_start) > 0, program.rank_start[1:] - 1, program.calls)
    lane_end_s = values[0][place[last], :lanes]
    return Run(program, prices, entry_s, lane_end_s, float(values.max(initial=0.0)))


def makespans_s(program: Program, seconds: Floats) -> Floats:
    """When *program* ends under each row of *seconds*: price lists x costs."""
    values, _, _ = _values(program, seconds)
    ends: Floats = values.max(axis=(1, 2), initial=0.0)
    return ends


def _values(program: Program, seconds: Floats) -> tuple[Floats, Ints, NDArray[np.intp]]:
    """lists x (1 + calls) x rows: what each call leaves behind, in the order of the plan.

    Row 0 is the start of the step: every lane free at 0, and inputs that nobody sends.
    """
    maps = fold(program, seconds)
    columns, rows = maps.shape[2:]
    order, bounds, gather = _plan(program, columns, rows)
    values = np.zeros((len(seconds), program.calls + 1, rows))
    flat = values.reshape(len(seconds), -1)
    segment, entries, done = program.segment[order], gather[:, :, None], values[:, 1:]
    for start, stop in pairwise(bounds):
        terms = maps.take(segment[start:stop], 1)
        terms += flat.take(entries[start:stop], 1)
        np.maximum.reduce(terms, 2, out=done[:, start:stop])
    return values, order, gather


def fold(program: Program, seconds: Floats) -> Floats:
    """lists x segments x (lanes + inputs) x (lanes + outputs): the max-plus matrix of every segment."""
    pieces = piece_maps(program, seconds)
    lanes, columns = len(program.lanes), len(program.lanes) + program.inputs
    rows = lanes + max((segment.outputs for segment in program.segments), default=0)
    maps = np.full((len(seconds), len(program.segments), columns, rows), -np.inf)
    known: dict[object, Floats] = {}
    for number, segment in enumerate(program.segments):
        found = known.get(segment.chain)
        if found is None:
            found = known[segment.chain] = _chained(segment, pieces, lanes)
        maps[:, number, : found.shape[2], : found.shape[1]] = found.swapaxes(1, 2)
    return maps


class Powers:
    """The map of a piece, and of so many repeats of it."""

    def __init__(self, once: Floats) -> None:
        """*once*: lists x (lanes + outputs) x (lanes + inputs)."""
        self.once = once
        self._squares = [once]
        self._known = {1: once}

    def of(self, repeat: int) -> Floats:
        if repeat not in self._known:
            while len(self._squares) < repeat.bit_length():
                self._squares.append(_product(self._squares[-1], self._squares[-1]))
            power: Floats | None = None
            for bit, square in enumerate(self._squares):
                if repeat >> bit & 1:
                    power = square if power is None else _product(square, power)
            assert power is not None
            self._known[repeat] = power
        return self._known[repeat]


def piece_maps(program: Program, seconds: Floats) -> dict[Piece, Powers]:
    """The map of each piece, under every price list."""
    found: dict[Piece, Powers] = {}
    alike: dict[object, list[tuple[Piece, Floats, bytes]]] = {}
    for piece, cost in program.cost_of.items():
        durations = seconds[:, cost].T
        priced = durations.tobytes()
        known = _MAPS.setdefault(piece, {}).get(priced)
        if known is not None:
            found[piece] = known
        else:
            alike.setdefault(piece.shape.key, []).append((piece, durations, priced))
    lists = len(seconds)
    for members in alike.values():
        shape = members[0][0].shape
        durations = np.concatenate([durations for _, durations, _ in members], axis=1)
        nodes = np.full((shape.first_op + shape.ops, shape.first_op, durations.shape[1]), -np.inf)
        nodes[np.arange(shape.first_op), np.arange(shape.first_op)] = 0.0
        for op, before in enumerate(shape.waits):
            np.add(_latest(nodes, before), durations[op], out=nodes[shape.first_op + op])
        kept = nodes[shape.exits].transpose(2, 0, 1)
        for at, (piece, _, priced) in enumerate(members):
            maps = _MAPS[piece]
            if len(maps) >= MOST_MAPS:
                maps.clear()
            # A copy, so that a piece remembered does not hold on to all that were made with it.
            found[piece] = maps[priced] = Powers(kept[at * lists : (at + 1) * lists].copy())
    return found


MOST_MAPS = 64
_MAPS: WeakKeyDictionary[Piece, dict[bytes, Powers]] = WeakKeyDictionary()
"""By the prices of their ops: layers that many strategies share are folded once."""


def _chained(segment: Segment, pieces: Mapping[Piece, Powers], lanes: int) -> Floats:
    """The product of the pieces of *segment*, each to the power of its repeat, above all their outputs."""
    product: Floats | None = None
    outputs: list[Floats] = []
    for piece, repeat in segment.chain:
        power = pieces[piece].of(repeat)
        product = power if product is None else _product(power, product)
        if len(piece.shape.outputs):
            outputs.append(product[:, lanes:])
            product = product[:, :lanes]
    assert product is not None
    return np.concatenate([product, *outputs], axis=1) if outputs else product


def _product(two: Floats, one: Floats) -> Floats:
    """The map of *one* followed by *two*."""
    result: Floats = np.maximum.reduce(two[:, :, :, None] + one[:, None], 2)
    return result


def _latest(nodes: Floats, before: tuple[int, ...]) -> Floats:
    """The maximum over the nodes *before*."""
    latest: Floats = nodes[before[0]]
    for node in before[1:]:
        latest = np.maximum(latest, nodes[node])
    return latest


def _plan(program: Program, columns: int, rows: int) -> tuple[Ints, list[int], NDArray[np.intp]]:
    """The calls by level, where each level begins, and where in the values each call finds its entry
    times."""
    plans = _PLANS.setdefault(program.made, {})
    lanes = len(program.lanes)
    found = plans.get((lanes, columns, rows))
    if found is not None:
        return found
    level = levels(program)
    order = np.argsort(level, kind="stable")
    bounds = np.flatnonzero(np.diff(level[order], prepend=-1, append=program.calls + 1)).tolist()
    place = np.zeros(program.calls + 1, np.int64)
    place[order] = np.arange(1, program.calls + 1)
    previous = place[np.arange(-1, program.calls - 1)]
    previous[program.rank_start[:-1][np.diff(program.rank_start) > 0]] = 0
    gather = np.empty((program.calls, columns), np.intp)
    gather[:, :lanes] = (previous * rows)[:, None] + np.arange(lanes)
    gather[:, lanes:] = np.where(
        program.source_call >= 0, place[program.source_call] * rows + lanes + program.source_port, 0
    )
    plans[lanes, columns, rows] = order, bounds, gather[order]
    return plans[lanes, columns, rows]


_Plan = tuple[Ints, list[int], NDArray[np.intp]]
_PLANS: WeakKeyDictionary[Calls, dict[tuple[int, int, int], _Plan]] = WeakKeyDictionary()
"""Programs that differ only in their segments share their calls, and with them the plan."""


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
    """The start and end of every task of the program written out, from the entry times of its call."""
    run = run.written_out
    program = run.program
    seconds = program.segment_seconds(run.seconds)
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
        nodes[: shape.first_op] = run.entry_s[calls, : shape.first_op].T
        starts = np.empty((shape.ops, len(calls)))
        for op, before in enumerate(shape.waits):
            starts[op] = _latest(nodes, before)
            np.add(starts[op], durations[op][row], out=nodes[shape.first_op + op])
        tasks = program.task_start[calls][:, None] + np.arange(shape.ops)
        start_s[tasks] = starts.T
        end_s[tasks] = nodes[shape.first_op :].T
    return Times(start_s, end_s)
