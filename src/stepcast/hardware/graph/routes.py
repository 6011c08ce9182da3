"""The links that messages between GPUs take, many messages at once."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepcast.hardware.cluster import Cluster, FabricKind, NetworkKind, NetworkRouting
from stepcast.hardware.graph.network import Network
from stepcast.hardware.placement import Place, placed
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.layout import Layout

# Entries of routes: which link carries which share of a message.


class RouteError(ValueError):
    """No way leads from one place to another."""


class Ways(NamedTuple):
    """Entries in any order: message *row* puts *share* of its bytes on *link*."""

    row: IntArray
    link: IntArray
    share: FloatArray


NO_WAYS = Ways(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def all_of(parts: Iterable[Ways]) -> Ways:
    listed = [part for part in parts if len(part.row)]
    if not listed:
        return NO_WAYS
    return Ways(*(np.concatenate(column) for column in zip(*listed, strict=True)))


def entries(row: IntArray, link: IntArray, share: FloatArray | float = 1.0) -> Ways:
    return Ways(row, link, np.broadcast_to(np.asarray(share, np.float64), row.shape))


def summed(
    row: IntArray, link: IntArray, amount: FloatArray, rows: int, links: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Entries sorted by row and link, with the amounts of each link of a row added up."""
    key = row * links + link
    order = np.argsort(key, kind="stable")
    key = key[order]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else order
    sums = np.add.reduceat(amount[order], starts) if len(key) else np.zeros(0)
    kept_row, kept_link = np.divmod(key[starts], links)
    first = np.concatenate([[0], np.cumsum(np.bincount(kept_row, minlength=rows))])
    return first.astype(np.int64), kept_link, sums


