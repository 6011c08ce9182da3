"""What each stage and chunk of a pipeline runs, from a workload that says it once for all stages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise

from stepcast.ir.identity import ByIdentity
from stepcast.ir.workload import Block, Stage, Workload
from stepcast.simulation.lanes import HANDED_ON
from stepcast.simulation.messages import USUAL, SlotKind
from stepcast.simulation.schedule import ChunkPlace, Schedule, SlotAction


class Body(StrEnum):
    """What the body of a uniform workload stands for."""

    STAGE = "stage"  # what every stage runs, as in SimAI
    MODEL = "model"  # the whole model, to be split over the stages


Blocks = tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The blocks of one chunk: in most micro-batches, and by kinds of slots in those that differ."""

    usual: Blocks
    varied: Mapping[SlotAction, Mapping[int, Blocks]]
    in_turn: bool
    final: int
    """The last micro-batch."""

    def bodies(self, kind: SlotAction) -> tuple[Blocks, ...]:
        """All that slots of a *kind* run."""
        return self.usual, *self.varied[kind].values()

    def blocks(self, phase: SlotKind) -> Blocks:
        which = phase.like
        if self.in_turn:
            # A split backward among whole ones may be the first of its kind and the last of all.
            ends = phase.last and phase.kind is not SlotAction.FORWARD
            which = self.final if ends else 0 if phase.first else self.final if phase.last else USUAL
        return self.varied[phase.kind].get(which, self.usual)


def chunks_of(workload: Workload, schedule: Schedule, body: Body) -> dict[ChunkPlace, Chunk]:
    """The layers of every chunk of *schedule*."""
    copies = model_copies(schedule)
    if not workload.uniform:
        if len(workload.stages) != len(copies[0]):
            raise ValueError(
                f"the workload has {len(workload.stages)} pieces, schedule {schedule.name} {len(copies[0])}"
            )
        # Stages that are one object run the same: so do their chunks.
        distinct = {id(stage): stage for stage in workload.stages}
        known = {number: _whole(stage, workload, schedule) for number, stage in distinct.items()}
        pieces = [known[id(stage)] for stage in workload.stages]
        return {place: piece for copy in copies for place, piece in zip(copy, pieces, strict=True)}
    whole = _whole(workload.stages[0], workload, schedule)
    if body is Body.MODEL:
        pieces = _split(whole, len(copies[0]))
        return {place: piece for copy in copies for place, piece in zip(copy, pieces, strict=True)}
    parts = _split(whole, schedule.chunks // len(copies))
    return {place: parts[place.chunk % len(parts)] for copy in copies for place in copy}


@lru_cache(maxsize=256)
def model_copies(schedule: Schedule) -> list[list[ChunkPlace]]:
    """The places of each copy of the model, from its start to its end; DualPipe runs two copies."""
    copies: list[list[ChunkPlace]] = []
    for chunk in range(schedule.chunks):
        for stage in range(schedule.stages):
            place: ChunkPlace | None = ChunkPlace(stage, chunk)
            assert place is not None
            if schedule.previous(place) is not None:
                continue
            copy: list[ChunkPlace] = []
            while place is not None:
                copy.append(place)
                place = schedule.following(place)
            copies.append(copy)
    return copies


def alike(workload: Workload) -> list[int]:
    """For each micro-batch the first one that differs from the usual in the same way, or USUAL."""
    differs: dict[int, list[tuple[int, int, int]]] = {}
    for number, stage in enumerate(workload.stages):
        for each in stage.variations if not stage.in_turn else ():
            differs.setdefault(each.micro_batch, []).append((number, each.position, id(each.layer)))
    first: dict[tuple[tuple[int, int, int], ...], int] = {}
    return [
        first.setdefault(tuple(differs[micro_batch]), micro_batch) if micro_batch in differs else USUAL
        for micro_batch in range(workload.micro_batches)
    ]


def _whole(stage: Stage, workload: Workload, schedule: Schedule) -> Chunk:
    varied = _VARIED.of(stage, _varied, schedule.kinds)
    return Chunk(stage.body, varied, stage.in_turn, workload.micro_batches - 1)


def _varied(stage: Stage, kinds: frozenset[SlotAction]) -> dict[SlotAction, dict[int, Blocks]]:
    bodies = stage.varied_blocks([HANDED_ON[kind] for kind in kinds])
    return dict(zip(kinds, bodies, strict=True))


_VARIED: ByIdentity[dict[SlotAction, dict[int, Blocks]]] = ByIdentity(1024)


def _split(whole: Chunk, parts: int) -> list[Chunk]:
    """Consecutive pieces of nearly equal numbers of layers; the same cuts in every micro-batch."""
    if parts == 1:
        return [whole]
    count = sum(len(block.layers) * block.repeat for block in whole.usual)
    if count < parts:
        raise ValueError(f"{count} layers cannot be split into {parts} chunks; use fewer stages or chunks")
    cuts = [round(count * part / parts) for part in range(parts + 1)]
    found = []
    for start, end in pairwise(cuts):
        usual = _cut(whole.usual, start, end)
        varied: dict[SlotAction, dict[int, Blocks]] = {}
        for kind, bodies in whole.varied.items():
            cut = {which: _cut(blocks, start, end) for which, blocks in bodies.items()}
            # Equal pieces stay one object, so that they are priced once.
            varied[kind] = {which: blocks for which, blocks in cut.items() if blocks != usual}
        found.append(replace(whole, usual=usual, varied=varied))
    return found


def _cut(blocks: Blocks, start: int, end: int) -> Blocks:
    """The layers from *start* to *end* of *blocks*, still folded."""
    found: list[Block] = []
    for block in blocks:
        length = len(block.layers)
        first, skipped = divmod(max(start, 0), length)
        last, taken = divmod(min(end, length * block.repeat), length)
        if first == last and skipped < taken:
            found.append(Block(block.layers[skipped:taken]))
        elif first < last:
            if skipped:
                found.append(Block(block.layers[skipped:]))
            if whole := last - first - (skipped > 0):
                found.append(Block(block.layers, whole))
            if taken:
                found.append(Block(block.layers[:taken]))
        start, end = start - length * block.repeat, end - length * block.repeat
        if end <= 0:
            break
    return tuple(found)
