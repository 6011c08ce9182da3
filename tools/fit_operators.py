"""Fit the operators of inference engines to public tables of ten GPUs: ``data/fits/operators.toml``.

    python tools/fit_operators.py ../shared/data/operators [--without b300,l40s] [--only ada] [--kinds mla_prefill]
                                  [--groups] [-o FILE]

Each architecture has its own constants. ``--without`` leaves out GPUs; an architecture that is then without rows uses
those of its stand-in. ``--groups`` leaves out every third shape of weights, heads or models and shows its errors,
without writing. ``--only`` and ``--kinds`` fit some architectures and kinds; others keep the constants of the file.
"""

import argparse
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fit_tables import OUT, put, to_toml
from minimise import Vector, minimise
from msgspec import to_builtins

from stepcast.cost import serving
from stepcast.cost.serving import ServingFit, serving_fit
from stepcast.hardware import Gpu, load_cluster
from stepcast.inputs.operator_tables import OperatorTable, read_operator_table
from stepcast.pytorch.profile import RECIPES, gpu_of
from stepcast.units import KIB, MS
from stepcast.validate.operators import COPIES, attention_cost_s, sequence_cost_s

ARCHITECTURES = {
    "ampere": ("a100-sxm-80gb",),
    "hopper": ("h100-sxm", "h200"),
    "blackwell": ("b200", "gb200"),
    "blackwell-ultra": ("b300", "gb300"),
    "ada": ("l40s",),
    "blackwell-rtx": ("rtx-pro-6000",),
    "xe2": ("arc-pro-b60",),
}
TILES = [[64, 64], [128, 64], [64, 128], [128, 128], [128, 160], [160, 128], [192, 128], [128, 192], [128, 256],
         [256, 128], [320, 128], [128, 320], [256, 256]]  # fmt: skip
Free = dict[str, tuple[float, float, float]]
LINEAR: Free = {
    "product.efficiency": (0.85, 0.2, 1.0),
    "product.operand_clocks": (0.004, 1e-5, 0.2),
    "product.store_exposure": (0.6, 0.01, 8.0),
    "product.memory_efficiency": (0.8, 0.3, 1.0),
    "product.reread": (0.02, 1e-6, 1.0),
    "product.partial_wave": (0.3, 0.01, 1.0),
    "product.split_s": (2.5e-6, 1e-8, 3e-5),
    "product.latency_s": (2.5e-6, 5e-7, 4e-5),
    "cached_speedup": (2.0, 1.0, 8.0),
    "joule_per_flop": (1e-12, 1e-14, 4e-12),
    "warm_up_s": (0.008, 0.001, 0.2),
}
QUANTISED: Free = {name: LINEAR[name] for name in LINEAR if name.partition(".")[2] not in ("reread", "split_s")} | {
    "quantise_factor": (1.0, 0.1, 8.0)
}
for name in ("cached_speedup", "warm_up_s"):
    del QUANTISED[name]
