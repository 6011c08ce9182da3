"""The flows of a communication: bytes on links, of all groups that run it at once.

The ranks of a stage do the same, so where one of them runs a collective, every group of that family in the
stage does. A flow alone takes the price of its collective: what it puts on a port, a NIC or a slot is at most
what these carry in that time. Links between switches are not held to that: what collides there, collides.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from stepcast.cost.collectives.choose import Algorithm
from stepcast.cost.collectives.moves import NO_THROUGH, Groups, Moved, Moves, Through, joined_moves, moved
from stepcast.hardware.cluster import FabricKind, NetworkKind, NetworkRouting
from stepcast.hardware.graph.network import Network
from stepcast.hardware.graph.routes import Ways, all_of, check_working, entries, over_ports, routes, summed
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import FlowSet
from stepcast.ir.group import FAMILIES, PARTS
from stepcast.ir.ranks import RankGrid
from stepcast.ir.work import Collective, CollectiveKind, Transfer

# Tiers that belong to one GPU or node: a price has counted what they carry.
OWN = ("NVLink", "PCIe", "sockets", "NIC", "torus")


def collective_flows(
    network: Network,
    seats: IntArray,
    grid: RankGrid,
    work: Collective,
    algorithm: Algorithm,
    price_s: float,
    *,
    stage: int | None = None,
    crossing: float = 1.0,
) -> FlowSet:
    """The flows of *work* while all ranks of *stage* (None: all ranks) run it; alone each takes *price_s*.

    *seats* is the GPU of each rank. Of groups that span stages, what the ranks of *stage* send counts.
    """
    members = members_of(grid, work.group, stage)
    mesh = network.cluster.node.fabric.kind is FabricKind.NVLINK_MESH
    groups = Groups.of(seats[members], network.cluster.domain_gpus, mesh)
    by_sender = network.topology.routing is not NetworkRouting.SPRAY and work.kind is CollectiveKind.ALL_TO_ALL
    size = float(work.total_bytes)
    found = moved(work.kind, algorithm, size, groups, by_sender=by_sender, crossing=crossing)
    moves = _along_axes(network, found.moves) if _rings_on_torus(network, algorithm) else found.moves
    added, reduced = found.added, found.reduced
    if stage is not None and _spans_stages(work.group):
        here = seats[_ranks_of(grid, stage)]
        moves = moves.only(np.isin(moves.source, here))
        added, reduced = (part.only(np.isin(part.gpu, here)) for part in (added, reduced))
    flows = groups.members.size if by_sender else groups.count
    of_group = np.arange(flows) // (groups.ranks if by_sender else 1)
    return _flow_set(network, Moved(moves, added, reduced), of_group, price_s)


def transfer_flows(
    network: Network, seats: IntArray, grid: RankGrid, work: Transfer, price_s: float, *, stage: int | None = None
) -> FlowSet:
    """A flow for each rank of *stage* (None: all) that sends to its peer, as *work* says."""
    members = members_of(grid, work.group, None if _spans_stages(work.group) else stage)
    peers = np.roll(members, -work.peer_offset, axis=1)
    source, target = members.ravel(), peers.ravel()
    if stage is not None and _spans_stages(work.group):
        here = np.isin(source, _ranks_of(grid, stage))
        source, target = source[here], target[here]
    flow = np.arange(len(source))
    moves = Moves(flow, seats[source], seats[target], np.full(len(source), float(work.size_bytes)))
    return _flow_set(network, Moved(moves, NO_THROUGH, NO_THROUGH), flow, price_s)


def message_flows(
    network: Network, source: IntArray, target: IntArray, size_bytes: FloatArray, price_s: float
) -> FlowSet:
    """A flow for each message from GPU *source* to GPU *target*."""
    flow = np.arange(len(source))
    moves = Moves(flow, source, target, size_bytes)
    return _flow_set(network, Moved(moves, NO_THROUGH, NO_THROUGH), flow, price_s)


@lru_cache(maxsize=256)
def members_of(grid: RankGrid, family: str, stage: int | None = None) -> IntArray:
    """Return the ranks of every group of *family*, a group a row, or of those within *stage*.

    The middle stage of an odd number mirrors itself: such a group of one exchanges nothing and is left out.
    """
    copies = grid.copies(family)
    size = max(len(offsets) for _, offsets in copies)
    rows = [
        np.asarray(firsts)[:, None] + np.asarray(offsets)[None, :] for firsts, offsets in copies if len(offsets) == size
    ]
    members: IntArray = np.concatenate(rows)
    if stage is not None and not _spans_stages(family):
        members = members[np.isin(members[:, 0], _ranks_of(grid, stage))]
    members.setflags(write=False)
    return members


def _spans_stages(family: str) -> bool:
    return "pp" in FAMILIES[PARTS.get(family, family)][1]


def _ranks_of(grid: RankGrid, stage: int) -> IntArray:
    stride, stages = grid.stride("pp"), grid.layout.pp
    return np.flatnonzero(np.arange(grid.layout.gpus) // stride % stages == stage)


def _rings_on_torus(network: Network, algorithm: Algorithm) -> bool:
    rings = (Algorithm.RING, Algorithm.HIERARCHICAL, Algorithm.TREE)
    return network.topology.kind is NetworkKind.TORUS and algorithm in rings


def _along_axes(network: Network, moves: Moves) -> Moves:
    """What leaves a domain, sent to the group's next along each dimension, both ways: on a torus rings run
    along lines. Where a group has no lines, its ring stays as it is.
    """
    size = network.cluster.domain_gpus
    out = moves.source // size != moves.target // size
    cells = int(max(moves.source.max(initial=0), moves.target.max(initial=0))) // size + 1
    place, at = np.unique(moves.flow[out] * cells + moves.source[out] // size, return_inverse=True)
    left = np.bincount(at, moves.size_bytes[out])
    flow, cell = np.divmod(place, cells)
    ends: list[tuple[IntArray, IntArray]] = []
    stride = 1
    for length in network.topology.shape:
        coordinate = cell // stride % length
        line = cell - coordinate * stride
        order = np.lexsort((coordinate, line, flow))
        new = np.ones(len(order), bool)
        new[1:] = (flow[order[1:]] != flow[order[:-1]]) | (line[order[1:]] != line[order[:-1]])
        start = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
        count = np.bincount(np.cumsum(new) - 1)[np.cumsum(new) - 1]
        follower = order[start + (np.arange(len(order)) - start + 1) % count]
        ends.append((order[count > 1], follower[count > 1]))
        stride *= length
    near, far = (np.concatenate(each) for each in zip(*ends, strict=True))
    ways = np.bincount(near, minlength=len(cell))
    if (ways == 0).any():
        return moves
    half = (left / ways)[near] / 2
    inside = moves.only(~out)
    return joined_moves(
        [
            inside,
            Moves(flow[near], cell[near] * size, cell[far] * size, half),
            Moves(flow[near], cell[far] * size, cell[near] * size, half),
        ]
    )


def _routed(network: Network, moves: Moves) -> Ways:
    ways = routes(network, moves.source, moves.target)
    return Ways(moves.flow[ways.row], ways.link, ways.share * moves.size_bytes[ways.row])


def _through_ports(network: Network, added: Through) -> Ways:
    """Sums within a node: over the ports on its switches."""
    if not len(added.flow):
        return all_of([])
    ways = over_ports(network, np.arange(len(added.flow)), added.gpu, added.gpu)
    check_working(network, ways)
    up = network["port up"]
    sent = (ways.link >= up.start) & (ways.link < up.start + up.size)
    size = np.where(sent, added.sent_bytes[ways.row], added.received_bytes[ways.row])
    return Ways(added.flow[ways.row], ways.link, ways.share * size)


def _through_switches(network: Network, reduced: Through) -> Ways:
    """Sums in the network: each node sends to its leaf, and each leaf of a group its sum to the spines."""
    if not len(reduced.flow):
        return all_of([])
    nics = network.cluster.node.nics
    slot, share = network.nic_slots
    node, local = np.divmod(reduced.gpu, network.cluster.node.gpus)
    at, column = np.nonzero(share[local])
    part = share[local[at], column]
    nic = slot[local[at], column]
    flow, sent, received = reduced.flow[at], reduced.sent_bytes[at] * part, reduced.received_bytes[at] * part
    parts = [
        entries(flow, network["nic up"].at(node[at], nic), sent),
        entries(flow, network["nic down"].at(node[at], nic), received),
    ]
    if "leaf up" in network.blocks:
        # What reaches a switch from one node of the group: all send as much, and the switch adds them.
        sums = _Sums(flow, node[at], sent, network.nodes)
        leaf = network.leaf_of(node[at] * nics + nic)
        parts += _upward(network, "leaf", sums.under(leaf))
        if "core up" in network.blocks:
            parts += _upward(network, "core", sums.under(network.pod_of(leaf)))
    ways = all_of(parts)
    check_working(network, ways)
    return ways


class _Sums(NamedTuple):
    """What nodes send of each flow, to be added in switches above them."""

    flow: IntArray
    node: IntArray
    sent_bytes: FloatArray
    nodes: int

    def under(self, switch: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """Of each flow that several switches have: these, and the bytes that each sends up."""
        count = int(switch.max()) + 1
        distinct, where = np.unique(self.flow * count + switch, return_inverse=True)
        of_node, at = np.unique(where * self.nodes + self.node, return_inverse=True)
        most = np.zeros(len(distinct))
        np.maximum.at(most, of_node // self.nodes, np.bincount(at, self.sent_bytes))
        flow, above = np.divmod(distinct, count)
        several = np.bincount(flow)[flow] > 1  # a group below one switch is done there
        return flow[several], above[several], most[several]


def _upward(network: Network, tier: str, sums: tuple[IntArray, IntArray, FloatArray]) -> list[Ways]:
    """Sums spread over the ways up from each switch, and their totals down again."""
    flow, switch, size = sums
    blocks = [network[f"{tier} {way}"] for way in ("up", "down")]
    ways = prod(blocks[0].shape[1:])
    places = np.unravel_index(np.arange(ways), blocks[0].shape[1:])
    return [
        entries(
            np.repeat(flow, ways),
            block.at(np.repeat(switch, ways), *(np.tile(place, len(flow)) for place in places)),
            np.repeat(size / ways, ways),
        )
        for block in blocks
    ]


def _flow_set(network: Network, found: Moved, group: IntArray, price_s: float) -> FlowSet:
    links = network.links
    first, link, size = _summed(network, found, len(group))
    own = np.isin(links.tier[link], [links.tiers.index(tier) for tier in OWN if tier in links.tiers])
    if network.alive is None:
        held = np.minimum(size, links.capacity_bytes_per_s[link] * price_s)
        return FlowSet.of(first, link, np.where(own, held, size), group=group)
    # A link that failed or is slow was not in the price: scaled as if it were whole.
    whole = _flow_set(network.healthy, found, group, price_s)
    before = _summed(network.healthy, found, len(group))[2]
    share = np.ones(len(group))
    np.minimum.at(share, whole.flow, whole.bytes_on / np.where(before > 0, before, 1.0))
    flow = np.repeat(np.arange(len(group)), np.diff(first))
    return FlowSet.of(first, link, np.where(own, size * share[flow], size), group=group)


def _summed(network: Network, found: Moved, flows: int) -> tuple[IntArray, IntArray, FloatArray]:
    """The links of each flow from ``first[flow]`` on, each once, and the bytes on them."""
    parts = [
        _routed(network, found.moves),
        _through_ports(network, found.added),
        _through_switches(network, found.reduced),
    ]
    ways = all_of(parts)
    return summed(ways.row, ways.link, ways.share, flows, len(network.links))
