"""A captured program as one of several tensor-parallel ranks runs it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from stepcast.ir.captured import Captured, LayerPart, Tie
from stepcast.ir.group import Group
from stepcast.ir.work import Attention, Collective, CollectiveKind, Elementwise, ElementwiseKind, Matmul, Work
from stepcast.ir.workload import Block, Layer, Op, Phase

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
