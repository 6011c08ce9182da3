"""Every algorithm of every collective as a curve: its time as a function of the size.

    t(S) = start + S * s_per_byte + sum of ramps,   ramp(S) = s_per_byte * min(S, until)

The start is latency, the slope is bandwidth, and a ramp is an effect that grows with the size up to a point: channels
that open one by one, a pipeline that fills. All terms are non-negative, so a curve never falls.

NCCL's protocols trade latency for bandwidth. LL sends 4 bytes of data with 4 of flag, so a receiver needs no fence;
LL128 sends 120 with 8 over NVLink; Simple sends plain data and synchronises by fences. The figures are in
data/fits/collectives.toml; sizes of chunks and channels are of NVIDIA/nccl, src/include/device.h (threads, words),
src/include/comm.h (bytes per thread) and src/enqueue.cc (chunks).
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from stepcast.cost.collectives.route import Protocol, Route
from stepcast.ir.types import dataclass
from stepcast.ir.work import CollectiveKind
from stepcast.units import KIB, US

if TYPE_CHECKING:
    from stepcast.ir.arrays import FloatArray

    Size = TypeVar("Size", float, FloatArray)
else:
    Size = TypeVar("Size")

# A channel opens per 512 threads of 8 bytes; a ring within a node first fills one such piece per rank.
BYTES_PER_CHANNEL = 512 * 8
# Data in one LL128 chunk of one channel: a step of 640 threads x 120 words of 8 bytes, which NCCL halves for messages
# of middling size until it is below 128 KiB, three times; 15/16 of it is data. Simple's is four times that.
CHUNK_BYTES = 640 * 120 * 8 // 2**3 * 15 // 16
CHUNKS = {Protocol.LL: 1, Protocol.LL128: 1, Protocol.SIMPLE: 4}
# A chunk that a rank of a chain passes on before the next has come: the cuts of a reduce of 8 A100
# (microsoft/superbenchmark), which takes 94 us for 8 MiB.
CHAIN_CHUNK_BYTES = CHUNK_BYTES // 4
# NVIDIA/nccl, src/enqueue.cc and src/transport/nvls.cc: bytes of a chunk for each rank and channel.
NVLS_CHUNK_BYTES = tuple(size * KIB for size in (16, 32, 64, 128))
# NVIDIA/nccl, src/graph/tuning.cc: hwLat of CollNetDirect, the 0.85 of its rate that Hopper and later reach.
COLLNET_INTRA_HOP_S = 3.7 * US
COLLNET_LATENCY_S = 31 * US  # beyond the network's own latency
COLLNET_SHARE = 0.85
INFINIBAND_HOP_S = 5.4 * US  # what NCCL's own figures of a hop between nodes contain: InfiniBand and three switches
# Peers that a kernel serves at once (NVIDIA/nccl, src/include/device.h: NCCL_MAX_DEV_WORK_P2P_PER_BATCH).
PEERS_AT_ONCE = 8

# Times round the ring: a reduce-scatter takes one, an all-gather one, an all-reduce is both.
ROUNDS = {CollectiveKind.ALL_REDUCE: 2, CollectiveKind.ALL_GATHER: 1, CollectiveKind.REDUCE_SCATTER: 1}
# Passes over the tree: an all-reduce goes up and comes down again.
PASSES = {CollectiveKind.ALL_REDUCE: 2, CollectiveKind.BROADCAST: 1, CollectiveKind.REDUCE: 1}


@dataclass(frozen=True, slots=True)
class Ramp:
    s_per_byte: float
    until_bytes: float

    def __post_init__(self) -> None:
        if not (self.s_per_byte >= 0 and self.until_bytes >= 0):
            raise ValueError(f"a ramp must not fall, not {self}")


@dataclass(frozen=True, slots=True)
class Curve:
    start_s: float
    s_per_byte: float
    ramps: tuple[Ramp, ...] = ()
    from_bytes: float = 0.0  # smaller messages cannot take this way
    least_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.start_s < math.inf and 0 <= self.s_per_byte < math.inf):
            raise ValueError(f"a curve starts at zero or above and does not fall, not {self}")

    def seconds(self, size_bytes: Size) -> Size:
        """Return the time of one size, or of an array of sizes."""
        total = self.start_s + size_bytes * self.s_per_byte
        if not (self.ramps or self.from_bytes):
            return total
        if isinstance(size_bytes, (int, float)):
            for ramp in self.ramps:
                total += ramp.s_per_byte * min(size_bytes, ramp.until_bytes)
            if self.from_bytes:
                total = max(total, self.least_s) if size_bytes >= self.from_bytes else math.inf
            return total
        import numpy

        for ramp in self.ramps:
            total += ramp.s_per_byte * numpy.minimum(size_bytes, ramp.until_bytes)
        if self.from_bytes:
            total = numpy.where(size_bytes >= self.from_bytes, numpy.maximum(total, self.least_s), math.inf)
        return total

    def for_share(self, share: float) -> "Curve":
        """Return the curve over the full size of a phase that handles *share* of it."""
        ramps = tuple(Ramp(ramp.s_per_byte * share, ramp.until_bytes / share) for ramp in self.ramps)
        return Curve(self.start_s, self.s_per_byte * share, ramps)


ZERO = Curve(0.0, 0.0)


def _add_phases(*phases: Curve) -> Curve:
    """Return the curve of phases that run one after the other."""
    return Curve(
        sum(phase.start_s for phase in phases),
        sum(phase.s_per_byte for phase in phases),
        tuple(ramp for phase in phases for ramp in phase.ramps),
    )


def _build_curve(route: Route, latency_s: float, s_per_byte: float, bytes_per_channel: float, *filling: Ramp) -> Curve:
    """Return a curve that starts after *latency_s*, with one channel open; each other one costs its overhead."""
    others = route.open_channels - 1
    if others and route.channel_overhead_s:
        filling = (Ramp(route.channel_overhead_s / bytes_per_channel, others * bytes_per_channel), *filling)
    return Curve(latency_s + route.channel_overhead_s, s_per_byte, filling)


# Protocols.


def protocols(route: Route) -> tuple[Protocol, ...]:
    """Return the protocols that *route* can use.

    LL128 relies on 128-byte stores of NVLink that arrive in one piece; some transports allow fewer.
    """
    known = tuple(Protocol) if route.nodes == 1 else route.network_protocols
    return tuple(protocol for protocol in known if route.nvlink or protocol is not Protocol.LL128)


def pair_protocols(route: Route) -> tuple[Protocol, ...]:
    """Return the protocols of transfers between pairs, which use LL within a node only."""
    return (Protocol.LL, Protocol.SIMPLE) if route.nodes == 1 else (Protocol.SIMPLE,)


def _ring_rate(route: Route, protocol: Protocol) -> float:
    """Return the bus bandwidth that a ring of *route* reaches in *protocol*."""
    rate = route.ring_bytes_per_s * route.tuning.share[protocol]
    return min(rate, route.ll_limit_bytes_per_s) if protocol is Protocol.LL else rate


def _intra_hop_s(route: Route, protocol: Protocol, tree: bool = False) -> float:
    tuning = route.tuning
    if not route.nvlink:
        return route.intra_latency_s + tuning.pcie_hop_s[protocol]
    return route.intra_latency_s + (tuning.tree_hop_s if tree else tuning.hop_s)[protocol]


def _inter_hop_s(route: Route, protocol: Protocol) -> float:
    """Return the seconds of a hop between nodes.

    What a transport takes longer than InfiniBand counts twice in Simple: once more for the flush that makes data
    visible to the GPU (NVIDIA/nccl, src/graph/tuning.cc, latencyInter).
    """
    flush_s = max(0.0, route.inter_latency_s - INFINIBAND_HOP_S) if protocol is Protocol.SIMPLE else 0.0
    return route.inter_latency_s + flush_s + route.tuning.network_hop_s[protocol]


def _longest_hop_s(route: Route, protocol: Protocol) -> float:
    return _inter_hop_s(route, protocol) if route.nodes > 1 else _intra_hop_s(route, protocol)


# The ring: every rank sends to the next, all links at once.


def ring_curve(kind: CollectiveKind, route: Route, protocol: Protocol) -> Curve:
    """Return the curve of all-reduce, all-gather or reduce-scatter in rounds of n-1 steps, each of 1/n of the buffer.

    Latency: every step waits for the one before, so all hops add up: (n-1) per round, of which nodes-1 leave a node.
    Bandwidth: each rank sends (n-1)/n of the buffer per round, S (n-1)/n / B, the least that is possible without
    reduction in the switches (Patarasuk and Yuan, 2009). The last step of all has nothing to send on: it copies its 1/n
    from the receive buffer, which reads and writes memory, 2 S/n / M.
    """
    n, rounds = route.ranks, ROUNDS[kind]
    latency_s = route.tuning.start_s[protocol] + rounds * _round_s(route, protocol)
    per_byte = rounds * (n - 1) / n / _ring_rate(route, protocol) + 2 / n / route.memory_bytes_per_s
    return _build_curve(route, latency_s, per_byte, _ring_bytes_per_channel(route))


def chain_curve(route: Route, protocol: Protocol) -> Curve:
    """Return the curve of broadcast or reduce: the buffer passes along the ring in chunks, from rank to rank.

    S/B for the last rank's last byte after the first arrived; the first is there when one chunk per channel has passed
    the n-2 ranks between. Chunks are cut so that a small message fills the pipeline too: it pays twice.
    """
    per_byte = 1 / _ring_rate(route, protocol)
    latency_s = route.tuning.start_s[protocol] + _round_s(route, protocol)
    filling = Ramp(per_byte, (route.ranks - 2) * route.open_channels * CHAIN_CHUNK_BYTES)
    return _build_curve(route, latency_s, per_byte, _ring_bytes_per_channel(route), filling)


def _round_s(route: Route, protocol: Protocol) -> float:
    """Return the seconds of all hops of one round."""
    leaving = route.nodes - 1
    staying = route.ranks - 1 - leaving
    return staying * _intra_hop_s(route, protocol) + leaving * _inter_hop_s(route, protocol)


def _ring_bytes_per_channel(route: Route) -> float:
    """Return the bytes that open a channel: between nodes as few as in a tree, since each has its own NIC to fill."""
    return BYTES_PER_CHANNEL * (route.ranks if route.nodes == 1 else 1)


def hierarchical_curve(kind: CollectiveKind, route: Route, protocol: Protocol) -> Curve:
    """Return the curve of rings of the g ranks of a node and of the N ranks of one position in their nodes, in turn.

    Frameworks that build a collective from two groups work this way; NCCL does not, so it is never chosen
    automatically. An all-reduce is a reduce-scatter within the node, an all-reduce of the 1/g part between nodes, and
    an all-gather within the node. An all-gather first gathers the 1/g part between nodes, a reduce-scatter does the
    reverse. Bytes out of a node are those of one ring over all ranks; the hops are 2(g-1) + 2(N-1) instead of 2(n-1).
    """
    node_route, crossing_route = route.node_route(), route.crossing_route()
    if route.nodes == 1:
        return ring_curve(kind, node_route, protocol)
    if route.ranks_per_node == 1:
        return ring_curve(kind, crossing_route, protocol)
    part = ring_curve(kind, crossing_route, protocol).for_share(1 / route.ranks_per_node)
    if kind is not CollectiveKind.ALL_REDUCE:
        return _add_phases(part, ring_curve(kind, node_route, protocol))
    scatter = ring_curve(CollectiveKind.REDUCE_SCATTER, node_route, protocol)
    return _add_phases(scatter, part, ring_curve(CollectiveKind.ALL_GATHER, node_route, protocol))


# The double binary tree: fewer hops than a ring, at less bandwidth.


def tree_curve(kind: CollectiveKind, route: Route, protocol: Protocol) -> Curve:
    """Return the curve of all-reduce, broadcast or reduce: chains within nodes and a double binary tree between them.

    Latency: up the chain of the node and log2(nodes) levels, and down again. Bandwidth: two trees carry half of the
    buffer each; a node that is inner in one is a leaf in the other (Sanders, Speck and Traeff, 2009), so each sends the
    buffer once per pass: S/B. Filling: no level is idle once one chunk per channel has passed each level.
    """
    passes, depth = PASSES[kind], (route.nodes - 1).bit_length()  # log2, rounded up
    chain_s = (route.ranks_per_node - 1) * _intra_hop_s(route, protocol, tree=True)
    latency_s = route.tuning.tree_start_s[protocol] + passes * (chain_s + depth * _inter_hop_s(route, protocol))
    chunk_bytes = CHUNKS[protocol] * route.open_channels * CHUNK_BYTES
    # LL's flags arrive with the data: nothing to wait for.
    step_s = 0.0 if protocol is Protocol.LL else route.tuning.tree_step_s
    per_byte = passes / (_ring_rate(route, protocol) * route.tuning.tree_share)
    # Chunks are cut so that a small message fills the pipeline too: it pays twice.
    filling = Ramp(per_byte, depth * chunk_bytes)
    return _build_curve(route, latency_s, per_byte + step_s / chunk_bytes, BYTES_PER_CHANNEL, filling)


# Reduction in the switches: NVLink SHARP within a node (NVLS), SHARP between nodes.
#
# NVLS works in chunks: each costs a synchronisation of all ranks, which larger chunks do less often, and the
# first must be through before any result is there, which takes larger ones longer. NCCL takes larger chunks for
# larger messages (src/enqueue.cc); we take those that are fastest, within 5 % of NCCL's choice.


def nvls_curves(kind: CollectiveKind, route: Route) -> Iterator[Curve]:
    """Yield curves of all-reduce, all-gather or reduce-scatter within one node, or of all-reduce between several, in
    small to large chunks.

    Each rank is in charge of 1/n of the buffer. It reads the sum of its part from the switch, which
    fetches that part from all ranks: each port sends S in all. It writes the result once and the switch
    spreads it: S/n more. An all-reduce thus sends S (1 + 1/n) where a ring sends 2 S (n-1)/n; a reduce-
    scatter is the first half, S, and an all-gather receives S.

    Between nodes there is a tree, in one pipeline with NVLS within each node, so the slower counts. Two nodes exchange
    the buffer once; with more, a node sends it up and down. A chunk is synchronised twice, with the switch and with
    the network, and fills the pipeline at every level, up and down.
    """
    tuning, ranks, levels = route.tuning, route.ranks_per_node, (route.nodes - 1).bit_length()
    # The ranks meet in the switch; a slower fabric cannot answer before its own latency.
    latency_s = max(tuning.nvls_start_s * ranks, route.intra_latency_s)
    latency_s += 2 * levels * (tuning.nvls_tree_hop_s + route.inter_latency_s)
    sent = 1 + 1 / ranks if kind is CollectiveKind.ALL_REDUCE else 1.0
    switch_s_per_byte = sent / (route.intra_bytes_per_s * route.reduction_share)
    tree_s_per_byte = min(levels, 2) / route.inter_bytes_per_s
    step_s = (2 if levels else 1) * tuning.nvls_step_s * ranks
    channels = tuning.nvls_tree_channels if levels else tuning.nvls_channels
    # NCCL's limits of chunks (src/transport/nvls.cc).
    is_limited = route.nodes > 1 and not route.in_network_reduction and (ranks >= 16 or route.nodes >= 4)
    for chunk_bytes in NVLS_CHUNK_BYTES[:-1] if is_limited else NVLS_CHUNK_BYTES:
        in_flight = chunk_bytes * channels * ranks
        filling = Ramp((1 + 2 * levels) * max(switch_s_per_byte, tree_s_per_byte), in_flight)
        per_byte = max(switch_s_per_byte + step_s / in_flight, tree_s_per_byte)
        yield _build_curve(route, latency_s, per_byte, BYTES_PER_CHANNEL * ranks, filling)


def in_network_curve(route: Route) -> Curve:
    """Return the curve of all-reduce: reduce-scatter in the node, one pass through the network's switches, all-gather.

    A node sends its sum up once and receives the total once: S over its NICs, whatever the number of
    nodes. Within the node the ranks exchange parts directly, 2 S (g-1)/g, in the same pipeline.
    """
    g = route.ranks_per_node
    latency_s = 2 * min(1, g - 1) * (COLLNET_INTRA_HOP_S + route.intra_latency_s)
    latency_s += COLLNET_LATENCY_S + route.inter_latency_s
    intra_s_per_byte = 2 * (g - 1) / g / route.intra_bytes_per_s
    per_byte = max(intra_s_per_byte, 1 / route.inter_bytes_per_s) / COLLNET_SHARE
    return _build_curve(route, latency_s, per_byte, BYTES_PER_CHANNEL)


# Messages between pairs: send and receive, all-to-all, gather and scatter.
#
# NCCL builds them from point-to-point transfers, which know LL (within a node, small) and Simple.


def message_curve(route: Route, protocol: Protocol) -> Curve:
    """Return the curve of one message to one peer: a hop, then S over the sender's port or its share of the NICs.

    Within a node the receiver copies it out of its buffer, which reads and writes memory, 2 S / M: no data of other
    peers fill the port during that time.
    """
    latency_s = route.tuning.start_s[protocol] + _longest_hop_s(route, protocol)
    if route.nodes == 1:
        per_byte = _pair_s_per_byte(route, protocol, 1 / route.intra_bytes_per_s) + 2 / route.memory_bytes_per_s
    else:
        per_byte = _pair_s_per_byte(route, protocol, route.fewest_per_node / route.inter_bytes_per_s)
    return _build_curve(route, latency_s, per_byte, BYTES_PER_CHANNEL * route.ranks)


def pairwise_curve(route: Route, protocol: Protocol, imbalance: float = 1.0) -> Curve:
    """Return the curve of all-to-all where each rank sends 1/n of its buffer to every other, directly.

    The g-1 parts for its own node go over its port, the n-g others out of the node, both at once: the slower counts.
    *imbalance* is what the busiest rank moves over what the average one does; all wait for it.
    """
    n, g = route.ranks, route.ranks_per_node
    node_bytes_per_s = min(route.intra_bytes_per_s * route.exchange_share, (g - 1) * route.tuning.peer_bytes_per_s)
    intra_s_per_byte = (g - 1) / n / node_bytes_per_s if g > 1 else 0.0
    inter_s_per_byte = 0.0 if route.nodes == 1 else (n - route.fewest_per_node) / n / route.exchange_bytes_per_s
    return _exchange_curve(route, protocol, imbalance * max(intra_s_per_byte, inter_s_per_byte))


def staged_curve(route: Route, protocol: Protocol, imbalance: float = 1.0) -> Curve:
    """Return the curve of all-to-all, first between the ranks of one position in their nodes, then within the node.

    A rank sends the (N-1)/N of its buffer meant for other nodes to its peer there, which then hands
    (g-1)/g of what it holds to its neighbours: (N-1) + (g-1) larger messages instead of N g - 1.
    """
    if route.nodes == 1 or route.ranks_per_node == 1:
        return pairwise_curve(route, protocol, imbalance)
    phases = (pairwise_curve(part, protocol, imbalance) for part in (route.crossing_route(), route.node_route()))
    return _add_phases(*phases)


def rooted_curve(route: Route, protocol: Protocol) -> Curve:
    """Return the curve of gather or scatter: the root receives or sends all parts but its own."""
    n, g = route.ranks, route.ranks_per_node
    intra_s_per_byte = (g - 1) / n / route.intra_bytes_per_s
    inter_s_per_byte = 0.0
    if route.nodes > 1:
        inter_s_per_byte = (n - g) / n / (route.inter_bytes_per_s / route.fewest_per_node)
    return _exchange_curve(route, protocol, max(intra_s_per_byte, inter_s_per_byte))


def _exchange_curve(route: Route, protocol: Protocol, wire_s_per_byte: float) -> Curve:
    """Return the curve of messages with all other ranks, some at once; the batches follow one another."""
    batches = -(-(route.ranks - 1) // PEERS_AT_ONCE)
    latency_s = route.tuning.exchange_start_s + batches * _longest_hop_s(route, protocol)
    per_byte = _pair_s_per_byte(route, protocol, wire_s_per_byte)
    filling: tuple[Ramp, ...] = ()
    if route.nodes == 1 and route.nvlink and protocol is Protocol.SIMPLE:
        # The first bytes of each message take longer: their chunks do not yet fill the links.
        filling = (Ramp(route.tuning.filling_share * per_byte, route.tuning.filling_bytes * route.ranks),)
    return _build_curve(route, latency_s, per_byte, BYTES_PER_CHANNEL * route.ranks, *filling)


def _pair_s_per_byte(route: Route, protocol: Protocol, wire_s_per_byte: float) -> float:
    """Return the seconds per byte of *protocol* over wires that take *wire_s_per_byte*; LL's threads limit it too."""
    slowed = wire_s_per_byte / route.tuning.share[protocol]
    return max(slowed, 1 / route.ll_limit_bytes_per_s) if protocol is Protocol.LL else slowed
