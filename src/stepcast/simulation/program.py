"""Programs: for each rank the sequence of its **calls** of segments, each input bound to an output of one.

Structure comes first and seconds last: an op names its **cost**, which is a number of seconds or whatever a
list of prices knows, and one program runs with any number of such lists. Nothing here knows what ops do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from stepcast.ir.limits import TASKS
from stepcast.simulation.fold import Chain, Fold, fold_of
from stepcast.simulation.segments import NO_LANE, Cost, Floats, Form, Ints, Piece, ProgramError, Segment, Shape

# Programs put together call by call, for what is not a plain pipeline.

Signal = tuple[int, int]
"""A call, as ``ProgramBuilder.call`` numbered it, and which of its outputs."""


class ProgramBuilder:
    """Collects the calls of every rank in the order in which the rank makes them."""

    def __init__(self, lanes: tuple[str, ...], ranks: int) -> None:
        self._lanes = lanes
        self._segments: dict[int, tuple[int, Segment]] = {}
        self._calls: list[list[int]] = [[] for _ in range(ranks)]
        self._segment: list[int] = []
        self._sources: list[dict[int, Signal]] = []

    def call(self, rank: int, segment: Segment, sources: Sequence[Signal | None] = ()) -> int:
        """*rank* calls *segment* next, its inputs bound to *sources*; the number of the call."""
        number, _ = self._segments.setdefault(id(segment), (len(self._segments), segment))
        call = len(self._segment)
        self._segment.append(number)
        self._sources.append({})
        self._calls[rank].append(call)
        for port, source in enumerate(sources):
            if source is not None:
                self.bind(call, port, source)
        return call

    def bind(self, call: int, port: int, source: Signal) -> None:
        """Bind an input of a call that is there already, to a call that may have come later."""
        self._sources[call][port] = source

    def program(self) -> "Program":
        segments = tuple(segment for _, segment in self._segments.values())
        order = [call for calls in self._calls for call in calls]
        place = {call: index for index, call in enumerate(order)}
        inputs = max((segment.inputs for segment in segments), default=0)
        source_call, source_port = np.full((2, len(order), inputs), -1, np.int64)
        for call, sources in enumerate(self._sources):
            for port, (source, output) in sources.items():
                if not 0 <= port < segments[self._segment[call]].inputs or source not in place:
                    raise ProgramError(f"call {call} binds input {port} to call {source}: one of them is not there")
                source_call[place[call], port] = place[source]
                source_port[place[call], port] = output
        start = np.cumsum([0, *(len(calls) for calls in self._calls)]).astype(np.int64)
        segment = np.array([self._segment[call] for call in order], np.int64)
        return Program(self._lanes, segments, Calls(start, segment, source_call, source_port))


Number = TypeVar("Number", np.int64, np.float64)
TICK_S = 2.0**-46
"""Prices are whole numbers of this, 14 femtoseconds: sums of them are exact up to two minutes, so that work
folded, written out or run event by event ends at the same bit."""


@dataclass(frozen=True, eq=False)
class Calls:
    """Who calls what, and who waits for whom. The calls of rank r are ``rank_start[r]`` to
    ``rank_start[r + 1]``, in order.
    """

    rank_start: Ints
    segment: Ints
    """The segment of each call."""
    source_call: Ints
    """calls x inputs: the call that gives this input; -1 means there from the start."""
    source_port: Ints
    """calls x inputs: which output of that call."""
    rank_names: tuple[str, ...] = ()
    micro_batches: Ints | None = None
    """calls x 2, for labels only: the micro-batches that a call is about, -1 for none."""
    names: tuple[str, ...] = ()
    """Of the segments, where they have none of their own."""

    def __post_init__(self) -> None:
        bounds = self.rank_start
        if self.rank_names and len(self.rank_names) != self.ranks:
            raise ProgramError(f"{self.ranks} ranks but {len(self.rank_names)} names")
        if bounds[0] != 0 or bounds[-1] != len(self.segment) or (np.diff(bounds) < 0).any():
            raise ProgramError("rank_start must rise from 0 to the number of calls")
        if self.source_call.shape[0] != len(self.segment) or self.source_port.shape != self.source_call.shape:
            raise ProgramError(f"sources must be {len(self.segment)} calls x inputs")

    @property
    def ranks(self) -> int:
        return len(self.rank_start) - 1

    @cached_property
    def asked(self) -> Ints:
        """Of each segment, up to the last that is called, how many outputs it must have."""
        if len(self.segment) and self.segment.min() < 0:
            raise ProgramError("a call names a segment that is not there")
        bound = self.source_call >= 0
        call, port = self.source_call[bound], self.source_port[bound]
        if call.size and (call.max() >= len(self.segment) or port.min() < 0):
            raise ProgramError("an input is bound to an output that is not there")
        asked = np.zeros(self.segment.max(initial=-1) + 1, np.int64)
        np.maximum.at(asked, self.segment[call], port + 1)
        return asked

    @cached_property
    def rank(self) -> Ints:
        """The rank of each call."""
        return np.repeat(np.arange(self.ranks), np.diff(self.rank_start))


OF_SEGMENTS = ("inputs", "pieces", "_numbered", "chain_of", "chains", "forms", "delays")
"""What a run needs to know of a program whatever its calls are."""


@dataclass(frozen=True, eq=False)
class Program:
    """Segments and the calls of them."""

    lanes: tuple[str, ...]
    """Lanes, then registers."""
    segments: tuple[Segment, ...]
    made: Calls
    which: Ints | None = None
    """Of each segment that calls name, which of these it is; without, they name these."""

    def __post_init__(self) -> None:
        if {segment.lanes for segment in self.segments} - {len(self.lanes)}:
            raise ProgramError(f"every segment must have the {len(self.lanes)} lanes of the program")
        asked, outputs = self.made.asked, np.array([segment.outputs for segment in self.segments], np.int64)
        outputs = outputs if self.which is None else outputs[self.which]
        if len(asked) > len(outputs):
            raise ProgramError("a call names a segment that is not there")
        if self.made.source_call.shape[1] != self.inputs:
            raise ProgramError(f"sources must be {self.calls} calls x {self.inputs} inputs")
        if (outputs[: len(asked)] < asked).any():
            raise ProgramError("an input is bound to an output that is not there")

    @property
    def rank_start(self) -> Ints:
        return self.made.rank_start

    @cached_property
    def segment(self) -> Ints:
        """The segment of each call."""
        return self.made.segment if self.which is None else self.which[self.made.segment]

    @property
    def source_call(self) -> Ints:
        return self.made.source_call

    @property
    def source_port(self) -> Ints:
        return self.made.source_port

    @property
    def rank_names(self) -> tuple[str, ...]:
        return self.made.rank_names

    @property
    def micro_batches(self) -> Ints | None:
        return self.made.micro_batches

    @property
    def names(self) -> tuple[str, ...]:
        """Of the segments that calls name."""
        return self.made.names or tuple([segment.name for segment in self.segments])

    @cached_property
    def _named(self) -> "Program":
        """The same with a segment of its own for each that calls name."""
        if self.which is None:
            return self
        parts = zip(self.which.tolist(), self.names, strict=True)
        return Program(self.lanes, tuple([self.segments[at].named(name) for at, name in parts]), self.made)

    @property
    def rank(self) -> Ints:
        return self.made.rank

    @property
    def ranks(self) -> int:
        return self.made.ranks

    @property
    def calls(self) -> int:
        return len(self.segment)

    def calling(self, made: Calls) -> "Program":
        """The same segments in other calls."""
        program = Program(self.lanes, self.segments, made, self.which)
        program.__dict__.update({name: getattr(self, name) for name in OF_SEGMENTS})
        return program

    @cached_property
    def inputs(self) -> int:
        """The most inputs of any segment."""
        return max([segment.inputs for segment in self.segments], default=0)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Each piece once."""
        return tuple(dict.fromkeys([piece for segment in self.segments for piece, _ in segment.chain]))

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """Each object that is a cost, once: to compare them takes longer than to price equal ones again. What
        a list of prices must know.
        """
        return self._numbered[0]

    @cached_property
    def op_costs(self) -> Ints:
        """For each op of all pieces, one piece after the other, the place of its cost among all."""
        return self._numbered[1]

    @cached_property
    def _numbered(self) -> tuple[tuple[Cost, ...], Ints]:
        pieces = self.pieces
        named = list(chain.from_iterable([piece.costs for piece in pieces]))
        keys = list(map(id, named))
        costs = dict(zip(keys, named, strict=True))
        place = dict(zip(costs, range(len(costs)), strict=True))
        places = np.fromiter(map(place.__getitem__, keys), np.int64, len(keys))
        ops = np.concatenate([np.zeros(0, np.int64), *[piece.cost for piece in pieces]])
        first = np.array([0, *[len(piece.costs) for piece in pieces]], np.int64).cumsum()[:-1]
        ops += np.repeat(first, [piece.shape.ops for piece in pieces])
        return tuple(costs.values()), places[ops]

    @cached_property
    def cost_of(self) -> dict[Piece, Ints]:
        """For each op of each piece the place of its cost among all."""
        ends = np.cumsum([len(piece.cost) for piece in self.pieces])
        return dict(zip(self.pieces, np.split(self.op_costs, ends[:-1]), strict=True)) if len(ends) else {}

    @cached_property
    def chain_of(self) -> Ints:
        """For each segment the number of its chain: segments may differ in their names alone."""
        number: dict[object, int] = {}
        return np.array([number.setdefault(each.chain, len(number)) for each in self.segments], np.int64)

    @property
    def called_chain_of(self) -> Ints:
        """The same for each segment that calls name."""
        return self.chain_of if self.which is None else self.chain_of[self.which]

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """Each chain once, its pieces by their number."""
        number = {piece: at for at, piece in enumerate(self.pieces)}
        chains = dict.fromkeys([segment.chain for segment in self.segments])
        return tuple(tuple([(number[piece], repeat) for piece, repeat in chain]) for chain in chains)

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """Of the pieces."""
        return tuple([piece.shape.form for piece in self.pieces])

    @cached_property
    def delays(self) -> bool:
        """Whether an op takes time but no lane: the last end of all may be one that only a register keeps."""
        return any(piece.delays for piece in self.pieces)

    @cached_property
    def fold(self) -> Fold:
        """How the matrices of the chains follow from the durations of ``op_costs``."""
        return fold_of(len(self.lanes), self.forms, self.chains, self.delays)

    def priced(self, price: Callable[[Cost], float] | None = None) -> Floats:
        """The price of each cost in whole ticks; without *price* costs are seconds."""
        if price is None:
            if not all(isinstance(cost, float | int) for cost in self.costs):
                raise ProgramError("costs that are not seconds need a list of prices")
            return in_ticks(np.array(self.costs, np.float64))
        return in_ticks(np.array([price(cost) for cost in self.costs], np.float64))

    @cached_property
    def flat(self) -> bool:
        return all(len(segment.chain) == 1 and segment.chain[0][1] == 1 for segment in self.segments)

    @cached_property
    def written_out(self) -> "Program":
        """The same with every repeat of every piece as a call of its own."""
        TASKS.check(self.written_tasks)
        if self.which is not None:
            return self._named.written_out
        if self.flat:
            return self
        flat: dict[tuple[Piece, str], int] = {}
        parts = []
        for segment, name in zip(self.segments, self.names, strict=True):
            numbers = [flat.setdefault((piece, name), len(flat)) for piece, _ in segment.chain]
            parts.append(np.repeat(numbers, [repeat for _, repeat in segment.chain]))
        start = self.flat_start
        most = max(segment.outputs for segment in self.segments)
        places = np.zeros((len(self.segments), max(most, 1), 2), np.int64)
        for row, segment in zip(places, self.segments, strict=True):
            if segment.outputs:
                row[: segment.outputs] = segment.output_places
        source_call, source_port = np.full((2, start[-1], self.inputs), -1, np.int64)
        rows, ports = np.nonzero(self.source_call >= 0)
        sources = self.source_call[rows, ports]
        place = places[self.segment[sources], self.source_port[rows, ports]]
        source_call[start[rows], ports] = start[sources] + place[:, 0]
        source_port[start[rows], ports] = place[:, 1]
        counts = np.diff(start)
        labels = None if self.micro_batches is None else np.repeat(self.micro_batches, counts, axis=0)
        made = Calls(
            start[self.rank_start], self._spread(parts, start), source_call, source_port, self.rank_names, labels
        )
        return Program(self.lanes, tuple(Segment(name, ((piece, 1),)) for piece, name in flat), made)

    @property
    def written_tasks(self) -> int:
        """The tasks of ``written_out``."""
        ops = [sum(piece.shape.ops * repeat for piece, repeat in segment.chain) for segment in self.segments]
        return int(np.array(ops, np.int64)[self.segment].sum()) if ops else 0

    @cached_property
    def flat_start(self) -> Ints:
        """The first call of ``written_out`` that each call is, and their number."""
        written = np.array([segment.written for segment in self.segments], np.int64)
        return np.concatenate([[0], np.cumsum(written[self.segment])]).astype(np.int64)

    @cached_property
    def task_start(self) -> Ints:
        """Tasks are ops of calls, numbered call by call: op i of call c is task ``task_start[c] + i``."""
        ops = np.array([segment.shape.ops for segment in self.segments], np.int64)
        starts = np.zeros(self.calls + 1, np.int64)
        np.cumsum(ops[self.segment], out=starts[1:])
        return starts

    @property
    def tasks(self) -> int:
        return int(self.task_start[-1])

    @cached_property
    def shapes(self) -> tuple[tuple[Shape, ...], Ints]:
        """The distinct shapes, and the shape of each segment."""
        index: dict[object, int] = {}
        shapes: list[Shape] = []
        of = []
        for segment in self.segments:
            number = index.setdefault(segment.shape.key, len(shapes))
            if number == len(shapes):
                shapes.append(segment.shape)
            of.append(number)
        return tuple(shapes), np.array(of, np.int64)

    def segment_seconds(self, seconds: Floats) -> list[Floats]:
        """The duration of each op of each segment of one piece."""
        return [seconds[self.cost_of[segment.chain[0][0]]] for segment in self.segments]

    def task_calls(self) -> Ints:
        """The call of every task."""
        return np.repeat(np.arange(self.calls), np.diff(self.task_start))

    def task_lanes(self) -> Ints:
        """The lane of every task, or NO_LANE."""
        return self.per_task([segment.shape.lane for segment in self.segments])

    def task_costs(self) -> Ints:
        """The place of every task's cost among all."""
        return self.per_task([self.cost_of[segment.chain[0][0]] for segment in self.segments])

    def task_durations_s(self, seconds: Floats | None = None) -> Floats:
        """The duration of every task: the array to change for jitter or slow ranks, then run unfolded."""
        return self.per_task(self.segment_seconds(self.priced() if seconds is None else seconds))

    def per_task(self, per_segment: Sequence[NDArray[Number]]) -> NDArray[Number]:
        """What each segment says of its ops, for every task."""
        return self._spread(per_segment, self.task_start)

    def _spread(self, per_segment: Sequence[NDArray[Number]], start: Ints) -> NDArray[Number]:
        """What each segment says of its parts, for the parts of every call, which begin at *start*."""
        if not self.calls:
            return np.zeros(0, per_segment[0].dtype if per_segment else np.int64)
        all_parts = np.concatenate(per_segment)
        parts = np.array([len(part) for part in per_segment], np.int64)
        offset = (np.cumsum(parts) - parts)[self.segment] - start[:-1]
        spread = np.repeat(offset, np.diff(start))
        spread += np.arange(start[-1])
        return all_parts[spread]

    def lane_busy_s(self, seconds: Floats | None = None) -> Floats:
        """ranks x lanes: the time in which each lane runs an op."""
        seconds = self.priced() if seconds is None else seconds
        busy_s: dict[Piece, Floats] = {}
        for piece, cost in self.cost_of.items():
            used = piece.shape.lane != NO_LANE
            busy_s[piece] = np.zeros(len(self.lanes))
            np.add.at(busy_s[piece], piece.shape.lane[used], seconds[cost[used]])
        per_segment = np.zeros((len(self.segments), len(self.lanes)))
        for row, segment in zip(per_segment, self.segments, strict=True):
            for piece, repeat in segment.chain:
                row += repeat * busy_s[piece]
        busy = np.zeros((self.ranks, len(self.lanes)))
        np.add.at(busy, self.rank, per_segment[self.segment])
        return busy


