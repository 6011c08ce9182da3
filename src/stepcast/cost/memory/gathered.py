"""ZeRO and FSDP: weights that are gathered from their shards, and gradients that are not reduced yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepcast.cost.memory.states import whole_bytes
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.sharding import Gathered, Reduced, ShardingPlan, gathered_bytes, plan_of
from stepcast.ir.stages import StagePiece
from stepcast.ir.strategy import Strategy
from stepcast.ir.trainable import held_shard, trained_shard


@dataclass(frozen=True, slots=True)
class Collected:
    """Bytes of a piece that are whole for a while: its weights, and its gradients beyond the rank's share."""

    weights: float
    gradients: float


NONE = Collected(0.0, 0.0)


def collected(
    model: Model, strategy: Strategy, framework: Framework, piece: StagePiece, orientations: int
) -> Collected:
    """What is whole at the fullest moment."""
    plan = plan_of(strategy, framework)
    if not (plan.by_unit or plan.splits_gradients):
        return NONE
    units = _units(model, piece)
    return Collected(
        _weights(model, strategy, framework, piece, units, orientations),
        _gradients(model, strategy, framework, piece, units),
    )


def keeps_weights(plan: ShardingPlan) -> bool:
    """Whether gathered weights of all layers, and so of all pieces, exist at the same time."""
    return plan.gathered in (Gathered.EACH_MICRO_BATCH, Gathered.ONCE)


def _weights(
    model: Model,
    strategy: Strategy,
    framework: Framework,
    piece: StagePiece,
    units: Sequence[StagePiece],
    orientations: int,
) -> float:
    """The unit at work and, as it was gathered, the next one; or all of them."""
    plan = plan_of(strategy, framework)
    if keeps_weights(plan):
        return whole_bytes(strategy, framework, plan.collected(held_shard(model, strategy, piece)), orientations)
    if plan.gathered is not Gathered.EACH_PASS:
        return 0.0
    shards = [plan.collected(held_shard(model, strategy, unit)) for unit in units]
    return max(
        (whole_bytes(strategy, framework, each, orientations) + gathered_bytes(strategy, each) for each in shards),
        default=0.0,
    )


def _gradients(
    model: Model, strategy: Strategy, framework: Framework, piece: StagePiece, units: Sequence[StagePiece]
) -> float:
    """Those of the unit at work, as they are computed, and where they are reduced once all sums so far."""
    plan = plan_of(strategy, framework)
    shards = (plan.unreduced(trained_shard(model, strategy, unit)) for unit in units)
    fresh = max((each.total for each in shards), default=0) * strategy.stored.bytes
    if plan.reduced is Reduced.EACH_MICRO_BATCH:
        return fresh
    split = plan.unreduced(trained_shard(model, strategy, piece))
    return fresh + (split.total - plan.share(split)) * framework.gradient_dtype.bytes


def _units(model: Model, piece: StagePiece) -> list[StagePiece]:
    """One of each kind that is gathered and reduced by itself: layers, and either end."""
    blocks = model.blocks
    kinds = {blocks[layer]: layer for layer in piece.layers}
    none = range(piece.layers.start, piece.layers.start)
    units = [StagePiece(range(layer, layer + 1), False, False) for layer in kinds.values()]
    if piece.embedding:
        units.append(StagePiece(none, True, False))
    if piece.head:
        units.append(StagePiece(none, False, True))
    return units
