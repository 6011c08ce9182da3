"""Changed copies of a Workload: what a user states that the file leaves out."""

from collections.abc import Callable
from dataclasses import replace

from stepcast.ir.check import require
from stepcast.ir.layout import Layout
from stepcast.ir.work import GATHERS, Collective, Recorded
from stepcast.ir.workload import Block, Layer, Op, Phase, Stage, Workload

# Note of a workload whose file holds one layer of several: index of that block in the body.
LAYER_BLOCK = "layer_block"


def with_ops(workload: Workload, change: Callable[[Op], Op]) -> Workload:
    """The workload with every op changed; layers and stages that were one object stay one."""
    layers: dict[int, Layer] = {}
    stages: dict[int, Stage] = {}

    def layer(each: Layer) -> Layer:
        if id(each) not in layers:
            forward, inputs, weights = (tuple(map(change, each.ops(phase))) for phase in Phase)
            layers[id(each)] = replace(each, forward=forward, input_gradient=inputs, weight_gradient=weights)
        return layers[id(each)]

    def stage(each: Stage) -> Stage:
        if id(each) not in stages:
            stages[id(each)] = replace(
                each,
                body=tuple(Block(tuple(map(layer, block.layers)), block.repeat) for block in each.body),
                prologue=tuple(map(layer, each.prologue)),
                epilogue=tuple(map(layer, each.epilogue)),
                variations=tuple(replace(one, layer=layer(one.layer)) for one in each.variations),
            )
        return stages[id(each)]

    return replace(workload, stages=tuple(map(stage, workload.stages)))


def with_layout(workload: Workload, layout: Layout) -> Workload:
    """The workload on other ranks; where it states shares, each rank brings what it brought before."""
    moved = replace(workload, layout=layout)
    if not workload.shares:
        return moved

    def grown(op: Op) -> Op:
        work = op.work
        if not isinstance(work, Collective) or work.kind not in GATHERS:
            return op
        share = work.size_bytes // workload.layout.size(work.group)
        return replace(op, work=replace(work, size_bytes=share * layout.size(work.group)))

    return with_ops(moved, grown)


def repeat_layers(workload: Workload, count: int) -> Workload:
    """The workload with its one model layer run *count* times."""
    note = workload.note(LAYER_BLOCK)
    require(note is not None, "this workload does not mark which rows are one model layer")
    require(count >= 1, f"a model has at least one layer, not {count}")
    at = int(note or 0)
    stage = workload.stages[0]
    body = tuple(Block(block.layers, count) if index == at else block for index, block in enumerate(stage.body))
    return replace(workload, stages=(replace(stage, body=body), *workload.stages[1:]))


def scale_backward(workload: Workload, factor: float) -> Workload:
    """Backward compute times as *factor* x forward, halved between input and weight gradient."""
    require(0 <= factor <= 1e6, f"a backward factor is zero or more, and below a million, not {factor}")
    return replace(workload, stages=tuple(_scale_stage(stage, factor) for stage in workload.stages))


def _scale_stage(stage: Stage, factor: float) -> Stage:
    body = tuple(
        Block(tuple(_scale_layer(layer, factor) for layer in block.layers), block.repeat) for block in stage.body
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