def in_ticks(seconds: Floats) -> Floats:
    """*seconds* rounded to whole ticks."""
    if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
        raise ProgramError("a duration is negative or not finite")
    rounded: Floats = np.rint(seconds / TICK_S) * TICK_S
    return rounded


@dataclass(frozen=True, eq=False)
class Times:
    """When every task of a program starts and ends."""

    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))


# In which order the calls of a program are run, and where each finds the times it begins with.
#
# A call is a matrix-vector product in (max, +). Calls at the same level of the dependency graph are done
# together; who waits for whom follows from the calls alone. Registers that are written but that no call reads
# take no part.


@dataclass(frozen=True, eq=False)
class CallPlan:
    """The calls by level, and where each finds its entry times among what the calls before it left behind."""

    order: Ints
    levels: tuple[tuple[int, int, NDArray[np.intp]], ...]
    """Where each level begins and ends in *order*, and entries x calls x 1: the place of each entry time."""

    def sweep(self, maps: Floats, chain: Ints) -> Floats:
        """(1 + calls) x rows: what each call leaves behind, in this order, row 0 being the start of the step.

        *maps* are the matrices of all chains, columns x chains x rows, *chain* the number of each call's.
        """
        values = np.zeros((len(self.order) + 1, maps.shape[2]))
        done, chain = values[1:], chain[self.order]
        matrices, found, latest = maps.take, values.reshape(-1).take, np.maximum.reduce
        for start, stop, entries in self.levels:
            terms = matrices(chain[start:stop], 1)
            terms += found(entries)
            latest(terms, 0, out=done[start:stop])
        return values

    def entries(self, values: Floats) -> Floats:
        """calls x columns: the entry times of every call."""
        flat = values.reshape(-1)
        columns = self.levels[0][2].shape[0] if self.levels else 0
        found = np.empty((len(self.order), columns))
        for start, stop, entries in self.levels:
            found[self.order[start:stop]] = flat.take(entries[:, :, 0].T)
        return found


