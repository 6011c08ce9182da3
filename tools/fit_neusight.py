"""The part of the compute fit that learns from many GPUs: fp32 on ordinary cores, from NeuSight's set.

Measured fp32 times of P4, P100, T4, V100 and A100 teach how the ordinary cores, the L2 cache, the memory and
the power limit scale from one GPU to another. ``--check`` leaves one GPU out at a time.
"""

import gzip
from csv import DictReader
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from minimise import Vector, minimise

from stepcast.cost.calibration import fit_correction
from stepcast.cost.compute import matmul_seconds
from stepcast.cost.compute_fit import ComputeFit, compute_fit
from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.gpu import Gpu
from stepcast.ir.dtype import DType
from stepcast.validate.neusight_ops import INPUTS, FP32Rows, reported_s

GPUS = {
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla P100-PCIE-16GB": "p100-pcie",
    "Tesla T4": "t4",
    "Tesla P4": "p4",
}
# Relative energy per operation by process node, assumed. TSMC states power savings at equal speed of about
# 60 % from 16 to 7 nm and 30 % from 7 to 5 nm; 12 nm is the 16 nm node refined.
NODE = {
    "pascal": 1.1,
    "volta": 1.0,
    "turing": 1.0,
    "ampere": 0.44,
    "ada": 0.3,
    "hopper": 0.3,
    "blackwell": 0.28,
}
# Architectures whose multiprocessors multiply in fp32 alike: the first shares the second's efficiency, so
# that what sets a T4 apart from a V100 is left to the power limit.
ALIKE = {"turing": "volta", "ada": "hopper", "blackwell": "hopper"}
SAMPLE = 150  # rows per GPU, operator and split that a fit sees


@dataclass(frozen=True)
class Points:
    """Rows of one operator on one GPU with their measured times; ``lone``: the fp32 rows of the h200 set."""

    op: str
    gpu: Gpu
    m: Vector
    n: Vector
    k: Vector
    batch: Vector
    seconds: Vector

    def part(self, chosen: Any) -> "Points":
        return Points(
            self.op, self.gpu, *(x[chosen] for x in (self.m, self.n, self.k, self.batch, self.seconds))
        )


def read_points(folder: Path) -> list[Points]:
    grouped: dict[tuple[str, str], list[dict[str, str]]] = {}
    with gzip.open(folder / "ops_fp32.csv.gz", "rt", encoding="utf-8") as lines:
        for row in DictReader(lines):
            grouped.setdefault((row["op"], row["device"]), []).append(row)
    points = []
    for (op, device), rows in grouped.items():

        def of(name: str, rows: list[dict[str, str]] = rows) -> Vector:
            return np.array([float(row[name] or 1) for row in rows])

        if op in ("linear", "bmm"):
            sizes = (of("m"), of("k"), of("n"), of("b"))
        else:
            sizes = (of("b"), of("h"), of("h"), of("b") * 0 + 1)
        points.append(Points(op, load_gpu(GPUS[device]), *sizes, of("ms") * 1e-3))
    return points


def h200_points(ops: list[dict[str, str]]) -> Points:
    """The fp32 rows of the h200 set: a sixth GPU, measured with other code and so without its overheads."""
    rows = [row for row in ops if row["op"] == "linear" and row["dtype"] == "fp32"]
    m, n, k, ms = (np.array([float(row[name]) for row in rows]) for name in ("M", "N", "K", "ms"))
    return Points("lone", load_gpu("h200"), m, n, k, m * 0 + 1, ms * 1e-3)


def predict(points: Points, fit: ComputeFit, added_s: float, least_s: float) -> Vector:
    sizes = (points.m, points.n, points.k, points.batch)
    if points.op == "lone":
        return np.asarray(matmul_seconds(*sizes, DType.FP32, points.gpu, fit))
    return reported_s(FP32Rows(points.op, points.gpu, *sizes), fit, added_s, least_s)


def sample(points: Points, count: int, seed: int = 0) -> Points:
    rng = np.random.default_rng(seed)
    size = points.seconds.size
    return points if size <= count else points.part(rng.choice(size, count, replace=False))


