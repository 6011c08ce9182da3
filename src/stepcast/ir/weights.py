"""The weight tensors of a model: name, shape, and how tensor and expert parallelism split them.

Every parameter count is a sum over these, so a count, its share per part and its share per rank cannot
disagree. Splitting follows Megatron-LM (Shoeybi et al. 2019, section 3): the first matrix of a pair is
split by columns with its bias, the second by rows while its bias stays whole, the embedding by vocabulary;
fewer kv heads than ranks are split all the same, and their results gathered (``generate.attention``);
norms, position embeddings, routers and the down-projections of latent attention are on every rank.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from stepcast.ir.architecture import Architecture
from stepcast.ir.model_parts import FeedForward, Mixer, PositionKind, QkNorm

# One weight tensor of a model: name, shape, and how tensor and expert parallelism split it.


class WeightPart(StrEnum):
    """What a weight belongs to."""

    EMBEDDING = "embedding"
    POSITION = "position"
    ATTENTION = "attention"
    MAMBA = "mamba"
    DELTA = "delta-net"
    MLP = "mlp"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared-experts"
    NORM = "norm"
    HEAD = "head"


class Split(StrEnum):
    """How ranks share a weight."""

    NONE = "none"  # every rank holds all of it
    TENSOR = "tensor"
    VOCAB = "vocab"  # tensor parallel, after the vocabulary is padded
    EXPERT = "expert"  # whole experts over ep, each expert over expert-tp
    EXPERT_REPLICATED = "expert-replicated"  # whole experts over ep, the rest on every rank


@dataclass(frozen=True, slots=True)
class Weight:
    """*most_ways* bounds the tensor split: 8 Mamba groups cannot be split 16 ways, so they are repeated.

    *inputs_split*: of matrices (outputs, inputs), or stacks of them, whether ranks split the inputs or the
    outputs; None where it is no matrix.
    """

    name: str
    part: WeightPart
    shape: tuple[int, ...]
    split: Split = Split.NONE
    most_ways: int = 0
    inputs_split: bool | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def on_rank(self, tp: int, ep: int, expert_tp: int, vocab: int) -> int:
        """Elements on the fullest rank; *vocab* is the padded vocabulary."""
        match self.split:
            case Split.NONE:
                return self.elements
            case Split.TENSOR:
                return -(-self.elements // (min(tp, self.most_ways) if self.most_ways else tp))
            case Split.VOCAB:
                return -(-vocab // tp) * math.prod(self.shape[1:])
            case Split.EXPERT:
                return -(-self.shape[0] // ep) * -(-math.prod(self.shape[1:]) // expert_tp)
            case Split.EXPERT_REPLICATED:
                return -(-self.shape[0] // ep) * math.prod(self.shape[1:])

    def matrices_on_rank(self, tp: int, ep: int, expert_tp: int, vocab: int) -> tuple[int, int, int]:
        """(how many, outputs, inputs) of the matrices that the fullest rank holds, or its parts of them."""
        count = -(-self.shape[0] // ep) if self.split is Split.EXPERT else 1
        elements = self.on_rank(tp, ep, expert_tp, vocab) // count
        kept = self.shape[-2] if self.inputs_split else self.shape[-1]
        other = -(-elements // kept)
        return (count, kept, other) if self.inputs_split else (count, other, kept)


def linear(
    name: str,
    part: WeightPart,
    inputs: int,
    outputs: int,
    bias: bool,
    split: Split = Split.NONE,
    *,
    by_rows: bool = False,
) -> list[Weight]:
    """A matrix and, where asked, its bias, which is split only along with the columns."""
    weights = [Weight(f"{name}.weight", part, (outputs, inputs), split, inputs_split=by_rows)]
    if bias:
        weights.append(Weight(f"{name}.bias", part, (outputs,), Split.NONE if by_rows else split))
    return weights


def norm_weight(model: Architecture, name: str, width: int) -> Weight:
    return Weight(name, WeightPart.NORM, (model.norm.elements(width),))


# The weight tensors of what mixes tokens in a layer: attention, latent attention, Mamba, delta nets.


def attention_weights(model: Architecture) -> list[Weight]:
    part, bias = WeightPart.ATTENTION, model.biases.qkv
    weights = linear("attention.query", part, model.hidden, model.query_width, bias, Split.TENSOR)
    if model.attention_gate:
        weights += linear("attention.gate", part, model.hidden, model.query_width, bias, Split.TENSOR)
    for name in ("attention.key", "attention.value"):
        weights += linear(name, part, model.hidden, model.kv_width, bias, Split.TENSOR)
    output = model.biases.attention_output
    weights += linear("attention.output", part, model.query_width, model.hidden, output, Split.TENSOR, by_rows=True)
    if model.qk_norm in (QkNorm.HEAD, QkNorm.WHOLE):
        count_elements = model.qk_norm is QkNorm.WHOLE
        widths = {"query": model.query_width, "key": model.kv_width}
        weights += [
            norm_weight(model, f"attention.{side}_norm", width if count_elements else model.head_dim)
            for side, width in widths.items()
        ]
    if model.attention_sinks:
        weights.append(Weight("attention.sinks", part, (model.heads,), Split.TENSOR))
    return weights


def latent_weights(model: Architecture) -> list[Weight]:
    """Down-projections and their norms are on every rank; heads are split on the way up."""
    latent, part, bias = model.latent, WeightPart.ATTENTION, model.biases.qkv
    assert latent is not None
    if latent.query_rank:
        weights = linear("attention.query_down", part, model.hidden, latent.query_rank, bias)
        weights.append(norm_weight(model, "attention.query_norm", latent.query_rank))
        weights += linear("attention.query_up", part, latent.query_rank, model.query_width, False, Split.TENSOR)
    else:
        weights = linear("attention.query", part, model.hidden, model.query_width, False, Split.TENSOR)
    weights += linear("attention.kv_down", part, model.hidden, latent.kv_rank + latent.rope_dim, bias)
    weights.append(norm_weight(model, "attention.kv_norm", latent.kv_rank))
    up = model.heads * (latent.nope_dim + latent.value_dim)
    weights += linear("attention.kv_up", part, latent.kv_rank, up, False, Split.TENSOR)
    values, output = model.heads * latent.value_dim, model.biases.attention_output
    weights += linear("attention.output", part, values, model.hidden, output, Split.TENSOR, by_rows=True)
    return weights


def mamba_weights(model: Architecture) -> list[Weight]:
    """A Mamba-2 mixer (Dao and Gu 2024, section 6): gate, input, B, C and dt from one projection.

    Groups bound the split of B and C; A, D and the dt bias are one number per head.
    """
    hybrid, part = model.hybrid, WeightPart.MAMBA
    assert hybrid is not None
    inner, states = hybrid.inner, 2 * hybrid.groups * hybrid.state
    split, ways = Split.TENSOR, hybrid.groups
    return [
        Weight("mamba.in.gate_input", part, (2 * inner, model.hidden), split, inputs_split=False),
        Weight("mamba.in.states", part, (states, model.hidden), split, ways, False),
        Weight("mamba.in.dt", part, (hybrid.mamba_heads, model.hidden), split, inputs_split=False),
        Weight("mamba.conv.input", part, (inner, hybrid.conv + 1), split),  # kernel and bias
        Weight("mamba.conv.states", part, (states, hybrid.conv + 1), split, ways),
        Weight("mamba.heads", part, (3, hybrid.mamba_heads), split),
        Weight("mamba.norm", WeightPart.NORM, (inner,), split),
        Weight("mamba.out", part, (model.hidden, inner), split, inputs_split=True),
    ]


def selective_weights(model: Architecture) -> list[Weight]:
    """A Mamba mixer of the first version (Gu and Dao 2023); A and D are numbers of channels."""
    own, part = model.selective, WeightPart.MAMBA
    assert own is not None
    weights = [
        Weight("selective.in", part, (2 * own.inner, model.hidden), inputs_split=False),
        Weight("selective.conv", part, (own.inner, own.conv + own.conv_bias)),
        Weight("selective.steps", part, (own.steps, own.inner), inputs_split=False),
        Weight("selective.dt", part, (own.inner, own.rank), inputs_split=False),
        Weight("selective.channels", part, ((own.state + 2) * own.inner,)),  # A, D and the bias of dt
        Weight("selective.out", part, (model.hidden, own.inner), inputs_split=True),
    ]
    return [*weights, Weight("selective.norms", WeightPart.NORM, (own.steps,))] if own.normed else weights


def delta_weights(model: Architecture) -> list[Weight]:
    """A gated delta net (Yang et al. 2024); decay and its bias are one number per head of values."""
    own, part, split = model.delta, WeightPart.DELTA, Split.TENSOR
    assert own is not None
    return [
        Weight("delta.in", part, (own.projected, model.hidden), split, inputs_split=False),
        Weight("delta.conv", part, (own.channels, own.conv), split),
        Weight("delta.heads", part, (2, own.value_heads), split),
        Weight("delta.norm", WeightPart.NORM, (own.value_dim,)),
        Weight("delta.out", part, (model.hidden, own.values), split, inputs_split=True),
    ]


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


def count_elements(weights: Iterable[Weight]) -> int:
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
