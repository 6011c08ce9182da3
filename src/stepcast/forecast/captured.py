"""Predictions of a captured program on one GPU or many: data and tensor parallel, sharded, cut into stages."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

from stepcast.cost.calibration import Calibration
from stepcast.cost.memory.stages import WORKSPACE_BYTES, StageMemory, held_in_flight
from stepcast.cost.price import Price
from stepcast.cost.pricing import ComputePrice
from stepcast.forecast import splitting
from stepcast.forecast.options import DEFAULTS, Options
from stepcast.forecast.predict import apply_host_pace, compute_pricer, issue_s_of, memory_facts
from stepcast.forecast.prediction import Prediction
from stepcast.forecast.simulate import simulate
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import load_fit
from stepcast.ir.captured import Captured, LayerPart, ShardUnit, count_flops
from stepcast.ir.framework import MEGATRON_CORE, Execution, Framework, Kernels, Modules
from stepcast.ir.layout import Layout
from stepcast.ir.schedules import Pipeline, ScheduleKind
from stepcast.ir.step import StepReport, Throughput
from stepcast.ir.types import dataclass
from stepcast.ir.work import Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Stage, Workload, fold_units, unfold_blocks
from stepcast.simulation.messages import Send
from stepcast.units import TFLOPS, format_percent

# The pace of the hosts that captured programs were measured on; seconds from the end of an operator to the next one.
STEPS = load_fit("captured", ("[steps]",))["steps"]
FITTED_PACE, KERNEL_GAP_S = STEPS["fitted_pace"], STEPS["kernel_gap_s"]
DDP = "ddp"  # fact of a script that wraps its model so: whether gradients are "copies" of its buckets or "views"
LEAST_UNMEASURED = 0.01  # of the GPU's time: less is not worth a warning


class CapturedSharding(StrEnum):
    NONE = "none"  # every rank has all states; gradients are summed
    FSDP = "fsdp"  # ranks share parameters, gradients and states


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a captured program. One micro-batch is what it computes for its batch."""

    dp: int = 1
    pp: int = 1
    micro_batches: int = 1
    sharding: CapturedSharding = CapturedSharding.NONE
    schedule: str | None = None
    tp: int = 1
    zero_gradients: float = 0.0  # of all weights, the share whose gradients are zero
    # Gradients that DDP sums together; 0: one bucket for all of a stage, None: DDP's own sizes.
    bucket_bytes: float | None = None
    sums_every_pass: bool = False  # DDP without ``no_sync`` sums gradients in every pass of gradient accumulation

    @property
    def ways(self) -> int:
        """Ranks that share parameters, gradients and states."""
        return self.dp if self.sharding is CapturedSharding.FSDP else 1

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp, dp=self.dp, pp=self.pp)


def framework_of(captured: Captured) -> Framework:
    """Return the framework whose host issues what was captured."""
    kernels = Kernels.COMPILED if captured.compiled else Kernels.PLAIN
    # Ops whose results the program reads are marked; elsewhere the host goes on.
    return replace(
        MEGATRON_CORE, name="captured", modules=Modules.CAPTURED, kernels=kernels, execution=Execution.EAGER,
        runs_ahead=True,
    )  # fmt: skip


def predict_captured(
    captured: Captured,
    cluster: Cluster,
    spread: Spread = Spread(),  # noqa: B008  # frozen
    calibration: Calibration | None = None,
    options: Options = DEFAULTS,
) -> Prediction:
    """Predict one step of *captured* on *cluster*, distributed as *spread* says.

    Of *options*, schedule, host and messages follow from the program and from *spread*.
    """
    framework, unsplit = framework_of(captured), captured
    captured = splitting.split_captured(captured, spread.tp)
    idle = spread.zero_gradients == 1
    compute = add_gaps(compute_pricer(captured.workload, cluster, calibration, framework.attention, idle))
    workload, begins = spread_out(captured, spread, compute)
    options = replace(
        options,
        schedule=spread.schedule,
        issue_s=issue_s_of(framework),
        ahead=framework.runs_ahead,
        contention=True,
        send=Send.EAGER,
    )
    prediction = simulate(workload, cluster, apply_host_pace(options, calibration, FITTED_PACE), compute)
    finish = partial(_complete_report, unsplit, captured, cluster, spread, begins, compute)
    return replace(prediction, memory=stage_memory(captured, spread, begins, cluster), finish=finish)


