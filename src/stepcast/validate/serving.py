"""The serving set: measured time to first token and time per output token of vLLM, SGLang and TensorRT-LLM.

Rows have the columns of aiconfigurator's ``silicon_sample.csv``. The concurrency is in the text of the source.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np

from stepcast.generation import placement
from stepcast.generation.forecast import SteadyServing, split_serving, steady_serving
from stepcast.generation.placement import GenerationFormats, GenerationLayout, GenerationMemory
from stepcast.generation.steps import NO_SPECULATION, Speculation, step_times
from stepcast.hardware import Cluster
from stepcast.ir.model import Model
from stepcast.ir.types import DType, group_by_key
from stepcast.models.catalog import load_model
from stepcast.validate import scoreboard

FILE = "serving_runs.csv.gz"
FORMATS = {"": DType.BF16, "bf16": DType.BF16, "fp8": DType.FP8, "fp8_block": DType.FP8, "nvfp4": DType.NVFP4}
SIZES = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
SHARED = ("backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode", "moe_quant_mode",
          "prefill_num_workers", "decode_num_workers",
          *(f"{pool}{size}" for pool in ("", "prefill_", "decode_") for size in SIZES))  # fmt: skip
PARTS = ("agg tpot", "agg ttft", "disagg tpot", "disagg ttft")
DRAFTING = Speculation(1)  # assumed of models with MTP modules where a disaggregated run states no workers
MOST_MEMORY = 0.98
DIFFERENT = 0.1  # times that differ by less are not ranked


class ServingPlan(NamedTuple):
    """The engine that a row describes; *split* where prefill engines are apart."""

    layout: GenerationLayout
    split: bool


def concurrency_of(row: scoreboard.Record) -> float:
    """Return the clients of one engine, which the source of a run states, unless its batches are smaller: the clients
    are then those of several engines.
    """
    stated = re.search(r"silicon_concurrency=(\d+)", row.get("silicon_data_source", ""))
    numbers = [float(stated[1])] if stated else []
    if row.get("batch_size"):
        # Dumps that multiply sizes divide batches by them.
        numbers.append(float(row["batch_size"]) * max(float(row.get("attention_dp_size") or 1.0), engine_of(row).dp))
    if not numbers:
        raise ValueError("states no concurrency")
    return min(numbers)


def layout_of(row: scoreboard.Record, pool: str, cluster: Cluster) -> GenerationLayout:
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


def _cluster(row: scoreboard.Record) -> Cluster:
    return scoreboard.cluster_of(row["system"].removesuffix("_sxm"))


@lru_cache(maxsize=4096)
def _memory(
    model: Model, layout: GenerationLayout, formats: GenerationFormats, cluster: Cluster, engine: str, context: float
) -> GenerationMemory:
    profile = placement.load_engine(engine)
    memory = placement.generation_memory(model, layout, formats, cluster.gpu, profile)
    if memory.sequences_that_fit(context) >= 1.0:
        return memory
    # The run was measured, so its engine was given more.
    return placement.generation_memory(model, layout, formats, cluster.gpu, profile, MOST_MEMORY)


def _formats(row: scoreboard.Record) -> GenerationFormats:
    dense, experts = (FORMATS[row[f"{part}_quant_mode"]] for part in ("gemm", "moe"))
    return GenerationFormats(dense, experts, DType.BF16 if dense is DType.BF16 else DType.FP8)


def engine_of(row: scoreboard.Record) -> GenerationLayout:
    """Return the layout of the engine that decodes, as a row states it."""
    return layout_of(row, "decode_" if row["mode"] == "disagg" else "", _cluster(row))


def plan_of(row: scoreboard.Record, clients: float) -> ServingPlan:
    """Return the engine of a row, which holds the sequences of *clients*.

    If the stated tensor parallel ranks do not divide the heads, they are the GPUs of several engines: some prefill.
    """
    model, layout = load_model(row["model_path"]), engine_of(row)
    context = float(row["isl"]) + float(row["osl"]) / 2.0
    apart = replace(layout, tp=1, dp=layout.width) if model.latent else layout
    memory = _memory(model, layout, _formats(row), _cluster(row), row["backend"], context)
    if model.heads % layout.tp:
        return ServingPlan(apart, split=True)
    # Every tensor-parallel rank would hold the latent cache of all sequences, for which it may have no room.
    fits = apart == layout or clients <= memory.sequences_that_fit(context)
    return ServingPlan(layout if fits else apart, row["mode"] == "disagg")


def predict_group(rows: Sequence[scoreboard.Record]) -> SteadyServing:
    """Return the prediction of rows that differ in their concurrency alone."""
    row, clients = rows[0], np.array([concurrency_of(row) for row in rows])
    model, cluster, formats = load_model(row["model_path"]), _cluster(row), _formats(row)
    layout, split = plan_of(row, float(clients.max()))
    engine, prompt, output = placement.load_engine(row["backend"]), float(row["isl"]), float(row["osl"])
    memory = _memory(model, layout, formats, cluster, row["backend"], prompt + output / 2.0)
    drafting = split and not row["prefill_num_workers"] and model.next_token_layers
    steps = step_times(model, cluster, layout, formats, engine, DRAFTING if drafting else NO_SPECULATION)
    if not split:
        return steady_serving(steps, memory, clients, prompt, output)
    pool = GenerationLayout(dp=cluster.node.gpus, ep=cluster.node.gpus)
    if row["mode"] == "disagg":
        pool = layout_of(row, "prefill_", cluster)
    prefill = step_times(model, cluster, pool, formats, engine)
    workers = [float(row[f"{name}_num_workers"] or 0) or None for name in ("prefill", "decode")]
    return split_serving(prefill, steps, memory, (workers[0], workers[1]), clients, prompt, output)


def group_rows(folder: str) -> list[list[scoreboard.Record]]:
    """Return the rows of *folder* in groups that differ in their concurrency alone. Engines apart are the same for all
    concurrencies; others are set up for each.
    """
    groups: dict[object, list[scoreboard.Record]] = {}
    for row in scoreboard.read_records(folder, FILE, FILE.removesuffix(".gz")):
        plan: object = None
        if row["mode"] == "agg":
            with suppress(ValueError, KeyError):  # predict_group says why
                plan = plan_of(row, concurrency_of(row))
        groups.setdefault((*(row.get(key) or "" for key in SHARED), plan), []).append(row)
    return list(groups.values())


def _pairs_right(cases: Iterable[tuple[tuple[str, ...], scoreboard.Pair]]) -> Iterator[bool]:
    """Yield for each two cases of a group that differ enough whether their order was predicted."""
    for members in group_by_key(cases).values():
        for (measured, predicted), (other, other_predicted) in combinations(members, 2):
            if abs(np.log(measured / other)) > np.log1p(DIFFERENT):
                yield (measured > other) == (predicted > other_predicted)


def measure_serving(folder: str) -> scoreboard.Measurements:
    """Return measured and predicted times of the serving runs in *folder*."""
    untimed: Counter[str] = Counter()
    ranked: dict[str, list[tuple[tuple[str, ...], scoreboard.Pair]]] = {"concurrency": [], "tp": []}

    def compare(members: list[scoreboard.Record]) -> list[scoreboard.ScoredRow]:
        predicted, scored = predict_group(members), []
        for row, *times in zip(members, predicted.ttft_s.tolist(), predicted.tpot_s.tolist(), strict=True):
            tags = {"mode": row["mode"], "engine": row["backend"], "model": row["model_path"].rsplit("/", 1)[-1],
                    "system": row["system"]}  # fmt: skip
            workers = "" if row["mode"] == "agg" else "stated" if row["prefill_num_workers"] else "not stated"
            for quantity, seconds in zip(("ttft", "tpot"), times, strict=True):
                measured = float(row[f"silicon_{quantity}_ms"] or 0) / 1e3
                if measured <= 0:
                    untimed[f"no {quantity}"] += 1
                    continue
                own = {"quantity": quantity, "part": f"{row['mode']} {quantity}", "workers": workers}
                scored.append(scoreboard.ScoredRow(row["id"], measured, seconds, {**own, **tags}))
                if quantity == "tpot":
                    version, fixed = row.get("backend_version", ""), {key: row.get(key) or "" for key in SHARED}
                    ranked["concurrency"].append(((version, *fixed.values()), (measured, seconds)))
                    same = (text for key, text in fixed.items() if not key.endswith(SIZES))
                    clients = row.get("silicon_data_source", "").partition("silicon_concurrency=")[2].split(";")[0]
                    ranked["tp"].append(((version, clients, *same), (measured, seconds)))
        return scored

    scored, skipped = scoreboard.compare_each(group_rows(folder), compare, count=len)
    figures = {
        f"order of time per output token by {name}: share of pairs right": float(np.mean(right))
        for name, cases in ranked.items()
        if (right := list(_pairs_right(cases)))
    }
    columns = scoreboard.columns_of(chain.from_iterable(scored))
    selections = {part: columns.labels("part") == part for part in PARTS}
    return scoreboard.Measurements(columns, untimed + skipped, selections, figures)
