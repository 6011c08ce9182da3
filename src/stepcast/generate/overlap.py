"""Where data-parallel communication runs: beside which layers of which micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate

from stepcast.generate.data import Buckets, as_issued, broadcast_ops, buckets, gather_ops, reduce_ops
from stepcast.generate.update import copy_op, own_parameters, send_gradients
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Kernels
from stepcast.ir.group import HostWay
from stepcast.ir.identity import ByIdentity
from stepcast.ir.layers.operators import K, Ops, wait_for
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.sharding import Gathered, Reduced, gathered_bytes
from stepcast.ir.weights import NOTHING, Shard
from stepcast.ir.work import Elementwise
from stepcast.ir.workload import Layer, Op, Phase, Variation


@dataclass(frozen=True, slots=True)
class Unit:
    """A transformer layer, or an end of the model."""

    layers: tuple[Layer, ...]
    held: Shard
    trained: Shard
    # Bytes of activations that the host keeps from the forward until the backward.
    leaving: int = 0


def feed_ops(ops: Ops, own: Ops, following: Ops, begins: bool) -> Ops:
    """*ops* that wait for their *own* gathers, requested here if a unit *begins* with them, and then request
    those of what runs next.
    """
    names = tuple(op.name for op in own)
    return (*(own if begins else ()), *wait_for(ops[:1], names), *following, *ops[1:])


def offload_activations(units: Sequence[Unit]) -> list[Unit]:
    """Units that send their activations after the forward and have them back for the backward."""
    known: dict[tuple[object, ...], Unit] = {}
    found = []
    for index, unit in enumerate(units):
        own, before = unit.leaving, units[index - 1].leaving if index else 0
        begins = index == len(units) - 1
        key = (id(unit.layers), own, before, begins)
        if key not in known:
            last = _move_activations(unit.layers[-1], own, before, begins)
            known[key] = replace(unit, layers=(*unit.layers[:-1], last))
        found.append(known[key])
    return found


@lru_cache(maxsize=1024)
def _move_activations(layer: Layer, own: int, before: int, begins: bool) -> Layer:
    """The last layer of a unit that keeps *own* bytes on the host, the unit before it *before*."""
    if own:
        ready = wait_for(layer.forward[-1:], ("activations out",))
        sent = copy_op("activations out", HostWay.OUT, own)
        layer = replace(layer, forward=(*layer.forward[:-1], *ready, sent))
    fetched = (copy_op("activations in", HostWay.IN, own),) if own else ()
    following = (copy_op("activations in", HostWay.IN, before),) if before else ()
    return replace(layer, input_gradient=feed_ops(layer.input_gradient, fetched, following, begins))


@dataclass(frozen=True, slots=True)
class Once:
    """What happens once per step: layers of one micro-batch that differ from the usual by what overlaps
    with them, and the collectives that overlap with nothing.
    """

    variations: tuple[Variation, ...]
    reduce: Ops
    gather: Ops


def gather_units(sizes: Sizes, units: Sequence[Unit]) -> list[Unit]:
    """ZeRO-3 and FSDP: parameters gathered for the forward of each unit, and again for its backward where
    they are freed in between.

    Overlapped, they are gathered while the unit before runs, so that only the first wait is exposed.
    """
    # DeepSpeed of 2021 fetches a module's tensors when it begins, and then waits for the GPU (stage3.py,
    # fetch_sub_module, _synchronize_communication); what it prefetches, 5e7 elements, holds no large weight.
    ahead, end = sizes.strategy.overlap.parameters and not sizes.framework.listed_gathers, len(units) - 1
    again = sizes.plan.gathered is Gathered.EACH_PASS
    requests: dict[tuple[str, Shard], Ops] = {}

    def request(phase: str, index: int, first: int) -> Ops:
        """The unit's gathers; the one that runs first asks for its own and for the next one's."""
        if not 0 <= index <= end:
            return ()
        key = (f"{phase} first" if ahead and index == first else phase, units[index].held)
        if key not in requests:
            requests[key] = gather_ops(sizes, key[0], Buckets(key[1]), not ahead)
        return requests[key]

    def gathered(index: int) -> Unit:
        layers = list(units[index].layers)
        made = _made_whole(sizes, units[index].held)
        own = request("forward", index, 0)
        following = request("forward", index + 1, 0) if ahead else ()
        layers[0] = _beginning(layers[0], made, own, following, not ahead or index == 0)
        if again:
            own = request("backward", index, end)
            following = request("backward", index - 1, end) if ahead else ()
            layers[-1] = _returning(layers[-1], made, own, following, not ahead or index == end)
        return replace(units[index], layers=tuple(layers))

    # Units between others of their kind are alike.
    known: dict[tuple[int, ...], Unit] = {}
    found = []
    numbers = [-1, *map(id, units), -1]
    for index in range(len(units)):
        near = tuple(numbers[index : index + 3])
        if near not in known:
            known[near] = gathered(index)
        found.append(known[near])
    return found


def reduce_units(sizes: Sizes, units: Sequence[Unit]) -> list[Unit]:
    """ZeRO 2 and 3, FSDP: gradients reduced with every micro-batch, when a unit's backward is done."""
    known: dict[int, Unit] = {}
    for unit in units:
        if id(unit) not in known:
            _, ending = _reduced(sizes, unit.layers[0], _own_buckets(sizes, unit))
            known[id(unit)] = replace(unit, layers=(ending, *unit.layers[1:]))
    return [known[id(unit)] for unit in units]


