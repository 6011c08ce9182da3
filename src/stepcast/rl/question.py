"""The question of ``stepcast rl``: a step of RL post-training, or a search for the best use of its GPUs.

In a search, training steps are predicted once for each pool and layout and generation once for each pool and layout;
a step of any mode is composed of one of each, so that thousands of combinations take as long as their parts.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Annotated

from msgspec import structs

from stepcast.generation.engine import EngineProfile, GenerationLayout, load_engine
from stepcast.generation.lengths import DEFAULT_CV
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import check_gpu_count
from stepcast.inputs.configs.rl import read_rl_config
from stepcast.ir.model import Model
from stepcast.ir.progress import report_progress
from stepcast.ir.types import FactDict, pick, require
from stepcast.questions import choices as readers
from stepcast.questions.choices import Choice, Question, amount, build_question, choices_of, count, gpu_count, share
from stepcast.questions.generation import LENGTH_HELP, formats_of, load_nouns, read_engine, read_lengths
from stepcast.questions.question import CHOICES, check_rules
from stepcast.rl import step as forecasts
from stepcast.rl.step import RlMode, RlPlacement, RlProfile, RlStep, RlTask, TrainingForecast, forecast_step
from stepcast.units import DEFAULT_CURRENCY

ALGORITHMS = ("grpo", "dapo", "ppo", "rloo")
# Choices that go to the training step as they are.
TRAINING_CHOICES = ("tp", "cp", "ep", "pp", "vpp", "sharding", "recompute", "precision", "framework")
DEFAULT_PROMPT = 256


class RlQuestion(Question, frozen=True, kw_only=True):
    """A question about a step of RL post-training."""

    # fmt: off
    model: str | None = None
    cluster: str | None = None
    set: tuple[str, ...] = ()
    software: str = "nemo-rl"
    engine: Annotated[str | None, Choice(read=read_engine)] = None
    algorithm: Annotated[str, Choice(values=ALGORITHMS)] = "grpo"
    prompts: Annotated[int, Choice(read=count(1, 10**6))] = 64
    group: Annotated[int, Choice(read=count(1, 10**5))] = 16
    prompt_length: Annotated[str, Choice(
        help=f"prompt length {LENGTH_HELP} (default: {DEFAULT_PROMPT})")] = str(DEFAULT_PROMPT)
    response_length: str = "2048"
    train_batch: Annotated[int | None, Choice(read=count(1, 10**7))] = None
    epochs: Annotated[int, Choice(read=count(1, 100))] = 1
    oversampling: Annotated[float | None, Choice(read=amount)] = None
    reference: Annotated[bool | None, Choice(deniable=True)] = None
    old_logprobs: Annotated[bool | None, Choice(deniable=True)] = None
    reward_s: Annotated[float, Choice(read=amount)] = 0.0
    reward_latency: str | None = None
    mode: Annotated[str | None, Choice(values=tuple(RlMode))] = None
    gpus: Annotated[int | None, Choice(read=gpu_count)] = None
    rollout_gpus: Annotated[int | None, Choice(read=gpu_count)] = None
    staleness: Annotated[int | None, Choice(read=count(0, 1000))] = None
    partial_rollout: bool = False
    search: bool = False
    tp: Annotated[int | None, Choice(read=gpu_count)] = None
    cp: Annotated[int | None, Choice(read=gpu_count)] = None
    ep: Annotated[int | None, Choice(read=gpu_count)] = None
    pp: Annotated[int | None, Choice(read=gpu_count)] = None
    vpp: Annotated[int | None, Choice(read=gpu_count)] = None
    sharding: Annotated[str | None, Choice(read=CHOICES["sharding"].read, values=CHOICES["sharding"].values)] = None
    recompute: Annotated[str | None, Choice(read=CHOICES["recompute"].read)] = None
    precision: Annotated[str | None, Choice(read=CHOICES["precision"].read)] = None
    framework: str | None = None
    pack_tokens: Annotated[int | None, Choice(read=count(1, 10**7))] = None
    gen_tp: Annotated[int | None, Choice(read=gpu_count)] = None
    gen_pp: Annotated[int, Choice(read=gpu_count)] = 1
    gen_ep: Annotated[int, Choice(read=gpu_count)] = 1
    gen_dp: Annotated[int, Choice(read=gpu_count)] = 1
    gen_weights: Annotated[str, Choice(values=("bf16", "fp8", "nvfp4", "int4"))] = "bf16"
    kv_cache: Annotated[str | None, Choice(values=("bf16", "fp8"))] = None
    memory_share: Annotated[float | None, Choice(read=share)] = None
    steps: Annotated[int | None, Choice(read=count(1, 10**7))] = None
    price: Annotated[float | None, Choice(read=readers.price)] = None
    currency: Annotated[str, Choice(read=readers.currency)] = DEFAULT_CURRENCY
    # fmt: on
    unset: frozenset[str] = frozenset()  # choices that neither the user nor a configuration made


def read_task(question: RlQuestion) -> RlTask:
    """Return the work of a step that *question* describes."""
    dapo = question.algorithm == "dapo"
    responses = question.prompts * question.group
    oversampling = question.oversampling if question.oversampling is not None else 1.5 if dapo else 1.0
    require(oversampling >= 1, f"--oversampling {oversampling:g}: at least 1, as many responses as are trained on")
    return RlTask(
        question.prompts,
        question.group,
        read_lengths("prompt-length", question.prompt_length),
        read_lengths("response-length", question.response_length),
        min(question.train_batch or responses, responses),
        question.epochs,
        question.old_logprobs is not False,
        not dapo if question.reference is None else question.reference,
        question.algorithm == "ppo",
        question.reward_s,
        oversampling,
        None if question.reward_latency is None else read_lengths("reward-latency", str(question.reward_latency)),
    )


def read_placement(question: RlQuestion) -> RlPlacement:
    """Return the pools and layouts that *question* describes."""
    if question.gpus is None:
        raise ValueError("no GPUs given: use --gpus N, and --rollout-gpus M where others generate")
    mode = RlMode(question.mode or (RlMode.ASYNC if question.rollout_gpus else RlMode.COLOCATED))
    check_rules("rl", question.choices, {"mode": str(mode), **pick(question, "steps price")})
    if mode is not RlMode.COLOCATED and not question.rollout_gpus:
        raise ValueError(f"--mode {mode} needs --rollout-gpus N, the GPUs that generate")
    pool = question.rollout_gpus or question.gpus
    usual, sizes = forecasts.load_profile(question.software).gen_tp, (question.gen_pp, question.gen_dp, question.gen_ep)
    engine = GenerationLayout(question.gen_tp or (1 if pool % usual or max(sizes) > 1 else usual), *sizes)
    if pool % engine.engine_gpus:
        raise ValueError(f"{pool} GPUs that generate are not a multiple of the {engine.engine_gpus} of one engine")
    layout = replace(engine, replicas=pool // engine.engine_gpus)
    training = {name: getattr(question, name) for name in TRAINING_CHOICES}
    training["recompute"] = training["recompute"] or "full"
    stated = tuple((name, value) for name, value in training.items() if value is not None)
    stale = (1 if question.staleness is None else question.staleness) if mode is RlMode.ASYNC else 0
    how = formats_of(question.gen_weights, question.kv_cache), question.memory_share, stale, question.partial_rollout
    return RlPlacement(mode, question.gpus, layout, stated, *how, question.pack_tokens or 0)


def read_nouns(question: RlQuestion) -> tuple[Model, Cluster, RlProfile, EngineProfile]:
    """Return the model, the cluster, the RL software and the engine of *question*."""
    model, cluster = load_nouns(question.model, question.cluster, question.set)
    profile = forecasts.load_profile(question.software)
    return model, cluster, profile, load_engine(question.engine or profile.engine)


def answer_rl(question: RlQuestion) -> RlStep:
    """Return the forecast of the step that *question* describes."""
    model, cluster, profile, engine = read_nouns(question)
    place = read_placement(question)
    check_gpu_count(cluster, place.gpus)
    return forecast_step(model, cluster, profile, engine, read_task(question), place)


def rl_facts(step: RlStep, question: RlQuestion, config: FactDict) -> FactDict:
    """Return the answer as its JSON; *config* is what became of the keys of a configuration."""
    training, generation, place = step.training, step.generation, step.placement
    run: FactDict | None = None
    if question.steps is not None:
        hours = question.steps * step.step_s / 3600.0
        cost = None if question.price is None else hours * place.gpus * question.price
        run = {"steps": question.steps, "days": hours / 24.0, "gpu_hours": hours * place.gpus}
        run |= {"cost": cost, "currency": question.currency}
    memory, defaults = training.memory, readers.state_defaults(question, question.unset)
    report = training.prediction.report
    doubts = [] if memory["fits"] else ["the training step does not fit into GPU memory"]
    return {
        **pick(step, "model=model.name cluster=cluster.name gpu=cluster.gpu.name"),
        **pick(place, "gpus train_gpus rollout_gpus=rollout.gpus"),
        "mode": str(place.mode),
        "software": step.profile.name,
        "engine": generation.engine.name,
        "algorithm": question.algorithm,
        **pick(step.task, "responses mean_length"),
        "response": str(step.task.response),
        **pick(step, "step_s phases_s"),
        "pools_s": pick(step, "rollout=rollout_pool_s training=train_pool_s"),
        "idle_share": step.idle_shares(),
        **pick(step, "bottleneck tokens_per_s_per_gpu"),
        "tail_s": generation.tail_s,
        "rollout_layout": generation.facts()["layout"],
        "training_layout": {name: str(value) for name, value in place.training_layout.items()},
        "memory_bytes": {
            "training": memory["total"],
            "rollout": sum(generation.memory.parts),
            "rollout_cache": generation.memory.cache_bytes,
            "capacity": memory["capacity"],
        },
        "fits": bool(memory["fits"]),
        "run": run,
        "sensitivity_s": forecasts.vary_spread(step) if step.task.response.shape == "lognormal" else {},
        "assumptions": [*defaults, *step.assumptions, *config.get("assumed", ())],
        "warnings": list(dict.fromkeys([*doubts, *step.profile.warnings, *generation.warnings, *report.warnings])),
        "config": config,
    }


def build_rl(choices: Mapping[str, object]) -> RlQuestion:
    """Return the question of *choices*, with defaults for those left open."""
    question = build_question(RlQuestion, choices)
    return structs.replace(question, unset=frozenset(choices_of(RlQuestion).keys() - choices.keys()))


def ask_rl(given: Mapping[str, object], model: object = None, config: str | None = None) -> tuple[RlQuestion, FactDict]:
    """Return the question of *given* choices, a configuration filling those left open, and what became of its keys."""
    choices = {**given, **({} if model is None else {"model": model})}
    if config is None:
        return build_rl(choices), {}
    gpus = choices.get("gpus")
    settings = read_rl_config(config, gpus if isinstance(gpus, int) else None)
    words = {name: value for name, value in settings.choices.items() if name in choices_of(RlQuestion)}
    # Configurations state the longest lengths alone: half of the limit is taken as the mean of responses, lognormal.
    most = settings.choices.get("max_response") or settings.choices.get("max_length")
    if most and "response_length" not in words:
        longest = int(str(most)) if "max_response" in settings.choices else max(int(str(most)) - DEFAULT_PROMPT, 1)
        words["response_length"] = f"lognormal:mean={max(longest // 2, 1)},cv={DEFAULT_CV},max={longest}"
    if "prompt_length" in words:  # the limit; prompts are shorter
        words["prompt_length"] = str(max(int(str(words["prompt_length"])) // 4, 1))
    filled = frozenset(words.keys() - choices.keys())
    shares = {"prompt_length": "prompts are a quarter", "response_length": "responses are half"}
    means = {name: f"{text} of their limit on average" for name, text in shares.items() if name in filled}
    facts = {
        "tool": settings.tool,
        "read": {name: str(value) for name, value in words.items()},
        "unread": list(settings.unread),
        "assumed": [*settings.assumed, *(f"{text} ({readers.option_of(name)})" for name, text in means.items())],
    }
    return build_rl({**words, **choices}).leave_unchecked(filled), facts


# ---- search -------------------------------------------------------------------------------------------------

DEGREES = (1, 2, 4, 8)
PIPELINES = (1, 2, 4, 8)
SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
SHOWN = 20
ENOUGH = 4  # training layouts of a pool that fit, those with the fewest model-parallel ranks first
USED = f"of each training pool, the fastest of the {ENOUGH} layouts that fit with the least model parallelism is used"

TrainingOptions = tuple[tuple[str, object], ...]


def _training_layouts(question: RlQuestion, model: Model, cluster: Cluster, gpus: int) -> list[TrainingOptions]:
    """Return layouts of a training pool; degrees that the question states are kept."""
    experts = model.experts.count if model.experts else 1
    names = ("cp", "vpp", "sharding", "precision", "framework")
    stated = {name: getattr(question, name) for name in names if getattr(question, name)}
    layouts = []
    tps = (question.tp,) if question.tp else DEGREES
    pps = (question.pp,) if question.pp else PIPELINES
    eps = (question.ep,) if question.ep else (1,) if experts == 1 else (8, 16, 32)
    for tp, pp, ep in sorted(product(tps, pps, eps), key=lambda degrees: degrees[0] * degrees[1]):
        divides = gpus % (tp * pp) == 0 and (gpus // pp) % ep == 0 and experts % ep == 0
        if divides and tp <= cluster.node.gpus and model.heads % tp == 0 and model.layers >= pp:
            given = {"tp": tp, "pp": pp, "ep": ep, "recompute": question.recompute or "full", **stated}
            layouts.append(tuple(given.items()))
    return layouts


def search_rl(question: RlQuestion) -> FactDict:
    """Return the best uses of ``question.gpus`` as facts, the fastest step first."""
    if not question.gpus:
        raise ValueError("no GPUs given: use --gpus N, all GPUs of the search")
    check_rules("rl-search", question.given, pick(question, "search mode price"))
    model, cluster, profile, engine = read_nouns(question)
    check_gpu_count(cluster, question.gpus)
    task, total, node = read_task(question), question.gpus, cluster.node.gpus
    formats = formats_of(question.gen_weights, question.kv_cache)
    modes = [RlMode(question.mode)] if question.mode else [RlMode.COLOCATED, RlMode.ASYNC]
    pools = {(RlMode.COLOCATED, total, total)} if RlMode.COLOCATED in modes else set()
    apart: list[RlMode] = [mode for mode in modes if mode != RlMode.COLOCATED]
    for mode, part in product(apart, SPLITS):
        rollout = round(total * part / node) * node if total > node else round(total * part)
        if 0 < rollout < total:
            pools.add((mode, total - rollout, rollout))
    sizes = sorted({train for _, train, _ in pools})
    jobs = [(train, layout) for train in sizes for layout in _training_layouts(question, model, cluster, train)]
    fitting: dict[int, list[tuple[TrainingOptions, TrainingForecast]]] = {train: [] for train in sizes}
    refused = Counter[int]()
    for train, layout in report_progress(jobs):
        if len(fitting[train]) >= ENOUGH:
            continue
        place = RlPlacement(RlMode.COLOCATED, train, GenerationLayout(), layout, pack_tokens=question.pack_tokens or 0)
        with suppress(ValueError):
            forecast = forecasts.forecast_training(model, cluster, profile, task, place)
            if forecast.memory["fits"]:
                fitting[train].append((layout, forecast))
                continue
        refused[train] += 1
    steps: list[RlStep] = []
    considered = too_large = 0
    for mode, train, rollout in sorted(pools):
        too_large += refused[train]
        if not fitting[train]:
            continue
        layout, training = min(fitting[train], key=lambda pair: pair[1].prediction.step_s)
        ages = (1,) if mode is not RlMode.ASYNC or question.staleness is not None else (1, 2, 4)
        widths = (question.gen_tp,) if question.gen_tp else (*DEGREES, 16, 32)
        for tp, age in product((tp for tp in widths if rollout % tp == 0 and model.heads % tp == 0), ages):
            considered += len(fitting[train])
            stale = (question.staleness or age) if mode is RlMode.ASYNC else 0
            how = formats, question.memory_share, stale, question.partial_rollout and mode is RlMode.ASYNC
            engines = GenerationLayout(tp=tp, replicas=rollout // tp)
            place = RlPlacement(mode, train, engines, layout, *how, question.pack_tokens or 0)
            try:
                steps.append(forecast_step(model, cluster, profile, engine, task, place, training))
            except ValueError:
                too_large += len(fitting[train])
    require(steps != [], f"no layout of {model.name} on {total} GPUs of {cluster.name} fits")
    steps.sort(key=lambda step: step.step_s)
    first = {step.placement.mode: step for step in reversed(steps)}  # the best of each mode is always shown
    shown = [step for index, step in enumerate(steps) if index < SHOWN or first[step.placement.mode] is step]
    return {
        **pick(steps[0], "model=model.name cluster=cluster.name gpu=cluster.gpu.name"),
        "gpus": total,
        "considered": considered,
        "too_large": too_large,
        "currency": question.currency,
        "rows": [_row(step, question) for step in shown],
        "assumptions": [*readers.state_defaults(question, question.unset), *steps[0].assumptions, USED],
        "warnings": profile.warnings,
    }


def _row(step: RlStep, question: RlQuestion) -> FactDict:
    place, rollout = step.placement, step.placement.rollout
    words = {name: value for name, value in place.training_layout.items() if value not in (1, None)}
    shown = (f"{name} {value}" for name, value in words.items() if name != "recompute" or value != "full")
    options = [f"--mode {place.mode}", f"--gpus {place.train_gpus}"]
    if place.mode is not RlMode.COLOCATED:
        options.append(f"--rollout-gpus {rollout.gpus}")
    options += [f"--staleness {place.staleness}"] if place.mode is RlMode.ASYNC else []
    options += [f"--{name} {value}" for name, value in words.items() if name != "dp"]
    options += [f"--gen-tp {rollout.tp}"] if rollout.tp != step.profile.gen_tp else []
    tokens = step.task.responses * step.task.mean_length
    cost = None if question.price is None else step.step_s / 3600.0 * place.gpus * question.price / tokens * 1e6
    idle = step.idle_shares()
    gpus_of_pools = [place.gpus] if len(idle) == 1 else [rollout.gpus, place.train_gpus]
    return {
        "mode": str(place.mode),
        **pick(step, "train_gpus=placement.train_gpus rollout_gpus=placement.rollout.gpus step_s"),
        "training": ", ".join(shown) or "one GPU",
        "rollout": str(rollout),
        **pick(step, "staleness=placement.staleness bottleneck"),
        "idle_share": sum(share * gpus for share, gpus in zip(idle.values(), gpus_of_pools, strict=True)) / place.gpus,
        "phases_s": step.phases_s,
        "cost_per_million_tokens": cost,
        "options": " ".join(options),
    }
