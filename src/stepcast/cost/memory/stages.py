"""Memory of each pipeline stage at its fullest moment, in named parts that add up.

The moments that can be the fullest of a stage are: when the last stage computes the loss, when a
layer runs backward while all others still wait, when the last backward ends and all gradients exist, and when
the optimizer runs. Sums over layers are linear in between, so no other moment can exceed all of these.

PyTorch reserves more than its tensors take (max_memory_reserved against max_memory_allocated). Measured on an
H200 (153 steps of the h200 and transformers sets), the gap follows what comes and goes in a step and what is
allocated late: the optimizer's moments are made in its first step, in blocks that activations have freed, and
the activations of the next step then need new ones. Where layers are recomputed both shares are about twice
as large, since few large blocks (logits, one layer) serve many small requests. Rounding to 512 bytes and to
segments of 2 MiB is part of the shares. expandable_segments:True leaves 0.4 of the gap where nothing is
recomputed, and all of it where everything is (15 of these steps measured both ways).
"""

from collections.abc import Sequence
from dataclasses import fields
from enum import StrEnum
from functools import lru_cache
from operator import mul

from stepcast.cost.memory.piece import StageActivations, find_activations, loss_bytes
from stepcast.cost.memory.states import StageStates, find_state_bytes, orientations
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.cluster import Gpu
from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels, Overhead
from stepcast.ir.model import Model, StageKind, find_stage_kinds, shares_words
from stepcast.ir.schedules import Pipeline, ScheduleKind, find_schedule
from stepcast.ir.step import Band
from stepcast.ir.strategy import Objective, Strategy, StrategyError
from stepcast.ir.tables import constants
from stepcast.ir.types import FP32_BYTES, dataclass, replace
from stepcast.units import MIB

# Scratch space of the matrix library: 32 MiB each for cuBLAS and cuBLASLt, PyTorch's default on Hopper.
# Transformer Engine has one of its own, and one for each stream that experts' products run on, as large as
# cuBLAS recommends: 4 MiB before Hopper (transformer_engine/pytorch/cpp_extensions/gemm.py,
# get_cublas_workspace_size_bytes; cuBLAS, cublasSetWorkspace).
WORKSPACE_BYTES = 2.0 * 32 * MIB
ENGINE_WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES = 32.0 * MIB, 4.0 * MIB
EXPERT_STREAMS = 4
LARGE_WORKSPACES = ("hopper", "blackwell", "blackwell-ultra")

InFlight = Sequence[Sequence[int]]
Counts = tuple[tuple[int, ...], ...]
NO_PARTS = ("stage", "capacity", "host", "band")  # fields that are not in the memory of a GPU
MEASURED: dict[str, float] = constants("memory")
UNKNOWN_BAND = Band(1.0, 1.0, "", 0)


@lru_cache(maxsize=1)
def _bands() -> dict[str, Band]:
    """Return the intervals of measured over predicted memory, by kind of run."""
    return {name: Band(**entry, of=name) for name, entry in load_fit("memory")["kinds"].items()}


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
    temporary: float  # logits, gathered layers, gradients in transfer
    fragmentation: float  # held by the allocator, used by nothing
    communication: float  # buffers of the communication library
    framework: float  # what the driver and its kernels take
    capacity: float
    host: float = 0.0  # in the memory of the host: what was offloaded
    band: Band = UNKNOWN_BAND

    @property
    def allocated(self) -> float:
        """Bytes of the framework's tensors: torch.cuda.max_memory_allocated."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary

    @property
    def reserved(self) -> float:
        """Bytes that its allocator holds: torch.cuda.max_memory_reserved."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> float:
        """Bytes that the GPU reports as used."""
        return self.allocated + self.fragmentation + self.communication + self.framework

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
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in NO_PARTS}


def memory(
    model: Model, strategy: Strategy, gpu: Gpu, framework: Framework = MEGATRON_CORE, in_flight: InFlight | None = None
) -> tuple[StageMemory, ...]:
    """Return the memory of each stage. *in_flight*: for each stage, how many micro-batches each of its pieces holds
    at once; by default the number that the schedule's authors give.
    """
    if strategy.longest > strategy.seq:
        strategy = replace(strategy, seq=strategy.longest, longest=0)
    if in_flight is None:
        in_flight = default_in_flight(strategy)
    if len(in_flight) != strategy.layout.pp:
        raise StrategyError(f"in-flight counts for {len(in_flight)} stages, but pp is {strategy.layout.pp}")
    shared = _Shared(model, strategy, framework, gpu, in_flight)
    kinds = find_stage_kinds(model, strategy)
    every: dict[int, StageMemory] = {}
    for terms in zip(kinds, shared.states.of_stages(kinds), shared.activations.of_stages(kinds), strict=True):
        _add_stages(every, shared, *terms)
    return tuple([every[stage] for stage in range(len(in_flight))])


