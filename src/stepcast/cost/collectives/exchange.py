"""Messages between pairs: send and receive, all-to-all, gather and scatter.

NCCL builds them from point-to-point transfers, which know LL (within a node, small) and Simple.
"""

from collections.abc import Sequence

from stepcast.cost.collectives.curve import Curve, one_after_another
from stepcast.cost.collectives.protocol import (
    BYTES_PER_CHANNEL,
    inter_hop_s,
    intra_hop_s,
    ll_limit,
    opening_channels,
    start_s,
)
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.tuning import Protocol

# Peers that a kernel serves at once (NVIDIA/nccl, src/include/device.h: NCCL_MAX_DEV_WORK_P2P_PER_BATCH).
PEERS_AT_ONCE = 8


def send_receive(route: Route, protocol: Protocol) -> Curve:
    """One message to one peer: a hop, then S over the sender's port, or over its share of the way out.

    Within a node the receiver copies it out of its buffer, which reads and writes memory, 2 S / M: no other
    peer's data fill the port meanwhile.
    """
    latency_s = route.tuning.start_s[protocol]
    if route.nodes == 1:
        latency_s += intra_hop_s(route, protocol)
        per_byte = _s_per_byte(route, protocol, 1 / route.intra_bytes_per_s) + 2 / route.memory_bytes_per_s
    else:
        latency_s += inter_hop_s(route, protocol)
        per_byte = _s_per_byte(route, protocol, route.fewest_per_node / route.inter_bytes_per_s)
    return _curve(route, latency_s, per_byte)


def pairwise_all_to_all(route: Route, protocol: Protocol, imbalance: float = 1.0) -> Curve:
    """Each rank sends 1/n of its buffer to every other, directly.

    The g-1 parts for its own node go over its port, the n-g others out of the node, both at once: the
    slower counts. *imbalance* is what the busiest rank moves over what the average one does; all wait for
    it.
    """
    n, g = route.ranks, route.ranks_per_node
    within = (g - 1) / n / (route.intra_bytes_per_s * route.exchange_share)
    between = 0.0 if route.nodes == 1 else (n - route.fewest_per_node) / n / route.exchange_bytes_per_s
    per_byte = _s_per_byte(route, protocol, imbalance * max(within, between))
    return _curve(route, _batches_s(route, protocol, n - 1), per_byte)


def hierarchical_all_to_all(route: Route, protocol: Protocol, imbalance: float = 1.0) -> Curve:
    """First between the ranks of the same place in their nodes, then within the node: fewer, larger messages.

    A rank sends the (N-1)/N of its buffer meant for other nodes to its peer there, which then hands
    (g-1)/g of what it holds to its neighbours: (N-1) + (g-1) messages where the pairwise way has N g - 1.
    """
    if route.nodes == 1 or route.ranks_per_node == 1:
        return pairwise_all_to_all(route, protocol, imbalance)
    phases = [
        pairwise_all_to_all(route.between(), protocol, imbalance),
        pairwise_all_to_all(route.within(), protocol, imbalance),
    ]
    return one_after_another(phases)


def root_exchange(route: Route, protocol: Protocol) -> Curve:
    """Gather and scatter: the root receives or sends all parts but its own, over its port and its way out."""
    n, g = route.ranks, route.ranks_per_node
    within = (g - 1) / n / route.intra_bytes_per_s
    between = 0.0
    if route.nodes > 1:
        between = (n - g) / n / (route.inter_bytes_per_s / route.fewest_per_node)
    per_byte = _s_per_byte(route, protocol, max(within, between))
    return _curve(route, _batches_s(route, protocol, n - 1), per_byte)


def imbalance_of(sent_bytes: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean buffer of an uneven all-to-all, and the busiest rank's load over the mean one.

    ``sent_bytes[i][j]`` is what rank i sends to rank j. A rank is as busy as the larger of what it sends to
    and what it receives from others. What it keeps (i = j) costs nothing.
    """
    n = len(sent_bytes)
    if n == 0 or any(len(row) != n for row in sent_bytes) or any(x < 0 for row in sent_bytes for x in row):
        raise ValueError("an uneven all-to-all needs a square table of sizes, none of them negative")
    sent = [sum(row) - row[i] for i, row in enumerate(sent_bytes)]
    received = [sum(row[i] for row in sent_bytes) - sent_bytes[i][i] for i in range(n)]
    mean = sum(sent) / n
    if mean == 0:
        return 0.0, 1.0
    return mean * n / (n - 1), max(*sent, *received) / mean


def _curve(route: Route, latency_s: float, per_byte: float) -> Curve:
    ramps = opening_channels(route, BYTES_PER_CHANNEL * route.ranks)
    return Curve(start_s(route, latency_s), per_byte, ramps)


def _s_per_byte(route: Route, protocol: Protocol, wire_s_per_byte: float) -> float:
    """What *protocol* makes of the wires' time: LL is bound by its threads too."""
    slowed = wire_s_per_byte / route.tuning.share[protocol]
    return max(slowed, 1 / ll_limit(route)) if protocol is Protocol.LL else slowed


def _batches_s(route: Route, protocol: Protocol, peers: int) -> float:
    """Latency of *peers* messages, some at once; the batches follow one another."""
    hop_s = inter_hop_s(route, protocol) if route.nodes > 1 else intra_hop_s(route, protocol)
    return route.tuning.exchange_start_s + -(-peers // PEERS_AT_ONCE) * hop_s
