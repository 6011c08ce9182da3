"""From a model or a workload to a step on a cluster: price every op, build the program, run it, read it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from stepcast.cost.calibration import Calibration
from stepcast.cost.collectives import Algorithm
from stepcast.cost.compute import compute_price, step_load
from stepcast.cost.fits import default_dispatch, default_fit
from stepcast.cost.memory import StageMemory, memory
from stepcast.cost.price import Price
from stepcast.cost.pricing import ComputePrice, Pricer, recorded_price
from stepcast.hardware import Cluster
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.step import PART_OF_GROUP, PARTS, Exposure, StageReport, StepReport, Throughput
from stepcast.ir.strategy import Execution, Strategy
from stepcast.ir.timeline import Timeline
from stepcast.ir.work import Collective, CollectiveKind, Compute, Direction, Transfer, Work
from stepcast.ir.workload import Phase, Workload
from stepcast.simulation.arrays import Times
from stepcast.simulation.breakdown import StageTime, stage_times
from stepcast.simulation.chunks import Body
from stepcast.simulation.critical import CriticalPath, critical_path
from stepcast.simulation.engine import Run, task_times
from stepcast.simulation.engine import simulate as run_program
from stepcast.simulation.messages import Send
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedule_check import peak_in_flight
from stepcast.simulation.schedules.table import ONLY_CHUNKS, make_schedule
from stepcast.simulation.segments import IssueSeconds
from stepcast.simulation.spans import timeline_of
from stepcast.simulation.step import HEALTHY, Conditions, Step, build_step
from stepcast.units import TFLOPS

# No published dense transformer is deeper; a body that would make one is likely the whole model.
DEEPEST_MODEL = 160


@dataclass(frozen=True)
class Options:
    """How a workload is run; what is None follows from the workload."""

    schedule: Schedule | str | None = None
    gpus: int | None = None
    body: Body = Body.STAGE
    send: Send = Send.EAGER
    algorithms: Mapping[CollectiveKind, Algorithm] = field(default_factory=dict)
    conditions: Conditions = HEALTHY
    # Seconds an eager host needs to issue each op; None: captured graphs, which cost it nothing.
    issue_s: IssueSeconds | None = None
    # Price communication by its slowest link alone, without latency or protocol.
    ideal_communication: bool = False


DEFAULTS = Options()


@dataclass(frozen=True, eq=False)
class Prediction:
    """A simulated step: the report, and on demand all its tasks."""

    report: StepReport
    step: Step
    run: Run

    @cached_property
    def times(self) -> Times:
        return task_times(self.run)

    @cached_property
    def timeline(self) -> Timeline:
        return timeline_of(self.step, self.times)

    @cached_property
    def critical_path(self) -> CriticalPath:
        return critical_path(self.step.program, self.times)


def predict(
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    options: Options = DEFAULTS,
    calibration: Calibration | None = None,
) -> Prediction:
    """One training step of *model* under *strategy* on *cluster*."""
    # Loaded here: a workload file needs no generator, and starts faster without.
    from stepcast.generate.flops import model_flops
    from stepcast.generate.workload import generate

    workload = generate(model, strategy)
    compute = compute_pricer(workload, cluster, calibration)
    options = replace(options, schedule=options.schedule or str(strategy.schedule))
    if strategy.execution is Execution.EAGER:
        options = replace(options, issue_s=_eager_issue_s)
    prediction = simulate(workload, cluster, options, compute)
    report = prediction.report
    # What the model needs: a causal mask leaves half of the attention square, as Megatron-LM counts today.
    flops = model_flops(model, strategy.seq, strategy.global_batch, causal=True)
    per_gpu = flops / report.step_s / strategy.layout.gpus
    throughput = Throughput(
        tokens_per_s=strategy.tokens / report.step_s,
        tflops_per_gpu=per_gpu / TFLOPS,
        mfu=per_gpu / cluster.gpu.matrix_peak_flops(str(strategy.precision)),
    )
    return replace(
        prediction,
        report=replace(
            report,
            throughput=throughput,
            memory_bytes=memory_facts(memory(model, strategy, cluster.gpu)),
            warnings=(*report.warnings, *_precision_warnings(cluster, str(strategy.precision))),
        ),
    )


def _precision_warnings(cluster: Cluster, precision: str) -> list[str]:
    """A format that the GPU does not multiply in runs as another, and MFU is counted against that one."""
    used = cluster.gpu.runs_as(precision)
    if used == precision:
        return []
    return [
        f"{cluster.gpu.name} has no {precision} matrix units: matrix products run as {used}; "
        f"it has {', '.join(cluster.gpu.matrix_flops)}"
    ]


def memory_facts(stages: Sequence[StageMemory]) -> dict[str, Any]:
    """The fullest stage in the words of the JSON contract, and every stage beside it."""
    fullest = max(stages, key=lambda stage: stage.total)
    return {
        **fullest.parts,
        "total": fullest.total,
        "capacity": fullest.capacity,
        "fits": all(stage.fits for stage in stages),
        "free": fullest.free,
        "stage": fullest.stage,
        "stages": [{"stage": stage.stage, **stage.parts, "total": stage.total} for stage in stages],
    }


def _eager_issue_s(work: Work, backward: bool) -> float:
    """What eager PyTorch takes on the host; a collective is issued like a heavy kernel."""
    dispatch = default_dispatch()
    if isinstance(work, Collective | Transfer):
        return dispatch.backward_heavy_s if backward else dispatch.heavy_s
    return dispatch.issue_s(work, backward)


def compute_pricer(
    workload: Workload, cluster: Cluster, calibration: Calibration | None = None
) -> ComputePrice:
    """Prices computation as part of a long step on the cluster's GPU."""
    gpu, fit = cluster.gpu, default_fit()
    stage = workload.stages[len(workload.stages) // 2]
    works = [
        op.work
        for layer in stage.body_layers()
        for phase in Phase
        for op in layer.ops(phase)
        if not isinstance(op.work, Collective | Transfer)
    ]
    load = step_load(works, gpu, fit)

    def price(work: Compute) -> Price:
        if calibration is not None:
            return calibration.price(work, gpu, fit, load)
        return compute_price(work, gpu, fit, load)

    return price


def simulate(
    workload: Workload,
    cluster: Cluster,
    options: Options = DEFAULTS,
    compute: ComputePrice = recorded_price,
    slow_ranks: Mapping[int, float] | None = None,
) -> Prediction:
    """Run *workload* on *cluster*; *slow_ranks* compute by a factor longer."""
    workload = _resized(workload, options.gpus)
    _check_room(workload.layout, cluster)
    assumptions: list[str] = []
    conditions = _with_slow_ranks(options.conditions, slow_ranks or {}, workload.layout, assumptions)
    schedule = _schedule(workload, options, assumptions)
    boundary_bytes = _boundary_bytes(workload, assumptions)
    pricer = Pricer(cluster, workload.layout, compute, options.algorithms, ideal=options.ideal_communication)
    message = Transfer(Direction.SEND, boundary_bytes, Group.PP)

    message_s = pricer.seconds(message)
    step = build_step(
        workload,
        schedule,
        pricer.seconds,
        lambda source, target: message_s,
        body=options.body,
        send=options.send,
        conditions=conditions,
        issue_s=options.issue_s,
    )
    run = run_program(step.program)
    report = _report(step, run, workload)
    low_s, high_s = _band(report, workload, pricer)
    return Prediction(
        replace(
            report,
            low_s=low_s,
            high_s=high_s,
            sources=pricer.sources(),
            warnings=(*workload.warnings, *_body_warnings(workload, options)),
            assumptions=tuple(assumptions),
        ),
        step,
        run,
    )


def _band(report: StepReport, workload: Workload, pricer: Pricer) -> tuple[float, float]:
    """The step when every price is at the low or the high end of its range.

    Each part of the breakdown moves as the prices in it do, and what waits for others as they all do.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for stage in {id(stage): stage for stage in workload.stages}.values():
        for layer, count in stage.counted_layers(workload.micro_batches):
            for op in (*layer.forward, *layer.input_gradient, *layer.weight_gradient):
                price = pricer.price(op.work)
                group = op.work.group if isinstance(op.work, Collective | Transfer) else None
                part = PART_OF_GROUP[group] if group else "compute"
                for at, seconds in enumerate((price.seconds, price.low_s, price.high_s)):
                    sums[part][at] += seconds * count
    total = [sum(each[at] for each in sums.values()) for at in range(3)]

    def moved(end: int) -> float:
        moved_s = 0.0
        for part, seconds in report.breakdown_s.items():
            base = sums.get("compute" if part == "optimizer" else part, total)
            base = base if base[0] > 0 else total
            moved_s += seconds * (base[end] / base[0] if base[0] > 0 else 1.0)
        return moved_s

    return min(report.step_s, moved(1)), max(report.step_s, moved(2))


def _with_slow_ranks(
    conditions: Conditions, slow_ranks: Mapping[int, float], layout: Layout, assumptions: list[str]
) -> Conditions:
    """The stages that slow ranks slow down: their tensor-parallel peers wait for them at every layer.

    The pipeline with the slow rank is never ahead of its healthy replicas, so it alone decides when gradients
    can be reduced. Slow ranks in several replicas are put into one pipeline, which may be too slow.
    """
    slow_stages = dict(conditions.slow_stages)
    for stage in slow_stages:
        if not 0 <= stage < layout.pp:
            raise ValueError(
                f"stage {stage} is outside the layout's {layout.pp} stages, 0 to {layout.pp - 1}"
            )
    replicas = set()
    per_stage = layout.tp * layout.cp * layout.dp
    for rank, factor in slow_ranks.items():
        if rank >= layout.gpus:
            raise ValueError(f"rank {rank} is outside the layout's {layout.gpus} GPUs")
        stage = rank // per_stage
        slow_stages[stage] = max(factor, slow_stages.get(stage, 1.0))
        replicas.add(rank % per_stage // (layout.tp * layout.cp))
    if len(replicas) > 1:
        assumptions.append(
            f"slow ranks of {len(replicas)} data-parallel replicas are simulated in one: an upper bound"
        )
    return replace(conditions, slow_stages=slow_stages)


def _resized(workload: Workload, gpus: int | None) -> Workload:
    """*workload* on *gpus*: data parallelism takes what tp x cp x pp leave."""
    if gpus is None or gpus == workload.layout.gpus:
        return workload
    layout = workload.layout
    model_gpus = layout.tp * layout.cp * layout.pp
    if gpus < model_gpus or gpus % model_gpus:
        raise ValueError(f"{gpus} GPUs are not a multiple of tp x cp x pp = {model_gpus}")
    return replace(workload, layout=replace(layout, dp=gpus // model_gpus))


def _check_room(layout: Layout, cluster: Cluster) -> None:
    if cluster.gpus is not None and layout.gpus > cluster.gpus:
        raise ValueError(f"the layout needs {layout.gpus} GPUs and cluster {cluster.name} has {cluster.gpus}")


def _schedule(workload: Workload, options: Options, assumptions: list[str]) -> Schedule:
    if isinstance(options.schedule, Schedule):
        return options.schedule
    layout = workload.layout
    name = options.schedule or ("interleaved" if layout.vpp > 1 else "1f1b")
    if layout.pp == 1 and name not in ("gpipe", "1f1b"):
        name = "1f1b"
    if options.schedule is None and name == "interleaved" and workload.micro_batches < layout.pp:
        name = "gpipe"
        assumptions.append(
            f"interleaving needs as many micro-batches as stages ({layout.pp}) and there are "
            f"{workload.micro_batches}: all forwards run before the backwards"
        )
    chunks = ONLY_CHUNKS.get(name, layout.vpp)
    return make_schedule(name, layout.pp, workload.micro_batches, chunks if layout.pp > 1 else 1)


def _boundary_bytes(workload: Workload, assumptions: list[str]) -> int:
    """Bytes of one micro-batch between stages: as stated, else as large as the activations look."""
    if workload.boundary_bytes is not None or workload.layout.pp == 1:
        return workload.boundary_bytes or 0
    sizes = [
        op.work.size_bytes
        for stage in workload.stages
        for block in stage.body
        for layer in block.layers
        for op in layer.forward
        if isinstance(op.work, Collective) and op.work.group is Group.TP
    ]
    guess = max(sizes, default=0)
    assumptions.append(
        f"messages between stages are not stated; taken as {guess:,} bytes, the largest tensor-parallel "
        "activation (2 x micro-batch x seq x hidden)"
    )
    return guess


def _body_warnings(workload: Workload, options: Options) -> list[str]:
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


def _report(step: Step, run: Run, workload: Workload) -> StepReport:
    """The breakdown of an average stage, which sums to the step because every stage's does."""
    stages = stage_times(step, run)
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
    parts[largest] += run.makespan_s - sum(parts.values())
    in_flight = peak_in_flight(step.schedule)
    return StepReport(
        step_s=run.makespan_s,
        breakdown_s=parts,
        communication_s={
            str(group): Exposure(totals[group], exposed[group]) for group in totals if totals[group] > 0
        },
        stages=tuple(_stage_report(each, in_flight[each.stage]) for each in stages),
        low_s=run.makespan_s,
        high_s=run.makespan_s,
        gpus=workload.layout.gpus,
        schedule=step.schedule.name,
        micro_batches=workload.micro_batches,
    )


def _stage_report(each: StageTime, in_flight: int) -> StageReport:
    exposed_s = sum(each.exposed_s.values())
    return StageReport(each.stage, each.busy_s, exposed_s, each.host_s, each.bubble_s, in_flight)
