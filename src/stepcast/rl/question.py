"""The question of ``stepcast rl``: a step of RL post-training, or a search for the best use of its GPUs."""

from collections.abc import Mapping
from typing import Annotated, Any

from stepcast.generation.lengths import DEFAULT_CV
from stepcast.generation.placement import EngineProfile, GenerationLayout, load_engine
from stepcast.hardware import Cluster
from stepcast.inputs.configs.rl import read_rl_config
from stepcast.ir.facts import FactDict
from stepcast.ir.model import Model
from stepcast.questions.choices import Choice, Question, amount, build_question, choices_of, count, gpu_count, share
from stepcast.questions.choices import currency as read_currency
from stepcast.questions.choices import price as read_price
from stepcast.questions.generation import LENGTH_HELP, EngineChoices, formats_of, load_nouns, read_engine, read_lengths
from stepcast.questions.question import CHOICES, WHAT
from stepcast.rl.step import RlMode, RlPlacement, RlProfile, RlStep, RlTask, forecast_step, load_profile, vary_spread
from stepcast.units import DEFAULT_CURRENCY

TASK = "responses of a step"
POOLS = "GPUs"
TRAINING = "training layout (options of predict)"
ROLLOUT = "rollout layout of one engine"
RUN = "run"
ALGORITHMS = ("grpo", "dapo", "ppo", "rloo")
# Choices that go to the training step as they are.
TRAINING_CHOICES = ("tp", "cp", "ep", "pp", "vpp", "sharding", "recompute", "precision", "framework")
DEFAULT_PROMPT = 256


# Defaults of choices that a configuration may make; None in a question, so that an option given with the same value
# wins over the configuration.
DEFAULTS: Mapping[str, object] = {
    "software": "nemo-rl",
    "algorithm": "grpo",
    "prompts": 64,
    "group": 16,
    "prompt_length": DEFAULT_PROMPT,
    "response_length": 2048,
    "epochs": 1,
    "gen_pp": 1,
    "gen_ep": 1,
    "gen_dp": 1,
    "gen_weights": "bf16",
}


class RlQuestion(Question, frozen=True, kw_only=True):
    """A question about a step of RL post-training."""

    # fmt: off
    model: Annotated[str | None, Choice(group=WHAT)] = None
    cluster: Annotated[str | None, Choice(group=WHAT)] = None
    set: Annotated[tuple[str, ...], Choice(group=WHAT)] = ()
    software: Annotated[Any, Choice(group=WHAT)] = None
    engine: Annotated[str | None, Choice(group=WHAT, read=read_engine)] = None
    algorithm: Annotated[Any, Choice(group=TASK, values=ALGORITHMS)] = None
    prompts: Annotated[Any, Choice(group=TASK, read=count(1, 10**6))] = None
    group: Annotated[Any, Choice(group=TASK, read=count(1, 10**5))] = None
    prompt_length: Annotated[Any, Choice(group=TASK,
        help=f"prompt length {LENGTH_HELP} (default: {DEFAULT_PROMPT})")] = None
    response_length: Annotated[Any, Choice(group=TASK)] = None
    train_batch: Annotated[int | None, Choice(group=TASK, read=count(1, 10**7))] = None
    epochs: Annotated[Any, Choice(group=TASK, read=count(1, 100))] = None
    oversampling: Annotated[float | None, Choice(group=TASK, read=amount)] = None
    reference: Annotated[bool | None, Choice(group=TASK, deniable=True)] = None
    old_logprobs: Annotated[bool | None, Choice(group=TASK, deniable=True)] = None
    reward_s: Annotated[float, Choice(group=TASK, read=amount)] = 0.0
    reward_latency: Annotated[str | None, Choice(group=TASK, read=str)] = None
    mode: Annotated[str | None, Choice(group=POOLS, values=tuple(RlMode))] = None
    gpus: Annotated[int | None, Choice(group=POOLS, read=gpu_count)] = None
    rollout_gpus: Annotated[int | None, Choice(group=POOLS, read=gpu_count)] = None
    staleness: Annotated[int | None, Choice(group=POOLS, read=count(0, 1000))] = None
    partial_rollout: Annotated[bool, Choice(group=POOLS)] = False
    search: Annotated[bool, Choice(group=POOLS)] = False
    tp: Annotated[int | None, Choice(group=TRAINING, read=gpu_count)] = None
    cp: Annotated[int | None, Choice(group=TRAINING, read=gpu_count)] = None
    ep: Annotated[int | None, Choice(group=TRAINING, read=gpu_count)] = None
    pp: Annotated[int | None, Choice(group=TRAINING, read=gpu_count)] = None
    vpp: Annotated[int | None, Choice(group=TRAINING, read=gpu_count)] = None
    sharding: Annotated[str | None, Choice(group=TRAINING, read=CHOICES["sharding"].read,
        values=CHOICES["sharding"].values)] = None
    recompute: Annotated[str | None, Choice(group=TRAINING, read=CHOICES["recompute"].read)] = None
    precision: Annotated[str | None, Choice(group=TRAINING, read=CHOICES["precision"].read)] = None
    framework: Annotated[str | None, Choice(group=TRAINING)] = None
    pack_tokens: Annotated[int | None, Choice(group=TRAINING, read=count(1, 10**7))] = None
    gen_tp: Annotated[int | None, Choice(group=ROLLOUT, read=gpu_count)] = None
    gen_pp: Annotated[Any, Choice(group=ROLLOUT, read=gpu_count)] = None
    gen_ep: Annotated[Any, Choice(group=ROLLOUT, read=gpu_count)] = None
    gen_dp: Annotated[Any, Choice(group=ROLLOUT, read=gpu_count)] = None
    gen_weights: Annotated[Any, Choice(group=ROLLOUT, values=("bf16", "fp8", "nvfp4", "int4"))] = None
    kv_cache: Annotated[str | None, Choice(group=ROLLOUT, values=("bf16", "fp8"))] = None
    memory_share: Annotated[float | None, Choice(group=ROLLOUT, read=share)] = None
    steps: Annotated[int | None, Choice(group=RUN, read=count(1, 10**7))] = None
    price: Annotated[float | None, Choice(group=RUN, read=read_price)] = None
    currency: Annotated[str, Choice(group=RUN, read=read_currency)] = DEFAULT_CURRENCY
    # fmt: on


