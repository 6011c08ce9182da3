"""The part of the compute fit that learns from many GPUs: fp32 on ordinary cores, from NeuSight's set.

Measured fp32 times of P4, P100, T4, V100, A100 and H200 teach how the ordinary cores, the L2 cache, the
memory and the power limit scale from one GPU to another; tools/fit_folds.py leaves one GPU out at a time.

Their measuring waits for the GPU after each call, so a reported time holds what the host takes until the
kernel starts. The shortest times of an operator on a GPU show that host; a GPU not measured gets the median.
"""

import gzip
from csv import DictReader
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fit_tables import Free, to_toml
from minimise import Vector, minimise

from stepcast.cost.fits import ComputeFit, compute_fit
from stepcast.cost.matmul import matmul_seconds
from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.ir.types import DType
from stepcast.validate.neusight import INPUTS, MATRIX, FP32Rows, reported_s

GPUS = {
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla P100-PCIE-16GB": "p100-pcie",
    "Tesla T4": "t4",
    "Tesla P4": "p4",
    "NVIDIA H200": "h200",
}
# Relative energy per operation by process node, assumed for boards that must throttle. TSMC states 65 % less
# power at equal speed from 16 to 7 nm (EE Times, 2018) and 30 % from 7 to 5 nm (Tom's Hardware, 2019); 12 nm
# is 16 nm refined.
NODE = {"pascal": 1.1, "turing": 1.0, "ada": 0.3}
# At full clock: an H200 that multiplied in fp32 at 51 TFLOP/s drew 680 W, and 124 W when idle at that clock
# (tools/measure_sweep.py). Older boards of that kind spend more, but within their limit: no V100 or A100 of
# the set falls back as the T4 and the P4 do.
FULL_CLOCK_JOULE = dict.fromkeys(("volta", "ampere", "hopper", "blackwell", "blackwell-ultra"), 1.09e-11)
# Whose kernels stand in for an architecture that lost its only GPU: both have compute capability 7.x.
NEAREST = {"volta": "turing", "turing": "volta"}
LATEST = "hopper"  # measured by us, with the library of today; its constants come from these rows alone
LIKE_LATEST = ("ada", "blackwell", "blackwell-ultra")  # 128 lanes to a multiprocessor as well
# What is reached of the memory bandwidth goes with the kind of memory: GDDR with checked bits and the first
# HBM, or later HBM.
MEMORIES = (("pascal", "turing", "ada"), ("volta", "ampere", "hopper", "blackwell", "blackwell-ultra"))
LONE = "lone"  # fp32 rows of the h200 set, measured with other code and so without its overheads
SAMPLE = 300  # rows per GPU and operator that a fit sees
HOSTS = ("volta", "turing", "ampere")  # GPUs whose hosts stand for those of newer ones
LEAST_QUANTILE = 0.03  # so many of the rows are kernels too short to show
PULL = 0.004  # weight, per row, of staying near the constants of all GPUs
# Architectures whose GPUs ran at full clock, so that their own constants can be told from the power limit.
FULL_CLOCK = ("volta", "ampere", "hopper")
STREAMS = ("layer-norm", "softmax", "softmax-wide", "softmax-registers", "softmax-shared")
# In the library that NeuSight used, batched products of every GPU but the V100 ran with one large tile; what
# it held for newer GPUs is not known.
OLDER_BATCHED = {"tiles": [[128, 128], [64, 64]]}


@dataclass(frozen=True)
class Points:
    """Rows of one operator on one GPU with their measured times."""

    op: str
    gpu: Gpu
    m: Vector
    n: Vector
    k: Vector
    batch: Vector
    seconds: Vector

    @property
    def least_s(self) -> float:
        """What the host takes at least."""
        return 0.0 if self.op == LONE else float(np.quantile(self.seconds, LEAST_QUANTILE))

    def part(self, chosen: Any) -> "Points":
        return Points(self.op, self.gpu, *(x[chosen] for x in (self.m, self.n, self.k, self.batch, self.seconds)))


