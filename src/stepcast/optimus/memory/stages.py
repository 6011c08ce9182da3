"""Memory of OptimusPrime's runs: its tensors, played through PyTorch's allocator (see tensors).

What the GPU reports is dominated by what the allocator holds, and that by where the largest tensors find
room: the gradient of a word embedding or output projection is as large as all activations together, and gets
a segment of its own each time something small has settled in the last one. No formula shows that.

Three figures are read off the sweep's logs: what a process takes before it has a tensor, what the group of
tensor ranks adds, and what messages between stages add.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from stepcast.cost.memory import StageMemory
from stepcast.hardware.gpu import Gpu
from stepcast.ir.model_parts import PositionKind
from stepcast.optimus.memory.layers import (
    Kept,
    attention_backward,
    attention_forward,
    down_backward,
    down_forward,
    norm_backward,
    norm_forward,
    norm_result,
    up_backward,
    up_forward,
)
from stepcast.optimus.memory.tensors import Part, StageShape, StageTensors
from stepcast.optimus.plan import OptimusPlan
from stepcast.units import MIB

CONTEXT_BYTES = 499 * MIB  # driver, kernels and the group of all ranks, before the first tensor
RANK_BYTES = 82 * MIB  # for each rank of a tensor-parallel group, once the weights are scattered
MESSAGE_BYTES = 92 * MIB  # pairs of ranks that exchange messages, and kernels loaded on first use
STEPS = 4  # played when all sequences have the same length


def optimus_memory(plan: OptimusPlan, gpu: Gpu, sequences: Sequence[int] = ()) -> tuple[StageMemory, ...]:
    """What each stage of an OptimusPrime run needs; *sequences* are the padded lengths of its steps."""
    model = plan.model
    if not model.gated or model.position.kind is not PositionKind.ROTARY or model.experts is not None:
        raise ValueError(f"{model.name} is no Llama: OptimusPrime's memory is known for those alone")
    lengths = tuple(sequences) or (round(plan.sequence),) * STEPS
    parts = _stage_parts(plan)
    return tuple(_stage_memory(_shape(plan, stage, parts), gpu, lengths) for stage in range(len(parts)))


def _stage_parts(plan: OptimusPlan) -> list[tuple[Part, ...]]:
    """A cut inside a layer counts as one in front of its down projection."""
    parts = [(kind, layer) for layer in range(plan.model.layers) for kind in ("attention", "up", "down")]
    layers = [stage.layers for stage in plan.stages]
    cuts = [3 * ceil(sum(layers[:stage])) - plan.inside for stage in range(1, len(layers))]
    return [tuple(parts[start:stop]) for start, stop in pairwise([0, *cuts, len(parts)])]


def _shape(plan: OptimusPlan, stage: int, parts: Sequence[tuple[Part, ...]]) -> StageShape:
    model, tp = plan.model, plan.layout.tp
    return StageShape(
        stage=stage,
        stages=len(parts),
        parts=parts[stage],
        tp=tp,
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        hidden=model.hidden,
        query=model.heads * model.head_dim // tp,
        key=model.kv_heads * model.head_dim // tp,
        ffn=model.ffn // tp,
        heads=model.heads // tp,
        head_dim=model.head_dim,
        vocab=model.vocab,
        inside=plan.inside,
        # Losses of the sweep fall without tensor parallelism and stay where they are with it, and no
        # moments would fit into what its middle stages take.
        updates=tp == 1,
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """At the end of a step, when most is held."""

    reserved: int
    parameters: int
    gradients: int
    optimizer: int
    most: int  # allocated at once


def _stage_memory(shape: StageShape, gpu: Gpu, lengths: Sequence[int]) -> StageMemory:
    """The step that holds most, halfway to the upper quartile: whether a large tensor finds its old place is
    a matter of a few kilobytes, so that the highest step of all is half luck.
    """
    stage = StageTensors(shape)
    steps = sorted((_step(stage, seq) for seq in lengths), key=lambda held: held.reserved)
    usual = steps[-1 - len(steps) // 4]
    reserved = (usual.reserved + steps[-1].reserved) / 2
    tensor = RANK_BYTES * shape.tp if shape.tp > 1 else 0
    states = usual.parameters + usual.gradients + usual.optimizer
    return StageMemory(
        stage=shape.stage,
        parameters=usual.parameters,
        gradients=usual.gradients,
        optimizer=usual.optimizer,
        activations=usual.most - states,
        temporary=0.0,
        fragmentation=reserved - usual.most,
        communication=tensor + (MESSAGE_BYTES if shape.stages > 1 else 0),
        framework=CONTEXT_BYTES,
        capacity=gpu.memory_bytes,
    )


def _step(stage: StageTensors, seq: int) -> _Held:
    """One step in OptimusPrime's 1F1B (Schedule1F1B of opt_prime/schedule.py)."""
    shape, memory = stage.shape, stage.memory
    memory.peak_reserved, memory.peak_allocated = memory.reserved, memory.allocated
    stage.begin(seq)
    messages: list[int] = []
    kept: dict[int, Kept] = {}
    ahead = min(shape.stages - 1 - shape.stage, shape.micro_batches)
    for batch in range(ahead):
        kept[batch] = _forward(stage, messages)
    for batch in range(shape.micro_batches):
        if batch + ahead < shape.micro_batches:
            kept[batch + ahead] = _forward(stage, messages)
        _backward(stage, kept.pop(batch), messages)
    held = _Held(
        reserved=memory.peak_reserved,
        parameters=sum(stage.sizes.values()),
        gradients=sum(stage.sizes[name] for name in stage.gradients),
        optimizer=2 * sum(stage.sizes.values()) if stage.states else 0,
        most=memory.peak_allocated,
    )
    stage.drop(*messages)
    stage.end()
    return held


