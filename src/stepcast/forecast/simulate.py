"""A workload on a cluster: price every op, build the program, run it, read the result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from stepcast.cost.pricing import ComputePrice, Pricer, recorded_price
from stepcast.forecast.options import (
    DEFAULTS,
    Engine,
    Options,
    as_workload_says,
    boundary_bytes_of,
    check_room,
    resized,
    schedule_of,
    with_slow_ranks,
    written,
)
from stepcast.forecast.reported import report_of
from stepcast.forecast.rows import row_of
from stepcast.hardware import Cluster
from stepcast.ir.band import Band
from stepcast.ir.doubts import doubts
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.model_parts import Routing
from stepcast.ir.step import StepReport
from stepcast.ir.timeline import Timeline
from stepcast.ir.work import Direction, Transfer
from stepcast.ir.workload import Workload
from stepcast.simulation.arrays import Program, Times
from stepcast.simulation.costs import Prices
from stepcast.simulation.critical import CriticalPath, critical_path
from stepcast.simulation.engine import Run, task_times
from stepcast.simulation.engine import simulate as run_program
from stepcast.simulation.messages import Send
from stepcast.simulation.pieces import Floats, ProgramError
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules.paired import paired
from stepcast.simulation.shorter import Pair, pair, shorter
from stepcast.simulation.spans import timeline_of
from stepcast.simulation.steady import LONG, Settled, settled, slots_of
from stepcast.simulation.step import Step, build_step
from stepcast.simulation.together import makespans_together
from stepcast.units import format_seconds

if TYPE_CHECKING:  # a workload file has no model whose memory could be counted
    from stepcast.cost.memory import StageMemory
    from stepcast.forecast.fluid import FluidStep


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
        from stepcast.views.notebook import step_html

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


def _say_group_limit(routing: Routing | None, layout: Layout, pricer: Pricer) -> list[str]:
    """Say how a limit on expert groups acts on the nodes that tokens are sent to."""
    nodes = pricer.route(Group.EP).nodes if routing and layout.ep > 1 else 1
    if routing is None or nodes == 1 or not routing.is_limited:
        return []
    limit = f"routing is limited to {routing.top_groups} of {routing.groups} expert groups"
    if not routing.aligns_with(nodes):
        return [f"{limit}, which do not align with {nodes} nodes: a token may be sent to any node"]
    size = routing.groups / nodes
    mapping = f"{size:g} group{'s' * (size > 1)} per node" if size >= 1 else f"{1 / size:g} nodes per group"
    mean = f"{routing.nodes_per_token(nodes):.2f} of {nodes} nodes on average"
    return [f"{limit}, {mapping}: a token is sent to {mean}"]


def prepared(
    workload: Workload,
    cluster: Cluster,
    options: Options = DEFAULTS,
    compute: ComputePrice = recorded_price,
    slow_ranks: Mapping[int, float] | None = None,
) -> Prediction:
    """What ``simulate`` runs, not yet run."""
    workload = resized(workload, options.gpus)
    options = as_workload_says(options, workload)
    check_room(workload.layout, cluster)
    assumptions: list[str] = []
    conditions = with_slow_ranks(options.conditions, slow_ranks or {}, workload.layout, assumptions)
    schedule = schedule_of(workload, options, assumptions)
    boundary_bytes = boundary_bytes_of(workload, assumptions)
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
    assumptions.extend(_say_group_limit(options.once_per_node, workload.layout, pricer))
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
        return built(schedule if isinstance(schedule, Schedule) else written(*schedule))

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
