"""Measure a GPU with PyTorch case by case, or import what others measured, and write the points to a file.

Each run starts with a cold L2 cache: a buffer larger than the cache is overwritten in between. The GPU is kept busy
while the host issues the operator, so that the time between two events is the GPU's alone. Data is random: zeros
draw less power and run faster. What is known is skipped, failures are noted, and measuring stops when the time is up.

The cases are sizes of training (``data/profile.toml``), few enough for three minutes. Matmuls are (tokens, outputs,
inputs) of common layer widths, so that every class has points from small ones, where launches and waves decide, to
large ones, where the peak does. Of the operators that others measured, rows of public tables, products are taken: those
in fp8 after the estimated time of quantising their input. Tables of attention include rotary embedding and the write
into a cache, which training has apart or not at all, and are not taken.
"""

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from itertools import chain, pairwise, product, zip_longest
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from stepcast.cost import calibration
from stepcast.cost.calibration import LOOKS, STEP, CalibrationError, Correction
from stepcast.cost.compute import compute_price, work_class
from stepcast.cost.fits import ComputeFit
from stepcast.cost.power import ALONE
from stepcast.cost.serving import LINEAR_FORMATS, fit_for, quantize_s
from stepcast.hardware.catalog import load_data, load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.operator_tables import OperatorTable, find_operator_tables, read_operator_table
from stepcast.inputs.source import parse_toml
from stepcast.ir.types import DType, dataclass, group_by_key, require
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.pytorch.run.execute import call_on_ranks
from stepcast.pytorch.run.operators import Call, Operators
from stepcast.units import MS

CollectiveRow = Mapping[str, str | int | float]  # kind, ranks, size_bytes, seconds
Operator = Matmul | GroupedMatmul | Attention | Elementwise
K = ElementwiseKind

SIZES = load_data("profile")
LONGEST_S = 0.05  # longer operators are not measured
MEMORY_SHARE = 0.4  # of the GPU's memory that one case may take
SYSTEMS, RECIPES = SIZES["systems"], SIZES["recipes"]  # by the words of the public tables
PRODUCTS = ("gemm", "gemm_small")
IMPORTED = ("bf16", "fp8")  # recipes whose products training runs too
LEAST_S = 50e-6  # shorter times depend on the launch: tables launch from CUDA graphs, ``profile`` one by one
LEAST_SHARE = 0.5  # of the measured time must remain after the time of quantisation is subtracted
MOST_POINTS = 300  # of a class, evenly over their times
WARM_UP = 3
FEWEST_RUNS, MOST_RUNS = 7, 25  # of a case
SUSTAINED_S = 1.2  # seconds of one operator without a pause; the second half counts
CASE_S = 0.15  # GPU time of all runs of one case
SPIN_CYCLES = 600_000  # about 0.3 ms: longer than the host needs to issue a backward call
HOST_CALLS = 300
STEP_LAYERS, STEP_WIDTH, STEP_RUNS = 12, 64, 30
WATCH_LAYERS, WATCH_CALLS = 4, 2  # of the smaller step that is repeated while a run goes on: 8 ms in all
HOST_LOOKS = 12  # the weight of a step measured right before a forecast, in steps spread over a profile
ALL_REDUCE_SIZES = tuple(2**power for power in range(10, 31, 2))  # 1 KiB to 1 GiB
ALL_REDUCE_RUNS = 9
ALL_REDUCE_WAIT_S = 60


@dataclass(frozen=True, slots=True)
class Case:
    """One operator to time; the name is its key in a calibration file."""

    work: Operator

    @property
    def kind(self) -> str:
        """Return the class of operators whose correction applies to the case."""
        return work_class(self.work)

    @property
    def name(self) -> str:
        work = self.work
        match work:
            case Matmul():
                batch = f" batch {work.batch}" if work.batch > 1 else ""
                return f"{self.kind} {work.m}x{work.n}x{work.k}{batch}"
            case GroupedMatmul():
                return f"{self.kind} {work.m}x{work.n}x{work.k} groups {work.groups}"
            case Attention():
                heads = f"heads {work.heads}/{work.kv_heads}x{work.head_dim}"
                return f"{self.kind} {work.batch}x{work.query_len} {heads}"
        return f"{self.kind} {work.dtype} {work.rows}x{work.columns}"


