"""A host: its GPUs, the fabric that joins them and the NICs that leave it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from stepcast.hardware.check import require_amount, require_count, require_positive
from stepcast.hardware.gpu import Gpu

# One direction of one connection.


@dataclass(frozen=True, slots=True)
class Link:
    """One direction: its line rate, the time of an empty message, and the share of the rate that data get."""

    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "bandwidth_bytes_per_s", "efficiency")
        require_amount(self, "latency_s")
        if self.efficiency > 1:
            raise ValueError(f"efficiency must be at most 1, not {self.efficiency!r}")

    @property
    def effective_bytes_per_s(self) -> float:
        """What a long transfer reaches."""
        return self.bandwidth_bytes_per_s * self.efficiency

    def scaled(self, factor: float) -> "Link":
        """The same link with *factor* times the bandwidth: several side by side, or a share of one."""
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor)


class FabricKind(StrEnum):
    NVSWITCH = "nvswitch"  # every GPU reaches every other at its full rate
    NVLINK_MESH = "nvlink-mesh"  # one link between each two GPUs (also AMD Infinity Fabric)
    NVLINK_PAIRS = "nvlink-pairs"  # bridges join GPUs 2i and 2i+1, the rest goes over PCIe
    PCIE = "pcie"


@dataclass(frozen=True, slots=True)
class Fabric:
    """What joins the GPUs of a node.

    ``link`` is one GPU's port on the switch, one edge of the mesh, one bridge, or one PCIe slot. GPUs that
    share a socket but no bridge talk over ``host_link``, GPUs of different sockets over ``socket_link``.
    """

    kind: FabricKind
    link: Link
    host_link: Link | None = None
    socket_link: Link | None = None
    sockets: int = 1
    in_switch_reduction: bool = False  # the switch adds (NVLink SHARP)
    reduction_share: float = 1.0  # of a ring's rate that a port keeps while the switch adds
    planes: int = 1  # switches side by side, each with its share of every GPU's links

    def __post_init__(self) -> None:
        require_count(self, "sockets", "planes")
        if self.kind is FabricKind.NVLINK_PAIRS and self.host_link is None:
            raise ValueError("an nvlink-pairs fabric needs host_link, the way between GPUs without a bridge")
        if self.in_switch_reduction and self.kind is not FabricKind.NVSWITCH:
            raise ValueError(f"in_switch_reduction needs an nvswitch fabric, not {self.kind}")
        if not 0 < self.reduction_share <= 1:
            raise ValueError(
                f"reduction_share must lie above 0 and be at most 1, not {self.reduction_share!r}"
            )

    def between(self, a: int, b: int, gpus: int) -> Link:
        """The way from GPU *a* to GPU *b* of a node that has *gpus*."""
        if self.kind in (FabricKind.NVSWITCH, FabricKind.NVLINK_MESH):
            return self.link
        if self.kind is FabricKind.NVLINK_PAIRS and a // 2 == b // 2:
            return self.link
        per_socket = max(1, gpus // self.sockets)
        if self.socket_link is not None and a // per_socket != b // per_socket:
            return self.socket_link
        return self.host_link or self.link

    def among(self, members: Sequence[int], gpus: int) -> Link:
        """What each of *members* can send at while the group runs a ring inside the node.

        In a full mesh the edges within the group carry disjoint rings side by side, so a GPU sends over
        all of them. Elsewhere there is one way between neighbours and the slowest one sets the pace.
        """
        ring = sorted(members)
        if len(ring) < 2:
            return self.link
        if self.kind is FabricKind.NVSWITCH:
            return self.link
        if self.kind is FabricKind.NVLINK_MESH:
            return self.link.scaled(len(ring) - 1)
        links = [self.between(a, b, gpus) for a, b in pairwise([*ring, ring[0]])]
        slowest = min(links, key=lambda link: link.effective_bytes_per_s)
        return Link(slowest.bandwidth_bytes_per_s, max(link.latency_s for link in links), slowest.efficiency)


@dataclass(frozen=True, slots=True)
class Host:
    """The processors of a node as GPUs see them: memory, and *links* to it that the GPUs share evenly."""

    memory_bytes: float
    memory_bandwidth_bytes_per_s: float  # of all sockets, reads and writes together
    link: Link
    links: int

    def __post_init__(self) -> None:
        require_positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s")
        require_count(self, "links")


@dataclass(frozen=True, slots=True)
class Node:
    gpu: Gpu
    gpus: int
    fabric: Fabric
    nics: int = 0  # that carry training traffic; storage and management NICs are not counted
    nic: Link | None = None
    transport: str = ""  # what the NICs speak, where it is told
    host: Host | None = None  # where it is known

    def __post_init__(self) -> None:
        require_count(self, "gpus")
        if type(self.nics) is not int or self.nics < 0:
            raise ValueError(f"nics must be a whole number, not {self.nics!r}")
        if (self.nics > 0) != (self.nic is not None):
            raise ValueError("nics and the link of a nic go together: give both or neither")
        if self.fabric.sockets > self.gpus:
            raise ValueError(f"sockets ({self.fabric.sockets}) must not exceed gpus ({self.gpus})")
