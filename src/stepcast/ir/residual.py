"""What is left of the error of one framework on one generation of GPUs: a factor that users can ask for."""

from dataclasses import asdict, dataclass
from typing import Any

from stepcast.ir.check import require


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

    def said(self, framework: str) -> str:
        many = "source" if self.sources == 1 else "sources"
        return (
            f"residual of {framework}, {self.kind}: times {self.factor:g}, the median of {self.rows} runs of "
            f"{self.sources} {many}, half of them within {self.spread * 100:.0f} %"
        )

    def facts(self) -> dict[str, Any]:
        return asdict(self)