def workspace_bytes(model: Model, framework: Framework, gpu: Gpu) -> float:
    """Return the scratch space of matrix products, which is never given back."""
    if framework.kernels is not Kernels.FUSED:
        return WORKSPACE_BYTES
    return WORKSPACE_BYTES + engine_workspace_bytes(gpu) * (1 + (EXPERT_STREAMS if model.experts else 0))


def engine_workspace_bytes(gpu: Gpu) -> float:
    """Return the scratch space of Transformer Engine's products on one stream."""
    return ENGINE_WORKSPACE_BYTES if gpu.architecture in LARGE_WORKSPACES else SMALL_WORKSPACE_BYTES


def verdict_of(stages: Sequence[StageMemory]) -> Verdict:
    """Return the worst verdict of *stages*."""
    return max((stage.verdict for stage in stages), key=list(Verdict).index, default=Verdict.FITS)


# Micro-batches in flight: the numbers that authors of schedules give.


def default_in_flight(strategy: Strategy) -> Counts:
    """Return, for each stage, the number of micro-batches that each of its pieces holds."""
    return held_in_flight(strategy.schedule, _pipeline_of(strategy))


def _pipeline_of(strategy: Strategy) -> Pipeline:
    layout = strategy.layout
    # With a forward that overlaps the backward of another micro-batch, one more is begun before the first ends. On a
    # single stage the one fills what the other empties, layer by layer.
    return Pipeline(layout.pp, layout.vpp, strategy.micro_batches, int(strategy.pairs_micro_batches and layout.pp > 1))


@lru_cache(maxsize=1024)
def held_in_flight(schedule: ScheduleKind, pipeline: Pipeline, before_input: bool = False) -> Counts:
    """Return, for each stage of *pipeline*, the micro-batches that each piece holds; with *before_input* those
    whose input gradient has not run. The others wait for their weight gradient: of the loss they keep the gradient
    of the logits alone.
    """
    facts, batches = find_schedule(schedule, pipeline.stages), pipeline.micro_batches
    count = (facts.before_input_gradient if before_input else None) or facts.held
    return tuple(tuple(min(batches, number) for number in count(pipeline, stage)) for stage in range(pipeline.stages))


# Memory beyond tensors.


def communication_bytes(strategy: Strategy, framework: Framework) -> float:
    """Return the bytes of flat buffers, and of the groups of more than one rank that a GPU takes part in."""
    layout = strategy.layout
    groups = (layout.tp > 1) + (layout.cp > 1) + (layout.dp * layout.cp > 1) + (layout.pp > 1) + (layout.ep > 1)
    return framework.flat_bytes(strategy) + framework.overhead.communicator_bytes * groups


def find_fragmentation(overhead: Overhead, recomputed: float) -> tuple[float, float, float, float]:
    """Return the terms of ``fragmented_bytes``; *recomputed*: share of the layers that run forward again."""
    plain = MEASURED["expandable_share"] if overhead.expandable_segments else 1.0
    times = plain + (MEASURED["recomputed_times"] - plain) * recomputed
    return times, overhead.fragmentation, overhead.displaced, plain * overhead.displaced


def fragmented_bytes(terms: tuple[float, float, float, float], loose: float, moments: float, update: float) -> float:
    """Return the bytes that the allocator reserves beyond the tensors. *loose*: the most that activations and
    temporaries take together. *moments*: of the optimizer. *update*: temporaries of an optimizer that is not fused.
    """
    times, fragmentation, displaced, displaced_once = terms
    return times * (fragmentation * loose + displaced * min(moments, loose)) + displaced_once * min(update, loose)


# One stage.


