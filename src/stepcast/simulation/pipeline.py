"""A schedule and the segments of its stages, joined into one program.

One rank per stage; rendezvous messages add one for each pair of stages and direction, named after them. A
call runs one slot, or two that are interleaved; its segment has one input and one output for each of them:
the activation or gradient that it needs, and the one that it makes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from stepcast.simulation.arrays import Ints, Program, ProgramError, Segment, TimedOp
from stepcast.simulation.distinct import distinct
from stepcast.simulation.messages import FREE, USUAL, Frame, Framed, Messages, Phase, Send, Which, Wire
from stepcast.simulation.schedule import Kind, Place, Schedule

SegmentOf = Callable[[int, tuple[Phase, ...]], Segment]
"""(stage, the one or two phases of the call) -> segment. Asked once for each kind of call of a stage."""


@dataclass(frozen=True)
class Round:
    """One call of some stages, once per step. Stages that meet in it wait for outputs of the round before."""

    segments: Mapping[int, Segment]
    waits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Stage -> the stages whose output 0 of the round before is input 0, 1, ... of its segment."""


def pipeline_program(
    schedule: Schedule,
    lanes: tuple[str, ...],
    segment_of: SegmentOf,
    messages: Messages = FREE,
    before: Sequence[Round] = (),
    after: Sequence[Round] = (),
    like: Sequence[int] = (),
) -> Program:
    """The program of *schedule*, with the rounds that come *before* the slots and *after* them.

    *like* says of each micro-batch which one it runs the same as; nothing: all run the usual.
    """
    build = _Build(schedule, lanes, messages, like)
    for stage in range(schedule.stages):
        build.rounds(stage, 0, before)
        build.slots(stage, segment_of)
        build.rounds(stage, len(before), after)
        build.close_rank(f"stage {stage}")
    if messages.mode is Send.RENDEZVOUS:
        build.channels()
    return build.program(before, after)


@dataclass(frozen=True)
class _Group:
    """Calls of one stage that share a framed segment."""

    framed: Framed
    calls: Ints
    batches: Ints
    """calls x phases: the micro-batches of the calls."""
    batches_before: Ints
    """The same for the calls before them."""


class _Build:
    def __init__(
        self, schedule: Schedule, lanes: tuple[str, ...], messages: Messages, like: Sequence[int]
    ) -> None:
        self.schedule, self.lanes, self.messages = schedule, lanes, messages
        self.like: Ints = np.array(like or [USUAL] * schedule.micro_batches, np.int64)
        self.segments: list[Segment] = []
        self.rank_start = [0]
        self.rank_names: list[str] = []
        self.parts: list[Ints] = []
        self.batches: list[Ints] = []
        self.calls = 0
        self.groups: list[_Group] = []
        self.round_calls: dict[tuple[int, int], int] = {}
        size = (2, schedule.stages, schedule.chunks, schedule.micro_batches)
        self.signal = {which: (np.full(size, -1, np.int64), np.full(size, -1, np.int64)) for which in Which}

    def add(self, segment: Ints, batches: Ints | None = None) -> int:
        """Append calls to the present rank; the first of them."""
        first = self.calls
        self.parts.append(segment)
        self.batches.append(np.full((len(segment), 2), -1, np.int64) if batches is None else batches)
        self.calls += len(segment)
        return first

    def close_rank(self, name: str) -> None:
        self.rank_start.append(self.calls)
        self.rank_names.append(name)

    def rounds(self, stage: int, offset: int, rounds: Sequence[Round]) -> None:
        for number, each in enumerate(rounds, start=offset):
            if stage in each.segments:
                self.segments.append(each.segments[stage])
                self.round_calls[number, stage] = self.add(np.array([len(self.segments) - 1], np.int64))

    def slots(self, stage: int, segment_of: SegmentOf) -> None:
        phases, code, batches = _calls(self.schedule, stage, self.like, self.messages.mode is Send.BLOCKING)
        key = code
        if self.messages.mode is not Send.EAGER:
            kinds = len(phases)
            neighbours = np.concatenate([[0], code, [0]])
            key = (neighbours[:-2] * kinds + code) * kinds + neighbours[2:]
        _, first, group = distinct(key)
        frame = Frame(self.schedule, stage, len(self.lanes), self.messages)
        bases = {number: segment_of(stage, each) for number, each in enumerate(phases) if each}
        used = np.array([len(each) for each in phases], np.int64)[code, None] > np.arange(2)
        first_call = self.add(len(self.segments) + group.astype(np.int64), np.where(used, batches, -1))
        before = np.concatenate([batches[:1], batches[:-1]])
        for number, at in enumerate(first.tolist()):
            around = [phases[code[near]] if 0 <= near < len(code) else () for near in (at - 1, at + 1)]
            framed = frame.around(bases.get(int(code[at])), phases[code[at]], *around)
            self.segments.append(_named(framed, phases[code[at]]))
            calls = np.flatnonzero(group == number)
            self.groups.append(_Group(framed, first_call + calls, batches[calls], before[calls]))
            for which, ports, shift in ((Which.READY, framed.ready, 0), (Which.POSTED, framed.posted, 1)):
                owners = phases[code[at]] if shift == 0 else around[1]
                for phase, port in ports.items():
                    place = int(owners[phase].backward), stage, owners[phase].chunk
                    batch = batches[calls + shift, phase]
                    self.signal[which][0][place][batch] = first_call + calls
                    self.signal[which][1][place][batch] = port

    def channels(self) -> None:
        """Every message between two stages, in the order of its sender, as a call of its own."""
        between: dict[tuple[int, int, int], list[tuple[Place, Place]]] = {}
        for chunk in range(self.schedule.chunks):
            for stage in range(self.schedule.stages):
                place = Place(stage, chunk)
                for direction, step in enumerate((self.schedule.following, self.schedule.previous)):
                    goal = step(place)
                    if goal is not None and goal.stage != stage:
                        between.setdefault((direction, stage, goal.stage), []).append((place, goal))
        for (direction, source, target), routes in sorted(between.items()):
            self.channel(direction, routes)
            self.close_rank(f"{('activations', 'gradients')[direction]} {source} to {target}")

    def channel(self, direction: int, routes: Sequence[tuple[Place, Place]]) -> None:
        kind, lane = (Kind.FORWARD, Kind.BACKWARD)[direction], self.messages.send_lanes[direction]
        sent, framed = [], []
        for number, (source, target) in enumerate(routes):
            op = TimedOp("message", self.messages.duration_s(kind, source, target), lane, inputs=(0, 1))
            segment = Segment.of("message", (op,), lanes=len(self.lanes), inputs=2, outputs=(0,))
            wires = (
                Wire(Which.READY, direction, source, False, 0),
                Wire(Which.POSTED, direction, target, False, 0),
            )
            framed.append(Framed(segment, wires, {}, {}))
            batches = np.array(self.schedule.micro_batches_of(source.chunk), np.int64)
            calls = self.signal[Which.READY][0][direction, *source][batches]
            sent.append(np.stack([calls, np.full_like(calls, number), batches]))
        ordered = np.concatenate(sent, axis=1)
        _, route, batch = ordered[:, np.argsort(ordered[0], kind="stable")]
        first = self.add(len(self.segments) + route, np.stack([batch, np.full_like(batch, -1)], axis=1))
        self.segments += [each.segment for each in framed]
        for number, (source, _) in enumerate(routes):
            at = np.flatnonzero(route == number)
            self.groups.append(_Group(framed[number], first + at, batch[at, None], batch[at, None]))
            self.signal[Which.ARRIVED][0][direction, *source][batch[at]] = first + at
            self.signal[Which.ARRIVED][1][direction, *source][batch[at]] = 0

    def program(self, before: Sequence[Round], after: Sequence[Round]) -> Program:
        inputs = max((segment.shape.inputs for segment in self.segments), default=0)
        source_call = np.full((self.calls, inputs), -1, np.int64)
        source_port = np.full((self.calls, inputs), -1, np.int64)
        for group in self.groups:
            for port, wire in enumerate(group.framed.wires):
                if wire is not None:
                    batch = (group.batches_before if wire.of_previous else group.batches)[:, wire.phase]
                    place = wire.direction, *wire.place
                    source_call[group.calls, port] = self.signal[wire.which][0][place][batch]
                    source_port[group.calls, port] = self.signal[wire.which][1][place][batch]
        for number, each in enumerate([*before, *after]):
            for stage, others in each.waits.items():
                for port, other in enumerate(others):
                    if (number - 1, other) not in self.round_calls:
                        raise ProgramError(
                            f"stage {stage} waits for stage {other}, which takes no part in the round before"
                        )
                    source_call[self.round_calls[number, stage], port] = self.round_calls[number - 1, other]
                    source_port[self.round_calls[number, stage], port] = 0
        segment = np.concatenate([np.zeros(0, np.int64), *self.parts])
        start = np.array(self.rank_start, np.int64)
        names = tuple(self.rank_names)
        batches = np.concatenate([np.zeros((0, 2), np.int64), *self.batches])
        segments = tuple(self.segments)
        return Program(self.lanes, segments, start, segment, source_call, source_port, names, batches)


