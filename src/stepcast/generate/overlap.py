"""Data-parallel communication and activation offload: the layers and micro-batches that they overlap with."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate

from stepcast.generate.data import (
    Buckets,
    broadcast_ops,
    fill_buckets,
    gather_ops,
    issue_buckets,
    reduce_ops,
    tensors_of_layer,
)
from stepcast.generate.update import copy_op, own_parameters, send_gradients
from stepcast.ir.architecture import NOTHING, Shard
from stepcast.ir.dataclass import ByIdentity, dataclass, replace
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Execution, Kernels
from stepcast.ir.layers.kernels import K, Ops
from stepcast.ir.layers.operators import wait_for
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import HostWay
from stepcast.ir.sharding import Gathered, Reduced, gathered_bytes
from stepcast.ir.strategy import RecomputeKind
from stepcast.ir.work import Elementwise
from stepcast.ir.workload import FIRST, LAST, Block, Layer, Op, Phase, VariedBodies, vary_blocks


@dataclass(frozen=True, slots=True)
class Unit:
    """A transformer layer, or an end of the model: gathered, reduced, recomputed and offloaded together."""

    layers: tuple[Layer, ...]
    held: Shard
    trained: Shard
    # Bytes of activations that the host keeps from the forward until the backward.
    leaving: int = 0

    @property
    def has_backward(self) -> bool:
        """Return False for layers of a frozen reference, which run forward only."""
        return any(layer.input_gradient or layer.weight_gradient for layer in self.layers)


def _prefetch(ops: Ops, own: Ops, following: Ops, begins: bool) -> Ops:
    """Return *ops* that wait for their *own* gathers, requested here if a unit *begins* with them, and then
    request those of what runs next.
    """
    names = tuple(op.name for op in own)
    return (*(own if begins else ()), *wait_for(ops[:1], names), *following, *ops[1:])


def offload_activations(units: Sequence[Unit]) -> list[Unit]:
    """Return units that send their activations after the forward and have them back for the backward.

    Activations of a layer are sent while the next one runs; that ends once they have gone, so that no more
    than two layers' are on the GPU. They are fetched while the layer after theirs runs backward (Transformer
    Engine, ``pytorch/cpu_offload.py``; Megatron-Core's fine-grained activation offloading).
    """
    known: dict[tuple[object, ...], Unit] = {}
    offloaded = []
    for index, unit in enumerate(units):
        own, before = unit.leaving, units[index - 1].leaving if index else 0
        begins = index == len(units) - 1
        key = (id(unit.layers), own, before, begins)
        if key not in known:
            last = _move_activations(unit.layers[-1], own, before, begins)
            known[key] = replace(unit, layers=(*unit.layers[:-1], last))
        offloaded.append(known[key])
    return offloaded


@lru_cache(maxsize=1024)
def _move_activations(layer: Layer, own: int, before: int, begins: bool) -> Layer:
    """Return the last layer of a unit that keeps *own* bytes on the host, the unit before it *before*."""
    if own:
        ready = wait_for(layer.forward[-1:], ("activations out",))
        sent = copy_op("activations out", HostWay.OUT, own)
        layer = replace(layer, forward=(*layer.forward[:-1], *ready, sent))
    fetched = (copy_op("activations in", HostWay.IN, own),) if own else ()
    following = (copy_op("activations in", HostWay.IN, before),) if before else ()
    return replace(layer, input_gradient=_prefetch(layer.input_gradient, fetched, following, begins))


def gather_units(sizes: Sizes, units: Sequence[Unit]) -> list[Unit]:
    """ZeRO-3 and FSDP: gather parameters for the forward of each unit, and again for its backward where they
    are freed in between. Overlapped, they are gathered while the unit before runs, so that only the first
    wait is exposed.
    """
    # DeepSpeed of 2021 fetches a module's tensors when it begins, and then waits for the GPU (stage3.py,
    # fetch_sub_module, _synchronize_communication); what it prefetches, 5e7 elements, holds no large weight.
    ahead, end = sizes.strategy.overlap.parameters and not sizes.framework.listed_gathers, len(units) - 1
    again = sizes.plan.gathered is Gathered.EACH_PASS
    # A recomputed layer is gathered for its second forward, as the first is.
    late = sizes.framework.late_gathers and sizes.strategy.recompute.kind is not RecomputeKind.FULL
    aheads = {"forward": ahead, "backward": ahead and not late}
    requests: dict[tuple[str, Shard], Ops] = {}

    def request(phase: str, index: int, first: int) -> Ops:
        """Return a unit's gathers; the one that runs first asks for its own and for the next one's."""
        if not 0 <= index <= end or (phase == "backward" and not units[index].has_backward):
            return ()
        key = (f"{phase} first" if aheads[phase] and index == first else phase, units[index].held)
        if key not in requests:
            requests[key] = gather_ops(sizes, key[0], Buckets(key[1]), not aheads[phase])
        return requests[key]

    def gather(index: int) -> Unit:
        layers, copies = list(units[index].layers), _unpack_ops(sizes, units[index].held)
        following = request("forward", index + 1, 0) if ahead else ()
        own = request("forward", index, 0)
        layers[0] = _begin(layers[0], Phase.FORWARD, copies, own, following, not ahead or index == 0)
        if again and units[index].has_backward:
            following = request("backward", index - 1, end) if aheads["backward"] else ()
            own, begins = request("backward", index, end), not aheads["backward"] or index == end
            layers[-1] = _begin(layers[-1], Phase.INPUT_GRADIENT, copies, own, following, begins)
        return replace(units[index], layers=tuple(layers))

    # Units between others of their kind are equal.
    known: dict[tuple[int, ...], Unit] = {}
    gathered = []
    numbers = [-1, *map(id, units), -1]
    for index in range(len(units)):
        near = tuple(numbers[index : index + 3])
        if near not in known:
            known[near] = gather(index)
        gathered.append(known[near])
    return gathered


def reduce_units(sizes: Sizes, units: Sequence[Unit]) -> list[Unit]:
    """ZeRO 2 and 3, FSDP: reduce gradients with every micro-batch, when a unit's backward is done."""
    known: dict[int, Unit] = {}
    for unit in units:
        if id(unit) not in known:
            _, ending = _reduce_layer(sizes, unit.layers[0], _unit_buckets(sizes, unit))
            known[id(unit)] = replace(unit, layers=(ending, *unit.layers[1:]))
    return [known[id(unit)] for unit in units]


