"""Memory of OptimusPrime runs (github.com/ai-computing/aicomp): its tensors in PyTorch's allocator.

A Hugging Face Llama in fp32, operator by operator as PyTorch's autograd runs it, in OptimusPrime's own 1F1B;
docs/optimus.md lists what stays allocated and why no formula shows it.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil

from stepcast.cost.memory import StageMemory
from stepcast.cost.memory.allocator import CachingAllocator
from stepcast.hardware.catalog import load_data
from stepcast.hardware.cluster import Gpu
from stepcast.ir.model_parts import PositionKind
from stepcast.ir.tables import constants
from stepcast.ir.types import replace
from stepcast.optimus.step import FP32_BYTES, OptimusPlan

COUNTED = constants("optimus-memory")
STEPS = 4  # simulated if all sequences have the same length

BlockPart = tuple[str, int]  # "attention", "up" (norm, gate and up projection) or "down", and the layer


class StageTensors:
    """Everything one tensor rank of a stage allocates; blocks are the numbers of the allocator."""

    def __init__(self, plan: OptimusPlan, stage: int, parts: tuple[BlockPart, ...]) -> None:
        model, tp = plan.model, plan.layout.tp
        self.plan, self.stage, self.parts, self.tp = plan, stage, parts, tp
        self.first, self.last = stage == 0, stage == len(plan.stages) - 1
        # Columns of queries, of keys and of the MLP on one rank.
        self.widths = model.heads * model.head_dim // tp, model.kv_heads * model.head_dim // tp, model.ffn // tp
        self.memory = CachingAllocator()
        self.new = self.memory.allocate
        self.sizes: dict[object, int] = {}
        self.weights: dict[object, int] = {}
        self.gradients: dict[object, int] = {}
        self.states: list[int] = []
        self.cycles: list[int] = []
        self.objects = 0.0
        self._load()

    def named_weights(self) -> Iterable[tuple[object, int, str]]:
        """Yield the name, the unsharded bytes, and how they are split: by "rows", by "columns" or not at all."""
        vocab, norm = self.plan.model.vocab, FP32_BYTES * self.plan.model.hidden
        query, key, ffn = (norm * self.tp * width for width in self.widths)
        projections = {
            "attention": {"q": (query, "rows"), "k": (key, "rows"), "v": (key, "rows"), "o": (query, "columns")},
            "up": {"gate": (ffn, "rows"), "up_proj": (ffn, "rows")},
            "down": {"down_proj": (ffn, "columns")},
        }
        if self.first:
            yield ("embedding", -1), vocab * norm, ""
        for kind, layer in self.parts:
            for name, (size, split) in projections[kind].items():
                yield (name, layer), size, split
            if kind != "down":
                yield (kind, layer), norm, ""
        if self.last:
            yield ("norm", -1), norm, ""
            yield ("head", -1), vocab * norm, ""

    def drop(self, *blocks: int) -> None:
        for block in blocks:
            self.memory.free(block)

    def _load(self) -> None:
        """Load unsharded weights, then the share of each rank; a split by columns copies every share first."""
        for name, size, _ in self.named_weights():
            self.weights[name], self.sizes[name] = self.new(size), size
        for name, size, split in self.named_weights():
            if split and self.tp > 1:
                copies = [self.new(size // self.tp) for _ in range(self.tp)] if split == "columns" else []
                share = self.new(size // self.tp)
                self.drop(*copies, self.weights[name])
                self.weights[name], self.sizes[name] = share, size // self.tp
        self.new(COUNTED["workspace_bytes"])

    def begin(self, seq: int) -> None:
        """Begin a step of sequences padded to *seq* tokens."""
        plan, model = self.plan, self.plan.model
        self.drop(*self.gradients.values())
        self.gradients = {}
        unit = plan.micro_batch * seq * FP32_BYTES  # one value per token
        mask = plan.micro_batch * seq * (-(-seq // 8) * 8) * FP32_BYTES
        heads = model.heads // self.tp
        query, key, inner = (unit * width for width in self.widths)
        self.size = {"unit": unit, "wide": unit * model.hidden, "inner": inner, "logits": unit * model.vocab}
        self.size |= {"query": query, "key": key, "half-query": query // 2, "half-key": key // 2}
        self.size |= {"mask": mask, "scores": heads * mask}
        self.size["sums"] = plan.micro_batch * heads * (-(-seq // 32) * 32) * 4
        self.conditions = {"first": self.first, "later": not self.first, "odd": seq % 8 > 0, "tp": self.tp > 1}
        self.scripts = {
            way: {part: self.read_script(text) for part, text in scripts.items()}
            for way, scripts in load_scripts().items()
        }
        wide, unsharded = self.size["wide"], inner * self.tp
        self.sent = (wide, unsharded, unsharded) if plan.inside else (wide, wide)
        table = seq * model.head_dim * FP32_BYTES
        self.side = (plan.micro_batch * seq * seq * FP32_BYTES, table, table)

    def end(self) -> None:
        """End a step: empty the cache, then run the optimizer weight by weight."""
        self._collect()
        self.memory.empty_cache()
        if self.tp > 1:
            # The losses of the sweep do not fall then, and moments would not fit its middle stages.
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

    def read_script(self, script: str) -> list[tuple[str, str, int]]:
        """Return the action, the name and the bytes of each operator that runs, from the words of
        ``data/optimus.toml``.
        """
        actions = []
        for word in script.split():
            condition, _, action = word.rpartition(":")
            name, _, size = action.partition("=")
            if not condition or self.conditions[condition]:
                kind = action[0] if action[0] in "-!" else condition if condition == "tp" else "="
                actions.append((kind, name.lstrip("-!"), self.size[size] if size else self.size["wide"]))
        return actions

    def run(self, way: str, blocks: dict[str, int], part: BlockPart) -> None:
        """Run the operators of a part, "forward" or "backward"."""
        for kind, name, size in self.scripts[way][part[0]]:
            if kind == "=":
                blocks[name] = self.new(size)
            elif kind == "-":
                self.memory.free(blocks.pop(name))
            elif kind == "!":
                self.weight_gradient((name, part[1]) if name else part)
            else:
                copy = self.new(size)
                self.memory.free(blocks[name])
                blocks[name] = copy

    def delay(self, *blocks: int) -> None:
        """Free blocks later: a reference cycle holds outputs and their gradients for some micro-batches."""
        self.cycles += blocks
        self.objects += COUNTED["batch_objects"] + COUNTED["layer_objects"] * len(self.parts) / 3
        if self.objects >= COUNTED["collected_at"]:
            self._collect()

    def _collect(self) -> None:
        self.drop(*self.cycles)
        self.cycles, self.objects = [], 0.0


@lru_cache(maxsize=1)
def load_scripts() -> dict[str, dict[str, str]]:
    """Return the operators of each part, forward and backward (``data/optimus.toml``)."""
    table = load_data("optimus")
    shared = {name: text for name, text in table.items() if isinstance(text, str)}
    for name in ("rotate", "rotate_backward"):
        shared |= {f"{name}_q": table[name].format("q", "query"), f"{name}_k": table[name].format("k", "key")}
    return {way: {part: text.format(**shared) for part, text in table[way].items()} for way in ("forward", "backward")}


NORM_PART: BlockPart = ("norm", -1)
SavedBlocks = dict[BlockPart, dict[str, int]]
"""The bytes that the forward of a micro-batch saves, by part."""


def optimus_memory(plan: OptimusPlan, gpu: Gpu, sequences: Sequence[int] = ()) -> tuple[StageMemory, ...]:
    """Return the memory of each stage; *sequences* are the padded lengths of the steps."""
    model = plan.model
    if not model.gated or model.position.kind is not PositionKind.ROTARY or model.experts is not None:
        raise ValueError(f"{model.name} is not a Llama: OptimusPrime's memory is known only for those")
    lengths = tuple(sequences) or (round(plan.sequence),) * STEPS
    parts = [(kind, layer) for layer in range(model.layers) for kind in ("attention", "up", "down")]
    layers = [stage.layers for stage in plan.stages]
    # A stage that ends inside a layer ends before its down projection.
    cuts = [3 * ceil(sum(layers[:stage])) - plan.inside for stage in range(1, len(layers))]
    memories = []
    for number, (start, stop) in enumerate(pairwise([0, *cuts, len(parts)])):
        stage = StageTensors(plan, number, tuple(parts[start:stop]))
        steps = sorted((_step(stage, seq, gpu) for seq in lengths), key=lambda step: step.reserved)
        # Halfway between the upper quartile of the steps and the highest: whether a large tensor fits its old place
        # depends on a few kilobytes, so the highest step is half luck.
        usual = steps[-1 - len(steps) // 4]
        reserved = (usual.reserved + steps[-1].reserved) / 2
        memories.append(replace(usual, fragmentation=reserved - usual.allocated))
    return tuple(memories)


def _step(stage: StageTensors, seq: int, gpu: Gpu) -> StageMemory:
    """Run one step in OptimusPrime's 1F1B (Schedule1F1B of opt_prime/schedule.py); return the memory at its end, when
    it is highest.
    """
    memory, micro_batches = stage.memory, stage.plan.micro_batches
    memory.peak_reserved, memory.peak_allocated = memory.reserved, memory.allocated
    stage.begin(seq)
    messages: list[int] = []
    saved: dict[int, SavedBlocks] = {}
    ahead = min(len(stage.plan.stages) - 1 - stage.stage, micro_batches)
    for batch in range(-ahead, micro_batches):
        if batch + ahead < micro_batches:
            saved[batch + ahead] = _forward(stage, messages)
        if batch >= 0:
            _backward(stage, saved.pop(batch), messages)
    parameters, gradients = sum(stage.sizes.values()), sum(stage.sizes[name] for name in stage.gradients)
    optimizer = 2 * parameters if stage.states else 0
    tensor = COUNTED["rank_bytes"] * stage.tp if stage.tp > 1 else 0
    result = StageMemory(
        stage=stage.stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=memory.peak_allocated - parameters - gradients - optimizer,
        temporary=0.0,
        fragmentation=memory.peak_reserved - memory.peak_allocated,
        communication=tensor + (COUNTED["message_bytes"] if len(stage.plan.stages) > 1 else 0),
        framework=COUNTED["context_bytes"],
        capacity=gpu.memory_bytes,
    )
    stage.drop(*messages)
    stage.end()
    return result


def _forward(stage: StageTensors, messages: list[int]) -> SavedBlocks:
    """Run one micro-batch; received tensors are added to *messages*, which stay."""
    saved, wide = SavedBlocks(), stage.size["wide"]
    if stage.first:
        inputs = [stage.new(wide)]
        messages += [stage.new(size) for size in stage.side]
    else:
        inputs = [stage.new(size) for size in stage.sent]
        messages += inputs
        others = stage.side if stage.stage == 1 else (*stage.sent, *stage.side)
        messages += [stage.new(size) for size in others]
    residual, factors = inputs[0], dict(zip(("activated", "up"), inputs[1:], strict=False))
    if not stage.first and not stage.plan.inside:
        residual = stage.new(wide)  # the sum of both tensors
    for part in stage.parts:
        blocks = saved[part] = dict(factors) if part[0] == "down" else {"input": residual}
        stage.run("forward", blocks, part)
        if part[0] == "attention":
            residual = blocks["residual"]
        elif part[0] == "up":
            factors = {name: blocks[name] for name in ("activated", "up")}
        elif part != stage.parts[-1] or stage.last:
            residual = stage.new(wide)
            stage.drop(blocks.pop("output"))
    if stage.last:
        saved[NORM_PART] = {"input": residual}
        stage.run("forward", saved[NORM_PART], NORM_PART)
    return saved


def _backward(stage: StageTensors, saved: SavedBlocks, messages: list[int]) -> None:
    wide = stage.size["wide"]
    gradient, factors, cycle = -1, dict[str, int](), list[int]()
    received = {*messages}
    if stage.last:
        blocks = saved[NORM_PART]
        stage.run("backward", blocks, NORM_PART)
        stage.drop(blocks["input"])
        gradient, cycle = blocks["back"], [blocks["to-logits"], blocks["logits"]]
    else:
        messages += [stage.new(size) for size in (*stage.sent, *stage.side)]
    for position, part in reversed(list(enumerate(stage.parts))):
        blocks, is_end = saved[part], part == stage.parts[-1]
        if part[0] == "down":
            stage.run("backward", blocks, part)
            factors = {name: blocks[name] for name in ("to-activated", "to-up")}
            stage.drop(*(blocks[name] for name in ("activated", "up") if blocks[name] not in received))
            if is_end and not stage.last:
                gradient = stage.new(wide)
            if position == 0:
                messages += [*factors.values(), gradient]
            continue
        if is_end:  # of a stage that ends behind an up projection
            factors = {name: stage.new(stage.size["inner"]) for name in ("to-activated", "to-up")}
            gradient = stage.new(wide)
            stage.drop(blocks["activated"], blocks["up"])
        blocks |= {"skip": gradient, **factors}
        stage.run("backward", blocks, part)
        gradient = blocks["total"]
        if blocks["input"] not in received:
            stage.drop(blocks["input"])
    if stage.first:
        stage.weight_gradient(("embedding", -1))
        stage.drop(gradient)
    else:
        if not stage.plan.inside:
            messages += [gradient, stage.new(wide)]
        messages += [stage.new(size) for size in stage.side]
    if "output" in saved[stage.parts[-1]]:
        stage.drop(saved[stage.parts[-1]]["output"])
    stage.delay(*cycle)
