"""Fit the constants of the compute prices and write them to src/stepcast/data/fits/.

    python tools/fit_compute.py --h200 src/stepcast/data/h200 --neusight FOLDER

FOLDER holds NeuSight's measurements, ``ops_fp32.csv.gz``; without it fp32 on ordinary cores is not fitted.
tools/fit_folds.py cross-validates. Needs numpy only; takes a few minutes.
"""

import argparse
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fit_neusight import all_points, fit_neusight
from fit_tables import OUT, Free, Row, column, fit_keys, put, read, report, to_toml
from minimise import Vector
from msgspec.structs import replace

from stepcast.cost.attention import AttentionSizes, attention_seconds
from stepcast.cost.fits import ComputeFit, compute_fit
from stepcast.cost.matmul import matmul_seconds
from stepcast.cost.memory_bound import softmax_key, stream_seconds
from stepcast.cost.power import ALONE, Load
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.types import DType

H200 = load_gpu("h200")
QUEUED = Load(0.1, 1.0)  # tools/measure_kernels.py queues each case for about that long

# ---- tensor-core matmul ------------------------------------------------------------------------------

TENSOR_FREE: Free = {
    "matmul.tensor.efficiency": (0.98, 0.5, 1.0),
    "matmul.tensor.operand_clocks": (0.005, 1e-4, 0.1),
    "matmul.tensor.store_exposure": (1.2, 0.01, 3.0),
    "matmul.tensor.memory_efficiency": (0.65, 0.4, 1.0),
    "matmul.tensor.split_s": (3e-6, 1e-7, 2e-5),
    "matmul.tensor.latency_s": (2.3e-6, 1e-7, 1e-5),
    "power.joule_per_flop.hopper.bf16": (0.9e-12, 1e-13, 5e-12),
    "power.warm_up_s": (2e-3, 1e-4, 5e-3),
}


# Tiles of tf32 are stored in about the time of bf16's, which have half of the bytes.
TF32_FREE: Free = {
    "matmul.tensor_of.hopper-tf32.efficiency": (0.95, 0.5, 1.0),
    "matmul.tensor_of.hopper-tf32.store_exposure": (0.6, 0.01, 3.0),
}


# Batched products: persistent kernels hide more of their stores, and stream from memory without a pause.
BATCHED_FREE: Free = {
    "matmul.tensor.batched.operand_clocks": (0.004, 1e-4, 0.1),
    "matmul.tensor.batched.store_exposure": (0.6, 0.01, 3.0),
    "matmul.tensor.batched.memory_efficiency": (0.8, 0.4, 1.0),
    "matmul.tensor.unaligned_operands": (15.0, 1.0, 100.0),
    "matmul.tensor.odd_operands": (40.0, 1.0, 200.0),
    "matmul.tensor.unaligned_memory": (0.4, 0.1, 1.0),
    "matmul.tensor.odd_memory": (0.3, 0.1, 1.0),
}


def matmul_predictor(rows: list[Row], load: Load = ALONE) -> Callable[[ComputeFit], Vector]:
    m, n, k, batch = (column(rows, name) for name in ("M", "N", "K", "B"))
    dtypes = np.array([row["dtype"] for row in rows])

    def predict(fit: ComputeFit) -> Vector:
        out = np.empty(len(rows))
        for dtype in np.unique(dtypes):
            i = dtypes == dtype
            out[i] = matmul_seconds(m[i], n[i], k[i], batch[i], DType(str(dtype)), H200, fit, load)
        return out

    return predict


