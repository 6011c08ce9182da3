"""Every kind of layer half, declared once, and what a layer of two halves has: weights, operators, FLOPs.

A new kind is a module and a line here: parameters, memory, FLOPs and operators follow.
"""

from collections.abc import Callable
from functools import lru_cache

from stepcast.ir.architecture import Architecture, Shard, Weight, WeightPart
from stepcast.ir.layers import attention, delta, experts, mamba, mlp, selective
from stepcast.ir.layers.sizes import SavedTensor, Sizes
from stepcast.ir.layers.weights import adapted_linears, list_weights
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.types import dataclass
from stepcast.ir.workload import Layer


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer half, a token mixer or a feed-forward.

    *weights* is the list of its tensors in ``data/weights.txt``, without the norms around it; parameters, optimizer
    states, adapters and the FLOPs of products with weights are sums over them. *mixing_flops* are the forward's other
    products, if any. *operators* are its layers in the order of the forward, norms included. *saved* are the tensors it
    saves for the backward without those norms, *transient* the bytes that its backward needs on top for a moment.
    *alternates*: torchtitan's selective recomputation knows its matmuls.
    """

    weights: str
    mixing_flops: Callable[[Architecture, LayerParts, int, int, bool], float] | None
    operators: Callable[[Sizes, LayerParts], tuple[Layer, ...]]
    saved: Callable[[Sizes, LayerParts], list[SavedTensor]]
    transient: Callable[[Sizes, LayerParts], float]
    alternates: bool = True


ATTENTION = (attention.count_mixing_flops, attention.list_operators, attention.list_saved, attention.transient_bytes)
MAMBA = (mamba.count_mixing_flops, mamba.list_operators, mamba.list_saved, mamba.transient_bytes)
SELECTIVE = (selective.count_mixing_flops, selective.list_operators, selective.list_saved, selective.transient_bytes)
DELTA = (delta.count_mixing_flops, delta.list_operators, delta.list_saved, delta.transient_bytes)
KINDS: dict[Mixer | FeedForward, LayerKind] = {
    Mixer.ATTENTION: LayerKind("attention", *ATTENTION),
    Mixer.MAMBA: LayerKind("mamba", *MAMBA, alternates=False),
    Mixer.SELECTIVE: LayerKind("selective", *SELECTIVE, alternates=False),
    Mixer.DELTA: LayerKind("delta", *DELTA, alternates=False),
    FeedForward.DENSE: LayerKind("mlp", None, mlp.list_operators, mlp.list_saved, mlp.transient_bytes),
    FeedForward.EXPERTS: LayerKind(
        "experts", None, experts.list_operators, experts.list_saved, experts.transient_bytes
    ),
}


def kinds_of(mixer: Mixer, feed_forward: FeedForward) -> list[LayerKind]:
    """Return the kinds of a layer's halves; either may be missing."""
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
