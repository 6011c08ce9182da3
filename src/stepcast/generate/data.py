"""Data parallelism: reducing gradients, gathering parameters, and the optimizer.

Volumes per rank for P parameters (Rajbhandari et al., ZeRO, 2020, section 7): an all-reduce of the gradients;
or (ZeRO 1, 2) their reduce-scatter and an all-gather of the parameters, which is as much; or (ZeRO 3, FSDP)
two all-gathers and a reduce-scatter for every micro-batch, half as much again. ``ir.sharding`` says when.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from stepcast.generate.update import count_tensors, fetch_weights, own_parameters, update_ops
from stepcast.ir.architecture import NOTHING, Shard, WeightPart
from stepcast.ir.framework import Execution
from stepcast.ir.layers.ends import STEP_KERNELS, count_visits
from stepcast.ir.layers.kernels import C, K, Ops, collective, make_layer, stream_op
from stepcast.ir.layers.kinds import block_weights
from stepcast.ir.layers.operators import QUANTISED_WEIGHTS
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Group
from stepcast.ir.model import Model, StagePiece, has_copies, trained_matrices, trained_shard
from stepcast.ir.sharding import Reduced, gathered_bytes
from stepcast.ir.strategy import TrainingKind
from stepcast.ir.types import DType, replace
from stepcast.ir.work import CollectiveKind, Elementwise
from stepcast.ir.workload import Layer, Op, Role


class Buckets(NamedTuple):
    """*times* buckets of the same contents, one after another."""

    shard: Shard
    times: int = 1


def reduce_ops(sizes: Sizes, name: str, buckets: Buckets, blocking: bool) -> Ops:
    """Sum the gradients of each bucket over the ranks that hold the same weights."""
    ops: list[Op] = []
    shard, times = buckets
    once = sizes.plan.reduced is Reduced.ONCE
    for part, weights in sizes.plan.kinds(shard):
        size = weights.total * sizes.gradient
        if part.ways > 1:
            called = f"{part.within} reduce-scatter {name}"
            ops.append(collective(called, C.REDUCE_SCATTER, size, part.within, blocking, times))
        if part.copies > 1:
            called, size = f"{part.between} all-reduce {name}", size // part.ways
            ops.append(collective(called, C.ALL_REDUCE, size, part.between, blocking, times))
        if once and sizes.plan.mirrored:
            summed = mirror_ops(sizes, name, Buckets(weights, times), blocking)
            ops += [replace(op, after=tuple(other.name for other in ops[-1:])) for op in summed]
    return tuple(ops)


def mirror_ops(sizes: Sizes, name: str, buckets: Buckets, blocking: bool) -> Ops:
    """Add the gradients of the two copies of each layer that DualPipe has.

    Stages i and pp-1-i hold the same two pieces of the model, each for half of the micro-batches
    (github.com/deepseek-ai/DualPipe: parameters 2x). What a rank has after the sum over its own replicas,
    its shard or everything, it adds to that of its mirror; both are done at the same time.
    """
    shard, times = buckets
    return tuple(
        collective(
            f"mirror all-reduce {'experts ' if weights.experts else ''}{name}",
            C.ALL_REDUCE,
            weights.total * sizes.gradient // part.ways,
            Group.MIRROR,
            blocking,
            times,
        )
        for part, weights in sizes.plan.kinds(shard)
    )


def gather_ops(sizes: Sizes, name: str, buckets: Buckets, blocking: bool) -> Ops:
    """Collect the parameters of each bucket from the ranks that share them."""
    strategy, ops = sizes.strategy, list[Op]()
    tensors = tensors_of_layer(sizes) if sizes.framework.listed_gathers else 1
    shard, times = buckets
    for part, weights in sizes.plan.kinds(shard):
        fetched = fetch_weights(sizes, name, part, weights.total * times, blocking)
        ops += fetched
        if part.ways > 1:
            size = -(-gathered_bytes(strategy, weights) // tensors)
            gather = collective(
                f"{part.within} all-gather {name}", C.ALL_GATHER, size, part.within, blocking, times * tensors
            )
            if sizes.framework.listed_gathers:
                gather = replace(gather, kernels=times * tensors * part.ways, host_reads=True)
            ops.append(replace(gather, after=tuple(op.name for op in fetched)))
    return tuple(ops)


def tensors_of_layer(sizes: Sizes) -> int:
    """Count the tensors: queries, keys and values are one where a product makes them all; norms have one or two."""
    return _count_tensors(sizes.model, sizes.separate_projections)


@lru_cache(maxsize=256)
def _count_tensors(model: Model, is_separate: bool) -> int:
    first = model.blocks[0]
    names = [weight.name for weight in block_weights(model, first.mixer, first.feed_forward)]
    joined = 0 if is_separate else sum(".key." in name or ".value." in name for name in names)
    return len(names) - joined + (model.norm.vectors - 1) * sum("norm" in name for name in names)


def broadcast_ops(sizes: Sizes, shard: Shard) -> Ops:
    """Send the parameters of *shard* from the ranks that own them, one after the other."""
    return tuple(
        collective(
            f"{part.within} broadcast parameters {number}",
            CollectiveKind.BROADCAST,
            -(-gathered_bytes(sizes.strategy, weights) // part.ways),
            part.within,
            times=owners.times,
        )
        for part, weights in sizes.plan.kinds(shard)
        if part.ways > 1
        for number, owners in enumerate(issue_buckets(sizes, [Buckets(weights, part.ways)]))
    )


def issue_buckets(sizes: Sizes, filled: Iterable[Buckets]) -> Iterator[Buckets]:
    """Yield equal buckets as one message that is issued with all their kernels. An eager host issues the later
    ones while the first are under way: so one, two, four and so on at a time.
    """
    for shard, times in filled:
        run = times if sizes.framework.execution is Execution.GRAPHS else 1
        while times:
            run = min(run, times)
            yield Buckets(shard, run)
            times, run = times - run, 2 * run


@lru_cache(maxsize=4096)
def fill_buckets(limit: int | None, shards: tuple[Shard, ...], tensors: int = 0) -> list[tuple[int, Buckets]]:
    """Return (index of the last of its shards, contents) of each bucket of at most *limit* parameters or one
    shard's, filled in the given order.

    Experts' gradients have buckets of their own (Megatron-Core's expert_parallel_buffers). A shard larger than a
    bucket is cut into equal ones, but not into more than it has *tensors*, where that is given, or one in an embedding.
    """
    if not any(shard.experts for shard in shards):
        return _fill(limit, shards, tensors)
    dense = _fill(limit, [Shard(shard.dense, 0, shard.unquantised) for shard in shards], tensors)
    experts = _fill(limit, [Shard(0, shard.experts) for shard in shards], 0)
    return sorted([*dense, *experts], key=lambda bucket: bucket[0])


def _fill(limit: int | None, shards: Sequence[Shard], tensors: int) -> list[tuple[int, Buckets]]:
    if limit is None:
        total = sum(shards, start=NOTHING)
        return [(len(shards) - 1, Buckets(total))] if total.total else []
    full: list[tuple[int, Buckets]] = []
    filled, size = NOTHING, 0
    for index, shard in enumerate(shards):
        filled = filled + shard if size else shard
        size = filled.dense + filled.experts
        if size and (size >= limit or index == len(shards) - 1):
            most = min(size // limit, (tensors if filled.quantised else 1) if tensors else size)
            full += [(index, cut) for cut in _cut_shard(filled, max(1, most))]
            size = 0
    return full


@lru_cache(maxsize=4096)
def _cut_shard(shard: Shard, count: int) -> list[Buckets]:
    """Return *shard* as *count* buckets of complete parameters, the first larger by one than the last."""
    if count == 1:
        return [Buckets(shard)]
    borders = sorted({0, count, *[total % count for total in shard]})
    return [
        Buckets(Shard(*[total // count + (start < total % count) for total in shard]), stop - start)
        for start, stop in pairwise(borders)
    ]


@lru_cache(maxsize=1024)
def _norm_parameters(model: Model, start: int, stop: int) -> int:
    """Return the parameters of the norms of some layers."""
    return sum(
        count * weight.elements
        for block, count in Counter(model.blocks[start:stop]).items()
        for weight in model.block_weights(block)
        if weight.part is WeightPart.NORM
    )


def epilogue(sizes: Sizes, model: Model, piece: StagePiece, reduce: Ops, gather: Ops) -> tuple[Layer, ...]:
    """Return gradient sums that could not overlap, the gradient norm, the optimizer, and the parameters' gather."""
    plan, strategy, is_full = sizes.plan, sizes.strategy, sizes.strategy.training is TrainingKind.FULL
    layers, sums, trained = list[Layer](), list(reduce), trained_shard(model, strategy, piece)
    if plan.mirrored and plan.reduced is Reduced.EACH_MICRO_BATCH:
        sums += mirror_ops(sizes, "gradients", Buckets(trained), blocking=True)
    norms = _norm_parameters(model, piece.layers.start, piece.layers.stop)
    if strategy.sequence_parallel and is_full and norms:  # which are unsharded on every tensor rank
        sums.append(collective("norm gradients tp all-reduce", C.ALL_REDUCE, norms * sizes.gradient, Group.TP))
    if is_full and piece.embedding != piece.head and has_copies(model, strategy):
        # Of gradients that are split already a rank has its share (Megatron-LM, finalize_model_grads.py).
        ways, rows = plan.dense.ways if plan.splits_gradients else 1, sizes.vocab
        size = -(-rows * (model.embedding_width or model.hidden) // ways) * sizes.gradient
        sums.append(collective("embedding all-reduce", C.ALL_REDUCE, size, Group.EMBEDDING))
    if sums:
        layers.append(make_layer(Role.GRADIENTS, tuple(sums)))
    own, tensors = own_parameters(sizes, trained), count_tensors(sizes, model, piece.layers)
    matrices = trained_matrices(model, strategy, piece) if sizes.framework.optimizer.knows_matrices else ()
    update = (*update_ops(sizes, trained, own, matrices, tensors), *_prepare_ops(sizes, trained))
    layers.append(make_layer(Role.OPTIMIZER, (*_gradient_norm(sizes, max(1, own), piece.layers), *update)))
    if gather:
        layers.append(make_layer(Role.PARAMETERS, gather))
    return tuple(layers)


def _prepare_ops(sizes: Sizes, trained: Shard) -> Ops:
    """Clear the buffer to which weight gradients are added (Megatron-Core, zero_grad_buffer), and quantise weights once
    for all micro-batches of the next step (Transformer Engine, get_weight_workspace), unless fp8 ones are gathered.
    """
    strategy, ops = sizes.strategy, list[Op]()
    if trained.total and sizes.adds_in_place:
        written = float(trained.total * sizes.gradient)
        cleared = Elementwise(K.FILL, 1, trained.total, 0.0, written, dtype=sizes.framework.gradient_dtype)
        ops.append(Op("clear gradients", cleared))
    trains_all = strategy.training is not TrainingKind.LORA and not strategy.fp8_parameters
    if trains_all and trained.quantised and strategy.precision in QUANTISED_WEIGHTS:
        read, write = (size * trained.quantised for size in QUANTISED_WEIGHTS[strategy.precision])
        ops.append(Op("quantise weights", Elementwise(K.CAST, 1, trained.quantised, read, write, dtype=sizes.stored)))
    return tuple(ops)


def _gradient_norm(sizes: Sizes, own: int, layers: range) -> Ops:
    """Return the norm of *own* gradients on a rank that holds some *layers*, summed over all ranks."""
    if not sizes.framework.optimizer.clips:
        return ()
    read = float(own * sizes.gradient)
    loops = sizes.framework.loop_kernels > 0  # reads the loss after the backward, then visits all modules and clips
    norm = Op("gradient norm", Elementwise(K.OTHER, 1, own, read, 0.0, dtype=DType.FP32), host_reads=loops)
    ops = (norm, NORM_SUM) if sizes.strategy.layout.gpus > 1 else (norm,)
    kernels = STEP_KERNELS + round(count_visits(sizes, layers))
    return (*ops, stream_op("visits", K.OTHER, 1, 1, 1, 1, DType.FP32, kernels=kernels)) if loops else ops


NORM_SUM = collective("gradient norm all-reduce", C.ALL_REDUCE, 4, Group.WORLD)
