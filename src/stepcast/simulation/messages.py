"""Messages between stages: the ops around the segment of a call that send and receive."""

from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import NamedTuple

from stepcast.ir.types import dataclass
from stepcast.simulation.schedule import SlotAction
from stepcast.simulation.segments import NO_LANE, Cost, ProgramError, Segment, TimedOp

DEFAULT_MICRO_BATCH = -1
BACKWARDS = (SlotAction.BACKWARD, SlotAction.INPUT)
"""Actions that take a gradient and pass one on."""


class SlotKind(NamedTuple):
    """The kind of a schedule slot; slots of one kind run the same segment."""

    kind: SlotAction
    chunk: int
    first: bool  # the first slot of this action and chunk on the stage
    last: bool  # the last one, of whole backwards and weight halves together: gradients can be reduced after it
    representative: int = DEFAULT_MICRO_BATCH  # the first of the micro-batches that run the same as this one


class Send(StrEnum):
    """When a message moves, and who waits for it."""

    EAGER = "eager"
    """As soon as it is ready, in the sender's lane alone; only the slot that needs it waits for it."""
    RENDEZVOUS = "rendezvous"
    """When it is ready and the receiver has begun the slot before the one that needs it (one receive ahead), in a lane
    of its own between the two stages. Computing goes on."""
    BLOCKING = "blocking"
    """When both sides have come to it; both stop computing until it has passed (the send of a slot and the receive of
    the next one are posted together, as Megatron-LM does). Schedules that run ahead of their receivers deadlock, as
    they would in a real run without buffers: more than one chunk, ZB-H2."""


@dataclass(frozen=True, eq=False)
class Messages:
    """The lanes that messages take and what they cost."""

    cost: Cost  # of a message between any two stages
    mode: Send = Send.EAGER
    compute_lane: int = 0
    send_lanes: tuple[int, int] = (1, 2)  # for activations and for gradients
    receive_lanes: tuple[int, int] = (3, 4)

    def __post_init__(self) -> None:
        lanes = (self.compute_lane, *self.send_lanes, *self.receive_lanes)
        if self.mode is Send.BLOCKING and len(set(lanes)) < len(lanes):
            raise ProgramError(f"blocking messages need five different lanes, not {lanes}")


FREE = Messages(0.0)
"""Messages that take no time and no lane."""
LOCAL: Cost = "local"
"""In place of its cost: the message stays on its stage."""


class Passage(NamedTuple):
    """The way of a slot's message to its stage and from it: none (None), LOCAL, or at a cost."""

    action: SlotAction
    comes: Cost
    goes: Cost

    @property
    def direction(self) -> int:
        """0 forward, 1 backward."""
        return int(self.action in BACKWARDS)

    @property
    def receives(self) -> bool:
        return self.comes is not None and self.comes != LOCAL

    @property
    def sends(self) -> bool:
        return self.goes is not None and self.goes != LOCAL


class CallContext(NamedTuple):
    """The passages of the slots of a call, and of the calls before and after it on its stage."""

    own: tuple[Passage, ...]
    before: tuple[Passage, ...] = ()
    after: tuple[Passage, ...] = ()

    def with_cost(self, cost: Cost) -> "CallContext":
        """Return the same passages with messages between stages at *cost*."""

        def price(passage: Passage) -> Passage:
            comes = cost if passage.receives else passage.comes
            return Passage(passage.action, comes, cost if passage.sends else passage.goes)

        return CallContext(*[tuple(map(price, part)) for part in self])


class MessageSignal(IntEnum):
    """The signal of another call that an input waits for."""

    READY = 0  # the message of a place has arrived (eager), or its sender has posted it
    POSTED = 1  # the receive of a place has been posted
    ARRIVED = 2  # the message of a place has passed (rendezvous)


class Wire(NamedTuple):
    """A signal for the micro-batch of a slot that an input of a call waits for, or that an output gives."""

    signal: int
    direction: int  # 0 forward, 1 backward
    way: int  # to the place: 0 before that of the slot in the model, 1 after it, -1 the same
    slot: int
    move: int = 0  # to the call whose slot it is: -1 the one before this one, 1 the one after it
    output: int = 0


NOWHERE = Wire(-1, 0, -1, 0)
"""An input that waits for nothing."""


@dataclass(frozen=True, eq=False)
class CallFrame:
    """A segment with the ops of its messages, the signal of each input, and those that its outputs give."""

    context: CallContext
    segment: Segment
    wires: tuple[Wire, ...]
    given: tuple[Wire, ...]


def build_frame(base: Segment | None, context: CallContext, messages: Messages, lanes: int) -> CallFrame:
    """Put the ops of messages around *base*, which runs the slots of *context*: its input and output k belong to slot
    k.
    """
    builder = _FrameBuilder(messages, lanes)
    if messages.mode is Send.BLOCKING:
        builder.send_and_receive(context)
    if messages.mode is Send.RENDEZVOUS:
        builder.post_receives(context.after)
    if base is not None:
        for number, passage in enumerate(context.own):
            if passage.comes is not None and base.inputs <= number:
                raise ProgramError(f"segment {base.name} has no input {number}")
            if passage.goes is not None and base.outputs <= number:
                raise ProgramError(f"segment {base.name} has no output {number}")
        first, arrived = builder.append(base, builder.arrived), builder.arrived
        builder.wires += [builder.wire_input(context.own, port) for port in range(base.inputs) if port not in arrived]
        builder.produced = {port: first + port for port in range(base.outputs)}
    builder.send_outputs(context.own)
    if messages.mode is Send.BLOCKING:
        builder.post_receives(context.after)
    outputs = sorted({*builder.ready.values(), *builder.posted.values()})
    parts = (builder.ready, context.own), (builder.posted, context.after)  # of this call, and of the next
    given = [
        Wire(move, passages[slot].direction, -1, slot, move, outputs.index(output))
        for move, (part, passages) in enumerate(parts)
        for slot, output in part.items()
    ]
    segment = builder.segment or Segment.of("", (), lanes=lanes)
    if outputs != list(range(builder.outputs)):
        segment = segment.with_outputs(outputs)
    return CallFrame(context, segment, tuple(builder.wires), tuple(given))


