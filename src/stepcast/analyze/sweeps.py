"""nccl-tests logs compared with a cluster: each size, and the likely cause where it is slow.

Sizes fall into three ranges by the prediction, not by fixed limits: *small* where latency dominates, *large* where
the bandwidth has levelled off, and *middle* between them. A fault is a change of the cluster: if the prediction with
the fault is close to the measurement, the fault explains it. Nothing is looked up by the name of a machine or a log.
"""

from dataclasses import replace
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import TypeVar

import msgspec
import numpy as np

from stepcast.analyze.result import AnalysisResult, load_rules
from stepcast.cost.collectives.choose import price
from stepcast.cost.collectives.sweep import kind_of, measured_time_s, sweep_route, sweep_s
from stepcast.hardware import Cluster
from stepcast.hardware.cluster import Fabric, FabricKind, Link
from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.measured import CollectiveSweep
from stepcast.ir.types import pick, require
from stepcast.ir.work import bus_factor
from stepcast.units import GB, US, format_percent

LATENCY_FACTOR = 1.5  # latency dominates up to this many times the time of a message of SMALLEST_BYTES
SMALLEST_BYTES, LARGEST_BYTES = 8.0, 2**63
LEVEL_SHARE = 0.8  # bandwidth has levelled off from this share of its maximum on
SPIKE_FACTOR = 1.25  # a size this many times slower than the next larger one was disturbed: shown, but not judged


class Range(StrEnum):
    SMALL = "small"
    MIDDLE = "middle"
    LARGE = "large"


class ComparedSize(msgspec.Struct, frozen=True):
    """One size of a sweep, measured and predicted."""

    size_bytes: int
    measured_s: float
    predicted_s: float
    error: float
    measured_busbw_bytes_per_s: float
    predicted_busbw_bytes_per_s: float
    reached: float  # measured divided by predicted bandwidth
    algorithm: str | None
    protocol: str | None
    range: Range
    spike: bool


class ComparedRange(msgspec.Struct, frozen=True):
    """The sizes of one range; times and bandwidths are medians."""

    from_bytes: int
    to_bytes: int
    sizes: int
    reached: float | None
    measured_busbw_bytes_per_s: float
    predicted_busbw_bytes_per_s: float
    measured_s: float
    predicted_s: float


class SweepFinding(msgspec.Struct, frozen=True):
    """A range that is slower (or faster) than predicted, and what that usually means."""

    range: Range
    reached: float
    cause: str
    means: str
    check: str
    rule: str


class SweepResult(AnalysisResult, frozen=True, kw_only=True):
    view = "measured.link_sweep_view"
    kind: str
    file: str
    collective: str
    ranks: int
    nodes: int
    device: str
    ranks_per_thread: int
    cluster: str
    mean_abs_error: float
    ranges: dict[str, ComparedRange | None]
    rows: list[ComparedSize]
    findings: list[SweepFinding]
    warnings: list[str]


class MeasuredSweep:
    """The timed sizes of one log, by size, and their predicted times on *cluster*.

    A ValueError says why this log cannot be compared with this cluster.
    """

    def __init__(self, sweep: CollectiveSweep, cluster: Cluster) -> None:
        self.sweep, self.cluster, self.kind, self.route = sweep, cluster, kind_of(sweep), sweep_route(sweep, cluster)
        if max((row.size_bytes for row in sweep.rows), default=0) > LARGEST_BYTES:
            raise ValueError(f"{sweep.source}: a size beyond {LARGEST_BYTES:,} bytes fits no memory")
        timed = [(row.size_bytes, measured_time_s(row)) for row in sweep.rows if row.size_bytes]
        points = sorted((float(size), time_s) for size, time_s in timed if time_s)
        require(bool(points), f"{sweep.source}: no size has a time")
        self.sizes_bytes, self.measured_s = (np.array(column) for column in zip(*points, strict=True))
        self.predicted_s = self.seconds_on(cluster)
        self.reached = self.predicted_s / self.measured_s  # measured divided by predicted bandwidth
        self.spikes = np.append(self.measured_s[:-1] > SPIKE_FACTOR * self.measured_s[1:], False)
        small = self.predicted_s <= LATENCY_FACTOR * float(sweep_s(sweep, np.array([SMALLEST_BYTES]), cluster)[0])
        rate = self.sizes_bytes / self.predicted_s
        large = ~small & (rate >= LEVEL_SHARE * rate.max())
        # Which sizes belong to each range; each belongs to one.
        self.parts: dict[Range, BoolArray] = {Range.SMALL: small, Range.MIDDLE: ~small & ~large, Range.LARGE: large}

    def seconds_on(self, cluster: Cluster) -> FloatArray:
        """Return the predicted times on another cluster, or on this one with a fault."""
        return sweep_s(self.sweep, self.sizes_bytes, cluster)

    def mean_reached(self, part: Range, predicted_s: FloatArray | None = None) -> float | None:
        """Return the geometric mean of measured over predicted bandwidth in one range, without spikes."""
        chosen = self.parts[part] & ~self.spikes
        if not chosen.any():
            return None
        predicted_s = self.predicted_s if predicted_s is None else predicted_s
        return float(np.exp(np.log(predicted_s[chosen] / self.measured_s[chosen]).mean()))

    def busbw(self, seconds: FloatArray) -> FloatArray:
        return self.sizes_bytes / seconds * bus_factor(self.kind, self.sweep.ranks)


