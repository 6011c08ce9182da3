"""What a collective moves between which of its ranks, in bytes: columns for all groups of a family at once.

One group's members are paced together, so all that a group moves is one flow; the senders of an exchange may
be told apart. Volumes are those of the algorithms' prices (``ring.py``, ``tree.py``, ``in_switch.py``,
``exchange.py``): what each pays for is what is moved here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepcast.cost.collectives.choose import Algorithm
from stepcast.cost.collectives.ring import ROUNDS
from stepcast.cost.collectives.tree import PASSES
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.work import CollectiveKind

MOST_PAIRS = 8_000_000  # of an exchange; beyond them ranks of the same place in their nodes talk


class Moves(NamedTuple):
    """Messages between GPUs: of which flow, from where to where, and how many bytes."""

    flow: IntArray
    source: IntArray
    target: IntArray
    size_bytes: FloatArray

    def only(self, here: NDArray[np.bool_]) -> "Moves":
        return Moves(self.flow[here], self.source[here], self.target[here], self.size_bytes[here])


class Through(NamedTuple):
    """What GPUs send to their switch and receive from it, which adds or spreads it, in bytes."""

    flow: IntArray
    gpu: IntArray
    sent_bytes: FloatArray
    received_bytes: FloatArray

    def only(self, here: NDArray[np.bool_]) -> "Through":
        return Through(self.flow[here], self.gpu[here], self.sent_bytes[here], self.received_bytes[here])


class Moved(NamedTuple):
    """All that a collective moves; ``added`` goes to switches within nodes, ``reduced`` to those between."""

    moves: Moves
    added: Through
    reduced: Through


NONE: IntArray = np.zeros(0, np.int64)
NO_MOVES = Moves(NONE, NONE, NONE, np.zeros(0))
NO_THROUGH = Through(NONE, NONE, np.zeros(0), np.zeros(0))


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of as many members each: the GPUs of one in a row, those of a scale-up domain side by side."""

    members: IntArray  # groups x members
    domain_gpus: int
    mesh: bool = False  # whether each two GPUs of a node have a link of their own

    @classmethod
    def of(cls, members: IntArray, domain_gpus: int, mesh: bool = False) -> "Groups":
        order = np.argsort(members // domain_gpus, axis=1, kind="stable")
        return cls(np.take_along_axis(members, order, axis=1), domain_gpus, mesh)

    @property
    def ranks(self) -> int:
        return int(self.members.shape[1])

    @property
    def count(self) -> int:
        return int(self.members.shape[0])

    @cached_property
    def gpu(self) -> IntArray:
        return self.members.ravel()

    @cached_property
    def node(self) -> IntArray:
        """For each member its node, counted over all groups."""
        domain = self.members // self.domain_gpus
        new = np.ones(domain.shape, bool)
        new[:, 1:] = domain[:, 1:] != domain[:, :-1]
        numbers: IntArray = np.cumsum(new.ravel()) - 1
        return numbers

    @cached_property
    def held(self) -> IntArray:
        """Members on each node."""
        return np.bincount(self.node)

    @cached_property
    def first(self) -> IntArray:
        """The first member of each node."""
        return np.concatenate([[0], np.cumsum(self.held)[:-1]]).astype(np.int64)

    @cached_property
    def group(self) -> IntArray:
        """The group of each node."""
        return self.first // self.ranks

    @cached_property
    def nodes(self) -> IntArray:
        """How many nodes each group is on."""
        return np.bincount(self.group, minlength=self.count)

    @cached_property
    def start(self) -> IntArray:
        """The first node of each group."""
        return np.concatenate([[0], np.cumsum(self.nodes)[:-1]]).astype(np.int64)

    @cached_property
    def place(self) -> IntArray:
        """The place of each node in its group."""
        return np.arange(len(self.held)) - self.start[self.group]

    def shared(self, near: IntArray, far: IntArray, size_bytes: FloatArray | float) -> Moves:
        """From node *near* to node *far*, shared evenly by their members, the i-th with the i-th."""
        channels = np.maximum(self.held[near], self.held[far])
        at = np.repeat(np.arange(len(near)), channels)
        number = np.arange(len(at)) - np.repeat(np.cumsum(channels) - channels, channels)
        source = self.gpu[self.first[near[at]] + number % self.held[near[at]]]
        target = self.gpu[self.first[far[at]] + number % self.held[far[at]]]
        size = np.broadcast_to(np.asarray(size_bytes, np.float64), near.shape)
        return Moves(self.group[near[at]], source, target, size[at] / channels[at])

    def around(self, size_bytes: FloatArray) -> Moves:
        """Each member sends *size_bytes* (told for each node) round its node: to the next there, or, where
        each two have a link of their own, evenly to all others.
        """
        held = self.held[self.node]
        size = size_bytes[self.node]
        at = np.flatnonzero((held > 1) & (size > 0))
        peers = held[at] - 1 if self.mesh else np.ones(len(at), np.int64)
        member = np.repeat(at, peers)
        ahead = np.arange(len(member)) - np.repeat(np.cumsum(peers) - peers, peers) + 1
        first = self.first[self.node[member]]
        other = first + (member - first + ahead) % held[member]
        sent = size[member] / np.repeat(peers, peers)
        return Moves(member // self.ranks, self.gpu[member], self.gpu[other], sent)

    def next_node(self) -> IntArray:
        """For each node the next of its group; after the last comes the first."""
        return self.start[self.group] + (self.place + 1) % self.nodes[self.group]


def moved(
    kind: CollectiveKind,
    algorithm: Algorithm,
    size_bytes: float,
    groups: Groups,
    *,
    by_sender: bool = False,
    crossing: float = 1.0,
) -> Moved:
    """What *groups* move for a collective of *size_bytes* each.

    *by_sender*: a flow for each sender of an exchange, not for each group. *crossing*: the share of an
    exchange's bytes between nodes that crosses the network, where tokens cross it once for each node.
    """
    if kind is CollectiveKind.BARRIER:
        kind = CollectiveKind.ALL_REDUCE
    match algorithm:
        case Algorithm.RING:
            found = _ring(kind, size_bytes, groups)
        case Algorithm.TREE:
            found = _tree(PASSES[kind], kind, size_bytes, groups)
        case Algorithm.HIERARCHICAL if kind is not CollectiveKind.ALL_TO_ALL:
            found = _hierarchical(ROUNDS[kind], size_bytes, groups)
        case Algorithm.HIERARCHICAL:
            found = _staged(size_bytes, groups, crossing)
        case Algorithm.PAIRWISE:
            found = _pairwise(size_bytes, groups, by_sender, crossing)
        case Algorithm.DIRECT:
            found = _rooted(kind, size_bytes, groups)
        case Algorithm.NVLS:
            return Moved(NO_MOVES, _added(kind, size_bytes, groups), NO_THROUGH)
        case Algorithm.NVLS_TREE:
            between = _double_tree(2, CollectiveKind.ALL_REDUCE, size_bytes, groups)
            return Moved(between, _added(kind, size_bytes, groups), NO_THROUGH)
        case Algorithm.IN_NETWORK:
            held = groups.held
            moves = groups.around(2 * (held - 1) / held * size_bytes)
            each = size_bytes / held[groups.node]
            member = np.arange(len(groups.gpu))
            return Moved(moves, NO_THROUGH, Through(member // groups.ranks, groups.gpu, each, each))
    return Moved(found, NO_THROUGH, NO_THROUGH)


def _ring(kind: CollectiveKind, size_bytes: float, groups: Groups) -> Moves:
    """As many rings as a node has members, each entering and leaving it by the NIC of another: a member sends
    to its neighbour all but what leaves the node at it. A chain is a ring that is not closed.
    """
    closed = kind in ROUNDS
    n = groups.ranks
    passed = ROUNDS[kind] * (n - 1) / n * size_bytes if closed else size_bytes
    alone = groups.nodes[groups.group] == 1
    inside = np.where(alone & closed, passed, passed * (groups.held - 1) / groups.held)
    near = np.flatnonzero(~alone & (closed | (groups.place < groups.nodes[groups.group] - 1)))
    return joined_moves([groups.around(inside), groups.shared(near, groups.next_node()[near], passed)])


def _tree(passes: int, kind: CollectiveKind, size_bytes: float, groups: Groups) -> Moves:
    """A chain within each node, as many as it has members, and two trees between nodes."""
    inside = passes * size_bytes * (groups.held - 1) / groups.held
    return joined_moves([groups.around(inside), _double_tree(passes, kind, size_bytes, groups)])


def _double_tree(passes: int, kind: CollectiveKind, size_bytes: float, groups: Groups) -> Moves:
    """Two trees with half of the buffer each: up, down, or both."""
    parts: list[Moves] = []
    for nodes in np.unique(groups.nodes).tolist():
        if nodes == 1:
            continue
        start = groups.start[groups.nodes == nodes][:, None]
        for parents in double_tree(nodes):
            child = np.flatnonzero(parents >= 0)
            near, far = (start + child).ravel(), (start + parents[child]).ravel()
            if passes == 2 or kind is CollectiveKind.REDUCE:
                parts.append(groups.shared(near, far, size_bytes / 2))
            if passes == 2 or kind is not CollectiveKind.REDUCE:
                parts.append(groups.shared(far, near, size_bytes / 2))
    return joined_moves(parts)


def double_tree(nodes: int) -> tuple[IntArray, IntArray]:
    """Each node's parent in two binary trees, -1 for the root: who is inner in one is a leaf in the other.

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
        mirrored = np.where(parents[::-1] >= 0, nodes - 1 - parents[::-1], -1)
        return parents, mirrored
    moved_on = np.roll(parents, 1)
    return parents, np.where(moved_on >= 0, (moved_on + 1) % nodes, -1)


def _hierarchical(rounds: int, size_bytes: float, groups: Groups) -> Moves:
    """Rings within the nodes, and rings of the members of one place between them."""
    held, nodes = groups.held, groups.nodes[groups.group]
    inside = rounds * (held - 1) / held * size_bytes
    near = np.flatnonzero(nodes > 1)
    passed = (rounds * (nodes - 1) / nodes * size_bytes)[near]
    return joined_moves([groups.around(inside), groups.shared(near, groups.next_node()[near], passed)])


def _staged(size_bytes: float, groups: Groups, crossing: float) -> Moves:
    """An exchange between the ranks of one place, then within the nodes."""
    held = groups.held
    near, far = _node_pairs(groups)
    between = size_bytes * held[near] / groups.nodes[groups.group[near]] * crossing
    return joined_moves([groups.around((held - 1) / held * size_bytes), groups.shared(near, far, between)])


def _node_pairs(groups: Groups) -> tuple[IntArray, IntArray]:
    """Each node with each other of its group."""
    others = groups.nodes[groups.group] - 1
    near = np.repeat(np.arange(len(groups.held)), others)
    ahead = np.arange(len(near)) - np.repeat(np.cumsum(others) - others, others) + 1
    group = groups.group[near]
    return near, groups.start[group] + (groups.place[near] + ahead) % groups.nodes[group]


def _pairwise(size_bytes: float, groups: Groups, by_sender: bool, crossing: float) -> Moves:
    """Each rank sends 1/n of its buffer to every other.

    Where tokens cross once for each node, they cross to the rank of the sender's place there, which hands
    them on to all that they are for.
    """
    n = groups.ranks
    if groups.count * n * (n - 1) > MOST_PAIRS:
        return _staged(size_bytes, groups, crossing)
    member = np.repeat(np.arange(len(groups.gpu)), n - 1)
    ahead = np.tile(np.arange(1, n), len(groups.gpu))
    group = member // n
    other = group * n + (member - group * n + ahead) % n
    flow = member if by_sender else group
    size = np.full(len(member), size_bytes / n)
    if crossing == 1:
        return Moves(flow, groups.gpu[member], groups.gpu[other], size)
    away = groups.node[member] != groups.node[other]
    first = groups.first[groups.node[other]]
    place = member - groups.first[groups.node[member]]
    handing = np.where(away, first + place % groups.held[groups.node[other]], member)
    onward = Moves(flow, groups.gpu[handing], groups.gpu[other], size).only(handing != other)
    across = Moves(flow, groups.gpu[member], groups.gpu[handing], size * crossing).only(away)
    return joined_moves([across, onward])


def _rooted(kind: CollectiveKind, size_bytes: float, groups: Groups) -> Moves:
    """Gather and scatter: all parts but its own to or from the first rank."""
    n = groups.ranks
    root = np.repeat(groups.members[:, 0], n - 1)
    others = groups.members[:, 1:].ravel()
    ends = (root, others) if kind is CollectiveKind.SCATTER else (others, root)
    flow = np.repeat(np.arange(groups.count), n - 1)
    return Moves(flow, *ends, np.full(len(flow), size_bytes / n))


def _added(kind: CollectiveKind, size_bytes: float, groups: Groups) -> Through:
    """NVLS: the switch fetches a part from all ranks for the one in charge, and spreads what that writes."""
    held = groups.held[groups.node]
    fetched = np.full(len(groups.gpu), size_bytes if kind is not CollectiveKind.ALL_GATHER else 0.0)
    spread = np.full(len(groups.gpu), size_bytes if kind is not CollectiveKind.REDUCE_SCATTER else 0.0)
    member = np.arange(len(groups.gpu))
    sent, received = fetched + spread / held, spread + fetched / held
    many = held > 1
    return Through(member[many] // groups.ranks, groups.gpu[many], sent[many], received[many])


def joined_moves(parts: Iterable[Moves]) -> Moves:
    listed: Sequence[Moves] = [part for part in parts if len(part.flow)]
    if not listed:
        return NO_MOVES
    return Moves(*(np.concatenate(column) for column in zip(*listed, strict=True)))
