"""Seconds of an eager block or training step on one GPU: kernels priced, then paced by the host."""

from collections.abc import Sequence
from typing import NamedTuple

from stepcast.cost.compute import Load, compute_price, step_load
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.dispatch import Dispatch, DispatchFit, elapsed_s
from stepcast.hardware.gpu import Gpu
from stepcast.validate.h200.eager_blocks import EagerBlock, Kernel, backward_kernels, forward_kernels
from stepcast.validate.h200.eager_models import EagerModel, backward_step, forward_step, optimizer_step

MEASURED_ROUNDS = 3  # the heat of a short piece depends on its own length: settle it in a few rounds


class BlockTime(NamedTuple):
    forward_s: float
    backward_s: float


class StepTime(NamedTuple):
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


def block_time(block: EagerBlock, gpu: Gpu, fit: ComputeFit, dispatch: DispatchFit) -> BlockTime:
    """One block called again and again by a measuring loop that lets gradients accumulate."""
    forward, backward = forward_kernels(block), backward_kernels(block, accumulate=True)
    duty = step_load((*forward, *backward), gpu, fit).duty
    forward_s, backward_s = priced(forward, gpu, fit, Load(1e-3, duty)), [0.0]
    for _ in range(MEASURED_ROUNDS):
        load = Load(max(1e-6, sum(forward_s) + sum(backward_s)), duty)
        forward_s, backward_s = priced(forward, gpu, fit, load), priced(backward, gpu, fit, load)
    forward_host = [dispatch.issue_s(work, backward=False) for work in forward]
    backward_host = [dispatch.issue_s(work, backward=True) for work in backward]
    return BlockTime(
        max(elapsed_s(forward_s, forward_host), dispatch.call_s + sum(forward_host)),
        elapsed_s(backward_s, backward_host),
    )


def step_time(
    model: EagerModel, gpu: Gpu, fit: ComputeFit, dispatch: DispatchFit, mode: Dispatch = Dispatch.EAGER
) -> StepTime:
    """One training step."""
    forward, backward, optimizer = forward_step(model), backward_step(model), optimizer_step(model)
    load = step_load((*forward, *backward, *optimizer), gpu, fit)
    forward_s, backward_s = priced(forward, gpu, fit, load), priced(backward, gpu, fit, load)
    optimizer_s = sum(priced(optimizer, gpu, fit, load))
    if mode is Dispatch.GRAPH:
        return StepTime(sum(forward_s), sum(backward_s), optimizer_s)
    checkpoint_s = dispatch.checkpoint_s * model.layers / len(forward) if model.recompute else 0.0
    forward_host = [dispatch.issue_s(work, backward=False) + checkpoint_s for work in forward]
    backward_host = [dispatch.issue_s(work, backward=True) for work in backward]
    return StepTime(elapsed_s(forward_s, forward_host), elapsed_s(backward_s, backward_host), optimizer_s)


def priced(kernels: Sequence[Kernel], gpu: Gpu, fit: ComputeFit, load: Load) -> list[float]:
    """Seconds of each kernel; equal kernels are priced once."""
    seconds = {work: compute_price(work, gpu, fit, load).seconds for work in set(kernels)}
    return [seconds[work] for work in kernels]
