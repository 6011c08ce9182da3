"""Measure a GPU with PyTorch case by case, and fit the corrections of a calibration to the points.

Each run starts with a cold L2 cache: a buffer larger than the cache is overwritten in between. The GPU is kept busy
while the host issues the operator, so that the time between two events is the GPU's alone. Data is random: zeros
draw less power and run faster. What is known is skipped, failures are noted, and measuring stops when the time is up.
Points that were left out of a fit show how much it helps.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from stepcast.cost import calibration
from stepcast.cost.calibration import LOOKS, STEP, CalibrationError, Correction, fit_correction, shows_slope
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import ATTENTION, ComputeFit
from stepcast.cost.power import ALONE, energy_seen
from stepcast.hardware import load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.source import parse_toml
from stepcast.ir.arrays import FloatArray
from stepcast.ir.types import DType, dataclass
from stepcast.ir.work import Attention, Matmul
from stepcast.pytorch.profile.cases import Case, Operator
from stepcast.pytorch.run.execute import call_on_ranks
from stepcast.pytorch.run.operators import Call, Operators

CollectiveRow = Mapping[str, str | int | float]  # kind, ranks, size_bytes, seconds
FEWEST = 3  # points that a class needs for a correction with all constants
FOLDS = 4
# The points do not show a least time that reduces the mean error by less than this.
VISIBLE_ERROR = 0.002
WARM_UP = 3
FEWEST_RUNS, MOST_RUNS = 7, 25  # of a case
SUSTAINED_S = 1.2  # seconds of one operator without a pause; the second half counts
CASE_S = 0.15  # GPU time of all runs of one case
SPIN_CYCLES = 600_000  # about 0.3 ms: longer than the host needs to issue a backward call
HOST_CALLS = 300
STEP_LAYERS, STEP_WIDTH, STEP_RUNS = 12, 64, 30
WATCH_LAYERS, WATCH_CALLS = 4, 2  # of the smaller step that is repeated while a run goes on: 8 ms in all
HOST_LOOKS = 12  # one of these steps says as much as so many spread over a profile, being next to what is forecast
ALL_REDUCE_SIZES = tuple(2**power for power in range(10, 31, 2))  # 1 KiB to 1 GiB
ALL_REDUCE_RUNS = 9
ALL_REDUCE_WAIT_S = 60


class Backend(Protocol):
    """A way to time an operator on this machine; any exception is a failed case."""

    def seconds(self, work: Operator) -> float:
        """Return the median seconds of runs with cold caches."""

    def sustained_s(self, work: Operator) -> float:
        """Return the median seconds of runs without a pause, once the clock has settled."""


@dataclass(frozen=True, slots=True)
class MeasuringProgress:
    """The progress of the measurement after one more case."""

    done: int
    total: int
    case: Case
    seconds: float | None  # None: failed
    elapsed_s: float
    points: "MeasuredPoints"  # all so far


@dataclass(frozen=True, slots=True)
class MeasuredPoints:
    """Measured seconds by the name of the case."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)  # reason by name
    left: tuple[str, ...] = ()  # not reached in time; a rerun measures them
    sustained: Mapping[str, float] = field(default_factory=dict)  # without a pause


def measure_sustained(cases: Sequence[Case], backend: Backend, known: MeasuredPoints) -> MeasuredPoints:
    """Return *known* with the seconds of each case, measured by itself first and then without a pause."""
    points = measure(cases, backend, known, math.inf, lambda: 0.0)
    sustained, failed = dict(known.sustained), {**known.failed, **points.failed}
    for case in cases:
        if case.name not in sustained and case.name in points.seconds:
            _try_to_measure(backend.sustained_s, case, sustained, failed, f"{case.name} sustained")
    return MeasuredPoints(points.seconds, failed, known.left, sustained)


def measure(
    cases: Sequence[Case], backend: Backend, known: MeasuredPoints, limit_s: float, clock: Callable[[], float],
    report: Callable[[MeasuringProgress], None] = lambda progress: None,
) -> MeasuredPoints:  # fmt: skip
    """Return *known* with the points of all other cases, until *limit_s* have passed.

    A case that failed before is tried again: memory may be free now.
    """
    start = clock()
    seconds, failed, left = dict(known.seconds), dict[str, str](), list[str]()
    unknown = [case for case in cases if case.name not in seconds]
    for done, case in enumerate(unknown, start=1):
        if clock() - start >= limit_s:
            left.append(case.name)
            continue
        _try_to_measure(backend.seconds, case, seconds, failed, case.name)
        so_far = MeasuredPoints(dict(seconds), dict(failed), sustained=known.sustained)
        report(MeasuringProgress(done, len(unknown), case, seconds.get(case.name), clock() - start, so_far))
    return MeasuredPoints(seconds, failed, tuple(left), known.sustained)


