"""The analysis of an OptimusPrime log: the wall time of a batch by part."""

import msgspec
import numpy as np

from stepcast.analyze.result import AnalysisResult
from stepcast.ir.measured import FIRST_WARM_STEP, RunLog
from stepcast.ir.types import FactDict, pick
from stepcast.optimus.step import Constants, Machine, OptimusPlan, batch_s, predict_step
from stepcast.views.declared import phrases

UNEXPLAINED = "unexplained"
SLOW_LAYER = 1.25  # a stage whose layers take this many times the median is a straggler
# The log times forward passes alone: with this share of CPU launch overhead they say little about the GPU.
LAUNCH_BOUND_SHARE = 0.2


class OptimusStage(msgspec.Struct, frozen=True):
    """One stage: the time of its modules in the log, and its time in the model."""

    stage: int
    ends_with: str
    layers: float
    forward_s: float | None  # timed modules, one micro-batch, median
    busy_s: float
    bubble_s: float
    parts_s: dict[str, float]


class SlowStage(msgspec.Struct, frozen=True):
    stage: int
    rank: int
    factor: float


class StagePart(msgspec.Struct, frozen=True):
    stage: int
    part: str
    seconds: float


class OptimusAnalysis(AnalysisResult, frozen=True, kw_only=True):
    """*breakdown_s* is that of the busiest stage and sums to the measured step, with what the model misses."""

    view = "measured.optimus_view"
    kind: str
    source: str
    step_s: float
    predicted_step_s: float
    error: float  # of the model, signed, as a share of the measured step
    breakdown_s: dict[str, float]
    breakdown_stage: int
    operations_s: dict[str, float]
    bubble_s: float
    exposed_comm_s: float
    stragglers: list[SlowStage]
    critical_path: list[StagePart]  # the busiest stage, for which the others wait, the longest part first
    stages: list[OptimusStage]
    messages: dict[str, int | list[int]]
    layout: dict[str, int]
    micro_batch: int
    micro_batches: int
    sequence: float
    model: str
    constants: dict[str, float]
    warnings: list[str]


def analyze_optimus(log: RunLog, plan: OptimusPlan, machine: Machine, constants: Constants) -> OptimusAnalysis:
    """Explain *log*, which ran *plan* on *machine*."""
    measured_s, layout = batch_s(log), plan.layout
    predicted = predict_step(plan, machine, constants)
    busiest, forward = predicted.busiest, log.stage_forward()
    parts = dict(busiest.parts_s)
    parts[UNEXPLAINED] = measured_s - sum(parts.values())
    path = sorted(busiest.parts_s.items(), key=lambda part: -part[1])
    host_s = busiest.parts_s["host"]
    doubts = FactDict(stage=busiest.stage, sequence=plan.sequence if layout.dp > 1 else None)
    if host_s > LAUNCH_BOUND_SHARE * predicted.step_s:
        doubts["host_share"] = host_s / predicted.step_s
    stages = []
    for number, (stage, time) in enumerate(zip(plan.stages, predicted.stages, strict=True)):
        ends_with = log.stage_ends[number] if number < len(log.stage_ends) else ""
        forward_s = forward[number].seconds if number in forward else None
        times = forward_s, time.busy_s, time.parts_s["bubble"], time.parts_s
        stages.append(OptimusStage(number, ends_with, stage.layers, *times))
    return OptimusAnalysis(
        kind="optimus run",
        source=log.source,
        step_s=measured_s,
        predicted_step_s=predicted.step_s,
        error=predicted.step_s / measured_s - 1,
        breakdown_s=parts,
        breakdown_stage=busiest.stage,
        operations_s=layer_times(log),
        bubble_s=parts["bubble"],
        exposed_comm_s=parts["messages"] + parts["tensor"] + parts["data"],
        stragglers=find_slow_stages(log),
        critical_path=[StagePart(busiest.stage, part, seconds) for part, seconds in path if seconds > 0],
        stages=stages,
        messages={
            "forward_per_hop": [plan.forward_messages(hop) for hop in range(layout.pp - 1)],
            "backward_per_hop": plan.backward_messages() if layout.pp > 1 else 0,
        },
        layout=pick(layout, "tp dp pp"),
        **pick(plan, "micro_batch micro_batches sequence model=model.name"),
        constants={name: getattr(constants, name) for name in constants.__slots__},
        warnings=[*log.warnings, *phrases("optimus-modules optimus-shuffled optimus-launch-bound", doubts)],
    )


def layer_times(log: RunLog) -> dict[str, float]:
    """Return the median forward seconds of each layer per micro-batch, summed over its stages."""
    names = sorted(log.layer_times.layers, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0))
    times = {name: log.layer_forward(name) for name in names}
    return {name: sum(part.seconds for part in parts.values()) for name, parts in times.items() if parts}


def find_slow_stages(log: RunLog) -> list[SlowStage]:
    """Return the stages whose timed modules are slower than those of the usual stage."""
    times = log.layer_times
    warm = np.greater_equal(times.step_of, FIRST_WARM_STEP)
    layer = np.array([name.isdigit() for name in times.layers], dtype=bool)
    rows = warm & layer[times.layer_of] if len(times.layers) else warm
    if not rows.any():
        return []
    per_op = times.total_s[rows] / np.maximum(times.ops_of[rows], 1)
    stages = times.stage_of[rows]
    typical = {stage: float(np.median(per_op[stages == stage])) for stage in np.unique(stages).tolist()}
    usual = float(np.median(list(typical.values())))
    return [
        SlowStage(stage, stage * log.layout.tp * log.layout.dp, seconds / usual)
        for stage, seconds in typical.items()
        if len(typical) > 2 and seconds > SLOW_LAYER * usual
    ]
