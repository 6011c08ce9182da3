"""The flows of a communication: bytes on links, of all groups that run it at once.

The ranks of a stage do the same, so where one of them runs a collective, every group of that family in the
stage does. The members of a group are paced together, so all that a group moves is one flow; the senders of an
exchange may be separate flows. Volumes are those that the curves in ``algorithms.py`` pay for.

A flow alone takes the price of its collective: its load on a port, a NIC or a slot is at most what these carry
in that time. Links between switches are not limited to that: what collides there, collides.
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from stepcast.cost.collectives.algorithms import PASSES, ROUNDS
from stepcast.cost.collectives.choose import Algorithm
from stepcast.hardware.cluster import FabricKind, NetworkKind, NetworkRouting
from stepcast.hardware.graph import routes
from stepcast.hardware.graph.network import Network
from stepcast.hardware.graph.routes import NO_SHARES, LinkShares, check_working, entries, over_ports, sum_shares
from stepcast.ir.arrays import FloatArray, IntArray, join_rows, take_rows
from stepcast.ir.flows import FlowSet
from stepcast.ir.layout import FAMILIES, PARTS, Layout
from stepcast.ir.work import Collective, CollectiveKind, Transfer

# Tiers that belong to one GPU or node: a price has counted what they carry.
OWN_TIERS = ("NVLink", "PCIe", "sockets", "NIC", "torus")
MOST_PAIRS = 8_000_000  # of an exchange; beyond them ranks of the same position in their nodes exchange


class GpuMessages(NamedTuple):
    """Messages between GPUs, in columns: the flow that each belongs to, its ends and its bytes."""

    flow: IntArray
    source: IntArray
    target: IntArray
    size_bytes: FloatArray


class SwitchTraffic(NamedTuple):
    """Bytes that GPUs send to a switch, which adds or spreads them, and receive from it."""

    flow: IntArray
    gpu: IntArray
    sent_bytes: FloatArray
    received_bytes: FloatArray


NONE: IntArray = np.zeros(0, np.int64)
NO_MESSAGES = GpuMessages(NONE, NONE, NONE, np.zeros(0))
NO_TRAFFIC = SwitchTraffic(NONE, NONE, np.zeros(0), np.zeros(0))


class CollectiveTraffic(NamedTuple):
    """All that a collective moves; ``added`` goes to switches within nodes, ``reduced`` to those between."""

    messages: GpuMessages = NO_MESSAGES
    added: SwitchTraffic = NO_TRAFFIC
    reduced: SwitchTraffic = NO_TRAFFIC


def collective_flows(
    network: Network,
    seats: IntArray,
    layout: Layout,
    work: Collective,
    algorithm: Algorithm,
    price_s: float,
    *,
    stage: int | None = None,
    crossing: float = 1.0,
) -> FlowSet:
    """Return the flows of *work* while all ranks of *stage* (None: all ranks) run it; alone each takes *price_s*.

    *seats* is the GPU of each rank. Of groups that span stages, what the ranks of *stage* send counts.
    """
    members = members_of(layout, work.group, stage)
    mesh = network.cluster.node.fabric.kind is FabricKind.NVLINK_MESH
    groups = Groups(seats[members], network.cluster.domain_gpus, mesh)
    by_sender = network.topology.routing is not NetworkRouting.SPRAY and work.kind is CollectiveKind.ALL_TO_ALL
    size = float(work.total_bytes)
    traffic = collective_traffic(work.kind, algorithm, size, groups, by_sender=by_sender, crossing=crossing)
    rings = (Algorithm.RING, Algorithm.HIERARCHICAL, Algorithm.TREE)
    if network.topology.kind is NetworkKind.TORUS and algorithm in rings:
        traffic = traffic._replace(messages=_along_axes(network, traffic.messages))
    if stage is not None and _spans_stages(work.group):
        stage_gpus = seats[_stage_ranks(layout, stage)]
        messages, added, reduced = traffic
        traffic = CollectiveTraffic(
            take_rows(messages, np.isin(messages.source, stage_gpus)),
            take_rows(added, np.isin(added.gpu, stage_gpus)),
            take_rows(reduced, np.isin(reduced.gpu, stage_gpus)),
        )
    flows = groups.members.size if by_sender else groups.count
    return _flow_set(network, traffic, np.arange(flows) // (groups.ranks if by_sender else 1), price_s)


def transfer_flows(
    network: Network, seats: IntArray, layout: Layout, work: Transfer, price_s: float, *, stage: int | None = None
) -> FlowSet:
    """Return a flow for each rank of *stage* (None: all) that sends *work* to its peer."""
    spans = _spans_stages(work.group)
    members = members_of(layout, work.group, None if spans else stage)
    source, target = members.ravel(), np.roll(members, -work.peer_offset, axis=1).ravel()
    if stage is not None and spans:
        in_stage = np.isin(source, _stage_ranks(layout, stage))
        source, target = source[in_stage], target[in_stage]
    return message_flows(network, seats[source], seats[target], np.full(len(source), float(work.size_bytes)), price_s)


def message_flows(
    network: Network, source: IntArray, target: IntArray, size_bytes: FloatArray, price_s: float
) -> FlowSet:
    """Return a flow for each message from GPU *source* to GPU *target*."""
    flow = np.arange(len(source))
    return _flow_set(network, CollectiveTraffic(GpuMessages(flow, source, target, size_bytes)), flow, price_s)


@lru_cache(maxsize=256)
def members_of(layout: Layout, family: str, stage: int | None = None) -> IntArray:
    """Return the ranks of every group of *family*, a group a row, or of those within *stage*.

    The middle stage of an odd number mirrors itself: such a group of one exchanges nothing and is left out.
    """
    copies = layout.group_copies(family)
    size = max(len(offsets) for _, offsets in copies)
    rows = [
        np.asarray(firsts)[:, None] + np.asarray(offsets)[None, :] for firsts, offsets in copies if len(offsets) == size
    ]
    members: IntArray = np.concatenate(rows)
    if stage is not None and not _spans_stages(family):
        members = members[np.isin(members[:, 0], _stage_ranks(layout, stage))]
    members.setflags(write=False)
    return members


def _spans_stages(family: str) -> bool:
    return "pp" in FAMILIES[PARTS.get(family, family)][1]


def _stage_ranks(layout: Layout, stage: int) -> IntArray:
    stride, stages = layout.stride("pp"), layout.pp
    return np.flatnonzero(np.arange(layout.gpus) // stride % stages == stage)


def _along_axes(network: Network, messages: GpuMessages) -> GpuMessages:
    """Send what leaves a domain to the group's next along each dimension, both ways: on a torus rings run
    along lines. Where a group has no lines, its ring is unchanged.
    """
    size = network.cluster.domain_gpus
    leaving = messages.source // size != messages.target // size
    cells = int(max(messages.source.max(initial=0), messages.target.max(initial=0))) // size + 1
    place, index = np.unique(messages.flow[leaving] * cells + messages.source[leaving] // size, return_inverse=True)
    left = np.bincount(index, messages.size_bytes[leaving])
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
    near, far = (np.concatenate(column) for column in zip(*ends, strict=True))
    ways = np.bincount(near, minlength=len(cell))
    if (ways == 0).any():
        return messages
    half = (left / ways)[near] / 2
    forth = GpuMessages(flow[near], cell[near] * size, cell[far] * size, half)
    back = GpuMessages(flow[near], cell[far] * size, cell[near] * size, half)
    return join_rows([take_rows(messages, ~leaving), forth, back], NO_MESSAGES)


def _flow_set(network: Network, traffic: CollectiveTraffic, group: IntArray, price_s: float) -> FlowSet:
    links = network.links
    first, link, size = _sum_on_links(network, traffic, len(group))
    is_own = np.isin(links.tier[link], [links.tiers.index(tier) for tier in OWN_TIERS if tier in links.tiers])
    if network.alive is None:
        limited = np.minimum(size, links.capacity_bytes_per_s[link] * price_s)
        return FlowSet.of(first, link, np.where(is_own, limited, size), group=group)
    # The price knows no link that failed or is slow: flows are scaled as if all of them worked.
    healthy = _flow_set(network.healthy, traffic, group, price_s)
    healthy_bytes = _sum_on_links(network.healthy, traffic, len(group))[2]
    share = np.ones(len(group))
    np.minimum.at(share, healthy.flow, healthy.bytes_on / np.where(healthy_bytes > 0, healthy_bytes, 1.0))
    flow = np.repeat(np.arange(len(group)), np.diff(first))
    return FlowSet.of(first, link, np.where(is_own, size * share[flow], size), group=group)


def _sum_on_links(network: Network, traffic: CollectiveTraffic, flows: int) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the links of each flow from ``first[flow]`` on, each once, and the bytes on them."""
    messages = traffic.messages
    routed = routes(network, messages.source, messages.target)
    sent = LinkShares(messages.flow[routed.row], routed.link, routed.share * messages.size_bytes[routed.row])
    in_switches = _through_ports(network, traffic.added), _through_switches(network, traffic.reduced)
    return sum_shares(*join_rows([sent, *in_switches], NO_SHARES), flows, len(network.links))


