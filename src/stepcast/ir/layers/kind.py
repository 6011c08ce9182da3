"""The declaration of a kind of layer: its weights, operators, saved tensors and FLOPs."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from stepcast.ir.architecture import Architecture
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


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer half, a token mixer or a feed-forward, declared once.

    *weights* is the list of its tensors in ``data/weights.txt``, without the norms around it; parameters, optimizer
    states, adapters and the FLOPs of products with weights are sums over them. *mixing_flops* are the forward's other
    products, if any. *operators* are its layers in the order of the forward, norms included. *saved* are the tensors it
    saves for the backward without those norms, *transient* the bytes that its backward needs on top for a moment.
    *alternates*: torchtitan's selective recomputation knows its matmuls.
    """

    weights: str
    mixing_flops: Callable[[Architecture, LayerParts, int, int, bool], float] | None
    operators: Callable[[Sizes, LayerParts], tuple[Layer, ...]]
    saved: Callable[[Sizes, LayerParts], list[SavedTensor]]
    transient: Callable[[Sizes, LayerParts], float]
    alternates: bool = True
