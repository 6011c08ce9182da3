"""Weight tensors: name, shape, and how tensor and expert parallelism split them.

Every parameter count is a sum over these, so a count, its share per part and its share per rank cannot
disagree. Splitting follows Megatron-LM (Shoeybi et al. 2019, section 3): the first matrix of a pair is split
by columns with its bias, the second by rows while every rank has all of its bias, the embedding by vocabulary;
fewer kv heads than ranks are split all the same, and their results gathered (``ir.layers.attention``); norms,
position embeddings, routers and the down-projections of latent attention are on every rank.
"""

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from stepcast.ir.architecture import Architecture
from stepcast.ir.dataclass import dataclass


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
    outputs; None where it is no matrix. *per_channel*: it scales single channels and multiplies no matrix.
    """

    name: str
    part: WeightPart
    shape: tuple[int, ...]
    split: Split = Split.NONE
    most_ways: int = 0
    inputs_split: bool | None = None
    per_channel: bool = False

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
        other = -(-elements // unsplit)
        return (count, unsplit, other) if self.inputs_split else (count, other, unsplit)


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
    """Return a matrix and, where asked, its bias, which is split only along with the columns."""
    weights = [Weight(f"{name}.weight", part, (outputs, inputs), split, inputs_split=by_rows)]
    if bias:
        weights.append(Weight(f"{name}.bias", part, (outputs,), Split.NONE if by_rows else split))
    return weights


def norm_weight(model: Architecture, name: str, width: int) -> Weight:
    return Weight(name, WeightPart.NORM, (model.norm.elements(width),))


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
