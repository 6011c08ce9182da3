"""A schedule and the segments of its stages, joined into one program.

One rank per stage; rendezvous messages add one for each pair of stages and direction, named after them. A
call runs one slot, or two that are interleaved; its segment has one input and one output for each of them:
the activation or gradient that it needs, and the one that it makes. Who calls what when depends on the
schedule alone and is worked out once for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from stepcast.ir.identity import ByIdentity
from stepcast.simulation.fold import distinct
from stepcast.simulation.messages import FREE, USUAL, End, Frame, Framed, Messages, Send, SlotKind, Which, Wire
from stepcast.simulation.program import Calls, Program
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction
from stepcast.simulation.segments import Cost, Ints, Piece, ProgramError, Segment, TimedOp

# What the calls of a pipeline are, before it is known which segments they call.


class RoundTemplate(NamedTuple):
    """A round without its segments."""

    stages: tuple[int, ...]
    waits: tuple[tuple[int, tuple[int, ...]], ...]
    in_turn: bool


class Passing:
    """How messages pass around any segment: one object, in whichever skeleton, where the same do."""

    def __init__(self, framed: Framed) -> None:
        self.framed = framed


class Slots(NamedTuple):
    """A segment that a stage calls for *phases*; *before* and *after* are those of the calls around it."""

    stage: int
    phases: tuple[SlotKind, ...]
    before: tuple[SlotKind, ...]
    after: tuple[SlotKind, ...]
    passes: Passing

    @property
    def name(self) -> str:
        return "+".join(f"{phase.kind.letter}.{phase.chunk}" for phase in self.phases) or "messages"

    def runs(self, same: Sequence[int], chunks: int) -> object:
        """Equal for those that run the same; *same* numbers what each place runs, of *chunks* a stage."""
        own = [(same[self.stage * chunks + phase.chunk], phase._replace(chunk=0)) for phase in self.phases]
        return self.passes, *own


class InRound(NamedTuple):
    """A segment that a stage calls in a round."""

    number: int
    stage: int

    @property
    def name(self) -> str:
        return ""


class ChannelMessage(NamedTuple):
    """A segment that a channel between two stages calls."""

    kind: SlotAction
    source: ChunkPlace
    target: ChunkPlace

    @property
    def name(self) -> str:
        return "message"


Part: TypeAlias = Slots | InRound | ChannelMessage


@dataclass(frozen=True)
class Called:
    """The calls of the slots of all stages, one stage after the other."""

    stage: Ints
    kind: Ints
    """For each call the number of its kind: those of a stage follow one another."""
    first: Ints
    """For each kind its first call."""
    near: list[tuple[tuple[SlotKind, ...], tuple[SlotKind, ...], tuple[SlotKind, ...]]]
    """For each kind its phases, and those of the calls before and after it."""
    batches: Ints
    """calls x 2: the micro-batches of the phases of each call, that of the first again where it has one."""
    labels: Ints
    """The same, -1 where there is none."""


def calls_of(schedule: Schedule, mode: Send, like: Ints) -> Called:
    """Blocking messages add an empty call at each end of a stage, in which the first receive is posted and
    the last send passes.
    """
    phases, stage, code, batches, first = _slots(schedule, like)
    before = after = np.zeros_like(code)
    group = code - 1
    if mode is Send.BLOCKING:
        ends = np.searchsorted(stage, np.arange(schedule.stages + 1))
        # Where one stage ends and the next begins, its own end comes first.
        bounds = np.concatenate([ends[1:], ends[:-1]])
        batches = np.insert(batches, bounds, batches[np.concatenate([ends[1:] - 1, ends[:-1]])], axis=0)
        code = np.insert(code, bounds, 0)
        stage = np.insert(stage, bounds, np.tile(np.arange(schedule.stages), 2))
    if mode is not Send.EAGER:
        last = np.append(stage[1:] != stage[:-1], True)
        after = np.where(last, 0, np.roll(code, -1))
        before = np.where(np.roll(last, 1), 0, np.roll(code, 1))
        kinds = len(phases)
        _, first, group = distinct(((stage * kinds + before) * kinds + code) * kinds + after)
    near = [
        (phases[own], phases[earlier], phases[later])
        for own, earlier, later in zip(*[part[first].tolist() for part in (code, before, after)], strict=True)
    ]
    used = np.array([len(each) for each in phases], np.int64)[code, None] > np.arange(2)
    return Called(stage, group, first, near, batches, np.where(used, batches, -1))


def _slots(schedule: Schedule, like: Ints) -> tuple[list[tuple[SlotKind, ...]], Ints, Ints, Ints, Ints]:
    """The kinds of calls of all stages (the empty one first); for each call its stage, its kind and its
    micro-batches; and the first call of each kind but the empty one.
    """
    counts = [len(order) for order in schedule.orders]
    every = chain.from_iterable(chain.from_iterable(schedule.orders))
    flat = np.fromiter(every, np.int64, 4 * sum(counts))
    kind, batch, chunk, with_next = flat.reshape(-1, 4).T
    stage = np.repeat(np.arange(schedule.stages), counts)
    what = (stage * len(SlotAction) + kind) * schedule.chunks + chunk
    first, last = np.zeros(len(kind), bool), np.zeros(len(kind), bool)
    first[distinct(what).first] = True
    # Weight gradients are complete after the last whole backward or the last weight half, whichever is later.
    ends = (
        stage * len(SlotAction) + np.where(kind == SlotAction.WEIGHT, SlotAction.BACKWARD, kind)
    ) * schedule.chunks + chunk
    last[len(kind) - 1 - distinct(ends[::-1]).first] = True
    likes, _, which = distinct(like - USUAL)
    slot = 1 + ((what * 2 + first) * 2 + last) * len(likes) + which[batch]
    second = np.concatenate([[False], with_next[:-1] > 0])
    starts = np.flatnonzero(~second)
    paired = with_next[starts] > 0
    partner = np.where(paired, starts + 1, starts)
    batches = np.stack([batch[starts], batch[partner]], axis=1)
    number = slot[starts]
    if paired.any():
        number = number * (slot.max() + 1) + np.where(paired, slot[partner], 0)
    _, where, code = distinct(number)
    phases: list[tuple[SlotKind, ...]] = [()]
    for at in starts[where].tolist():
        pair = range(at, at + 1 + int(with_next[at]))
        phases.append(
            tuple(
                [
                    SlotKind(SlotAction(kind[i]), int(chunk[i]), bool(first[i]), bool(last[i]), int(like[batch[i]]))
                    for i in pair
                ]
            )
        )
    return phases, stage[starts], code + 1, batches, where


# Who calls what when in a pipeline, and who waits for whom: what follows from a schedule alone, worked out
# once for it.
#
# One rank per stage; rendezvous messages add one for each pair of stages and direction, named after them. Which
# segments are called is left open: each is told by what it is.


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A program without its segments, and what each of them is."""

    made: Calls
    parts: tuple[Part, ...]
    chunks: int
    _known: dict[tuple[int, ...], tuple[list[Part], Ints]] = field(default_factory=dict, init=False, repr=False)

    def once_each(self, same: tuple[int, ...]) -> tuple[list[Part], Ints]:
        """The parts, those that run the same once, and for each of all which of these it is; *same* has equal
        numbers for places that run the same, chunk by chunk of each stage.
        """
        if same not in self._known:
            number: dict[object, int] = {}
            once: list[Part] = []
            which = []
            for part in self.parts:
                key = part.runs(same, self.chunks) if isinstance(part, Slots) else part
                at = number.setdefault(key, len(once))
                if at == len(once):
                    once.append(part)
                which.append(at)
            self._known[same] = once, np.array(which, np.int64)
        return self._known[same]


