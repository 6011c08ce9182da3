"""What data-parallel ranks of a captured program exchange: sums of gradients, or shares of everything."""

import math
from collections.abc import Sequence
from dataclasses import replace

from stepcast.ir.captured import LayerPart
from stepcast.ir.group import Group
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.ir.workload import Block, Layer, Op, Stage, Variation, fold_units
from stepcast.units import MIB

# Gradients that are summed together, and of the first bucket (torch/nn/parallel/distributed.py,
# bucket_cap_mb; torch/csrc/distributed/c10d/reducer.hpp, kDefaultFirstBucketBytes).
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * MIB, MIB


def reduced(
    layers: Sequence[Layer],
    parts: Sequence[LayerPart],
    epilogue: tuple[Layer, ...],
    micro_batches: int,
    bucket_bytes: float | None = None,
) -> Stage:
    """Gradients summed in buckets while the backward goes on, in its last micro-batch alone.

    Every bucket but the first, which DDP makes small, has *bucket_bytes*; 0 makes one bucket of all.
    """
    changed: dict[int, Layer] = {}
    names: list[str] = []
    later = BUCKET_BYTES if bucket_bytes is None else bucket_bytes or math.inf
    size, limit = 0, min(FIRST_BUCKET_BYTES, later) if later < math.inf else later
    for at in reversed(range(len(layers))):
        size += parts[at].parameter_bytes
        if size >= limit or (at == 0 and size):
            names.append(f"dp all-reduce {len(names)}")
            op = Op(names[-1], Collective(CollectiveKind.ALL_REDUCE, size, Group.DP), blocking=False)
            changed[at] = replace(layers[at], weight_gradient=(*layers[at].weight_gradient, op))
            size, limit = 0, later
    epilogue = _after(epilogue, names)
    if micro_batches == 1:
        body = tuple(Block((changed.get(at, layer),)) for at, layer in enumerate(layers))
        return Stage(body, epilogue=epilogue)
    body = tuple(fold_units([(layer,) for layer in layers]))
    variations = tuple(Variation(micro_batches - 1, at, layer) for at, layer in sorted(changed.items()))
    return Stage(body, epilogue=epilogue, variations=variations, in_turn=True)


def sharded(
    layers: Sequence[Layer],
    parts: Sequence[LayerPart],
    units: Sequence[range],
    epilogue: tuple[Layer, ...],
    micro_batches: int,
) -> Stage:
    """Parameters of each unit gathered while the one before runs, again for its backward, whose gradients
    are summed and shared out (Zhao et al. 2023, PyTorch FSDP).
    """
    sizes = [sum(parts[at].parameter_bytes for at in unit) for unit in units]
    held = [number for number, size in enumerate(sizes) if size]
    found = list(layers)

    def gather(number: int, phase: str) -> Op:
        work = Collective(CollectiveKind.ALL_GATHER, sizes[number], Group.DP)
        return Op(f"dp all-gather {phase} {number}", work, blocking=False)

    names = []
    for place, number in enumerate(held):
        unit = units[number]
        ahead = [gather(held[place + 1], "forward")] if place + 1 < len(held) else []
        own = [gather(number, "forward")] if place == 0 else []
        first = found[unit.start]
        found[unit.start] = replace(
            first, forward=(*own, *_waiting(first.forward, f"dp all-gather forward {number}"), *ahead)
        )
        last = found[unit.stop - 1]
        own = [gather(number, "backward")] if place == len(held) - 1 else []
        ahead = [gather(held[place - 1], "backward")] if place else []
        inputs = _waiting(last.input_gradient, f"dp all-gather backward {number}")
        found[unit.stop - 1] = replace(last, input_gradient=(*own, *inputs, *ahead))
        names.append(f"dp reduce-scatter {number}")
        share = Op(names[-1], Collective(CollectiveKind.REDUCE_SCATTER, sizes[number], Group.DP), blocking=False)
        first = found[unit.start]
        found[unit.start] = replace(first, weight_gradient=(*first.weight_gradient, share))
    body = tuple(Block((layer,)) for layer in found)
    return Stage(body, epilogue=_after(epilogue, names))


def _waiting(ops: tuple[Op, ...], name: str) -> tuple[Op, ...]:
    """*ops*, of which the first waits for *name*."""
    if not ops:
        return ops
    return (replace(ops[0], after=(*ops[0].after, name)), *ops[1:])


def _after(epilogue: tuple[Layer, ...], names: Sequence[str]) -> tuple[Layer, ...]:
    """The optimizer waits for all gradients."""
    if not epilogue or not epilogue[0].forward:
        return epilogue
    first = epilogue[0]
    op = replace(first.forward[0], after=tuple(names))
    return (replace(first, forward=(op, *first.forward[1:])), *epilogue[1:])
