"""List the operators to measure: sizes of training (``data/profile.toml``), few enough for three minutes.

Matmuls are (tokens, outputs, inputs) of common layer widths, so that every class has points from small ones, where
launches and waves decide, to large ones, where the peak does.

Of the operators that others measured, rows of public tables, products are taken: those in fp8 after the estimated time
of quantising their input. Tables of attention include rotary embedding and the write into a cache, which training has
apart or not at all, and are not taken.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count, product, zip_longest

import numpy as np

from stepcast.cost.compute import compute_price, work_class
from stepcast.cost.fits import ComputeFit
from stepcast.cost.power import ALONE
from stepcast.cost.serving import LINEAR_FORMATS, fit_for, quantize_s
from stepcast.hardware.catalog import load_data, load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.operator_tables import OperatorTable, find_operator_tables, read_operator_table
from stepcast.ir.types import DType, dataclass
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.units import MS

Operator = Matmul | GroupedMatmul | Attention | Elementwise
K = ElementwiseKind

SIZES = load_data("profile")
LONGEST_S = 0.05  # longer operators are not measured
MEMORY_SHARE = 0.4  # of the GPU's memory that one case may take
SYSTEMS, RECIPES = SIZES["systems"], SIZES["recipes"]  # by the words of the public tables
PRODUCTS = ("gemm", "gemm_small")
IMPORTED = ("bf16", "fp8")  # recipes of products that training has too
LEAST_S = 50e-6  # shorter ones show how they were launched: from a CUDA graph, where ``profile`` launches each
LEAST_SHARE = 0.5  # of the measured time must be left when the quantisation is subtracted
MOST_POINTS = 300  # of a class, evenly over their times


@dataclass(frozen=True, slots=True)
class Case:
    """One operator to time; the name is its key in a calibration file."""

    work: Operator

    @property
    def kind(self) -> str:
        """Return the class under which it is calibrated."""
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
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    turns = {case: next(numbers[case.kind]) for case in cases}
    return tuple(sorted(cases, key=lambda case: turns[case]))


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
    if len(seen) != 1:
        names = ", ".join(sorted(seen)) or "none"
        raise ValueError(f"the tables hold products of {names}; name one GPU with --gpu")
    cases: dict[Case, float] = {}
    for kind in dict.fromkeys(case.kind for case in points):
        own_cases = sorted((case for case in points if case.kind == kind), key=lambda case: points[case])
        picked = np.unique(np.linspace(0, len(own_cases) - 1, min(len(own_cases), MOST_POINTS)).astype(int))
        cases |= {own_cases[index]: points[own_cases[index]] for index in picked.tolist()}
    [(name, rows)] = seen.items()
    software = f"{rows.word('framework')} {rows.word('version')}, imported tables"
    seconds = {case.name: value for case, value in cases.items()}
    return ImportedPoints(load_gpu(name), rows.word("device"), software, tuple(cases), seconds, skipped)


def _products(rows: OperatorTable, gpu: Gpu) -> Iterator[tuple[Case, float]]:
    """Yield each product with its seconds alone."""
    recipe = RECIPES.get(rows.word("dtype", "gemm_dtype"), "")
    if recipe not in IMPORTED:
        raise ValueError(f"products in {rows.word('dtype', 'gemm_dtype')!r} are not imported")
    m, n, k = (rows.counts(side) for side in "mnk")
    measured_s = rows.numbers("latency_ms") * MS
    alone_s = measured_s.copy()
    for kind in LINEAR_FORMATS[recipe].quantise if fit_for(gpu).quantize else ():
        alone_s = alone_s - quantize_s(m, k, gpu, kind)
    sizes = np.stack([m, n, k], axis=1).astype(np.int64).tolist()
    for index in np.flatnonzero(alone_s > np.maximum(LEAST_S, LEAST_SHARE * measured_s)).tolist():
        rows_m, columns_n, depth_k = sizes[index]
        yield Case(Matmul(rows_m, columns_n, depth_k, dtype=LINEAR_FORMATS[recipe].product)), float(alone_s[index])
