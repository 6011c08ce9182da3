"""The way a group of ranks communicates over, in plain numbers: all that a collective's cost depends on."""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from stepcast.cost.collectives.tuning import Tuning, library_tuning, tuning_of
from stepcast.hardware.cluster import Cluster, FabricKind, Link
from stepcast.hardware.path import GroupPath
from stepcast.hardware.placement import Place
from stepcast.ir.work import Collective, CollectiveKind

UNEVEN = 2.0  # ranks on the fullest node over the emptiest, from which on it is said


@dataclass(frozen=True, slots=True)
class Route:
    """Rates are what a long transfer reaches, efficiency included; latencies those of one empty message.

    ``intra`` is the way between two ranks of a node, for one rank; ``inter`` the way out of a node, for
    all of the group's ranks there together (of the node that holds fewest). Where all send to all, a rank
    gets ``exchange_bytes_per_s`` of the way out, less than its share where the network is oversubscribed.
    """

    ranks: int
    nodes: int = 1
    ranks_per_node: int = 0  # on the node that holds most; 0: all of them
    fewest_per_node: int = 0  # 0: as ranks_per_node
    intra_bytes_per_s: float = math.inf
    intra_latency_s: float = 0.0
    inter_bytes_per_s: float = math.inf
    inter_latency_s: float = 0.0
    exchange_bytes_per_s: float = 0.0  # 0: a rank's share of inter
    exchange_share: float = 1.0  # of the rate within a node, where all send to all
    reduction_share: float = 1.0  # of the rate within a node, where the switch adds
    memory_bytes_per_s: float = math.inf
    launch_overhead_s: float = 0.0  # of the host, for each rank that a thread drives
    call_overhead_s: float = 0.0  # of the caller, before and after each collective
    channel_overhead_s: float = 0.0
    through_share: float = 1.0  # of the rate within a node, for a ring that passes through it
    channels: int = 24  # within a node
    channels_per_rank: int = 2  # between nodes
    ranks_per_thread: int = 1
    nvlink: bool = True  # else PCIe within the node
    in_switch_reduction: bool = False
    in_network_reduction: bool = False
    tuning: Tuning = field(default_factory=library_tuning)

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "channels", "channels_per_rank", "ranks_per_thread"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if self.ranks_per_node == 0:
            object.__setattr__(self, "ranks_per_node", -(-self.ranks // self.nodes))
        if self.fewest_per_node == 0:
            object.__setattr__(self, "fewest_per_node", min(self.ranks_per_node, self.ranks // self.nodes))
        if not 1 <= self.fewest_per_node <= self.ranks_per_node <= self.ranks:
            raise ValueError(
                f"{self.ranks} ranks cannot be spread over {self.nodes} nodes, "
                f"{self.fewest_per_node} to {self.ranks_per_node} on each"
            )
        if self.exchange_bytes_per_s == 0:
            object.__setattr__(self, "exchange_bytes_per_s", self.inter_bytes_per_s / self.fewest_per_node)
        for name in ("intra_bytes_per_s", "inter_bytes_per_s", "exchange_bytes_per_s", "memory_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above zero, not {getattr(self, name)!r}")
        for name in (
            "intra_latency_s",
            "inter_latency_s",
            "launch_overhead_s",
            "call_overhead_s",
            "channel_overhead_s",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {getattr(self, name)!r}")

    @property
    def ring_bytes_per_s(self) -> float:
        """A ring passes each node's border once, over all its ranks' NICs, and each rank's port."""
        if self.nodes == 1:
            return self.intra_bytes_per_s
        if self.ranks_per_node == 1:
            return self.inter_bytes_per_s
        return min(self.intra_bytes_per_s * self.through_share, self.inter_bytes_per_s)

    @property
    def open_channels(self) -> int:
        """Channels that a large message uses."""
        if self.nodes == 1:
            return self.channels
        return min(self.channels, self.channels_per_rank * self.fewest_per_node)

    @property
    def unevenness(self) -> float:
        """Ranks on the fullest node over those on the emptiest, through whose way out all of them go."""
        return self.ranks_per_node / self.fewest_per_node

    def within(self) -> "Route":
        """The same ranks seen from one node."""
        return replace(self, ranks=self.ranks_per_node, nodes=1, fewest_per_node=self.ranks_per_node)

    def between(self) -> "Route":
        """One rank of each node: they share the way out with the node's other ranks."""
        return replace(
            self,
            ranks=self.nodes,
            ranks_per_node=1,
            fewest_per_node=1,
            inter_bytes_per_s=self.inter_bytes_per_s / self.ranks_per_node,
        )


@lru_cache(maxsize=4096)
def route_of(path: GroupPath, cluster: Cluster, ranks_per_thread: int = 1) -> Route:
    """What a group's *path* through *cluster* means for its collectives."""
    intra, inter, constants = path.intra, path.inter, cluster.communication
    fabric = cluster.node.fabric
    nvlink = fabric.kind is not FabricKind.PCIE
    if fabric.kind is FabricKind.NVLINK_PAIRS and intra is not None:
        nvlink = intra.bandwidth_bytes_per_s >= fabric.link.bandwidth_bytes_per_s
    through = 1.0
    if fabric.kind is FabricKind.NVLINK_MESH and path.nodes > 1 and path.ranks_per_node > 1:
        # As many rings as GPUs pass a node, each over all but one of them, so every edge of the mesh carries
        # one in either direction; a ring that closes in the node has an edge less for each GPU.
        through = path.ranks_per_node / (path.ranks_per_node - 1)
    exchange = 0.0
    if inter is not None and path.exchange_bytes_per_s is not None:
        exchange = path.exchange_bytes_per_s * inter.efficiency
    return Route(
        ranks=path.ranks,
        nodes=path.nodes,
        ranks_per_node=path.ranks_per_node,
        fewest_per_node=path.fewest_per_node,
        intra_bytes_per_s=_rate(intra),
        intra_latency_s=intra.latency_s if intra else 0.0,
        inter_bytes_per_s=_rate(inter) * path.fewest_per_node,
        inter_latency_s=inter.latency_s if inter else 0.0,
        exchange_bytes_per_s=exchange,
        exchange_share=constants.exchange_share,
        reduction_share=fabric.reduction_share,
        through_share=through,
        memory_bytes_per_s=cluster.gpu.memory_bandwidth_bytes_per_s,
        launch_overhead_s=constants.launch_overhead_s,
        channel_overhead_s=constants.channel_overhead_s,
        ranks_per_thread=min(ranks_per_thread, path.ranks),
        nvlink=nvlink,
        in_switch_reduction=path.in_switch_reduction,
        in_network_reduction=path.in_network_reduction,
        tuning=tuning_of(cluster),
    )


def uneven_warning(who: str, route: Route, cluster: Cluster, place: Place) -> list[str]:
    """Says that *who* is slow for the node that holds least of it; nothing where that hardly matters."""
    if route.unevenness < UNEVEN:
        return []
    racks = cluster.topology.scale_up_nodes > 1
    what = "rack" if racks else "node"
    remedy = "use --place even, or " if racks and place is Place.PACKED else ""
    return [
        f"{who} {route.ranks} ranks stands on {route.nodes} {what}s, {route.ranks_per_node} on the fullest "
        f"and {route.fewest_per_node} on the emptiest, whose way out bounds them all: {remedy}"
        f"choose GPUs that fill every {what} alike"
    ]


def _rate(link: Link | None) -> float:
    return link.effective_bytes_per_s if link else math.inf


# What computation loses to a collective that runs beside it.
#
# A collective's kernel keeps one thread block per channel on a multiprocessor of its own, which large
# matrix kernels cannot share. While it runs, computation has the other multiprocessors, so every second
# of it costs blocks / multiprocessors seconds of computing. On an H200 a stand-in of 16 copying blocks
# (12 % of it) costs a transformer layer 7 to 21 %, of 24 (18 %) 12 to 21 % (tools/measure_overlap.py);
# Lee et al., "Characterizing Compute-Communication Overlap" (arXiv 2507.03114), found 18.9 % on average
# over A100, H100, MI210 and MI250.

# DeepSeek-V3 (2024), section 3.2.2, and DeepEP, which keep 20 for dispatch and combine.
EXPERT_BLOCKS = 20


def lost_share(work: Collective, route: Route, multiprocessors: int) -> float:
    """Seconds of computing lost for each second of *work* beside it."""
    if route.ranks == 1:
        return 0.0
    blocks = EXPERT_BLOCKS if work.kind is CollectiveKind.ALL_TO_ALL else route.open_channels
    return min(1.0, blocks / multiprocessors)
