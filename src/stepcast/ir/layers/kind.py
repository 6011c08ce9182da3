"""The declaration of a kind of layer: its weights, operators, saved tensors, FLOPs and adapters."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from stepcast.ir.architecture import Architecture, Weight
from stepcast.ir.dataclass import dataclass
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.model_parts import LayerParts
from stepcast.ir.strategy import RecomputeModule
from stepcast.ir.workload import Layer

Part = TypeVar("Part")


def present(part: Part | None) -> Part:
    """Return a part of a model that those with this kind of layer have."""
    assert part is not None
    return part


class SavedTensor(NamedTuple):
    """A tensor saved for the backward; recomputing any of the modules in *freed_by* frees it."""

    name: str
    size_bytes: float
    freed_by: tuple[RecomputeModule, ...] = ()


class AdaptedLinear(NamedTuple):
    """A linear layer that LoRA can adapt; those with one *pair* share their input, and fused one pair of matrices.

    Tensor-parallel ranks split its outputs, its inputs (*by_rows*) or neither. *experts* of them exist, if any.
    """

    name: str
    pair: str
    inputs: int
    outputs: int
    by_rows: bool = False
    split: bool = True
    experts: int = 0


def projection_adapters(model: Architecture, projected: int, inner: int, split: bool = True) -> list[AdaptedLinear]:
    """Return the projections into and out of a recurrent mixer (in_proj and out_proj of transformers' modules)."""
    into = AdaptedLinear("in", "in", model.hidden, projected, split=split)
    return [into, AdaptedLinear("out", "out", inner, model.hidden, by_rows=True, split=split)]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer half, a token mixer or a feed-forward, declared once.

    *weights* are its tensors without the norms around it; parameters, optimizer states and the FLOPs of
    products with weights are sums over them. *mixing_flops* are the forward's other products, if any. *operators* are
    its layers in the order of the forward, norms included. *saved* are the tensors it saves for the backward
    without those norms, *transient* the bytes that its backward needs on top for a moment. *adapters* are the
    linear layers LoRA can adapt. *alternates*: torchtitan's selective recomputation knows its matmuls.
    """

    weights: Callable[[Architecture], list[Weight]]
    mixing_flops: Callable[[Architecture, LayerParts, int, int, bool], float] | None
    operators: Callable[[Sizes, LayerParts], tuple[Layer, ...]]
    saved: Callable[[Sizes, LayerParts], list[SavedTensor]]
    transient: Callable[[Sizes, LayerParts], float]
    adapters: Callable[[Architecture], list[AdaptedLinear]]
    alternates: bool = True