def plan_of(program: Program, lanes: int, outputs: int) -> CallPlan:
    """The plan for calls that leave behind the times of so many *lanes* and *outputs*."""
    plans = _PLANS.setdefault(program.made, {})
    if (lanes, outputs) not in plans:
        plans[lanes, outputs] = _plan(program, lanes, lanes + outputs)
    return plans[lanes, outputs]


_PLANS: WeakKeyDictionary[Calls, dict[tuple[int, int], CallPlan]] = WeakKeyDictionary()
"""Programs that differ only in their segments share their calls, and with them the plan."""


def _plan(program: Program, lanes: int, rows: int) -> CallPlan:
    order = order_of(program)
    entries = np.empty((lanes + program.inputs, program.calls), np.intp)
    entries[:lanes] = order.previous * rows + np.arange(lanes)[:, None]
    entries[lanes:] = np.where(order.sources > 0, order.sources * rows + lanes + order.ports, 0)
    bounds = pairwise(level_bounds(order.level))
    return CallPlan(order.calls, tuple((start, stop, entries[:, start:stop, None].copy()) for start, stop in bounds))


def level_bounds(level: Ints) -> list[int]:
    """Where each level of rising ones begins, and the end."""
    bounds: list[int] = np.flatnonzero(np.diff(level, prepend=-1, append=len(level) + 1)).tolist()
    return bounds


