"""What decides how much a layer keeps, beside its model and its kind."""

from dataclasses import dataclass

from stepcast.ir.framework import Kernels
from stepcast.ir.strategy import ContextKind, RecomputeModule


@dataclass(frozen=True, slots=True)
class SavedShape:
    tokens: int
    seq: int
    batch: int
    tp: int
    outer: int  # ways in which tokens outside tensor-parallel regions are split
    cp: int
    expert_tp: int
    element: float
    stream: float  # bytes of an element of the residual stream
    matmul: float  # bytes of an element as a matmul keeps its input
    flash: bool
    mask: float  # bytes of an element of dropout's mask; 0 without dropout
    activated: float  # bytes of an element of an activation's input, as fused kernels keep it
    kernels: Kernels
    alternate: bool  # every second matmul is recomputed
    modules: frozenset[RecomputeModule]  # which the backward runs again
    routed: float  # rows at the busiest expert rank per token and chosen expert
    written: bool = False  # modules of transformers, which keep what each of their operations needs
    masked: bool = False  # attention by a mask, for a window
    wide_softmax: bool = False  # of attention that is written out
    score: float = 0.0  # bytes of an element of its square
    eager_ssm: bool = False  # scans of Mamba-2 as PyTorch operations
    copies: bool = False  # autocast casts the input of each product by itself
    context: ContextKind = ContextKind.RING  # how context-parallel ranks exchange keys and values

    @property
    def plain(self) -> bool:
        return self.kernels is Kernels.PLAIN
