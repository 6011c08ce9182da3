"""Named constants from Megatron-LM traces: how fast stages compute, and what links between ranks reach."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean, median

import numpy as np

from stepcast.analyze.megatron.analysis import MeetingTraffic, MegatronAnalysis
from stepcast.analyze.recording import BlockKind
from stepcast.calibrate.classes import FittedClass, overall_errors
from stepcast.cost.calibration import Correction
from stepcast.cost.collectives.sweep import reached_busbw
from stepcast.cost.compute import compute_price, step_load, work_class
from stepcast.cost.fits import default_fit
from stepcast.generate.workload import generate
from stepcast.hardware import Gpu, load_cluster
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, Biases, Norm, NormKind, Position, PositionKind
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import DType, FactDict, dataclass, group_by_key
from stepcast.ir.work import Attention, Compute, GroupedMatmul, Matmul, bus_factor
from stepcast.ir.workload import Layer, Phase, Workload
from stepcast.models.catalog import load_model
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds

# Measured and predicted computation of Megatron-LM runs, stage by stage and phase by phase.

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


def _infer_model(facts: Mapping[str, object], assumptions: list[str]) -> Model | None:
    """Return the model that the reader inferred from the sizes of tensors and gradients."""
    if any(facts.get(name) is None for name in ("hidden", "ffn", "layers", "vocab", "seq", "dtype")):
        return None
    sizes: FactDict = {name: int(str(facts[name])) for name in ("layers", "hidden", "ffn", "vocab")}
    hidden, seq = sizes["hidden"], int(str(facts["seq"]))
    gated = bool(facts.get("gated_mlp"))
    width = HEAD_DIM if hidden >= SMALL_HIDDEN and hidden % HEAD_DIM == 0 else SMALL_HEAD_DIM
    if hidden % width:
        return None
    assumptions.append(f"heads are {width} wide")
    return Model(
        "traced",
        **sizes,
        heads=hidden // width,
        kv_heads=hidden // width,
        head_dim=width,
        max_seq=seq,
        gated=gated,
        activation=Activation.SILU if gated else Activation.GELU,
        norm=Norm() if gated else Norm(NormKind.LAYER, bias=True),
        biases=Biases() if gated else Biases(qkv=True, attention_output=True, mlp=True),
        position=Position(PositionKind.LEARNED, seq) if facts.get("learnt_positions") else Position(),
    )


def _build_workload(analysis: MegatronAnalysis, model: Model, dtype: DType) -> Workload:
    recording = analysis.recording
    facts, layout = recording.facts, recording.layout
    layers_on, stage_layers = facts.get("layers_on"), ()
    if isinstance(layers_on, dict) and len(layers_on) == layout.pp:
        stage_layers = tuple(layers_on[stage] for stage in range(layout.pp))
    batch, seq = int(str(facts["micro_batch"])), int(str(facts["seq"]))
    sequences = batch * layout.dp * max(1, recording.micro_batches)
    strategy = Strategy(layout, batch, sequences, seq, stage_layers=stage_layers, precision=dtype)
    return generate(model, strategy, Framework(flash_attention=dtype in (DType.FP16, DType.BF16)))


def _measured_seconds(analysis: MegatronAnalysis) -> dict[tuple[int, BlockKind], float]:
    """Return the seconds per micro-batch by stage and phase: the median of the ranks that are not slow.

    Stages that lack a phase are left out: their trace is cut.
    """
    recording = analysis.recording
    slow = {straggler.rank for straggler in analysis.result.stragglers}
    times = (
        ((record.stage, phase), recording.compute_s(record, phase) / max(1, recording.micro_batches))
        for record in recording.ranks
        for phase in PHASES
        if record.rank not in slow
    )
    seconds_of = group_by_key((key, seconds) for key, seconds in times if seconds > 0)
    complete = [stage for stage, _ in seconds_of if all((stage, phase) in seconds_of for phase in PHASES)]
    return {key: median(seconds) for key, seconds in sorted(seconds_of.items()) if key[0] in complete}


def _works(layers: Sequence[Layer], phases: Iterable[Phase]) -> list[Compute]:
    return [op.work for layer in layers for phase in phases for op in layer.ops(phase) if isinstance(op.work, Compute)]


def fit_factor(points: Sequence[ComputePoint]) -> FittedClass:
    """Fit measured over predicted as a mean logarithm; runs are left out in turn, or stages of a single run."""
    ratios = np.array([point.measured_s / point.predicted_s for point in points])
    has_several_runs = len({point.run for point in points}) > 1
    keys = np.array([point.run if has_several_runs else str(point.stage) for point in points])
    factor = float(np.exp(np.log(ratios).mean()))
    errors: list[float] = []
    for unseen in (keys == key for key in dict.fromkeys(keys.tolist())):
        if not unseen.all():
            errors += np.abs(np.exp(np.log(ratios[~unseen]).mean()) / ratios[unseen] - 1).tolist()
    before, after = np.abs(1 / ratios - 1), np.abs(factor / ratios - 1)
    correction = Correction(factor, spread=max(errors or after.tolist()))
    left_out = mean(errors) if errors else None
    return FittedClass("", len(points), correction, float(before.mean()), float(after.mean()), left_out)


# Collectives whose time on the host is known.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "message")
WIDE = 10.0  # sizes that differ by a larger factor separate latency from bandwidth
RESOLUTION_S = 1e-5  # of the times in traces
SHORTEST_S = 1.5 * RESOLUTION_S
# A bandwidth is read off transfers that take at least so long: below, latency is most of it.
LONG_S = 2e-4
MATRIX = ("matmul", "bmm", "grouped")
UNLIKE = 1.1  # factors of forward and backward with a larger ratio get a warning
SCATTERED = 0.15  # errors of transfers that are not of one link


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """One measured transfer: bytes that cross each rank's link, and the time from the last arrival on."""

    group: str
    kind: str
    ranks: int
    size_bytes: int
    seconds: float

    @property
    def crossing_bytes(self) -> float:
        return self.size_bytes * bus_factor(self.kind, self.ranks)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """*latency_s* is None where the points cannot separate it from the bandwidth, which then contains it."""

    bandwidth_bytes_per_s: float | None
    latency_s: float | None
    error: float