def fit_tensor(table: dict[str, Any], ops: list[Row], fp8: list[Row], kernels: list[Row]) -> None:
    rows = [row for row in ops if row["op"] == "linear" and row["dtype"] == "bf16"]
    measured = column(rows, "ms") * 1e-3
    put(table, fit_keys(table, TENSOR_FREE, matmul_predictor(rows), measured))
    energy = table["power"]["joule_per_flop"]["hopper"]["bf16"]
    table["power"]["joule_per_flop"]["hopper"] |= {"fp16": energy, "tf32": 2 * energy, "fp8": energy / 2}
    # The same process node, so the same energy is assumed; compute_start.toml has those of other nodes.
    table["power"]["joule_per_flop"]["ada"] = dict(table["power"]["joule_per_flop"]["hopper"])
    for dtype, more in (("fp16", []), ("tf32", []), ("fp8", fp8)):
        own = [row for row in [*ops, *more] if row["op"] == "linear" and row["dtype"] == dtype]
        free: Free = {f"matrix_efficiency.{dtype}": (0.95, 0.5, 1.0)}
        long = long_enough(own)
        put(table, fit_keys(table, free, matmul_predictor(long), column(long, "ms") * 1e-3))
        if dtype == "tf32":
            put(table, {key: start for key, (start, _, _) in TF32_FREE.items()})
            put(table, fit_keys(table, TF32_FREE, matmul_predictor(long), column(long, "ms") * 1e-3))
        report(f"linear {dtype}, one constant", matmul_predictor(own)(compute_fit(table)), column(own, "ms") * 1e-3)
    fit_batched(table, ops, kernels)
    grouped = [row for row in fp8 if row["op"] == "grouped_linear"]
    free = {"grouped_s": (1e-7, 1e-9, 1e-5), "grouped_efficiency": (0.9, 0.5, 1.0)}
    put(table, fit_keys(table, free, grouped_predictor(grouped), column(grouped, "ms") * 1e-3))
    report("grouped bf16, two constants", grouped_predictor(grouped)(compute_fit(table)), column(grouped, "ms") * 1e-3)


def long_enough(rows: list[Row]) -> list[Row]:
    """Products that say something about the rate of their unit rather than about launches."""
    return [row for row in rows if float(row["ms"]) > 0.02]


def fit_batched(table: dict[str, Any], ops: list[Row], kernels: list[Row]) -> None:
    """Batched products, and what rows without alignment cost these and linear layers."""
    bmm = [row for row in ops if row["op"] == "bmm" and row["dtype"] == "bf16"]
    queued = [
        {"dtype": "bf16", "B": "1", "M": row["a"], "N": row["b"], "K": row["c"], "us": row["us"]}
        for row in kernels
        if row["case"] == "linear" and row["dtype"] == "bf16" and (int(row["b"]) % 8 or int(row["c"]) % 8)
    ]
    measured = np.concatenate([column(bmm, "ms") * 1e-3, column(queued, "us") * 1e-6])
    alone, busy = matmul_predictor(bmm), matmul_predictor(queued, QUEUED)

    def predict(fit: ComputeFit) -> Vector:
        return np.concatenate([alone(fit), busy(fit)])

    put(table, fit_keys(table, BATCHED_FREE, predict, measured))
    fitted = compute_fit(table)
    report("bmm bf16", alone(fitted), column(bmm, "ms") * 1e-3)
    report("linear bf16 without alignment, queued", busy(fitted), column(queued, "us") * 1e-6)


def grouped_predictor(rows: list[Row]) -> Callable[[ComputeFit], Vector]:
    groups, m, n, k = (column(rows, name) for name in ("B", "M", "N", "K"))
    return lambda fit: np.asarray(matmul_seconds(m, n, k, groups, DType.BF16, H200, fit, grouped=True))


# ---- attention ---------------------------------------------------------------------------------------


def attention_free(phase: str) -> Free:
    """The constants of one phase of attention with their start and bounds."""
    free: Free = {
        f"attention.{phase}.efficiency": (0.9, 0.3, 1.0),
        f"attention.{phase}.flops_per_score": (300.0, 1.0, 2000.0),
        f"attention.{phase}.tail": (0.5, 0.01, 2.0),
        f"attention.{phase}.memory_exposure": (0.5, 0.01, 3.0),
        f"attention.{phase}.latency_s": (5e-6, 1e-7, 4e-5),
    }
    return free | ({"backward_call_s": (1.3e-4, 5e-5, 2.5e-4)} if phase == "backward" else {})


