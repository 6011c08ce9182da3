"""The blocks of each chunk of a pipeline."""

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise

import numpy as np

from stepcast.ir.types import ByIdentity, cached_property, dataclass
from stepcast.ir.workload import FIRST, LAST, Block, Blocks, Stage, Workload, count_layers, unfold_blocks
from stepcast.simulation.lanes import PHASES_OF
from stepcast.simulation.lowering import SlotOps, list_slot
from stepcast.simulation.messages import DEFAULT_MICRO_BATCH, SlotKind
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction


class Body(StrEnum):
    """The meaning of the body of a uniform workload."""

    STAGE = "stage"  # what every stage runs, as in SimAI
    MODEL = "model"  # the whole model, to be split over the stages


SlotKey = tuple[SlotAction, int]
"""The action of a slot, and its micro-batch if that runs other ops than the usual one."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The blocks of one model chunk: in most micro-batches, and by actions in those that differ."""

    default: Blocks
    actions: tuple[SlotAction, ...]
    varied: Mapping[SlotKey, Blocks]

    def find_slot(self, slot: SlotKind) -> SlotKey:
        """Return the key of the ops of *slot* among ``slots``."""
        kind, which = slot.kind, slot.representative
        if slot.first and kind is SlotAction.FORWARD and (kind, FIRST) in self.varied:
            which = FIRST
        elif slot.last and (kind, LAST) in self.varied:
            which = LAST
        return kind, which if (kind, which) in self.varied else DEFAULT_MICRO_BATCH

    @property
    def variants(self) -> tuple[SlotKey, ...]:
        """Equal for chunks whose ``find_slot`` gives the same."""
        return tuple(self.varied)

    def blocks(self, slot: SlotKind) -> Blocks:
        return self.varied.get(self.find_slot(slot), self.default)

    @cached_property
    def slots(self) -> dict[SlotKey, SlotOps]:
        """The ops of each slot, by action and micro-batch."""
        bodies = {(action, DEFAULT_MICRO_BATCH): self.default for action in self.actions} | {**self.varied}
        return {key: list_slot(blocks, key[0]) for key, blocks in bodies.items()}


