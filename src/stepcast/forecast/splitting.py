"""A captured program split over ranks: cut into pipeline stages, split into tensor-parallel shares, and with what
data-parallel ranks exchange.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from stepcast.ir.captured import Captured, LayerPart, ShardUnit, Tie
from stepcast.ir.layout import Group
from stepcast.ir.work import Attention, Collective, CollectiveKind, Elementwise, ElementwiseKind, Matmul, Work
from stepcast.ir.workload import LAST, Block, Layer, Op, Phase, Role, Stage, fold_units, vary_blocks
from stepcast.units import MIB

# Pipeline stages of equal times that send little.


class CutError(ValueError):
    """A program that cannot be cut so often."""


def _find_places(captured: Captured) -> list[int]:
    """Return where a cut may be: within a block that repeats only where no other place of it would send less;
    elsewhere, where neither neighbour would send less.
    """
    sent = [part.sent_bytes for part in captured.parts]
    places: list[int] = []
    start = 0
    for block in captured.stage.body:
        length = len(block.layers)
        for first in range(start, start + length * block.repeat, length):
            inside = range(max(first, 1), first + length)
            least = min((sent[index] for index in inside if sent[index]), default=0)
            for index in inside:
                # A block of one layer has no inside; its neighbours decide whether it is a good place.
                near = sent[index - 1 : index + 2] if length == 1 else [least]
                if sent[index] and sent[index] <= min(size for size in near if size):
                    places.append(index)
        start += length * block.repeat
    return places


def cut_stages(captured: Captured, seconds: Sequence[float], stages: int) -> list[int]:
    """Return the layers at which stages 1, 2, ... begin: the slowest stage is as fast as can be, then the bytes sent
    are least. *seconds* are those of each layer, forward and backward.
    """
    if stages == 1:
        return []
    borders = sorted({0, *_find_places(captured), len(captured.parts)})
    if len(borders) <= stages:
        raise CutError(f"{captured.name}: can be cut into {len(borders) - 1} stages at most, not {stages}")
    total = [0.0, *accumulate(seconds)]
    # best[border]: (slowest stage, bytes sent, the cuts before) of the layers up to there.
    best: dict[int, tuple[float, int, list[int]]] = {0: (0.0, 0, [])}
    for stage in range(stages):
        before, best = best, {}
        for end in borders[stage + 1 :] if stage < stages - 1 else borders[-1:]:
            slowest = {cut: max(known[0], total[end] - total[cut]) for cut, known in before.items() if cut < end}
            # Times are compared to a picosecond; equal ones by the bytes sent.
            begin = min(slowest, key=lambda cut: (round(slowest[cut], 12), before[cut][1]))
            sent = captured.parts[end].sent_bytes if end < len(captured.parts) else 0
            best[end] = slowest[begin], before[begin][1] + sent, [*before[begin][2], end]
    return best[borders[-1]][2][:-1]


def stage_ranges(total: int, begins: Sequence[int]) -> list[range]:
    """Return the layers of each stage."""
    return [range(first, last) for first, last in pairwise([0, *begins, total])]


# Data-parallel ranks: sums of gradients, or shares of everything.

# Gradients that are summed together, and those of the first bucket (torch/nn/parallel/distributed.py, bucket_cap_mb;
# torch/csrc/distributed/c10d/reducer.hpp, kDefaultFirstBucketBytes).
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * MIB, MIB


def reduce_gradients(
    layers: Sequence[Layer],
    parts: Sequence[LayerPart],
    epilogue: tuple[Layer, ...],
    micro_batches: int,
    bucket_bytes: float | None = None,
) -> Stage:
    """Return the stage with gradients summed in buckets during the backward of the last of *micro_batches* that differ.

    Buckets have *bucket_bytes*; 0 makes one bucket of all. DDP's own sizes have a small first one.
    """
    changed: dict[int, Layer] = {}
    names: list[str] = []
    later = BUCKET_BYTES if bucket_bytes is None else bucket_bytes or math.inf
    size, limit = 0, FIRST_BUCKET_BYTES if bucket_bytes is None else later
    for index in reversed(range(len(layers))):
        size += parts[index].reduced_bytes or parts[index].gradient_bytes
        if size >= limit or (index == 0 and size):
            names.append(f"dp all-reduce {len(names)}")
            op = Op(names[-1], Collective(CollectiveKind.ALL_REDUCE, size, Group.DP), blocking=False)
            changed[index] = replace(layers[index], weight_gradient=(*layers[index].weight_gradient, op))
            size, limit = 0, later
    epilogue = _update_after(epilogue, names)
    if micro_batches == 1:
        body = tuple(Block((changed.get(index, layer),)) for index, layer in enumerate(layers))
        return Stage(body, epilogue=epilogue)
    body = tuple(fold_units([(layer,) for layer in layers]))
    return Stage(body, epilogue=epilogue, varied=((LAST, vary_blocks(body, changed)),) if changed else ())


def shard_parameters(layers: Sequence[Layer], units: Sequence[ShardUnit], epilogue: tuple[Layer, ...]) -> Stage:
    """Return the stage with the parameters of each unit gathered while the one before runs, again for its backward
    unless they stay, and their gradients summed and scattered (Zhao et al. 2023, PyTorch FSDP; ``fully_shard`` has
    the same order: the outermost unit first and last).
    """
    changed, numbers = list(layers), {unit: number for number, unit in enumerate(units)}

    def change(index: int, phase: Phase, ops: tuple[Op, ...]) -> None:
        layer = changed[index]
        is_forward = phase is Phase.FORWARD
        changed[index] = replace(layer, forward=ops) if is_forward else replace(layer, input_gradient=ops)

    def gather_all(order: Sequence[tuple[ShardUnit, int]], phase: Phase) -> None:
        """Gather each unit after the layer that begins the one before it, and before the layer that begins it."""
        before, word = -1, "forward" if phase is Phase.FORWARD else "backward"
        for unit, index in order:
            if phase is Phase.FORWARD or unit.is_freed:
                name = f"dp all-gather {word} {numbers[unit]}"
                gather = Op(name, Collective(CollectiveKind.ALL_GATHER, unit.gathered_bytes, Group.DP), blocking=False)
                ops = changed[index].ops(phase)
                own = next((place for place, op in enumerate(ops) if not isinstance(op.work, Collective)), len(ops))
                waiting = [replace(op, after=(*op.after, name)) for op in ops[own : own + 1]]
                ahead = [gather] if before in (-1, index) else []
                change(index, phase, (*ops[:own], *ahead, *waiting, *ops[own + 1 :]))
                if not ahead:
                    change(before, phase, (*changed[before].ops(phase), gather))
            before = index

    def begin(unit: ShardUnit, phase: Phase, span: Sequence[int]) -> tuple[ShardUnit, int]:
        return unit, next((index for index in span if layers[index].ops(phase)), span[0])

    starts = [begin(unit, Phase.FORWARD, range(unit.first, unit.last + 1)) for unit in units]
    gather_all(sorted(starts, key=lambda start: (start[1], -start[0].last)), Phase.FORWARD)
    starts = [begin(unit, Phase.INPUT_GRADIENT, range(unit.last, unit.first - 1, -1)) for unit in units]
    gather_all(sorted(starts, key=lambda start: (-start[1], start[0].first)), Phase.INPUT_GRADIENT)
    names = []
    for unit in sorted((unit for unit in units if unit.reduced_bytes), key=lambda unit: (-unit.first, unit.last)):
        names.append(f"dp reduce-scatter {numbers[unit]}")
        share = Op(names[-1], Collective(CollectiveKind.REDUCE_SCATTER, unit.reduced_bytes, Group.DP), blocking=False)
        first = changed[unit.first]
        changed[unit.first] = replace(first, weight_gradient=(*first.weight_gradient, share))
    return Stage(tuple(Block((layer,)) for layer in changed), epilogue=_update_after(epilogue, names))


def _update_after(epilogue: tuple[Layer, ...], names: Sequence[str]) -> tuple[Layer, ...]:
    """Return the optimizer that waits for all gradients."""
    if not epilogue or not epilogue[0].forward:
        return epilogue
    first = epilogue[0]
    op = replace(first.forward[0], after=tuple(names))
    return (replace(first, forward=(op, *first.forward[1:])), *epilogue[1:])


# Tensor-parallel ranks: one rank's share of each layer.

UNSPLIT, SUMMED = "-", "+"
PRODUCT_SIZES = "mnkb"
# Sizes of a part, and how much of each is split.
SPLIT_SIZES = {
    "parameter_bytes": "split_bytes",
    "kept_bytes": "split_kept_bytes",
    "forward_peak_bytes": "split_forward_bytes",
    "backward_peak_bytes": "split_backward_bytes",
}


class SplitError(ValueError):
    """A program that cannot be split so often."""


def split_captured(captured: Captured, ways: int) -> Captured:
    """Return one rank's share: its products, heads and what is between, with the sums over all ranks."""
    if ways == 1:
        return captured
    if not any(part.split for part in captured.parts):
        raise SplitError(
            f"{captured.name}: --tp: it has no linear maps whose results meet in another one alone, which "
            "could be split; --gpus, --pp and --sharding fsdp are possible"
        )

    @cache
    def share(layer: Layer, split: str) -> Layer:
        return _split_layer(layer, split, ways)

    body: list[Block] = []
    start = 0
    for block in captured.stage.body:
        length, repeats = len(block.layers), []
        for first in range(start, start + length * block.repeat, length):
            own = zip(block.layers, captured.parts[first : first + length], strict=True)
            repeats.append(tuple(share(layer, part.split) if part.split else layer for layer, part in own))
        is_equal = all(layers == repeats[0] for layers in repeats)
        body += [Block(repeats[0], block.repeat)] if is_equal else [Block(layers) for layers in repeats]
        start += length * block.repeat
    parts = tuple(_split_part(part, ways) for part in captured.parts)

    def remaining_share(name: str) -> float:
        """Return the share of all parts that is left of a size."""
        now, before = (sum(int(getattr(part, name)) for part in every) for every in (parts, captured.parts))
        return now / max(1, before)

    held, saved = remaining_share("parameter_bytes"), remaining_share("kept_bytes")
    memory = captured.memory
    epilogue = tuple(shrink_update(layer, held) for layer in captured.stage.epilogue)
    stage = replace(captured.stage, body=tuple(body), epilogue=epilogue)
    return replace(
        captured,
        workload=replace(captured.workload, stages=(stage,)),
        parts=parts,
        units=(),  # of whole layers
        ties=tuple(_split_tie(tie, ways) for tie in captured.ties),
        memory=replace(
            memory,
            **{
                name: round(getattr(memory, name) * (saved if name in ("activations", "unused") else held))
                for name in ["parameters", "gradients", "optimizer", "activations", "all_gradients", "update", "unused"]
            },
        ),
    )