@lru_cache(maxsize=128)
def skeleton_of(
    schedule: Schedule,
    mode: Send,
    like: tuple[int, ...],
    before: tuple[RoundTemplate, ...],
    after: tuple[RoundTemplate, ...],
) -> Skeleton:
    build = _Build(schedule, mode, like)
    build.stages(before, after)
    if mode is Send.RENDEZVOUS:
        build.channels()
    found = build.skeleton((*before, *after))
    _ORIGINS[found.made] = _Origin(mode, set(like) <= {USUAL}, before, after, found.parts)
    return found


class _Origin(NamedTuple):
    """What calls were made from, besides a schedule."""

    mode: Send
    usual: bool
    """All micro-batches run the usual."""
    before: tuple[RoundTemplate, ...]
    after: tuple[RoundTemplate, ...]
    parts: tuple[Part, ...]


_ORIGINS: WeakKeyDictionary[Calls, _Origin] = WeakKeyDictionary()


@lru_cache(maxsize=128)
def rescheduled(made: Calls, schedule: Schedule) -> Calls | None:
    """The calls of the same segments under a *schedule* of more or fewer micro-batches; None where those
    segments are not all that it calls, or others.
    """
    origin = _ORIGINS.get(made)
    if origin is None or not origin.usual:
        return None
    like = (USUAL,) * schedule.micro_batches
    other = skeleton_of(schedule, origin.mode, like, origin.before, origin.after)
    return other.made if other.parts == origin.parts else None


