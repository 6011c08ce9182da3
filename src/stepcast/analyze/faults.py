"""What usually keeps a collective from its rate, each as a changed description of the cluster.

A fault explains a shortfall where the cluster with that fault is predicted to do what was measured. So each
finding is one comparison, with its threshold: nothing is looked up by name of a machine or of a log.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stepcast.analyze.sweeps import MeasuredSweep, Range
from stepcast.hardware import Cluster, Fabric, FabricKind, Link
from stepcast.units import GB, US, format_percent

# Below this share of the predicted bandwidth a range falls short: the model itself is off by about a tenth.
SHORT = {Range.SMALL: 0.67, Range.MIDDLE: 0.75, Range.LARGE: 0.87}
BEYOND = 1.25  # of the predicted bandwidth: the description is too slow
# Lanes of PCIe that a GPU of that architecture has, 16 of 8, 16 or 32 GT/s in 128b/130b, in GB/s.
PCIE_GB_PER_S = {"pascal": 15.75, "volta": 15.75, "turing": 15.75, "ampere": 31.5, "ada": 31.5, "cdna2": 31.5}
PCIE_5_GB_PER_S = 63.0
PCIE_EFFICIENCY = 0.75  # of the lanes, as measured between A40s of one socket (data/clusters/a40-pcie.toml)


Change = Callable[[Cluster, MeasuredSweep], Cluster | None]
"""The cluster with a fault; None where it cannot have it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """*within* is how near the prediction with the fault must come to what was measured."""

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

# What is left to suspect where no fault of the table explains a range.
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

# Kernel sockets: small messages are late, about 30 us a hop where RDMA needs 5 to 10 (16 A100 over IP over
# InfiniBand, Azure/aks-rdma-infiniband), and large ones are bound by one core's copying.
TCP_LATENCY_S = 30 * US
TCP_WITHIN = 1.6  # small messages take at least 1/1.6 of what they do over TCP
TCP_SHORT = 0.5  # and large ones reach less than this


def findings(log: MeasuredSweep) -> list[dict[str, Any]]:
    """What falls short, range by range, the largest sizes first; and what that usually means."""
    if (tcp := _tcp(log)) is not None:
        return [tcp]
    found = []
    for part in (Range.LARGE, Range.MIDDLE, Range.SMALL):
        reached = log.mean_reached(part)
        if reached is None:
            continue
        if reached < SHORT[part]:
            found.append(_explained(log, part, reached))
        elif reached > BEYOND and part is Range.LARGE:
            found.append(_finding(part, reached, *BETTER, f"more than {format_percent(BEYOND)}"))
    # A slow end slows the middle too: that is told once.
    short = [one for one in found if one["reached"] < 1 and one["range"] != Range.MIDDLE]
    return short or found


BETTER = (
    "beyond-description",
    "faster than the description allows: other NICs, SHARP, or another cluster than the one named",
    "--cluster; 'stepcast calibrate' fits the description to this log",
)


def _tcp(log: MeasuredSweep) -> dict[str, Any] | None:
    """Sockets instead of RDMA: late at small sizes and slow at large ones."""
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


def _explained(log: MeasuredSweep, part: Range, reached: float) -> dict[str, Any]:
    """The fault of that range whose prediction comes nearest, if any comes near enough."""
    near: list[tuple[float, Fault, float]] = []
    for fault in FAULTS:
        faulty = fault.change(log.cluster, log) if fault.part is part else None
        if faulty is None:
            continue
        with_fault = log.mean_reached(part, log.seconds_on(faulty))
        assert with_fault is not None, "the range holds sizes"
        distance = max(with_fault, 1 / with_fault)
        if distance <= fault.within and distance < 1 / reached:
            near.append((distance, fault, with_fault))
    below = f"below {format_percent(SHORT[part])}"
    if not near:
        return _finding(part, reached, *UNEXPLAINED[part, log.sweep.nodes > 1], below)
    _, fault, with_fault = min(near, key=lambda one: one[0])
    rule = f"{below}, and {with_fault:.2f} times what this fault leaves (at most {fault.within:g} either way)"
    return _finding(part, reached, fault.cause, fault.means, fault.check, rule)


def _finding(part: Range, reached: float, cause: str, means: str, check: str, rule: str) -> dict[str, Any]:
    return {
        "range": part,
        "reached": reached,
        "cause": cause,
        "means": means,
        "check": check,
        "rule": f"{part} sizes reach {format_percent(reached)} of the predicted bandwidth: {rule}",
    }