@dataclass(frozen=True, eq=False)
class Order:
    """The calls level by level. Places in it count from 1; 0 is the start of the step."""

    calls: Ints
    segment: Ints
    """The segment that each names."""
    level: Ints
    """Of each, rising."""
    previous: Ints
    """The place of the call before it on its rank."""
    sources: Ints
    """inputs x calls: the place of the call that gives the input."""
    ports: Ints
    """The same for the output that it is of that call."""


def order_of(program: Program) -> Order:
    found = _ORDERS.get(program.made)
    if found is None:
        found = _ORDERS[program.made] = _order(program)
    return found


_ORDERS: WeakKeyDictionary[Calls, Order] = WeakKeyDictionary()


def _order(program: Program) -> Order:
    made, level = program.made, levels(program)
    order = np.argsort(level, kind="stable")
    place = np.zeros(program.calls + 1, np.int64)
    place[order] = np.arange(1, program.calls + 1)
    previous = place[np.arange(-1, program.calls - 1)]
    previous[made.rank_start[:-1][np.diff(made.rank_start) > 0]] = 0
    sources = np.where(made.source_call >= 0, place[made.source_call], 0)
    return Order(order, made.segment[order], level[order], previous[order], sources[order].T, made.source_port[order].T)


def levels(program: Program) -> Ints:
    """For each call the number of calls on the longest chain that leads to it.

    ProgramError if calls wait for each other in a circle.
    """
    found = _LEVELS.get(program.made)
    if found is None:
        found = _LEVELS[program.made] = _levels(program)
    return found


_LEVELS: WeakKeyDictionary[Calls, Ints] = WeakKeyDictionary()


def _levels(program: Program) -> Ints:
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
        segment = program.names[program.made.segment[call]]
        name = program.rank_names[rank] if program.rank_names else f"rank {rank}"
        return f"call {call - program.rank_start[rank]} of {name} ({segment})"

    call = next(call for call, stop in zip(at, program.rank_start[1:], strict=True) if call < stop)
    sources = program.source_call[call].tolist()
    blocker = next(source for source in sources if source >= 0 and source >= at[program.rank[source]])
    return f"deadlock: {named(call)} waits for {named(blocker)}"
