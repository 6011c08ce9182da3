"""How much slower a network's links are than its NICs, for groups that all use them at once.

Each kind answers (hops, near, far): switches or links between the farthest neighbours, and by how much a
ring's messages to neighbours and an exchange of all with all are slowed down.
"""

from collections import Counter
from itertools import pairwise

from stepcast.hardware.topology import NetworkKind, Routing, Topology

Slowdown = tuple[int, float, float]


def slowdown(topology: Topology, domains: list[int], every: int | None) -> Slowdown:
    """For a group with members in *domains*, of a cluster of *every* domain (None: as many as it needs)."""
    if topology.kind is NetworkKind.TORUS:
        return _torus(topology, domains)
    if topology.kind is NetworkKind.DRAGONFLY:
        assert every is not None, "a dragonfly has checked that its nodes are told"
        return _dragonfly(topology, domains, every)
    return _tree(topology, domains)


def alike_domains(topology: Topology) -> int:
    """Scale-up domains after which the network is the same again: those of a pod, or of one leaf switch."""
    return max(1, (topology.pod_nodes or topology.leaf_nodes or 0) // topology.scale_up_nodes)


def _leaf_domains(topology: Topology) -> int:
    return max(1, (topology.leaf_nodes or 0) // topology.scale_up_nodes)


def _under(domains: list[int], size: int) -> Counter[int]:
    """How many of *domains* each switch, or pod, of *size* domains has."""
    return Counter(domain // size for domain in domains)


def _tree(topology: Topology, domains: list[int]) -> Slowdown:
    """With m of the group's nodes under each leaf, a ring leaves the leaf once per m nodes, and so do the
    rings of the other groups under it: the uplinks, 1/oversubscription of the downlinks, carry 1/m of the
    traffic. In an exchange between n nodes each sends (n-m)/(n-1) of its traffic up. So it is again with
    pods, whose way out is less by the oversubscription of both tiers.
    """
    leaves = _under(domains, _leaf_domains(topology))
    if topology.leaf_nodes is None or len(leaves) == 1:
        return 1, 1.0, 1.0
    short = topology.oversubscription
    fewest, others = min(leaves.values()), len(domains) - 1
    near, far = short / fewest, short * (len(domains) - fewest) / others
    pods = _under(domains, alike_domains(topology))
    if topology.pod_nodes is None or len(pods) == 1:
        return 3, max(1.0, near), max(1.0, far)
    short *= topology.pod_oversubscription
    fewest = min(pods.values())
    return 5, max(1.0, near, short / fewest), max(1.0, far, short * (len(domains) - fewest) / others)


def _dragonfly(topology: Topology, domains: list[int], every: int) -> Slowdown:
    """A ring's neighbours are in one other place, to which leads one link of many, 1/(k-1) of what may leave;
    messages that may also go by way of others use all, twice each. An exchange uses all links evenly. What
    goes to another pod takes a link within each of the two besides.
    """
    under_leaf = _leaf_domains(topology)
    in_pod = alike_domains(topology) if topology.pod_nodes else -(-every // under_leaf) * under_leaf
    leaves, pods = _under(domains, under_leaf), _under(domains, in_pod)
    if len(leaves) == 1:
        return 1, 1.0, 1.0
    short, others = topology.oversubscription, len(domains) - 1
    in_leaf, in_pods = min(leaves.values()), min(pods.values())
    touched = max(Counter(leaf * under_leaf // in_pod for leaf in leaves).values())  # switches of a pod
    links = max(1, in_pod // under_leaf - 1)
    to_one = links if topology.routing is Routing.ECMP else min(links, 2)
    sprayed = topology.routing is Routing.SPRAY
    to_all = (2 * links - 1) / links if sprayed else links / max(1, touched - 1)
    to_all = min(to_all, to_one)
    near = to_one * short / in_leaf if in_pods > in_leaf else 1.0
    local = (in_pods - in_leaf) / others * to_all
    if len(pods) == 1:
        return 2, max(1.0, near), max(1.0, short * local)
    away, at_ends = (len(domains) - in_pods) / others, 2 * links / (links + 1)
    across = max(1, -(-every // in_pod) - 1)
    over = min(across, 2) if topology.routing is Routing.ADAPTIVE else across
    near = max(near, at_ends * short / in_pods, over * topology.pod_oversubscription / in_pods)
    far = max(short * (local + at_ends * away), topology.pod_oversubscription * away)
    return 4, max(1.0, near), max(1.0, far)


def _torus(topology: Topology, domains: list[int]) -> tuple[int, float, float]:
    """Links crossed, and the slow-down of neighbour and of all-to-all traffic, in a torus.

    A node's NICs are spread evenly over its dimensions, and a group uses those it extends in; where its
    neighbours are h links apart, h rings of sibling groups share each link. In an exchange every byte takes
    up as many links as its way is long.
    """
    shape = topology.shape
    cells = [_cell(domain, shape) for domain in domains]
    spacings = [_spacing({cell[axis] for cell in cells}, size) for axis, size in enumerate(shape)]
    hops = max(spacings)
    unused = len(shape) / sum(spacing > 0 for spacing in spacings)
    mean_way = sum(_distance(cells[0], cell, shape) for cell in cells) / (len(cells) - 1)
    return hops, unused * hops, unused * max(hops, mean_way)


def _spacing(places: set[int], size: int) -> int:
    """Links between neighbours along one dimension; the way that closes an open line runs back beside it."""
    if len(places) == 1:
        return 0
    ring = sorted(places)
    gaps = sorted(b - a for a, b in pairwise([*ring, ring[0] + size]))
    return gaps[-1] if len(places) == size else gaps[-2]


def _cell(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    cell = []
    for size in shape:
        cell.append(index % size)
        index //= size
    return tuple(cell)


def _distance(a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Links between two nodes, the shorter way round in each dimension."""
    return sum(min(abs(x - y), size - abs(x - y)) for x, y, size in zip(a, b, shape, strict=True))
