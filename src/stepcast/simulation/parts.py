"""What the calls of a pipeline are, before it is known which segments they call."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from stepcast.simulation.distinct import distinct
from stepcast.simulation.messages import USUAL, Framed, Phase
from stepcast.simulation.pieces import Ints
from stepcast.simulation.schedule import Kind, Place, Schedule


class Meeting(NamedTuple):
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
    phases: tuple[Phase, ...]
    before: tuple[Phase, ...]
    after: tuple[Phase, ...]
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


class Message(NamedTuple):
    """A segment that a channel between two stages calls."""

    kind: Kind
    source: Place
    target: Place

    @property
    def name(self) -> str:
        return "message"


Part: TypeAlias = Slots | InRound | Message


def calls_of(
    schedule: Schedule, stage: int, like: Ints, open_and_close: bool
) -> tuple[list[tuple[Phase, ...]], Ints, Ints, Ints]:
    """The kinds of calls of a stage (the empty one first), the kind of each call, its micro-batches, and the
    first call of each kind but the empty one.

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
    likes, _, which = distinct(like - USUAL)
    slot = 1 + ((what * 2 + first) * 2 + last) * len(likes) + which[batch]
    slots_known = len(Kind) * schedule.chunks * 4 * len(likes) + 1
    second = np.concatenate([[False], with_next[:-1] > 0])
    starts = np.flatnonzero(~second)
    paired = with_next[starts] > 0
    partner = np.where(paired, starts + 1, starts)
    batches = np.stack([batch[starts], batch[partner]], axis=1)
    number = slot[starts]
    if paired.any():
        number = number * slots_known + np.where(paired, slot[partner], 0)
    _, where, code = distinct(number)
    phases: list[tuple[Phase, ...]] = [()]
    for at in starts[where].tolist():
        pair = range(at, at + 1 + int(with_next[at]))
        phases.append(
            tuple(
                [
                    Phase(Kind(kind[i]), int(chunk[i]), bool(first[i]), bool(last[i]), int(like[batch[i]]))
                    for i in pair
                ]
            )
        )
    code = code + 1
    if open_and_close:
        code = np.concatenate([[0], code, [0]])
        batches = np.concatenate([batches[:1], batches, batches[-1:]])
    return phases, code, batches, where
