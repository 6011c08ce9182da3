"""Adjustments of a price: the kernels of earlier years, and the slowest of many GPUs that wait for one another.

The prices are those of PyTorch 2.11 with cuDNN's attention. FlashAttention 1 reaches 30 to 50 % of an A100's peak
forward and 25 to 35 % backward (Dao, FlashAttention-2, 2023, section 1); FlashAttention-2 what our prices say
of an A100 (figures 5 and 6 there) but only 35 % of an H100 (Shah et al., FlashAttention-3, 2024, abstract).
On an H200 it takes 25.9 and 68.9 ms for 32 heads of 32,768 tokens (tools/measure_ring_attention.py, kernels
kept up for a second) where our prices say 15.8 and 47.2 ms within a step.
FlashAttention 1 on an H100 is assumed to gain as much over an A100 as its successor does.

Attention without such a kernel multiplies one small matrix per head. cuBLAS of CUDA 11 left the tensor cores
where the rows of these miss 16-byte boundaries: with heads of 108 instead of 216 the same model takes 41 s
longer (BLOOM's chronicles, "NHEADs comparison", 162.72 s and 121.28 s), which is all of its batched products
at 10 TFLOP/s, half of what an A100's ordinary cores can do.

GPUs of one kind hold different clocks under the same power limit. Sinha et al., "Not All GPUs Are Created
Equal" (SC 2022, arXiv 2208.11035), ran the same work on 90 % of the GPUs of five clusters: on average their
times differ by 8 %, outliers left out. Whiskers of a box plot, beyond which values count as outliers, stand
5.4 standard deviations of normal values apart, so one is 1.5 % (V100 and MI60). "5 % and higher differences
on an 8-gpu node" (stas00/ml-engineering, compute/accelerator, of products) are those of 1.75 %: taken here.
MLPerf bounds it from above: the same run on eight GPUs in nodes of different makers differs by 1.2 % (one
standard deviation, six groups of rows), as the slowest of eight would if single ones differed by 2.0 %.
Published runs that differ in their number of GPUs alone bound it from below: 49 series grow by 2.3 % from
their smallest to their largest (median), by 1.0 % so predicted and by 0.1 % without.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import erfc, sqrt

from stepcast.cost.price import Price
from stepcast.ir.dtype import DType
from stepcast.ir.framework import AttentionKernel
from stepcast.ir.layout import Layout
from stepcast.ir.work import Attention, Compute, GroupedMatmul, Matmul

# (kernel, architecture) -> seconds forward and backward over those of the current kernels.
SLOWER: Mapping[tuple[AttentionKernel, str], tuple[float, float]] = {
    (AttentionKernel.FLASH_1, "ampere"): (1.46, 1.68),
    (AttentionKernel.FLASH_1, "hopper"): (2.5, 2.8),
    (AttentionKernel.FLASH_2, "hopper"): (1.64, 1.46),
}
# FlashAttention 1 loses less with heads of 64: fitted to MPT-125M and -350M on A100 (llm-foundry's tables), whose long
# sequences are nearly all attention, and which would be 15 % too slow otherwise.
NARROW_HEADS, NARROW_WIDTH = 0.83, 64
# Products and attention in 8 and 4 bits by the kernels of CUDA 12 on Blackwell, its first: the same LoRA took 1.51 s on
# eight B200 in MLPerf 5.0 and 1.30 s in 5.1; NVIDIA's recipes of that time (dgxc-benchmarking) agree.
EARLY_BLACKWELL = 1.1
BOUNDARY_BYTES = 16


def convert_for_kernel(work: Compute, kernel: AttentionKernel) -> Compute:
    """Return *work* in the format in which that generation multiplies it."""
    if kernel is AttentionKernel.CUDA_11 and isinstance(work, Matmul) and work.batch > 1:
        return replace(work, dtype=DType.FP32) if misses_boundaries(work) else work
    return work


def slow_for_kernel(price: Price, work: Compute, kernel: AttentionKernel, architecture: str) -> Price:
    """Return the price of that generation from the *price* of current kernels."""
    if kernel is AttentionKernel.CUDA_12 and architecture == "blackwell" and isinstance(work, CLOCKED):
        return price.times(EARLY_BLACKWELL) if work.dtype.scaled else price
    if not isinstance(work, Attention) or (kernel, architecture) not in SLOWER:
        return price
    narrow = NARROW_HEADS if kernel is AttentionKernel.FLASH_1 and work.head_dim <= NARROW_WIDTH else 1.0
    return price.times(SLOWER[kernel, architecture][work.backward] * narrow)


def misses_boundaries(work: Matmul) -> bool:
    return any(size * work.dtype.bytes % BOUNDARY_BYTES for size in (work.n, work.k))


# Standard deviation of a GPU's time for work that its clock decides, over that of the typical one.
VARIATION = 0.0175
ROOT = sqrt(2.0)
CLOCKED = (Matmul, GroupedMatmul, Attention)


@lru_cache(maxsize=1024)
def slowest(gpus: int, stages: int = 1) -> float:
    """Return the expected time of the slowest of *gpus* over that of the typical one.

    The expected largest of n normal values: Blom, Statistical Estimates and Transformed Beta-Variables, 1958. If the
    GPUs of one of *stages* alone decide, the slowest of all is rarely among them.
    """
    if gpus < 2:
        return 1.0
    from statistics import NormalDist

    return 1.0 + VARIATION * NormalDist().inv_cdf((gpus + 0.25 - 0.625 * stages) / (gpus + 0.25))


@lru_cache(maxsize=4096)
def _slowest_of_stages(gpus: int, stages_s: tuple[tuple[float, float], ...]) -> float:
    """Return the time of products over that of the typical GPU where stages differ.

    *stages_s*: for each stage the seconds of work that clocks decide, and of other work. A slow GPU in a stage with
    less work holds nobody up. As in Blom's rule, the longest duration is the one that 0.625 GPUs exceed on average.
    """
    exceeding, ranks = 0.625 * gpus / (gpus + 0.25), gpus // len(stages_s)
    kinds = Counter(stages_s).items()
    low_s, high_s = (max(clocked * factor + other for clocked, other in stages_s) for factor in (0.9, 1.2))
    while high_s - low_s > 1e-9 * high_s:
        middle_s, above = (low_s + high_s) / 2, 0.0
        for (clocked, other), count in kinds:
            above += ranks * count * erfc(((middle_s - other) / clocked - 1.0) / VARIATION / ROOT) / 2
        if above > exceeding:
            low_s = middle_s
        else:
            high_s = middle_s
    return min((high_s - other) / clocked for clocked, other in stages_s)


def pace_of(layout: Layout, micro_batches: int, stages_s: tuple[tuple[float, float], ...] = ()) -> float:
    """Return the time of products over that of the typical GPU, on average over a step.

    The slowest GPU of all holds up its tensor ranks in every layer, its pipeline in every micro-batch and
    other replicas in every step, unless *stages_s* (seconds of each stage that clocks decide, and others) give it less
    work. While a pipeline fills and drains, one stage after the other counts, each as slow as the slowest of its own
    that wait for one another.
    """
    turns, waits = micro_batches * layout.vpp, layout.pp - 1
    even = len(set(stages_s)) < 2 or not all(clocked for clocked, _ in stages_s)
    longest = slowest(layout.gpus) if even else _slowest_of_stages(layout.gpus, stages_s)
    return (turns * longest + waits * _stage_slowest(layout)) / (turns + waits)


def least_pace(layout: Layout, micro_batches: int) -> float:
    """Return a lower bound of the pace of *layout* and others that cut the same layers on as many GPUs into more
    even stages or fewer: the number of micro-batches grows with that of stages.
    """
    turns = micro_batches / layout.pp
    return (turns * slowest(layout.gpus) + _stage_slowest(layout)) / (turns + 1.0)


def _stage_slowest(layout: Layout) -> float:
    return slowest(max(layout.tp * layout.cp, layout.ep))


def apply_pace(price: Price, work: Compute, pace: float) -> Price:
    """Return *price* at the pace of the slowest GPU; work that waits for memory takes all GPUs equally long."""
    return price.times(pace) if isinstance(work, CLOCKED) else price


def apply_pace_s(seconds: float, work: Compute, pace: float) -> float:
    """Return the seconds of ``apply_pace`` alone."""
    return seconds * pace if isinstance(work, CLOCKED) else seconds
