"""An OptimusPrime step: its plan, and the seconds of every part on the host and the GPU, as a Program for the engine.

A plan has no measured times: it is all that a prediction may know of a run.

OptimusPrime runs a traced Hugging Face Llama in eager fp32, with tensor parallelism by DTensor. One Python thread
launches all work, so a pass takes the longer of launching and computing; with DTensor that is launching unless
micro-batches are large. Times follow from the machine, except for four named constants.

Each stage has a host lane and a device lane. Its order is that of opt_prime/schedule.py (1F1B): the gradient of a
micro-batch is sent only after the next activations have been received. A message begins when both sides have reached
it with their GPUs idle, because sizes and shapes are read back to the host. Data-parallel gradients are reduced only
during the backward of the last micro-batch: the earlier ones run under DistributedDataParallel's no_sync.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np

from stepcast.analyze.intervals import union_of
from stepcast.cost.collectives.choose import price
from stepcast.cost.collectives.route import route_of
from stepcast.hardware import Cluster, resolve
from stepcast.ir.layout import Layout
from stepcast.ir.measured import FIRST_WARM_STEP, RunLog
from stepcast.ir.model import Model
from stepcast.ir.tables import constants
from stepcast.ir.types import Size, dataclass, require
from stepcast.ir.work import CollectiveKind
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.program import CallTable, Program, ProgramBuilder, Times
from stepcast.simulation.segments import Segment, TimedOp

LAYER_MODULE = re.compile(r"model_layers_([0-9]{1,6})_(?:self_attn|mlp)_([a-z_]{1,20})")
# Leaf modules of one layer in the order of running; the log times each of them.
LAYER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "act_fn", "up_proj", "down_proj")
STAGE_0_TENSORS = 3  # the mask and rotary tables that stage 0 sends with its own tensors


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage: its modules in layers, and the weights of their matmuls."""

    layers: float
    weights: int  # of its layers, before tensor parallelism
    embeds: bool
    heads: bool

    def __post_init__(self) -> None:
        require(self.layers > 0 or self.heads or self.embeds, "a stage runs at least one module")


@dataclass(frozen=True, slots=True)
class OptimusPlan:
    """*sequence* is the padded length of a step's samples; *inside* means that stages end inside an MLP."""

    model: Model
    layout: Layout
    micro_batch: Size
    micro_batches: Size
    sequence: float
    stages: tuple[StagePlan, ...]
    inside: bool

    def __post_init__(self) -> None:
        require(self.sequence > 0, f"the sequence length must be above zero, not {self.sequence!r}")

    @property
    def tokens(self) -> float:
        """The tokens of one micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def head_weights(self) -> int:
        """The weights of the embedding or the output projection, which tensor parallelism does not shard."""
        return self.model.vocab * self.model.hidden

    def forward_messages(self, hop: int) -> int:
        """Return the point-to-point messages from stage *hop* to the next for one micro-batch.

        Source: opt_prime/comm.py of ai-computing/aicomp. A tuple is announced by its type and length, each
        tensor by its type, dimensions, shape and format, then sent; stage 0's tuple travels all the way.
        """
        own = 3 if self.inside else 2
        return 2 + 5 * (own + STAGE_0_TENSORS) + (2 + 5 * own if hop else 0)

    def backward_messages(self) -> int:
        """Return the messages of the gradients: one for each input, in a list in a tuple that ends with None."""
        return 2 + (2 + 5 * ((3 if self.inside else 2) + STAGE_0_TENSORS)) + 1

    def boundary_elements(self) -> float:
        """Return the values a stage sends for one micro-batch: the residual and its last layer's partial result."""
        width = self.model.hidden + (2 * self.model.ffn if self.inside else self.model.hidden)
        return self.tokens * width


def module_weights(model: Model) -> dict[str, int]:
    """Return the weights of each leaf module of a layer."""
    inner, shared = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sizes = (inner, shared, shared, inner, model.ffn, 0, model.ffn, model.ffn)
    return {name: model.hidden * size for name, size in zip(LAYER_MODULES, sizes, strict=True)}