DEPTH: Free = {"depth_s": (1e-9, 1e-12, 1e-8)}
QUANTIZE: Free = {
    "latency_s": (3e-6, 1e-7, 2e-5),
    "bandwidth_efficiency": (0.8, 0.2, 1.0),
    "cached_speedup": (2.0, 1.0, 8.0),
    "cached_share": (1.0, 0.3, 3.0),
    "elements_per_clock": (6.0, 0.5, 64.0),
    "row_clocks": (50.0, 1e-3, 5000.0),
}
PREFILL: Free = {
    "efficiency": (0.8, 0.05, 1.0),
    "flops_per_score": (150.0, 1.0, 4000.0),
    "tail": (0.5, 0.01, 3.0),
    "memory_exposure": (1.0, 0.1, 8.0),
    "cache_write": (1.0, 0.1, 8.0),
    "tile_clocks": (3000.0, 10.0, 60000.0),
    "window_margin": (1.0, 0.2, 512.0),  # tiles; a kernel that ignores windows has many
    "narrow": (1.0, 0.3, 4.0),
    "wide": (1.0, 0.3, 8.0),
    "widest": (1.0, 0.3, 20.0),
    "joule_per_flop": (7e-13, 1e-13, 4e-12),
    "latency_s": (1.5e-5, 1e-6, 8e-5),
}
MLA_PREFILL: Free = {
    name: PREFILL[name] for name in PREFILL if name not in ("window_margin", "narrow", "wide", "widest")
}
SMALL_SHARED_BYTES = 128 * KIB  # per multiprocessor, as Ada and RTX PRO have: tiles of 64 queries, 192 + 128 wide
SMALL_MLA_PREFILL: Free = MLA_PREFILL | {"cached_share": (0.8, 0.1, 3.0)}
DECODE: Free = {
    "latency_s": (6e-6, 2e-6, 8e-5),
    "bandwidth_efficiency": (0.85, 0.1, 1.0),
    "cached_speedup": (2.0, 1.0, 8.0),
    "cached_share": (1.0, 0.25, 4.0),
    "block_clocks": (4000.0, 10.0, 200000.0),
    "token_clocks": (10.0, 0.01, 3000.0),
    "head_block_clocks": (2000.0, 10.0, 60000.0),
    "head_token_clocks": (10.0, 0.01, 3000.0),
    "window_margin": (64.0, 0.1, 512.0),
    "lone": (1.0, 0.01, 10.0),
    "sharpness": (3.0, 1.0, 6.0),
}
MLA_DECODE: Free = {name: DECODE[name] for name in DECODE if not name.startswith(("head_", "window_"))} | {
    "efficiency": (0.4, 0.005, 1.0)
}
SEQUENCE: Free = {
    "latency_s": (6e-6, 1e-6, 1e-3),
    "bandwidth_efficiency": (0.7, 0.01, 1.0),
    "sequence_clocks": (5.0, 1e-3, 1e6),
    "unit_clocks": (5.0, 1e-3, 1e6),
    "step_clocks": (500.0, 1.0, 1e5),
}
REDUCE: Free = {
    "start_s": (3e-6, 1e-7, 1e-4),
    "rank_s": (1e-7, 1e-9, 1e-5),
    "once_share": (0.6, 0.02, 2.0),
    "twice_start_s": (3e-6, 1e-7, 1e-4),
    "twice_share": (0.6, 0.02, 2.0),
}
FIXED: dict[str, dict[str, Any]] = {
    "linear": {"product": {"tiles": TILES}, "quantise_factor": 1.0},
    "prefill": {},
    "mla_prefill": {"window_margin": 0.0, "narrow": 1.0, "wide": 1.0, "widest": 1.0},
    "decode": {"efficiency": 1.0, "most_grouped": 32.0, "tile_heads": 16.0},
    "mla_decode": {
        "head_block_clocks": 0.0,
        "head_token_clocks": 0.0,
        "most_grouped": 128.0,
        "tile_heads": 64.0,
        "window_margin": 0.0,
    },
}
Rows = list[tuple[OperatorTable, Gpu]]


def fit_kind(
    entry: dict[str, Any],
    path: tuple[str, str],
    free: Free,
    rows: Rows,
    predict: Callable[[OperatorTable, Gpu, ServingFit], Vector],
) -> None:
    """Put the constants of one kind and format that fit *rows* into *entry*."""
    kind, name = path
    start: dict[str, Any] = to_builtins(FIXED.get(kind, {}))
    start = {**start, **({"product": dict(start["product"])} if "product" in start else {})}
    if kind == "mla_decode":
        start["divides"] = entry["attends_in_cache_format"]
    base = entry[kind].get("bf16") if kind == "linear" and name != "bf16" else None
    if base is not None:
        start = {**base, "product": dict(base["product"]), "quantise_factor": 1.0}
        if name == "nvfp4":  # no kernel of it divides the reduction
            start["product"]["split_s"] = 1.0
    if free is SMALL_MLA_PREFILL:
        start["query_tile"] = 64.0
    entry.setdefault(kind, {})[name] = start
    kept, held = divide(rows) if GROUPS else (rows, [])
    keys = list(free)
    low, high = (np.array([free[key][side] for key in keys]) for side in (1, 2))

    def ratios(values: Vector, chosen: Rows) -> Vector:
        put(start, dict(zip(keys, (float(f"{value:.5g}") for value in values), strict=True)))
        fit = serving_fit(entry)
        parts = [predict(table, gpu, fit) / (table.numbers("latency_ms") * MS) for table, gpu in chosen]
        return np.concatenate(parts)

    first = np.clip(np.array([free[key][0] for key in keys]), low, high)
    best = minimise(lambda values: ratios(values, kept), first, low, high)
    for label, chosen in (("", kept), (", shapes left out", held)):
        if chosen:
            error = np.abs(ratios(best, chosen) - 1.0)
            spread = f"median {np.median(error):.1%}, 90 % within {np.quantile(error, 0.9):.1%}"
            print(f"  {kind}.{name}: {error.size} rows{label}, {spread}", flush=True)


GROUPS = False
SHAPES = (("n", "k"), ("k",), ("num_heads", "head_dim"), ("num_heads",), ("model_name",), ("message_size",))