def _own_buckets(sizes: Sizes, unit: Unit) -> tuple[Buckets, ...]:
    """The gradients of one unit, in buckets of its own."""
    limit = sizes.framework.bucket_parameters(sizes.strategy, first_piece=False)
    return tuple([filled for _, filled in buckets(limit, (unit.trained,))])


def _reduced(sizes: Sizes, layer: Layer, filled: tuple[Buckets, ...]) -> tuple[Ops, Layer]:
    """What reduces the gradients in *filled* buckets, and *layer* that ends with it."""

    def make() -> tuple[Ops, Layer]:
        ops = _reductions(sizes, filled)
        return ops, _ending(layer, ops)

    return _REDUCED.get((sizes, layer), make, filled)


# Of one strategy, whose stages have most of their units in common.
_REDUCED: ByIdentity[tuple[Ops, Layer]] = ByIdentity(512)
_GATHERED: ByIdentity[tuple[Ops, Layer]] = ByIdentity(512)


def _reductions(sizes: Sizes, filled: Sequence[Buckets]) -> Ops:
    blocking, ops = not sizes.strategy.overlap.gradients, list[Op]()
    for number, each in enumerate(as_issued(sizes, filled)):
        reduced = reduce_ops(sizes, f"gradients {number}", each, blocking)
        ops += [*_copied_in(sizes, each), *reduced]
        own = own_parameters(sizes, each.shard) * each.times
        ops += send_gradients(sizes, number, own, reduced, blocking)
    return tuple(ops)


def _made_whole(sizes: Sizes, shard: Shard) -> Ops:
    """What a rank does with what it gathered. FSDP2 splits each parameter by itself and copies it to where
    the layers expect it (PyTorch, torch/distributed/fsdp/_fully_shard: split_with_sizes_copy); a rank that
    shares with nobody casts its fp32 weights.
    """
    strategy, ops = sizes.strategy, []
    for part, each in sizes.plan.kinds(shard):
        size = float(gathered_bytes(strategy, each))
        whose = "expert parameters" if each.experts else "parameters"
        if part.ways > 1 and sizes.framework.kernels is Kernels.COMPILED:
            copied = Elementwise(K.COPY, 1, each.total, size, size, dtype=sizes.stored)
            ops.append(Op(f"{whose} copy out", copied))
        elif part.ways == 1 and part.collected:
            read = DType.FP32.bytes * each.total
            cast = Elementwise(K.CAST, 1, each.total, read, size, dtype=DType.FP32)
            ops.append(Op(f"{whose} cast", cast))
    return tuple(ops)


def _copied_in(sizes: Sizes, filled: Buckets) -> Ops:
    """FSDP2: gradients into one buffer in the format of their sum, part by part for each rank (chunk_cat)."""
    if sizes.framework.kernels is not Kernels.COMPILED:
        return ()
    split = sizes.plan.unreduced(filled.shard).total * filled.times
    if not split:
        return ()
    read, write = float(split * sizes.element), float(split * sizes.gradient)
    return (Op("gradients copy in", Elementwise(K.COPY, 1, split, read, write, dtype=sizes.stored)),)


def once_per_step(sizes: Sizes, units: Sequence[Unit], first_piece: bool) -> Once:
    """Gradients that are reduced once go beside the last backward, parameters that are gathered once beside
    the first forward, bucket by bucket or unit by unit; or both beside nothing.
    """
    plan, filled = sizes.plan, _filled(sizes, units, first_piece)
    first: dict[int, Layer] = {}
    last: dict[int, Layer] = {}
    reduce: Ops = ()
    gather: Ops = ()
    if plan.reduced is Reduced.ONCE:
        last, reduce = _reduced_once(sizes, units, filled)
    if plan.gathered is Gathered.AFTER_UPDATE:
        first, gather = _gathered_once(sizes, units, filled)
    elif plan.gathered is Gathered.ONCE:
        first = {
            place: whole.layers[0]
            for place, unit, whole in zip(_places(units), units, gather_units(sizes, units), strict=True)
            if whole.layers[0] != unit.layers[0]
        }
    final = sizes.strategy.micro_batches - 1
    if final == 0:
        first, last = first | _both(first, last), {}
    variations = [Variation(0, place, layer) for place, layer in sorted(first.items())]
    variations += [Variation(final, place, layer) for place, layer in sorted(last.items())]
    return Once(tuple(variations), reduce, gather)


