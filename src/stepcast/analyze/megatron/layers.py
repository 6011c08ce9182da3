"""Time of each layer, where tensor-parallel collectives mark its end: two in each layer and direction."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from stepcast.analyze.megatron.events import Operation
from stepcast.analyze.recording import BlockKind, Recording

PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Layers of one stage. *forward_s* and *backward_s* are means over its layers, computation only;
    *each_forward_s* and *each_backward_s* are wall times from layer to layer, empty where nothing marks
    them."""

    stage: int
    layers: int
    forward_s: float
    backward_s: float
    each_forward_s: tuple[float, ...]
    each_backward_s: tuple[float, ...]

    def facts(self) -> dict[str, object]:
        return {
            "stage": self.stage,
            "layers": self.layers,
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "each_forward_s": list(self.each_forward_s),
            "each_backward_s": list(self.each_backward_s),
        }


def stage_layers(operations: Mapping[int, list[Operation]], recording: Recording) -> tuple[StageLayers, ...]:
    """One entry per stage whose number of layers is known."""
    found = []
    for stage in sorted({record.stage for record in recording.ranks}):
        layers = _layers_on(recording, stage)
        if not layers:
            continue
        mine = [record for record in recording.ranks if record.stage == stage]
        batches = max(1, recording.micro_batches)
        forward_s, backward_s = (
            mean(recording.compute_s(record, kind) for record in mine) / layers / batches
            for kind in (BlockKind.FORWARD, BlockKind.BACKWARD)
        )
        listed = [operation for record in mine for operation in operations[record.rank]]
        found.append(
            StageLayers(
                stage,
                layers,
                forward_s,
                backward_s,
                _each(listed, "forward_step", layers),
                _each(listed, "backward_step", layers)[::-1],
            )
        )
    return tuple(found)


def _layers_on(recording: Recording, stage: int) -> int:
    known = recording.facts.get("layers_on")
    if isinstance(known, dict) and stage in known:
        return int(known[stage])
    layers = recording.facts.get("layers")
    return layers // recording.layout.pp if isinstance(layers, int) else 0


def _each(operations: list[Operation], name: str, layers: int) -> tuple[float, ...]:
    """The mean wall time of each layer in the order of running, over ranks and micro-batches."""
    rows = []
    for operation in operations:
        if operation.name != name or not operation.parts:
            continue
        usual, count = Counter(event.name for event in operation.parts).most_common(1)[0]
        if count != PER_LAYER * layers:
            continue
        marks = [event for event in operation.parts if event.name == usual]
        before = [event for event in operation.parts if event.end_s <= marks[0].start_s]
        cursor_s = before[-1].end_s if before else operation.start_s
        row = []
        for event in marks[PER_LAYER - 1 :: PER_LAYER]:
            row.append(event.end_s - cursor_s)
            cursor_s = event.end_s
        rows.append(row)
    return tuple(mean(column) for column in zip(*rows, strict=True))
