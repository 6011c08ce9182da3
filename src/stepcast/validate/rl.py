"""The rl set: published steps of RL post-training with NeMo RL and verl.

Rows state mean lengths and limits, not distributions: responses are taken as lognormal, cut at the limit. NeMo RL's
recipes, where they are at hand, add packing, recomputation, memory shares and the split of GPUs.
"""

import re
from collections import Counter
from itertools import chain, combinations
from pathlib import Path

from stepcast.generation.placement import GenerationLayout
from stepcast.inputs.configs.rl import read_rl_values
from stepcast.ir.types import FactDict, Facts, group_by_key
from stepcast.models.catalog import find_name, load_model
from stepcast.rl.question import RlQuestion, answer_rl, build_rl
from stepcast.rl.step import RlMode, RlPlacement, load_profile, sync_seconds
from stepcast.validate import scoreboard

FILE, RECIPES = "rl_runs.csv", "nemo_rl_recipes.csv"
PROMPT = 150  # tokens of a mathematical question; rows do not state prompts
CV = 0.8  # of response lengths before the cut
# Responses of Qwen2.5-Math-7B and Qwen3-30B-A3B in verl's runs, which publish no lengths: assumed.
UNSTATED_RESPONSE = 2000
# Trainers of verl that take responses as they finish, whichever weights they began with.
STREAMS = re.compile("stale|separate_async")
QUANTITIES = {"step": "step_time_s", "generation": "gen_s", "logprob": "old_logprob_s", "update": "update_actor_s",
              "sync": "weight_sync_s"}  # fmt: skip
PHASES = {"generation": "generation", "logprob": "old log-probabilities", "update": "update", "sync": "weight sync"}

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
    names = (find_name("-".join(words[1:end])) for end in range(len(words), 1, -1))
    return next(filter(None, names), None)


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
    choices: FactDict = {name: recipe[name] for name in TAKEN if name in recipe}
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
    for name in ("tp", "cp", "ep", "pp"):
        if row[f"train_{name}"] and name not in recipe:
            choices[name] = int(row[f"train_{name}"])
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
            predicted |= {name: step.phases_s.get(phase, 0.0) for name, phase in PHASES.items()}
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

    scored, skipped = scoreboard.compare_each(scoreboard.read_records(folder, FILE), compare)
    columns = scoreboard.columns_of(chain.from_iterable(scored))
    selections = {name: columns.labels("quantity") == name for name in QUANTITIES}
    right = [
        (measured > other_measured) == (predicted > other_predicted)
        for members in group_by_key(steps).values()
        for (mode, measured, predicted), (other, other_measured, other_predicted) in combinations(members, 2)
        if mode != other
    ]
    pairs = "colocated against async on as many GPUs: share of pairs right"
    figures = {pairs: sum(right) / len(right)} if right else {}
    return scoreboard.Measurements(columns, waits + skipped, selections, figures, NOTES)
