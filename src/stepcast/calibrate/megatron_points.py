"""Measured and predicted computation of Megatron-LM runs, stage by stage and phase by phase."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepcast.analyze.megatron.analysis import MegatronAnalysis
from stepcast.analyze.recording import BlockKind
from stepcast.cost.compute import compute_price, step_load, work_class
from stepcast.cost.fits import default_fit
from stepcast.generate.workload import generate
from stepcast.hardware import Gpu
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, Biases, Norm, NormKind, Position, PositionKind
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Attention, Compute, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Phase, Workload
from stepcast.models.catalog import load_model

# Traces do not include the number of heads; this width is the default from hidden 1,024 on, the other below.
HEAD_DIM, SMALL_HEAD_DIM, SMALL_HIDDEN = 128, 64, 1024
PHASES = {BlockKind.FORWARD: (Phase.FORWARD,), BlockKind.BACKWARD: (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)}


@dataclass(frozen=True, slots=True)
class ComputePoint:
    """The computation of one stage in one micro-batch, forward or backward."""

    run: str
    stage: int
    phase: BlockKind
    dtype: DType
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class RunPoints:
    """One run: its points, the classes of operators that they are made of, and what had to be assumed."""

    points: tuple[ComputePoint, ...]
    classes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def compute_points(analysis: MegatronAnalysis, source: str, gpu: Gpu, model_name: str | None) -> RunPoints:
    """Return the points of one run; none, with a warning, where its model is not known."""
    facts = analysis.recording.facts
    run = os.path.basename(source.rstrip("/")) or source
    assumptions: list[str] = []
    model = load_model(model_name) if model_name else _infer_model(facts, assumptions)
    for name in ("hidden", "layers"):
        traced, own = facts.get(name), getattr(model, name, None)
        if model_name and traced is not None and traced != own:
            raise ValueError(f"{source}: was traced with {name} {traced}, but {model_name} has {own}")
    missing = [name for name in ("dtype", "micro_batch", "seq") if facts.get(name) is None]
    measured = _measured_seconds(analysis)
    problem = ""
    if model is None:
        problem = "the trace does not tell its model; say which with --model"
    elif missing:
        problem = f"the trace does not tell its {' and '.join(missing)}"
    elif not measured:
        problem = "no rank that is not slow has both a forward and a backward"
    if problem or model is None:
        return RunPoints((), warnings=(f"{run}: computation left out: {problem}",))
    dtype = DType(str(facts["dtype"]))
    workload = _build_workload(analysis, model, dtype)
    if dtype is DType.FP32 and _beyond_peak(workload, measured, gpu):
        dtype = DType.TF32
        workload = _build_workload(analysis, model, dtype)
        assumptions.append("fp32 matmuls run as tf32: they are faster than the fp32 peak allows")
    fused = "fused (flash)" if dtype in (DType.FP16, DType.BF16) else "unfused"
    assumptions.append(f"{dtype} attention is {fused}")
    points = [
        ComputePoint(run, stage, phase, dtype, _predicted_s(workload, stage, phase, gpu), seconds)
        for (stage, phase), seconds in measured.items()
    ]
    classes = {work_class(work) for stage in workload.stages for work in _works(stage.body_layers(), Phase)}
    return RunPoints(tuple(points), tuple(sorted(classes)), tuple(assumptions), tuple(analysis.result.warnings))


def _infer_model(facts: Mapping[str, object], assumptions: list[str]) -> Model | None:
    """Return the model that the reader inferred from the sizes of tensors and gradients."""
    if any(facts.get(name) is None for name in ("hidden", "ffn", "layers", "vocab", "seq", "dtype")):
        return None
    hidden, ffn, layers, vocab, seq = (int(str(facts[name])) for name in ("hidden", "ffn", "layers", "vocab", "seq"))
    gated = bool(facts.get("gated_mlp"))
    width = HEAD_DIM if hidden >= SMALL_HIDDEN and hidden % HEAD_DIM == 0 else SMALL_HEAD_DIM
    if hidden % width:
        return None
    assumptions.append(f"heads are {width} wide")
    learnt = bool(facts.get("learnt_positions"))
    return Model(
        "traced",
        layers=layers,
        hidden=hidden,
        heads=hidden // width,
        kv_heads=hidden // width,
        head_dim=width,
        ffn=ffn,
        vocab=vocab,
        max_seq=seq,
        gated=gated,
        activation=Activation.SILU if gated else Activation.GELU,
        norm=Norm() if gated else Norm(NormKind.LAYER, bias=True),
        biases=Biases() if gated else Biases(qkv=True, attention_output=True, mlp=True),
        position=Position(PositionKind.LEARNED, seq) if learnt else Position(),
    )


def _build_workload(analysis: MegatronAnalysis, model: Model, dtype: DType) -> Workload:
    recording = analysis.recording
    facts, layout = recording.facts, recording.layout
    layers_on = facts.get("layers_on")
    batch = int(str(facts["micro_batch"]))
    strategy = Strategy(
        layout,
        batch,
        batch * layout.dp * max(1, recording.micro_batches),
        int(str(facts["seq"])),
        stage_layers=tuple(layers_on[stage] for stage in range(layout.pp))
        if isinstance(layers_on, dict) and len(layers_on) == layout.pp
        else (),
        precision=dtype,
    )
    framework = Framework(flash_attention=dtype in (DType.FP16, DType.BF16))
    return generate(model, strategy, framework)


def _measured_seconds(analysis: MegatronAnalysis) -> dict[tuple[int, BlockKind], float]:
    """Return the seconds per micro-batch by stage and phase: the median of the ranks that are not slow.

    Stages that lack a phase are left out: their trace is cut.
    """
    recording = analysis.recording
    slow = {straggler.rank for straggler in analysis.result.stragglers}
    seconds_of: dict[tuple[int, BlockKind], list[float]] = {}
    for record in recording.ranks:
        for phase in PHASES:
            seconds = recording.compute_s(record, phase) / max(1, recording.micro_batches)
            if record.rank not in slow and seconds > 0:
                seconds_of.setdefault((record.stage, phase), []).append(seconds)
    complete = [stage for stage, _ in seconds_of if all((stage, phase) in seconds_of for phase in PHASES)]
    return {key: median(seconds) for key, seconds in sorted(seconds_of.items()) if key[0] in complete}


def _works(layers: Sequence[Layer], phases: Iterable[Phase]) -> list[Compute]:
    return [op.work for layer in layers for phase in phases for op in layer.ops(phase) if isinstance(op.work, Compute)]


def _predicted_s(workload: Workload, stage: int, phase: BlockKind, gpu: Gpu) -> float:
    fit = default_fit()
    middle = workload.stages[len(workload.stages) // 2]
    load = step_load(_works(middle.body_layers(), Phase), gpu, fit)
    works = _works(workload.stages[stage].body_layers(), PHASES[phase])
    return sum(compute_price(work, gpu, fit, load).seconds for work in works)


def _beyond_peak(workload: Workload, measured: Mapping[tuple[int, BlockKind], float], gpu: Gpu) -> bool:
    """Return whether more was multiplied in the measured time than the GPU can multiply in fp32."""
    flops = sum(
        work.flops
        for stage, phase in measured
        for work in _works(workload.stages[stage].body_layers(), PHASES[phase])
        if isinstance(work, Matmul | GroupedMatmul | Attention)
    )
    return flops / sum(measured.values()) > gpu.matrix_peak_flops("fp32")


@dataclass(frozen=True, slots=True)
class FactorFit:
    """One factor over some points: errors without it, with it, and on runs or stages left out."""

    factor: float
    points: int
    before: float
    after: float
    left_out: float | None
    spread: float

    @property
    def helps(self) -> bool:
        """Return whether points that a factor has not seen come closer with it; True for a single point."""
        return self.left_out is None or self.left_out < self.before


def fit_factor(points: Sequence[ComputePoint]) -> FactorFit:
    """Fit measured over predicted as a mean logarithm; runs are left out in turn, or stages of a single run."""
    factor = _factor(points)
    several = len({point.run for point in points}) > 1
    keys = [(point.run if several else point.stage) for point in points]
    errors = []
    for key in sorted(set(keys), key=str):
        rest = [point for point, own in zip(points, keys, strict=True) if own != key]
        held = [point for point, own in zip(points, keys, strict=True) if own == key]
        if rest:
            errors += _errors(held, _factor(rest))
    after = _errors(points, factor)
    return FactorFit(
        factor,
        len(points),
        _mean(_errors(points, 1.0)),
        _mean(after),
        _mean(errors) if errors else None,
        max(errors or after),
    )


def _factor(points: Sequence[ComputePoint]) -> float:
    return math.exp(_mean([math.log(point.measured_s / point.predicted_s) for point in points]))


def _errors(points: Sequence[ComputePoint], factor: float) -> list[float]:
    return [abs(factor * point.predicted_s / point.measured_s - 1) for point in points]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
