"""What links reach, from measured collectives and messages: time = latency + bytes over bandwidth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepcast.analyze.changes import bus_factor
from stepcast.analyze.megatron.traffic import Traffic
from stepcast.cost.collectives.reached import reached_busbw
from stepcast.hardware import load_cluster

# Of other kinds the host's part is not known.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "message")
# Sizes further apart than this tell latency from bandwidth.
WIDE = 10.0
# Traces tell hundredths of a millisecond.
RESOLUTION_S = 1e-5
SHORTEST_S = 1.5 * RESOLUTION_S
# A bandwidth is read off transfers that take at least so long: below, latency is most of it.
LONG_S = 2e-4


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """One measured transfer: bytes that cross each rank's link, and the time from the last arrival on."""

    group: str
    kind: str
    ranks: int
    size_bytes: int
    seconds: float

    @property
    def crossing_bytes(self) -> float:
        return self.size_bytes * bus_factor(self.kind, self.ranks)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """*latency_s* is None where the points cannot split it from the bandwidth, which then contains it."""

    group: str
    points: int
    bandwidth_bytes_per_s: float | None
    latency_s: float | None
    error: float


def link_points(traffic: Sequence[Traffic]) -> list[LinkPoint]:
    """What of *traffic* passed a link with nothing beside it; each kind and size once."""
    found: dict[tuple[str, str, int], LinkPoint] = {}
    for row in traffic:
        seconds = row.transfer_s
        if seconds is None and row.count > 1 and row.kind != "message":
            # Without peers: the shortest of several waited least.
            seconds = row.shortest_s
        if row.kind not in COLLECTIVES or row.overlapped or row.ranks < 2 or not row.size_bytes:
            continue
        if seconds is not None and seconds >= SHORTEST_S:
            point = LinkPoint(row.group, row.kind, row.ranks, row.size_bytes, seconds)
            found.setdefault((row.group, row.name, row.size_bytes), point)
    return list(found.values())


def fit_link(points: Sequence[LinkPoint]) -> LinkFit:
    """Latency and bandwidth of one group's transfers, by least squares of relative errors."""
    group = points[0].group
    sizes = [point.crossing_bytes for point in points]
    long = [point for point in points if point.seconds >= LONG_S]
    rates = sorted(point.crossing_bytes / point.seconds for point in long)
    if max(sizes) < WIDE * min(sizes) or not long:
        bandwidth = rates[len(rates) // 2] if rates else None
        return LinkFit(group, len(points), bandwidth, None, _error(points, 0.0, bandwidth))
    latency_s, per_byte_s = _line(points)
    bandwidth = 1 / per_byte_s if per_byte_s > 0 else None
    return LinkFit(group, len(points), bandwidth, latency_s, _error(points, latency_s, bandwidth))


def _line(points: Sequence[LinkPoint]) -> tuple[float, float]:
    """Latency and seconds per byte, neither below zero."""
    ones = [1 / point.seconds for point in points]
    rates = [point.crossing_bytes / point.seconds for point in points]
    aa, ab, bb = (
        sum(x * y for x, y in zip(left, right, strict=True))
        for left, right in ((ones, ones), (ones, rates), (rates, rates))
    )
    determinant = aa * bb - ab * ab
    latency_s = (bb * sum(ones) - ab * sum(rates)) / determinant
    per_byte_s = (aa * sum(rates) - ab * sum(ones)) / determinant
    if latency_s < 0:
        return 0.0, sum(rates) / bb
    if per_byte_s < 0:
        return sum(ones) / aa, 0.0
    return latency_s, per_byte_s


def _error(points: Sequence[LinkPoint], latency_s: float, bandwidth: float | None) -> float:
    errors = []
    for point in points:
        fitted_s = latency_s + (point.crossing_bytes / bandwidth if bandwidth else 0.0)
        errors.append(abs(fitted_s / point.seconds - 1))
    return sum(errors) / len(errors)


@dataclass(frozen=True, slots=True)
class LinkEfficiency:
    """A key of a cluster's description, and the value that gives the measured time."""

    key: str
    value: float
    beyond: bool  # the transfer is faster than the whole link of that description


def link_efficiency(cluster: str, points: Sequence[LinkPoint]) -> LinkEfficiency:
    """With which efficiency the largest transfer of *points* takes its measured time on *cluster*."""
    largest = max(points, key=lambda point: point.crossing_bytes)
    measured = largest.crossing_bytes / largest.seconds
    inside = largest.ranks <= load_cluster(cluster).domain_gpus
    key = "node.fabric.link.efficiency" if inside else "node.nic.efficiency"

    def reached(efficiency: float) -> float:
        own = load_cluster(cluster, [f"{key}={efficiency:.6f}"])
        return reached_busbw(largest.kind, largest.size_bytes, largest.ranks, own) or 0.0

    low, high = 0.01, 1.0
    if reached(high) <= measured:
        return LinkEfficiency(key, 1.0, True)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < measured else (low, middle)
    return LinkEfficiency(key, round(high, 4), False)


def by_group(points: Sequence[LinkPoint]) -> Mapping[str, list[LinkPoint]]:
    groups: dict[str, list[LinkPoint]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    return groups
