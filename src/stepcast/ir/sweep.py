"""Measured collectives: one kind, one group, many sizes."""

from dataclasses import dataclass

from stepcast.ir.check import require_amounts, require_counts
from stepcast.ir.dtype import DType
from stepcast.ir.work import CollectiveKind


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One size. Times are per operation; None where the test did not run that variant."""

    size_bytes: int
    out_of_place_s: float | None
    in_place_s: float | None

    def __post_init__(self) -> None:
        require_counts(self, 0, "size_bytes")
        for name in ("out_of_place_s", "in_place_s"):
            if getattr(self, name) is not None:
                require_amounts(self, name)


@dataclass(frozen=True, slots=True)
class CollectiveSweep:
    """*kind* is None where the log does not tell (two kinds can share one bandwidth rule)."""

    kind: CollectiveKind | None
    ranks: int
    nodes: int
    device: str
    dtype: DType | None
    rows: tuple[SweepRow, ...]
    source: str = ""
    warnings: tuple[str, ...] = ()
