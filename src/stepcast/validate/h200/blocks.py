"""Seconds of one transformer block on one GPU, called again and again by a measuring loop.

Its kernels are those of a generated step between embedding and head, without what ranks say to each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stepcast.cost.compute import Load, step_load
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.dispatch import DispatchFit, elapsed_s
from stepcast.generate.workload import generate
from stepcast.hardware.gpu import Gpu
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Compute
from stepcast.ir.workload import Op
from stepcast.validate.priced import priced

MEASURED_ROUNDS = 3  # the heat of a short piece depends on its own length: settle it in a few rounds


class BlockTime(NamedTuple):
    forward_s: float
    backward_s: float


class Kernels(NamedTuple):
    """Kernels with how many each stands for."""

    works: tuple[Compute, ...]
    counts: tuple[int, ...]

    def issue_s(self, dispatch: DispatchFit, backward: bool) -> list[float]:
        pairs = zip(self.works, self.counts, strict=True)
        return [dispatch.issue_s(work, backward) * count for work, count in pairs]


def block_time(
    model: Model,
    strategy: Strategy,
    framework: Framework,
    gpu: Gpu,
    fit: ComputeFit,
    dispatch: DispatchFit,
) -> BlockTime:
    """Forward and backward of a *model* of one layer, without its ends."""
    layers = [
        layer
        for layer in generate(model, strategy, framework).stages[0].body_layers()
        if layer.name.startswith(("attention", "mlp"))
    ]
    forward = _kernels([op for layer in layers for op in layer.forward])
    backward = _kernels(
        [op for layer in reversed(layers) for op in (*layer.input_gradient, *layer.weight_gradient)]
    )
    duty = step_load((*forward.works, *backward.works), gpu, fit).duty
    forward_s, backward_s = priced(forward.works, gpu, fit, Load(1e-3, duty)), [0.0]
    for _ in range(MEASURED_ROUNDS):
        load = Load(max(1e-6, sum(forward_s) + sum(backward_s)), duty)
        forward_s, backward_s = priced(forward.works, gpu, fit, load), priced(backward.works, gpu, fit, load)
    forward_host, backward_host = forward.issue_s(dispatch, False), backward.issue_s(dispatch, True)
    return BlockTime(
        max(elapsed_s(forward_s, forward_host), dispatch.call_s + sum(forward_host)),
        elapsed_s(backward_s, backward_host),
    )


def _kernels(ops: Sequence[Op]) -> Kernels:
    found = [(op.work, op.kernels) for op in ops if isinstance(op.work, Compute)]
    return Kernels(tuple(work for work, _ in found), tuple(count for _, count in found))
