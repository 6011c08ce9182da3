"""Memory of each pipeline stage at its fullest moment, in named parts that add up.

A stage is looked at in the moments that can be its fullest: when the last stage computes the loss, when a
layer runs backward while all others still wait, when the last backward ends and all gradients exist, and when
the optimizer runs. Sums over layers are linear in between, so no other moment can exceed all of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from stepcast.cost.memory.gathered import keeps_weights
from stepcast.cost.memory.in_flight import before_input_gradient, default_in_flight
from stepcast.cost.memory.loss import loss_bytes
from stepcast.cost.memory.overhead import UNKNOWN_BAND, MemoryBand, communicators, fragmented_bytes, memory_band
from stepcast.cost.memory.piece import PieceTotals, piece_totals
from stepcast.cost.memory.states import orientations
from stepcast.hardware.gpu import Gpu
from stepcast.ir.dtype import FP32_BYTES
from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels, Overhead
from stepcast.ir.model import Model
from stepcast.ir.model_parts import LayerParts
from stepcast.ir.optimizer import OptimizerKind
from stepcast.ir.saved import SavedActivations
from stepcast.ir.sharding import Reduced, plan_of
from stepcast.ir.stages import pieces, pieces_of_stage
from stepcast.ir.strategy import Strategy, StrategyError, TrainingKind
from stepcast.units import MIB

# Scratch space of the matrix library: 32 MiB each for cuBLAS and cuBLASLt, PyTorch's default on Hopper.
# Transformer Engine has one of its own, and one for each stream that experts' products run on, as large as
# cuBLAS recommends: 4 MiB before Hopper (transformer_engine/pytorch/cpp_extensions/gemm.py,
# get_cublas_workspace_size_bytes; cuBLAS, cublasSetWorkspace).
WORKSPACE_BYTES = 2.0 * 32 * MIB
ENGINE_WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES = 32.0 * MIB, 4.0 * MIB
EXPERT_STREAMS = 4
LARGE_WORKSPACES = ("hopper", "blackwell", "blackwell-ultra")


BESIDE = ("stage", "capacity", "host", "band")  # no parts of what a GPU holds
# Layers whose activations are on their way: while one runs, its neighbour's are sent or fetched.
STAGED_LAYERS = 2


class Verdict(StrEnum):
    """Whether a step fits into memory, from the best to the worst."""

    FITS = "fits"
    TIGHT = "tight"  # fits as predicted, but not at the upper end of the 90 % interval
    DOES_NOT_FIT = "does not fit"


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
    host: float = 0.0  # in the memory of the host: what was offloaded
    band: MemoryBand = UNKNOWN_BAND

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
    def low(self) -> float:
        """Lower end of the 90 % interval of the total."""
        return self.total - self.reserved * (1 - self.band.low)

    @property
    def high(self) -> float:
        """Upper end of the 90 % interval of the total."""
        return self.total + self.reserved * (self.band.high - 1)

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, also at the upper end of the interval."""
        if not self.fits:
            return Verdict.DOES_NOT_FIT
        return Verdict.FITS if self.high <= self.capacity else Verdict.TIGHT

    @property
    def free(self) -> float:
        """Bytes left; negative where it does not fit."""
        return self.capacity - self.total

    @property
    def parts(self) -> dict[str, float]:
        """Every part by name; they add up to the total."""
        names = [field.name for field in fields(self) if field.name not in BESIDE]
        return {name: getattr(self, name) for name in names}


def memory(
    model: Model,
    strategy: Strategy,
    gpu: Gpu,
    framework: Framework = MEGATRON_CORE,
    in_flight: Sequence[Sequence[int]] | None = None,
) -> tuple[StageMemory, ...]:
    """What each stage needs. *in_flight*: for each stage, how many micro-batches each of its pieces holds at
    once; the schedule's usual number unless given.
    """
    if in_flight is None:
        in_flight = default_in_flight(strategy)
    if len(in_flight) != strategy.layout.pp:
        raise StrategyError(f"in-flight counts for {len(in_flight)} stages, but pp is {strategy.layout.pp}")
    totals = _piece_totals(model, strategy, framework, orientations(strategy, gpu))
    shared = _Shared(model, strategy, framework, workspace_bytes(model, framework, gpu))
    known: dict[tuple[int, ...], _Held] = {}
    stages = []
    before_input = before_input_gradient(strategy)
    for stage, counts in enumerate(in_flight):
        pieces = [totals[index] for index in pieces_of_stage(strategy, stage)]
        key = tuple(map(id, pieces))
        if key not in known:
            known[key] = _Held(shared, pieces)
        stages.append(_Stage(known[key], counts, before_input[stage]).memory(stage, gpu))
    return tuple(stages)


