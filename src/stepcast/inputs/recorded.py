"""Files of ``stepcast record`` next to its traces: step boundaries, and logs of collective libraries."""

import os
import statistics
from itertools import pairwise

import msgspec

from stepcast.inputs.source import Source, prefix_errors
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import RESULT
from stepcast.ir.measured import CollectiveLog

# Folders next to the traces.
STEPS, FLIGHT, INSPECTOR = "steps", "flight-recorder", "inspector"


class _RecordedMessage(msgspec.Struct):
    start_s: float
    end_s: float
    name: str
    bytes: int
    ranks: list[int] = []


class _RecordedFile(msgspec.Struct):
    rank: int
    step_ends_s: list[float]
    window: tuple[int, int]
    ahead_s: float = 0.0
    peak_bytes: int = 0
    host: str = ""
    collectives: list[_RecordedMessage] = []


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """One process of a recorded job."""

    rank: int
    host: str
    steps_s: tuple[float, ...]  # each step from the second on, by the wall clock
    window: range  # the steps that the profiler saw
    ahead_s: float
    peak_bytes: int
    collectives: int

    @property
    def outside_s(self) -> float:
        """Return the median step outside of the window, without those that start and warm up the profiler."""
        near = range(self.window.start - 2, self.window.stop + 1)
        plain = [step_s for index, step_s in enumerate(self.steps_s) if index not in near]
        return statistics.median(plain or self.steps_s or [0.0])

    @property
    def window_s(self) -> float | None:
        inside = [step_s for index, step_s in enumerate(self.steps_s) if index in self.window]
        return statistics.mean(inside) if inside else None

    def facts(self) -> dict[str, object]:
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
    """Return the ranks in *folder*, in order; none where there is no such folder."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json")) if os.path.isdir(folder) else []
    return sorted((_read_rank(os.path.join(folder, name)) for name in names), key=lambda recorded: recorded.rank)


def read_logs(folder: str) -> list[CollectiveLog]:
    """Return the logs of the flight recorder and of NCCL's Inspector, where the recorded *folder* holds them."""
    from stepcast.inputs.collective_logs import read_run_flight_recorder, read_run_inspector

    logs = []
    for name, read in ((FLIGHT, read_run_flight_recorder), (INSPECTOR, read_run_inspector)):
        inside = os.path.join(folder, name)
        if files := sorted(os.listdir(inside)) if os.path.isdir(inside) else []:
            logs.append(read([Source(os.path.join(inside, file)) for file in files]))
    return logs


def _read_rank(path: str) -> RecordedRank:
    with prefix_errors("no steps of a recorded job", path, (msgspec.DecodeError, UnicodeDecodeError)):
        file = msgspec.json.decode(Source(path).data(RESULT), type=_RecordedFile)
    skip, steps = file.window
    return RecordedRank(
        rank=file.rank,
        host=file.host,
        steps_s=tuple(after - before for before, after in pairwise(file.step_ends_s)),
        # Step number skip + 1 warms the profiler up; differences begin with step 2.
        window=range(skip, skip + steps),
        ahead_s=file.ahead_s,
        peak_bytes=file.peak_bytes,
        collectives=len(file.collectives),
    )
