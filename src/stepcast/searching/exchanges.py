"""The least that replicas spend on gradients and weights: whole stages in one message each."""

from dataclasses import dataclass

from stepcast.cost.pricing import Pricer
from stepcast.hardware import Cluster
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.schedules import SCHEDULES
from stepcast.ir.sharding import Gathered, Partition, Reduced, gathered_bytes, plan_of
from stepcast.ir.stages import pieces, pieces_of_stage
from stepcast.ir.strategy import Strategy
from stepcast.ir.trainable import trained_shard
from stepcast.ir.weights import NOTHING, Shard
from stepcast.ir.work import Collective, CollectiveKind

# How often weights are collected in a micro-batch.
GATHERS = {Gathered.EACH_PASS: 2, Gathered.EACH_MICRO_BATCH: 1}
BEFORE = (Gathered.AFTER_UPDATE, Gathered.ONCE)


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Seconds of the busiest group: gathered once, of each micro-batch both ways and reduced, and reduced
    once, after the last backward has begun.
    """

    before_s: float
    each_s: float
    each_reduced_s: float
    once_s: float

    def values(self) -> tuple[float, float, float, float]:
        return self.before_s, self.each_s, self.each_reduced_s, self.once_s


def exchanges(model: Model, cluster: Cluster, framework: Framework, strategy: Strategy) -> Exchanges:
    """Of the first stage; of several groups the one that takes longest, since they may run side by side."""
    every, plan = pieces(model, strategy), plan_of(strategy, framework)
    own = (trained_shard(model, strategy, every[at]) for at in pieces_of_stage(strategy, 0))
    shard, pricer = sum(own, start=NOTHING), Pricer(cluster, strategy.layout)
    # With a copy of the model in each direction, a micro-batch passes through one of them.
    copies = SCHEDULES[strategy.schedule].copies if strategy.layout.pp > 1 else 1
    found = Exchanges(0.0, 0.0, 0.0, 0.0)
    for part, each in plan.kinds(shard):
        if not each.total:
            continue
        reduced_s, gathered_s = _reduced_s(pricer, framework, part, each), 0.0
        if part.ways > 1:
            work = Collective(CollectiveKind.ALL_GATHER, gathered_bytes(strategy, each), part.within)
            gathered_s = pricer.seconds(work)
        # A gather and a reduction of one group follow one another.
        always = plan.reduced is Reduced.EACH_MICRO_BATCH and part.ways > 1
        each_reduced_s = reduced_s / copies if always else 0.0
        here = Exchanges(
            gathered_s if plan.gathered in BEFORE else 0.0,
            GATHERS.get(plan.gathered, 0) * gathered_s / copies + each_reduced_s,
            each_reduced_s,
            reduced_s if plan.reduced is Reduced.ONCE else 0.0,
        )
        found = Exchanges(*map(max, found.values(), here.values()))
    return found


def _reduced_s(pricer: Pricer, framework: Framework, part: Partition, shard: Shard) -> float:
    size = int(shard.total * framework.gradient_dtype.bytes)
    if part.ways > 1:
        return pricer.seconds(Collective(CollectiveKind.REDUCE_SCATTER, size, part.within))
    if part.copies > 1:
        return pricer.seconds(Collective(CollectiveKind.ALL_REDUCE, size, part.between))
    return 0.0