TEMPLATE_LANES = 5


@lru_cache(maxsize=4096)
def frame_template(mode: Send, context: CallContext) -> CallFrame:
    """Return the frame around any segment with one input and one output for each slot; messages cost 1."""
    count = len(context.own)
    ops = [TimedOp("", 0.0, inputs=(number,)) for number in range(count)]
    base = Segment.of("", ops, lanes=TEMPLATE_LANES, inputs=count, outputs=range(count)) if count else None
    return build_frame(base, context, Messages(1.0, mode), TEMPLATE_LANES)


@lru_cache(maxsize=1024)
def _single_op(op: TimedOp, lanes: int) -> Segment:
    """Return one object for the same op, so that what it is joined to is joined once."""
    return Segment.of("", (op,), lanes=lanes, inputs=len(op.inputs), outputs=(0,))


class _FrameBuilder:
    """Builds one frame from its first op to its last."""

    def __init__(self, messages: Messages, lanes: int) -> None:
        self.messages, self.lanes = messages, lanes
        self.segment: Segment | None = None
        self.outputs = 0
        self.wires: list[Wire] = []
        self.arrived: dict[int, int] = {}
        self.produced: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.posted: dict[int, int] = {}

    def append(self, segment: Segment, bind: dict[int, int]) -> int:
        """Append *segment*; return its first output."""
        self.segment = self.segment.then(segment, bind) if self.segment else segment
        first = self.outputs
        self.outputs += segment.outputs
        return first

    def add(self, op: TimedOp, bind: dict[int, int] | None = None, wire: Wire | None = None) -> int:
        """Append one op; return the output that is its end."""
        if wire:
            self.wires.append(wire)
        return self.append(_single_op(op, self.lanes), bind or {})

    def send_and_receive(self, context: CallContext) -> None:
        """Add the messages that the call before this one posted: its own and those that this call needs."""
        waits = []
        for number, passage in enumerate(context.before):
            if passage.sends:
                op = TimedOp("send", passage.goes, self.messages.send_lanes[passage.direction], inputs=(0,))
                wire = Wire(MessageSignal.POSTED, passage.direction, 1 - passage.direction, number, -1)
                waits.append(self.add(op, wire=wire))
        for number, passage in enumerate(context.own):
            if passage.receives:
                op = TimedOp("receive", passage.comes, self.messages.receive_lanes[passage.direction], inputs=(0,))
                wire = Wire(MessageSignal.READY, passage.direction, passage.direction, number)
                self.arrived[number] = self.add(op, wire=wire)
                waits.append(self.arrived[number])
        if waits:
            op = TimedOp("wait for messages", 0.0, self.messages.compute_lane, inputs=tuple(range(len(waits))))
            self.add(op, bind=dict(enumerate(waits)))

    def post_receives(self, after: tuple[Passage, ...]) -> None:
        """Be ready for the messages of the next call from here on."""
        blocking = self.messages.mode is Send.BLOCKING
        for number, passage in enumerate(after):
            if passage.receives:
                lane = self.messages.receive_lanes[passage.direction] if blocking else NO_LANE
                self.posted[number] = self.add(TimedOp("post receive", 0.0, lane, lanes=(self.messages.compute_lane,)))

    def wire_input(self, own: tuple[Passage, ...], port: int) -> Wire:
        """Return what an input without an op of its own waits for: its message, or the loss of this stage."""
        if port >= len(own) or own[port].action is SlotAction.WEIGHT:
            return NOWHERE
        passage = own[port]
        if passage.comes is not None:
            passes = self.messages.mode is Send.RENDEZVOUS and passage.receives
            signal = MessageSignal.ARRIVED if passes else MessageSignal.READY
            return Wire(signal, passage.direction, passage.direction, port)
        return Wire(MessageSignal.READY, 0, -1, port) if passage.direction else NOWHERE

    def send_outputs(self, own: tuple[Passage, ...]) -> None:
        """Send (eager) or post the send (blocking) of what each slot produced."""
        mode = self.messages.mode
        for number, passage in enumerate(own):
            if number not in self.produced or passage.action is SlotAction.WEIGHT:
                continue
            self.ready[number] = self.produced[number]
            free = mode is Send.EAGER and passage.goes == 0
            if passage.sends and mode is not Send.RENDEZVOUS and not free:
                name, cost = ("send", passage.goes) if mode is Send.EAGER else ("post send", 0.0)
                op = TimedOp(name, cost, self.messages.send_lanes[passage.direction], inputs=(0,))
                self.ready[number] = self.add(op, bind={0: self.produced[number]})
