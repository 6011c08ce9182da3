"""Changed copies of a Workload: what a user states that the file leaves out."""

from dataclasses import replace

from stepcast.ir.check import require
from stepcast.ir.work import Recorded
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload

# Note of a workload whose file holds one layer of several: index of that block in the body.
LAYER_BLOCK = "layer_block"


def repeat_layers(workload: Workload, count: int) -> Workload:
    """The workload with its one model layer run *count* times."""
    note = workload.note(LAYER_BLOCK)
    require(note is not None, "this workload does not mark which rows are one model layer")
    require(count >= 1, f"a model has at least one layer, not {count}")
    at = int(note or 0)
    stage = workload.stages[0]
    body = tuple(
        Block(block.layers, count) if index == at else block for index, block in enumerate(stage.body)
    )
    return replace(workload, stages=(replace(stage, body=body), *workload.stages[1:]))


def scale_backward(workload: Workload, factor: float) -> Workload:
    """Backward compute times as *factor* x forward, halved between input and weight gradient."""
    require(0 <= factor <= 1e6, f"a backward factor is zero or more, and below a million, not {factor}")
    return replace(workload, stages=tuple(_scale_stage(stage, factor) for stage in workload.stages))


def _scale_stage(stage: Stage, factor: float) -> Stage:
    body = tuple(
        Block(tuple(_scale_layer(layer, factor) for layer in block.layers), block.repeat)
        for block in stage.body
    )
    variations = tuple(
        replace(variation, layer=_scale_layer(variation.layer, factor)) for variation in stage.variations
    )
    return replace(stage, body=body, variations=variations)


def _scale_layer(layer: Layer, factor: float) -> Layer:
    forward_s = sum(op.work.duration_s for op in layer.forward if isinstance(op.work, Recorded))
    half = (Op("", Recorded(forward_s * factor / 2)),)

    def without_times(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return tuple(op for op in ops if not isinstance(op.work, Recorded))

    return replace(
        layer,
        input_gradient=half + without_times(layer.input_gradient),
        weight_gradient=half + without_times(layer.weight_gradient),
    )
