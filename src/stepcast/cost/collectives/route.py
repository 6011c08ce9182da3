"""The links that a group of ranks communicates over, in plain numbers: all that the cost of a collective depends on.

The constants of the collective libraries are in data/fits/collectives.toml, each with its source.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from functools import lru_cache

from stepcast.hardware.catalog import convert_units, load_fit, network_protocols
from stepcast.hardware.cluster import Cluster, FabricKind
from stepcast.hardware.path import GroupPath, Place
from stepcast.ir.tables import Amount, convert_table
from stepcast.ir.types import Quantity, Size, assign, dataclass, pick, replace, require
from stepcast.ir.work import CollectiveKind
from stepcast.units import MIB

# The architecture whose limits hold for those that no table names, and for routes that name no GPU.
DEFAULT_ARCHITECTURE = "hopper"
NEVER = 2**31  # ranks from which a switch without reduction is used
UNEVEN = 2.0  # ranks on the fullest node over the emptiest, from which on users are warned
# Thread blocks of an exchange of tokens: DeepSeek-V3 (2024), section 3.2.2, and DeepEP use 20 for dispatch and combine.
EXPERT_BLOCKS = 20


class Protocol(StrEnum):
    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


PerProtocol = Mapping[Protocol, Amount]


@dataclass(frozen=True, slots=True, eq=False)
class Tuning:
    """Constants of a library's collectives on one architecture, apart from links and hosts.

    There is one object for each, so that routes, which are keys of caches, need not compare forty figures.
    """

    start_s: PerProtocol
    tree_start_s: PerProtocol
    hop_s: PerProtocol  # beyond the link's own latency, over NVLink or Infinity Fabric
    pcie_hop_s: PerProtocol
    tree_hop_s: PerProtocol
    network_hop_s: PerProtocol
    share: PerProtocol  # of the rate that is left to data
    ll_limit_bytes_per_s: tuple[float, float, float]  # in one node, on two, on more
    message_s: Amount  # for the host to prepare one message of an all-to-all
    exchange_start_s: Amount
    tree_step_s: Amount  # synchronisation of a chunk
    tree_share: Amount  # of the ring's rate
    nvls_start_s: Amount  # for each rank of the node
    nvls_step_s: Amount  # synchronisation of a chunk, for each rank of the node
    nvls_tree_hop_s: Amount
    torch_call_s: Amount
    channel_factor: Amount = 1.0  # on the cluster's cost of opening channels
    nvls_least_ranks: int = NEVER
    nvls_channels: int = 16
    nvls_tree_channels: int = 16
    ring_from_bytes: float = 0.0  # all-reduce between nodes: smaller messages take the tree
    peer_bytes_per_s: float = math.inf  # that the channels between two GPUs of a node reach, in an exchange
    filling_share: Amount = 0.4  # of the time per byte, which the first bytes of an exchange over NVLink take longer
    filling_bytes: float = 8 * MIB  # of each message


def tuning_of(cluster: Cluster) -> Tuning:
    """Return the constants of the cluster's library (by default that of the GPUs' vendor) on its architecture."""
    default = "rccl" if cluster.gpu.vendor == "amd" else "nccl"
    return library_tuning(cluster.communication.library or default, cluster.gpu.architecture)


@lru_cache(maxsize=64)
def library_tuning(library: str = "nccl", architecture: str = DEFAULT_ARCHITECTURE) -> Tuning:
    """Return the constants of *library*; an architecture without an entry has the default limits and no NVLS."""
    tables = load_fit("collectives")
    require(library in tables, f"library must be one of {', '.join(tables)}, not {library!r}")
    table = tables[library]
    base = tables[table.pop("base", library)]
    architectures = base["architectures"] | table.pop("architectures")
    table = {name: value for name, value in {**base, **table}.items() if name != "architectures"}
    default = architectures.get(DEFAULT_ARCHITECTURE) or next(iter(architectures.values()))
    tuning = architectures.get(architecture, {"ll_limit_gb_per_s": default["ll_limit_gb_per_s"]})
    return convert_table(convert_units(table | tuning), Tuning)


@dataclass(frozen=True, slots=True)
class Route:
    """Rates are those of a long transfer, efficiency included; latencies those of one empty message.

    ``intra`` is the connection between two ranks of a node, for one rank; ``inter`` the connection out of a node, for
    all of the group's ranks there together (of the node that holds fewest). Where all send to all, a rank
    gets ``exchange_bytes_per_s`` of it, less than its share where the network is oversubscribed.
    """

    ranks: int
    nodes: Size = 1
    ranks_per_node: int = 0  # on the node that holds most; 0: all of them
    fewest_per_node: int = 0  # 0: as ranks_per_node
    intra_bytes_per_s: float = math.inf
    intra_latency_s: Quantity = 0.0
    inter_bytes_per_s: float = math.inf
    inter_latency_s: Quantity = 0.0
    exchange_bytes_per_s: float = 0.0  # 0: a rank's share of inter
    exchange_share: float = 1.0  # of the rate within a node, where all send to all
    reduction_share: float = 1.0  # of the rate within a node, where the switch adds
    memory_bytes_per_s: float = math.inf
    launch_overhead_s: Quantity = 0.0  # of the host, for each rank that a thread drives
    call_overhead_s: Quantity = 0.0  # of the caller, before and after each collective
    channel_overhead_s: Quantity = 0.0
    through_share: float = 1.0  # of the rate within a node, for a ring that passes through it
    channels: Size = 24  # within a node
    channels_per_rank: Size = 2  # between nodes
    ranks_per_thread: Size = 1
    nvlink: bool = True  # else PCIe within the node
    network_protocols: tuple[Protocol, ...] = tuple(Protocol)  # between nodes
    in_switch_reduction: bool = False
    in_network_reduction: bool = False
    tuning: Tuning = field(default_factory=library_tuning)

    def __post_init__(self) -> None:
        if self.ranks_per_node == 0:
            assign(self, "ranks_per_node", -(-self.ranks // self.nodes))
        if self.fewest_per_node == 0:
            assign(self, "fewest_per_node", min(self.ranks_per_node, self.ranks // self.nodes))
        if not 1 <= self.fewest_per_node <= self.ranks_per_node <= self.ranks:
            raise ValueError(
                f"{self.ranks} ranks cannot be spread over {self.nodes} nodes, "
                f"{self.fewest_per_node} to {self.ranks_per_node} on each"
            )
        if self.exchange_bytes_per_s == 0:
            assign(self, "exchange_bytes_per_s", self.inter_bytes_per_s / self.fewest_per_node)
        for name in self.__slots__:
            value = getattr(self, name)
            if name.endswith("_bytes_per_s") and not value > 0:
                raise ValueError(f"{name} must be above zero, not {value!r}")

    @property
    def ring_bytes_per_s(self) -> float:
        """The rate of a ring, which leaves each node once, over the NICs of all its ranks, and uses each port."""
        if self.nodes == 1:
            return self.intra_bytes_per_s
        if self.ranks_per_node == 1:
            return self.inter_bytes_per_s
        return min(self.intra_bytes_per_s * self.through_share, self.inter_bytes_per_s)

    @property
    def open_channels(self) -> int:
        """The number of channels that a large message uses."""
        return self.channels if self.nodes == 1 else min(self.channels, self.channels_per_rank * self.fewest_per_node)

    @property
    def ll_limit_bytes_per_s(self) -> float:
        """The highest rate of LL's threads."""
        return self.tuning.ll_limit_bytes_per_s[min(self.nodes, 3) - 1]

    @property
    def unevenness(self) -> float:
        """Ranks on the fullest node over those on the emptiest, whose links limit the group."""
        return self.ranks_per_node / self.fewest_per_node

    def node_route(self) -> "Route":
        """Return the route of the ranks of one node."""
        return replace(self, ranks=self.ranks_per_node, nodes=1, fewest_per_node=self.ranks_per_node)

    def crossing_route(self) -> "Route":
        """Return the route of one rank of each node; they share the links out with the node's other ranks."""
        rate = self.inter_bytes_per_s / self.ranks_per_node
        return replace(self, ranks=self.nodes, ranks_per_node=1, fewest_per_node=1, inter_bytes_per_s=rate)


