"""Peak memory of OptimusPrime runs by stage, beside what gpustat saw."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from stepcast.analyze.optimus.plan import OptimusPlan, plan_of_log
from stepcast.cost.memory.optimus import optimus_memory
from stepcast.hardware.gpu import Gpu
from stepcast.inputs.errors import FormatError
from stepcast.inputs.gpustat import read_gpustat
from stepcast.inputs.source import Source
from stepcast.ir.dtype import DType
from stepcast.ir.model import Model
from stepcast.ir.runlog import RunLog
from stepcast.ir.strategy import Execution, Kernels, Strategy

# ``20251224_105911_TP1_DP1_PP8_MBS1_GBS32_log.txt`` has ``20251224_105911_gpustat_TP1_..._GBS32.log`` beside.
LOG_END, GPUSTAT_END, GPUSTAT = "_log.txt", ".log", "gpustat_"
STAMP_WORDS = 2
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


def stage_peaks(log: RunLog, model: Model, gpu: Gpu, sequences: Sequence[float]) -> tuple[StagePeak, ...]:
    """Every stage of *log*; nothing where no gpustat log lies beside it, or data parallelism is used."""
    file = gpustat_beside(log.source)
    if file is None or log.layout.dp > 1:
        return ()
    try:
        peaks = read_gpustat(Source(file))
    except FormatError:
        return ()
    plan = plan_of_log(log, model, sequences)
    lengths = [round(length) for length in sequences]
    stages = optimus_memory(model, strategy_of(plan, max(lengths)), gpu, lengths)
    tp, name = log.layout.tp, os.path.basename(log.source).removesuffix(LOG_END)
    if len(peaks) < log.layout.tp * log.layout.pp:
        return ()
    return tuple(
        StagePeak(name, stage.stage, max(peaks[stage.stage * tp : (stage.stage + 1) * tp]), stage.total)
        for stage in stages
    )


def strategy_of(plan: OptimusPlan, seq: int) -> Strategy:
    """A run as a strategy; cuts inside a layer count as behind it."""
    bounds = [ceil(sum(stage.layers for stage in plan.stages[:count])) for count in range(plan.layout.pp)]
    bounds.append(plan.model.layers)
    return Strategy(
        plan.layout,
        plan.micro_batch,
        plan.micro_batch * plan.micro_batches * plan.layout.dp,
        seq,
        precision=DType.FP32,
        kernels=Kernels.PLAIN,
        execution=Execution.EAGER,
        stage_layers=tuple(stop - start for start, stop in pairwise(bounds)),
    )


def gpustat_beside(path: str) -> str | None:
    folder, name = os.path.split(path)
    words = name.removesuffix(LOG_END).split("_")
    stamp, rest = words[:STAMP_WORDS], words[STAMP_WORDS:]
    file = os.path.join(folder, "_".join([*stamp, GPUSTAT + "_".join(rest)]) + GPUSTAT_END)
    return file if name.endswith(LOG_END) and os.path.exists(file) else None


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
