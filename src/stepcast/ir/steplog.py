"""What a training program printed of its steps, and what a collective library wrote of its calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class LoggedStep(NamedTuple):
    """One line of a log; what it does not say is None."""

    step: int
    seconds: float | None = None
    tflops_per_gpu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples: int | None = None  # of the global batch
    memory_bytes: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class StepLog:
    """The steps of one run, as its program printed them."""

    steps: tuple[LoggedStep, ...]
    source: str = ""
    program: str = ""
    peak_bytes: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class LoggedCollective(NamedTuple):
    """One collective that one rank called."""

    rank: int
    group: str
    turn: int  # among the calls of its group
    kind: str
    size_bytes: int
    state: str = "completed"
    issued_s: float | None = None
    seconds: float | None = None
    bus_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class CollectiveLog:
    """Calls of some or all ranks of a job, and who belongs to which group."""

    calls: tuple[LoggedCollective, ...]
    ranks: tuple[int, ...]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    source: str = ""
    program: str = ""
    warnings: tuple[str, ...] = ()