def _try_to_measure(
    measure_s: Callable[[Operator], float], case: Case, seconds: dict[str, float], failed: dict[str, str], key: str
) -> None:
    """Add the seconds of *case* to *seconds*, or to *failed* the reason of a failure as *key*."""
    try:
        if (result := measure_s(case.work)) > 0:
            seconds[case.name] = result
        else:
            failed[key] = f"measured {result} s"
    except Exception as error:  # after any error of a driver or library, the other cases go on
        failed[key] = " ".join(str(error).split())[:200] or type(error).__name__


@dataclass(frozen=True, slots=True)
class Document:
    """One measured GPU."""

    gpu: str  # its name in the catalogue
    device: str  # the name its driver gives
    software: str
    points: MeasuredPoints
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    launch: Mapping[str, float] = field(default_factory=dict)  # seconds of the host and of an empty kernel
    collectives: Sequence[CollectiveRow] = ()
    power: Mapping[str, float] = field(default_factory=dict)  # see Calibration


def to_toml(document: Document, verb: str = "profile") -> str:
    points = document.points
    lines = [f"# Written by 'stepcast {verb}'; give it to predict or op with --calibration."]
    lines += [f"{name} = {_format(getattr(document, name))}" for name in ("gpu", "device", "software")]
    for kind, correction in document.corrections.items():
        lines += _section(f"[class.{_format(kind)}]", asdict(correction))
    lines += _section("[power]", document.power)
    lines += _section("[launch]", document.launch)
    for row in document.collectives:
        lines += _section("[[collective]]", row)
    for name, values in (("points", points.seconds), ("sustained", points.sustained), ("failed", points.failed)):
        lines += _section(f"[{name}]", {_format(case): value for case, value in values.items()})
    return "\n".join(lines) + "\n"


def _section(header: str, entries: Mapping[str, str | int | float]) -> list[str]:
    return ["", header, *(f"{key} = {_format(value)}" for key, value in entries.items())] if entries else []


def _format(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=True)
    return repr(value) if isinstance(value, int) else f"{value:.6g}" if value else "0.0"


