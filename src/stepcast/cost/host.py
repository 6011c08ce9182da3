"""The host's side of a step: copies between its memory and the GPUs, and the optimizer's update there.

All GPUs of a node that a job has copy and update at the same time, so each has a share of the links and of
the memory.
"""

from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.hardware import Cluster
from stepcast.hardware.cluster import Host
from stepcast.ir.work import HostCopy, HostUpdate

# Of the memory's peak, what an update on the host moves. DeepSpeed's CPU-Adam updates 4 and 10 billion
# parameters in 1.03 and 2.57 s on a DGX-2 with 12 channels of DDR4-2666, 30 bytes each: 0.46; PyTorch's, not
# fused, 10 billion in 14.76 s, 82 bytes each: 0.22 (Ren et al., ZeRO-Offload, 2021, table 4). On 16 cores of
# an H200's host PyTorch's own fused AdamW is 7 times as fast as its loop, there 6.
UPDATE_SHARE = {True: 0.46, False: 0.22}
# Nine in ten lie within, as far as the few figures say: 1 billion parameters take 0.22 s, 15 % less.
COPY_SPREAD, UPDATE_SPREAD = 0.1, 0.3


def host_of(cluster: Cluster) -> Host:
    """The host of a node; a ValueError where the description says nothing of it."""
    if cluster.node.host is None:
        raise ValueError(
            f"{cluster.name} says nothing of its hosts, to which this would be offloaded: describe node.host "
            "with memory, memory_bandwidth, links and link (docs/clusters.md)"
        )
    return cluster.node.host


def copy_bytes_per_s(host: Host, gpus: int) -> float:
    """What one of *gpus* reaches in one direction while the others copy too."""
    links = host.link.effective_bytes_per_s * min(1.0, host.links / gpus)
    return min(links, host.memory_bandwidth_bytes_per_s / gpus)


def copy_price(work: HostCopy, host: Host, gpus: int) -> Price:
    seconds = host.link.latency_s + work.size_bytes / copy_bytes_per_s(host, gpus)
    return _price(seconds, Bound.NETWORK, COPY_SPREAD)


def update_price(work: HostUpdate, host: Host, gpus: int) -> Price:
    """Where each of *gpus* has as much to update."""
    moved = work.read_bytes + work.write_bytes
    reached = host.memory_bandwidth_bytes_per_s * UPDATE_SHARE[work.fused] / gpus
    return _price(moved / reached, Bound.MEMORY, UPDATE_SPREAD)


def _price(seconds: float, bound: Bound, spread: float) -> Price:
    return Price(seconds, PriceSource.SCALED, bound, 1.0, seconds / (1 + spread), seconds * (1 + spread))