def fit_attention(table: dict[str, Any], ops: list[Row]) -> None:
    for phase, op in (("forward", "sdpa_fwd"), ("backward", "sdpa_bwd")):
        rows = [row for row in ops if row["op"] == op]
        measured = column(rows, "ms") * 1e-3
        put(table, fit_keys(table, attention_free(phase), attention_predictor(rows, phase), measured))


def attention_predictor(rows: list[Row], phase: str) -> Callable[[ComputeFit], Vector]:
    """A lone backward call waits for the autograd engine, so a call time bounds it from below."""
    b, s, h, kv, d = (column(rows, name) for name in ("B", "S", "heads", "kv", "D"))
    backward = phase == "backward"

    def predict(fit: ComputeFit) -> Vector:
        seconds = attention_seconds(AttentionSizes(b, s, s, h, kv, d, d), True, backward, DType.BF16, H200, fit)
        return np.asarray((seconds**4 + fit.backward_call_s**4) ** 0.25 if backward else seconds)

    return predict


# ---- memory-bound kernels ----------------------------------------------------------------------------

STREAM_FREE: Free = {
    "stream.add.bandwidth_efficiency": (0.9, 0.5, 1.0),
    "stream.add.latency_s": (1.2e-6, 1e-7, 5e-6),
    "stream.gelu.elements_per_clock": (3.3, 0.3, 50.0),
    "stream.dropout.elements_per_clock": (2.4, 0.3, 50.0),
    "stream.cast-up.elements_per_clock": (1.4, 0.3, 50.0),
    "stream.cast-up.latency_s": (2.5e-6, 1e-7, 5e-6),
    "stream.optimizer.bandwidth_efficiency": (0.74, 0.3, 1.0),
    "stream.optimizer.elements_per_clock": (0.8, 0.1, 50.0),
    "stream.layer-norm.bandwidth_efficiency": (0.87, 0.3, 1.0),
    "stream.layer-norm.row_clocks": (350.0, 1.0, 5000.0),
    "stream.layer-norm.column_clocks": (3.8, 0.1, 40.0),
    "stream.rms-norm.bandwidth_efficiency": (0.87, 0.3, 1.0),
    "stream.rms-norm.row_clocks": (40.0, 1.0, 5000.0),
    "stream.rms-norm.column_clocks": (3.8, 0.1, 40.0),
    "stream.softmax.bandwidth_efficiency": (0.86, 0.1, 1.0),
    "stream.softmax.column_clocks": (6.0, 0.1, 40.0),
    "stream.softmax-wide.column_clocks": (8.0, 0.1, 40.0),
    "stream.softmax-registers.elements_per_clock": (1.2, 0.1, 50.0),
    "stream.softmax-shared.elements_per_clock": (2.0, 0.1, 50.0),
    "stream.embedding.bandwidth_efficiency": (0.78, 0.1, 1.0),
    "stream.cross-entropy.bandwidth_efficiency": (0.82, 0.3, 1.0),
    "stream.quantize.bandwidth_efficiency": (0.2, 0.05, 1.0),
    "stream.quantize.latency_s": (1.5e-5, 1e-6, 4e-5),
}
# Fitted after the rest: a lone call of SwiGLU is two kernels, and a step does not see its latency.
LATE_FREE: Free = {"stream.silu.latency_s": (2e-6, 1e-7, 1e-5)}
LIKE_ADD = ("mul", "gelu", "silu", "dropout", "cast", "cast-up", "rotary", "swiglu", "mask", "fill", "other")

OWN_LATENCY = ("quantize", "cast-up")  # several kernels in one call; more threads than other kernels


