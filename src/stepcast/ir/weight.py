"""One weight tensor of a model: name, shape, and how tensor and expert parallelism split it."""

import math
from dataclasses import dataclass
from enum import StrEnum

from stepcast.ir.architecture import Architecture


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
