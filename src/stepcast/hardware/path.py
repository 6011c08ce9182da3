"""The links that a group of ranks crosses.

Rank r runs on GPU r mod n of node r div n, unless its job gets parts of racks (``Placement``). All GPUs of a
node are assumed to communicate at once, each in its own group of the same family, unless stated otherwise: so a
GPU's share of its node's NICs is nics / gpus.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache, partial
from itertools import accumulate, groupby, pairwise
from math import lcm
from operator import mul
from typing import NamedTuple

from stepcast.hardware.cluster import Cluster, Link, NetworkKind, NetworkRouting, Topology
from stepcast.ir.layout import Copies, Layout
from stepcast.ir.types import ByIdentity, dataclass, require

# The GPUs of a job: ranks fill one scale-up domain after the other, and a placement states how many each domain gets.
# Domains may hold several nodes (an NVL72 rack).


class Place(StrEnum):
    EVEN = "even"  # the same number of full nodes in every domain, as Slurm's --segment does
    PACKED = "packed"  # every domain is filled before the next


class Region(NamedTuple):
    """Ranks from *start* to *stop*, placed in consecutive domains from *domain* on with *held* ranks each."""

    start: int
    stop: int
    domain: int
    held: int

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the domain of *rank*, and its place there."""
        domain, local = divmod(rank - self.start, self.held)
        return self.domain + domain, local


Placement = tuple[int, ...]
"""The number of ranks in each domain; empty where every domain is filled."""
FILLED: Placement = ()
ENDLESS = 2**62
MANY_RANKS = 1024  # from which on arrays are faster than loops


@lru_cache(maxsize=1024)
def list_regions(placement: Placement, size: int) -> tuple[Region, ...]:
    """Return the regions of *placement*, runs of domains with equally many ranks; a filled domain has *size* ranks."""
    regions: list[Region] = []
    start = domain = 0
    for ranks, run in groupby(placement or (size,)):
        count = sum(1 for _ in run)
        regions.append(Region(start, start + count * ranks, domain, ranks))
        start, domain = start + count * ranks, domain + count
    regions[-1] = regions[-1]._replace(stop=ENDLESS)
    return tuple(regions)


SpreadRanks = tuple[Sequence[int], tuple[tuple[int, ...], ...]]
"""The domains of some ranks in ascending order, and the distinct sets of GPUs that the ranks use in a domain."""


def _spread(ranks: Sequence[int], regions: Sequence[Region]) -> SpreadRanks:
    """Return the domains of ascending *ranks*, and the distinct sets of GPUs that they use there."""
    if len(regions) == 1 and (spread := _spread_evenly(ranks, regions[0].held)):
        return spread
    domains: dict[int, list[int]] = {}
    ahead = iter(regions)
    region = next(ahead)
    for rank in ranks:
        while rank >= region.stop:
            region = next(ahead)
        domain, local = region.locate(rank)
        domains.setdefault(domain, []).append(local)
    return list(domains), tuple(dict.fromkeys(map(tuple, domains.values())))


