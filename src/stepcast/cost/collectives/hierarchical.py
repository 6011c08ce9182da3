"""Within the nodes and between them in turn, as frameworks do that build a collective from two groups.

NCCL itself does not work this way, so it is never chosen automatically.
"""

from stepcast.cost.collectives.curve import Curve, one_after_another
from stepcast.cost.collectives.ring import ring
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.tuning import Protocol
from stepcast.ir.work import CollectiveKind

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
)


def hierarchical(kind: CollectiveKind, route: Route, protocol: Protocol) -> Curve:
    """Rings of the g ranks of a node and of the N ranks of one place in their nodes, one after the other.

    An all-reduce is a reduce-scatter within the node, an all-reduce of the 1/g part between nodes, and an
    all-gather within the node. An all-gather first gathers the 1/g part between nodes, a reduce-scatter
    does the reverse. Bytes out of a node are those of one ring over all ranks; the hops are 2(g-1) +
    2(N-1) instead of 2(n-1).
    """
    within, between = route.within(), route.between()
    if route.nodes == 1:
        return ring(kind, within, protocol)
    if route.ranks_per_node == 1:
        return ring(kind, between, protocol)
    part = ring(kind, between, protocol).of_share(1 / route.ranks_per_node)
    if kind is not ALL_REDUCE:
        return one_after_another([part, ring(kind, within, protocol)])
    return one_after_another([ring(REDUCE_SCATTER, within, protocol), part, ring(ALL_GATHER, within, protocol)])
