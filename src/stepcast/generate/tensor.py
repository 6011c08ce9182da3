"""Tensor parallelism: what stands around the split matmuls.

Megatron-LM (Shoeybi et al. 2019, section 3): the first matmul of a pair is split by columns, the second by
rows; the forward all-reduces after the second, the backward after the first. With sequence parallelism
(Korthikanti et al. 2022, section 4.2.2) each all-reduce becomes a reduce-scatter and an all-gather, and the
backward gathers the input of the first matmul again for its weight gradient.
"""

from dataclasses import replace

from stepcast.generate.parts import (
    QUANTISED,
    Linear,
    Ops,
    cast,
    collective,
    dropped,
    dropped_gradient,
    layer,
    residual,
    waiting,
)
from stepcast.generate.sizes import Sizes
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Kernels
from stepcast.ir.group import Group
from stepcast.ir.strategy import TrainingKind
from stepcast.ir.work import CollectiveKind
from stepcast.ir.workload import Layer, Role

# Into which Transformer Engine cuts a product whose result is summed beside it (module/base.py,
# initialize_ub: num_splits of the method "pipeline").
PARTS = 4
GATHER, SCATTER, REDUCE = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


def tensor_bytes(sizes: Sizes, width: int | None = None) -> int:
    """The buffer of a tensor-parallel collective: the tokens of a micro-batch, *width* (hidden) wide."""
    return sizes.tokens * (width or sizes.model.hidden) * sizes.element


def _gathers_quantised(sizes: Sizes, linear: Linear) -> bool:
    """Whether operands of *linear* are quantised before they are gathered, as Transformer Engine does: its
    buffers of gathers are in fp8 then (module/base.py, initialize_ub). Adapters of LoRA take them wide.
    """
    engine = sizes.framework.kernels is Kernels.FUSED and sizes.strategy.training is not TrainingKind.LORA
    return engine and sizes.strategy.sequence_parallel and linear.dtype in QUANTISED


def gathered_bytes(sizes: Sizes, linear: Linear, width: int | None = None, gradient: bool = False) -> int:
    """What is gathered for *linear*. Scales of blocks hold along rows or along columns: of a *gradient* both
    are needed, of an input one forward and the other backward.
    """
    size = tensor_bytes(sizes, width)
    if not _gathers_quantised(sizes, linear):
        return size
    copies = 2 if gradient and linear.dtype is not DType.FP8 else 1
    return round(size / sizes.element * linear.dtype.bytes * copies)


def column_layer(
    sizes: Sizes,
    role: Role,
    linears: tuple[Linear, ...],
    then: Ops = (),
    then_gradient: Ops = (),
    width: int | None = None,
) -> Layer:
    """Matmuls split by columns on inputs of *width*, and what follows them on this rank (*then*)."""
    if _gathers_quantised(sizes, linears[0]):
        linears = tuple(replace(linear, gathered=sizes.tp) for linear in linears)
    forward = tuple(op for linear in linears for op in linear.forward(sizes))
    gradients = tuple(op for linear in linears for op in linear.input_gradient(sizes))
    weights = tuple(op for linear in linears for op in linear.weight_gradient(sizes))
    if sizes.tp == 1:
        return layer(role, forward + then, then_gradient + gradients, weights)
    size = tensor_bytes(sizes, width)
    beside = _beside(sizes)
    if not sizes.strategy.sequence_parallel:
        reduce = collective(f"{role} tp all-reduce", REDUCE, size, Group.TP, blocking=not beside)
        return layer(role, forward + then, (*then_gradient, *gradients, reduce), weights)
    overlap = sizes.strategy.overlap.tensor
    whole = gathered_bytes(sizes, linears[0], width)
    gather = collective(f"{role} tp all-gather", GATHER, whole, Group.TP, blocking=not overlap)
    again = collective(f"{role} tp all-gather again", GATHER, whole, Group.TP, blocking=not beside)
    scatter = collective(f"{role} tp reduce-scatter", SCATTER, size, Group.TP, blocking=not beside)
    return layer(
        role,
        (gather, *forward, *waiting(then, (gather.name,) if overlap else ())),
        (*then_gradient, again, *gradients, scatter),
        waiting(weights, (again.name,) if beside else ()),
    )


def _beside(sizes: Sizes) -> bool:
    """Whether the backward's collectives run beside the gradients' matmuls, as in Megatron-LM."""
    return sizes.fused and sizes.strategy.overlap.tensor_gradients


def column_waits(sizes: Sizes, role: Role) -> tuple[str, ...]:
    """What the backward before a column layer waits for."""
    if sizes.tp == 1 or not _beside(sizes):
        return ()
    kind = "reduce-scatter" if sizes.strategy.sequence_parallel else "all-reduce"
    return (f"{role} tp {kind}",)


def row_layer(sizes: Sizes, role: Role, linear: Linear, ends: bool = True) -> Layer:
    """A matmul split by rows, the sum over ranks, and the residual where the branch *ends* here.

    Overlapped, its gradient is gathered beside the matmul that takes it (Transformer Engine's ring exchange
    of proj_dgrad and fc2_dgrad, module/base.py, initialize_ub), but for adapters of LoRA, which take it too.
    """
    sequence = sizes.strategy.sequence_parallel
    if _gathers_quantised(sizes, linear):
        linear = replace(linear, gathered_gradient=sizes.tp)
    forward = linear.forward(sizes)
    gradient = linear.input_gradient(sizes)
    weight = linear.weight_gradient(sizes)
    hidden = sizes.model.hidden
    tail: Ops = (residual(sizes, sizes.outer_tokens, hidden),) if ends else ()
    if ends and sizes.framework.dropout and sizes.by_operation:
        tail = (dropped(sizes, "dropout", sizes.outer_tokens, hidden), *tail)
    if ends and sizes.framework.dropout:
        gradient = (dropped_gradient(sizes, "dropout gradient", sizes.outer_tokens, hidden), *gradient)
    if ends and sizes.casts:
        # The stream's gradient is as wide as the stream, the branch's as narrow as the branch.
        narrow = cast(sizes, "branch gradient cast", sizes.outer_tokens, hidden, sizes.stream, sizes.stored)
        gradient = (narrow, *gradient)
    if sizes.tp == 1:
        return layer(role, forward + tail, gradient, weight)
    size = tensor_bytes(sizes)
    overlap = sizes.strategy.overlap.tensor
    kind, word = (SCATTER, "reduce-scatter") if sequence else (REDUCE, "all-reduce")
    reduce = collective(f"{role} tp {word}", kind, size, Group.TP, blocking=not overlap)
    if overlap:
        # The sum of one part runs beside the matmul of the next, so it is issued with the matmul; that of the
        # last part has no matmul beside it.
        last = collective(f"{role} tp {word} of the last part", kind, size // PARTS, Group.TP)
        reduce = collective(reduce.name, kind, size - size // PARTS, Group.TP, blocking=False)
        forward = (reduce, *forward, *waiting((last,), (reduce.name,)))
    else:
        forward = (*forward, reduce)
    if sequence:
        whole = gathered_bytes(sizes, linear, gradient=True)
        beside = overlap and sizes.strategy.training is not TrainingKind.LORA
        gather = collective(f"{role} tp all-gather", GATHER, whole, Group.TP, blocking=not beside)
        gradient = (gather, *gradient)
        weight = waiting(weight, (gather.name,) if beside else ())
    return layer(role, forward + tail, gradient, weight)
