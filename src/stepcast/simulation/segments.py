"""Work of one rank: ops in lanes and registers, pieces made of ops, and segments made of pieces.

A **lane** runs its ops one after the other in the order of issue, like a GPU stream. A **register** stores the end of
one op. A **piece** is work such as one layer: ops that wait for lanes, registers, inputs and one another. A **segment**
has a **chain** of pieces with repeat counts, such as the forward of a stage. Its inputs belong to its first piece, its
outputs are those of all. An op starts when its lane is free and everything it waits for has ended; all lanes are
free at 0. Pieces and chains of them are folded to matrices. This module does not know what ops do.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import accumulate
from itertools import chain as join
from typing import TypeAlias

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.types import Remembered, cached_property, dataclass, replace

Cost: TypeAlias = Hashable
"""Seconds as a plain number, or a key that a price list knows."""
NO_LANE = -1
"""The lane of an op that occupies none: it starts when what it waits for has ended (a delay, a meeting point)."""


class ProgramError(ValueError):
    """A segment or program that contradicts itself or can never end."""


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op of a piece: its lane, its cost and what it waits for besides the op before it in its lane."""

    name: str
    cost: Cost
    lane: int = 0
    after: tuple[int, ...] = ()  # earlier ops of the piece
    inputs: tuple[int, ...] = ()  # inputs of the segment, for ops of its first piece
    lanes: tuple[int, ...] = ()  # lanes whose work so far must have ended, and registers whose op must have
    stores: tuple[int, ...] = ()  # registers that store its end
    is_optimizer: bool = False  # its time is reported apart from that of other ops of its lane


