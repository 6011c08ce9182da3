"""A captured program on a GPU, or on many: data and tensor parallel, sharded, cut into pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from stepcast.cost.calibration import Calibration
from stepcast.cost.memory.stages import WORKSPACE_BYTES, StageMemory
from stepcast.cost.pricing import ComputePrice
from stepcast.forecast.cuts import cuts, pieces
from stepcast.forecast.exchanges import reduced, sharded
from stepcast.forecast.issue import issue_s_of
from stepcast.forecast.options import Engine, Options
from stepcast.forecast.predict import compute_pricer, memory_facts
from stepcast.forecast.simulate import Prediction, simulate
from stepcast.forecast.splits import split_captured, updated_share, with_idle_weights
from stepcast.forecast.ties import held_parts, summed
from stepcast.hardware import Cluster
from stepcast.ir.captured import Captured, Part
from stepcast.ir.framework import MEGATRON_CORE, Execution, Framework, Kernels, Modules
from stepcast.ir.layout import Layout
from stepcast.ir.step import StepReport, Throughput
from stepcast.ir.work import Compute
from stepcast.ir.workload import Layer, Stage, Workload, folded, written
from stepcast.simulation.messages import Send
from stepcast.units import TFLOPS


class CapturedSharding(StrEnum):
    NONE = "none"  # every rank has all states; gradients are summed
    FSDP = "fsdp"  # ranks share parameters, gradients and states


@dataclass(frozen=True, slots=True)
class Spread:
    """How a captured program is spread. What it computes for its batch is one micro-batch."""

    dp: int = 1
    pp: int = 1
    micro_batches: int = 1
    sharding: CapturedSharding = CapturedSharding.NONE
    schedule: str | None = None
    tp: int = 1
    zero_gradients: float = 0.0  # of all weights, the share whose gradients are zero

    @property
    def ways(self) -> int:
        """Ranks that share parameters, gradients and states."""
        return self.dp if self.sharding is CapturedSharding.FSDP else 1

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp, dp=self.dp, pp=self.pp)


def framework_of(captured: Captured) -> Framework:
    """How the host issues what was captured."""
    modules = Modules.TRANSFORMERS if "transformers" in dict(captured.facts) else Modules.TORCH
    kernels = Kernels.COMPILED if captured.compiled else Kernels.PLAIN
    # Where the program looks at a result, the op that makes it says so; elsewhere the host goes on.
    return replace(
        MEGATRON_CORE,
        name="captured",
        modules=modules,
        kernels=kernels,
        execution=Execution.EAGER,
        runs_ahead=True,
    )


def predict_captured(
    captured: Captured,
    cluster: Cluster,
    spread: Spread = Spread(),  # noqa: B008  # frozen
    calibration: Calibration | None = None,
    engine: Engine = Engine.FAST,
) -> Prediction:
    """One step of *captured* on *cluster*, spread so."""
    framework, whole = framework_of(captured), captured
    captured = split_captured(captured, spread.tp)
    idle = spread.zero_gradients == 1
    compute = compute_pricer(captured.workload, cluster, calibration, framework.attention, idle)
    workload, begins = spread_out(captured, spread, compute)
    issue_s = issue_s_of(framework)
    options = Options(
        schedule=spread.schedule,
        issue_s=issue_s,
        ahead=framework.runs_ahead,
        contention=True,
        send=Send.EAGER,
        engine=engine,
    )
    prediction = simulate(workload, cluster, options, compute)
    memory = stage_memory(captured, spread, begins, cluster)
    return replace(
        prediction,
        memory=memory,
        finish=lambda report, stages: _finished(report, stages, whole, cluster, spread, begins),
    )


def spread_out(captured: Captured, spread: Spread, compute: ComputePrice) -> tuple[Workload, list[int]]:
    """The workload of *spread*, and the layers at which its later stages begin."""
    layers = written(captured.stage.body)
    price = {id(layer): _seconds(layer, compute) for layer in layers}
    begins = cuts(captured, [price[id(layer)] for layer in layers], spread.pp)
    held, sums = held_parts(captured, begins), summed(captured, begins, spread.ways)
    stages = []
    for own, added in zip(pieces(len(layers), begins), sums, strict=True):
        units, parts = _units(captured, own), held[own.start : own.stop]
        stages.append(_stage(captured, [layers[at] for at in own], parts, units, spread, added))
    sent = max((captured.parts[at].sent_bytes for at in begins), default=0)
    workload = replace(
        captured.workload,
        stages=tuple(stages),
        layout=spread.layout,
        micro_batches=spread.micro_batches,
        boundary_bytes=sent if spread.pp > 1 else None,
    )
    return workload, begins


def _stage(
    captured: Captured,
    layers: Sequence[Layer],
    parts: Sequence[Part],
    units: Sequence[range],
    spread: Spread,
    sums: tuple[Layer, ...],
) -> Stage:
    share = sum(part.parameter_bytes for part in parts) / max(1, captured_bytes(captured))
    updates = [
        with_idle_weights(updated_share(layer, share / spread.ways), spread.zero_gradients)
        for layer in captured.stage.epilogue
    ]
    epilogue = (*sums, *updates)
    if spread.dp == 1:
        body = tuple(folded([(layer,) for layer in layers]))
        return Stage(captured.stage.body if spread.pp == 1 else body, epilogue=epilogue)
    if spread.sharding is CapturedSharding.FSDP:
        return sharded(layers, parts, units, epilogue, spread.micro_batches)
    return reduced(layers, parts, epilogue, spread.micro_batches)


def captured_bytes(captured: Captured) -> int:
    return sum(part.parameter_bytes for part in captured.parts)


def _units(captured: Captured, own: range) -> list[range]:
    """Layers whose parameters are gathered together: each repeat of a block, and what lies between."""
    borders, start = {own.start, own.stop}, 0
    for block in captured.stage.body:
        length = len(block.layers)
        if block.repeat > 1:
            borders |= {start + at * length for at in range(block.repeat + 1)}
        start += length * block.repeat
    inside = sorted(each for each in borders if own.start <= each <= own.stop)
    return [range(first - own.start, last - own.start) for first, last in pairwise(inside)]


def _seconds(layer: Layer, compute: ComputePrice) -> float:
    return sum(compute(op.work).seconds for op in layer.all_ops if isinstance(op.work, Compute))


def stage_memory(
    captured: Captured, spread: Spread, begins: Sequence[int], cluster: Cluster
) -> tuple[StageMemory, ...]:
    """What each stage holds: its share of the states, and the activations of micro-batches in flight."""
    whole, memory, overhead = (
        max(1, captured_bytes(captured)),
        captured.memory,
        framework_of(captured).overhead,
    )
    kept = max(1, sum(part.kept_bytes for part in captured.parts))
    ways, held_by = spread.ways, held_parts(captured, begins)
    found = []
    for stage, own in enumerate(pieces(len(captured.parts), begins)):
        parts = held_by[own.start : own.stop]
        share = sum(part.parameter_bytes for part in parts) / whole
        held = sum(part.kept_bytes for part in parts) / kept
        alone = spread.pp == 1 and spread.micro_batches == 1
        flying = 1 if spread.pp == 1 else min(spread.micro_batches, spread.pp - stage)
        gradients = memory.gradients if alone else memory.all_gradients * share
        last = stage == spread.pp - 1
        gathered = 0.0
        if ways > 1:
            units = [
                sum(p.parameter_bytes for p in parts[unit.start : unit.stop])
                for unit in _units(captured, own)
            ]
            gathered = 2.0 * max(units, default=0)
        found.append(
            StageMemory(
                stage=stage,
                parameters=memory.parameters * share / ways,
                gradients=gradients / ways,
                optimizer=memory.optimizer * share / ways,
                activations=memory.activations * held * flying,
                temporary=(memory.temporary if last else 0) + gathered + WORKSPACE_BYTES,
                fragmentation=overhead.fragmentation * memory.activations * held * flying,
                communication=overhead.buffer_bytes if spread.layout.gpus > 1 else 0.0,
                framework=overhead.context_bytes,
                capacity=cluster.gpu.memory_bytes,
            )
        )
    return tuple(found)


def _finished(
    report: StepReport,
    stages: Sequence[StageMemory],
    captured: Captured,
    cluster: Cluster,
    spread: Spread,
    begins: Sequence[int],
) -> StepReport:
    batches = spread.micro_batches * spread.dp
    flops = captured.flops() * batches / report.step_s / spread.layout.gpus
    tokens = captured.tokens * batches / report.step_s
    peak = cluster.gpu.matrix_peak_flops(str(captured.precision))
    layers = written(captured.stage.body)
    run = {
        "model": captured.name,
        "framework": "captured",
        "parameters": captured.parameters,
        "micro_batch": captured.batch,
        "global_batch": captured.batch * batches,
        "precision": str(captured.precision),
        "begins": [layers[at].name for at in begins],
        **dict(captured.facts),
    }
    return replace(
        report,
        throughput=Throughput(tokens, flops / TFLOPS, flops / peak),
        run={**report.run, **run},
        memory_bytes=memory_facts(stages),
    )
