"""Ways without a tree of switches: along a torus, and through a dragonfly."""

import numpy as np

from stepcast.hardware.graph.network import Network
from stepcast.hardware.graph.ways import NO_WAYS, RouteError, Ways, all_of, entries, hashed
from stepcast.hardware.topology import Routing
from stepcast.ir.flows import Floats, Ints


def along_torus(network: Network, source: Ints, target: Ints, keys: Ints) -> Ways:
    """From domain to domain, one dimension after the other, each the shorter way round; of two equally long
    ways the hash takes one. A message that would meet a link that failed goes the other way round.
    """
    parts: list[Ways] = []
    here, row = source.copy(), np.arange(len(source))
    stride = 1
    for axis, size in enumerate(network.topology.shape):
        start, end = here // stride % size, target // stride % size
        ahead = (end - start) % size
        tie = (2 * ahead == size) & (hashed(network.topology.seed, source, target, keys) % 2 == 1)
        back = (2 * ahead > size) | tie
        back = _round_failures(network, here, start, ahead, back, axis, stride)
        for step in range(size):
            left = np.where(back, size - ahead, ahead)
            moving = np.flatnonzero((ahead > 0) & (step < left))
            if not len(moving):
                break
            place = (start + np.where(back, -step, step)) % size
            cell = here + (place - start) * stride
            link = network["torus"].at(cell[moving], axis, back[moving].astype(np.int64))
            parts.append(entries(row[moving], link))
        here = here + (end - start) * stride
        stride *= size
    return all_of(parts)


def _round_failures(
    network: Network, here: Ints, start: Ints, ahead: Ints, back: Ints, axis: int, stride: int
) -> Ints:
    """Whether each message goes backwards once ways with a failed link are left out."""
    if network.alive is None:
        return back
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
        raise RouteError(
            f"no way is left from {name.partition(' along')[0]}: links both ways round have failed"
        )
    return np.where(broken[0], True, np.where(broken[1], False, back))


