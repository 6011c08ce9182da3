"""A schedule and the segments of its stages, joined into one program.

A call runs one slot, or two that are interleaved; its segment has one input and one output for each of them: the
activation or gradient that it needs, and the one that it produces. Each stage is a rank; rendezvous messages add a rank
for each pair of stages and direction. Which rank calls which segment when, and what waits for what, depends on the
schedule alone: it is a ``PipelineTemplate``, built once with array operations and shared by all strategies.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product, zip_longest
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import IntArray, distinct, distinct_rows
from stepcast.ir.types import ByIdentity, cached_property, dataclass
from stepcast.simulation import messages as wiring
from stepcast.simulation.program import CallTable, Program
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction
from stepcast.simulation.segments import Chain, Piece, ProgramError, Segment, TimedOp, intern_chain


class RoundTemplate(NamedTuple):
    """One call of some stages, once per step. Stages that meet in it wait for outputs of the round before."""

    stages: tuple[int, ...]
    waits: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Stages with those whose output 0 of the round before is input 0, 1, ... of their segments."""
    in_turn: bool = False  # they wait for outputs of this same round instead, one after the other


class Round(NamedTuple):
    """A round with the segments of its stages; stages that run the same need only the first."""

    template: RoundTemplate
    segments: Mapping[int, Segment]

    @classmethod
    def of(
        cls, segments: Mapping[int, Segment], waits: Mapping[int, tuple[int, ...]] | None = None, in_turn: bool = False
    ) -> "Round":
        """Return the round of the stages that have *segments*; *waits* as in its template."""
        return cls(RoundTemplate(tuple(segments), tuple((waits or {}).items()), in_turn), segments)


Slots = tuple[wiring.SlotKind, ...]
"""The one or two slots of a call."""


class SlotCall(NamedTuple):
    """A segment that a stage calls for *slots*."""

    stage: int
    slots: Slots
    frame: wiring.CallFrame


class RoundCall(NamedTuple):
    """A segment that a stage calls in a round."""

    number: int
    stage: int


class ChannelCall(NamedTuple):
    """A segment that a channel between two stages calls: a message that waits for its receiver."""

    kind: SlotAction
    source: ChunkPlace
    target: ChunkPlace


@dataclass(frozen=True, eq=False)
class PipelineTemplate(CallTable):
    """The calls of a pipeline without their segments, whose numbers are those of the kinds of its slots, of the calls
    of its rounds and of its channels.
    """

    # Always given; fields that follow optional ones need a default.
    slots: "SlotTable" = None  # type: ignore[assignment]
    rounds: "RoundTable" = None  # type: ignore[assignment]

    @property
    def segment_names(self) -> tuple[str, ...]:
        kinds = ["+".join([f"{slot.kind.letter}.{slot.chunk}" for slot in call.slots]) for call in self.slots.kinds]
        names = [name or "messages" for name in kinds]
        return (*names, *("" for _ in self.rounds.calls), *("message" for _ in self.slots.channels))

    @cached_property
    def _groups(self) -> dict[object, "CallGroups"]:
        return {}

    def group_calls(self, same: "SameCalls") -> "CallGroups":
        """Return the kinds of calls that run something different."""
        key = (same.places, same.turns, same.variants)
        groups = self._groups.get(key)
        if groups is None:
            calls, runs, which = self.slots.group(same)
            rounds, others = self.rounds.group(same.turns)
            channels = len(calls) + len(rounds) + np.arange(len(self.slots.channels))
            groups = CallGroups(calls, runs, rounds, np.concatenate([which, len(calls) + others, channels]))
            self._groups[key] = groups
        return groups


class CallGroups(NamedTuple):
    """The kinds of calls of a pipeline that run something different: those of slots, of rounds, then the channels."""

    slots: list[tuple[wiring.CallFrame, int]]  # with the number of what they run among *runs*
    runs: list[SlotCall]  # one of the calls that run the same slots of the same chunks
    rounds: list[RoundCall]
    which: IntArray  # for each kind of the template its number


