"""Measured runs with logs: replays of Megatron-LM traces, and predictions of OptimusPrime runs."""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from stepcast.analyze.changes import lay_out
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.recording import from_durations, play
from stepcast.hardware import load_cluster
from stepcast.inputs.optimus_log import find_gpustat, read_gpustat, read_logs
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import folder_files, read
from stepcast.ir.measured import RunLog
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.timeline import Timeline
from stepcast.optimus.calibration import CLUSTER, Observation, fit, lengths_of, load_shipped, observe_run, plan_run
from stepcast.optimus.memory import optimus_memory
from stepcast.optimus.step import machine_of, step_s
from stepcast.simulation.schedules import make_schedule
from stepcast.units import format_percent
from stepcast.validate.scoreboard import Measurements, Pair, ScoredRow, columns_of, compare_each, error_figures

# A model of fewer layers was made to try the tracing out: its step is launch delays, not computation.
REAL_LAYERS = 16
REAL, TOY = "real size", "toy"
AS_RECORDED, ANEW = "as recorded", "laid out anew"


def measure_megatron_traces(folder: str) -> Measurements:
    """Compare every run folder under *folder*, or *folder* itself where it holds one run.

    Rows are replays from durations alone, which can be wrong. The figures are of two others: the recording as
    ``stepcast replay`` runs it, which repeats what the clocks recorded, so that its error shows no more than
    contradictions between ranks; and runs laid out anew from what a micro-batch takes on each stage and a
    typical message, as a change of the schedule lays them out.
    """
    pairs: dict[str, list[Pair]] = {f"{what}, {size}": [] for what in (AS_RECORDED, ANEW) for size in (REAL, TOY)}

    def compare(path: str) -> list[ScoredRow]:
        timeline = read(path)
        if not isinstance(timeline, Timeline) or timeline.layout is None:
            raise ValueError("is no Megatron-LM trace")
        recording = record_megatron(timeline)
        layers, measured_s = recording.facts.get("layers"), recording.measured_step_s
        size = REAL if isinstance(layers, int) and layers >= REAL_LAYERS else TOY
        name, predicted_s = os.path.basename(os.path.normpath(path)), play(from_durations(recording)).step_s
        pairs[f"{AS_RECORDED}, {size}"].append((measured_s, play(recording).step_s))
        if recording.is_complete:
            plan = make_schedule(str(ScheduleKind.ONE_F_ONE_B), recording.layout.pp, recording.micro_batches, 1)
            pairs[f"{ANEW}, {size}"].append((measured_s, play(lay_out(recording, plan)).step_s))
        return [ScoredRow(name, measured_s, predicted_s, {"size": size})]

    runs = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    rows, skipped = compare_each(runs or [folder], compare)
    table = columns_of(rows)
    figures = error_figures(pairs, "mean_abs_error", "worst_abs_error")
    return Measurements(table, skipped, table.select("size", REAL, TOY), figures)


# ---- OptimusPrime runs predicted from their configuration, each left out of its own fit -----------------------

WITHIN = 0.10
FEWEST_OTHERS = 4  # fewer other runs than constants cannot fit them


def predict_runs(logs: Sequence[RunLog]) -> tuple[list[ScoredRow], Counter[str]]:
    """Predict each run from constants that never saw it.

    Of the run itself only the configuration is used, and its steps' padded lengths: nothing timed. The constants
    are fitted to the other runs; for a run that the shipped constants were not fitted to, they are the shipped ones.
    """
    machine = machine_of(load_cluster(CLUSTER))

    def observe(log: RunLog) -> list[Observation]:
        try:
            return [observe_run(log, machine)]
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{log.source}: ")) from None

    def predict(run: Observation) -> list[ScoredRow]:
        others = [other for other in observations if other is not run]
        if run.name not in load_shipped().runs:
            constants, source = load_shipped().constants, "shipped"
        elif len(others) >= FEWEST_OTHERS:
            constants, source = fit(others, machine).constants, "fitted to the other runs"
        else:
            raise ValueError(f"fewer than {FEWEST_OTHERS} other runs to fit to")
        layout = run.plan.layout
        tags = {"layout": f"tp{layout.tp} dp{layout.dp} pp{layout.pp}", "constants": source}
        return [ScoredRow(run.name, run.measured_s, step_s(run.plan, machine, constants), tags)]

    observations, unread = compare_each(logs, observe)
    rows, skipped = compare_each(observations, predict)
    return rows, unread + skipped


def read_stage_peaks(logs: Sequence[RunLog]) -> list[Pair]:
    """Return the measured and predicted bytes of the fullest GPU of every stage of every run without data parallelism
    and with a gpustat log next to it. gpustat samples every two seconds, so it may miss the peak.
    """
    gpu = load_cluster(CLUSTER).gpu

    def compare(log: RunLog) -> list[Pair]:
        file, tp = find_gpustat(log.source), log.layout.tp
        peaks: tuple[int, ...] = ()
        if file is not None and log.layout.dp == 1:
            with suppress(FormatError):
                peaks = read_gpustat(Source(file))
        if len(peaks) < tp * log.layout.pp:
            return []
        stages = optimus_memory(plan_run(log), gpu, [round(length) for length in lengths_of(log)])
        return [(max(peaks[stage.stage * tp : (stage.stage + 1) * tp]), stage.total) for stage in stages]

    return compare_each(logs, compare)[0]  # predict_runs counts what is left out


def measure_optimus(folder: str) -> Measurements:
    """Compare every log in *folder*, or that one log."""
    unread: Counter[str] = Counter()
    files = [folder] if os.path.isfile(folder) else folder_files(folder)
    logs = read_logs(files, lambda path, reason: unread.update([reason]))
    rows, skipped = predict_runs(logs)
    notes = [f"{os.path.basename(log.source)}: {warning}" for log in logs for warning in log.warnings]
    peaks, names = read_stage_peaks(logs), ("mean_abs_error", "worst_abs_error", "mean_error")
    figures = error_figures({"peak memory by stage": peaks}, *names)
    if peaks:
        within = np.mean([abs(predicted / measured - 1) <= WITHIN for measured, predicted in peaks])
        figures[f"stages whose peak memory is within {format_percent(WITHIN, 0)}"] = float(within)
    return Measurements(columns_of(rows), unread + skipped, figures=figures, notes=tuple(notes))