def add_gaps(compute: ComputePrice) -> ComputePrice:
    """Return prices of operators that include the GPU's time until it starts the next one."""

    @cache
    def price(work: Compute) -> Price:
        own = compute(work)
        times = {name: getattr(own, name) + KERNEL_GAP_S for name in ("seconds", "low_s", "high_s")}
        return replace(own, **times)

    return price


def share_unmeasured(captured: Captured, compute: ComputePrice) -> dict[str, float]:
    """Return the share of the GPU's time in operators that no measured class describes, by name, the largest first:
    they are priced by the bytes that they move.
    """
    total_s, seconds = 0.0, defaultdict[str, float](float)
    for layer, count in captured.stage.counted_layers(1):
        for op in layer.all_ops:
            if isinstance(op.work, Compute):
                op_s = count * compute(op.work).seconds
                total_s += op_s
                if isinstance(op.work, Elementwise) and op.work.kind is ElementwiseKind.OTHER and op.work.elements > 1:
                    seconds[op.name.partition(" ")[0]] += op_s
    return {name: seconds[name] / total_s for name in sorted(seconds, key=lambda name: -seconds[name])}


def spread_out(captured: Captured, spread: Spread, compute: ComputePrice) -> tuple[Workload, list[int]]:
    """Return the workload of *spread*, and the layers at which its later stages begin."""
    layers = unfold_blocks(captured.stage.body)
    seconds = {
        id(layer): sum(compute(op.work).seconds for op in layer.all_ops if isinstance(op.work, Compute))
        for layer in layers
    }
    begins = splitting.cut_stages(captured, [seconds[id(layer)] for layer in layers], spread.pp)
    parts = splitting.copy_tied_parameters(captured, begins)
    sums = splitting.sum_tied_gradients(captured, begins, spread.ways)
    ranges = splitting.stage_ranges(len(layers), begins)
    stages = [
        _build_stage(captured, layers, parts, own, spread, added) for own, added in zip(ranges, sums, strict=True)
    ]
    sent = max((captured.parts[index].sent_bytes for index in begins), default=0)
    workload = replace(
        captured.workload,
        stages=tuple(stages),
        layout=spread.layout,
        micro_batches=spread.micro_batches,
        boundary_bytes=sent if spread.pp > 1 else None,
    )
    return workload, begins


def _build_stage(
    captured: Captured,
    layers: Sequence[Layer],
    parts: Sequence[LayerPart],
    own: range,
    spread: Spread,
    sums: tuple[Layer, ...],
) -> Stage:
    layers, parts = layers[own.start : own.stop], parts[own.start : own.stop]
    share = _parameter_share(captured, parts) / spread.ways
    updates = [
        splitting.split_idle_weights(splitting.shrink_update(layer, share), spread.zero_gradients)
        for layer in captured.stage.epilogue
    ]
    epilogue = (*sums, *updates)
    if spread.dp == 1:
        body = tuple(fold_units([(layer,) for layer in layers]))
        return Stage(captured.stage.body if spread.pp == 1 else body, epilogue=epilogue)
    if spread.sharding is CapturedSharding.FSDP:
        return splitting.shard_parameters(layers, find_units(captured, own, parts), epilogue)
    varied = 1 if spread.sums_every_pass else spread.micro_batches
    return splitting.reduce_gradients(layers, parts, epilogue, varied, spread.bucket_bytes)


def _parameter_share(captured: Captured, parts: Sequence[LayerPart]) -> float:
    total = sum(part.parameter_bytes for part in captured.parts)
    return sum(part.parameter_bytes for part in parts) / max(1, total)


def find_units(captured: Captured, own: range, parts: Sequence[LayerPart]) -> list[ShardUnit]:
    """Return the layers of a stage whose parameters are gathered together: those that the script shards together;
    else each repeat of a block, and what is between.
    """
    if captured.units and len(own) == len(captured.parts):
        return list(captured.units)
    # The layers of each repeat of a block, and those between.
    borders, start = {own.start, own.stop}, 0
    for block in captured.stage.body:
        length = len(block.layers)
        if block.repeat > 1:
            borders |= {start + number * length for number in range(block.repeat + 1)}
        start += length * block.repeat
    units = []
    for first, stop in pairwise(sorted(border - own.start for border in borders if own.start <= border <= own.stop)):
        gathered, reduced = (sum(getattr(part, name) for part in parts[first:stop]) for name in
                             ("parameter_bytes", "gradient_bytes"))  # fmt: skip
        if gathered:
            units.append(ShardUnit(first, stop - 1, gathered, reduced))
    return units


