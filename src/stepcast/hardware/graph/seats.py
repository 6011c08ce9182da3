"""Which GPU each rank of a job has."""

from collections.abc import Sequence

import numpy as np

from stepcast.hardware.cluster import Cluster
from stepcast.hardware.placement import Place, placed
from stepcast.ir.flows import Ints
from stepcast.ir.layout import Layout


def seats_of(cluster: Cluster, layout: Layout, place: Place = Place.EVEN) -> Ints:
    """The GPU of each rank of a job that has the cluster from its first node on."""
    whole = (layout.tp, layout.expert_tp_size * layout.ep, layout.tp * layout.cp)
    placement = placed(place, cluster, layout.gpus, whole)
    ranks, size = np.arange(layout.gpus), cluster.domain_gpus
    seats = np.empty_like(ranks)
    for region in placement.regions(size):
        here = (ranks >= region.start) & (ranks < region.stop)
        away, local = np.divmod(ranks[here] - region.start, region.held)
        seats[here] = (region.domain + away) * size + local
    return seats


def seats_on(cluster: Cluster, nodes: Sequence[int], ranks: int) -> Ints:
    """The GPU of each rank of a job that fills *nodes* in their order."""
    gpus = cluster.node.gpus
    if len(set(nodes)) != len(nodes) or any(node < 0 for node in nodes):
        raise ValueError(f"nodes must be counted from 0 and given once each, not {list(nodes)}")
    if ranks > len(nodes) * gpus:
        raise ValueError(f"{ranks} ranks need {-(-ranks // gpus)} nodes of {gpus} GPUs, not {len(nodes)}")
    node, local = np.divmod(np.arange(ranks), gpus)
    return np.asarray(nodes, np.int64)[node] * gpus + local