MATMUL = {
    "efficiency": (0.95, 0.5, 1.0),
    "operand_clocks": (0.05, 0.001, 1.0),
    "memory_efficiency": (0.7, 0.4, 1.0),
    "reread": (0.5, 1e-3, 1.0),
    "unaligned_efficiency": (0.95, 0.6, 1.0),
    "partial_wave": (0.5, 0.02, 1.0),
    "split_s": (5e-6, 1e-7, 2e-5),
}


def set_simt(table: dict[str, Any], values: Vector, architectures: list[str]) -> dict[str, Any]:
    simt = dict(zip(MATMUL, (float(v) for v in values[: len(MATMUL)]), strict=True))
    simt["odd_efficiency"] = simt["unaligned_efficiency"]
    energy = float(values[len(MATMUL)])
    known = table["power"]["joule_per_flop"]
    power = known | {name: {**known.get(name, {}), "fp32": energy * share} for name, share in NODE.items()}
    shares = dict(zip(architectures, (float(v) for v in values[-len(architectures) :]), strict=True))
    shares["unseen"] = float(f"{np.mean(list(shares.values())):.4g}")
    shares |= {name: shares[like] for name, like in ALIKE.items() if like in shares}
    return {
        **table,
        "simt_efficiency": shares,
        "matmul": {**table["matmul"], "simt": {**table["matmul"]["simt"], **simt}},
        "power": {**table["power"], "joule_per_flop": power},
    }


