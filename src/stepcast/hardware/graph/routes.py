"""The links that messages between GPUs take, many messages at once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stepcast.hardware.cluster import PAIRED, Cluster, FabricKind, NetworkKind, NetworkRouting
from stepcast.hardware.graph.network import Network
from stepcast.hardware.path import Place, list_regions, place_job
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray, join_rows, take_rows
from stepcast.ir.layout import Layout


class RouteError(ValueError):
    """No route leads from one GPU to another."""


class LinkShares(NamedTuple):
    """Entries in any order: message *row* puts *share* of its bytes on *link*."""

    row: IntArray
    link: IntArray
    share: FloatArray


NO_SHARES = LinkShares(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def entries(row: IntArray, link: IntArray, share: FloatArray | float = 1.0) -> LinkShares:
    return LinkShares(row, link, np.broadcast_to(np.asarray(share, np.float64), row.shape))


def sum_shares(
    row: IntArray, link: IntArray, amount: FloatArray, rows: int, links: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return entries sorted by row and link, with the amounts of each link of a row added up."""
    key = row * links + link
    order = np.argsort(key, kind="stable")
    key = key[order]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else order
    sums = np.add.reduceat(amount[order], starts) if len(key) else np.zeros(0)
    unique_row, unique_link = np.divmod(key[starts], links)
    first = np.concatenate([[0], np.cumsum(np.bincount(unique_row, minlength=rows))])
    return first.astype(np.int64), unique_link, sums


# The GPU of each rank of a job.


def seats_of(cluster: Cluster, layout: Layout, place: Place = Place.EVEN) -> IntArray:
    """Return the GPU of each rank of a job that has the cluster from its first node on."""
    placement = place_job(place, cluster, layout)
    ranks, size = np.arange(layout.gpus), cluster.domain_gpus
    seats = np.empty_like(ranks)
    for region in list_regions(placement, size):
        in_region = (ranks >= region.start) & (ranks < region.stop)
        away, local = np.divmod(ranks[in_region] - region.start, region.held)
        seats[in_region] = (region.domain + away) * size + local
    return seats


def seats_on(cluster: Cluster, nodes: Sequence[int], ranks: int) -> IntArray:
    """Return the GPU of each rank of a job that fills *nodes* in their order."""
    gpus = cluster.node.gpus
    if len(set(nodes)) != len(nodes) or any(node < 0 for node in nodes):
        raise ValueError(f"nodes must be counted from 0 and given once each, not {list(nodes)}")
    if ranks > len(nodes) * gpus:
        raise ValueError(f"{ranks} ranks need {-(-ranks // gpus)} nodes of {gpus} GPUs, not {len(nodes)}")
    node, local = np.divmod(np.arange(ranks), gpus)
    return np.asarray(nodes, np.int64)[node] * gpus + local


# Routes through a tree of switches: the spine, and the core switch, that each message takes.

BLOCK = 4096  # messages whose routes are listed at once


def through_tree(network: Network, source: IntArray, target: IntArray, keys: IntArray) -> LinkShares:
    """Return routes from NIC *source* to NIC *target* over leaves, spines and cores, without the NICs' own links."""
    below, above = network.leaf_of(source), network.leaf_of(target)
    crossing = np.flatnonzero(below != above)
    if not len(crossing) or "leaf up" not in network.blocks:
        return NO_SHARES
    row, hashes, pair_share = _queue_pairs(network, crossing, source, target, keys)
    ways, routing = network.spines * network.cores, network.topology.routing
    load = np.zeros(len(network.links))
    parts: list[LinkShares] = []
    for start in range(0, len(row), BLOCK):
        rows, hashed = row[start : start + BLOCK], hashes[start : start + BLOCK]
        lower, upper, share = below[rows], above[rows], np.full(len(rows), pair_share)
        working = _working(network, lower, upper)
        if routing is NetworkRouting.SPRAY:
            usable = np.ones((len(rows), ways), bool) if working is None else working
            index, way = np.nonzero(usable)
            rows, lower, upper, share = rows[index], lower[index], upper[index], pair_share / usable.sum(axis=1)[index]
        elif routing is NetworkRouting.ADAPTIVE:
            way = _least_loaded(network, lower, upper, hashed, working, load)
        elif working is None:
            way = hashed % ways
        else:  # of those that work, the one with the number that the hash gives
            number = hashed % working.sum(axis=1)
            way = np.argmax(np.cumsum(working, axis=1) > number[:, None], axis=1)
        leaves, cores = _tree_links(network, lower, upper, way)
        far = np.flatnonzero(network.pod_of(lower) != network.pod_of(upper))
        parts += [entries(rows, link, share) for link in leaves]
        parts += [entries(rows[far], link[far], share[far]) for link in cores]
    return join_rows(parts, NO_SHARES)


