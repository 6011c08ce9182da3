"""Lower bounds of the seconds that the parts of a model take: kinds of blocks, embedding and head."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from stepcast.cost.compute import cool_seconds, load_of, make_pricer
from stepcast.cost.fits import default_fit
from stepcast.cost.pace import apply_pace_s, convert_for_kernel, least_pace, slow_for_kernel
from stepcast.cost.power import Load
from stepcast.cost.pricing import Pricer
from stepcast.generate.workload import block_layers, end_layers
from stepcast.hardware import Cluster
from stepcast.ir.architecture import NOTHING, Shard
from stepcast.ir.arrays import FloatArray
from stepcast.ir.framework import Framework
from stepcast.ir.layers.experts import exchange_routing
from stepcast.ir.layout import Channel, Group
from stepcast.ir.model import Model, pieces, pieces_of_stage, trained_shard
from stepcast.ir.model_parts import LayerParts, Routing
from stepcast.ir.schedules import SCHEDULES
from stepcast.ir.sharding import Gathered, Partition, Reduced, gathered_bytes, plan_of
from stepcast.ir.strategy import RecomputeKind, Strategy, layer_view
from stepcast.ir.work import COMMUNICATING, COMPUTING, Collective, CollectiveKind, Transfer, Work
from stepcast.ir.workload import Layer, Op
from stepcast.searching.space import CandidateSpace, pipeline_strategy

LOAD_STEP = 1e-9  # sums of the same seconds in another order
LANES = (Group.TP, Group.CP, Group.EP, Group.EXPERT_TP)
# How often weights are gathered in a micro-batch, and when they are gathered only once.
GATHERS = {Gathered.EACH_PASS: 2, Gathered.EACH_MICRO_BATCH: 1}
GATHERED_ONCE = (Gathered.AFTER_UPDATE, Gathered.ONCE)


PartLayers = Sequence[Sequence[Layer]]
"""The layers of each part of a model."""


class PartTime(IntEnum):
    """Columns of ``part_costs``, in seconds.

    The first four run from begin to end: kernels and the communication they wait for. The others may hide behind
    another micro-batch: kernels alone, a backward or a forward from its first kernel to its last, and from LANES
    on the communication of each group.
    """

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENTS = 2
    WEIGHT_GRADIENTS = 3
    KERNELS = 4
    BACKWARD_SPAN = 5
    LANES = 6
    FORWARD_SPAN = 10  # after one column for each of LANES


def block_kinds(model: Model) -> tuple[LayerParts, ...]:
    """Return the kinds of blocks of *model*, in the order in which they first appear."""
    return tuple(dict.fromkeys(model.blocks))


def count_parts(space: CandidateSpace, row: int) -> FloatArray:
    """Return an array pieces x parts: how many blocks of each kind, embeddings and heads each piece of *row* has."""
    model, kinds, counts = space.model, block_kinds(space.model), list[list[int]]()
    for piece in pieces(model, pipeline_strategy(space, row)):
        blocks = model.blocks[piece.layers.start : piece.layers.stop]
        counts.append([*map(blocks.count, kinds), piece.embedding, piece.head])
    return np.array(counts, dtype=np.float64)


def part_layers(model: Model, framework: Framework, strategy: Strategy) -> list[tuple[Layer, ...]]:
    """Return the layers of each kind of block, of the embedding and of the head."""
    view, full = layer_view(strategy), strategy.recompute.kind is RecomputeKind.FULL
    blocks = [block_layers(model, view, framework, kind, full) for kind in block_kinds(model)]
    return [*blocks, *(end_layers(model, view, framework, embeds) for embeds in (range(0), None))]


def part_loads(cluster: Cluster, parts: PartLayers) -> FloatArray:
    """Return parts x 3: the values of ``cool_seconds`` for each part."""
    loads = np.zeros((len(parts), 3))
    for part, layers in enumerate(parts):
        works = [op.work for layer in layers for op in layer.all_ops if type(op.work) in COMPUTING]
        loads[part] = cool_seconds(Counter(works), cluster.gpu, default_fit())  # type: ignore[arg-type]
    return loads


def least_load(cluster: Cluster, mixtures: FloatArray) -> Load:
    """Return a load no higher than that of any of *mixtures*, rows of ``part_loads``, or of any sum of them."""
    gpu, fit = cluster.gpu, default_fit()
    loads = [load_of(matrix_s, total_s, energy_s, gpu, fit) for matrix_s, total_s, energy_s in mixtures.tolist()]
    duty = max(0.0, min(load.duty for load in loads) - LOAD_STEP)
    wanted = [load.wanted for load in loads if load.wanted is not None]
    return replace(loads[0], duty=duty, wanted=max(0.0, min(wanted) - LOAD_STEP) if wanted else None)


def part_costs(
    model: Model, cluster: Cluster, framework: Framework, strategy: Strategy, parts: PartLayers, load: Load
) -> FloatArray:
    """Return parts x PartTime: the least that any strategy with such layers spends on them.

    Anything else a strategy adds comes on top. The GPU has at least this *load*, which heats it.
    """
    seconds = _LayerSeconds(cluster, strategy, framework, load, exchange_routing(model, strategy, framework))
    costs = np.zeros((len(parts), PartTime.FORWARD_SPAN + 1))
    for part, layers in enumerate(parts):
        forward = [op for layer in layers for op in layer.forward]
        inputs = [op for layer in reversed(layers) for op in layer.input_gradient]
        weights = [op for layer in reversed(layers) for op in layer.weight_gradient]
        backward = [op for layer in reversed(layers) for op in (*layer.input_gradient, *layer.weight_gradient)]
        walks = [seconds.walk(ops) for ops in (forward, backward, inputs, weights)]
        costs[part, :4] = [walk.end_s for walk in walks]
        costs[part, PartTime.KERNELS] = walks[0].kernels_s + walks[1].kernels_s
        costs[part, PartTime.FORWARD_SPAN] = walks[0].span_s
        costs[part, PartTime.BACKWARD_SPAN] = min(walks[1].span_s, walks[2].span_s + walks[3].span_s)
        for lane, group in enumerate(LANES):
            costs[part, PartTime.LANES + lane] = sum(walk.lanes_s.get(group, 0.0) for walk in walks[:2])
    return costs


class _LayerWalk(NamedTuple):
    end_s: float
    span_s: float  # from the begin of the first kernel to the end of the last
    kernels_s: float
    lanes_s: dict[Channel, float]


class _LayerSeconds:
    """Ops one after the other, as the simulation runs them on a rank that has nothing else to do.

    Kernels and blocking communication follow one another; other communication runs concurrently in a lane of its
    group and delays what waits for it. In a busier rank lanes are later, and nothing is sooner.
    """

    def __init__(
        self, cluster: Cluster, strategy: Strategy, framework: Framework, load: Load, once_per_node: Routing | None
    ) -> None:
        self.attention, self.architecture = framework.attention, cluster.gpu.architecture
        self.price = make_pricer(cluster.gpu, default_fit(), load)
        self.pace = least_pace(strategy.layout, strategy.micro_batches)
        self.pricer = Pricer(cluster, strategy.layout, once_per_node=once_per_node)
        self.lanes = {group for group in LANES if strategy.layout.size(group) > 1}
        # By object id: ops of a backward are walked twice, and the layers stay alive.
        self.known: dict[int, float] = {}

    def walk(self, ops: Iterable[Op]) -> _LayerWalk:
        done_s = kernels_s = last_s = 0.0
        first_s: float | None = None
        lanes_s: dict[Channel, float] = {}
        busy_s: dict[Channel, float] = {}
        ended_s: dict[str, float] = {}
        for op in ops:
            work = op.work
            start_s = max([done_s, *(ended_s.get(name, 0.0) for name in op.after)]) if op.after else done_s
            spent_s = self.known.get(id(work))
            if spent_s is None:
                spent_s = self.known[id(work)] = self._seconds(work)
            if type(work) not in COMMUNICATING:
                ended_s[op.name] = done_s = last_s = start_s + spent_s
                first_s = start_s if first_s is None else first_s
                kernels_s += spent_s
                continue
            if spent_s <= 0.0:
                continue
            group: Channel = work.group  # type: ignore[union-attr]
            end_s = max(start_s, lanes_s.get(group, 0.0)) + spent_s
            lanes_s[group] = ended_s[op.name] = end_s
            busy_s[group] = busy_s.get(group, 0.0) + spent_s
            if op.blocking:
                done_s = end_s
        return _LayerWalk(done_s, last_s - (first_s or 0.0), kernels_s, busy_s)

    def _seconds(self, work: Work) -> float:
        if type(work) in COMPUTING:
            as_it_runs = convert_for_kernel(work, self.attention)  # type: ignore[arg-type]
            price = slow_for_kernel(self.price(as_it_runs), as_it_runs, self.attention, self.architecture)
            return apply_pace_s(price.seconds, as_it_runs, self.pace)
        runs = isinstance(work, Collective | Transfer) and work.group in self.lanes and work.size_bytes > 0
        return self.pricer.seconds(work) if runs else 0.0


class ExchangeSeconds(NamedTuple):
    """Seconds of the busiest group for gradients and weights."""

    before_s: float  # gathered once
    per_batch_s: float  # gathered and reduced with each micro-batch
    per_batch_reduced_s: float  # reduced with each micro-batch
    once_s: float  # reduced once, after the last backward has begun


def price_exchanges(model: Model, cluster: Cluster, framework: Framework, strategy: Strategy) -> ExchangeSeconds:
    """Return the least that replicas spend on gradients and weights of the first stage, in one message each.

    Of several groups the slowest counts, since they may run concurrently.
    """
    every, plan = pieces(model, strategy), plan_of(strategy, framework)
    own = (trained_shard(model, strategy, every[index]) for index in pieces_of_stage(strategy, 0))
    shard, pricer = sum(own, start=NOTHING), Pricer(cluster, strategy.layout)
    # With a copy of the model in each direction, a micro-batch passes through one of them.
    copies = SCHEDULES[strategy.schedule].copies if strategy.layout.pp > 1 else 1
    longest = ExchangeSeconds(0.0, 0.0, 0.0, 0.0)
    for part, weights in plan.kinds(shard):
        if not weights.total:
            continue
        reduced_s, gathered_s = _reduced_s(pricer, framework, part, weights), 0.0
        if part.ways > 1:
            work = Collective(CollectiveKind.ALL_GATHER, gathered_bytes(strategy, weights), part.within)
            gathered_s = pricer.seconds(work)
        # A gather and a reduction of one group follow one another.
        always = plan.reduced is Reduced.EACH_MICRO_BATCH and part.ways > 1
        per_batch_reduced_s = reduced_s / copies if always else 0.0
        seconds = ExchangeSeconds(
            gathered_s if plan.gathered in GATHERED_ONCE else 0.0,
            GATHERS.get(plan.gathered, 0) * gathered_s / copies + per_batch_reduced_s,
            per_batch_reduced_s,
            reduced_s if plan.reduced is Reduced.ONCE else 0.0,
        )
        longest = ExchangeSeconds(*map(max, longest, seconds))
    return longest


def _reduced_s(pricer: Pricer, framework: Framework, part: Partition, shard: Shard) -> float:
    size = int(shard.total * framework.gradient_dtype.bytes)
    if part.ways > 1:
        return pricer.seconds(Collective(CollectiveKind.REDUCE_SCATTER, size, part.within))
    if part.copies > 1:
        return pricer.seconds(Collective(CollectiveKind.ALL_REDUCE, size, part.between))
    return 0.0
