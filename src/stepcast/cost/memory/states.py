"""Bytes of parameters, gradients and optimizer states on one rank, and of a checkpoint of them.

Per parameter of mixed-precision Adam: 2 for the weight, 4 (or 2) for its gradient, 12 for the fp32 copy and
two moments. ZeRO 1 splits the last over data-parallel ranks, ZeRO 2 the gradients as well, ZeRO 3 and FSDP
all (Rajbhandari et al. 2020, section 5); FSDP keeps one copy, in fp32, and gathers it in training precision.
"""

from typing import NamedTuple

from stepcast.hardware.cluster import Gpu
from stepcast.ir.architecture import Shard, WeightPart
from stepcast.ir.dataclass import dataclass
from stepcast.ir.dtype import FP32_BYTES, DType
from stepcast.ir.framework import Framework, Kernels, Modules, Offloaded, OptimizerKind
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model, StagePiece, held_shard, trained_matrices, trained_shard
from stepcast.ir.sharding import Gathered, Reduced, ShardingPlan, gathered_bytes, plan_of
from stepcast.ir.strategy import BaseWeights, Objective, Strategy, TrainingKind

# Formats whose weights fused kernels keep quantised from one micro-batch to the next.
QUANTISED = (DType.FP8, DType.MXFP8, DType.NVFP4)
# GPUs whose matrix units multiply fp8 in either orientation.
EITHER_ORIENTATION = ("blackwell", "blackwell-ultra")


class States(NamedTuple):
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    host: float = 0.0  # in the memory of the host, instead of the GPU's


def piece_states(
    model: Model, strategy: Strategy, framework: Framework, piece: StagePiece, orientations: int
) -> States:
    """Return what one rank keeps for *piece* all the time, each quantised weight in *orientations* copies; gradients
    as if none were freed.
    """
    held, trained = held_shard(model, strategy, piece), trained_shard(model, strategy, piece)
    plan, parameters = plan_of(strategy, framework), 0.0
    for part, shard in plan.kinds(held):
        unsharded = unsharded_bytes(strategy, framework, shard, orientations)
        parameters += _sharded_bytes(strategy, framework, shard) / part.ways if part.collected else unsharded
    if strategy.training is TrainingKind.LORA:
        for part, shard in plan.kinds(trained):
            width = FP32_BYTES if framework.fp32_adapters else _stored_bytes(strategy, framework)
            parameters += width * shard.total / (part.ways if part.collected else 1)
    elif strategy.objective is Objective.DPO:
        parameters *= 2  # the reference; under LoRA it is the model without its adapters
    gradients = gradient_bytes(strategy, framework, plan, trained)
    optimizer = optimizer_bytes(model, strategy, framework, piece, plan)
    states = States(parameters, gradients, optimizer)
    return _offload(states, strategy, framework, plan, trained) if strategy.offload.optimizer else states


def _stored_bytes(strategy: Strategy, framework: Framework) -> float:
    return FP32_BYTES if framework.keeps_fp32_weights(strategy) else strategy.weights.bytes


def gradient_bytes(strategy: Strategy, framework: Framework, plan: ShardingPlan, trained: Shard) -> float:
    """Return the bytes of all gradients that one rank keeps. PyTorch's FSDP casts what it reduced to the
    format of the sharded weights (torch.distributed.fsdp, MixedPrecisionPolicy); flat buffers keep theirs.
    """
    flat = framework.kernels is Kernels.FUSED
    wide = plan.splits_gradients and framework.keeps_fp32_weights(strategy) and not flat
    width = FP32_BYTES if wide else framework.gradient_dtype.bytes
    total = 0.0
    for part, shard in plan.kinds(trained):
        total += width * shard.total / (part.ways if plan.splits_gradients else 1)
    return total


