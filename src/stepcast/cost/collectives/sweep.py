"""Measured sweeps of a collective over sizes, and the times that the model predicts for them."""

from stepcast.cost.collectives.choose import collective_s, price, send_receive_price
from stepcast.cost.collectives.route import Route, route_of
from stepcast.hardware import Cluster
from stepcast.hardware.path import job_path
from stepcast.ir.arrays import FloatArray
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.types import require
from stepcast.ir.work import CollectiveKind

MESSAGE = "message"


def sweep_route(sweep: CollectiveSweep, cluster: Cluster) -> Route:
    """Return the route of the ranks, spread evenly over as many nodes as the log names."""
    per_node = -(-sweep.ranks // sweep.nodes)
    if per_node > cluster.domain_gpus:
        raise ValueError(f"{sweep.source}: {per_node} ranks on a node; {cluster.name} holds {cluster.domain_gpus}")
    return route_of(job_path(cluster, sweep.ranks, per_node), cluster, sweep.ranks_per_thread)


def measured_time_s(row: SweepRow) -> float | None:
    """Return the mean of the variants that ran; None where none did."""
    times = [time_s for time_s in (row.out_of_place_s, row.in_place_s) if time_s]
    return sum(times) / len(times) if times else None


def kind_of(sweep: CollectiveSweep) -> CollectiveKind:
    """Return the collective of a sweep; a ValueError where it cannot be priced."""
    if sweep.kind is None:
        raise ValueError(
            f"{sweep.source}: does not say which collective it timed; keep the line with the program's name "
            "(all_gather_perf ...) in the log"
        )
    require(sweep.ranks >= 2, f"{sweep.source}: a single rank does not communicate")
    return sweep.kind


def sweep_s(sweep: CollectiveSweep, sizes_bytes: FloatArray, cluster: Cluster) -> FloatArray:
    """Return the seconds of *sizes_bytes* on *cluster*, averaged over in place and out of place as it was timed."""
    kind, route = kind_of(sweep), sweep_route(sweep, cluster)
    in_place = any(row.in_place_s for row in sweep.rows)
    out_of_place = any(row.out_of_place_s for row in sweep.rows)
    variants = ([False] if out_of_place else []) + ([True] if in_place or not out_of_place else [])
    times = [collective_s(kind, sizes_bytes, route, in_place=variant) for variant in variants]
    return sum(times[1:], start=times[0]) / len(times)


def reached_busbw(kind: str, size_bytes: int, ranks: int, cluster: Cluster) -> float | None:
    """Return the bus bandwidth that *kind* (a collective or a message) should reach over neighbouring ranks of
    *cluster*; None for unknown kinds.
    """
    route = route_of(job_path(cluster, ranks), cluster)
    if kind == MESSAGE:
        return send_receive_price(size_bytes, route).busbw_bytes_per_s
    if kind not in set(CollectiveKind):
        return None
    return price(CollectiveKind(kind), size_bytes, route).busbw_bytes_per_s
