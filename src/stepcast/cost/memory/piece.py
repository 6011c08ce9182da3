"""The memory of one pipeline piece: activations of one micro-batch, and the loss at its end."""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels, LossKernel, Modules
from stepcast.ir.layers.ends import LOSS_TOKENS, loss_chunks
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.model import Model, StageKind, StagePiece, count_blocks, count_frozen, held_shard
from stepcast.ir.sharding import plan_of
from stepcast.ir.strategy import Objective, Offload, Strategy, TrainingKind, layer_view
from stepcast.ir.types import FP32_BYTES, ByIdentity, DType

# torch.compile pads a matmul whose width is not a multiple of this: logits and their gradient are copied.
ALIGNED = 8
# Layers whose activations are in transfer: while one runs, its neighbour's are sent or fetched.
STAGED_LAYERS = 2


class PieceActivations(NamedTuple):
    """Bytes of the activations of one micro-batch in one piece."""

    saved: float
    on_host: float  # in the memory of the host
    staged: float  # the most that one of these layers saves, while it is transferred
    recomputed: float  # of a recomputed layer or module while it runs
    transient: float
    largest_layer: float


class StageActivations(NamedTuple):
    """Those of a stage: of each of its pieces, of the layers in transfer, and the most of any."""

    saved: tuple[float, ...]
    on_host: tuple[float, ...]
    staged: float
    recomputed: float
    transient: float
    largest_layer: float


class LayerActivations:
    """The activations of one micro-batch in a model whose layers have one view of their strategy, with the *offload* of
    some. The residual stream takes *full* bytes, or *outer* ones where tensor ranks split it.
    """

    def __init__(self, model: Model, view: Strategy, framework: Framework, offload: Offload) -> None:
        self.model, self.view, self.offload = model, view, offload
        self.full = view.local_tokens * model.hidden * view.stream.bytes
        self.outer = self.full / view.outer_ways
        self.recomputed = view.recompute.whole_layers(model.layers) / max(1, model.layers)
        rows, trains = model.padded_vocab(view.layout.tp) / view.layout.tp, view.training is TrainingKind.FULL
        self.word_gradient = rows * model.word_width * view.weights.bytes if trains else 0.0
        self.count_layer = cache(lambda block: count_saved(model, view, block, framework))

    def of_stages(self, kinds: list[StageKind]) -> list[StageActivations]:
        """Return the activations of each kind of stage, counted once for each list of them."""
        return _STAGES.of(kinds, _count_stages, self)


def find_activations(model: Model, strategy: Strategy, framework: Framework) -> LayerActivations:
    """Return those of all strategies that run the same layers."""
    terms, offload = (model, layer_view(strategy), framework), strategy.offload
    return _ACTIVATIONS.get(terms, lambda: LayerActivations(*terms, offload), offload.activations)


_ACTIVATIONS: ByIdentity[LayerActivations] = ByIdentity(1024)
_STAGES: ByIdentity[list[StageActivations]] = ByIdentity(4096)


def _count_stages(kinds: list[StageKind], layers: LayerActivations) -> list[StageActivations]:
    known: dict[int, PieceActivations] = {}
    of_stages = []
    for kind in kinds:
        for piece in kind.pieces:
            if id(piece) not in known:
                known[id(piece)] = _count_piece(piece, layers)
        saved, on_host, staged, *most = zip(*[known[id(piece)] for piece in kind.pieces], strict=True)
        of_stages.append(StageActivations(saved, on_host, STAGED_LAYERS * max(staged), *map(max, most)))
    return of_stages


