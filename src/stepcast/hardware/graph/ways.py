"""Entries of routes: which link carries which share of a message."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from stepcast.ir.flows import Floats, Ints


class RouteError(ValueError):
    """No way leads from one place to another."""


class Ways(NamedTuple):
    """Entries in any order: message *row* puts *share* of its bytes on *link*."""

    row: Ints
    link: Ints
    share: Floats

    def csr(self, rows: int, links: int) -> tuple[Ints, Ints, Floats]:
        """The links of each row from ``first[row]`` on, each once, with its share."""
        return summed(self.row, self.link, self.share, rows, links)


NO_WAYS = Ways(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def all_of(parts: Iterable[Ways]) -> Ways:
    listed = [part for part in parts if len(part.row)]
    if not listed:
        return NO_WAYS
    return Ways(*(np.concatenate(column) for column in zip(*listed, strict=True)))


def entries(row: Ints, link: Ints, share: Floats | float = 1.0) -> Ways:
    return Ways(row, link, np.broadcast_to(np.asarray(share, np.float64), row.shape))


def summed(row: Ints, link: Ints, amount: Floats, rows: int, links: int) -> tuple[Ints, Ints, Floats]:
    """Entries sorted by row and link, with the amounts of each link of a row added up."""
    key = row * links + link
    order = np.argsort(key, kind="stable")
    key = key[order]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else order
    sums = np.add.reduceat(amount[order], starts) if len(key) else np.zeros(0)
    kept_row, kept_link = np.divmod(key[starts], links)
    first = np.concatenate([[0], np.cumsum(np.bincount(kept_row, minlength=rows))])
    return first.astype(np.int64), kept_link, sums


def hashed(seed: int, *keys: Ints) -> Ints:
    """62 bits for each row of *keys* that look drawn (splitmix64: Steele, Lea and Flood, 2014)."""
    state = np.full(len(keys[0]), seed, np.uint64)
    for key in keys:
        with np.errstate(over="ignore"):
            state = (state ^ key.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    return (state >> np.uint64(2)).astype(np.int64)
