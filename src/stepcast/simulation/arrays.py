"""What the engines run: segments, and the calls that every rank makes of them.

A **lane** runs its ops one after the other in the order in which they were issued (a GPU stream). A
**register** keeps the end of the latest op that was told to be kept there. A **piece** is work of one rank,
such as one layer: ops in lanes that wait for lanes, registers, inputs and one another. A **segment** is a
chain of pieces, each as often as it repeats: the forward of a stage. Its inputs belong to its first piece;
its outputs are those of its pieces. A **program** is, for each rank, the sequence of its **calls** of
segments, each input bound to an output of another call. An op starts when its lane is free and everything it
waits for has ended; the first op of a lane starts at 0.

Structure comes first and seconds last: an op names its **cost**, which is a number of seconds or whatever a
list of prices knows, and one program runs with any number of such lists. Nothing here knows what ops do.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)
Cost: TypeAlias = Hashable
"""Seconds as a plain number, or a key of a list of prices."""

NO_LANE = -1
"""The lane of an op that occupies none: it starts when what it waits for has ended (a delay, a meeting
point)."""
TICK_S = 2.0**-46
"""Prices are whole numbers of this, 14 femtoseconds: sums of them are exact up to two minutes, so that work
folded, written out or run event by event ends at the same bit."""


class ProgramError(ValueError):
    """A segment or program that contradicts itself or can never end."""


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op of a piece: its lane, its cost and what it waits for besides the op before it in its lane."""

    name: str
    cost: Cost
    lane: int = 0
    after: tuple[int, ...] = ()
    """Earlier ops of the piece."""
    inputs: tuple[int, ...] = ()
    """Inputs of the segment, for ops of its first piece."""
    lanes: tuple[int, ...] = ()
    """Lanes whose work issued so far, and registers whose op, in this call or before it, must have ended."""
    keeps: tuple[int, ...] = ()
    """Registers in which its end is kept."""


@dataclass(frozen=True, eq=False)
class Shape:
    """The ops of a piece without their costs.

    What an op waits for is a list of nodes, the op before it in its lane first: node ``k`` below ``lanes`` is
    the time at which lane or register ``k`` stood when the piece began, then come the inputs, then the ops.
    """

    lanes: int
    """Lanes and registers."""
    inputs: int
    names: tuple[str, ...]
    lane: Ints
    before: Ints
    before_start: Ints
    outputs: Ints
    """The op whose end is the output."""
    last: Ints
    """For each lane its last op, for each register the op kept in it, or -1."""

    def __post_init__(self) -> None:
        laneless = np.flatnonzero(self.lane == NO_LANE)
        if laneless.size:
            needed = np.concatenate([self.before - self.first_op, self.outputs, self.last])
            for op in laneless[~np.isin(laneless, needed)]:
                raise ProgramError(f"op {op} ({self.names[op]}) has no lane and nothing waits for it")

    @property
    def first_op(self) -> int:
        """The node of op 0."""
        return self.lanes + self.inputs

    @property
    def ops(self) -> int:
        return len(self.lane)

    @cached_property
    def waits(self) -> tuple[tuple[int, ...], ...]:
        """``before`` of each op as plain tuples."""
        nodes, bounds = self.before.tolist(), self.before_start.tolist()
        return tuple(tuple(nodes[start:stop]) for start, stop in pairwise(bounds))

    @cached_property
    def exits(self) -> Ints:
        """The nodes that say where each lane and register stands after the piece, then those of the
        outputs."""
        kept = np.where(self.last < 0, np.arange(self.lanes), self.first_op + self.last)
        return np.concatenate([kept, self.first_op + self.outputs])

    @cached_property
    def key(self) -> tuple[int, int, bytes, bytes, bytes, bytes, bytes]:
        """Equal for shapes that behave the same."""
        arrays = (self.lane, self.before, self.before_start, self.outputs, self.last)
        lane, before, before_start, outputs, last = (array.tobytes() for array in arrays)
        return self.lanes, self.inputs, lane, before, before_start, outputs, last


@dataclass(frozen=True, eq=False)
class Piece:
    """A shape with the costs of its ops: op i costs ``costs[cost[i]]``."""

    shape: Shape
    costs: tuple[Cost, ...]
    cost: Ints

    @classmethod
    def of(
        cls, name: str, ops: Sequence[TimedOp], *, lanes: int, inputs: int = 0, outputs: Sequence[int] = ()
    ) -> "Piece":
        """The piece of *ops*, listed in the order in which they are issued."""
        shape = _shape(name, ops, lanes, inputs, outputs)
        number: dict[Cost, int] = {}
        cost = [number.setdefault(op.cost, len(number)) for op in ops]
        for each in number:
            if isinstance(each, float | int) and not 0 <= each < np.inf:
                raise ProgramError(f"segment {name}: a duration is negative or not finite")
        return cls(shape, tuple(number), np.array(cost, np.int64))


