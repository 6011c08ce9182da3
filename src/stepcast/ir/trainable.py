"""Which weights of a stage a rank trains: all it holds, or with LoRA the adapters alone."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from stepcast.ir.model import Model
from stepcast.ir.model_parts import FeedForward, Mixer
from stepcast.ir.stages import StagePiece
from stepcast.ir.strategy import Strategy, TrainingKind
from stepcast.ir.weights import (
    NOTHING,
    Shard,
    WeightPart,
    embedding_weights,
    head_weights,
    next_token_shard,
    next_token_weights,
    range_shard,
)

ENDS = (WeightPart.EMBEDDING, WeightPart.POSITION, WeightPart.HEAD)


def held_shard(model: Model, strategy: Strategy, piece: StagePiece) -> Shard:
    """The model's own weights that one rank holds of *piece*, before data-parallel ranks split them."""
    layout = strategy.layout
    sizes = (layout.tp, layout.ep, layout.expert_tp_size)
    shard = range_shard(model, piece.layers, *sizes, piece.embedding, piece.head)
    if not (piece.head and strategy.further_tokens):
        return shard
    # Repeated for further tokens, the module's weights are the same (Megatron-Core's mtp_use_repeated_layer).
    further = next_token_shard(model, *sizes)
    modules = min(strategy.further_tokens, model.next_token_layers)
    return sum((further for _ in range(modules)), start=shard)


def trained_shard(model: Model, strategy: Strategy, piece: StagePiece) -> Shard:
    """The weights that have gradients and optimizer states."""
    if strategy.training is TrainingKind.FULL:
        return held_shard(model, strategy, piece)
    layout, rank = strategy.layout, strategy.lora_rank
    shards = (
        adapter_shard(model, block.mixer, block.feed_forward, rank, layout.tp, layout.ep, layout.expert_tp_size)
        for block in model.blocks[piece.layers.start : piece.layers.stop]
    )
    return sum(shards, start=NOTHING)


@dataclass(frozen=True, slots=True)
class Matrices:
    """*count* equal matrices on one rank, or its parts of them."""

    count: int
    rows: int
    columns: int
    part: WeightPart

    @property
    def elements(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def inside(self) -> bool:
        """Whether they stand in a layer, not before the first or after the last."""
        return self.part not in ENDS


def trained_matrices(model: Model, strategy: Strategy, piece: StagePiece) -> tuple[Matrices, ...]:
    """The matrices among the weights that one rank trains of *piece*, equal ones together."""
    layout = strategy.layout
    weights = [weight for at in piece.layers for weight in model.block_weights(model.blocks[at])]
    if piece.embedding:
        weights += embedding_weights(model)
    if piece.head:
        weights += head_weights(model)[1 if model.tied and piece.embedding else 0 :]
        if strategy.further_tokens:
            weights += next_token_weights(model) * min(strategy.further_tokens, model.next_token_layers)
    sizes = (layout.tp, layout.ep, layout.expert_tp_size, model.padded_vocab(layout.tp))
    found: Counter[tuple[int, int, WeightPart]] = Counter()
    for weight, repeats in Counter(weights).items():
        if weight.inputs_split is not None:
            count, rows, columns = weight.matrices_on_rank(*sizes)
            found[rows, columns, weight.part] += count * repeats
    return tuple(Matrices(count, *shape) for shape, count in found.items())


@lru_cache(maxsize=1024)
def adapter_shard(
    model: Model, mixer: Mixer, feed_forward: FeedForward, rank: int, tp: int = 1, ep: int = 1, expert_tp: int = 1
) -> Shard:
    """Two matrices of *rank* beside every linear layer of a block (Hu et al., LoRA, 2021).

    Fused projections (q, k, v; gate and up) have one pair between them. The half that touches a split side
    is split with it.
    """
    dense = 0
    if mixer is Mixer.ATTENTION:
        dense += sum(rank * width for width in _attention_widths(model, tp))
    if feed_forward is FeedForward.DENSE:
        dense += rank * _mlp_widths(model, model.ffn, model.hidden, tp)
    experts = 0
    if feed_forward is FeedForward.EXPERTS and model.experts:
        own = model.experts
        if own.shared_ffn:
            dense += rank * _mlp_widths(model, own.shared_ffn, model.hidden, tp)
        each = _mlp_widths(model, own.ffn, own.latent or model.hidden, expert_tp)
        experts = rank * -(-own.count // ep) * each
    return Shard(dense, experts, unquantised=dense)


def _mlp_widths(model: Model, ffn: int, width: int, tp: int) -> int:
    """Inputs and outputs of both linear layers on one rank, added up."""
    sides = 2 if model.gated else 1
    return (width + sides * ffn // tp) + (ffn // tp + width)


def _attention_widths(model: Model, tp: int) -> list[int]:
    latent, hidden = model.latent, model.hidden
    output = model.heads * model.value_dim // tp + hidden
    if latent is None:
        return [hidden + (model.query_width + 2 * model.kv_width) // tp, output]
    widths = [hidden + latent.kv_rank + latent.rope_dim]
    widths.append(latent.kv_rank + model.heads * (latent.nope_dim + latent.value_dim) // tp)
    if latent.query_rank:
        widths += [hidden + latent.query_rank, latent.query_rank + model.query_width // tp]
    else:
        widths.append(hidden + model.query_width // tp)
    return [*widths, output]
