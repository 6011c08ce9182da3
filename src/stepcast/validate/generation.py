"""The sets of generation: serving runs of inference engines, and published steps of RL post-training.

The serving set is measured time to first token and time per output token of vLLM, SGLang and TensorRT-LLM. Its rows
have the columns of aiconfigurator's ``silicon_sample.csv``. The concurrency is in the text of the source.

The rl set is steps with NeMo RL and verl. Rows state mean lengths and limits, not distributions: responses are taken as
lognormal, cut at the limit. NeMo RL's recipes, where they are at hand, add packing, recomputation, memory shares and
the split of GPUs.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np

from stepcast.generation.engine import (
    NO_SPECULATION,
    GenerationFormats,
    GenerationLayout,
    GenerationMemory,
    Speculation,
    generation_memory,
    load_engine,
    step_times,
)
from stepcast.generation.forecast import SteadyServing, split_serving, steady_serving
from stepcast.hardware import Cluster
from stepcast.inputs.configs.rl import read_rl_values
from stepcast.ir.model import Model
from stepcast.ir.types import DType, FactDict, Facts, group_by_key, require
from stepcast.models.catalog import find_name, load_model
from stepcast.questions.generation import formats_of
from stepcast.rl.question import RlQuestion, answer_rl, build_rl
from stepcast.rl.step import RlMode, RlPlacement, load_profile, sync_seconds
from stepcast.validate import scoreboard

SERVING_FILE = "serving_runs.csv.gz"
FORMATS = {"": DType.BF16, "bf16": DType.BF16, "fp8": DType.FP8, "fp8_block": DType.FP8, "nvfp4": DType.NVFP4}
SIZES = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
SHARED = ("backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode", "moe_quant_mode",
          "prefill_num_workers", "decode_num_workers",
          *(f"{pool}{size}" for pool in ("", "prefill_", "decode_") for size in SIZES))  # fmt: skip
PARTS = ("agg tpot", "agg ttft", "disagg tpot", "disagg ttft")
DRAFTING = Speculation(1)  # assumed of models with MTP modules where a disaggregated run states no workers
MOST_MEMORY = 0.98
DIFFERENT = 0.1  # times that differ by less are not ranked


def concurrency_of(row: scoreboard.Record) -> float:
    """Return the clients of one engine, which the source of a run states, unless its batches are smaller: the clients
    are then those of several engines.
    """
    stated = re.search(r"silicon_concurrency=(\d+)", row.get("silicon_data_source", ""))
    numbers = [float(stated[1])] if stated else []
    if row.get("batch_size"):
        # Dumps that multiply sizes divide batches by them.
        numbers.append(float(row["batch_size"]) * max(float(row.get("attention_dp_size") or 1.0), engine_of(row).dp))
    require(bool(numbers), "states no concurrency")
    return min(numbers)


def layout_of(row: scoreboard.Record, pool: str, cluster: Cluster) -> GenerationLayout:
    """Return the layout that the columns of *pool* describe.

    Some dumps multiply tensor and expert parallel sizes, though both span the same GPUs: 64 and 8 x 8 for
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
    profile = load_engine(engine)
    memory = generation_memory(model, layout, formats, cluster.gpu, profile)
    if memory.sequences_that_fit(context) >= 1.0:
        return memory
    # The run was measured, so its engine was given more.
    return generation_memory(model, layout, formats, cluster.gpu, profile, MOST_MEMORY)


def _formats(row: scoreboard.Record) -> GenerationFormats:
    dense, experts = (FORMATS[row[f"{part}_quant_mode"]] for part in ("gemm", "moe"))
    cache = DType.BF16 if dense is DType.BF16 else DType.FP8
    if experts.bytes < 1 and load_model(row["model_path"]).published_weights == "mxfp4":  # rows say "4 bits" alone
        return formats_of("mxfp4", cache)
    return GenerationFormats(dense, experts, cache)


def engine_of(row: scoreboard.Record) -> GenerationLayout:
    """Return the layout of the engine that decodes, as a row states it."""
    return layout_of(row, "decode_" if row["mode"] == "disagg" else "", _cluster(row))


def plan_of(row: scoreboard.Record, clients: float) -> tuple[GenerationLayout, bool]:
    """Return the engine of a row, which holds the sequences of *clients*, and whether prefill engines are apart.

    If the stated tensor parallel ranks do not divide the heads, they are the GPUs of several engines: some prefill.
    """
    model, layout = load_model(row["model_path"]), engine_of(row)
    context = float(row["isl"]) + float(row["osl"]) / 2.0
    apart = replace(layout, tp=1, dp=layout.width) if model.latent else layout
    memory = _memory(model, layout, _formats(row), _cluster(row), row["backend"], context)
    if model.heads % layout.tp:
        return apart, True
    # Every tensor-parallel rank would hold the latent cache of all sequences, for which it may have no room.
    fits = apart == layout or clients <= memory.sequences_that_fit(context)
    return layout if fits else apart, row["mode"] == "disagg"


