"""A cluster: one kind of node, the network between them, and the constants of its collective library."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from stepcast.hardware.check import require_amount, require_count
from stepcast.hardware.gpu import Gpu
from stepcast.hardware.node import FabricKind, Node
from stepcast.hardware.topology import NetworkKind, Topology
from stepcast.units import US

# Small messages of 2 and 8 GPUs in one process, for each GPU: 3.9 and 4.4 us (NetX-lab/Echo and
# microsoft/superbenchmark: A100), 3.3 to 5.3 (Azure/AI-benchmarking-guide: A100, H100).
USUAL_LAUNCH_S = 4.4 * US
# All-to-all of 8 A100 (microsoft/superbenchmark: 226 of a ring's 235 GB/s), 8 H100 (MooreThreads/SimuMax: 345
# of 370), 4 and 64 GB200, 8 GB300 and 8 B300 (oracle-quickstart: 640 to 680 of 684).
USUAL_EXCHANGE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Communication:
    """Constants of the collective library on this cluster that no datasheet states.

    With the latency and efficiency of the fabric's link and of the NIC, these are the fitted numbers.
    """

    # To start one rank's kernel; a thread starts those of its ranks in turn.
    launch_overhead_s: float = USUAL_LAUNCH_S
    channel_overhead_s: float = 0.0  # for each channel that a collective opens; more open with its size
    # What an all-to-all reaches of the rate within a node, whose messages go to all peers at once.
    exchange_share: float = USUAL_EXCHANGE_SHARE
    # The same for tokens that go to their experts and come back, in uneven parts; 0: as others.
    expert_share: float = 0.0
    library: str = ""  # whose tables hold, such as "nccl-2.12"; none: the GPU maker's

    def __post_init__(self) -> None:
        require_amount(self, "launch_overhead_s", "channel_overhead_s")
        if not 0 < self.exchange_share <= 1:
            raise ValueError(f"exchange_share must lie above 0 and be at most 1, not {self.exchange_share!r}")
        if self.expert_share == 0:
            object.__setattr__(self, "expert_share", self.exchange_share)
        if not 0 < self.expert_share <= 1:
            raise ValueError(f"expert_share must lie above 0 and be at most 1, not {self.expert_share!r}")


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    node: Node
    topology: Topology
    communication: Communication
    nodes: int | None = None  # None: as many as asked for
    description: str = ""
    # Nodes of a second kind in the same network; the search alone uses them.
    other: "Cluster | None" = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.nodes is not None:
            require_count(self, "nodes")
        if self.other is not None and (self.nodes is None or self.other.nodes is None):
            raise ValueError("nodes of both kinds must be told: nodes, and other.nodes")
        if self.nodes != 1 and self.node.nic is None:
            raise ValueError(
                "a cluster of several nodes needs node.nics and node.nic; nodes = 1 does without"
            )
        if self.topology.scale_up_nodes > 1 and self.node.fabric.kind is not FabricKind.NVSWITCH:
            raise ValueError("scale_up_nodes above 1 needs an nvswitch fabric")
        if self.topology.kind is NetworkKind.DRAGONFLY and self.nodes is None:
            raise ValueError(
                "nodes must be told: what leaves a dragonfly's pod is shared by its links to all others"
            )
        if self.topology.shape and self.nodes is not None and self.nodes != self.torus_nodes:
            raise ValueError(f"nodes ({self.nodes}) must fill the torus ({self.torus_nodes})")

    @property
    def gpu(self) -> Gpu:
        return self.node.gpu

    @property
    def domain_gpus(self) -> int:
        """GPUs that reach each other over the fabric: those of a node, or of a scale-up domain."""
        return self.node.gpus * self.topology.scale_up_nodes

    @property
    def domains(self) -> int | None:
        """Scale-up domains of the first kind; None where the cluster is as large as asked for."""
        return None if self.gpus is None else self.gpus // self.domain_gpus

    @property
    def torus_nodes(self) -> int:
        return prod(self.topology.shape) * self.topology.scale_up_nodes

    @property
    def gpus(self) -> int | None:
        """How many GPUs of the first kind there are; None where the cluster is as large as asked for."""
        if self.topology.shape:
            return self.torus_nodes * self.node.gpus
        return None if self.nodes is None else self.nodes * self.node.gpus