class MemoryMoment(NamedTuple):
    """Bytes of one rank at a moment of the step, beyond its parameters and optimizer states."""

    gradients: float
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.temporary


def stage_memory(
    captured: Captured, spread: Spread, begins: Sequence[int], cluster: Cluster
) -> tuple[StageMemory, ...]:
    """Return what each stage holds at its fullest moment."""
    memory, framework = captured.memory, framework_of(captured)
    overhead = framework.overhead
    layers = [layer for layer, _ in captured.stage.counted_layers(1)]
    # cuBLAS has a buffer in each thread that multiplies: that of the program, and that of autograd.
    threads = [layer.forward for layer in layers], [layer.input_gradient + layer.weight_gradient for layer in layers]
    multiplying = sum(any(isinstance(op.work, Matmul | GroupedMatmul) for ops in own for op in ops) for own in threads)
    buffers = WORKSPACE_BYTES * multiplying / len(threads)
    held_by = splitting.copy_tied_parameters(captured, begins)
    # The micro-batches whose activations each stage holds at once.
    schedule = ScheduleKind(spread.schedule or ScheduleKind.ONE_F_ONE_B)
    held = held_in_flight(schedule, Pipeline(spread.pp, 1, spread.micro_batches))
    in_flight = [1] if spread.pp == 1 else [sum(chunks) for chunks in held]
    stages = []
    for stage, own in enumerate(splitting.stage_ranges(len(captured.parts), begins)):
        parts = held_by[own.start : own.stop]
        share = _parameter_share(captured, parts)
        buckets, has_views = _bucket_bytes(captured, parts, spread)
        moments = [MemoryMoment(memory.gradients, memory.activations, memory.temporary)]
        is_traced = spread.layout.gpus == spread.dp and spread.ways == spread.micro_batches == 1
        if not is_traced or has_views:
            units = find_units(captured, own, parts)
            moments = moments * is_traced
            is_first = "accumulation" not in dict(captured.facts)
            moments += _list_moments(parts, units, spread, in_flight[stage], memory.update * share, is_first)
        if has_views and (spread.micro_batches == 1 or spread.sums_every_pass):
            moments = [moment._replace(gradients=0.0) for moment in moments]
        moment = max(moments, key=lambda moment: moment.total)
        states = (memory.parameters + memory.optimizer) * share / spread.ways
        stages.append(
            StageMemory(
                stage=stage,
                parameters=memory.parameters * share / spread.ways,
                gradients=moment.gradients + buckets,
                optimizer=memory.optimizer * share / spread.ways,
                activations=moment.activations,
                temporary=moment.temporary + buffers,
                fragmentation=memory.unused / max(1, memory.peak) * (states + moment.total) + buckets,
                communication=overhead.buffer_bytes if spread.layout.gpus > 1 else 0.0,
                framework=overhead.context_bytes,
                capacity=cluster.gpu.memory_bytes,
            )
        )
    return tuple(stages)


def _bucket_bytes(captured: Captured, parts: Sequence[LayerPart], spread: Spread) -> tuple[float, bool]:
    """Return the bytes of DDP's buckets, and whether gradients are views into them.

    Otherwise all gradients are there twice (torch/csrc/distributed/c10d/reducer.cpp), as are those of passes that sum
    none, which become views when the last pass has added to them. Buckets stay from step to step.
    The first step has one bucket for all of them; when the second makes the others, the thread that watches NCCL still
    holds it (for up to 0.1 s), so that it remains reserved as often as not.
    """
    facts = dict(captured.facts)
    if spread.sharding is CapturedSharding.FSDP or (spread.dp == 1 and DDP not in facts):
        return 0.0, False
    return sum(part.reduced_bytes or part.gradient_bytes for part in parts), facts.get(DDP) == "views"


