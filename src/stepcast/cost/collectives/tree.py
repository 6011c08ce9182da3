"""The double binary tree: fewer hops than a ring, at less bandwidth."""

from stepcast.cost.collectives.curve import Curve, Ramp
from stepcast.cost.collectives.protocol import (
    BYTES_PER_CHANNEL,
    CHUNK_BYTES,
    CHUNKS,
    inter_hop_s,
    intra_hop_s,
    opening_channels,
    rate_of,
    start_s,
)
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.tuning import Protocol
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
    per channel has passed each level.
    """
    passes, depth = PASSES[kind], levels(route.nodes)
    chain_s = (route.ranks_per_node - 1) * intra_hop_s(route, protocol, tree=True)
    latency_s = route.tuning.tree_start_s[protocol]
    latency_s += passes * (chain_s + depth * inter_hop_s(route, protocol))
    chunk_bytes = CHUNKS[protocol] * route.open_channels * CHUNK_BYTES
    # LL's flags arrive with the data: nothing to wait for.
    step_s = 0.0 if protocol is Protocol.LL else route.tuning.tree_step_s
    per_byte = passes / rate_of(route, protocol)
    # Chunks are cut so that a small message fills the pipeline too: it pays twice.
    filling = Ramp(per_byte, depth * chunk_bytes)
    ramps = (*opening_channels(route, BYTES_PER_CHANNEL), filling)
    return Curve(start_s(route, latency_s), per_byte + step_s / chunk_bytes, ramps)
