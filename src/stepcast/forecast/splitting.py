"""Where a captured program is cut into pipeline stages: equal times, and little to send."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from stepcast.ir.captured import Captured, LayerPart, Tie
from stepcast.ir.group import Group
from stepcast.ir.work import Attention, Collective, CollectiveKind, Elementwise, ElementwiseKind, Matmul, Work
from stepcast.ir.workload import Block, Layer, Op, Phase, Role, Stage, Variation, fold_units
from stepcast.units import MIB


class CutError(ValueError):
    """A program that cannot be cut so often."""


def places(captured: Captured) -> list[int]:
    """Where a cut may be: within a block that repeats only where no other place of it would send less.

    Elsewhere, where neither neighbour would send less.
    """
    sent = [part.sent_bytes for part in captured.parts]
    found: list[int] = []
    start = 0
    for block in captured.stage.body:
        length = len(block.layers)
        for first in range(start, start + length * block.repeat, length):
            inside = range(max(first, 1), first + length)
            least = min((sent[at] for at in inside if sent[at]), default=0)
            for at in inside:
                # A block of one layer has no inside; its neighbours say whether it is a good place.
                beside = sent[at - 1 : at + 2] if length == 1 else [least]
                if sent[at] and sent[at] <= min(each for each in beside if each):
                    found.append(at)
        start += length * block.repeat
    return found


def cuts(captured: Captured, seconds: Sequence[float], stages: int) -> list[int]:
    """The layers at which stages 1, 2, ... begin: the slowest stage is as fast as can be, then the bytes
    sent are least. *seconds* are those of each layer, forward and backward.
    """
    if stages == 1:
        return []
    borders = [0, *places(captured), len(captured.parts)]
    borders = sorted(set(borders))
    if len(borders) <= stages:
        raise CutError(f"{captured.name}: can be cut into {len(borders) - 1} stages at most, not {stages}")
    total = [0.0, *accumulate(seconds)]
    sent = [captured.parts[at].sent_bytes if 0 < at < len(captured.parts) else 0 for at in borders]
    count = len(borders)
    # best[i]: (slowest stage, bytes sent, the cut before) of the layers up to border i.
    best: list[tuple[float, int, list[int]] | None] = [None] * count
    best[0] = (0.0, 0, [])
    for stage in range(stages):
        following: list[tuple[float, int, list[int]] | None] = [None] * count
        last = stage == stages - 1
        for end in range(stage + 1, count):
            if last and end != count - 1:
                continue
            for begin in range(stage, end):
                before = best[begin]
                if before is None:
                    continue
                slowest = max(before[0], total[borders[end]] - total[borders[begin]])
                known = following[end]
                # To a thousandth: what is told apart by less is told apart by what it sends.
                moved = before[1] + (0 if last else sent[end])
                if known is None or (round(slowest, 12), moved) < (round(known[0], 12), known[1]):
                    following[end] = (slowest, moved, [*before[2], borders[end]])
        best = following
    found = best[count - 1]
    assert found is not None
    return found[2][:-1]


def pieces(total: int, begins: Sequence[int]) -> list[range]:
    """The layers of each stage."""
    return [range(first, last) for first, last in pairwise([0, *begins, total])]


# What data-parallel ranks of a captured program exchange: sums of gradients, or shares of everything.

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


# A captured program as one of several tensor-parallel ranks runs it.

WHOLE, SUMMED = "-", "+"
SIZES = "mnkb"


class SplitError(ValueError):
    """A program that cannot be split so often."""


def split_captured(captured: Captured, ways: int) -> Captured:
    """One rank's share: its products, heads and what lies between, with the sums over all ranks."""
    if ways == 1:
        return captured
    if not any(part.split for part in captured.parts):
        raise SplitError(
            f"{captured.name}: --tp: it has no linear maps whose results meet in another one alone, which "
            "could be split; --gpus, --pp and --sharding fsdp are possible"
        )

    @cache
    def share(layer: Layer, split: str) -> Layer:
        return _layer(layer, split, ways)

    body: list[Block] = []
    start = 0
    for block in captured.stage.body:
        length, repeats = len(block.layers), []
        for first in range(start, start + length * block.repeat, length):
            own = zip(block.layers, captured.parts[first : first + length], strict=True)
            repeats.append(tuple(share(layer, part.split) if part.split else layer for layer, part in own))
        alike = all(each == repeats[0] for each in repeats)
        body += [Block(repeats[0], block.repeat)] if alike else [Block(each) for each in repeats]
        start += length * block.repeat
    parts = tuple(_part(part, ways) for part in captured.parts)
    held = _ratio(parts, captured.parts, "parameter_bytes")
    kept = _ratio(parts, captured.parts, "kept_bytes")
    memory = captured.memory
    stage = replace(
        captured.stage,
        body=tuple(body),
        epilogue=tuple(updated_share(layer, held) for layer in captured.stage.epilogue),
    )
    return replace(
        captured,
        workload=replace(captured.workload, stages=(stage,)),
        parts=parts,
        ties=tuple(_tie(tie, ways) for tie in captured.ties),
        memory=replace(
            memory,
            parameters=round(memory.parameters * held),
            gradients=round(memory.gradients * held),
            optimizer=round(memory.optimizer * held),
            activations=round(memory.activations * kept),
            all_gradients=round(memory.all_gradients * held),
            update=round(memory.update * held),
        ),
    )


