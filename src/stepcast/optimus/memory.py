"""Memory of OptimusPrime runs (github.com/ai-computing/aicomp): its tensors in PyTorch's allocator.

A Hugging Face Llama in fp32, operator by operator as PyTorch's autograd runs it, in OptimusPrime's own 1F1B:

- A received tuple stays until the step ends, and so do the gradients a stage receives and sends (``run_info.env``
  and ``run_info.grads`` of opt_prime/schedule.py are cleared once per step). From stage 2 on a tuple of stage 0 comes
  with each micro-batch.
- Everything received requires a gradient, rotary tables and mask too: so the factors of the rotary embedding are
  saved, except on stage 0.
- A step ends with ``torch.cuda.empty_cache``; gradients are dropped when the next one begins.
- The helper that ``core_backward`` defines calls itself, so outputs and their gradients are in a reference cycle until
  Python collects it. On the last stage these are the logits of earlier micro-batches.
- The tensor-parallel linears are DTensors: unsharded when they arrive on the GPU, then scattered; all-reduces copy.

The memory that a GPU reports is dominated by the allocator's cache, and that by where the largest tensors find space:
the gradient of an embedding or output projection is as large as all activations together, and gets a new segment
whenever something small occupies the last one. No formula shows that.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil

from stepcast.cost.memory import StageMemory
from stepcast.cost.memory.allocator import CachingAllocator
from stepcast.hardware.gpu import Gpu
from stepcast.ir.dataclass import dataclass
from stepcast.ir.model_parts import PositionKind
from stepcast.optimus.plan import OptimusPlan
from stepcast.units import MIB

FLOAT = 4
COLLECTED_AT = 700  # objects created but not freed after which Python looks for cycles (gc.get_threshold())
BATCH_OBJECTS, LAYER_OBJECTS = 200, 50  # left by a micro-batch, and by each layer of it: messages, events
WORKSPACE_BYTES = 8.125 * MIB  # cuBLAS before Hopper: 2 x 4096 + 8 x 16 KiB

BlockPart = tuple[str, int]  # "attention", "up" (norm, gate and up projection) or "down", and the layer


@dataclass(frozen=True, slots=True)
class StageShape:
    """The part of one tensor rank in a stage; *inside* means that stages end behind an up projection."""

    stage: int
    stages: int
    parts: tuple[BlockPart, ...]
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
    updates: bool  # whether the optimizer has states

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def weights(self) -> Iterable[tuple[object, int, str]]:
        """Yield the name, the unsharded bytes, and how they are split: by "rows", by "columns" or not at all."""
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
    """Everything one rank allocates; blocks are the numbers of the allocator."""

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

    def compute(self, size: float, *consumed: int) -> int:
        """Allocate the result of an operator, then free the inputs that nothing else needs."""
        block = self.new(size)
        self.drop(*consumed)
        return block

    def _load(self) -> None:
        """Load unsharded weights, then the share of each rank; a split by columns copies every share first."""
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
        """Begin a step of sequences padded to *seq* tokens."""
        shape = self.shape
        self.drop(*self.gradients.values())
        self.gradients = {}
        self.seq = seq
        self.unit = shape.micro_batch * seq * FLOAT  # one value per token
        self.wide, self.inner = self.unit * shape.hidden, self.unit * shape.ffn
        aligned = -(-seq // 8) * 8
        self.mask = shape.micro_batch * seq * aligned * FLOAT
        self.scores = shape.heads * self.mask
        unsharded = self.inner * shape.tp
        self.sent = (self.wide, unsharded, unsharded) if shape.inside else (self.wide, self.wide)
        table = seq * shape.head_dim * FLOAT
        self.side = (shape.micro_batch * seq * seq * FLOAT, table, table)

    def end(self) -> None:
        """End a step: empty the cache, then run the optimizer weight by weight."""
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
        """Allocate a weight gradient; it stays if it is the first, else it is added to that and freed."""
        block = self.new(self.sizes[name])
        if name in self.gradients:
            self.drop(block)
        else:
            self.gradients[name] = block

    def reduce(self, block: int) -> int:
        """Return the result of an all-reduce between tensor ranks, which is a copy."""
        if self.shape.tp == 1:
            return block
        copy = self.new(self.wide)
        self.drop(block)
        return copy

    def delay(self, *blocks: int) -> None:
        """Free blocks later: a reference cycle holds outputs and their gradients for some micro-batches."""
        self.cycles += blocks
        self.objects += BATCH_OBJECTS + LAYER_OBJECTS * len(self.shape.parts) / 3
        if self.objects >= COLLECTED_AT:
            self._collect()

    def _collect(self) -> None:
        self.drop(*self.cycles)
        self.cycles, self.objects = [], 0.0


SavedBlocks = dict[object, list[int]]
"""What the forward of a micro-batch saves, by part and layer."""


def norm_forward(stage: StageTensors, saved: SavedBlocks, name: object) -> None:
    """Run a root-mean-square norm; the root, the normalised value and the result are saved."""
    square = stage.new(stage.wide)
    mean = stage.compute(stage.unit, square)
    shifted = stage.compute(stage.unit, mean)
    root = stage.compute(stage.unit, shifted)
    saved["norm", name] = [root, stage.new(stage.wide), stage.new(stage.wide)]


def norm_backward(stage: StageTensors, saved: SavedBlocks, name: object, gradient: int, skip: int | None) -> int:
    """Return the gradient of the input from that of the result, with the residual's *skip* added."""
    root, normal = saved.pop(("norm", name))
    scaled, product = stage.new(stage.wide), stage.new(stage.wide)
    stage.drop(gradient)
    stage.weight_gradient(name)
    stage.drop(product, normal)
    direct, product = stage.new(stage.wide), stage.new(stage.wide)
    to_root = stage.compute(stage.unit, product, scaled, root)
    double, to_square = stage.new(stage.wide), stage.new(stage.wide)
    stage.drop(to_root, double)
    result = stage.compute(stage.wide, direct, to_square)
    if skip is None:
        return result
    return stage.compute(stage.wide, result, skip)


