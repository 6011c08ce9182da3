"""What slots issue of layers: their ops in order, how these look, and what they cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, groupby
from typing import Any, NamedTuple

from stepcast.ir.group import Channel, Group
from stepcast.ir.identity import ByIdentity
from stepcast.ir.work import COMMUNICATING, Collective, group_of
from stepcast.ir.workload import Block, Layer, Op, Phase, Role, label_op
from stepcast.simulation.costs import Beside, Delayed, Issue, Seconds, Slowed
from stepcast.simulation.lanes import COMPUTE, HANDED_ON, Lanes
from stepcast.simulation.schedule import SlotAction
from stepcast.simulation.schedules import PairPart, merge_parts
from stepcast.simulation.segments import NO_LANE, Cost, Piece, TimedOp

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


# Layers as pieces: the ops of a phase, issued in order, in the lanes of one rank.


class Issued(NamedTuple):
    """An op with the layer it belongs to."""

    layer: Layer
    op: Op
    backward: bool = False


def phase_ops(layers: Sequence[Layer], kind: SlotAction) -> list[Issued]:
    """The ops of one slot in the order in which they are issued."""
    return [issued for part in _in_order(layers, kind) for issued in part.issued]


def once_ops(layers: Iterable[Layer], phases: Sequence[Phase]) -> list[Issued]:
    """The ops of layers that run once per step, all their *phases* together."""
    return [Issued(layer, op) for layer in layers for phase in phases for op in layer.ops(phase)]


@dataclass(frozen=True, eq=False)
class Looks:
    """How some ops look; one object for those that look the same."""

    each: tuple[Look, ...]

    @cached_property
    def groups(self) -> frozenset[Channel]:
        """Those that communicate."""
        return frozenset([look.group for look in self.each if look.group is not None])

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset([look.name for look in self.each])

    @cached_property
    def awaited(self) -> frozenset[str]:
        """What ops wait for that was issued before all of these."""
        found: set[str] = set()
        issued: set[str] = set()
        for look in self.each:
            found.update([name for name in look.after if name not in issued])
            issued.add(look.name)
        return frozenset(found)


class _Part(NamedTuple):
    """What slots of one kind issue of a layer, how that looks, and what its ops cost at full speed."""

    issued: list[Issued]
    looks: Looks
    costs: list[Cost]


def _in_order(layers: Sequence[Layer], kind: SlotAction) -> list[_Part]:
    """Layer by layer: many blocks have most of their layers in common."""
    ordered = layers if kind is SlotAction.FORWARD else reversed(layers)
    return [_ISSUED.of(layer, _issued_by, kind) for layer in ordered]


_ISSUED: ByIdentity[_Part] = ByIdentity(32768)


def _issued_by(layer: Layer, kind: SlotAction) -> _Part:
    backward = kind is not SlotAction.FORWARD
    issued = [Issued(layer, op, backward) for phase in HANDED_ON[kind] for op in layer.ops(phase)]
    return _Part(issued, looks_of(issued), [own_cost(each, 1.0) for each in issued])


@dataclass(frozen=True, eq=False)
class IssueRow:
    """What slots of one kind issue of layers that follow one another."""

    issued: list[Issued]
    looks: tuple[Looks, ...]
    costs: list[Cost]

    @cached_property
    def groups(self) -> frozenset[Channel]:
        """Those that communicate."""
        return frozenset().union(*[looks.groups for looks in self.looks])

    @cached_property
    def awaited(self) -> frozenset[str]:
        """What ops wait for that was issued before all of these."""
        found: set[str] = set()
        issued: set[str] = set()
        for looks in self.looks:
            if looks.awaited:
                found |= looks.awaited - issued
            issued |= looks.names
        return frozenset(found)


def row_of(layers: Sequence[Layer], kind: SlotAction) -> IssueRow:
    return _ROWS.of(layers, _row, kind)


_ROWS: ByIdentity[IssueRow] = ByIdentity(8192)


def _row(layers: Sequence[Layer], kind: SlotAction) -> IssueRow:
    parts = _in_order(layers, kind)
    issued = list(chain.from_iterable([part.issued for part in parts]))
    costs = list(chain.from_iterable([part.costs for part in parts]))
    return IssueRow(issued, tuple([part.looks for part in parts]), costs)


def own_cost(issued: Issued, factor: float) -> Cost:
    layer, op, _ = issued
    work = op.work
    if type(work) in COMMUNICATING:
        return Delayed(work, layer.process_s) if layer.process_s else work  # type: ignore[arg-type]
    return work if factor == 1.0 else Slowed(work, factor)


def looks_of(issued: Sequence[Issued]) -> Looks:
    return _looks(tuple([_look(layer, op) for layer, op, _ in issued]))


def _look(layer: Layer, op: Op) -> tuple[Any, ...]:
    """What a Look is made of."""
    work = op.work
    moves = type(work) in COMMUNICATING
    return (
        layer.name,
        op.name,
        work.group if moves else None,  # type: ignore[union-attr]
        not moves or work.size_bytes > 0,  # type: ignore[union-attr]
        type(work) is Collective,
        op.after,
        op.blocking,
        op.early,
        op.host_reads,
        layer.captured,
        layer.role is Role.OPTIMIZER,
    )


@lru_cache(maxsize=8192)
def _looks(each: tuple[tuple[Any, ...], ...]) -> Looks:
    return Looks(tuple([Look(*one) for one in each]))


# How the ops of a piece hang together, however much work they are.
#
# Computation runs in the compute lane, each group's communication in a lane of its own. A blocking
# communication starts when the computation before it has ended and holds up the computation after it; a
# non-blocking one holds up nobody but the ops that name it. An outline is the same for all layers that look
# alike; what its ops cost is said by their numbers.


class _Outlined(NamedTuple):
    """A piece whose costs are told by the numbers of ops."""

    piece: Piece
    own: tuple[int, ...]
    """Of each cost that is an op's own the number of the op."""
    others: tuple[tuple[int, Cost], ...]
    """The other costs, and which they are of all."""


