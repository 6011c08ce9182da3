"""Which GPUs a job gets: how many of each scale-up domain, where those hold several nodes (an NVL72 rack).

Ranks follow each other in a domain and from one domain to the next; a placement says where they move on.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from math import lcm

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
        starts = [0, *accumulate(self.held)]
        for rank in ranks:
            domain, local = divmod(rank, size)
            if self.held:
                domain = bisect_right(starts, rank) - 1
                local = rank - starts[domain]
            domains.setdefault(domain, []).append(local)
        return domains

    @property
    def period(self) -> int | None:
        """After how many ranks domains repeat: 0 for whole ones, None where they differ."""
        return self.held[0] if len(set(self.held)) == 1 else None if self.held else 0


FILLED = Placement()


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


PLACES: dict[Place, Callable[[Cluster, int, tuple[int, ...]], Placement]] = {
    Place.EVEN: _even,
    Place.PACKED: _packed,
}
