"""Seconds of every part of an OptimusPrime step, on the host and on the GPU.

OptimusPrime runs a traced Hugging Face Llama in eager fp32, with tensor parallelism by DTensor. One Python thread
launches all work, so a pass takes the longer of launching and computing; with DTensor that is launching unless
micro-batches are large. Times follow from the machine, except for four named constants.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from stepcast.cost.collectives.choose import price
from stepcast.cost.collectives.route import route_of
from stepcast.hardware import Cluster, resolve
from stepcast.ir.dataclass import dataclass, require
from stepcast.ir.tables import constants
from stepcast.ir.work import CollectiveKind
from stepcast.optimus.plan import OptimusPlan, StagePlan

FP32_BYTES = 4
MEMORY_EFFICIENCY = 0.85  # share of the peak bandwidth that element-wise kernels reach


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a cluster that determine the cost of a step."""

    name: str
    matrix_flops: float  # fp32
    memory_bytes_per_s: float
    launch_s: float  # the shortest a kernel takes
    all_reduce_s: Callable[[range, float], float]  # from ranks and bytes
    hop_bytes_per_s: Callable[[int, int], float]  # between two ranks

    def __post_init__(self) -> None:
        require(self.matrix_flops > 0 and self.memory_bytes_per_s > 0, "rates must be above zero")

    def move_s(self, values: float) -> float:
        """Return the seconds to read or write that many fp32 values."""
        return FP32_BYTES * values / (MEMORY_EFFICIENCY * self.memory_bytes_per_s)


def machine_of(cluster: Cluster) -> Machine:
    """Return the machine of *cluster*; OptimusPrime computes in fp32 without TF32."""
    gpu = cluster.node.gpu

    @lru_cache(maxsize=4096)
    def all_reduce_s(ranks: range, size_bytes: float) -> float:
        if len(ranks) < 2:
            return 0.0
        path = resolve(cluster, ranks, active_per_node=min(len(ranks), cluster.domain_gpus))
        return float(price(CollectiveKind.ALL_REDUCE, max(1, round(size_bytes)), route_of(path, cluster)).seconds)

    def hop_bytes_per_s(one: int, other: int) -> float:
        path = resolve(cluster, [one, other])
        link = path.intra or path.inter
        assert link is not None
        return link.effective_bytes_per_s

    rates = gpu.matrix_peak_flops("fp32"), gpu.memory_bandwidth_bytes_per_s, gpu.launch_overhead_s
    return Machine(cluster.name, *rates, all_reduce_s, hop_bytes_per_s)


# Work of the host in plain operators, passes over tensors and bytes of one layer and of the ends of a model.
COUNTED = constants("optimus")
BUCKET_PASSES: int = COUNTED["bucket_passes"]  # of gradients, copied to their bucket or back


@dataclass(frozen=True, slots=True)
class Constants:
    """Calibrated constants: the first from timed forward passes, the other four from the rest of the wall time."""

    matmul_efficiency: float  # of the fp32 peak, forward
    backward_factor: float  # backward over forward time of the matmuls
    message_s: float  # of one point-to-point message, with its host synchronisation on both sides
    host_op_s: float  # of one plain operator on the host
    fixed_s: float  # per step: data, allocation after the cache was emptied, printing

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"{name} must be above zero, not {value!r}")


class PassWork(NamedTuple):
    """A piece of a pass: the work of the host before the GPU can begin, then that of the GPU, by part."""

    host_s: float
    device_s: dict[str, float]
    gradients: float = 0.0  # parameters whose gradients are ready after this


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage: a forward, the first backward of a step, any later one, the optimizer."""

    forward: tuple[PassWork, ...]
    first_backward: tuple[PassWork, ...]
    backward: tuple[PassWork, ...]
    optimizer: tuple[PassWork, ...]


def matmul_s(weights: float, tokens: float, machine: Machine, efficiency: float) -> float:
    """Return the time of *tokens* rows through matrices of *weights*; few rows also wait for the weights."""
    compute_s = 2 * weights * tokens / (efficiency * machine.matrix_flops)
    return math.hypot(compute_s, machine.move_s(weights))


def efficiency_of(seconds: float, weights: float, tokens: float, machine: Machine) -> float | None:
    """Return the efficiency for which `matmul_s` gives *seconds*; None if reading the weights takes as long."""
    compute_s = math.sqrt(max(0.0, seconds**2 - machine.move_s(weights) ** 2))
    return 2 * weights * tokens / (compute_s * machine.matrix_flops) if compute_s else None


def slowest_of(ranks: int) -> float:
    """Return the mean time of the slowest of *ranks* hosts over that of one: Blom's expected maximum (1958)."""
    if ranks == 1:
        return 1.0
    return 1 + float(COUNTED["host_scatter"]) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def stage_work(plan: OptimusPlan, stage: StagePlan, machine: Machine, constants: Constants) -> StageWork:
    """Return the work of *stage*, layers in halves so that the GPU starts soon after the host does."""
    halves = round(2 * stage.layers)
    forward: list[PassWork] = []
    backwards: list[list[PassWork]] = [[], []]  # the first of a step, and later ones, which accumulate gradients
    optimizer: list[PassWork] = []
    if halves:
        own = _layer_work(plan, stage, machine, constants, halves)
        forward, *backwards, optimizer = ([work] * halves for work in own)
    ends = _EndWork(plan, machine, constants)
    if stage.embeds:
        forward.insert(0, ends.embedding)
    if stage.heads:
        forward.append(ends.head)
    for number, backward in enumerate(backwards):
        if stage.embeds:
            backward.append(ends.embedding_backward[number])
        if stage.heads:
            backward.insert(0, ends.head_backward[number])
    optimizer += [ends.optimizer] * (stage.embeds + stage.heads)
    first_backward, later_backward = map(tuple, backwards)
    return StageWork(tuple(forward), first_backward, later_backward, tuple(optimizer))


