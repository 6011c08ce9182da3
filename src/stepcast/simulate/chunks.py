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
    places = model_order(schedule)
    if not workload.uniform:
        if len(workload.stages) != len(places):
            raise ValueError(
                f"the workload has {len(workload.stages)} pieces and schedule {schedule.name} {len(places)}"
            )
        return {place: _whole(stage, workload) for place, stage in zip(places, workload.stages, strict=True)}
    whole = _whole(workload.stages[0], workload)
    if body is Body.MODEL:
        return dict(zip(places, _split(whole, len(places)), strict=True))
    parts = _split(whole, schedule.chunks)
    return {place: parts[place.chunk] for place in places}


def model_order(schedule: Schedule) -> list[Place]:
    """Every place, from the start of the model to its end."""
    places = [Place(stage, chunk) for chunk in range(schedule.chunks) for stage in range(schedule.stages)]
    ordered: list[Place] = []
    for start in places:
        if schedule.previous(start) is None:
            place: Place | None = start
            while place is not None:
                ordered.append(place)
                place = schedule.following(place)
    return ordered


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
