"""The candidates of several parts as one table: those that may fit, then those that nearly do."""

from collections.abc import Sequence

import numpy as np

from stepcast.hardware import Cluster
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.searching.bound import Bounding, Bounds
from stepcast.searching.columns import LAYOUT, Tick
from stepcast.searching.result import SpacePart
from stepcast.searching.timing import Timing

# Rules of thumb by which candidates are ordered before their bounds are known.
AGAIN = {"none": 1.0, "selective": 1.02, "full": 4 / 3}
WAYS = 0.03
ROOMY = 0.85


class Bounded:
    """A number for each candidate, and its bounds as far as they are known."""

    def __init__(
        self,
        parts: Sequence[SpacePart],
        cluster: Cluster,
        capacity: float,
        near: float,
        workers: int = 1,
        tick: Tick | None = None,
    ) -> None:
        self.parts, self.capacity = parts, capacity
        self.boundings = [Bounding(part.space, cluster, part.framework, workers, tick) for part in parts]
        found = [bounding.fitting() for bounding in self.boundings]
        self.legal = sum(int(allowed.sum()) for allowed, _ in found)
        least = [float(memory.min(initial=np.inf)) for _, memory in found]
        self.smallest_bytes = min(least) if self.legal else None
        few = [np.flatnonzero(allowed & (memory <= capacity)) for allowed, memory in found]
        more = [np.flatnonzero(allowed & (memory > capacity) & (memory <= near)) for allowed, memory in found]
        self.fitting = sum(map(len, few))
        both = [*enumerate(few), *enumerate(more)]
        self.part = np.concatenate([np.full(len(rows), number) for number, rows in both])
        self.row: IntArray = np.concatenate([rows for _, rows in both])
        self.ranks: IntArray = np.concatenate([parts[number].rows[rows] for number, rows in both])
        self.gpus: IntArray = np.concatenate([parts[number].space.columns["gpus"][rows] for number, rows in both])
        self.memory_bytes: FloatArray = np.concatenate([found[number][1][rows] for number, rows in both])
        self.time_s: FloatArray = np.full(len(self.row), np.inf)
        self.computing_s: FloatArray = np.full(len(self.row), np.inf)
        self.timings: list[Timing] = []
        self.kinds: IntArray = np.zeros(len(self.row), dtype=np.int64)
        kinds = 0
        for number, bounding in enumerate(self.boundings):
            here = self.part == number
            timing = bounding.timing(np.sort(self.row[here]))
            self.timings.append(timing)
            self.kinds[here] = kinds + timing.hot.kind[self.row[here]]
            kinds += len(timing.hot.first)

    @property
    def priced(self) -> int:
        """Kinds of layers that were priced."""
        return sum(timing.priced for timing in self.timings)

    def promising(self) -> IntArray:
        """Return candidates that may fit, one of each layout and sharding, those that tend to be fast first.

        It decides which bounds are worked out first where time is short. A forward computed again is a third
        more work, the bubble is (pp - 1) / (vpp x micro-batches) (Narayanan et al. 2021), and each doubling
        of the ways that exchange activations costs a little. Pipelines and shardings take turns.
        """
        order: FloatArray = np.zeros(self.fitting)
        layout: IntArray = np.zeros(self.fitting, dtype=np.int64)
        turn: IntArray = np.zeros(self.fitting, dtype=np.int64)
        for which, part in enumerate(self.parts):
            here = np.flatnonzero(self.part[: self.fitting] == which)
            space, rows = part.space, self.row[here]
            column = {name: space.column(name)[rows] for name in (*LAYOUT, "sharding", "vpp", "recompute")}
            again = np.array([AGAIN[name] for name in space.axes.recompute])[column["recompute"]]
            bubble = (column["pp"] - 1) / (column["vpp"] * space.micro_batches[rows])
            ways = np.log2(column["tp"] * column["cp"] * column["ep"])
            order[here] = again * (1 + bubble) * (1 + WAYS * ways)
            turn[here] = column["pp"] * len(space.axes.sharding) + column["sharding"]
            layout[here] = turn[here]
            for name in LAYOUT:
                layout[here] = layout[here] * (int(column[name].max(initial=0)) + 1) + column[name]
        # Bounds of memory are lower ones: what nearly fills a GPU by them often does not fit.
        order[self.memory_bytes[: self.fitting] > ROOMY * self.capacity] += AGAIN["full"]
        ranked = np.argsort(order, kind="stable")
        ranked = ranked[np.sort(np.unique(layout[ranked], return_index=True)[1])]
        by_turn = np.argsort(turn[ranked], kind="stable")
        _, starts, counts = np.unique(turn[ranked][by_turn], return_index=True, return_counts=True)
        place = np.empty(len(ranked), dtype=np.int64)
        place[by_turn] = np.arange(len(ranked)) - np.repeat(starts, counts)
        found: IntArray = ranked[np.argsort(place, kind="stable")]
        return found

    def place(self, number: int) -> tuple[SpacePart, int]:
        """The part of a candidate, and its row there."""
        return self.parts[int(self.part[number])], int(self.row[number])

    def bound(self, numbers: IntArray, rough: bool = False) -> Bounds:
        """The bounds of some, tight ones unless *rough* ones are asked for; they are kept."""
        for which, timing in enumerate(self.timings):
            here = numbers[self.part[numbers] == which]
            self.time_s[here], self.computing_s[here] = timing.times(self.row[here], rough)
        return Bounds(
            np.ones(len(numbers), dtype=np.bool_),
            self.time_s[numbers],
            self.computing_s[numbers],
            self.memory_bytes[numbers],
        )
