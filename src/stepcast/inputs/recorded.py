"""What ``stepcast record`` wrote beside its traces: step boundaries, and what collective libraries logged."""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import RESULT
from stepcast.ir.measured import CollectiveLog

# Folders beside the traces.
STEPS, FLIGHT, INSPECTOR = "steps", "flight-recorder", "inspector"


class _Message(msgspec.Struct):
    start_s: float
    end_s: float
    name: str
    bytes: int
    ranks: list[int] = []


class _Rank(msgspec.Struct):
    rank: int
    step_ends_s: list[float]
    window: tuple[int, int]
    ahead_s: float = 0.0
    peak_bytes: int = 0
    host: str = ""
    collectives: list[_Message] = []


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """One process of a recorded job."""

    rank: int
    host: str
    steps_s: tuple[float, ...]  # each step from the second on, by the wall clock
    window: range  # those that the profiler saw
    ahead_s: float
    peak_bytes: int
    collectives: int

    @property
    def outside_s(self) -> float:
        """The median step outside of the window; those that start and warm up the profiler left out."""
        near = range(self.window.start - 2, self.window.stop + 1)
        plain = [each for at, each in enumerate(self.steps_s) if at not in near]
        return statistics.median(plain or self.steps_s or [0.0])

    @property
    def window_s(self) -> float | None:
        inside = [each for at, each in enumerate(self.steps_s) if at in self.window]
        return statistics.mean(inside) if inside else None

    def facts(self) -> dict[str, Any]:
        window_s, outside_s = self.window_s, self.outside_s
        return {
            "rank": self.rank,
            "host": self.host,
            "steps": len(self.steps_s) + 1,
            "step_s": outside_s,
            "window_step_s": window_s,
            "overhead": window_s / outside_s - 1 if window_s and outside_s else None,
            "ahead_s": self.ahead_s,
            "peak_bytes": self.peak_bytes,
            "collectives": self.collectives,
        }


def read_steps(folder: str) -> list[RecordedRank]:
    """The ranks in *folder*, in order; none where there is no such folder."""
    if not os.path.isdir(folder):
        return []
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    return sorted((_read(os.path.join(folder, name)) for name in names), key=lambda each: each.rank)


def read_logs(folder: str) -> list[CollectiveLog]:
    """What the flight recorder and NCCL's Inspector wrote, where the recorded *folder* holds it."""
    from stepcast.inputs.collective_logs import read_run_flight_recorder, read_run_inspector

    readers: dict[str, Callable[[Sequence[Source]], CollectiveLog]] = {
        FLIGHT: read_run_flight_recorder,
        INSPECTOR: read_run_inspector,
    }
    found = []
    for name, read in readers.items():
        inside = os.path.join(folder, name)
        files = sorted(os.listdir(inside)) if os.path.isdir(inside) else []
        if files:
            found.append(read([Source(os.path.join(inside, file)) for file in files]))
    return found


def _read(path: str) -> RecordedRank:
    try:
        found = msgspec.json.decode(Source(path).data(RESULT), type=_Rank)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"no steps of a recorded job: {error}", path) from None
    skip, steps = found.window
    return RecordedRank(
        rank=found.rank,
        host=found.host,
        steps_s=tuple(after - before for before, after in pairwise(found.step_ends_s)),
        # Step number skip + 1 warms the profiler up; differences begin with step 2.
        window=range(skip, skip + steps),
        ahead_s=found.ahead_s,
        peak_bytes=found.peak_bytes,
        collectives=len(found.collectives),
    )