class _Bound(NamedTuple):
    """A wire, and the place of which it carries a signal, of all calls or of each."""

    wire: Wire
    stage: int | Ints
    chunk: int | Ints


class _Alike(NamedTuple):
    """Kinds of calls around whose segments the same messages stand, by one of them."""

    number: int
    passes: Passing
    phases: tuple[SlotKind, ...]
    before: tuple[SlotKind, ...]
    after: tuple[SlotKind, ...]

    @property
    def framed(self) -> Framed:
        return self.passes.framed


@dataclass(frozen=True)
class _Group:
    """Calls that are bound alike."""

    wires: tuple[_Bound | None, ...]
    calls: Ints
    batches: Ints
    """calls x phases: the micro-batches of the calls."""
    batches_before: Ints
    """The same for the calls before them."""


class _Build:
    def __init__(self, schedule: Schedule, mode: Send, like: Sequence[int]) -> None:
        self.schedule, self.mode = schedule, mode
        self.like: Ints = np.array(like or [USUAL] * schedule.micro_batches, np.int64)
        self.frames = [
            Frame(schedule, stage, _MESSAGE_LANES, Messages(_anything, mode)) for stage in range(schedule.stages)
        ]
        self.parts: list[Part] = []
        self.rank_start = [0]
        self.rank_names: list[str] = []
        self.segment: list[Ints] = []
        self.batches: list[Ints] = []
        self.calls = 0
        self.groups: list[_Group] = []
        self.round_calls: dict[tuple[int, int], int] = {}
        self.alike: dict[object, _Alike] = {}
        size = (2, schedule.stages, schedule.chunks, schedule.micro_batches)
        self.signal = {which: (np.full(size, -1, np.int64), np.full(size, -1, np.int64)) for which in Which}

    def add(self, segment: Ints, batches: Ints | None = None) -> int:
        """Append calls to the present rank; the first of them."""
        first = self.calls
        self.segment.append(segment)
        self.batches.append(np.full((len(segment), 2), -1, np.int64) if batches is None else batches)
        self.calls += len(segment)
        return first

    def close_rank(self, name: str) -> None:
        self.rank_start.append(self.calls)
        self.rank_names.append(name)

    def rounds(self, stage: int, offset: int, meetings: Sequence[RoundTemplate]) -> None:
        for number, each in enumerate(meetings, start=offset):
            if stage in each.stages:
                self.parts.append(InRound(number, stage))
                self.round_calls[number, stage] = self.add(np.array([len(self.parts) - 1], np.int64))

    def stages(self, before: Sequence[RoundTemplate], after: Sequence[RoundTemplate]) -> None:
        """The calls of every stage: those of its slots, between those of the rounds."""
        called = calls_of(self.schedule, self.mode, self.like)
        first_stage = called.stage[called.first]
        slots = [self.slot(stage, near) for stage, near in zip(first_stage.tolist(), called.near, strict=True)]
        stages = np.arange(self.schedule.stages + 1)
        calls, kinds = (np.searchsorted(part, stages).tolist() for part in (called.stage, first_stage))
        numbers = np.empty_like(called.stage)
        for stage in range(self.schedule.stages):
            own, kind = slice(calls[stage], calls[stage + 1]), slice(kinds[stage], kinds[stage + 1])
            self.rounds(stage, 0, before)
            first = self.add(called.kind[own] + len(self.parts) - kind.start, called.labels[own])
            self.parts += [part for part, _ in slots[kind]]
            numbers[own] = np.arange(first, self.calls)
            self.rounds(stage, len(before), after)
            self.close_rank(f"stage {stage}")
        alike = np.array([number for _, number in slots], np.int64)[called.kind]
        own_batches = called.batches
        earlier = np.concatenate([own_batches[:1], own_batches[:-1]])
        later = np.concatenate([own_batches[1:], own_batches[-1:]])
        self.bind(np.stack([numbers, called.stage, alike]), np.stack([earlier, own_batches, later]))

    def slot(
        self, stage: int, near: tuple[tuple[SlotKind, ...], tuple[SlotKind, ...], tuple[SlotKind, ...]]
    ) -> tuple[Slots, int]:
        """What a stage calls for some phases between others, and the number of those that are alike."""
        frame = self.frames[stage]
        passes = frame.key(*near)
        key = (passes, *[phase.chunk for phases in near for phase in phases])
        found = self.alike.get(key)
        if found is None:
            like = _LIKE.get((), partial(_passing, frame, near), self.mode, passes)
            found = self.alike[key] = _Alike(len(self.alike), like, *near)
        return Slots(stage, *near, found.passes), found.number

    def bind(self, slots: Ints, batches: Ints) -> None:
        """Which signals the calls of slots give, and which they wait for: for all that are alike together.

        *slots*: which calls they are, their stage and the number of those that are alike; *batches*: the
        micro-batches of the call before, of their own, and of the one after.
        """
        order = np.argsort(slots[2], kind="stable")
        bounds = np.searchsorted(slots[2][order], np.arange(len(self.alike) + 1)).tolist()
        for each, start, stop in zip(self.alike.values(), bounds, bounds[1:], strict=False):
            members = order[start:stop]
            calls, stages = slots[:2, members]
            before, own, after = batches[:, members]
            for which, ports, owners, batch in (
                (Which.READY, each.framed.ready, each.phases, own),
                (Which.POSTED, each.framed.posted, each.after, after),
            ):
                for phase, port in ports.items():
                    place = int(owners[phase].backward), stages, owners[phase].chunk, batch[:, phase]
                    self.signal[which][0][place] = calls
                    self.signal[which][1][place] = port
            wires = tuple(self.bound(wire, each, stages) if wire else None for wire in each.framed.wires)
            self.groups.append(_Group(wires, calls, own, before))

    def bound(self, wire: Wire, each: _Alike, stages: Ints) -> _Bound:
        places = np.zeros((2, self.schedule.stages), np.int64)
        for stage in set(stages.tolist()):
            places[:, stage] = self.frames[stage].place(wire, each.phases, each.before)
        return _Bound(wire, *places[:, stages])

    def channels(self) -> None:
        """Every message between two stages, in the order of its sender, as a call of its own."""
        between: dict[tuple[int, int, int], list[tuple[ChunkPlace, ChunkPlace]]] = {}
        for chunk in range(self.schedule.chunks):
            for stage in range(self.schedule.stages):
                place = ChunkPlace(stage, chunk)
                for direction, step in enumerate((self.schedule.following, self.schedule.previous)):
                    goal = step(place)
                    if goal is not None and goal.stage != stage:
                        between.setdefault((direction, stage, goal.stage), []).append((place, goal))
        for (direction, source, target), routes in sorted(between.items()):
            self.channel(direction, routes)
            self.close_rank(f"{('activations', 'gradients')[direction]} {source} to {target}")

    def channel(self, direction: int, routes: Sequence[tuple[ChunkPlace, ChunkPlace]]) -> None:
        kind, sent = (SlotAction.FORWARD, SlotAction.BACKWARD)[direction], []
        for number, (source, _) in enumerate(routes):
            batches = np.array(self.schedule.micro_batches_of(source.chunk), np.int64)
            calls = self.signal[Which.READY][0][direction, *source][batches]
            sent.append(np.stack([calls, np.full_like(calls, number), batches]))
        ordered = np.concatenate(sent, axis=1)
        _, route, batch = ordered[:, np.argsort(ordered[0], kind="stable")]
        first = self.add(len(self.parts) + route, np.stack([batch, np.full_like(batch, -1)], axis=1))
        for number, (source, target) in enumerate(routes):
            self.parts.append(ChannelMessage(kind, source, target))
            wires = (
                _Bound(Wire(Which.READY, direction, End.SOURCE, False, 0), *source),
                _Bound(Wire(Which.POSTED, direction, End.TARGET, False, 0), *target),
            )
            at = np.flatnonzero(route == number)
            self.groups.append(_Group(wires, first + at, batch[at, None], batch[at, None]))
            self.signal[Which.ARRIVED][0][direction, *source][batch[at]] = first + at
            self.signal[Which.ARRIVED][1][direction, *source][batch[at]] = 0

    def skeleton(self, meetings: Sequence[RoundTemplate]) -> Skeleton:
        met = [len(others) for each in meetings for _, others in each.waits]
        inputs = max([0, *met, *(len(group.wires) for group in self.groups)])
        source_call = np.full((self.calls, inputs), -1, np.int64)
        source_port = np.full((self.calls, inputs), -1, np.int64)
        for group in self.groups:
            for port, bound in enumerate(group.wires):
                if bound is not None:
                    wire, stage, chunk = bound
                    batch = (group.batches_before if wire.of_previous else group.batches)[:, wire.phase]
                    place = wire.direction, stage, chunk, batch
                    calls, ports = self.signal[wire.which]
                    source_call[group.calls, port] = calls[place]
                    source_port[group.calls, port] = ports[place]
        for number, each in enumerate(meetings):
            awaited = number if each.in_turn else number - 1
            for stage, others in each.waits:
                for port, other in enumerate(others):
                    if (awaited, other) not in self.round_calls:
                        raise ProgramError(
                            f"stage {stage} waits for stage {other}, which takes no part in the round before"
                        )
                    source_call[self.round_calls[number, stage], port] = self.round_calls[awaited, other]
                    source_port[self.round_calls[number, stage], port] = 0
        segment = np.concatenate([np.zeros(0, np.int64), *self.segment])
        start = np.array(self.rank_start, np.int64)
        batches = np.concatenate([np.zeros((0, 2), np.int64), *self.batches])
        names = tuple([part.name for part in self.parts])
        made = Calls(start, segment, source_call, source_port, tuple(self.rank_names), batches, names)
        return Skeleton(made, tuple(self.parts), self.schedule.chunks)


