"""How a call of a stage sends and receives: its own segment with the ops of its messages around it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction
from stepcast.simulation.segments import NO_LANE, Cost, ProgramError, Segment, TimedOp

USUAL = -1


class SlotKind(NamedTuple):
    """What a slot is, whichever of alike micro-batches it runs."""

    kind: SlotAction
    chunk: int
    first: bool
    """The first slot of this kind and chunk on the stage."""
    last: bool
    """The last one, of whole backwards and weight halves together: gradients can be reduced after it."""
    like: int = USUAL
    """The first of the micro-batches that run the same as this one; USUAL where most do."""

    @property
    def backward(self) -> bool:
        return self.kind in (SlotAction.BACKWARD, SlotAction.INPUT)


class Send(StrEnum):
    """When a message moves, and who waits for it."""

    EAGER = "eager"
    """As soon as it is ready, in the sender's lane alone; only the slot that needs it waits for it."""
    RENDEZVOUS = "rendezvous"
    """When it is ready and the receiver has begun the slot before the one that needs it (one receive ahead),
    in a lane of its own between the two stages. Computing goes on."""
    BLOCKING = "blocking"
    """When both sides have come to it; both stop computing until it has passed (the send of a slot and the
    receive of the next one are posted together, as Megatron-LM does). Schedules that run ahead of their
    receivers deadlock, as they would in a real run without buffers: more than one chunk, ZB-H2."""


@dataclass(frozen=True)
class Messages:
    """The lanes that messages take and how long they take."""

    cost: Callable[[SlotAction, ChunkPlace, ChunkPlace], Cost]
    """(FORWARD or BACKWARD, from, to) -> what the message costs."""
    mode: Send = Send.EAGER
    compute_lane: int = 0
    send_lanes: tuple[int, int] = (1, 2)
    """For activations and for gradients."""
    receive_lanes: tuple[int, int] = (3, 4)
    alike: bool = False
    """Whether messages between all stages cost the same."""

    def __post_init__(self) -> None:
        lanes = (self.compute_lane, *self.send_lanes, *self.receive_lanes)
        if self.mode is Send.BLOCKING and len(set(lanes)) < len(lanes):
            raise ProgramError(f"blocking messages need five different lanes, not {lanes}")


FREE = Messages(lambda kind, source, target: 0.0)
"""Messages that take no time and no lane."""


class Which(StrEnum):
    """The signal of another call that an input waits for."""

    READY = "ready"
    """The message of a place: arrived (eager), or posted by its sender."""
    POSTED = "posted"
    """The receive of a place has been posted."""
    ARRIVED = "arrived"
    """The message of a place has passed (rendezvous)."""


class End(StrEnum):
    """A place, as seen from that of a phase."""

    SOURCE = "source"
    """Where its message comes from."""
    TARGET = "target"
    HERE = "here"


class Wire(NamedTuple):
    """An input of a call: the signal *which* of the place at an *end* of one of the phases, for its
    micro-batch.
    """

    which: Which
    direction: int
    end: End
    of_previous: bool
    """The phase is one of the call before this one (whose message is being sent)."""
    phase: int


@dataclass(frozen=True)
class Framed:
    """A segment with its messages, what each input is bound to and which output gives which signal."""

    segment: Segment
    wires: tuple[Wire | None, ...]
    ready: dict[int, int]
    """Phase of this call -> output."""
    posted: dict[int, int]
    """Phase of the next call -> output."""