def plan_of_log(log: RunLog, model: Model, sequences: Sequence[float]) -> OptimusPlan:
    """Return the plan of *log*; *sequences* are the padded lengths of steps 1, 2, ..."""
    if log.parameters and log.parameters != model.parameters:
        raise ValueError(f"{log.source}: has {log.parameters:,} parameters, but {model.name} has {model.parameters:,}")
    batch_s(log)  # says so where there is none
    indices = sorted({batch.index for batch in log.batches if batch.index >= FIRST_WARM_STEP})
    used = [sequences[index] for index in indices if index < len(sequences)]
    require(bool(used), f"{log.source}: no sequence length is known for its batches")
    return plan(model, log.layout, log.micro_batch, log.micro_batches, float(median(used)), log.stage_ends)


def batch_s(log: RunLog) -> float:
    """Return the median wall time of the batches of *log*."""
    batch = log.batch_time()
    if batch is None:
        raise ValueError(f"{log.source}: no batch after the first is printed; expected '| ms/batch' lines")
    return batch.seconds


def plan(
    model: Model, layout: Layout, micro_batch: int, micro_batches: int, sequence: float, stage_ends: Sequence[str] = ()
) -> OptimusPlan:
    """Return the plan with *stage_ends* as the log prints them, or with those that OptimusPrime would choose."""
    names = _module_names(model)
    ends = []
    for name in stage_ends:
        match = LAYER_MODULE.fullmatch(name)
        module = (int(match[1]), match[2]) if match else (-1, name)
        require(module in names, f"{name!r} is no module of the model; expected one like model_layers_1_mlp_up_proj")
        ends.append(names.index(module))
    ends = ends or default_cuts(model, layout.tp, layout.pp)
    require(len(ends) == layout.pp, f"{len(ends)} stage ends are printed, but PP is {layout.pp}")
    # The last stage always runs to the end of the model.
    bounds = [0, *(end + 1 for end in ends[:-1]), len(names)]
    weights = module_weights(model)
    stages = []
    for start, stop in pairwise(bounds):
        inside = [name for layer, name in names[start:stop] if layer >= 0]
        layers, stage_weights = len(inside) / len(LAYER_MODULES), sum(weights[name] for name in inside)
        stages.append(StagePlan(layers, stage_weights, embeds=start == 0, heads=stop == len(names)))
    cut_inside = any(names[stop - 1][1] != "down_proj" for stop in bounds[1:-1])
    return OptimusPlan(model, layout, micro_batch, micro_batches, sequence, tuple(stages), cut_inside)


def default_cuts(model: Model, tp: int, pp: int) -> list[int]:
    """Return the last module of each stage: after every (modules // pp) of them.

    With tensor parallelism it is the first end of a layer behind that.
    """
    names = _module_names(model)
    segment, count = len(names) // pp, 0
    cuts: list[int] = []
    for position, (_, name) in enumerate(names):
        count += 1
        is_full = count == segment if tp == 1 else count > segment and name == "down_proj"
        if is_full and len(cuts) < pp - 1:
            cuts.append(position)
            count = 0
    require(len(cuts) == pp - 1, f"{model.name} cannot be cut into {pp} stages")
    return [*cuts, len(names) - 1]


def _module_names(model: Model) -> list[tuple[int, str]]:
    """Return layer and name of every timed module; layer -1 for the embedding and the output projection."""
    layers = [(layer, name) for layer in range(model.layers) for name in LAYER_MODULES]
    return [(-1, "embed_tokens"), *layers, (-1, "lm_head")]


