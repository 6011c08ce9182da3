"""Layers as pieces: the ops of a slot in the order of issue, in the lanes of one rank.

Computation runs in the compute lane, each group's communication in a lane of its own. A blocking communication starts
when the computation before it has ended and holds up the computation after it; a non-blocking one holds up only the ops
that name it. What waits for what does not depend on the sizes of ops: a ``PieceTemplate`` is built once for all layers
with the same ``OpFeatures`` and filled with the costs of each.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain, groupby
from typing import NamedTuple

from stepcast.ir.dataclass import dataclass
from stepcast.ir.group import Channel, Group
from stepcast.ir.identity import ByIdentity
from stepcast.ir.work import COMMUNICATING, Collective, group_of
from stepcast.ir.workload import Block, Layer, Op, Phase, Role, label_op
from stepcast.simulation.costs import ContentionCost, DelayedCost, IssueCost, Seconds, SlowedCost
from stepcast.simulation.lanes import COMPUTE, PHASES_OF, Lanes
from stepcast.simulation.schedule import SlotAction
from stepcast.simulation.schedules import PairPart, merge_parts
from stepcast.simulation.segments import NO_LANE, Cost, Piece, TimedOp

PAIRED = frozenset({Group.EP})
"""Groups whose communication of one slot of a pair runs while the other slot computes."""


class IssuedOp(NamedTuple):
    """An op with the layer it belongs to."""

    layer: Layer
    op: Op
    backward: bool = False

    def cost(self, factor: float) -> Cost:
        """Return the cost of its work on a stage that computes *factor* times slower."""
        work = self.op.work
        if type(work) in COMMUNICATING:
            return DelayedCost(work, self.layer.process_s) if self.layer.process_s else work  # type: ignore[arg-type]
        return work if factor == 1.0 else SlowedCost(work, factor)


class OpFeatures(NamedTuple):
    """The features of an op that decide what it waits for and what waits for it."""

    layer: str
    name: str
    group: Channel | None  # None for computation
    runs: bool  # False for a communication of no bytes
    collective: bool
    after: tuple[str, ...]
    blocking: bool
    early: bool
    host_reads: bool
    captured: bool
    optimizer: bool


@dataclass(frozen=True, eq=False)
class OpSequence:
    """The features of some ops in order; one object for equal ones (``_intern_sequence``)."""

    ops: tuple[OpFeatures, ...]

    @cached_property
    def groups(self) -> frozenset[Channel]:
        return frozenset([op.group for op in self.ops if op.group is not None])

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset([op.name for op in self.ops])

    @cached_property
    def awaited(self) -> frozenset[str]:
        """The names that ops wait for and that none of these before them has."""
        awaited: set[str] = set()
        issued: set[str] = set()
        for op in self.ops:
            awaited.update([name for name in op.after if name not in issued])
            issued.add(op.name)
        return frozenset(awaited)


@lru_cache(maxsize=8192)
def _intern_sequence(ops: tuple[tuple[object, ...], ...]) -> OpSequence:
    return OpSequence(tuple([OpFeatures(*op) for op in ops]))  # type: ignore[arg-type]


def _describe_ops(issued: Sequence[IssuedOp]) -> OpSequence:
    described = []
    for layer, op, _ in issued:
        work = op.work
        moves = type(work) in COMMUNICATING
        features = (
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
        described.append(features)
    return _intern_sequence(tuple(described))


@dataclass(frozen=True, eq=False)
class SlotOps:
    """The ops that a slot issues for some layers."""

    issued: list[IssuedOp]
    sequences: tuple[OpSequence, ...]  # layer by layer
    costs: list[Cost]  # at full speed

    @cached_property
    def groups(self) -> frozenset[Channel]:
        return frozenset().union(*[sequence.groups for sequence in self.sequences])

    @cached_property
    def awaited(self) -> frozenset[str]:
        """The names that ops wait for and that none of these before them has."""
        awaited: set[str] = set()
        issued: set[str] = set()
        for sequence in self.sequences:
            if sequence.awaited:
                awaited |= sequence.awaited - issued
            issued |= sequence.names
        return frozenset(awaited)


_SLOT_OPS: ByIdentity[SlotOps] = ByIdentity(8192)
_LAYER_OPS: ByIdentity[SlotOps] = ByIdentity(32768)


def list_slot_ops(layers: Sequence[Layer], action: SlotAction) -> SlotOps:
    """Return the ops of one slot of *layers*, cached by their identity."""
    return _SLOT_OPS.of(layers, join_slot_ops, action)


def join_slot_ops(layers: Sequence[Layer], action: SlotAction) -> SlotOps:
    """Return the ops of one slot in the order of issue. Many blocks share most of their layers."""
    ordered = layers if action is SlotAction.FORWARD else reversed(layers)
    parts = [_LAYER_OPS.of(layer, _list_layer_ops, action) for layer in ordered]
    issued = list(chain.from_iterable([part.issued for part in parts]))
    costs = list(chain.from_iterable([part.costs for part in parts]))
    return SlotOps(issued, tuple([part.sequences[0] for part in parts]), costs)


def _list_layer_ops(layer: Layer, action: SlotAction) -> SlotOps:
    backward = action is not SlotAction.FORWARD
    issued = [IssuedOp(layer, op, backward) for phase in PHASES_OF[action] for op in layer.ops(phase)]
    return SlotOps(issued, (_describe_ops(issued),), [op.cost(1.0) for op in issued])


def list_once_ops(layers: Iterable[Layer], phases: Sequence[Phase]) -> list[IssuedOp]:
    """Return the ops of layers that run once per step, all their *phases* together."""
    return [IssuedOp(layer, op) for layer in layers for phase in phases for op in layer.ops(phase)]


@dataclass(frozen=True)
class LoweringTerms:
    """The terms under which ops become pieces."""

    lanes: Lanes
    alone: frozenset[Channel] = frozenset()  # groups of one rank, which do not communicate
    eager: bool = False  # a host issues the ops one by one
    contention: bool = False  # computing loses to communication that overlaps it


class CostSlot(NamedTuple):
    """The place of a cost in a template: the work of an op, or its issue by the host."""

    part: str
    op: int


class ContentionSlot(NamedTuple):
    """The place of a ``ContentionCost`` in a template; collectives and computing by the numbers of ops."""

    windows: tuple[tuple[int, tuple[int, ...]], ...]
    computing: tuple[int, ...]


@dataclass(frozen=True)
class PieceTemplate:
    """A piece whose costs are slots, to be filled with those of actual ops."""

    piece: Piece
    works: tuple[int, ...]  # for each cost that is the work of an op the number of the op, else 0
    others: tuple[tuple[int, Cost], ...]  # the other costs with their index

    @classmethod
    def of(cls, piece: Piece) -> "PieceTemplate":
        is_work = [isinstance(cost, CostSlot) and cost.part == "work" for cost in piece.costs]
        works = [cost.op if isinstance(cost, CostSlot) else 0 for cost in piece.costs]
        others = [(index, cost) for index, cost in enumerate(piece.costs) if not is_work[index]]
        return cls(piece, tuple(works), tuple(others))

    def fill(self, issued: Sequence[IssuedOp], factor: float, costs: Sequence[Cost] | None = None) -> Piece:
        """Return the piece of the *issued* ops, whose works have these *costs* where they are known."""
        if costs is None:
            costs = [op.cost(factor) for op in issued]
        filled: list[Cost] = [costs[op] for op in self.works] if costs else [0.0] * len(self.works)
        for index, cost in self.others:
            if isinstance(cost, CostSlot):
                _, op, backward = issued[cost.op]
                filled[index] = IssueCost(op.work, backward, op.kernels)
            elif isinstance(cost, ContentionSlot):
                computing = tuple([issued[op].op.work for op in cost.computing])
                windows = [(issued[op].op.work, window) for op, window in cost.windows]
                filled[index] = ContentionCost(tuple(windows), computing, factor)  # type: ignore[arg-type]
            else:
                filled[index] = cost
        return self.piece.with_costs(tuple(filled))


@dataclass
class _Window:
    """A collective, and the computing of its piece from its issue until the first op that waits for it."""

    stream: int
    name: str
    op: int
    blocking: bool
    start: int
    end: int | None = None


class _PieceBuilder:
    """Collects the ops of one piece as they are issued, in one stream or two that are interleaved."""

    def __init__(self, terms: LoweringTerms, streams: int) -> None:
        self.terms, self.lanes, self.streams = terms, terms.lanes, streams
        self.ops: list[TimedOp] = []
        # Whether each stream has done anything in this piece, which had to wait for the input of its slot.
        self.begun = [False] * streams
        # The blocking communication of each stream that nothing has waited for yet.
        self.awaited: dict[int, int] = {}
        self.named: list[dict[str, int]] = [{} for _ in range(streams)]
        # The computing with its stream, the collectives that overlap it, and where earlier ones were waited for.
        self.computing: list[tuple[int, int]] = []
        self.windows: list[_Window] = []
        self.waited: dict[tuple[int, str], int] = {}

    def add(self, stream: int, number: int, op: OpFeatures) -> None:
        """Issue the op with this *number* in *stream*."""
        after, registers = self._find_named_waits(stream, op)
        done = self.lanes.done(stream)
        stores: tuple[int, ...] = ()
        if op.name in self.lanes.register:
            stores += (self.lanes.register[op.name],)
        if op.host_reads:
            stores += (self.lanes.read,)
        if op.group is None:
            after += self._issue(number, op)
            registers += (done, *self._input_register(stream))
            index = self._append(op, number, COMPUTE, after, registers, (done, *stores))
            self.begun[stream] = True
            self.awaited.pop(stream, None)
            self.computing.append((stream, number))
        elif op.runs and op.group not in self.terms.alone:
            after += self._issue(number, op)
            registers += (done,)
            if op.early:
                after, registers = (), ()
            # A slot of a pair holds up the other while it waits for anything but its experts.
            stops_both = op.blocking and self.streams > 1 and op.group not in PAIRED
            if op.blocking:
                registers += self._first_registers(stream)
                stores += (done,)
            if stops_both:
                registers += (COMPUTE,)
            index = self._append(op, number, self.lanes.of(op.group), after, registers, stores)
            if stops_both:
                self.ops.append(TimedOp("wait", 0.0, COMPUTE, (index,)))
            elif op.blocking:
                self.awaited[stream] = index
            if op.collective and (not op.blocking or (self.streams > 1 and not stops_both)):
                self.windows.append(_Window(stream, op.name, number, op.blocking, len(self.computing)))
        else:
            return
        self.named[stream][op.name] = index

    def _append(
        self,
        op: OpFeatures,
        number: int,
        lane: int,
        after: tuple[int, ...],
        registers: tuple[int, ...],
        stores: tuple[int, ...],
    ) -> int:
        label, waits = label_op(op.layer, op.name), tuple(dict.fromkeys(after))
        self.ops.append(TimedOp(label, CostSlot("work", number), lane, waits, (), registers, stores, op.optimizer))
        return len(self.ops) - 1

    def _issue(self, number: int, op: OpFeatures) -> tuple[int, ...]:
        """Add the op of an eager host, which ends before the work can start and waits for results that it reads."""
        host = self.lanes.host_lane
        if host is None or not self.terms.eager or op.captured:
            return ()
        self.ops.append(TimedOp("issue", CostSlot("issue", number), host, lanes=(self.lanes.read,)))
        return (len(self.ops) - 1,)

    def _input_register(self, stream: int) -> tuple[int, ...]:
        return () if self.begun[stream] else (self.lanes.given(stream),)

    def _first_registers(self, stream: int) -> tuple[int, ...]:
        """Return what a blocking communication waits for that is the first op of its stream: the input of the slot,
        and the computation of whatever ran before the slot.
        """
        if self.begun[stream]:
            return ()
        given = self._input_register(stream)
        self.begun[stream] = True
        # Interleaved slots are one piece, so that what came before is known.
        return (*given, self.lanes.turn if self.streams == 1 else COMPUTE)

    def _find_named_waits(self, stream: int, op: OpFeatures) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ops of this piece that *op* names, and the registers of those that were issued earlier."""
        if not op.after:
            return (), ()
        named, register = self.named[stream], self.lanes.register
        # A collective that waits for another holds up no computation.
        for name in op.after if op.blocking or not op.collective else ():
            self._close_window(stream, name)
        here = tuple(named[name] for name in op.after if name in named)
        earlier = tuple(register[name] for name in op.after if name not in named and name in register)
        return here, earlier

    def _close_window(self, stream: int, name: str) -> None:
        """Note that an op waits here for a collective of this piece or of an earlier one."""
        for window in reversed(self.windows):
            if (window.stream, window.name) == (stream, name):
                window.end = len(self.computing) if window.end is None else window.end
                return
        self.waited.setdefault((stream, name), len(self.computing))

    def _find_contention(self, continues: bool) -> ContentionSlot | None:
        """Return what computing loses to collectives; None where nothing overlaps any."""
        every = tuple(range(len(self.computing)))
        windows = []
        for collective in self.windows:
            waited = self.waited.get((collective.stream, collective.name))
            if collective.blocking:
                window = tuple(index for index in every if self.computing[index][0] != collective.stream)
            elif collective.end is not None:
                window = every[collective.start : collective.end]
            elif continues and (waited is None or waited >= collective.start):
                window = every
            else:
                # The next piece waits for it where this one waited for that of the piece before.
                window = every[collective.start :] + (every[: waited or 0] if continues else ())
            if window:
                windows.append((collective.op, () if window == every else window))
        return ContentionSlot(tuple(windows), tuple(op for _, op in self.computing)) if windows else None

    def build(self, continues: bool) -> PieceTemplate:
        """Return the piece, after which its slot *continues* with another or ends.

        A blocking communication at the end holds up the computation of the next piece too.
        """
        if self.awaited:
            self.ops.append(TimedOp("wait", 0.0, COMPUTE, tuple(self.awaited.values())))
        if self.terms.contention and (contention := self._find_contention(continues)) is not None:
            done = tuple(self.lanes.done(stream) for stream in range(self.streams))
            self.ops.append(TimedOp("slowed by communication", contention, COMPUTE, stores=done))
        return PieceTemplate.of(Piece.of("", self.ops, lanes=self.lanes.count))