def through_dragonfly(network: Network, source: Ints, target: Ints, keys: Ints) -> Ways:
    """From NIC to NIC: straight, or first to another pod or switch where the routing spreads messages.

    The link between two pods ends at the switch whose number is that of the other pod (counted round).
    """
    topology = network.topology
    assert topology.leaf_nodes is not None
    routers = network["local"].shape[1] if "local" in network.blocks else 1
    pods = network["global"].shape[0] if "global" in network.blocks else 1
    here, there = network.leaf_of(source), network.leaf_of(target)
    crossing = np.flatnonzero(here != there)
    if not len(crossing):
        return NO_WAYS
    here, there = here[crossing], there[crossing]
    near = here // routers == there // routers
    # By way of which pod (of messages that leave theirs) or switch (of the others): itself means straight on.
    choices = np.where(near, routers, pods)
    straight = np.where(near, here % routers, here // routers)
    if topology.routing is Routing.SPRAY:
        at, via, share = _everywhere(network, here, there, near, choices, straight, routers)
    else:
        queue_pairs = topology.queue_pairs
        at = np.repeat(np.arange(len(here)), queue_pairs)
        share = np.full(len(at), 1 / queue_pairs)
        via = straight[at]
        if topology.routing is Routing.ADAPTIVE or network.alive is not None:
            numbers = keys[crossing][at] * queue_pairs + np.tile(np.arange(queue_pairs), len(here))
            hashes = hashed(topology.seed, source[crossing][at], target[crossing][at], numbers)
            via = _least_loaded(
                network, here[at], there[at], near[at], choices[at], straight[at], hashes, routers
            )
    return _by_way_of(network, crossing[at], here[at], there[at], near[at], via, share, routers)


def _everywhere(
    network: Network, here: Ints, there: Ints, near: Ints, choices: Ints, straight: Ints, routers: int
) -> tuple[Ints, Ints, Floats]:
    """Every way once, those with failed links left out."""
    end = np.where(near, there % routers, there // routers)
    at = np.repeat(np.arange(len(here)), choices)
    via = np.arange(len(at)) - np.repeat(np.cumsum(choices) - choices, choices)
    keep = via != end[at]  # by way of the end is straight on, which is counted already
    at, via = at[keep], via[keep]
    if network.alive is not None:
        ways = _by_way_of(
            network, np.arange(len(at)), here[at], there[at], near[at], via, np.ones(len(at)), routers
        )
        broken = np.zeros(len(at), bool)
        broken[ways.row[~network.alive[ways.link]]] = True
        at, via = at[~broken], via[~broken]
    count = np.bincount(at, minlength=len(here))
    if (count == 0).any():
        lost = int(np.argmin(count))
        raise RouteError(_unreached(here[lost], there[lost], routers))
    return at, via, 1.0 / count[at]


def _least_loaded(
    network: Network,
    here: Ints,
    there: Ints,
    near: Ints,
    choices: Ints,
    straight: Ints,
    hashes: Ints,
    routers: int,
) -> Ints:
    load = np.zeros(len(network.links))
    worth = 1.0 / network.links.capacity_bytes_per_s
    chosen = straight.copy()
    for message in range(len(here)):
        count = int(choices[message])
        via = np.arange(count)
        one = np.full(count, message)
        ways = _by_way_of(network, via, here[one], there[one], near[one], via, np.ones(count), routers)
        full = np.zeros(count)
        np.maximum.at(full, ways.row, load[ways.link] + worth[ways.link])
        if network.alive is not None:
            full[ways.row[~network.alive[ways.link]]] = np.inf
        if np.isinf(full.min()):
            raise RouteError(_unreached(here[message], there[message], routers))
        if full[straight[message]] > full.min() * (1 + 1e-9):
            least = np.flatnonzero(full <= full.min() * (1 + 1e-9))
            chosen[message] = least[hashes[message] % len(least)]
        taken = ways.link[ways.row == chosen[message]]
        load[taken] += worth[taken]
    return chosen


def _unreached(here: int, there: int, routers: int) -> str:
    ends = (f"pod {leaf // routers} switch {leaf % routers}" for leaf in (int(here), int(there)))
    return "no way is left from {} to {}: links have failed".format(*ends)


def _by_way_of(
    network: Network, row: Ints, here: Ints, there: Ints, near: Ints, via: Ints, share: Floats, routers: int
) -> Ways:
    """The links of ways that touch pod or switch *via* on their way from leaf *here* to leaf *there*."""
    parts: list[Ways] = []
    pod, switch = np.divmod(here, routers)
    end_pod, end_switch = np.divmod(there, routers)
    stops_pod = np.where(near, pod, via)
    stops_switch = np.where(near, via, -1)

    def within(at: Ints, which: Ints, start: Ints, end: Ints) -> None:
        moving = start != end
        if moving.any():
            on, part = row[at][moving], share[at][moving]
            for stretch in _local(network, which[moving], start[moving], end[moving]):
                taken = stretch >= 0
                parts.append(entries(on[taken], stretch[taken], part[taken]))

    def across(at: Ints, first: Ints, second: Ints, start: Ints) -> Ints:
        """To another pod; the switch that the message arrives at."""
        leaving = first != second
        gate = np.where(leaving, second % routers, start)
        within(at, first, start, gate)
        if leaving.any():
            link = network["global"].at(first[leaving], second[leaving])
            parts.append(entries(row[at][leaving], link, share[at][leaving]))
        return np.where(leaving, first % routers, start)

    inside = np.flatnonzero(near)
    if len(inside):
        within(inside, pod[inside], switch[inside], stops_switch[inside])
        within(inside, pod[inside], stops_switch[inside], end_switch[inside])
    outside = np.flatnonzero(~near)
    if len(outside):
        at = across(outside, pod[outside], stops_pod[outside], switch[outside])
        at = across(outside, stops_pod[outside], end_pod[outside], at)
        within(outside, end_pod[outside], at, end_switch[outside])
    return all_of(parts)


def _local(network: Network, pod: Ints, start: Ints, end: Ints) -> list[Ints]:
    """The link between two switches of a pod; where it failed those by way of another switch (else -1)."""
    local = network["local"]
    link = local.at(pod, start, end)
    if network.alive is None or network.alive[link].all():
        return [link]
    other = np.arange(local.shape[1])[None, :]
    outward = local.at(pod[:, None], start[:, None], other)
    onward = local.at(pod[:, None], other, end[:, None])
    works = (
        network.alive[outward] & network.alive[onward] & (other != start[:, None]) & (other != end[:, None])
    )
    via = np.argmax(works, axis=1)
    round_it = ~network.alive[link] & works.any(axis=1)
    first = np.where(round_it, local.at(pod, start, via), link)
    return [first, np.where(round_it, local.at(pod, via, end), -1)]
