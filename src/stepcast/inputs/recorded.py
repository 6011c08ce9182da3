"""Files of ``stepcast record`` next to its traces: step boundaries, and logs of collective libraries."""

import os
import statistics
from itertools import pairwise

import msgspec

from stepcast.inputs.collective_logs import read_run_flight_recorder, read_run_inspector
from stepcast.inputs.source import Source, prefix_errors
from stepcast.ir.limits import RESULT
from stepcast.ir.measured import CollectiveLog
from stepcast.ir.types import FactDict

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


def read_steps(folder: str) -> list[FactDict]:
    """Return the facts of the ranks in *folder*, in order; none where there is no such folder."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".json")) if os.path.isdir(folder) else []
    return sorted((_read_rank(os.path.join(folder, name)) for name in names), key=lambda recorded: recorded["rank"])


def read_logs(folder: str) -> list[CollectiveLog]:
    """Return the logs of the flight recorder and of NCCL's Inspector, where the recorded *folder* holds them."""
    logs = []
    for name, read in ((FLIGHT, read_run_flight_recorder), (INSPECTOR, read_run_inspector)):
        logs_folder = os.path.join(folder, name)
        if files := sorted(os.listdir(logs_folder)) if os.path.isdir(logs_folder) else []:
            logs.append(read([Source(os.path.join(logs_folder, file)) for file in files]))
    return logs


def _read_rank(path: str) -> FactDict:
    with prefix_errors("no steps of a recorded job", path, (msgspec.DecodeError, UnicodeDecodeError)):
        file = msgspec.json.decode(Source(path).data(RESULT), type=_RecordedFile)
    skip, steps = file.window
    # Times by the wall clock, from the second step on. Step number skip + 1 warms the profiler up.
    steps_s = [after - before for before, after in pairwise(file.step_ends_s)]
    profiled_s = [step_s for index, step_s in enumerate(steps_s) if index in range(skip, skip + steps)]
    profiled = range(skip - 2, skip + steps + 1)  # with those that start and warm up the profiler
    outside = [step_s for index, step_s in enumerate(steps_s) if index not in profiled]
    window_s = statistics.mean(profiled_s) if profiled_s else None
    outside_s = statistics.median(outside or steps_s or [0.0])
    return {
        "rank": file.rank,
        "host": file.host,
        "steps": len(steps_s) + 1,
        "step_s": outside_s,
        "window_step_s": window_s,
        "overhead": window_s / outside_s - 1 if window_s and outside_s else None,
        "ahead_s": file.ahead_s,
        "peak_bytes": file.peak_bytes,
        "collectives": len(file.collectives),
    }
