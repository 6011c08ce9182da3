"""The double binary tree: fewer hops than a ring, at less bandwidth."""

from stepcast.cost.collectives.curve import Curve, Ramp
from stepcast.cost.collectives.protocol import (
    BANDWIDTH_SHARE,
    BYTES_PER_CHANNEL,
    CHUNK_BYTES,
    Protocol,
    inter_hop_s,
    intra_hop_s,
    opening_channels,
    start_s,
)
from stepcast.cost.collectives.route import Route
from stepcast.ir.work import CollectiveKind

# Passes over the tree: an all-reduce goes up and comes down again.
PASSES = {CollectiveKind.ALL_REDUCE: 2, CollectiveKind.BROADCAST: 1, CollectiveKind.REDUCE: 1}


def levels(nodes: int) -> int:
    """Height of the tree between nodes: log2, rounded up."""
    return (nodes - 1).bit_length()


def tree(kind: CollectiveKind, route: Route, protocol: Protocol) -> Curve:
    """All-reduce, broadcast and reduce over a chain within each node and a double binary tree between nodes.

    Latency: up the chain of the node and log2(nodes) levels, and down again. Bandwidth: two trees carry
    half of the buffer each; a node that is inner in one is a leaf in the other (Sanders, Speck and
    Traeff, 2009), so each sends the buffer once per pass: S/B. Filling: no level is idle once one chunk
    per channel has passed each level; chunks are cut so that small messages fill the pipeline too, hence
    pay twice.
    """
    passes, depth = PASSES[kind], levels(route.nodes)
    rate = route.ring_bytes_per_s * BANDWIDTH_SHARE[protocol]
    chain_s = (route.ranks_per_node - 1) * intra_hop_s(route, protocol, tree=True)
    latency_s = passes * (chain_s + depth * inter_hop_s(route, protocol))
    filling = Ramp(passes / rate, depth * route.open_channels * CHUNK_BYTES)
    ramps = (*opening_channels(route, BYTES_PER_CHANNEL), filling)
    return Curve(start_s(route, latency_s), passes / rate, ramps)
