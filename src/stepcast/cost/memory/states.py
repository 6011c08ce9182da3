"""Bytes of parameters, gradients and optimizer states on one rank.

Per parameter of mixed-precision Adam: 2 for the weight, 4 (or 2) for its gradient, 12 for the fp32 copy and
two moments. ZeRO 1 splits the last over data-parallel ranks, ZeRO 2 the gradients as well, ZeRO 3 and FSDP
all (Rajbhandari et al. 2020, section 5); FSDP keeps one copy, in fp32, and gathers it in training precision.
"""

from dataclasses import dataclass

from stepcast.ir.dtype import DType
from stepcast.ir.model import Model
from stepcast.ir.stages import Piece
from stepcast.ir.strategy import Kernels, Sharding, Strategy, TrainingKind
from stepcast.ir.trainable import held_shard, trained_shard
from stepcast.ir.weights import Shard

FP32_BYTES = DType.FP32.bytes
# Formats whose weights are kept quantised, in both orientations, from one micro-batch to the next.
QUANTISED = (DType.FP8, DType.MXFP8, DType.NVFP4)


@dataclass(frozen=True, slots=True)
class States:
    parameters: float
    gradients: float
    optimizer: float

    def __add__(self, other: "States") -> "States":
        return States(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


def split_ways(strategy: Strategy) -> tuple[int, int]:
    """Ranks that share the states of dense and of expert parameters."""
    if strategy.sharding is Sharding.NONE:
        return 1, 1
    return strategy.layout.shard_size, strategy.layout.expert_dp


def piece_states(model: Model, strategy: Strategy, piece: Piece) -> States:
    """What one rank keeps for *piece* all the time; gradients as if none were freed."""
    held, trained = held_shard(model, strategy, piece), trained_shard(model, strategy, piece)
    adapters = trained if strategy.training is TrainingKind.LORA else Shard(0, 0)
    ways, sharding = split_ways(strategy), strategy.sharding
    fsdp = sharding in (Sharding.FSDP, Sharding.HYBRID_FSDP)
    weight = FP32_BYTES if fsdp and strategy.optimizer.master_weights else strategy.stored.bytes
    whole = _split(held, (1, 1)) + _split(adapters, (1, 1))
    shared = _split(held, ways) + _split(adapters, ways)
    parameters = weight * (shared if sharding.splits_parameters else whole)
    if strategy.precision in QUANTISED and strategy.kernels is Kernels.FUSED:
        parameters += 2 * strategy.precision.bytes * _split(held, (1, 1))
    gradient = strategy.gradient_dtype.bytes
    gradients = gradient * _split(trained, ways if sharding.splits_gradients else (1, 1))
    return States(parameters, gradients, optimizer_bytes(strategy, fsdp) * _split(trained, ways))


def optimizer_bytes(strategy: Strategy, fsdp: bool = False) -> float:
    """Moments and, where the weights are less precise and it is not they that are kept, the fp32 copy."""
    optimizer = strategy.optimizer
    copied = optimizer.master_weights and strategy.stored is not DType.FP32 and not fsdp
    return optimizer.moments * optimizer.moment_dtype.bytes + (FP32_BYTES if copied else 0.0)


def _split(shard: Shard, ways: tuple[int, int]) -> float:
    return shard.dense / ways[0] + shard.experts / ways[1]
