"""A workload on a cluster: price every op, build the program, run it, read the result."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

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
from stepcast.forecast.prediction import Prediction
from stepcast.hardware import Cluster
from stepcast.ir.arrays import FloatArray
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.model_parts import Routing
from stepcast.ir.work import Direction, Transfer
from stepcast.ir.workload import Workload
from stepcast.simulation.costs import Prices
from stepcast.simulation.engine import Run, makespans_together
from stepcast.simulation.engine import simulate as run_program
from stepcast.simulation.messages import Send
from stepcast.simulation.program import Program
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import pair_slots
from stepcast.simulation.segments import ProgramError
from stepcast.simulation.steady import LONG, ProgramPair, count_slots, find_steady_step, pair_programs, shorten_schedule
from stepcast.simulation.step import Step, build_step

if TYPE_CHECKING:  # a workload file has no model whose memory could be counted
    from stepcast.forecast.fluid import FluidStep


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
    programs: list[tuple[Program, FloatArray]] = []
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
            whole_s = brief[1].end_s(ends_s[at], ends_s[at + 1], moves_s.get(at + 1))
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
            pair_slots(schedule) if options.pairs and not isinstance(options.schedule, Schedule) else schedule,
            prices,
            message,
            body=options.body,
            send=options.send or Send.EAGER,
            conditions=conditions,
            alone=alone,
        )

    found = None
    if not fluid and not isinstance(schedule, Schedule) and count_slots(*schedule[1:]) > LONG and _alike(workload):
        found = find_steady_step(*schedule, lambda schedule: _run(built(schedule)))

    @cache
    def whole() -> Step:
        return built(schedule if isinstance(schedule, Schedule) else written(*schedule))

    @cache
    def ran() -> Run:
        return _run(whole())[1]

    sizes = None
    runs_all = found is not None or fluid or options.pairs
    if not runs_all and not isinstance(schedule, Schedule) and _alike(workload):
        sizes = shorten_schedule(*schedule)

    @cache
    def brief() -> tuple[Step, ProgramPair] | None:
        assert sizes is not None
        step = built(sizes.short)
        both = pair_programs(step.program, sizes)
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
