"""Host-bound execution: an eager framework issues kernels one by one, and small kernels wait for it.

The host runs ahead of the GPU as long as kernels are longer than their dispatch. Kernel i cannot start before
the host has issued it, so a sequence ends at the latest of (issue of kernel i + all GPU work from i on).
A captured graph or a compiled step issues everything at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul

# Further host seconds of a grouped matmul for each expert: Transformer Engine calls cuBLAS and handles
# weights, formats and gradients expert by expert. Its issue 2897 measures 1.2 ms forward and 2.1 ms backward
# for both layers of 64 experts: 9.4 and 8.2 us for each product of an expert, with the products joined.
EXPERT_ISSUE_S = 9e-6
# Further host seconds of a product in a scaled format: Transformer Engine's modules handle scales, quantisers
# and transposes in Python. Its issue 445 has 2.07 ms in fp8 and 0.57 in bf16 for the three products of a
# linear layer of 1,024 x 1,024 on an H100, whose kernels take a few microseconds.
SCALED_ISSUE_S = 0.5e-3
# Further host seconds of any product of Megatron-LM's and Transformer Engine's modules, more Python than
# PyTorch's own: Transformer Engine's pull request 1191 (2024) measures 74 us of host for a forward of
# Megatron's ColumnParallelLinear in bf16 and 115 us for its own, 50 us of which are heavy_s; halfway between.
MODULE_ISSUE_S = 45e-6
# Host seconds of each copy that PyTorch makes of what it gathered into a list, one for each rank
# (ProcessGroupNCCL::allgather): tools/measure_part_copies.py on the host of an H200.
PART_ISSUE_S = 6e-6

# The host's times differ so much between machines, days and runs, either way: the same host-bound steps took
# 0.8 to 1.3 times as long on three days (tools/measure_pace.py), and 0.73 to 1.03 times the median within one
# minute (20 small PyTorch programs on an H200).
HOST_SPREAD = 1.25

FUSED_UPDATES = (ElementwiseKind.OPTIMIZER, ElementwiseKind.IDLE_OPTIMIZER)


@dataclass(frozen=True, slots=True)
class DispatchFit:
    """Host seconds to issue one kernel of eager PyTorch."""

    light_s: float  # element-wise kernels
    heavy_s: float  # a linear or attention module: Python layers, autograd bookkeeping, library heuristics
    backward_light_s: float  # from the autograd engine, which is C++
    backward_heavy_s: float
    call_s: float  # of one call from a measuring loop: events, graph set-up
    # Further, for what a layer's code does around its attention, and around each grouped product of experts.
    layer_s: float = 0.0
    backward_layer_s: float = 0.0
    grouped_s: float = 0.0
    backward_grouped_s: float = 0.0
    # Of the optimizer's lists, for each tensor in them: updated in one kernel, or operation by operation.
    update_s: float = 0.0
    listed_update_s: float = 0.0

    def issue_s(self, work: Compute, backward: bool) -> float:
        return self._kernel_s(work, backward) + self._around_s(work, backward)

    def _around_s(self, work: Compute, backward: bool) -> float:
        if isinstance(work, GroupedMatmul):
            return self.backward_grouped_s if backward else self.grouped_s
        layer_s = self.backward_layer_s if backward else self.layer_s
        if isinstance(work, Attention):
            return layer_s
        # Attention that is written out has two batched products, and four in the backward.
        batched = isinstance(work, Matmul) and work.batch > 1
        return layer_s / (4 if backward else 2) if batched else 0.0

    def _kernel_s(self, work: Compute, backward: bool) -> float:
        if isinstance(work, Elementwise):
            if work.kind in FUSED_UPDATES and self.update_s:
                return self.update_s
            if work.kind is ElementwiseKind.LISTED_OPTIMIZER and self.listed_update_s:
                return self.listed_update_s
            return self.backward_light_s if backward else self.light_s
        return self.backward_heavy_s if backward else self.heavy_s


def elapsed_s(kernel_s: Sequence[float], issue_s: Sequence[float]) -> float:
    """From the first issue until the GPU has finished, the GPU idle at the start."""
    if not len(kernel_s):
        return 0.0
    kernels = np.asarray(kernel_s, dtype=np.float64)
    issued = np.cumsum(np.asarray(issue_s, dtype=np.float64))
    remaining = np.cumsum(kernels[::-1])[::-1]
    # The first kernel's own dispatch overlaps the end of what ran before.
    ahead = issued - issued[0]
    return float(max(np.max(ahead + remaining), issued[-1]))
