"""Operators that others measured: rows of public tables as cases of a profile.

Products are taken: those in fp8 after the estimated time of quantising their input. Tables of attention include rotary
embedding and the write into a cache, which training has apart or not at all, and are not taken.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from stepcast.cost.serving import LINEAR_FORMATS, fit_for, quantize_s
from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.operator_tables import OperatorTable, find_operator_tables, read_operator_table
from stepcast.ir.types import dataclass
from stepcast.ir.work import Matmul
from stepcast.pytorch.profile.cases import SIZES, Case
from stepcast.units import MS

SYSTEMS, RECIPES = SIZES["systems"], SIZES["recipes"]  # by the words of the public tables
PRODUCTS = ("gemm", "gemm_small")
IMPORTED = ("bf16", "fp8")  # recipes of products that training has too
LEAST_S = 50e-6  # shorter ones show how they were launched: from a CUDA graph, where ``profile`` launches each
LEAST_SHARE = 0.5  # of the measured time must be left when the quantisation is subtracted
MOST_POINTS = 300  # of a class, evenly over their times


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
    [(name, rows)], cases = seen.items(), _thin_out(points)
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
        work = Matmul(rows_m, columns_n, depth_k, dtype=LINEAR_FORMATS[recipe].product)
        yield Case(work), float(alone_s[index])


def _thin_out(points: dict[Case, float]) -> dict[Case, float]:
    """Return at most MOST_POINTS of each class, evenly over their times."""
    result: dict[Case, float] = {}
    for kind in dict.fromkeys(case.kind for case in points):
        own = sorted((case for case in points if case.kind == kind), key=lambda case: points[case])
        picked = np.unique(np.linspace(0, len(own) - 1, min(len(own), MOST_POINTS)).astype(int))
        result |= {own[index]: points[own[index]] for index in picked.tolist()}
    return result
