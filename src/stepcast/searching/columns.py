"""What depends on a few columns, worked out once for each distinct row of them and spread over all."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.searching.crew import in_parallel
from stepcast.searching.space import Space

Found = TypeVar("Found")

LAYOUT = ("gpus", "tp", "cp", "ep", "expert_tp", "pp")
KEPT = ("tp", "cp", "ep", "expert_tp", "micro_batch", "recompute", "sequence_parallel", "precision")
LAYER = ("gpus", *KEPT, "overlap")
PIECES = ("pp", "vpp", "schedule")
STATES = (*LAYOUT, "sharding", "precision")
Tick = Callable[[], None]


class SpaceColumns:
    """The columns of a space, and others that follow from them; *tick* is called while much is worked out."""

    def __init__(self, space: Space, workers: int = 1, tick: Tick | None = None) -> None:
        self.space, self.workers, self.tick = space, workers, tick
        self.further: dict[str, IntArray] = {}

    def column(self, name: str) -> IntArray:
        return self.further[name] if name in self.further else self.space.column(name)

    def distinct(self, rows: IntArray, names: tuple[str, ...]) -> tuple[IntArray, IntArray]:
        """The first candidate of each distinct row of *names* among *rows*, and to which each belongs."""
        packed = np.zeros(len(rows), dtype=np.int64)
        for name in names:
            column = self.column(name)[rows]
            packed = packed * (int(column.max(initial=0)) + 1) + column
        _, first, member = np.unique(packed, return_index=True, return_inverse=True)
        return rows[first], member.reshape(-1)

    def holds(self, rows: IntArray, names: tuple[str, ...], of: Callable[[int], bool]) -> BoolArray:
        first, member = self.distinct(rows, names)
        found: BoolArray = np.array(self.every(of, first), dtype=np.bool_)[member]
        return found

    def spread(self, rows: IntArray, names: tuple[str, ...], of: Callable[[int], FloatArray]) -> FloatArray:
        """An array for each of *rows*: what *of* says of the first candidate with the same *names*."""
        first, member = self.distinct(rows, names)
        return np.stack(self.every(of, first))[member]

    def every(self, of: Callable[[int], Found], rows: IntArray) -> Sequence[Found]:
        """*of* each of *rows*, over all workers."""
        return in_parallel(of, rows.tolist(), self.workers, self.tick)

    def several(self, rows: IntArray, names: tuple[str, ...]) -> list[tuple[int, IntArray]]:
        """The first candidate of each distinct row of *names*, and where in *rows* all of them are."""
        if not len(rows):
            return []
        first, member = self.distinct(rows, names)
        order = np.argsort(member, kind="stable")
        cuts = np.searchsorted(member[order], np.arange(1, len(first)))
        return list(zip(first.tolist(), np.split(order, cuts), strict=True))


class Lazily:
    """An array for each of some rows, worked out when first asked for, once for rows with like columns."""

    def __init__(
        self, columns: SpaceColumns, rows: IntArray, names: tuple[str, ...], of: Callable[[int], FloatArray]
    ) -> None:
        self.columns, self.of = columns, of
        self.first, member = columns.distinct(rows, names)
        self.kind = np.full(len(columns.space), -1)
        self.kind[rows] = member
        self.known = np.zeros(len(self.first), dtype=np.bool_)
        self.found: FloatArray | None = None

    def get(self, row: int) -> FloatArray | None:
        """That of *row* where it is known."""
        kind = int(self.kind[row])
        return self.found[kind] if self.found is not None and self.known[kind] else None

    def at(self, rows: IntArray) -> FloatArray:
        kinds = self.kind[rows]
        if len(new := np.unique(kinds[~self.known[kinds]])):
            made = np.stack(self.columns.every(self.of, self.first[new]))
            if self.found is None:
                self.found = np.zeros((len(self.first), *made.shape[1:]))
            self.found[new] = made
            self.known[new] = True
        assert self.found is not None
        values: FloatArray = self.found[kinds]
        return values
