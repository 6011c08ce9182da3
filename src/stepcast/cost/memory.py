"""Memory of each pipeline stage at its fullest moment, in named parts that add up.

A stage is looked at in the moments that can be its fullest: when the last stage computes the loss, when a
layer runs backward while all others still wait, when the last backward ends and all gradients exist, and when
the optimizer runs. Sums over layers are linear in between, so no other moment can exceed all of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from stepcast.cost.in_flight import default_in_flight
from stepcast.cost.memory_activations import Kept, layer_kept
from stepcast.cost.memory_loss import gathered_bytes, loss_bytes
from stepcast.cost.memory_overhead import OVERHEADS, Overhead, communicators
from stepcast.cost.memory_states import States, piece_states, split_ways
from stepcast.hardware.gpu import Gpu
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Block
from stepcast.ir.stages import Piece, pieces, pieces_of_stage
from stepcast.ir.strategy import Kernels, Strategy, StrategyError, TrainingKind
from stepcast.ir.trainable import trained_shard

# Scratch space of the matrix library: 32 MiB each for cuBLAS and cuBLASLt, PyTorch's default on Hopper.
WORKSPACE_BYTES = 2.0 * 32 * 2**20


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one GPU of a stage at its fullest moment."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float  # logits, gathered layers, gradients on their way
    fragmentation: float  # held by the allocator, used by nothing
    communication: float  # buffers of the communication library
    framework: float  # what the driver and its kernels take
    capacity: float

    @property
    def allocated(self) -> float:
        """What the framework's tensors take: torch.cuda.max_memory_allocated."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary

    @property
    def reserved(self) -> float:
        """What its allocator holds: torch.cuda.max_memory_reserved."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> float:
        """What the GPU reports as used."""
        return self.reserved + self.communication + self.framework

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    @property
    def free(self) -> float:
        """Bytes left; negative where it does not fit."""
        return self.capacity - self.total

    @property
    def parts(self) -> dict[str, float]:
        """Every part by name; they add up to the total."""
        names = [field.name for field in fields(self) if field.name not in ("stage", "capacity")]
        return {name: getattr(self, name) for name in names}


def memory(
    model: Model,
    strategy: Strategy,
    gpu: Gpu,
    in_flight: Sequence[Sequence[int]] | None = None,
    overhead: Overhead | None = None,
) -> tuple[StageMemory, ...]:
    """What each stage needs. *in_flight*: for each stage, how many micro-batches each of its pieces holds at
    once; the schedule's usual number unless given. *overhead* is the framework's: plain PyTorch's or
    Megatron's, by the kernels, unless given.
    """
    if overhead is None:
        overhead = OVERHEADS["megatron" if strategy.kernels is Kernels.FUSED else "pytorch"]
    if in_flight is None:
        in_flight = default_in_flight(strategy)
    if len(in_flight) != strategy.layout.pp:
        raise StrategyError(f"in-flight counts for {len(in_flight)} stages, but pp is {strategy.layout.pp}")
    parts = pieces(model, strategy)
    known: dict[tuple[object, ...], StageMemory] = {}
    stages = []
    for stage, counts in enumerate(in_flight):
        held = [parts[index] for index in pieces_of_stage(strategy, stage)]
        key = (
            tuple(counts),
            *((model.blocks[p.layers.start : p.layers.stop], p.embedding, p.head) for p in held),
        )
        if key not in known:
            known[key] = _Stage(model, strategy, held, counts).memory(stage, gpu, overhead)
        found = known[key]
        stages.append(found if found.stage == stage else _numbered(found, stage))
    return tuple(stages)


def fits(model: Model, strategy: Strategy, gpu: Gpu) -> bool:
    """Whether every stage fits into the GPU's memory."""
    return all(stage.fits for stage in memory(model, strategy, gpu))


def _numbered(memory: StageMemory, stage: int) -> StageMemory:
    return StageMemory(stage, *(getattr(memory, field.name) for field in fields(memory)[1:]))


@dataclass(frozen=True, slots=True)
class _Moment:
    gradients: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.temporary


