"""Where data-parallel communication runs: beside which layers of which micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from stepcast.generate.data import broadcast_ops, buckets, gather_ops, reduce_ops
from stepcast.generate.parts import K, Ops, waiting
from stepcast.generate.sizes import Sizes
from stepcast.ir.strategy import Kernels, Sharding
from stepcast.ir.weights import Shard
from stepcast.ir.work import Elementwise, streamed
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
    """ZeRO-3 and FSDP: parameters gathered for the forward and again for the backward of each unit.

    Overlapped, they are gathered while the unit before runs, so that only the first wait is exposed.
    """
    ahead, end, gathered = sizes.strategy.overlap.parameters, len(units) - 1, []

    def requests(phase: str, first: int) -> list[Ops]:
        """Each unit's gathers; the one that runs first asks for its own and for the next one's."""
        names = [f"{phase} first" if ahead and index == first else phase for index in range(len(units))]
        return [
            gather_ops(sizes, name, unit.held, not ahead) for name, unit in zip(names, units, strict=True)
        ]

    forward, backward = requests("forward", 0), requests("backward", end)
    for index, unit in enumerate(units):
        layers = list(unit.layers)
        copied = _copied_out(sizes, unit.held)
        following = forward[index + 1] if ahead and index < end else ()
        begins = not ahead or index == 0
        own = copied + layers[0].forward
        layers[0] = replace(layers[0], forward=_fed(own, forward[index], following, begins))
        following = backward[index - 1] if ahead and index else ()
        begins = not ahead or index == end
        own = copied + layers[-1].input_gradient
        layers[-1] = replace(layers[-1], input_gradient=_fed(own, backward[index], following, begins))
        gathered.append(replace(unit, layers=tuple(layers)))
    return gathered


def reducing(sizes: Sizes, units: Sequence[Unit]) -> list[Unit]:
    """ZeRO 2 and 3, FSDP: gradients reduced with every micro-batch, when a unit's backward is done."""
    blocking, limit = (
        not sizes.strategy.overlap.gradients,
        sizes.strategy.bucket_parameters(first_piece=False),
    )
    reduced = []
    for unit in units:
        ops = tuple(
            op
            for _, number, shard in buckets(limit, [unit.trained])
            for op in (*_copied_in(sizes, shard), *reduce_ops(sizes, f"gradients {number}", shard, blocking))
        )
        reduced.append(replace(unit, layers=(_ending(unit.layers[0], ops), *unit.layers[1:])))
    return reduced


def _copied_out(sizes: Sizes, shard: Shard) -> Ops:
    """FSDP2 splits each parameter by itself: what is gathered is copied to where the layers expect it
    (PyTorch, torch/distributed/fsdp/_fully_shard: split_with_sizes_copy).
    """
    if not _by_parameter(sizes, shard):
        return ()
    return (Op("parameters copy out", streamed(K.COPY, 1, shard.total, 1, 1, sizes.stored)),)


def _copied_in(sizes: Sizes, shard: Shard) -> Ops:
    """And gradients into one buffer in the format of their sum, part by part for each rank (chunk_cat)."""
    if not _by_parameter(sizes, shard):
        return ()
    read, write = float(shard.total * sizes.element), float(shard.total * sizes.gradient)
    work = Elementwise(K.COPY, 1, shard.total, read, write, dtype=sizes.stored)
    return (Op("gradients copy in", work),)


def _by_parameter(sizes: Sizes, shard: Shard) -> bool:
    layout, compiled = sizes.strategy.layout, sizes.strategy.kernels is Kernels.COMPILED
    return compiled and shard.total > 0 and layout.dp * layout.cp > 1


def once_per_step(sizes: Sizes, units: Sequence[Unit], first_piece: bool) -> Once:
    """Gradients without ZeRO-2 are reduced beside the last backward, parameters under ZeRO 1 and 2 gathered
    beside the first forward, bucket by bucket; or after the step.
    """
    sharding, overlap = sizes.strategy.sharding, sizes.strategy.overlap
    # Parameters are gathered in the buckets of their gradients.
    limit = sizes.strategy.bucket_parameters(first_piece)
    filled = buckets(limit, [unit.trained for unit in reversed(units)])
    beginning = [(len(units) - 1 - index, number, shard) for index, number, shard in filled]
    first: dict[int, Layer] = {}
    last: dict[int, Layer] = {}
    reduce: Ops = ()
    gather: Ops = ()
    if not sharding.splits_gradients:
        last, reduce = _reduced_once(sizes, units, beginning, overlap.gradients)
    if sharding in (Sharding.ZERO_1, Sharding.ZERO_2):
        first, gather = _gathered_once(sizes, units, beginning, overlap.parameters)
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
    sizes: Sizes, units: Sequence[Unit], beginning: Sequence[Bucket], beside: bool
) -> tuple[dict[int, Layer], Ops]:
    places, last = _places(units), {}
    alone: Ops = ()
    for unit, parts in groupby(beginning, key=lambda bucket: bucket[0]):
        ops = tuple(
            op
            for _, number, shard in parts
            for op in reduce_ops(sizes, f"gradients {number}", shard, blocking=not beside)
        )
        if beside and ops:
            last[places[unit]] = _ending(units[unit].layers[0], ops)
        else:
            alone += ops
    return last, alone


def _gathered_once(
    sizes: Sizes, units: Sequence[Unit], beginning: Sequence[Bucket], beside: bool
) -> tuple[dict[int, Layer], Ops]:
    if sizes.strategy.owners_broadcast:
        dense, experts = (sum(getattr(unit.trained, part) for unit in units) for part in ("dense", "experts"))
        return {}, broadcast_ops(sizes, Shard(dense, experts))
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
