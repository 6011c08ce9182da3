"""Reduction in the switches: NVLink SHARP within a node (NVLS), SHARP between nodes.

NVLS works in chunks: each costs a synchronisation of all ranks, which larger chunks do less often, and the
first must be through before any result is there, which takes larger ones longer. NCCL takes larger chunks for
larger messages (src/enqueue.cc); we take those that are fastest, within 5 % of NCCL's choice.
"""

from collections.abc import Iterator

from stepcast.cost.collectives.curve import Curve, Ramp
from stepcast.cost.collectives.protocol import BYTES_PER_CHANNEL, opening_channels, start_s
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.tree import levels
from stepcast.ir.work import CollectiveKind
from stepcast.units import KIB, US

# NVIDIA/nccl, src/enqueue.cc and src/transport/nvls.cc: bytes of a chunk for each rank and channel.
CHUNK_BYTES = tuple(size * KIB for size in (16, 32, 64, 128))
TREE_CHUNK_BYTES = (*CHUNK_BYTES, 256 * KIB)
CHANNELS = 16

# NVIDIA/nccl, src/graph/tuning.cc: hwLat of CollNetDirect, the 0.85 of its rate that Hopper and later reach.
COLLNET_INTRA_HOP_S = 3.7 * US
COLLNET_LATENCY_S = 31 * US  # beyond the network's own latency
COLLNET_SHARE = 0.85


def nvls(kind: CollectiveKind, route: Route) -> Iterator[Curve]:
    """All-reduce, all-gather and reduce-scatter within one node, in small to large chunks.

    Each rank is in charge of 1/n of the buffer. It reads the sum of its part from the switch, which
    fetches that part from all ranks: each port sends S in all. It writes the result once and the switch
    spreads it: S/n more. An all-reduce thus sends S (1 + 1/n) where a ring sends 2 S (n-1)/n; a reduce-
    scatter is the first half, S, and an all-gather receives S.
    """
    for chunk_bytes in CHUNK_BYTES:
        yield _in_chunks(route, _start_s(route), _nvls_s_per_byte(kind, route), chunk_bytes, 1)


def nvls_tree(route: Route) -> Iterator[Curve]:
    """All-reduce: NVLS within each node, a tree between them, both in one pipeline, so the slower counts.

    Two nodes exchange the buffer once; with more, a node sends it up and down. A chunk is synchronised twice,
    with the switch and with the network, and twice as many fill the pipeline.
    """
    hop_s = route.tuning.nvls_tree_hop_s + route.inter_latency_s
    latency_s = _start_s(route) + 2 * levels(route.nodes) * hop_s
    between = (1 if route.nodes == 2 else 2) / route.inter_bytes_per_s
    per_byte = max(_nvls_s_per_byte(CollectiveKind.ALL_REDUCE, route.within()), between)
    for chunk_bytes in TREE_CHUNK_BYTES:
        yield _in_chunks(route, latency_s, per_byte, chunk_bytes, 2)


def in_network(route: Route) -> Curve:
    """All-reduce: reduce-scatter within the node, one pass through the network's switches, all-gather.

    A node sends its sum up once and receives the total once: S over its NICs, whatever the number of
    nodes. Within the node the ranks exchange parts directly, 2 S (g-1)/g, in the same pipeline.
    """
    g = route.ranks_per_node
    latency_s = 2 * min(1, g - 1) * (COLLNET_INTRA_HOP_S + route.intra_latency_s)
    latency_s += COLLNET_LATENCY_S + route.inter_latency_s
    within = 2 * (g - 1) / g / route.intra_bytes_per_s
    per_byte = max(within, 1 / route.inter_bytes_per_s) / COLLNET_SHARE
    return Curve(start_s(route, latency_s), per_byte, opening_channels(route, BYTES_PER_CHANNEL))


def _start_s(route: Route) -> float:
    """NCCL's ranks meet in the switch; a slower fabric cannot answer before its own latency."""
    return max(route.tuning.nvls_start_s * route.ranks_per_node, route.intra_latency_s)


def _in_chunks(route: Route, latency_s: float, s_per_byte: float, chunk_bytes: float, stages: int) -> Curve:
    under_way = chunk_bytes * CHANNELS * route.ranks_per_node
    step_s = stages * route.tuning.nvls_step_s * route.ranks_per_node
    filling = Ramp(stages * s_per_byte, under_way)
    return Curve(
        start_s(route, latency_s),
        s_per_byte + step_s / under_way,
        (*opening_channels(route, BYTES_PER_CHANNEL * route.ranks_per_node), filling),
    )


def _nvls_s_per_byte(kind: CollectiveKind, route: Route) -> float:
    sent = 1 + 1 / route.ranks if kind is CollectiveKind.ALL_REDUCE else 1.0
    return sent / (route.intra_bytes_per_s * route.reduction_share)
