"""The ranks that split weights and their states, and the times of gathers and reductions.

The collectives of a workload and the count of memory both follow from here, so that they cannot disagree.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import lru_cache

from stepcast.ir.architecture import Shard
from stepcast.ir.framework import Framework, Offloaded
from stepcast.ir.layout import Group, Layout
from stepcast.ir.schedules import PiecePlacement, find_schedule
from stepcast.ir.strategy import NO_RECOMPUTE, ScheduleKind, Sharding, Strategy
from stepcast.ir.types import ByIdentity, DType, dataclass, replace


class Gathered(StrEnum):
    """The time at which split weights are gathered, and how long they stay so."""

    NEVER = "never"
    AFTER_UPDATE = "after-update"  # ZeRO 1 and 2: into weights that are whole all the time
    EACH_PASS = "each-pass"  # for every forward and every backward of a unit, and freed after either
    EACH_MICRO_BATCH = "each-micro-batch"  # for every forward, and freed after its backward
    ONCE = "once"  # for the first forward of a step, and freed after its last backward


class Reduced(StrEnum):
    """The time at which gradients are summed over the ranks that hold the same weights."""

    EACH_MICRO_BATCH = "each-micro-batch"
    ONCE = "once"  # after the last backward, summed over the micro-batches before


@dataclass(frozen=True, slots=True)
class Partition:
    """The split of dense weights or of experts: *ways* ranks of group *within* split one copy, and the holders of the
    same share, *copies* of them, form the group *between*.
    """

    ways: int
    copies: int
    within: Group
    between: Group
    # Weights are collected before use: gathered, or by one rank alone cast from fp32 or fetched from the host.
    collected: bool = False


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    dense: Partition
    experts: Partition
    gathered: Gathered
    reduced: Reduced
    splits_gradients: bool
    # Layers are gathered and reduced one by one (ZeRO 3, FSDP), or in buckets.
    by_unit: bool
    # The stage at the same distance from the other end holds the same layers (DualPipe).
    mirrored: bool = False

    def kinds(self, shard: Shard) -> Iterator[tuple[Partition, Shard]]:
        """Yield the dense weights and the experts of *shard*, as far as there are any, with how they are split."""
        if shard.dense:
            yield self.dense, Shard(shard.dense, 0, shard.unquantised) if shard.experts else shard
        if shard.experts:
            yield self.experts, Shard(0, shard.experts)

    def share(self, shard: Shard) -> float:
        """Parameters of *shard* whose optimizer states one rank keeps."""
        return sum([part_shard.total / part.ways for part, part_shard in self.kinds(shard)])

    def gathered_part(self, shard: Shard) -> Shard:
        """Return the part of *shard* that is gathered before it is used."""
        return self._select(shard, lambda part: part.collected)

    def unreduced(self, shard: Shard) -> Shard:
        """Return the part of *shard* whose gradients are complete before the reduction and split after it."""
        return self._select(shard, lambda part: self.splits_gradients and part.ways > 1)

    def _select(self, shard: Shard, is_chosen: Callable[[Partition], bool]) -> Shard:
        dense, experts = is_chosen(self.dense), is_chosen(self.experts)
        return Shard(shard.dense if dense else 0, shard.experts if experts else 0, shard.unquantised if dense else 0)


def plan_of(strategy: Strategy, framework: Framework) -> ShardingPlan:
    """Return how *strategy* splits, gathers and reduces."""
    return _PLANS.of(strategy, _find_plan, framework)


_PLANS: ByIdentity[ShardingPlan] = ByIdentity(256)


def states_view(strategy: Strategy, framework: Framework) -> Strategy:
    """Return *strategy* as far as weights, gradients and their collectives depend on it: context ranks hold copies of
    the weights like data-parallel ones, and of the pipeline it matters whether another stage holds a copy of a layer.
    """
    return _VIEWS.of(strategy, _make_view, framework.late_gathers)


_VIEWS: ByIdentity[Strategy] = ByIdentity(2048)


def _make_view(strategy: Strategy, late_gathers: bool) -> Strategy:
    layout = strategy.layout
    ranks, facts = layout.dp * layout.cp, find_schedule(strategy.schedule, layout.pp)
    return replace(
        strategy,
        layout=replace(layout, cp=1, dp=ranks, pp=min(2, layout.pp), vpp=1),
        micro_batch=1,
        global_batch=ranks,
        schedule=ScheduleKind.ONE_F_ONE_B if facts.placement is PiecePlacement.LOOP else strategy.schedule,
        stage_layers=(),
        recompute=strategy.recompute if late_gathers else NO_RECOMPUTE,
        overlap=replace(strategy.overlap, transfers=True, experts=False),
    )


def _find_plan(strategy: Strategy, framework: Framework) -> ShardingPlan:
    casts = framework.keeps_fp32_weights(strategy) and strategy.weights is not DType.FP32
    fetches = framework.offloaded is Offloaded.WEIGHTS and strategy.offload.optimizer > 0
    mirrored = find_schedule(strategy.schedule, strategy.layout.pp).copies > 1
    return _plan(strategy.layout, strategy.sharding, strategy.reshards, casts or fetches, mirrored)


def gathered_bytes(strategy: Strategy, shard: Shard) -> int:
    """Return the bytes of an all-gather of *shard*: the stored format, or 1 byte for each weight stored in fp8.

    MXFP8 has scales along rows and along columns: both are made of bf16 weights, once these are gathered
    (Megatron-Core's --reuse-grad-buf-for-mxfp8-param-ag).
    """
    stored = strategy.weights.bytes
    is_fp8 = strategy.fp8_parameters and strategy.precision is DType.FP8
    narrow = strategy.precision.bytes if is_fp8 else stored
    return int(narrow * shard.quantised + stored * shard.unquantised)


@lru_cache(maxsize=1024)
def _plan(layout: Layout, sharding: Sharding, reshards: bool, collects: bool, mirrored: bool) -> ShardingPlan:
    # As many copies of the experts are split as of the other weights: each within the ranks of a copy
    # (Megatron-Core's --num-distributed-optimizer-instances, torchtitan's mesh of dp_replicate and efsdp).
    none, partitions = sharding is Sharding.NONE, []
    for group, shard, replica, ways in (
        (Group.DP, Group.SHARD, Group.REPLICA, layout.shard_size),
        (Group.EXPERT_DP, Group.EXPERT_SHARD, Group.EXPERT_REPLICA, layout.size(Group.EXPERT_SHARD)),
    ):
        ranks, ways = layout.size(group), 1 if none else ways
        partitions.append(Partition(ways, ranks // ways, *((shard, replica) if 1 < ways < ranks else (group, group))))
    dense, experts = partitions
    split = dense.ways > 1 or experts.ways > 1
    splits_gradients = sharding.splits_gradients and split
    gathered, reduced = Gathered.NEVER, Reduced.EACH_MICRO_BATCH if splits_gradients else Reduced.ONCE
    by_unit = sharding.splits_parameters and (split or collects)
    if by_unit:
        dense, experts = (replace(part, collected=part.ways > 1 or collects) for part in partitions)
        if reshards:
            gathered = Gathered.EACH_PASS
        elif layout.pp == 1:
            gathered = Gathered.EACH_MICRO_BATCH
        else:
            # Each micro-batch would gather and reduce everything anew (torch.distributed.pipelining's stage
            # does neither before the last backward; so did Llama 3, 2024, section 3.3.2).
            gathered, reduced = Gathered.ONCE, Reduced.ONCE
    elif split:
        gathered = Gathered.AFTER_UPDATE
    return ShardingPlan(dense, experts, gathered, reduced, splits_gradients, by_unit, mirrored)