def workspace_bytes(model: Model, framework: Framework, gpu: Gpu) -> float:
    """Scratch space of matrix products, which is never given back."""
    if framework.kernels is not Kernels.FUSED:
        return WORKSPACE_BYTES
    own = ENGINE_WORKSPACE_BYTES if gpu.architecture in LARGE_WORKSPACES else SMALL_WORKSPACE_BYTES
    return WORKSPACE_BYTES + own * (1 + (EXPERT_STREAMS if model.experts else 0))


def fits(model: Model, strategy: Strategy, gpu: Gpu, framework: Framework = MEGATRON_CORE) -> bool:
    """Whether every stage fits into the GPU's memory."""
    return all(stage.fits for stage in memory(model, strategy, gpu, framework))


def verdict_of(stages: Sequence[StageMemory]) -> Verdict:
    """Return the worst verdict of *stages*."""
    order = list(Verdict)
    return max((stage.verdict for stage in stages), key=order.index, default=Verdict.FITS)


class _Moment(NamedTuple):
    gradients: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.temporary


def _piece_totals(model: Model, strategy: Strategy, framework: Framework, orientations: int) -> list[PieceTotals]:
    """Every piece's totals in model order; pieces of the same layers share theirs."""
    known: dict[tuple[object, ...], PieceTotals] = {}
    kinds: dict[LayerParts, SavedActivations] = {}
    blocks = model.blocks
    totals = []
    for piece in pieces(model, strategy):
        # Blocks of a kind are one object.
        alike = tuple(map(id, blocks[piece.layers.start : piece.layers.stop]))
        key = (alike, piece.embedding, piece.head)
        if key not in known:
            known[key] = piece_totals(model, strategy, framework, piece, kinds, orientations)
        totals.append(known[key])
    return totals


class _Shared:
    """What is the same for every stage."""

    def __init__(self, model: Model, strategy: Strategy, framework: Framework, workspace: float) -> None:
        layout = strategy.layout
        self.workspace = workspace
        self.strategy, self.framework, self.plan = strategy, framework, plan_of(strategy, framework)
        # Flat buffers exist all the time; PyTorch's own gradients from the first backward of a step on.
        self.early = framework.kernels is Kernels.FUSED or strategy.micro_batches > 1 or self.plan.splits_gradients
        whole = strategy.local_tokens * model.hidden * strategy.stream.bytes
        outer = whole / strategy.outer_ways
        # Gathered inputs of tensor-parallel matmuls, and messages between stages.
        self.exchanged = (2 * whole if strategy.sequence_parallel else 0.0) + (2 * outer if layout.pp > 1 else 0.0)
        self.head_activations = 2 * outer  # input and output of the final norm
        self.communicators = communicators(strategy)
        self.recomputed = strategy.recompute.whole_layers(model.layers) / max(1, model.layers)
        full = strategy.training is TrainingKind.FULL
        width = model.embedding_width or model.hidden
        rows = model.padded_vocab(layout.tp) / layout.tp
        self.word_gradient = rows * width * strategy.weights.bytes if full else 0.0
        self.tied = model.tied
        self.model = model
        self.loss: dict[tuple[int, int], float] = {}

    def loss_bytes(self, count: int, before_input: int) -> float:
        """Of *count* micro-batches, the loss of *before_input* at most has not run backward yet."""
        key = min(count, before_input), max(0, count - before_input)
        if key not in self.loss:
            self.loss[key] = loss_bytes(self.model, self.strategy, key[0], self.framework, key[1])
        return self.loss[key]


class _Held:
    """What stages of the same pieces hold, however many micro-batches they have begun."""

    def __init__(self, shared: _Shared, pieces: Sequence[PieceTotals]) -> None:
        self.shared, self.pieces = shared, pieces
        self.states = pieces[0].states
        for piece in pieces[1:]:
            self.states = self.states + piece.states
        self.trained = sum([piece.trained for piece in pieces])
        self.owned = sum([piece.owned for piece in pieces])
        # Of the parameters whose states the rank keeps, those that it updates itself.
        self.updated = self.owned * (1 - shared.strategy.offload.optimizer)
        self.staged = STAGED_LAYERS * max([piece.staged for piece in pieces])
        self.head = any(piece.head for piece in pieces)
        self.embedding = any(piece.embedding for piece in pieces)
        self.working = max([piece.transient for piece in pieces]) + shared.exchanged
        self.again = max([piece.recomputed for piece in pieces])
        self.largest_layer = max([piece.largest_layer for piece in pieces])
        whole = sum if keeps_weights(shared.plan) else max
        self.gathered = whole([piece.collected.weights for piece in pieces])
        whole = sum if shared.plan.reduced is Reduced.ONCE else max
        self.unreduced = whole([piece.collected.gradients for piece in pieces])


