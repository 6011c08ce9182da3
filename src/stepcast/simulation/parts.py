"""What the calls of a pipeline are, before it is known which segments they call."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from stepcast.simulation.distinct import distinct
from stepcast.simulation.messages import USUAL, Framed, Send, SlotKind
from stepcast.simulation.pieces import Ints
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction


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