@dataclass(frozen=True, eq=False)
class Segment:
    """A chain of pieces, each as often as it repeats."""

    name: str
    chain: tuple[tuple[Piece, int], ...]

    def __post_init__(self) -> None:
        for at, (piece, repeat) in enumerate(self.chain):
            inputs, outputs = piece.shape.inputs, len(piece.shape.outputs)
            if repeat < 1 or (inputs and at) or ((inputs or outputs) and repeat > 1):
                raise ProgramError(
                    f"segment {self.name}: inputs belong to its first piece, and pieces with ports run once"
                )

    @classmethod
    def of(
        cls, name: str, ops: Sequence[TimedOp], *, lanes: int, inputs: int = 0, outputs: Sequence[int] = ()
    ) -> "Segment":
        """The segment of one piece."""
        return cls(name, ((Piece.of(name, ops, lanes=lanes, inputs=inputs, outputs=outputs), 1),))

    @property
    def lanes(self) -> int:
        return self.chain[0][0].shape.lanes

    @property
    def inputs(self) -> int:
        return self.chain[0][0].shape.inputs

    @cached_property
    def outputs(self) -> int:
        return len(self.output_places)

    @cached_property
    def output_places(self) -> list[tuple[int, int]]:
        """For each output the place of its piece, repeats counted, and which output of that it is."""
        places, at = [], 0
        for piece, repeat in self.chain:
            places += [(at, port) for port in range(len(piece.shape.outputs))]
            at += repeat
        return places

    @property
    def written(self) -> int:
        """Pieces with their repeats."""
        return sum(repeat for _, repeat in self.chain)

    @property
    def shape(self) -> Shape:
        """Of a segment of one piece."""
        ((piece, repeat),) = self.chain
        assert repeat == 1
        return piece.shape

    def named(self, name: str) -> "Segment":
        return Segment(name, self.chain)

    def giving(self, outputs: Sequence[int]) -> "Segment":
        """The same ops with only these of its outputs, in this order."""
        kept = [self.output_places[output] for output in outputs]
        if kept != sorted(kept) and len(self.chain) > 1:
            raise ProgramError(f"segment {self.name}: outputs of several pieces come in their order")
        chain, at = [], 0
        for piece, repeat in self.chain:
            ports = tuple(port for place, port in kept if place == at)
            chain.append((_giving(piece, ports), repeat))
            at += repeat
        return Segment(self.name, tuple(chain))

    def then(self, other: "Segment", bind: Mapping[int, int] | None = None) -> "Segment":
        """Both in one: the ops of *other* issued after these.

        *bind* gives inputs of *other* an output of this segment's last piece. The other inputs of *other*
        come after the inputs of this segment, its outputs after the outputs.
        """
        (one, _), (two, _) = self.chain[-1], other.chain[0]
        earlier = self.outputs - len(one.shape.outputs)
        bound = tuple(sorted((port, output - earlier) for port, output in (bind or {}).items()))
        joined = _joined(one, two, bound)
        return Segment(self.name, (*self.chain[:-1], (joined, 1), *other.chain[1:]))


@lru_cache(maxsize=4096)
def _giving(piece: Piece, outputs: tuple[int, ...]) -> Piece:
    if outputs == tuple(range(len(piece.shape.outputs))):
        return piece
    kept = piece.shape.outputs[np.array(outputs, np.int64)]
    return replace(piece, shape=replace(piece.shape, outputs=kept))


@lru_cache(maxsize=4096)
def _joined(one: Piece, two: Piece, bind: tuple[tuple[int, int], ...]) -> Piece:
    number = {cost: at for at, cost in enumerate(one.costs)}
    renamed = np.array([number.setdefault(cost, len(number)) for cost in two.costs], np.int64)
    cost = np.concatenate([one.cost, renamed[two.cost]]) if len(two.cost) else one.cost
    return Piece(_join(one.shape, two.shape, dict(bind)), tuple(number), cost)


def _shape(name: str, ops: Sequence[TimedOp], lanes: int, inputs: int, outputs: Sequence[int]) -> Shape:
    now = list(range(lanes))
    before: list[int] = []
    starts = [0]
    first_op = lanes + inputs
    for index, op in enumerate(ops):
        here = f"segment {name}: op {index} ({op.name})"
        if not NO_LANE <= op.lane < lanes or not all(0 <= lane < lanes for lane in (*op.lanes, *op.keeps)):
            raise ProgramError(f"{here} names a lane that is not there")
        if not all(0 <= earlier < index for earlier in op.after):
            raise ProgramError(f"{here} waits for an op that is not before it")
        if not all(0 <= port < inputs for port in op.inputs):
            raise ProgramError(f"{here} waits for an input that is not there")
        nodes = [] if op.lane == NO_LANE else [now[op.lane]]
        nodes += [first_op + earlier for earlier in op.after]
        nodes += [lanes + port for port in op.inputs]
        nodes += [now[lane] for lane in op.lanes]
        if not nodes:
            raise ProgramError(f"{here} has no lane and waits for nothing")
        before += dict.fromkeys(nodes)
        starts.append(len(before))
        if op.lane != NO_LANE:
            now[op.lane] = first_op + index
        for register in op.keeps:
            now[register] = first_op + index
    if not all(0 <= output < len(ops) for output in outputs):
        raise ProgramError(f"segment {name}: an output is no op")
    names = tuple(op.name for op in ops)
    lane = [op.lane for op in ops]
    last = [node - first_op if node >= first_op else -1 for node in now]
    return Shape(
        lanes, inputs, names, *(np.array(part, np.int64) for part in (lane, before, starts, outputs, last))
    )