def link_points(traffic: Sequence[MeetingTraffic]) -> list[LinkPoint]:
    """Return the transfers of a run that used a link alone; each kind and size once."""
    points: dict[tuple[str, str, int], LinkPoint] = {}
    for row in traffic:
        seconds = row.transfer_s
        if seconds is None and row.count > 1 and row.kind != "message":
            # Without peers: the shortest of several waited least.
            seconds = row.shortest_s
        used_alone = row.kind in COLLECTIVES and not row.overlapped and row.ranks >= 2
        if used_alone and row.size_bytes and seconds is not None and seconds >= SHORTEST_S:
            point = LinkPoint(row.group, row.kind, row.ranks, row.size_bytes, seconds)
            points.setdefault((row.group, row.name, row.size_bytes), point)
    return list(points.values())


def fit_link(points: Sequence[LinkPoint]) -> LinkFit:
    """Fit latency and bandwidth of one group's transfers by least squares of relative errors."""
    sizes = np.array([point.crossing_bytes for point in points])
    seconds = np.array([point.seconds for point in points])
    rates, long = sizes / seconds, seconds >= LONG_S
    latency_s, per_byte_s = 0.0, 0.0
    separated = bool(sizes.max() >= WIDE * sizes.min() and long.any())
    if separated:
        columns = np.stack([1 / seconds, rates], axis=1)
        latency_s, per_byte_s = np.linalg.lstsq(columns, np.ones(len(points)))[0].tolist()
        if latency_s < 0:
            latency_s, per_byte_s = 0.0, float(rates.sum() / (rates @ rates))
        elif per_byte_s < 0:
            latency_s, per_byte_s = float((1 / seconds).sum() / (seconds**-2).sum()), 0.0
    elif long.any():
        per_byte_s = 1 / float(np.sort(rates[long])[long.sum() // 2])
    error = float(np.abs((latency_s + sizes * per_byte_s) / seconds - 1).mean())
    bandwidth = 1 / per_byte_s if per_byte_s > 0 else None
    return LinkFit(bandwidth, latency_s if separated else None, error)


def link_efficiency(cluster: str, points: Sequence[LinkPoint]) -> tuple[str, float, bool]:
    """Return the key of the efficiency of the link that *points* used, and the value that fits the largest of them.

    The last value is True if the transfer was faster than the described link at full efficiency, which is returned.
    """
    largest = max(points, key=lambda point: point.crossing_bytes)
    measured = largest.crossing_bytes / largest.seconds
    is_in_domain = largest.ranks <= load_cluster(cluster).domain_gpus
    key = "node.fabric.link.efficiency" if is_in_domain else "node.nic.efficiency"

    def bus_bandwidth(efficiency: float) -> float:
        described = load_cluster(cluster, [f"{key}={efficiency:.6f}"])
        return reached_busbw(largest.kind, largest.size_bytes, largest.ranks, described) or 0.0

    low, high = 0.01, 1.0
    if bus_bandwidth(high) <= measured:
        return key, 1.0, True
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if bus_bandwidth(middle) < measured else (low, middle)
    return key, round(high, 4), False


class _Calibration:
    """Collects the constants, assumptions and warnings of several runs."""

    def __init__(self, runs: Mapping[str, MegatronAnalysis], gpu: Gpu, model: str | None) -> None:
        self.runs, self.gpu = runs, gpu
        self.points: list[ComputePoint] = []
        self.classes: list[str] = []  # of the operators that the points are made of
        self.assumptions: list[str] = []
        self.warnings: list[str] = []
        for source, analysis in runs.items():
            self.add_run(source, analysis, model)
        # One factor for each number format.
        self.factors = {
            str(dtype): fit_factor([point for point in self.points if point.dtype is dtype])
            for dtype in dict.fromkeys(point.dtype for point in self.points)
        }
        self.constants: dict[str, FactDict] = {}
        # Slow ranks, and what the runs cannot show.
        for source, analysis in runs.items():
            name = os.path.basename(source.rstrip("/"))
            for slow in analysis.result.stragglers:
                self.warnings.append(f"{name}: rank {slow.rank} is {slow.factor:.2f} times as slow and left out")
        if all(analysis.recording.micro_batches <= 1 for analysis in runs.values()):
            self.warnings.append(
                "one micro-batch per step cannot split the fixed overhead of a step from that of a micro-batch"
            )
        widths = {analysis.recording.facts.get("hidden") for analysis in runs.values()}
        if len(widths) == 1 and self.points:
            self.warnings.append("one model width cannot show how the factor changes with size; slopes are left at 0")

    def add_run(self, source: str, analysis: MegatronAnalysis, model_name: str | None) -> None:
        """Add the points of one run; none, with a warning, where its model is not known."""
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
            self.warnings.append(f"{run}: computation left out: {problem}")
            return
        dtype = DType(str(facts["dtype"]))
        workload = _build_workload(analysis, model, dtype)
        passes = (_works(workload.stages[stage].body_layers(), PHASES[phase]) for stage, phase in measured)
        every = (work for works in passes for work in works)
        multiplied = sum(work.flops for work in every if isinstance(work, Matmul | GroupedMatmul | Attention))
        if dtype is DType.FP32 and multiplied / sum(measured.values()) > self.gpu.matrix_peak_flops("fp32"):
            dtype = DType.TF32
            workload = _build_workload(analysis, model, dtype)
            assumptions.append("fp32 matmuls run as tf32: they are faster than the fp32 peak allows")
        fused = "fused (flash)" if dtype in (DType.FP16, DType.BF16) else "unfused"
        assumptions.append(f"{dtype} attention is {fused}")
        fit, middle = default_fit(), workload.stages[len(workload.stages) // 2]
        load = step_load(_works(middle.body_layers(), Phase), self.gpu, fit)
        for (stage, phase), seconds in measured.items():
            works = _works(workload.stages[stage].body_layers(), PHASES[phase])
            predicted_s = sum(compute_price(work, self.gpu, fit, load).seconds for work in works)
            self.points.append(ComputePoint(run, stage, phase, dtype, predicted_s, seconds))
        self.classes += sorted(
            {work_class(work) for stage in workload.stages for work in _works(stage.body_layers(), Phase)}
        )
        self.assumptions += assumptions
        self.warnings += analysis.result.warnings

    def add(self, name: str, title: str, value: float, text: str, points: int, known: str) -> None:
        """Add a fitted constant: its value, also as *text*, the number of points and how certain it is."""
        self.constants[name] = {"title": title, "value": value, "text": text, "points": points, "known": known}

    def add_factor(self, name: str, title: str, fit: FittedClass) -> None:
        off, factor = fit.left_out, fit.correction.factor
        known = "one point: cannot be checked" if off is None else f"{format_percent(off)} off where left out"
        self.add(name, title, factor, f"{factor:.3f}", fit.points, known)

    def add_computation(self) -> None:
        for dtype, fit in self.factors.items():
            dtype_points = [point for point in self.points if point.dtype == dtype]
            self.add_factor(f"compute_factor_{dtype}", f"compute over predicted, {dtype}", fit)
            phases = {phase: fit_factor([point for point in dtype_points if point.phase is phase]) for phase in PHASES}
            for phase, phase_fit in phases.items():
                self.add_factor(f"{phase}_compute_factor_{dtype}", f"  {phase}", phase_fit)
            forward, backward = (phase_fit.correction.factor for phase_fit in phases.values())
            if max(forward, backward) > UNLIKE * min(forward, backward):
                self.warnings.append(
                    f"{dtype}: forward takes {forward:.2f} and backward {backward:.2f} times what is predicted; "
                    "one factor for both fits neither"
                )
            seconds = {(point.run, point.stage, point.phase): point.measured_s for point in dtype_points}
            ratios = [
                seconds[run, stage, BlockKind.BACKWARD] / forward_s
                for (run, stage, phase), forward_s in seconds.items()
                if phase is BlockKind.FORWARD
            ]
            value, known = median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
            title = f"backward over forward, {dtype}"
            self.add(f"backward_factor_{dtype}", title, value, f"{value:.2f}", len(ratios), known)
        if self.points:
            self.warnings.append(
                "a trace times complete passes: one factor covers matmuls, attention and memory-bound kernels, "
                "which it cannot separate"
            )
        self.warnings += [
            f"{dtype}: the factor is not used: points left out of it are {format_percent(fit.left_out or 0.0)} "
            f"off with it and {format_percent(fit.before)} without"
            for dtype, fit in self.factors.items()
            if not fit.helps
        ]

    def add_links(self, cluster: str | None) -> None:
        links = (point for run in self.runs.values() for point in link_points(run.result.communication))
        for group, points in group_by_key((point.group, point) for point in links).items():
            fit, count = fit_link(points), len(points)
            if rate := fit.bandwidth_bytes_per_s:
                title, known = f"{group}: bus bandwidth", f"points {format_percent(fit.error)} off"
                self.add(f"{group}_bandwidth_bytes_per_s", title, rate, format_rate(rate), count, known)
            if fit.latency_s is not None:
                title, known = f"{group}: latency of a transfer", f"within {format_seconds(RESOLUTION_S)} at best"
                self.add(f"{group}_latency_s", title, fit.latency_s, format_seconds(fit.latency_s), count, known)
                if fit.error > SCATTERED:
                    self.warnings.append(
                        f"{group}: transfers are {format_percent(fit.error)} off one latency and one bandwidth: "
                        "do all runs use the same links?"
                    )
            else:
                sizes = sorted({point.size_bytes for point in points})
                listed = format_bytes(sizes[0]) if len(sizes) == 1 else f"{len(sizes)} sizes close together"
                kind = "message" if group == "pp" else f"{group} transfer"
                title, seconds = f"{group}: time of a transfer", median(point.seconds for point in points)
                self.add(f"{group}_message_s", title, seconds, format_seconds(seconds), count, listed)
                what, more = listed, "add runs of other sizes"
                if len(sizes) == 1:
                    what = f"one {kind} size ({listed})"
                    more = (
                        "the bandwidth contains the latency; add runs with another micro-batch, sequence or hidden size"
                    )
                self.warnings.append(f"{group}: {what} cannot split latency from bandwidth; {more}")
            if cluster and group == "tp":
                key, value, beyond = link_efficiency(cluster, points)
                title, known = f"tp: link efficiency of {cluster}", f"--set {key}={value:g}"
                self.add("tp_link_efficiency", title, value, f"{value:.3f}", 1, known)
                if beyond:
                    self.warnings.append(f"tp: faster than the link of {cluster}: is this the cluster it ran on?")

    def class_corrections(self) -> dict[str, Correction]:
        """Correct matmuls by the factor of their format, and classes that formats share by that of all points.

        A format whose factor does not help points left out of it is not corrected.
        """
        used = [point for point in self.points if self.factors[str(point.dtype)].helps]
        if not used:
            return {}
        shared, formats = fit_factor(used), {str(point.dtype) for point in used}
        corrections = {}
        for kind in dict.fromkeys(self.classes):
            family, _, dtype = kind.partition(".")
            if family not in MATRIX or dtype in formats:
                corrections[kind] = (self.factors[dtype] if family in MATRIX else shared).correction
        return corrections

    def toml(self, classes: Mapping[str, Correction], errors: Mapping[str, float | None]) -> str:
        lines = [
            "# Written by 'stepcast calibrate'; give it to predict or op with --calibration.",
            f'gpu = "{self.gpu.name}"',
            f'source = "stepcast calibrate on {len(self.runs)} Megatron-LM runs"',
            "runs = [",
            *(f'    "{os.path.basename(source.rstrip("/"))}",' for source in self.runs),
            "]",
        ]
        for kind, correction in classes.items():
            lines += ["", f'[class."{kind}"]', *(f"{key} = {value:.6g}" for key, value in asdict(correction).items())]
        lines += ["", "[constants]"]
        lines += [f"{name} = {about['value']:.6g}  # {about['known']}" for name, about in self.constants.items()]
        lines += ["", "[fit]  # mean errors of computation", f"points = {len(self.points)}"]
        lines += [f"{name} = {error:.4g}" for name, error in errors.items() if error is not None]
        return "\n".join(lines) + "\n"


def calibrate_megatron(
    runs: Mapping[str, MegatronAnalysis], gpu: Gpu, cluster: str | None = None, model: str | None = None
) -> tuple[FactDict, str]:
    """Return the constants of all *runs* (by where each was read from) together, and the file that holds them."""
    calibration = _Calibration(runs, gpu, model)
    calibration.add_computation()
    calibration.add_links(cluster)
    # The time per step in which a rank neither computes nor communicates nor waits.
    ranks = [analysis.result.rank_times for analysis in runs.values()]
    host_s = [mean(rank.breakdown_s["host"] for rank in stage_ranks) for stage_ranks in ranks]
    known, value = f"{format_seconds(min(host_s))} to {format_seconds(max(host_s))}", median(host_s)
    calibration.add("fixed_step_s", "fixed step overhead (host)", value, format_seconds(value), len(host_s), known)
    classes = calibration.class_corrections()
    errors = overall_errors(calibration.factors.values())
    facts: FactDict = {
        "kind": "calibration",
        "source": "megatron",
        "gpu": gpu.name,
        "points": len(calibration.points),
        "constants": calibration.constants,
        "classes": {kind: asdict(correction) for kind, correction in classes.items()},
        **errors,
        "stages": [asdict(point) for point in calibration.points],
        "assumptions": list(dict.fromkeys(calibration.assumptions)),
        "warnings": calibration.warnings,
    }
    return facts, calibration.toml(classes, errors)