def _both(first: Mapping[int, Layer], last: Mapping[int, Layer]) -> dict[int, Layer]:
    """Layers of the only micro-batch, which is the first and the last; alike ones stay one object."""
    known: dict[tuple[int, int], Layer] = {}
    found = {}
    for place, layer in last.items():
        begun = first.get(place, layer)
        key = (id(begun), id(layer))
        if key not in known:
            known[key] = _ending(begun, layer.weight_gradient[len(begun.weight_gradient) :])
        found[place] = known[key]
    return found


Filled = Mapping[int, tuple[Buckets, ...]]
"""The buckets that a unit's backward completes, and with which its forward begins."""


def _filled(sizes: Sizes, units: Sequence[Unit], first_piece: bool) -> Filled:
    """Each unit's own, or those that gradients fill from the last unit to the first."""
    if sizes.plan.by_unit:
        own = {id(unit): _own_buckets(sizes, unit) for unit in units}
        return {index: own[id(unit)] for index, unit in enumerate(units)}
    # Parameters are gathered in the buckets of their gradients; what is split is reduced layer by layer.
    limit = sizes.framework.bucket_parameters(sizes.strategy, first_piece and not sizes.plan.splits_gradients)
    filled: dict[int, tuple[Buckets, ...]] = {}
    for index, each in buckets(limit, tuple([unit.trained for unit in reversed(units)])):
        unit = len(units) - 1 - index
        filled[unit] = (*filled.get(unit, ()), each)
    return filled


def _reduced_once(sizes: Sizes, units: Sequence[Unit], filled: Filled) -> tuple[dict[int, Layer], Ops]:
    """The units that end with reductions, or what is reduced after all of them."""
    places = _places(units)
    last: dict[int, Layer] = {}
    alone: Ops = ()
    for index in sorted(filled, reverse=True):
        ops, ending = _reduced(sizes, units[index].layers[0], filled[index])
        if sizes.strategy.overlap.gradients and ops:
            last[places[index]] = ending
        else:
            alone += ops
    return last, alone


def _gathered_once(sizes: Sizes, units: Sequence[Unit], filled: Filled) -> tuple[dict[int, Layer], Ops]:
    """The units that begin with gathers, or what is gathered after the step.

    Every stage asks for all its parameters when the step begins, not when its first micro-batch comes
    (Megatron-LM, --align-param-gather).
    """
    if sizes.framework.owners_broadcast:
        return {}, broadcast_ops(sizes, sum((unit.trained for unit in units), start=NOTHING))
    beside, places = sizes.strategy.overlap.parameters, _places(units)
    first: dict[int, Layer] = {}
    alone: Ops = ()

    def begun(layer: Layer, buckets: tuple[Buckets, ...]) -> tuple[Ops, Layer]:
        ops = tuple(
            replace(op, early=beside)
            for number, each in enumerate(as_issued(sizes, reversed(buckets)))
            for op in gather_ops(sizes, f"parameters {number}", each, blocking=not beside)
        )
        return ops, _beginning(layer, (), ops, (), True)

    for index in sorted(filled):
        layer, own = units[index].layers[0], filled[index]
        ops, beginning = _GATHERED.get((sizes, layer), partial(begun, layer, own), own)
        if beside and ops:
            first[places[index]] = beginning
        else:
            alone += ops
    return first, alone


# Remembered from one forecast to the next: layers that are one object are worked out once.
LAYERS: ByIdentity[Layer] = ByIdentity(4 * 4096)


def _beginning(layer: Layer, made: Ops, own: Ops, following: Ops, begins: bool) -> Layer:
    """*layer* whose forward waits for its *own* gathers and requests the *following* ones."""
    key = (Phase.FORWARD, made, own, following, begins)
    forward = partial(feed_ops, made + layer.forward, own, following, begins)
    return LAYERS.get((layer,), lambda: replace(layer, forward=forward()), key)


def _returning(layer: Layer, made: Ops, own: Ops, following: Ops, begins: bool) -> Layer:
    """The same for its backward."""
    key = (Phase.INPUT_GRADIENT, made, own, following, begins)
    backward = partial(feed_ops, made + layer.input_gradient, own, following, begins)
    return LAYERS.get((layer,), lambda: replace(layer, input_gradient=backward()), key)


def _ending(layer: Layer, ops: Ops) -> Layer:
    """*layer* with *ops* at the end of its backward."""
    key = (Phase.WEIGHT_GRADIENT, ops)
    return LAYERS.get((layer,), lambda: replace(layer, weight_gradient=layer.weight_gradient + ops), key)


def _places(units: Sequence[Unit]) -> list[int]:
    """Where each unit's first layer stands among all."""
    return [0, *accumulate([len(unit.layers) for unit in units])][:-1]