def _spread_evenly(ranks: Sequence[int], size: int) -> SpreadRanks | None:
    """Return what ``_spread`` does without a loop over the ranks; None unless they are consecutive or use the same
    GPUs in all their domains.
    """
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        domains = range(ranks[0] // size, ranks[-1] // size + 1)
        start, stop = ranks[0] - domains[0] * size, ranks[-1] + 1 - domains[-1] * size
        if len(domains) == 1:
            return domains, (tuple(range(start, stop)),)
        full = [range(size)] if len(domains) > 2 else []
        return domains, tuple(dict.fromkeys(map(tuple, [range(start, size), *full, range(stop)])))
    if isinstance(ranks, range) and ranks.step % size == 0:
        domains = range(ranks[0] // size, ranks[-1] // size + 1, ranks.step // size)
        return domains, ((ranks[0] % size,),)
    if len(ranks) < MANY_RANKS:
        return None
    import numpy as np

    members = np.arange(ranks.start, ranks.stop, ranks.step) if isinstance(ranks, range) else ranks
    domain, local = np.divmod(members, size)
    per_domain = int(np.searchsorted(domain, domain[0], "right"))
    if len(ranks) % per_domain:
        return None
    domain, local = domain.reshape(-1, per_domain), local.reshape(-1, per_domain)
    if (domain != domain[:, :1]).any() or (np.diff(domain[:, 0]) == 0).any() or (local != local[0]).any():
        return None
    return domain[:, 0].tolist(), (tuple(local[0].tolist()),)


@lru_cache(maxsize=1024)
def place_ranks(place: Place, cluster: Cluster, ranks: int, together: tuple[int, ...] = ()) -> Placement:
    """Place the *ranks* of a job. *together*: runs of ranks to keep in one domain, the most important first.

    An even placement uses full nodes and groups, in as few domains as hold them, whose numbers differ by one unit at
    most.
    """
    size = cluster.domain_gpus
    if cluster.topology.scale_up_nodes == 1 or ranks <= size or place is Place.PACKED:
        return FILLED
    units = [cluster.node.gpus]
    for run in together:
        if lcm(units[-1], run) <= size:
            units.append(lcm(units[-1], run))
    domains = cluster.domains
    for unit in reversed(units):
        count, rest = divmod(ranks, unit)
        used = -(-count // (size // unit))
        if rest == 0 and (domains is None or used <= domains):
            share, more = divmod(count, used)
            return tuple(unit * (share + (domain < more)) for domain in range(used))
    return FILLED


def place_job(place: Place, cluster: Cluster, layout: Layout) -> Placement:
    """Place the ranks of *layout*, tensor-parallel ones together, then experts, then context-parallel ones."""
    together = (layout.tp, layout.expert_tp_size * layout.ep, layout.tp * layout.cp)
    return place_ranks(place, cluster, layout.gpus, together)


Slowdown = tuple[int, float, float]
"""(hops, near, far) of groups that all use the network at once: the switches (links of a torus) between the farthest
neighbours, and by how much messages to ring neighbours (near) and all-to-all messages (far) are slower than the NICs.
"""


def slowdown(topology: Topology, domains: Sequence[int], every: int | None) -> Slowdown:
    """Return the slowdown of a group in *domains*; the cluster has *every* domains (None: as many as the job needs)."""
    if topology.kind is NetworkKind.TORUS:
        return _torus(topology, domains)
    if topology.kind is NetworkKind.DRAGONFLY:
        assert every is not None, "a dragonfly has checked that its nodes are given"
        return _dragonfly(topology, domains, every)
    return _tree(topology, domains)


def repeated_domains(topology: Topology) -> int:
    """Return the scale-up domains after which the network repeats: those of a pod, or of one leaf switch."""
    return max(1, (topology.pod_nodes or topology.leaf_nodes or 0) // topology.scale_up_nodes)


def _leaf_domains(topology: Topology) -> int:
    return max(1, (topology.leaf_nodes or 0) // topology.scale_up_nodes)


def _count_under(domains: Sequence[int], size: int) -> Counter[int]:
    """Return how many of *domains* are below each switch, or in each pod, of *size* domains."""
    return Counter([domain // size for domain in domains])


def _find_fewest(domains: Sequence[int], size: int) -> tuple[int, int]:
    """Return how many switches (or pods) of *size* domains have any of ascending *domains*, and the fewest of one."""
    if isinstance(domains, range) and domains.step >= size:
        return len(domains), 1
    if not isinstance(domains, range) or size % domains.step:
        counts = _count_under(domains, size)
        return len(counts), min(counts.values())
    first, last = domains[0] // size, domains[-1] // size
    if first == last:
        return 1, len(domains)
    full = size // domains.step
    at_first = ((first + 1) * size - 1 - domains[0]) // domains.step + 1
    at_last = domains[-1] % size // domains.step + 1
    return last - first + 1, min(at_first, at_last, full)


def _tree(topology: Topology, domains: Sequence[int]) -> Slowdown:
    """Return the slowdown in a tree of leaf, spine and core switches.

    With m of the group's nodes under each leaf, a ring leaves the leaf once per m nodes, and so do the
    rings of the other groups under it: the uplinks, 1/oversubscription of the downlinks, carry 1/m of the
    traffic. In an exchange between n nodes each sends (n-m)/(n-1) of its traffic up. The same holds for
    pods, whose uplinks are less by the oversubscription of both tiers.
    """
    leaves, fewest = _find_fewest(domains, _leaf_domains(topology))
    if topology.leaf_nodes is None or leaves == 1:
        return 1, 1.0, 1.0
    short, others = topology.oversubscription, len(domains) - 1
    near, far = short / fewest, short * (len(domains) - fewest) / others
    pods, fewest = _find_fewest(domains, repeated_domains(topology))
    if topology.pod_nodes is None or pods == 1:
        return 3, max(1.0, near), max(1.0, far)
    short *= topology.pod_oversubscription
    return 5, max(1.0, near, short / fewest), max(1.0, far, short * (len(domains) - fewest) / others)


def _dragonfly(topology: Topology, domains: Sequence[int], every: int) -> Slowdown:
    """Return the slowdown in a dragonfly.

    A ring's neighbours are under one other switch, which one link of many leads to, 1/(k-1) of what may leave;
    messages that may also go through others use all, twice each. An exchange uses all links evenly. Messages
    to another pod also take a link within each of the two.
    """
    under_leaf = _leaf_domains(topology)
    in_pod = repeated_domains(topology) if topology.pod_nodes else -(-every // under_leaf) * under_leaf
    leaves, pods = _count_under(domains, under_leaf), _count_under(domains, in_pod)
    if len(leaves) == 1:
        return 1, 1.0, 1.0
    short, others = topology.oversubscription, len(domains) - 1
    in_leaf, in_pods = min(leaves.values()), min(pods.values())
    touched = max(Counter(leaf * under_leaf // in_pod for leaf in leaves).values())  # switches of a pod
    links = max(1, in_pod // under_leaf - 1)
    to_one = links if topology.routing is NetworkRouting.ECMP else min(links, 2)
    to_all = (2 * links - 1) / links if topology.routing is NetworkRouting.SPRAY else links / max(1, touched - 1)
    to_all = min(to_all, to_one)
    near = to_one * short / in_leaf if in_pods > in_leaf else 1.0
    local = (in_pods - in_leaf) / others * to_all
    if len(pods) == 1:
        return 2, max(1.0, near), max(1.0, short * local)
    away, at_ends = (len(domains) - in_pods) / others, 2 * links / (links + 1)
    across = max(1, -(-every // in_pod) - 1)
    over = min(across, 2) if topology.routing is NetworkRouting.ADAPTIVE else across
    near = max(near, at_ends * short / in_pods, over * topology.pod_oversubscription / in_pods)
    far = max(short * (local + at_ends * away), topology.pod_oversubscription * away)
    return 4, max(1.0, near), max(1.0, far)


def _torus(topology: Topology, domains: Sequence[int]) -> Slowdown:
    """Return the links crossed, and the slowdown of neighbour and of all-to-all traffic, in a torus.

    A node's NICs are spread evenly over its dimensions, and a group uses those it extends in; where its
    neighbours are h links apart, h rings of sibling groups share each link. In an exchange every byte occupies
    as many links as its route is long.
    """
    shape = topology.shape
    cells = [torus_cell(domain, shape) for domain in domains]
    spacings = []  # links between neighbours along each dimension; an open line is closed by running back along it
    for axis, size in enumerate(shape):
        ring = sorted({cell[axis] for cell in cells})
        gaps = sorted(after - before for before, after in pairwise([*ring, ring[0] + size]))
        spacings.append(0 if len(ring) == 1 else gaps[-1] if len(ring) == size else gaps[-2])
    hops = max(spacings)
    unused = len(shape) / sum(spacing > 0 for spacing in spacings)
    # The shorter way round in each dimension.
    distances = (
        min(abs(x - y), size - abs(x - y)) for cell in cells for x, y, size in zip(cells[0], cell, shape, strict=True)
    )
    mean_distance = sum(distances) / (len(cells) - 1)
    return hops, unused * hops, unused * max(hops, mean_distance)


def torus_cell(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinates of domain *index* in a torus of this *shape*."""
    strides = accumulate(shape, mul, initial=1)
    return tuple(index // stride % size for size, stride in zip(shape, strides, strict=False))


@dataclass(frozen=True, slots=True)
class GroupPath:
    """A group of ranks as the network sees it. A node here is a scale-up domain: a host, or a full NVL72.

    ``intra`` is the link of one member to its neighbours in the node, ``inter`` its share of the links out
    of the node; None where the group has no such neighbours. ``exchange_bytes_per_s`` is the line rate that a
    member has when all send to all: oversubscription and distance cost more then than between neighbours.
    """

    ranks: int
    nodes: int
    ranks_per_node: int  # on the node that has most
    fewest_per_node: int
    intra: Link | None
    inter: Link | None
    exchange_bytes_per_s: float | None  # between nodes, per member
    hops: int  # switches, or links of a torus, between the farthest neighbours of different nodes
    in_switch_reduction: bool  # NVLink SHARP within the node
    in_network_reduction: bool  # SHARP between nodes


def resolve(
    cluster: Cluster, ranks: Sequence[int], active_per_node: int | None = None, placement: Placement = FILLED
) -> GroupPath:
    """Return the links that *ranks* cross while *active_per_node* GPUs of each node (None: all) use its NICs."""
    members = ranks if isinstance(ranks, range) else sorted(set(ranks))
    if not members or len(members) != len(ranks):
        raise ValueError("a group needs at least one rank, each of them once")
    if members[0] < 0 or (cluster.gpus is not None and members[-1] >= cluster.gpus):
        raise ValueError(f"rank {members[-1]} is outside {cluster.name}, which has {cluster.gpus} GPUs")
    size = cluster.domain_gpus
    nodes, members_by_node = _spread(members, list_regions(placement, size))
    sizes = [len(local) for local in members_by_node]
    most_per_node, fewest_per_node = max(sizes), min(sizes)
    links = (cluster.node.fabric.among(local, size) for local in members_by_node if len(local) > 1)
    intra = min(links, key=lambda link: (link.effective_bytes_per_s, -link.latency_s), default=None)
    inter, exchange, hops = None, None, 0
    if len(nodes) > 1:
        active = max(most_per_node, size if active_per_node is None else active_per_node)
        is_aligned = len(members_by_node) == 1  # each node holds the same GPUs, each NIC talks to its own rail
        inter, exchange, hops = _network_share(cluster, nodes, is_aligned, active)
    in_switch = cluster.node.fabric.in_switch_reduction and most_per_node > 1
    in_network = cluster.topology.in_network_reduction and len(nodes) > 1
    counts = len(members), len(nodes), most_per_node, fewest_per_node
    return GroupPath(*counts, intra, inter, exchange, hops, in_switch, in_network)


def job_path(cluster: Cluster, ranks: int, ranks_per_node: int | None = None, place: Place = Place.EVEN) -> GroupPath:
    """Return the links of a job that is one group: *ranks* in order, or *ranks_per_node* on the first GPUs of each.

    Nothing else runs on its nodes, so its ranks have their NICs to themselves.
    """
    size = cluster.domain_gpus
    if ranks_per_node is None:
        return resolve(cluster, range(ranks), min(size, ranks), place_ranks(place, cluster, ranks))
    spread = [rank // ranks_per_node * size + rank % ranks_per_node for rank in range(ranks)]
    return resolve(cluster, spread, min(ranks_per_node, ranks))


@lru_cache(maxsize=4096)
def group_path(
    cluster: Cluster, layout: Layout, family: str, place: Place = Place.EVEN, active: int | None = None
) -> GroupPath:
    """Return the slowest group of *family*: the one on most nodes, then over the least bandwidth."""
    return _slowest_path(cluster, layout, partial(layout.group_copies, family), place, active)


@lru_cache(maxsize=4096)
def neighbour_path(
    cluster: Cluster, layout: Layout, family: str, place: Place = Place.EVEN, active: int | None = None
) -> GroupPath:
    """Return the slowest link from a rank to the next of its group, as between pipeline stages."""
    require(len(layout.group(family)) != 1, f"{family} has a single rank, so no neighbours")
    return _slowest_path(cluster, layout, partial(layout.neighbours, family), place, active)


def _slowest_path(
    cluster: Cluster, layout: Layout, list_groups: Callable[[int], Iterable[Copies]], place: Place, active: int | None
) -> GroupPath:
    placement = place_job(place, cluster, layout)
    paths = [
        _RESOLVED.get((cluster,), partial(resolve, cluster, ranks, active, placement), ranks, active, placement)
        for ranks in _distinct(list_groups, cluster, placement)
    ]

    def slowness(path: GroupPath) -> tuple[float, ...]:
        inter, intra = (link.effective_bytes_per_s if link else float("inf") for link in (path.inter, path.intra))
        return (path.nodes, -inter, -intra, path.hops, -path.fewest_per_node)

    return max(paths, key=slowness)


_RESOLVED: ByIdentity[GroupPath] = ByIdentity(2048)  # layouts of one job have many groups of ranks in common


def _distinct(
    list_groups: Callable[[int], Iterable[Copies]], cluster: Cluster, placement: Placement
) -> list[tuple[int, ...] | range]:
    """Return one group of each shape, since groups of a shape have equal paths.

    Copies of a group have one shape if they are a multiple of a leaf apart, or a multiple of a domain if they stay
    within one. Where all members have the same place in different domains, that place makes no difference.
    """
    regions = list_regions(placement, cluster.domain_gpus)
    torus = cluster.topology.kind is NetworkKind.TORUS
    under_leaf = repeated_domains(cluster.topology)
    known: dict[tuple[int, ...] | range, dict[object, int]] = {}
    is_even = not torus and len(regions) == 1
    domain = regions[0].held
    for firsts, offsets in list_groups(domain * under_leaf if is_even else 0):
        shapes = known.setdefault(offsets, {})
        if is_even:
            is_within = all(first % domain + offsets[-1] < domain for first in firsts)
            leaf = domain if is_within else domain * under_leaf
            steps = offsets[1:2] if isinstance(offsets, range) else offsets
            step = 1 if any(offset % domain for offset in steps) else domain
            # The first of each shape remains.
            known[offsets] = {first % leaf // step: first for first in reversed(firsts)} | shapes
        elif torus:
            shapes.update(zip(firsts, firsts, strict=True))
        else:
            for first in _add_within(firsts, offsets[-1], regions, under_leaf, shapes):
                shapes.setdefault(_shape(first, offsets, regions, under_leaf), first)
    groups = [_move(offsets, first) for offsets, shapes in known.items() for first in shapes.values()]
    return sorted(groups, key=lambda ranks: tuple(ranks[:2]))


def _move(offsets: tuple[int, ...] | range, first: int) -> tuple[int, ...] | range:
    """Return the ranks of a group that begins at *first*."""
    if isinstance(offsets, range):
        return range(offsets.start + first, offsets.stop + first, offsets.step)
    return tuple([first + offset for offset in offsets])


def _add_within(
    firsts: Sequence[int], span: int, regions: Sequence[Region], under_leaf: int, shapes: dict[object, int]
) -> Sequence[int]:
    """Add the shapes of the groups that stay within one region to *shapes*; return the first ranks of the others."""
    import numpy as np

    begins = np.asarray(firsts)
    number = np.searchsorted([region.start for region in regions], begins, side="right") - 1
    start, stop, domain, ranks_per_domain = np.array(regions)[number].T
    is_within = begins + span < stop
    away, local = np.divmod(begins - start, ranks_per_domain)
    keys = np.stack([number, local, (domain + away) % under_leaf])[:, is_within]
    unique, places = np.unique(keys, axis=1, return_index=True)
    for key, first in zip(unique.T.tolist(), begins[is_within][places].tolist(), strict=True):
        shapes.setdefault(((0, *key, False),), first)
    rest: list[int] = begins[~is_within].tolist()
    return rest


def _shape(first: int, offsets: Sequence[int], regions: Sequence[Region], under_leaf: int) -> object:
    """Return a value that is equal for groups that differ only in which domains of each region they are in."""
    shape, index, leaf_before = [], 0, -1
    while index < len(offsets):
        number = bisect_right(regions, first + offsets[index], key=lambda region: region.start) - 1
        region = regions[number]
        domain, local = region.locate(first + offsets[index])
        # The last domains of a region and the first of the next may have one leaf.
        shape.append((index, number, local, domain % under_leaf, domain // under_leaf == leaf_before))
        index = bisect_left(offsets, region.stop - first)
        leaf_before = region.locate(first + offsets[index - 1])[0] // under_leaf
    return tuple(shape)


def _network_share(cluster: Cluster, domains: Sequence[int], aligned: bool, active: int) -> tuple[Link, float, int]:
    """Return one member's share of the links between nodes, its rate when all send to all, and the hops."""
    topology, nic = cluster.topology, cluster.node.nic
    assert nic is not None, "a cluster of several nodes has checked that it has NICs"
    nics = cluster.node.nics * topology.scale_up_nodes
    # A GPU reaches the NICs next to it, one at least, and shares them with the GPUs that are active.
    share = min(nics / active, max(1.0, nics / cluster.domain_gpus))
    hops, near, far = slowdown(topology, domains, cluster.domains)
    latency_s = nic.latency_s + topology.switch_latency_s * hops
    if topology.kind is NetworkKind.TORUS:
        latency_s = nic.latency_s * hops
    if not aligned and topology.kind in (NetworkKind.RAIL_OPTIMISED, NetworkKind.RAIL_ONLY):
        latency_s += cluster.node.fabric.link.latency_s  # first over the fabric to the GPU on the right rail
    link = Link(nic.bandwidth_bytes_per_s * share / near, latency_s, nic.efficiency)
    return link, nic.bandwidth_bytes_per_s * share / far, hops
