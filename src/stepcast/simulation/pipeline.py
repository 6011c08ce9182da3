"""A schedule and the segments of its stages, joined into one program.

A call runs one slot, or two that are interleaved; its segment has one input and one output for each of them: the
activation or gradient that it needs, and the one that it produces. Each stage is a rank; rendezvous messages add a rank
for each pair of stages and direction. Which rank calls which segment when, and what waits for what, depends on the
schedule alone: it is a ``PipelineTemplate``, built once with array operations and shared by all strategies.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from stepcast.ir.arrays import BoolArray, IntArray, distinct, distinct_rows
from stepcast.ir.types import cached_property, dataclass
from stepcast.simulation import messages as wiring
from stepcast.simulation.program import CallTable, Program
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction
from stepcast.simulation.segments import Chain, ProgramError, Segment, TimedOp, intern_chain


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


PipelineCall: TypeAlias = SlotCall | RoundCall | ChannelCall


@dataclass(frozen=True, eq=False)
class PipelineTemplate(CallTable):
    """The calls of a pipeline without their segments: ``kinds`` describes the segment of each number."""

    kinds: tuple[PipelineCall, ...] = ()  # those of slots first
    slot_frames: IntArray | None = None  # equal for the kinds of slots with the same slots and frame
    chunks: int = 1
    rounds: tuple[RoundTemplate, ...] = ()  # those before the slots, then those after them

    @property
    def segment_names(self) -> tuple[str, ...]:
        def name(kind: PipelineCall) -> str:
            if isinstance(kind, SlotCall):
                return "+".join(f"{slot.kind.letter}.{slot.chunk}" for slot in kind.slots) or "messages"
            return "message" if isinstance(kind, ChannelCall) else ""

        return tuple(map(name, self.kinds))

    @cached_property
    def _groups(self) -> dict[object, "CallGroups"]:
        return {}

    def group_calls(self, same: "SameCalls") -> "CallGroups":
        """Return the kinds of calls that run something different."""
        key = (same.places, same.turns, same.variants)
        if key not in self._groups:
            self._groups[key] = self._find_groups(same)
        return self._groups[key]

    def _find_groups(self, same: "SameCalls") -> "CallGroups":
        frames = self.slot_frames
        assert frames is not None
        places, count = np.array(same.places, np.int64), max(same.places) + 1
        every = self.kinds[: len(frames)]
        ends = [(kind.slots[0].chunk, kind.slots[-1].chunk) if kind.slots else (0, 0) for kind in every]  # type: ignore[union-attr]
        first, last = np.array([kind.stage for kind in every]) * self.chunks + np.array(ends, np.int64).reshape(-1, 2).T  # type: ignore[union-attr]
        _, where, groups = distinct((frames * count + places[first]) * count + places[last])
        kinds: list[tuple[PipelineCall, int]] = []
        runs: dict[Hashable, SlotCall] = {}
        numbers: dict[Hashable, int] = {}
        which = []

        def number(call: PipelineCall, key: Hashable, run: int = -1) -> int:
            """Return the number of what the calls of *key* run."""
            if key not in numbers:
                numbers[key] = len(kinds)
                kinds.append((call, run))
            return numbers[key]

        for index in where.tolist():
            call = every[index]
            assert isinstance(call, SlotCall)
            own = call.stage * self.chunks
            run = tuple([(same.places[own + slot.chunk], same.find(call.stage, slot)) for slot in call.slots])
            runs.setdefault(run, call)
            which.append(number(call, (call.frame, run), list(runs).index(run)))
        waits = [dict(template.waits) for template in self.rounds]
        others = []
        for kind in self.kinds[len(frames) :]:
            key: Hashable = kind
            if isinstance(kind, RoundCall) and same.turns:
                key = (kind.number, same.turns[kind.stage], len(waits[kind.number].get(kind.stage, ())))
            others.append(number(kind, key))
        return CallGroups(kinds, list(runs.values()), np.array([*np.array(which)[groups].tolist(), *others], np.int64))


class CallGroups(NamedTuple):
    """The kinds of calls of a pipeline that run something different."""

    kinds: list[tuple[PipelineCall, int]]  # with the number of what they run among *runs*
    runs: list[SlotCall]  # one of the calls that run the same slots of the same chunks
    which: IntArray  # for each kind of the template its number among *kinds*


@lru_cache(maxsize=512)
def build_template(
    schedule: Schedule,
    mode: wiring.Send,
    representatives: tuple[int, ...],
    before: tuple[RoundTemplate, ...],
    after: tuple[RoundTemplate, ...],
) -> PipelineTemplate:
    """Build the calls of *schedule*; *representatives* has for each micro-batch the one it runs the same as."""
    builder = _TemplateBuilder(schedule, mode, before, after)
    builder.add_stages(representatives or (wiring.DEFAULT_MICRO_BATCH,) * schedule.micro_batches)
    builder.give_signals()
    if mode is wiring.Send.RENDEZVOUS:
        builder.add_channels()
    return builder.build()


class _SlotCalls(NamedTuple):
    """The calls of the slots of all stages, stage by stage. The kinds of a stage follow one another."""

    stage: IntArray
    kind: IntArray
    batches: IntArray  # calls x 2: the micro-batches of the slots; that of the first again where there is one
    is_used: BoolArray  # calls x 2: whether there is such a slot
    kind_stage: IntArray
    framed: list[tuple[Slots, wiring.CallFrame]]
    frame_of_kind: IntArray  # the number of each kind among *framed*


@lru_cache(maxsize=256)
def _find_calls(schedule: Schedule, mode: wiring.Send, representatives: tuple[int, ...]) -> _SlotCalls:
    """Return the calls of all slots. Blocking messages add an empty call at each end of a stage, in which the first
    receive is posted and the last send passes.
    """
    slots, stage, code, batches = _number_slots(schedule, np.array(representatives, np.int64))
    before = after = np.zeros_like(code)
    if mode is wiring.Send.BLOCKING:
        ends = np.searchsorted(stage, np.arange(schedule.stages + 1))
        # Where one stage ends and the next begins, its own end comes first.
        bounds = np.concatenate([ends[1:], ends[:-1]])
        batches = np.insert(batches, bounds, batches[np.concatenate([ends[1:] - 1, ends[:-1]])], axis=0)
        code = np.insert(code, bounds, 0)
        stage = np.insert(stage, bounds, np.tile(np.arange(schedule.stages), 2))
    if mode is not wiring.Send.EAGER:
        last = np.append(stage[1:] != stage[:-1], True)
        after = np.where(last, 0, np.roll(code, -1))
        before = np.where(np.roll(last, 1), 0, np.roll(code, 1))
    _, first, kind = distinct(((stage * len(slots) + before) * len(slots) + code) * len(slots) + after)
    is_used = np.array([(len(part) > 0, len(part) > 1) for part in slots]).take(code, 0)
    kind_stage, codes = stage[first], [code[first], before[first], after[first]]
    # Messages pass all stages between the first and the last in the same way.
    ends = (kind_stage == 0) + 2 * (kind_stage == schedule.stages - 1)
    kinds_of_frames, frame_of_kind = distinct_rows([ends, *codes])
    framed = []
    for place, *near_codes in zip(*[part[kinds_of_frames].tolist() for part in (kind_stage, *codes)], strict=True):
        near = [slots[number] for number in near_codes]
        parts = [tuple([wiring.find_passage(schedule, place, slot) for slot in part]) for part in near]
        framed.append((near[0], wiring.frame_template(mode, wiring.CallContext(*parts))))
    return _SlotCalls(stage, kind, batches, is_used, kind_stage, framed, frame_of_kind)


def _number_slots(schedule: Schedule, representative: IntArray) -> tuple[list[Slots], IntArray, IntArray, IntArray]:
    """Return the kinds of calls of any stage (the empty one first), and for each call its stage, its kind and its
    micro-batches.
    """
    action, batch, chunk, with_next = np.ascontiguousarray(schedule.slots.T)
    stage = np.repeat(np.arange(schedule.stages), schedule.counts)
    what = (stage * len(SlotAction) + action) * schedule.chunks + chunk
    first, last = np.zeros(len(action), bool), np.zeros(len(action), bool)
    first[distinct(what).first] = True
    # Weight gradients are complete after the last whole backward or the last weight half, whichever is later.
    ending = np.where(action == SlotAction.WEIGHT, SlotAction.BACKWARD, action)
    ends = (stage * len(SlotAction) + ending) * schedule.chunks + chunk
    last[len(action) - 1 - distinct(ends[::-1]).first] = True
    different, _, which = distinct(representative - wiring.DEFAULT_MICRO_BATCH)
    slot = 1 + (((action * schedule.chunks + chunk) * 2 + first) * 2 + last) * len(different) + which[batch]
    second = np.concatenate([[False], with_next[:-1] > 0])
    starts = np.flatnonzero(~second)
    paired = with_next[starts] > 0
    partner = np.where(paired, starts + 1, starts)
    batches = np.stack([batch[starts], batch[partner]], axis=1)
    number = slot[starts]
    if paired.any():
        number = number * (slot.max() + 1) + np.where(paired, slot[partner], 0)
    _, where, code = distinct(number)

    def describe(i: int) -> wiring.SlotKind:
        actions = SlotAction(action[i]), int(chunk[i])
        return wiring.SlotKind(*actions, bool(first[i]), bool(last[i]), int(representative[batch[i]]))

    pairs = [range(start, start + 1 + int(with_next[start])) for start in starts[where].tolist()]
    kinds: list[Slots] = [(), *[tuple([describe(i) for i in pair]) for pair in pairs]]
    return kinds, stage[starts], code + 1, batches


class _TemplateBuilder:
    """Lays the calls of all ranks out and binds their inputs to the calls that give the signals."""

    def __init__(
        self, schedule: Schedule, mode: wiring.Send, before: tuple[RoundTemplate, ...], after: tuple[RoundTemplate, ...]
    ) -> None:
        self.schedule, self.mode, self.before, self.after = schedule, mode, before, after
        places = [ChunkPlace(stage, chunk) for stage in range(schedule.stages) for chunk in range(schedule.chunks)]
        sources = [schedule.previous(place) for place in places], [schedule.following(place) for place in places]
        # Direction x places: where a message comes from. A message goes where those of the other direction come from.
        self.source = np.array(
            [[-1 if place is None else self.number_place(place) for place in part] for part in sources], np.int64
        )
        size = (2, len(places), schedule.micro_batches)
        self.signals = {
            signal: (np.full(size, -1, np.int64), np.full(size, -1, np.int64)) for signal in wiring.MessageSignal
        }
        self.bindings: list[tuple[IntArray, int, IntArray, IntArray]] = []
        """Calls, their input, and the calls and outputs that it waits for."""

    def number_place(self, place: ChunkPlace) -> int:
        return place.stage * self.schedule.chunks + place.chunk

    def add_stages(self, representatives: tuple[int, ...]) -> None:
        """Add the calls of every stage: those of its slots, between those of the rounds."""
        calls = self.slot_calls = _find_calls(self.schedule, self.mode, representatives)
        framed, frame_of_kind = calls.framed, calls.frame_of_kind
        pairs = zip(calls.kind_stage.tolist(), frame_of_kind.tolist(), strict=True)
        slot_kinds = [SlotCall(stage, *framed[number]) for stage, number in pairs]
        rounds = [
            RoundCall(number, stage)
            for number, template in enumerate((*self.before, *self.after))
            for stage in template.stages
        ]
        self.kinds: list[PipelineCall] = [*slot_kinds, *rounds]
        kinds = np.concatenate([calls.kind, np.arange(len(slot_kinds), len(self.kinds))])
        labels = np.concatenate([np.where(calls.is_used, calls.batches, -1), np.full((len(rounds), 2), -1)])
        # On each stage the rounds before the slots, the slots, the rounds after them.
        turns = [3 * call.stage + 2 * (call.number >= len(self.before)) for call in rounds]
        turn = np.concatenate([3 * calls.stage + 1, np.array(turns, np.int64)])
        order = np.argsort(turn, kind="stable")
        self.calls, self.segment, self.labels = len(order), [kinds[order]], [labels.take(order, 0)]
        self.rank_start = np.searchsorted(turn[order], 3 * np.arange(self.schedule.stages + 1)).tolist()
        self.rank_names = [f"stage {stage}" for stage in range(self.schedule.stages)]
        numbers = np.argsort(order, kind="stable")
        self.slot_numbers = numbers[: len(calls.kind)]
        self.round_calls = dict(zip(rounds, numbers[len(calls.kind) :].tolist(), strict=True))
        frames = {frame: number for number, frame in enumerate(dict.fromkeys([frame for _, frame in framed]))}
        frame_of_call = np.array([frames[frame] for _, frame in framed], np.int64)[frame_of_kind[calls.kind]]
        self.members = [(frame, np.flatnonzero(frame_of_call == number)) for frame, number in frames.items()]
        chunks = [(slots[0].chunk, slots[-1].chunk) if slots else (0, 0) for slots, _ in framed]
        chunk = np.array(chunks, np.int64).take(frame_of_kind[calls.kind], 0)
        self.places = calls.stage[:, None] * self.schedule.chunks + chunk

    def give_signals(self) -> None:
        """Note which outputs of the calls of slots give which signals."""
        for frame, members in self.members:
            given = [
                (wiring.MessageSignal.READY, frame.context.own, frame.ready, members),
                (wiring.MessageSignal.POSTED, frame.context.after, frame.posted, members + 1),
            ]
            for signal, passages, outputs, owners in given:
                for slot, output in outputs.items():
                    direction = int(passages[slot].backward)
                    index = direction, self.places[owners, slot], self.slot_calls.batches[owners, slot]
                    self.signals[signal][0][index] = self.slot_numbers[members]
                    self.signals[signal][1][index] = output

    def bind(
        self, calls: IntArray, port: int, signal: wiring.MessageSignal, index: tuple[int, IntArray | int, IntArray]
    ) -> None:
        """Bind an input of *calls* to the *signal* of (direction, place, micro-batch)."""
        self.bindings.append((calls, port, self.signals[signal][0][index], self.signals[signal][1][index]))

    def add_channels(self) -> None:
        """Add every message between two stages as a call of its own, in the order of its sender."""
        between: dict[tuple[int, int, int], list[tuple[ChunkPlace, ChunkPlace]]] = {}
        for chunk in range(self.schedule.chunks):
            for stage in range(self.schedule.stages):
                place = ChunkPlace(stage, chunk)
                for direction, step in enumerate((self.schedule.following, self.schedule.previous)):
                    goal = step(place)
                    if goal is not None and goal.stage != stage:
                        between.setdefault((direction, stage, goal.stage), []).append((place, goal))
        ready, arrived = self.signals[wiring.MessageSignal.READY], self.signals[wiring.MessageSignal.ARRIVED]
        for (direction, sender, receiver), routes in sorted(between.items()):
            parts = []
            for number, (source, _) in enumerate(routes):
                batches = np.array(self.schedule.micro_batches_of(source.chunk), np.int64)
                sends = ready[0][direction, self.number_place(source)][batches]
                parts.append(np.stack([sends, np.full_like(sends, number), batches]))
            ordered = np.concatenate(parts, axis=1)
            _, route, batch = ordered[:, np.argsort(ordered[0], kind="stable")]
            calls = np.arange(self.calls, self.calls + len(route))
            self.calls += len(route)
            self.segment.append(len(self.kinds) + route)
            self.labels.append(np.stack([batch, np.full_like(batch, -1)], axis=1))
            for number, (source, target) in enumerate(routes):
                self.kinds.append(ChannelCall((SlotAction.FORWARD, SlotAction.BACKWARD)[direction], source, target))
                own = np.flatnonzero(route == number)
                sent, received = (self.number_place(place) for place in (source, target))
                self.bind(calls[own], 0, wiring.MessageSignal.READY, (direction, sent, batch[own]))
                self.bind(calls[own], 1, wiring.MessageSignal.POSTED, (direction, received, batch[own]))
                arrived[0][direction, sent, batch[own]] = calls[own]
                arrived[1][direction, sent, batch[own]] = 0
            self.rank_start.append(self.calls)
            self.rank_names.append(f"{('activations', 'gradients')[direction]} {sender} to {receiver}")

    def build(self) -> PipelineTemplate:
        for frame, members in self.members:
            for port, wire in enumerate(frame.wires):
                if wire is not None:
                    owners = members - 1 if wire.of_previous else members
                    place = self.places[owners, wire.slot]
                    if wire.end is not wiring.WireEnd.HERE:
                        place = self.source[wire.direction ^ (wire.end is wiring.WireEnd.TARGET)][place]
                    index = wire.direction, place, self.slot_calls.batches[owners, wire.slot]
                    self.bind(self.slot_numbers[members], port, wire.signal, index)
        rounds = (*self.before, *self.after)
        met = [len(others) for template in rounds for _, others in template.waits]
        inputs = max([0, *met, *(port + 1 for _, port, _, _ in self.bindings)])
        inputs = max([inputs, *(len(frame.wires) for frame, _ in self.members)])
        source_call, source_port = np.full((2, self.calls, inputs), -1, np.int64)
        for calls, port, sources, outputs in self.bindings:
            source_call[calls, port] = sources
            source_port[calls, port] = outputs
        for number, template in enumerate(rounds):
            awaited = number if template.in_turn else number - 1
            for stage, others in template.waits:
                for port, other in enumerate(others):
                    if RoundCall(awaited, other) not in self.round_calls:
                        raise ProgramError(
                            f"stage {stage} waits for stage {other}, which takes no part in the round before"
                        )
                    call = self.round_calls[RoundCall(number, stage)]
                    source_call[call, port] = self.round_calls[RoundCall(awaited, other)]
                    source_port[call, port] = 0
        return PipelineTemplate(
            rank_start=np.array(self.rank_start, np.int64),
            segment=np.concatenate(self.segment),
            source_call=source_call,
            source_port=source_port,
            rank_names=tuple(self.rank_names),
            micro_batches=np.concatenate(self.labels),
            kinds=tuple(self.kinds),
            slot_frames=self.slot_calls.frame_of_kind,
            chunks=self.schedule.chunks,
            rounds=rounds,
        )


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
    templates = [tuple([round_.template for round_ in rounds]) for rounds in (before, after)]
    template = build_template(schedule, messages.mode, tuple(representatives), *templates)
    groups = template.group_calls(same_calls or SameCalls(tuple(range(schedule.stages * schedule.chunks))))
    rounds, count = [*before, *after], len(lanes)
    bases = [segment_of(run.stage, run.slots) if run.slots else EMPTY for run in groups.runs]
    segments: dict[Segment, int] = {}
    numbers = []
    for kind, run in groups.kinds:
        if isinstance(kind, SlotCall):
            base = bases[run]
            segment = Segment("", _frame_chain(base.chain, kind.frame, messages, count), base.lists, base.repeats)
        elif isinstance(kind, RoundCall):
            segment = rounds[kind.number].segments[kind.stage]
        else:
            lane = messages.send_lanes[kind.kind is SlotAction.BACKWARD]
            op = TimedOp("message", messages.cost, lane, inputs=(0, 1))
            segment = Segment.of("message", (op,), lanes=count, inputs=2, outputs=(0,))
        numbers.append(segments.setdefault(segment, len(segments)))
    return Program(lanes, tuple(segments), template, np.array(numbers, np.int64)[groups.which])


@lru_cache(maxsize=8192)
def _frame_chain(chain: Chain, frame: wiring.CallFrame, messages: wiring.Messages, lanes: int) -> Chain:
    """Return *chain* with its messages, which are joined to its ends alone."""
    base = Segment("", chain) if chain.pieces else None
    framed = wiring.build_frame(base, frame.context.with_cost(messages.cost), messages, lanes)
    return intern_chain(framed.segment.chain.pieces)
