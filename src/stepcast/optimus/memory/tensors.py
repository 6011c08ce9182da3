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

from collections.abc import Iterable
from dataclasses import dataclass

from stepcast.cost.memory.allocator import CachingAllocator
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