FP32_BYTES = 4
MEMORY_EFFICIENCY = 0.85  # share of the peak bandwidth that element-wise kernels reach


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a cluster that determine the cost of a step."""

    matrix_flops: float  # fp32
    memory_bytes_per_s: float
    launch_s: float  # the shortest a kernel takes
    all_reduce_s: Callable[[range, float], float]  # from ranks and bytes
    hop_bytes_per_s: Callable[[int, int], float]  # between two ranks

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

    def hop_bytes_per_s(rank: int, other: int) -> float:
        path = resolve(cluster, [rank, other])
        link = path.intra or path.inter
        assert link is not None
        return link.effective_bytes_per_s

    rates = gpu.matrix_peak_flops("fp32"), gpu.memory_bandwidth_bytes_per_s, gpu.launch_overhead_s
    return Machine(*rates, all_reduce_s, hop_bytes_per_s)


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


class PieceWork(NamedTuple):
    """A half of a layer, the embedding, or the output projection with the loss, on one GPU."""

    forward: PassWork
    first_backward: PassWork  # of a step
    optimizer: PassWork
    adding_s: float  # of later backwards, which add to gradients

    @property
    def backward(self) -> PassWork:
        first = self.first_backward
        return first._replace(device_s=first.device_s | {"accumulation": self.adding_s})


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


def stage_work(
    plan: OptimusPlan, stage: StagePlan, machine: Machine, constants: Constants
) -> dict[str, list[PassWork]]:
    """Return the pieces of each pass of *stage*, layers in halves so that the GPU starts soon after the host does."""
    halves = round(2 * stage.layers)
    layers = [_layer_work(plan, stage, machine, constants, halves)] * halves if halves else []
    embedding, head = _end_works(plan, machine, constants)
    first, last = [embedding] * stage.embeds, [head] * stage.heads
    pieces = [*first, *layers, *last]
    passes = {
        "F": [piece.forward for piece in pieces],
        "B first": [piece.first_backward for piece in reversed(pieces)],
        "B": [piece.backward for piece in reversed(pieces)],
        "end": [piece.optimizer for piece in (*layers, *first, *last)],
    }
    return passes | {"B last": passes["B" if plan.micro_batches > 1 else "B first"]}


def _update_s(plan: OptimusPlan, machine: Machine, weights: float) -> float:
    passes = COUNTED["adam_passes"] + (COUNTED["clip_passes"] if plan.layout.tp == 1 else 0)
    return machine.move_s(passes * weights)


def _layer_work(plan: OptimusPlan, stage: StagePlan, machine: Machine, constants: Constants, pieces: int) -> PieceWork:
    """Return one of the *pieces* of a stage's layers."""
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
    return PieceWork(
        PassWork(forward_host_s * slowest * share, forward),
        PassWork(backward_host_s * slowest * share, backward | {"accumulation": 0.0}, weights),
        PassWork(update_host_s * share, {"optimizer": _update_s(plan, machine, weights)}),
        machine.move_s(weights * COUNTED["accumulation_bytes"] / FP32_BYTES),
    )


def _end_works(plan: OptimusPlan, machine: Machine, constants: Constants) -> tuple[PieceWork, PieceWork]:
    """Return the embedding, and the output projection with the loss."""
    move_s, weights, logits = machine.move_s, plan.head_weights, plan.tokens * plan.model.vocab
    head_s = matmul_s(weights, plan.tokens, machine, constants.matmul_efficiency)
    loss_passes, gradient_passes = COUNTED["loss_passes"]
    forward_host_s, backward_host_s, update_host_s = (work * constants.host_op_s for work in COUNTED["end_work"])
    update = PassWork(update_host_s, {"optimizer": _update_s(plan, machine, weights)})
    adding_s = move_s(weights * COUNTED["accumulation_bytes"] / FP32_BYTES)
    embedding = PassWork(2 * forward_host_s, {"unhooked": move_s(5 * plan.tokens * plan.model.hidden)})
    zeroing = PassWork(backward_host_s, {"unhooked": move_s(weights)}, weights)  # of the dense gradient
    head = PassWork(forward_host_s, {"compute": head_s, "unhooked": move_s(loss_passes * logits)})
    gradient = {"unhooked": move_s(gradient_passes * logits), "compute": constants.backward_factor * head_s}
    return (
        PieceWork(embedding, zeroing, update, adding_s),
        PieceWork(head, PassWork(backward_host_s, gradient, weights), update, adding_s),
    )


# ---- the step as a program -----------------------------------------------------------------------------------

HOST, DEVICE, NETWORK = 0, 1, 2
LANES = ("host", "device", "network")
# Work of the device or a message; "host" and "bubble" are the rest.
WORKING = ("compute", "unhooked", "accumulation", "tensor", "data", "messages", "optimizer", "fixed")
PARTS = (*WORKING, "host", "bubble")
# A side has come to a message when its host and its device are idle.
POST = Segment.of("post", [TimedOp("", 0.0, HOST, lanes=(DEVICE,))], lanes=3, outputs=(0,))
MESSAGES = ("f", "b", "labels")  # activations, gradients, and the labels of all micro-batches
LABEL_MESSAGES = 5  # of one micro-batch's labels, from the first stage to the last


