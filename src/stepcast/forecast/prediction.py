"""The prediction of a step: what was simulated, as a time, a report, a table row, a roofline or a timeline."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from dataclasses import fields as get_fields
from os import PathLike, fspath
from typing import TYPE_CHECKING

from stepcast.cost.host import HOST_PACES
from stepcast.cost.pricing import Pricer
from stepcast.forecast.options import Engine, Options, ScheduleSize, write_schedule
from stepcast.hardware import Cluster
from stepcast.ir.layout import Group
from stepcast.ir.step import PART_OF_GROUP, PARTS, Band, Exposure, StageReport, StepReport
from stepcast.ir.types import FactDict, Facts, OperatorFacts, RooflineFacts, cached_property, dataclass, find_doubts
from stepcast.ir.work import Attention, Compute, Elementwise, GroupedMatmul, Matmul, Recorded, Transfer
from stepcast.ir.workload import Workload
from stepcast.simulation.breakdown import stage_times
from stepcast.simulation.chunks import Body
from stepcast.simulation.costs import Prices
from stepcast.simulation.engine import Run, makespans_s, simulate, task_times
from stepcast.simulation.messages import Send
from stepcast.simulation.program import Times
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import pair_slots
from stepcast.simulation.seconds import WorkSeconds
from stepcast.simulation.steady import LONG, SteadyStep, count_slots, find_steady_run
from stepcast.simulation.step import Conditions, Step, build_step
from stepcast.units import format_percent, format_seconds
from stepcast.views.answer import Answer

if TYPE_CHECKING:
    from stepcast.cost.memory import StageMemory
    from stepcast.forecast.fluid import FluidStep
    from stepcast.ir.timeline import Timeline
    from stepcast.simulation.timeline import CriticalPath

Cell = str | int | float | bool | None
ASKED = ("model", "parameters", "cluster", "gpu", "framework")
REACHED = ("step_s", "tokens_per_s", "tflops_per_gpu", "mfu", "bubble_fraction")


def row_of(facts: Facts) -> dict[str, Cell]:
    """Return the facts of a prediction as one row of a table; what a workload file does not state is None."""
    row: dict[str, Cell] = {name: facts.get(name) for name in ASKED}
    row |= facts.get("strategy") or {"gpus": facts["gpus"], "schedule": facts["schedule"]}
    row |= {name: facts[name] for name in REACHED}
    row |= {name: facts["uncertainty"][name] for name in ("low_s", "high_s")}
    memory = facts["memory_bytes"] or {}
    row |= {"memory_bytes": memory.get("total"), "fits": memory.get("fits")}
    return row | {f"{part}_s": seconds for part, seconds in facts["breakdown_s"].items()}


def roofline(prediction: "Prediction") -> RooflineFacts | None:
    """Return the operators by name, averaged over the GPUs of the step, with what they compute, move and take; None
    where only their times are known.
    """
    workload, pricer, gpu = prediction.workload, prediction.pricer, prediction.cluster.gpu
    sums: dict[tuple[str, str], OperatorFacts] = {}
    formats: defaultdict[str, float] = defaultdict(float)
    share = 1 if workload.uniform else 1 / workload.layout.pp
    for stage in workload.stages:
        for layer, count in stage.counted_layers(workload.micro_batches):
            for op in layer.all_ops:
                work = op.work
                if not isinstance(work, Compute) or isinstance(work, Recorded):
                    continue
                price = pricer.price(work)
                name, kind, dtype = layer.op_name(op), type(work).__name__.lower(), str(getattr(work, "dtype", ""))
                nothing = OperatorFacts(
                    name=name,
                    kind=kind,
                    dtype=dtype,
                    count=0.0,
                    flops=0.0,
                    bytes=0.0,
                    seconds=0.0,
                    bound=str(price.bound),
                )
                total = sums.setdefault((name, kind), nothing)
                flops, moved = 0.0, 0.0
                if isinstance(work, Matmul | GroupedMatmul | Attention):
                    flops, moved = work.flops, work.moved_bytes
                    formats[dtype] += flops * count
                elif isinstance(work, Elementwise):
                    flops, moved = float(work.elements), work.moved_bytes
                total["count"] += count * share
                total["flops"] += count * share * flops
                total["bytes"] += count * share * moved
                total["seconds"] += count * share * price.seconds
    operators = [total for total in sums.values() if total["seconds"] > 0 < total["flops"] and total["bytes"] > 0]
    if not operators:
        return None
    dtype = max(formats, key=lambda name: formats[name], default="bf16")
    return RooflineFacts(
        gpu=gpu.name,
        dtype=gpu.runs_as(dtype),
        peak_flops=gpu.matrix_peak_flops(dtype),
        bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
        operators=sorted(operators, key=lambda operator: -operator["seconds"]),
    )


# The answer mentions the CPU's pace where it widens the interval by more than this share of the step.
NOTED_SHARE = 0.05
UNSETTLED = (
    "stages drift apart over very many micro-batches: the time breakdown counts those that were left out like the last "
    "of those simulated; the step time counts all of them"
)
UNMEASURED_PACE = (
    "the CPU's pace was not measured: the 90 % interval allows for {:g} to {:g} times its usual time; "
    "--calibration with a profile of the machine narrows it"
)
# No published dense transformer is deeper; a body that would make one is likely the whole model.
DEEPEST_MODEL = 160


def report_of(prediction: "Prediction") -> StepReport:
    """Return the breakdown of an average stage, which sums to the step because every stage's does."""
    step_s, workload, pricer = prediction.simulated_s, prediction.workload, prediction.pricer
    fluid = prediction.fluid
    step, run = prediction.source.reported
    stages = fluid.stage_times() if fluid else stage_times(step, run)
    count = len(stages)
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    totals: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    for stage in stages:
        parts["compute"] += stage.compute_s / count
        parts["optimizer"] += stage.optimizer_s / count
        parts["bubble"] += stage.bubble_s / count
        parts["other"] += stage.host_s / count
        for group, seconds in stage.exposed_s.items():
            parts[PART_OF_GROUP[group]] += seconds / count
            exposed[group] += seconds / count
            totals[group] += stage.communication_s[group] / count
    # Sums of floats in another order: let the largest part carry the last bit.
    largest = max(parts, key=lambda part: parts[part])
    parts[largest] += step_s - sum(parts.values())
    in_flight = step.schedule.count_in_flight()
    for work in step.list_works():  # so that the pricer knows all sources; their seconds came from tables
        pricer.price(work)
    # A stage that waits for its CPU holds up the others.
    host_s = max(parts["other"], *(stage.host_s for stage in stages))
    low_s, high_s, is_paced = _find_interval(prediction, step_s, host_s)
    run_facts: FactDict = {"cluster": prediction.cluster.name, **workload.layout.facts(), **_stated_run(workload)}
    return StepReport(
        step_s=step_s,
        breakdown_s=parts,
        communication_s={str(group): Exposure(totals[group], exposed[group]) for group in totals if totals[group] > 0},
        stages=tuple(
            StageReport(s.stage, s.busy_s, sum(s.exposed_s.values()), s.host_s, s.bubble_s, in_flight[s.stage])
            for s in stages
        ),
        low_s=min(step_s, low_s),
        high_s=max(step_s, high_s),
        band=prediction.band,
        gpus=workload.layout.gpus,
        schedule=step.schedule.name,
        micro_batches=workload.micro_batches,
        run=run_facts | ({"engine": str(prediction.options.engine)} if fluid else {}),
        sources=pricer.sources(),
        warnings=(
            *workload.warnings,
            *_check_gpu(workload, prediction.cluster),
            *_check_body(workload, prediction.options),
            *pricer.placement_warnings(),
            *prediction.cluster.list_doubts(fluid is not None),
        ),
        assumptions=(
            *prediction.assumptions,
            *(_describe_sharing(fluid) if fluid else ()),
            *(() if run.is_settled else [UNSETTLED]),
            *([UNMEASURED_PACE.format(*prediction.options.host_paces)] if is_paced else []),
        ),
    )


