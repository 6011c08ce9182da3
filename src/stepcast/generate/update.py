"""The optimizer's update of a rank's weights: what it reads and writes, and Muon's products.

With data-parallel ranks that split states, Muon gives each whole matrices, in turn from the largest on
(Megatron-Core's LayerWiseDistributedOptimizer). Where weights are split as well, matrices are exchanged for
that and back (microsoft/dion, ``dion/muon.py``). Tensor ranks make their own parts orthogonal (Megatron-LM's
default --muon-tp-mode blockwise).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from stepcast.ir.architecture import Shard, WeightPart
from stepcast.ir.framework import ADAM, ITERATIONS, Modules, Offloaded, Optimizer, OptimizerKind
from stepcast.ir.layers.kernels import K, Ops, collective
from stepcast.ir.layers.kinds import block_weights, count_adapted
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import HostWay
from stepcast.ir.model import Matrices, Model, count_frozen
from stepcast.ir.sharding import Partition, gathered_bytes
from stepcast.ir.types import FP32_BYTES, DType, replace
from stepcast.ir.work import CollectiveKind, Elementwise, ElementwiseKind, HostCopy, HostUpdate, Matmul
from stepcast.ir.workload import Op

# Copies and updates are seen in so many parts; Megatron-Core has one for each tensor, DeepSpeed one for each
# tile. More of them would change the step by less than the last part takes.
HOST_PARTS = 16


def own_parameters(sizes: Sizes, shard: Shard) -> int:
    """Return the parameters whose optimizer states this rank keeps."""
    plan = sizes.plan
    return -(-shard.dense // plan.dense.ways) - (-shard.experts // plan.experts.ways)


def update_ops(sizes: Sizes, trained: Shard, own: int, matrices: Sequence[Matrices], tensors: int) -> Ops:
    """Update the *own* parameters of a rank among those *trained*. They are in so many *tensors*; *matrices* are those
    that the optimizer treats apart.
    """
    optimizer = sizes.framework.optimizer
    copied = gathered_bytes(sizes.strategy, trained) / max(1, trained.total)
    make_update = partial(_update_op, sizes, copied, tensors)
    if sizes.strategy.offload.optimizer:
        on_host = round(own * sizes.strategy.offload.optimizer)
        on_gpu = (make_update("update", optimizer, own - on_host),) if own > on_host else ()
        return update_on_host(sizes, on_host, _moved_bytes(sizes, optimizer, copied), on_gpu)
    if optimizer.kind is not OptimizerKind.MUON:  # weights with gradients, and those without any
        own = max(1, own)
        divides = optimizer.kind is OptimizerKind.ADAMW and optimizer.fused
        idle = round(own * sizes.strategy.zero_gradients) if divides else 0
        ops: Ops = (make_update("update", optimizer, own - idle),) if own > idle else ()
        if idle:
            op = make_update("idle update", optimizer, idle, kind=K.IDLE_OPTIMIZER)
            ops += (replace(op, kernels=1) if ops else op,)
        return ops
    inside = [matrix for matrix in matrices if matrix.inside]
    orthogonal = sum(-(-matrix.elements // _partition(sizes, matrix).ways) for matrix in inside)
    ops = tuple(_orthogonalise(sizes, inside))
    if orthogonal:
        ops += (make_update("matrices update", optimizer, orthogonal),)
    if own > orthogonal:
        # What is no matrix is AdamW's.
        ops += (make_update("update", optimizer, own - orthogonal, passes_of=ADAM),)
    return ops


def _update_op(
    sizes: Sizes,
    copied: float,
    tensors: int,
    name: str,
    optimizer: Optimizer,
    elements: int,
    passes_of: Optimizer | None = None,
    kind: ElementwiseKind = K.OPTIMIZER,
) -> Op:
    """Read and write *elements* weights of *tensors*; a host that issues this goes through all tensors first."""
    read, write = _moved_bytes(sizes, optimizer, copied, passes_of)
    listed = optimizer.kind is OptimizerKind.ADAMW and not optimizer.fused
    kind = K.LISTED_OPTIMIZER if listed else kind
    if optimizer.moment_dtype is DType.INT8:
        kind = K.QUANTISED_OPTIMIZER
    work = Elementwise(kind, 1, elements, read * elements, write * elements, dtype=DType.FP32)
    # Clipping goes through all tensors as well, in a training loop that waits for the loss before it.
    clips = sizes.framework.loop_kernels > 0 and kind is not K.QUANTISED_OPTIMIZER
    return Op(name, work, kernels=tensors * (1 + clips))


def count_tensors(sizes: Sizes, model: Model, layers: range) -> int:
    """Count the trained tensors of some *layers*, as far as transformers' modules go, whose lists were measured."""
    if sizes.framework.modules is not Modules.TRANSFORMERS:
        return 1
    strategy = sizes.strategy
    if strategy.lora_rank:
        return max(1, (3 if strategy.dora else 2) * count_adapted(model, strategy.lora_targets, layers))
    first = layers.start + count_frozen(model, strategy.trained_layers, layers)
    trained = Counter(model.blocks[first : layers.stop]).items()
    return max(1, sum(count * len(block_weights(model, block.mixer, block.feed_forward)) for block, count in trained))