@lru_cache(maxsize=4096)
def route_of(path: GroupPath, cluster: Cluster, ranks_per_thread: int = 1) -> Route:
    """Return the route of a group whose ranks are connected by *path*."""
    intra, inter, constants = path.intra, path.inter, cluster.communication
    fabric = cluster.node.fabric
    nvlink = fabric.kind not in (FabricKind.PCIE, FabricKind.PCIE_PAIRS)
    if fabric.kind is FabricKind.NVLINK_PAIRS and intra is not None:
        nvlink = intra.bandwidth_bytes_per_s >= fabric.link.bandwidth_bytes_per_s
    through, tuning = 1.0, tuning_of(cluster)
    if fabric.kind is FabricKind.NVLINK_MESH and path.nodes > 1 and path.ranks_per_node > 1:
        # As many rings as GPUs pass a node, each over all but one of them, so every edge of the mesh carries
        # one in either direction; a ring that closes in the node has an edge less for each GPU.
        through = path.ranks_per_node / (path.ranks_per_node - 1)
    exchange = path.exchange_bytes_per_s * inter.efficiency if inter and path.exchange_bytes_per_s else 0.0
    return Route(
        **pick(path, "ranks nodes ranks_per_node fewest_per_node in_switch_reduction in_network_reduction"),
        intra_bytes_per_s=intra.effective_bytes_per_s if intra else math.inf,
        intra_latency_s=intra.latency_s if intra else 0.0,
        inter_bytes_per_s=inter.effective_bytes_per_s * path.fewest_per_node if inter else math.inf,
        inter_latency_s=inter.latency_s if inter else 0.0,
        exchange_bytes_per_s=exchange,
        exchange_share=constants.exchange_share,
        reduction_share=fabric.reduction_share,
        through_share=through,
        memory_bytes_per_s=cluster.gpu.memory_bandwidth_bytes_per_s,
        launch_overhead_s=constants.launch_overhead_s,
        channel_overhead_s=constants.channel_overhead_s * tuning.channel_factor,
        ranks_per_thread=min(ranks_per_thread, path.ranks),
        nvlink=nvlink,
        network_protocols=tuple(map(Protocol, network_protocols(cluster))) if inter else tuple(Protocol),
        tuning=tuning,
    )


