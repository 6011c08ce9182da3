"""What each stage and chunk of a pipeline runs, from a workload that says it once for all stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from stepcast.ir.workload import Layer, Stage, Workload
from stepcast.simulate.schedule import Place, Schedule


class Body(StrEnum):
    """What the body of a uniform workload stands for."""

    STAGE = "stage"  # what every stage runs, as in SimAI
    MODEL = "model"  # the whole model, to be split over the stages


@dataclass(frozen=True, slots=True)
class Chunk:
    """The layers of one chunk: in most micro-batches, in the first and in the last."""

    usual: tuple[Layer, ...]
    first: tuple[Layer, ...]
    last: tuple[Layer, ...]


def chunks_of(workload: Workload, schedule: Schedule, body: Body) -> dict[Place, Chunk]:
    """The layers of every chunk of *schedule*."""
    copies = model_copies(schedule)
    if not workload.uniform:
        if len(workload.stages) != len(copies[0]):
            raise ValueError(
                f"the workload has {len(workload.stages)} pieces, schedule {schedule.name} {len(copies[0])}"
            )
        pieces = [_whole(stage, workload) for stage in workload.stages]
        return {place: piece for copy in copies for place, piece in zip(copy, pieces, strict=True)}
    whole = _whole(workload.stages[0], workload)
    if body is Body.MODEL:
        pieces = _split(whole, len(copies[0]))
        return {place: piece for copy in copies for place, piece in zip(copy, pieces, strict=True)}
    parts = _split(whole, schedule.chunks // len(copies))
    return {place: parts[place.chunk % len(parts)] for copy in copies for place in copy}


def model_copies(schedule: Schedule) -> list[list[Place]]:
    """The places of each copy of the model, from its start to its end; DualPipe runs two copies."""
    copies: list[list[Place]] = []
    for chunk in range(schedule.chunks):
        for stage in range(schedule.stages):
            place: Place | None = Place(stage, chunk)
            assert place is not None
            if schedule.previous(place) is not None:
                continue
            copy: list[Place] = []
            while place is not None:
                copy.append(place)
                place = schedule.following(place)
            copies.append(copy)
    return copies


def _whole(stage: Stage, workload: Workload) -> Chunk:
    return Chunk(
        usual=stage.body_layers(),
        first=stage.body_layers(0),
        last=stage.body_layers(workload.micro_batches - 1),
    )


def _split(whole: Chunk, parts: int) -> list[Chunk]:
    """Consecutive pieces of nearly equal numbers of layers; the same cuts in every micro-batch."""
    count = len(whole.usual)
    if count < parts:
        raise ValueError(f"{count} layers cannot be split into {parts} chunks; use fewer stages or chunks")
    cuts = [round(count * part / parts) for part in range(parts + 1)]

    def piece(layers: Sequence[Layer], part: int) -> tuple[Layer, ...]:
        return tuple(layers[cuts[part] : cuts[part + 1]])

    return [
        Chunk(piece(whole.usual, part), piece(whole.first, part), piece(whole.last, part))
        for part in range(parts)
    ]
