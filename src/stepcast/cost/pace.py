"""Adjustments of a price: the kernels of earlier years, and the slowest of many GPUs that wait for one another.

The prices are those of PyTorch 2.11 with cuDNN's attention; ``data/fits/constants.toml`` has how much slower the
kernels before them are, and how far GPUs of one kind differ.

Attention without such a kernel multiplies one small matrix per head. cuBLAS of CUDA 11 left the tensor cores
where the rows of these miss 16-byte boundaries: with heads of 108 instead of 216 the same model takes 41 s
longer (BLOOM's chronicles, "NHEADs comparison", 162.72 s and 121.28 s), which is all of its batched products
at 10 TFLOP/s, half of what an A100's ordinary cores can do.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import erfc, sqrt

from stepcast.cost.price import Price
from stepcast.ir.framework import AttentionKernel
from stepcast.ir.layout import Layout
from stepcast.ir.tables import constants
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Compute, GroupedMatmul, Matmul

MEASURED = constants("pace")
BOUNDARY_BYTES = 16


def convert_for_kernel(work: Compute, kernel: AttentionKernel) -> Compute:
    """Return *work* in the format in which that generation multiplies it."""
    if kernel is AttentionKernel.CUDA_11 and isinstance(work, Matmul) and work.batch > 1:
        return replace(work, dtype=DType.FP32) if misses_boundaries(work) else work
    return work


def slow_for_kernel(price: Price, work: Compute, kernel: AttentionKernel, architecture: str) -> Price:
    """Return the price of that generation from the *price* of current kernels."""
    if kernel is AttentionKernel.CUDA_12 and architecture == "blackwell" and isinstance(work, CLOCKED):
        return price.times(MEASURED["early_blackwell"]) if work.dtype.scaled else price
    if not isinstance(work, Attention) or (slower := MEASURED.get(kernel, {}).get(architecture)) is None:
        return price
    is_narrow = kernel is AttentionKernel.FLASH_1 and work.head_dim <= MEASURED["narrow_width"]
    return price.times(slower[work.backward] * (MEASURED["narrow_heads"] if is_narrow else 1.0))


def misses_boundaries(work: Matmul) -> bool:
    return any(size * work.dtype.bytes % BOUNDARY_BYTES for size in (work.n, work.k))


# Standard deviation of a GPU's time for work that its clock decides, over that of the typical one.
VARIATION: float = MEASURED["variation"]
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
    low_s, high_s = (max([clocked_s * factor + other_s for (clocked_s, other_s), _ in kinds]) for factor in (0.9, 1.2))
    while high_s - low_s > 1e-9 * high_s:
        middle_s, above = (low_s + high_s) / 2, 0.0
        for (clocked_s, other_s), count in kinds:
            above += ranks * count * erfc(((middle_s - other_s) / clocked_s - 1.0) / VARIATION / ROOT) / 2
        if above > exceeding:
            low_s = middle_s
        else:
            high_s = middle_s
    return min([(high_s - other_s) / clocked_s for (clocked_s, other_s), _ in kinds])


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
