"""The prediction of a step: what was priced and simulated, read in the ways that people ask for."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from stepcast.cost.compute import moved_bytes
from stepcast.cost.host import HOST_SPREAD
from stepcast.cost.pricing import Pricer
from stepcast.forecast.options import Options
from stepcast.hardware import Cluster
from stepcast.ir.band import Band
from stepcast.ir.facts import OperatorFacts, RooflineFacts, find_doubts
from stepcast.ir.step import PART_OF_GROUP, PARTS, Exposure, StageReport, StepReport
from stepcast.ir.timeline import Timeline
from stepcast.ir.work import Attention, Compute, Elementwise, GroupedMatmul, Matmul, Recorded
from stepcast.ir.workload import Workload
from stepcast.simulation.breakdown import StageTime, stage_times
from stepcast.simulation.engine import Run, makespans_s, task_times
from stepcast.simulation.program import Times
from stepcast.simulation.schedule_file import peak_in_flight
from stepcast.simulation.steady import ProgramPair, SteadyStep
from stepcast.simulation.step import Body, Step
from stepcast.simulation.timeline import CriticalPath, critical_path, timeline_of
from stepcast.units import format_seconds

if TYPE_CHECKING:
    from stepcast.cost.memory import StageMemory
    from stepcast.forecast.fluid import FluidStep

# Answers as rows of a table: one level deep, plain values, names that say their unit.

Cell = str | int | float | bool | None

ASKED = ("model", "parameters", "cluster", "gpu", "framework")
REACHED = ("step_s", "tokens_per_s", "tflops_per_gpu", "mfu", "bubble_fraction")


def row_of(facts: Mapping[str, Any]) -> dict[str, Cell]:
    """The facts of a prediction as one row; what a workload file does not know is None."""
    row: dict[str, Cell] = {name: facts.get(name) for name in ASKED}
    row |= facts.get("strategy") or {"gpus": facts["gpus"], "schedule": facts["schedule"]}
    row |= {name: facts[name] for name in REACHED}
    row |= {name: facts["uncertainty"][name] for name in ("low_s", "high_s")}
    memory = facts["memory_bytes"] or {}
    row |= {"memory_bytes": memory.get("total"), "fits": memory.get("fits")}
    return row | {f"{part}_s": seconds for part, seconds in facts["breakdown_s"].items()}


# The operators of a predicted step: what each computes, moves and takes, beside what the GPU could do.

Counted = Matmul | GroupedMatmul | Attention | Elementwise


@dataclass(slots=True)
class _Sum:
    kind: str
    dtype: str
    count: float = 0.0
    flops: float = 0.0
    moved_bytes: float = 0.0
    seconds: float = 0.0
    bound: str = ""


def roofline(prediction: "Prediction") -> RooflineFacts | None:
    """Operators by name, over an average GPU of the step; None where only their times are known."""
    workload, pricer, gpu = prediction.workload, prediction.pricer, prediction.cluster.gpu
    sums: dict[tuple[str, str], _Sum] = {}
    formats: defaultdict[str, float] = defaultdict(float)
    times = 1 if workload.uniform else 1 / workload.layout.pp
    for stage in workload.stages:
        for layer, count in stage.counted_layers(workload.micro_batches):
            for op in layer.all_ops:
                work = op.work
                if not isinstance(work, Compute) or isinstance(work, Recorded):
                    continue
                price = pricer.price(work)
                kind, dtype = type(work).__name__.lower(), str(getattr(work, "dtype", ""))
                each = sums.setdefault((layer.op_name(op), kind), _Sum(kind, dtype, bound=str(price.bound)))
                flops = _flops(work)
                each.count += count * times
                each.flops += count * times * flops
                each.moved_bytes += count * times * (moved_bytes(work) if isinstance(work, Counted) else 0.0)
                each.seconds += count * times * price.seconds
                if isinstance(work, Matmul | GroupedMatmul | Attention):
                    formats[dtype] += flops * count
    listed = [
        OperatorFacts(
            name=name,
            kind=each.kind,
            dtype=each.dtype,
            count=each.count,
            flops=each.flops,
            bytes=each.moved_bytes,
            seconds=each.seconds,
            bound=each.bound,
        )
        for (name, _), each in sums.items()
        if each.seconds > 0 and each.flops > 0 and each.moved_bytes > 0
    ]
    if not listed:
        return None
    dtype = max(formats, key=lambda name: formats[name], default="bf16")
    return RooflineFacts(
        gpu=gpu.name,
        dtype=gpu.runs_as(dtype),
        peak_flops=gpu.matrix_peak_flops(dtype),
        bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
        operators=sorted(listed, key=lambda each: -each["seconds"]),
    )


def _flops(work: Compute) -> float:
    if isinstance(work, Matmul | GroupedMatmul | Attention):
        return work.flops
    return float(work.elements) if isinstance(work, Elementwise) else 0.0


# What a simulated step says: its breakdown, its stages, its range, and what to doubt of the workload.

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
        communication_s={str(group): Exposure(totals[group], exposed[group]) for group in totals if totals[group] > 0},
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
    return found.extend(low_s, further[0]), found.extend(high_s, further[1])


def _priced_ends(step: Step, pricer: Pricer) -> tuple[float, float]:
    """The step when every price is at the low or the high end of its range."""
    ends = [step.program.priced(replace(step.prices, seconds=seconds)) for seconds in (pricer.low_s, pricer.high_s)]
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


# Predictions that are pickled: what was found travels, the functions that found it do not.


@dataclass(frozen=True, slots=True)
class KnownRun:
    """Returns what was found before."""

    value: Any

    def __call__(self, *_: object) -> Any:
        return self.value


def packed(prediction: "Prediction") -> tuple[Callable[..., "Prediction"], tuple[Any, ...]]:
    """What pickle needs to make the prediction again."""
    state = {
        "workload": prediction.workload,
        "cluster": prediction.cluster,
        "pricer": prediction.pricer,
        "options": prediction.options,
        "place": prediction.place,
        "assumptions": prediction.assumptions,
        "memory": prediction.memory,
        "band": prediction.band,
    }
    step, run = (None, None) if prediction.settled else (prediction.step, prediction.run)
    found = {"report": prediction.report, "found_s": prediction.simulated_s}
    if prediction.shared:  # they do not follow from the run
        found["times"] = prediction.times
    return _unpacked, (state, step, run, found)


def _unpacked(state: dict[str, Any], step: Step | None, run: Run | None, found: dict[str, Any]) -> "Prediction":

    built: Callable[[], Any] = KnownRun(step) if step is not None else _too_long
    ran: Callable[[], Any] = KnownRun(run) if step is not None else _too_long
    made = Prediction(built=built, ran=ran, **state)
    # They are computed when first asked for, and were.
    made.__dict__.update(found)
    return made


def _too_long() -> NoReturn:
    raise ValueError("a step of so many micro-batches travels without its tasks: predict it again")


MOST_DRAWN = 5_000_000


Finish = Callable[[StepReport, "tuple[StageMemory, ...]"], StepReport]
"""What completes a report: of the step, and of the memory of its stages."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """A simulated step: how long it takes and, on demand, its report and all its tasks."""

    # Every slot of it, put together and simulated once each.
    built: Callable[[], Step]
    ran: Callable[[], Run]
    workload: Workload
    cluster: Cluster
    pricer: Pricer
    options: Options
    # Which rank of each stage stands for the others.
    place: int = 0
    assumptions: tuple[str, ...] = ()
    # Of each stage; nothing where no model is known.
    memory: "tuple[StageMemory, ...]" = ()
    finish: Finish | None = None
    # How measured steps of its kind lay around their predictions; None where no model is known.
    band: Band | None = None
    # Of very many micro-batches, which tell the step and its report without all of them.
    settled: SteadyStep | None = None
    # Of many micro-batches: a shorter step that may tell when it ends.
    brief: Callable[[], tuple[Step, ProgramPair] | None] | None = None
    # By the fluid engine, where that is asked for.
    shared: "Callable[[], FluidStep] | None" = None
    # When it ends, where it was simulated together with others.
    ends_s: float | None = None
    # What was asked for, in the words of the JSON contract.
    asked: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        layout, where = self.workload.layout, self.cluster.name
        named = f"{self.workload.name} " if self.workload.name else ""
        return f"Prediction({named}on {layout.gpus:,} GPUs of {where}: {format_seconds(self.step_s)} a step)"

    def _repr_html_(self) -> str:
        from stepcast.views.html import render_notebook
        from stepcast.views.step import step_view

        return render_notebook(step_view(self.report.facts(), self.drawn, roofline(self)), "prediction")

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was found: functions that led to it do not travel."""

        return packed(self)

    @property
    def step(self) -> Step:
        return self.built()

    @property
    def run(self) -> Run:
        return self.ran()

    def price(self) -> None:
        """Put together and price what ``together`` runs of it: what cannot be priced is told now."""
        brief = self.brief and self.brief()
        if self.settled is None:
            _ = brief[0].seconds if brief else self.step.seconds

    @property
    def simulated_s(self) -> float:
        return self.found_s

    @cached_property
    def found_s(self) -> float:
        if self.settled:
            return self.settled.makespan_s
        if self.shared:
            return self.shared().run.makespan_s
        return self.run.makespan_s if self.ends_s is None else self.ends_s

    @property
    def step_s(self) -> float:
        residual = self.options.residual
        return self.simulated_s * (residual.factor if residual else 1.0)

    @property
    def fits(self) -> bool:
        """Whether every stage fits into the memory of its GPUs, as far as that is known."""
        return all(stage.fits for stage in self.memory)

    @cached_property
    def report(self) -> StepReport:
        report = report_of(self)
        report = self.finish(report, self.memory) if self.finish else report
        return replace(report, warnings=(*report.warnings, *find_doubts(report.facts())))

    def noting(self, assumptions: Sequence[str] = (), warnings: Sequence[str] = ()) -> "Prediction":
        """The same with more said in its report: *assumptions* first, *warnings* last."""

        def finish(report: StepReport, memory: "tuple[StageMemory, ...]") -> StepReport:
            report = self.finish(report, memory) if self.finish else report
            return replace(
                report, assumptions=(*assumptions, *report.assumptions), warnings=(*report.warnings, *warnings)
            )

        return replace(self, finish=finish)

    def facts(self) -> dict[str, Any]:
        """The same as the command line prints with ``--json``."""
        return {**self.asked, **self.report.facts()}

    def row(self) -> dict[str, str | int | float | bool | None]:
        """One line of a table, such as a pandas DataFrame takes: plain values by name."""
        return row_of(self.facts())

    @cached_property
    def times(self) -> Times:
        return self.shared().run.times if self.shared else task_times(self.run)

    @cached_property
    def timeline(self) -> Timeline:
        return timeline_of(self.step, self.times, self.workload.layout, self.place)

    @property
    def drawn(self) -> Timeline | None:
        """The timeline; None of so many tasks that nobody could look through them."""
        if self.settled:
            return None
        try:
            return None if self.step.program.written_out.tasks > MOST_DRAWN else self.timeline
        except ValueError:  # it travelled without its tasks
            return None

    @cached_property
    def critical_path(self) -> CriticalPath:
        return critical_path(self.step.program, self.times)