SegmentKey = tuple[str, int]  # a pass and its stage, a message and its hop, or "start" or "post" and 0
StagePass = tuple[str, int, int]  # a pass or a message, its micro-batch, and the stage or the hop


@dataclass(frozen=True, slots=True)
class OptimusStageTime:
    """Seconds of one stage by part; they sum to the step."""

    stage: int
    parts_s: dict[str, float]

    @property
    def busy_s(self) -> float:
        return sum(seconds for part, seconds in self.parts_s.items() if part != "bubble")


@dataclass(frozen=True, slots=True)
class PredictedStep:
    step_s: float
    stages: tuple[OptimusStageTime, ...]

    @property
    def busiest(self) -> OptimusStageTime:
        """The stage that waits least, which sets the pace."""
        return max(self.stages, key=lambda stage: stage.busy_s)


def predict_step(plan: OptimusPlan, machine: Machine, constants: Constants) -> PredictedStep:
    """Predict the step and its time by part."""
    program = build_program(plan, machine, constants)
    run = simulate(program)
    times, step = task_times(run), run.makespan_s
    parts = [_parts(program, times, stage, step) for stage in range(plan.layout.pp)]
    return PredictedStep(step, tuple(OptimusStageTime(stage, parts_s) for stage, parts_s in enumerate(parts)))


def step_s(plan: OptimusPlan, machine: Machine, constants: Constants) -> float:
    """Return the time of the step alone, as a fit needs it."""
    return simulate(build_program(plan, machine, constants)).makespan_s


def build_program(plan: OptimusPlan, machine: Machine, constants: Constants) -> Program:
    """Return the program of a step."""
    segments = _segments(plan, machine, constants)
    table, keys = _call_table(plan.layout.pp, plan.micro_batches)
    return Program(LANES, tuple(segments[key] for key in keys), table)


def _segments(plan: OptimusPlan, machine: Machine, constants: Constants) -> dict[SegmentKey, Segment]:
    """Return the passes of all stages, their start, and the messages between them."""
    start = [TimedOp("fixed", constants.fixed_s, HOST), TimedOp("", 0.0, DEVICE, after=(0,))]
    segments = {("start", 0): Segment.of("start", start, lanes=3), ("post", 0): POST}
    for number, stage in enumerate(plan.stages):
        for name, works in stage_work(plan, stage, machine, constants).items():
            ops = _ops(plan, machine, works, name == "B last" and plan.layout.dp > 1)
            segments[name, number] = Segment.of(name, ops, lanes=3)
    for hop in range(plan.layout.pp - 1):
        ranks = plan.layout.tp * plan.layout.dp
        tensors_s = FP32_BYTES * plan.boundary_elements() / machine.hop_bytes_per_s(hop * ranks, (hop + 1) * ranks)
        count = plan.forward_messages(hop)
        # From the second hop on, stage 0's tensors are sent too.
        segments["f", hop] = _message(count * constants.message_s + (2 if hop else 1) * tensors_s)
        segments["b", hop] = _message(plan.backward_messages() * constants.message_s + tensors_s)
    segments["labels", 0] = _message(LABEL_MESSAGES * plan.micro_batches * constants.message_s)
    return segments


def _ops(plan: OptimusPlan, machine: Machine, works: Sequence[PassWork], reduces: bool = False) -> list[TimedOp]:
    """Return the ops of pieces that are launched, then run; the last backward *reduces* gradients between replicas.

    The gradients of a piece are copied to a bucket that is reduced during the next pieces; all are copied back after
    the last one.
    """
    ops: list[TimedOp] = []
    for work in works:
        ops.append(TimedOp("host", work.host_s, HOST))
        launched = len(ops) - 1
        parts = [part for part in WORKING if part in work.device_s]
        ops += [TimedOp(part, work.device_s[part], DEVICE, after=(launched,)) for part in parts]
        if reduces:
            ranks = range(0, plan.layout.tp * plan.layout.dp, plan.layout.tp)
            ops.append(TimedOp("data", machine.move_s(BUCKET_PASSES * work.gradients), DEVICE))
            seconds = machine.all_reduce_s(ranks, work.gradients * FP32_BYTES)
            ops.append(TimedOp("data", seconds, NETWORK, lanes=(DEVICE,)))
    if reduces:
        back_s = machine.move_s(BUCKET_PASSES * sum(work.gradients for work in works))
        ops.append(TimedOp("data", back_s, DEVICE, lanes=(NETWORK,)))
    return ops


