"""Architecture: the shape of a decoder-only language model, and its weight tensors.

Weights have a name, a shape, and a way in which tensor and expert parallelism split them.

Every parameter count is a sum over these, so a count, its share per part and its share per rank cannot
disagree. Splitting follows Megatron-LM (Shoeybi et al. 2019, section 3): the first matrix of a pair is split
by columns with its bias, the second by rows while every rank has all of its bias, the embedding by vocabulary;
fewer kv heads than ranks are split all the same, and their results gathered (``ir.layers.attention``); norms,
position embeddings, routers and the down-projections of latent attention are on every rank.
"""

import math
from collections.abc import Iterable
from dataclasses import field, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Self

from stepcast.ir import model_parts as parts
from stepcast.ir.limits import LAYERS, WIDTH
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.recurrent import Delta, Selective
from stepcast.ir.types import Natural, Quantity, Size, dataclass, require

MOST_LAYERS = LAYERS.most

RMS_NORM = parts.Norm()
NO_BIASES = parts.Biases()
ROTARY = parts.Position()
WEIGHT_FORMATS = ("bf16", "fp8", "nvfp4", "mxfp4", "int4", "int4-experts")  # of generation
EXPERT_FORMATS = ("mxfp4", "int4-experts")  # of experts alone, all else is in bf16


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a model: *ffn* is the inner width of the dense MLP (0 where every layer has experts), *kv_heads* the
    key/value heads of grouped-query attention, *max_seq* the longest sequence the model is meant for.

    *parallel_block* runs attention and MLP side by side on the same input; *shared_norm* says that they then share one
    norm. *post_norms* adds a norm after each of them, and without *pre_norms* these are the only ones (OLMo 2).
    *embedding_width* is the width of the word embedding where a projection leads from it to the hidden width
    (OPT-350M); 0 = hidden. *next_token_layers* are DeepSeek-V3's multi-token-prediction modules: they are not part of
    ``parameters``. *vocab_multiple* pads the vocabulary to a multiple of itself times the tensor-parallel size, as
    Megatron does with 128; 0 keeps it as it is. *joined*: queries, keys and values come from one matrix in the model's
    own code, and so do gate and up. *wide_norms*: norms multiply by their weight in fp32. *attention_gate*: a sigmoid
    of as wide a projection as the queries' multiplies what attention returns (Qwen3-Next). *dropout*: of its branches
    in training, where its code decides that; *drops_attention*: of the attention's probabilities, too.
    *published_weights* is the number format of its checkpoints.
    """

    name: str
    layers: Size
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn: Natural
    vocab: Size
    max_seq: Size
    tied: bool = False
    gated: bool = True
    activation: parts.Activation = parts.Activation.SILU
    norm: parts.Norm = RMS_NORM
    biases: parts.Biases = NO_BIASES
    position: parts.Position = ROTARY
    parallel_block: bool = False
    shared_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: parts.QkNorm = parts.QkNorm.NONE
    embedding_norm: bool = False
    final_norm: bool = True
    attention_sinks: bool = False
    attention_gate: bool = False
    attention_softcap: Quantity = 0.0
    logit_softcap: Quantity = 0.0
    embedding_width: Natural = 0
    window: parts.Window | None = None
    experts: parts.Experts | None = None
    latent: parts.Latent | None = None
    hybrid: parts.Hybrid | None = None
    delta: Delta | None = None
    selective: Selective | None = None
    next_token_layers: Natural = 0
    vocab_multiple: Natural = 0
    joined: bool = False
    wide_norms: bool = False
    dropout: float = 0.0
    drops_attention: bool = False
    published_weights: str = field(default=WEIGHT_FORMATS[0], compare=False)
    source: str = ""
    unread: tuple[str, ...] = field(default=(), compare=False)  # notes on what its file states and is not modelled

    def __post_init__(self) -> None:
        require(bool(self.name), "a model needs a name")
        require(self.layers <= MOST_LAYERS, f"layers must be at most {MOST_LAYERS:,}, not {self.layers:,}")
        for name in ("hidden", "heads", "head_dim", "ffn", "vocab", "max_seq", "embedding_width"):
            value = getattr(self, name)
            require(value <= WIDTH.most, f"{name} must be at most {WIDTH.most:,}, not {value:,}")
        known = ", ".join(WEIGHT_FORMATS)
        require(self.published_weights in WEIGHT_FORMATS, f"published_weights must be one of {known}")
        require(self.heads % self.kv_heads == 0, f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        require(self.pre_norms or self.post_norms, "a model has norms before its halves, after them or both")
        require(self.parallel_block or not self.shared_norm, "only a parallel block can share its norm")
        if self.latent is not None:
            wide = self.latent.nope_dim + self.latent.rope_dim
            require(self.head_dim == wide, f"head_dim must be nope_dim + rope_dim = {wide}, not {self.head_dim}")
            require(self.kv_heads == self.heads, "latent attention has as many kv_heads as heads")
        if self.hybrid is not None:
            letters = len(self.hybrid.pattern)
            require(letters == self.layers, f"the hybrid pattern has {letters} letters for {self.layers} layers")
            for name, mixer in (("delta", Mixer.DELTA), ("selective", Mixer.SELECTIVE)):
                needed = mixer in self.hybrid.mixers and getattr(self, name) is None
                require(not needed, f"the hybrid pattern has {mixer} layers and needs {name}")
        else:
            alone = self.delta is None and self.selective is None
            require(alone, "delta and selective need a hybrid pattern")
        require(not (self.attention_gate and self.latent), "latent attention has no gate")
        kinds = {block.feed_forward for block in self.block_kinds}
        require(FeedForward.DENSE not in kinds or self.ffn > 0, "ffn must be at least 1 where a layer is dense")
        require(FeedForward.EXPERTS not in kinds or self.experts is not None, "the hybrid pattern needs experts")
        if self.experts is not None:
            require(FeedForward.EXPERTS in kinds, f"none of the {self.layers} layers has experts")

    def __hash__(self) -> int:
        """Hash what most often differs: hashes are asked for far more often than values are made."""
        return hash((self.name, self.layers, self.hidden, self.ffn, self.vocab))

    @property
    def blocks(self) -> tuple[LayerParts, ...]:
        """The parts of each layer, first to last."""
        return _blocks(self.layers, self.window, self.experts, self.hybrid)[0]

    @property
    def block_kinds(self) -> frozenset[LayerParts]:
        """The distinct blocks: few, however many layers there are."""
        return _blocks(self.layers, self.window, self.experts, self.hybrid)[1]

    @property
    def next_token_blocks(self) -> tuple[LayerParts, ...]:
        """The blocks of one multi-token-prediction module; a hybrid's has one for each half."""
        feed_forward = FeedForward.EXPERTS if self.experts else FeedForward.DENSE
        if self.hybrid:
            return LayerParts(Mixer.ATTENTION, FeedForward.NONE), LayerParts(Mixer.NONE, feed_forward)
        return (LayerParts(Mixer.ATTENTION, feed_forward),)

    @property
    def value_dim(self) -> int:
        """Width of one head's value."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys (the values are as wide, except in latent attention)."""
        return self.kv_heads * self.head_dim

    @property
    def sides(self) -> int:
        """Matrices before an MLP's activation: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def word_width(self) -> int:
        """Width of the word embedding and of what the head multiplies."""
        return self.embedding_width or self.hidden

    @property
    def projects_words(self) -> bool:
        """Return True if projections lead from the word embedding to the hidden width, and back."""
        return self.word_width != self.hidden

    @property
    def expert_width(self) -> int:
        """Width that experts work in."""
        return (self.experts and self.experts.latent) or self.hidden

    @property
    def expert_layers(self) -> int:
        return sum(block.feed_forward is FeedForward.EXPERTS for block in self.blocks)

    def padded_vocab(self, tp: int = 1) -> int:
        """Return the rows of the embedding when it is split over *tp* ranks."""
        if not self.vocab_multiple:
            return self.vocab
        step = self.vocab_multiple * tp
        return -(-self.vocab // step) * step

    def with_layers(self, layers: int) -> Self:
        """Return the model cut (or, where nothing but the count changes, grown) to *layers*."""
        hybrid = self.hybrid and replace(self.hybrid, pattern=self.hybrid.pattern[:layers])
        return replace(self, layers=layers, hybrid=hybrid)

    def with_max_seq(self, max_seq: int) -> Self:
        """Return the model built for sequences of *max_seq*; learned positions grow or shrink with it."""
        learned = self.position.kind is parts.PositionKind.LEARNED
        offset = max(self.position.count - self.max_seq, 0)
        position = replace(self.position, count=max_seq + offset) if learned else self.position
        return replace(self, max_seq=max_seq, position=position)


@lru_cache(maxsize=256)
def _blocks(
    layers: int, window: parts.Window | None, experts: parts.Experts | None, hybrid: parts.Hybrid | None
) -> tuple[tuple[LayerParts, ...], frozenset[LayerParts]]:
    """Return the parts of each layer, and its kinds; layers of a kind are one object, which compares by identity."""
    known: dict[LayerParts, LayerParts] = {}
    kinds = []
    for layer in range(layers):
        if hybrid:
            mixer, feed_forward = parts.HYBRID_BLOCKS[hybrid.pattern[layer]]
        else:
            mixer = Mixer.ATTENTION
            routed = experts is not None and experts.is_expert_layer(layer)
            feed_forward = FeedForward.EXPERTS if routed else FeedForward.DENSE
        windowed = window.size_at(layer) if window and mixer is Mixer.ATTENTION else None
        block = LayerParts(mixer, feed_forward, windowed, bool(windowed and window and window.chunked))
        kinds.append(known.setdefault(block, block))
    return tuple(kinds), frozenset(known)


class WeightPart(StrEnum):
    """The part of a model that a weight belongs to."""

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


# Parts whose weights are looked up, scale or shift, and multiply no matrix.
NOT_MULTIPLIED = (WeightPart.EMBEDDING, WeightPart.POSITION, WeightPart.NORM)
# Parts that stay out of fp8 and fp4.
UNQUANTISED = (*NOT_MULTIPLIED, WeightPart.ROUTER, WeightPart.HEAD)


class Split(StrEnum):
    """The way in which ranks share a weight."""

    NONE = "none"  # every rank holds all of it
    TENSOR = "tensor"
    VOCAB = "vocab"  # tensor parallel, after the vocabulary is padded
    EXPERT = "expert"  # complete experts over ep, each expert over expert-tp
    EXPERT_REPLICATED = "expert-replicated"  # complete experts over ep, the rest on every rank


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight tensor.

    *most_ways* bounds the tensor split: 8 Mamba groups cannot be split 16 ways, so they are repeated.
    *inputs_split*: of matrices (outputs, inputs), or stacks of them, whether ranks split the inputs or the
    outputs; None where it is no matrix. *per_channel*: it scales single channels and multiplies no matrix. *lora* and
    *pair*: the linear layers that adapters change (``data/weights.txt``).
    """

    name: str
    part: WeightPart
    shape: tuple[int, ...]
    split: Split = Split.NONE
    most_ways: int = 0
    inputs_split: bool | None = None
    per_channel: bool = False
    lora: tuple[str, ...] = ()
    pair: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_multiplied(self) -> bool:
        """Return True if tokens are multiplied by it as a matrix; biases of all experts are none."""
        dimensions = 3 if self.part is WeightPart.EXPERTS else 2
        return self.part not in NOT_MULTIPLIED and len(self.shape) >= dimensions and not self.per_channel

    def on_rank(self, tp: int, ep: int, expert_tp: int, vocab: int) -> int:
        """Return the elements on the fullest rank; *vocab* is the padded vocabulary."""
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
        """Return (how many, outputs, inputs) of the matrices that the fullest rank holds, or its parts of them."""
        count = -(-self.shape[0] // ep) if self.split is Split.EXPERT else 1
        elements = self.on_rank(tp, ep, expert_tp, vocab) // count
        unsplit = self.shape[-2] if self.inputs_split else self.shape[-1]
        split_size = -(-elements // unsplit)
        return (count, unsplit, split_size) if self.inputs_split else (count, split_size, unsplit)


def count_elements(weights: Iterable[Weight]) -> int:
    return sum(weight.elements for weight in weights)


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


def shard_weights(model: Architecture, weights: Iterable[Weight], tp: int, ep: int, expert_tp: int) -> Shard:
    """Return the parameters that one rank holds of *weights*."""
    vocab, shard = model.padded_vocab(tp), NOTHING
    for weight in weights:
        elements = weight.on_rank(tp, ep, expert_tp, vocab)
        if weight.part is WeightPart.EXPERTS:
            shard += Shard(0, elements)
        else:
            quantised = weight.part not in UNQUANTISED and len(weight.shape) > 1
            shard += Shard(elements, 0, 0 if quantised else elements)
    return shard