def _named(framed: Framed, phases: tuple[Phase, ...]) -> Segment:
    name = "+".join(f"{phase.kind.letter}.{phase.chunk}" for phase in phases) or "messages"
    return replace(framed.segment, name=name)


def _calls(
    schedule: Schedule, stage: int, like: Ints, open_and_close: bool
) -> tuple[list[tuple[Phase, ...]], Ints, Ints]:
    """The kinds of calls of a stage (the empty one first), the kind of each call and its micro-batches.

    *open_and_close* adds an empty call at each end, in which the first receive is posted and the last send
    passes.
    """
    slots = schedule.orders[stage]
    flat = np.fromiter(chain.from_iterable(slots), np.int64, 4 * len(slots))
    kind, batch, chunk, with_next = flat.reshape(-1, 4).T
    what = kind * schedule.chunks + chunk
    first, last = np.zeros(len(kind), bool), np.zeros(len(kind), bool)
    first[distinct(what).first] = True
    last[len(kind) - 1 - distinct(what[::-1]).first] = True
    likes, _, which = distinct(like)
    slot = 1 + ((what * 2 + first) * 2 + last) * len(likes) + which[batch]
    slots_known = len(Kind) * schedule.chunks * 4 * len(likes) + 1
    second = np.concatenate([[False], with_next[:-1] > 0])
    starts = np.flatnonzero(~second)
    paired = with_next[starts] > 0
    partner = np.where(paired, starts + 1, starts)
    batches = np.stack([batch[starts], batch[partner]], axis=1)
    number = slot[starts] * slots_known + np.where(paired, slot[partner], 0)
    _, where, code = distinct(number)
    phases: list[tuple[Phase, ...]] = [()]
    for at in starts[where].tolist():
        pair = range(at, at + 1 + int(with_next[at]))
        phases.append(
            tuple(
                Phase(Kind(kind[i]), int(chunk[i]), bool(first[i]), bool(last[i]), int(like[batch[i]]))
                for i in pair
            )
        )
    code = code.astype(np.int64) + 1
    if open_and_close:
        code = np.concatenate([[0], code, [0]])
        batches = np.concatenate([batches[:1], batches, batches[-1:]])
    return phases, code, batches
