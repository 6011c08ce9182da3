"""How nodes are joined."""

from dataclasses import dataclass
from enum import StrEnum

from stepcast.hardware.check import require_amount, require_count, require_positive


class NetworkKind(StrEnum):
    RAIL_OPTIMISED = "rail-optimised"  # NIC i of every node on leaf switch i, leaves joined by spines
    FAT_TREE = "fat-tree"  # all NICs of a node on the same leaf switch, leaves joined by spines
    RAIL_ONLY = "rail-only"  # one network per rail, nothing joins them
    TORUS = "torus"  # nodes joined to their neighbours directly


@dataclass(frozen=True, slots=True)
class Topology:
    """The network between nodes. ``scale_up_nodes`` of them may share one NVLink domain, as in an NVL72."""

    kind: NetworkKind
    switch_latency_s: float = 0.0
    leaf_nodes: int | None = None  # nodes that reach each other through one switch; None: all of them
    oversubscription: float = 1.0  # bandwidth into a leaf over bandwidth from the leaf to the spines
    scale_up_nodes: int = 1
    shape: tuple[int, ...] = ()  # of a torus, in scale-up domains
    in_network_reduction: bool = False  # the switches add (SHARP)

    def __post_init__(self) -> None:
        require_amount(self, "switch_latency_s")
        require_positive(self, "oversubscription")
        require_count(self, "scale_up_nodes")
        if self.leaf_nodes is not None:
            require_count(self, "leaf_nodes")
        if self.oversubscription < 1:
            raise ValueError(f"oversubscription must be at least 1, not {self.oversubscription!r}")
        if (self.kind is NetworkKind.TORUS) != bool(self.shape):
            raise ValueError("shape is for a torus, and a torus needs one, such as [4, 4, 4]")
        if any(type(size) is not int or size < 1 for size in self.shape):
            raise ValueError(f"shape must be whole numbers of at least 1, not {list(self.shape)!r}")
