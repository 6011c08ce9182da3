"""Work of one rank: ops in lanes and registers, pieces of them, and segments that are chains of pieces.

A **lane** runs its ops one after the other in the order in which they were issued (a GPU stream). A
**register** keeps the end of the latest op that was told to be kept there. A **piece** is work such as one
layer: ops in lanes that wait for lanes, registers, inputs and one another. A **segment** is a chain of
pieces, each as often as it repeats: the forward of a stage. Its inputs belong to its first piece; its outputs
are those of its pieces. An op starts when its lane is free and everything it waits for has ended; the first
op of a lane starts at 0. Nothing here knows what ops do.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Cost: TypeAlias = Hashable
"""Seconds as a plain number, or a key of a list of prices."""

NO_LANE = -1
"""The lane of an op that occupies none: it starts when what it waits for has ended (a delay, a meeting
point)."""


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
    apart: bool = False
    """Its time is told apart from that of others in its lane."""


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
    apart: frozenset[int] = frozenset()
    """Ops whose time is told apart."""

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
    def ports(self) -> tuple[int, int]:
        """How many inputs and outputs there are."""
        return self.inputs, len(self.outputs)

    @cached_property
    def waits(self) -> tuple[tuple[int, ...], ...]:
        """``before`` of each op as plain tuples."""
        nodes, bounds = self.before.tolist(), self.before_start.tolist()
        return tuple(tuple(nodes[start:stop]) for start, stop in pairwise(bounds))

    @cached_property
    def form(self) -> "Form":
        """One object for all shapes that behave the same."""
        if self.key not in _FORMS:
            if len(_FORMS) >= MOST_FORMS:
                _FORMS.clear()
            _FORMS[self.key] = _form(self)
        return _FORMS[self.key]

    @cached_property
    def key(self) -> tuple[int, int, bytes, bytes, bytes, bytes, bytes]:
        """Equal for shapes that behave the same."""
        arrays = (self.lane, self.before, self.before_start, self.outputs, self.last)
        lane, before, before_start, outputs, last = (array.tobytes() for array in arrays)
        return self.lanes, self.inputs, lane, before, before_start, outputs, last


@dataclass(frozen=True, eq=False)
class Form:
    """A shape without its names and the lanes that it does not touch.

    Nodes are the lanes and registers that it touches, then its inputs, then its ops.
    """

    reads: frozenset[int]
    """Lanes and registers of the shape that ops wait for as they stood before the piece."""
    writes: frozenset[int]
    touched: Ints
    inputs: int
    before: Ints
    """The nodes that each op waits for, one op after the other."""
    waits: Ints
    """For each op their number."""
    level: Ints
    """For each op the number of ops on the longest chain that leads to it."""
    exits: Ints
    """Where each touched lane and register stands after the piece, then the outputs."""

    @property
    def outputs(self) -> int:
        return len(self.exits) - len(self.touched)


MOST_FORMS = 16384
_FORMS: dict[object, Form] = {}


def _form(shape: Shape) -> Form:
    reads = frozenset(node for node in shape.before.tolist() if node < shape.lanes)
    writes = frozenset(np.flatnonzero(shape.last >= 0).tolist())
    touched = sorted(reads | writes)
    first_op = len(touched) + shape.inputs
    moved = {lane: at for at, lane in enumerate(touched)}
    moved |= {shape.lanes + port: len(touched) + port for port in range(shape.inputs)}
    moved |= {shape.first_op + op: first_op + op for op in range(shape.ops)}
    before = [moved[node] for node in shape.before.tolist()]
    level = [-1] * first_op
    for start, stop in pairwise(shape.before_start.tolist()):
        level.append(1 + max(level[node] for node in before[start:stop]))
    last = shape.last.tolist()
    kept = [at if last[lane] < 0 else first_op + last[lane] for at, lane in enumerate(touched)]
    exits = kept + [first_op + output for output in shape.outputs.tolist()]
    arrays = [np.array(part, np.int64) for part in (touched, before, level[first_op:], exits)]
    lanes, nodes, levels, ends = arrays
    return Form(reads, writes, lanes, shape.inputs, nodes, np.diff(shape.before_start), levels, ends)


@dataclass(frozen=True, eq=False)
class Piece:
    """A shape with the costs of its ops: op i costs ``costs[cost[i]]``."""

    shape: Shape
    costs: tuple[Cost, ...]
    cost: Ints

    @cached_property
    def delays(self) -> bool:
        """Whether any op takes time but no lane."""
        return any(self.costs[number] != 0 for number in self.cost[self.shape.lane == NO_LANE].tolist())

    def costing(self, costs: tuple[Cost, ...]) -> "Piece":
        """The same ops at other *costs*, which are zero where these are."""
        piece = Piece(self.shape, costs, self.cost)
        piece.__dict__["delays"] = self.delays
        return piece

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
    outputs: int = field(init=False)

    def __post_init__(self) -> None:
        given = 0
        for at, (piece, repeat) in enumerate(self.chain):
            inputs, outputs = piece.shape.ports
            given += outputs
            if repeat < 1 or (inputs and at) or (repeat > 1 and (inputs or outputs)):
                raise ProgramError(
                    f"segment {self.name}: inputs belong to its first piece, and pieces with ports run once"
                )
        object.__setattr__(self, "outputs", given)

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
    apart = frozenset(at for at, op in enumerate(ops) if op.apart)
    arrays = [np.array(part, np.int64) for part in (lane, before, starts, outputs, last)]
    issued_in, waits, bounds, given, ends = arrays
    return Shape(lanes, inputs, names, issued_in, waits, bounds, given, ends, apart)


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
        one.apart.union(one.ops + op for op in two.apart),
    )
