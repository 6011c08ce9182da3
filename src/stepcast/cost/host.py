"""The host's side of a step: issuing kernels, copies between its memory and the GPUs, and the optimizer's update there.

An eager framework issues kernels one by one. The host runs ahead of the GPU as long as kernels are longer than their
dispatch. Kernel i cannot start before the host has issued it, so a sequence ends at the latest of (issue of kernel i +
all GPU work from i on). A captured graph or a compiled step issues everything at once.

All GPUs of a node that a job has copy and update at the same time, so each has a share of the links and of
the memory.
"""

from collections.abc import Sequence

import numpy as np

from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.hardware import Cluster
from stepcast.hardware.cluster import Host
from stepcast.ir.dtype import DType
from stepcast.ir.work import HostCopy, HostUpdate

# Additional host seconds of a grouped matmul for each expert, whose weights, formats and gradients Transformer Engine
# handles one by one: its issue 2897 has 1.2 ms forward and 2.1 ms backward for both layers of 64 experts in MXFP8, 9.4
# and 8.2 us for each product of an expert, with the products joined. Where each is a call of cuBLAS on one of four
# streams, eight products too small to matter take 0.267 ms (pull request 3134), 33 us each; two products of three
# quantise an operand of each expert in a scaled format, 20 us a call (pull request 3137).
EXPERT_ISSUE_S, SEPARATE_ISSUE_S, EXPERT_SCALED_S = 9e-6, 33e-6, 13e-6
# Additional host seconds of another product in a scaled format: Transformer Engine's modules handle scales, quantisers
# and transposes in Python. Its issue 445 has 2.07 ms in fp8 and 0.57 in bf16 for the three products of a
# linear layer of 1,024 x 1,024 on an H100, whose kernels take a few microseconds. MXFP8 needs one kernel where fp8
# looks for the largest magnitude first, and NVFP4 does both: taken as half.
SCALED_ISSUE_S = {DType.FP8: 0.5e-3, DType.MXFP8: 0.25e-3, DType.NVFP4: 0.5e-3}
# Additional host seconds of any product of Megatron-LM's and Transformer Engine's modules, more Python than
# PyTorch's own: Transformer Engine's pull request 1191 (2024) measures 74 us of host for a forward of
# Megatron's ColumnParallelLinear in bf16 and 115 us for its own, 50 us of which are heavy_s; halfway between.
MODULE_ISSUE_S = 45e-6
# Times as long as an x86 host takes, on a Grace CPU: 37.1 and 33.2 us for PyTorch's linear layer on a GB200 and a
# GH200, 13.5 on a DGX H100 (Transformer Engine's issue 2053), but 1.09 times for the dispatch of an operator (PyTorch's
# issue 187862). Taken between them, with published mixtures in sight.
HOST_PACE = dict.fromkeys(("gb200", "gb300", "gh200", "gh200-144gb"), 1.5)
# Host seconds of each copy that PyTorch makes of what it gathered into a list, one for each rank
# (ProcessGroupNCCL::allgather): tools/measure_part_copies.py on the host of an H200.
PART_ISSUE_S = 6e-6

# The host's times differ so much between machines, days and runs: a small training step took 5.9 to 10.3 ms in eleven
# visits to hosts of one kind (data/fits/captured.toml), a spread of 0.20 in the logarithm, and programs differ by 0.11
# more where the pace is known; 90 % of such times are between 0.69 and 1.44. The 5th and 95th percentile of 92
# fine-tuning steps that the host limits, in eight of the visits (data/transformers/tuning.csv), are 0.80 and 1.38. The
# same host-bound steps took 0.8 to 1.3 times as long on three days (tools/measure_pace.py), and 0.73 to 1.03 times the
# median within one minute (20 small PyTorch programs on an H200).
HOST_PACES = 0.7, 1.45
# The same where the pace was measured in the same visit: 159 of these fine-tuning steps, 0.86 and 1.22.
MEASURED_PACES = 0.86, 1.22
# Share of the memory's peak that an update on the host reaches. DeepSpeed's CPU-Adam updates 4 and 10 billion
# parameters in 1.03 and 2.57 s on a DGX-2 with 12 channels of DDR4-2666, 30 bytes each: 0.46; PyTorch's, not
# fused, 10 billion in 14.76 s, 82 bytes each: 0.22 (Ren et al., ZeRO-Offload, 2021, table 4). On 16 cores of
# an H200's host PyTorch's own fused AdamW is 7 times as fast as its loop, there 6.
UPDATE_SHARE = {True: 0.46, False: 0.22}
# Half widths of the 90 % range, as far as the few figures show: 1 billion parameters take 0.22 s, 15 % less.
COPY_SPREAD, UPDATE_SPREAD = 0.1, 0.3


def host_of(cluster: Cluster) -> Host:
    """Return the host of a node; a ValueError where the description does not include it."""
    if cluster.node.host is None:
        raise ValueError(
            f"{cluster.name} does not describe its hosts, to which this would be offloaded: use --set with "
            "node.host.memory, .memory_bandwidth, .links, .link.bandwidth and .link.latency (docs/offload.md)"
        )
    return cluster.node.host


def copy_bytes_per_s(host: Host, gpus: int) -> float:
    """Return the rate of one of *gpus* in one direction while the others copy too."""
    links = host.link.effective_bytes_per_s * min(1.0, host.links / gpus)
    return min(links, host.memory_bandwidth_bytes_per_s / gpus)


def copy_price(work: HostCopy, host: Host, gpus: int) -> Price:
    seconds = host.link.latency_s + work.size_bytes / copy_bytes_per_s(host, gpus)
    return Price.spread(seconds, PriceSource.SCALED, Bound.NETWORK, COPY_SPREAD)


def update_price(work: HostUpdate, host: Host, gpus: int) -> Price:
    """Return the price of an update where each of *gpus* has as much to update."""
    moved = work.read_bytes + work.write_bytes
    reached = host.memory_bandwidth_bytes_per_s * UPDATE_SHARE[work.fused] / gpus
    return Price.spread(moved / reached, PriceSource.SCALED, Bound.MEMORY, UPDATE_SPREAD)


def elapsed_s(kernel_s: Sequence[float], issue_s: Sequence[float]) -> float:
    """Return the seconds from the first issue until the GPU, idle at the start, has finished."""
    if not len(kernel_s):
        return 0.0
    kernels = np.asarray(kernel_s, dtype=np.float64)
    issued = np.cumsum(np.asarray(issue_s, dtype=np.float64))
    remaining = np.cumsum(kernels[::-1])[::-1]
    # The first kernel's own dispatch overlaps the end of what ran before.
    ahead = issued - issued[0]
    return float(max(np.max(ahead + remaining), issued[-1]))
