"""Where data-parallel communication runs: beside which layers of which micro-batches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from stepcast.generate.data import broadcast_ops, buckets, gather_ops, reduce_ops
from stepcast.generate.parts import K, Ops, waiting
from stepcast.generate.sizes import Sizes
from stepcast.ir.dtype import DType
from stepcast.ir.sharding import Gathered, Reduced, gathered_bytes, plan_of
from stepcast.ir.strategy import Kernels
from stepcast.ir.weights import NOTHING, Shard
from stepcast.ir.work import Elementwise
from stepcast.ir.workload import Layer, Op, Variation


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that are gathered, reduced and recomputed together: a transformer layer, or an end."""

    layers: tuple[Layer, ...]
    held: Shard
    trained: Shard


Bucket = tuple[int, int, Shard]
"""(the first of the units in it, number, contents)."""


@dataclass(frozen=True, slots=True)
class Once:
    """What happens once per step: layers of one micro-batch that differ from the usual by what overlaps
    with them, and the collectives that overlap with nothing.
    """

    variations: tuple[Variation, ...]
    reduce: Ops
    gather: Ops


def gathering(sizes: Sizes, units: Sequence[Unit]) -> list[Unit]:
    """ZeRO-3 and FSDP: parameters gathered for the forward of each unit, and again for its backward where
    they are freed in between.

    Overlapped, they are gathered while the unit before runs, so that only the first wait is exposed.
    """
    ahead, end, gathered = sizes.strategy.overlap.parameters, len(units) - 1, []
    again = plan_of(sizes.strategy).gathered is Gathered.EACH_PASS

    def requests(phase: str, first: int) -> list[Ops]:
        """Each unit's gathers; the one that runs first asks for its own and for the next one's."""
        names = [f"{phase} first" if ahead and index == first else phase for index in range(len(units))]
        return [
            gather_ops(sizes, name, unit.held, not ahead) for name, unit in zip(names, units, strict=True)
        ]

    forward, backward = requests("forward", 0), requests("backward", end)
    for index, unit in enumerate(units):
        layers = list(unit.layers)
        made = _made_whole(sizes, unit.held)
        following = forward[index + 1] if ahead and index < end else ()
        begins = not ahead or index == 0
        own = made + layers[0].forward
        layers[0] = replace(layers[0], forward=_fed(own, forward[index], following, begins))
        if again:
            following = backward[index - 1] if ahead and index else ()
            begins = not ahead or index == end
            own = made + layers[-1].input_gradient
            layers[-1] = replace(layers[-1], input_gradient=_fed(own, backward[index], following, begins))
        gathered.append(replace(unit, layers=tuple(layers)))
    return gathered


def reducing(sizes: Sizes, units: Sequence[Unit]) -> list[Unit]:
    """ZeRO 2 and 3, FSDP: gradients reduced with every micro-batch, when a unit's backward is done."""
    return [
        replace(unit, layers=(_ending(unit.layers[0], _unit_reductions(sizes, unit)), *unit.layers[1:]))
        for unit in units
    ]


def _unit_reductions(sizes: Sizes, unit: Unit) -> Ops:
    """The gradients of one unit, in buckets of its own."""
    limit = sizes.strategy.bucket_parameters(first_piece=False)
    return _reductions(sizes, buckets(limit, [unit.trained]))


def _reductions(sizes: Sizes, filled: Iterable[Bucket]) -> Ops:
    blocking = not sizes.strategy.overlap.gradients
    return tuple(
        op
        for _, number, shard in filled
        for op in (*_copied_in(sizes, shard), *reduce_ops(sizes, f"gradients {number}", shard, blocking))
    )


def _made_whole(sizes: Sizes, shard: Shard) -> Ops:
    """What a rank does with what it gathered. FSDP2 splits each parameter by itself and copies it to where
    the layers expect it (PyTorch, torch/distributed/fsdp/_fully_shard: split_with_sizes_copy); a rank that
    shares with nobody casts its fp32 weights.
    """
    strategy, ops = sizes.strategy, []
    for part, each in plan_of(strategy).kinds(shard):
        size = float(gathered_bytes(strategy, each))
        if part.ways > 1 and strategy.kernels is Kernels.COMPILED:
            copied = Elementwise(K.COPY, 1, each.total, size, size, dtype=sizes.stored)
            ops.append(Op("parameters copy out", copied))
        elif part.ways == 1 and part.collected:
            read = DType.FP32.bytes * each.total
            ops.append(
                Op("parameters cast", Elementwise(K.CAST, 1, each.total, read, size, dtype=DType.FP32))
            )
    return tuple(ops)


