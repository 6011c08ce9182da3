"""Measured sweeps beside the model: the way that a sweep's ranks take, and what its sizes should cost."""

from typing import TYPE_CHECKING

from stepcast.cost.collectives.choose import collective_s, price, send_receive_price
from stepcast.cost.collectives.route import Route, route_of
from stepcast.hardware import Cluster, Place, placed, resolve
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.work import CollectiveKind

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray


def sweep_route(sweep: CollectiveSweep, cluster: Cluster) -> Route:
    """The ranks spread evenly over as many nodes as the log names."""
    per_node = -(-sweep.ranks // sweep.nodes)
    if per_node > cluster.domain_gpus:
        raise ValueError(f"{sweep.source}: {per_node} ranks on a node; {cluster.name} holds {cluster.domain_gpus}")
    ranks = [rank // per_node * cluster.domain_gpus + rank % per_node for rank in range(sweep.ranks)]
    return route_of(resolve(cluster, ranks, active_per_node=per_node), cluster, sweep.ranks_per_thread)


def measured_time_s(row: SweepRow) -> float | None:
    """The mean of the variants that ran; None where none did."""
    times = [time_s for time_s in (row.out_of_place_s, row.in_place_s) if time_s]
    return sum(times) / len(times) if times else None


def kind_of(sweep: CollectiveSweep) -> CollectiveKind:
    """The collective of a sweep that can be priced."""
    if sweep.kind is None:
        raise ValueError(
            f"{sweep.source}: does not say which collective it timed; keep the line with the program's name "
            "(all_gather_perf ...) in the log"
        )
    if sweep.ranks < 2:
        raise ValueError(f"{sweep.source}: a single rank does not communicate")
    return sweep.kind


def sweep_s(sweep: CollectiveSweep, sizes_bytes: "NDArray[float64]", cluster: Cluster) -> "NDArray[float64]":
    """What *sizes_bytes* of the collective of *sweep* cost on *cluster*, in place and out as it was timed."""
    kind, route = kind_of(sweep), sweep_route(sweep, cluster)
    places = {place for row in sweep.rows for place in places_of(row)} or {True}
    times = [collective_s(kind, sizes_bytes, route, in_place=place) for place in sorted(places)]
    return sum(times[1:], start=times[0]) / len(times)


def places_of(row: SweepRow) -> list[bool]:
    """The variants that ran: True in place, False out of place."""
    return [place for place, time_s in ((True, row.in_place_s), (False, row.out_of_place_s)) if time_s]


# The bus bandwidth that a collective should reach on a cluster, for holding measured ones against it.

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
