"""Model: an architecture with its weights, counted exactly."""

from dataclasses import dataclass

from stepcast.ir.architecture import Architecture
from stepcast.ir.check import require
from stepcast.ir.model_parts import LayerParts
from stepcast.ir.weights import (
    Shard,
    Weight,
    WeightPart,
    block_weights,
    count_elements,
    embedding_weights,
    head_weights,
    next_token_weights,
    range_shard,
)


@dataclass(frozen=True, slots=True)
class Model(Architecture):
    """What is simulated: how wide and deep it is stands in Architecture, how many weights that makes here."""

    __hash__ = Architecture.__hash__  # a dataclass would make another

    @property
    def parameters(self) -> int:
        """All weights, tied ones once, prediction modules for further tokens left out."""
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
        return count_elements(embedding_weights(self))

    @property
    def head_parameters(self) -> int:
        """The output projection; 0 where it is the word embedding again."""
        return count_elements(head_weights(self)) if not self.tied else count_elements(head_weights(self)[1:])

    @property
    def next_token_parameters(self) -> int:
        """The multi-token-prediction modules, which share embedding and head with the model."""
        return count_elements(next_token_weights(self)) * self.next_token_layers

    def layer_parameters(self, layer: int) -> dict[WeightPart, int]:
        """What one layer holds, by part."""
        counts: dict[WeightPart, int] = {}
        for weight in self.block_weights(self.blocks[layer]):
            counts[weight.part] = counts.get(weight.part, 0) + weight.elements
        return counts

    def block_weights(self, block: LayerParts) -> tuple[Weight, ...]:
        """The tensors of a layer of this kind."""
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
        """Parameters one rank holds of a pipeline stage: see shard_of."""
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
        """What one rank holds of *layers*, with the *embedding* and with final norm and *head* if asked.

        A stage that has the head but not the embedding holds its own copy of tied weights, as Megatron
        does. *expert_tp* splits each expert; it is *tp* unless given.
        """
        require(layers.step == 1, "a stage holds consecutive layers")
        inside = 0 <= layers.start <= layers.stop <= self.layers
        require(inside, f"layers {layers.start}..{layers.stop} reach outside the model's {self.layers}")
        for name, value in (("tp", tp), ("ep", ep), ("expert_tp", 1 if expert_tp is None else expert_tp)):
            require(type(value) is int and value >= 1, f"{name} must be a whole number of at least 1, not {value!r}")
        return range_shard(self, layers, tp, ep, tp if expert_tp is None else expert_tp, embedding, head)
