"""Peak memory of OptimusPrime runs by stage, beside what gpustat saw."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepcast.hardware.gpu import Gpu
from stepcast.inputs.errors import FormatError
from stepcast.inputs.gpustat import read_gpustat
from stepcast.inputs.optimus.beside import LOG_END, gpustat_beside
from stepcast.inputs.source import Source
from stepcast.ir.runlog import RunLog
from stepcast.optimus.memory import optimus_memory
from stepcast.optimus.runs import lengths_of, planned

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
    file = gpustat_beside(log.source)
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