def _queue_pairs(
    network: Network, crossing: IntArray, source: IntArray, target: IntArray, keys: IntArray
) -> tuple[IntArray, IntArray, float]:
    """Return the message and the hash of each queue pair of the messages *crossing*, and its share of the message."""
    topology = network.topology
    queue_pairs = 1 if topology.routing is NetworkRouting.SPRAY else topology.queue_pairs
    row = np.repeat(crossing, queue_pairs)
    key = keys[row] * queue_pairs + np.tile(np.arange(queue_pairs), len(crossing))
    return row, _hash(topology.seed, source[row], target[row], key), 1 / queue_pairs


def _hash(seed: int, *keys: IntArray) -> IntArray:
    """Return 62 pseudo-random bits for each row of *keys* (splitmix64: Steele, Lea and Flood, 2014)."""
    state = np.full(len(keys[0]), seed, np.uint64)
    for key in keys:
        with np.errstate(over="ignore"):
            state = (state ^ key.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    return (state >> np.uint64(2)).astype(np.int64)


def _tree_links(
    network: Network, below: IntArray, above: IntArray, way: IntArray
) -> tuple[list[IntArray], list[IntArray]]:
    """Return the links between leaves and spines of a way, and those between spines and cores, if there are any."""
    spine, core = way % network.spines, way // network.spines
    leaves = [network["leaf up"].links_at(below, spine), network["leaf down"].links_at(above, spine)]
    if "core up" not in network.blocks:
        return leaves, []
    lower, upper = network.pod_of(below), network.pod_of(above)
    return leaves, [network["core up"].links_at(lower, spine, core), network["core down"].links_at(upper, spine, core)]


def _working(network: Network, below: IntArray, above: IntArray) -> BoolArray | None:
    """Return which ways work for each message; None: all."""
    if network.alive is None:
        return None
    way = np.arange(network.spines * network.cores)[None, :]
    leaves, cores = _tree_links(network, below[:, None], above[:, None], way)
    working: BoolArray = network.alive[leaves[0]] & network.alive[leaves[1]]
    if cores:
        same_pod = network.pod_of(below)[:, None] == network.pod_of(above)[:, None]
        working &= (network.alive[cores[0]] & network.alive[cores[1]]) | same_pod
    lost = np.flatnonzero(~working.any(axis=1))
    if len(lost):
        ends = [network.links.name(int(network["leaf up"].links_at(leaf[lost[0]], 0)[0])) for leaf in (below, above)]
        first_end, second_end = (end.partition(" to ")[0] for end in ends)
        raise RouteError(f"no route is left from {first_end} to {second_end}: a link of each has failed")
    return working


def _least_loaded(
    network: Network, below: IntArray, above: IntArray, hashes: IntArray, working: BoolArray | None, load: FloatArray
) -> IntArray:
    """Return the way of each message, chosen one after the other: the way whose busiest link carries least.

    Hashes break ties. *load* has the seconds that each link is busy; every message adds its own.
    """
    way = np.arange(network.spines * network.cores)
    seconds_per_byte = 1.0 / network.links.capacity_bytes_per_s
    far = network.pod_of(below) != network.pod_of(above)
    chosen = np.empty(len(below), np.int64)
    for message in range(len(below)):
        leaves, cores = _tree_links(network, below[message], above[message], way)
        used = leaves + (cores if far[message] else [])
        full = np.max([load[links] + seconds_per_byte[links] for links in used], axis=0)
        if working is not None:
            full = np.where(working[message], full, np.inf)
        least = np.flatnonzero(full <= full.min() * (1 + 1e-9))
        best = int(least[hashes[message] % len(least)])
        chosen[message] = best
        for links in used:
            load[links[best]] += seconds_per_byte[links[best]]
    return chosen


# Routes without a tree of switches: along a torus, and through a dragonfly.


def along_torus(network: Network, source: IntArray, target: IntArray) -> LinkShares:
    """Return routes from domain to domain, one dimension after the other, each the shorter way round, or half each
    way where both are as long. A message that would meet a link that failed goes the other way round.
    """
    parts: list[LinkShares] = []
    position, row = source.copy(), np.arange(len(source))
    stride = 1
    for axis, size in enumerate(network.topology.shape):
        start, end = position // stride % size, target // stride % size
        ahead = (end - start) % size
        back = np.where(2 * ahead == size, 0.5, 2 * ahead > size)
        if network.alive is not None:
            back = _round_failures(network, position, start, ahead, back, axis, stride)
        for way, share in enumerate((1 - back, back)):
            steps = np.where(ahead > 0, size - ahead if way else ahead, 0)
            for step in range(int(steps[share > 0].max(initial=0))):
                moving = np.flatnonzero((step < steps) & (share > 0))
                place = (start[moving] + (-step if way else step)) % size
                cell = position[moving] + (place - start[moving]) * stride
                parts.append(entries(row[moving], network["torus"].links_at(cell, axis, way), share[moving]))
        position = position + (end - start) * stride
        stride *= size
    return join_rows(parts, NO_SHARES)


def _round_failures(
    network: Network, position: IntArray, start: IntArray, ahead: IntArray, back: FloatArray, axis: int, stride: int
) -> FloatArray:
    """Return the share of each message that goes backwards round the ring, avoiding ways with failed links."""
    assert network.alive is not None
    size = network.topology.shape[axis]
    broken = []
    for way in (0, 1):
        steps = size - ahead if way else ahead
        failed = np.zeros(len(position), bool)
        for step in range(size):
            place = (start + (-step if way else step)) % size
            link = network["torus"].links_at(position + (place - start) * stride, axis, way)
            failed |= (ahead > 0) & (step < steps) & ~network.alive[link]
        broken.append(failed)
    both = np.flatnonzero(broken[0] & broken[1])
    if len(both):
        name = network.links.name(int(network["torus"].links_at(position[both[0]], axis, 0)[0])).partition(" along")[0]
        raise RouteError(f"no route is left from {name}: links both ways round have failed")
    return np.where(broken[0], 1.0, np.where(broken[1], 0.0, back))


class _Crossing(NamedTuple):
    """Messages of a dragonfly: their leaves, the pod or switch that they go through, and the switch that they leave by.

    Within a pod ``via`` is a switch, between pods a pod; that of the start means a direct route.
    """

    row: IntArray
    here: IntArray
    there: IntArray
    via: IntArray
    gate: IntArray


def through_dragonfly(network: Network, source: IntArray, target: IntArray, keys: IntArray) -> LinkShares:
    """Return routes from NIC to NIC. Each switch of a pod has a link to every other pod.

    Spraying uses all of these, and within a pod all switches between; a hash chooses one link between pods
    and goes directly within; adaptive routing also goes through other pods, where that carries less.
    """
    switches = network["local"].shape[1] if "local" in network.blocks else 1
    here, there = network.leaf_of(source), network.leaf_of(target)
    crossing = np.flatnonzero(here != there)
    if not len(crossing):
        return NO_SHARES
    row, hashes, pair_share = _queue_pairs(network, crossing, source, target, keys)
    is_same_pod = here[row] // switches == there[row] // switches
    direct = np.where(is_same_pod, here[row] % switches, here[row] // switches)
    chosen = _Crossing(np.arange(len(row)), here[row], there[row], direct, hashes % switches)
    share = np.full(len(row), pair_share)
    routing = network.topology.routing
    if routing is NetworkRouting.SPRAY:
        chosen, share = _everywhere(network, chosen, is_same_pod, switches)
    elif routing is NetworkRouting.ADAPTIVE or network.alive is not None:
        chosen = _direct_least_loaded(network, chosen, hashes, switches)
    used = _links(network, chosen, switches)
    return LinkShares(row[chosen.row[used.row]], used.link, share[used.row])


def _everywhere(
    network: Network, direct: _Crossing, is_same_pod: BoolArray, switches: int
) -> tuple[_Crossing, FloatArray]:
    """Return routes over every switch within a pod, or every link between two; those with failed links left out."""
    message = np.repeat(direct.row, switches)
    number = np.tile(np.arange(switches), len(direct.row))
    every = take_rows(direct, message)
    # Through the switch of the end is direct, which is counted already.
    counted = ~is_same_pod[message] | (number != every.there % switches)
    via = np.where(is_same_pod[message], number, every.via)
    every = take_rows(every._replace(via=via, gate=number), counted)
    if network.alive is not None:
        used = _links(network, every, switches)
        broken = np.zeros(len(every.row), bool)
        broken[used.row[~network.alive[used.link]]] = True
        every = take_rows(every, ~broken)
    count = np.bincount(every.row, minlength=len(direct.row))
    if (count == 0).any():
        raise RouteError(_describe_unreached(direct, int(np.argmin(count)), switches))
    return every, 1.0 / count[every.row]


def _direct_least_loaded(network: Network, direct: _Crossing, hashes: IntArray, switches: int) -> _Crossing:
    """Route one message after the other where the fullest link is emptiest; of equal routes the shorter, then the
    hash's. Where only failures are avoided, all routes that work are equal but for their length.
    """
    adaptive = network.topology.routing is NetworkRouting.ADAPTIVE
    pods = network["global"].shape[0] if "global" in network.blocks else 1
    load = np.zeros(len(network.links))
    seconds_per_byte = 1.0 / network.links.capacity_bytes_per_s
    via, gate = direct.via.copy(), direct.gate.copy()
    for message in range(len(hashes)):
        is_same_pod = direct.here[message] // switches == direct.there[message] // switches
        ways = switches if is_same_pod else pods * switches
        number = np.arange(ways)
        tried = take_rows(direct, np.full(ways, message))
        tried = tried._replace(via=number if is_same_pod else number // switches, gate=number % switches)
        links = _links(network, tried, switches)
        full = np.zeros(ways)
        if adaptive:
            np.maximum.at(full, links.row, load[links.link] + seconds_per_byte[links.link])
        np.add.at(full, links.row, 1e-9 * seconds_per_byte[links.link])  # prefers the shorter of equal routes
        if network.alive is not None:
            full[links.row[~network.alive[links.link]]] = np.inf
        if np.isinf(full.min()):
            raise RouteError(_describe_unreached(direct, message, switches))
        least = np.flatnonzero(full <= full.min() * (1 + 1e-6))
        best = least[hashes[message] % len(least)]
        via[message], gate[message] = tried.via[best], tried.gate[best]
        best_links = links.link[links.row == best]
        load[best_links] += seconds_per_byte[best_links]
    return direct._replace(via=via, gate=gate)


def _describe_unreached(messages: _Crossing, lost: int, switches: int) -> str:
    leaves = (int(messages.here[lost]), int(messages.there[lost]))
    ends = (f"pod {leaf // switches} switch {leaf % switches}" for leaf in leaves)
    return "no route is left from {} to {}: links have failed".format(*ends)


def _links(network: Network, messages: _Crossing, switches: int) -> LinkShares:
    """Return the links that each of *messages* takes; rows count them."""
    parts: list[LinkShares] = []
    pod, switch = np.divmod(messages.here, switches)
    end_pod, end = np.divmod(messages.there, switches)
    is_same_pod = pod == end_pod

    def add_local(row: IntArray, pods: IntArray, start: IntArray, stop: IntArray) -> None:
        moving = np.flatnonzero(start != stop)
        if len(moving):
            for link in _local(network, pods[moving], start[moving], stop[moving]):
                parts.append(entries(row[moving][link >= 0], link[link >= 0]))

    local = np.flatnonzero(is_same_pod)
    add_local(local, pod[local], switch[local], messages.via[local])
    add_local(local, pod[local], messages.via[local], end[local])
    remote = np.flatnonzero(~is_same_pod)
    gate, via = messages.gate[remote], messages.via[remote]
    add_local(remote, pod[remote], switch[remote], gate)
    for first, second in ((pod[remote], via), (via, end_pod[remote])):
        leaving = np.flatnonzero(first != second)
        if len(leaving):
            link = network["global"].links_at(first[leaving], second[leaving], gate[leaving])
            parts.append(entries(remote[leaving], link))
    add_local(remote, end_pod[remote], gate, end[remote])
    return join_rows(parts, NO_SHARES)


def _local(network: Network, pod: IntArray, start: IntArray, end: IntArray) -> list[IntArray]:
    """Return the link between two switches of a pod; where it failed those through another switch (else -1)."""
    local = network["local"]
    link = local.links_at(pod, start, end)
    if network.alive is None or network.alive[link].all():
        return [link]
    middle = np.arange(local.shape[1])[None, :]
    outward = local.links_at(pod[:, None], start[:, None], middle)
    onward = local.links_at(pod[:, None], middle, end[:, None])
    works = network.alive[outward] & network.alive[onward] & (middle != start[:, None]) & (middle != end[:, None])
    via = np.argmax(works, axis=1)
    round_it = ~network.alive[link] & works.any(axis=1)
    first = np.where(round_it, local.links_at(pod, start, via), link)
    return [first, np.where(round_it, local.links_at(pod, via, end), -1)]


def routes(network: Network, source: IntArray, target: IntArray, keys: IntArray | None = None) -> LinkShares:
    """Return the route of each message from GPU *source* to GPU *target*; *keys* distinguish messages of a pair.

    Messages stay on the fabric within a scale-up domain. Between domains each GPU uses the NICs next to it.
    On rails a message first goes over the fabric to the GPU of its node that is on the target's rail, as
    NCCL does (PXN); elsewhere the switches join all NICs.
    """
    cluster = network.cluster
    keys = np.zeros(len(source), np.int64) if keys is None else keys
    domain = cluster.domain_gpus
    apart = source // domain != target // domain
    local, remote = np.flatnonzero(~apart & (source != target)), np.flatnonzero(apart)
    parts = [through_fabric(network, local, source[local], target[local])]
    if len(remote):
        if cluster.topology.kind is NetworkKind.TORUS:
            along = along_torus(network, source[remote] // domain, target[remote] // domain)
            parts.append(along._replace(row=remote[along.row]))
        else:
            parts.append(_through_nics(network, remote, source[remote], target[remote], keys[remote]))
    shares = join_rows(parts, NO_SHARES)
    check_working(network, shares)
    return shares


def through_fabric(network: Network, row: IntArray, source: IntArray, target: IntArray) -> LinkShares:
    """Return routes over the fabric of a node, or of a scale-up domain."""
    if not len(row):
        return NO_SHARES
    fabric, gpus = network.cluster.node.fabric, network.cluster.node.gpus
    node, start = np.divmod(source, gpus)
    end = target % gpus
    if fabric.kind is FabricKind.NVSWITCH:
        return over_ports(network, row, source, target)
    if fabric.kind is FabricKind.NVLINK_MESH:
        return entries(row, network["edge"].links_at(node, start, end))
    parts: list[LinkShares] = []
    hosted = np.ones(len(row), bool)
    if fabric.kind in PAIRED:
        hosted = start // 2 != end // 2
        parts.append(entries(row[~hosted], network["bridge"].links_at(node, start)[~hosted]))
    parts += [
        entries(row[hosted], network["slot up"].links_at(node, start)[hosted]),
        entries(row[hosted], network["slot down"].links_at(node, end)[hosted]),
    ]
    if "socket" in network.blocks:
        per_socket = max(1, gpus // fabric.sockets)
        left, right = (np.minimum(place // per_socket, fabric.sockets - 1) for place in (start, end))
        across = hosted & (left != right)
        parts.append(entries(row[across], network["socket"].links_at(node, left, right)[across]))
    return join_rows(parts, NO_SHARES)


def over_ports(network: Network, row: IntArray, sender: IntArray, receiver: IntArray) -> LinkShares:
    """Return routes from the ports of *sender* to those of *receiver*, evenly over all switches that both reach."""
    gpus = network.cluster.node.gpus
    up, down = network["port up"], network["port down"]
    planes = up.shape[2]
    index, plane = np.repeat(np.arange(len(row)), planes), np.tile(np.arange(planes), len(row))
    out = up.links_at(*np.divmod(sender[index], gpus), plane)
    into = down.links_at(*np.divmod(receiver[index], gpus), plane)
    share = np.full(len(index), 1 / planes)
    if network.alive is not None and planes > 1:
        works = network.alive[out] & network.alive[into]
        count = np.bincount(index, works, len(row))[index]
        usable = works | (count == 0)  # a port that failed everywhere is named in the error
        index, out, into = index[usable], out[usable], into[usable]
        share = 1 / np.maximum(count[usable], 1)
    return join_rows([entries(row[index], out, share), entries(row[index], into, share)], NO_SHARES)


def _through_nics(network: Network, row: IntArray, source: IntArray, target: IntArray, keys: IntArray) -> LinkShares:
    """Return routes over the NICs: over the fabric to the right rail if there are rails, then through the switches."""
    gpus, nics = network.cluster.node.gpus, network.cluster.node.nics
    parts: list[LinkShares] = []
    if network.on_rails:
        first_nic = network.nic_slots[0][:, 0]
        off_rail = first_nic[source % gpus] != first_nic[target % gpus]
        if off_rail.any():
            handed = np.where(off_rail, source // gpus * gpus + target % gpus, source)
            parts.append(through_fabric(network, row[off_rail], source[off_rail], handed[off_rail]))
            source = handed
    if "slot up" in network.blocks:
        up, down = network["slot up"], network["slot down"]
        parts.append(entries(row, up.links_at(*np.divmod(source, gpus))))
        parts.append(entries(row, down.links_at(*np.divmod(target, gpus))))
    index, out, into, share = _nics(network, source, target)
    parts.append(entries(row[index], network["nic up"].links_at(*np.divmod(out, nics)), share))
    parts.append(entries(row[index], network["nic down"].links_at(*np.divmod(into, nics)), share))
    through_switches = through_dragonfly if network.topology.kind is NetworkKind.DRAGONFLY else through_tree
    through = through_switches(network, out, into, keys[index])
    parts.append(LinkShares(row[index][through.row], through.link, through.share * share[through.row]))
    return join_rows(parts, NO_SHARES)


def _nics(network: Network, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Return message by message the NICs it leaves and arrives by, and the share that goes between the two.

    A GPU with several NICs has each talk to the same one of its peer. Those that failed are left out.
    """
    nic, share = network.nic_slots
    nic, share = np.tile(nic, (network.nodes, 1)), np.tile(share, (network.nodes, 1))
    gpus, nics, slots = network.cluster.node.gpus, network.cluster.node.nics, nic.shape[1]
    if network.alive is not None:
        node = np.arange(network.gpus)[:, None] // gpus
        up, down = (network[f"nic {way}"].links_at(node, nic) for way in ("up", "down"))
        share = share * (network.alive[up] & network.alive[down])
        working_share = share.sum(axis=1, keepdims=True)
        share = np.divide(share, working_share, out=np.zeros_like(share), where=working_share > 0)
    if slots == 1:
        index = np.arange(len(source))
        out, into = source // gpus * nics + nic[source, 0], target // gpus * nics + nic[target, 0]
        return index, out, into, np.ones(len(index))
    has_equal_shares = (share[source] == share[target]).all(axis=1)
    index = np.repeat(np.arange(len(source)), slots * slots)
    left = np.tile(np.repeat(np.arange(slots), slots), len(source))
    right = np.tile(np.arange(slots), len(source) * slots)
    part = share[source[index], left] * share[target[index], right]
    part = np.where(has_equal_shares[index], np.where(left == right, share[source[index], left], 0.0), part)
    used = part > 0
    reached = np.bincount(index[used], minlength=len(source)) > 0
    if not reached.all():
        lost = int(np.argmin(reached))
        ends = (f"node {gpu // gpus} GPU {gpu % gpus}" for gpu in (int(source[lost]), int(target[lost])))
        raise RouteError("no route is left from {} to {}: all NICs of one have failed".format(*ends))
    index, left, right = index[used], left[used], right[used]
    out = source[index] // gpus * nics + nic[source[index], left]
    into = target[index] // gpus * nics + nic[target[index], right]
    return index, out, into, part[used]


def check_working(network: Network, shares: LinkShares) -> None:
    """Raise a RouteError if a link that cannot be avoided has failed."""
    if network.alive is None or not len(shares.link):
        return
    broken = np.flatnonzero(~network.alive[shares.link])
    if len(broken):
        name = network.links.name(int(shares.link[broken[0]]))
        raise RouteError(f"{name} has failed, and messages have no other route")