def divide(rows: Rows) -> tuple[Rows, Rows]:
    """Return the rows to fit and those of every third shape (weights, heads or model), which are left out."""
    kept, held = [], []
    for table, gpu in rows:
        columns = next(names for names in SHAPES if set(names) <= set(table.columns))
        shapes = np.array(["/".join(words) for words in zip(*(table.columns[name] for name in columns), strict=True)])
        left_out = np.array([sum(shape.encode()) % 3 == 0 for shape in shapes])
        for chosen, mask in ((kept, ~left_out), (held, left_out)):
            if mask.any():
                chosen.append((table.take(mask), gpu))
    return kept, held


def predict_linear(name: str) -> Callable[[OperatorTable, Gpu, ServingFit], Vector]:
    def predict(table: OperatorTable, gpu: Gpu, fit: ServingFit) -> Vector:
        m, n, k = (table.counts(side) for side in "mnk")
        return np.asarray(serving.linear_s(m, n, k, gpu, name, COPIES, fit=fit))

    return predict


def predict_quantize(name: str) -> Callable[[OperatorTable, Gpu, ServingFit], Vector]:
    return lambda table, gpu, fit: np.asarray(
        serving.quantize_s(table.counts("m"), table.counts("k"), gpu, name, fit=fit)
    )


def predict_reduce(table: OperatorTable, gpu: Gpu, fit: ServingFit) -> Vector:
    link, ranks = load_cluster(gpu.name).node.fabric.link.bandwidth_bytes_per_s, int(table.word("num_gpus"))
    return np.asarray(serving.custom_reduce_s(table.numbers("message_size") * 2.0, ranks, gpu, link, fit))


def read_rows(folder: Path) -> dict[str, list[tuple[OperatorTable, Gpu]]]:
    tables: dict[str, list[tuple[OperatorTable, Gpu]]] = {}
    words = (
        "system",
        "device",
        "kernel_source",
        "phase",
        "dtype",
        "gemm_dtype",
        "attn_dtype",
        "mla_dtype",
        "kv_cache_dtype",
        "quant_dtype",
        "num_gpus",
    )
    for path in sorted(folder.glob("*.csv.gz")):
        if path.name.startswith(("gemm", "quantize", "attention", "mla", "mamba2", "gated", "custom")):
            table = read_operator_table(str(path))
            table = table.take(table.numbers("latency_ms") > 0)
            tables[table.name] = [(part, gpu_of(part)) for part in table.split(words)]
    return tables


def pick(rows: Rows, gpus: tuple[str, ...], **words: str | tuple[str, ...]) -> Rows:
    def matches(table: OperatorTable) -> bool:
        return all(
            table.word(*name.split("__")) in ((word,) if isinstance(word, str) else word)
            for name, word in words.items()
        )

    return [(table, gpu) for table, gpu in rows if gpu.name in gpus and matches(table)]


KINDS = ("linear", "quantize", "prefill", "decode", "mla_prefill", "mla_decode", "sequence", "reduce")
TABLES = {"gemm": "linear", "gemm_small": "linear", "quantize_scale": "quantize", "quantize_matrix": "quantize",
          "attention_prefill": "prefill", "attention_decode": "decode", "mla_prefill": "mla_prefill",
          "mla_decode": "mla_decode", "mamba2": "sequence", "gated_delta_net": "sequence",
          "custom_allreduce": "reduce"}  # fmt: skip


def fit_architecture(
    all_tables: dict[str, Rows], gpus: tuple[str, ...], follows: bool, known: dict[str, Any], kinds: set[str]
) -> dict[str, Any]:
    """Return the constants of one architecture: fitted ones of *kinds*, *known* ones of others."""
    entry: dict[str, Any] = {"attends_in_cache_format": follows} | {
        kind: {} if kind in kinds else known.get(kind, {}) for kind in KINDS
    }
    tables = {name: rows if TABLES[name] in kinds else [] for name, rows in all_tables.items()}
    for name, table in (("scale", "quantize_scale"), ("cast", "quantize_matrix")):
        if rows := pick(tables[table], gpus):
            fit_kind(entry, ("quantize", name), QUANTIZE, rows, predict_quantize(name))
    for word, name in RECIPES.items():
        if rows := pick(tables["gemm"] + tables["gemm_small"], gpus, dtype__gemm_dtype=word):
            free = LINEAR if name == "bf16" else QUANTISED | (DEPTH if name in ("fp8-block", "nvfp4") else {})
            fit_kind(entry, ("linear", name), free, rows, predict_linear(name))
    fused = tuple(source for source in ("torch_flow", "vllm_flash_attn"))
    for name, words in (("bf16", {"attn_dtype": "bfloat16"}), ("fp8", {})):
        chosen = pick(tables["attention_prefill"], gpus, **words)
        chosen = [(table, gpu) for table, gpu in chosen if (computed_in(table, follows) == name)]
        if chosen:
            fit_kind(entry, ("prefill", name), PREFILL, chosen, attention_cost_s)
    for name, word in (("bf16", "bfloat16"), ("fp8", "fp8")):
        if rows := pick(tables["attention_decode"], gpus, kv_cache_dtype=word, kernel_source=fused):
            fit_kind(entry, ("decode", name), DECODE, rows, attention_cost_s)
        if rows := pick(tables["mla_prefill"], gpus, kv_cache_dtype=word):
            small = rows[0][1].shared_memory_per_sm_bytes < SMALL_SHARED_BYTES
            fit_kind(entry, ("mla_prefill", name), SMALL_MLA_PREFILL if small else MLA_PREFILL, rows, attention_cost_s)
        if rows := pick(tables["mla_decode"], gpus, kv_cache_dtype=word):
            fit_kind(entry, ("mla_decode", name), MLA_DECODE, rows, attention_cost_s)
    for table in ("mamba2", "gated_delta_net"):
        for source in sorted({part.word("kernel_source") for part, gpu in tables[table] if gpu.name in gpus}):
            rows = pick(tables[table], gpus, kernel_source=source)
            fit_kind(entry, ("sequence", f"{table}-{source}"), SEQUENCE, rows, sequence_cost_s)
    if rows := pick(tables["custom_allreduce"], gpus):
        fit_kind(entry, ("reduce", "custom"), REDUCE, rows, predict_reduce)
    return {kind: values for kind, values in entry.items() if values not in ({}, False)}


