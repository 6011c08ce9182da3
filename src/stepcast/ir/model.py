"""Model: an architecture with its weights, counted exactly."""

from functools import lru_cache
from itertools import accumulate

from stepcast.ir import weights as tensors
from stepcast.ir.architecture import Architecture
from stepcast.ir.check import require
from stepcast.ir.dataclass import dataclass
from stepcast.ir.layers.ends import embedding_weights, final_weights, head_weights
from stepcast.ir.layers.kinds import block_weights
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.weights import Shard, Weight, WeightPart


@dataclass(frozen=True, slots=True)
class Model(Architecture):
    """The model that is simulated: Architecture has its widths and depth, this class counts its weights."""

    __hash__ = Architecture.__hash__  # a dataclass would make another

    @property
    def parameters(self) -> int:
        """All weights, tied ones once, without multi-token prediction modules."""
        return self.parameters_of(range(self.layers), embedding=True, head=True)

    @property
    def active_parameters(self) -> int:
        """Weights that take part in the forward of one token: of the routed experts, top_k."""
        if self.experts is None:
            return self.parameters
        routed = sum(
            weight.elements
            for block in self.blocks
            for weight in self.block_weights(block)
            if weight.part is WeightPart.EXPERTS
        )
        return self.parameters - routed // self.experts.count * (self.experts.count - self.experts.top_k)

    @property
    def embedding_parameters(self) -> int:
        """Word and position embeddings with their norm or projection."""
        return tensors.count_elements(embedding_weights(self))

    @property
    def head_parameters(self) -> int:
        """The output projection; 0 where it is the word embedding again."""
        return tensors.count_elements(head_weights(self)[1 if self.tied else 0 :])

    @property
    def next_token_parameters(self) -> int:
        """The multi-token-prediction modules, which share embedding and head with the model."""
        return tensors.count_elements(next_token_weights(self)) * self.next_token_layers

    def layer_parameters(self, layer: int) -> dict[WeightPart, int]:
        """Return the parameters of one layer, by part."""
        counts: dict[WeightPart, int] = {}
        for weight in self.block_weights(self.blocks[layer]):
            counts[weight.part] = counts.get(weight.part, 0) + weight.elements
        return counts

    def block_weights(self, block: LayerParts) -> tuple[Weight, ...]:
        """Return the tensors of a layer of this kind."""
        return block_weights(self, block.mixer, block.feed_forward)

    def parameters_of(
        self,
        layers: range,
        *,
        tp: int = 1,
        ep: int = 1,
        expert_tp: int | None = None,
        embedding: bool = False,
        head: bool = False,
    ) -> int:
        """Return the parameters one rank holds of a pipeline stage: see shard_of."""
        return self.shard_of(layers, tp=tp, ep=ep, expert_tp=expert_tp, embedding=embedding, head=head).total

    def shard_of(
        self,
        layers: range,
        *,
        tp: int = 1,
        ep: int = 1,
        expert_tp: int | None = None,
        embedding: bool = False,
        head: bool = False,
    ) -> Shard:
        """Return the shard of one rank of *layers*, with the *embedding* and with final norm and *head* if asked.

        A stage that has the head but not the embedding holds its own copy of tied weights, as Megatron
        does. *expert_tp* splits each expert; it is *tp* unless given.
        """
        require(layers.step == 1, "a stage holds consecutive layers")
        inside = 0 <= layers.start <= layers.stop <= self.layers
        require(inside, f"layers {layers.start}..{layers.stop} reach outside the model's {self.layers}")
        for name, value in (("tp", tp), ("ep", ep), ("expert_tp", 1 if expert_tp is None else expert_tp)):
            require(type(value) is int and value >= 1, f"{name} must be a whole number of at least 1, not {value!r}")
        return range_shard(self, layers, tp, ep, tp if expert_tp is None else expert_tp, embedding, head)


def next_token_weights(model: Architecture) -> list[Weight]:
    """Return one multi-token-prediction module (DeepSeek-V3, 2024, section 2.2), without embedding and head:
    two norms, a projection of both inputs to the hidden width, one block, one norm before the head.
    """
    if not model.next_token_layers:
        return []
    blocks = [block_weights(model, block.mixer, block.feed_forward) for block in model.next_token_blocks]
    return [
        tensors.norm_weight(model, "mtp.embedding_norm", model.hidden),
        tensors.norm_weight(model, "mtp.hidden_norm", model.hidden),
        *tensors.linear("mtp.projection", WeightPart.MLP, 2 * model.hidden, model.hidden, False, tensors.Split.TENSOR),
        *(weight for block in blocks for weight in block),
        tensors.norm_weight(model, "mtp.final_norm", model.hidden),
    ]


@lru_cache(maxsize=1024)
def next_token_shard(model: Architecture, tp: int, ep: int, expert_tp: int) -> Shard:
    """Return the shard of one rank of a multi-token-prediction module."""
    return tensors.shard_weights(model, next_token_weights(model), tp, ep, expert_tp)


@lru_cache(maxsize=16384)
def range_shard(
    model: Architecture, layers: range, tp: int, ep: int, expert_tp: int, embedding: bool, head: bool
) -> Shard:
    """Return the shard of one rank of consecutive *layers*; see Model.shard_of."""
    before = _running_shards(model, tp, ep, expert_tp)
    ends: list[Weight] = embedding_weights(model) if embedding else []
    if head:
        own_copy = not (model.tied and embedding)
        ends = ends + final_weights(model) + (head_weights(model) if own_copy else head_weights(model)[1:])
    return before[layers.stop] - before[layers.start] + tensors.shard_weights(model, ends, tp, ep, expert_tp)


@lru_cache(maxsize=1024)
def _running_shards(model: Architecture, tp: int, ep: int, expert_tp: int) -> tuple[Shard, ...]:
    """Return the parameters of all layers before each layer."""
    shards: dict[tuple[Mixer, FeedForward], Shard] = {}
    for block in model.blocks:
        kind = (block.mixer, block.feed_forward)
        if kind not in shards:
            shards[kind] = tensors.shard_weights(model, block_weights(model, *kind), tp, ep, expert_tp)
    return tuple(
        accumulate((shards[block.mixer, block.feed_forward] for block in model.blocks), initial=tensors.NOTHING)
    )
