"""An OptimusPrime log explained: where the wall time of a batch went."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepcast.ir.measured import FIRST_WARM_STEP, RunLog
from stepcast.optimus.cost import Constants, Machine
from stepcast.optimus.plan import OptimusPlan, batch_s
from stepcast.optimus.program import PredictedStep, predict_step
from stepcast.units import format_seconds

UNEXPLAINED = "unexplained"
# Stages whose layers run this much slower than the run's usual layer are named.
SLOW_LAYER = 1.25
# The log times forward passes alone: with launch-bound passes a stage's times say little about its GPU.
LAUNCH_BOUND_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage: what the log timed and what the model makes of it."""

    stage: int
    ends_with: str
    layers: float
    forward_s: float | None  # timed modules, one micro-batch, median
    parts_s: dict[str, float]

    def facts(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "ends_with": self.ends_with,
            "layers": self.layers,
            "forward_s": self.forward_s,
            "busy_s": sum(seconds for part, seconds in self.parts_s.items() if part != "bubble"),
            "bubble_s": self.parts_s["bubble"],
            "parts_s": self.parts_s,
        }


@dataclass(frozen=True, slots=True)
class OptimusAnalysis:
    """*breakdown_s* is the busiest stage's and sums to the measured step, what the model misses included."""

    source: str
    plan: OptimusPlan
    constants: Constants
    measured_s: float
    predicted: PredictedStep
    stages: tuple[StageRow, ...]
    operations_s: dict[str, float]
    stragglers: tuple[dict[str, float], ...]
    warnings: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return f"OptimusAnalysis({len(self.stages)} stages, {format_seconds(self.measured_s)} a step)"

    def _repr_html_(self) -> str:
        from stepcast.views.html import render_notebook
        from stepcast.views.traces import optimus_view

        return render_notebook(optimus_view(self.facts()), "analysis")

    @property
    def breakdown_s(self) -> dict[str, float]:
        parts = dict(self.predicted.busiest.parts_s)
        parts[UNEXPLAINED] = self.measured_s - sum(parts.values())
        return parts

    @property
    def error(self) -> float:
        """Of the model, signed, as a share of the measured step."""
        return self.predicted.step_s / self.measured_s - 1

    def facts(self) -> dict[str, Any]:
        parts, plan = self.breakdown_s, self.plan
        return {
            "kind": "optimus run",
            "source": self.source,
            "step_s": self.measured_s,
            "predicted_step_s": self.predicted.step_s,
            "error": self.error,
            "breakdown_s": parts,
            "breakdown_stage": self.predicted.busiest.stage,
            "operations_s": self.operations_s,
            "bubble_s": parts["bubble"],
            "exposed_comm_s": parts["messages"] + parts["tensor"] + parts["data"],
            "stragglers": list(self.stragglers),
            "critical_path": self._critical_path(),
            "stages": [row.facts() for row in self.stages],
            "messages": {
                "forward_per_hop": [plan.forward_messages(hop) for hop in range(plan.layout.pp - 1)],
                "backward_per_hop": plan.backward_messages() if plan.layout.pp > 1 else 0,
            },
            "layout": {"tp": plan.layout.tp, "dp": plan.layout.dp, "pp": plan.layout.pp},
            "micro_batch": plan.micro_batch,
            "micro_batches": plan.micro_batches,
            "sequence": plan.sequence,
            "model": plan.model.name,
            "constants": {name: getattr(self.constants, name) for name in self.constants.__slots__},
            "warnings": list(self.warnings),
        }

    def _critical_path(self) -> list[dict[str, Any]]:
        """The busiest stage is what the others wait for: its parts, the longest first."""
        busiest = self.predicted.busiest
        parts = sorted(busiest.parts_s.items(), key=lambda item: -item[1])
        return [{"stage": busiest.stage, "part": part, "seconds": value} for part, value in parts if value > 0]


def analyze_optimus(log: RunLog, plan: OptimusPlan, machine: Machine, constants: Constants) -> OptimusAnalysis:
    """Explain *log*, which ran *plan* on *machine*."""
    measured_s = batch_s(log)
    predicted = predict_step(plan, machine, constants)
    forward = log.stage_forward()
    ends = dict(enumerate(log.stage_ends))
    stages = tuple(
        StageRow(
            stage=number,
            ends_with=ends.get(number, ""),
            layers=stage.layers,
            forward_s=forward[number].seconds if number in forward else None,
            parts_s=predicted.stages[number].parts_s,
        )
        for number, stage in enumerate(plan.stages)
    )
    return OptimusAnalysis(
        source=log.source,
        plan=plan,
        constants=constants,
        measured_s=measured_s,
        predicted=predicted,
        stages=stages,
        operations_s=operations(log),
        stragglers=tuple(stragglers(log)),
        warnings=(*log.warnings, *_doubts(plan, predicted)),
    )


def operations(log: RunLog) -> dict[str, float]:
    """Median forward seconds of each layer per micro-batch, its parts on several stages added."""
    names = sorted(log.layer_times.layers, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0))
    return {
        name: sum(part.seconds for part in log.layer_forward(name).values())
        for name in names
        if log.layer_forward(name)
    }


def stragglers(log: RunLog) -> list[dict[str, float]]:
    """Stages whose timed modules run slower than those of the usual stage, with the factor."""
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
        {"stage": stage, "rank": stage * log.layout.tp * log.layout.dp, "factor": seconds / usual}
        for stage, seconds in typical.items()
        if len(typical) > 2 and seconds > SLOW_LAYER * usual
    ]


def _doubts(plan: OptimusPlan, predicted: PredictedStep) -> list[str]:
    parts = predicted.busiest.parts_s
    doubts = ["the log times forward modules alone; every other part is the model's"]
    if plan.layout.dp > 1:
        doubts.append(
            "data parallelism shuffles the samples: unless their lengths were given, "
            f"{plan.sequence:g} tokens is what is to be expected, not what was run"
        )
    if parts["host"] > LAUNCH_BOUND_SHARE * predicted.step_s:
        doubts.append(
            f"launch-bound: the GPU of stage {predicted.busiest.stage} waits for its host for "
            f"{parts['host'] / predicted.step_s:.0%} of the step, so timed modules hold host time too"
        )
    return doubts
