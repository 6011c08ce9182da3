"""How far from a prediction measured steps of its kind lay."""

from dataclasses import dataclass
from typing import Any

LEVEL = 0.9
"""Of the runs that a band was fitted to, the share that lies inside; also of the range of a single price."""


@dataclass(frozen=True, slots=True)
class Band:
    """Measured over predicted: from *low* to *high* for a share *level* of runs *of* that kind.

    The two need not lie equally far from 1. *widened* tells what of this prediction nobody has measured.
    """

    low: float
    high: float
    of: str
    rows: int
    level: float = LEVEL
    widened: tuple[str, ...] = ()
    # Whether any run on such GPUs was.
    measured: bool = True

    def around(self, step_s: float) -> tuple[float, float]:
        """The ends in seconds; the prediction itself is always inside."""
        return step_s * min(1.0, self.low), step_s * max(1.0, self.high)

    def facts(self) -> dict[str, Any]:
        return {"level": self.level, "of": self.of, "rows": self.rows, "widened": list(self.widened)}
