"""The bus bandwidth that a collective should reach on a cluster, for holding measured ones against it."""

from stepcast.cost.collectives.choose import price, send_receive_price
from stepcast.cost.collectives.route import route_of
from stepcast.hardware import Cluster, Place, placed, resolve
from stepcast.ir.work import CollectiveKind

MESSAGE = "message"


def reached_busbw(kind: str, size_bytes: int, ranks: int, cluster: Cluster) -> float | None:
    """Bytes per second of *kind* (a collective or a message) over neighbouring ranks; None if not known."""
    active = min(ranks, cluster.domain_gpus)
    path = resolve(cluster, range(ranks), active, placed(Place.EVEN, cluster, ranks))
    route = route_of(path, cluster)
    if kind == MESSAGE:
        return send_receive_price(size_bytes, route).busbw_bytes_per_s
    if kind not in set(CollectiveKind):
        return None
    return price(CollectiveKind(kind), size_bytes, route).busbw_bytes_per_s
