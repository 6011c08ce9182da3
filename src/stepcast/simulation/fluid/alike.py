"""Flows and links that are alike: they get the same, so one of each stands for all.

Two flows are alike when they begin together, weigh the same and put the same bytes on links that are alike;
two links, when they have the same capacity and carry the same bytes of flows that are alike. The coarsest
such division is found by refining one that is too coarse (Paige and Tarjan 1987; Grohe and others,
Dimension reduction via colour refinement, 2014). Max-min fair rates are equal within each class, as filling
shows: flows that are alike rise alike, so links that are alike are full at the same moment and stop flows
that are alike.
That holds for any classes of flows that are under way, whichever they are.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepcast.ir.flows import Floats, FlowSet, Ints, Links

DIGITS = 40
"""Bits of bytes that are looked at: what differs by less differs by its rounding."""


class Alike(NamedTuple):
    """The class of every flow, those of earlier sets first, and of every link."""

    flow: Ints
    link: Ints


def alike(links: Links, flows: FlowSet, begins: Ints) -> Alike:
    """Classes of *flows*, where those with the same number in *begins* begin together."""
    mantissa, exponent = np.frexp(flows.bytes_on)
    bytes_seen = _mixed(
        np.rint(mantissa * 2.0**DIGITS).astype(np.uint64) + _mixed(exponent.astype(np.uint64))
    )
    by_link = np.argsort(flows.link, kind="stable")
    used, link_first = np.unique(flows.link[by_link], return_index=True)
    full = np.flatnonzero(np.diff(flows.first))
    flow = _numbered(begins, flows.weight)
    link = _numbered(links.tier, links.capacity_bytes_per_s)
    known = 0
    while known < (known := int(flow.max(initial=-1)) + int(link.max(initial=-1)) + 2):
        seen = np.zeros(len(flow), np.uint64)
        if len(full):
            seen[full] = np.add.reduceat(_mixed(bytes_seen + _mixed(link)[flows.link]), flows.first[full])
        flow = _numbered(flow, seen)
        carried = np.zeros(len(link), np.uint64)
        if len(used):
            entries = _mixed(bytes_seen + _mixed(flow)[flows.flow])[by_link]
            carried[used] = np.add.reduceat(entries, link_first)
        link = _numbered(link, carried)
    return Alike(flow, link)


def _mixed(values: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Whole numbers scattered over 64 bits (splitmix64's finaliser)."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _numbered(first: Ints, second: NDArray[np.generic]) -> Ints:
    """The pairs numbered from 0, in their order."""
    order = np.lexsort((second, first))
    one, two = first[order], second[order]
    new = np.ones(len(order), np.int64)
    new[1:] = (one[1:] != one[:-1]) | (two[1:] != two[:-1])
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(new) - 1
    return numbers


class Merged(NamedTuple):
    """Classes in place of flows and links: what all flows of a class put on one link of another."""

    flow: Ints
    link: Ints
    bytes_on: Floats


def merged(found: Alike, flows: FlowSet) -> Merged:
    """The entries of classes, by flow and then by link."""
    links = int(found.link.max(initial=-1)) + 1
    keys = found.flow[flows.flow] * max(links, 1) + found.link[flows.link]
    entries, of = np.unique(keys, return_inverse=True)
    total = np.bincount(of.ravel(), flows.bytes_on, len(entries)).astype(np.float64)
    flow, link = np.divmod(entries, max(links, 1))
    count = np.bincount(found.link, minlength=links)
    return Merged(flow, link, total / count[link])
