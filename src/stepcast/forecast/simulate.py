"""A workload on a cluster: price every op, build the program, run it, read the result."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from stepcast.cost.compute import MOST_KNOWN, LoadPricer, Spent
from stepcast.cost.pace import apply_pace
from stepcast.cost.price import Price
from stepcast.cost.pricing import ComputePrice, Pricer, recorded_price
from stepcast.forecast.options import (
    DEFAULTS,
    Engine,
    Options,
    check_capacity,
    complete_options,
    find_boundary_bytes,
    find_schedule,
    resize_workload,
    slow_down_stages,
)
from stepcast.forecast.prediction import Prediction, PreparedStep
from stepcast.hardware import Cluster
from stepcast.ir.arrays import FloatArray
from stepcast.ir.layout import Group, Layout
from stepcast.ir.model_parts import Routing
from stepcast.ir.types import ByIdentity, dataclass
from stepcast.ir.work import COMPUTING, Compute, Direction, Transfer, Work, group_of
from stepcast.ir.workload import Workload
from stepcast.simulation.costs import Prices
from stepcast.simulation.lowering import OpList


def simulate(
    workload: Workload,
    cluster: Cluster,
    options: Options = DEFAULTS,
    compute: ComputePrice = recorded_price,
    slow_ranks: Mapping[int, float] | None = None,
) -> Prediction:
    """Run *workload* on *cluster*; *slow_ranks* compute by a factor longer."""
    if not (isinstance(workload, Workload) and isinstance(cluster, Cluster)):
        raise TypeError("simulate takes a Workload, such as stepcast.read(FILE), and a stepcast.load_cluster(NAME)")
    prediction = prepare(workload, cluster, options, compute, slow_ranks)
    _ = prediction.simulated_s  # what cannot run fails now
    return prediction


def prepare(
    workload: Workload,
    cluster: Cluster,
    options: Options = DEFAULTS,
    compute: ComputePrice = recorded_price,
    slow_ranks: Mapping[int, float] | None = None,
) -> Prediction:
    """Return the prediction that ``simulate`` runs, not yet run."""
    workload = resize_workload(workload, options.gpus)
    options = complete_options(options, workload)
    layout, slow_ranks = workload.layout, slow_ranks or {}
    check_capacity(layout, cluster)
    assumptions: list[str] = []
    conditions = slow_down_stages(options.conditions, slow_ranks, layout, assumptions)
    schedule = find_schedule(workload, options, assumptions)
    message = Transfer(Direction.SEND, find_boundary_bytes(workload, assumptions), Group.PP)
    is_fluid, priced = options.engine is Engine.FLUID, cluster
    if is_fluid:
        from stepcast.forecast.fluid import without_sharing

        priced = without_sharing(cluster)
    pricer = Pricer(
        priced,
        layout,
        compute,
        options.algorithms,
        once_per_node=options.once_per_node,
        ideal=options.ideal_communication,
        place=options.place,
        alone=is_fluid,
    )
    assumptions.extend(_describe_group_limit(options.once_per_node, layout, pricer))
    contention = pricer.lost_share if options.contention else None
    alone = _find_alone(layout)
    table = WorkTable(pricer, compute, alone).works_s if isinstance(compute, PacedCompute) else None
    prices = Prices(pricer.seconds, options.issue_s, contention, ahead=options.ahead, table=table)
    step = PreparedStep(workload, cluster, pricer, options, schedule, prices, message, conditions, alone)
    # The pipeline with the slowest rank is the one simulated; without one any is, so the first.
    slowest = max(slow_ranks, key=lambda rank: slow_ranks[rank], default=0)
    place = slowest % layout.rank_of_stage(1)
    return Prediction(step, workload, cluster, pricer, options, place, tuple(assumptions))


@dataclass(frozen=True, eq=False)
class PacedCompute:
    """The price of computation under one load, times the pace of the slowest GPU for work that its clock decides."""

    base: LoadPricer
    pace: float

    def __call__(self, work: Compute) -> Price:
        price = self.base(work)
        return price if self.pace == 1.0 else apply_pace(price, work, self.pace)


_SECONDS: ByIdentity[FloatArray] = ByIdentity(1024)


class WorkTable:
    """The seconds of works, remembered for all steps whose GPUs are as busy or whose groups use the same links."""

    def __init__(self, pricer: Pricer, compute: PacedCompute, alone: frozenset[Group]) -> None:
        self.pricer, self.compute, self.alone = pricer, compute, alone
        self.moving = pricer.links.seconds

    def works_s(self, lists: Sequence[OpList]) -> FloatArray:
        """Return the seconds of each work of *lists*; 0 for communication that does not run."""
        inputs = (lists, self.compute.base, self.moving)
        return _SECONDS.get(inputs, partial(self._price_lists, lists), self.compute.pace)

    def _price_lists(self, lists: Sequence[OpList]) -> FloatArray:
        hot, cool = self.compute.base.spent, self.compute.base.cool.spent
        pace, moving = self.compute.pace, self.moving
        keys = [key for ops in lists for key in ops.keys]
        works = [work for ops in lists for work in ops.works]
        seconds = {}
        for key, work in dict(zip(keys, works, strict=True)).items():
            spent = hot.get(key) or cool.get(key) or moving.get(key) or self._spend(key, work)
            seconds[key] = spent[0] * pace + spent[1]
        return np.array([seconds[key] for key in keys], np.float64)

    def _spend(self, key: int, work: Work) -> Spent:
        """Return the seconds of a *work* that was not asked for yet."""
        moving = self.moving
        if type(work) in COMPUTING:
            return self.compute.base.spend(work)  # type: ignore[arg-type]
        if len(moving) >= MOST_KNOWN:
            moving.clear()
        group = group_of(work)
        runs = group is None or (group not in self.alone and work.size_bytes > 0)  # type: ignore[union-attr]
        moving[key] = (0.0, self.pricer.other_s(work) if runs else 0.0, work)  # type: ignore[arg-type]
        return moving[key]


def _describe_group_limit(routing: Routing | None, layout: Layout, pricer: Pricer) -> list[str]:
    """Return a note on how a limit on expert groups acts on the nodes that tokens are sent to."""
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


@lru_cache(maxsize=1024)
def _find_alone(layout: Layout) -> frozenset[Group]:
    """Return the groups of one rank."""
    return frozenset(group for group in Group if layout.size(group) == 1)