def _offload(states: States, strategy: Strategy, framework: Framework, plan: ShardingPlan, trained: Shard) -> States:
    """Move states to the host, which has weights, moments and fp32 gradients of what it updates (Megatron-Core's
    HybridDeviceOptimizer, DeepSpeed's ZeRO-Offload: 16 bytes a parameter); the GPU keeps what the software
    does not move.
    """
    share, owned = strategy.offload.optimizer, plan.share(trained)
    split = framework.offloaded is not Offloaded.STATES and plan.splits_gradients
    weights = 0.0 if _copies_weights(strategy, framework) else _stored_bytes(strategy, framework)
    return States(
        parameters=0.0 if framework.offloaded is Offloaded.WEIGHTS else states.parameters,
        gradients=states.gradients * (1 - share if split else 1),
        optimizer=states.optimizer * (1 - share),
        host=share * (states.optimizer + owned * (FP32_BYTES + weights)),
    )


def orientations(strategy: Strategy, gpu: Gpu) -> int:
    """Return the copies of each quantised weight: forward and backward products read it along different axes.

    Scales of blocks differ between the two; with one scale a copy is transposed for matrix units that need
    it (Transformer Engine, is_non_tn_fp8_gemm_supported).
    """
    return 1 if strategy.precision is DType.FP8 and gpu.architecture in EITHER_ORIENTATION else 2


def unsharded_bytes(strategy: Strategy, framework: Framework, shard: Shard, orientations: int) -> float:
    """Return the bytes of weights as the layers use them. Fused kernels keep them quantised from one micro-batch to
    the next, in addition to the stored ones or, with parameters in fp8, instead of them.
    """
    stored, quantised = strategy.weights.bytes, 0.0
    if strategy.precision in QUANTISED:
        copies = orientations if framework.kernels is Kernels.FUSED else int(strategy.fp8_parameters)
        quantised = copies * strategy.precision.bytes
    narrow = quantised if strategy.fp8_parameters else stored + quantised
    if strategy.base_weights is not BaseWeights.TRAINED:
        narrow = strategy.base_weights.bytes
    return narrow * shard.quantised + stored * shard.unquantised


def _sharded_bytes(strategy: Strategy, framework: Framework, shard: Shard) -> float:
    """Return what all ranks together keep of weights that they split."""
    if strategy.base_weights is not BaseWeights.TRAINED:
        return strategy.base_weights.bytes * shard.quantised + strategy.weights.bytes * shard.unquantised
    if framework.keeps_fp32_weights(strategy):
        return FP32_BYTES * shard.total
    narrow = strategy.precision.bytes if strategy.fp8_parameters else strategy.weights.bytes
    return narrow * shard.quantised + strategy.weights.bytes * shard.unquantised


def optimizer_bytes(
    model: Model, strategy: Strategy, framework: Framework, piece: StagePiece, plan: ShardingPlan
) -> float:
    """Return the bytes of moments and, where the stored weights are less precise, of the fp32 copy."""
    optimizer, owned = framework.optimizer, plan.share(trained_shard(model, strategy, piece))
    copied = _copies_weights(strategy, framework)
    moments = optimizer.moments * owned
    if optimizer.knows_matrices:
        for matrices in trained_matrices(model, strategy, piece):
            part = plan.experts if matrices.part is WeightPart.EXPERTS else plan.dense
            if optimizer.kind is OptimizerKind.MUON:  # one moment of two
                spared = matrices.elements if matrices.inside else 0
            else:  # all but the sums of rows and of columns
                spared = matrices.elements - matrices.count * (matrices.rows + matrices.columns)
            moments -= spared / part.ways
    wide = 0.0
    if optimizer.moment_dtype is DType.INT8 and framework.modules is Modules.TRANSFORMERS and piece.embedding:
        # Embeddings keep 32-bit moments (transformers, Trainer: register_module_override of bitsandbytes).
        words = model.vocab * (model.embedding_width or model.hidden) / strategy.layout.tp / plan.dense.ways
        trained = strategy.training is TrainingKind.FULL
        wide = words * optimizer.moments * (FP32_BYTES - optimizer.moment_bytes) if trained else 0.0
    return moments * optimizer.moment_bytes + wide + (FP32_BYTES * owned if copied else 0.0)