def read_points(folder: Path, name: str = "ops_fp32.csv.gz") -> list[Points]:
    grouped: dict[tuple[str, str], list[dict[str, str]]] = {}
    file = folder / name
    with gzip.open(file, "rt", encoding="utf-8") if name.endswith("gz") else file.open() as lines:
        for row in DictReader(lines):
            grouped.setdefault((row["op"], row["device"]), []).append(row)
    points = []
    for (op, device), rows in grouped.items():

        def of(name: str, rows: list[dict[str, str]] = rows) -> Vector:
            return np.array([float(row[name] or 1) for row in rows])

        sizes = (of("m"), of("k"), of("n"), of("b")) if op in MATRIX else (of("b"), of("h"), of("h"), of("b") * 0 + 1)
        points.append(Points(op, load_gpu(GPUS[device]), *sizes, of("ms") * 1e-3))
    return points


def h200_points(ops: list[dict[str, str]]) -> Points:
    """The fp32 products of the h200 set."""
    rows = [row for row in ops if row["op"] in MATRIX and row["dtype"] == "fp32"]
    sizes = (np.array([float(row[name] or 1) for row in rows]) for name in ("M", "N", "K", "B", "ms"))
    m, n, k, batch, ms = sizes
    return Points(LONE, load_gpu("h200"), m, n, k, batch, ms * 1e-3)


def predict(points: Points, fit: ComputeFit, added_s: float, least_s: float) -> Vector:
    sizes = (points.m, points.n, points.k, points.batch)
    if points.op == LONE:
        return np.asarray(matmul_seconds(*sizes, DType.FP32, points.gpu, fit))
    return reported_s(FP32Rows(points.op, points.gpu, *sizes), fit, added_s, least_s)


def sample(points: Points, count: int, seed: int = 0) -> Points:
    rng = np.random.default_rng(seed)
    size = points.seconds.size
    return points if size <= count else points.part(rng.choice(size, count, replace=False))


MATMUL: Free = {
    "efficiency": (0.97, 0.5, 1.0),
    "operand_clocks": (0.02, 0.001, 1.0),
    "store_exposure": (0.1, 0.001, 3.0),
    "memory_efficiency": (0.7, 0.3, 1.0),
    "reread": (0.5, 1e-3, 1.0),
    "partial_wave": (0.8, 0.02, 1.0),
    "split_s": (8e-6, 1e-7, 4e-5),
}
# Energy per operation at 12 nm, and by operator the share of the host's least time before the kernel starts.
OTHERS = ((1.6e-11, 1e-12, 6e-11), (0.7, 0.2, 1.0), (0.7, 0.2, 1.0))


def set_simt(table: dict[str, Any], values: Vector, left_out: str = "") -> dict[str, Any]:
    """*table* with the constants of ordinary cores; kernels of the architecture *left_out* are not known."""
    simt = dict(zip(MATMUL, map(float, values), strict=False))
    energy = float(values[len(MATMUL)])
    matmul, known = table["matmul"], table["power"]["joule_per_flop"]
    kernels = dict(matmul["simt_of"])
    if left_out:
        shapes: dict[str, Any] = kernels.get(NEAREST.get(left_out, "")) or _shapes(matmul["simt"])
        kernels[left_out] = shapes | simt
    joule = {name: float(f"{energy * share:.4g}") for name, share in NODE.items()} | FULL_CLOCK_JOULE
    power = known | {name: {**known.get(name, {}), "fp32": value} for name, value in joule.items()}
    return {
        **table,
        "matmul": {**matmul, "simt": {**matmul["simt"], **simt}, "simt_of": kernels},
        "power": {**table["power"], "joule_per_flop": power},
    }


def _shapes(simt: dict[str, Any]) -> dict[str, Any]:
    return {name: simt[name] for name in ("tiles", "batched")}


def set_own(table: dict[str, Any], values: Vector, names: tuple[str, ...]) -> dict[str, Any]:
    """*table* with constants for the kernels of the architectures *names* alone."""
    own = {name: float(f"{x:.4g}") for name, x in zip(MATMUL, map(float, values), strict=True)}
    kernels = dict(table["matmul"]["simt_of"])
    for name in names:
        kernels[name] = (kernels.get(name) or kernels[names[0]]) | own
    return {**table, "matmul": {**table["matmul"], "simt_of": kernels}}


