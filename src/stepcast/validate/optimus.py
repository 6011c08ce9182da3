"""OptimusPrime runs predicted from their configuration: a folder of logs, each left out of its own fit."""

import os
from collections.abc import Callable, Sequence

from stepcast.hardware import load_cluster
from stepcast.inputs.optimus.beside import read_logs
from stepcast.inputs.table import folder_files
from stepcast.ir.runlog import RunLog
from stepcast.optimus.calibration import shipped
from stepcast.optimus.fit import Observation, fit
from stepcast.optimus.machine import machine_of
from stepcast.optimus.program import step_s
from stepcast.optimus.runs import CLUSTER, observed
from stepcast.validate.optimus_memory import StagePeak, figures, stage_peaks
from stepcast.validate.scoreboard import Measurements, Row, columns

# Fewer other runs than constants cannot fit them.
FEWEST_OTHERS = 4


def rows(logs: Sequence[RunLog], skip: Callable[[str, str], None]) -> tuple[Row, ...]:
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
        found.append(Row(one.name, one.measured_s, predicted_s, tags))
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
