# mypy: ignore-errors
# ruff: noqa: B023 -- closures are used within their turn of the loop
"""Fit the fused experts of inference engines to public tables; writes data/fits/experts.toml.

Each kernel has constants for each architecture. A fifth of the shapes (sizes and degrees of parallelism) is left out of
a fit and shows its errors; the constants that are written are fitted to all rows.

    python tools/fit_experts.py ../shared/data/operators [KERNEL ...]

Constants of kernels that are not named stay as they are; without names all are fitted.
"""

import json
import sys
import tomllib
import zlib
from pathlib import Path

import numpy as np
from minimise import minimise

from stepcast.cost.experts import FusedExpertsFit, RankLoad
from stepcast.inputs.operator_tables import read_operator_table
from stepcast.units import MS
from stepcast.validate.operators import ExpertColumns, expert_columns, expert_cost_s, gpu_of

TARGET = Path(__file__).parents[1] / "src" / "stepcast" / "data" / "fits" / "experts.toml"
FREE = {
    "start_s": (3e-5, 1e-6, 1e-3),
    "hidden_passes": (1.0, 1e-4, 20),
    "inner_passes": (1.0, 1e-4, 20),
    "efficiency": (0.4, 0.02, 1.2),
    "memory_efficiency": (0.8, 0.1, 1.1),
    "expert_s": (1e-9, 1e-10, 1e-5),
    "permute_passes": (0.5, 1e-4, 20),
    "tile_16": (0.3, 0.02, 1),
    "tile_64": (0.6, 0.05, 1),
    "sharpness": (3, 1, 8),
    "cached_share": (1, 0.2, 4),
    "cached_speedup": (3, 1, 12),
    "depth_s": (5e-10, 1e-12, 2e-8),
    "reread": (0.2, 1e-4, 2),
    "sort_s": (3e-7, 1e-9, 1e-5),
}
COLD = {"cold": (0.1, 1e-3, 3)}  # of kernels whose tiles do not suit the sizes
# The kernel that takes vLLM's default tiles, and the shapes (experts of a rank, inner width) for which vLLM ships tuned
# ones: files "E=8,N=1792,device_name=NVIDIA_A100-SXM4-80GB.json" in vllm/model_executor/layers/fused_moe/configs.
TUNED = [[1, 1792], [1, 3584], [1, 7168], [1, 14336], [8, 1792], [8, 2048], [8, 3584], [8, 4096], [8, 7168],
         [16, 1344], [16, 2688], [128, 192]]  # fmt: skip
FIXED = {("vllm_fused_moe", "ampere"): {"default_tiles": True, "tuned": TUNED}}
MOST_ROWS = 900


def main() -> None:
    groups: dict[tuple[str, str], list] = {}
    for name in ("experts", "experts_small"):
        table = read_operator_table(str(Path(sys.argv[1]) / f"{name}.csv.gz"))
        for rows in table.split(("system", "device", "kernel_source", "moe_dtype", "distribution")):
            gpu = gpu_of(rows)
            if rows.word("kernel_source") in sys.argv[2:] or not sys.argv[2:]:
                groups.setdefault((rows.word("kernel_source"), gpu.architecture), []).append((rows, gpu))
    kernels = tomllib.loads(TARGET.read_text(encoding="utf-8"))["kernels"] if sys.argv[2:] else {}
    held_errors, all_errors = [], []
    for (kernel, architecture), parts in sorted(groups.items()):
        parts.sort(key=lambda part: (part[0].word("moe_dtype"), part[1].name))
        merged: dict[tuple, list] = {}
        for rows, gpu in parts:
            merged.setdefault((rows.word("moe_dtype"), gpu), []).append(expert_columns(rows))
        columns = [(word, join(own), gpu) for (word, gpu), own in merged.items()]
        fixed = FIXED.get((kernel, architecture), {})
        free = FREE | (COLD if fixed else {})
        start, low, high = np.array(list(free.values())).T
        measured = np.concatenate([rows.numbers("latency_ms") for rows, _ in parts]) * MS
        shapes = np.concatenate([shape_keys(rows) for rows, _ in parts])
        lengths = [len(own.tokens) for _, own, _ in columns]
        part_of = np.repeat(np.arange(len(columns)), lengths)
        place = np.concatenate([np.arange(length) for length in lengths])

        def predict(values, chosen):
            fit = FusedExpertsFit(**dict(zip(free, map(float, values), strict=True)), **fixed)
            seconds = np.empty(len(chosen))
            for index, (word, own, gpu) in enumerate(columns):
                mine = part_of[chosen] == index
                if mine.any():
                    at = place[chosen][mine]
                    load = RankLoad(*(column[at] for column in own.load))
                    taken = ExpertColumns(*(load if column is own.load else column[at] for column in own))
                    seconds[mine] = expert_cost_s(kernel, word, taken, gpu, fit)
            return seconds

        def solve(allowed):
            chosen = np.where(allowed)[0]
            chosen = np.random.default_rng(0).choice(chosen, min(len(chosen), MOST_ROWS), replace=False)
            return minimise(lambda values: predict(values, chosen) / measured[chosen], start, low, high, scale=0.1)

        held = shapes == 0
        everything = np.arange(len(measured))
        if held.any() and not held.all():
            error = np.abs(predict(solve(~held), everything[held]) / measured[held] - 1)
            held_errors.append(error)
        best = solve(np.ones(len(measured), dtype=bool))
        all_errors.append(np.abs(predict(best, everything) / measured - 1))
        text = f"{100 * held_errors[-1].mean():.1f} % left out" if held.any() and not held.all() else ""
        print(kernel, architecture, len(measured), f"{100 * all_errors[-1].mean():.1f} %", text, flush=True)
        kernels.setdefault(kernel, {})[architecture] = dict(zip(free, best, strict=True)) | fixed
    for name, errors in (("all", all_errors), ("left out", held_errors)):
        print(f"{name}: {100 * np.concatenate(errors).mean():.1f} %")
    lines = [
        "source = \"tools/fit_experts.py on half of the shapes of NVIDIA aiconfigurator's tables experts and "
        'experts_small (095f58a): fused experts of vLLM 0.14 to 0.24, balanced and power-law routing"'
    ]
    for kernel, architectures in kernels.items():
        lines += ["", f"[kernels.{kernel}]"]
        for architecture, values in architectures.items():
            written = {
                key: f"{x:.4g}" if type(x) in (int, float, np.float64) else json.dumps(x) for key, x in values.items()
            }
            inner = ", ".join(f"{key} = {text}" for key, text in written.items())
            lines.append(f"{architecture} = {{ {inner} }}")
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")


def join(parts: list[ExpertColumns]) -> ExpertColumns:
    loads = RankLoad(*(np.concatenate(columns) for columns in zip(*(part.load for part in parts), strict=True)))
    columns = zip(*(part._replace(load=part.tokens) for part in parts), strict=True)
    return ExpertColumns(*map(np.concatenate, columns))._replace(load=loads)


def shape_keys(rows) -> np.ndarray:
    names = ("hidden_size", "inter_size", "num_experts", "moe_tp_size", "moe_ep_size")
    columns = np.stack([rows.counts(name) for name in names], axis=1)
    return np.array([zlib.crc32(row.tobytes()) % 5 for row in columns])


if __name__ == "__main__":
    main()