def _join(one: Shape, two: Shape, bind: Mapping[int, int]) -> Shape:
    """The nodes of *two* renamed to what they are when its ops follow those of *one*."""
    if one.lanes != two.lanes:
        raise ProgramError(f"segments of {one.lanes} and {two.lanes} lanes cannot be joined")
    free = [port for port in range(two.inputs) if port not in bind]
    inputs = one.inputs + len(free)
    first_op = one.lanes + inputs
    entry = np.where(one.last < 0, np.arange(one.lanes), first_op + one.last)
    ports = np.empty(two.inputs, np.int64)
    ports[free] = one.lanes + one.inputs + np.arange(len(free))
    for port, output in bind.items():
        ports[port] = first_op + one.outputs[output]
    names = np.concatenate([entry, ports, first_op + one.ops + np.arange(two.ops)])
    moved = np.where(one.before < one.first_op, one.before, one.before + len(free))
    return Shape(
        one.lanes,
        inputs,
        one.names + two.names,
        np.concatenate([one.lane, two.lane]),
        np.concatenate([moved, names[two.before]]),
        np.concatenate([one.before_start, one.before_start[-1] + two.before_start[1:]]),
        np.concatenate([one.outputs, one.ops + two.outputs]),
        np.where(two.last < 0, one.last, one.ops + two.last),
    )


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
    def rank(self) -> Ints:
        """The rank of each call."""
        return np.repeat(np.arange(self.ranks), np.diff(self.rank_start))


@dataclass(frozen=True, eq=False)
class Program:
    """Segments and the calls of them."""

    lanes: tuple[str, ...]
    """Lanes, then registers."""
    segments: tuple[Segment, ...]
    made: Calls

    def __post_init__(self) -> None:
        if any(segment.lanes != len(self.lanes) for segment in self.segments):
            raise ProgramError(f"every segment must have the {len(self.lanes)} lanes of the program")
        if self.calls and not 0 <= self.segment.min() <= self.segment.max() < len(self.segments):
            raise ProgramError("a call names a segment that is not there")
        if self.made.source_call.shape[1] != self.inputs:
            raise ProgramError(f"sources must be {self.calls} calls x {self.inputs} inputs")
        call, port = (part[self.source_call >= 0] for part in (self.source_call, self.source_port))
        outputs = np.array([segment.outputs for segment in self.segments], np.int64)
        if call.size and (
            call.max() >= self.calls or port.min() < 0 or (port >= outputs[self.segment[call]]).any()
        ):
            raise ProgramError("an input is bound to an output that is not there")

    @property
    def rank_start(self) -> Ints:
        return self.made.rank_start

    @property
    def segment(self) -> Ints:
        return self.made.segment

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
    def rank(self) -> Ints:
        return self.made.rank

    @property
    def ranks(self) -> int:
        return self.made.ranks

    @property
    def calls(self) -> int:
        return len(self.segment)

    @cached_property
    def inputs(self) -> int:
        """The most inputs of any segment."""
        return max((segment.inputs for segment in self.segments), default=0)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Each piece once."""
        return tuple(dict.fromkeys(piece for segment in self.segments for piece, _ in segment.chain))

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """Each cost once: what a list of prices must know."""
        return tuple(dict.fromkeys(cost for piece in self.pieces for cost in piece.costs))

    @cached_property
    def cost_of(self) -> dict[Piece, Ints]:
        """For each op of each piece the place of its cost among all."""
        number = {cost: at for at, cost in enumerate(self.costs)}
        return {
            piece: np.array([number[cost] for cost in piece.costs], np.int64)[piece.cost]
            if piece.costs
            else piece.cost
            for piece in self.pieces
        }

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
        if self.flat:
            return self
        flat: dict[tuple[Piece, str], int] = {}
        parts = []
        for segment in self.segments:
            numbers = [flat.setdefault((piece, segment.name), len(flat)) for piece, _ in segment.chain]
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
            start[self.rank_start],
            self._spread(parts, start),
            source_call,
            source_port,
            self.rank_names,
            labels,
        )
        return Program(self.lanes, tuple(Segment(name, ((piece, 1),)) for piece, name in flat), made)

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