@dataclass(frozen=True, eq=False)
class Shape:
    """The ops of a piece without names and costs; one object for those that are issued in the same way.

    The nodes that an op waits for are numbered: node ``k`` below ``lanes`` is the time of lane or register ``k`` when
    the piece begins, then come the inputs, then the ops. The op before it in its lane is listed first.
    """

    lanes: int  # lanes and registers
    inputs: int
    lane_of: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]  # the nodes that each op waits for
    output_ops: tuple[int, ...]  # the op whose end is the output
    last_ops: tuple[int, ...]  # for each lane its last op, for each register the op stored in it, or -1

    @property
    def first_op(self) -> int:
        """The node of op 0."""
        return self.lanes + self.inputs

    @property
    def ops(self) -> int:
        return len(self.lane_of)

    @property
    def ports(self) -> tuple[int, int]:
        """The numbers of inputs and outputs."""
        return self.inputs, len(self.output_ops)

    @cached_property
    def lane(self) -> IntArray:
        """The lane of each op."""
        return np.array(self.lane_of, np.int64)

    @cached_property
    def last(self) -> IntArray:
        return np.array(self.last_ops, np.int64)

    @cached_property
    def outputs(self) -> IntArray:
        return np.array(self.output_ops, np.int64)

    @cached_property
    def before(self) -> IntArray:
        """``waits`` of all ops, one after the other."""
        return np.array(list(join.from_iterable(self.waits)), np.int64)

    @cached_property
    def before_start(self) -> IntArray:
        """The place in ``before`` where the nodes of each op begin, and the end of all."""
        return np.array([0, *accumulate(map(len, self.waits))], np.int64)

    @cached_property
    def lane_ops(self) -> list[list[int]]:
        """The ops of each lane, in order; those without one come last."""
        ops: list[list[int]] = [[] for _ in range(self.lanes + 1)]
        for op, lane in enumerate(self.lane_of):
            ops[lane].append(op)
        return ops

    @cached_property
    def reads(self) -> int:
        """Lanes and registers whose time before the piece is waited for, as bits."""
        return sum([1 << node for node in {node for nodes in self.waits for node in nodes} if node < self.lanes])

    @cached_property
    def writes(self) -> int:
        return sum([1 << lane for lane, op in enumerate(self.last_ops) if op >= 0])

    @cached_property
    def touched(self) -> list[int]:
        """Lanes and registers that are read or written."""
        return list_bits(self.reads | self.writes)

    @cached_property
    def compact(self) -> tuple[list[list[int]], list[int]]:
        """The nodes that each op waits for, numbered without the lanes that are not touched; then those of each
        touched lane and register after the piece, and of the outputs.
        """
        number = {lane: index for index, lane in enumerate(self.touched)}
        moved = len(number) - self.lanes
        waits = [[number[node] if node < self.lanes else node + moved for node in nodes] for nodes in self.waits]
        first = len(number) + self.inputs
        last = [number[lane] if self.last_ops[lane] < 0 else first + self.last_ops[lane] for lane in number]
        return waits, last + [first + op for op in self.output_ops]

    @cached_property
    def entries(self) -> list[int]:
        """The touched lanes and registers, then the inputs."""
        return [*self.touched, *range(self.lanes, self.first_op)]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of touched lanes and registers, inputs, outputs and ops."""
        return len(self.touched), self.inputs, len(self.output_ops), len(self.lane_of)


def list_bits(mask: int) -> list[int]:
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


MOST_SHAPES = 16384
_SHAPES = Remembered[object, Shape]()


@dataclass(frozen=True, eq=False)
class Piece:
    """Ops in the order of issue, with their shape."""

    shape: Shape
    ops: tuple[TimedOp, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple([op.name for op in self.ops])

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        return tuple([op.cost for op in self.ops])

    @cached_property
    def optimizer_ops(self) -> frozenset[int]:
        return frozenset(index for index, op in enumerate(self.ops) if op.is_optimizer)

    @cached_property
    def has_delays(self) -> bool:
        """Whether any op takes time but no lane."""
        return any(op.cost != 0 and op.lane == NO_LANE for op in self.ops)

    @classmethod
    def of(
        cls, name: str, ops: Sequence[TimedOp], *, lanes: int, inputs: int = 0, outputs: Sequence[int] = ()
    ) -> "Piece":
        """Build the piece of *ops*, listed in the order of issue."""
        # Pieces differ in names and costs far more often than in their shapes, which take long to build and check.
        structure = tuple([(op.lane, op.after, op.inputs, op.lanes, op.stores) for op in ops])
        key = (lanes, inputs, tuple(outputs), structure)
        shape = _SHAPES.get(key)
        if shape is None:
            if len(_SHAPES) >= MOST_SHAPES:
                _SHAPES.clear()
            shape = _SHAPES[key] = _shape_ops(name, ops, lanes, inputs, outputs)
        for op in ops:
            if isinstance(op.cost, float | int) and not 0 <= op.cost < np.inf:
                raise ProgramError(f"segment {name}: a duration is negative or not finite")
        return cls(shape, tuple(ops))


@dataclass(frozen=True, eq=False)
class Chain:
    """Pieces that run one after the other; segments know how often each repeats."""

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if any(piece.shape.inputs for piece in self.pieces[1:]):
            raise ProgramError("inputs of a chain belong to its first piece")

    @cached_property
    def lanes(self) -> int:
        return self.pieces[0].shape.lanes

    @cached_property
    def inputs(self) -> int:
        return self.pieces[0].shape.inputs

    @cached_property
    def outputs(self) -> int:
        return sum(piece.shape.ports[1] for piece in self.pieces)

    @cached_property
    def output_places(self) -> list[tuple[int, int]]:
        """The index of the piece of each output, and its port there."""
        return [(index, port) for index, piece in enumerate(self.pieces) for port in range(piece.shape.ports[1])]

    @cached_property
    def limits(self) -> tuple[int, int, int, int, int]:
        """The lanes and registers that are read before they are written, as bits, the inputs and outputs, the width of
        the largest matrix of a piece, and the most nodes of a piece.

        Where an op takes time but no lane, all are read: the last end may be that of any register.
        """
        read = written = 0
        width = nodes = 1
        for piece in self.pieces:
            read |= piece.shape.reads & ~written
            written |= piece.shape.writes
            if piece.has_delays:
                read = (1 << self.lanes) - 1
            touched, inputs, outputs, ops = piece.shape.sizes
            width, nodes = max(width, touched + inputs, touched + outputs), max(nodes, touched + inputs + ops)
        return read, self.inputs, self.outputs, width, nodes


intern_chain = lru_cache(2**14)(Chain)
"""Return one object for the same pieces."""


@dataclass(frozen=True)
class Segment:
    """A chain that a program calls. For each of its pieces, the list of ops that its costs belong to, -1 where they are
    no slots to be filled, and how often it runs, which is once if it has inputs or outputs. Nothing: all -1, all once.
    """

    name: str
    chain: Chain
    lists: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, name: str, ops: Sequence[TimedOp], *, lanes: int, inputs: int = 0, outputs: Sequence[int] = ()
    ) -> "Segment":
        """Build the segment of one piece."""
        return cls(name, Chain((Piece.of(name, ops, lanes=lanes, inputs=inputs, outputs=outputs),)))

    @property
    def inputs(self) -> int:
        return self.chain.inputs

    @property
    def outputs(self) -> int:
        return self.chain.outputs

    @property
    def piece_lists(self) -> tuple[int, ...]:
        """The list of each piece."""
        return self.lists or (-1,) * len(self.chain.pieces)

    @property
    def times(self) -> tuple[int, ...]:
        """The number of runs of each piece."""
        return self.repeats or (1,) * len(self.chain.pieces)

    @property
    def piece(self) -> Piece:
        """The only piece of a segment of one piece."""
        ((piece, repeat),) = zip(self.chain.pieces, self.times, strict=True)
        assert repeat == 1
        return piece

    @property
    def shape(self) -> Shape:
        return self.piece.shape

    @property
    def names(self) -> tuple[str, ...]:
        return self.piece.names

    def with_outputs(self, outputs: Sequence[int]) -> "Segment":
        """Return the same ops with only these *outputs*, in this order."""
        wanted = [self.chain.output_places[output] for output in outputs]
        if wanted != sorted(wanted) and len(self.chain.pieces) > 1:
            raise ProgramError(f"segment {self.name}: outputs of several pieces come in their order")
        pieces = [
            _select_outputs(piece, tuple([port for place, port in wanted if place == index]))
            for index, piece in enumerate(self.chain.pieces)
        ]
        return Segment(self.name, Chain(tuple(pieces)), repeats=self.repeats)

    def then(self, other: "Segment", bind: Mapping[int, int] | None = None) -> "Segment":
        """Join both into one: the ops of *other* are issued after these.

        *bind* maps inputs of *other* to outputs of this segment's last piece. The other inputs of *other* come after
        the inputs of this segment, its outputs after the outputs.
        """
        (*before, last), (following, *after) = self.chain.pieces, other.chain.pieces
        earlier = self.outputs - last.shape.ports[1]
        bound = tuple(sorted((port, output - earlier) for port, output in (bind or {}).items()))
        repeats = (*self.times[:-1], 1, *other.times[1:])
        return Segment(self.name, Chain((*before, _join_pieces(last, following, bound), *after)), repeats=repeats)


@lru_cache(maxsize=4096)
def _select_outputs(piece: Piece, ports: tuple[int, ...]) -> Piece:
    shape = piece.shape
    if ports == tuple(range(shape.ports[1])):
        return piece
    outputs = [shape.output_ops[port] for port in ports]
    return Piece.of("", piece.ops, lanes=shape.lanes, inputs=shape.inputs, outputs=outputs)


@lru_cache(maxsize=4096)
def _join_pieces(first: Piece, second: Piece, bind: tuple[tuple[int, int], ...]) -> Piece:
    """Return the ops of *second* after those of *first*; *bind* has inputs of *second* with outputs of *first*."""
    lanes, count, bound = first.shape.lanes, len(first.ops), dict(bind)
    if lanes != second.shape.lanes:
        raise ProgramError(f"segments of {lanes} and {second.shape.lanes} lanes cannot be joined")
    given = first.shape.output_ops
    free = [port for port in range(second.shape.inputs) if port not in bound]
    number = {port: first.shape.inputs + index for index, port in enumerate(free)}
    ops = list(first.ops)
    for op in second.ops:
        after = [count + earlier for earlier in op.after] + [given[bound[port]] for port in op.inputs if port in bound]
        inputs = [number[port] for port in op.inputs if port in number]
        ops.append(replace(op, after=tuple(after), inputs=tuple(inputs)))
    outputs = [*given, *[count + output for output in second.shape.output_ops]]
    return Piece.of("", ops, lanes=lanes, inputs=first.shape.inputs + len(free), outputs=outputs)


def _shape_ops(name: str, ops: Sequence[TimedOp], lanes: int, inputs: int, outputs: Sequence[int]) -> Shape:
    now, first_op = list(range(lanes)), lanes + inputs
    waits: list[tuple[int, ...]] = []

    def refuse(words: str) -> ProgramError:
        return ProgramError(f"segment {name}: op {len(waits)} ({ops[len(waits)].name}) {words}")

    for index, op in enumerate(ops):
        lane, stores = op.lane, op.stores
        own = () if lane == NO_LANE else (lane,)
        places = (*own, *op.lanes, *stores)
        if places and not 0 <= min(places) <= max(places) < lanes:
            raise refuse("names a lane that is not there")
        if op.after and not 0 <= min(op.after) <= max(op.after) < index:
            raise refuse("waits for an op that is not before it")
        if op.inputs and not 0 <= min(op.inputs) <= max(op.inputs) < inputs:
            raise refuse("waits for an input that is not there")
        waited = [now[place] for place in own]
        waited += [first_op + earlier for earlier in op.after]
        waited += [lanes + port for port in op.inputs]
        waited += [now[place] for place in op.lanes]
        if not waited:
            raise refuse("has no lane and waits for nothing")
        waits.append(tuple(dict.fromkeys(waited)))
        for place in (*own, *stores):
            now[place] = first_op + index
    if outputs and not 0 <= min(outputs) <= max(outputs) < len(ops):
        raise ProgramError(f"segment {name}: an output is no op")
    if delays := [index for index, op in enumerate(ops) if op.lane == NO_LANE]:
        needed = {*now, *join.from_iterable(waits), *[first_op + output for output in outputs]}
        if unneeded := [index for index in delays if first_op + index not in needed]:
            raise ProgramError(f"op {unneeded[0]} has no lane and nothing waits for it")
    last = tuple([node - first_op if node >= first_op else -1 for node in now])
    return Shape(lanes, inputs, tuple([op.lane for op in ops]), tuple(waits), tuple(outputs), last)


# ---- Pieces and chains of them as max-plus matrices.
#
# Each end time in a piece is a maximum over its entry times (those of its lanes, registers and inputs), each plus a
# constant. So a piece is a small matrix: columns for lanes, registers and inputs, rows for lanes, registers and
# outputs; a piece that repeats is a power of its matrix, a chain of pieces a product. Only the lanes and registers that
# a piece touches take part. ``kernels.fold_chains`` does the same, compiled; here, where it takes longer, equal pieces
# and chains are computed once.


@lru_cache(maxsize=2**12)
def fold_piece(shape: Shape, durations_s: tuple[float, ...], repeat: int = 1) -> FloatArray:
    """Return (touched + outputs) x (touched + inputs): the matrix of *repeat* pieces whose ops take *durations_s*."""
    if repeat > 1:
        return _raise_matrix(fold_piece(shape, durations_s), repeat)
    values: list[list[float]] = np.where(np.eye(len(shape.entries)), 0.0, -np.inf).tolist()
    waits, exits = shape.compact
    for nodes, duration_s in zip(waits, durations_s, strict=True):
        latest = values[nodes[0]]
        for node in nodes[1:]:
            latest = list(map(max, latest, values[node]))
        values.append([value + duration_s for value in latest])
    return np.array([values[node] for node in exits]).reshape(len(exits), len(shape.entries))


@lru_cache(maxsize=2**12)
def fold_chain(
    lanes: int, parts: tuple[tuple[Shape, tuple[float, ...], int], ...], read: tuple[int, ...], ports: tuple[int, int]
) -> FloatArray:
    """Return (read + outputs) x (read + inputs): the matrix of a chain of *parts*: shapes, seconds of ops, repeats.

    *read*: the lanes and registers that chains read; *ports*: the most inputs and outputs of a chain.
    """
    begins = np.array([*read, *range(lanes, lanes + ports[0])])
    state = np.where(np.arange(lanes + ports[0])[:, None] == begins, 0.0, -np.inf)
    matrix, given = np.full((len(read) + ports[1], len(begins)), -np.inf), len(read)
    for shape, durations_s, repeat in parts:
        after = product(fold_piece(shape, durations_s, repeat), state[shape.entries])
        count = len(shape.touched)
        state[shape.touched] = after[:count]
        matrix[given : given + len(after) - count] = after[count:]
        given += len(after) - count
    matrix[: len(read)] = state[begins[: len(read)]]
    return matrix


def _raise_matrix(matrix: FloatArray, repeat: int) -> FloatArray:
    """Return *matrix* to the power *repeat*, by repeated squaring."""
    factors = []
    while repeat:
        factors += [matrix] * (repeat & 1)
        repeat >>= 1
        matrix = product(matrix, matrix) if repeat else matrix
    return reduce(lambda first, second: product(second, first), factors)


def product(second: FloatArray, first: FloatArray) -> FloatArray:
    """Return the matrix of *first* followed by *second*."""
    result: FloatArray = np.maximum.reduce(second[:, :, None] + first, 1, initial=-np.inf)
    return result


def widen(matrix: FloatArray, shape: Shape) -> FloatArray:
    """Return (lanes + outputs) x (lanes + inputs): the *matrix* of a piece with all lanes."""
    inputs, outputs = shape.ports
    wide = np.full((shape.lanes + outputs, shape.lanes + inputs), -np.inf)
    np.fill_diagonal(wide[:, : shape.lanes], 0.0)
    rows = np.array([*shape.touched, *range(shape.lanes, shape.lanes + outputs)], np.int64)
    wide[rows[:, None], shape.entries] = matrix
    return wide
