"""Error bands of predictions, and corrections fitted to measured runs."""

from dataclasses import asdict

from stepcast.ir.check import require
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


# The remaining error of one framework on one generation of GPUs: a factor that users can ask for.


@dataclass(frozen=True, slots=True)
class Residual:
    """Measured over predicted, the median of *rows* published runs from *sources* sources.

    It holds for the framework, the generation and the kind of model it was fitted on, and nowhere else.
    *spread*: half of those runs lay within that share of it.
    """

    generation: str
    experts: bool
    factor: float
    rows: int
    sources: int
    spread: float

    def __post_init__(self) -> None:
        require(0.2 <= self.factor <= 5, f"a residual of {self.factor} is no correction")
        require(self.rows > 0 and self.sources > 0, "a residual needs the runs it was fitted to")
        require(0 <= self.spread < 1, f"a residual cannot spread by {self.spread}")

    @property
    def kind(self) -> str:
        return f"{'experts' if self.experts else 'dense'} on {self.generation}"

    def describe(self, framework: str) -> str:
        many = "source" if self.sources == 1 else "sources"
        return (
            f"residual of {framework}, {self.kind}: times {self.factor:g}, the median of {self.rows} runs of "
            f"{self.sources} {many}, half of them within {self.spread * 100:.0f} %"
        )

    def facts(self) -> dict[str, object]:
        return asdict(self)
