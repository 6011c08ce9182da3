"""How nodes are joined."""

from dataclasses import dataclass
from enum import StrEnum

from stepcast.hardware.check import require_amount, require_count, require_positive


class NetworkKind(StrEnum):
    RAIL_OPTIMISED = "rail-optimised"  # NIC i of every node on leaf switch i, leaves joined by spines
    FAT_TREE = "fat-tree"  # all NICs of a node on the same leaf switch, leaves joined by spines
    RAIL_ONLY = "rail-only"  # one network per rail, nothing joins them
    TORUS = "torus"  # nodes joined to their neighbours directly
    DRAGONFLY = "dragonfly"  # leaf switches of a pod joined to each other, and each two pods


class Routing(StrEnum):
    """How a message finds its way where there are several."""

    SPRAY = "spray"  # packet by packet, evenly over all ways
    ECMP = "ecmp"  # each queue pair over one way, which a hash chooses
    ADAPTIVE = "adaptive"  # each queue pair over the way that carries least when it starts


@dataclass(frozen=True, slots=True)
class Topology:
    """The network between nodes. ``scale_up_nodes`` of them may share one NVLink domain, as in an NVL72.

    A pod is a part of the cluster whose leaves have spines of their own, joined to those of other pods by
    core switches; of a dragonfly it is a group.
    """

    kind: NetworkKind
    switch_latency_s: float = 0.0
    leaf_nodes: int | None = None  # nodes that reach each other through one switch; None: all of them
    oversubscription: float = 1.0  # bandwidth into a leaf over bandwidth from the leaf to the spines
    scale_up_nodes: int = 1
    shape: tuple[int, ...] = ()  # of a torus, in scale-up domains
    in_network_reduction: bool = False  # the switches add (SHARP)
    pod_nodes: int | None = None  # None: all of them
    pod_oversubscription: float = 1.0  # bandwidth into a pod's spines over bandwidth from there to the cores
    spines: int | None = None  # ways up from a leaf; None: as many links of a NIC's rate as its share needs
    cores: int | None = None  # ways up from a spine; None: likewise
    routing: Routing = Routing.SPRAY
    queue_pairs: int = 1  # that each two NICs share their messages among
    seed: int = 0  # of the hash
    failed: tuple[str, ...] = ()  # links, by their names or patterns of them
    slow: tuple[str, ...] = ()  # the same with the share that is left, such as "node 3 NIC 2 up: 0.5"

    @property
    def doubts(self) -> list[str]:
        """What prices of collectives one by one leave out, as a warning; flows over the links know it."""
        said = {"routing": self.routing is not Routing.SPRAY, "failed": self.failed, "slow": self.slow}
        names = " and ".join(f"network.{name}" for name, given in said.items() if given)
        return (
            [f"{names}: the fast engine leaves it out of account; --engine fluid does not"] if names else []
        )

    def __post_init__(self) -> None:
        require_amount(self, "switch_latency_s")
        require_positive(self, "oversubscription")
        require_count(self, "scale_up_nodes")
        if self.leaf_nodes is not None:
            require_count(self, "leaf_nodes")
        if self.oversubscription < 1:
            raise ValueError(f"oversubscription must be at least 1, not {self.oversubscription!r}")
        self._check_tiers()
        if (self.kind is NetworkKind.TORUS) != bool(self.shape):
            raise ValueError("shape is for a torus, and a torus needs one, such as [4, 4, 4]")
        if any(type(size) is not int or size < 1 for size in self.shape):
            raise ValueError(f"shape must be whole numbers of at least 1, not {list(self.shape)!r}")

    def _check_tiers(self) -> None:
        for name in ("pod_nodes", "spines", "cores"):
            if getattr(self, name) is not None:
                require_count(self, name)
        require_positive(self, "pod_oversubscription")
        require_count(self, "queue_pairs")
        if self.pod_oversubscription < 1:
            raise ValueError(f"pod_oversubscription must be at least 1, not {self.pod_oversubscription!r}")
        if self.kind is NetworkKind.TORUS and self.in_network_reduction:
            raise ValueError("in_network_reduction needs switches between nodes, which a torus has not")
        if self.kind is NetworkKind.DRAGONFLY and self.leaf_nodes is None:
            raise ValueError("leaf_nodes is missing: a dragonfly needs the nodes of one of its switches")
        if self.pod_nodes is None:
            return
        if self.kind is NetworkKind.TORUS:
            raise ValueError("pod_nodes is for trees of switches and dragonflies, not for a torus")
        if self.leaf_nodes is None or self.pod_nodes % self.leaf_nodes:
            raise ValueError(
                f"pod_nodes ({self.pod_nodes}) must be whole leaves: a multiple of leaf_nodes "
                f"({self.leaf_nodes or 'not given'})"
            )
        if self.pod_nodes % self.scale_up_nodes:
            raise ValueError(
                f"pod_nodes ({self.pod_nodes}) must hold whole scale-up domains of {self.scale_up_nodes}"
            )
