"""The host's side of a step: issuing kernels, copies between its memory and the GPUs, and the optimizer's update there.

An eager framework issues kernels one by one. The host runs ahead of the GPU as long as kernels are longer than their
dispatch. Kernel i cannot start before the host has issued it, so a sequence ends at the latest of (issue of kernel i +
all GPU work from i on). A captured graph or a compiled step issues everything at once.

All GPUs of a node that a job has copy and update at the same time, so each has a share of the links and of the memory.
"""

from collections.abc import Sequence

import numpy as np

from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.hardware import Cluster
from stepcast.hardware.cluster import Host
from stepcast.ir.tables import constants
from stepcast.ir.work import HostCopy, HostUpdate

# Additional seconds to issue a grouped matmul for each expert, joined or separate, and in a scaled format; another
# product in a scaled format; any product of Megatron-LM's and Transformer Engine's modules; and each copy that PyTorch
# makes of what it gathered into a list.
HOST = constants("host")
EXPERT_ISSUE_S: float = HOST["expert_issue_s"]
SEPARATE_ISSUE_S: float = HOST["separate_issue_s"]
EXPERT_SCALED_S: float = HOST["expert_scaled_s"]
SCALED_ISSUE_S: dict[str, float] = HOST["scaled_issue_s"]
MODULE_ISSUE_S: float = HOST["module_issue_s"]
PART_ISSUE_S: float = HOST["part_issue_s"]
HOST_PACE: dict[str, float] = HOST["pace"]  # times as long as an x86 host takes, by GPU
# The interval of the host's times over those predicted, and where its pace was measured in the same visit.
HOST_PACES, MEASURED_PACES = tuple(HOST["paces"]), tuple(HOST["measured_paces"])
# Share of the memory's peak that an update on the host reaches, fused or not.
UPDATE_SHARE: dict[bool, float] = {True: HOST["fused_update_share"], False: HOST["listed_update_share"]}


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
    return Price.spread(seconds, PriceSource.SCALED, Bound.NETWORK, HOST["copy_spread"])


def update_price(work: HostUpdate, host: Host, gpus: int) -> Price:
    """Return the price of an update where each of *gpus* has as much to update."""
    moved = work.read_bytes + work.write_bytes
    reached = host.memory_bandwidth_bytes_per_s * UPDATE_SHARE[work.fused] / gpus
    return Price.spread(moved / reached, PriceSource.SCALED, Bound.MEMORY, HOST["update_spread"])


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
