"""Memory of OptimusPrime's runs (github.com/ai-computing/aicomp), which differ from everybody else's.

Its tensor parallelism splits the linear layers of the blocks alone: word embedding and output projection are
whole on every rank. And its optimizer was given the weights before they were split, so that split weights
have gradients but no moments: what gpustat shows of stages without an embedding leaves no room for any.
Without tensor parallelism neither applies, and the general count holds.

The blocks are Hugging Face's, in fp32, without fusion. Three figures are fitted to the sweep's logs of 2 and
4 tensor ranks, which gpustat sampled every two seconds: the squares of attention scores a layer keeps, the
copies of logits, and the communication buffers.
"""

from stepcast.cost.in_flight import default_in_flight
from stepcast.cost.memory import StageMemory, memory
from stepcast.hardware.gpu import Gpu
from stepcast.ir.model import Model
from stepcast.ir.stages import Piece, pieces
from stepcast.ir.strategy import Strategy
from stepcast.ir.weights import Part
from stepcast.units import MIB

FLOAT = 4.0
SQUARES = 6  # of the attention scores: scaled, masked, normalised, and their copies
LOGITS = (
    3.25  # copies alive at once: logits, shifted, normalised, gradient; of two micro-batches where there are
)
CONTEXT_BYTES = 550 * MIB
RANK_BYTES = 80 * MIB  # of communication buffers, for each tensor rank
SLACK_BYTES = 150 * MIB  # gradients on their way and messages, once backwards run


def optimus_memory(model: Model, strategy: Strategy, gpu: Gpu) -> tuple[StageMemory, ...]:
    """What each stage of an OptimusPrime run needs."""
    if strategy.layout.tp == 1:
        return memory(model, strategy, gpu)
    counts = [count for (count,) in default_in_flight(strategy)]
    parts = pieces(model, strategy)
    return tuple(
        max(_moments(model, strategy, gpu, stage, piece, count), key=lambda each: each.total)
        for stage, (piece, count) in enumerate(zip(parts, counts, strict=True))
    )


def _moments(
    model: Model, strategy: Strategy, gpu: Gpu, stage: int, piece: Piece, in_flight: int
) -> list[StageMemory]:
    """Before the first backward there are no gradients; after it one micro-batch less may be in flight."""
    tp, batches = strategy.layout.tp, strategy.micro_batches
    split, whole = _weights(model, piece, tp)
    layer = len(piece.layers) * _layer_bytes(model, strategy)
    logits = strategy.local_tokens * model.vocab * FLOAT if piece.head else 0.0
    loss = LOGITS * logits * min(2, batches)

    def moment(gradients: float, micro_batches: int, temporary: float) -> StageMemory:
        return StageMemory(
            stage=stage,
            parameters=split + whole,
            gradients=gradients,
            optimizer=2 * whole,
            activations=micro_batches * layer,
            temporary=temporary,
            fragmentation=0.0,
            communication=RANK_BYTES * tp,
            framework=CONTEXT_BYTES,
            capacity=gpu.memory_bytes,
        )

    later = in_flight - 1 if in_flight == batches else in_flight
    return [
        moment(0.0, in_flight, loss),
        moment(split + whole, later, SLACK_BYTES + (loss if batches > 1 else 0.0)),
    ]


def _weights(model: Model, piece: Piece, tp: int) -> tuple[float, float]:
    """Bytes of weights that tensor ranks split, and of those that each holds whole."""
    blocks = model.blocks[piece.layers.start : piece.layers.stop]
    weights = [weight for block in blocks for weight in model.block_weights(block)]
    split = sum(weight.elements for weight in weights if weight.part is not Part.NORM)
    ends = model.vocab * model.hidden * (piece.embedding + piece.head)
    norms = sum(weight.elements for weight in weights if weight.part is Part.NORM)
    return split / tp * FLOAT, (ends + norms) * FLOAT


def _layer_bytes(model: Model, strategy: Strategy) -> float:
    """What a layer keeps: around the split, both norms' inputs and normalised values; inside it, queries,
    keys and values repeated for all heads, the result, the gated MLP's four tensors, and the scores.
    """
    inside = 4 * model.query_width + 4 * model.ffn + SQUARES * model.heads * strategy.seq
    return strategy.local_tokens * (4 * model.hidden + inside / strategy.layout.tp) * FLOAT
