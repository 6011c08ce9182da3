"""The links of a cluster: within its nodes, its NICs, and between its switches.

Every capacity is what data reach, efficiency included. A switch itself never limits: its ports do. Where all
messages are spread evenly over parallel links and none of these is worse than the others, those count as one.
Links are numbered in blocks, as many as an array of some shape has places, so that a link's number is arithmetic.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from math import ceil, prod

import numpy as np

from stepcast.hardware.cluster import PAIRED, Cluster, FabricKind, NetworkKind, NetworkRouting, Topology
from stepcast.hardware.path import torus_cell
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.flows import Links
from stepcast.ir.types import dataclass

LinkNamer = Callable[..., str]
RAILS = (NetworkKind.RAIL_OPTIMISED, NetworkKind.RAIL_ONLY)
AXES = "xyzuvw"


@dataclass(frozen=True)
class LinkBlock:
    """Equal links of one tier, numbered from *start* on; *namer* names a link by its place in *shape*."""

    tier: str
    start: int
    shape: tuple[int, ...]
    bytes_per_s: float
    namer: LinkNamer = field(repr=False)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def links_at(self, *place: IntArray | int) -> IntArray:
        """Return the numbers of the links at *place*, a column for each dimension."""
        number: IntArray = np.zeros(1, np.int64)
        for size, index in zip(self.shape, place, strict=True):
            number = number * size + index
        return number + self.start

    def name(self, link: int) -> str:
        return self.namer(*(int(place) for place in np.unravel_index(link - self.start, self.shape)))


class LinkBlocks(dict[str, LinkBlock]):
    """Blocks of links that are numbered one after the other."""

    def add(self, key: str, tier: str, shape: Sequence[int], bytes_per_s: float, namer: LinkNamer) -> None:
        self[key] = LinkBlock(tier, sum(block.size for block in self.values()), tuple(shape), bytes_per_s, namer)

    def build(self) -> Links:
        blocks = list(self.values())
        starts, sizes = (np.array([getattr(block, name) for block in blocks], np.int64) for name in ("start", "size"))
        tiers = tuple(dict.fromkeys(block.tier for block in blocks))

        def name(link: int) -> str:
            return blocks[int(np.searchsorted(starts, link, side="right")) - 1].name(link)

        numbers: IntArray = np.array([tiers.index(block.tier) for block in blocks], np.int64)
        rates: FloatArray = np.array([block.bytes_per_s for block in blocks], np.float64)
        return Links(tiers, np.repeat(numbers, sizes), np.repeat(rates, sizes), name)


def apply_faults(links: Links, topology: Topology) -> tuple[Links, BoolArray | None]:
    """Return *links* with the remaining capacities of slow links, and a mask of those that work (None: all)."""
    if not (topology.failed or topology.slow):
        return links, None
    names = [links.name(link) for link in range(len(links))]
    alive = np.ones(len(links), bool)
    capacity = links.capacity_bytes_per_s.copy()
    for pattern in topology.failed:
        alive[_match_names(pattern, names, "failed")] = False
    for entry in topology.slow:
        (pattern, _, text), share = entry.rpartition(":"), -1.0
        with suppress(ValueError):
            share = float(text)
        if not (pattern and 0 < share <= 1):
            raise ValueError(
                f"network.slow: {entry!r} is not a link and the share that is left, above 0 and at most 1, "
                "such as 'node 3 NIC 2 up: 0.5'"
            )
        capacity[_match_names(pattern, names, "slow")] *= share
    return Links(links.tiers, links.tier, capacity, links.name), alive


def _match_names(pattern: str, names: list[str], key: str) -> list[int]:
    """Return the links whose names match *pattern*, in which * matches anything."""
    matches = [link for link, name in enumerate(names) if fnmatchcase(name, pattern)]
    if not matches:
        raise ValueError(
            f"network.{key}: no link is called {pattern!r}; they are called such as {names[0]!r} or {names[-1]!r}"
        )
    return matches


@dataclass(frozen=True, eq=False)
class Network:
    """The links of the first *nodes* of *cluster*. GPUs are numbered node by node."""

    cluster: Cluster
    nodes: int
    links: Links
    blocks: dict[str, LinkBlock]
    alive: BoolArray | None  # which links work; None: all of them
    spines: int  # distinct ways up from a leaf
    cores: int  # distinct ways up from a spine

    def __getitem__(self, key: str) -> LinkBlock:
        return self.blocks[key]

    @property
    def topology(self) -> Topology:
        return self.cluster.topology

    @property
    def gpus(self) -> int:
        return self.nodes * self.cluster.node.gpus

    @property
    def on_rails(self) -> bool:
        return self.topology.kind in RAILS

    @cached_property
    def nic_slots(self) -> tuple[IntArray, FloatArray]:
        """The NICs next to each GPU of a node, and its share of messages over each.

        NICs are distributed evenly over the GPUs: with fewer NICs than GPUs several have the same, with
        more a GPU has several. Slots beyond those it has hold a share of 0.
        """
        node = self.cluster.node
        gpus, nics = node.gpus, node.nics
        begins, ends = np.arange(gpus) * nics, (np.arange(gpus) + 1) * nics  # in units of 1 / gpus
        slots = max(1, int((-(-ends // gpus) - begins // gpus).max()))
        nic = begins[:, None] // gpus + np.arange(slots)
        covered = np.minimum(ends[:, None], (nic + 1) * gpus) - np.maximum(begins[:, None], nic * gpus)
        share = np.maximum(covered, 0) / nics
        return np.minimum(nic, nics - 1), share

    @property
    def healthy(self) -> "Network":
        """This network with every link as it was built."""
        if self.alive is None:
            return self
        return network_of(replace(self.cluster, topology=replace(self.topology, failed=(), slow=())), self.nodes)

    def leaf_of(self, nic: IntArray) -> IntArray:
        """Return the leaf switch of each of *nic*, counted over all nodes."""
        node, rail = np.divmod(nic, self.cluster.node.nics)
        unit = node // (self.topology.leaf_nodes or max(1, self.nodes))
        return unit * self.cluster.node.nics + rail if self.on_rails else unit

    def pod_of(self, leaf: IntArray) -> IntArray:
        topology = self.topology
        if topology.pod_nodes is None:
            return np.zeros_like(leaf)
        assert topology.leaf_nodes is not None, "pods have checked that they have leaves"
        rails = self.cluster.node.nics if self.on_rails else 1
        return leaf // rails // (topology.pod_nodes // topology.leaf_nodes)


@lru_cache(maxsize=32)
def network_of(cluster: Cluster, nodes: int) -> Network:
    """Return the links of the first *nodes* of *cluster*, rounded up to full scale-up domains."""
    if nodes < 1 or (cluster.gpus is not None and nodes * cluster.node.gpus > cluster.gpus):
        raise ValueError(f"{nodes} nodes are not in {cluster.name}, which has {cluster.nodes or 'none'}")
    domain = cluster.topology.scale_up_nodes
    nodes = ceil(nodes / domain) * domain
    blocks = LinkBlocks()
    _add_fabric(blocks, cluster, nodes)
    spines = cores = 1
    if cluster.topology.kind is NetworkKind.TORUS:
        _add_torus(blocks, cluster)
    elif cluster.node.nic is not None:
        shape, rate = (nodes, cluster.node.nics), cluster.node.nic.effective_bytes_per_s
        blocks.add("nic up", "NIC", shape, rate, lambda n, i: f"node {n} NIC {i} up")
        blocks.add("nic down", "NIC", shape, rate, lambda n, i: f"node {n} NIC {i} down")
        spines, cores = _add_switches(blocks, cluster, nodes)
    links, alive = apply_faults(blocks.build(), cluster.topology)
    return Network(cluster, nodes, links, blocks, alive, spines, cores)


def _add_fabric(blocks: LinkBlocks, cluster: Cluster, nodes: int) -> None:
    """Add ports on a switch, edges of a mesh, bridges, slots and the links between sockets."""
    fabric, gpus = cluster.node.fabric, cluster.node.gpus
    rate, every = fabric.link.effective_bytes_per_s, (nodes, gpus)
    match fabric.kind:
        case FabricKind.NVSWITCH:
            # Parallel switches are distinct where one may be worse than the others.
            planes = fabric.planes if cluster.topology.failed or cluster.topology.slow else 1

            def switch(plane: int) -> str:
                return f"NVSwitch {plane}" if planes > 1 else "NVSwitch"

            shape, share = (nodes, gpus, planes), rate / planes
            blocks.add("port up", "NVLink", shape, share, lambda n, g, p: f"node {n} GPU {g} to {switch(p)}")
            blocks.add("port down", "NVLink", shape, share, lambda n, g, p: f"{switch(p)} to node {n} GPU {g}")
        case FabricKind.NVLINK_MESH:
            shape = (nodes, gpus, gpus)
            blocks.add("edge", "NVLink", shape, rate, lambda n, a, b: f"node {n} GPU {a} to GPU {b}")
        case FabricKind.NVLINK_PAIRS | FabricKind.PCIE_PAIRS:
            tier = "NVLink" if fabric.kind is FabricKind.NVLINK_PAIRS else "PCIe"
            blocks.add("bridge", tier, every, rate, lambda n, g: f"node {n} GPU {g} to GPU {g ^ 1}")
    if fabric.kind in (FabricKind.PCIE, *PAIRED):
        slot = (fabric.host_link or fabric.link).effective_bytes_per_s
        blocks.add("slot up", "PCIe", every, slot, lambda n, g: f"node {n} GPU {g} PCIe up")
        blocks.add("slot down", "PCIe", every, slot, lambda n, g: f"node {n} GPU {g} PCIe down")
        if fabric.socket_link is not None and fabric.sockets > 1:
            shape = (nodes, fabric.sockets, fabric.sockets)
            socket_rate = fabric.socket_link.effective_bytes_per_s
            blocks.add("socket", "sockets", shape, socket_rate, lambda n, a, b: f"node {n} socket {a} to socket {b}")


def _add_switches(blocks: LinkBlocks, cluster: Cluster, nodes: int) -> tuple[int, int]:
    """Add the links between switches; return how many ways lead up from a leaf, and from a spine."""
    topology, nic = cluster.topology, cluster.node.nic
    assert nic is not None
    if topology.leaf_nodes is None:
        return 1, 1
    rails = cluster.node.nics if topology.kind in RAILS else 1
    below = topology.leaf_nodes * cluster.node.nics / rails  # NICs of one leaf
    rate, units = nic.effective_bytes_per_s, ceil(nodes / topology.leaf_nodes)
    if topology.kind is NetworkKind.DRAGONFLY:
        _add_dragonfly(blocks, cluster, nodes, below * rate)
        return 1, 1
    distinct = topology.routing is not NetworkRouting.SPRAY or bool(topology.failed or topology.slow)
    spines = _count_ways(topology.spines, below / topology.oversubscription, distinct)
    up = below * rate / topology.oversubscription / spines
    is_numbered = distinct or topology.spines == 1

    def leaf(number: int) -> str:
        return f"leaf {number}" if rails == 1 else f"rail {number % rails} leaf {number // rails}"

    def spine(number: int) -> str:
        return f"spine {number}" if is_numbered else "spines"

    shape = (units * rails, spines)
    blocks.add("leaf up", "leaf to spine", shape, up, lambda a, s: f"{leaf(a)} to {spine(s)}")
    blocks.add("leaf down", "spine to leaf", shape, up, lambda a, s: f"{spine(s)} to {leaf(a)}")
    if topology.pod_nodes is None:
        return spines, 1
    leaves = topology.pod_nodes // topology.leaf_nodes * rails  # of one pod
    into = leaves * up / rate  # a spine, in links of a NIC's rate
    cores = _count_ways(topology.cores, into / topology.pod_oversubscription, distinct)
    core_rate = leaves * up / topology.pod_oversubscription / cores
    pods = ceil(nodes / topology.pod_nodes)

    def core(spine: int, way: int) -> str:
        return f"core {spine * cores + way}" if is_numbered else "cores"

    shape3 = (pods, spines, cores)
    blocks.add("core up", "spine to core", shape3, core_rate, lambda p, s, c: f"pod {p} {spine(s)} to {core(s, c)}")
    blocks.add("core down", "core to spine", shape3, core_rate, lambda p, s, c: f"{core(s, c)} to pod {p} {spine(s)}")
    return spines, cores


def _count_ways(stated: int | None, links: float, distinct: bool) -> int:
    """Return the number of parallel ways: those given, else links of a NIC's rate; one unless they are distinct."""
    return (stated or max(1, round(links))) if distinct else 1


