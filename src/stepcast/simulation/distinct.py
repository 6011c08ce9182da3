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
    order = np.argsort(elements, kind="stable")
    ordered = elements[order]
    starts = np.ones(len(elements), bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    inverse = np.empty(len(elements), np.int64)
    inverse[order] = np.cumsum(starts) - 1
    return Distinct(ordered[starts], order[starts], inverse)


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
