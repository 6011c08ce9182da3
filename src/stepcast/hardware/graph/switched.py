"""Ways through a tree of switches: which spine, and which core switch, each message takes."""

import numpy as np
from numpy.typing import NDArray

from stepcast.hardware.graph.network import Network
from stepcast.hardware.graph.ways import NO_WAYS, RouteError, Ways, all_of, entries, hashed
from stepcast.hardware.topology import Routing
from stepcast.ir.flows import Floats, Ints

BLOCK = 4096  # messages whose ways are listed at once


def switched(network: Network, source: Ints, target: Ints, keys: Ints) -> Ways:
    """From NIC *source* to NIC *target*, over leaves, spines and cores; the NICs' own links are not told."""
    below, above = network.leaf_of(source), network.leaf_of(target)
    crossing = np.flatnonzero(below != above)
    if not len(crossing) or "leaf up" not in network.blocks:
        return NO_WAYS
    queue_pairs = 1 if network.topology.routing is Routing.SPRAY else network.topology.queue_pairs
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
    network: Network, row: Ints, below: Ints, above: Ints, hashes: Ints, share: float, load: Floats
) -> Ways:
    """The links of the way that the network's routing chooses, or of all ways. *load* is what links carry."""
    ways = network.spines * network.cores
    working = _working(network, below, above)
    if network.topology.routing is Routing.SPRAY:
        if ways == 1:
            return _over(network, row, below, above, np.zeros_like(row), np.full(len(row), share))
        at, way = np.nonzero(working) if working is not None else _every(len(row), ways)
        count = working.sum(axis=1)[at] if working is not None else np.full(len(at), ways)
        return _over(network, row[at], below[at], above[at], way, share / count)
    if network.topology.routing is Routing.ECMP:
        way = hashes % ways if working is None else _nth(working, hashes % working.sum(axis=1))
    else:
        way = _least_loaded(network, below, above, hashes, working, load)
    return _over(network, row, below, above, way, np.full(len(row), share))


def _every(rows: int, ways: int) -> tuple[Ints, Ints]:
    return np.repeat(np.arange(rows), ways), np.tile(np.arange(ways), rows)


def _nth(working: NDArray[np.bool_], number: Ints) -> Ints:
    """For each row the place of its *number*-th True."""
    found: Ints = np.argmax(np.cumsum(working, axis=1) > number[:, None], axis=1)
    return found


def _over(network: Network, row: Ints, below: Ints, above: Ints, way: Ints, share: Floats) -> Ways:
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


def _working(network: Network, below: Ints, above: Ints) -> NDArray[np.bool_] | None:
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
    below: Ints,
    above: Ints,
    hashes: Ints,
    working: NDArray[np.bool_] | None,
    load: Floats,
) -> Ints:
    """One message after the other, over the way whose fullest link is emptiest; a hash breaks ties."""
    ways = network.spines * network.cores
    way = np.arange(ways)
    spine, core = way % network.spines, way // network.spines
    worth = 1.0 / network.links.capacity_bytes_per_s
    pods = (network.pod_of(below), network.pod_of(above))
    chosen = np.empty(len(below), np.int64)
    for message in range(len(below)):
        on = [
            network["leaf up"].at(below[message], spine),
            network["leaf down"].at(above[message], spine),
        ]
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