def fit_simt(
    table: dict[str, Any], points: list[Points]
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """[matmul.simt] and the energy of fp32, with the overheads of the measuring code (op -> added, least)."""
    rows = [sample(p, 2 * SAMPLE) for p in points if p.op in ("linear", "bmm", "lone")]
    architectures = sorted({ALIKE.get(p.gpu.architecture, p.gpu.architecture) for p in rows})
    bounds = [*MATMUL.values(), (1.6e-11, 1e-12, 4e-11), *[(3e-5, 1e-6, 8e-5), (4e-5, 1e-5, 1e-4)] * 2]
    bounds += [(0.9, 0.7, 1.0)] * len(architectures)
    start, low, high = (np.array([b[i] for b in bounds]) for i in range(3))
    first = len(MATMUL) + 1

    def overheads(x: Vector) -> dict[str, tuple[float, float]]:
        linear, bmm = (float(x[first]), float(x[first + 1])), (float(x[first + 2]), float(x[first + 3]))
        return {"linear": linear, "bmm": bmm, "lone": (0.0, 0.0)}

    def ratios(x: Vector) -> Vector:
        fit, extra = compute_fit(set_simt(table, x, architectures)), overheads(x)
        return np.concatenate([predict(p, fit, *extra[p.op]) / p.seconds for p in rows])

    best = minimise(ratios, start, low, high, scale=0.1, rounds=20)
    best = np.array([float(f"{value:.4g}") for value in best])
    return set_simt(table, best, architectures), overheads(best)


def fit_memory(
    table: dict[str, Any], points: list[Points], default: float | None = None
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """What each architecture reaches of its bandwidth, the older norm and softmax kernels, and overheads."""
    points = [p for p in points if p.op != "lone"]
    architectures = sorted({p.gpu.architecture for p in points})
    table = {**table, "memory_efficiency": dict(table.get("memory_efficiency", {}))}
    whole = table["stream"]["add"]["bandwidth_efficiency"] * 4.0
    for name in architectures:
        reached = [
            np.median(
                p.m * p.n * (INPUTS.get(p.op, 1) + 1) * 4.0 / p.seconds / p.gpu.memory_bandwidth_bytes_per_s
            )
            for q in points
            if q.gpu.architecture == name and q.op not in ("linear", "bmm", "softmax", "ln")
            for p in [q.part(q.seconds > 1e-3)]
            if p.seconds.size
        ]
        table["memory_efficiency"][name] = float(f"{min(1.0, float(np.median(reached)) / (whole / 4.0)):.3g}")
    table["memory_efficiency"]["unseen"] = default or float(
        f"{np.mean([table['memory_efficiency'][name] for name in architectures]):.3g}"
    )
    overheads: dict[str, tuple[float, float]] = {}
    for op in sorted({p.op for p in points} - {"linear", "bmm"}):
        rows = [sample(p, 2 * SAMPLE) for p in points if p.op == op]
        table, overheads[op] = _fit_stream(table, op, rows)
    return table, overheads


def _fit_stream(
    table: dict[str, Any], op: str, rows: list[Points]
) -> tuple[dict[str, Any], tuple[float, float]]:
    bounds = [(1e-5, 1e-7, 4e-5), (3e-5, 5e-6, 1e-4)]
    if op == "ln":
        bounds += [(0.7, 0.3, 1.0), (300.0, 1.0, 5000.0), (4.0, 0.1, 40.0)]
    elif op == "softmax":
        bounds += [(0.8, 0.2, 1.0), (0.6, 0.2, 1.0), (0.5, 0.2, 1.0)]
    start, low, high = (np.array([b[i] for b in bounds]) for i in range(3))

    def changed(x: Vector) -> dict[str, Any]:
        stream = dict(table["stream"])
        if op == "ln":
            names = ("bandwidth_efficiency", "row_clocks", "column_clocks")
            stream["layer-norm"] = {
                **stream["layer-norm"],
                **dict(zip(names, map(float, x[2:]), strict=True)),
            }
        elif op == "softmax":
            for key, value in zip(("softmax", "softmax-registers", "softmax-shared"), x[2:], strict=True):
                stream[key] = {**stream[key], "bandwidth_efficiency": float(value)}
        return {**table, "stream": stream}

    def ratios(x: Vector) -> Vector:
        fit = compute_fit(changed(x))
        return np.concatenate([predict(p, fit, float(x[0]), float(x[1])) / p.seconds for p in rows])

    best = np.array([float(f"{v:.4g}") for v in minimise(ratios, start, low, high, scale=0.1, rounds=15)])
    return changed(best), (float(best[0]), float(best[1]))


def check(table: dict[str, Any], points: list[Points]) -> None:
    """Leave one GPU out, then give back 20 of its points per operator."""
    cells: dict[tuple[str, str], float] = {}
    calibrated: dict[tuple[str, str], float] = {}
    for left_out in GPUS.values():
        rest = [p for p in points if p.gpu.name != left_out]
        fitted, overheads = fit_simt(table, rest)
        fitted, more = fit_memory(fitted, rest)
        overheads |= more
        fit = compute_fit(fitted)
        overheads["lone"] = (0.0, 0.0)
        for own in (p for p in points if p.gpu.name == left_out):
            predicted = predict(own, fit, *overheads[own.op])
            cells[own.op, left_out] = float(np.mean(np.abs(predicted / own.seconds - 1.0)))
            seen = np.random.default_rng(1).choice(own.seconds.size, 20, replace=False)
            unseen = np.ones(own.seconds.size, dtype=bool)
            unseen[seen] = False
            correction = fit_correction(predicted[seen], own.seconds[seen])
            error = np.abs(np.asarray(correction.applied_s(predicted[unseen])) / own.seconds[unseen] - 1.0)
            calibrated[own.op, left_out] = float(np.mean(error))
    for op in sorted({op for op, _ in cells}):
        row = [f"{cells[op, name]:.1%}/{calibrated[op, name]:.1%}" for name in GPUS.values()]
        print(f"  {op:8s}", "  ".join(row))
    mean, better = np.mean(list(cells.values())), np.mean(list(calibrated.values()))
    print(
        f"neusight, leave one GPU out: mean over cells {mean:.2%}; with 20 points per operator {better:.2%}"
    )


def fit_neusight(
    table: dict[str, Any], folder: Path, ops: list[dict[str, str]], checked: bool, out: Path
) -> None:
    from fit_compute import to_toml

    points = [*read_points(folder), h200_points(ops)]
    if checked:
        check(table, points)
    fitted, overheads = fit_simt(table, points)
    fitted, more = fit_memory(fitted, points)
    for section in ("matmul", "power", "simt_efficiency", "memory_efficiency"):
        table[section] = fitted[section]
    own = {
        "source": "tools/fit_neusight.py on NeuSight's fp32 set: older norm and softmax kernels, and "
        "the overheads of its measuring code",
        "stream": {key: fitted["stream"][key]
                   for key in ("layer-norm", "softmax", "softmax-registers", "softmax-shared")},
        "added_s": {op: value[0] for op, value in (overheads | more).items() if op != "lone"},
        "least_s": {op: value[1] for op, value in (overheads | more).items() if op != "lone"},
    }  # fmt: skip
    (out / "neusight.toml").write_text("\n".join(to_toml(own)) + "\n", encoding="utf-8")