def split_chunks(workload: Workload, schedule: Schedule, body: Body) -> tuple[list[Chunk], tuple[int, ...]]:
    """Return the different chunks of *schedule*, and the number of that of each place, chunk by chunk of each stage."""
    copies = schedule.copies
    if not workload.uniform:
        if len(workload.stages) != len(copies[0]):
            raise ValueError(
                f"the workload has {len(workload.stages)} pieces, schedule {schedule.name} {len(copies[0])}"
            )
        # Stages that are one object run the same: so do their chunks.
        distinct = {id(stage): stage for stage in workload.stages}
        number = {key: index for index, key in enumerate(distinct)}
        own = [number[id(stage)] for stage in workload.stages]
        chunks = [_make_chunk(stage, schedule) for stage in distinct.values()]
        return chunks, tuple([own[position] for position in find_positions(schedule)])
    whole = _make_chunk(workload.stages[0], schedule)
    if body is Body.MODEL:
        return _split_chunk(whole, len(copies[0])), find_positions(schedule)
    chunks = _split_chunk(whole, schedule.chunks // len(copies))
    return chunks, tuple([chunk % len(chunks) for chunk in range(schedule.chunks)]) * schedule.stages


@lru_cache(maxsize=256)
def find_positions(schedule: Schedule) -> tuple[int, ...]:
    """Return the position in the model of each place, chunk by chunk of each stage. The chunks of a stage follow one
    another in the model, or belong to one copy of it after the other.
    """
    position = np.empty(schedule.stages * schedule.chunks, np.int64)
    for copy in schedule.copies:
        position[copy] = np.arange(len(copy))
    return tuple(position.tolist())


def model_copies(schedule: Schedule) -> list[list[ChunkPlace]]:
    """Return the places of each copy of the model, from its start to its end."""
    return [[ChunkPlace(*divmod(place, schedule.chunks)) for place in copy.tolist()] for copy in schedule.copies]


def find_representatives(workload: Workload, micro_batches: int) -> tuple[int, ...]:
    """Return for each micro-batch of the schedule the first one that differs from the default in the same way, or
    DEFAULT_MICRO_BATCH; nothing where none differs. A schedule from a file may have more than the workload.
    """
    differs: dict[int, list[tuple[int, int]]] = {}
    for number, stage in enumerate(workload.stages):
        for which, blocks in stage.varied:
            if which >= 0:
                differs.setdefault(which, []).append((number, id(blocks)))
    if not differs:
        return ()
    first: dict[tuple[tuple[int, int], ...], int] = {}
    representatives = [DEFAULT_MICRO_BATCH] * micro_batches
    for micro_batch in range(min(workload.micro_batches, micro_batches)):
        if micro_batch in differs:
            representatives[micro_batch] = first.setdefault(tuple(differs[micro_batch]), micro_batch)
    return tuple(representatives)


_CHUNKS: ByIdentity[Chunk] = ByIdentity(8192)


def _make_chunk(stage: Stage, schedule: Schedule) -> Chunk:
    """Return the chunk of *stage*, one object for the same stage."""

    def make(stage: Stage, actions: frozenset[SlotAction]) -> Chunk:
        order = tuple(sorted(actions))
        every = [(action, which, blocks) for action in order for which, blocks in stage.varied]
        varied = {(action, which): blocks for action, which, blocks in every if _differs(stage, action, which, blocks)}
        return Chunk(stage.body, order, varied)

    return _CHUNKS.of(stage, make, schedule.actions)


def _differs(stage: Stage, action: SlotAction, which: int, blocks: Blocks) -> bool:
    """Whether an *action* of micro-batch *which*, whose body is *blocks*, runs other ops than usual."""
    if which in (FIRST, LAST):
        return (action is SlotAction.FORWARD) == (which == FIRST) and action is not SlotAction.INPUT
    pairs = zip(unfold_blocks(stage.body), unfold_blocks(blocks), strict=True)
    return any(usual.ops(phase) is not other.ops(phase) for usual, other in pairs for phase in PHASES_OF[action])


def _split_chunk(whole: Chunk, parts: int) -> list[Chunk]:
    """Return consecutive parts of nearly equal numbers of layers; the same cuts in every micro-batch."""
    if parts == 1:
        return [whole]
    count = count_layers(whole.default)
    if count < parts:
        raise ValueError(f"{count} layers cannot be split into {parts} chunks; use fewer stages or chunks")
    chunks = []
    for start, end in pairwise([round(count * part / parts) for part in range(parts + 1)]):
        default = _cut_blocks(whole.default, start, end)
        cut = {key: _cut_blocks(blocks, start, end) for key, blocks in whole.varied.items()}
        # Equal parts stay one object, so that they are priced once.
        varied = {key: blocks for key, blocks in cut.items() if blocks != default}
        chunks.append(replace(whole, default=default, varied=varied))
    return chunks


def _cut_blocks(blocks: Blocks, start: int, end: int) -> Blocks:
    """Return the layers from *start* to *end* of *blocks*, still folded."""
    cut: list[Block] = []
    for block in blocks:
        length = len(block.layers)
        first, skipped = divmod(max(start, 0), length)
        last, taken = divmod(min(end, length * block.repeat), length)
        if first == last and skipped < taken:
            cut.append(Block(block.layers[skipped:taken]))
        elif first < last:
            if skipped:
                cut.append(Block(block.layers[skipped:]))
            if repeat := last - first - (skipped > 0):
                cut.append(Block(block.layers, repeat))
            if taken:
                cut.append(Block(block.layers[:taken]))
        start, end = start - length * block.repeat, end - length * block.repeat
        if end <= 0:
            break
    return tuple(cut)
