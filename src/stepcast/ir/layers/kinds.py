"""Every kind of layer half, declared once, and what a layer of two halves has: weights, operators, FLOPs.

A new kind is a module with a ``LayerKind`` and a line here: parameters, memory, FLOPs and operators follow.
"""

from functools import lru_cache

from stepcast.ir.architecture import Architecture, Shard, Weight, WeightPart
from stepcast.ir.layers.attention import ATTENTION
from stepcast.ir.layers.delta import DELTA
from stepcast.ir.layers.experts import EXPERTS
from stepcast.ir.layers.kind import LayerKind
from stepcast.ir.layers.mamba import MAMBA
from stepcast.ir.layers.mlp import MLP
from stepcast.ir.layers.selective import SELECTIVE
from stepcast.ir.layers.weights import adapted_linears, list_weights
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer

KINDS: dict[Mixer | FeedForward, LayerKind] = {
    Mixer.ATTENTION: ATTENTION,
    Mixer.MAMBA: MAMBA,
    Mixer.SELECTIVE: SELECTIVE,
    Mixer.DELTA: DELTA,
    FeedForward.DENSE: MLP,
    FeedForward.EXPERTS: EXPERTS,
}


def kinds_of(mixer: Mixer, feed_forward: FeedForward) -> list[LayerKind]:
    """Return the kinds of a layer's halves, of which either may be missing."""
    return [KINDS[half] for half in (mixer, feed_forward) if half in KINDS]


@lru_cache(maxsize=4096)
def block_weights(model: Architecture, mixer: Mixer, feed_forward: FeedForward) -> tuple[Weight, ...]:
    """Return the tensors of one layer, norms included."""
    kinds = kinds_of(mixer, feed_forward)
    weights = [weight for kind in kinds for weight in list_weights(model, kind.weights)]
    norms = (1 if model.shared_norm else len(kinds)) if model.pre_norms else 0
    names = [f"norm.{index}" for index in range(norms)]
    names += [f"post_norm.{index}" for index in range(len(kinds) if model.post_norms else 0)]
    return (*weights, *(Weight(name, WeightPart.NORM, (model.norm.vectors * model.hidden,)) for name in names))


def mixing_flops(model: Architecture, block: LayerParts, seq: int, batch: int, causal: bool) -> float:
    """Return a forward's products that mix tokens, that is those without weights."""
    kinds = kinds_of(block.mixer, block.feed_forward)
    mixing = (kind.mixing_flops(model, block, seq, batch, causal) for kind in kinds if kind.mixing_flops)
    return sum(mixing, start=0.0)


@lru_cache(maxsize=1024)
def adapter_shard(
    model: Architecture,
    mixer: Mixer,
    feed_forward: FeedForward,
    rank: int,
    tp: int = 1,
    ep: int = 1,
    expert_tp: int = 1,
    targets: tuple[str, ...] = (),
    separate: bool = False,
) -> Shard:
    """Return the two matrices of *rank* next to the *targets*, or every linear layer, of a block (Hu et al. 2021).

    Fused projections (q, k, v; gate and up) have one pair between them unless they are *separate*. The half that
    touches a split side is split with it.
    """
    dense = experts = 0
    pairs: set[str] = set()
    for linear in (linear for kind in kinds_of(mixer, feed_forward) for linear in adapted_linears(model, kind.weights)):
        if targets and linear.name not in targets:
            continue
        ways = (expert_tp if linear.experts else tp) if linear.split else 1
        shared = not separate and linear.pair in pairs
        inputs, outputs = (
            (linear.inputs // ways, linear.outputs) if linear.by_rows else (linear.inputs, linear.outputs // ways)
        )
        width = outputs + (0 if shared else inputs)
        pairs.add(linear.pair)
        if linear.experts:
            experts += rank * -(-linear.experts // ep) * width
        else:
            dense += rank * width
    return Shard(dense, experts, unquantised=dense)


@lru_cache(maxsize=1024)
def count_adapted(model: Architecture, targets: tuple[str, ...]) -> int:
    """Return the linear layers of all blocks among the *targets*, or all that LoRA can adapt."""
    return sum(
        not targets or linear.name in targets
        for block in model.blocks
        for kind in kinds_of(block.mixer, block.feed_forward)
        for linear in adapted_linears(model, kind.weights)
    )
