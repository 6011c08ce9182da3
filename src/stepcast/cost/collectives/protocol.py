"""How NCCL moves bytes: protocols that trade latency for bandwidth, channels that open with the size.

LL sends 4 bytes of data with 4 of flag, so a receiver needs no fence; LL128 sends 120 with 8 over NVLink;
Simple sends plain data and synchronises by fences. Figures are of NVIDIA/nccl, src/graph/tuning.cc (2.7
to 2.12: tables baseLat and hwLat, ring columns; the values of LL are the links' own latency and are taken
off), src/include/device.h (threads, words), src/include/comm.h (bytes per thread) and src/enqueue.cc
(chunks). They hold for any cluster; what differs between clusters stands in the cluster's description.
"""

from enum import StrEnum

from stepcast.cost.collectives.curve import Ramp
from stepcast.cost.collectives.route import Route
from stepcast.units import US


class Protocol(StrEnum):
    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


# Share of the bandwidth that data get: a quarter in LL (half is flags, and the stores are small), 120/128
# less some in LL128.
BANDWIDTH_SHARE = {Protocol.LL: 0.25, Protocol.LL128: 0.92, Protocol.SIMPLE: 1.0}

# Time that a ring needs beyond LL's, once (baseLat less 3.6 us) ...
RING_START_S = {Protocol.LL: 0.0, Protocol.LL128: 6.4 * US, Protocol.SIMPLE: 4.8 * US}
# ... and at each hop, over NVLink, PCIe and the network (hwLat less LL's).
NVLINK_HOP_S = {Protocol.LL: 0.0, Protocol.LL128: 1.43 * US, Protocol.SIMPLE: 2.93 * US}
PCIE_HOP_S = {Protocol.LL: 0.0, Protocol.LL128: 1.5 * US, Protocol.SIMPLE: 4.7 * US}
NETWORK_HOP_S = {Protocol.LL: 0.0, Protocol.LL128: 1.3 * US, Protocol.SIMPLE: 6.9 * US}
# A hop down a tree's chain costs LL128 half of what it costs a ring's (hwLat 1.2 against 1.9 us).
TREE_NVLINK_HOP_S = NVLINK_HOP_S | {Protocol.LL128: 0.7 * US}

# Within a node LL takes 1.8 times as long per hop when the group spans nodes.
SPANNING_LL_FACTOR = 1.8

# A channel opens per 512 threads of 8 bytes; a ring within a node first fills one such piece per rank.
BYTES_PER_CHANNEL = 512 * 8
# Data in one chunk of one channel: a step of 640 threads x 120 words of 8 bytes, which NCCL halves for
# messages of middling size until it is below 128 KiB, three times; 15/16 of it is data.
CHUNK_BYTES = 640 * 120 * 8 // 2**3 * 15 // 16


def intra_hop_s(route: Route, protocol: Protocol, tree: bool = False) -> float:
    """One hop within a node."""
    latency_s = route.intra_latency_s
    if protocol is Protocol.LL and route.nodes > 1:
        latency_s *= SPANNING_LL_FACTOR
    if not route.nvlink:
        return latency_s + PCIE_HOP_S[protocol]
    return latency_s + (TREE_NVLINK_HOP_S if tree else NVLINK_HOP_S)[protocol]


def inter_hop_s(route: Route, protocol: Protocol) -> float:
    """One hop between nodes."""
    return route.inter_latency_s + NETWORK_HOP_S[protocol]


def start_s(route: Route, latency_s: float) -> float:
    """When the first result is there: after its way through the group, and after the last kernel's launch.

    A host thread starts the kernels of its ranks one after another while the first are already under way, so
    the later of the two counts. One channel is open from the start.
    """
    return max(latency_s, route.launch_overhead_s * route.ranks_per_thread) + route.channel_overhead_s


def opening_channels(route: Route, bytes_per_channel: float) -> tuple[Ramp, ...]:
    """Each further channel costs its overhead, until all that the route has are open."""
    further = route.open_channels - 1
    if further == 0 or route.channel_overhead_s == 0:
        return ()
    return (Ramp(route.channel_overhead_s / bytes_per_channel, further * bytes_per_channel),)


def protocols(route: Route) -> tuple[Protocol, ...]:
    """LL128 relies on NVLink's 128-byte stores arriving whole."""
    if route.nvlink:
        return (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)
    return (Protocol.LL, Protocol.SIMPLE)