def _through_ports(network: Network, added: SwitchTraffic) -> LinkShares:
    """Return sums within a node over the ports on its switches."""
    if not len(added.flow):
        return NO_SHARES
    shares = over_ports(network, np.arange(len(added.flow)), added.gpu, added.gpu)
    check_working(network, shares)
    up = network["port up"]
    sent = (shares.link >= up.start) & (shares.link < up.start + up.size)
    size = np.where(sent, added.sent_bytes[shares.row], added.received_bytes[shares.row])
    return LinkShares(added.flow[shares.row], shares.link, shares.share * size)


def _through_switches(network: Network, reduced: SwitchTraffic) -> LinkShares:
    """Return sums in the network: each node sends to its leaf, and each leaf of a group its sum to the spines."""
    if not len(reduced.flow):
        return NO_SHARES
    nics = network.cluster.node.nics
    slot, share = network.nic_slots
    node, local = np.divmod(reduced.gpu, network.cluster.node.gpus)
    index, column = np.nonzero(share[local])
    part = share[local[index], column]
    nic, node = slot[local[index], column], node[index]
    flow = reduced.flow[index]
    sent, received = reduced.sent_bytes[index] * part, reduced.received_bytes[index] * part
    parts = [
        entries(flow, network["nic up"].links_at(node, nic), sent),
        entries(flow, network["nic down"].links_at(node, nic), received),
    ]
    if "leaf up" in network.blocks:
        leaf = network.leaf_of(node * nics + nic)
        parts += _upward(network, "leaf", leaf, flow, node, sent)
        if "core up" in network.blocks:
            parts += _upward(network, "core", network.pod_of(leaf), flow, node, sent)
    shares = join_rows(parts, NO_SHARES)
    check_working(network, shares)
    return shares


