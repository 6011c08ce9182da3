"""Distinct values of an array. numpy's own function for it loads its masked arrays, which takes longer than
a whole simulated step.
"""

from typing import NamedTuple

import numpy as np

from stepcast.simulation.pieces import Ints


class Distinct(NamedTuple):
    values: Ints
    """Each value once, rising."""
    first: Ints
    """Where it stands first."""
    inverse: Ints
    """For each element the index of its value."""


def distinct(elements: Ints) -> Distinct:
    count = len(elements)
    if count and elements.min() >= 0 and (most := int(elements.max())) < FEW * count:
        return _counted(elements, most)
    order = np.argsort(elements, kind="stable")
    ordered = elements[order]
    starts = np.ones(count, bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    inverse = np.empty(count, np.int64)
    inverse[order] = np.cumsum(starts) - 1
    return Distinct(ordered[starts], order[starts], inverse)


FEW = 8
"""So many possible values for each element: to look at all of them takes less than to sort."""


def _counted(elements: Ints, most: int) -> Distinct:
    """Of numbers from 0 to *most*."""
    place = np.full(most + 1, -1, np.int64)
    place[elements[::-1]] = np.arange(len(elements) - 1, -1, -1)
    values = np.flatnonzero(place >= 0)
    first = place[values]
    place[values] = np.arange(len(values))
    return Distinct(values, first, place[elements])


def distinct_rows(rows: Ints) -> Distinct:
    """The same for the rows of a table; *values* numbers them."""
    known: dict[bytes, int] = {}
    packed = np.ascontiguousarray(rows)
    width = packed.itemsize * packed.shape[1]
    data = packed.tobytes()
    inverse = np.empty(len(rows), np.int64)
    first: list[int] = []
    for at in range(len(rows)):
        number = known.setdefault(data[at * width : (at + 1) * width], len(known))
        if number == len(first):
            first.append(at)
        inverse[at] = number
    return Distinct(np.arange(len(known)), np.array(first, np.int64), inverse)
