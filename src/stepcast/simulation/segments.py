"""Layers as pieces: the ops of a phase, issued in order, in the lanes of one rank.

Computation runs in the compute lane, each group's communication in a lane of its own. A blocking
communication starts when the computation before it has ended and holds up the computation after it; a
non-blocking one holds up nobody but the ops that name it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stepcast.ir.group import Channel, Group
from stepcast.ir.work import Collective, Communication, Work, group_of
from stepcast.ir.workload import Layer, Op, Phase
from stepcast.simulation.costs import Beside, Delayed, Issue, Seconds, Slowed
from stepcast.simulation.identity import ByIdentity
from stepcast.simulation.lanes import COMPUTE, HANDED_ON, Lanes
from stepcast.simulation.pieces import NO_LANE, Cost, Piece, TimedOp
from stepcast.simulation.schedule import Kind


@dataclass(frozen=True, slots=True)
class Issued:
    """An op with the layer it belongs to."""

    layer: Layer
    op: Op
    backward: bool = False


def phase_ops(layers: Sequence[Layer], kind: Kind) -> list[Issued]:
    """The ops of one slot in the order in which they are issued."""
    backward = kind is not Kind.FORWARD
    return [
        Issued(layer, op, backward)
        for layer in (reversed(layers) if backward else layers)
        for phase in HANDED_ON[kind]
        for op in layer.ops(phase)
    ]


def once_ops(layers: Iterable[Layer], phases: Sequence[Phase]) -> list[Issued]:
    """The ops of layers that run once per step, all their *phases* together."""
    return [Issued(layer, op) for layer in layers for phase in phases for op in layer.ops(phase)]


@dataclass(frozen=True)
class Terms:
    """How pieces are made of ops, apart from the ops themselves."""

    lanes: Lanes
    alone: frozenset[Group] = frozenset()
    """Groups of one rank, which have nobody to talk to."""
    eager: bool = False
    """Whether a host issues the ops one by one."""
    contention: bool = False
    """Whether computing loses to communication that runs beside it."""
    factor: float = 1.0
    """How much slower than it should the stage computes."""


def begin_piece(lanes: Lanes, streams: int) -> Piece:
    """The begin of a slot, or of two that are interleaved: input k is what stream k needs."""
    ops = [TimedOp("turn", 0.0, NO_LANE, lanes=(COMPUTE,), keeps=(lanes.turn,))]
    for stream in range(streams):
        ops.append(TimedOp("given", 0.0, NO_LANE, inputs=(stream,), keeps=(lanes.given(stream),)))
        ops.append(TimedOp("fresh", 0.0, NO_LANE, lanes=(lanes.begin,), keeps=(lanes.done(stream),)))
    return Piece.of("begin", ops, lanes=lanes.count, inputs=streams)


def end_piece(lanes: Lanes, streams: int) -> Piece:
    """Output k is what stream k made; one that made nothing hands on what it was given."""
    ops = [
        TimedOp(
            "made",
            0.0,
            NO_LANE,
            lanes=(lanes.done(stream), lanes.given(stream), lanes.turn),
            keeps=(lanes.done(stream),),
        )
        for stream in range(streams)
    ]
    return Piece.of("end", ops, lanes=lanes.count, outputs=range(streams))


def layers_piece(layers: tuple[Layer, ...], kind: Kind, terms: Terms, goes_on: bool) -> Piece:
    """One slot's ops of *layers*; the same piece for the same layers. The slot *goes on* with others."""

    def make() -> Piece:
        build = Build(terms, 1)
        for each in phase_ops(layers, kind):
            build.issue(0, each)
        return build.piece(goes_on)

    return _pieces(terms).get(layers, make, kind, goes_on)


@lru_cache(maxsize=256)
def _pieces(terms: Terms) -> ByIdentity[Piece]:
    return ByIdentity(4096)


def once_piece(issued: Sequence[Issued], name: str, terms: Terms, others: int, finish: bool) -> Piece:
    """What runs once per step, when *others* have come and, to *finish*, all communication has ended.

    Its output is the end of everything issued so far.
    """
    lanes, build = terms.lanes, Build(terms, 1)
    waits = lanes.collectives if finish else ()
    begins = (lanes.turn, lanes.given(0), lanes.done(0))
    build.ops.append(TimedOp(name, 0.0, COMPUTE, inputs=tuple(range(others)), lanes=waits, keeps=begins))
    for each in issued:
        build.issue(0, each)
    build.ops.append(TimedOp("end of round", 0.0, COMPUTE, lanes=(lanes.done(0), *lanes.collectives)))
    return Piece.of(name, build.ops, lanes=lanes.count, inputs=others, outputs=(len(build.ops) - 1,))


