"""nccl-tests logs compared with a cluster: each size, and the likely cause where it is slow.

Sizes fall into three ranges by the prediction, not by fixed limits: *small* where latency dominates, *large* where
the bandwidth has levelled off, and *middle* between them. A fault is a change of the cluster: if the prediction with
the fault is close to the measurement, the fault explains it. Nothing is looked up by the name of a machine or a log.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import cached_property

import msgspec
import numpy as np

from stepcast.analyze.result import AnalysisResult
from stepcast.cost.collectives import bus_factor, price
from stepcast.cost.collectives.sweep import kind_of, measured_time_s, sweep_route, sweep_s
from stepcast.hardware import Cluster, Fabric, FabricKind, Link
from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.measured import CollectiveSweep
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


@dataclass(frozen=True)
class MeasuredSweep:
    """The timed sizes of one log, and their predicted times on *cluster*."""

    sweep: CollectiveSweep
    cluster: Cluster

    def check(self) -> None:
        """Raise a ValueError that says why this log cannot be compared with this cluster."""
        kind_of(self.sweep)
        sweep_route(self.sweep, self.cluster)
        largest = max((row.size_bytes for row in self.sweep.rows), default=0)
        if largest > LARGEST_BYTES:
            raise ValueError(f"{self.sweep.source}: a size beyond {LARGEST_BYTES:,} bytes fits no memory")
        if not len(self.sizes_bytes):
            raise ValueError(f"{self.sweep.source}: no size has a time")

    @cached_property
    def timed(self) -> tuple[FloatArray, FloatArray]:
        """Sizes and times, by size."""
        rows = [(row.size_bytes, measured_time_s(row)) for row in self.sweep.rows if row.size_bytes]
        points = sorted((float(size), time_s) for size, time_s in rows if time_s)
        return np.array([size for size, _ in points]), np.array([time_s for _, time_s in points])

    @property
    def sizes_bytes(self) -> FloatArray:
        return self.timed[0]

    @property
    def measured_s(self) -> FloatArray:
        return self.timed[1]

    @cached_property
    def predicted_s(self) -> FloatArray:
        return self.seconds_on(self.cluster)

    def seconds_on(self, cluster: Cluster) -> FloatArray:
        """Return the predicted times on another cluster, or on this one with a fault."""
        return sweep_s(self.sweep, self.sizes_bytes, cluster)

    @property
    def reached(self) -> FloatArray:
        """Measured divided by predicted bandwidth, by size."""
        return self.predicted_s / self.measured_s

    @cached_property
    def spikes(self) -> BoolArray:
        slower = np.zeros(len(self.sizes_bytes), dtype=bool)
        slower[:-1] = self.measured_s[:-1] > SPIKE_FACTOR * self.measured_s[1:]
        return slower

    def within(self, part: Range) -> BoolArray:
        """Return which sizes belong to *part*; each belongs to one."""
        empty_s = float(sweep_s(self.sweep, np.array([SMALLEST_BYTES]), self.cluster)[0])
        small = self.predicted_s <= LATENCY_FACTOR * empty_s
        rate = self.sizes_bytes / self.predicted_s
        large = ~small & (rate >= LEVEL_SHARE * rate.max())
        parts: dict[Range, BoolArray] = {Range.SMALL: small, Range.MIDDLE: ~small & ~large, Range.LARGE: large}
        return parts[part]

    def mean_reached(self, part: Range, predicted_s: FloatArray | None = None) -> float | None:
        """Return the geometric mean of measured over predicted bandwidth in one range, without spikes."""
        chosen = self.within(part) & ~self.spikes
        if not chosen.any():
            return None
        predicted_s = self.predicted_s if predicted_s is None else predicted_s
        return float(np.exp(np.log(predicted_s[chosen] / self.measured_s[chosen]).mean()))

    def busbw(self, seconds: FloatArray) -> FloatArray:
        return self.sizes_bytes / seconds * bus_factor(kind_of(self.sweep), self.sweep.ranks)


def analyze_sweep(sweep: CollectiveSweep, cluster: Cluster) -> SweepResult:
    """Compare a log with *cluster*, size by size and by range, and name the likely causes of a shortfall."""
    log, kind = MeasuredSweep(sweep, cluster), kind_of(sweep)
    log.check()
    route = sweep_route(sweep, cluster)
    measured, predicted = log.busbw(log.measured_s), log.busbw(log.predicted_s)
    parts = {part: log.within(part) for part in Range}
    rows = []
    for index, size in enumerate(log.sizes_bytes.tolist()):
        best = price(kind, size, route)
        rows.append(
            ComparedSize(
                round(size),
                float(log.measured_s[index]),
                float(log.predicted_s[index]),
                float(log.predicted_s[index] / log.measured_s[index] - 1),
                float(measured[index]),
                float(predicted[index]),
                float(log.reached[index]),
                best.algorithm,
                best.protocol,
                next(part for part, chosen in parts.items() if chosen[index]),
                bool(log.spikes[index]),
            )
        )
    ranges = {
        str(part): ComparedRange(
            round(log.sizes_bytes[chosen].min()),
            round(log.sizes_bytes[chosen].max()),
            int(chosen.sum()),
            log.mean_reached(part),
            *(float(np.median(values[chosen])) for values in (measured, predicted, log.measured_s, log.predicted_s)),
        )
        if chosen.any()
        else None
        for part, chosen in parts.items()
    }
    return SweepResult(
        kind="collective sweep",
        file=sweep.source,
        collective=kind,
        ranks=sweep.ranks,
        nodes=sweep.nodes,
        device=sweep.device,
        ranks_per_thread=sweep.ranks_per_thread,
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

Change = Callable[[Cluster, MeasuredSweep], Cluster | None]
"""Return the cluster with a fault, or None if it cannot have it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault explains a range if the prediction with it is *within* this factor of the measurement."""

    cause: str
    part: Range
    change: Change
    within: float
    means: str
    check: str


def _fewer_nics(share: Callable[[int], int]) -> Change:
    def change(cluster: Cluster, log: MeasuredSweep) -> Cluster | None:
        node, used = cluster.node, share(cluster.node.nics)
        if log.sweep.nodes == 1 or not 0 < used < node.nics:
            return None
        return replace(cluster, node=replace(node, nics=used))

    return change


def _without_in_switch(cluster: Cluster, log: MeasuredSweep) -> Cluster | None:
    node = cluster.node
    if not node.fabric.in_switch_reduction:
        return None
    return replace(cluster, node=replace(node, fabric=replace(node.fabric, in_switch_reduction=False)))


def _without_in_network(cluster: Cluster, log: MeasuredSweep) -> Cluster | None:
    if not cluster.topology.in_network_reduction:
        return None
    return replace(cluster, topology=replace(cluster.topology, in_network_reduction=False))


def _over_pcie(cluster: Cluster, log: MeasuredSweep) -> Cluster | None:
    node = cluster.node
    if node.fabric.kind is FabricKind.PCIE or cluster.topology.scale_up_nodes > 1:
        return None
    rate = PCIE_GB_PER_S.get(cluster.gpu.architecture, PCIE_5_GB_PER_S) * GB
    link = Link(rate, node.fabric.link.latency_s, PCIE_EFFICIENCY)
    return replace(cluster, node=replace(node, fabric=Fabric(FabricKind.PCIE, link)))


def _over_tcp(cluster: Cluster) -> Cluster:
    nic = cluster.node.nic
    assert nic is not None, "the nodes of a sweep over several have NICs"
    late = replace(nic, latency_s=max(nic.latency_s, TCP_LATENCY_S))
    return replace(cluster, node=replace(cluster.node, nic=late))


FAULTS = (
    Fault(
        "one-nic",
        Range.LARGE,
        _fewer_nics(lambda nics: 1),
        1.15,
        "one NIC of each node carries everything",
        "NCCL_IB_HCA, or devices missing in the container: NCCL_DEBUG=INFO lists the NICs it found",
    ),
    Fault(
        "quarter-of-nics",
        Range.LARGE,
        _fewer_nics(lambda nics: nics // 4),
        1.15,
        "a quarter of the NICs carries everything",
        "NCCL_DEBUG=INFO lists the NICs and channels; NCCL_IB_HCA and NCCL_NCHANNELS_PER_NET_PEER limit them",
    ),
    Fault(
        "half-of-nics",
        Range.LARGE,
        _fewer_nics(lambda nics: nics // 2),
        1.15,
        "half of the NICs carry everything, or all of them at half their rate",
        "NICs of one socket only, PCIe links trained to half their width, or GPUs that reach NICs across "
        "sockets (nvidia-smi topo -m: SYS or NODE where PIX is expected)",
    ),
    Fault(
        "no-in-switch-reduction",
        Range.LARGE,
        _without_in_switch,
        1.12,
        "the NVSwitch does not add (NVLink SHARP): the plateau is that of a ring",
        "NCCL_NVLS_ENABLE, the fabric manager, CUDA 12.1 or later; too few GPUs for NVLS",
    ),
    Fault(
        "no-in-network-reduction",
        Range.LARGE,
        _without_in_network,
        1.12,
        "the network's switches do not add (SHARP)",
        "NCCL_COLLNET_ENABLE and the SHARP plugin; NCCL_DEBUG=INFO names the algorithm",
    ),
    Fault(
        "no-nvlink",
        Range.LARGE,
        _over_pcie,
        1.6,
        "GPUs of a node exchange data over PCIe or host memory instead of their links",
        "nvidia-smi nvlink -s, the fabric manager, NCCL_P2P_DISABLE, peer access under virtualisation",
    ),
)

# Suspicions where no fault of the table explains a range, for several nodes and for one.
UNEXPLAINED = {
    (Range.LARGE, True): (
        "slow-network",
        "several NICs carry data, but not at their rate: wrong affinity (GPUs reach NICs across sockets, or "
        "NICs read host memory without GPUDirect RDMA), or others share the network",
        "nvidia-smi topo -m, NCCL_DEBUG=INFO ('GDRDMA' behind each channel), ib_write_bw between NICs",
    ),
    (Range.LARGE, False): (
        "slow-fabric",
        "links inside the node do not reach their rate",
        "nvidia-smi nvlink -s and -e (links down, replays), clocks and power limits, other jobs on the node",
    ),
    (Range.MIDDLE, True): (
        "slow-middle",
        "small and large sizes are as expected and those between are not: another protocol or algorithm than "
        "the library would choose, or too few channels",
        "NCCL_PROTO, NCCL_ALGO, NCCL_MAX_NCHANNELS, a tuner plugin",
    ),
    (Range.SMALL, True): (
        "slow-start",
        "latency, not bandwidth: the host launches late or the network's proxy threads wait for a core",
        "CPU affinity of the ranks (numactl, Slurm's --cpu-bind), the CPU's governor, ranks per thread (-g)",
    ),
}
UNEXPLAINED[Range.MIDDLE, False] = UNEXPLAINED[Range.MIDDLE, True]
UNEXPLAINED[Range.SMALL, False] = UNEXPLAINED[Range.SMALL, True]


def find_shortfalls(log: MeasuredSweep) -> list[SweepFinding]:
    """Return the ranges that are slow, the largest sizes first, with their usual causes."""
    if (tcp := _tcp(log)) is not None:
        return [tcp]
    findings = []
    for part in (Range.LARGE, Range.MIDDLE, Range.SMALL):
        reached = log.mean_reached(part)
        if reached is None:
            continue
        if reached < SHORT[part]:
            findings.append(_explain(log, part, reached))
        elif reached > BEYOND and part is Range.LARGE:
            findings.append(_finding(part, reached, *BETTER, f"more than {format_percent(BEYOND)}"))
    # A slow end slows the middle too, which is reported once.
    return [finding for finding in findings if finding.reached < 1 and finding.range != Range.MIDDLE] or findings


BETTER = (
    "beyond-description",
    "faster than the description allows: other NICs, SHARP, or another cluster than the one named",
    "--cluster; 'stepcast calibrate' fits the description to this log",
)


def _tcp(log: MeasuredSweep) -> SweepFinding | None:
    """Return the finding for sockets instead of RDMA: high latency, and low bandwidth at large sizes."""
    small, large = log.mean_reached(Range.SMALL), log.mean_reached(Range.LARGE)
    if log.sweep.nodes == 1 or small is None or small >= SHORT[Range.SMALL]:
        return None
    if large is not None and large >= TCP_SHORT:
        return None
    over_tcp = log.mean_reached(Range.SMALL, log.seconds_on(_over_tcp(log.cluster)))
    if over_tcp is None or not small < over_tcp <= TCP_WITHIN:
        return None
    rule = (
        f"at least 1/{TCP_WITHIN} of the time that small sizes take over TCP (it is {1 / over_tcp:.2f} of "
        f"it), and large ones below {format_percent(TCP_SHORT)}"
    )
    return _finding(
        Range.SMALL,
        small,
        "tcp",
        "the nodes talk over TCP sockets instead of RDMA",
        "NCCL_DEBUG=INFO says NET/Socket: the RDMA or provider plugin (EFA, gIB, TCPX) is not loaded, "
        "/dev/infiniband is not in the container, NCCL_IB_DISABLE, or memlock limits",
        rule,
    )


def _explain(log: MeasuredSweep, part: Range, reached: float) -> SweepFinding:
    """Return the fault of that range whose prediction is closest, if one is close enough."""
    near: list[tuple[float, Fault, float]] = []
    for fault in FAULTS:
        faulty = fault.change(log.cluster, log) if fault.part is part else None
        if faulty is None:
            continue
        with_fault = log.mean_reached(part, log.seconds_on(faulty))
        assert with_fault is not None, "the range has sizes"
        distance = max(with_fault, 1 / with_fault)
        if distance <= fault.within and distance < 1 / reached:
            near.append((distance, fault, with_fault))
    below = f"below {format_percent(SHORT[part])}"
    if not near:
        return _finding(part, reached, *UNEXPLAINED[part, log.sweep.nodes > 1], below)
    _, fault, with_fault = min(near, key=lambda candidate: candidate[0])
    rule = f"{below}, and {with_fault:.2f} times what this fault leaves (at most {fault.within:g} either way)"
    return _finding(part, reached, fault.cause, fault.means, fault.check, rule)


def _finding(part: Range, reached: float, cause: str, means: str, check: str, rule: str) -> SweepFinding:
    rule = f"{part} sizes reach {format_percent(reached)} of the predicted bandwidth: {rule}"
    return SweepFinding(part, reached, cause, means, check, rule)
