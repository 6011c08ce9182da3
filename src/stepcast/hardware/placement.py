"""Which GPUs a job gets: how many of each scale-up domain, where those hold several nodes (an NVL72 rack).

Ranks follow each other in a domain and from one domain to the next; a placement says where they move on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from math import lcm
from typing import NamedTuple

from stepcast.hardware.cluster import Cluster


class Place(StrEnum):
    EVEN = "even"  # the same number of whole nodes in every domain, as Slurm's --segment does
    PACKED = "packed"  # every domain is filled before the next


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks of each domain in turn; none given: as many as a domain has GPUs."""

    held: tuple[int, ...] = ()

    def spread(self, ranks: Sequence[int], size: int) -> Mapping[int, Sequence[int]]:
        """Domain -> the GPUs in it that *ranks*, rising, sit on; domains have *size* GPUs."""
        if not self.held and ranks[-1] - ranks[0] == len(ranks) - 1:
            return _all_between(ranks[0], ranks[-1] + 1, size)
        domains: dict[int, list[int]] = {}
        ahead = iter(self.regions(size))
        region = next(ahead)
        for rank in ranks:
            while rank >= region.stop:
                region = next(ahead)
            domain, local = region.of(rank)
            domains.setdefault(domain, []).append(local)
        return domains

    def regions(self, size: int) -> "tuple[Region, ...]":
        """Runs of domains that hold as many ranks each; domains have *size* GPUs."""
        return _regions(self.held) if self.held else (Region(0, ENDLESS, 0, size),)


FILLED = Placement()
ENDLESS = 2**62


class Region(NamedTuple):
    """The ranks from *start* to *stop* sit in domains from *domain* on that hold *held* each."""

    start: int
    stop: int
    domain: int
    held: int

    def of(self, rank: int) -> tuple[int, int]:
        """The domain of *rank*, and its place there."""
        domain, local = divmod(rank - self.start, self.held)
        return self.domain + domain, local


@lru_cache(maxsize=1024)
def _regions(held: tuple[int, ...]) -> tuple[Region, ...]:
    found: list[Region] = []
    start = domain = 0
    for ranks, run in groupby(held):
        count = sum(1 for _ in run)
        found.append(Region(start, start + count * ranks, domain, ranks))
        start, domain = start + count * ranks, domain + count
    found[-1] = found[-1]._replace(stop=ENDLESS)
    return tuple(found)


def _all_between(start: int, stop: int, size: int) -> dict[int, range]:
    """What ranks that follow each other hold: a whole world of them takes no longer than its domains."""
    domains = range(start // size, -(-stop // size))
    whole = dict.fromkeys(domains, range(size))
    first, last = domains[0], domains[-1]
    whole[last] = range(stop - last * size)
    whole[first] = range(start - first * size, whole[first].stop)
    return whole


@lru_cache(maxsize=1024)
def placed(place: Place, cluster: Cluster, ranks: int, whole: tuple[int, ...] = ()) -> Placement:
    """Where *ranks* of a job sit. *whole*: runs of ranks to keep in one domain, the most important first."""
    if cluster.topology.scale_up_nodes == 1 or ranks <= cluster.domain_gpus:
        return FILLED
    return PLACES[place](cluster, ranks, whole)


def _packed(cluster: Cluster, ranks: int, whole: tuple[int, ...]) -> Placement:
    return FILLED


def _even(cluster: Cluster, ranks: int, whole: tuple[int, ...]) -> Placement:
    """Whole nodes and groups, in as few domains as hold them, whose numbers differ by one unit at most."""
    units = [cluster.node.gpus]
    for run in whole:
        if lcm(units[-1], run) <= cluster.domain_gpus:
            units.append(lcm(units[-1], run))
    domains = None if cluster.gpus is None else cluster.gpus // cluster.domain_gpus
    for unit in reversed(units):
        count, rest = divmod(ranks, unit)
        used = -(-count // (cluster.domain_gpus // unit))
        if rest == 0 and (domains is None or used <= domains):
            share, more = divmod(count, used)
            return Placement(tuple(unit * (share + (domain < more)) for domain in range(used)))
    return FILLED


PLACES: dict[Place, Callable[[Cluster, int, tuple[int, ...]], Placement]] = {Place.EVEN: _even, Place.PACKED: _packed}