def _copies_weights(strategy: Strategy, framework: Framework) -> bool:
    """Return whether the optimizer has weights of its own, besides those that layers use or ranks split."""
    narrow = strategy.weights is not DType.FP32 and not framework.keeps_fp32_weights(strategy)
    return framework.optimizer.master_weights and narrow


def checkpoint_bytes(model: Model, strategy: Strategy, framework: Framework) -> float:
    """Return the bytes of a checkpoint: the weights that are trained and the states of the optimizer, once.

    BLOOM's is an example: 2 bytes of bf16 weights, 4 of their fp32 copy and 8 of moments for each of 176 billion
    parameters are 2.24 TiB, and its authors report 2.3 TB (BigScience 176B model, engineering side).
    """
    single = Strategy(
        Layout(),
        micro_batch=1,
        global_batch=1,
        seq=strategy.seq,
        precision=strategy.precision,
        autocast=strategy.autocast,
        sharding=strategy.sharding,
        training=strategy.training,
        lora_rank=strategy.lora_rank,
        further_tokens=strategy.further_tokens,
    )
    piece = StagePiece(range(model.layers), embedding=True, head=True)
    states = optimizer_bytes(model, single, framework, piece, plan_of(single, framework))
    return _stored_bytes(single, framework) * trained_shard(model, single, piece).total + states


# ZeRO and FSDP: weights that are gathered from their shards, and gradients that are not reduced yet.


@dataclass(frozen=True, slots=True)
class Collected:
    """Bytes of a piece that are unsharded for a while: its weights, and its gradients beyond the rank's share."""

    weights: float
    gradients: float


def collected_bytes(
    model: Model, strategy: Strategy, framework: Framework, piece: StagePiece, orientations: int
) -> Collected:
    """Return what is unsharded at the fullest moment."""
    plan = plan_of(strategy, framework)
    if not (plan.by_unit or plan.splits_gradients):
        return Collected(0.0, 0.0)
    units = _list_units(model, piece)
    weights = 0.0
    if keeps_weights(plan):
        shard = plan.collected(held_shard(model, strategy, piece))
        weights = unsharded_bytes(strategy, framework, shard, orientations)
    elif plan.gathered is Gathered.EACH_PASS:
        # The unit at work and, as it was gathered, the next one.
        shards = [plan.collected(held_shard(model, strategy, unit)) for unit in units]
        sizes = (
            unsharded_bytes(strategy, framework, shard, orientations) + gathered_bytes(strategy, shard)
            for shard in shards
        )
        weights = max(sizes, default=0.0)
    # Gradients of the unit at work, as they are computed, and where they are reduced once all sums so far.
    unreduced = (plan.unreduced(trained_shard(model, strategy, unit)) for unit in units)
    gradients = max((shard.total for shard in unreduced), default=0) * strategy.stored.bytes
    if plan.reduced is not Reduced.EACH_MICRO_BATCH:
        split = plan.unreduced(trained_shard(model, strategy, piece))
        gradients += (split.total - plan.share(split)) * framework.gradient_dtype.bytes
    return Collected(weights, gradients)


def keeps_weights(plan: ShardingPlan) -> bool:
    """Return whether gathered weights of all layers, and so of all pieces, exist at the same time."""
    return plan.gathered in (Gathered.EACH_MICRO_BATCH, Gathered.ONCE)


def _list_units(model: Model, piece: StagePiece) -> list[StagePiece]:
    """Return one of each kind that is gathered and reduced by itself: layers, and either end."""
    kinds = dict(zip(model.blocks[piece.layers.start : piece.layers.stop], piece.layers, strict=True))
    none = range(piece.layers.start, piece.layers.start)
    units = [StagePiece(range(layer, layer + 1), False, False) for layer in kinds.values()]
    if piece.embedding:
        units.append(StagePiece(none, True, False))
    if piece.head:
        units.append(StagePiece(none, False, True))
    return units