def predict_group(rows: Sequence[scoreboard.Record]) -> SteadyServing:
    """Return the prediction of rows that differ in their concurrency alone."""
    row, clients = rows[0], np.array([concurrency_of(row) for row in rows])
    model, cluster, formats = load_model(row["model_path"]), _cluster(row), _formats(row)
    layout, split = plan_of(row, float(clients.max()))
    engine, prompt, output = load_engine(row["backend"]), float(row["isl"]), float(row["osl"])
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
    for row in scoreboard.read_records(folder, SERVING_FILE, SERVING_FILE.removesuffix(".gz")):
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
    table = scoreboard.columns_of(scored)
    return scoreboard.Measurements(table, untimed + skipped, table.select("part", *PARTS), figures)


RL_FILE, RECIPES = "rl_runs.csv", "nemo_rl_recipes.csv"
PROMPT = 150  # tokens of a mathematical question; rows do not state prompts
CV = 0.8  # of response lengths before the cut
# Responses of Qwen2.5-Math-7B and Qwen3-30B-A3B in verl's runs, which publish no lengths: assumed.
UNSTATED_RESPONSE = 2000
# Trainers of verl that take responses as they finish, whichever weights they began with.
STREAMS = re.compile("stale|separate_async")
QUANTITIES = {"step": "step_time_s", "generation": "gen_s", "logprob": "old_logprob_s", "update": "update_actor_s",
              "sync": "weight_sync_s"}  # fmt: skip
RL_PHASES = {"generation": "generation", "logprob": "old log-probabilities", "update": "update", "sync": "weight sync"}

# Choices of a recipe that its run takes over.
TAKEN = ["tp", "cp", "ep", "pp", "recompute", "pack_tokens", "gen_ep", "memory_share", "precision", "staleness"]
NOTES = (
    f"prompts of {PROMPT} tokens, responses lognormal with cv {CV} before the cut at the limit: lengths are "
    "published as means",
    f"verl's runs on H20 publish no lengths: {UNSTATED_RESPONSE:,} tokens assumed",
    "log-probabilities of a reference model are computed unless a recipe says otherwise",
)


def read_recipes(path: Path) -> list[FactDict]:
    """Return the choices of each recipe."""
    rows = scoreboard.read_records(path) if path.is_file() else ()
    recipes = group_by_key((row["recipe"], (row["key"], row["value"])) for row in rows)
    return [{"recipe": name, **read_rl_values(dict(keys)).choices} for name, keys in recipes.items()]


def find_recipe(row: scoreboard.Record, recipes: list[FactDict]) -> FactDict:
    """Return the recipe of a run: the same model, GPUs, mode and formats; nothing where none is."""
    name = find_name(row["model"])
    for recipe in recipes:
        file, total = str(recipe["recipe"]), int(recipe["gpus"]) + int(recipe.get("rollout_gpus", 0))
        model = find_name(str(recipe["model"])) or _model_of(file)
        same_mode = (recipe["mode"] == "async") == row["mode"].startswith("async")
        same_format = (recipe.get("precision") == "fp8") == (row["train_precision"] == "fp8")
        same_algorithm = file.startswith("dapo") == (row["algorithm"] == "DAPO")
        same = same_mode and same_format and same_algorithm and not ("mxfp8" in file or "40K" in file)
        if name == model and total == int(row["num_gpus"]) and same:
            return recipe
    return {}


def _model_of(recipe: str) -> str | None:
    """Return the model whose name is part of a recipe's, such as grpo-deepseek-v3-64n8g."""
    words = recipe.split("-")
    return next(filter(None, (find_name("-".join(words[1:end])) for end in range(len(words), 1, -1))), None)