def gpu_cases(gpu: Gpu, fit: ComputeFit, formats: Sequence[DType], quick: bool = False) -> tuple[Case, ...]:
    """Return the cases worth measuring on *gpu*, the classes in turns so that an early end leaves some of each.

    *formats* are the matrix formats its PyTorch can multiply in.
    """
    cases = [Case(work) for work in dict.fromkeys(_list_works(formats, quick)) if _fits(work, gpu, fit)]
    by_class = group_by_key((case.kind, case) for case in cases).values()
    return tuple(filter(None, chain.from_iterable(zip_longest(*by_class))))


def sustained_cases(gpu: Gpu, fit: ComputeFit, formats: Sequence[DType]) -> tuple[Case, ...]:
    """Return the cases to run without a pause: products in the formats of training, and attention."""
    used = [dtype for dtype in (DType.BF16, DType.FP8, DType.FP16) if dtype in formats]
    works: list[Operator] = [Matmul(m, n, k, 1, dtype) for dtype in used for m, n, k in SIZES["sustained"]["products"]]
    batch, length, heads, kv_heads, dim = SIZES["sustained"]["attention"]
    for half, backward in product([dtype for dtype in used if dtype is not DType.FP8][:1], (False, True)):
        works.append(Attention(batch, length, length, heads, kv_heads, dim, dim, True, backward, half))
    return tuple(Case(work) for work in works if _fits(work, gpu, fit))


def _list_works(formats: Sequence[DType], quick: bool) -> Iterator[Operator]:
    chosen = SIZES["quick" if quick else "usual"]
    for dtype in formats:
        # The widest sweep for the format that training uses; half as many sizes for the others.
        sizes = [(m, n, k) for m in chosen["tokens"] for n, k in chosen["weights"]][:: 1 if dtype is DType.BF16 else 2]
        # Small and large sizes in turns, so that the first few points already span the range.
        sizes.sort(key=math.prod)
        middle = (len(sizes) + 1) // 2
        for m, n, k in filter(None, chain.from_iterable(zip_longest(sizes[:middle], sizes[middle:]))):
            yield Matmul(m, n, k, 1, dtype)
    half = DType.BF16 if DType.BF16 in formats else DType.FP16
    if half in formats:
        for length in chosen["batched"]:
            yield Matmul(length, length, 128, 32, half)
            yield Matmul(length, 128, length, 32, half)
        for groups, rows in chosen["experts"] if half is DType.BF16 else ():
            yield GroupedMatmul(rows, 4096, 2048, groups, half)
            yield GroupedMatmul(rows, 2048, 4096, groups, half)
        for (batch, length), (query, key, dim), backward in product(chosen["lengths"], chosen["heads"], (False, True)):
            yield Attention(batch, length, length, query, key, dim, dim, True, backward, half)
    dtype = half if half in formats else DType.FP32
    for rows, columns in chosen["shapes"]:
        size = rows * columns * dtype.bytes
        for kind, reads in ((K.ADD, 2), (K.COPY, 1), (K.GELU, 1), (K.LAYER_NORM, 1), (K.RMS_NORM, 1)):
            yield Elementwise(kind, rows, columns, reads * size, size, False, dtype)
        # PyTorch has a kernel for rows of up to 1,024 elements, which unfused attention runs.
        short = min(columns, 1024)
        moved = rows * short * dtype.bytes
        yield Elementwise(K.SOFTMAX, rows, short, moved, moved, False, dtype)
        if dtype is not DType.FP32:
            yield Elementwise(K.CAST, rows, columns, size, 4.0 * rows * columns, False, dtype)
        yield Elementwise(K.OPTIMIZER, 1, rows * columns, 4 * size, 3 * size, False, dtype)


def _fits(work: Operator, gpu: Gpu, fit: ComputeFit) -> bool:
    """Return True if *work* takes neither too long nor too much memory on *gpu*."""
    small = held_bytes(work) <= MEMORY_SHARE * gpu.memory_bytes
    return small and compute_price(work, gpu, fit, ALONE).seconds <= LONGEST_S


def held_bytes(work: Operator) -> float:
    """Return the bytes of the tensors that a case needs at once."""
    if not isinstance(work, Attention):
        return work.moved_bytes
    query = work.batch * work.query_len * work.heads * work.head_dim
    return (4 if not work.backward else 8) * 2 * query * work.dtype.bytes