@lru_cache(maxsize=512)
def build_template(
    schedule: Schedule,
    mode: wiring.Send,
    representatives: tuple[int, ...],
    before: tuple[RoundTemplate, ...],
    after: tuple[RoundTemplate, ...],
) -> PipelineTemplate:
    """Build the calls of *schedule*; *representatives* has for each micro-batch the one it runs the same as."""
    return lay_rounds(schedule.stages, before, after).join(find_calls(schedule, mode, representatives))


_TEMPLATES: ByIdentity[PipelineTemplate] = ByIdentity(1024)


@dataclass(frozen=True, eq=False)
class RoundTable:
    """The calls of all rounds."""

    calls: list[RoundCall]
    stage: IntArray  # of each call
    is_after: IntArray  # 1 for calls that come after the slots of their stage, 0 for those before them
    place: IntArray  # the number of calls of its stage that come before it on the same side of the slots
    sources: IntArray  # calls x inputs: the call that gives the input, or -1
    counts: IntArray  # 2 x stages: the calls before the slots of each stage and after them

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], tuple[list[RoundCall], IntArray]]:
        return {}

    def group(self, turns: tuple[int, ...]) -> tuple[list[RoundCall], IntArray]:
        """Return one of the calls of each round that run the same, as stages of the same turn do that wait for as many
        others, and the number of that of each call.
        """
        if turns not in self._groups:
            kinds: dict[tuple[int, int, int], RoundCall] = {}
            turn_of, waits = turns or range(self.counts.shape[1]), (self.sources >= 0).sum(1).tolist()
            keys = [(call.number, turn_of[call.stage], count) for call, count in zip(self.calls, waits, strict=True)]
            for key, call in zip(keys, self.calls, strict=True):
                kinds.setdefault(key, call)
            number = {key: index for index, key in enumerate(kinds)}
            self._groups[turns] = list(kinds.values()), np.array([number[key] for key in keys], np.int64)
        return self._groups[turns]

    def join(self, slots: "SlotTable") -> PipelineTemplate:
        """Return the calls of *slots* on each stage between those of the rounds, then those of the channels."""
        first, last = self.counts
        ends = np.cumsum(slots.counts + first + last)
        starts = ends - slots.counts - last  # of the slots
        shift = starts - np.cumsum(slots.counts) + slots.counts
        calls, own = len(slots.kind), int(slots.counts.sum())
        numbers = np.arange(len(self.calls), len(self.calls) + calls + 1)  # channels follow all stages
        numbers[:own] = np.arange(own) + np.repeat(shift, slots.counts)
        numbers[calls] = -1
        placed = numbers[:calls]
        before, after = (starts - first)[self.stage], (starts + slots.counts)[self.stage]
        turns = np.where(self.is_after, after, before) + self.place
        total, kinds, inputs = calls + len(self.calls), len(slots.kind_stage), slots.source_call.shape[1]
        segment = np.empty(total, np.int64)
        segment[placed] = slots.kind
        segment[placed[own:]] += len(self.calls)
        segment[turns] = np.arange(kinds, kinds + len(self.calls))
        source_call, source_port = np.full((2, total, max(inputs, self.sources.shape[1])), -1, np.int64)
        source_call[placed, :inputs] = numbers.take(slots.source_call)
        source_port[placed, :inputs] = slots.source_port
        if self.calls:
            met = self.sources.shape[1]
            source_call[turns, :met] = np.where(self.sources < 0, -1, turns[self.sources])
            source_port[turns, :met] = np.minimum(self.sources, 0)
        labels = np.full((total, 2), -1, np.int64)
        labels[placed] = slots.batches
        return PipelineTemplate(
            rank_start=np.concatenate([[0], ends, ends[-1] + np.cumsum(slots.channel_counts, dtype=np.int64)]),
            segment=segment,
            source_call=source_call,
            source_port=source_port,
            rank_names=slots.rank_names,
            micro_batches=labels,
            slots=slots,
            rounds=self,
        )