def norm_result(stage: StageTensors, saved: SavedBlocks, name: object) -> None:
    """Free the result of a norm after the gradients of the projections that read it."""
    stage.drop(saved["norm", name].pop())


def attention_forward(stage: StageTensors, saved: SavedBlocks, layer: int) -> int:
    """Return the residual behind the attention."""
    shape, new = stage.shape, stage.new
    query, key = stage.unit * shape.query, stage.unit * shape.key
    norm_forward(stage, saved, ("attention", layer))
    projected = new(query), new(key), new(key)
    queries, factors = _rotate(stage, projected[0], query)
    keys, more = _rotate(stage, projected[1], key)
    saved["rotary", layer] = factors + more
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
    saved["attention", layer] = [*repeated, sums, result]
    output = stage.reduce(new(stage.wide))
    return stage.compute(stage.wide, output)


def _rotate(stage: StageTensors, block: int, size: int) -> tuple[int, list[int]]:
    """Return x cos + rotate(x) sin, and the factors, which are saved if the tables require gradients."""
    straight, half = stage.new(size), stage.new(size // 2)
    turned = stage.compute(size, half)
    crossed = stage.new(size)
    if stage.shape.first:
        stage.drop(turned)
    result = stage.compute(size, straight, crossed)
    if stage.shape.first:
        stage.drop(block)
        return result, []
    return result, [block, turned]


def attention_backward(stage: StageTensors, saved: SavedBlocks, layer: int, gradient: int) -> int:
    shape, new = stage.shape, stage.new
    query, key = stage.unit * shape.query, stage.unit * shape.key
    to_result = new(query)
    stage.weight_gradient(("o", layer))
    to_query, to_key, to_value = new(query), new(query), new(query)
    if not shape.first:
        stage.drop(new(stage.scores), new(stage.mask))
    stage.drop(to_result, *saved.pop(("attention", layer)))
    keys = stage.compute(key, to_key)
    values = stage.compute(key, to_value)
    queries, keys = _rotate_backward(stage, to_query, query), _rotate_backward(stage, keys, key)
    stage.drop(*saved.pop(("rotary", layer)))
    total = -1
    for block, name in ((values, "v"), (keys, "k"), (queries, "q")):
        part = new(stage.wide)
        stage.weight_gradient((name, layer))
        stage.drop(block)
        part = stage.reduce(part)
        total = part if total < 0 else stage.compute(stage.wide, total, part)
    norm_result(stage, saved, ("attention", layer))
    return norm_backward(stage, saved, ("attention", layer), total, gradient)


def _rotate_backward(stage: StageTensors, gradient: int, size: int) -> int:
    straight = stage.new(size)
    if not stage.shape.first:  # gradients of the tables
        stage.drop(stage.new(size))
        stage.drop(stage.new(size))
    crossed = stage.new(size)
    turned = stage.compute(size, crossed)
    return stage.compute(size, straight, turned, gradient)


def up_forward(stage: StageTensors, saved: SavedBlocks, layer: int) -> list[int]:
    """Return the activated gate and the up projection's output."""
    norm_forward(stage, saved, ("up", layer))
    gate, activated = stage.new(stage.inner), stage.new(stage.inner)
    saved["up", layer] = [gate]
    return [activated, stage.new(stage.inner)]


def up_backward(stage: StageTensors, saved: SavedBlocks, layer: int, gradients: list[int], skip: int) -> int:
    to_activated, to_up = gradients
    by_up = stage.new(stage.wide)
    stage.weight_gradient(("up_proj", layer))
    stage.drop(to_up)
    by_up = stage.reduce(by_up)
    to_gate = stage.compute(stage.inner, to_activated, *saved.pop(("up", layer)))
    by_gate = stage.new(stage.wide)
    stage.weight_gradient(("gate", layer))
    stage.drop(to_gate)
    total = stage.compute(stage.wide, by_up, stage.reduce(by_gate))
    norm_result(stage, saved, ("up", layer))
    return norm_backward(stage, saved, ("up", layer), total, skip)


def down_forward(stage: StageTensors, saved: SavedBlocks, layer: int, factors: list[int]) -> int:
    product = stage.new(stage.inner)
    output = stage.reduce(stage.new(stage.wide))
    saved["down", layer] = [product, *factors]
    return output


def down_backward(stage: StageTensors, saved: SavedBlocks, layer: int) -> tuple[list[int], list[int]]:
    """Return the gradients of the activated gate and the up projection's output, and these themselves."""
    product, *factors = saved.pop(("down", layer))
    to_product = stage.new(stage.inner)
    stage.weight_gradient(("down_proj", layer))
    stage.drop(product)
    gradients = [stage.new(stage.inner), stage.new(stage.inner)]
    stage.drop(to_product)
    return gradients, factors


# Read from the sweep's logs.
CONTEXT_BYTES = 499 * MIB  # driver, kernels and the communicator of all ranks, before the first tensor
RANK_BYTES = 82 * MIB  # for each rank of a tensor-parallel group, once the weights are scattered
MESSAGE_BYTES = 92 * MIB  # pairs of ranks that exchange messages, and kernels loaded on first use
STEPS = 4  # simulated if all sequences have the same length


def optimus_memory(plan: OptimusPlan, gpu: Gpu, sequences: Sequence[int] = ()) -> tuple[StageMemory, ...]:
    """Return the memory of each stage; *sequences* are the padded lengths of the steps."""
    model = plan.model
    if not model.gated or model.position.kind is not PositionKind.ROTARY or model.experts is not None:
        raise ValueError(f"{model.name} is not a Llama: OptimusPrime's memory is known only for those")
    lengths = tuple(sequences) or (round(plan.sequence),) * STEPS
    parts = _stage_parts(plan)
    return tuple(_stage_memory(_shape(plan, stage, parts), gpu, lengths) for stage in range(len(parts)))


def _stage_parts(plan: OptimusPlan) -> list[tuple[BlockPart, ...]]:
    """Return the parts of each stage; one that ends inside a layer ends before its down projection."""
    parts = [(kind, layer) for layer in range(plan.model.layers) for kind in ("attention", "up", "down")]
    layers = [stage.layers for stage in plan.stages]
    cuts = [3 * ceil(sum(layers[:stage])) - plan.inside for stage in range(1, len(layers))]
    return [tuple(parts[start:stop]) for start, stop in pairwise([0, *cuts, len(parts)])]


def _shape(plan: OptimusPlan, stage: int, parts: Sequence[tuple[BlockPart, ...]]) -> StageShape:
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
        # With tensor parallelism the losses of the sweep do not fall, and moments would not fit its middle stages.
        updates=tp == 1,
    )


