"""What depends on a few columns, worked out once for each distinct row of them and spread over all."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stepcast.searching.crew import in_parallel
from stepcast.searching.space import Ints, Space

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LAYOUT = ("gpus", "tp", "cp", "ep", "expert_tp", "pp")
KEPT = ("tp", "cp", "ep", "expert_tp", "micro_batch", "recompute", "sequence_parallel", "precision")
LAYER = ("gpus", *KEPT, "overlap")
PIECES = ("pp", "vpp", "schedule")
STATES = (*LAYOUT, "sharding", "precision")


class Columns:
    """The columns of a space, and others that follow from them."""

    def __init__(self, space: Space, workers: int = 1) -> None:
        self.space, self.workers = space, workers
        self.further: dict[str, Ints] = {}

    def column(self, name: str) -> Ints:
        return self.further[name] if name in self.further else self.space.column(name)

    def distinct(self, rows: Ints, names: tuple[str, ...]) -> tuple[Ints, Ints]:
        """The first candidate of each distinct row of *names* among *rows*, and to which each belongs."""
        packed = np.zeros(len(rows), dtype=np.int64)
        for name in names:
            column = self.column(name)[rows]
            packed = packed * (int(column.max(initial=0)) + 1) + column
        _, first, member = np.unique(packed, return_index=True, return_inverse=True)
        return rows[first], member.reshape(-1)

    def holds(self, rows: Ints, names: tuple[str, ...], of: Callable[[int], bool]) -> Bools:
        first, member = self.distinct(rows, names)
        found: Bools = np.array(in_parallel(of, first.tolist(), self.workers), dtype=np.bool_)[member]
        return found

    def spread(self, rows: Ints, names: tuple[str, ...], of: Callable[[int], Floats]) -> Floats:
        """An array for each of *rows*: what *of* says of the first candidate with the same *names*."""
        first, member = self.distinct(rows, names)
        return np.stack(in_parallel(of, first.tolist(), self.workers))[member]

    def several(self, rows: Ints, names: tuple[str, ...]) -> list[tuple[int, Ints]]:
        """The first candidate of each distinct row of *names*, and where in *rows* all of them are."""
        first, member = self.distinct(rows, names)
        order = np.argsort(member, kind="stable")
        cuts = np.searchsorted(member[order], np.arange(1, len(first)))
        return list(zip(first.tolist(), np.split(order, cuts), strict=True))