def computed_in(table: OperatorTable, follows: bool) -> str:
    """Return the format in which attention multiplies: that of the cache, where kernels follow it."""
    word = table.word("kv_cache_dtype") if follows else table.word("attn_dtype")
    return "fp8" if word == "fp8" else "bf16"


FOLLOWS = ("hopper", "blackwell", "blackwell-ultra", "xe2")  # those of Intel run other kernels for a cache in fp8
SOURCE = (
    "tools/fit_operators.py on half of the shapes of NVIDIA aiconfigurator's tables gemm, gemm_small, quantize_*, "
    "attention_*, mla_*, mamba2, gated_delta_net and custom_allreduce: TensorRT-LLM 1.3.0rc20 (A100: 1.0.0, and "
    "SGLang 0.5.10 for gated_delta_net; B60: vLLM 0.20.1), short bursts from CUDA graphs at locked clocks; rows of an "
    "architecture are those of its GPUs"
)
RESTS_ON = {
    "linear": "gemm and gemm_small: the rows of the format",
    "quantize": "scale: quantize_scale; cast: quantize_matrix",
    "prefill": "attention_prefill: the rows whose products run in the format, which is that of the cache where "
    "attends_in_cache_format is true",
    "decode": "attention_decode: the rows with a cache in the format, without kernel_source torch_flow_flashinfer",
    "mla_prefill": "mla_prefill: the rows with a cache in the format",
    "mla_decode": "mla_decode: the rows with a cache in the format",
    "sequence": "mamba2 and gated_delta_net: the rows of the kernel_source",
    "reduce": "custom_allreduce: the rows of 2, 4 and 8 GPUs",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without", default="")
    parser.add_argument("--only", default=",".join(ARCHITECTURES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("-o", type=Path, default=OUT / "operators.toml")
    parser.add_argument("--groups", action="store_true")
    args = parser.parse_args()
    global GROUPS
    GROUPS = args.groups
    tables = read_rows(args.folder)
    left_out = set(filter(None, args.without.split(",")))
    table: dict[str, Any] = {
        "source": SOURCE,
        "rests_on": RESTS_ON,
        "stand_in": {
            "else": "hopper",
            **dict.fromkeys(("volta", "turing", "pascal"), "ampere"),
            "ada": "blackwell-rtx",
            "blackwell-rtx": "ada",
            "blackwell-ultra": "blackwell",
            "rubin": "blackwell-ultra",
        },
        "architecture": {},
    }
    only, kinds = set(args.only.split(",")), set(args.kinds.split(","))
    partly = kinds != set(KINDS) or only != set(ARCHITECTURES)
    known = tomllib.loads(args.o.read_text(encoding="utf-8"))["architecture"] if partly else {}
    for architecture, gpus in ARCHITECTURES.items():
        kept = tuple(gpu for gpu in gpus if gpu not in left_out)
        own = known.get(architecture, {})
        if kept and architecture in only:
            print(architecture, ", ".join(kept), flush=True)
            own = fit_architecture(tables, kept, architecture in FOLLOWS, own, kinds)
            own = {"gpus": list(kept), **own}
        if own:
            table["architecture"][architecture] = own
    if args.groups:
        return
    args.o.write_text("\n".join(to_toml(table)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