def _split_part(part: LayerPart, ways: int) -> LayerPart:
    changed: dict[str, int] = {}
    for name, split_name in SPLIT_SIZES.items():
        split = getattr(part, split_name)
        changed |= {name: getattr(part, name) - split + split // ways, split_name: 0}
    left = changed["parameter_bytes"] / max(1, part.parameter_bytes)
    for name in ("parameters", "gradient_bytes", "reduced_bytes"):
        changed[name] = round(getattr(part, name) * left)
    return replace(part, split="", **changed)


def _split_tie(tie: Tie, ways: int) -> Tie:
    return replace(tie, size_bytes=tie.size_bytes - tie.split_bytes + tie.split_bytes // ways, split_bytes=0)


def _split_layer(layer: Layer, split: str, ways: int) -> Layer:
    phases = split.split("|")
    if len(phases) != len(Phase):
        raise SplitError(f"{layer.name}: {split!r} names {len(phases)} phases, not {len(Phase)}")
    forward, inputs, weights = (
        tuple(_split_ops(layer.ops(phase), letters.split(), layer.name, ways))
        for phase, letters in zip(Phase, phases, strict=True)
    )
    return replace(layer, forward=forward, input_gradient=inputs, weight_gradient=weights)


def _split_ops(ops: Sequence[Op], letters: Sequence[str], name: str, ways: int) -> list[Op]:
    if letters and len(letters) != len(ops):
        raise SplitError(f"{name}: {len(letters)} letters for {len(ops)} ops")
    split = []
    for op, letter in zip(ops, letters or [UNSPLIT] * len(ops), strict=True):
        split.append(replace(op, work=_split_work(op.work, letter.rstrip(SUMMED), name, ways)))
        if letter.endswith(SUMMED) and isinstance(op.work, Matmul):
            size = round(op.work.m * op.work.n * op.work.batch * op.work.dtype.bytes)
            split.append(Op(f"{op.name} tp all-reduce", Collective(CollectiveKind.ALL_REDUCE, size, Group.TP)))
    return split


def _split_work(work: Work, letter: str, name: str, ways: int) -> Work:
    def divide(size: int, what: str) -> int:
        if size % ways:
            raise SplitError(f"--tp {ways}: {name}: {what} {size}, cannot be split {ways} ways")
        return size // ways

    if letter == UNSPLIT:
        return work
    match work:
        case Matmul() if letter in PRODUCT_SIZES:
            sizes = {"m": work.m, "n": work.n, "k": work.k, "b": work.batch}
            sizes[letter] = divide(sizes[letter], "a size of a product,")
            return replace(work, m=sizes["m"], n=sizes["n"], k=sizes["k"], batch=sizes["b"])
        case Attention():
            heads = divide(work.heads, "heads, of which there are")
            return replace(work, heads=heads, kv_heads=divide(work.kv_heads, "key heads,"))
        case Elementwise():
            rows, columns = work.rows, max(1, work.columns // ways)
            if work.rows % ways == 0:
                rows, columns = work.rows // ways, work.columns
            read_bytes, write_bytes = work.read_bytes / ways, work.write_bytes / ways
            return replace(work, rows=rows, columns=columns, read_bytes=read_bytes, write_bytes=write_bytes)
    return work


# The optimizer.


def shrink_update(layer: Layer, share: float) -> Layer:
    """Return the optimizer of a *share* of the parameters."""
    if share >= 1.0:
        return layer
    return replace(layer, forward=tuple(replace(op, work=_shrink_work(op.work, share)) for op in layer.forward))


def _shrink_work(work: Work, share: float) -> Work:
    if not isinstance(work, Elementwise):
        return work
    columns = max(1, round(work.columns * share))
    return replace(work, columns=columns, read_bytes=work.read_bytes * share, write_bytes=work.write_bytes * share)


def split_idle_weights(layer: Layer, share: float) -> Layer:
    """Return the optimizer where a *share* of the weights has no gradient, for which AdamW's fused kernel takes longer
    (``ElementwiseKind.IDLE_OPTIMIZER``).
    """
    ops: list[Op] = []
    for op in layer.forward:
        work = op.work
        if not isinstance(work, Elementwise) or work.kind is not ElementwiseKind.OPTIMIZER or not share:
            ops.append(op)
            continue
        busy = [replace(op, work=_shrink_work(work, 1.0 - share))] if share < 1.0 else []
        idle = _shrink_work(replace(work, kind=ElementwiseKind.IDLE_OPTIMIZER), share)
        ops += [*busy, replace(op, name=f"idle {op.name}", work=idle, kernels=1 if busy else op.kernels)]
    return replace(layer, forward=tuple(ops))


# Parameters that stages share: each has a copy, and their gradients are summed.


def copy_tied_parameters(captured: Captured, begins: Sequence[int]) -> list[LayerPart]:
    """Return the parts of *captured*; in a stage that shares parameters with one before, the first layer that reads
    them has a copy.
    """
    parts = list(captured.parts)
    for tie in captured.ties:
        first = {bisect_right(begins, part): part for part in reversed(tie.parts)}
        for stage, index in first.items():
            if stage != bisect_right(begins, tie.parts[0]):
                own, size = parts[index], tie.size_bytes
                parameters, gradients = own.parameter_bytes + size, own.gradient_bytes + size
                parts[index] = replace(own, parameter_bytes=parameters, gradient_bytes=gradients)
    return parts


def sum_tied_gradients(captured: Captured, begins: Sequence[int], ways: int) -> list[tuple[Layer, ...]]:
    """Return for each stage the sums over those that share parameters, each of which is split *ways*.

    The first and the last have a group of their own, as Megatron-LM's embedding group; others are summed over all
    stages.
    """
    last = len(begins)
    sizes: dict[Group, int] = {}
    for tie in captured.ties:
        stages = {bisect_right(begins, part) for part in tie.parts}
        if len(stages) > 1:
            group = Group.EMBEDDING if stages == {0, last} else Group.PP
            sizes[group] = sizes.get(group, 0) + tie.size_bytes // ways
    sums: list[tuple[Layer, ...]] = []
    for stage in range(last + 1):
        groups = [group for group in sizes if group is Group.PP or stage in (0, last)]
        ops = tuple(
            Op(f"tied {group} all-reduce", Collective(CollectiveKind.ALL_REDUCE, sizes[group], group))
            for group in groups
        )
        sums.append((Layer(str(Role.GRADIENTS), ops, role=Role.GRADIENTS),) if ops else ())
    return sums