def interleaved_piece(streams: Sequence[Sequence[Issued]], seconds: Seconds, terms: Terms) -> Piece:
    """Ops of all streams, each stream in its own order: always the op that can start first, so that one
    stream computes while the other communicates (DeepSeek-V3, 2024, section 3.2.1); of two the one whose
    stream has done less.
    """
    orders = [_Order(stream, seconds) for stream in streams]
    free_s: dict[Channel | None, float] = {}
    build = Build(terms, len(streams))
    while any(order.left for order in orders):
        starts = [
            (order.start_s(free_s), order.done_share, number)
            for number, order in enumerate(orders)
            if order.left
        ]
        start_s, _, number = min(starts)
        build.issue(number, orders[number].take(start_s, free_s))
    return build.piece(False)


class _Order:
    """One stream of ops, as far as it has been issued."""

    def __init__(self, ops: Sequence[Issued], seconds: Seconds) -> None:
        self.ops, self.at = ops, 0
        self.lengths_s = [seconds(issued.op.work) for issued in ops]
        self.total_s = sum(self.lengths_s) or 1.0
        self.done_s = self.ready_s = 0.0
        self.ended_s: dict[str, float] = {}

    @property
    def left(self) -> bool:
        return self.at < len(self.ops)

    @property
    def done_share(self) -> float:
        return self.done_s / self.total_s

    def start_s(self, free_s: dict[Channel | None, float]) -> float:
        """When the next op can start: its lane is free, and what it waits for has ended."""
        op = self.ops[self.at].op
        named_s = max((self.ended_s.get(name, 0.0) for name in op.after), default=0.0)
        return max(self.ready_s, free_s.get(group_of(op.work), 0.0), named_s)

    def take(self, start_s: float, free_s: dict[Channel | None, float]) -> Issued:
        issued, length_s = self.ops[self.at], self.lengths_s[self.at]
        end_s = start_s + length_s
        free_s[group_of(issued.op.work)] = self.ended_s[issued.op.name] = end_s
        if issued.op.blocking or not isinstance(issued.op.work, Communication):
            self.ready_s = end_s
        self.done_s += length_s
        self.at += 1
        return issued


@dataclass
class _Window:
    """A collective and where among the computing of its piece it was issued, and first waited for."""

    stream: int
    name: str
    work: Collective
    blocking: bool
    start: int
    end: int | None = None