def _upward(
    network: Network, tier: str, switch: IntArray, flow: IntArray, node: IntArray, sent_bytes: FloatArray
) -> list[LinkShares]:
    """Return the sums that switches send up, spread over their links, and the totals that come down again.

    All nodes of a group send as much, and the switch adds them, so it sends up what it gets from one node.
    """
    count, nodes = int(switch.max()) + 1, network.nodes
    distinct, where = np.unique(flow * count + switch, return_inverse=True)
    node_of, index = np.unique(where * nodes + node, return_inverse=True)
    largest = np.zeros(len(distinct))
    np.maximum.at(largest, node_of // nodes, np.bincount(index, sent_bytes))
    flow, above = np.divmod(distinct, count)
    has_several = np.bincount(flow)[flow] > 1  # a group below one switch is done there
    flow, above, size = flow[has_several], above[has_several], largest[has_several]
    blocks = [network[f"{tier} {direction}"] for direction in ("up", "down")]
    ways = prod(blocks[0].shape[1:])
    places = np.unravel_index(np.arange(ways), blocks[0].shape[1:])
    return [
        entries(
            np.repeat(flow, ways),
            block.links_at(np.repeat(above, ways), *(np.tile(place, len(flow)) for place in places)),
            np.repeat(size / ways, ways),
        )
        for block in blocks
    ]


# Bytes that a collective moves between its ranks, for all groups of a family at once.


class Groups:
    """Groups of as many members each: the GPUs of one in a row, those of a scale-up domain next to each other.

    *mesh*: each two GPUs of a node have a link of their own.
    """

    def __init__(self, members: IntArray, domain_gpus: int, mesh: bool = False) -> None:
        order = np.argsort(members // domain_gpus, axis=1, kind="stable")
        self.members: IntArray = np.take_along_axis(members, order, axis=1)  # groups x members
        self.mesh, self.count, self.ranks = mesh, int(members.shape[0]), int(members.shape[1])
        domain = self.members // domain_gpus
        starts_node = np.ones(domain.shape, bool)
        starts_node[:, 1:] = domain[:, 1:] != domain[:, :-1]
        # Of each member: its GPU, its group, and its node, counted over all groups.
        self.gpu = self.members.ravel()
        self.flow = np.arange(len(self.gpu)) // self.ranks
        self.node: IntArray = np.cumsum(starts_node.ravel()) - 1
        # Of each node: its number of members, the first of them, its group and the nodes of that.
        self.node_size = np.bincount(self.node)
        self.first = _starts(self.node_size)
        self.group = self.first // self.ranks
        # Of each group: its number of nodes, and the first of them.
        self.nodes = np.bincount(self.group, minlength=self.count)
        self.start = _starts(self.nodes)
        # Of each node again: the number of nodes of its group, and its place among them.
        self.group_nodes = self.nodes[self.group]
        self.place = np.arange(len(self.node_size)) - self.start[self.group]

    def pair_messages(self, near: IntArray, far: IntArray, size_bytes: FloatArray | float) -> GpuMessages:
        """Return messages from node *near* to node *far*, shared evenly by their members, the i-th with the i-th."""
        channels = np.maximum(self.node_size[near], self.node_size[far])
        index, number = _count_up(channels)
        source, target = (self.gpu[self.first[end[index]] + number % self.node_size[end[index]]] for end in (near, far))
        size = np.broadcast_to(np.asarray(size_bytes, np.float64), near.shape)
        return GpuMessages(self.group[near[index]], source, target, size[index] / channels[index])

    def ring_messages(self, size_bytes: FloatArray) -> GpuMessages:
        """Return messages of each member round its node, *size_bytes* by node: to the next there, or, where
        each two have a link of their own, evenly to all others.
        """
        node_members = self.node_size[self.node]
        size = size_bytes[self.node]
        senders = np.flatnonzero((node_members > 1) & (size > 0))
        peers = node_members[senders] - 1 if self.mesh else np.ones(len(senders), np.int64)
        index, number = _count_up(peers)
        member = senders[index]
        first = self.first[self.node[member]]
        peer = first + (member - first + number + 1) % node_members[member]
        return GpuMessages(member // self.ranks, self.gpu[member], self.gpu[peer], size[member] / peers[index])

    def rings(self, node_bytes: FloatArray, senders: IntArray, ring_bytes: FloatArray | float) -> GpuMessages:
        """Return messages of each member round its node, and of *senders*, nodes, each to the next of its group; after
        the last comes the first.
        """
        following = (self.start[self.group] + (self.place + 1) % self.group_nodes)[senders]
        between = self.pair_messages(senders, following, ring_bytes)
        return join_rows([self.ring_messages(node_bytes), between], NO_MESSAGES)


def _starts(counts: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)


def _count_up(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return each index as often as its count says, and the numbers from 0 within each."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def collective_traffic(
    kind: CollectiveKind,
    algorithm: Algorithm,
    size_bytes: float,
    groups: Groups,
    *,
    by_sender: bool = False,
    crossing: float = 1.0,
) -> CollectiveTraffic:
    """Return what *groups* move for a collective of *size_bytes* each.

    *by_sender*: a flow for each sender of an exchange, not for each group. *crossing*: the share of an
    exchange's bytes between nodes that crosses the network, where tokens cross it once for each node.
    """
    if kind is CollectiveKind.BARRIER:
        kind = CollectiveKind.ALL_REDUCE
    members, nodes = groups.node_size, groups.group_nodes
    match algorithm:
        case Algorithm.RING:
            return CollectiveTraffic(_ring(kind, size_bytes, groups))
        case Algorithm.TREE:  # chains within each node, as many as it has members, and two trees between nodes
            chains = groups.ring_messages(PASSES[kind] * size_bytes * (members - 1) / members)
            return CollectiveTraffic(join_rows([chains, _double_tree(kind, size_bytes, groups)], NO_MESSAGES))
        case Algorithm.HIERARCHICAL if kind is not CollectiveKind.ALL_TO_ALL:
            # Rings within the nodes, and rings of the members of one position between them.
            node_bytes, ring_bytes = (ROUNDS[kind] * (size - 1) / size * size_bytes for size in (members, nodes))
            senders = np.flatnonzero(nodes > 1)
            return CollectiveTraffic(groups.rings(node_bytes, senders, ring_bytes[senders]))
        case Algorithm.HIERARCHICAL:
            return CollectiveTraffic(_staged_exchange(size_bytes, groups, crossing))
        case Algorithm.PAIRWISE:
            return CollectiveTraffic(_pairwise(size_bytes, groups, by_sender, crossing))
        case Algorithm.DIRECT:  # gather and scatter: all parts but its own to or from the first rank
            peers = groups.ranks - 1
            ends = groups.members[:, 1:].ravel(), np.repeat(groups.members[:, 0], peers)
            source, target = reversed(ends) if kind is CollectiveKind.SCATTER else ends
            flow = np.repeat(np.arange(groups.count), peers)
            return CollectiveTraffic(GpuMessages(flow, source, target, np.full(len(flow), size_bytes / groups.ranks)))
        case Algorithm.NVLS:
            return CollectiveTraffic(added=_nvls(kind, size_bytes, groups))
        case Algorithm.NVLS_TREE:
            return CollectiveTraffic(_double_tree(kind, size_bytes, groups), _nvls(kind, size_bytes, groups))
        case Algorithm.IN_NETWORK:
            ring_messages = groups.ring_messages(2 * (members - 1) / members * size_bytes)
            part = size_bytes / members[groups.node]
            return CollectiveTraffic(ring_messages, reduced=SwitchTraffic(groups.flow, groups.gpu, part, part))


def _ring(kind: CollectiveKind, size_bytes: float, groups: Groups) -> GpuMessages:
    """Return messages of as many rings as a node has members, each entering and leaving it by another NIC: a member
    sends to its neighbour all but what leaves the node at it. A chain is a ring that is not closed.
    """
    closed = kind in ROUNDS
    n = groups.ranks
    ring_bytes = ROUNDS[kind] * (n - 1) / n * size_bytes if closed else size_bytes
    alone = groups.group_nodes == 1
    node_bytes = np.where(alone & closed, ring_bytes, ring_bytes * (groups.node_size - 1) / groups.node_size)
    senders = np.flatnonzero(~alone & (closed | (groups.place < groups.group_nodes - 1)))
    return groups.rings(node_bytes, senders, ring_bytes)


def _double_tree(kind: CollectiveKind, size_bytes: float, groups: Groups) -> GpuMessages:
    """Return messages of two trees with half of the buffer each: up, down, or both."""
    parts: list[GpuMessages] = []
    for nodes in np.unique(groups.nodes[groups.nodes > 1]).tolist():
        start = groups.start[groups.nodes == nodes][:, None]
        for parents in double_tree(nodes):
            child = np.flatnonzero(parents >= 0)
            near, far = (start + child).ravel(), (start + parents[child]).ravel()
            if kind is not CollectiveKind.BROADCAST:
                parts.append(groups.pair_messages(near, far, size_bytes / 2))
            if kind is not CollectiveKind.REDUCE:
                parts.append(groups.pair_messages(far, near, size_bytes / 2))
    return join_rows(parts, NO_MESSAGES)


def double_tree(nodes: int) -> tuple[IntArray, IntArray]:
    """Return each node's parent in two binary trees, -1 for the root: an inner node of one is a leaf in the other.

    The first is NCCL's (src/graph/trees.cc): a node's lowest set bit is its height. The second is its mirror
    image, or, of an odd number of nodes, the same moved on by one.
    """
    number = np.arange(nodes)
    parents = np.full(nodes, -1)
    low = number & -number
    for node in range(1, nodes):
        bit = int(low[node])
        parent = (node ^ bit) | (bit << 1)
        parents[node] = parent if parent < nodes else node ^ bit
    if nodes % 2 == 0:
        return parents, np.where(parents[::-1] >= 0, nodes - 1 - parents[::-1], -1)
    moved_on = np.roll(parents, 1)
    return parents, np.where(moved_on >= 0, (moved_on + 1) % nodes, -1)


def _staged_exchange(size_bytes: float, groups: Groups, crossing: float) -> GpuMessages:
    """Return messages of an exchange between the ranks of one position, then within the nodes."""
    members = groups.node_size
    senders, number = _count_up(groups.group_nodes - 1)  # each node with each other of its group
    group = groups.group[senders]
    receivers = groups.start[group] + (groups.place[senders] + number + 1) % groups.nodes[group]
    between = groups.pair_messages(senders, receivers, size_bytes * members[senders] / groups.nodes[group] * crossing)
    return join_rows([groups.ring_messages((members - 1) / members * size_bytes), between], NO_MESSAGES)


def _pairwise(size_bytes: float, groups: Groups, by_sender: bool, crossing: float) -> GpuMessages:
    """Return messages of each rank to every other, 1/n of its buffer.

    Where tokens cross once for each node, they cross to the rank of the sender's position there, which hands
    them on to all that they are for.
    """
    n = groups.ranks
    if groups.count * n * (n - 1) > MOST_PAIRS:
        return _staged_exchange(size_bytes, groups, crossing)
    member = np.repeat(np.arange(len(groups.gpu)), n - 1)
    ahead = np.tile(np.arange(1, n), len(groups.gpu))
    group = member // n
    peer = group * n + (member - group * n + ahead) % n
    flow = member if by_sender else group
    size = np.full(len(member), size_bytes / n)
    if crossing == 1:
        return GpuMessages(flow, groups.gpu[member], groups.gpu[peer], size)
    away = groups.node[member] != groups.node[peer]
    first = groups.first[groups.node[peer]]
    place = member - groups.first[groups.node[member]]
    handing = np.where(away, first + place % groups.node_size[groups.node[peer]], member)
    onward = take_rows(GpuMessages(flow, groups.gpu[handing], groups.gpu[peer], size), handing != peer)
    across = take_rows(GpuMessages(flow, groups.gpu[member], groups.gpu[handing], size * crossing), away)
    return join_rows([across, onward], NO_MESSAGES)


def _nvls(kind: CollectiveKind, size_bytes: float, groups: Groups) -> SwitchTraffic:
    """Return traffic of a switch that fetches a part from all ranks for the one in charge, and spreads its result."""
    members = groups.node_size[groups.node]
    fetched = np.full(len(groups.gpu), size_bytes if kind is not CollectiveKind.ALL_GATHER else 0.0)
    spread = np.full(len(groups.gpu), size_bytes if kind is not CollectiveKind.REDUCE_SCATTER else 0.0)
    sent, received = fetched + spread / members, spread + fetched / members
    return take_rows(SwitchTraffic(groups.flow, groups.gpu, sent, received), members > 1)