def _unit_buckets(sizes: Sizes, unit: Unit) -> tuple[Buckets, ...]:
    """Return the gradients of one unit, in buckets of its own."""
    limit = sizes.framework.bucket_parameters(sizes.strategy, first_piece=False)
    return tuple([buckets for _, buckets in fill_buckets(limit, (unit.trained,), tensors_of_layer(sizes))])


# Kernels that an eager host issues to check a bucket of gradients: its norm, whether that is NaN or infinite, and two
# copies of the answers.
CHECK_KERNELS = 6
# Layers of one strategy, whose stages have most of their units in common.
_REDUCED: ByIdentity[tuple[Ops, Layer]] = ByIdentity(512)
_GATHERED: ByIdentity[tuple[Ops, Layer]] = ByIdentity(512)


def _reduce_layer(sizes: Sizes, layer: Layer, buckets: tuple[Buckets, ...]) -> tuple[Ops, Layer]:
    """Return the ops that reduce the gradients in *buckets*, and *layer* that ends with them."""

    def make() -> tuple[Ops, Layer]:
        blocking, ops = not sizes.strategy.overlap.gradients, list[Op]()
        for number, issued in enumerate(issue_buckets(sizes, buckets)):
            reduced = reduce_ops(sizes, f"gradients {number}", issued, blocking)
            own = own_parameters(sizes, issued.shard) * issued.times
            packed = (*_pack_ops(sizes, issued), *_check_ops(sizes, number, issued))
            ops += [*packed, *reduced, *send_gradients(sizes, number, own, reduced, blocking)]
        return tuple(ops), _end_backward(layer, tuple(ops))

    return _REDUCED.get((sizes, layer), make, buckets)