def _outlined(piece: Piece) -> _Outlined:
    own = [said.at if isinstance(said, Own) else 0 for said in piece.costs]
    others = [(at, said) for at, said in enumerate(piece.costs) if not isinstance(said, Own)]
    return _Outlined(piece, tuple(own), tuple(others))


class Pieces:
    """Pieces under the same terms: those of the same layers are one object, those that look alike are
    outlined once.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms, self.lanes = terms, terms.lanes
        self._made: ByIdentity[Piece] = ByIdentity(4096)
        self._outlined: dict[tuple[object, ...], _Outlined] = {}

    def begin(self, streams: int) -> Piece:
        """The begin of a slot, or of two that are interleaved: input k is what stream k needs."""
        return self._made.get((), lambda: _begin(self.lanes, streams), "begin", streams)

    def end(self, streams: int) -> Piece:
        """Output k is what stream k made; one that made nothing hands on what it was given."""
        return self._made.get((), lambda: _end(self.lanes, streams), "end", streams)

    def slot(self, blocks: Sequence[Block], kind: SlotAction, factor: float) -> list[tuple[Piece, int]]:
        """The pieces of *blocks*, each with its repeats, in the order in which a slot of that *kind* runs
        them; its stage computes by *factor* slower than it should.
        """
        ordered = blocks if kind is SlotAction.FORWARD else blocks[::-1]
        chain = [(self._layers(block.layers, kind, True, factor), block.repeat) for block in ordered]
        if chain and _loses(chain[-1][0]):
            # To collectives that run on beside the next piece: there is none after the last.
            piece, repeat = chain.pop()
            chain += [(piece, repeat - 1)] if repeat > 1 else []
            chain.append((self._layers(ordered[-1].layers, kind, False, factor), 1))
        return chain

    def _layers(self, layers: Sequence[Layer], kind: SlotAction, goes_on: bool, factor: float) -> Piece:
        """One slot's ops of *layers*, after which it *goes on* with others or not."""
        return self._made.of(layers, self._of_layers, (kind, goes_on, factor))

    def _of_layers(self, layers: Sequence[Layer], key: tuple[SlotAction, bool, float]) -> Piece:
        kind, goes_on, factor = key
        row = row_of(layers, kind)
        costs = row.costs if factor == 1.0 else None
        return self._filled(row.issued, row.looks, (), 1, goes_on, factor, costs)

    def interleaved(self, streams: Sequence[Sequence[Issued]], seconds: Seconds, factor: float) -> Piece:
        """Return the ops of two slots that run as a pair, in the order that ends earliest.

        One computes while the other exchanges tokens with its experts; all other communication holds up both
        (DeepSeek-V3, 2024, section 3.2.1; Megatron-Core's model_chunk_schedule_plan.py: dispatch and combine
        have a stream of their own, attention and MLP of both share one).
        """
        cut = [self._cut_at_exchanges(stream) for stream in streams]
        first, second = (
            [PairPart(exchanges, _lasts_s(ops, seconds, factor)) for exchanges, ops in parts] for parts in cut
        )
        left = [iter(parts) for parts in cut]
        numbers: list[int] = []
        issued: list[Issued] = []
        for number in merge_parts(first, second):
            _, ops = next(left[number])
            numbers += [number] * len(ops)
            issued += ops
        return self._filled(issued, (looks_of(issued),), tuple(numbers), len(streams), False, factor)

    def _cut_at_exchanges(self, stream: Sequence[Issued]) -> list[tuple[bool, list[Issued]]]:
        """Return the ops of a slot in runs, with whether a run exchanges tokens with experts or computes."""

        def exchanges(issued: Issued) -> bool:
            group = group_of(issued.op.work)
            return issued.op.blocking and group in PAIRED and group not in self.terms.alone

        return [(kind, list(run)) for kind, run in groupby(stream, key=exchanges)]

    def once(self, issued: Sequence[Issued], name: str, others: int, finish: bool, factor: float) -> Piece:
        """What runs once per step, when *others* have come and, to *finish*, all communication has ended.

        Its output is the end of everything issued so far.
        """
        looks = looks_of(issued)
        key = (looks, name, others, finish)
        outlined = self._outlined.get(key)
        if outlined is None:
            outlined = self._outlined[key] = _outlined(self._once(looks, name, others, finish))
        return _costing(outlined, issued, factor)

    def _once(self, looks: Looks, name: str, others: int, finish: bool) -> Piece:
        lanes, outline = self.lanes, Outline(self.terms, 1)
        waits = lanes.collectives if finish else ()
        begins = (lanes.turn, lanes.given(0), lanes.done(0))
        first = TimedOp(name, 0.0, COMPUTE, inputs=tuple(range(others)), lanes=waits, keeps=begins)
        outline.ops.append(first)
        for at, look in enumerate(looks.each):
            outline.issue(0, at, look)
        outline.ops.append(TimedOp("end of round", 0.0, COMPUTE, lanes=(lanes.done(0), *lanes.collectives)))
        last = len(outline.ops) - 1
        return Piece.of(name, outline.ops, lanes=lanes.count, inputs=others, outputs=(last,))

    def _filled(
        self,
        issued: Sequence[Issued],
        looks: tuple[Looks, ...],
        streams: tuple[int, ...],
        count: int,
        goes_on: bool,
        factor: float,
        costs: Sequence[Cost] | None = None,
    ) -> Piece:
        """The piece of ops that were *issued*, each in its stream; without *streams*, all in the first."""
        key = (looks, streams, goes_on)
        outlined = self._outlined.get(key)
        if outlined is None:
            outline = Outline(self.terms, count)
            for at, look in enumerate(look for part in looks for look in part.each):
                outline.issue(streams[at] if streams else 0, at, look)
            outlined = self._outlined[key] = _outlined(outline.piece(goes_on))
        return _costing(outlined, issued, factor, costs)


