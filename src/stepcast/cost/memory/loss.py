"""What exists for a moment only: the logits and their gradient, and layers gathered from their shards."""

from stepcast.cost.memory.states import FP32_BYTES
from stepcast.ir.dtype import DType
from stepcast.ir.model import Model
from stepcast.ir.stages import Piece
from stepcast.ir.strategy import Kernels, Strategy, TrainingKind
from stepcast.ir.trainable import held_shard, trained_shard

# torch.compile pads a matmul whose width is not a multiple of this: logits and their gradient are copied.
ALIGNED = 8


def loss_bytes(model: Model, strategy: Strategy, in_flight: int = 1) -> float:
    """The most that logits, softmax and their gradients take at once, and the projection's own gradient.

    *in_flight* micro-batches keep their softmax; one of them is at work. So do the losses of further tokens:
    Megatron-Core computes them before that of the next token, which is the first to run backward.
    """
    tp, kernels = strategy.layout.tp, strategy.kernels
    vocab = model.padded_vocab(tp)
    logits = strategy.local_tokens * vocab / tp
    kept = logits * FP32_BYTES * max(0, in_flight * (1 + strategy.further_tokens) - 1)
    element = strategy.stored.bytes
    if kernels is Kernels.PLAIN:
        # The softmax, and the gradients before and after it; the logits themselves are gone.
        return kept + 3 * FP32_BYTES * logits
    if kernels is Kernels.COMPILED:
        if strategy.sharding.splits_parameters:
            # Layers are compiled one by one and the loss is not; the logits outlive it.
            return kept + (3 * FP32_BYTES + element) * logits
        return kept + logits * element * (1 if vocab % ALIGNED == 0 else 3)
    # Megatron-LM: logits, their fp32 copy and softmax; then the gradient in both formats and the weight's.
    width = model.embedding_width or model.hidden
    weight = vocab / tp * width * element if strategy.training is TrainingKind.FULL else 0.0
    copies = 2 * FP32_BYTES + (element if strategy.stored is not DType.FP32 else 0.0)
    return kept + copies * logits + weight


def further_ends_bytes(model: Model, strategy: Strategy) -> float:
    """What a module for one further token keeps around its block: the token's embedding, which is normed, the
    two norms' results side by side, which the projection needs, and input and output of the last norm.
    The stream it starts from is kept already, by what made it.
    """
    outer = strategy.local_tokens * model.hidden // strategy.outer_ways
    return (1 + 2 + 2) * outer * strategy.stored.bytes


def gathered_bytes(model: Model, strategy: Strategy, piece: Piece) -> tuple[float, float]:
    """ZeRO-3 and FSDP: gathered weights, and gradients that are not reduced yet.

    That is the unit at work and the next one, and the gradients of one. In a pipeline the weights of the
    whole stage stay gathered and its gradients are summed unreduced until the last micro-batch, or each of
    them would gather and reduce everything anew (torch.distributed.pipelining).
    """
    if not strategy.sharding.splits_parameters:
        return 0.0, 0.0
    if strategy.layout.pp > 1:
        weights = held_shard(model, strategy, piece).total * strategy.stored.bytes
        return weights, trained_shard(model, strategy, piece).total * strategy.gradient_dtype.bytes
    size = _largest_unit(model, strategy, piece) * strategy.stored.bytes
    return 2 * size, size


def _largest_unit(model: Model, strategy: Strategy, piece: Piece) -> int:
    """Parameters of the largest layer or end: each is gathered by itself."""
    kinds = {model.blocks[layer]: layer for layer in piece.layers}
    units = [Piece(range(layer, layer + 1), False, False) for layer in kinds.values()]
    none = range(piece.layers.start, piece.layers.start)
    if piece.embedding:
        units.append(Piece(none, True, False))
    if piece.head:
        units.append(Piece(none, False, True))
    return max((held_shard(model, strategy, unit).total for unit in units), default=0)