@lru_cache(maxsize=512)
def lay_rounds(stages: int, before: tuple[RoundTemplate, ...], after: tuple[RoundTemplate, ...]) -> RoundTable:
    """Return the calls of rounds *before* the slots and *after* them."""
    rounds = (*before, *after)
    calls = [RoundCall(number, stage) for number, template in enumerate(rounds) for stage in template.stages]
    index: dict[tuple[int, int], int] = {call: place for place, call in enumerate(calls)}
    counts = [0] * stages, [0] * stages
    is_after, place = [call.number >= len(before) for call in calls], []
    for call, side in zip(calls, is_after, strict=True):
        place.append(counts[side][call.stage])
        counts[side][call.stage] += 1
    most = max([0, *[len(others) for template in rounds for _, others in template.waits]])
    sources = np.full((len(calls), most), -1, np.int64)
    for number, template in enumerate(rounds):
        awaited = number if template.in_turn else number - 1
        for stage, others in template.waits:
            for port, other in enumerate(others):
                if (awaited, other) not in index:
                    raise ProgramError(
                        f"stage {stage} waits for stage {other}, which takes no part in the round before"
                    )
                sources[index[number, stage], port] = index[awaited, other]
    columns = [np.array(column, np.int64) for column in ([call.stage for call in calls], is_after, place)]
    return RoundTable(calls, *columns, sources, np.array(counts, np.int64))


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The calls of the slots of all stages, stage by stage, then those of the channels between stages."""

    schedule: Schedule
    counts: IntArray  # the calls of each stage
    kind: IntArray  # of each call: those of a stage follow one another, then those of channels
    batches: IntArray  # calls x 2: the micro-batches of the slots, -1 where there is no such slot
    source_call: IntArray  # calls x inputs, as in a ``CallTable``
    source_port: IntArray
    kind_stage: IntArray
    kind_code: IntArray  # of each kind of slots the number of its slots among *codes*
    kind_frame: IntArray  # and of its frame among *frames*
    kind_order: IntArray  # rises with what the calls before and after it are
    codes: list[Slots]
    chunk: IntArray  # slots of a call x codes: the chunk of each, that of the first where there is no second
    frames: list[wiring.CallFrame]
    channels: list[ChannelCall]
    channel_counts: list[int]  # the calls of each rank of channels
    rank_names: tuple[str, ...]

    @property
    def kinds(self) -> list[SlotCall]:
        parts = zip(self.kind_stage.tolist(), self.kind_code.tolist(), self.kind_frame.tolist(), strict=True)
        return [SlotCall(stage, self.codes[code], self.frames[frame]) for stage, code, frame in parts]

    @cached_property
    def _groups(self) -> dict[object, tuple[list[tuple[wiring.CallFrame, int]], list[SlotCall], IntArray]]:
        return {}

    def group(self, same: "SameCalls") -> tuple[list[tuple[wiring.CallFrame, int]], list[SlotCall], IntArray]:
        """Return the kinds of calls that run something different, as ``CallGroups`` has them."""
        key = (same.places, same.variants)
        if key not in self._groups:
            self._groups[key] = self._find_groups(same)
        return self._groups[key]

    def _find_groups(self, same: "SameCalls") -> tuple[list[tuple[wiring.CallFrame, int]], list[SlotCall], IntArray]:
        places, count, chunks = np.array(same.places, np.int64), max(same.places) + 1, self.schedule.chunks
        order = self.kind_order
        for own in places[self.kind_stage * chunks + self.chunk[:, self.kind_code]]:
            order = order * count + own
        _, where, groups = distinct(order)
        calls: dict[tuple[int, int], int] = {}
        runs: dict[Hashable, int] = {}
        known: dict[Hashable, Hashable] = {}
        first_calls, which = [], []
        columns = [part[where].tolist() for part in (self.kind_stage, self.kind_code, self.kind_frame)]
        for stage, code, frame in zip(*columns, strict=True):
            slots, key = self.codes[code], []
            for slot in slots:
                own = same.places[stage * chunks + slot.chunk], slot.kind, slot[2:]
                if own not in known:
                    known[own] = own[0], same.find(stage, slot)
                key.append(known[own])
            run = runs.setdefault(tuple(key), len(runs))
            if run == len(first_calls):
                first_calls.append(SlotCall(stage, slots, self.frames[frame]))
            which.append(calls.setdefault((frame, run), len(calls)))
        kinds = [(self.frames[frame], run) for frame, run in calls]
        return kinds, first_calls, np.array(which, np.int64)[groups]


@lru_cache(maxsize=256)
def find_calls(schedule: Schedule, mode: wiring.Send, representatives: tuple[int, ...]) -> SlotTable:
    """Return the calls of all slots. Blocking messages add an empty call at each end of a stage, in which the first
    receive is posted and the last send passes.
    """
    codes, stage, code, batches = _number_slots(schedule, representatives)
    if mode is wiring.Send.BLOCKING:
        ends = np.searchsorted(stage, np.arange(schedule.stages + 1))
        # Where one stage ends and the next begins, its own end comes first.
        bounds = np.concatenate([ends[1:], ends[:-1]])
        batches, code = np.insert(batches, bounds, -1, axis=0), np.insert(code, bounds, 0)
        stage = np.insert(stage, bounds, np.tile(np.arange(schedule.stages), 2))
    near = [code]
    if mode is not wiring.Send.EAGER:
        is_last = np.append(stage[1:] != stage[:-1], True)
        after = np.where(is_last, 0, np.roll(code, -1))
        near += [after, np.where(np.roll(is_last, 1), 0, np.roll(code, 1))]
    number = stage
    for part in (*near[2:], *near[:2]):
        number = number * len(codes) + part
    _, first, kind = distinct(number)
    kinds = np.stack([part[first] for part in near])
    builder = _TableBuilder(schedule, mode, codes, stage[first], kinds, kind, batches)
    return builder.build(np.bincount(stage, minlength=schedule.stages))


def _number_slots(
    schedule: Schedule, representatives: tuple[int, ...]
) -> tuple[list[Slots], IntArray, IntArray, IntArray]:
    """Return the slots of calls of any stage (nothing comes first), and for each call its stage, the number of its
    slots, and its micro-batches, -1 where it has no second slot.
    """
    action, batch, chunk, with_next = np.ascontiguousarray(schedule.slots.T)
    index, stage = np.arange(len(action)), np.repeat(np.arange(schedule.stages), schedule.counts)
    slot = action * schedule.chunks + chunk
    own = stage * (len(SlotAction) * schedule.chunks) + slot
    number, place = 4 * slot, np.full(schedule.stages * len(SlotAction) * schedule.chunks, -1, np.int64)
    place[own[::-1]] = index[::-1]
    number[place[place >= 0]] += 2  # the first of its action and chunk
    if SlotAction.WEIGHT in schedule.actions:
        # Weight gradients are complete after the last whole backward or the last weight half, whichever is later.
        place[:] = -1
        own = np.where(
            action == SlotAction.WEIGHT, own - (SlotAction.WEIGHT - SlotAction.BACKWARD) * schedule.chunks, own
        )
    place[own] = index
    number[place[place >= 0]] += 1  # the last one
    different = sorted({*representatives}) or [wiring.DEFAULT_MICRO_BATCH]
    if len(different) > 1:
        number = number * len(different) + np.searchsorted(different, representatives)[batch]
    second, most = np.full_like(batch, -1), 0
    if schedule.has_pairs:
        most = int(number.max()) + 2
        starts = np.flatnonzero(np.concatenate([[True], with_next[:-1] == 0]))
        paired = with_next[starts] > 0
        partner = np.where(paired, starts + 1, starts)
        second = np.where(paired, batch[partner], -1)
        number = number[starts] * most + np.where(paired, 1 + number[partner], 0)
        batch, stage = batch[starts], stage[starts]
    values, _, code = distinct(number)

    def describe(value: int) -> wiring.SlotKind:
        value, representative = divmod(value, len(different))
        value, ends = divmod(value, 4)
        kind, chunk = divmod(value, schedule.chunks)
        return wiring.SlotKind(ACTIONS[kind], chunk, ends >= 2, ends % 2 > 0, different[representative])

    pairs = [divmod(value, most) if most else (value, 0) for value in values.tolist()]
    codes: list[Slots] = [(), *[(describe(own), *([describe(other - 1)] if other else [])) for own, other in pairs]]
    return codes, stage, code + 1, np.stack([batch, second], axis=1)


ACTIONS = tuple(SlotAction)
PASSAGES = [
    wiring.Passage(action, *ways) for action in SlotAction for ways in product((None, wiring.LOCAL, 1.0), repeat=2)
]
NOWHERE = -1, 0, 0, 0, 0, 0
SIGNALS = tuple(wiring.MessageSignal)


def _number_passages(schedule: Schedule) -> IntArray:
    """Return for each stage, action and chunk 1 + the number of its passage."""
    near = schedule.neighbours.reshape(2, schedule.stages, schedule.chunks)
    is_local = near // schedule.chunks == np.arange(schedule.stages)[:, None]
    comes, goes = np.where(is_local, 1, np.where(near < 0, 0, 2))
    passages = np.full((schedule.stages, len(SlotAction), schedule.chunks), 28)
    passages[:, 0] = 1 + 3 * comes + goes
    passages[:, 1] = 10 + 3 * goes + comes
    passages[:, 2] = 9 + passages[:, 1]
    return passages.reshape(-1)


class _TableBuilder:
    """Binds the inputs of the calls of slots to the calls that give the signals."""

    def __init__(
        self,
        schedule: Schedule,
        mode: wiring.Send,
        codes: list[Slots],
        stage: IntArray,
        near: IntArray,
        kind: IntArray,
        batches: IntArray,
    ) -> None:
        """*stage*: that of each kind; *near*: their slots, and those of the calls after and before them, by their
        number among *codes*; *kind*: that of each call.
        """
        self.schedule, self.mode, self.codes, self.stage, self.near = schedule, mode, codes, stage, near
        self.kind, self.batches, chunks = kind, batches, schedule.chunks
        width = 2 if schedule.has_pairs else 1
        slots = [[slot.kind * chunks + slot.chunk for slot in own] + [-1] * (width - len(own)) for own in codes]
        slot = np.array(slots, np.int64)
        self.chunk = np.maximum(np.where(slot.T < 0, slot[:, 0], slot.T), 0) % chunks
        passages = _number_passages(schedule).take(
            stage[:, None] * (len(SlotAction) * chunks) + slot[near], mode="clip"
        )
        passages[slot[near] < 0] = 0
        # One number for the passages of a call: the last comes first, 0 is none.
        own = passages[..., 0] if width == 1 else passages[..., 1] * (1 + len(PASSAGES)) + passages[..., 0]
        first, self.frame = distinct_rows(own)
        contexts = [list(map(_list_passages, numbers)) for numbers in own[:, first].T.tolist()]
        self.frames = [
            wiring.frame_template(mode, wiring.CallContext(context[0], *context[:0:-1])) for context in contexts
        ]
        self.places = schedule.stages * chunks
        self.ways = np.concatenate([np.arange(self.places)[None], schedule.neighbours])
        self.size = (1 if mode is wiring.Send.EAGER else 3) * 2 * self.places * schedule.micro_batches
        # The calls and outputs that give signals; at the end those that nobody gives.
        self.signals = np.full((2, self.size + schedule.micro_batches + 1), -1, np.int64)
        self.channels: list[ChannelCall] = []
        self.channel_counts: list[int] = []
        self.rank_names = [f"stage {stage}" for stage in range(schedule.stages)]

    def build(self, counts: IntArray) -> SlotTable:
        """Return the table of calls; *counts* are those of each stage."""
        calls = np.arange(len(self.kind))
        for entries in zip_longest(*map(_list_given, self.frames), fillvalue=NOWHERE):
            index, outputs = self.find_signals(entries)
            self.signals[0][index], self.signals[1][index] = calls, outputs
        self.signals[:, self.size :] = -1
        wires = zip_longest(*[map(_list_wire, frame.wires) for frame in self.frames], fillvalue=NOWHERE)
        ports = [self.find_signals(entries)[0] for entries in wires]
        if self.mode is wiring.Send.RENDEZVOUS:
            ports = self.add_channels(ports)
        index = np.stack(ports, axis=1) if ports else np.zeros((len(calls), 0), np.int64)
        ends = (self.stage == 0) + 2 * (self.stage == self.schedule.stages - 1)
        order = ends * len(self.codes) + self.near[0]
        if len(self.near) > 1:
            _, order = distinct_rows([order, *self.near[:0:-1]])
        return SlotTable(
            schedule=self.schedule,
            counts=counts,
            kind=self.kind,
            batches=self.batches,
            source_call=self.signals[0].take(index),
            source_port=self.signals[1].take(index),
            kind_stage=self.stage,
            kind_code=self.near[0],
            kind_frame=self.frame,
            kind_order=order,
            codes=self.codes,
            chunk=self.chunk,
            frames=self.frames,
            channels=self.channels,
            channel_counts=self.channel_counts,
            rank_names=tuple(self.rank_names),
        )

    def find_signals(self, entries: Sequence[tuple[int, ...]]) -> tuple[IntArray, IntArray]:
        """Return for each call the place among all signals of the one that its frame has among *entries*, and its
        output.
        """
        columns = np.array(entries, np.int64).T.take(self.frame, 1)
        signal, direction, way, slot, move, output = columns
        codes = self.near[move, np.arange(len(move))]
        place = self.ways[way, self.stage * self.schedule.chunks + self.chunk[slot, codes]]
        first = ((2 * signal + direction) * self.places + place) * self.schedule.micro_batches
        first = np.where(signal < 0, self.size + 1, first)
        moved = (2 * move + slot).take(self.kind) + np.arange(0, self.batches.size, 2)
        return first.take(self.kind) + self.batches.take(moved, mode="wrap"), output.take(self.kind)

    def add_channels(self, ports: list[IntArray]) -> list[IntArray]:
        """Add every message between two stages as a call of its own, in the order of its sender. Return the signals of
        the inputs of all calls; *ports* has those of the calls of slots.
        """
        schedule, step = self.schedule, self.size // 3
        between: dict[tuple[int, int, int], list[tuple[ChunkPlace, ChunkPlace]]] = {}
        for chunk in range(schedule.chunks):
            for stage in range(schedule.stages):
                place = ChunkPlace(stage, chunk)
                for direction, find in enumerate((schedule.following, schedule.previous)):
                    goal = find(place)
                    if goal is not None and goal.stage != stage:
                        between.setdefault((direction, stage, goal.stage), []).append((place, goal))
        ranks = [np.zeros((5, 0), np.int64)]
        for (direction, sender, receiver), routes in sorted(between.items()):
            parts = []
            for source, target in routes:
                batch = np.array(schedule.micro_batches_of(source.chunk), np.int64)
                ends = [direction * self.places + end.stage * schedule.chunks + end.chunk for end in (source, target)]
                sent, received = np.array(ends)[:, None] * schedule.micro_batches + batch
                kind = np.full_like(batch, len(self.stage) + len(self.channels))
                parts.append(np.stack([sent, step + received, 2 * step + sent, kind, batch]))
                self.channels.append(ChannelCall((SlotAction.FORWARD, SlotAction.BACKWARD)[direction], source, target))
            rows = np.concatenate(parts, axis=1)
            ranks.append(rows[:, np.argsort(self.signals[0][rows[0]], kind="stable")])
            self.channel_counts.append(len(rows[0]))
            self.rank_names.append(f"{('activations', 'gradients')[direction]} {sender} to {receiver}")
        ready, posted, arrived, kind, batch = np.concatenate(ranks, axis=1)
        calls = len(self.kind)
        self.signals[:, arrived] = np.arange(calls, calls + len(kind)), np.zeros_like(kind)
        self.kind = np.concatenate([self.kind, kind])
        self.batches = np.concatenate([self.batches, np.stack([batch, np.full_like(batch, -1)], axis=1)])
        nowhere = np.full(len(self.kind), self.size)
        return [
            np.concatenate([nowhere[:calls] if own is None else own, nowhere[calls:] if other is None else other])
            for own, other in zip_longest(ports, [ready, posted] if between else [])
        ]


def _list_passages(number: int) -> tuple[wiring.Passage, ...]:
    return tuple([PASSAGES[passage - 1] for passage in reversed(divmod(number, 1 + len(PASSAGES))) if passage])


def _list_given(frame: wiring.CallFrame) -> list[tuple[int, ...]]:
    """Return the signals that a call gives: signal, direction, way to its place, slot, call from this one, output."""
    context = frame.context
    ready = [(0, int(context.own[slot].backward), 0, slot, 0, output) for slot, output in frame.ready.items()]
    return ready + [(1, int(context.after[slot].backward), 0, slot, 1, output) for slot, output in frame.posted.items()]


def _list_wire(wire: wiring.Wire | None) -> tuple[int, ...]:
    """Return the signal that an input waits for, as those that a call gives."""
    if wire is None:
        return NOWHERE
    ways = {
        wiring.WireEnd.HERE: 0,
        wiring.WireEnd.SOURCE: 1 + wire.direction,
        wiring.WireEnd.TARGET: 2 - wire.direction,
    }
    return SIGNALS.index(wire.signal), wire.direction, ways[wire.end], wire.slot, -wire.of_previous, 0


class SameCalls(NamedTuple):
    """The calls of a pipeline that run the same segment."""

    places: tuple[int, ...]  # chunk by chunk of each stage: equal where the same runs
    turns: tuple[int, ...] = ()  # equal for stages that run the same in rounds; nothing: all differ
    find: Callable[[int, wiring.SlotKind], Hashable] = lambda stage, slot: (slot.kind, *slot[2:])
    """(stage, slot) -> equal for slots of a place that run the same."""
    variants: Hashable = None  # equal where ``find`` gives the same for the same places


EMPTY = Segment("", Chain(()))
SegmentOf = Callable[[int, Slots], Segment]
"""(stage, the slots of the call) -> segment; called once for each kind of call of a stage."""


def pipeline_program(
    schedule: Schedule,
    lanes: tuple[str, ...],
    segment_of: SegmentOf,
    messages: wiring.Messages = wiring.FREE,
    before: Sequence[Round] = (),
    after: Sequence[Round] = (),
    representatives: Sequence[int] = (),
    same_calls: SameCalls | None = None,
) -> Program:
    """Build the program of *schedule*, with the rounds that come *before* the slots and *after* them.

    *representatives* has for each micro-batch the one it runs the same as; nothing: all run the default. Without
    *same_calls*, *segment_of* is called for all stages.
    """
    mode, same_as = messages.mode, tuple(representatives)
    templates = [tuple([round_.template for round_ in rounds]) for rounds in (before, after)]
    parts = (schedule, *templates[0], *templates[1])  # which take longer to compare than to look up
    build = partial(build_template, schedule, mode, same_as, *templates)
    template = _TEMPLATES.get(parts, build, mode, same_as, len(before))
    groups = template.group_calls(same_calls or SameCalls(tuple(range(schedule.stages * schedule.chunks))))
    own, count = [round_.segments for round_ in (*before, *after)], len(lanes)
    bases = [segment_of(run.stage, run.slots) if run.slots else EMPTY for run in groups.runs]
    every = []
    for frame, run in groups.slots:
        base = bases[run]
        every.append(Segment("", _frame_chain(base.chain, frame, messages, count), base.lists, base.repeats))
    every += [own[number][stage] for number, stage in groups.rounds]
    for channel in template.slots.channels:
        op = TimedOp("message", messages.cost, messages.send_lanes[channel.kind is SlotAction.BACKWARD], inputs=(0, 1))
        every.append(Segment.of("message", (op,), lanes=count, inputs=2, outputs=(0,)))
    segments: dict[Segment, int] = {}
    numbers = [segments.setdefault(segment, len(segments)) for segment in every]
    return Program(lanes, tuple(segments), template, np.array(numbers, np.int64)[groups.which])


@lru_cache(maxsize=8192)
def _frame_chain(chain: Chain, frame: wiring.CallFrame, messages: wiring.Messages, lanes: int) -> Chain:
    """Return *chain* with its messages, which are joined to its ends alone."""
    first, *between, last = chain.pieces if len(chain.pieces) > 2 else (None, None)
    if first is None or last is None or any(piece.shape.ports[1] for piece in between):
        return intern_chain(_frame_pieces(chain.pieces, frame, messages, lanes))
    first, last = _frame_pieces((first, last), frame, messages, lanes)
    return intern_chain((first, *between, last))


@lru_cache(maxsize=1024)
def _frame_pieces(
    pieces: tuple[Piece, ...], frame: wiring.CallFrame, messages: wiring.Messages, lanes: int
) -> tuple[Piece, ...]:
    """Return *pieces* with their messages."""
    base = Segment("", Chain(pieces)) if pieces else None
    return wiring.build_frame(base, frame.context.with_cost(messages.cost), messages, lanes).segment.chain.pieces
