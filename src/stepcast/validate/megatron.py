"""Replays of measured Megatron-LM runs against their measured steps: a folder with one folder per run."""

import os
from collections.abc import Iterator

import numpy as np

from stepcast.analyze.durations import from_durations
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.play import play
from stepcast.analyze.recording import Recording
from stepcast.analyze.whatif import reschedule
from stepcast.inputs.table import read
from stepcast.ir.timeline import Timeline
from stepcast.validate.scoreboard import Measurements, ScoredRow, columns, compare_each, error_figures

# A model of fewer layers was made to try the tracing out: its step is launch delays, not computation.
REAL_LAYERS = 16
SIZE = "size"
REAL, TOY = "real size", "toy"


def measure_folder(folder: str) -> Measurements:
    """Every run folder under *folder*, or *folder* itself where it holds one run.

    Rows are replays from durations alone, which can be wrong. The figures are of two others: the recording as
    ``stepcast replay`` runs it, which repeats what the clocks said, so that its error shows no more than
    contradictions between ranks; and runs laid out anew from what a micro-batch takes on each stage and a
    typical message, as a change of the schedule lays them out.
    """
    figured: dict[str, list[ScoredRow]] = {"as recorded": [], "laid out anew": []}

    def compare(path: str) -> ScoredRow:
        recording = _recording(path)
        row = _row(path, recording, from_durations(recording))
        figured["as recorded"].append(_row(path, recording, recording))
        if recording.whole:
            again = reschedule(recording, recording.micro_batches)
            figured["laid out anew"].append(_row(path, recording, again))
        return row

    rows, skipped = compare_each(_runs(folder), compare)
    table = columns(rows)
    sizes = table.tags.get(SIZE, np.zeros(0, dtype=np.str_))
    return Measurements(
        table,
        skipped,
        selections={REAL: sizes == REAL, TOY: sizes == TOY},
        figures={name: error for what, rows in figured.items() for name, error in _figures(what, rows)},
        notes=("replays from recorded durations alone; every wait between ranks is worked out",),
    )


def _runs(folder: str) -> list[str]:
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    runs = [os.path.join(folder, name) for name in names if os.path.isdir(os.path.join(folder, name))]
    return runs or [folder]


def _recording(path: str) -> Recording:
    timeline = read(path)
    if not isinstance(timeline, Timeline) or timeline.layout is None:
        raise ValueError("is no Megatron-LM trace")
    return record_megatron(timeline)


def _row(path: str, measured: Recording, replayed: Recording) -> ScoredRow:
    layers = measured.facts.get("layers")
    size = REAL if isinstance(layers, int) and layers >= REAL_LAYERS else TOY
    name = os.path.basename(os.path.normpath(path))
    return ScoredRow(name, measured.measured_step_s, play(replayed).step_s, {SIZE: size})


def _figures(what: str, rows: list[ScoredRow]) -> Iterator[tuple[str, float]]:
    for size in (REAL, TOY):
        pairs = [(row.measured_s, row.predicted_s) for row in rows if row.tags[SIZE] == size]
        yield from error_figures(f"{what}, {size}", pairs, "mean_abs_error", "worst_abs_error")