def analyze_sweep(sweep: CollectiveSweep, cluster: Cluster) -> SweepResult:
    """Compare a log with *cluster*, size by size and by range, and name the likely causes of a shortfall."""
    log = MeasuredSweep(sweep, cluster)
    measured, predicted = log.busbw(log.measured_s), log.busbw(log.predicted_s)
    columns = (log.measured_s, log.predicted_s, log.reached - 1, measured, predicted, log.reached)
    rows = []
    for index, size in enumerate(log.sizes_bytes.tolist()):
        best = price(log.kind, size, log.route)
        measured_s, predicted_s, error, own, expected, reached = (float(column[index]) for column in columns)
        figures = measured_s, predicted_s, error, own, expected, reached
        part = next(part for part, chosen in log.parts.items() if chosen[index])
        rows.append(ComparedSize(round(size), *figures, best.algorithm, best.protocol, part, bool(log.spikes[index])))
    ranges: dict[str, ComparedRange | None] = dict.fromkeys(log.parts)
    for part, chosen in log.parts.items():
        if chosen.any():
            sizes, figured = log.sizes_bytes[chosen], (measured, predicted, log.measured_s, log.predicted_s)
            counts = round(sizes.min()), round(sizes.max()), int(chosen.sum())
            medians = (float(np.median(values[chosen])) for values in figured)
            ranges[part] = ComparedRange(*counts, log.mean_reached(part), *medians)
    return SweepResult(
        kind="collective sweep",
        collective=log.kind,
        **pick(sweep, "file=source ranks nodes device ranks_per_thread"),
        cluster=cluster.name,
        mean_abs_error=float(np.abs(log.reached - 1).mean()),
        ranges=ranges,
        rows=rows,
        findings=find_shortfalls(log),
        warnings=list(sweep.warnings),
    )


# A range that reaches less than this share of the predicted bandwidth is slow: the model is off by about a tenth.
SHORT = {Range.SMALL: 0.67, Range.MIDDLE: 0.75, Range.LARGE: 0.87}
BEYOND = 1.25  # times the predicted bandwidth: the description is too slow
# Bandwidth of PCIe by architecture: 16 lanes of 8, 16 or 32 GT/s in 128b/130b.
PCIE_GB_PER_S = {"pascal": 15.75, "volta": 15.75, "turing": 15.75, "ampere": 31.5, "ada": 31.5, "cdna2": 31.5}
PCIE_5_GB_PER_S = 63.0
PCIE_EFFICIENCY = 0.75  # of the lanes, as measured between A40s of one socket (data/clusters/a40-pcie.toml)

# Kernel sockets: small messages take about 30 us a hop where RDMA needs 5 to 10 (16 A100 over IP over InfiniBand,
# Azure/aks-rdma-infiniband), and large ones are limited by the copies of one core.
TCP_LATENCY_S = 30 * US
TCP_WITHIN = 1.6  # small messages take at least 1/1.6 of the time over TCP
TCP_SHORT = 0.5  # large ones reach less than this share


class SweepCause(msgspec.Struct, frozen=True):
    """A possible cause of a slow range, and what to check (``data/analysis.toml``).

    A fault changes a *field* of the cluster: it divides a number (by 0: leaves one), or clears a flag. It explains the
    range *part* if the prediction with it is *within* this factor of the measurement.
    """

    cause: str
    means: str
    check: str
    part: Range = Range.LARGE
    field: str = ""
    divide: int = 0
    within: float = 0.0
    nodes: str = "any"  # of a suspicion where no fault explains a range: one, several or any

    def faulty(self, log: MeasuredSweep) -> Cluster | None:
        """Return the cluster with this fault; None if it cannot have it."""
        cluster, node = log.cluster, log.cluster.node
        if self.field == "node.fabric":
            if node.fabric.kind is FabricKind.PCIE or cluster.topology.scale_up_nodes > 1:
                return None
            rate = PCIE_GB_PER_S.get(cluster.gpu.architecture, PCIE_5_GB_PER_S) * GB
            link = Link(rate, node.fabric.link.latency_s, PCIE_EFFICIENCY)
            return replace(cluster, node=replace(node, fabric=Fabric(FabricKind.PCIE, link)))
        old = attrgetter(self.field)(cluster)
        if isinstance(old, bool):
            return change_field(cluster, self.field, False) if old else None
        left = old // self.divide if self.divide else 1
        return change_field(cluster, self.field, left) if log.sweep.nodes > 1 and 0 < left < old else None