def _unpack_ops(sizes: Sizes, shard: Shard) -> Ops:
    """Return what a rank does with gathered weights. FSDP2 splits each parameter by itself and copies it to
    where the layers expect it (PyTorch, torch/distributed/fsdp/_fully_shard: split_with_sizes_copy); a rank
    that shares with nobody casts its fp32 weights.
    """
    ops = []
    casts = sizes.framework.keeps_fp32_weights(sizes.strategy) and sizes.strategy.weights is not DType.FP32
    for part, weights in sizes.plan.kinds(shard):
        size, total = float(gathered_bytes(sizes.strategy, weights)), weights.total
        name = "expert parameters" if weights.experts else "parameters"
        if part.ways > 1 and sizes.framework.kernels is Kernels.COMPILED:
            ops.append(Op(f"{name} copy out", Elementwise(K.COPY, 1, total, size, size, dtype=sizes.stored)))
        elif part.ways == 1 and part.collected and casts:
            read = DType.FP32.bytes * total
            ops.append(Op(f"{name} cast", Elementwise(K.CAST, 1, total, read, size, dtype=DType.FP32)))
    return tuple(ops)


def _pack_ops(sizes: Sizes, buckets: Buckets) -> Ops:
    """FSDP2: copy gradients into one buffer in the format of their sum, part by part for each rank (chunk_cat)."""
    if sizes.framework.kernels is not Kernels.COMPILED:
        return ()
    split = sizes.plan.unreduced(buckets.shard).total * buckets.times
    read, write = float(split * sizes.element), float(split * sizes.gradient)
    return (Op("gradients copy in", Elementwise(K.COPY, 1, split, read, write, dtype=sizes.stored)),) if split else ()


def _check_ops(sizes: Sizes, number: int, buckets: Buckets) -> Ops:
    """Return the norms of buckets, which an eager host reads (Megatron-Core's check_grads)."""
    if not sizes.framework.checks_gradients or sizes.framework.execution is Execution.GRAPHS:
        return ()
    total = buckets.shard.total * buckets.times
    norm = Elementwise(K.OTHER, 1, total, float(total * sizes.gradient), 0.0, dtype=sizes.stored)
    return (Op(f"gradients {number} check", norm, kernels=CHECK_KERNELS * buckets.times, host_reads=True),)


@dataclass(frozen=True, slots=True)
class OncePerStep:
    """The layers of the first forward and of the last backward that differ from the usual by what overlaps with them,
    by their place, and the collectives that overlap with nothing.
    """

    first: Mapping[int, Layer]
    last: Mapping[int, Layer]
    reduce: Ops
    gather: Ops

    def vary(self, body: tuple[Block, ...]) -> VariedBodies:
        """Return the bodies of the micro-batches that differ from *body*."""
        changes = ((FIRST, self.first), (LAST, self.last))
        return tuple((which, vary_blocks(body, changed)) for which, changed in changes if changed)


def once_per_step(sizes: Sizes, units: Sequence[Unit], first_piece: bool) -> OncePerStep:
    """Overlap gradients that are reduced once with the last backward, and parameters that are gathered once
    with the first forward, bucket by bucket or unit by unit; or either with nothing.
    """
    plan, buckets = sizes.plan, _buckets_by_unit(sizes, units, first_piece)
    first: dict[int, Layer] = {}
    last: dict[int, Layer] = {}
    reduce: Ops = ()
    gather: Ops = ()
    if plan.reduced is Reduced.ONCE:
        last, reduce = _reduce_once(sizes, units, buckets)
    if plan.gathered is Gathered.AFTER_UPDATE:
        first, gather = _gather_once(sizes, units, buckets)
    elif plan.gathered is Gathered.ONCE:
        first = {
            place: gathered.layers[0]
            for place, unit, gathered in zip(_places(units), units, gather_units(sizes, units), strict=True)
            if gathered.layers[0] != unit.layers[0]
        }
    return OncePerStep(first, last, reduce, gather)


UnitBuckets = Mapping[int, tuple[Buckets, ...]]
"""The buckets that a unit's backward completes, and with which its forward begins."""


