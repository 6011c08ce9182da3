"""Every kind of layer half, declared once, and what a layer of two halves has: weights, operators, FLOPs
and saved activations.

A new kind is a module and a line here: parameters, memory, FLOPs and operators follow.

Saved activations are the bytes that a layer saves from its forward until its backward, tensor by tensor. Each kind of
half lists its own tensors; the norms around it are added here. A recomputed module frees the tensors that
``generate.recompute`` makes anew and keeps its input; they are back while its half of the layer runs backward.
"""

from collections.abc import Callable
from functools import lru_cache

from stepcast.ir.architecture import Architecture, Shard, Weight, WeightPart
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.layers import attention, delta, experts, mamba, mlp, selective
from stepcast.ir.layers.lists import adapted_linears, list_weights, norm_readers
from stepcast.ir.layers.sizes import MASK_BYTES, SavedTensor, Sizes
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.strategy import BaseWeights, RecomputeModule, Strategy
from stepcast.ir.types import FP32_BYTES, dataclass
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
        inputs = 0 if shared else linear.inputs // (ways if linear.by_rows else 1)
        width = inputs + linear.outputs // (1 if linear.by_rows else ways)
        pairs.add(linear.pair)
        if linear.experts:
            experts += rank * -(-linear.experts // ep) * width
        else:
            dense += rank * width
    return Shard(dense, experts, unquantised=dense)


@lru_cache(maxsize=1024)
def count_adapted(model: Architecture, targets: tuple[str, ...], layers: range | None = None) -> int:
    """Return the linear layers among the *targets*, or all that LoRA can adapt, of all blocks or of some *layers*."""
    blocks = model.blocks if layers is None else model.blocks[layers.start : layers.stop]
    kinds = [kind for block in blocks for kind in kinds_of(block.mixer, block.feed_forward)]
    linears = (linear for kind in kinds for linear in adapted_linears(model, kind.weights))
    return sum(not targets or linear.name in targets for linear in linears)


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Bytes of one layer and one micro-batch on one rank.

    *input* is what remains where the full layer is recomputed. *transient* is what its backward (or its
    recomputed forward and backward) needs on top for a moment. *again* is how much more it needs while
    recomputed modules are back, where it is not recomputed as a whole.
    """

    saved: float
    input: float
    transient: float
    again: float = 0.0

    def after(self, is_recomputed: bool) -> float:
        return self.input if is_recomputed else self.saved


@lru_cache(maxsize=4096)
def count_saved(
    model: Architecture, strategy: Strategy, block: LayerParts, framework: Framework = MEGATRON_CORE
) -> SavedActivations:
    """Return the saved activations of a layer of kind *block*."""
    sizes = Sizes(model, strategy, framework)
    layer_input = sizes.outer_share * model.hidden * sizes.stream.bytes
    halves = saved_halves(sizes, block)
    if sizes.alternates_matmuls:
        # torchtitan's selective recomputation saves the layer's input and the outputs of every second matmul.
        transient = max(kind.transient(sizes, block) for kind in kinds_of(block.mixer, FeedForward.DENSE))
        saved = layer_input + sum(tensor.size_bytes for tensors, _ in halves for tensor in tensors)
        return SavedActivations(saved, layer_input, transient)
    modules = frozenset(sizes.strategy.recompute.selected)
    if sizes.framework.fused_experts:  # an activation inside the experts' matmul has no kernel to run again
        modules -= {RecomputeModule.EXPERT_ACTIVATION}
    saved = peak = transient = 0.0
    for tensors, half_transient in halves:
        freed = sum(tensor.size_bytes for tensor in tensors if modules.intersection(tensor.freed_by))
        saved += sum(tensor.size_bytes for tensor in tensors) - freed
        transient = max(transient, half_transient)
        peak = max(peak, half_transient + freed)
    return SavedActivations(saved, layer_input, transient, peak - transient)


def saved_halves(sizes: Sizes, block: LayerParts) -> list[tuple[list[SavedTensor], float]]:
    """Return the saved tensors of mixer and feed-forward, norms included, and the transient of each."""
    model, halves = sizes.model, []
    for kind in kinds_of(block.mixer, block.feed_forward):
        # Elsewhere the norm is part of the linear layer after it, which recomputation leaves alone.
        own_norm = kind is KINDS[FeedForward.EXPERTS] or (kind is KINDS[Mixer.ATTENTION] and model.latent is not None)
        normed = kind is KINDS.get(block.mixer) or not (model.shared_norm and block.mixer is Mixer.ATTENTION)
        tensors = [*_saved_norms(sizes, kind, own_norm, normed), *kind.saved(sizes, block)]
        halves.append(([*tensors, *_saved_by_adapters(sizes, kind)], _transient(sizes, kind, block)))
    return halves


def _transient(sizes: Sizes, kind: LayerKind, block: LayerParts) -> float:
    """Return the bytes that a half's backward needs for a moment: of 4-bit weights also the largest, dequantised."""
    linears, stored, dequantised, weighed = adapted_linears(sizes.model, kind.weights), sizes.stored.bytes, 0.0, 0.0
    if sizes.strategy.base_weights is not BaseWeights.TRAINED:
        dequantised = stored * max((float(linear.inputs * linear.outputs) for linear in linears), default=0.0)
    if sizes.strategy.dora:
        # The identity by which peft multiplies, in fp32 and cast, and its product: in the forward that runs again.
        weighed = max(
            (linear.inputs * ((FP32_BYTES + stored) * linear.inputs + stored * linear.outputs) for linear in linears),
            default=0.0,
        )
    return max(kind.transient(sizes, block) + dequantised, weighed)


def _saved_by_adapters(sizes: Sizes, kind: LayerKind) -> list[SavedTensor]:
    """Return what peft's adapters save: the narrow product, a mask of dropout, and the input of the output
    projection as autocast cast it (the others' inputs are counted where they are made).
    """
    if not (sizes.strategy.lora_rank and sizes.eager_modules):
        return []
    linears = [linear for linear in adapted_linears(sizes.model, kind.weights) if sizes.count_adapted(linear.name)]
    saved = len(linears) * sizes.strategy.lora_rank * sizes.stored.bytes
    saved += sum(linear.inputs * MASK_BYTES for linear in linears) if sizes.strategy.lora_dropout else 0.0
    if sizes.casts_adapter_inputs:
        saved += sum(linear.inputs * sizes.stored.bytes for linear in linears if linear.name == "output")
    if sizes.strategy.dora:  # what magnitudes multiply: the base's result and the adapters'
        saved += sum(2 * linear.outputs * sizes.stored.bytes for linear in linears)
    return [SavedTensor("adapters", sizes.tokens * saved)]


def _saved_norms(sizes: Sizes, kind: LayerKind, own_norm: bool, normed: bool) -> list[SavedTensor]:
    """Return the input of a norm, its output, which the products after it need, the input of a norm at the
    end and dropout's mask. *own_norm*: the norm is a kernel of its own, which recomputation can run again.
    """
    model, outer = sizes.model, sizes.outer_share * sizes.model.hidden
    if sizes.alternates_matmuls:
        return [] if kind.alternates else [SavedTensor("norm output", outer * sizes.stored.bytes)]
    input_bytes = sizes.stream.bytes
    if sizes.writes_out_norms:
        # Its input in fp32 and what its weight multiplies.
        weighted = FP32_BYTES if model.wide_norms else sizes.stream.bytes
        input_bytes = FP32_BYTES + (weighted if sizes.trains_norms else 0.0)
    tensors = []
    if normed:
        output_bytes = sizes.matmul_bytes if sizes.fused_by_hand else sizes.stored.bytes
        copies = sizes.input_copies(*norm_readers(model, kind.weights))
        freed_by = (RecomputeModule.NORMS,) if own_norm else ()
        tensors.append(SavedTensor("norm output", outer * output_bytes * copies, freed_by))
        if model.pre_norms:
            tensors.append(SavedTensor("norm input", outer * input_bytes))
    if model.post_norms:
        tensors.append(SavedTensor("norm input at the end", outer * input_bytes))
    if sizes.mask_bytes:
        tensors.append(SavedTensor("dropout mask", outer * sizes.mask_bytes))
    return tensors