def shared(fit: ComputeFit) -> ComputeFit:
    """Kinds that differ by one constant take the rest from their relative."""
    add = fit.streams["add"]
    streams = dict(fit.streams)
    for key in LIKE_ADD:
        streams[key] = replace(streams[key], bandwidth_efficiency=add.bandwidth_efficiency)
    for key in ("softmax-wide", "softmax-registers", "softmax-shared"):
        streams[key] = replace(streams[key], bandwidth_efficiency=streams["softmax"].bandwidth_efficiency)
    for key in streams:
        if key not in OWN_LATENCY:
            streams[key] = replace(streams[key], latency_s=add.latency_s)
    return replace(fit, streams=streams)


def stream_predictor(
    rows: list[Row], share: Callable[[ComputeFit], ComputeFit] = shared
) -> Callable[[ComputeFit], Vector]:
    def one(row: Row, fit: ComputeFit) -> float:
        size = 4.0 if row["dtype"] == "fp32" else 2.0
        if row["numel"]:
            lines, wide = 1.0, float(row["numel"])
        else:
            lines, wide = float(row["rows"]), float(row["cols"])
        n = lines * wide

        def kernel(key: str, read_bytes: float, write_bytes: float) -> float:
            return float(stream_seconds(key, lines, wide, read_bytes * n, write_bytes * n, H200, fit))

        match row["op"]:
            case "add":
                return kernel("add", 2 * size, size)
            case "gelu" | "dropout" as op:
                return kernel(op, size, size)
            case "silu_mul":
                # Two kernels in one call: the launch of the second hides behind the first.
                hidden = H200.launch_overhead_s + fit.stream("add").latency_s - fit.step_launch_s
                return kernel("silu", size, size) + kernel("mul", 2 * size, size) - hidden
            case "quantize_fp8":
                return kernel("quantize", 4, 1)
            case "cast_fp32":
                return kernel("cast-up", 2, 4)
            case "adamw_fused":
                return kernel("optimizer", 4 * size, 3 * size)
            case "layernorm":
                return kernel("layer-norm", size, size)
            case "rmsnorm":
                return kernel("rms-norm", size, size)
            case "softmax":
                return kernel(softmax_key(int(wide)), size, size)
            case "embedding":
                return kernel("embedding", size, size)
            case "cross_entropy":
                return kernel("cast-up", 2, 4) + kernel("cross-entropy", 12, 4)
        raise ValueError(row["op"])

    return lambda fit: np.array([one(row, share(fit)) for row in rows])


def fit_late(table: dict[str, Any], rows: list[Row]) -> dict[str, float]:
    """Return the constants that follow from all others."""
    return fit_keys(table, LATE_FREE, stream_predictor(rows, lambda fit: fit), column(rows, "ms") * 1e-3)


def fit_streams(table: dict[str, Any], ops: list[Row]) -> None:
    others = ("linear", "bmm", "sdpa_fwd", "sdpa_bwd", "grouped_linear")
    rows = [row for row in ops if row["op"] not in others]
    measured = column(rows, "ms") * 1e-3
    put(table, fit_keys(table, STREAM_FREE, stream_predictor(rows), measured))
    for name, entry in table["stream"].items():
        done = shared(compute_fit(table)).streams[name]
        entry |= {"bandwidth_efficiency": done.bandwidth_efficiency, "latency_s": done.latency_s}
    put(table, fit_late(table, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--h200", type=Path, required=True)
    parser.add_argument("--neusight", type=Path)
    chosen = parser.parse_args()
    ops = [*read(chosen.h200 / "ops.csv"), *read(chosen.h200 / "ops_batched.csv")]
    fp8 = read(chosen.h200 / "ops_fp8_grouped.csv")
    table = tomllib.loads((Path(__file__).parent / "compute_start.toml").read_text(encoding="utf-8"))
    fit_tensor(table, ops, fp8, read(chosen.h200 / "kernels.csv"))
    fit_attention(table, ops)
    fit_streams(table, [*ops, *fp8])
    if chosen.neusight:
        fit_neusight(table, all_points(chosen.neusight, chosen.h200, ops), OUT)
    OUT.mkdir(exist_ok=True)
    (OUT / "compute.toml").write_text("\n".join(to_toml(table)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