def read_document(text: str, where: str) -> Document:
    """Return what an earlier run wrote; raise CalibrationError for any other file."""
    try:
        table = parse_toml(text)
        points, sustained, power = (
            {str(name): float(value) for name, value in table.get(key, {}).items()}
            for key in ("points", "sustained", "power")
        )
        failed = {str(name): str(reason) for name, reason in table.get("failed", {}).items()}
        return Document(
            gpu=str(table["gpu"]),
            device=str(table["device"]),
            software=str(table["software"]),
            points=MeasuredPoints(points, failed, sustained=sustained),
            corrections={
                kind: Correction(**{key: float(value) for key, value in entry.items()})
                for kind, entry in table.get("class", {}).items()
            },
            launch={name: (int if name == LOOKS else float)(value) for name, value in table.get("launch", {}).items()},
            collectives=tuple(table.get("collective", ())),
            power=power,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CalibrationError(f"{where}: {problem}; expected a file that 'stepcast profile' wrote, or none") from None


@dataclass(frozen=True, slots=True)
class FittedClass:
    """One class of operators: its correction, and the mean errors without it and with it."""

    kind: str
    points: int
    correction: Correction
    before: float
    after: float
    left_out: float | None  # each point by a correction that was not fitted to it; None if there is one point
    unidentified: tuple[str, ...] = ()  # constants that the points do not show

    @property
    def helps(self) -> bool:
        """Return True if the correction brings other points closer; for one point that is not known."""
        return self.left_out is None or self.left_out < self.before


def fit_energies(cases: Sequence[Case], points: MeasuredPoints, gpu: Gpu, fit: ComputeFit) -> dict[str, float]:
    """Return joule per operation by format, and attention's as a multiple, from cases that slowed when sustained."""
    law = fit.power.of(gpu.architecture)
    seen: dict[str, list[float]] = {}
    for case in cases:
        work = case.work
        if case.name not in points.sustained or not isinstance(work, Matmul | Attention):
            continue
        energy = energy_seen(points.seconds[case.name], points.sustained[case.name], work.flops, gpu.power_w, law)
        if energy > 0:
            name = ATTENTION if isinstance(work, Attention) else gpu.runs_as(work.dtype)
            seen.setdefault(name, []).append(energy)
    energies = {name: float(np.exp(np.mean(np.log(values)))) for name, values in seen.items()}
    half = energies.get("bf16") or energies.get("fp16")
    attention = energies.pop(ATTENTION, None)
    return energies if attention is None or half is None else {**energies, ATTENTION: attention / half}


def fit_classes(
    cases: Sequence[Case], seconds: Mapping[str, float], gpu: Gpu, fit: ComputeFit
) -> tuple[FittedClass, ...]:
    """Return a correction for every class with enough points."""
    fitted, measured = [], [case for case in cases if case.name in seconds]
    for kind in dict.fromkeys(case.kind for case in measured):
        own = [case for case in measured if case.kind == kind]
        if len(own) >= FEWEST:
            predicted = np.array([compute_price(case.work, gpu, fit, ALONE).seconds for case in own])
            fitted.append(fit_class(kind, predicted, np.array([seconds[case.name] for case in own])))
    return tuple(fitted)


def fit_class(kind: str, predicted: FloatArray, measured: FloatArray, in_step: bool = False) -> FittedClass:
    """Return the correction of one class; for one or two points only a factor.

    *in_step*: the points are of operators within a step, not of each by itself.
    """
    few = predicted.size < FEWEST
    correction = _fit_factor(predicted, measured) if few else fit_correction(predicted, measured, in_step)
    after = np.asarray(correction.applied_s(predicted))
    spread, left_out = max(correction.spread, Correction(1.0).spread if few else 0.0), None
    if predicted.size > 1:
        unseen = _predict_left_out(predicted, measured, in_step)
        # The range must hold for operators that were not measured, so errors on points left out set it.
        spread = max(spread, float(np.quantile(np.abs(unseen / measured - 1.0), 0.9)))
        left_out = _mean_error(unseen, measured)
    try:
        correction = replace(correction, spread=min(spread, calibration.PLAUSIBLE["spread"][1])).check_plausible()
    except CalibrationError as error:
        raise CalibrationError(f"class {kind!r}: {error}; are its times in the unit their file says?") from None
    without_least = np.asarray(replace(correction, least_s=0.0).applied_s(predicted))
    errors = _mean_error(predicted, measured), _mean_error(after, measured)
    hides_least = _mean_error(without_least, measured) - errors[1] < VISIBLE_ERROR
    unidentified = {"slope": not shows_slope(predicted), "least_s": hides_least}
    hidden = tuple(name for name, is_hidden in unidentified.items() if is_hidden)
    return FittedClass(kind, int(predicted.size), correction, *errors, left_out, hidden)


def _fit_factor(predicted: FloatArray, measured: FloatArray) -> Correction:
    return Correction(float(np.exp(np.mean(np.log(measured / predicted)))))


def _predict_left_out(predicted: FloatArray, measured: FloatArray, in_step: bool) -> FloatArray:
    """Return every point as corrected by a fit to the other folds."""
    order = np.argsort(predicted, kind="stable")
    folds = min(FOLDS, order.size)
    result = predicted.copy()
    for fold in range(folds):
        held_out = np.zeros(order.size, dtype=bool)
        held_out[order[fold::folds]] = True
        rest = predicted[~held_out], measured[~held_out]
        own = fit_correction(*rest, in_step) if rest[0].size > 1 else _fit_factor(*rest)
        result[held_out] = own.applied_s(predicted[held_out])
    return result


def _mean_error(predicted: FloatArray, measured: FloatArray) -> float:
    return float(np.mean(np.abs(predicted / measured - 1.0)))


class ProfiledOperators(Operators):
    """Operators with the kernel of attention that PyTorch chooses by itself."""

    def _attend(self, *inputs: Any, **options: Any) -> Any:
        return self._torch.nn.functional.scaled_dot_product_attention(*inputs, **options)


class TorchBackend:
    """Times operators on GPU 0."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._operators = ProfiledOperators(torch, "cuda")
        self._step = small_step(torch, "cuda")
        l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 64 * 2**20
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.int8, device="cuda")
        torch.backends.cuda.matmul.allow_tf32 = False

    @property
    def device(self) -> str:
        return str(self._torch.cuda.get_device_name(0))

    @property
    def software(self) -> str:
        return f"torch {self._torch.__version__}, CUDA {self._torch.version.cuda}"

    @property
    def formats(self) -> tuple[DType, ...]:
        """Return the matrix formats that this GPU and PyTorch multiply in."""
        capability = self._torch.cuda.get_device_capability(0)
        formats = [DType.BF16, DType.TF32] if capability >= (8, 0) else []
        if capability >= (8, 9) and hasattr(self._torch, "float8_e4m3fn"):
            formats.append(DType.FP8)
        return (*formats, DType.FP16, DType.FP32)

    def seconds(self, work: Operator) -> float:
        """Return the median seconds of runs with a cold cache."""
        return self._time(work, self._median_s)

    def sustained_s(self, work: Operator) -> float:
        """Return the seconds of a run among runs without a pause."""
        return self._time(work, self._sustained_s)

    def _time(self, work: Operator, measure: Callable[[Call], float]) -> float:
        try:
            return measure(self._operators.build(work))
        finally:
            self._torch.backends.cuda.matmul.allow_tf32 = False
            self._torch.cuda.empty_cache()

    def _sustained_s(self, call: Call) -> float:
        """Run batches of about 20 ms, the host one batch ahead of the GPU."""
        torch = self._torch
        runs = max(1, round(0.02 / self._median_s(call)))
        events: list[Any] = []
        start = time.monotonic()
        while time.monotonic() - start < SUSTAINED_S or len(events) < 4:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            for _ in range(runs):
                call()
            if len(events) > 2:
                events[-2].synchronize()
        torch.cuda.synchronize()
        spans = [float(before.elapsed_time(after)) for before, after in pairwise(events)]
        return statistics.median(spans[len(spans) // 2 :]) * 1e-3 / runs

    def _median_s(self, call: Call) -> float:
        for _ in range(WARM_UP):
            call()
        self._torch.cuda.synchronize()
        runs = max(FEWEST_RUNS, min(MOST_RUNS, int(CASE_S / max(self._once_s(call), 1e-6))))
        return statistics.median(self._once_s(call) for _ in range(runs))

    def launch(self) -> dict[str, float]:
        """Return the host's seconds for a small step, a light and a heavy operator, and the GPU's shortest kernel."""
        torch = self._torch
        tiny, weight = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return {
            "step_host_s": host_s(torch, self._step, STEP_RUNS),
            "kernel_s": statistics.median(self._once_s(lambda: tiny + tiny) for _ in range(MOST_RUNS)),
            "light_host_s": host_s(torch, lambda: tiny + tiny),
            "heavy_host_s": host_s(torch, lambda: torch.nn.functional.linear(tiny, weight)),
        }

    def _once_s(self, call: Call) -> float:
        torch = self._torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def host_s(torch: ModuleType, call: Call, calls: int = HOST_CALLS) -> float:
    """Return the seconds of the host for one call, the GPU not waited for."""
    for _ in range(max(1, calls // 10)):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return spent


def measure_host(torch: ModuleType, gpu: str) -> calibration.Calibration:
    """Return the pace of this host, which changes with what else runs on it, in a quarter of a second."""
    seconds = min(0.09, host_s(torch, small_step(torch, "cuda"), STEP_RUNS))
    launch = {STEP: seconds, LOOKS: HOST_LOOKS}
    return calibration.calibration({"gpu": load_gpu(gpu).name, "launch": launch}, "this host")


def watch_host(torch: ModuleType) -> Callable[[], float]:
    """Return a function that returns how many times as long as now this host takes whenever it is called."""
    step = small_step(torch, "cuda", WATCH_LAYERS)
    now_s = host_s(torch, step, STEP_RUNS)
    return lambda: host_s(torch, step, WATCH_CALLS) / now_s


def small_step(torch: Any, device: str, count: int = STEP_LAYERS) -> Call:
    """Return a training step of *count* layers whose kernels are shorter than the host's time to issue them. Random
    numbers that the caller draws later stay the same.
    """
    nn = torch.nn
    with torch.random.fork_rng():
        layers = [
            (nn.LayerNorm(STEP_WIDTH), nn.Linear(STEP_WIDTH, 4 * STEP_WIDTH), nn.Linear(4 * STEP_WIDTH, STEP_WIDTH))
            for _ in range(count)
        ]
        data = torch.randn(8, 8, STEP_WIDTH, device=device)
    model = nn.ModuleList(module for layer in layers for module in layer).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)

    def step() -> None:
        stream = data
        for norm, up, down in layers:
            stream = stream + down(nn.functional.gelu(up(norm(stream).transpose(0, 1).reshape(64, STEP_WIDTH)))).view(
                8, 8, STEP_WIDTH
            )
        stream.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def all_reduce_points(torch: ModuleType, ranks: int) -> list[CollectiveRow]:
    """Return the seconds of an all-reduce over the GPUs of this machine for each size: the slowest rank's median."""
    times = call_on_ranks(torch, _time_all_reduces, ranks, ranks, wait_s=ALL_REDUCE_WAIT_S)
    return [
        {"kind": "all-reduce", "ranks": ranks, "size_bytes": size, "seconds": max(seconds)}
        for size, *seconds in zip(ALL_REDUCE_SIZES, *times, strict=True)
    ]


def bus_bytes_per_s(row: CollectiveRow) -> float:
    """Return the rate of each GPU's links, which carry 2 (n - 1) / n of the buffer."""
    ranks = int(row["ranks"])
    return 2.0 * (ranks - 1) / ranks * float(row["size_bytes"]) / float(row["seconds"])


def _time_all_reduces(rank: int, ranks: int) -> list[float]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    medians = []
    for size in ALL_REDUCE_SIZES:
        buffer = torch.zeros(size // 2, dtype=torch.bfloat16, device=f"cuda:{rank}")
        seconds = []
        for _ in range(WARM_UP + ALL_REDUCE_RUNS):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        medians.append(statistics.median(seconds[WARM_UP:]))
    return medians
