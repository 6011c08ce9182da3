"""Floating-point operations that a model needs for a training step."""

from functools import lru_cache

from stepcast.ir.architecture import Weight, WeightPart
from stepcast.ir.layers.kinds import adapter_shard, mixing_flops
from stepcast.ir.layers.lists import list_weights
from stepcast.ir.model import Model


def model_flops(
    model: Model,
    seq: int,
    batch: int,
    *,
    causal: bool = False,
    mtp_layers: int = 0,
    lora_rank: int = 0,
    lora_targets: tuple[str, ...] = (),
    processed_share: float = 1.0,
    document: int = 0,
    reference: bool = False,
    trained_layers: int = 0,
) -> float:
    """Return the FLOPs of training on *batch* sequences, without recomputation; a backward is twice its forward.

    For a dense GPT this is 72 B s l h^2 (1 + s / 6h + V / 12lh), as Narayanan et al. (2021, appendix) count,
    which takes attention as the full square; *causal* counts the half that is needed. Of routed experts the
    top_k chosen ones count, for the *processed_share* of their tokens. Each of *mtp_layers* is a
    module and the head once more. With LoRA frozen weights have no gradient of their own, which leaves two
    thirds of theirs, as Megatron-Bridge counts (flop_utils.py), and adapters of *lora_rank* come on top. In
    packed sequences attention stays within a *document*. A *reference* adds a forward. Where
    only some *trained_layers* are trained, the head has an input gradient and the layers below them no backward.
    """
    if document and document < seq:
        seq, batch = document, round(batch * seq / document)
    weights, mixing = _forward_flops(model, seq, batch, causal, mtp_layers, processed_share)
    frozen = weights + mixing if reference else 0.0
    if trained_layers:
        head = 2.0 * seq * batch * sum(_products_per_token(model, weight) for weight in list_weights(model, "head"))
        backward = head + 2.0 * (weights - head + mixing) * min(1.0, trained_layers / model.layers)
        return weights + mixing + backward + frozen
    if not lora_rank:
        return 3.0 * (weights + mixing) + frozen
    adapters = _adapter_flops(model, seq * batch, lora_rank, lora_targets, processed_share)
    return 2.0 * weights + 3.0 * (mixing + adapters) + frozen


@lru_cache(maxsize=1024)
def _forward_flops(
    model: Model, seq: int, batch: int, causal: bool, mtp_layers: int, processed_share: float
) -> tuple[float, float]:
    """Return a forward's products with weights, and those that mix tokens: attention and scans."""
    tokens = float(batch * seq)
    head = 2.0 * tokens * sum(_products_per_token(model, weight) for weight in list_weights(model, "head"))
    weights = head * (1 + mtp_layers) + mtp_layers * 4.0 * tokens * model.hidden * model.hidden
    if model.embedding_width and model.embedding_width != model.hidden:
        weights += 2.0 * tokens * model.embedding_width * model.hidden
    mixing = 0.0
    for block in (*model.blocks, *model.next_token_blocks * mtp_layers):
        products = (_products_per_token(model, weight, processed_share) for weight in model.block_weights(block))
        weights += 2.0 * tokens * sum(products)
        mixing += mixing_flops(model, block, seq, batch, causal)
    return weights, mixing


def _adapter_flops(model: Model, tokens: int, rank: int, targets: tuple[str, ...], processed_share: float) -> float:
    """Return a forward's products with LoRA's adapters."""
    total = 0.0
    for block in model.blocks:
        shard = adapter_shard(model, block.mixer, block.feed_forward, rank, targets=targets)
        chosen = model.experts.top_k / model.experts.count * processed_share if model.experts else 0.0
        total += 2.0 * tokens * (shard.dense + shard.experts * chosen)
    return total


def _products_per_token(model: Model, weight: Weight, processed_share: float = 1.0) -> float:
    """Return the multiplications per token: the elements of a matrix, of experts those of the chosen ones."""
    if not weight.is_multiplied:
        return 0.0
    if weight.part is WeightPart.EXPERTS and model.experts is not None:
        return weight.elements / model.experts.count * model.experts.top_k * processed_share
    return float(weight.elements)
