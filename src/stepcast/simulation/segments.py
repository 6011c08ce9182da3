"""Layers as pieces: the ops of a phase, issued in order, in the lanes of one rank.

Computation runs in the compute lane, each group's communication in a lane of its own. A blocking
communication starts when the computation before it has ended and holds up the computation after it; a
non-blocking one holds up nobody but the ops that name it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from stepcast.ir.group import Group
from stepcast.ir.work import Collective, Communication, Transfer, Work
from stepcast.ir.workload import Layer, Op, Phase
from stepcast.simulation.arrays import NO_LANE, Cost, Piece, TimedOp
from stepcast.simulation.lanes import COMPUTE, HANDED_ON, Lanes
from stepcast.simulation.schedule import Kind

Seconds = Callable[[Work], float]
IssueSeconds = Callable[[Work, bool], float]
"""(work, whether in a backward) -> seconds the host needs to issue it."""


@dataclass(frozen=True, slots=True)
class Issue:
    """The cost of the host for issuing the kernels of a work."""

    work: Work
    backward: bool
    kernels: int


@dataclass(frozen=True, slots=True)
class Delayed:
    """The cost of a communication whose result may be used only after a while."""

    work: Communication
    delay_s: float


@dataclass(frozen=True, slots=True)
class Slowed:
    """The cost of a computation on a stage that is *factor* times as slow as it should be."""

    work: Work
    factor: float


@dataclass(frozen=True, slots=True)
class Lost:
    """What computing loses to a communication that runs beside it."""

    work: Communication


@dataclass(frozen=True)
class Prices:
    """Seconds of every cost that pieces are made of."""

    seconds: Seconds
    issue_s: IssueSeconds | None = None
    lost_s: Seconds | None = None
    slow_groups: Mapping[Group, float] = field(default_factory=dict)

    def __call__(self, cost: Cost) -> float:
        match cost:
            case float() | int():
                return cost
            case Issue(work, backward, kernels):
                assert self.issue_s is not None
                return self.issue_s(work, backward) * kernels
            case Delayed(work, delay_s):
                return self._communication_s(work) + delay_s
            case Slowed(work, factor):
                return self.seconds(work) * factor
            case Lost(work):
                assert self.lost_s is not None
                # What a slow group exchanges lasts longer, and so does what it takes from computing.
                return self.lost_s(work) * self.slow_groups.get(work.group, 1.0)
            case Collective() | Transfer():
                return self._communication_s(cost)
        return self.seconds(cost)  # type: ignore[arg-type]

    def _communication_s(self, work: Communication) -> float:
        return self.seconds(work) * self.slow_groups.get(work.group, 1.0)


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


def layers_piece(layers: tuple[Layer, ...], kind: Kind, terms: Terms) -> Piece:
    """One slot's ops of *layers*; the same piece for the same layers."""
    known = _pieces(terms)
    key = (kind, *map(id, layers))
    found = known.get(key)
    if found is None:
        if len(known) >= MOST_PIECES:
            known.clear()
        build = Build(terms, 1)
        for each in phase_ops(layers, kind):
            build.issue(0, each)
        found = known[key] = (layers, build.piece())
    return found[1]


MOST_PIECES = 4096


@lru_cache(maxsize=256)
def _pieces(terms: Terms) -> dict[tuple[int, ...], tuple[tuple[Layer, ...], Piece]]:
    """By the identity of the layers, which stay alive beside their piece."""
    return {}


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
    """Ops of all streams, each stream in its own order, taken in proportion to the computation done."""
    placed = []
    for stream, listed in enumerate(streams):
        total_s = sum(seconds(issued.op.work) for issued in listed) or 1.0
        done_s = 0.0
        for at, issued in enumerate(listed):
            placed.append((done_s / total_s, stream, at, issued))
            done_s += seconds(issued.op.work)
    build = Build(terms, len(streams))
    for _, stream, _, issued in sorted(placed, key=lambda item: item[:3]):
        build.issue(stream, issued)
    return build.piece()


class Build:
    """The ops of one piece as they are issued."""

    def __init__(self, terms: Terms, streams: int) -> None:
        self.terms, self.lanes, self.streams = terms, terms.lanes, streams
        self.ops: list[TimedOp] = []
        # Per stream: whether it has done anything in this piece, which had to wait for what the slot was
        # given, and the blocking communication that nothing has waited for yet.
        self.begun = [False] * streams
        self.awaited: dict[int, int] = {}
        self.named: dict[str, int] = {}

    def issue(self, stream: int, issued: Issued) -> None:
        op, layer = issued.op, issued.layer
        work = op.work
        after, registers = self._named_waits(op)
        done = self.lanes.done(stream)
        keeps = (self.lanes.register[op.name],) if op.name in self.lanes.register else ()
        if op.host_reads:
            keeps += (self.lanes.read,)
        name = layer.op_name(op)
        if isinstance(work, Collective | Transfer):
            if not work.size_bytes or work.group in self.terms.alone:
                return
            after += self._issued(issued)
            registers += (done,)
            cost: Cost = Delayed(work, layer.process_s) if layer.process_s else work
            if op.blocking:
                registers += self._begins(stream)
                keeps += (done,)
            at = self._add(name, cost, self.lanes.of(work.group), after, registers, keeps)
            if op.blocking:
                self.awaited[stream] = at
            elif self.terms.contention and isinstance(work, Collective):
                self.ops.append(TimedOp(f"slowed by {name}", Lost(work), COMPUTE))
        else:
            after += self._issued(issued)
            registers += (done, *self._given(stream))
            cost = work if self.terms.factor == 1.0 else Slowed(work, self.terms.factor)
            at = self._add(name, cost, COMPUTE, after, registers, (done, *keeps))
            self.begun[stream] = True
            self.awaited.pop(stream, None)
        self.named[op.name] = at

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

    def _named_waits(self, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ops of this piece that *op* names, and the registers of those that were issued earlier."""
        here = tuple(self.named[name] for name in op.after if name in self.named)
        register = self.lanes.register
        earlier = tuple(register[name] for name in op.after if name not in self.named and name in register)
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

    def piece(self) -> Piece:
        """A blocking communication at the end holds up the computation of the next piece too."""
        if self.awaited:
            self.ops.append(TimedOp("wait", 0.0, COMPUTE, tuple(self.awaited.values())))
        return Piece.of("", self.ops, lanes=self.lanes.count)