def hashed(seed: int, *keys: IntArray) -> IntArray:
    """62 bits for each row of *keys* that look drawn (splitmix64: Steele, Lea and Flood, 2014)."""
    state = np.full(len(keys[0]), seed, np.uint64)
    for key in keys:
        with np.errstate(over="ignore"):
            state = (state ^ key.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    return (state >> np.uint64(2)).astype(np.int64)


# Which GPU each rank of a job has.


def seats_of(cluster: Cluster, layout: Layout, place: Place = Place.EVEN) -> IntArray:
    """The GPU of each rank of a job that has the cluster from its first node on."""
    whole = (layout.tp, layout.expert_tp_size * layout.ep, layout.tp * layout.cp)
    placement = placed(place, cluster, layout.gpus, whole)
    ranks, size = np.arange(layout.gpus), cluster.domain_gpus
    seats = np.empty_like(ranks)
    for region in placement.regions(size):
        here = (ranks >= region.start) & (ranks < region.stop)
        away, local = np.divmod(ranks[here] - region.start, region.held)
        seats[here] = (region.domain + away) * size + local
    return seats


def seats_on(cluster: Cluster, nodes: Sequence[int], ranks: int) -> IntArray:
    """The GPU of each rank of a job that fills *nodes* in their order."""
    gpus = cluster.node.gpus
    if len(set(nodes)) != len(nodes) or any(node < 0 for node in nodes):
        raise ValueError(f"nodes must be counted from 0 and given once each, not {list(nodes)}")
    if ranks > len(nodes) * gpus:
        raise ValueError(f"{ranks} ranks need {-(-ranks // gpus)} nodes of {gpus} GPUs, not {len(nodes)}")
    node, local = np.divmod(np.arange(ranks), gpus)
    return np.asarray(nodes, np.int64)[node] * gpus + local


# Ways through a tree of switches: which spine, and which core switch, each message takes.

BLOCK = 4096  # messages whose ways are listed at once


def switched(network: Network, source: IntArray, target: IntArray, keys: IntArray) -> Ways:
    """From NIC *source* to NIC *target*, over leaves, spines and cores; the NICs' own links are not told."""
    below, above = network.leaf_of(source), network.leaf_of(target)
    crossing = np.flatnonzero(below != above)
    if not len(crossing) or "leaf up" not in network.blocks:
        return NO_WAYS
    queue_pairs = 1 if network.topology.routing is NetworkRouting.SPRAY else network.topology.queue_pairs
    row = np.repeat(crossing, queue_pairs)
    key = keys[row] * queue_pairs + np.tile(np.arange(queue_pairs), len(crossing))
    hashes = hashed(network.topology.seed, source[row], target[row], key)
    load = np.zeros(len(network.links))
    parts = [
        _chosen(network, row[at], below[row[at]], above[row[at]], hashes[at], 1 / queue_pairs, load)
        for at in _blocks(len(row))
    ]
    return all_of(parts)


def _blocks(count: int) -> list[slice]:
    return [slice(start, start + BLOCK) for start in range(0, count, BLOCK)]


def _chosen(
    network: Network, row: IntArray, below: IntArray, above: IntArray, hashes: IntArray, share: float, load: FloatArray
) -> Ways:
    """The links of the way that the network's routing chooses, or of all ways. *load* is what links carry."""
    ways = network.spines * network.cores
    working = _working(network, below, above)
    if network.topology.routing is NetworkRouting.SPRAY:
        if ways == 1:
            return _over(network, row, below, above, np.zeros_like(row), np.full(len(row), share))
        at, way = np.nonzero(working) if working is not None else _every(len(row), ways)
        count = working.sum(axis=1)[at] if working is not None else np.full(len(at), ways)
        return _over(network, row[at], below[at], above[at], way, share / count)
    if network.topology.routing is NetworkRouting.ECMP:
        way = hashes % ways if working is None else _nth(working, hashes % working.sum(axis=1))
    else:
        way = _least_loaded(network, below, above, hashes, working, load)
    return _over(network, row, below, above, way, np.full(len(row), share))


def _every(rows: int, ways: int) -> tuple[IntArray, IntArray]:
    return np.repeat(np.arange(rows), ways), np.tile(np.arange(ways), rows)


def _nth(working: NDArray[np.bool_], number: IntArray) -> IntArray:
    """For each row the place of its *number*-th True."""
    found: IntArray = np.argmax(np.cumsum(working, axis=1) > number[:, None], axis=1)
    return found


def _over(network: Network, row: IntArray, below: IntArray, above: IntArray, way: IntArray, share: FloatArray) -> Ways:
    spine, core = way % network.spines, way // network.spines
    parts = [
        entries(row, network["leaf up"].at(below, spine), share),
        entries(row, network["leaf down"].at(above, spine), share),
    ]
    lower, upper = network.pod_of(below), network.pod_of(above)
    far = np.flatnonzero(lower != upper)
    if len(far):
        up = network["core up"].at(lower[far], spine[far], core[far])
        down = network["core down"].at(upper[far], spine[far], core[far])
        parts += [entries(row[far], up, share[far]), entries(row[far], down, share[far])]
    return all_of(parts)


def _working(network: Network, below: IntArray, above: IntArray) -> NDArray[np.bool_] | None:
    """For each message which ways work; None: all."""
    if network.alive is None:
        return None
    way = np.arange(network.spines * network.cores)[None, :]
    spine, core = way % network.spines, way // network.spines
    alive = network.alive
    working = alive[network["leaf up"].at(below[:, None], spine)]
    working = working & alive[network["leaf down"].at(above[:, None], spine)]
    if "core up" in network.blocks:
        lower, upper = network.pod_of(below)[:, None], network.pod_of(above)[:, None]
        through = alive[network["core up"].at(lower, spine, core)]
        through = through & alive[network["core down"].at(upper, spine, core)]
        working = working & (through | (lower == upper))
    lost = np.flatnonzero(~working.any(axis=1))
    if len(lost):
        left = network.links.name(int(network["leaf up"].at(below[lost[0]], 0)[0])).partition(" to ")[0]
        right = network.links.name(int(network["leaf up"].at(above[lost[0]], 0)[0])).partition(" to ")[0]
        raise RouteError(f"no way is left from {left} to {right}: a link of each has failed")
    return working


def _least_loaded(
    network: Network,
    below: IntArray,
    above: IntArray,
    hashes: IntArray,
    working: NDArray[np.bool_] | None,
    load: FloatArray,
) -> IntArray:
    """One message after the other, over the way whose fullest link is emptiest; a hash breaks ties."""
    ways = network.spines * network.cores
    way = np.arange(ways)
    spine, core = way % network.spines, way // network.spines
    worth = 1.0 / network.links.capacity_bytes_per_s
    pods = (network.pod_of(below), network.pod_of(above))
    chosen = np.empty(len(below), np.int64)
    for message in range(len(below)):
        on = [network["leaf up"].at(below[message], spine), network["leaf down"].at(above[message], spine)]
        lower, upper = (pod[message] for pod in pods)
        if lower != upper:
            on += [network["core up"].at(lower, spine, core), network["core down"].at(upper, spine, core)]
        full = np.max([load[links] + worth[links] for links in on], axis=0)
        if working is not None:
            full = np.where(working[message], full, np.inf)
        least = np.flatnonzero(full <= full.min() * (1 + 1e-9))
        best = int(least[hashes[message] % len(least)])
        chosen[message] = best
        for links in on:
            load[links[best]] += worth[links[best]]
    return chosen


# Ways without a tree of switches: along a torus, and through a dragonfly.


def along_torus(network: Network, source: IntArray, target: IntArray) -> Ways:
    """From domain to domain, one dimension after the other, each the shorter way round, or half each way
    where both are as long. A message that would meet a link that failed goes the other way round.
    """
    parts: list[Ways] = []
    here, row = source.copy(), np.arange(len(source))
    stride = 1
    for axis, size in enumerate(network.topology.shape):
        start, end = here // stride % size, target // stride % size
        ahead = (end - start) % size
        back = np.where(2 * ahead == size, 0.5, 2 * ahead > size)
        if network.alive is not None:
            back = _round_failures(network, here, start, ahead, back, axis, stride)
        for way, share in enumerate((1 - back, back)):
            left = np.where(ahead > 0, size - ahead if way else ahead, 0)
            for step in range(int(left[share > 0].max(initial=0))):
                moving = np.flatnonzero((step < left) & (share > 0))
                place = (start[moving] + (-step if way else step)) % size
                cell = here[moving] + (place - start[moving]) * stride
                parts.append(entries(row[moving], network["torus"].at(cell, axis, way), share[moving]))
        here = here + (end - start) * stride
        stride *= size
    return all_of(parts)


def _round_failures(
    network: Network, here: IntArray, start: IntArray, ahead: IntArray, back: FloatArray, axis: int, stride: int
) -> FloatArray:
    """The share of each message that goes backwards once ways with a failed link are left out."""
    assert network.alive is not None
    size = network.topology.shape[axis]
    broken = []
    for way in (0, 1):
        left = size - ahead if way else ahead
        found = np.zeros(len(here), bool)
        for step in range(size):
            place = (start + (-step if way else step)) % size
            link = network["torus"].at(here + (place - start) * stride, axis, way)
            found |= (ahead > 0) & (step < left) & ~network.alive[link]
        broken.append(found)
    both = np.flatnonzero(broken[0] & broken[1])
    if len(both):
        name = network.links.name(int(network["torus"].at(here[both[0]], axis, 0)[0]))
        told = name.partition(" along")[0]
        raise RouteError(f"no way is left from {told}: links both ways round have failed")
    return np.where(broken[0], 1.0, np.where(broken[1], 0.0, back))


class _Crossing(NamedTuple):
    """Messages of a dragonfly: their leaves, by which pod or switch they go, and by which switch they leave.

    Within a pod ``via`` is a switch, between pods a pod; that of the start means straight on.
    """

    row: IntArray
    here: IntArray
    there: IntArray
    via: IntArray
    gate: IntArray

    def at(self, which: IntArray) -> "_Crossing":
        return _Crossing(*(column[which] for column in self))


def through_dragonfly(network: Network, source: IntArray, target: IntArray, keys: IntArray) -> Ways:
    """From NIC to NIC. Each switch of a pod has a link to every other pod.

    Spraying uses all of these, and within a pod all switches between; a hash chooses one link between pods
    and goes straight within; adaptive routing also goes by way of other pods, where that carries less.
    """
    topology = network.topology
    switches = network["local"].shape[1] if "local" in network.blocks else 1
    here, there = network.leaf_of(source), network.leaf_of(target)
    crossing = np.flatnonzero(here != there)
    if not len(crossing):
        return NO_WAYS
    queue_pairs = 1 if topology.routing is NetworkRouting.SPRAY else topology.queue_pairs
    at = np.repeat(crossing, queue_pairs)
    numbers = keys[at] * queue_pairs + np.tile(np.arange(queue_pairs), len(crossing))
    hashes = hashed(topology.seed, source[at], target[at], numbers)
    near = here[at] // switches == there[at] // switches
    straight = np.where(near, here[at] % switches, here[at] // switches)
    chosen = _Crossing(np.arange(len(at)), here[at], there[at], straight, hashes % switches)
    share = np.full(len(at), 1 / queue_pairs)
    if topology.routing is NetworkRouting.SPRAY:
        chosen, share = _everywhere(network, chosen, near, switches)
    elif topology.routing is NetworkRouting.ADAPTIVE or network.alive is not None:
        chosen = _direct_least_loaded(network, chosen, hashes, switches)
    ways = _links(network, chosen, switches)
    return Ways(at[chosen.row[ways.row]], ways.link, share[ways.row])


def _everywhere(
    network: Network, straight: _Crossing, near: NDArray[np.bool_], switches: int
) -> tuple[_Crossing, FloatArray]:
    """Every switch within a pod, or every link between two; ways with failed links left out."""
    each = np.repeat(straight.row, switches)
    number = np.tile(np.arange(switches), len(straight.row))
    every = straight.at(each)
    # By way of the end is straight on, which is counted already.
    keep = ~near[each] | (number != every.there % switches)
    via = np.where(near[each], number, every.via)
    every = every._replace(via=via, gate=number).at(np.flatnonzero(keep))
    if network.alive is not None:
        ways = _links(network, every, switches)
        broken = np.zeros(len(every.row), bool)
        broken[ways.row[~network.alive[ways.link]]] = True
        every = every.at(np.flatnonzero(~broken))
    count = np.bincount(every.row, minlength=len(straight.row))
    if (count == 0).any():
        raise RouteError(_unreached(straight, int(np.argmin(count)), switches))
    return every, 1.0 / count[every.row]


def _direct_least_loaded(network: Network, straight: _Crossing, hashes: IntArray, switches: int) -> _Crossing:
    """One message after the other over the way whose fullest link is emptiest; of equals the shorter, then
    the hash's. Where only failures are gone round, all ways that work are equal but for their length.
    """
    adaptive = network.topology.routing is NetworkRouting.ADAPTIVE
    pods = network["global"].shape[0] if "global" in network.blocks else 1
    load = np.zeros(len(network.links))
    worth = 1.0 / network.links.capacity_bytes_per_s
    via, gate = straight.via.copy(), straight.gate.copy()
    for message in range(len(hashes)):
        near = straight.here[message] // switches == straight.there[message] // switches
        ways = switches if near else pods * switches
        number = np.arange(ways)
        tried = straight.at(np.full(ways, message))
        tried = tried._replace(via=number if near else number // switches, gate=number % switches)
        links = _links(network, tried, switches)
        full = np.zeros(ways)
        if adaptive:
            np.maximum.at(full, links.row, load[links.link] + worth[links.link])
        np.add.at(full, links.row, 1e-9 * worth[links.link])  # of ways as full the shorter
        if network.alive is not None:
            full[links.row[~network.alive[links.link]]] = np.inf
        if np.isinf(full.min()):
            raise RouteError(_unreached(straight, message, switches))
        least = np.flatnonzero(full <= full.min() * (1 + 1e-6))
        best = least[hashes[message] % len(least)]
        via[message], gate[message] = tried.via[best], tried.gate[best]
        taken = links.link[links.row == best]
        load[taken] += worth[taken]
    return straight._replace(via=via, gate=gate)


def _unreached(messages: _Crossing, lost: int, switches: int) -> str:
    leaves = (int(messages.here[lost]), int(messages.there[lost]))
    ends = (f"pod {leaf // switches} switch {leaf % switches}" for leaf in leaves)
    return "no way is left from {} to {}: links have failed".format(*ends)


def _links(network: Network, messages: _Crossing, switches: int) -> Ways:
    """The links that each of *messages* takes; rows count them."""
    parts: list[Ways] = []
    pod, switch = np.divmod(messages.here, switches)
    end_pod, end = np.divmod(messages.there, switches)
    near = pod == end_pod

    def within(row: IntArray, which: IntArray, start: IntArray, stop: IntArray) -> None:
        moving = np.flatnonzero(start != stop)
        if len(moving):
            for link in _local(network, which[moving], start[moving], stop[moving]):
                parts.append(entries(row[moving][link >= 0], link[link >= 0]))

    inside = np.flatnonzero(near)
    within(inside, pod[inside], switch[inside], messages.via[inside])
    within(inside, pod[inside], messages.via[inside], end[inside])
    outside = np.flatnonzero(~near)
    if len(outside):
        gate, via = messages.gate[outside], messages.via[outside]
        within(outside, pod[outside], switch[outside], gate)
        for first, second in ((pod[outside], via), (via, end_pod[outside])):
            leaving = np.flatnonzero(first != second)
            link = network["global"].at(first[leaving], second[leaving], gate[leaving])
            parts.append(entries(outside[leaving], link))
        within(outside, end_pod[outside], gate, end[outside])
    return all_of(parts)


def _local(network: Network, pod: IntArray, start: IntArray, end: IntArray) -> list[IntArray]:
    """The link between two switches of a pod; where it failed those by way of another switch (else -1)."""
    local = network["local"]
    link = local.at(pod, start, end)
    if network.alive is None or network.alive[link].all():
        return [link]
    other = np.arange(local.shape[1])[None, :]
    outward = local.at(pod[:, None], start[:, None], other)
    onward = local.at(pod[:, None], other, end[:, None])
    works = network.alive[outward] & network.alive[onward] & (other != start[:, None]) & (other != end[:, None])
    via = np.argmax(works, axis=1)
    round_it = ~network.alive[link] & works.any(axis=1)
    first = np.where(round_it, local.at(pod, start, via), link)
    return [first, np.where(round_it, local.at(pod, via, end), -1)]


__all__ = ["RouteError", "Ways", "check_working", "routes"]


def routes(network: Network, source: IntArray, target: IntArray, keys: IntArray | None = None) -> Ways:
    """The way of each message from GPU *source* to GPU *target*; *keys* tell messages of a pair apart.

    Messages stay on the fabric within a scale-up domain. Between domains each GPU uses the NICs next to it.
    On rails a message first goes over the fabric to the GPU of its node that is on the target's rail, as
    NCCL does (PXN); elsewhere the switches join all NICs.
    """
    cluster = network.cluster
    keys = np.zeros(len(source), np.int64) if keys is None else keys
    domain = cluster.domain_gpus
    apart = source // domain != target // domain
    inside, outside = np.flatnonzero(~apart & (source != target)), np.flatnonzero(apart)
    parts = [within(network, inside, source[inside], target[inside])]
    if len(outside):
        if cluster.topology.kind is NetworkKind.TORUS:
            found = along_torus(network, source[outside] // domain, target[outside] // domain)
            parts.append(found._replace(row=outside[found.row]))
        else:
            parts.append(_between(network, outside, source[outside], target[outside], keys[outside]))
    ways = all_of(parts)
    check_working(network, ways)
    return ways


def within(network: Network, row: IntArray, source: IntArray, target: IntArray) -> Ways:
    """Over the fabric of a node, or of a scale-up domain."""
    if not len(row):
        return all_of([])
    fabric, gpus = network.cluster.node.fabric, network.cluster.node.gpus
    node, start = np.divmod(source, gpus)
    end = target % gpus
    if fabric.kind is FabricKind.NVSWITCH:
        return over_ports(network, row, source, target)
    if fabric.kind is FabricKind.NVLINK_MESH:
        return entries(row, network["edge"].at(node, start, end))
    parts: list[Ways] = []
    hosted = np.ones(len(row), bool)
    if fabric.kind is FabricKind.NVLINK_PAIRS:
        hosted = start // 2 != end // 2
        parts.append(entries(row[~hosted], network["bridge"].at(node, start)[~hosted]))
    parts += [
        entries(row[hosted], network["slot up"].at(node, start)[hosted]),
        entries(row[hosted], network["slot down"].at(node, end)[hosted]),
    ]
    if "socket" in network.blocks:
        per_socket = max(1, gpus // fabric.sockets)
        left, right = (np.minimum(place // per_socket, fabric.sockets - 1) for place in (start, end))
        across = hosted & (left != right)
        parts.append(entries(row[across], network["socket"].at(node, left, right)[across]))
    return all_of(parts)


def over_ports(network: Network, row: IntArray, sender: IntArray, receiver: IntArray) -> Ways:
    """From the ports of *sender* to those of *receiver*, evenly over all switches that both reach."""
    gpus = network.cluster.node.gpus
    up, down = network["port up"], network["port down"]
    planes = up.shape[2]
    at, plane = np.repeat(np.arange(len(row)), planes), np.tile(np.arange(planes), len(row))
    out = up.at(*np.divmod(sender[at], gpus), plane)
    into = down.at(*np.divmod(receiver[at], gpus), plane)
    share = np.full(len(at), 1 / planes)
    if network.alive is not None and planes > 1:
        works = network.alive[out] & network.alive[into]
        count = np.bincount(at, works, len(row))[at]
        kept = works | (count == 0)  # a port that failed everywhere is told by its name
        at, out, into = at[kept], out[kept], into[kept]
        share = 1 / np.maximum(count[kept], 1)
    return all_of([entries(row[at], out, share), entries(row[at], into, share)])


def _between(network: Network, row: IntArray, source: IntArray, target: IntArray, keys: IntArray) -> Ways:
    """Over the NICs: along the fabric to the right rail where there are rails, then through the switches."""
    gpus, nics = network.cluster.node.gpus, network.cluster.node.nics
    parts: list[Ways] = []
    if network.on_rails:
        first_nic = network.nic_slots[0][:, 0]
        off_rail = first_nic[source % gpus] != first_nic[target % gpus]
        if off_rail.any():
            handed = np.where(off_rail, source // gpus * gpus + target % gpus, source)
            parts.append(within(network, row[off_rail], source[off_rail], handed[off_rail]))
            source = handed
    if "slot up" in network.blocks:
        up, down = network["slot up"], network["slot down"]
        parts.append(entries(row, up.at(*np.divmod(source, gpus))))
        parts.append(entries(row, down.at(*np.divmod(target, gpus))))
    at, out, into, share = _nics(network, source, target)
    parts.append(entries(row[at], network["nic up"].at(*np.divmod(out, nics)), share))
    parts.append(entries(row[at], network["nic down"].at(*np.divmod(into, nics)), share))
    through = (through_dragonfly if network.topology.kind is NetworkKind.DRAGONFLY else switched)(
        network, out, into, keys[at]
    )
    parts.append(Ways(row[at][through.row], through.link, through.share * share[through.row]))
    return all_of(parts)


def _nics(network: Network, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Message by message the NICs it leaves and arrives by, and the share that goes between the two.

    A GPU with several NICs has each talk to the same one of its peer.
    """
    nic, share = _working_slots(network)
    nics = network.cluster.node.nics
    slots = nic.shape[1]
    gpus = network.cluster.node.gpus
    if slots == 1:
        at = np.arange(len(source))
        return (at, source // gpus * nics + nic[source, 0], target // gpus * nics + nic[target, 0], np.ones(len(at)))
    alike = (share[source] == share[target]).all(axis=1)
    at = np.repeat(np.arange(len(source)), slots * slots)
    left = np.tile(np.repeat(np.arange(slots), slots), len(source))
    right = np.tile(np.arange(slots), len(source) * slots)
    part = share[source[at], left] * share[target[at], right]
    part = np.where(alike[at], np.where(left == right, share[source[at], left], 0.0), part)
    used = part > 0
    reached = np.bincount(at[used], minlength=len(source)) > 0
    if not reached.all():
        lost = int(np.argmin(reached))
        ends = (f"node {gpu // gpus} GPU {gpu % gpus}" for gpu in (int(source[lost]), int(target[lost])))
        raise RouteError("no way is left from {} to {}: all NICs of one have failed".format(*ends))
    at, left, right = at[used], left[used], right[used]
    out = source[at] // gpus * nics + nic[source[at], left]
    into = target[at] // gpus * nics + nic[target[at], right]
    return at, out, into, part[used]


def _working_slots(network: Network) -> tuple[IntArray, FloatArray]:
    """For every GPU its NICs and the share of each, those that failed left out."""
    nic, share = network.nic_slots
    nic, share = np.tile(nic, (network.nodes, 1)), np.tile(share, (network.nodes, 1))
    if network.alive is None:
        return nic, share
    node = np.arange(network.gpus)[:, None] // network.cluster.node.gpus
    works = network.alive[network["nic up"].at(node, nic)] & network.alive[network["nic down"].at(node, nic)]
    share = share * works
    left = share.sum(axis=1, keepdims=True)
    return nic, np.divide(share, left, out=np.zeros_like(share), where=left > 0)


def check_working(network: Network, ways: Ways) -> None:
    """Links without a way round must work."""
    if network.alive is None or not len(ways.link):
        return
    broken = np.flatnonzero(~network.alive[ways.link])
    if len(broken):
        raise RouteError(f"{network.links.name(int(ways.link[broken[0]]))} has failed, and messages have no other way")
