"""A cluster: one kind of GPU and of node, the network between nodes, and the constants of its collective library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from itertools import pairwise
from math import prod

from stepcast.ir.tables import Amount, Count, Portion, Positive, Ratio, Share, Whole
from stepcast.ir.types import DType, assign, dataclass, require
from stepcast.units import US

# Where a format has no matrix units of its own, the work runs in the first of these the GPU has. bf16 on
# a GPU that lacks it is converted to fp32, never to fp16, whose range is smaller. Scaled formats (fp8, mxfp8,
# fp4, nvfp4) have no substitute: Transformer Engine's check_fp8_support, check_mxfp8_support and
# check_nvfp4_support (pytorch/quantization.py) refuse GPUs without their units.
RUNS_AS: dict[str, tuple[str, ...]] = {"tf32": ("fp32",), "fp16": ("fp32",), "bf16": ("fp32",)}

# Architectures with the same kernels, and errors of predictions, by the name of one of them.
GENERATIONS: Mapping[str, str] = {"volta": "ampere", "blackwell-ultra": "blackwell", "cdna3": "cdna", "cdna4": "cdna"}
ORDINARY = ("fp32", "fp64")  # formats that ordinary cores multiply


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. Its peaks are dense (no structured sparsity) and keyed by the name of the number format."""

    name: str
    vendor: str
    architecture: str
    matrix_flops: Mapping[str, Positive]  # matrix multiply, on tensor cores where there are any
    vector_flops: Mapping[str, Positive]  # everything else
    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive
    l2_bytes: Positive
    sms: Count  # streaming multiprocessors, or compute units on AMD
    clock_hz: Positive  # boost
    shared_memory_per_sm_bytes: Positive
    launch_overhead_s: Amount  # the shortest an operator takes, however small
    power_w: Positive
    # The fastest matrix multiply that anybody published, where it is known.
    reached_flops: Mapping[str, Positive] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, table in (("matrix", self.matrix_flops), ("vector", self.vector_flops)):
            require("fp32" in table, f"{name}.fp32 is missing, the peak of fp32")
        for dtype, reached in self.reached_flops.items():
            if reached > self.matrix_flops.get(dtype, 0.0):
                problem = f"a product cannot exceed the peak, matrix.{dtype}; correct one of them"
                raise ValueError(f"reached.{dtype} is too high: {problem}")

    def __hash__(self) -> int:
        """Return a hash of the fields that differ most often; hashing all of them would be slow."""
        return hash((self.name, self.power_w, self.clock_hz, self.memory_bytes))

    @property
    def generation(self) -> str:
        return GENERATIONS.get(self.architecture, self.architecture)

    def runs_as(self, dtype: str) -> str:
        """Return the number format in which a matrix multiply requested in *dtype* runs on this GPU."""
        for candidate in (dtype, *RUNS_AS.get(dtype, ())):
            if candidate in self.matrix_flops:
                return candidate
        raise ValueError(f"{self.name} has no {dtype} matrix units; it has {', '.join(self.matrix_flops)}")

    @property
    def half_format(self) -> DType:
        """The 16-bit format of a run that names none: bf16, or fp16 on a GPU whose matrix units have that alone."""
        return DType.FP16 if "bf16" not in self.matrix_flops and "fp16" in self.matrix_flops else DType.BF16

    def matrix_peak_flops(self, dtype: str) -> float:
        """Return the dense matrix-multiply peak in *dtype*, or in the format that replaces it."""
        return self.matrix_flops[self.runs_as(dtype)]

    def best_product_flops(self, dtype: str) -> float:
        """Return the FLOP/s that no published matrix multiply in *dtype* exceeded; infinite without a measurement.

        A format without a published rate reaches the same share of its peak as the best published format. Formats
        that run outside matrix units have no limit.
        """
        used = self.runs_as(dtype)
        if used in self.reached_flops or used in ORDINARY or not self.reached_flops:
            return self.reached_flops.get(used, math.inf)
        shares = (flops / self.matrix_flops[name] for name, flops in self.reached_flops.items())
        return self.matrix_flops[used] * max(shares)