class _Shared:
    """Values that are the same for every stage."""

    def __init__(self, model: Model, strategy: Strategy, framework: Framework, gpu: Gpu, in_flight: InFlight) -> None:
        layout, overhead = strategy.layout, framework.overhead
        self.model, self.strategy, self.framework, self.in_flight = model, strategy, framework, in_flight
        self.before_input = held_in_flight(strategy.schedule, _pipeline_of(strategy), True)
        self.states = find_state_bytes(model, strategy, framework, orientations(strategy, gpu))
        self.activations = find_activations(model, strategy, framework)
        self.workspace = workspace_bytes(model, framework, gpu)
        flat = framework.kernels is Kernels.FUSED
        # Flat buffers exist all the time, and so do accumulators wider than the gradients; PyTorch's own gradients from
        # the first backward of a step on.
        wider, several = overhead.gradient_bytes > 0, strategy.micro_batches > 1
        self.early = flat or wider or several or self.states.plan.splits_gradients
        full, outer = self.activations.full, self.activations.outer
        # Gathered inputs of tensor-parallel matmuls, and messages between stages.
        self.exchanged = (2 * full if strategy.sequence_parallel else 0.0) + (2 * outer if layout.pp > 1 else 0.0)
        held_tensors = overhead.exchanged_tensors if strategy.sequence_parallel else 0.0
        if layout.pp > 1 and layout.tp >= MEASURED["node_ranks"]:
            held_tensors *= MEASURED["held_share"] if layout.pp > 2 and layout.tp < 4 * MEASURED["node_ranks"] else 0.0
        self.held_by_layer = held_tensors * (full - outer)
        self.head_activations = 2 * outer  # input and output of the final norm
        self.beyond = communication_bytes(strategy, framework), overhead.context_bytes, gpu.memory_bytes
        self.recomputed, self.word_gradient = self.activations.recomputed, self.activations.word_gradient
        # The dense gradient of a word embedding exists in addition to what it is added to: for a moment twice, with
        # tied weights three times. Flat buffers need one.
        self.tied_gradients = 2 if shares_words(model, strategy) and not flat else 1
        # Plain PyTorch adds a new gradient to that of earlier micro-batches; the output projection's is the largest,
        # and finds no space among what is freed in small pieces.
        self.added_gradient = 0.0 if flat or not several else self.word_gradient
        self.band = _bands()["one GPU" if layout.gpus == 1 else "several GPUs"]
        self.fragmentation = find_fragmentation(overhead, self.recomputed)
        self.fills = framework.loop_kernels > 0 and not strategy.lora_rank

    def find_gaps(self, again: float) -> tuple[float, ...]:
        """Return what the allocator holds because of the output projection; *again*: of a layer that is recomputed."""
        strategy, framework = self.strategy, self.framework
        if not framework.loop_kernels or strategy.objective is Objective.REWARD or framework.chunks_loss:
            return (self.added_gradient,)
        # The loop's fp32 copy of the logits is made while the loss still has its own, and cut up afterwards.
        logits = strategy.local_tokens * self.model.padded_vocab(strategy.layout.tp)
        copy = MEASURED["output_share"] * FP32_BYTES * logits / strategy.layout.tp
        return self.added_gradient, copy, MEASURED["layer_share"] * self.recomputed * again


def _add_stages(
    every: dict[int, StageMemory], shared: _Shared, kind: StageKind, states: StageStates, of_batch: StageActivations
) -> None:
    """Add the memory of the stages of *kind*."""
    strategy, framework, heads = shared.strategy, shared.framework, kind.heads
    parameters, gradients, more_gradients, optimizer, host, buckets = states[:6]
    first_gradients, gathered, unreduced, lasting, update = states[6:]
    saved, on_host, staged, again, transient, largest_layer = of_batch
    early = gradients if shared.early else 0.0
    # The last layer to run backward has no gradients yet when its activations are all there.
    late = max(early, gradients - first_gradients)
    embedding = shared.word_gradient * (shared.tied_gradients if heads else 1) if kind.embedding else 0.0
    working, sharded = transient + shared.exchanged, gathered + unreduced + shared.workspace
    at_backward, backward, end = again + working + sharded, working + sharded, embedding + shared.workspace
    # Gradients, activations and temporaries at the moments without activations of other layers, the update last.
    later = max((late, largest_layer, backward), (gradients, 0.0, end), (gradients, 0.0, update), key=sum)
    # The most that comes and goes then.
    least_loose, latest = max(largest_layer + backward, end), sum(later)
    gaps = shared.find_gaps(again) if heads else ()
    for stage in kind.stages:
        counts, temporary = shared.in_flight[stage], at_backward
        activations = sum(map(mul, counts, saved)) + staged
        if heads:
            activations += max([counts[number] for number in heads]) * shared.head_activations
        for number in heads:
            begun, count = min(counts[number], shared.before_input[stage][number]), counts[number]
            loss = loss_bytes(shared.model, strategy, begun, framework, count - begun)
            temporary = max(temporary, loss + (gathered + shared.workspace))
        loose = max(activations + temporary, least_loose)
        if shared.fills:
            filled = MEASURED["filled_share"] * min(loose, lasting + gradients)
            recomputed, fragmentation = shared.recomputed, shared.fragmentation[1]
            fragmentation = fragmentation * (2 - recomputed) * loose + recomputed * filled
        else:
            fragmentation = fragmented_bytes(shared.fragmentation, loose, lasting, update)
            for gap in gaps:
                fragmentation += gap
        moment = (early, activations, temporary)
        if latest > sum(moment):
            moment = later
        own_host = host + sum(map(mul, counts, on_host)) if staged else host
        own = (parameters, moment[0] + more_gradients + buckets, optimizer, moment[1], moment[2], fragmentation)
        stage_memory = StageMemory(stage, *own, *shared.beyond, own_host, shared.band)
        if shared.held_by_layer:
            # Nothing is held that would not be free otherwise, also at the upper end of the interval.
            spare = max(0.0, stage_memory.capacity - stage_memory.high) / shared.band.high
            held = sum(map(mul, counts, kind.layers)) * shared.held_by_layer
            stage_memory = replace(stage_memory, temporary=moment[2] + min(held, spare))
        every[stage] = stage_memory
