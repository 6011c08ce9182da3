"""Ways without a tree of switches: along a torus, and through a dragonfly."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepcast.hardware.graph.network import Network
from stepcast.hardware.graph.ways import NO_WAYS, RouteError, Ways, all_of, entries, hashed
from stepcast.hardware.topology import Routing
from stepcast.ir.flows import Floats, Ints


def along_torus(network: Network, source: Ints, target: Ints) -> Ways:
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
    network: Network, here: Ints, start: Ints, ahead: Ints, back: Floats, axis: int, stride: int
) -> Floats:
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

    row: Ints
    here: Ints
    there: Ints
    via: Ints
    gate: Ints

    def at(self, which: Ints) -> "_Crossing":
        return _Crossing(*(column[which] for column in self))


def through_dragonfly(network: Network, source: Ints, target: Ints, keys: Ints) -> Ways:
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
    queue_pairs = 1 if topology.routing is Routing.SPRAY else topology.queue_pairs
    at = np.repeat(crossing, queue_pairs)
    numbers = keys[at] * queue_pairs + np.tile(np.arange(queue_pairs), len(crossing))
    hashes = hashed(topology.seed, source[at], target[at], numbers)
    near = here[at] // switches == there[at] // switches
    straight = np.where(near, here[at] % switches, here[at] // switches)
    chosen = _Crossing(np.arange(len(at)), here[at], there[at], straight, hashes % switches)
    share = np.full(len(at), 1 / queue_pairs)
    if topology.routing is Routing.SPRAY:
        chosen, share = _everywhere(network, chosen, near, switches)
    elif topology.routing is Routing.ADAPTIVE or network.alive is not None:
        chosen = _least_loaded(network, chosen, hashes, switches)
    ways = _links(network, chosen, switches)
    return Ways(at[chosen.row[ways.row]], ways.link, share[ways.row])


def _everywhere(
    network: Network, straight: _Crossing, near: NDArray[np.bool_], switches: int
) -> tuple[_Crossing, Floats]:
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


def _least_loaded(network: Network, straight: _Crossing, hashes: Ints, switches: int) -> _Crossing:
    """One message after the other over the way whose fullest link is emptiest; of equals the shorter, then
    the hash's. Where only failures are gone round, all ways that work are equal but for their length.
    """
    adaptive = network.topology.routing is Routing.ADAPTIVE
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

    def within(row: Ints, which: Ints, start: Ints, stop: Ints) -> None:
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