class PieceFactory:
    """Makes pieces under the same terms: one object for the same layers, one template for the same features."""

    def __init__(self, terms: LoweringTerms) -> None:
        self.terms, self.lanes = terms, terms.lanes
        self._pieces: ByIdentity[Piece] = ByIdentity(4096)
        self._templates: dict[tuple[object, ...], PieceTemplate] = {}

    def make_begin(self, streams: int) -> Piece:
        """Return the begin of a slot, or of two that are interleaved: input k is what stream k needs."""
        return self._pieces.get((), lambda: _build_begin(self.lanes, streams), "begin", streams)

    def make_end(self, streams: int) -> Piece:
        """Return the end: output k is what stream k produced, or its input if it produced nothing."""
        return self._pieces.get((), lambda: _build_end(self.lanes, streams), "end", streams)

    def make_slot(self, blocks: Sequence[Block], action: SlotAction, factor: float) -> list[tuple[Piece, int]]:
        """Return the pieces of *blocks* with their repeats in the order in which a slot runs them, on a stage that
        computes *factor* times slower.
        """
        ordered = blocks if action is SlotAction.FORWARD else blocks[::-1]
        pieces = [(self._make_layers(block.layers, action, True, factor), block.repeat) for block in ordered]
        if pieces and pieces[-1][0].costs and isinstance(pieces[-1][0].costs[-1], ContentionCost):
            # Collectives that outlast the last piece overlap no other.
            piece, repeat = pieces.pop()
            pieces += [(piece, repeat - 1)] if repeat > 1 else []
            pieces.append((self._make_layers(ordered[-1].layers, action, False, factor), 1))
        return pieces

    def _make_layers(self, layers: Sequence[Layer], action: SlotAction, continues: bool, factor: float) -> Piece:
        return self._pieces.of(layers, self._fill_layers, (action, continues, factor))

    def _fill_layers(self, layers: Sequence[Layer], key: tuple[SlotAction, bool, float]) -> Piece:
        action, continues, factor = key
        ops = list_slot_ops(layers, action)
        template = self._find_template(ops.sequences, (), 1, continues)
        return template.fill(ops.issued, factor, ops.costs if factor == 1.0 else None)

    def interleave(self, streams: Sequence[Sequence[IssuedOp]], seconds: Seconds, factor: float) -> Piece:
        """Return the ops of two slots that run as a pair, in the order that ends earliest.

        One computes while the other exchanges tokens with its experts; all other communication holds up both
        (DeepSeek-V3, 2024, section 3.2.1; Megatron-Core's model_chunk_schedule_plan.py: dispatch and combine have a
        stream of their own, attention and MLP of both share one).
        """

        def exchanges(issued: IssuedOp) -> bool:
            group = group_of(issued.op.work)
            return issued.op.blocking and group in PAIRED and group not in self.terms.alone

        known: dict[tuple[int, int, int], float] = {}

        def run_alone_s(ops: Sequence[IssuedOp]) -> float:
            """Layers that repeat are the same objects, and so are their ops."""
            key = (id(ops[0].op), id(ops[-1].op), len(ops))
            if key not in known:
                known[key] = _run_alone_s(ops, seconds, factor)
            return known[key]

        runs = [[(kind, list(run)) for kind, run in groupby(stream, key=exchanges)] for stream in streams]
        first, second = ([PairPart(kind, run_alone_s(ops)) for kind, ops in part] for part in runs)
        left = [iter(part) for part in runs]
        numbers: list[int] = []
        issued: list[IssuedOp] = []
        for number in merge_parts(first, second):
            _, ops = next(left[number])
            numbers += [number] * len(ops)
            issued += ops
        return self._find_template((_describe_ops(issued),), tuple(numbers), len(streams), False).fill(issued, factor)

    def _find_template(
        self, sequences: tuple[OpSequence, ...], streams: tuple[int, ...], count: int, continues: bool
    ) -> PieceTemplate:
        """Return the template of ops, each in its stream; without *streams*, all in the first."""
        key = (sequences, streams, continues)
        template = self._templates.get(key)
        if template is None:
            builder = _PieceBuilder(self.terms, count)
            for number, op in enumerate(op for sequence in sequences for op in sequence.ops):
                builder.add(streams[number] if streams else 0, number, op)
            template = self._templates[key] = builder.build(continues)
        return template

    def make_once(self, issued: Sequence[IssuedOp], name: str, others: int, finish: bool, factor: float) -> Piece:
        """Return what runs once per step, when *others* have come and, to *finish*, all communication has ended.

        Its output is the end of everything issued so far.
        """
        sequence = _describe_ops(issued)
        key = (sequence, name, others, finish)
        template = self._templates.get(key)
        if template is None:
            lanes, builder = self.lanes, _PieceBuilder(self.terms, 1)
            waits = lanes.collectives if finish else ()
            begins = (lanes.turn, lanes.given(0), lanes.done(0))
            builder.ops.append(TimedOp(name, 0.0, COMPUTE, (), tuple(range(others)), waits, begins))
            for number, op in enumerate(sequence.ops):
                builder.add(0, number, op)
            builder.ops.append(TimedOp("end of round", 0.0, COMPUTE, lanes=(lanes.done(0), *lanes.collectives)))
            last = len(builder.ops) - 1
            piece = Piece.of(name, builder.ops, lanes=lanes.count, inputs=others, outputs=(last,))
            template = self._templates[key] = PieceTemplate.of(piece)
        return template.fill(issued, factor)