def _describe_sharing(fluid: "FluidStep") -> list[str]:
    """Return by how much the fluid engine found the communication of each group slowed."""
    slowed: dict[str, float] = {}
    for operations in fluid.observed.operations:
        if operations.slowest > 1.005:
            name = operations.who.name
            slowed[name] = max(operations.slowest, slowed.get(name, 1.0))
    most = sorted(slowed.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{group} up to {times:.2f} times as long" for group, times in most)
    notes = [f"engine fluid: communication shared the network: {listed or 'nothing was slowed by it'}"]
    times = fluid.run.fluid_times
    if not times.exact:
        notes.append(
            f"engine fluid: from {format_seconds(times.near_from_s)} on, changes of rates below "
            f"{format_percent(times.near)} were not followed: there were too many flows"
        )
    return notes


def _find_interval(prediction: "Prediction", step_s: float, host_s: float) -> tuple[float, float, bool]:
    """Return the interval of the band where runs of its kind were measured, and whether the CPU's pace, which was not
    measured, widens it. Where no run was measured, prices may be less sure still. The time *host_s* that GPUs wait for
    their hosts is never surer than the pace of hosts.
    """
    band, pricer, options = prediction.band, prediction.pricer, prediction.options
    low_s, high_s = step_s, step_s
    if band is None or not band.measured:
        prices = pricer.low_s, pricer.high_s
        low_s, high_s = _run_ends(
            prediction,
            lambda step: [step.price(replace(step.prices, seconds=seconds, table=None)) for seconds in prices],
        )
    sooner_s, later_s = host_s * (1.0 - options.host_paces[0]), host_s * (options.host_paces[1] - 1.0)
    if options.issue_s and (host_s > 0 or options.ahead) and prediction.workload.layout.pp == 1:
        # A slower host also holds up GPUs that it now keeps busy.
        def pace_hosts(step: Step) -> list[WorkSeconds]:
            return [step.pace_host(step.base_seconds, pace) for pace in options.host_paces]

        ends_s = _run_ends(prediction, pace_hosts)
        sooner_s, later_s = max(sooner_s, step_s - ends_s[0]), max(later_s, ends_s[1] - step_s)
    around = band.around(step_s) if band else (step_s, step_s)
    ends = min(low_s - sooner_s, around[0]), max(high_s + later_s, around[1])
    unpaced = min(low_s, around[0]), max(high_s, around[1])
    wider_s = (ends[1] - ends[0]) - (unpaced[1] - unpaced[0])
    return *ends, options.host_paces == HOST_PACES and wider_s > NOTED_SHARE * step_s


def _run_ends(prediction: "Prediction", find_ends: Callable[[Step], list[WorkSeconds]]) -> tuple[float, float]:
    """Return the step with the seconds of its operations at the low and at the high end of a range."""
    steady = prediction.source.steady
    if steady:
        runs = [steady[0].simulate(seconds) for seconds in find_ends(steady[0].step)]
        if runs[0] and runs[1]:
            return runs[0].makespan_s, runs[1].makespan_s
    step = prediction.step
    low_s, high_s = makespans_s(step.program, list(map(step.add_lead, find_ends(step))))
    if prediction.fluid:  # sharing adds the same to both
        slowed = prediction.simulated_s / prediction.run.makespan_s if prediction.run.makespan_s else 1.0
        return low_s * slowed, high_s * slowed
    return low_s, high_s


def _stated_run(workload: Workload) -> FactDict:
    """Return the model and the batch of the run that a workload was written from, as far as it states them."""
    notes = {name: workload.note(name) or "" for name in ("model", "seq", "micro_batch")}
    facts: FactDict = {name: int(text) if text.isdecimal() else text for name, text in notes.items() if text}
    if isinstance(size := facts.get("micro_batch"), int):
        facts["global_batch"] = size * workload.micro_batches * workload.layout.dp
    return facts


def _check_gpu(workload: Workload, cluster: Cluster) -> tuple[str, ...]:
    """Warn of compute times that were estimated for another GPU."""
    gpu, name = workload.note("gpu"), cluster.gpu.name
    if gpu in (None, name):
        return ()
    return (f"the file has compute times of {gpu}, which are not changed for {name}: predict for it instead",)


def _check_body(workload: Workload, options: Options) -> list[str]:
    """Warn of a body that lists more layers than a stage can have: it is likely the whole model."""
    if not workload.uniform or workload.layout.pp == 1 or options.body is Body.MODEL:
        return []
    layers = max((block.repeat for block in workload.stages[0].body), default=1)
    total = layers * workload.layout.pp
    if total <= DEEPEST_MODEL:
        return []
    return [
        f"the body lists {layers} layers and counts as one of {workload.layout.pp} stages, "
        f"{total} layers in all; if it is the whole model, use --body model"
    ]


Finish = Callable[[StepReport, "tuple[StageMemory, ...]"], StepReport]
"""Completes a report from the report of the step and the memory of its stages."""


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step that is built and run on demand: all its slots, or fewer that settle the rest."""

    workload: Workload
    cluster: Cluster
    pricer: Pricer
    options: Options
    schedule: Schedule | ScheduleSize
    prices: Prices
    message: Transfer
    conditions: Conditions
    alone: frozenset[Group]  # groups of one rank

    def arrange(self, schedule: Schedule) -> Schedule:
        """Return *schedule* with its slots in pairs where micro-batches are interleaved."""
        pairs = self.options.pairs and not isinstance(self.options.schedule, Schedule)
        return pair_slots(schedule) if pairs else schedule

    def build(self, schedule: Schedule) -> Step:
        terms, options = (self.workload, schedule, self.prices, self.message), self.options
        send = options.send or Send.EAGER
        return build_step(*terms, body=options.body, send=send, conditions=self.conditions, alone=self.alone)

    @cached_property
    def step(self) -> Step:
        """The step with every slot."""
        schedule = self.schedule
        return self.build(self.arrange(schedule if isinstance(schedule, Schedule) else write_schedule(*schedule)))

    @cached_property
    def run(self) -> Run:
        return simulate(self.step.program, self.step.seconds)

    @property
    def _periodic_size(self) -> ScheduleSize | None:
        """The size of the schedule if no micro-batch differs from the others but the first and the last."""
        varies = any(which >= 0 for stage in self.workload.stages for which, _ in stage.varied)
        is_fast = self.options.engine is Engine.FAST
        return None if isinstance(self.schedule, Schedule) or varies or not is_fast else self.schedule

    @cached_property
    def is_long(self) -> bool:
        """Whether the step has too many slots to be written out."""
        size = self._periodic_size
        return size is not None and count_slots(*size[1:]) > LONG and self.steady is not None

    @cached_property
    def steady(self) -> tuple[SteadyStep, Run] | None:
        """A short step in place of one of many micro-batches."""
        size = self._periodic_size
        return find_steady_run(size, self.build, self.arrange) if size else None

    @property
    def reported(self) -> tuple[Step, Run]:
        """The step whose breakdown is that of the whole."""
        size, steady = self._periodic_size, self.steady
        if size and not (steady and steady[1].is_settled):
            steady = find_steady_run(size, self.build, self.arrange, is_reported=True)
        return (steady[0].step, steady[1]) if steady else (self.step, self.run)

    @cached_property
    def makespan_s(self) -> float:
        """When the step ends."""
        if self.fluid:
            return self.fluid.run.makespan_s
        # The run of all slots is as large as all that led to it, and few ask for it.
        return self.steady[1].makespan_s if self.steady else simulate(self.step.program, self.step.seconds).makespan_s

    @cached_property
    def fluid(self) -> "FluidStep | None":
        """The step run by the fluid engine, where that is asked for."""
        if self.options.engine is not Engine.FLUID:
            return None
        from stepcast.forecast.fluid import run_fluid

        options = self.options
        return run_fluid(self.step, self.pricer, self.cluster, options.others, nodes=options.network_nodes)


@dataclass(frozen=True, eq=False)
class PickledStep:
    """A step that was run before its prediction was pickled; one of very many micro-batches has no tasks."""

    result: tuple[Step, Run] | None
    is_long: bool = False
    steady: None = None
    fluid: None = None

    @property
    def reported(self) -> tuple[Step, Run]:
        if self.result is None:
            raise ValueError("a step of so many micro-batches is pickled without its tasks: predict it again")
        return self.result

    @property
    def step(self) -> Step:
        return self.reported[0]

    @property
    def run(self) -> Run:
        return self.reported[1]


MOST_SHOWN = 5_000_000


@dataclass(frozen=True, eq=False)
class Prediction(Answer):
    """A simulated training step.

    ``step_s`` is its time and ``interval_s`` its 90 % interval; ``tokens_per_s`` and ``mfu`` are its throughput,
    ``breakdown_s`` its time breakdown (mean over stages), ``memory_bytes`` the memory of the fullest stage and
    ``fits`` whether that suffices. ``report`` has the rest with its defaults and warnings, ``timeline`` all
    operations; ``to_dict()`` is the answer as JSON and ``save_html(path)`` its page.
    """

    source: PreparedStep | PickledStep
    workload: Workload
    cluster: Cluster
    pricer: Pricer
    options: Options
    place: int = 0  # the rank of each stage that represents the others
    assumptions: tuple[str, ...] = ()
    memory: "tuple[StageMemory, ...]" = ()  # of each stage; nothing where no model is known
    finish: Finish | None = None
    band: Band | None = None  # of measured steps of its kind around their predictions; None where no model is known
    asked: Facts = field(default_factory=dict)  # the question, in the words of the JSON contract
    describe: "Callable[[Prediction], FactDict] | None" = None

    def __repr__(self) -> str:
        layout, where = self.workload.layout, self.cluster.name
        named = f"{self.workload.name} " if self.workload.name else ""
        return f"Prediction({named}on {layout.gpus:,} GPUs of {where}: {format_seconds(self.step_s)} a step)"

    def _repr_html_(self) -> str:
        from stepcast.views.html import render_notebook
        from stepcast.views.step import step_view

        return render_notebook(step_view(self.facts(), self.shown_timeline, roofline(self)), "prediction")

    def __reduce__(self) -> tuple[Callable[..., "Prediction"], tuple[object, ...]]:
        """Pickle the results: functions that led to them are not pickled."""
        known = {"report": self.report, "simulated_s": self.simulated_s}
        if self.fluid:  # they do not follow from the run
            known["times"] = self.times
        left_out = ("source", "finish")
        fields = {field.name: getattr(self, field.name) for field in get_fields(self) if field.name not in left_out}
        return _unpickle, (None if self.source.is_long else (self.step, self.run), fields, known)

    @property
    def step(self) -> Step:
        return self.source.step

    @property
    def run(self) -> Run:
        return self.source.run

    @property
    def fluid(self) -> "FluidStep | None":
        return self.source.fluid

    @cached_property
    def simulated_s(self) -> float:
        assert isinstance(self.source, PreparedStep)  # pickled with the prediction otherwise
        return self.source.makespan_s

    @property
    def step_s(self) -> float:
        return self.simulated_s

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
        """Return the same with more notes in its report: *assumptions* first, *warnings* last."""

        def finish(report: StepReport, memory: "tuple[StageMemory, ...]") -> StepReport:
            report = self.finish(report, memory) if self.finish else report
            notes = (*assumptions, *report.assumptions)
            return replace(report, assumptions=notes, warnings=(*report.warnings, *warnings))

        return replace(self, finish=finish)

    def facts(self) -> FactDict:
        """Return the question and the report; ``to_dict()`` adds the whole run, and changes if it does not fit."""
        return {**self.asked, **self.report.facts()}

    def save_html(self, path: "str | PathLike[str]") -> None:
        """Write the answer as self-contained HTML, which works offline."""
        from stepcast.outputs.files import write_file
        from stepcast.version import __version__
        from stepcast.views.document import About
        from stepcast.views.html import render_page
        from stepcast.views.step import step_view

        view = step_view({"command": "", "version": __version__, **self.to_dict()}, self.shown_timeline, roofline(self))
        write_file(fspath(path), render_page(view, About("predict", "stepcast.predict()", __version__)))

    @property
    def interval_s(self) -> tuple[float, float]:
        """The ends of the 90 % interval of the step time."""
        return self.report.low_s, self.report.high_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all GPUs; None for workloads without a model."""
        return self.report.throughput.tokens_per_s if self.report.throughput else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation; None for workloads without a model."""
        return self.report.throughput.mfu if self.report.throughput else None

    @property
    def breakdown_s(self) -> Mapping[str, float]:
        """The time breakdown, a mean over stages."""
        return self.report.breakdown_s

    @property
    def memory_bytes(self) -> Facts:
        """The memory breakdown of the fullest stage; empty for workloads without a model."""
        return self.report.memory_bytes or {}

    def row(self) -> dict[str, Cell]:
        """Return one row of a table, such as a pandas DataFrame takes: plain values by name."""
        return row_of(self.facts())

    @cached_property
    def times(self) -> Times:
        return self.fluid.run.times if self.fluid else task_times(self.run)

    @cached_property
    def timeline(self) -> "Timeline":
        from stepcast.simulation.timeline import timeline_of

        return timeline_of(self.step, self.times, self.workload.layout, self.place)

    @property
    def shown_timeline(self) -> "Timeline | None":
        """The timeline; None of so many tasks that nobody could look through them."""
        if self.source.is_long:
            return None
        try:
            return None if self.step.program.written_out.tasks > MOST_SHOWN else self.timeline
        except ValueError:  # it was pickled without its tasks
            return None

    @cached_property
    def critical_path(self) -> "CriticalPath":
        from stepcast.simulation.timeline import critical_path

        return critical_path(self.step.program, self.times)


def _unpickle(result: tuple[Step, Run] | None, fields: Facts, known: Mapping[str, object]) -> Prediction:
    prediction = Prediction(PickledStep(result), **fields)
    # They are computed when first asked for, and were.
    prediction.__dict__.update(known)
    return prediction
