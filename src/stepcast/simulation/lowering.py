"""Layers as pieces: the ops of a slot in the order of issue, in the lanes of one rank.

Computation runs in the compute lane, each group's communication in a lane of its own. A blocking communication starts
when the computation before it has ended and holds up the computation after it; a non-blocking one holds up only the ops
that name it. What waits for what does not depend on the sizes of ops: a piece is built once for all layers with the
same ``OpFeatures``; its costs are slots that seconds are put into later.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.layout import Channel, Group
from stepcast.ir.types import ByIdentity, cached_property, dataclass
from stepcast.ir.work import COMMUNICATING, Collective, CollectiveKind, Work, group_of
from stepcast.ir.workload import Blocks, ChangedBlocks, ChangedUnit, Layer, Op, Role, label_op
from stepcast.simulation.lanes import COMPUTE, PHASES_OF, STREAMS, Lanes
from stepcast.simulation.schedule import SlotAction
from stepcast.simulation.schedules import PairPart, merge_parts
from stepcast.simulation.seconds import CollectiveGroup, ContentionSlot, CostSlot
from stepcast.simulation.segments import NO_LANE, Chain, Piece, TimedOp

Seconds = Callable[[Work], float]
NO_LAYER = Layer("")
PAIRED = frozenset({Group.EP})
"""Groups whose communication of one slot of a pair runs while the other slot computes."""


class IssuedOp(NamedTuple):
    """An op with the layer it belongs to."""

    layer: Layer
    op: Op
    backward: bool = False


class OpFeatures(NamedTuple):
    """The features of an op that decide what it waits for and what waits for it."""

    layer: str
    name: str
    group: Channel | None  # None for computation
    runs: bool  # False for a communication of no bytes
    collective: CollectiveKind | None  # of a collective
    after: tuple[str, ...]
    blocking: bool
    early: bool
    host_reads: bool
    captured: bool
    optimizer: bool
    delayed: bool  # a communication whose result may be used some time after its end


@dataclass(frozen=True, eq=False)
class OpSequence:
    """The features of some ops in order; one object for equal ones of a layer, and for the same layers."""

    ops: tuple[OpFeatures, ...]

    @cached_property
    def groups(self) -> frozenset[Channel]:
        return frozenset([op.group for op in self.ops if op.group is not None])

    @cached_property
    def has_delays(self) -> bool:
        return any(op.delayed for op in self.ops)

    @cached_property
    def awaited(self) -> frozenset[str]:
        """The names that ops wait for and that none of these before them has."""
        awaited: set[str] = set()
        issued: set[str] = set()
        for op in self.ops:
            awaited.update([name for name in op.after if name not in issued])
            issued.add(op.name)
        return frozenset(awaited)

    @cached_property
    def is_computing(self) -> BoolArray:
        """Whether each op computes; False for communication."""
        return np.array([op.group is None for op in self.ops], bool)


@lru_cache(maxsize=8192)
def _intern_sequence(ops: tuple[tuple[object, ...], ...]) -> OpSequence:
    return OpSequence(tuple([OpFeatures(*op) for op in ops]))  # type: ignore[arg-type]


@lru_cache(maxsize=8192)
def _join_sequences(sequences: tuple[OpSequence, ...]) -> OpSequence:
    return OpSequence(tuple(chain.from_iterable([sequence.ops for sequence in sequences])))


@dataclass(frozen=True, eq=False)
class OpList:
    """Ops that are issued one after the other: those of a layer, or of several such *lists*."""

    sequence: OpSequence
    works: list[Work]
    keys: list[int]  # the identities of the works, by which their prices are looked up
    size: int  # their number
    lists: Sequence["OpList"] = ()
    layer: Layer = NO_LAYER
    ops: Sequence[Op] = ()
    backward: bool = False

    @classmethod
    def of_layer(cls, layer: Layer, ops: Sequence[Op], backward: bool = False) -> "OpList":
        """Return the list of *ops* of *layer*."""
        described = []
        name, *terms = layer.name, layer.captured, layer.role is Role.OPTIMIZER
        works, delays = [op.work for op in ops], layer.process_s > 0
        for op, work in zip(ops, works):  # noqa: B905  # both are made of *ops*
            kind = type(work)
            moves = kind in COMMUNICATING
            group, runs = (work.group, work.size_bytes > 0) if moves else (None, True)  # type: ignore[union-attr]
            collective = work.kind if kind is Collective else None  # type: ignore[union-attr]
            waits = op.after, op.blocking, op.early, op.host_reads
            described.append((name, op.name, group, runs, collective, *waits, *terms, moves and delays))
        sequence = _intern_sequence(tuple(described))
        return cls(sequence, works, list(map(id, works)), len(works), (), layer, ops, backward)

    @classmethod
    def join(cls, lists: Sequence["OpList"]) -> "OpList":
        """Return the ops of *lists* of layers, one after the other."""
        works = list(chain.from_iterable([part.works for part in lists]))
        keys = list(chain.from_iterable([part.keys for part in lists]))
        return cls(_join_sequences(tuple([part.sequence for part in lists])), works, keys, len(works), lists)

    @cached_property
    def issued(self) -> list[IssuedOp]:
        if self.lists:
            return [entry for part in self.lists for entry in part.issued]
        return [IssuedOp(self.layer, op, self.backward) for op in self.ops]

    @cached_property
    def delays_s(self) -> FloatArray | None:
        """The delay after which the result of each communication may be used; None without any."""
        if not self.sequence.has_delays:
            return None
        return np.where(self.sequence.is_computing, 0.0, [issued.layer.process_s for issued in self.issued])


SlotOps = tuple[list[OpList], tuple[int, ...]]
"""The ops of the blocks of a slot in the order in which they run, and their repeats."""


_SLOT_OPS: ByIdentity[OpList] = ByIdentity(2**15)
_LAYER_OPS: ByIdentity[OpList] = ByIdentity(32768)


def list_slot(blocks: Blocks, action: SlotAction) -> SlotOps:
    """Return the ops of a slot of *blocks*; the same layers have one list."""
    step = 1 if action is SlotAction.FORWARD else -1
    if not isinstance(blocks, ChangedBlocks):
        lists = [_SLOT_OPS.of(block.layers, join_slot_ops, action) for block in blocks[::step]]
        return lists, tuple([block.repeat for block in blocks[::step]])
    changed, patterns = blocks.folded
    units, lists = [_list_unit(unit, action) for unit in changed], []
    for pattern, _ in patterns[::step]:
        own = [units[number] for number in pattern[::step]]
        lists.append(_SLOT_OPS.get(own, partial(OpList.join, own)) if len(own) > 1 else own[0])
    return lists, tuple([times for _, times in patterns[::step]])


def _list_unit(unit: ChangedUnit, action: SlotAction) -> OpList:
    """Return the ops of a unit, those of the layers that are the usual ones as the usual unit has them."""
    layers, ending, beginning, place = unit
    usual = _SLOT_OPS.of(layers, join_slot_ops, action)

    def make() -> OpList:
        if beginning is None:
            return OpList.join((usual, OpList.of_layer(layers[0], ending, True)))
        # No layer before this one has a forward.
        others = _SLOT_OPS.get((layers,), lambda: OpList.join(usual.lists[place + 1 :]), action, place)
        return OpList.join((_LAYER_OPS.of(beginning, _list_layer, action), others))

    return _SLOT_OPS.get((layers, beginning, ending), make, action) if beginning or ending else usual


def join_slot_ops(layers: Sequence[Layer], action: SlotAction) -> OpList:
    """Return the ops of one slot in the order of issue. Many blocks share most of their layers."""
    ordered = layers if action is SlotAction.FORWARD else layers[::-1]
    return OpList.join([_LAYER_OPS.of(layer, _list_layer, action) for layer in ordered])


def _list_layer(layer: Layer, action: SlotAction) -> OpList:
    ops = [op for phase in PHASES_OF[action] for op in layer.ops(phase)]
    return OpList.of_layer(layer, ops, action is not SlotAction.FORWARD)


@dataclass(frozen=True)
class LoweringTerms:
    """The terms under which ops become pieces."""

    lanes: Lanes
    alone: frozenset[Channel] = frozenset()  # groups of one rank, which do not communicate
    eager: bool = False  # a host issues the ops one by one
    contention: bool = False  # computing loses to communication that overlaps it


@dataclass
class _Window:
    """A collective, and the computing of its piece from its issue until the first op that waits for it."""

    stream: int
    name: str
    op: int
    kind: CollectiveGroup
    blocking: bool
    start: int
    end: int | None = None


_label = lru_cache(maxsize=4096)(label_op)


class _PieceBuilder:
    """Collects the ops of one piece as they are issued, in one stream or two that are interleaved."""

    def __init__(self, terms: LoweringTerms, streams: int) -> None:
        self.terms, self.lanes, self.streams = terms, terms.lanes, streams
        self.host = terms.lanes.host_lane if terms.eager else None
        self.done, self.given = (list(map(of, range(streams))) for of in (terms.lanes.done, terms.lanes.given))
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
        after, registers = self._find_named_waits(stream, op) if op.after else ((), ())
        done, stores = self.done[stream], tuple[int, ...]()
        if op.name in self.lanes.register:
            stores += (self.lanes.register[op.name],)
        if op.host_reads:
            stores += (self.lanes.read,)
        if op.group is None:
            if self.host is not None:
                after += self._issue(number, op)
            registers += (done,) if self.begun[stream] else (done, self.given[stream])
            index = self._append(op, number, COMPUTE, after, registers, (done, *stores))
            self.begun[stream] = True
            self.awaited.pop(stream, None)
            self.computing.append((stream, number))
        elif op.runs and op.group not in self.terms.alone:
            if self.host is not None:
                after += self._issue(number, op)
            registers += (done,)
            if op.early:
                after, registers = (), ()
            # A slot of a pair holds up the other while it waits for anything but its experts.
            stops_both = op.blocking and self.streams > 1 and op.group not in PAIRED
            if op.blocking:
                if not self.begun[stream]:
                    # The input of the slot, and the computation of whatever ran before it; interleaved slots are one
                    # piece, so that what came before is known.
                    registers += (self.given[stream], self.lanes.turn if self.streams == 1 else COMPUTE)
                    self.begun[stream] = True
                stores += (done,)
            if stops_both:
                registers += (COMPUTE,)
            index = self._append(op, number, self.lanes.of(op.group), after, registers, stores)
            if stops_both:
                self.ops.append(TimedOp("wait", 0.0, COMPUTE, (index,)))
            elif op.blocking:
                self.awaited[stream] = index
            if op.collective and (not op.blocking or (self.streams > 1 and not stops_both)):
                kind: CollectiveGroup = op.collective, op.group  # type: ignore[assignment]
                self.windows.append(_Window(stream, op.name, number, kind, op.blocking, len(self.computing)))
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
        waits = after if len(after) < 2 else tuple(dict.fromkeys(after))
        label = _label(op.layer, op.name)
        self.ops.append(TimedOp(label, CostSlot(number), lane, waits, (), registers, stores, op.optimizer))
        return len(self.ops) - 1

    def _issue(self, number: int, op: OpFeatures) -> tuple[int, ...]:
        """Add the op of an eager host, which ends before the work can start and waits for results that it reads."""
        assert self.host is not None
        if op.captured:
            return ()
        self.ops.append(TimedOp("issue", CostSlot(number, True), self.host, lanes=(self.lanes.read,)))
        return (len(self.ops) - 1,)

    def _find_named_waits(self, stream: int, op: OpFeatures) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ops of this piece that *op* names, and the registers of those that were issued earlier."""
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
                windows.append((collective.op, collective.kind, () if window == every else window))
        return ContentionSlot(tuple(windows), tuple(op for _, op in self.computing)) if windows else None

    def build(self, continues: bool) -> Piece:
        """Return the piece, after which its slot *continues* with another or ends.

        A blocking communication at the end holds up the computation of the next piece too.
        """
        if self.awaited:
            self.ops.append(TimedOp("wait", 0.0, COMPUTE, tuple(self.awaited.values())))
        if self.terms.contention and (contention := self._find_contention(continues)) is not None:
            self.ops.append(TimedOp("slowed by communication", contention, COMPUTE, stores=tuple(self.done)))
        return Piece.of("", self.ops, lanes=self.lanes.count)


