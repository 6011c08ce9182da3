"""Pairs of keys and values, collected by key in the order in which keys first occur."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def group_by_key(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def sum_by_key(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Return the sum of the numbers of each key."""
    sums: dict[Key, float] = {}
    for key, number in pairs:
        sums[key] = sums.get(key, 0.0) + number
    return sums