def _count_piece(piece: StagePiece, known: LayerActivations) -> PieceActivations:
    model, view, layers = known.model, known.view, piece.layers
    recomputed_layers = view.recompute.whole_layers(len(layers))
    offloaded_layers = known.offload.layers(len(layers))
    frozen = count_frozen(model, view.trained_layers, layers)  # they save nothing
    activations = recomputed = on_host = staged = transient = largest = 0.0
    cuts = {frozen, max(frozen, recomputed_layers), max(frozen, offloaded_layers), len(layers)}
    for start, stop in pairwise(sorted(cuts)):
        for block, count in count_blocks(model, layers[start:stop]):
            layer = known.count_layer(block)
            again = start < recomputed_layers
            saved = layer.input if again else layer.saved
            if start < offloaded_layers:
                staged = max(staged, saved)
                on_host += count * saved
            else:
                activations += count * saved
            recomputed = max(recomputed, layer.saved - layer.input if again else layer.again)
            transient, largest = max(transient, layer.transient), max(largest, layer.saved + layer.again)
    if view.autocast:
        activations += _cast_weights(model, view, piece, recomputed_layers)
    if piece.head and view.mtp_layers:
        modules = [known.count_layer(block) for block in model.next_token_blocks]
        # Around its block a module saves the token's embedding, the joined results of two norms, and input and output
        # of the last norm; the stream it starts from is saved already.
        ends = (1 + 2 + 2) * (view.local_tokens * model.hidden // view.outer_ways) * view.stored.bytes
        activations += view.mtp_layers * (ends + sum(layer.saved for layer in modules))
        recomputed = max(recomputed, *(layer.again for layer in modules))
        transient = max(transient, *(layer.transient for layer in modules))
        largest = max(largest, *(layer.saved + layer.again for layer in modules))
    return PieceActivations(activations, on_host, staged, recomputed, transient, largest)


def _cast_weights(model: Model, strategy: Strategy, piece: StagePiece, recomputed_layers: int) -> float:
    """Return the bytes of weights that autocast cast for products and saves for their backward; those of recomputed
    layers, which are the first, are cast again.
    """
    saved = StagePiece(range(piece.layers.start + recomputed_layers, piece.layers.stop), False, False)
    elements: float = held_shard(model, strategy, saved).quantised
    if piece.head:
        tp, width = strategy.layout.tp, model.word_width
        elements += model.padded_vocab(tp) / tp * width
    return strategy.stored.bytes * elements


def _chunked_loss_bytes(model: Model, strategy: Strategy, framework: Framework) -> float:
    """Return the most that TRL's chunked loss takes: copies of the projection and of its gradient, some logits of one
    part, and two copies of the inputs. Bytes of each element as counted on an H200 (40 losses, at most 1 % off).
    """
    width, vocab = model.word_width, model.padded_vocab()
    trains = strategy.trains_all_weights
    if framework.loss is LossKernel.CHUNKED_FP32:
        copies, logits = (10, 4) if trains else (4, 16)
    elif strategy.weights is DType.FP32:
        copies, logits = (12, 0) if trains else (2, 14)
    else:
        copies, logits = (8, 2) if trains else (6, 2)
    inputs = 2 * strategy.local_tokens * width * strategy.weights.bytes
    return vocab * (copies * width + logits * min(strategy.local_tokens, LOSS_TOKENS)) + inputs


def loss_bytes(
    model: Model, strategy: Strategy, in_flight: int = 1, framework: Framework = MEGATRON_CORE, waiting: int = 0
) -> float:
    """Return the most that logits, softmax and their gradients take at once, with the projection's gradient.

    *in_flight* micro-batches save their softmax; one of them is running. So do the losses of MTP modules:
    Megatron-Core computes them before that of the next token, which is the first to run backward.
    *waiting* more have run their input gradient and wait for the weight gradient of a zero-bubble schedule:
    autograd has freed their softmax, and the projection keeps its input and the gradient of its output, the
    logits, in the training precision (github.com/sail-sg/zero-bubble, WeightGradStore.put in
    megatron/core/tensor_parallel/layers.py).
    """
    if strategy.objective is Objective.REWARD:
        return strategy.local_tokens * FP32_BYTES
    tp, kernels = strategy.layout.tp, framework.kernels
    vocab = model.padded_vocab(tp)
    logits = strategy.local_tokens * vocab / tp
    saved = logits * FP32_BYTES * max(0, in_flight * (1 + strategy.mtp_layers) - 1)
    element = strategy.stored.bytes
    saved += logits * element * waiting * (1 + strategy.mtp_layers)
    if strategy.layout.pp > 1:
        saved += logits * element * min(framework.deferred_gradients, strategy.micro_batches)
    if framework.runs_liger and strategy.objective is Objective.SFT:
        # Logits of one part, gradients of its inputs and, if it is trained, twice that of the projection.
        width = model.word_width
        inputs = strategy.local_tokens * width * element
        parts = loss_chunks(strategy.local_tokens, width, vocab)
        projection = 2 * vocab * width * element if strategy.trains_all_weights else 0
        return saved + logits / parts * (element + FP32_BYTES) + inputs + projection
    if framework.chunks_loss and strategy.objective is Objective.SFT:
        return saved + _chunked_loss_bytes(model, strategy, framework)
    if kernels is Kernels.PLAIN and strategy.objective is Objective.DPO:
        # Logits, the log-softmax of each row in fp32, and gradients of rows and of all (TRL, selective_log_softmax);
        # logits that a loop casts to fp32 are saved by their logsumexp, and all gradients are in fp32.
        return saved + (3 * FP32_BYTES if framework.loop_kernels else FP32_BYTES + 3 * element) * logits
    if framework.loss is LossKernel.COMPOSER and tp == 1:
        return saved + 2 * element * logits
    if kernels is Kernels.PLAIN:
        # The softmax, and the gradients before and after it; the logits may be gone.
        capped = element if framework.writes_out and model.logit_softcap else 0.0
        return saved + (3 * FP32_BYTES + capped + (element if framework.keeps_logits else 0.0)) * logits
    if kernels is Kernels.COMPILED:
        if plan_of(strategy, framework).by_unit:
            # Layers are compiled one by one and the loss is not; the logits outlive it.
            return saved + (3 * FP32_BYTES + element) * logits
        if framework.modules is Modules.TRANSFORMERS:
            # The logits, from which its loss function has their gradient made in fp32.
            return saved + logits * (element + FP32_BYTES)
        return saved + logits * element * (1 if vocab % ALIGNED == 0 else 3)
    width = model.word_width
    weight = vocab / tp * width * element if strategy.training is TrainingKind.FULL else 0.0
    narrow = element if strategy.stored is not DType.FP32 else 0.0
    if framework.loss is LossKernel.ENGINE:
        return saved + element * logits + weight
    if framework.loss is LossKernel.IN_PLACE:
        # Logits or their gradient and the fp32 copy, which is gone when the weight's gradient is made.
        return saved + max((FP32_BYTES + narrow) * logits, element * logits + weight)
    # Logits, their fp32 copy and softmax; then the gradient in both formats and the weight's.
    return saved + (2 * FP32_BYTES + narrow) * logits + weight