def _update_s(plan: OptimusPlan, machine: Machine, weights: float) -> float:
    passes = COUNTED["adam_passes"] + (COUNTED["clip_passes"] if plan.layout.tp == 1 else 0)
    return machine.move_s(passes * weights)


def _layer_work(
    plan: OptimusPlan, stage: StagePlan, machine: Machine, constants: Constants, pieces: int
) -> tuple[PassWork, PassWork, PassWork, PassWork]:
    """Return forward, first and later backward and optimizer of one of the *pieces* of a stage's layers on one GPU."""
    tp, tokens, model, factor = plan.layout.tp, plan.tokens, plan.model, constants.backward_factor
    share, weights = stage.layers / pieces, stage.weights / plan.layout.tp / pieces

    def product_s(values: float) -> float:
        return matmul_s(values, tokens, machine, constants.matmul_efficiency)

    slowest = slowest_of(tp)
    forward_host_s, backward_host_s, update_host_s = (
        operators * constants.host_op_s for operators in COUNTED["plain_work" if tp == 1 else "sharded_work"]
    )
    layer_s = product_s(stage.weights / stage.layers / tp)
    activation_s = machine.move_s(2 * tokens * model.ffn / tp)
    scores = plan.micro_batch * model.heads / tp * plan.sequence**2
    passes = COUNTED["whole_passes"] + COUNTED["sharded_passes"] / tp
    launched_s = COUNTED["untimed_kernels"] * machine.launch_s
    untimed_s = max(machine.move_s(passes * tokens * model.hidden + 2 * scores), launched_s)
    reduce_s = machine.all_reduce_s(range(tp), tokens * model.hidden * FP32_BYTES) if tp > 1 else 0.0
    forward = {
        "compute": (layer_s + activation_s) * share,
        "unhooked": untimed_s * share,
        # The sums after the output and the down projection are used at once: nothing hides them.
        "tensor": 2 * reduce_s * share,
    }
    # Of the reductions, those of q, k, v, gate and up overlap the next of them.
    widths = (model.kv_heads * model.head_dim, model.heads * model.head_dim, model.ffn)
    hidden_s = [factor * product_s(model.hidden * width / tp) for width in widths]
    backward = {
        "compute": (factor * layer_s + 2 * activation_s) * share,
        "unhooked": COUNTED["backward_passes"] * untimed_s * share,
        "tensor": (2 * reduce_s + sum(max(0.0, reduce_s - behind_s) for behind_s in hidden_s)) * share,
    }
    first, later = (
        {**backward, "accumulation": machine.move_s(accumulated * COUNTED["accumulation_bytes"] / FP32_BYTES)}
        for accumulated in (0.0, weights)
    )
    return (
        PassWork(forward_host_s * slowest * share, forward),
        PassWork(backward_host_s * slowest * share, first, weights),
        PassWork(backward_host_s * slowest * share, later, weights),
        PassWork(update_host_s * share, {"optimizer": _update_s(plan, machine, weights)}),
    )


class _EndWork:
    """The embedding, and the output projection with the loss, on one GPU; backward the first time and later."""

    def __init__(self, plan: OptimusPlan, machine: Machine, constants: Constants) -> None:
        move_s, weights, logits = machine.move_s, plan.head_weights, plan.tokens * plan.model.vocab
        head_s = matmul_s(weights, plan.tokens, machine, constants.matmul_efficiency)
        loss_passes, gradient_passes = COUNTED["loss_passes"]
        forward_host_s, backward_host_s, update_host_s = (work * constants.host_op_s for work in COUNTED["end_work"])
        accumulation: dict[str, float] = {"accumulation": move_s(weights * COUNTED["accumulation_bytes"] / FP32_BYTES)}
        self.embedding = PassWork(2 * forward_host_s, {"unhooked": move_s(5 * plan.tokens * plan.model.hidden)})
        self.head = PassWork(forward_host_s, {"compute": head_s, "unhooked": move_s(loss_passes * logits)})
        embedding = {"unhooked": move_s(weights)}  # the dense gradient is zeroed
        head = {"unhooked": move_s(gradient_passes * logits), "compute": constants.backward_factor * head_s}
        self.embedding_backward, self.head_backward = (
            [PassWork(backward_host_s, parts, weights), PassWork(backward_host_s, parts | accumulation, weights)]
            for parts in (embedding, head)
        )
        self.optimizer = PassWork(update_host_s, {"optimizer": _update_s(plan, machine, weights)})
