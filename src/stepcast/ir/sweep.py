"""Measured collectives: one kind, one group, many sizes."""

import math
from dataclasses import dataclass

from stepcast.ir.dtype import DType
from stepcast.ir.work import CollectiveKind


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One size. Times are per operation; None where the test did not run that variant."""

    size_bytes: int
    out_of_place_s: float | None
    in_place_s: float | None

    def __post_init__(self) -> None:
        # Written out, not with ir.check's helpers: long logs have one of these per line.
        if type(self.size_bytes) is not int or self.size_bytes < 0:
            raise ValueError(f"size_bytes must be a whole number, zero or more, not {self.size_bytes!r}")
        for time_s in (self.out_of_place_s, self.in_place_s):
            if time_s is not None and not 0 <= time_s < math.inf:
                raise ValueError(f"times must be finite numbers, zero or more, not {time_s!r}")


@dataclass(frozen=True, slots=True)
class CollectiveSweep:
    """*kind* is None where the log does not tell (two kinds can share one bandwidth rule).

    One host thread starts the kernels of *ranks_per_thread* ranks in turn, which small messages feel.
    """

    kind: CollectiveKind | None
    ranks: int
    nodes: int
    device: str
    dtype: DType | None
    rows: tuple[SweepRow, ...]
    source: str = ""
    warnings: tuple[str, ...] = ()
    ranks_per_thread: int = 1
