"""How NCCL moves bytes: protocols that trade latency for bandwidth, channels that open with the size.

LL sends 4 bytes of data with 4 of flag, so a receiver needs no fence; LL128 sends 120 with 8 over NVLink;
Simple sends plain data and synchronises by fences. The figures stand in data/fits/collectives.toml; sizes of
chunks and channels are of NVIDIA/nccl, src/include/device.h (threads, words), src/include/comm.h (bytes per
thread) and src/enqueue.cc (chunks).
"""

from stepcast.cost.collectives.curve import Ramp
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.tuning import Protocol

# A channel opens per 512 threads of 8 bytes; a ring within a node first fills one such piece per rank.
BYTES_PER_CHANNEL = 512 * 8
# Data in one LL128 chunk of one channel: a step of 640 threads x 120 words of 8 bytes, which NCCL halves for
# messages of middling size until it is below 128 KiB, three times; 15/16 of it is data. Simple's is four
# times that.
CHUNK_BYTES = 640 * 120 * 8 // 2**3 * 15 // 16
CHUNKS = {Protocol.LL: 1, Protocol.LL128: 1, Protocol.SIMPLE: 4}


def rate_of(route: Route, protocol: Protocol) -> float:
    """Bus bandwidth that a ring of *route* reaches in *protocol*."""
    rate = route.ring_bytes_per_s * route.tuning.share[protocol]
    return min(rate, ll_limit(route)) if protocol is Protocol.LL else rate


def ll_limit(route: Route) -> float:
    """The most that LL's threads move."""
    return route.tuning.ll_limit_bytes_per_s[min(route.nodes, 3) - 1]


def intra_hop_s(route: Route, protocol: Protocol, tree: bool = False) -> float:
    """One hop within a node."""
    tuning = route.tuning
    if not route.nvlink:
        return route.intra_latency_s + tuning.pcie_hop_s[protocol]
    return route.intra_latency_s + (tuning.tree_hop_s if tree else tuning.hop_s)[protocol]


def inter_hop_s(route: Route, protocol: Protocol) -> float:
    """One hop between nodes."""
    return route.inter_latency_s + route.tuning.network_hop_s[protocol]


def start_s(route: Route, latency_s: float) -> float:
    """When the first result is there: after its way through the group. One channel is open from the start."""
    return latency_s + route.channel_overhead_s


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
