"""The weights of a stage that a rank holds, and those it trains: all of them, or with LoRA the adapters alone."""

from collections import Counter

from stepcast.ir.dataclass import dataclass
from stepcast.ir.layers.ends import embedding_weights, head_weights
from stepcast.ir.layers.kinds import adapter_shard
from stepcast.ir.model import Model, next_token_shard, next_token_weights, range_shard
from stepcast.ir.stages import StagePiece
from stepcast.ir.strategy import Strategy, TrainingKind
from stepcast.ir.weights import NOTHING, Shard, WeightPart

ENDS = (WeightPart.EMBEDDING, WeightPart.POSITION, WeightPart.HEAD)


def held_shard(model: Model, strategy: Strategy, piece: StagePiece) -> Shard:
    """Return the model's own weights that one rank holds of *piece*, before data-parallel ranks split them."""
    layout = strategy.layout
    sizes = (layout.tp, layout.ep, layout.expert_tp_size)
    shard = range_shard(model, piece.layers, *sizes, piece.embedding, piece.head)
    if not (piece.head and strategy.further_tokens):
        return shard
    # Repeated for further tokens, the module's weights are the same (Megatron-Core's mtp_use_repeated_layer).
    modules = min(strategy.further_tokens, model.next_token_layers)
    return sum([next_token_shard(model, *sizes)] * modules, start=shard)


def count_frozen(model: Model, strategy: Strategy, layers: range) -> int:
    """Return how many of *layers* lie below those that are trained, and so run no backward."""
    if not strategy.trained_layers:
        return 0
    return min(len(layers), max(0, model.layers - strategy.trained_layers - layers.start))


def _trained_piece(model: Model, strategy: Strategy, piece: StagePiece) -> StagePiece:
    """Return the part of *piece* whose own weights are trained."""
    if not strategy.trained_layers:
        return piece
    return StagePiece(piece.layers[count_frozen(model, strategy, piece.layers) :], False, False)


def trained_shard(model: Model, strategy: Strategy, piece: StagePiece) -> Shard:
    """Return the weights that have gradients and optimizer states."""
    if strategy.training is TrainingKind.FULL:
        return held_shard(model, strategy, _trained_piece(model, strategy, piece))
    layout, adapters = strategy.layout, (strategy.lora_targets, strategy.lora_separate)
    spread = (strategy.lora_rank, layout.tp, layout.ep, layout.expert_tp_size, *adapters)
    shards = (
        adapter_shard(model, block.mixer, block.feed_forward, *spread)
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
        """Return True if they belong to a layer, not to an end of the model."""
        return self.part not in ENDS


def trained_matrices(model: Model, strategy: Strategy, piece: StagePiece) -> tuple[Matrices, ...]:
    """Return the matrices among the weights that one rank trains of *piece*, equal ones together."""
    layout, piece = strategy.layout, _trained_piece(model, strategy, piece)
    weights = [weight for layer in piece.layers for weight in model.block_weights(model.blocks[layer])]
    if piece.embedding:
        weights += embedding_weights(model)
    if piece.head:
        weights += head_weights(model)[1 if model.tied and piece.embedding else 0 :]
        if strategy.further_tokens:
            weights += next_token_weights(model) * min(strategy.further_tokens, model.next_token_layers)
    sizes = (layout.tp, layout.ep, layout.expert_tp_size, model.padded_vocab(layout.tp))
    counts: Counter[tuple[int, int, WeightPart]] = Counter()
    for weight, repeats in Counter(weights).items():
        if weight.inputs_split is not None:
            count, rows, columns = weight.matrices_on_rank(*sizes)
            counts[rows, columns, weight.part] += count * repeats
    return tuple(Matrices(count, *shape) for shape, count in counts.items())