def question_of(row: scoreboard.Record, recipe: Facts) -> RlQuestion:
    """Return the question that a row describes, with what its recipe adds."""
    gpus, most = int(row["num_gpus"]), int(row["max_seq"] or 0)
    mean = float(row["avg_seq"]) - PROMPT if row["avg_seq"] else float(UNSTATED_RESPONSE)
    length = f"lognormal:mean={mean:.0f},cv={CV},max={max(most - PROMPT, int(mean) + 1)}" if most else f"{mean:.0f}"
    group = int(recipe.get("group", 16))
    responses = int(row["rollout_batch"] or 0) or int(recipe.get("prompts", 0)) * group or 512 * group
    if not row["rollout_batch"] and row["tokens_per_s_per_gpu"] and row["avg_seq"]:  # stated by the tokens of a step
        tokens = float(row["tokens_per_s_per_gpu"]) * gpus * float(row["step_time_s"])
        responses = round(tokens / float(row["avg_seq"]) / group) * group
    degrees = ((name, row[f"train_{name}"]) for name in ("tp", "cp", "ep", "pp"))
    choices: FactDict = {name: int(degree) for name, degree in degrees if degree}
    choices |= {name: recipe[name] for name in TAKEN if name in recipe}
    choices |= {
        "model": load_model(row["model"]),
        "cluster": scoreboard.cluster_of(row["gpu"]),
        "software": "nemo-rl" if row["framework"] == "NeMo RL" else "verl",
        "prompts": max(responses // group, 1),
        "group": group,
        "prompt_length": PROMPT,
        "response_length": length,
        "train_batch": int(row["train_batch"] or responses),
        "algorithm": "grpo",
        "gen_weights": "fp8" if row["gen_precision"] == "fp8" else "bf16",
        "gen_tp": int(row["gen_tp"] or recipe.get("gen_tp", 0)) or None,
        "oversampling": max(int(recipe.get("prompts", 0)) * group / responses, 1.0) if recipe else 1.0,
        "reference": bool(recipe.get("reference", row["framework"] == "NeMo RL" or "GRPO" in row["algorithm"])),
    }
    if row["train_precision"] == "fp8":
        choices["precision"] = "fp8"
    if not row["mode"].startswith("coloc"):
        rollout = int(row["gpus_rollout"] or recipe.get("rollout_gpus", gpus // 2))
        choices |= {"mode": "async", "gpus": int(row["gpus_train"] or gpus - rollout), "rollout_gpus": rollout}
        words = f"{row['policy']} {row['mode']}"
        stale = int(row["policy"].partition("-step")[0]) if "-step" in row["policy"] else 1
        choices |= {"staleness": stale, "partial_rollout": STREAMS.search(words) is not None or stale > 1}
        if row["framework"] == "verl":  # trains on log-probabilities of the rollout
            choices["old_logprobs"] = False
    else:
        choices |= {"mode": "colocated", "gpus": gpus}
        choices.pop("staleness", None)
    if "FSDP" not in row["notes"] and row["framework"] == "verl":
        choices |= {"framework": "megatron-core", "sharding": "zero-1"}
    return build_rl(choices)


def measure_rl(folder: str) -> scoreboard.Measurements:
    """Return measured and predicted times of the steps in *folder*."""
    place = Path(folder)
    recipes = read_recipes((place.parent if place.is_file() else place) / RECIPES)
    waits: Counter[str] = Counter()
    steps: list[tuple[tuple[str, ...], tuple[bool, float, float]]] = []

    def compare(row: scoreboard.Record) -> list[scoreboard.ScoredRow]:
        measured = {name: float(row[column]) for name, column in QUANTITIES.items() if row[column]}
        if "async" in row["mode"] and measured.pop("generation", 0.0):
            waits["asynchronous runs publish the wait of the trainer as generation, which is not forecast"] += 1
        if set(measured) == {"sync"}:  # weights are moved where nothing else was measured
            train, rollout = int(row["gpus_train"]), int(row["gpus_rollout"])
            placement = RlPlacement(RlMode.ASYNC, train, GenerationLayout(tp=1, replicas=rollout))
            arguments = load_model(row["model"]), scoreboard.cluster_of(row["gpu"]), load_profile("verl"), placement
            predicted = {"sync": sync_seconds(*arguments, "checkpoint-engine" in row["notes"])}
        else:
            step = answer_rl(question_of(row, find_recipe(row, recipes)))
            predicted = {"step": step.step_s}
            predicted |= {name: step.phases_s.get(phase, 0.0) for name, phase in RL_PHASES.items()}
        is_async = "async" in row["mode"]
        tags = {
            "software": row["framework"],
            "mode": "colocated" if row["mode"].startswith("coloc") else "async" if is_async else row["mode"],
            "model": row["model"],
            "gpu": row["gpu"],
            "lengths": "mean published" if row["avg_seq"] else "assumed",
        }
        if "step" in measured:
            columns = ("framework", "version", "model", "gpu", "num_gpus", "train_precision")
            steps.append((tuple(map(row.__getitem__, columns)), (is_async, measured["step"], predicted["step"])))
        return [
            scoreboard.ScoredRow(row["id"], seconds, predicted[name], {"quantity": name, **tags})
            for name, seconds in measured.items()
            if predicted[name] > 0
        ]

    scored, skipped = scoreboard.compare_each(scoreboard.read_records(folder, RL_FILE), compare)
    table = scoreboard.columns_of(scored)
    right = [
        (measured > other_measured) == (predicted > other_predicted)
        for members in group_by_key(steps).values()
        for (mode, measured, predicted), (other, other_measured, other_predicted) in combinations(members, 2)
        if mode != other
    ]
    pairs = "colocated against async on as many GPUs: share of pairs right"
    figures = {pairs: sum(right) / len(right)} if right else {}
    return scoreboard.Measurements(table, waits + skipped, table.select("quantity", *QUANTITIES), figures, NOTES)