class RlChoices(EngineChoices, total=False):
    """Choices of ``stepcast.predict_rl``; see ``stepcast rl --help``."""

    software: str | None
    algorithm: str | None
    prompts: int | None
    train_batch: int | None
    epochs: int | None
    oversampling: float | None
    reference: bool | None
    old_logprobs: bool | None
    reward_s: float | None
    reward_latency: str | float | None
    mode: str | None
    rollout_gpus: int | None
    staleness: int | None
    partial_rollout: bool
    cp: int | None
    vpp: int | None
    sharding: str | None
    recompute: str | None
    precision: str | None
    framework: str | None
    pack_tokens: int | None
    gen_tp: int | None
    gen_pp: int | None
    gen_ep: int | None
    gen_dp: int | None
    gen_weights: str | None
    steps: int | None
    price: float | None
    currency: str | None


def read_config_choices(choices: Mapping[str, object]) -> FactDict:
    """Return the choices of a configuration in the words of a question.

    Configurations state the longest lengths alone: a response is taken as half of the limit on average, lognormal.
    """
    words = {name: value for name, value in choices.items() if name in choices_of(RlQuestion)}
    most = choices.get("max_response") or choices.get("max_length")
    if most and "response_length" not in words:
        longest = int(str(most)) if "max_response" in choices else max(int(str(most)) - DEFAULT_PROMPT, 1)
        words["response_length"] = f"lognormal:mean={max(longest // 2, 1)},cv={DEFAULT_CV},max={longest}"
    if "prompt_length" in words:  # the limit; prompts are shorter
        words["prompt_length"] = str(max(int(str(words["prompt_length"])) // 4, 1))
    return words


def read_task(question: RlQuestion) -> RlTask:
    """Return the work of a step that *question* describes."""
    dapo = question.algorithm == "dapo"
    responses = question.prompts * question.group
    batch = min(question.train_batch or responses, responses)
    oversampling = question.oversampling if question.oversampling is not None else 1.5 if dapo else 1.0
    if oversampling < 1:
        raise ValueError(f"--oversampling {oversampling:g}: at least 1, as many responses as are trained on")
    return RlTask(
        question.prompts,
        question.group,
        read_lengths("prompt-length", question.prompt_length),
        read_lengths("response-length", question.response_length),
        batch,
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
    if mode is RlMode.COLOCATED and question.rollout_gpus:
        raise ValueError("--rollout-gpus has no effect with --mode colocated, where all GPUs generate")
    if mode is not RlMode.COLOCATED and not question.rollout_gpus:
        raise ValueError(f"--mode {mode} needs --rollout-gpus N, the GPUs that generate")
    for name, given in (("staleness", question.staleness is not None), ("partial-rollout", question.partial_rollout)):
        if given and mode is not RlMode.ASYNC:
            raise ValueError(f"--{name} has no effect with --mode {mode}; it needs async")
    pool = question.rollout_gpus or question.gpus
    usual, sizes = load_profile(question.software).gen_tp, (question.gen_pp, question.gen_dp, question.gen_ep)
    one = GenerationLayout(question.gen_tp or (1 if pool % usual or max(sizes) > 1 else usual), *sizes)
    if pool % one.engine_gpus:
        raise ValueError(f"{pool} GPUs that generate are not a multiple of the {one.engine_gpus} of one engine")
    layout = GenerationLayout(one.tp, one.pp, one.dp, one.ep, pool // one.engine_gpus)
    training = {name: getattr(question, name) for name in TRAINING_CHOICES}
    training["recompute"] = training["recompute"] or "full"
    stated = tuple((name, value) for name, value in training.items() if value is not None)
    return RlPlacement(
        mode,
        question.gpus,
        layout,
        stated,
        formats_of(question.gen_weights, question.kv_cache),
        question.memory_share,
        (1 if question.staleness is None else question.staleness) if mode is RlMode.ASYNC else 0,
        question.partial_rollout,
        question.pack_tokens or 0,
    )


def read_nouns(question: RlQuestion) -> tuple[Model, Cluster, RlProfile, EngineProfile]:
    """Return the model, the cluster, the RL software and the engine of *question*."""
    model, cluster = load_nouns(question.model, question.cluster, question.set)
    profile = load_profile(question.software)
    return model, cluster, profile, load_engine(question.engine or profile.engine)


def answer_rl(question: RlQuestion) -> RlStep:
    """Return the forecast of the step that *question* describes."""
    model, cluster, profile, engine = read_nouns(question)
    return forecast_step(model, cluster, profile, engine, read_task(question), read_placement(question))


def rl_facts(step: RlStep, question: RlQuestion) -> FactDict:
    """Return the answer as its JSON."""
    training, generation, place = step.training, step.generation, step.placement
    run: FactDict | None = None
    if question.steps is not None:
        hours = question.steps * step.step_s / 3600.0
        cost = None if question.price is None else hours * place.gpus * question.price
        run = {"steps": question.steps, "days": hours / 24.0, "gpu_hours": hours * place.gpus, "cost": cost,
               "currency": question.currency}  # fmt: skip
    memory = training.memory
    return {
        "model": step.model.name,
        "cluster": step.cluster.name,
        "gpu": step.cluster.gpu.name,
        "gpus": place.gpus,
        "train_gpus": place.train_gpus,
        "rollout_gpus": place.rollout.gpus,
        "mode": str(place.mode),
        "software": step.profile.name,
        "engine": generation.engine.name,
        "algorithm": question.algorithm,
        "responses": step.task.responses,
        "mean_length": step.task.mean_length,
        "response": str(step.task.response),
        "step_s": step.step_s,
        "phases_s": step.phases_s,
        "pools_s": {"rollout": step.rollout_pool_s, "training": step.train_pool_s},
        "idle_share": step.idle_shares(),
        "bottleneck": step.bottleneck,
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "tail_s": generation.tail_s,
        "rollout_layout": generation.facts()["layout"],
        "training_layout": {name: str(value) for name, value in place.training},
        "memory_bytes": {
            "training": memory["total"],
            "rollout": sum(generation.memory.parts),
            "rollout_cache": generation.memory.cache_bytes,
            "capacity": memory["capacity"],
        },
        "fits": bool(memory["fits"]),
        "run": run,
        "sensitivity_s": vary_spread(step) if step.task.response.shape == "lognormal" else {},
        "assumptions": list(step.assumptions),
        "warnings": [
            *([] if memory["fits"] else ["the training step does not fit into GPU memory"]),
            *step.profile.warnings,
        ],
    }


def build_rl(choices: Mapping[str, object]) -> RlQuestion:
    """Return the question of *choices*, with defaults for those left open."""
    return build_question(RlQuestion, {**DEFAULTS, **choices})


def ask_rl(given: Mapping[str, object], model: object = None, config: str | None = None) -> tuple[RlQuestion, FactDict]:
    """Return the question of *given* choices, a configuration filling those left open, and what became of its keys."""
    choices = {**given, **({} if model is None else {"model": model})}
    if config is None:
        return build_rl(choices), {}
    found = read_rl_config(config)
    words = read_config_choices(found.choices)
    read = {name: str(value) for name, value in words.items()}
    return build_rl({**words, **choices}), {"tool": found.tool, "read": read, "unread": list(found.unread)}