def _copied_in(sizes: Sizes, shard: Shard) -> Ops:
    """FSDP2: gradients into one buffer in the format of their sum, part by part for each rank (chunk_cat)."""
    if sizes.strategy.kernels is not Kernels.COMPILED:
        return ()
    split = plan_of(sizes.strategy).unreduced(shard).total
    if not split:
        return ()
    read, write = float(split * sizes.element), float(split * sizes.gradient)
    return (Op("gradients copy in", Elementwise(K.COPY, 1, split, read, write, dtype=sizes.stored)),)


def once_per_step(sizes: Sizes, units: Sequence[Unit], first_piece: bool) -> Once:
    """Gradients that are reduced once go beside the last backward, parameters that are gathered once beside
    the first forward, bucket by bucket or unit by unit; or both beside nothing.
    """
    plan, overlap = plan_of(sizes.strategy), sizes.strategy.overlap
    # Parameters are gathered in the buckets of their gradients.
    limit = sizes.strategy.bucket_parameters(first_piece)
    filled = buckets(limit, [unit.trained for unit in reversed(units)])
    beginning = [(len(units) - 1 - index, number, shard) for index, number, shard in filled]
    first: dict[int, Layer] = {}
    last: dict[int, Layer] = {}
    reduce: Ops = ()
    gather: Ops = ()
    if plan.reduced is Reduced.ONCE:
        last, reduce = _reduced_once(sizes, units, beginning)
    if plan.gathered is Gathered.AFTER_UPDATE:
        first, gather = _gathered_once(sizes, units, beginning, overlap.parameters)
    elif plan.gathered is Gathered.ONCE:
        first = {
            place: whole.layers[0]
            for place, unit, whole in zip(_places(units), units, gathering(sizes, units), strict=True)
            if whole.layers[0] != unit.layers[0]
        }
    final = sizes.strategy.micro_batches - 1
    if final == 0:
        first = first | {
            place: replace(first.get(place, layer), weight_gradient=layer.weight_gradient)
            for place, layer in last.items()
        }
        last = {}
    variations = [Variation(0, place, layer) for place, layer in sorted(first.items())]
    variations += [Variation(final, place, layer) for place, layer in sorted(last.items())]
    return Once(tuple(variations), reduce, gather)


def _reduced_once(
    sizes: Sizes, units: Sequence[Unit], beginning: Sequence[Bucket]
) -> tuple[dict[int, Layer], Ops]:
    """The units that end with reductions, or what is reduced after all of them."""
    places, last = _places(units), {}
    alone: Ops = ()
    reductions: Iterable[tuple[int, Ops]]
    if plan_of(sizes.strategy).by_unit:
        reductions = ((index, _unit_reductions(sizes, units[index])) for index in reversed(range(len(units))))
    else:
        groups = groupby(beginning, key=lambda bucket: bucket[0])
        reductions = ((unit, _reductions(sizes, parts)) for unit, parts in groups)
    for unit, ops in reductions:
        if sizes.strategy.overlap.gradients and ops:
            last[places[unit]] = _ending(units[unit].layers[0], ops)
        else:
            alone += ops
    return last, alone


def _gathered_once(
    sizes: Sizes, units: Sequence[Unit], beginning: Sequence[Bucket], beside: bool
) -> tuple[dict[int, Layer], Ops]:
    if sizes.strategy.owners_broadcast:
        return {}, broadcast_ops(sizes, sum((unit.trained for unit in units), start=NOTHING))
    groups: list[tuple[int, Ops]] = []
    for unit, parts in groupby(reversed(beginning), key=lambda bucket: bucket[0]):
        ops = tuple(
            op
            for _, number, shard in parts
            for op in gather_ops(sizes, f"parameters {number}", shard, blocking=not beside)
        )
        if ops:
            groups.append((unit, ops))
    everything = tuple(op for _, ops in groups for op in ops)
    if not beside or not groups:
        return {}, everything
    places, first = _places(units), {}
    for unit, ops in groups:
        layer = units[unit].layers[0]
        # Every stage asks for all its parameters when the step begins, not when its first micro-batch comes
        # (Megatron-LM, --align-param-gather).
        asked = everything if unit == groups[0][0] else ()
        first[places[unit]] = replace(layer, forward=(*asked, *_fed(layer.forward, ops, (), begins=False)))
    return first, ()


def _fed(ops: Ops, own: Ops, following: Ops, begins: bool) -> Ops:
    """*ops* that wait for their *own* gathers, requested here if a unit *begins* with them, and then request
    those of what runs next.
    """
    names = tuple(op.name for op in own)
    return (*(own if begins else ()), *waiting(ops[:1], names), *following, *ops[1:])


def _ending(layer: Layer, ops: Ops) -> Layer:
    """*layer* with *ops* at the end of its backward."""
    return replace(layer, weight_gradient=layer.weight_gradient + ops)


def _places(units: Sequence[Unit]) -> list[int]:
    """Where each unit's first layer stands among all."""
    return [0, *accumulate(len(unit.layers) for unit in units)][:-1]
