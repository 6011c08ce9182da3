"""Tensors of a stage of an OptimusPrime run (github.com/ai-computing/aicomp), in the order they come and go.

A Hugging Face Llama in fp32, operator by operator as PyTorch's autograd runs it, in OptimusPrime's own 1F1B:

- A received tuple stays until the step ends, and so do the gradients a stage receives and sends
  (``run_info.env`` and ``run_info.grads`` of opt_prime/schedule.py are cleared once per step). From stage 2
  on a tuple of stage 0 comes with each micro-batch.
- Everything received asks for a gradient, rotary tables and mask too: so the factors of the rotary embedding
  are kept, but not on stage 0.
- A step ends with ``torch.cuda.empty_cache``; gradients are dropped when the next one begins.
- The helper that ``core_backward`` defines calls itself, so outputs and their gradients hang in a reference
  cycle until Python collects it. Of the last stage that is the logits of earlier micro-batches.
- The tensor-parallel linears are DTensors: whole when they arrive on the GPU, then scattered; all-reduces
  make a copy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from stepcast.cost.memory import StageMemory
from stepcast.cost.memory.allocator import CachingAllocator
from stepcast.hardware.gpu import Gpu
from stepcast.ir.model_parts import PositionKind
from stepcast.optimus.plan import OptimusPlan
from stepcast.units import MIB

FLOAT = 4
# Python looks for cycles when so many more objects have been made than freed (gc.get_threshold()).
COLLECTED_AT = 700
# Objects that a micro-batch leaves behind, and each layer of it: messages, events of the timed modules.
BATCH_OBJECTS, LAYER_OBJECTS = 200, 50
WORKSPACE_BYTES = 8.125 * MIB  # cuBLAS before Hopper: 2 x 4096 + 8 x 16 KiB

Part = tuple[str, int]  # "attention", "up" (norm, gate and up projection) or "down", and the layer


@dataclass(frozen=True, slots=True)
class StageShape:
    """What one tensor rank of a stage has; *inside* says that cuts fall behind an up projection."""

    stage: int
    stages: int
    parts: tuple[Part, ...]
    tp: int
    micro_batch: int
    micro_batches: int
    hidden: int
    query: int
    key: int
    ffn: int
    heads: int
    head_dim: int
    vocab: int
    inside: bool
    updates: bool  # the optimizer has states

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def weights(self) -> Iterable[tuple[object, int, str]]:
        """Name, bytes when whole, and how it is split: by "rows", by "columns" or not at all."""
        wide = FLOAT * self.hidden * self.tp
        if self.first:
            yield "embedding", FLOAT * self.vocab * self.hidden, ""
        for kind, layer in self.parts:
            if kind == "attention":
                yield ("q", layer), wide * self.query, "rows"
                yield ("k", layer), wide * self.key, "rows"
                yield ("v", layer), wide * self.key, "rows"
                yield ("o", layer), wide * self.query, "columns"
                yield (kind, layer), FLOAT * self.hidden, ""
            elif kind == "up":
                yield ("gate", layer), wide * self.ffn, "rows"
                yield ("up_proj", layer), wide * self.ffn, "rows"
                yield (kind, layer), FLOAT * self.hidden, ""
            else:
                yield ("down_proj", layer), wide * self.ffn, "columns"
        if self.last:
            yield "norm", FLOAT * self.hidden, ""
            yield "head", FLOAT * self.vocab * self.hidden, ""


class StageTensors:
    """Everything one rank allocates. Blocks are known by the names the allocator gave them."""

    def __init__(self, shape: StageShape) -> None:
        self.shape = shape
        self.memory = CachingAllocator()
        self.new = self.memory.allocate
        self.sizes: dict[object, int] = {}
        self.weights: dict[object, int] = {}
        self.gradients: dict[object, int] = {}
        self.states: list[int] = []
        self.cycles: list[int] = []
        self.objects = 0.0
        self._load()

    def drop(self, *blocks: int) -> None:
        for block in blocks:
            self.memory.free(block)

    def _load(self) -> None:
        """The whole weights, then each rank's share of them: a split by columns copies every share first."""
        shape = self.shape
        for name, size, _ in shape.weights():
            self.weights[name], self.sizes[name] = self.new(size), size
        for name, size, split in shape.weights():
            if split and shape.tp > 1:
                copies = [self.new(size // shape.tp) for _ in range(shape.tp)] if split == "columns" else []
                share = self.new(size // shape.tp)
                self.drop(*copies, self.weights[name])
                self.weights[name], self.sizes[name] = share, size // shape.tp
        self.new(WORKSPACE_BYTES)

    def begin(self, seq: int) -> None:
        """A step of sequences padded to *seq* tokens."""
        shape = self.shape
        self.drop(*self.gradients.values())
        self.gradients = {}
        self.seq = seq
        self.unit = shape.micro_batch * seq * FLOAT  # one value per token
        self.wide, self.inner = self.unit * shape.hidden, self.unit * shape.ffn
        aligned = -(-seq // 8) * 8
        self.mask = shape.micro_batch * seq * aligned * FLOAT
        self.scores = shape.heads * self.mask
        whole_inner = self.inner * shape.tp
        self.handed = (self.wide, whole_inner, whole_inner) if shape.inside else (self.wide, self.wide)
        table = seq * shape.head_dim * FLOAT
        self.side = (shape.micro_batch * seq * seq * FLOAT, table, table)

    def end(self) -> None:
        """After the last backward: the cache is emptied, then the optimizer runs weight by weight."""
        self._collect()
        self.memory.empty_cache()
        if not self.shape.updates:
            return
        fresh = not self.states
        for size in self.sizes.values():
            if fresh:
                self.states += [self.new(size), self.new(size)]
            self.drop(self.new(size))  # the root of the second moment

    def weight_gradient(self, name: object) -> None:
        """Kept if it is the first; else added to that, and gone."""
        block = self.new(self.sizes[name])
        if name in self.gradients:
            self.drop(block)
        else:
            self.gradients[name] = block

    def reduced(self, block: int) -> int:
        """An all-reduce between tensor ranks makes a copy."""
        if self.shape.tp == 1:
            return block
        copy = self.new(self.wide)
        self.drop(block)
        return copy

    def delay(self, *blocks: int) -> None:
        """Outputs and their gradients that a reference cycle holds for some micro-batches more."""
        self.cycles += blocks
        self.objects += BATCH_OBJECTS + LAYER_OBJECTS * len(self.shape.parts) / 3
        if self.objects >= COLLECTED_AT:
            self._collect()

    def _collect(self) -> None:
        self.drop(*self.cycles)
        self.cycles, self.objects = [], 0.0


# Forward and backward of a Llama layer's parts, tensor by tensor: see tensors.
#
# Names: what a forward keeps is a dict entry of the micro-batch, under the part and its layer.

Kept = dict[object, list[int]]


def norm_forward(stage: StageTensors, kept: Kept, name: object) -> None:
    """Root-mean-square norm: kept are the root, the normalised value and the result."""
    square = stage.new(stage.wide)
    mean = stage.new(stage.unit)
    stage.drop(square)
    shifted = stage.new(stage.unit)
    stage.drop(mean)
    root = stage.new(stage.unit)
    stage.drop(shifted)
    kept["norm", name] = [root, stage.new(stage.wide), stage.new(stage.wide)]


def norm_backward(stage: StageTensors, kept: Kept, name: object, gradient: int, skip: int | None) -> int:
    """From the gradient of the result to that of the input, with the residual's *skip* added."""
    root, normal = kept.pop(("norm", name))
    scaled, product = stage.new(stage.wide), stage.new(stage.wide)
    stage.drop(gradient)
    stage.weight_gradient(name)
    stage.drop(product, normal)
    direct, product = stage.new(stage.wide), stage.new(stage.wide)
    to_root = stage.new(stage.unit)
    stage.drop(product, scaled, root)
    double, to_square = stage.new(stage.wide), stage.new(stage.wide)
    stage.drop(to_root, double)
    result = stage.new(stage.wide)
    stage.drop(direct, to_square)
    if skip is None:
        return result
    total = stage.new(stage.wide)
    stage.drop(result, skip)
    return total


def norm_result(stage: StageTensors, kept: Kept, name: object) -> None:
    """The projections' gradients are done: what they were given can go."""
    stage.drop(kept["norm", name].pop())


def attention_forward(stage: StageTensors, kept: Kept, layer: int) -> int:
    """To the residual behind the attention."""
    shape, new = stage.shape, stage.new
    query, key = stage.unit * shape.query, stage.unit * shape.key
    norm_forward(stage, kept, ("attention", layer))
    projected = new(query), new(key), new(key)
    queries, factors = _rotated(stage, projected[0], query)
    keys, more = _rotated(stage, projected[1], key)
    kept["rotary", layer] = factors + more
    repeated = [new(query)]
    stage.drop(keys)
    repeated.append(new(query))
    stage.drop(projected[2])
    repeated.insert(0, new(query))
    stage.drop(queries)
    if stage.seq % 8:
        repeated.append(new(stage.mask))
    rows = -(-stage.seq // 32) * 32
    result = new(query)
    sums = new(shape.micro_batch * shape.heads * rows * 4)
    kept["attention", layer] = [*repeated, sums, result]
    output = stage.reduced(new(stage.wide))
    residual = new(stage.wide)
    stage.drop(output)
    return residual


def _rotated(stage: StageTensors, block: int, size: int) -> tuple[int, list[int]]:
    """x cos + rotate(x) sin; both factors are kept where the tables ask for gradients."""
    straight, half = stage.new(size), stage.new(size // 2)
    turned = stage.new(size)
    stage.drop(half)
    crossed = stage.new(size)
    if stage.shape.first:
        stage.drop(turned)
    result = stage.new(size)
    stage.drop(straight, crossed)
    if stage.shape.first:
        stage.drop(block)
        return result, []
    return result, [block, turned]


def attention_backward(stage: StageTensors, kept: Kept, layer: int, gradient: int) -> int:
    shape, new = stage.shape, stage.new
    query, key = stage.unit * shape.query, stage.unit * shape.key
    to_result = new(query)
    stage.weight_gradient(("o", layer))
    to_query, to_key, to_value = new(query), new(query), new(query)
    if not shape.first:
        stage.drop(new(stage.scores), new(stage.mask))
    stage.drop(to_result, *kept.pop(("attention", layer)))
    keys = new(key)
    stage.drop(to_key)
    values = new(key)
    stage.drop(to_value)
    queries, keys = _rotated_backward(stage, to_query, query), _rotated_backward(stage, keys, key)
    stage.drop(*kept.pop(("rotary", layer)))
    total = -1
    for block, name in ((values, "v"), (keys, "k"), (queries, "q")):
        part = new(stage.wide)
        stage.weight_gradient((name, layer))
        stage.drop(block)
        part = stage.reduced(part)
        total = part if total < 0 else _sum(stage, total, part)
    norm_result(stage, kept, ("attention", layer))
    return norm_backward(stage, kept, ("attention", layer), total, gradient)


def _sum(stage: StageTensors, one: int, other: int) -> int:
    total = stage.new(stage.wide)
    stage.drop(one, other)
    return total


def _rotated_backward(stage: StageTensors, gradient: int, size: int) -> int:
    straight = stage.new(size)
    if not stage.shape.first:  # those of the tables
        stage.drop(stage.new(size))
        stage.drop(stage.new(size))
    crossed = stage.new(size)
    turned = stage.new(size)
    stage.drop(crossed)
    result = stage.new(size)
    stage.drop(straight, turned, gradient)
    return result


def up_forward(stage: StageTensors, kept: Kept, layer: int) -> list[int]:
    """The activated gate and the up projection's output."""
    norm_forward(stage, kept, ("up", layer))
    gate, activated = stage.new(stage.inner), stage.new(stage.inner)
    kept["up", layer] = [gate]
    return [activated, stage.new(stage.inner)]


def up_backward(stage: StageTensors, kept: Kept, layer: int, gradients: list[int], skip: int) -> int:
    to_activated, to_up = gradients
    by_up = stage.new(stage.wide)
    stage.weight_gradient(("up_proj", layer))
    stage.drop(to_up)
    by_up = stage.reduced(by_up)
    to_gate = stage.new(stage.inner)
    stage.drop(to_activated, *kept.pop(("up", layer)))
    by_gate = stage.new(stage.wide)
    stage.weight_gradient(("gate", layer))
    stage.drop(to_gate)
    total = _sum(stage, by_up, stage.reduced(by_gate))
    norm_result(stage, kept, ("up", layer))
    return norm_backward(stage, kept, ("up", layer), total, skip)


def down_forward(stage: StageTensors, kept: Kept, layer: int, factors: list[int]) -> int:
    product = stage.new(stage.inner)
    output = stage.reduced(stage.new(stage.wide))
    kept["down", layer] = [product, *factors]
    return output


def down_backward(stage: StageTensors, kept: Kept, layer: int) -> tuple[list[int], list[int]]:
    """Gradients of the activated gate and the up projection's output, and these themselves."""
    product, *factors = kept.pop(("down", layer))
    to_product = stage.new(stage.inner)
    stage.weight_gradient(("down_proj", layer))
    stage.drop(product)
    gradients = [stage.new(stage.inner), stage.new(stage.inner)]
    stage.drop(to_product)
    return gradients, factors


# Memory of OptimusPrime's runs: its tensors, played through PyTorch's allocator (see tensors).
#
# What the GPU reports is dominated by what the allocator holds, and that by where the largest tensors
# find room: the gradient of a word embedding or output projection is as large as all activations
# together, and gets a segment of its own each time something small has settled in the last one. No
# formula shows that.
#
# Three figures are read off the sweep's logs: what a process takes before it has a tensor, what the group of
# tensor ranks adds, and what messages between stages add.

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
