"""The parts of a Model."""

from enum import StrEnum

from stepcast.ir.types import Natural, Size, dataclass, require, require_counts


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_NEW = "gelu-new"  # the same by tanh, operation by operation where code is not compiled
    GELU_BLOOM = "gelu-bloom"  # likewise, in a function that saves its input alone and has its own gradient
    RELU = "relu"
    SQUARED_RELU = "squared-relu"


class NormKind(StrEnum):
    LAYER = "layer"
    RMS = "rms"


class PositionKind(StrEnum):
    LEARNED = "learned"
    ROTARY = "rotary"
    ALIBI = "alibi"
    NONE = "none"


class QkNorm(StrEnum):
    """The norm of queries and keys before the scores."""

    NONE = "none"
    HEAD = "head"  # one weight vector of head_dim for all heads (Qwen 3, Gemma 3)
    PLAIN = "plain"  # no weights at all (Llama 4)
    WHOLE = "whole"  # all heads of a token together, a weight for each element (OLMo 2)


class Mixer(StrEnum):
    """The token mixer of a block."""

    ATTENTION = "attention"
    MAMBA = "mamba"
    SELECTIVE = "selective"  # Mamba of the first version
    DELTA = "delta"  # gated delta net
    NONE = "none"


class FeedForward(StrEnum):
    """The feed-forward of a block, after its mixer."""

    DENSE = "dense"
    EXPERTS = "experts"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Norm:
    """Every norm of a model is of one kind; only a layer norm may carry a bias."""

    kind: NormKind = NormKind.RMS
    bias: bool = False

    def __post_init__(self) -> None:
        require(not (self.bias and self.kind is NormKind.RMS), "an RMS norm has no bias")

    @property
    def vectors(self) -> int:
        """Vectors of weights: the scale and, where there is one, the bias."""
        return 2 if self.bias else 1


@dataclass(frozen=True, slots=True)
class Biases:
    """The linear layers that add a bias."""

    qkv: bool = False
    attention_output: bool = False
    mlp: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """The position encoding of a model; *count* rows of weights where positions are learned.

    A *share* of each head is rotated; *tailed*: code that joins the rotated and the other part. *scaled*: cosine and
    sine carry a factor (YaRN), which Transformer Engine's fused rotation does not take.
    """

    kind: PositionKind = PositionKind.ROTARY
    count: Natural = 0
    share: float = 1.0
    tailed: bool = False
    scaled: bool = False

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"a share between 0 and 1 of each head is turned, not {self.share!r}")
        learned = self.kind is PositionKind.LEARNED
        require(learned == (self.count > 0), "count is given for learned positions and only for them")


@dataclass(frozen=True, slots=True)
class Window:
    """Local attention. *pattern* runs over the layers and repeats; true = local.

    A query sees the last *size* keys, or, where attention is *chunked* (Llama 4), those before it in its own
    chunk of *size* tokens.
    """

    size: Size
    pattern: tuple[bool, ...] = (True,)
    chunked: bool = False

    def __post_init__(self) -> None:
        require(len(self.pattern) > 0, "the window pattern must not be empty")

    def size_at(self, layer: int) -> int | None:
        return self.size if self.pattern[layer % len(self.pattern)] else None


