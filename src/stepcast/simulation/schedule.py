"""A pipeline schedule: for each stage, the order of its forward and backward slots.

A stage holds *chunks* pieces of the model. The placement says where the pieces are along the model; a micro-batch
visits them in that order forward and in the opposite order backward.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import IntArray
from stepcast.ir.schedules import PiecePlacement
from stepcast.ir.types import cached_property, dataclass, require_counts


class ScheduleError(ValueError):
    """A schedule that cannot be made, or one that is not a schedule."""


class SlotAction(IntEnum):
    """The action of a slot. A backward is either whole (B) or split into its two halves (I, then W)."""

    FORWARD = 0
    BACKWARD = 1
    INPUT = 2
    WEIGHT = 3

    @property
    def letter(self) -> str:
        return "FBIW"[self]


class Slot(NamedTuple):
    """One micro-batch through one chunk of a stage, forward or backward."""

    kind: SlotAction
    micro_batch: int
    chunk: int = 0
    with_next: bool = False  # interleaved with the slot after it (DualPipe overlaps a forward with a backward)

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.letter}{self.micro_batch}{chunk}"


class ChunkPlace(NamedTuple):
    """One chunk of one stage."""

    stage: int
    chunk: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """The slots of every stage in the order in which the stage runs them: *slots* of all stages, one row for each with
    the fields of a ``Slot``, stage by stage, and the number of each stage.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    placement: PiecePlacement
    slots: IntArray
    counts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        name: str,
        stages: int,
        micro_batches: int,
        chunks: int,
        placement: PiecePlacement,
        orders: Sequence[Sequence[Slot] | IntArray],
    ) -> "Schedule":
        """Return the schedule with the order of each stage, as slots or as rows."""
        slots = np.concatenate([np.array(order, np.int64).reshape(-1, len(Slot._fields)) for order in orders])
        return cls(name, stages, micro_batches, chunks, placement, slots, tuple(map(len, orders)))

    def __hash__(self) -> int:
        return hash((self.name, self.stages, self.micro_batches, self.chunks))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Schedule)
            and hash(self) == hash(other)
            and (self.placement, self.counts) == (other.placement, other.counts)
            and np.array_equal(self.slots, other.slots)
        )

    def __post_init__(self) -> None:
        require_counts(self, 1, "stages", "micro_batches", "chunks")
        if len(self.counts) != self.stages:
            raise ScheduleError(f"{self.stages} stages but {len(self.counts)} orders")
        if self.placement is not PiecePlacement.LOOP and self.chunks != 2:
            raise ScheduleError(f"placement {self.placement} needs 2 chunks, not {self.chunks}")
        if self.placement is PiecePlacement.TWO_WAY and self.micro_batches % 2:
            raise ScheduleError(f"two-way placement needs an even number of micro-batches, not {self.micro_batches}")

    @cached_property
    def actions(self) -> frozenset[SlotAction]:
        """The actions of its slots."""
        return frozenset(map(SlotAction, np.flatnonzero(np.bincount(self.slots[:, 0])).tolist()))

    @cached_property
    def has_pairs(self) -> bool:
        """Whether some slots run interleaved with the next one."""
        return bool(self.slots[:, 3].any())

    @cached_property
    def orders(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots of each stage."""
        ends = np.cumsum([0, *self.counts]).tolist()
        kinds = list(SlotAction)
        slots = [Slot(kinds[kind], batch, chunk, bool(pair)) for kind, batch, chunk, pair in self.slots.tolist()]
        return tuple([tuple(slots[first:end]) for first, end in pairwise(ends)])

    def count_in_flight(self, until: SlotAction = SlotAction.WEIGHT) -> tuple[int, ...]:
        """Return for each stage the most chunk activations held at once, from their forward to their backward.

        A split backward releases them at its weight gradient, or at its input gradient with ``until=SlotAction.INPUT``.
        """
        action = self.slots[:, 0]
        releases = (action == SlotAction.BACKWARD) | (action == until)
        held = np.cumsum((action == SlotAction.FORWARD).astype(np.int64) - releases)
        # A stage has released all of its own when the next one begins.
        return tuple([int(part.max(initial=0)) for part in np.split(held, np.cumsum(self.counts)[:-1])])

    @cached_property
    def copies(self) -> list[IntArray]:
        """The places of each copy of the model, from its start to its end. They are numbered chunk by chunk of each
        stage. DualPipe runs two copies.
        """
        number = np.arange(self.stages * self.chunks).reshape(self.stages, self.chunks).T
        is_loop = self.placement is PiecePlacement.LOOP
        ways = [own if is_loop or chunk == 0 else own[::-1] for chunk, own in enumerate(number)]
        return ways if self.placement is PiecePlacement.TWO_WAY else [np.concatenate(ways)]

    @cached_property
    def neighbours(self) -> IntArray:
        """The place before each in the model and the one after it, or -1."""
        near = np.full((2, self.stages * self.chunks), -1, np.int64)
        for copy in self.copies:
            near[0, copy[1:]], near[1, copy[:-1]] = copy[:-1], copy[1:]
        return near

    def previous(self, place: ChunkPlace) -> ChunkPlace | None:
        """Return where a micro-batch was before it came to *place*; None at the start of the model."""
        return self._step(place, 0)

    def following(self, place: ChunkPlace) -> ChunkPlace | None:
        """Return where a micro-batch goes after *place*; None at the end of the model."""
        return self._step(place, 1)

    def _step(self, place: ChunkPlace, way: int) -> ChunkPlace | None:
        number = int(self.neighbours[way, place.stage * self.chunks + place.chunk])
        return None if number < 0 else ChunkPlace(*divmod(number, self.chunks))

    def micro_batches_of(self, chunk: int) -> range:
        """Return the micro-batches that pass through *chunk*."""
        if self.placement is not PiecePlacement.TWO_WAY:
            return range(self.micro_batches)
        half = self.micro_batches // 2
        return range(chunk * half, (chunk + 1) * half)