class _Stage:
    def __init__(self, held: _Held, counts: Sequence[int], before_input: Sequence[int]) -> None:
        self.held, self.counts, self.before_input, self.shared = held, counts, before_input, held.shared
        self.strategy, self.framework = held.shared.strategy, held.shared.framework
        self.states = held.states
        pairs = list(zip(held.pieces, counts, strict=True))
        self.activations = sum([count * piece.activations for piece, count in pairs]) + held.staged
        self.on_host = sum([count * piece.on_host for piece, count in pairs])
        if held.head:
            at_head = max(count for piece, count in pairs if piece.head)
            self.activations += at_head * held.shared.head_activations

    def memory(self, stage: int, gpu: Gpu) -> StageMemory:
        overhead = self.framework.overhead
        moments = self._moments()
        running = max(moments, key=lambda each: each.total)
        updating = _Moment(self.states.gradients, 0.0, self._update())
        moment = max(running, updating, key=lambda each: each.total)
        fragmentation = fragmented_bytes(
            overhead,
            loose=max(each.activations + each.temporary for each in moments),
            moments=self._moment_bytes(),
            update=updating.temporary,
            recomputed=self.shared.recomputed,
        )
        return StageMemory(
            stage=stage,
            parameters=self.states.parameters,
            gradients=moment.gradients + overhead.gradient_bytes * self.held.trained,
            optimizer=self._optimizer(overhead),
            activations=moment.activations,
            temporary=moment.temporary,
            # A large gradient that is added to another finds no room among what is freed in small pieces.
            fragmentation=fragmentation + self._accumulated(),
            communication=overhead.buffer_bytes + overhead.communicator_bytes * self.shared.communicators,
            framework=overhead.context_bytes,
            capacity=gpu.memory_bytes,
            host=self.states.host + self.on_host,
            band=memory_band(self.strategy.layout.gpus),
        )

    def _optimizer(self, overhead: Overhead) -> float:
        held = self.held
        others = FP32_BYTES * (held.trained - held.owned) if overhead.whole_master else 0.0
        return self.states.optimizer + overhead.step_bytes * held.updated + others

    def _moments(self) -> list[_Moment]:
        """The moments of a step before the optimizer's."""
        shared, held, gradients = self.shared, self.held, self.states.gradients
        early = gradients if shared.early else 0.0
        sharded = held.gathered + held.unreduced + shared.workspace
        # The last layer to run backward has no gradients yet when its activations are all there.
        late = max(early, gradients - held.pieces[0].first_layer_gradients)
        moments = [
            _Moment(early, self.activations, held.again + held.working + sharded),
            _Moment(late, held.largest_layer, held.working + sharded),
            _Moment(gradients, 0.0, self._embedding_gradient() + shared.workspace),
        ]
        for piece, count, before_input in zip(held.pieces, self.counts, self.before_input, strict=True):
            if piece.head:
                loss = shared.loss_bytes(count, before_input) + held.gathered + shared.workspace
                moments.append(_Moment(early, self.activations, loss))
        return moments

    def _update(self) -> float:
        """Without fusion the root of AdamW's second moment exists for all weights at once."""
        optimizer = self.framework.optimizer
        if optimizer.fused or optimizer.kind is not OptimizerKind.ADAMW:
            return 0.0
        return self.held.updated * optimizer.moment_bytes

    def _moment_bytes(self) -> float:
        """What the optimizer allocates in its first step and holds from then on."""
        optimizer = self.framework.optimizer
        return self.held.updated * optimizer.moments * optimizer.moment_bytes

    def _accumulated(self) -> float:
        """Plain PyTorch adds a new gradient to that of earlier micro-batches; the output projection's is the
        largest.
        """
        if self.framework.kernels is Kernels.FUSED or self.strategy.micro_batches == 1 or not self.held.head:
            return 0.0
        return self.shared.word_gradient

    def _embedding_gradient(self) -> float:
        """The dense gradient of a word embedding exists beside what it is added to: for a moment twice, with
        tied weights three times. Flat buffers need one.
        """
        if not self.held.embedding:
            return 0.0
        twice = self.shared.tied and self.held.head and self.framework.kernels is not Kernels.FUSED
        return self.shared.word_gradient * (2 if twice else 1)
