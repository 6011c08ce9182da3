"""The options of a run, and what follows from the workload where they are unset."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum

from stepcast.cost.collectives.choose import Algorithm
from stepcast.cost.host import HOST_PACES
from stepcast.hardware import Cluster, Place
from stepcast.ir.flows import Repeating
from stepcast.ir.layout import Layout
from stepcast.ir.model_parts import Routing
from stepcast.ir.types import dataclass, replace
from stepcast.ir.work import CollectiveKind
from stepcast.ir.workload import Workload, with_layout
from stepcast.simulation.chunks import Body
from stepcast.simulation.costs import IssueSeconds
from stepcast.simulation.messages import Send
from stepcast.simulation.schedule import Schedule, ScheduleError
from stepcast.simulation.schedules import choose_schedule, chunks_for, make_schedule
from stepcast.simulation.steady import MOST, count_slots
from stepcast.simulation.step import HEALTHY, Conditions


class Engine(StrEnum):
    """The engine that runs a step."""

    FAST = "fast"  # folded, each communication as long as it takes by itself
    FLUID = "fluid"  # task by task, communication as flows


@dataclass(frozen=True)
class Options:
    """The options of a run; those that are None follow from the workload."""

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
    # Nine in ten hosts take between these times as long as issue_s says.
    host_paces: tuple[float, float] = HOST_PACES
    # Whether that host goes on to the next step before this one has ended.
    ahead: bool = False
    # Whether computation slows down while communication overlaps it; recorded times may include that already.
    contention: bool = False
    # How tokens choose experts where they cross the network once for each node; None: once for each expert.
    once_per_node: Routing | None = None
    # Price communication by its slowest link alone, without latency or protocol.
    ideal_communication: bool = False
    # Which GPUs of each rack the job gets, where racks are scale-up domains of several nodes.
    place: Place = Place.EVEN
    # fluid: communication that overlaps shares the links of the network.
    engine: Engine = Engine.FAST
    # Traffic of other jobs on the same network, and the nodes of the cluster that it needs; for fluid.
    others: Sequence[Repeating] = ()
    network_nodes: int | None = None


DEFAULTS = Options()


def complete_options(options: Options, workload: Workload) -> Options:
    """Return *options* with unset ones as the workload states them."""
    manner = workload.manner
    return replace(
        options,
        schedule=options.schedule or manner.schedule or None,
        send=options.send or (Send(manner.messages) if manner.messages else None),
        contention=options.contention or (manner.alone and not options.ideal_communication),
        once_per_node=options.once_per_node or manner.routing,
        pairs=options.pairs or manner.pairs,
    )


def slow_down_stages(
    conditions: Conditions, slow_ranks: Mapping[int, float], layout: Layout, assumptions: list[str]
) -> Conditions:
    """Return *conditions* with the stages of slow ranks: their tensor-parallel peers wait for them at every layer.

    The pipeline with the slow rank is never ahead of its healthy replicas, so it alone decides when gradients can be
    reduced. Slow ranks in several replicas are put into one pipeline, which may be too slow.
    """
    slow_stages = dict(conditions.slow_stages)
    for stage in slow_stages:
        if not 0 <= stage < layout.pp:
            raise ValueError(f"stage {stage} is outside the layout's {layout.pp} stages, 0 to {layout.pp - 1}")
    replicas = set()
    per_stage = layout.rank_of_stage(1)
    for rank, factor in slow_ranks.items():
        if rank >= layout.gpus:
            raise ValueError(f"rank {rank} is outside the layout's {layout.gpus} GPUs")
        stage = rank // per_stage
        slow_stages[stage] = max(factor, slow_stages.get(stage, 1.0))
        replicas.add(rank % per_stage // (layout.tp * layout.cp))
    if len(replicas) > 1:
        assumptions.append(f"slow ranks of {len(replicas)} data-parallel replicas are simulated in one: an upper bound")
    return replace(conditions, slow_stages=slow_stages)


def resize_workload(workload: Workload, gpus: int | None) -> Workload:
    """Return *workload* on *gpus*: data parallelism takes what tp x cp x pp leave."""
    layout = workload.layout
    if gpus is None or gpus == layout.gpus:
        return workload
    model_gpus = layout.tp * layout.cp * layout.pp
    if gpus < model_gpus or gpus % model_gpus:
        raise ValueError(f"{gpus} GPUs are not a multiple of tp x cp x pp = {model_gpus}")
    resized = with_layout(workload, replace(layout, dp=gpus // model_gpus))
    # The user has answered the warning that asked for their number.
    return replace(resized, warnings=tuple(warning for warning in resized.warnings if "--gpus" not in warning))


def check_capacity(layout: Layout, cluster: Cluster) -> None:
    if cluster.gpus is not None and layout.gpus > cluster.gpus:
        raise ValueError(f"the layout needs {layout.gpus} GPUs and cluster {cluster.name} has {cluster.gpus}")


ScheduleSize = tuple[str, int, int, int]
"""The name of a schedule, its stages, micro-batches and chunks."""


def find_schedule(workload: Workload, options: Options, assumptions: list[str]) -> Schedule | ScheduleSize:
    """Return the schedule of the options, or the size of the one to make."""
    if isinstance(options.schedule, Schedule):
        return options.schedule
    layout, micro_batches = workload.layout, workload.micro_batches
    name = choose_schedule(layout, micro_batches, options.schedule)
    if options.schedule is None and layout.vpp > 1 and layout.pp > 1 and name == "gpipe":
        assumptions.append(
            f"interleaving needs as many micro-batches as stages ({layout.pp}) and there are "
            f"{micro_batches}: all forwards run before the backwards"
        )
    return name, layout.pp, micro_batches, chunks_for(layout, name)


class TooManySlotsError(ScheduleError):
    """A schedule that would have to be run slot by slot and has too many of them."""


def write_schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Make the schedule slot by slot, as long as that is possible."""
    if count_slots(stages, micro_batches, chunks) > MOST:
        raise TooManySlotsError(
            f"{micro_batches:,} micro-batches of schedule {name} on {stages} stage(s) are more than the "
            f"{MOST:,} slots that are run one by one; use fewer"
        )
    return make_schedule(name, stages, micro_batches, chunks)


def find_boundary_bytes(workload: Workload, assumptions: list[str]) -> int:
    """Return the bytes of one micro-batch between stages: as stated, else those of the largest activation."""
    if workload.boundary_bytes is not None or workload.layout.pp == 1:
        return workload.boundary_bytes or 0
    guess = workload.largest_activation_bytes
    assumptions.append(
        f"messages between stages are not stated; taken as {guess:,} bytes, the largest tensor-parallel "
        "activation (2 x micro-batch x seq x hidden)"
    )
    return guess
