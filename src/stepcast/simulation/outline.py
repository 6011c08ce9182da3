"""How the ops of a piece hang together, however much work they are.

Computation runs in the compute lane, each group's communication in a lane of its own. A blocking
communication starts when the computation before it has ended and holds up the computation after it; a
non-blocking one holds up nobody but the ops that name it. An outline is the same for all layers that look
alike; what its ops cost is said by their numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

from stepcast.ir.group import Channel, Group
from stepcast.ir.workload import label_op
from stepcast.simulation.lanes import COMPUTE, Lanes
from stepcast.simulation.pieces import Piece, TimedOp

PAIRED = frozenset({Group.EP})
"""Groups whose communication, of one slot of a pair, runs while the other slot computes."""


class Look(NamedTuple):
    """What decides how an op hangs together with others."""

    layer: str
    name: str
    group: Channel | None
    """None for computation."""
    runs: bool
    """Not a communication of no bytes."""
    collective: bool
    after: tuple[str, ...]
    blocking: bool
    early: bool
    host_reads: bool
    captured: bool
    optimizer: bool
    """Part of the optimizer's step, which reports tell apart."""

    @property
    def label(self) -> str:
        return label_op(self.layer, self.name)


@dataclass(frozen=True)
class Terms:
    """How pieces are made of ops, apart from the ops themselves."""

    lanes: Lanes
    alone: frozenset[Channel] = frozenset()
    """Groups of one rank, which have nobody to talk to."""
    eager: bool = False
    """Whether a host issues the ops one by one."""
    contention: bool = False
    """Whether computing loses to communication that runs beside it."""


@dataclass(frozen=True, slots=True)
class Own:
    """The cost of the work of an op, by the op's number."""

    at: int


@dataclass(frozen=True, slots=True)
class Issues:
    """The cost of the host for issuing it."""

    at: int


@dataclass(frozen=True, slots=True)
class Loses:
    """What computing loses to collectives: ``Beside`` by the numbers of ops."""

    windows: tuple[tuple[int, tuple[int, ...]], ...]
    """Each collective with the places of the computing that may run beside it; none stand for all."""
    computing: tuple[int, ...]


@dataclass
class _Window:
    """A collective and where among the computing of its piece it was issued, and first waited for."""

    stream: int
    name: str
    at: int
    blocking: bool
    start: int
    end: int | None = None


class Outline:
    """The ops of one piece as they are issued, each with a number."""

    def __init__(self, terms: Terms, streams: int) -> None:
        self.terms, self.lanes, self.streams = terms, terms.lanes, streams
        self.ops: list[TimedOp] = []
        # Per stream: whether it has done anything in this piece, which had to wait for what the slot was
        # given, and the blocking communication that nothing has waited for yet.
        self.begun = [False] * streams
        self.awaited: dict[int, int] = {}
        self.named: list[dict[str, int]] = [{} for _ in range(streams)]
        # What computes, and in whose stream; what communicates beside it, from where on and until what waits.
        self.computing: list[tuple[int, int]] = []
        self.beside: list[_Window] = []
        self.waited: dict[tuple[int, str], int] = {}

    def issue(self, stream: int, at: int, look: Look) -> None:
        """The op with number *at*."""
        after, registers = self._named_waits(stream, look)
        done = self.lanes.done(stream)
        keeps: tuple[int, ...] = ()
        if look.name in self.lanes.register:
            keeps += (self.lanes.register[look.name],)
        if look.host_reads:
            keeps += (self.lanes.read,)
        if look.group is not None:
            if not look.runs or look.group in self.terms.alone:
                return
            after += self._issued(at, look)
            registers += (done,)
            if look.early:
                after, registers = (), ()
            # Of a pair, a slot holds up the other while it waits for anything but its experts.
            stops_both = look.blocking and self.streams > 1 and look.group not in PAIRED
            if look.blocking:
                registers += self._begins(stream)
                keeps += (done,)
            if stops_both:
                registers += (COMPUTE,)
            op = self._add(look, at, self.lanes.of(look.group), after, registers, keeps)
            if stops_both:
                self.ops.append(TimedOp("wait", 0.0, COMPUTE, (op,)))
            elif look.blocking:
                self.awaited[stream] = op
            if look.collective and (not look.blocking or (self.streams > 1 and not stops_both)):
                self.beside.append(_Window(stream, look.name, at, look.blocking, len(self.computing)))
        else:
            after += self._issued(at, look)
            registers += (done, *self._given(stream))
            op = self._add(look, at, COMPUTE, after, registers, (done, *keeps))
            self.begun[stream] = True
            self.awaited.pop(stream, None)
            self.computing.append((stream, at))
        self.named[stream][look.name] = op

    def _beside(self, goes_on: bool) -> Loses | None:
        """What computing loses to collectives; None where nothing runs beside any."""
        every = tuple(range(len(self.computing)))
        windows = []
        for each in self.beside:
            if each.blocking:
                window = tuple(at for at in every if self.computing[at][0] != each.stream)
            elif each.end is not None:
                window = every[each.start : each.end]
            elif goes_on and self.waited.get((each.stream, each.name), each.start) >= each.start:
                window = every
            else:
                # The next piece waits for it where this one waited for that of the piece before.
                again = self.waited.get((each.stream, each.name), 0) if goes_on else 0
                window = every[each.start :] + every[:again]
            if window:
                windows.append((each.at, () if window == every else window))
        return Loses(tuple(windows), tuple(at for _, at in self.computing)) if windows else None

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

    def _issued(self, at: int, look: Look) -> tuple[int, ...]:
        """The host's own op, which an eager host ends before the work can start.

        It waits for results that it reads.
        """
        host = self.lanes.host_lane
        if host is None or not self.terms.eager or look.captured:
            return ()
        self.ops.append(TimedOp("issue", Issues(at), host, lanes=(self.lanes.read,)))
        return (len(self.ops) - 1,)

    def _named_waits(self, stream: int, look: Look) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ops of this piece that the op names, and the registers of those that were issued earlier."""
        if not look.after:
            return (), ()
        named, register = self.named[stream], self.lanes.register
        # A collective that waits for another holds up no computation.
        for name in look.after if look.blocking or not look.collective else ():
            self._waits_for(stream, name)
        here = tuple(named[name] for name in look.after if name in named)
        earlier = tuple(register[name] for name in look.after if name not in named and name in register)
        return here, earlier

    def _add(
        self, look: Look, at: int, lane: int, after: tuple[int, ...], registers: tuple[int, ...], keeps: tuple[int, ...]
    ) -> int:
        waits = tuple(dict.fromkeys(after))
        self.ops.append(TimedOp(look.label, Own(at), lane, waits, (), registers, keeps, look.optimizer))
        return len(self.ops) - 1

    def piece(self, goes_on: bool) -> Piece:
        """A blocking communication at the end holds up the computation of the next piece too."""
        if self.awaited:
            self.ops.append(TimedOp("wait", 0.0, COMPUTE, tuple(self.awaited.values())))
        if self.terms.contention and (loses := self._beside(goes_on)) is not None:
            self.ops.append(TimedOp("slowed by communication", loses, COMPUTE, keeps=self._all_done()))
        return Piece.of("", self.ops, lanes=self.lanes.count)

    def _all_done(self) -> tuple[int, ...]:
        return tuple(self.lanes.done(stream) for stream in range(self.streams))
