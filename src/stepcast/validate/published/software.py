"""How much slower the kernels of earlier years are than those our prices were learnt on.

The prices know PyTorch 2.11 with cuDNN's attention. FlashAttention 1 reaches 30 to 50 % of an A100's peak
forward and 25 to 35 % backward (Dao, FlashAttention-2, 2023, section 1); FlashAttention-2 what our prices say
of an A100 (figures 5 and 6 there) but only 35 % of an H100 (Shah et al., FlashAttention-3, 2024, abstract).
FlashAttention 1 on an H100 is taken to gain as much over an A100 as its successor does.

Attention without such a kernel multiplies one small matrix per head. cuBLAS of CUDA 11 left the tensor cores
where the rows of these miss 16-byte boundaries: with heads of 108 instead of 216 the same model takes 41 s
longer (BLOOM's chronicles, "NHEADs comparison", 162.72 s and 121.28 s), which is all of its batched products
at 10 TFLOP/s, half of what an A100's ordinary cores can do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from stepcast.cost.calibration import Calibration, Correction
from stepcast.cost.compute import ALONE, Load, compute_price
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.price import Price
from stepcast.hardware.gpu import Gpu
from stepcast.ir.dtype import DType
from stepcast.ir.work import Compute, Matmul


class AttentionKernel(StrEnum):
    """Which fused attention a run used."""

    NONE = "none, on CUDA 11"
    FLASH_1 = "flash-attention 1"
    FLASH_2 = "flash-attention 2"
    CURRENT = "current"


# (kernel, architecture) -> seconds forward and backward over those of the current kernels.
SLOWER: Mapping[tuple[AttentionKernel, str], tuple[float, float]] = {
    (AttentionKernel.FLASH_1, "ampere"): (1.46, 1.68),
    (AttentionKernel.FLASH_1, "hopper"): (2.5, 2.8),
    (AttentionKernel.FLASH_2, "hopper"): (1.5, 1.5),
}


BOUNDARY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Cuda11(Calibration):
    """Prices with batched products as cuBLAS of CUDA 11 ran them."""

    def price(self, work: Compute, gpu: Gpu, fit: ComputeFit, load: Load = ALONE) -> Price:
        if isinstance(work, Matmul) and work.batch > 1 and misses_boundaries(work):
            work = replace(work, dtype=DType.FP32)
        return compute_price(work, gpu, fit, load)


def misses_boundaries(work: Matmul) -> bool:
    return any(size * work.dtype.bytes % BOUNDARY_BYTES for size in (work.n, work.k))


@lru_cache(maxsize=16)
def calibration_of(kernel: AttentionKernel, gpu: str, architecture: str) -> Calibration | None:
    """Prices with the attention of *kernel*; None where the current ones hold."""
    if kernel is AttentionKernel.NONE:
        return Cuda11(gpu, {})
    if (kernel, architecture) not in SLOWER:
        return None
    forward, backward = SLOWER[kernel, architecture]
    return Calibration(
        gpu, {"attention.forward": Correction(forward), "attention.backward": Correction(backward)}
    )
