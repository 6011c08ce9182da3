"""A schedule and the segments of its stages, joined into one program.

One rank per stage; rendezvous messages add one for each pair of stages and direction, named after them. A
call runs one slot, or two that are interleaved; its segment has one input and one output for each of them:
the activation or gradient that it needs, and the one that it makes. Who calls what when depends on the
schedule alone and is worked out once for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stepcast.ir.identity import ByIdentity
from stepcast.simulation.arrays import Program
from stepcast.simulation.messages import FREE, Frame, Messages, SlotKind
from stepcast.simulation.parts import ChannelMessage, InRound, Part, RoundTemplate, Slots
from stepcast.simulation.pieces import Cost, Piece, Segment, TimedOp
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction
from stepcast.simulation.skeleton import skeleton_of

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