@dataclass(frozen=True, slots=True)
class _StepMemory:
    """The memory at the end of a step, when it is highest."""

    reserved: int
    parameters: int
    gradients: int
    optimizer: int
    peak: int  # allocated at once


def _stage_memory(shape: StageShape, gpu: Gpu, lengths: Sequence[int]) -> StageMemory:
    """Return the memory halfway between the upper quartile of the steps and the highest.

    Whether a large tensor fits its old place depends on a few kilobytes, so the highest step is half luck.
    """
    stage = StageTensors(shape)
    steps = sorted((_step(stage, seq) for seq in lengths), key=lambda step: step.reserved)
    usual = steps[-1 - len(steps) // 4]
    reserved = (usual.reserved + steps[-1].reserved) / 2
    tensor = RANK_BYTES * shape.tp if shape.tp > 1 else 0
    states = usual.parameters + usual.gradients + usual.optimizer
    return StageMemory(
        stage=shape.stage,
        parameters=usual.parameters,
        gradients=usual.gradients,
        optimizer=usual.optimizer,
        activations=usual.peak - states,
        temporary=0.0,
        fragmentation=reserved - usual.peak,
        communication=tensor + (MESSAGE_BYTES if shape.stages > 1 else 0),
        framework=CONTEXT_BYTES,
        capacity=gpu.memory_bytes,
    )


def _step(stage: StageTensors, seq: int) -> _StepMemory:
    """Run one step in OptimusPrime's 1F1B (Schedule1F1B of opt_prime/schedule.py)."""
    shape, memory = stage.shape, stage.memory
    memory.peak_reserved, memory.peak_allocated = memory.reserved, memory.allocated
    stage.begin(seq)
    messages: list[int] = []
    saved: dict[int, SavedBlocks] = {}
    ahead = min(shape.stages - 1 - shape.stage, shape.micro_batches)
    for batch in range(ahead):
        saved[batch] = _forward(stage, messages)
    for batch in range(shape.micro_batches):
        if batch + ahead < shape.micro_batches:
            saved[batch + ahead] = _forward(stage, messages)
        _backward(stage, saved.pop(batch), messages)
    result = _StepMemory(
        reserved=memory.peak_reserved,
        parameters=sum(stage.sizes.values()),
        gradients=sum(stage.sizes[name] for name in stage.gradients),
        optimizer=2 * sum(stage.sizes.values()) if stage.states else 0,
        peak=memory.peak_allocated,
    )
    stage.drop(*messages)
    stage.end()
    return result


def _forward(stage: StageTensors, messages: list[int]) -> SavedBlocks:
    """Run one micro-batch; received tensors are added to *messages*, which stay."""
    shape, saved = stage.shape, SavedBlocks()
    inputs: list[int] = []
    if shape.first:
        inputs = [stage.new(stage.wide)]
        messages += [stage.new(size) for size in stage.side]
    else:
        inputs = [stage.new(size) for size in stage.sent]
        messages += inputs
        others = stage.side if shape.stage == 1 else (*stage.sent, *stage.side)
        messages += [stage.new(size) for size in others]
    saved["received"] = [] if shape.first else inputs
    residual, factors = inputs[0], inputs[1:]
    if not shape.first and not shape.inside:
        residual = stage.new(stage.wide)  # the sum of both tensors
    for position, (kind, layer) in enumerate(shape.parts):
        if kind == "attention":
            saved["input", layer] = [residual]
            residual = attention_forward(stage, saved, layer)
        elif kind == "up":
            saved["middle", layer] = [residual]
            factors = up_forward(stage, saved, layer)
        else:
            output = down_forward(stage, saved, layer, factors)
            if position < len(shape.parts) - 1 or shape.last:
                residual = stage.compute(stage.wide, output)
            else:
                saved["output"] = [output]
    if shape.last:
        norm_forward(stage, saved, "norm")
        saved["output"] = [residual, stage.new(stage.unit * shape.vocab)]
    elif shape.inside:
        saved["output"] = factors
    return saved


def _loss_backward(stage: StageTensors, saved: SavedBlocks) -> int:
    """Run cross entropy and the output projection; logits and their gradient stay in a cycle."""
    residual, logits = saved.pop("output")
    size = stage.unit * stage.shape.vocab
    chances, picked, gradient = stage.new(size), stage.new(size), stage.new(size)
    stage.drop(picked, chances)
    saved["cycle"] = [gradient, logits]
    to_norm = stage.new(stage.wide)
    stage.weight_gradient("head")
    norm_result(stage, saved, "norm")
    to_residual = norm_backward(stage, saved, "norm", to_norm, None)
    stage.drop(residual)
    return to_residual


def _backward(stage: StageTensors, saved: SavedBlocks, messages: list[int]) -> None:
    shape, received = stage.shape, saved["received"]
    gradient, factors = -1, [-1, -1]
    if shape.last:
        gradient = _loss_backward(stage, saved)
    else:
        messages += [stage.new(size) for size in (*stage.sent, *stage.side)]
    end = len(shape.parts) - 1
    for position, (kind, layer) in reversed(list(enumerate(shape.parts))):
        if kind == "down":
            factors, values = down_backward(stage, saved, layer)
            stage.drop(*(value for value in values if value not in received))
            if position == end and not shape.last:
                gradient = stage.new(stage.wide)
            if position == 0:
                messages += [*factors, gradient]
        elif kind == "up":
            if position == end:
                factors = [stage.new(stage.inner), stage.new(stage.inner)]
                gradient = stage.compute(stage.wide, *saved.pop("output"))
            gradient = up_backward(stage, saved, layer, factors, gradient)
            stage.drop(*(block for block in saved["middle", layer] if block not in received))
        else:
            gradient = attention_backward(stage, saved, layer, gradient)
            stage.drop(*(block for block in saved["input", layer] if block not in received))
    _finish(stage, saved, messages, gradient)


def _finish(stage: StageTensors, saved: SavedBlocks, messages: list[int], gradient: int) -> None:
    """Allocate the embedding's gradient, or those that are sent back."""
    shape = stage.shape
    if shape.first:
        stage.weight_gradient("embedding")
        stage.drop(gradient)
    else:
        if not shape.inside:
            messages += [gradient, stage.new(stage.wide)]
        messages += [stage.new(size) for size in stage.side]
    stage.drop(*saved.pop("output", []))
    stage.delay(*saved.pop("cycle", []))
