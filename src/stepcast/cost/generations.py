"""How much slower the kernels of earlier years are than those our prices were learnt on.

The prices know PyTorch 2.11 with cuDNN's attention. FlashAttention 1 reaches 30 to 50 % of an A100's peak
forward and 25 to 35 % backward (Dao, FlashAttention-2, 2023, section 1); FlashAttention-2 what our prices say
of an A100 (figures 5 and 6 there) but only 35 % of an H100 (Shah et al., FlashAttention-3, 2024, abstract).
On an H200 it takes 25.9 and 68.9 ms for 32 heads of 32,768 tokens (tools/measure_ring_attention.py, kernels
kept up for a second) where our prices say 15.8 and 47.2 ms within a step.
FlashAttention 1 on an H100 is taken to gain as much over an A100 as its successor does.

Attention without such a kernel multiplies one small matrix per head. cuBLAS of CUDA 11 left the tensor cores
where the rows of these miss 16-byte boundaries: with heads of 108 instead of 216 the same model takes 41 s
longer (BLOOM's chronicles, "NHEADs comparison", 162.72 s and 121.28 s), which is all of its batched products
at 10 TFLOP/s, half of what an A100's ordinary cores can do.
"""

from collections.abc import Mapping
from dataclasses import replace

from stepcast.cost.price import Price
from stepcast.ir.dtype import DType
from stepcast.ir.framework import AttentionKernel
from stepcast.ir.work import Attention, Compute, Matmul

# (kernel, architecture) -> seconds forward and backward over those of the current kernels.
SLOWER: Mapping[tuple[AttentionKernel, str], tuple[float, float]] = {
    (AttentionKernel.FLASH_1, "ampere"): (1.46, 1.68),
    (AttentionKernel.FLASH_1, "hopper"): (2.5, 2.8),
    (AttentionKernel.FLASH_2, "hopper"): (1.64, 1.46),
}
BOUNDARY_BYTES = 16


def as_run(work: Compute, kernel: AttentionKernel) -> Compute:
    """*work* in the format in which that generation multiplies it."""
    if kernel is AttentionKernel.CUDA_11 and isinstance(work, Matmul) and work.batch > 1:
        return replace(work, dtype=DType.FP32) if misses_boundaries(work) else work
    return work


def slowed(price: Price, work: Compute, kernel: AttentionKernel, architecture: str) -> Price:
    """*price* of the current kernels as what that generation takes."""
    if not isinstance(work, Attention) or (kernel, architecture) not in SLOWER:
        return price
    return price.times(SLOWER[kernel, architecture][work.backward])


def misses_boundaries(work: Matmul) -> bool:
    return any(size * work.dtype.bytes % BOUNDARY_BYTES for size in (work.n, work.k))