def _forward(stage: StageTensors, messages: list[int]) -> Kept:
    """One micro-batch; what is received goes to *messages*, which stay."""
    shape, kept = stage.shape, Kept()
    inputs: list[int] = []
    if shape.first:
        inputs = [stage.new(stage.wide)]
        messages += [stage.new(size) for size in stage.side]
    else:
        inputs = [stage.new(size) for size in stage.handed]
        messages += inputs
        others = stage.side if shape.stage == 1 else (*stage.handed, *stage.side)
        messages += [stage.new(size) for size in others]
    kept["received"] = [] if shape.first else inputs
    residual, factors = inputs[0], inputs[1:]
    if not shape.first and not shape.inside:
        residual = stage.new(stage.wide)  # both tensors' sum
    for position, (kind, layer) in enumerate(shape.parts):
        if kind == "attention":
            kept["input", layer] = [residual]
            residual = attention_forward(stage, kept, layer)
        elif kind == "up":
            kept["middle", layer] = [residual]
            factors = up_forward(stage, kept, layer)
        else:
            output = down_forward(stage, kept, layer, factors)
            if position < len(shape.parts) - 1 or shape.last:
                residual = stage.new(stage.wide)
                stage.drop(output)
            else:
                kept["output"] = [output]
    if shape.last:
        norm_forward(stage, kept, "norm")
        kept["output"] = [residual, stage.new(stage.unit * shape.vocab)]
    elif shape.inside:
        kept["output"] = factors
    return kept


def _loss_backward(stage: StageTensors, kept: Kept) -> int:
    """Cross entropy and the output projection; logits and their gradient are held in a cycle."""
    residual, logits = kept.pop("output")
    size = stage.unit * stage.shape.vocab
    chances, picked, gradient = stage.new(size), stage.new(size), stage.new(size)
    stage.drop(picked, chances)
    kept["cycle"] = [gradient, logits]
    to_norm = stage.new(stage.wide)
    stage.weight_gradient("head")
    norm_result(stage, kept, "norm")
    to_residual = norm_backward(stage, kept, "norm", to_norm, None)
    stage.drop(residual)
    return to_residual


def _backward(stage: StageTensors, kept: Kept, messages: list[int]) -> None:
    shape, received = stage.shape, kept["received"]
    gradient, factors = -1, [-1, -1]
    if shape.last:
        gradient = _loss_backward(stage, kept)
    else:
        messages += [stage.new(size) for size in (*stage.handed, *stage.side)]
    end = len(shape.parts) - 1
    for position, (kind, layer) in reversed(list(enumerate(shape.parts))):
        if kind == "down":
            factors, values = down_backward(stage, kept, layer)
            stage.drop(*(value for value in values if value not in received))
            if position == end and not shape.last:
                gradient = stage.new(stage.wide)
            if position == 0:
                messages += [*factors, gradient]
        elif kind == "up":
            if position == end:
                factors = [stage.new(stage.inner), stage.new(stage.inner)]
                gradient = stage.new(stage.wide)
                stage.drop(*kept.pop("output"))
            gradient = up_backward(stage, kept, layer, factors, gradient)
            stage.drop(*(block for block in kept["middle", layer] if block not in received))
        else:
            gradient = attention_backward(stage, kept, layer, gradient)
            stage.drop(*(block for block in kept["input", layer] if block not in received))
    _finish(stage, kept, messages, gradient)


def _finish(stage: StageTensors, kept: Kept, messages: list[int], gradient: int) -> None:
    """The embedding's gradient, or those that are sent back."""
    shape = stage.shape
    if shape.first:
        stage.weight_gradient("embedding")
        stage.drop(gradient)
    else:
        if not shape.inside:
            messages += [gradient, stage.new(stage.wide)]
        messages += [stage.new(size) for size in stage.side]
    stage.drop(*kept.pop("output", []))
    stage.delay(*kept.pop("cycle", []))
