"""Links that failed or are slow, told by their names."""

from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from stepcast.hardware.topology import Topology
from stepcast.ir.flows import Links


def with_faults(links: Links, topology: Topology) -> tuple[Links, NDArray[np.bool_] | None]:
    """*links* with the capacities that are left, and which of them work (None: all)."""
    if not (topology.failed or topology.slow):
        return links, None
    names = [links.name(link) for link in range(len(links))]
    alive = np.ones(len(links), bool)
    left = links.capacity_bytes_per_s.copy()
    for pattern in topology.failed:
        alive[_named(pattern, names, "failed")] = False
    for entry in topology.slow:
        pattern, share = _slowed(entry)
        left[_named(pattern, names, "slow")] *= share
    return Links(links.tiers, links.tier, left, links.namer), alive


def _slowed(entry: str) -> tuple[str, float]:
    pattern, _, told = entry.rpartition(":")
    try:
        share = float(told)
    except ValueError:
        share = -1.0
    if not (pattern and 0 < share <= 1):
        raise ValueError(
            f"network.slow: {entry!r} is not a link and the share that is left, above 0 and at most 1, "
            "such as 'node 3 NIC 2 up: 0.5'"
        )
    return pattern, share


def _named(pattern: str, names: list[str], key: str) -> list[int]:
    """The links that *pattern* names: itself, or with * for anything."""
    found = [link for link, name in enumerate(names) if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(
            f"network.{key}: no link is called {pattern!r}; they are called such as {names[0]!r} "
            f"or {names[-1]!r}"
        )
    return found