def uneven_warning(group: str, route: Route, cluster: Cluster, place: Place) -> list[str]:
    """Return a warning if the node that holds fewest ranks of *group* limits it; empty where that hardly matters."""
    if route.unevenness < UNEVEN:
        return []
    racks = cluster.topology.scale_up_nodes > 1
    unit = "rack" if racks else "node"
    remedy = "use --place even, or " if racks and place is Place.PACKED else ""
    return [
        f"{group} {route.ranks} ranks is spread over {route.nodes} {unit}s, {route.ranks_per_node} on the fullest "
        f"and {route.fewest_per_node} on the emptiest, whose links limit all of them: {remedy}"
        f"choose a number of GPUs that fills every {unit} equally"
    ]


def lost_share(kind: CollectiveKind, route: Route, multiprocessors: int) -> float:
    """Return the seconds of computation lost for each second that a collective of *kind* overlaps it.

    The kernel of a collective occupies one multiprocessor per channel, which large matrix kernels cannot share. While
    it runs, computation has the other multiprocessors, so every second of it costs blocks / multiprocessors seconds of
    computing. On an H200 a stand-in of 16 copying blocks (12 % of it) costs a transformer layer 7 to 21 %, of 24
    (18 %) 12 to 21 % (tools/measure_overlap.py); Lee et al., "Characterizing Compute-Communication Overlap" (arXiv
    2507.03114), found 18.9 % on average over A100, H100, MI210 and MI250.
    """
    if route.ranks == 1:
        return 0.0
    blocks = EXPERT_BLOCKS if kind is CollectiveKind.ALL_TO_ALL else route.open_channels
    return min(1.0, blocks / multiprocessors)