Owner = TypeVar("Owner")


def change_field(owner: Owner, path: str, value: object) -> Owner:
    """Return *owner* with another value of a field, which may be one of its fields': ``node.nic.latency_s``."""
    name, _, rest = path.partition(".")
    changed = change_field(getattr(owner, name), rest, value) if rest else value
    return replace(owner, **{name: changed})  # type: ignore[type-var]


@cache
def load_causes() -> dict[str, SweepCause]:
    """Return the causes by name, in the order in which they are tried."""
    return {cause.cause: cause for cause in msgspec.convert(load_rules()["sweep"], list[SweepCause])}


def find_shortfalls(log: MeasuredSweep) -> list[SweepFinding]:
    """Return the ranges that are slow, the largest sizes first, with their usual causes."""
    if (tcp := _tcp(log)) is not None:
        return [tcp]
    findings = []
    for part in (Range.LARGE, Range.MIDDLE, Range.SMALL):
        reached = log.mean_reached(part) or 1.0  # a range without sizes has no shortfall
        if reached < SHORT[part]:
            findings.append(_explain(log, part, reached))
        elif reached > BEYOND and part is Range.LARGE:
            findings.append(_finding(part, reached, "beyond-description", f"more than {format_percent(BEYOND)}"))
    # A slow end slows the middle too, which is reported once.
    return [finding for finding in findings if finding.reached < 1 and finding.range != Range.MIDDLE] or findings


def _tcp(log: MeasuredSweep) -> SweepFinding | None:
    """Return the finding for sockets instead of RDMA: high latency, and low bandwidth at large sizes."""
    small, large = log.mean_reached(Range.SMALL), log.mean_reached(Range.LARGE)
    if log.sweep.nodes == 1 or small is None or small >= SHORT[Range.SMALL]:
        return None
    if large is not None and large >= TCP_SHORT:
        return None
    nic = log.cluster.node.nic
    assert nic is not None, "the nodes of a sweep over several have NICs"
    sockets = change_field(log.cluster, "node.nic.latency_s", max(nic.latency_s, TCP_LATENCY_S))
    over_tcp = log.mean_reached(Range.SMALL, log.seconds_on(sockets))
    if over_tcp is None or not small < over_tcp <= TCP_WITHIN:
        return None
    rule = (
        f"at least 1/{TCP_WITHIN} of the time that small sizes take over TCP (it is {1 / over_tcp:.2f} of "
        f"it), and large ones below {format_percent(TCP_SHORT)}"
    )
    return _finding(Range.SMALL, small, "tcp", rule)


def _explain(log: MeasuredSweep, part: Range, reached: float) -> SweepFinding:
    """Return the fault of that range whose prediction is closest, if one is close enough."""
    near: list[tuple[float, SweepCause, float]] = []
    for fault in load_causes().values():
        faulty = fault.faulty(log) if fault.field and fault.part is part else None
        if faulty is None:
            continue
        with_fault = log.mean_reached(part, log.seconds_on(faulty))
        assert with_fault is not None, "the range has sizes"
        distance = max(with_fault, 1 / with_fault)
        if distance <= fault.within and distance < 1 / reached:
            near.append((distance, fault, with_fault))
    below = f"below {format_percent(SHORT[part])}"
    if not near:
        nodes = ("any", "several" if log.sweep.nodes > 1 else "one")
        suspects = (cause for cause in load_causes().values() if cause.part is part and not cause.field)
        return _finding(part, reached, next(cause.cause for cause in suspects if cause.nodes in nodes), below)
    _, fault, with_fault = min(near, key=lambda candidate: candidate[0])
    rule = f"{below}, and {with_fault:.2f} times what this fault leaves (at most {fault.within:g} either way)"
    return _finding(part, reached, fault.cause, rule)


def _finding(part: Range, reached: float, cause: str, rule: str) -> SweepFinding:
    rule = f"{part} sizes reach {format_percent(reached)} of the predicted bandwidth: {rule}"
    return SweepFinding(part, reached, cause, load_causes()[cause].means, load_causes()[cause].check, rule)
