"""What a simulated step says: its breakdown, its stages, its range, and what to doubt of the workload."""

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stepcast.cost.dispatch import HOST_SPREAD
from stepcast.cost.pricing import Pricer
from stepcast.ir.step import PART_OF_GROUP, PARTS, Exposure, StageReport, StepReport
from stepcast.ir.workload import Workload
from stepcast.simulation.breakdown import StageTime, stage_times
from stepcast.simulation.chunks import Body
from stepcast.simulation.engine import makespans_s
from stepcast.simulation.schedule_file import peak_in_flight
from stepcast.simulation.step import Step
from stepcast.units import format_seconds

if TYPE_CHECKING:
    from stepcast.forecast.options import Options
    from stepcast.forecast.simulate import Prediction

# No published dense transformer is deeper; a body that would make one is likely the whole model.
DEEPEST_MODEL = 160


def report_of(prediction: "Prediction") -> StepReport:
    """The breakdown of an average stage, which sums to the step because every stage's does."""
    step_s, workload, pricer = prediction.simulated_s, prediction.workload, prediction.pricer
    found = prediction.settled
    step = found.short[0] if found else prediction.step
    stages = found.stage_times() if found else _stages(prediction)
    count = len(stages)
    parts = dict.fromkeys(PARTS, 0.0)
    totals: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    for each in stages:
        parts["compute"] += each.compute_s / count
        parts["optimizer"] += each.optimizer_s / count
        parts["bubble"] += each.bubble_s / count
        parts["other"] += each.host_s / count
        for group, seconds in each.exposed_s.items():
            parts[PART_OF_GROUP[group]] += seconds / count
            exposed[group] += seconds / count
            totals[group] += each.communication_s[group] / count
    # Sums of floats in another order: let the largest part carry the last bit.
    largest = max(parts, key=lambda part: parts[part])
    parts[largest] += step_s - sum(parts.values())
    in_flight = peak_in_flight(step.schedule)
    low_s, high_s = _ends(prediction, step_s, parts["other"])
    report = StepReport(
        step_s=step_s,
        breakdown_s=parts,
        communication_s={
            str(group): Exposure(totals[group], exposed[group]) for group in totals if totals[group] > 0
        },
        stages=tuple(_stage_report(each, in_flight[each.stage]) for each in stages),
        low_s=min(step_s, low_s),
        high_s=max(step_s, high_s),
        band=prediction.band,
        gpus=workload.layout.gpus,
        schedule=step.schedule.name,
        micro_batches=workload.micro_batches,
        run={
            "cluster": prediction.cluster.name,
            **workload.layout.facts(),
            **({"engine": str(prediction.options.engine)} if prediction.shared else {}),
        },
        sources=pricer.sources(),
        warnings=(
            *workload.warnings,
            *_body_warnings(workload, prediction.options),
            *pricer.placement_warnings(),
            *(() if prediction.shared else prediction.cluster.topology.doubts),
        ),
        assumptions=(*prediction.assumptions, *_sharing(prediction)),
    )
    residual = prediction.options.residual
    return report.corrected(residual) if residual else report


def _stages(prediction: "Prediction") -> tuple[StageTime, ...]:
    if prediction.shared:
        return prediction.shared().stage_times()
    return stage_times(prediction.step, prediction.run)


def _sharing(prediction: "Prediction") -> list[str]:
    """By how much the fluid engine found communication slowed, of each group that was."""
    if not prediction.shared:
        return []
    slowed: dict[str, float] = {}
    for each in prediction.shared().observed.operations:
        if each.slowest > 1.005:
            slowed[each.who.name] = max(each.slowest, slowed.get(each.who.name, 1.0))
    most = sorted(slowed.items(), key=lambda item: -item[1])
    told = ", ".join(f"{group} up to {times:.2f} times as long" for group, times in most)
    notes = [f"engine fluid: communication shared the network: {told or 'nothing was slowed by it'}"]
    found = prediction.shared().run.found
    if not found.exact:
        notes.append(
            f"engine fluid: from {format_seconds(found.near_from_s)} on, changes of rates below "
            f"{found.near:.1%} were not followed: there were too many flows"
        )
    return notes


def _stage_report(each: StageTime, in_flight: int) -> StageReport:
    exposed_s = sum(each.exposed_s.values())
    return StageReport(each.stage, each.busy_s, exposed_s, each.host_s, each.bubble_s, in_flight)


def _ends(prediction: "Prediction", step_s: float, host_s: float) -> tuple[float, float]:
    """Of the band, where runs of its kind were measured; where none was, prices may be less sure still, and
    so is the time *host_s* that GPUs wait for their hosts.
    """
    band = prediction.band
    if band is not None and band.measured:
        return band.around(step_s)
    low_s, high_s = _range(prediction)
    low_s, high_s = low_s - host_s * (1.0 - 1.0 / HOST_SPREAD), high_s + host_s * (HOST_SPREAD - 1.0)
    if band is None:
        return low_s, high_s
    around = band.around(step_s)
    return min(low_s, around[0]), max(high_s, around[1])


def _range(prediction: "Prediction") -> tuple[float, float]:
    """With every price at an end of its range, of all slots, however few of them were simulated."""
    found, pricer = prediction.settled, prediction.pricer
    low_s, high_s = _priced_ends(found.short[0] if found else prediction.step, pricer)
    if prediction.shared:  # what sharing adds, it adds to both
        slowed = prediction.simulated_s / prediction.run.makespan_s if prediction.run.makespan_s else 1.0
        return low_s * slowed, high_s * slowed
    if found is None:
        return low_s, high_s
    further = _priced_ends(found.longer[0], pricer)
    return found.extended(low_s, further[0]), found.extended(high_s, further[1])


def _priced_ends(step: Step, pricer: Pricer) -> tuple[float, float]:
    """The step when every price is at the low or the high end of its range."""
    ends = [
        step.program.priced(replace(step.prices, seconds=seconds))
        for seconds in (pricer.low_s, pricer.high_s)
    ]
    low_s, high_s = makespans_s(step.program, np.stack(ends)).tolist()
    return low_s, high_s


def _body_warnings(workload: Workload, options: "Options") -> list[str]:
    """A body that lists more layers than a stage can have is likely the whole model."""
    if not workload.uniform or workload.layout.pp == 1 or options.body is Body.MODEL:
        return []
    repeats = [block.repeat for block in workload.stages[0].body]
    layers = max(repeats, default=1)
    total = layers * workload.layout.pp
    if total <= DEEPEST_MODEL:
        return []
    return [
        f"the body lists {layers} layers and counts as one of {workload.layout.pp} stages, "
        f"{total} layers in all; if it is the whole model, use --body model"
    ]
