"""What one stage of a pipeline runs in a step: its slots in the schedule's order, with their messages."""

from collections.abc import Iterable, Iterator

from stepcast.inputs.chakra.plan import BODY, EPILOGUE, PROLOGUE
from stepcast.ir.workload import Layer, Phase, Workload
from stepcast.outputs.chakra_chain import Chain, Node, Where
from stepcast.simulation.chunks import model_copies
from stepcast.simulation.schedule import Kind, Place, Schedule, Slot

ACTIVATIONS, GRADIENTS = 0, 1
BACKWARD = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
PHASES = {
    Kind.FORWARD: (Phase.FORWARD,),
    Kind.BACKWARD: BACKWARD,
    Kind.INPUT: (Phase.INPUT_GRADIENT,),
    Kind.WEIGHT: (Phase.WEIGHT_GRADIENT,),
}
# A piece of the workload: its stage, and the first and last layer of the body.
Piece = tuple[int, int, int]


class StageNodes:
    """The nodes of the ranks at one place of the pipeline."""

    def __init__(self, workload: Workload, schedule: Schedule, coordinate: int, answered: bool) -> None:
        self._workload, self._schedule, self._coordinate = workload, schedule, coordinate
        self._chain = Chain(workload.layout, coordinate, answered)
        self._pieces = _pieces(workload, schedule, coordinate)
        self.held = tuple(sorted({piece[0] for piece in self._pieces.values()}))
        stated = workload.boundary_bytes
        self._size_bytes = workload.largest_activation_bytes if stated is None else stated
        self._usual = {stage: workload.stages[stage].body_layers() for stage in self.held}

    def nodes(self) -> Iterator[Node]:
        stages = [(index, self._workload.stages[index]) for index in self.held]
        for index, stage in stages:
            yield from self._once(index, enumerate(stage.prologue), PROLOGUE, (Phase.FORWARD,))
        for slot in self._schedule.orders[self._coordinate]:
            yield from self._slot(slot)
        self._chain.finish()
        for index, stage in stages:
            backwards = reversed(list(enumerate(stage.prologue)))
            yield from self._once(index, backwards, PROLOGUE, BACKWARD)
            yield from self._once(index, enumerate(stage.epilogue), EPILOGUE, tuple(Phase))

    def _once(
        self, stage: int, layers: Iterable[tuple[int, Layer]], section: str, phases: tuple[Phase, ...]
    ) -> Iterator[Node]:
        for position, layer in layers:
            for phase in phases:
                yield from self._chain.layer(layer, Where(stage, section, position, phase))

    def _slot(self, slot: Slot) -> Iterator[Node]:
        place = Place(self._coordinate, slot.chunk)
        before, after = self._schedule.previous(place), self._schedule.following(place)
        if slot.kind is Kind.FORWARD:
            yield from self._received(slot, before, ACTIVATIONS)
            yield from self._ops(slot)
            yield from self._sent(slot, after, ACTIVATIONS)
        else:
            if slot.kind is not Kind.WEIGHT:
                yield from self._received(slot, after, GRADIENTS)
            yield from self._ops(slot)
            if slot.kind is not Kind.WEIGHT:
                yield from self._sent(slot, before, GRADIENTS)

    def _ops(self, slot: Slot) -> Iterator[Node]:
        index, start, stop = self._pieces[Place(self._coordinate, slot.chunk)]
        layers = self._layers(index, slot.micro_batch)
        positions = range(start, stop)
        for position in positions if slot.kind is Kind.FORWARD else reversed(positions):
            for phase in PHASES[slot.kind]:
                where = Where(index, BODY, position, phase, slot.micro_batch)
                yield from self._chain.layer(layers[position], where)

    def _layers(self, index: int, micro_batch: int) -> tuple[Layer, ...]:
        stage = self._workload.stages[index]
        if any(variation.micro_batch == micro_batch for variation in stage.variations):
            return stage.body_layers(micro_batch)
        return self._usual[index]

    def _received(self, slot: Slot, source: Place | None, direction: int) -> Iterator[Node]:
        if source is not None and source.stage != self._coordinate:
            tag = self._tag(slot, source, direction)
            yield self._chain.receive(direction, source.stage, self._size_bytes, tag)

    def _sent(self, slot: Slot, target: Place | None, direction: int) -> Iterator[Node]:
        if target is not None and target.stage != self._coordinate:
            tag = self._tag(slot, Place(self._coordinate, slot.chunk), direction)
            yield self._chain.send(direction, target.stage, self._size_bytes, tag)

    def _tag(self, slot: Slot, source: Place, direction: int) -> int:
        """The same on both sides: the micro-batch, and the chunk it comes from."""
        return (slot.micro_batch * self._schedule.chunks + source.chunk) * 2 + direction


def _pieces(workload: Workload, schedule: Schedule, coordinate: int) -> dict[Place, Piece]:
    """What of the workload each chunk runs; a stage given once for all is cut into its chunks."""
    copies = model_copies(schedule)
    if workload.uniform:
        count = workload.stages[0].body_layer_count
        parts = schedule.chunks // len(copies)
        if count < parts > 1:
            raise ValueError(f"{count} layers cannot be split into {parts} chunks; use fewer chunks")
        cuts = [round(count * part / parts) for part in range(parts + 1)]
        return {
            Place(coordinate, chunk): (0, cuts[chunk % parts], cuts[chunk % parts + 1])
            for chunk in range(schedule.chunks)
        }
    if len(workload.stages) != len(copies[0]):
        raise ValueError(
            f"the workload has {len(workload.stages)} pieces, schedule {schedule.name} {len(copies[0])}"
        )
    return {
        place: (index, 0, workload.stages[index].body_layer_count)
        for copy in copies
        for index, place in enumerate(copy)
        if place.stage == coordinate
    }