def _ratio(after: Sequence[LayerPart], before: Sequence[LayerPart], name: str) -> float:
    now, then = (sum(int(getattr(part, name)) for part in parts) for parts in (after, before))
    return now / max(1, then)


def _part(part: LayerPart, ways: int) -> LayerPart:
    def share(size: int, split: int) -> int:
        return size - split + split // ways

    left = share(part.parameter_bytes, part.split_bytes) / max(1, part.parameter_bytes)
    return replace(
        part,
        parameters=round(part.parameters * left),
        parameter_bytes=share(part.parameter_bytes, part.split_bytes),
        gradient_bytes=round(part.gradient_bytes * left),
        kept_bytes=share(part.kept_bytes, part.split_kept_bytes),
        forward_peak_bytes=share(part.forward_peak_bytes, part.split_forward_bytes),
        backward_peak_bytes=share(part.backward_peak_bytes, part.split_backward_bytes),
        split_bytes=0,
        split_kept_bytes=0,
        split_forward_bytes=0,
        split_backward_bytes=0,
        split="",
    )


def _tie(tie: Tie, ways: int) -> Tie:
    return replace(tie, size_bytes=tie.size_bytes - tie.split_bytes + tie.split_bytes // ways, split_bytes=0)


def _layer(layer: Layer, split: str, ways: int) -> Layer:
    phases = split.split("|")
    if len(phases) != len(Phase):
        raise SplitError(f"{layer.name}: {split!r} names {len(phases)} phases, not {len(Phase)}")
    forward, inputs, weights = (
        tuple(_ops(layer.ops(phase), letters.split(), layer.name, ways))
        for phase, letters in zip(Phase, phases, strict=True)
    )
    return replace(layer, forward=forward, input_gradient=inputs, weight_gradient=weights)


def _ops(ops: Sequence[Op], letters: Sequence[str], name: str, ways: int) -> list[Op]:
    if letters and len(letters) != len(ops):
        raise SplitError(f"{name}: {len(letters)} letters for {len(ops)} ops")
    found = []
    for op, letter in zip(ops, letters or [WHOLE] * len(ops), strict=True):
        found.append(replace(op, work=_share(op.work, letter.rstrip(SUMMED), name, ways)))
        if letter.endswith(SUMMED) and isinstance(op.work, Matmul):
            size = round(op.work.m * op.work.n * op.work.batch * op.work.dtype.bytes)
            found.append(Op(f"{op.name} tp all-reduce", Collective(CollectiveKind.ALL_REDUCE, size, Group.TP)))
    return found


def _share(work: Work, letter: str, name: str, ways: int) -> Work:
    if letter == WHOLE:
        return work
    match work:
        case Matmul() if letter in SIZES:
            return _product(work, letter, name, ways)
        case Attention():
            heads = _divided(work.heads, ways, f"{name}: heads, of which there are")
            return replace(work, heads=heads, kv_heads=_divided(work.kv_heads, ways, f"{name}: key heads,"))
        case Elementwise():
            rows, columns = (work.rows // ways, work.columns) if work.rows % ways == 0 else (
                work.rows, max(1, work.columns // ways))  # fmt: skip
            return replace(work, rows=rows, columns=columns, read_bytes=work.read_bytes / ways,
                           write_bytes=work.write_bytes / ways)  # fmt: skip
    return work


def _product(work: Matmul, letter: str, name: str, ways: int) -> Matmul:
    sizes = {"m": work.m, "n": work.n, "k": work.k, "b": work.batch}
    sizes[letter] = _divided(sizes[letter], ways, f"{name}: a size of a product,")
    return replace(work, m=sizes["m"], n=sizes["n"], k=sizes["k"], batch=sizes["b"])


def _divided(size: int, ways: int, what: str) -> int:
    if size % ways:
        raise SplitError(f"--tp {ways}: {what} {size}, cannot be split {ways} ways")
    return size // ways


def updated_share(layer: Layer, share: float) -> Layer:
    """The optimizer of a *share* of the parameters."""
    if share >= 1.0:
        return layer
    return replace(layer, forward=tuple(replace(op, work=_smaller(op.work, share)) for op in layer.forward))


def _smaller(work: Work, share: float) -> Work:
    if not isinstance(work, Elementwise):
        return work
    return replace(
        work,
        columns=max(1, round(work.columns * share)),
        read_bytes=work.read_bytes * share,
        write_bytes=work.write_bytes * share,
    )


def with_idle_weights(layer: Layer, share: float) -> Layer:
    """The optimizer where a *share* of the weights has no gradient, which AdamW's fused kernel takes longer
    over (``ElementwiseKind.IDLE_OPTIMIZER``).
    """
    ops: list[Op] = []
    for op in layer.forward:
        work = op.work
        if not isinstance(work, Elementwise) or work.kind is not ElementwiseKind.OPTIMIZER or not share:
            ops.append(op)
            continue
        kept = [replace(op, work=_smaller(work, 1.0 - share))] if share < 1.0 else []
        idle = _smaller(replace(work, kind=ElementwiseKind.IDLE_OPTIMIZER), share)
        kernels = 1 if kept else op.kernels
        ops += [*kept, replace(op, name=f"idle {op.name}", work=idle, kernels=kernels)]
    return replace(layer, forward=tuple(ops))


# Parameters that stages of a captured program share: each has a copy, and their gradients are summed.


def held_parts(captured: Captured, begins: Sequence[int]) -> list[LayerPart]:
    """The parts of *captured*; of a stage that shares parameters with one before, the first layer that reads
    them has a copy.
    """
    found = list(captured.parts)
    for tie in captured.ties:
        first = {bisect_right(begins, part): part for part in reversed(tie.parts)}
        for stage, part in first.items():
            if stage != bisect_right(begins, tie.parts[0]):
                own = found[part]
                found[part] = replace(
                    own,
                    parameter_bytes=own.parameter_bytes + tie.size_bytes,
                    gradient_bytes=own.gradient_bytes + tie.size_bytes,
                )
    return found


def summed(captured: Captured, begins: Sequence[int], ways: int) -> list[tuple[Layer, ...]]:
    """For each stage the sums over those that share parameters, each of which is split *ways*.

    The first and the last have a group of their own, as Megatron-LM's embedding group; others are summed
    over all stages.
    """
    last = len(begins)
    sizes: dict[Group, int] = {}
    for tie in captured.ties:
        stages = {bisect_right(begins, part) for part in tie.parts}
        if len(stages) > 1:
            group = Group.EMBEDDING if stages == {0, last} else Group.PP
            sizes[group] = sizes.get(group, 0) + tie.size_bytes // ways
    found: list[tuple[Layer, ...]] = []
    for stage in range(last + 1):
        taken = [group for group in sizes if group is Group.PP or stage in (0, last)]
        ops = tuple(
            Op(f"tied {group} all-reduce", Collective(CollectiveKind.ALL_REDUCE, sizes[group], group))
            for group in taken
        )
        found.append((Layer(str(Role.GRADIENTS), ops, role=Role.GRADIENTS),) if ops else ())
    return found
