"""What one pipeline piece holds: states, and activations of one micro-batch."""

from dataclasses import dataclass
from itertools import groupby

from stepcast.cost.memory.gathered import Collected, collected
from stepcast.cost.memory.loss import further_ends_bytes
from stepcast.cost.memory.states import States, gradient_bytes, piece_states
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.model_parts import LayerParts
from stepcast.ir.saved import SavedActivations, count_saved
from stepcast.ir.sharding import plan_of
from stepcast.ir.stages import StagePiece
from stepcast.ir.strategy import Strategy
from stepcast.ir.trainable import held_shard, trained_shard


@dataclass(frozen=True, slots=True)
class PieceTotals:
    """Bytes, but for the two counts of parameters: those trained, and those whose states the rank keeps."""

    states: States
    trained: int
    owned: float
    activations: float  # of one micro-batch
    on_host: float  # of one micro-batch, in the memory of the host
    staged: float  # the most that one of these layers keeps, while it is on its way
    recomputed: float  # what a recomputed layer or module holds while it is worked on
    transient: float
    largest_layer: float
    first_layer_gradients: float
    collected: Collected
    embedding: bool
    head: bool


def piece_totals(
    model: Model,
    strategy: Strategy,
    framework: Framework,
    piece: StagePiece,
    known: dict[LayerParts, SavedActivations],
    orientations: int,
) -> PieceTotals:
    """The totals of one piece; *known* gains what layers of each kind keep, for the pieces after it."""
    trained = trained_shard(model, strategy, piece)
    whole = strategy.recompute.whole_layers(len(piece.layers))
    kinds: dict[LayerParts, SavedActivations] = {}

    def kept_by(block: LayerParts) -> SavedActivations:
        if block not in kinds:
            if block not in known:
                known[block] = count_saved(model, strategy, block, framework)
            kinds[block] = known[block]
        return kinds[block]

    offloaded = strategy.offload.layers(len(piece.layers))
    activations = recomputed = on_host = staged = 0.0
    blocks = model.blocks[piece.layers.start : piece.layers.stop]
    alike = ((block, at < whole, at < offloaded) for at, block in enumerate(blocks))
    # Most layers are like the one before; they are added one by one, as sums of floats are.
    for (block, again, sent), run in groupby(alike):
        kept = kept_by(block)
        after = kept.after(again)
        if sent:
            staged = max(staged, after)
        for _ in run:
            if sent:
                on_host += after
            else:
                activations += after
        recomputed = max(recomputed, kept.saved - kept.input if again else kept.again)
    if strategy.autocast:
        activations += _cast_weights(model, strategy, piece, whole)
    if piece.head and strategy.further_tokens:
        further = [kept_by(block) for block in model.next_token_blocks]
        activations += strategy.further_tokens * (
            further_ends_bytes(model, strategy) + sum(kept.saved for kept in further)
        )
        recomputed = max(recomputed, *(kept.again for kept in further))
    return PieceTotals(
        states=piece_states(model, strategy, framework, piece, orientations),
        trained=trained.total,
        owned=plan_of(strategy, framework).share(trained),
        activations=activations,
        on_host=on_host,
        staged=staged,
        recomputed=recomputed,
        transient=max((kept.transient for kept in kinds.values()), default=0.0),
        largest_layer=max((kept.saved + kept.again for kept in kinds.values()), default=0.0),
        first_layer_gradients=_first_layer_gradients(model, strategy, framework, piece),
        collected=collected(model, strategy, framework, piece, orientations),
        embedding=piece.embedding,
        head=piece.head,
    )


def _cast_weights(model: Model, strategy: Strategy, piece: StagePiece, whole: int) -> float:
    """What autocast made of the weights that products read, for their backward; of recomputed layers, *whole*
    from the first on, it is made again.
    """
    kept = StagePiece(range(piece.layers.start + whole, piece.layers.stop), False, False)
    elements: float = held_shard(model, strategy, kept).quantised
    if piece.head:
        tp, width = strategy.layout.tp, model.embedding_width or model.hidden
        elements += model.padded_vocab(tp) / tp * width
    return strategy.stored.bytes * elements


def _first_layer_gradients(model: Model, strategy: Strategy, framework: Framework, piece: StagePiece) -> float:
    layers = piece.layers
    if not layers:
        return 0.0
    first = StagePiece(range(layers.start, layers.start + 1), False, False)
    if not strategy.offload.optimizer:
        trained = trained_shard(model, strategy, first)
        return gradient_bytes(strategy, framework, plan_of(strategy, framework), trained)
    return piece_states(model, strategy, framework, first, orientations=1).gradients