def _message(seconds: float) -> Segment:
    ops = [TimedOp("messages", seconds, HOST, inputs=(0,)), TimedOp("", 0.0, DEVICE, after=(0,))]
    return Segment.of("message", ops, lanes=3, inputs=1)


@lru_cache(maxsize=16)
def _call_table(stages: int, micro_batches: int) -> tuple[CallTable, tuple[SegmentKey, ...]]:
    """Return the calls of a step, which do not depend on its times, and the key of each segment in them."""
    builder = ProgramBuilder(LANES, stages)
    parts: dict[SegmentKey, Segment] = {}  # numbered by the builder in the order of their first calls
    waiting: dict[StagePass, tuple[int, int]] = {}

    def call(stage: int, kind: str, number: int) -> int:
        empty = POST if kind == "post" else Segment.of(kind, [], lanes=3, inputs=int(kind in MESSAGES))
        return builder.call(stage, parts.setdefault((kind, number), empty))

    for stage in range(stages):
        call(stage, "start", 0)
        for key in _order(stage, stages, micro_batches):
            kind, _, number = key
            if kind not in MESSAGES:
                call(stage, kind, number)
                continue
            posted, message = call(stage, "post", 0), call(stage, kind, number)
            if key in waiting:
                other_posted, other_message = waiting.pop(key)
                builder.bind(message, 0, (other_posted, 0))
                builder.bind(other_message, 0, (posted, 0))
            else:
                waiting[key] = posted, message
    assert not waiting, waiting
    return builder.program().table, tuple(parts)


def _order(stage: int, stages: int, micro_batches: int) -> Iterator[StagePass]:
    """Yield the passes of a stage in a step and its messages "f" and "b" with the stage before and after it.

    Source: Schedule1F1B of opt_prime/schedule.py, aicomp.
    """
    last = stages - 1
    if stages > 1 and stage in (0, last):
        yield "labels", 0, 0
    warm_up = min(last - stage, micro_batches)

    def before(kind: str, batch: int) -> list[StagePass]:
        return [(kind, batch, stage - 1)] if stage else []

    def after(kind: str, batch: int) -> list[StagePass]:
        return [(kind, batch, stage)] if stage < last else []

    delayed: list[StagePass] = []
    for batch in range(-warm_up, micro_batches):
        ahead = batch + warm_up
        if ahead < micro_batches:
            yield from (*before("f", ahead), *delayed, ("F", ahead, stage), *after("f", ahead))
        else:
            yield from delayed
        if batch >= 0:
            kind = "B last" if batch == micro_batches - 1 else "B" if batch else "B first"
            yield from (*after("b", batch), (kind, batch, stage))
            delayed = before("b", batch)
    yield from delayed
    yield "end", 0, stage


def _parts(program: Program, times: Times, stage: int, step: float) -> dict[str, float]:
    """Return device time and messages by name, the host if only it is busy, and the rest as bubble."""
    calls = slice(program.table.rank_start[stage], program.table.rank_start[stage + 1])
    tasks = slice(program.task_start[calls.start], program.task_start[calls.stop])
    start, end = times.start_s[tasks], times.end_s[tasks]
    named = np.array([name for number in program.segment[calls].tolist() for name in program.segments[number].names])
    lane = program.task_lanes()[tasks]
    seconds = dict.fromkeys(PARTS, 0.0)
    shown = (lane == DEVICE) | np.isin(named, ("messages", "fixed"))
    for part in WORKING:
        seconds[part] = float((end - start)[shown & (named == part)].sum())
    working = union_of(start[shown], end[shown])
    # Overlapped reductions cost nothing; the rest delays the stage.
    reducing = union_of(start[lane == NETWORK], end[lane == NETWORK])
    seconds["data"] += reducing.without(working).length_s
    launching = union_of(start[named == "host"], end[named == "host"])
    seconds["host"] = launching.without(working.union(reducing)).length_s
    seconds["bubble"] = max(0.0, step - sum(seconds.values()))
    return seconds
