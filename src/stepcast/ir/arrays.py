"""Names for the numpy array types used across the package, and the distinct values of arrays."""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Int32Array = NDArray[np.int32]
UIntArray = NDArray[np.uint64]
BoolArray = NDArray[np.bool_]
TextArray = NDArray[np.str_]

Columns = TypeVar("Columns", bound=tuple[IntArray | FloatArray, ...])  # a named tuple


def take_rows(columns: Columns, rows: BoolArray | IntArray) -> Columns:
    """Return the *rows* of *columns* that a mask or numbers select."""
    return type(columns)(*(column[rows] for column in columns))


def join_rows(parts: Iterable[Columns], nothing: Columns) -> Columns:
    """Return the rows of all *parts*, one part after the other; *nothing* has none."""
    filled = [part for part in parts if len(part[0])]
    return type(nothing)(*(np.concatenate(column) for column in zip(*filled, strict=True))) if filled else nothing


FEW_VALUES = 8
"""With at most so many possible values per element, counting them is faster than sorting."""


class Distinct(NamedTuple):
    """The distinct values of an array. ``numpy.unique`` imports masked arrays, which takes longer than a step."""

    values: IntArray  # rising
    first: IntArray  # the first index of each value
    inverse: IntArray  # for each element the index of its value


def distinct(elements: IntArray) -> Distinct:
    """Return the distinct values of *elements*."""
    count = len(elements)
    if count and elements.min() >= 0 and (most := int(elements.max())) < FEW_VALUES * count:
        place = np.full(most + 1, -1, np.int64)
        place[elements[::-1]] = np.arange(count - 1, -1, -1)
        values = np.flatnonzero(place >= 0)
        first = place[values]
        place[values] = np.arange(len(values))
        return Distinct(values, first, place[elements])
    order = np.argsort(elements, kind="stable")
    ordered = elements[order]
    starts = np.ones(count, bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    inverse = np.empty(count, np.int64)
    inverse[order] = np.cumsum(starts) - 1
    return Distinct(ordered[starts], order[starts], inverse)


def distinct_rows(columns: Iterable[IntArray]) -> tuple[IntArray, IntArray]:
    """Return the first of the rows of *columns* that are equal, in rising order, and for each row its number among
    these. Columns are of small whole numbers.
    """
    numbers: IntArray | None = None
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if numbers is None:
            numbers, count = np.zeros(len(column), np.int64), 1
        elif count * size > FEW_VALUES * len(column):
            values, _, numbers = distinct(numbers)
            count = len(values)
        numbers = numbers * size + column
        count *= size
    assert numbers is not None
    _, first, member = distinct(numbers)
    return first, member