class Frame:
    """Puts the message ops of one stage around its segments."""

    def __init__(self, schedule: Schedule, stage: int, lanes: int, messages: Messages) -> None:
        self.schedule, self.stage, self.lanes, self.messages = schedule, stage, lanes, messages
        self._known: dict[tuple[SlotAction, int], tuple[Cost, ...]] = {}

    def around(
        self,
        base: Segment | None,
        phases: tuple[SlotKind, ...],
        before: tuple[SlotKind, ...],
        after: tuple[SlotKind, ...],
    ) -> Framed:
        """*base* runs *phases*; *before* and *after* are those of the calls before and after it."""
        build = _Build(self)
        if self.messages.mode is Send.BLOCKING:
            build.send_and_receive(before, phases)
        if self.messages.mode is Send.RENDEZVOUS:
            build.post_receives(after)
        build.base(base, phases)
        build.outputs(phases)
        if self.messages.mode is Send.BLOCKING:
            build.post_receives(after)
        return build.framed()

    def inbound(self, phase: SlotKind) -> ChunkPlace | None:
        """Where the message of *phase* comes from."""
        place = ChunkPlace(self.stage, phase.chunk)
        if phase.kind is SlotAction.WEIGHT:
            return None
        return self.schedule.following(place) if phase.backward else self.schedule.previous(place)

    def outbound(self, phase: SlotKind) -> ChunkPlace | None:
        place = ChunkPlace(self.stage, phase.chunk)
        if phase.kind is SlotAction.WEIGHT:
            return None
        return self.schedule.previous(place) if phase.backward else self.schedule.following(place)

    def place(self, wire: Wire, phases: tuple[SlotKind, ...], before: tuple[SlotKind, ...]) -> ChunkPlace:
        """The place of which *wire* carries a signal."""
        phase = (before if wire.of_previous else phases)[wire.phase]
        ends = {End.SOURCE: self.inbound, End.TARGET: self.outbound}
        found = ends[wire.end](phase) if wire.end in ends else ChunkPlace(self.stage, phase.chunk)
        assert found is not None
        return found

    def remote(self, place: ChunkPlace | None) -> bool:
        return place is not None and place.stage != self.stage

    def cost(self, phase: SlotKind, source: ChunkPlace, target: ChunkPlace) -> Cost:
        return self.messages.cost(SlotAction.BACKWARD if phase.backward else SlotAction.FORWARD, source, target)

    def key(self, phases: tuple[SlotKind, ...], before: tuple[SlotKind, ...], after: tuple[SlotKind, ...]) -> object:
        """Equal for calls around whose segments the same messages stand, of whichever stage and chunk."""
        if self.messages.mode is Send.EAGER:
            before = after = ()
        return tuple([tuple([(phase.kind, self._passes(phase)) for phase in part]) for part in (phases, before, after)])

    def _passes(self, phase: SlotKind) -> tuple[Cost, ...]:
        """How the messages of *phase* come and go: not at all, within the stage, or at a cost."""
        what = phase.kind, phase.chunk
        if what not in self._known:
            here, source, target = ChunkPlace(self.stage, phase.chunk), self.inbound(phase), self.outbound(phase)
            comes: Cost = source is not None
            goes: Cost = target is not None
            if source is not None and self.remote(source):
                comes = ("from another", self.cost(phase, source, here))
            if target is not None and self.remote(target):
                goes = ("to another", self.cost(phase, here, target))
            self._known[what] = comes, goes
        return self._known[what]


@lru_cache(maxsize=1024)
def _single(op: TimedOp, lanes: int) -> Segment:
    """The same object for the same op, so that what it is joined to is joined once."""
    return Segment.of("", (op,), lanes=lanes, inputs=len(op.inputs), outputs=(0,))