def _list_moments(
    parts: Sequence[LayerPart],
    units: Sequence[ShardUnit],
    spread: Spread,
    in_flight: int,
    update: float,
    is_first: bool,
) -> Iterator[MemoryMoment]:
    """Yield the moments that can be the fullest: each layer's forward and backward, and the update.

    A later pass of gradient accumulation computes the gradients of a layer before it adds them to those it has. If the
    captured pass *is_first*, its backward peaks do not contain them yet.

    Sharding splits gradients among ranks once their unit's backward has ended; until then they are complete,
    as are the weights of the unit at work and of the one gathered ahead of it. Saved activations and what a
    layer needs while it runs stay as they are.
    """
    saved = sum(part.kept_bytes for part in parts)
    every = sum(part.gradient_bytes for part in parts) / spread.ways
    accumulates = spread.micro_batches > 1
    gathered, fresh = 0.0, [0.0] * len(parts)  # complete weights; complete gradients while a layer's backward runs
    if spread.ways > 1:
        gathered = 2.0 * max((unit.gathered_bytes for unit in units if unit.is_freed), default=0)
        gathered += sum(unit.gathered_bytes for unit in units if not unit.is_freed)
        for unit in units:
            for index in range(unit.first, unit.last + 1):
                fresh[index] += unit.reduced_bytes
    elif accumulates and is_first:
        fresh = [float(part.gradient_bytes) for part in parts]
    before, reduced = 0.0, every  # saved by layers before; gradients of this layer and later ones
    for part, complete in zip(parts, fresh, strict=True):
        held = (in_flight - 1) * saved + before
        gradients = every if accumulates else 0.0
        yield _peak(gradients, held, part.kept_bytes, part.forward_peak_bytes, gathered)
        gradients = every if accumulates else reduced
        yield _peak(gradients, held, part.kept_bytes, part.backward_peak_bytes, gathered + complete)
        before += part.kept_bytes
        reduced -= part.gradient_bytes / spread.ways
    yield MemoryMoment(every, 0.0, update / spread.ways)


def _peak(gradients: float, held: float, saved: int, peak: int, others: float) -> MemoryMoment:
    """Return the moment at which a layer that saves *saved* bytes needs *peak*."""
    return MemoryMoment(gradients, held + min(saved, peak), max(0, peak - saved) + others)


def _complete_report(
    captured: Captured,
    split: Captured,
    cluster: Cluster,
    spread: Spread,
    begins: Sequence[int],
    compute: ComputePrice,
    report: StepReport,
    stages: Sequence[StageMemory],
) -> StepReport:
    """Return *report* with what follows from the captured program; *split* is the share of one rank."""
    unmeasured = share_unmeasured(split, compute)
    batches = spread.micro_batches * spread.dp
    every = captured.flops()
    model_flops = every - captured.recomputed_flops
    at_peak_s = sum(flops / cluster.gpu.matrix_peak_flops(name) for name, flops in count_flops(captured.stage).items())
    at_peak_s *= model_flops / max(1.0, every)
    per_s = batches / report.step_s / spread.layout.gpus
    tokens = captured.tokens * batches / report.step_s
    layers = unfold_blocks(captured.stage.body)
    run = {
        "model": captured.name,
        "framework": "captured",
        "parameters": captured.parameters,
        "micro_batch": captured.batch,
        "global_batch": captured.batch * batches,
        "precision": str(captured.precision),
        "begins": [layers[index].name for index in begins],
        **dict(captured.facts),
        "unmeasured": {"share": sum(unmeasured.values()), "operators": unmeasured},
        "seq": captured.tokens // captured.batch,
    }
    return replace(
        report,
        throughput=Throughput(tokens, model_flops * per_s / TFLOPS, at_peak_s * per_s),
        run={**report.run, **run},
        memory_bytes=memory_facts(stages),
        warnings=(*report.warnings, *_describe_unmeasured(unmeasured)),
    )


def _describe_unmeasured(unmeasured: dict[str, float]) -> list[str]:
    total = sum(unmeasured.values())
    if total < LEAST_UNMEASURED:
        return []
    names = ", ".join(f"{name} {format_percent(share)}" for name, share in list(unmeasured.items())[:3])
    known_by = f"of the GPU's time is in operators that were not measured, estimated by their bytes: {names}"
    return [f"{format_percent(total)} {known_by}"]