@dataclass(frozen=True, slots=True)
class ImportedPoints:
    """The cases of one GPU with their seconds, and the rows that were not taken by reason."""

    gpu: Gpu
    device: str
    software: str
    cases: tuple[Case, ...]
    seconds: dict[str, float]
    skipped: Counter[str]


def gpu_of(rows: OperatorTable) -> Gpu:
    """Return the GPU of rows by the system or the device that they name."""
    system = rows.word("system")
    return load_gpu(SYSTEMS.get(system, system) or rows.word("device"))


def import_tables(places: Sequence[str], gpu: Gpu | None) -> ImportedPoints:
    """Return the products of tables in files and folders, those of *gpu* or of the one GPU that they name."""
    skipped: Counter[str] = Counter()
    points: dict[Case, float] = {}
    seen: dict[str, OperatorTable] = {}
    for table in (read_operator_table(path) for place in places for path in find_operator_tables(place)):
        if table.name not in PRODUCTS:
            skipped[f"{table.name}: not an operator of training steps by itself"] += len(table)
            continue
        for rows in table.split(("system", "device", "dtype", "gemm_dtype")):
            own = gpu_of(rows)
            if gpu is not None and own.name != gpu.name:
                skipped[f"{table.name}: measured on {own.name}, not {gpu.name}"] += len(rows)
                continue
            seen[own.name] = rows
            try:
                points |= _products(rows, own)
            except ValueError as error:
                skipped[f"{table.name}: {error}"] += len(rows)
    if not seen:
        reasons = sorted(skipped, key=lambda reason: "measured on" not in reason)[:4]
        on = f" on {gpu.name}" if gpu else ""
        raise ValueError(
            f"no row is a matrix product{on}; expected a table such as gemm_perf.csv"
            + "".join(f"; {reason}" for reason in reasons)
        )
    require(len(seen) == 1, f"the tables hold products of {', '.join(sorted(seen))}; name one GPU with --gpu")
    cases = list[Case]()
    for own_cases in group_by_key((case.kind, case) for case in points).values():
        own_cases.sort(key=lambda case: points[case])
        picked = np.unique(np.linspace(0, len(own_cases) - 1, min(len(own_cases), MOST_POINTS)).astype(int))
        cases += [own_cases[index] for index in picked.tolist()]
    [(name, rows)] = seen.items()
    software = f"{rows.word('framework')} {rows.word('version')}, imported tables"
    seconds = {case.name: points[case] for case in cases}
    return ImportedPoints(load_gpu(name), rows.word("device"), software, tuple(cases), seconds, skipped)


def _products(rows: OperatorTable, gpu: Gpu) -> Iterator[tuple[Case, float]]:
    """Yield each product with its seconds alone."""
    recipe = RECIPES.get(rows.word("dtype", "gemm_dtype"), "")
    require(recipe in IMPORTED, f"products in {rows.word('dtype', 'gemm_dtype')!r} are not imported")
    m, n, k = (rows.counts(side) for side in "mnk")
    measured_s = rows.numbers("latency_ms") * MS
    alone_s = measured_s.copy()
    for kind in LINEAR_FORMATS[recipe].quantise if fit_for(gpu).quantize else ():
        alone_s = alone_s - quantize_s(m, k, gpu, kind)
    sizes = np.stack([m, n, k], axis=1).astype(np.int64).tolist()
    for index in np.flatnonzero(alone_s > np.maximum(LEAST_S, LEAST_SHARE * measured_s)).tolist():
        rows_m, columns_n, depth_k = sizes[index]
        yield Case(Matmul(rows_m, columns_n, depth_k, dtype=LINEAR_FORMATS[recipe].product)), float(alone_s[index])


# ---- measuring -------------------------------------------------------------------------------------------------------


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
    """Return the host's seconds for one call, without waiting for the GPU."""
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
    """Return the pace of this host as a calibration. It changes with the other load; measuring takes 0.25 s."""
    launch = {STEP: min(0.09, host_s(torch, small_step(torch, "cuda"), STEP_RUNS)), LOOKS: HOST_LOOKS}
    return calibration.calibration({"gpu": load_gpu(gpu).name, "launch": launch}, "this host")


def watch_host(torch: ModuleType) -> Callable[[], float]:
    """Return a function that measures the host again, and returns its time as a multiple of the present time."""
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