class NetworkKind(StrEnum):
    RAIL_OPTIMISED = "rail-optimised"  # NIC i of every node on leaf switch i, leaves joined by spines
    FAT_TREE = "fat-tree"  # all NICs of a node on the same leaf switch, leaves joined by spines
    RAIL_ONLY = "rail-only"  # one network per rail, nothing joins them
    TORUS = "torus"  # nodes joined to their neighbours directly
    DRAGONFLY = "dragonfly"  # leaf switches of a pod joined to each other, and each two pods


class NetworkRouting(StrEnum):
    """The choice among several routes of a message."""

    SPRAY = "spray"  # packet by packet, evenly over all routes
    ECMP = "ecmp"  # each queue pair over one route, which a hash chooses
    ADAPTIVE = "adaptive"  # each queue pair over the route that carries least when it starts


@dataclass(frozen=True, slots=True)
class Topology:
    """The network between nodes. ``scale_up_nodes`` of them may share one NVLink domain, as in an NVL72.

    A pod is a part of the cluster whose leaves have spines of their own, joined to those of other pods by
    core switches; of a dragonfly it is a group.
    """

    kind: NetworkKind
    switch_latency_s: Amount = 0.0
    leaf_nodes: Count | None = None  # nodes that reach each other through one switch; None: all of them
    oversubscription: Ratio = 1.0  # bandwidth into a leaf over bandwidth from the leaf to the spines
    scale_up_nodes: Count = 1
    shape: tuple[Count, ...] = ()  # of a torus, in scale-up domains
    in_network_reduction: bool = False  # the switches add (SHARP)
    pod_nodes: Count | None = None  # None: all of them
    pod_oversubscription: Ratio = 1.0  # bandwidth into a pod's spines over bandwidth from there to the cores
    spines: Count | None = None  # ways up from a leaf; None: as many links of a NIC's rate as its share needs
    cores: Count | None = None  # ways up from a spine; None: the same
    routing: NetworkRouting = NetworkRouting.SPRAY
    queue_pairs: Count = 1  # among which two NICs divide their messages
    seed: Whole = 0  # of the hash that chooses routes
    failed: tuple[str, ...] = ()  # links, by their names or patterns of them
    slow: tuple[str, ...] = ()  # the same with the share that is left, such as "node 3 NIC 2 up: 0.5"

    @property
    def doubts(self) -> list[str]:
        """A warning that the fast engine ignores routing and link faults; the fluid engine models them."""
        settings = {"routing": self.routing is not NetworkRouting.SPRAY, "failed": self.failed, "slow": self.slow}
        names = " and ".join(f"network.{name}" for name, value in settings.items() if value)
        return [f"{names}: the fast engine leaves it out of account; --engine fluid does not"] if names else []

    def __post_init__(self) -> None:
        if (self.kind is NetworkKind.TORUS) != bool(self.shape):
            raise ValueError("shape is for a torus, and a torus needs one, such as [4, 4, 4]")
        if self.kind is NetworkKind.TORUS and self.in_network_reduction:
            raise ValueError("in_network_reduction needs switches between nodes, which a torus has not")
        if self.kind is NetworkKind.DRAGONFLY and self.leaf_nodes is None:
            raise ValueError("leaf_nodes is missing: a dragonfly needs the nodes of one of its switches")
        if self.pod_nodes is None:
            return
        if self.kind is NetworkKind.TORUS:
            raise ValueError("pod_nodes is for trees of switches and dragonflies, not for a torus")
        for name, nodes in (("leaf_nodes", self.leaf_nodes), ("scale_up_nodes", self.scale_up_nodes)):
            fills = nodes is not None and self.pod_nodes % nodes == 0
            require(fills, f"pod_nodes ({self.pod_nodes}) must be a multiple of {name} ({nodes or 'not given'})")


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection: its line rate, the time of an empty message, and the share that data get."""

    bandwidth_bytes_per_s: Positive
    latency_s: Amount
    efficiency: Portion = 1.0

    @property
    def effective_bytes_per_s(self) -> float:
        """The rate of a long transfer."""
        return self.bandwidth_bytes_per_s * self.efficiency

    def scale(self, factor: float) -> "Link":
        """Return this link with *factor* times the bandwidth: several in parallel, or a share of one."""
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor)


class FabricKind(StrEnum):
    NVSWITCH = "nvswitch"  # every GPU reaches every other at its full rate
    NVLINK_MESH = "nvlink-mesh"  # one link between each two GPUs (also AMD Infinity Fabric)
    NVLINK_PAIRS = "nvlink-pairs"  # bridges join GPUs 2i and 2i+1, the rest goes over PCIe
    PCIE_PAIRS = "pcie-pairs"  # PCIe switches join GPUs 2i and 2i+1, the rest goes through the host
    PCIE = "pcie"


PAIRED = (FabricKind.NVLINK_PAIRS, FabricKind.PCIE_PAIRS)


@dataclass(frozen=True, slots=True)
class Fabric:
    """The connections between the GPUs of a node.

    ``link`` is one GPU's port on the switch, one edge of the mesh, one bridge or switch of a pair, or one PCIe
    slot. GPUs that share a socket but no pair talk over ``host_link``, GPUs of different sockets over ``socket_link``.
    """

    kind: FabricKind
    link: Link
    host_link: Link | None = None
    socket_link: Link | None = None
    sockets: Count = 1
    in_switch_reduction: bool = False  # the switch adds (NVLink SHARP)
    reduction_share: Portion = 1.0  # of a ring's rate that a port keeps while the switch adds
    planes: Count = 1  # parallel switches, each with its share of every GPU's links

    def __post_init__(self) -> None:
        if self.kind in PAIRED and self.host_link is None:
            raise ValueError(f"{self.kind} needs host_link, the link between GPUs of different pairs")
        if self.in_switch_reduction and self.kind is not FabricKind.NVSWITCH:
            raise ValueError(f"in_switch_reduction needs an nvswitch fabric, not {self.kind}")

    def between(self, a: int, b: int, gpus: int) -> Link:
        """Return the link from GPU *a* to GPU *b* of a node that has *gpus*."""
        if self.kind in (FabricKind.NVSWITCH, FabricKind.NVLINK_MESH):
            return self.link
        if self.kind in PAIRED and a // 2 == b // 2:
            return self.link
        per_socket = max(1, gpus // self.sockets)
        if self.socket_link is not None and a // per_socket != b // per_socket:
            return self.socket_link
        return self.host_link or self.link

    def among(self, members: Sequence[int], gpus: int) -> Link:
        """Return the link over which each of *members* sends while the group runs a ring inside the node.

        In a full mesh the edges within the group carry disjoint rings in parallel, so a GPU sends over
        all of them. Elsewhere there is one link between neighbours and the slowest one sets the pace.
        """
        ring = sorted(members)
        if len(ring) < 2 or self.kind is FabricKind.NVSWITCH:
            return self.link
        if self.kind is FabricKind.NVLINK_MESH:
            return self.link.scale(len(ring) - 1)
        links = [self.between(a, b, gpus) for a, b in pairwise([*ring, ring[0]])]
        slowest = min(links, key=lambda link: link.effective_bytes_per_s)
        return Link(slowest.bandwidth_bytes_per_s, max(link.latency_s for link in links), slowest.efficiency)


@dataclass(frozen=True, slots=True)
class Host:
    """The processors of a node as GPUs see them: memory, and *links* to it that the GPUs share evenly."""

    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive  # of all sockets, reads and writes together
    link: Link
    links: Count


@dataclass(frozen=True, slots=True)
class Node:
    gpu: Gpu
    gpus: Count
    fabric: Fabric
    nics: Whole = 0  # that carry training traffic; storage and management NICs are not counted
    nic: Link | None = None
    transport: str = ""  # of the NICs, where it is given
    host: Host | None = None  # where it is known

    def __post_init__(self) -> None:
        if (self.nics > 0) != (self.nic is not None):
            raise ValueError("nics and the link of a nic go together: give both or neither")
        require(self.fabric.sockets <= self.gpus, f"sockets ({self.fabric.sockets}) must not exceed gpus ({self.gpus})")


# Small messages of 2 and 8 GPUs in one process, for each GPU: 3.9 and 4.4 us (NetX-lab/Echo and
# microsoft/superbenchmark: A100), 3.3 to 5.3 (Azure/AI-benchmarking-guide: A100, H100).
DEFAULT_LAUNCH_S = 4.4 * US
# All-to-all of 8 A100 (microsoft/superbenchmark: 226 of a ring's 235 GB/s), 8 H100 (MooreThreads/SimuMax: 345
# of 370), 4 and 64 GB200, 8 GB300 and 8 B300 (oracle-quickstart: 640 to 680 of 684).
DEFAULT_EXCHANGE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Communication:
    """Constants of the collective library on this cluster that no datasheet states.

    With the latency and efficiency of the fabric's link and of the NIC, these are the fitted numbers.
    """

    # To launch the kernel of one rank; a thread launches those of its ranks one after the other.
    launch_overhead_s: Amount = DEFAULT_LAUNCH_S
    channel_overhead_s: Amount = 0.0  # for each channel that a collective opens; larger ones open more
    # Share of the rate within a node that an all-to-all reaches, whose messages go to all peers at once.
    exchange_share: Portion = DEFAULT_EXCHANGE_SHARE
    # The same for tokens that go to their experts and come back, in uneven parts; 0: as exchange_share.
    expert_share: Share = 0.0
    library: str = ""  # the collective library, such as "nccl-2.12"; none: that of the GPU's vendor

    def __post_init__(self) -> None:
        if self.expert_share == 0:
            assign(self, "expert_share", self.exchange_share)


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    node: Node
    topology: Topology
    communication: Communication
    nodes: Count | None = None  # None: as many as requested
    description: str = ""
    other: "Cluster | None" = None  # nodes of a second kind in the same network; the search alone uses them
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.other is not None and (self.nodes is None or self.other.nodes is None):
            raise ValueError("nodes of both kinds must be given: nodes, and other.nodes")
        if self.other is not None and (self.topology.shape or None in (self.node.nic, self.other.node.nic)):
            raise ValueError("two kinds of nodes need NICs of both (node.nics and node.nic), and a network of switches")
        if self.nodes != 1 and self.node.nic is None:
            raise ValueError("a cluster of several nodes needs node.nics and node.nic; nodes = 1 needs neither")
        if self.topology.scale_up_nodes > 1 and self.node.fabric.kind is not FabricKind.NVSWITCH:
            raise ValueError("scale_up_nodes above 1 needs an nvswitch fabric")
        if self.topology.kind is NetworkKind.DRAGONFLY and self.nodes is None:
            raise ValueError("nodes must be given: what leaves a dragonfly's pod is shared by its links to all others")
        if self.topology.shape and self.nodes is not None and self.nodes != self.torus_nodes:
            raise ValueError(f"nodes ({self.nodes}) must fill the torus ({self.torus_nodes})")

    @property
    def gpu(self) -> Gpu:
        return self.node.gpu

    def list_doubts(self, fluid: bool = False) -> list[str]:
        """Return warnings of what the description states and no forecast counts."""
        doubts = [] if fluid else self.topology.doubts
        if self.other is not None:
            doubts.append(
                f"the {self.other.gpus:,} {self.other.gpu.name} of {self.name} are not used: only search uses both"
            )
        return doubts

    @property
    def domain_gpus(self) -> int:
        """GPUs that reach each other over the fabric: those of a node, or of a scale-up domain."""
        return self.node.gpus * self.topology.scale_up_nodes

    @property
    def domains(self) -> int | None:
        """Scale-up domains of the first kind; None where the cluster is as large as requested."""
        return None if self.gpus is None else self.gpus // self.domain_gpus

    @property
    def torus_nodes(self) -> int:
        return prod(self.topology.shape) * self.topology.scale_up_nodes

    @property
    def gpus(self) -> int | None:
        """The number of GPUs of the first kind; None where the cluster is as large as requested."""
        if self.topology.shape:
            return self.torus_nodes * self.node.gpus
        return None if self.nodes is None else self.nodes * self.node.gpus