def _moved_bytes(
    sizes: Sizes, optimizer: Optimizer, copied: float, passes_of: Optimizer | None = None
) -> tuple[float, float]:
    """Return the bytes read and written for a weight; of a master copy also the training copy's, *copied*
    bytes, if that is kept.
    """
    strategy, passes = sizes.strategy, (passes_of or optimizer).passes
    master = optimizer.master_weights and strategy.weights is not DType.FP32
    weight = DType.FP32.bytes if master else strategy.weights.bytes
    gradient, moment, narrow = sizes.framework.gradient_dtype.bytes, optimizer.moment_bytes, DType.BF16.bytes
    read, write = (
        passes.weight[way] * weight
        + passes.moments[way] * moment
        + passes.temporary[way] * gradient
        + passes.narrow[way] * narrow
        for way in (0, 1)
    )
    read += passes.gradient * gradient
    if master and not sizes.framework.keeps_fp32_weights(strategy):
        write += copied
    return read, write


def _orthogonalise(sizes: Sizes, matrices: Sequence[Matrices]) -> Iterator[Op]:
    """Yield (a I + b A + c A A) X with A = X X^T along the shorter side, again and again in bf16."""
    strategy, before = sizes.strategy, {True: 0, False: 0}
    for matrix in sorted(matrices, key=lambda group: -group.rows * group.columns):
        part, experts = _partition(sizes, matrix), matrix.part is WeightPart.EXPERTS
        # Each rank's turn comes once in *ways* matrices; the first rank has the most.
        first = before[experts]
        before[experts] = last = first + matrix.count
        count = -(-last // part.ways) - -(-first // part.ways)
        name = f"{matrix.part} {matrix.rows}x{matrix.columns}"
        short, long = sorted((matrix.rows, matrix.columns))
        if part.ways > 1 and strategy.sharding.splits_parameters:
            size = -(-matrix.elements // part.ways) * int(DType.BF16.bytes)
            yield collective(f"{name} exchange", CollectiveKind.ALL_TO_ALL, size, part.within)
        for step in range(ITERATIONS if count else 0):
            yield Op(f"{name} gram {step}", Matmul(short, short, long, count, DType.BF16))
            yield Op(f"{name} square {step}", Matmul(short, short, short, count, DType.BF16))
            yield Op(f"{name} product {step}", Matmul(short, long, short, count, DType.BF16))
        if part.ways > 1 and strategy.sharding.splits_parameters:
            yield collective(f"{name} exchange back", CollectiveKind.ALL_TO_ALL, size, part.within)


def _partition(sizes: Sizes, matrices: Matrices) -> Partition:
    return sizes.plan.experts if matrices.part is WeightPart.EXPERTS else sizes.plan.dense


def copy_op(name: str, way: HostWay, size_bytes: int, blocking: bool = False) -> Op:
    return Op(name, HostCopy(way, size_bytes), blocking)


def send_gradients(sizes: Sizes, number: int, own: int, reduced: Ops, blocking: bool) -> Ops:
    """Send the gradients of *own* parameters to the host once they are *reduced*, where the software does so."""
    share = sizes.strategy.offload.optimizer
    if not share or sizes.framework.offloaded is Offloaded.STATES:
        return ()
    copy = copy_op(f"gradients out {number}", HostWay.OUT, round(own * share) * sizes.gradient, blocking)
    return (replace(copy, after=tuple(op.name for op in reduced)),)


def fetch_weights(sizes: Sizes, name: str, part: Partition, parameters: int, blocking: bool) -> Ops:
    """Fetch a rank's share of *parameters* from the host, where weights are kept there."""
    strategy, framework = sizes.strategy, sizes.framework
    if not strategy.offload.optimizer or framework.offloaded is not Offloaded.WEIGHTS:
        return ()
    wide = framework.keeps_fp32_weights(strategy)
    size = -(-parameters // part.ways) * (FP32_BYTES if wide else strategy.weights.bytes)
    return (copy_op(f"{part.within} weights in {name}", HostWay.IN, int(size), blocking),)


def update_on_host(sizes: Sizes, elements: int, moved: tuple[float, float], on_gpu: Ops) -> Ops:
    """Update *elements* on the host, which reads and writes *moved* bytes of each; *on_gpu* is what the GPU
    updates at the same time. Gradients that are still there go first, updated weights come back last. They
    follow one another in parts, so that copies overlap the update (Megatron-Core's
    --overlap-cpu-optimizer-d2h-h2d; Ren et al., ZeRO-Offload, 2021, section 4.1).
    """
    if not elements:
        return on_gpu
    framework, count = sizes.framework, min(HOST_PARTS, elements)
    parts = [elements * (part + 1) // count - elements * part // count for part in range(count)]
    read, write = moved
    updates = [
        Op(f"host update {number}", HostUpdate(read * count, write * count, framework.optimizer.fused))
        for number, count in enumerate(parts)
    ]
    sent: Ops = ()
    if framework.offloaded is Offloaded.STATES:
        wide = int(FP32_BYTES) if framework.optimizer.master_weights else sizes.gradient
        sent = tuple(
            copy_op(f"gradients out {number}", HostWay.OUT, count * wide) for number, count in enumerate(parts)
        )
        updates = [replace(op, after=(copy.name,)) for op, copy in zip(updates, sent, strict=True)]
    if framework.offloaded is Offloaded.WEIGHTS:
        return (*on_gpu, *updates)
    back = [
        # What gathers the weights waits for the last of them.
        copy_op(
            f"weights in {number}", HostWay.IN, round(count * sizes.strategy.weights.bytes), number == len(updates) - 1
        )
        for number, count in enumerate(parts)
    ]
    pairs = (op for pair in zip(updates, back, strict=True) for op in pair)
    return (*sent, *on_gpu, *pairs)
