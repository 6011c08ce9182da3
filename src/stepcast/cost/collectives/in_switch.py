"""Reduction in the switches: NVLink SHARP within a node (NVLS), SHARP between nodes.

Latencies are of NVIDIA/nccl, src/graph/tuning.cc 2.19 (table hwLat, columns NVLS, NVLSTree and
CollNetDirect); the efficiency of NVLS is the 0.85 that later versions give Hopper.
"""

from stepcast.cost.collectives.curve import Curve
from stepcast.cost.collectives.protocol import BYTES_PER_CHANNEL, opening_channels, start_s
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.tree import levels
from stepcast.ir.work import CollectiveKind
from stepcast.units import US

NVLS_EFFICIENCY = 0.85
NVLS_LATENCY_S = 23 * US
NVLS_TREE_HOP_S = 14 * US  # beyond the network's own latency
COLLNET_INTRA_HOP_S = 3.7 * US
COLLNET_LATENCY_S = 31 * US  # beyond the network's own latency


def nvls(kind: CollectiveKind, route: Route) -> Curve:
    """All-reduce, all-gather and reduce-scatter within one node.

    Each rank is in charge of 1/n of the buffer. It reads the sum of its part from the switch, which
    fetches that part from all ranks: each port sends S in all. It writes the result once and the switch
    spreads it: S/n more. An all-reduce thus sends S (1 + 1/n) where a ring sends 2 S (n-1)/n; a reduce-
    scatter is the first half, S, and an all-gather receives S. The rate is 0.85 of what the link gives a
    ring. On 8 H100 that makes 280 GB/s; NCCL's author states about 275 (NVIDIA/nccl-tests issue 212).
    """
    ramps = opening_channels(route, BYTES_PER_CHANNEL * route.ranks)
    # NCCL's figure holds for NVLink; a slower fabric cannot answer before its own latency.
    latency_s = max(NVLS_LATENCY_S, route.intra_latency_s)
    return Curve(start_s(route, latency_s), _nvls_s_per_byte(kind, route), ramps)


def nvls_tree(route: Route) -> Curve:
    """All-reduce: NVLS within each node, a tree between them, both in one pipeline, so the slower counts.

    Two nodes exchange the buffer once; with more, a node sends it up and down.
    """
    hop_s = NVLS_TREE_HOP_S + route.inter_latency_s
    latency_s = max(NVLS_LATENCY_S, route.intra_latency_s) + 2 * levels(route.nodes) * hop_s
    between = (1 if route.nodes == 2 else 2) / route.inter_bytes_per_s
    per_byte = max(_nvls_s_per_byte(CollectiveKind.ALL_REDUCE, route.within()), between)
    return Curve(start_s(route, latency_s), per_byte, opening_channels(route, BYTES_PER_CHANNEL))


def in_network(route: Route) -> Curve:
    """All-reduce: reduce-scatter within the node, one pass through the network's switches, all-gather.

    A node sends its sum up once and receives the total once: S over its NICs, whatever the number of
    nodes. Within the node the ranks exchange parts directly, 2 S (g-1)/g, in the same pipeline.
    """
    g = route.ranks_per_node
    latency_s = 2 * min(1, g - 1) * (COLLNET_INTRA_HOP_S + route.intra_latency_s)
    latency_s += COLLNET_LATENCY_S + route.inter_latency_s
    within = 2 * (g - 1) / g / route.intra_bytes_per_s
    per_byte = max(within, 1 / route.inter_bytes_per_s)
    return Curve(start_s(route, latency_s), per_byte, opening_channels(route, BYTES_PER_CHANNEL))


def _nvls_s_per_byte(kind: CollectiveKind, route: Route) -> float:
    sent = 1 + 1 / route.ranks if kind is CollectiveKind.ALL_REDUCE else 1.0
    return sent / (route.intra_bytes_per_s * NVLS_EFFICIENCY)
