"""The least time and memory that each candidate takes: for all of them at once, or for those asked for."""

from dataclasses import dataclass

import numpy as np

from stepcast.hardware import Cluster
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.framework import Framework
from stepcast.searching.columns import SpaceColumns, Tick
from stepcast.searching.fitting import Fitting
from stepcast.searching.legal import legal
from stepcast.searching.space import Space
from stepcast.searching.timing import Timing


@dataclass(frozen=True)
class Bounds:
    """Of every candidate; those that are not legal have neither."""

    legal: BoolArray
    time_s: FloatArray
    computing_s: FloatArray  # of an average stage
    memory_bytes: FloatArray


def bounds(space: Space, cluster: Cluster, framework: Framework, most_bytes: float, workers: int = 1) -> Bounds:
    """Legality and memory of all candidates, and the time of those that may fit into *most_bytes*."""
    bounding = Bounding(space, cluster, framework, workers)
    allowed, memory = bounding.fitting()
    rows = np.flatnonzero(allowed & (memory <= most_bytes))
    time_s, computing_s = np.full(len(space), np.inf), np.full(len(space), np.inf)
    if len(rows):
        time_s[rows], computing_s[rows] = bounding.timing(rows).times(rows)
    return Bounds(allowed, time_s, computing_s, memory)


class Bounding:
    """Bounds of the candidates of *space*; *tick* is called while many are worked out."""

    def __init__(
        self, space: Space, cluster: Cluster, framework: Framework, workers: int = 1, tick: Tick | None = None
    ) -> None:
        self.cluster, self.framework = cluster, framework
        self.columns = SpaceColumns(space, workers, tick)

    def fitting(self) -> tuple[BoolArray, FloatArray]:
        """Which candidates are legal, and the least memory of those."""
        allowed = legal(self.columns, self.framework)
        memory = np.full(len(allowed), np.inf)
        if len(rows := np.flatnonzero(allowed)):
            memory[rows] = Fitting(self.columns, self.cluster, self.framework).bytes(rows)
        return allowed, memory

    def timing(self, rows: IntArray) -> Timing:
        """The times of *rows*."""
        return Timing(self.columns, self.cluster, self.framework, rows)