def _buckets_by_unit(sizes: Sizes, units: Sequence[Unit], first_piece: bool) -> UnitBuckets:
    """Return each unit's own buckets, or those that gradients fill from the last unit to the first."""
    if sizes.plan.by_unit:
        distinct = {id(unit): unit for unit in units}
        own = {key: _unit_buckets(sizes, unit) for key, unit in distinct.items()}
        return {index: own[id(unit)] for index, unit in enumerate(units)}
    # Parameters are gathered in the buckets of their gradients; what is split is reduced layer by layer.
    limit = sizes.framework.bucket_parameters(sizes.strategy, first_piece and not sizes.plan.splits_gradients)
    filled: dict[int, tuple[Buckets, ...]] = {}
    trained = tuple([unit.trained for unit in reversed(units)])
    other = sum([shard.unquantised for shard in trained]) if sizes.strategy.fp8_parameters else 0
    if 0 < other < sum([shard.total for shard in trained]):
        # Embeddings, the output projection and norms have buffers of their own, whose buckets are reduced and
        # gathered with the last of the fp8 ones (Megatron-Core, param_and_grad_buffer.py, partition_buckets).
        trained = tuple([Shard(shard.dense - shard.unquantised, shard.experts) for shard in trained])
        filled[0] = (Buckets(Shard(other, 0, other)),)
    for index, buckets in fill_buckets(limit, trained, tensors_of_layer(sizes)):
        unit = len(units) - 1 - index
        filled[unit] = (*filled.get(unit, ()), buckets)
    return filled


def _reduce_once(sizes: Sizes, units: Sequence[Unit], buckets: UnitBuckets) -> tuple[dict[int, Layer], Ops]:
    """Return the units that end with reductions, or what is reduced after all of them."""
    places, overlaps = _places(units), sizes.strategy.overlap.gradients
    known: dict[tuple[int, int], tuple[Ops, Layer]] = {}  # most units are one object, and so are their buckets
    last: dict[int, Layer] = {}
    exposed: Ops = ()
    for index in sorted(buckets, reverse=True):
        layer, own = units[index].layers[0], buckets[index]
        key = id(layer), id(own)
        if key not in known:
            known[key] = _reduce_layer(sizes, layer, own)
        ops, ending = known[key]
        if overlaps and ops:
            last[places[index]] = ending
        else:
            exposed += ops
    return last, exposed


def _gather_once(sizes: Sizes, units: Sequence[Unit], buckets: UnitBuckets) -> tuple[dict[int, Layer], Ops]:
    """Return the units that begin with gathers, or what is gathered after the step.

    Every stage asks for all its parameters when the step begins, not when its first micro-batch comes
    (Megatron-LM, --align-param-gather).
    """
    if sizes.framework.owners_broadcast:
        return {}, broadcast_ops(sizes, sum((unit.trained for unit in units), start=NOTHING))
    overlaps, places = sizes.strategy.overlap.parameters, _places(units)
    first: dict[int, Layer] = {}
    exposed: Ops = ()

    def begin(layer: Layer, own: tuple[Buckets, ...]) -> tuple[Ops, Layer]:
        ops = tuple(
            replace(op, early=overlaps)
            for number, issued in enumerate(issue_buckets(sizes, reversed(own)))
            for op in gather_ops(sizes, f"parameters {number}", issued, blocking=not overlaps)
        )
        return ops, _begin(layer, Phase.FORWARD, (), ops, (), True)

    for index in sorted(buckets):
        layer, own = units[index].layers[0], buckets[index]
        ops, beginning = _GATHERED.get((sizes, layer), partial(begin, layer, own), own)
        if overlaps and ops:
            first[places[index]] = beginning
        else:
            exposed += ops
    return first, exposed


# Remembered from one forecast to the next: layers that are one object are worked out once.
LAYERS: ByIdentity[Layer] = ByIdentity(4 * 4096)


def _begin(layer: Layer, phase: Phase, copies: Ops, own: Ops, following: Ops, begins: bool) -> Layer:
    """Return *layer* whose *phase* waits for its *own* gathers and requests the *following* ones."""

    def make() -> Layer:
        ops = _prefetch(copies + layer.ops(phase), own, following, begins)
        return replace(layer, forward=ops) if phase is Phase.FORWARD else replace(layer, input_gradient=ops)

    return LAYERS.get((layer,), make, (phase, copies, own, following, begins))


def _end_backward(layer: Layer, ops: Ops) -> Layer:
    """Return *layer* with *ops* at the end of its backward."""
    key = (Phase.WEIGHT_GRADIENT, ops)
    return LAYERS.get((layer,), lambda: replace(layer, weight_gradient=layer.weight_gradient + ops), key)


def _places(units: Sequence[Unit]) -> list[int]:
    """Return the position of each unit's first layer among all layers."""
    return [0, *accumulate([len(unit.layers) for unit in units])][:-1]