class _Stage:
    def __init__(
        self, model: Model, strategy: Strategy, held: Sequence[Piece], counts: Sequence[int]
    ) -> None:
        self.model, self.strategy, self.held, self.counts = model, strategy, held, counts
        states = States(0.0, 0.0, 0.0)
        for piece in held:
            states = states + piece_states(model, strategy, piece)
        self.states = states
        shards = [trained_shard(model, strategy, piece) for piece in held]
        self.trained = sum(shard.total for shard in shards)
        ways = split_ways(strategy)
        self.owned = sum(shard.dense / ways[0] + shard.experts / ways[1] for shard in shards)
        self.layers: list[Kept] = []  # one of each kind
        self.activations = 0.0
        self.recomputed = 0.0
        self._count_layers()

    def _count_layers(self) -> None:
        model, strategy = self.model, self.strategy
        kinds: dict[Block, Kept] = {}
        for piece, count in zip(self.held, self.counts, strict=True):
            whole = strategy.recompute.whole_layers(len(piece.layers))
            numbers: dict[tuple[Block, bool], int] = {}
            for position, block in enumerate(model.blocks[piece.layers.start : piece.layers.stop]):
                key = (block, position < whole)
                numbers[key] = numbers.get(key, 0) + 1
            for (block, again), number in numbers.items():
                kept = kinds.get(block)
                if kept is None:
                    kept = kinds[block] = layer_kept(model, strategy, block)
                self.activations += count * number * kept.after(again)
                if again:
                    self.recomputed = max(self.recomputed, kept.kept - kept.input)
            if piece.head:
                # Input and output of the final norm.
                split = strategy.layout.tp if strategy.sequence_parallel else 1
                width = strategy.local_tokens / split * model.hidden * strategy.stored.bytes
                self.activations += 2 * count * width
        self.layers = list(kinds.values())

    def memory(self, stage: int, gpu: Gpu, overhead: Overhead) -> StageMemory:
        running = max(self._moments(), key=lambda each: each.total)
        updating = _Moment(self.states.gradients, 0.0, self._update())
        moment = max(running, updating, key=lambda each: each.total)
        # What is freed in small pieces cannot serve a large request: both phases end up reserved.
        large = min(updating.temporary, running.activations + running.temporary) + self._accumulated()
        loose = moment.activations + moment.temporary
        return StageMemory(
            stage=stage,
            parameters=self.states.parameters,
            gradients=moment.gradients + overhead.gradient_bytes * self.trained,
            optimizer=self.states.optimizer + overhead.step_bytes * self.owned,
            activations=moment.activations,
            temporary=moment.temporary,
            fragmentation=overhead.fragmentation * loose + large,
            communication=overhead.buffer_bytes + overhead.communicator_bytes * communicators(self.strategy),
            framework=overhead.context_bytes,
            capacity=gpu.memory_bytes,
        )

    def _moments(self) -> list[_Moment]:
        """The moments of a step before the optimizer's."""
        states, strategy = self.states, self.strategy
        # Flat buffers exist all the time; PyTorch's own gradients from the first backward of a step on.
        lasting = strategy.kernels is Kernels.FUSED or strategy.micro_batches > 1
        early = states.gradients if lasting or strategy.sharding.splits_gradients else 0.0
        working = max((kept.transient for kept in self.layers), default=0.0) + self._exchanged()
        gathered, unreduced = gathered_bytes(self.model, strategy, self.held)
        sharded = gathered + unreduced + WORKSPACE_BYTES
        one = max((kept.kept for kept in self.layers), default=0.0)
        # The last layer to run backward has no gradients yet when its activations are all there.
        late = max(early, states.gradients - self._first_layer_gradients())
        moments = [
            _Moment(early, self.activations, self.recomputed + working + sharded),
            _Moment(late, one, working + sharded),
            _Moment(states.gradients, 0.0, self._embedding_gradient() + WORKSPACE_BYTES),
        ]
        for piece, count in zip(self.held, self.counts, strict=True):
            if piece.head:
                loss = loss_bytes(self.model, strategy, count)
                moments.append(_Moment(early, self.activations, loss + gathered + WORKSPACE_BYTES))
        return moments

    def _update(self) -> float:
        """Without fusion the root of the second moment exists for all weights at once."""
        optimizer = self.strategy.optimizer
        if optimizer.fused or not optimizer.moments:
            return 0.0
        return self.owned * optimizer.moment_dtype.bytes

    def _accumulated(self) -> float:
        """Plain PyTorch adds a weight's new gradient to that of earlier micro-batches; the largest weight is the
        output projection.
        """
        model, strategy = self.model, self.strategy
        if strategy.kernels is Kernels.FUSED or strategy.micro_batches == 1:
            return 0.0
        if strategy.training is TrainingKind.LORA or not any(piece.head for piece in self.held):
            return 0.0
        tp = strategy.layout.tp
        return model.padded_vocab(tp) / tp * (model.embedding_width or model.hidden) * strategy.stored.bytes

    def _first_layer_gradients(self) -> float:
        layers = self.held[0].layers
        if not layers:
            return 0.0
        first = Piece(range(layers.start, layers.start + 1), False, False)
        return piece_states(self.model, self.strategy, first).gradients

    def _exchanged(self) -> float:
        """Gathered inputs of tensor-parallel matmuls, and messages between stages."""
        strategy, layout = self.strategy, self.strategy.layout
        whole = strategy.local_tokens * self.model.hidden * strategy.stored.bytes
        size = 2 * whole if strategy.sequence_parallel else 0.0
        if layout.pp > 1:
            size += 2 * whole / (layout.tp if strategy.sequence_parallel else 1)
        return size

    def _embedding_gradient(self) -> float:
        """The dense gradient of a word embedding exists beside what it is added to: for a moment twice, with
        tied weights three times. Flat buffers need one.
        """
        model, strategy = self.model, self.strategy
        if strategy.training is TrainingKind.LORA or not any(piece.embedding for piece in self.held):
            return 0.0
        width = model.embedding_width or model.hidden
        size = model.padded_vocab(strategy.layout.tp) / strategy.layout.tp * width * strategy.stored.bytes
        if strategy.kernels is Kernels.FUSED:
            return size
        return size * (2 if model.tied and any(piece.head for piece in self.held) else 1)