@lru_cache(maxsize=256)
def piece_factory(terms: LoweringTerms) -> PieceFactory:
    """Return the one factory for *terms*, with the pieces that it has made."""
    return PieceFactory(terms)


def _build_begin(lanes: Lanes, streams: int) -> Piece:
    """A pair begins when the inputs of both have come (deepseek-ai/DualPipe, _forward_backward_chunk)."""
    ops = [TimedOp("turn", 0.0, NO_LANE, lanes=(COMPUTE,), stores=(lanes.turn,))]
    every = tuple(range(streams))
    for stream in every:
        ops.append(TimedOp("given", 0.0, NO_LANE, inputs=every, stores=(lanes.given(stream),)))
        ops.append(TimedOp("fresh", 0.0, NO_LANE, lanes=(lanes.begin,), stores=(lanes.done(stream),)))
    return Piece.of("begin", ops, lanes=lanes.count, inputs=streams)


def _build_end(lanes: Lanes, streams: int) -> Piece:
    """A pair sends both results when both are there, as in DualPipe's code."""
    waits = (*map(lanes.done, range(streams)), *map(lanes.given, range(streams)), lanes.turn)
    ops = [TimedOp("made", 0.0, NO_LANE, lanes=waits, stores=(lanes.done(stream),)) for stream in range(streams)]
    return Piece.of("end", ops, lanes=lanes.count, outputs=range(streams))


def _run_alone_s(ops: Sequence[IssuedOp], seconds: Seconds, factor: float) -> float:
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