class PieceFactory:
    """Makes pieces under the same terms, whose costs are slots: one for the same features of ops."""

    def __init__(self, terms: LoweringTerms) -> None:
        self.terms, self.lanes = terms, terms.lanes
        # Sequences are compared by identity.
        self.make_ends, self.make_once = lru_cache(self._make_ends), lru_cache(4096)(self._make_once)
        self.make_chain, self.make_layers = lru_cache(4096)(self._make_chain), lru_cache(4096)(self._make_layers)

    def _make_ends(self, streams: int) -> tuple[Piece, Piece]:
        """Return the begin and the end of a slot, or of two that are interleaved. Input k is what stream k needs,
        output k what it produced, or its input if it produced nothing. A pair begins when both inputs have come, and
        sends both results when both are there (deepseek-ai/DualPipe, _forward_backward_chunk).
        """
        lanes, every = self.lanes, tuple(range(streams))
        ops = [TimedOp("turn", 0.0, NO_LANE, lanes=(COMPUTE,), stores=(lanes.turn,))]
        for stream in every:
            ops.append(TimedOp("given", 0.0, NO_LANE, inputs=every, stores=(lanes.given(stream),)))
            ops.append(TimedOp("fresh", 0.0, NO_LANE, lanes=(lanes.begin,), stores=(lanes.done(stream),)))
        begin = Piece.of("begin", ops, lanes=lanes.count, inputs=streams)
        waits = (*map(lanes.done, every), *map(lanes.given, every), lanes.turn)
        ops = [TimedOp("made", 0.0, NO_LANE, lanes=waits, stores=(lanes.done(stream),)) for stream in every]
        return begin, Piece.of("end", ops, lanes=lanes.count, outputs=every)

    def _make_chain(self, sequences: tuple[OpSequence, ...], is_last_repeated: bool) -> Chain:
        """Return a slot of *sequences*. Collectives that outlast the last piece overlap no other: a last sequence that
        repeats is then two pieces.
        """
        pieces = [self.make_layers(sequence, True) for sequence in sequences]
        if pieces and pieces[-1].costs and isinstance(pieces[-1].costs[-1], ContentionSlot):
            others = pieces if is_last_repeated else pieces[:-1]
            pieces = [*others, self.make_layers(sequences[-1])]
        begin, end = self.make_ends(1)
        return Chain((begin, *pieces, end))

    def _make_layers(self, sequence: OpSequence, continues: bool = False, streams: tuple[int, ...] = ()) -> Piece:
        """Return ops, each in its stream or without *streams* all in the first, after which their slot *continues*."""
        builder = _PieceBuilder(self.terms, STREAMS if streams else 1)
        for number, op in enumerate(sequence.ops):
            builder.add(streams[number] if streams else 0, number, op)
        return builder.build(continues)

    def _make_once(self, sequence: OpSequence, name: str, others: int, finish: bool) -> Chain:
        """Return what runs once per step, when *others* have come and, to *finish*, all communication has ended.

        Its output is the end of everything issued so far.
        """
        lanes, builder = self.lanes, _PieceBuilder(self.terms, 1)
        waits = lanes.collectives if finish else ()
        begins = (lanes.turn, lanes.given(0), lanes.done(0))
        builder.ops.append(TimedOp(name, 0.0, COMPUTE, (), tuple(range(others)), waits, begins))
        for number, op in enumerate(sequence.ops):
            builder.add(0, number, op)
        builder.ops.append(TimedOp("end of round", 0.0, COMPUTE, lanes=(lanes.done(0), *lanes.collectives)))
        size = {"lanes": lanes.count, "inputs": others}
        return Chain((Piece.of(name, builder.ops, **size, outputs=(len(builder.ops) - 1,)),))

    def interleave(self, streams: Sequence[OpList], seconds: Seconds, factor: float) -> tuple[OpList, Piece]:
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
            """Return the seconds until *ops* of one slot have computed and all that holds them up has ended."""
            # Layers that repeat are the same objects, and so are their ops.
            key = (id(ops[0].op), id(ops[-1].op), len(ops))
            if key in known:
                return known[key]
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
            known[key] = ready_s
            return ready_s

        runs = [[(kind, list(run)) for kind, run in groupby(stream.issued, key=exchanges)] for stream in streams]
        first, second = ([PairPart(kind, run_alone_s(ops)) for kind, ops in part] for part in runs)
        left = [iter(part) for part in runs]
        numbers: list[int] = []
        issued: list[IssuedOp] = []
        for number in merge_parts(first, second):
            _, ops = next(left[number])
            numbers += [number] * len(ops)
            issued += ops
        by_layer = [list(run) for _, run in groupby(issued, key=lambda entry: (id(entry.layer), entry.backward))]
        joined = OpList.join(
            [OpList.of_layer(run[0].layer, [entry.op for entry in run], run[0].backward) for run in by_layer]
        )
        return joined, self.make_layers(joined.sequence, streams=tuple(numbers))