def fit_own(
    table: dict[str, Any], points: list[Points], shares: dict[str, float], names: tuple[str, ...]
) -> dict[str, Any]:
    """The kernels of one generation, measured by *points*; what these do not show stays as it is."""
    simt = table["matmul"]["simt"]
    start = np.array([simt[name] for name in MATMUL])
    low, high = (np.array([b[i] for b in MATMUL.values()]) for i in (1, 2))
    found = [(sample(p, 2 * SAMPLE), p.least_s) for p in points]

    def ratios(x: Vector) -> Vector:
        fit = compute_fit(set_own(table, x, names))
        rows = [predict(p, fit, shares[p.op] * least_s, least_s) / p.seconds for p, least_s in found]
        return np.concatenate([*rows, (x / start) ** (PULL * sum(row.size for row in rows))])

    return set_own(table, minimise(ratios, start, low, high, scale=0.1, rounds=20), names)


def without(points: list[Points], held: str) -> tuple[list[Points], str]:
    """The rows of all GPUs but *held*, and its architecture where no other GPU shares it."""
    rest = [p for p in points if p.gpu.name != held]
    own = next((p.gpu.architecture for p in points if p.gpu.name == held), "")
    return rest, "" if own in {p.gpu.architecture for p in rest} else own


def median_s(points: list[Points], op: str) -> float:
    """The least time of the host, where it is not known: older GPUs sat in older hosts, ours was another."""
    hosts = [p.least_s for p in points if p.op == op and p.gpu.architecture in HOSTS]
    return float(f"{np.median(hosts):.4g}")