MANY_EXPERTS = 2**30  # where a source states how many experts a token has, but not of how many


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of experts by tokens: *top_k* of *count*, inside the best *top_groups* of *groups* equal groups.

    DeepSeek-V3 (2024, section 2.1.2) limits a token to 4 of 8 groups, so that with a group on each node it
    is sent to at most 4 nodes. *library*: what exchanges its tokens (deepep, hybridep), *token_bytes* each.
    """

    top_k: int
    count: int = MANY_EXPERTS
    groups: int = 1
    top_groups: int = 1
    library: str = "deepep"
    token_bytes: float = 14336.0  # 7,168 elements of 2 bytes, where a workload does not say

    @property
    def is_limited(self) -> bool:
        return self.top_groups < self.groups

    def aligns_with(self, nodes: int) -> bool:
        """Return True if each node holds complete groups, or each group fills complete nodes."""
        return nodes % self.groups == 0 or self.groups % nodes == 0

    def nodes_per_token(self, nodes: int) -> float:
        """Return the expected number of distinct nodes that hold a token's experts, spread over *nodes*.

        A Markov chain over (groups met, nodes met) draws the experts from the best downwards, each left
        equally likely. The groups with the best experts are those met first, so once *top_groups* are met
        all others drop out. That is exact for groups ranked by their best expert (DeepSeek-V2); ranking by
        the two best (V3) differs by less than 1 %. Groups that do not align with nodes are left out.
        """
        groups, top_groups = self.groups, self.top_groups
        if not (self.is_limited and self.aligns_with(nodes)):
            groups = top_groups = nodes
        group_experts, node_experts = self.count / groups, self.count / nodes
        states = {(0, 0): 1.0}
        for chosen in range(self.top_k):
            following: dict[tuple[int, int], float] = {}
            for (met, reached), chance in states.items():
                candidates = (self.count if met < top_groups else top_groups * group_experts) - chosen
                new_group = (groups - met) * group_experts / candidates if met < top_groups else 0.0
                if nodes >= groups:
                    opens = new_group
                    joins = max(met * nodes / groups - reached, 0.0) * node_experts / candidates
                else:
                    unmet_groups = (nodes - reached) * groups / nodes
                    opens, joins = unmet_groups * group_experts / candidates if new_group else 0.0, 0.0
                for step, share in (
                    ((1, 1), opens),
                    ((1, 0), new_group - opens),
                    ((0, 1), joins),
                    ((0, 0), 1.0 - new_group - joins),
                ):
                    if share > 0.0:
                        state = met + step[0], reached + step[1]
                        following[state] = following.get(state, 0.0) + chance * share
            states = following
        return sum(reached * chance for (_, reached), chance in states.items())


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in place of the MLP.

    *pattern* runs over the layers from the first and repeats (true = experts); the *first_dense* layers
    have a dense MLP whatever it says. *latent* is the width experts work in where tokens are projected
    down before dispatch and up after combine (LatentMoE); 0 means the hidden width. A token's experts
    come from *top_groups* of *groups* groups (``topk_group`` and ``n_group`` of Hugging Face configs).
    """

    count: Size
    top_k: Size
    ffn: Size
    shared_ffn: Natural = 0
    shared_gate: bool = False
    router_bias: bool = False
    latent: Natural = 0
    first_dense: Natural = 0
    pattern: tuple[bool, ...] = (True,)
    wide_weights: bool = False  # its code weighs what experts return in fp32
    groups: Size = 1
    top_groups: Size = 1

    def __post_init__(self) -> None:
        require(self.top_k <= self.count, f"top_k {self.top_k} exceeds the {self.count} experts")
        require(self.count % self.groups == 0, f"{self.count} experts do not fill {self.groups} groups equally")
        require(self.top_groups <= self.groups, f"top_groups {self.top_groups} exceeds {self.groups} groups")
        groups, size = self.top_groups, self.count // self.groups
        require(self.top_k <= groups * size, f"{groups} groups of {size} experts hold no {self.top_k}")
        require(any(self.pattern), "the expert pattern names no layer")
        require(not (self.shared_gate and not self.shared_ffn), "a shared gate needs a shared expert")

    @property
    def routing(self) -> Routing:
        return Routing(self.top_k, self.count, self.groups, self.top_groups)

    def is_expert_layer(self, layer: int) -> bool:
        return layer >= self.first_dense and self.pattern[layer % len(self.pattern)]


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): low ranks before the heads.

    *query_rank* 0 means queries are projected directly. A head's query is nope_dim + rope_dim wide. With
    *top_keys* an indexer of *index_heads* heads of *index_dim* scores all keys, and each query attends to the
    best *top_keys* (DeepSeek-V3.2-Exp, 2025, section 1: DeepSeek Sparse Attention); 0: to all of them.
    """

    kv_rank: Size
    nope_dim: Size
    rope_dim: Size
    value_dim: Size
    query_rank: Natural = 0
    index_heads: int = 0
    index_dim: int = 0
    top_keys: Natural = 0

    def __post_init__(self) -> None:
        require_counts(self, 1 if self.top_keys else 0, "index_heads", "index_dim")


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Layers of unlike kinds.

    *pattern* has one letter per layer. Where a layer is one thing (Nemotron-H; Megatron-LM's letters): ``M`` Mamba-2,
    ``*`` attention, ``-`` MLP, ``E`` experts. Where it is a mixer and a feed-forward (Bamba, Granite 4): ``m`` Mamba-2
    and ``a`` attention before an MLP, ``x`` and ``y`` before experts; ``S`` is Mamba of the first version alone, ``s``
    and ``t`` the same before an MLP and before experts (Jamba), ``d`` and ``e`` a gated delta net before them
    (Qwen3-Next). The sizes are those of Mamba-2 blocks, where there are any: their inner width is mamba_heads x
    mamba_head_dim; *chunk* is the scan's, Megatron-LM's unless given.
    """

    pattern: str
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    state: int = 0
    groups: int = 0
    conv: int = 4
    chunk: int = 128

    def __post_init__(self) -> None:
        unknown = sorted(set(self.pattern) - set(HYBRID_BLOCKS))
        require(not unknown, f"unknown letters {unknown} in the hybrid pattern; known: {' '.join(HYBRID_BLOCKS)}")
        require(len(self.pattern) > 0, "the hybrid pattern must not be empty")
        least = int(Mixer.MAMBA in self.mixers)
        require_counts(self, least, "mamba_heads", "mamba_head_dim", "state", "groups", "conv", "chunk")
        divides = not least or self.mamba_heads % self.groups == 0
        require(divides, f"mamba_heads {self.mamba_heads} is not a multiple of groups {self.groups}")

    @property
    def mixers(self) -> set[Mixer]:
        return {HYBRID_BLOCKS[letter][0] for letter in self.pattern}

    @property
    def inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim


HYBRID_BLOCKS: dict[str, tuple[Mixer, FeedForward]] = {
    "M": (Mixer.MAMBA, FeedForward.NONE),
    "*": (Mixer.ATTENTION, FeedForward.NONE),
    "-": (Mixer.NONE, FeedForward.DENSE),
    "E": (Mixer.NONE, FeedForward.EXPERTS),
    "m": (Mixer.MAMBA, FeedForward.DENSE),
    "a": (Mixer.ATTENTION, FeedForward.DENSE),
    "x": (Mixer.MAMBA, FeedForward.EXPERTS),
    "y": (Mixer.ATTENTION, FeedForward.EXPERTS),
    "S": (Mixer.SELECTIVE, FeedForward.NONE),
    "s": (Mixer.SELECTIVE, FeedForward.DENSE),
    "t": (Mixer.SELECTIVE, FeedForward.EXPERTS),
    "d": (Mixer.DELTA, FeedForward.DENSE),
    "e": (Mixer.DELTA, FeedForward.EXPERTS),
}


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of one layer; *window* None means full attention."""

    mixer: Mixer = Mixer.ATTENTION
    feed_forward: FeedForward = FeedForward.DENSE
    window: int | None = None
    chunked: bool = False  # the window is a chunk: attention is block-diagonal
