"""A workload on a cluster: price every op, build the program, run it, read the result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from stepcast.cost.collectives import Algorithm
from stepcast.cost.pricing import ComputePrice, Pricer, recorded_price
from stepcast.forecast.reported import report_of
from stepcast.forecast.rows import row_of
from stepcast.hardware import Cluster, Place
from stepcast.ir.band import Band
from stepcast.ir.doubts import doubts
from stepcast.ir.edits import with_layout
from stepcast.ir.flows import Repeating
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.residual import Residual
from stepcast.ir.step import StepReport
from stepcast.ir.timeline import Timeline
from stepcast.ir.work import CollectiveKind, Direction, Transfer
from stepcast.ir.workload import Workload
from stepcast.simulation.arrays import Program, Times
from stepcast.simulation.chunks import Body
from stepcast.simulation.costs import IssueSeconds, Prices
from stepcast.simulation.critical import CriticalPath, critical_path
from stepcast.simulation.engine import Run, task_times
from stepcast.simulation.engine import simulate as run_program
from stepcast.simulation.messages import Send
from stepcast.simulation.pieces import Floats, ProgramError
from stepcast.simulation.schedule import Schedule, ScheduleError
from stepcast.simulation.schedules.paired import paired
from stepcast.simulation.schedules.table import chunks_for, make_schedule, usual_schedule
from stepcast.simulation.shorter import Pair, pair, shorter
from stepcast.simulation.spans import timeline_of
from stepcast.simulation.steady import LONG, MOST, Settled, settled, slots_of
from stepcast.simulation.step import HEALTHY, Conditions, Step, build_step
from stepcast.simulation.together import makespans_together
from stepcast.units import format_seconds

if TYPE_CHECKING:  # a workload file has no model whose memory could be counted
    from stepcast.cost.memory import StageMemory
    from stepcast.forecast.fluid import FluidStep


class Engine(StrEnum):
    """How a step is run."""

    FAST = "fast"  # folded, each communication as long as it takes by itself
    FLUID = "fluid"  # task by task, communication as flows


@dataclass(frozen=True)
class Options:
    """How a workload is run; what is None follows from the workload."""

    schedule: Schedule | str | None = None
    gpus: int | None = None
    body: Body = Body.STAGE
    send: Send | None = None
    # Forwards interleaved with backwards of other micro-batches.
    pairs: bool = False
    algorithms: Mapping[CollectiveKind, Algorithm] = field(default_factory=dict)
    conditions: Conditions = HEALTHY
    # Seconds an eager host needs to issue each op; None: captured graphs, which cost it nothing.
    issue_s: IssueSeconds | None = None
    # Whether that host goes on to the next step before this one has ended.
    ahead: bool = False
    # Whether computation slows down while communication runs beside it; recorded times may hold that already.
    contention: bool = False
    # Experts per token where its exchange crosses the network once for each node; None: once for each expert.
    once_per_node: int | None = None
    # Price communication by its slowest link alone, without latency or protocol.
    ideal_communication: bool = False
    # Which GPUs of each rack the job gets, where racks are scale-up domains of several nodes.
    place: Place = Place.EVEN
    # fluid: communication shares the links of the network while it runs side by side.
    engine: Engine = Engine.FAST
    # Traffic of other jobs on the same network, and the nodes of the cluster that it needs; for fluid.
    others: Sequence[Repeating] = ()
    network_nodes: int | None = None
    # By how much measured runs of this framework on such GPUs were slower or faster, where that is asked for.
    residual: Residual | None = None


DEFAULTS = Options()
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
    settled: Settled | None = None
    # Of many micro-batches: a shorter step that may tell when it ends.
    brief: Callable[[], tuple[Step, Pair] | None] | None = None
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
        from stepcast.forecast.operators import roofline
        from stepcast.pages.notebook import step_html

        return step_html(self.report.facts(), self.drawn, roofline(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was found: functions that led to it do not travel."""
        from stepcast.forecast.travelling import packed

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
        return replace(report, warnings=(*report.warnings, *doubts(report.facts())))

    def noting(self, assumptions: Sequence[str] = (), warnings: Sequence[str] = ()) -> "Prediction":
        """The same with more said in its report: *assumptions* first, *warnings* last."""

        def finish(report: StepReport, memory: "tuple[StageMemory, ...]") -> StepReport:
            report = self.finish(report, memory) if self.finish else report
            return replace(
                report,
                assumptions=(*assumptions, *report.assumptions),
                warnings=(*report.warnings, *warnings),
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


def simulate(
    workload: Workload,
    cluster: Cluster,
    options: Options = DEFAULTS,
    compute: ComputePrice = recorded_price,
    slow_ranks: Mapping[int, float] | None = None,
) -> Prediction:
    """Run *workload* on *cluster*; *slow_ranks* compute by a factor longer."""
    prediction = prepared(workload, cluster, options, compute, slow_ranks)
    if prediction.settled is None:
        _ = prediction.shared() if prediction.shared else prediction.run  # what cannot run is told now
    return prediction


def together(predictions: Sequence[Prediction]) -> Sequence[Prediction]:
    """The same *predictions*, simulated in one go as if each were by itself; not, where one cannot run."""
    if any(each.shared for each in predictions):
        return predictions
    programs: list[tuple[Program, Floats]] = []
    watched = {}
    for each in predictions:
        brief = each.brief and each.brief()
        if brief:
            step, both = brief
            programs += [(both.short, step.seconds), (both.longer, step.seconds)]
            watched[len(programs) - 1] = both.watched
        elif each.settled is None:
            programs.append((each.step.program, each.step.seconds))
    try:
        ends_s, moves_s = makespans_together(programs, watched)
    except ProgramError:
        return predictions
    found, at = [], 0
    for each in predictions:
        brief = each.brief and each.brief()
        if brief:
            whole_s = brief[1].ends_s(ends_s[at], ends_s[at + 1], moves_s.get(at + 1))
            found.append(replace(each, ends_s=whole_s))
            at += 2
        elif each.settled is None:
            found.append(replace(each, ends_s=ends_s[at]))
            at += 1
        else:
            found.append(each)
    return found


def prepared(
    workload: Workload,
    cluster: Cluster,
    options: Options = DEFAULTS,
    compute: ComputePrice = recorded_price,
    slow_ranks: Mapping[int, float] | None = None,
) -> Prediction:
    """What ``simulate`` runs, not yet run."""
    workload = _resized(workload, options.gpus)
    options = _as_workload_says(options, workload)
    _check_room(workload.layout, cluster)
    assumptions: list[str] = []
    conditions = _with_slow_ranks(options.conditions, slow_ranks or {}, workload.layout, assumptions)
    schedule = _schedule(workload, options, assumptions)
    boundary_bytes = _boundary_bytes(workload, assumptions)
    fluid = options.engine is Engine.FLUID
    pricer = Pricer(
        _unshared(cluster) if fluid else cluster,
        workload.layout,
        compute,
        options.algorithms,
        once_per_node=options.once_per_node,
        ideal=options.ideal_communication,
        place=options.place,
        alone=fluid,
    )
    message = Transfer(Direction.SEND, boundary_bytes, Group.PP)

    takes = pricer.lost_share if options.contention else None
    prices = Prices(pricer.seconds, options.issue_s, takes, ahead=options.ahead)
    alone = _alone(workload.layout)

    def built(schedule: Schedule) -> Step:
        return build_step(
            workload,
            paired(schedule) if options.pairs and not isinstance(options.schedule, Schedule) else schedule,
            prices,
            message,
            body=options.body,
            send=options.send or Send.EAGER,
            conditions=conditions,
            alone=alone,
        )

    found = None
    if (
        not fluid
        and not isinstance(schedule, Schedule)
        and slots_of(*schedule[1:]) > LONG
        and _alike(workload)
    ):
        found = settled(*schedule, lambda schedule: _run(built(schedule)))

    @cache
    def whole() -> Step:
        return built(schedule if isinstance(schedule, Schedule) else _written(*schedule))

    @cache
    def ran() -> Run:
        return _run(whole())[1]

    sizes = None
    runs_all = found is not None or fluid or options.pairs
    if not runs_all and not isinstance(schedule, Schedule) and _alike(workload):
        sizes = shorter(*schedule)

    @cache
    def brief() -> tuple[Step, Pair] | None:
        assert sizes is not None
        step = built(sizes.short)
        both = pair(step.program, sizes)
        return (step, both) if both else None

    @cache
    def shared() -> "FluidStep":
        from stepcast.forecast.fluid import run_fluid

        return run_fluid(whole(), pricer, cluster, options.others, nodes=options.network_nodes)

    place = _place(slow_ranks or {}, workload.layout)
    return Prediction(
        whole,
        ran,
        workload,
        cluster,
        pricer,
        options,
        place,
        tuple(assumptions),
        settled=found,
        brief=brief if sizes else None,
        shared=shared if fluid else None,
    )


def _unshared(cluster: Cluster) -> Cluster:
    from stepcast.forecast.fluid import unshared

    return unshared(cluster)


@lru_cache(maxsize=1024)
def _alone(layout: Layout) -> frozenset[Group]:
    """Groups of one rank."""
    return frozenset(group for group in Group if layout.size(group) == 1)


def _run(step: Step) -> tuple[Step, Run]:
    return step, run_program(step.program, step.seconds)


def _alike(workload: Workload) -> bool:
    """Whether no micro-batch differs from the usual but the first and the last."""
    return all(stage.in_turn or not stage.variations for stage in workload.stages)


def _place(slow_ranks: Mapping[int, float], layout: Layout) -> int:
    """The pipeline with the slowest rank is the one simulated; without one any is, so the first."""
    slowest = max(slow_ranks, key=lambda rank: slow_ranks[rank], default=0)
    return slowest % layout.rank_of_stage(1)


def _as_workload_says(options: Options, workload: Workload) -> Options:
    """*options* with what they leave open as the workload states it."""
    manner = workload.manner
    return replace(
        options,
        schedule=options.schedule or manner.schedule or None,
        send=options.send or (Send(manner.messages) if manner.messages else None),
        contention=options.contention or (manner.alone and not options.ideal_communication),
        once_per_node=options.once_per_node or manner.once_per_node or None,
    )


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
    per_stage = layout.rank_of_stage(1)
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
    resized = with_layout(workload, replace(layout, dp=gpus // model_gpus))
    # The user has answered the warning that asked for their number.
    return replace(resized, warnings=tuple(each for each in resized.warnings if "--gpus" not in each))


def _check_room(layout: Layout, cluster: Cluster) -> None:
    if cluster.gpus is not None and layout.gpus > cluster.gpus:
        raise ValueError(f"the layout needs {layout.gpus} GPUs and cluster {cluster.name} has {cluster.gpus}")


def _schedule(
    workload: Workload, options: Options, assumptions: list[str]
) -> Schedule | tuple[str, int, int, int]:
    """The schedule, or its name, stages, micro-batches and chunks."""
    if isinstance(options.schedule, Schedule):
        return options.schedule
    layout, micro_batches = workload.layout, workload.micro_batches
    name = usual_schedule(layout, micro_batches, options.schedule)
    if options.schedule is None and layout.vpp > 1 and layout.pp > 1 and name == "gpipe":
        assumptions.append(
            f"interleaving needs as many micro-batches as stages ({layout.pp}) and there are "
            f"{micro_batches}: all forwards run before the backwards"
        )
    return name, layout.pp, micro_batches, chunks_for(layout, name)


def _written(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Slot by slot, as long as that is possible."""
    if slots_of(stages, micro_batches, chunks) > MOST:
        raise ScheduleError(
            f"{micro_batches:,} micro-batches of schedule {name} on {stages} stage(s) are more than the "
            f"{MOST:,} slots that are run one by one; use fewer"
        )
    return make_schedule(name, stages, micro_batches, chunks)


def _boundary_bytes(workload: Workload, assumptions: list[str]) -> int:
    """Bytes of one micro-batch between stages: as stated, else as large as the activations look."""
    if workload.boundary_bytes is not None or workload.layout.pp == 1:
        return workload.boundary_bytes or 0
    guess = workload.largest_activation_bytes
    assumptions.append(
        f"messages between stages are not stated; taken as {guess:,} bytes, the largest tensor-parallel "
        "activation (2 x micro-batch x seq x hidden)"
    )
    return guess
