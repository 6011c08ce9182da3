"""Data parallelism: reducing gradients, gathering parameters, and the optimizer.

Volumes per rank for P parameters (Rajbhandari et al., ZeRO, 2020, section 7): an all-reduce of the gradients;
or (ZeRO 1, 2) their reduce-scatter and an all-gather of the parameters, which is as much; or (ZeRO 3, FSDP)
two all-gathers and a reduce-scatter for every micro-batch, half as much again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepcast.generate.parts import K, Ops, collective
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import GATHER, REDUCE, SCATTER
from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.strategy import Sharding
from stepcast.ir.weights import Shard
from stepcast.ir.work import CollectiveKind, Elementwise
from stepcast.ir.workload import Layer, Op


def reduce_ops(sizes: Sizes, name: str, shard: Shard, blocking: bool) -> Ops:
    """The gradients of *shard* summed over the ranks that hold the same weights."""
    layout, sharding = sizes.strategy.layout, sizes.strategy.sharding
    ops: list[Op] = []
    size = shard.dense * sizes.gradient
    if size and layout.dp * layout.cp > 1:
        if sharding is Sharding.NONE:
            ops.append(collective(f"dp all-reduce {name}", REDUCE, size, Group.DP, blocking))
        elif layout.shard_size == layout.dp * layout.cp:
            ops.append(collective(f"dp reduce-scatter {name}", SCATTER, size, Group.DP, blocking))
        else:
            part = size // layout.shard_size
            if layout.shard_size > 1:
                ops.append(collective(f"shard reduce-scatter {name}", SCATTER, size, Group.SHARD, blocking))
            ops.append(collective(f"replica all-reduce {name}", REDUCE, part, Group.REPLICA, blocking))
    size = shard.experts * sizes.gradient
    if size and layout.expert_dp > 1:
        kind, word = (REDUCE, "all-reduce") if sharding is Sharding.NONE else (SCATTER, "reduce-scatter")
        ops.append(collective(f"expert-dp {word} {name}", kind, size, Group.EXPERT_DP, blocking))
    return tuple(ops)


def gather_ops(sizes: Sizes, name: str, shard: Shard, blocking: bool) -> Ops:
    """The parameters of *shard* collected from the ranks that share them, in the training precision."""
    layout = sizes.strategy.layout
    ops: list[Op] = []
    if shard.dense and layout.shard_size > 1:
        whole = layout.shard_size == layout.dp * layout.cp
        group = Group.DP if whole else Group.SHARD
        size = shard.dense * sizes.element
        ops.append(collective(f"{group} all-gather {name}", GATHER, size, group, blocking))
    if shard.experts and layout.expert_dp > 1:
        size = shard.experts * sizes.element
        ops.append(collective(f"expert-dp all-gather {name}", GATHER, size, Group.EXPERT_DP, blocking))
    return tuple(ops)


def broadcast_ops(sizes: Sizes, shard: Shard) -> Ops:
    """The parameters of *shard* from the ranks that own them, one after the other."""
    layout = sizes.strategy.layout
    ops: list[Op] = []
    groups = (
        (
            shard.dense,
            layout.shard_size,
            Group.DP if layout.shard_size == layout.dp * layout.cp else Group.SHARD,
        ),
        (shard.experts, layout.expert_dp, Group.EXPERT_DP),
    )
    for parameters, ranks, group in groups:
        if parameters and ranks > 1:
            size = -(-parameters * sizes.element // ranks)
            ops += [
                collective(f"{group} broadcast parameters {owner}", CollectiveKind.BROADCAST, size, group)
                for owner in range(ranks)
            ]
    return tuple(ops)


def buckets(limit: int | None, shards: Sequence[Shard]) -> list[tuple[int, int, Shard]]:
    """(index of the last of its shards, number, contents) of each bucket of at most *limit* parameters or one
    shard's, filled in the given order.

    Experts' gradients have buckets of their own (Megatron-Core's expert_parallel_buffers). A shard larger
    than a bucket is cut into equal ones.
    """
    found = [(index, Shard(size, 0)) for index, size in _filled(limit, [shard.dense for shard in shards])]
    found += [(index, Shard(0, size)) for index, size in _filled(limit, [shard.experts for shard in shards])]
    ordered = sorted(found, key=lambda bucket: bucket[0])
    return [(index, number, shard) for number, (index, shard) in enumerate(ordered)]


def _filled(limit: int | None, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(index of the last one in it, size) of each bucket."""
    size = 0
    for index, added in enumerate(sizes):
        size += added
        last = index == len(sizes) - 1
        if not size or not (last or (limit is not None and size >= limit)):
            continue
        count = 1 if limit is None else max(1, size // limit)
        yield from ((index, _part(size, count, part)) for part in range(count))
        size = 0


def _part(total: int, count: int, part: int) -> int:
    """Whole shares that add up to *total*."""
    return total * (part + 1) // count - total * part // count


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a stage holds when its micro-batches are done, for the once-per-step layers."""

    held: Shard
    trained: Shard
    norms: int  # parameters of the norms, which sequence parallelism leaves whole on every tensor rank
    tied_embedding: int  # rows x width of a word embedding of which another stage has a copy


def epilogue(sizes: Sizes, end: StepEnd, reduce: Ops, gather: Ops) -> tuple[Layer, ...]:
    """Gradient sums that could not overlap, the gradient norm, the optimizer, and the parameters' gather."""
    layers = []
    sums = list(reduce)
    if sizes.strategy.sequence_parallel and end.norms:
        size = end.norms * sizes.gradient
        sums.append(collective("norm gradients tp all-reduce", REDUCE, size, Group.TP))
    if end.tied_embedding:
        size = end.tied_embedding * sizes.gradient
        sums.append(collective("embedding all-reduce", REDUCE, size, Group.EMBEDDING))
    if sums:
        layers.append(Layer("gradients", tuple(sums)))
    layers.append(Layer("optimizer", (*_gradient_norm(sizes, end), _update(sizes, end))))
    if gather:
        layers.append(Layer("parameters", gather))
    return tuple(layers)


def own_parameters(sizes: Sizes, shard: Shard) -> int:
    """Parameters whose optimizer states this rank keeps."""
    if sizes.strategy.sharding is Sharding.NONE:
        return shard.total
    layout = sizes.strategy.layout
    return -(-shard.dense // layout.shard_size) + -(-shard.experts // layout.expert_dp)


def _gradient_norm(sizes: Sizes, end: StepEnd) -> Ops:
    own = max(1, own_parameters(sizes, end.trained))
    read = float(own * sizes.gradient)
    ops: Ops = (Op("gradient norm", Elementwise(K.OTHER, 1, own, read, 0.0, dtype=DType.FP32)),)
    if sizes.strategy.layout.gpus > 1:
        ops += (collective("gradient norm all-reduce", REDUCE, 4, Group.WORLD),)
    return ops


def _update(sizes: Sizes, end: StepEnd) -> Op:
    """Adam reads gradient, weight and moments and writes all but the gradient, and the training copy."""
    strategy, own = sizes.strategy, max(1, own_parameters(sizes, end.trained))
    optimizer = strategy.optimizer
    master = optimizer.master_weights and strategy.stored is not DType.FP32
    weight = 4.0 if master else strategy.stored.bytes
    moments = optimizer.moments * optimizer.moment_dtype.bytes
    read = weight + moments + strategy.gradient_dtype.bytes
    write = weight + moments + (strategy.stored.bytes if master else 0.0)
    return Op("update", Elementwise(K.OPTIMIZER, 1, own, read * own, write * own, dtype=DType.FP32))
