"""Bytes of parameters, gradients and optimizer states on one rank.

Per parameter of mixed-precision Adam: 2 for the weight, 4 (or 2) for its gradient, 12 for the fp32 copy and
two moments. ZeRO 1 splits the last over data-parallel ranks, ZeRO 2 the gradients as well, ZeRO 3 and FSDP
all (Rajbhandari et al. 2020, section 5); FSDP keeps one copy, in fp32, and gathers it in training precision.
"""

from dataclasses import dataclass

from stepcast.hardware.gpu import Gpu
from stepcast.ir.dtype import FP32_BYTES, DType
from stepcast.ir.framework import Framework, Kernels, Offloaded
from stepcast.ir.model import Model
from stepcast.ir.optimizer import OptimizerKind
from stepcast.ir.sharding import ShardingPlan, plan_of
from stepcast.ir.stages import StagePiece
from stepcast.ir.strategy import Strategy, TrainingKind
from stepcast.ir.trainable import Matrices, held_shard, trained_matrices, trained_shard
from stepcast.ir.weights import Shard, WeightPart

# Formats whose weights fused kernels keep quantised from one micro-batch to the next.
QUANTISED = (DType.FP8, DType.MXFP8, DType.NVFP4)
# GPUs whose matrix units multiply fp8 in either orientation.
EITHER_ORIENTATION = ("blackwell", "blackwell-ultra")


@dataclass(frozen=True, slots=True)
class States:
    parameters: float
    gradients: float
    optimizer: float
    host: float = 0.0  # in the memory of the host, instead of the GPU's

    def __add__(self, other: "States") -> "States":
        return States(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.host + other.host,
        )


def piece_states(
    model: Model, strategy: Strategy, framework: Framework, piece: StagePiece, orientations: int
) -> States:
    """What one rank keeps for *piece* all the time, each quantised weight in *orientations* copies; gradients
    as if none were freed.
    """
    held, trained = held_shard(model, strategy, piece), trained_shard(model, strategy, piece)
    plan, parameters = plan_of(strategy, framework), 0.0
    for part, each in plan.kinds(held):
        whole = whole_bytes(strategy, framework, each, orientations)
        parameters += _share_bytes(strategy, framework, each) / part.ways if part.collected else whole
    if strategy.training is TrainingKind.LORA:
        kept = FP32_BYTES if framework.keeps_fp32_weights(strategy) else strategy.weights.bytes
        for part, each in plan.kinds(trained):
            parameters += kept * each.total / (part.ways if part.collected else 1)
    gradients = gradient_bytes(strategy, framework, plan, trained)
    optimizer = optimizer_bytes(model, strategy, framework, piece, plan)
    states = States(parameters, gradients, optimizer)
    return _offloaded(states, strategy, framework, plan, trained) if strategy.offload.optimizer else states


def gradient_bytes(strategy: Strategy, framework: Framework, plan: ShardingPlan, trained: Shard) -> float:
    """Gradients of what one rank trains, all of them at once. PyTorch's FSDP casts what it reduced to the
    format of the sharded weights (torch.distributed.fsdp, MixedPrecisionPolicy); flat buffers keep theirs.
    """
    flat = framework.kernels is Kernels.FUSED
    wide = plan.splits_gradients and framework.keeps_fp32_weights(strategy) and not flat
    width = FP32_BYTES if wide else framework.gradient_dtype.bytes
    found = 0.0
    for part, each in plan.kinds(trained):
        ways = part.ways if plan.splits_gradients else 1
        found += width * each.total / ways
    return found


def _offloaded(states: States, strategy: Strategy, framework: Framework, plan: ShardingPlan, trained: Shard) -> States:
    """The host has weights, moments and fp32 gradients of what it updates (Megatron-Core's
    HybridDeviceOptimizer, DeepSpeed's ZeRO-Offload: 16 bytes a parameter); the GPU keeps what the software
    does not take along.
    """
    share, owned = strategy.offload.optimizer, plan.share(trained)
    split = framework.offloaded is not Offloaded.STATES and plan.splits_gradients
    weights = 0.0
    if not _copies_weights(strategy, framework):
        weights = FP32_BYTES if framework.keeps_fp32_weights(strategy) else strategy.weights.bytes
    return States(
        parameters=0.0 if framework.offloaded is Offloaded.WEIGHTS else states.parameters,
        gradients=states.gradients * (1 - share if split else 1),
        optimizer=states.optimizer * (1 - share),
        host=share * (states.optimizer + owned * (FP32_BYTES + weights)),
    )


def orientations(strategy: Strategy, gpu: Gpu) -> int:
    """Copies of each quantised weight: products of the forward and of the backward read it along other axes.

    Scales of blocks differ between the two; with one scale a copy is transposed for matrix units that need
    it (Transformer Engine, is_non_tn_fp8_gemm_supported).
    """
    return 1 if strategy.precision is DType.FP8 and gpu.architecture in EITHER_ORIENTATION else 2


def whole_bytes(strategy: Strategy, framework: Framework, shard: Shard, orientations: int) -> float:
    """Weights as the layers use them. Fused kernels keep them quantised from one micro-batch to the next,
    beside the stored ones or, with parameters in fp8, instead of them.
    """
    stored, quantised = strategy.weights.bytes, 0.0
    if strategy.precision in QUANTISED:
        copies = orientations if framework.kernels is Kernels.FUSED else int(strategy.fp8_parameters)
        quantised = copies * strategy.precision.bytes
    narrow = quantised if strategy.fp8_parameters else stored + quantised
    return narrow * shard.quantised + stored * shard.unquantised


def _share_bytes(strategy: Strategy, framework: Framework, shard: Shard) -> float:
    """What all ranks together keep of weights that they split."""
    if framework.keeps_fp32_weights(strategy):
        return FP32_BYTES * shard.total
    narrow = strategy.precision.bytes if strategy.fp8_parameters else strategy.weights.bytes
    return narrow * shard.quantised + strategy.weights.bytes * shard.unquantised


def optimizer_bytes(
    model: Model, strategy: Strategy, framework: Framework, piece: StagePiece, plan: ShardingPlan
) -> float:
    """Moments and, where the weights are less precise and it is not they that are kept, the fp32 copy."""
    optimizer, owned = framework.optimizer, plan.share(trained_shard(model, strategy, piece))
    copied = _copies_weights(strategy, framework)
    moments = optimizer.moments * owned
    if optimizer.knows_matrices:
        for each in trained_matrices(model, strategy, piece):
            part = plan.experts if each.part is WeightPart.EXPERTS else plan.dense
            moments -= _spared(optimizer.kind, each) / part.ways
    return moments * optimizer.moment_bytes + (FP32_BYTES * owned if copied else 0.0)


def _copies_weights(strategy: Strategy, framework: Framework) -> bool:
    """Whether the optimizer has weights of its own, besides those that layers use or ranks split."""
    narrow = strategy.weights is not DType.FP32 and not framework.keeps_fp32_weights(strategy)
    return framework.optimizer.master_weights and narrow


def _spared(kind: OptimizerKind, matrices: Matrices) -> int:
    """Elements that an optimizer does not keep of matrices, though it would of other weights: one moment of
    two; or a matrix, of which it keeps the sums of rows and of columns.
    """
    if kind is OptimizerKind.MUON:
        return matrices.elements if matrices.inside else 0
    return matrices.elements - matrices.count * (matrices.rows + matrices.columns)