class _Build:
    """One framed segment, from its first op to its last."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.messages = frame.messages
        self.segment: Segment | None = None
        self.outputs_so_far = 0
        self.wires: list[Wire | None] = []
        self.arrived: dict[int, int] = {}
        self.produced: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.posted: dict[int, int] = {}

    def add(self, op: TimedOp, bind: dict[int, int] | None = None, wire: Wire | None = None) -> int:
        """Append one op; the output that is its end."""
        piece = _single(op, self.frame.lanes)
        if wire:
            self.wires.append(wire)
        return self.append(piece, bind or {})

    def append(self, piece: Segment, bind: dict[int, int]) -> int:
        """Append *piece*; its first output."""
        self.segment = self.segment.then(piece, bind) if self.segment else piece
        first = self.outputs_so_far
        self.outputs_so_far += piece.outputs
        return first

    def send_and_receive(self, before: tuple[SlotKind, ...], phases: tuple[SlotKind, ...]) -> None:
        """The messages that the call before this one posted: its own and those that this call needs."""
        frame, waits = self.frame, []
        for number, phase in enumerate(before):
            target = frame.outbound(phase)
            if target is not None and frame.remote(target):
                lane = self.messages.send_lanes[phase.backward]
                cost = frame.cost(phase, ChunkPlace(frame.stage, phase.chunk), target)
                wire = Wire(Which.POSTED, int(phase.backward), End.TARGET, True, number)
                waits.append(self.add(TimedOp("send", cost, lane, inputs=(0,)), wire=wire))
        for number, phase in enumerate(phases):
            source = frame.inbound(phase)
            if source is not None and frame.remote(source):
                lane = self.messages.receive_lanes[phase.backward]
                cost = frame.cost(phase, source, ChunkPlace(frame.stage, phase.chunk))
                wire = Wire(Which.READY, int(phase.backward), End.SOURCE, False, number)
                self.arrived[number] = self.add(TimedOp("receive", cost, lane, inputs=(0,)), wire=wire)
                waits.append(self.arrived[number])
        if waits:
            op = TimedOp("wait for messages", 0.0, self.messages.compute_lane, inputs=tuple(range(len(waits))))
            self.add(op, bind=dict(enumerate(waits)))

    def post_receives(self, after: tuple[SlotKind, ...]) -> None:
        """Be ready for the messages of the next call from here on."""
        blocking = self.messages.mode is Send.BLOCKING
        for number, phase in enumerate(after):
            if self.frame.remote(self.frame.inbound(phase)):
                lane = self.messages.receive_lanes[phase.backward] if blocking else NO_LANE
                self.posted[number] = self.add(TimedOp("post receive", 0.0, lane, lanes=(self.messages.compute_lane,)))

    def base(self, base: Segment | None, phases: tuple[SlotKind, ...]) -> None:
        """The segment itself; input and output k belong to phase k."""
        if base is None:
            return
        for number, phase in enumerate(phases):
            takes, gives = self.frame.inbound(phase), self.frame.outbound(phase)
            if takes is not None and base.inputs <= number:
                raise ProgramError(f"segment {base.name} of stage {self.frame.stage} has no input {number}")
            if gives is not None and base.outputs <= number:
                raise ProgramError(f"segment {base.name} of stage {self.frame.stage} has no output {number}")
        bind = dict(self.arrived)
        first = self.append(base, bind)
        self.wires += [self.wire(phases, port) for port in range(base.inputs) if port not in bind]
        self.produced = {port: first + port for port in range(base.outputs)}

    def wire(self, phases: tuple[SlotKind, ...], port: int) -> Wire | None:
        """What a message that needs no op of its own is bound to: its arrival, or the loss of this stage."""
        if port >= len(phases) or phases[port].kind is SlotAction.WEIGHT:
            return None
        phase = phases[port]
        source = self.frame.inbound(phase)
        if source is not None:
            passes = self.messages.mode is Send.RENDEZVOUS and self.frame.remote(source)
            which = Which.ARRIVED if passes else Which.READY
            return Wire(which, int(phase.backward), End.SOURCE, False, port)
        if phase.backward:
            return Wire(Which.READY, 0, End.HERE, False, port)
        return None

    def outputs(self, phases: tuple[SlotKind, ...]) -> None:
        """Send (eager) or post the send (blocking) of what each phase produced."""
        frame, mode = self.frame, self.messages.mode
        for number, phase in enumerate(phases):
            if number not in self.produced or phase.kind is SlotAction.WEIGHT:
                continue
            self.ready[number] = self.produced[number]
            target = frame.outbound(phase)
            if target is None or not frame.remote(target) or mode is Send.RENDEZVOUS:
                continue
            lane, cost = self.messages.send_lanes[phase.backward], 0.0  # type: int, Cost
            if mode is Send.EAGER:
                cost = frame.cost(phase, ChunkPlace(frame.stage, phase.chunk), target)
                if cost == 0:
                    continue
            name = "send" if mode is Send.EAGER else "post send"
            op = TimedOp(name, cost, lane, inputs=(0,))
            self.ready[number] = self.add(op, bind={0: self.produced[number]})

    def framed(self) -> Framed:
        """With only the outputs that give a signal."""
        kept = sorted({*self.ready.values(), *self.posted.values()})
        ready = {phase: kept.index(output) for phase, output in self.ready.items()}
        posted = {phase: kept.index(output) for phase, output in self.posted.items()}
        segment = self.segment or Segment.of("", (), lanes=self.frame.lanes)
        if kept != list(range(self.outputs_so_far)):
            segment = segment.giving(kept)
        return Framed(segment, tuple(self.wires), ready, posted)
