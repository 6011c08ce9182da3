"""Floating-point operations of a training step: what the model asks for, and what a workload executes."""

from functools import lru_cache

from stepcast.generate.context import window_keys
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Mixer
from stepcast.ir.recurrent import SelectiveScan, delta_rule_of, scan_of
from stepcast.ir.trainable import adapter_shard
from stepcast.ir.weights import Weight, WeightPart, head_weights

# Parts whose weights are looked up, scale or shift, and multiply no matrix.
NOT_MULTIPLIED = (WeightPart.EMBEDDING, WeightPart.POSITION, WeightPart.NORM)
# Weights of Mamba blocks and delta nets of single channels and heads, which are no matrices either.
PER_CHANNEL = ("mamba.conv", "mamba.heads", "selective.conv", "delta.conv", "delta.heads")
# Works that count: matrix products, attention, and what runs along the sequence.


def model_flops(
    model: Model,
    seq: int,
    batch: int,
    *,
    causal: bool = False,
    further_tokens: int = 0,
    lora_rank: int = 0,
    kept_share: float = 1.0,
) -> float:
    """What training on *batch* sequences needs, without recomputation; a backward is twice its forward.

    For a dense GPT this is 72 B s l h^2 (1 + s / 6h + V / 12lh), as Narayanan et al. (2021, appendix) count,
    which takes attention as the full square; *causal* counts the half that is needed. Of routed experts the
    top_k chosen ones count, as far as they keep their tokens (*kept_share*). Each of *further_tokens* is a
    module and the head once more. With LoRA frozen weights have no gradient of their own, which leaves two
    thirds of theirs, as Megatron-Bridge counts (flop_utils.py), and adapters of *lora_rank* come on top.
    """
    weights, mixing = _forward(model, seq, batch, causal, further_tokens, kept_share)
    if not lora_rank:
        return 3.0 * (weights + mixing)
    return 2.0 * weights + 3.0 * (mixing + _adapter_flops(model, seq * batch, lora_rank, kept_share))


@lru_cache(maxsize=1024)
def _forward(
    model: Model, seq: int, batch: int, causal: bool, further_tokens: int, kept_share: float
) -> tuple[float, float]:
    """A forward's products with weights, and those that mix tokens: attention and scans."""
    tokens = float(batch * seq)
    head = 2.0 * tokens * sum(_multiplied(model, weight) for weight in head_weights(model))
    weights = head * (1 + further_tokens) + further_tokens * 4.0 * tokens * model.hidden * model.hidden
    if model.embedding_width and model.embedding_width != model.hidden:
        weights += 2.0 * tokens * model.embedding_width * model.hidden
    mixing = 0.0
    for block in (*model.blocks, *model.next_token_blocks * further_tokens):
        multiplied = (_multiplied(model, weight, kept_share) for weight in model.block_weights(block))
        weights += 2.0 * tokens * sum(multiplied)
        if block.mixer is Mixer.ATTENTION:
            keys: float = seq / 2 if causal else seq
            keys = min(keys, window_keys(seq, block) or keys)
            mixing += 2.0 * tokens * keys * model.heads * (model.head_dim + model.value_dim)
        else:
            mixing += _scan_flops(model, block.mixer, seq, batch)
    return weights, mixing


def _adapter_flops(model: Model, tokens: int, rank: int, kept_share: float) -> float:
    """A forward's products with LoRA's adapters."""
    total = 0.0
    for block in model.blocks:
        shard = adapter_shard(model, block.mixer, block.feed_forward, rank)
        chosen = model.experts.top_k / model.experts.count * kept_share if model.experts else 0.0
        total += 2.0 * tokens * (shard.dense + shard.experts * chosen)
    return total


def _scan_flops(model: Model, mixer: Mixer, seq: int, batch: int) -> float:
    """What runs along the sequence, as it is executed: products of the chunked form (Dao and Gu 2024,
    section 6), of the delta rule in chunks, or a selective scan.
    """
    if mixer is Mixer.MAMBA and model.hybrid is not None:
        return scan_of(model.hybrid, batch, seq).flops
    if mixer is Mixer.DELTA and model.delta is not None:
        return delta_rule_of(model.delta, batch, seq).flops
    if mixer is Mixer.SELECTIVE and model.selective is not None:
        return SelectiveScan(batch, seq, model.selective.inner, model.selective.state).flops
    return 0.0


def _multiplied(model: Model, weight: Weight, kept_share: float = 1.0) -> float:
    """Multiplications per token: the elements of a matrix, of experts those of the chosen ones."""
    if weight.part in NOT_MULTIPLIED or len(weight.shape) < 2 or weight.name.startswith(PER_CHANNEL):
        return 0.0
    if weight.part is WeightPart.EXPERTS and model.experts is not None:
        if len(weight.shape) < 3:  # biases of all experts
            return 0.0
        return weight.elements / model.experts.count * model.experts.top_k * kept_share
    return float(weight.elements)
