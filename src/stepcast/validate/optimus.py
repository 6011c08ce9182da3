"""OptimusPrime runs predicted from their configuration: a folder of logs, each left out of its own fit."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stepcast.hardware import load_cluster
from stepcast.hardware.gpu import Gpu
from stepcast.inputs.optimus_log import LOG_END, find_gpustat, read_gpustat, read_logs
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import folder_files
from stepcast.ir.measured import RunLog
from stepcast.optimus.calibration import CLUSTER, Observation, fit, lengths_of, observed, planned, shipped
from stepcast.optimus.cost import machine_of
from stepcast.optimus.memory import optimus_memory
from stepcast.optimus.program import step_s
from stepcast.validate.scoreboard import Measurements, ScoredRow, columns

# Peak memory of OptimusPrime runs by stage, beside what gpustat saw.

WITHIN = 0.10


@dataclass(frozen=True, slots=True)
class StagePeak:
    """The fullest GPU of a stage; gpustat looks every two seconds, so that it may miss the top."""

    run: str
    stage: int
    measured_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def stage_peaks(log: RunLog, gpu: Gpu) -> tuple[StagePeak, ...]:
    """Every stage of *log*; nothing where no gpustat log lies beside it, or data parallelism is used."""
    file = find_gpustat(log.source)
    if file is None or log.layout.dp > 1:
        return ()
    try:
        peaks = read_gpustat(Source(file))
    except FormatError:
        return ()
    stages = optimus_memory(planned(log), gpu, [round(length) for length in lengths_of(log)])
    tp, name = log.layout.tp, os.path.basename(log.source).removesuffix(LOG_END)
    if len(peaks) < log.layout.tp * log.layout.pp:
        return ()
    return tuple(
        StagePeak(name, stage.stage, max(peaks[stage.stage * tp : (stage.stage + 1) * tp]), stage.total)
        for stage in stages
    )


def figures(peaks: Sequence[StagePeak]) -> Iterator[tuple[str, float]]:
    """What the scoreboard shows."""
    errors = [peak.error for peak in peaks]
    if not errors:
        return
    yield "peak memory by stage: mean_abs_error", sum(abs(error) for error in errors) / len(errors)
    yield "peak memory by stage: worst_abs_error", max(abs(error) for error in errors)
    yield "peak memory by stage: mean_error", sum(errors) / len(errors)
    within = sum(abs(error) <= WITHIN for error in errors)
    yield f"stages whose peak memory is within {WITHIN:.0%}", within / len(errors)


# Fewer other runs than constants cannot fit them.
FEWEST_OTHERS = 4


def rows(logs: Sequence[RunLog], skip: Callable[[str, str], None]) -> tuple[ScoredRow, ...]:
    """Each run predicted from constants that never saw it.

    Of the run itself only the configuration is used, and its steps' padded lengths: nothing timed.
    The constants are fitted to the other runs; for a run that the shipped constants were not fitted to,
    they are the shipped ones.
    """
    machine = machine_of(load_cluster(CLUSTER))
    seen: list[Observation] = []
    for log in logs:
        try:
            seen.append(observed(log, machine))
        except ValueError as error:
            skip(log.source, str(error).removeprefix(f"{log.source}: "))
    found = []
    for one in seen:
        others = [other for other in seen if other is not one]
        if one.name not in shipped().runs:
            constants, fitted = shipped().constants, "shipped"
        elif len(others) >= FEWEST_OTHERS:
            constants, fitted = fit(others, machine).constants, "fitted to the other runs"
        else:
            skip(one.source, f"fewer than {FEWEST_OTHERS} other runs to fit to")
            continue
        predicted_s = step_s(one.plan, machine, constants)
        layout = one.plan.layout
        tags = {"layout": f"tp{layout.tp} dp{layout.dp} pp{layout.pp}", "constants": fitted}
        found.append(ScoredRow(one.name, one.measured_s, predicted_s, tags))
    return tuple(found)


def peaks(logs: Sequence[RunLog]) -> tuple[StagePeak, ...]:
    """Peak memory of every stage of every run with a gpustat log beside it."""
    gpu = load_cluster(CLUSTER).gpu
    found: list[StagePeak] = []
    for log in logs:
        try:
            found += stage_peaks(log, gpu)
        except ValueError:  # told of by rows()
            continue
    return tuple(found)


def measure_folder(folder: str) -> Measurements:
    skipped: dict[str, int] = {}

    def skip(path: str, reason: str) -> None:
        skipped[reason] = skipped.get(reason, 0) + 1

    logs = read_logs([folder] if os.path.isfile(folder) else folder_files(folder), skip)
    found = rows(logs, skip)
    notes = ["a run's configuration and its steps' lengths are used; nothing that was timed in it"]
    notes += [f"{os.path.basename(log.source)}: {told}" for log in logs for told in log.warnings]
    return Measurements(columns(found), skipped, figures=dict(figures(peaks(logs))), notes=tuple(notes))