class Build:
    """The ops of one piece as they are issued."""

    def __init__(self, terms: Terms, streams: int) -> None:
        self.terms, self.lanes, self.streams = terms, terms.lanes, streams
        self.ops: list[TimedOp] = []
        # Per stream: whether it has done anything in this piece, which had to wait for what the slot was
        # given, and the blocking communication that nothing has waited for yet.
        self.begun = [False] * streams
        self.awaited: dict[int, int] = {}
        self.named: list[dict[str, int]] = [{} for _ in range(streams)]
        # What computes, and in whose stream; what communicates beside it, from where on and until what waits.
        self.computing: list[tuple[int, Work]] = []
        self.beside: list[_Window] = []
        self.waited: dict[tuple[int, str], int] = {}

    def issue(self, stream: int, issued: Issued) -> None:
        op, layer = issued.op, issued.layer
        work = op.work
        after, registers = self._named_waits(stream, op)
        done = self.lanes.done(stream)
        keeps: tuple[int, ...] = ()
        if op.name in self.lanes.register:
            keeps += (self.lanes.register[op.name],)
        if op.host_reads:
            keeps += (self.lanes.read,)
        name = layer.op_name(op)
        if isinstance(work, Communication):
            if not work.size_bytes or work.group in self.terms.alone:
                return
            after += self._issued(issued)
            registers += (done,)
            if op.early:
                after, registers = (), ()
            cost: Cost = Delayed(work, layer.process_s) if layer.process_s else work
            if op.blocking:
                registers += self._begins(stream)
                keeps += (done,)
            at = self._add(name, cost, self.lanes.of(work.group), after, registers, keeps)
            if op.blocking:
                self.awaited[stream] = at
            if isinstance(work, Collective) and (not op.blocking or self.streams > 1):
                self.beside.append(_Window(stream, op.name, work, op.blocking, len(self.computing)))
        else:
            after += self._issued(issued)
            registers += (done, *self._given(stream))
            cost = work if self.terms.factor == 1.0 else Slowed(work, self.terms.factor)
            at = self._add(name, cost, COMPUTE, after, registers, (done, *keeps))
            self.begun[stream] = True
            self.awaited.pop(stream, None)
            self.computing.append((stream, work))
        self.named[stream][op.name] = at

    def _beside(self, goes_on: bool) -> Beside | None:
        """What computing loses to collectives; None where nothing runs beside any."""
        computing = tuple(work for _, work in self.computing)
        windows = []
        for each in self.beside:
            if each.blocking:
                window = tuple(work for stream, work in self.computing if stream != each.stream)
            elif each.end is not None:
                window = computing[each.start : each.end]
            elif goes_on and self.waited.get((each.stream, each.name), each.start) >= each.start:
                window = computing
            else:
                # The next piece waits for it where this one waited for that of the piece before.
                again = self.waited.get((each.stream, each.name), 0) if goes_on else 0
                window = computing[each.start :] + computing[:again]
            if window:
                windows.append((each.work, window))
        return Beside(tuple(windows), computing, self.terms.factor) if windows else None

    def _waits_for(self, stream: int, name: str) -> None:
        """An op waits here: for what this piece issued, or for what an earlier one did."""
        for each in reversed(self.beside):
            if (each.stream, each.name) == (stream, name):
                each.end = len(self.computing) if each.end is None else each.end
                return
        self.waited.setdefault((stream, name), len(self.computing))

    def _begins(self, stream: int) -> tuple[int, ...]:
        """What a blocking communication waits for that nothing of its stream came before: the slot's input,
        and the computation of whatever ran before the slot.
        """
        if self.begun[stream]:
            return ()
        given = self._given(stream)
        self.begun[stream] = True
        # Interleaved slots are one piece, so that what came before is known.
        return (*given, self.lanes.turn if self.streams == 1 else COMPUTE)

    def _given(self, stream: int) -> tuple[int, ...]:
        return () if self.begun[stream] else (self.lanes.given(stream),)

    def _issued(self, issued: Issued) -> tuple[int, ...]:
        """The host's own op, which an eager host ends before the work can start.

        It waits for results that it reads.
        """
        host = self.lanes.host_lane
        if host is None or not self.terms.eager or issued.layer.captured:
            return ()
        cost = Issue(issued.op.work, issued.backward, issued.op.kernels)
        self.ops.append(TimedOp("issue", cost, host, lanes=(self.lanes.read,)))
        return (len(self.ops) - 1,)

    def _named_waits(self, stream: int, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ops of this piece that *op* names, and the registers of those that were issued earlier."""
        if not op.after:
            return (), ()
        named, register = self.named[stream], self.lanes.register
        # What communicates beside computing holds none of it up by its waits.
        if op.blocking or not isinstance(op.work, Communication):
            for name in op.after:
                self._waits_for(stream, name)
        here = tuple(named[name] for name in op.after if name in named)
        earlier = tuple(register[name] for name in op.after if name not in named and name in register)
        return here, earlier

    def _add(
        self,
        name: str,
        cost: Cost,
        lane: int,
        after: tuple[int, ...],
        registers: tuple[int, ...],
        keeps: tuple[int, ...],
    ) -> int:
        self.ops.append(TimedOp(name, cost, lane, tuple(dict.fromkeys(after)), (), registers, keeps))
        return len(self.ops) - 1

    def piece(self, goes_on: bool) -> Piece:
        """A blocking communication at the end holds up the computation of the next piece too."""
        if self.awaited:
            self.ops.append(TimedOp("wait", 0.0, COMPUTE, tuple(self.awaited.values())))
        if self.terms.contention and (beside := self._beside(goes_on)) is not None:
            self.ops.append(TimedOp("slowed by communication", beside, COMPUTE, keeps=self._all_done()))
        return Piece.of("", self.ops, lanes=self.lanes.count)

    def _all_done(self) -> tuple[int, ...]:
        return tuple(self.lanes.done(stream) for stream in range(self.streams))