def fit_simt(
    table: dict[str, Any], points: list[Points], left_out: str = ""
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """[matmul.simt] and the energy of fp32, with the overheads of the measuring code (op -> added, least)."""
    found = [(sample(p, SAMPLE), p.least_s) for p in points if p.op in MATRIX and p.gpu.architecture != LATEST]
    bounds = [*MATMUL.values(), *OTHERS]
    start, low, high = (np.array([b[i] for b in bounds]) for i in range(3))

    def share(x: Vector) -> dict[str, float]:
        return {"linear": float(x[-2]), "bmm": float(x[-1])}

    def ratios(x: Vector) -> Vector:
        fit, before = compute_fit(set_simt(table, x, left_out)), share(x)
        return np.concatenate([predict(p, fit, before[p.op] * least_s, least_s) / p.seconds for p, least_s in found])

    best = minimise(ratios, start, low, high, scale=0.1, rounds=20)
    best = np.array([float(f"{value:.4g}") for value in best])
    overheads = {op: _overhead(points, op, share(best)[op]) for op in MATRIX}
    table, shares = set_simt(table, best, left_out), {**share(best), LONE: 0.0}
    for name in sorted({p.gpu.architecture for p in points} & set(FULL_CLOCK)):
        own = [p for p in points if p.gpu.architecture == name and p.op in _products(name)]
        table = fit_own(table, own, shares, (name, *(LIKE_LATEST if name == LATEST else ())))
    return table, overheads


def _products(architecture: str) -> tuple[str, ...]:
    return (LONE,) if architecture == LATEST else MATRIX


def _overhead(points: list[Points], op: str, share: float) -> tuple[float, float]:
    least_s = median_s(points, op)
    return float(f"{share * least_s:.4g}"), least_s


def fit_memory(table: dict[str, Any], points: list[Points]) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """What each architecture reaches of its bandwidth, the older norm and softmax kernels, and overheads."""
    points = [p for p in points if p.op not in (*MATRIX, LONE)]
    table = {**table, "memory_efficiency": memory_efficiency(table, points)}
    # The newest GPU ran other norm and softmax kernels; the h200 set is about those.
    older = [p for p in points if p.gpu.architecture != LATEST]
    overheads: dict[str, tuple[float, float]] = {}
    for op in sorted({p.op for p in points}):
        table, share = _fit_stream(table, [p for p in (older if op in ("ln", "softmax") else points) if p.op == op])
        overheads[op] = _overhead(points, op, share)
    return table, overheads


def memory_efficiency(table: dict[str, Any], points: list[Points]) -> dict[str, float]:
    """By architecture, relative to the streams of the H200; one not measured takes its kind of memory's."""
    whole = table["stream"]["add"]["bandwidth_efficiency"]
    known = {LATEST: 1.0}
    for name in sorted({p.gpu.architecture for p in points} - {LATEST}):
        reached = [
            np.median(_bytes(p) / p.seconds / p.gpu.memory_bandwidth_bytes_per_s)
            for q in points
            if q.gpu.architecture == name and q.op not in ("softmax", "ln")
            for p in [q.part(q.seconds > 1e-3)]
            if p.seconds.size
        ]
        known[name] = min(1.0, float(np.median(reached)) / whole)
    result = dict(known)
    for alike in MEMORIES:
        same = [known[name] for name in alike if name in known]
        result |= {name: float(np.mean(same)) for name in alike if name not in known and same}
    result["unseen"] = float(np.mean(list(known.values())))
    return {name: float(f"{value:.3g}") for name, value in result.items()}


def _bytes(points: Points) -> Vector:
    return points.m * points.n * (INPUTS.get(points.op, 1) + 1) * 4.0


def _fit_stream(table: dict[str, Any], points: list[Points]) -> tuple[dict[str, Any], float]:
    op, found = points[0].op, [(sample(p, SAMPLE), p.least_s) for p in points]
    bounds = [(0.4, 0.05, 1.0)]
    if op == "ln":
        bounds += [(0.7, 0.3, 1.0), (300.0, 1.0, 5000.0), (4.0, 0.1, 40.0)]
    elif op == "softmax":
        bounds += [(0.8, 0.2, 1.0), (0.6, 0.2, 1.0), (0.6, 0.2, 1.0), (0.5, 0.2, 1.0)]
    start, low, high = (np.array([b[i] for b in bounds]) for i in range(3))

    def changed(x: Vector) -> dict[str, Any]:
        stream = dict(table["stream"])
        if op == "ln":
            names = ("bandwidth_efficiency", "row_clocks", "column_clocks")
            stream["layer-norm"] = {**stream["layer-norm"], **dict(zip(names, map(float, x[1:]), strict=True))}
        elif op == "softmax":
            for key, value in zip(STREAMS[1:], x[1:], strict=True):
                older = {"bandwidth_efficiency": float(value), "elements_per_clock": 0.0, "column_clocks": 0.0}
                stream[key] = {**stream[key], **older}
        return {**table, "stream": stream}

    def ratios(x: Vector) -> Vector:
        fit = compute_fit(changed(x))
        return np.concatenate([predict(p, fit, x[0] * least_s, least_s) / p.seconds for p, least_s in found])

    best = np.array([float(f"{v:.4g}") for v in minimise(ratios, start, low, high, scale=0.1, rounds=15)])
    return changed(best), float(best[0])


def all_points(neusight: Path, h200: Path, ops: list[dict[str, str]]) -> list[Points]:
    return [*read_points(neusight), *read_points(h200, "one_at_a_time_fp32.csv"), h200_points(ops)]


def fit_neusight(table: dict[str, Any], points: list[Points], out: Path) -> None:
    fitted, overheads = fit_memory(table, points)
    fitted, more = fit_simt(fitted, points)
    for section in ("matmul", "power", "memory_efficiency"):
        table[section] = fitted[section]
    own = {
        "source": "tools/fit_neusight.py on NeuSight's fp32 set: older norm and softmax kernels, and "
        "the overheads of its measuring code",
        "matmul": {"simt_of": {name: {"batched": OLDER_BATCHED} for name in (LATEST, *LIKE_LATEST)}},
        "stream": {key: fitted["stream"][key] for key in STREAMS},
        "added_s": {op: value[0] for op, value in (overheads | more).items()},
        "least_s": {op: value[1] for op, value in (overheads | more).items()},
    }
    (out / "neusight.toml").write_text("\n".join(to_toml(own)) + "\n", encoding="utf-8")