def _passing(frame: Frame, near: tuple[tuple[SlotKind, ...], tuple[SlotKind, ...], tuple[SlotKind, ...]]) -> Passing:
    return Passing(_placeholder(frame, *near))


_LIKE: ByIdentity[Passing] = ByIdentity(4096)
"""One object for equal keys of frames, in whichever skeleton: it costs less to compare."""


def _anything(kind: SlotAction, source: ChunkPlace, target: ChunkPlace) -> Cost:
    """Where only who sends to whom matters."""
    return 1.0


def _placeholder(
    frame: Frame, phases: tuple[SlotKind, ...], before: tuple[SlotKind, ...], after: tuple[SlotKind, ...]
) -> Framed:
    """What is bound to what around any segment for *phases*."""
    count = len(phases)
    ops = [TimedOp("", 0.0, inputs=(number,)) for number in range(count)]
    base = Segment.of("", ops, lanes=frame.lanes, inputs=count, outputs=range(count)) if count else None
    return frame.around(base, phases, before, after)


_MESSAGE_LANES = 5


SegmentOf = Callable[[int, tuple[SlotKind, ...]], Segment]
"""(stage, the one or two phases of the call) -> segment. Asked once for each kind of call of a stage."""


@dataclass(frozen=True)
class Round:
    """One call of some stages, once per step. Stages that meet in it wait for outputs of the round before."""

    segments: Mapping[int, Segment]
    waits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Stage -> the stages whose output 0 of the round before is input 0, 1, ... of its segment."""
    in_turn: bool = False
    """Whether they wait for outputs of this same round instead, one after the other."""

    @property
    def meeting(self) -> RoundTemplate:
        return RoundTemplate(tuple(self.segments), tuple(self.waits.items()), self.in_turn)


def pipeline_program(
    schedule: Schedule,
    lanes: tuple[str, ...],
    segment_of: SegmentOf,
    messages: Messages = FREE,
    before: Sequence[Round] = (),
    after: Sequence[Round] = (),
    like: Sequence[int] = (),
    same: Sequence[object] = (),
) -> Program:
    """The program of *schedule*, with the rounds that come *before* the slots and *after* them.

    *like* says of each micro-batch which one it runs the same as; nothing: all run the usual. *same*, chunk
    by chunk of each stage, is equal where *segment_of* gives the same segments; nothing: it is asked for all.
    """
    meetings = [tuple([each.meeting for each in rounds]) for rounds in (before, after)]
    skeleton = skeleton_of(schedule, messages.mode, tuple(like), *meetings)
    rounds = [*before, *after]
    number: dict[object, int] = {}
    places = same or range(schedule.stages * schedule.chunks)
    runs = tuple([number.setdefault(each, len(number)) for each in places])
    known: dict[object, Segment] = {}
    costs = tuple([messages.cost(kind, _HERE, _HERE) for kind in _SENT]) if messages.alike else ()

    def segment(part: Part) -> Segment:
        if isinstance(part, InRound):
            return rounds[part.number].segments[part.stage]
        if isinstance(part, ChannelMessage):
            kind, source, target = part
            return _message(messages.cost(kind, source, target), len(lanes), messages, kind)
        base = segment_of(part.stage, part.phases) if part.phases else None
        key = (base, part.passes if messages.alike else part)
        if key not in known:
            frame = Frame(schedule, part.stage, len(lanes), messages)
            known[key] = Segment("", _framed(frame, base, part, costs))
        return known[key]

    parts, which = skeleton.once_each(runs) if messages.alike else (skeleton.parts, None)
    made = list(map(segment, parts))
    own = {id(each): each for each in made}
    place = {key: at for at, key in enumerate(own)}
    numbers = np.array([place[id(each)] for each in made], np.int64)
    return Program(lanes, tuple(own.values()), skeleton.made, numbers if which is None else numbers[which])


_HERE = ChunkPlace(0, 0)
_SENT = (SlotAction.FORWARD, SlotAction.BACKWARD)


def _framed(frame: Frame, base: Segment | None, part: Slots, costs: tuple[Cost, ...]) -> tuple[tuple[Piece, int], ...]:
    """The chain of *base* with its messages, which are joined to its ends alone and remembered for them;
    *costs* of messages where all are alike.
    """
    phases = part.phases, part.before, part.after
    if base is None or len(base.chain) < 3 or any(piece.shape.ports[1] for piece, _ in base.chain[:-1]):
        return frame.around(base, *phases).segment.chain
    (first, _), (last, _) = ends = base.chain[0], base.chain[-1]
    key = (frame.messages.mode, part.passes, *costs) if costs else (frame.messages.mode, frame.key(*phases))
    begin, end = _ENDS.get((first, last), lambda: frame.around(Segment("", ends), *phases).segment.chain, key)
    return (begin, *base.chain[1:-1], end)


_ENDS: ByIdentity[tuple[tuple[Piece, int], ...]] = ByIdentity(4096)


def _message(cost: object, lanes: int, messages: Messages, kind: SlotAction) -> Segment:
    lane = messages.send_lanes[kind is SlotAction.BACKWARD]
    op = TimedOp("message", cost, lane, inputs=(0, 1))
    return Segment.of("message", (op,), lanes=lanes, inputs=2, outputs=(0,))