@lru_cache(maxsize=256)
def pieces_under(terms: Terms) -> Pieces:
    return Pieces(terms)


def _begin(lanes: Lanes, streams: int) -> Piece:
    """A pair begins when the inputs of both have come (deepseek-ai/DualPipe, _forward_backward_chunk)."""
    ops = [TimedOp("turn", 0.0, NO_LANE, lanes=(COMPUTE,), keeps=(lanes.turn,))]
    every = tuple(range(streams))
    for stream in every:
        ops.append(TimedOp("given", 0.0, NO_LANE, inputs=every, keeps=(lanes.given(stream),)))
        ops.append(TimedOp("fresh", 0.0, NO_LANE, lanes=(lanes.begin,), keeps=(lanes.done(stream),)))
    return Piece.of("begin", ops, lanes=lanes.count, inputs=streams)


def _end(lanes: Lanes, streams: int) -> Piece:
    """A pair sends both results when both are made, as there."""
    made = (*map(lanes.done, range(streams)), *map(lanes.given, range(streams)), lanes.turn)
    ops = [TimedOp("made", 0.0, NO_LANE, lanes=made, keeps=(lanes.done(stream),)) for stream in range(streams)]
    return Piece.of("end", ops, lanes=lanes.count, outputs=range(streams))


def _costing(
    outlined: _Outlined, issued: Sequence[Issued], factor: float, costs: Sequence[Cost] | None = None
) -> Piece:
    """The piece with what its ops cost: their own *costs* where these are known."""
    own = [own_cost(each, factor) for each in issued] if costs is None else costs

    def other(said: Cost) -> Cost:
        if isinstance(said, Issues):
            _, op, backward = issued[said.at]
            return Issue(op.work, backward, op.kernels)
        if isinstance(said, Loses):
            computing = tuple([issued[at].op.work for at in said.computing])
            windows = [(issued[at].op.work, window) for at, window in said.windows]
            return Beside(tuple(windows), computing, factor)  # type: ignore[arg-type]
        return said

    found: list[Cost] = [own[at] for at in outlined.own] if own else [0.0] * len(outlined.own)
    for at, said in outlined.others:
        found[at] = other(said)
    return outlined.piece.costing(tuple(found))


def _loses(piece: Piece) -> bool:
    """Whether its computing loses to collectives beside it, which is told last."""
    return bool(piece.costs) and isinstance(piece.costs[-1], Beside)


def _lasts_s(ops: Sequence[Issued], seconds: Seconds, factor: float) -> float:
    """Return the seconds until *ops* of one slot have computed and all that holds them up has ended."""
    ready_s = 0.0
    free_s: dict[Channel, float] = {}
    ended_s: dict[str, float] = {}
    for _, op, _ in ops:
        start_s = max([ready_s, *(ended_s.get(name, 0.0) for name in op.after)])
        group = group_of(op.work)
        if group is None:
            ready_s = end_s = start_s + seconds(op.work) * factor
        else:
            end_s = free_s[group] = max(start_s, free_s.get(group, 0.0)) + seconds(op.work)
            if op.blocking:
                ready_s = end_s
        ended_s[op.name] = end_s
    return ready_s
