"""Error bands of predictions."""

from stepcast.ir.dataclass import dataclass
from stepcast.ir.facts import BandFacts

LEVEL = 0.9
"""The share of the runs that a band was fitted to inside it; also of the range of a single cost estimate."""


@dataclass(frozen=True, slots=True)
class Band:
    """Measured over predicted: from *low* to *high* for a share *level* of runs *of* that kind.

    The two need not be equally far from 1. *widened* names what of this prediction nobody has measured.
    """

    low: float
    high: float
    of: str
    rows: int
    level: float = LEVEL
    widened: tuple[str, ...] = ()
    # False where no run on such GPUs was measured.
    measured: bool = True

    def around(self, step_s: float) -> tuple[float, float]:
        """Return the ends in seconds; the prediction itself is always inside."""
        return step_s * min(1.0, self.low), step_s * max(1.0, self.high)

    def facts(self, low_s: float, high_s: float) -> BandFacts:
        return {
            "low_s": low_s,
            "high_s": high_s,
            "level": self.level,
            "of": self.of,
            "rows": self.rows,
            "widened": list(self.widened),
        }