def _add_dragonfly(blocks: LinkBlocks, cluster: Cluster, nodes: int, into_router: float) -> None:
    """Add a link between each two switches of a pod, and one from each switch to every other pod."""
    topology = cluster.topology
    assert topology.leaf_nodes is not None
    routers = (topology.pod_nodes or nodes) // topology.leaf_nodes or 1
    pods = ceil(nodes / (topology.pod_nodes or nodes))
    every = ceil((cluster.nodes or nodes) / (topology.pod_nodes or nodes))  # pods of the full cluster
    local = into_router / topology.oversubscription / max(1, routers - 1)
    far = into_router * routers / topology.pod_oversubscription / max(1, every - 1)
    if routers > 1:
        shape = (pods, routers, routers)
        blocks.add("local", "within pods", shape, local, lambda p, a, b: f"pod {p} switch {a} to switch {b}")
    if pods > 1:
        shape = (pods, pods, routers)
        blocks.add("global", "between pods", shape, far / routers, lambda a, b, s: f"pod {a} switch {s} to pod {b}")


def _add_torus(blocks: LinkBlocks, cluster: Cluster) -> None:
    """Add links along each dimension; a domain's NICs are spread evenly over dimensions and directions."""
    topology, node = cluster.topology, cluster.node
    assert node.nic is not None, "a torus has several nodes, so NICs"
    shape, axes = topology.shape, len(topology.shape)
    rate = node.nics * topology.scale_up_nodes * node.nic.effective_bytes_per_s / (2 * axes)

    def name(cell: int, axis: int, way: int) -> str:
        along = AXES[axis] if axes <= len(AXES) else f"axis {axis}"
        return f"cell ({', '.join(map(str, torus_cell(cell, shape)))}) along {'+-'[way]}{along}"

    blocks.add("torus", "torus", (prod(shape), axes, 2), rate, name)
