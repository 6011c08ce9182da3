"""The weight tensors of a model: name, shape, and how tensor and expert parallelism split them.

Every parameter count is a sum over these, so a count, its share per part and its share per rank cannot
disagree. Splitting follows Megatron-LM (Shoeybi et al. 2019, section 3): the first matrix of a pair is
split by columns with its bias, the second by rows while its bias stays whole, the embedding by vocabulary;
fewer kv heads than ranks are split all the same, and their results gathered (``generate.attention``);
norms, position embeddings, routers and the down-projections of latent attention are on every rank.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from stepcast.ir.architecture import Architecture
from stepcast.ir.mixer_weights import attention_weights, delta_weights, latent_weights, mamba_weights, selective_weights
from stepcast.ir.model_parts import FeedForward, Mixer, PositionKind
from stepcast.ir.weight import Split, Weight, WeightPart, linear, norm_weight


class Shard(NamedTuple):
    """Parameters one rank holds: *dense* ones have replicas in the dp group, *experts* in expert-dp.

    *unquantised* are those of the dense ones that no product in fp8 or fp4 reads.
    """

    dense: int
    experts: int
    unquantised: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def quantised(self) -> int:
        return self.total - self.unquantised

    def __add__(self, other: "Shard") -> "Shard":  # type: ignore[override]  # not of tuples
        return Shard(self.dense + other.dense, self.experts + other.experts, self.unquantised + other.unquantised)

    def __sub__(self, other: "Shard") -> "Shard":
        return Shard(self.dense - other.dense, self.experts - other.experts, self.unquantised - other.unquantised)


NOTHING = Shard(0, 0)
# Parts whose matrices are multiplied in fp8 or fp4 where the strategy says so.
MULTIPLIED = (WeightPart.ATTENTION, WeightPart.MAMBA, WeightPart.DELTA, WeightPart.MLP, WeightPart.SHARED_EXPERTS)


def whole(weights: Iterable[Weight]) -> int:
    """Elements of all *weights* together."""
    return sum(weight.elements for weight in weights)


def embedding_weights(model: Architecture) -> list[Weight]:
    """Word embedding first, then what stands between it and the first layer."""
    width = model.embedding_width or model.hidden
    words = (model.vocab, width)
    weights = [Weight("embedding.word", WeightPart.EMBEDDING, words, Split.VOCAB, inputs_split=False)]
    if model.position.kind is PositionKind.LEARNED:
        positions = (model.position.count, model.hidden)
        weights.append(Weight("embedding.position", WeightPart.POSITION, positions, inputs_split=False))
    if width != model.hidden:
        weights.append(Weight("embedding.project_in", WeightPart.EMBEDDING, (model.hidden, width), inputs_split=False))
    if model.embedding_norm:
        weights.append(norm_weight(model, "embedding.norm", model.hidden))
    return weights


def final_weights(model: Architecture) -> list[Weight]:
    return [norm_weight(model, "final_norm", model.hidden)] if model.final_norm else []


def head_weights(model: Architecture) -> list[Weight]:
    """The output projection first (the word embedding again where tied), then its bias and projection."""
    width = model.embedding_width or model.hidden
    weights = linear("head", WeightPart.HEAD, width, model.vocab, model.biases.head, Split.VOCAB)
    if width != model.hidden:
        weights.append(Weight("head.project_out", WeightPart.HEAD, (width, model.hidden), inputs_split=False))
    return weights


def next_token_weights(model: Architecture) -> list[Weight]:
    """One multi-token-prediction module (DeepSeek-V3, 2024, section 2.2), without embedding and head.

    Two norms, a projection of both inputs to the hidden width, one block, one norm before the head.
    """
    if not model.next_token_layers:
        return []
    feed_forward = FeedForward.EXPERTS if model.experts else FeedForward.DENSE
    block = block_weights(model, Mixer.ATTENTION, feed_forward)
    if model.hybrid:  # a hybrid's module is one attention block and one feed-forward block
        block = (
            *block_weights(model, Mixer.ATTENTION, FeedForward.NONE),
            *block_weights(model, Mixer.NONE, feed_forward),
        )
    return [
        norm_weight(model, "mtp.embedding_norm", model.hidden),
        norm_weight(model, "mtp.hidden_norm", model.hidden),
        *linear("mtp.projection", WeightPart.MLP, 2 * model.hidden, model.hidden, False, Split.TENSOR),
        *block,
        norm_weight(model, "mtp.final_norm", model.hidden),
    ]


@lru_cache(maxsize=4096)
def block_weights(model: Architecture, mixer: Mixer, feed_forward: FeedForward) -> tuple[Weight, ...]:
    """The tensors of one layer."""
    weights: list[Weight] = []
    match mixer:
        case Mixer.ATTENTION:
            weights += latent_weights(model) if model.latent else attention_weights(model)
        case Mixer.MAMBA:
            weights += mamba_weights(model)
        case Mixer.SELECTIVE:
            weights += selective_weights(model)
        case Mixer.DELTA:
            weights += delta_weights(model)
    match feed_forward:
        case FeedForward.DENSE:
            weights += _mlp(model, "mlp", WeightPart.MLP, model.ffn)
        case FeedForward.EXPERTS:
            weights += _experts(model)
    halves = (mixer is not Mixer.NONE) + (feed_forward is not FeedForward.NONE)
    norms = (1 if model.shared_norm else halves) if model.pre_norms else 0
    weights += [norm_weight(model, f"norm.{index}", model.hidden) for index in range(norms)]
    if model.post_norms:
        weights += [norm_weight(model, f"post_norm.{index}", model.hidden) for index in range(halves)]
    return tuple(weights)


def _mlp(model: Architecture, name: str, part: WeightPart, ffn: int) -> list[Weight]:
    weights: list[Weight] = []
    for side in ("gate", "up") if model.gated else ("up",):
        weights += linear(f"{name}.{side}", part, model.hidden, ffn, model.biases.mlp, Split.TENSOR)
    return weights + linear(f"{name}.down", part, ffn, model.hidden, model.biases.mlp, Split.TENSOR, by_rows=True)


def _experts(model: Architecture) -> list[Weight]:
    experts = model.experts
    assert experts is not None
    weights = linear("router", WeightPart.ROUTER, model.hidden, experts.count, experts.router_bias)
    width = experts.latent or model.hidden
    if experts.latent:
        weights += linear("experts.latent_down", WeightPart.MLP, model.hidden, width, False)
        weights += linear("experts.latent_up", WeightPart.MLP, width, model.hidden, False)
    sides = 2 if model.gated else 1
    count, ffn, part = experts.count, experts.ffn, WeightPart.EXPERTS
    for name, shape, by_rows in (("up", (sides * ffn, width), False), ("down", (width, ffn), True)):
        stacked = (count, *shape)
        weights.append(Weight(f"experts.{name}.weight", part, stacked, Split.EXPERT, inputs_split=by_rows))
    if model.biases.mlp:
        weights.append(Weight("experts.up.bias", part, (count, sides * ffn), Split.EXPERT))
        weights.append(Weight("experts.down.bias", part, (count, width), Split.EXPERT_REPLICATED))
    if experts.shared_ffn:
        weights += _mlp(model, "shared_experts", WeightPart.SHARED_EXPERTS, experts.shared_ffn)
    if experts.shared_gate:
        weights.append(Weight("shared_experts.gate_value.weight", WeightPart.SHARED_EXPERTS, (1, model.hidden)))
    return weights


def _shard(model: Architecture, weights: Iterable[Weight], tp: int, ep: int, expert_tp: int) -> Shard:
    vocab, shard = model.padded_vocab(tp), NOTHING
    for weight in weights:
        elements = weight.on_rank(tp, ep, expert_tp, vocab)
        if weight.part is WeightPart.EXPERTS:
            shard += Shard(0, elements)
        else:
            quantised = weight.part in MULTIPLIED and len(weight.shape) > 1
            shard += Shard(elements, 0, 0 if quantised else elements)
    return shard


@lru_cache(maxsize=1024)
def _running(model: Architecture, tp: int, ep: int, expert_tp: int) -> tuple[Shard, ...]:
    """Parameters of all layers before each layer."""
    shards: dict[tuple[Mixer, FeedForward], Shard] = {}
    for block in model.blocks:
        kind = (block.mixer, block.feed_forward)
        if kind not in shards:
            shards[kind] = _shard(model, block_weights(model, *kind), tp, ep, expert_tp)
    return tuple(accumulate((shards[block.mixer, block.feed_forward] for block in model.blocks), initial=NOTHING))


@lru_cache(maxsize=1024)
def next_token_shard(model: Architecture, tp: int, ep: int, expert_tp: int) -> Shard:
    """What one rank holds of a multi-token-prediction module."""
    return _shard(model, next_token_weights(model), tp, ep, expert_tp)


@lru_cache(maxsize=16384)
def range_shard(
    model: Architecture, layers: range, tp: int, ep: int, expert_tp: int, embedding: bool, head: bool
) -> Shard:
    """What one rank holds of consecutive *layers*; see Model.shard_of."""
    before = _running(model, tp, ep, expert_tp)
    ends: list[Weight] = embedding_weights(model) if embedding else []
    if head:
        own_copy = not (model.tied and embedding)
        ends = ends + final_weights(model) + (head_weights(model) if own_copy else head_weights(model)[1:])
    return before[layers.stop] - before[layers.start] + _shard(model, ends, tp, ep, expert_tp)
