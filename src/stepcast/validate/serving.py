"""The serving set: measured time to first token and time per output token of vLLM, SGLang and TensorRT-LLM.

Rows have the columns of aiconfigurator's ``silicon_sample.csv``. The concurrency is in the text of the source.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from stepcast.generation import placement
from stepcast.generation.forecast import SteadyServing, split_serving, steady_serving
from stepcast.generation.placement import GenerationFormats, GenerationLayout, GenerationMemory
from stepcast.generation.steps import NO_SPECULATION, Speculation, step_times
from stepcast.hardware import Cluster, load_cluster
from stepcast.ir.dtype import DType
from stepcast.models.catalog import load_model
from stepcast.validate.scoreboard import Measurements, Pair, Record, ScoredRow, columns_of, compare_each, read_records

FILE = "serving_runs.csv.gz"
CLUSTERS = {"h100_sxm": "dgx-h100", "h200_sxm": "hgx-h200", "b200_sxm": "dgx-b200", "b300_sxm": "dgx-b300",
            "gb200": "gb200-nvl72", "gb300": "gb300-nvl72", "a100_sxm": "dgx-a100"}  # fmt: skip
FORMATS = {"": DType.BF16, "bf16": DType.BF16, "fp8": DType.FP8, "fp8_block": DType.FP8, "nvfp4": DType.NVFP4}
SIZES = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
SHARED = ("backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode", "moe_quant_mode",
          "prefill_num_workers", "decode_num_workers",
          *(f"{pool}{size}" for pool in ("", "prefill_", "decode_") for size in SIZES))  # fmt: skip
PARTS = ("agg tpot", "agg ttft", "disagg tpot", "disagg ttft")
DRAFTING = Speculation(1)  # assumed of models with MTP modules where a disaggregated run states no workers
MOST_MEMORY = 0.98
DIFFERENT = 0.1  # times that differ by less are not ranked


def concurrency_of(row: Record, layout: GenerationLayout) -> float:
    """Return the clients of one engine, which the source of a run states, unless its batches are smaller: the clients
    are then those of several engines.
    """
    stated = re.search(r"silicon_concurrency=(\d+)", row.get("silicon_data_source", ""))
    numbers = [float(stated[1])] if stated else []
    if row.get("batch_size"):
        numbers.append(float(row["batch_size"]) * layout.dp)
    if not numbers:
        raise ValueError("states no concurrency")
    return min(numbers)


def layout_of(row: Record, pool: str, cluster: Cluster) -> GenerationLayout:
    """Return the layout that the columns of *pool* describe.

    Some dumps multiply tensor and expert parallel sizes, of which both span the same GPUs: 64 and 8 x 8 for
    an engine on one node of 8. Where the experts' sizes span more ranks than attention, it is data parallel.
    """
    tp, pp, dp, expert_tp, ep = (int(float(row.get(f"{pool}{size}") or 0)) or 1 for size in SIZES)
    if tp * dp > cluster.node.gpus and expert_tp == ep and tp * dp == expert_tp * ep:
        tp, dp = (expert_tp, 1) if tp > 1 else (1, expert_tp)
    elif expert_tp * ep > tp * dp and expert_tp * ep % tp == 0:
        dp = expert_tp * ep // tp
    return GenerationLayout(tp=tp, pp=pp, dp=dp, ep=ep if tp * dp % ep == 0 else 1)


@lru_cache(maxsize=32)
def _cluster(system: str) -> Cluster:
    if system not in CLUSTERS:
        raise ValueError(f"system {system!r} is not known")
    return load_cluster(CLUSTERS[system])


def predict_group(rows: Sequence[Record]) -> SteadyServing:
    """Return the prediction of rows that differ in their concurrency alone."""
    row = rows[0]
    model, cluster, engine = (
        load_model(row["model_path"]),
        _cluster(row["system"]),
        placement.load_engine(row["backend"]),
    )
    dense, experts = (FORMATS[row[f"{part}_quant_mode"]] for part in ("gemm", "moe"))
    formats = GenerationFormats(dense, experts, DType.BF16 if dense is DType.BF16 else DType.FP8)
    prompt, output = float(row["isl"]), float(row["osl"])

    pool = "decode_" if row["mode"] == "disagg" else ""
    layout = layout_of(row, pool, cluster)
    clients = np.array([concurrency_of(each, layout) for each in rows])
    context = prompt + output / 2.0

    def memory_of(layout: GenerationLayout) -> GenerationMemory:
        memory = placement.generation_memory(model, layout, formats, cluster.gpu, engine)
        if memory.sequences_that_fit(context) >= 1.0:
            return memory
        # The run was measured, so its engine was given more.
        return placement.generation_memory(model, layout, formats, cluster.gpu, engine, MOST_MEMORY)

    apart = replace(layout, tp=1, dp=layout.width) if model.latent else layout
    if apart != layout and (model.heads % layout.tp or clients.max() > memory_of(layout).sequences_that_fit(context)):
        # Every tensor-parallel rank would hold the latent cache of all sequences, for which it has no room.
        layout = apart
    memory = memory_of(layout)
    drafting = pool and not row["prefill_num_workers"] and model.next_token_layers
    steps = step_times(model, cluster, layout, formats, engine, DRAFTING if drafting else NO_SPECULATION)
    if not pool:
        return steady_serving(steps, memory, clients, prompt, output)
    prefill = step_times(model, cluster, layout_of(row, "prefill_", cluster), formats, engine)
    stated = [float(row[f"{name}_num_workers"] or 0) or None for name in ("prefill", "decode")]
    return split_serving(prefill, steps, memory, (stated[0], stated[1]), clients, prompt, output)


def _pairs_right(cases: Mapping[tuple[str, ...], list[Pair]]) -> Iterator[bool]:
    """Yield for each two cases of a group that differ enough whether their order was predicted."""
    for members in cases.values():
        for (measured, predicted), (other, other_predicted) in combinations(members, 2):
            if abs(np.log(measured / other)) > np.log1p(DIFFERENT):
                yield (measured > other) == (predicted > other_predicted)


def measure_serving(folder: str) -> Measurements:
    """Return measured and predicted times of the serving runs in *folder*."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for row in read_records(folder, FILE, FILE.removesuffix(".gz")):
        groups.setdefault(tuple(row.get(key) or "" for key in SHARED), []).append(row)
    untimed: Counter[str] = Counter()
    ranked: dict[str, dict[tuple[str, ...], list[Pair]]] = {"concurrency": {}, "tp": {}}

    def compare(members: list[Record]) -> list[ScoredRow]:
        predicted = predict_group(members)
        times = zip(predicted.ttft_s.tolist(), predicted.tpot_s.tolist(), strict=True)
        return [scored for row, of_row in zip(members, times, strict=True) for scored in compare_row(row, *of_row)]

    def compare_row(row: Record, ttft_s: float, tpot_s: float) -> Iterator[ScoredRow]:
        tags = {"mode": row["mode"], "engine": row["backend"], "model": row["model_path"].rsplit("/", 1)[-1],
                "system": row["system"]}  # fmt: skip
        workers = "" if row["mode"] == "agg" else "stated" if row["prefill_num_workers"] else "not stated"
        for quantity, seconds in (("ttft", ttft_s), ("tpot", tpot_s)):
            measured = float(row[f"silicon_{quantity}_ms"] or 0) / 1e3
            if measured <= 0:
                untimed[f"no {quantity}"] += 1
                continue
            own = {"quantity": quantity, "part": f"{row['mode']} {quantity}", "workers": workers}
            yield ScoredRow(row["id"], measured, seconds, {**own, **tags})
            if quantity == "tpot":
                version, fixed = row.get("backend_version", ""), {key: row.get(key) or "" for key in SHARED}
                ranked["concurrency"].setdefault((version, *fixed.values()), []).append((measured, seconds))
                same = (text for key, text in fixed.items() if not key.endswith(SIZES))
                clients = row.get("silicon_data_source", "").partition("silicon_concurrency=")[2].split(";")[0]
                ranked["tp"].setdefault((version, clients, *same), []).append((measured, seconds))

    scored, skipped = compare_each(groups.values(), compare, count=len)
    figures = {
        f"order of time per output token by {name}: share of pairs right": float(np.mean(right))
        for name, cases in ranked.items()
        if (right := list(_pairs_right(cases)))
    }
    columns = columns_of([row for rows in scored for row in rows])
    selections = {part: columns.tags["part"] == part for part in PARTS}
    return Measurements(columns, untimed + skipped, selections, figures)
