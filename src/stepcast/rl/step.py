"""One step of RL post-training, composed of generation, forward passes, updates and moving weights.

A step generates responses to prompts, scores them, computes log-probabilities under the old and the reference
policy, trains on them, and gives the new weights to the generation engines. Colocated, all GPUs do one after the
other, and memory moves to the host and back. Split, two pools of GPUs take turns. Asynchronously, they work at once,
on batches up to *staleness* steps apart, and the slower pool decides.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from math import ceil, prod

import numpy as np
from msgspec import Struct, structs

from stepcast.cost.host import copy_bytes_per_s
from stepcast.forecast.prediction import Prediction
from stepcast.generation.engine import EngineProfile, GenerationFormats, GenerationLayout
from stepcast.generation.forecast import GenerationForecast, GenerationTask, forecast_generation
from stepcast.generation.lengths import Lengths
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import data_names, load_data
from stepcast.ir.model import Model
from stepcast.ir.model_parts import FeedForward
from stepcast.ir.strategy import RecomputeKind
from stepcast.ir.tables import Amount, Count, Positive, convert_table
from stepcast.ir.types import FactDict, dataclass
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import settle
from stepcast.units import MS, format_seconds
from stepcast.views.answer import Answer

ROUND = 64  # sequences are padded or packed to multiples of this
BF16_FORMATS = GenerationFormats()
REWARD_SEED = 1
AHEAD = 8  # batches in a row in which the long tail of each is hidden by the others


class RlMode(StrEnum):
    COLOCATED = "colocated"  # training and generation take turns on the same GPUs
    SPLIT = "split"  # on GPUs of their own, still taking turns
    ASYNC = "async"  # on GPUs of their own, at the same time


class RlProfile(Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """The overheads of RL software.

    *step_s* and *sequence_s* pass on the host in each step and for each response (data, rewards, advantages).
    *tensor_s*: gathering, converting and sending one tensor of the weights. *train_pace*: time of training on packed
    responses over that of the same pre-training step.
    """

    name: str
    engine: str
    framework: str
    sharding: str
    gen_tp: Count  # tensor-parallel ranks of an engine where a run states none
    step_s: Amount
    sequence_s: Amount
    tensor_s: Amount
    colocated_tensor_s: Amount  # the same where training and generation share GPUs
    sync_links: Amount  # bandwidth that moving weights reaches, in NICs or NVLinks of one GPU
    train_pace: Positive
    forward_pace: Positive  # likewise for passes that compute log-probabilities alone
    padded_token_s: Amount  # moving the batch, padded to the longest sequence, to the GPUs for one pass
    rollout_sequence_s: Amount  # host time of a running sequence in each step of a rollout, beyond serving
    compared: bool = True  # with published runs of this software
    host_pace: dict[str, Positive] = {}  # the same on other hosts, over that on x86, by the GPU of the node
    sources: dict[str, str] = {}

    @property
    def warnings(self) -> list[str]:
        """A warning where no run shows how far off this profile is."""
        text = f"the overheads of {self.name} were never compared with a run of it: they are those of other software"
        return [] if self.compared else [text]


@lru_cache(maxsize=16)
def load_profile(name: str) -> RlProfile:
    """Return the profile *name*."""
    if name not in (known := data_names("rl_software")):
        raise ValueError(f"unknown RL software {name!r}; choose from {', '.join(known)}")
    return convert_table(load_data(f"rl_software/{name}"), RlProfile)


@dataclass(frozen=True, slots=True)
class RlTask:
    """The work of a step: *prompts* x *group* responses, trained *train_batch* sequences at a time, *epochs* times.

    *oversampling*: responses generated over those trained on (dynamic sampling of DAPO). *reference* and *critic*
    are additional models of the same size. *reward_s* is spent on rewards after the last response; *reward_latency*
    are milliseconds from the end of each response to its own reward, while others are still generated.
    """

    prompts: int
    group: int
    prompt: Lengths
    response: Lengths
    train_batch: int
    epochs: int = 1
    old_logprobs: bool = True
    reference: bool = False
    critic: bool = False
    reward_s: float = 0.0
    oversampling: float = 1.0
    reward_latency: Lengths | None = None

    @property
    def responses(self) -> int:
        return self.prompts * self.group

    @property
    def mean_length(self) -> float:
        return self.prompt.mean + self.response.mean


@dataclass(frozen=True, slots=True)
class RlPlacement:
    """The GPUs of a step and their layouts; *training* are options of ``predict`` for the training pool."""

    mode: RlMode
    train_gpus: int
    rollout: GenerationLayout
    training: tuple[tuple[str, object], ...] = ()
    formats: GenerationFormats = BF16_FORMATS
    memory_share: float | None = None
    staleness: int = 0
    partial_rollout: bool = False
    pack_tokens: int = 0  # of a training micro-batch; 0: the longest sequence

    @property
    def model_ranks(self) -> int:
        """The training ranks that share one copy of the model."""
        options = dict(self.training)
        return prod(int(str(options.get(name) or 1)) for name in ("tp", "cp", "pp"))

    @property
    def dp(self) -> int:
        return self.train_gpus // self.model_ranks

    @property
    def training_layout(self) -> dict[str, object]:
        """The data-parallel replicas of the training pool, and its options."""
        return {"dp": self.dp, **dict(self.training)}

    @property
    def gpus(self) -> int:
        return self.train_gpus + (0 if self.mode is RlMode.COLOCATED else self.rollout.gpus)


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """One optimizer step, and the share of forward passes in its work: backward is twice a forward, recomputing all
    activations one more.
    """

    prediction: Prediction
    forward_share: float

    @property
    def memory(self) -> FactDict:
        return dict(self.prediction.memory_bytes or {})

    @property
    def forward_s(self) -> float:
        """Seconds of a forward pass over the sequences of the step, without gradients and update."""
        parts = self.prediction.breakdown_s
        return (self.prediction.step_s - parts["dp"] - parts["optimizer"]) * self.forward_share


@dataclass(frozen=True)
class RlStep(Answer):
    """The forecast of a step: seconds of each phase, of the pools, and the parts they came from."""

    view, title = "generation.rl_view", "rl"
    model: Model
    cluster: Cluster
    profile: RlProfile
    task: RlTask
    placement: RlPlacement
    phases_s: dict[str, float]
    step_s: float
    rollout_pool_s: float
    train_pool_s: float
    generation: GenerationForecast
    training: TrainingForecast
    assumptions: tuple[str, ...] = ()
    describe: Callable[["RlStep"], FactDict] | None = None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.task.responses * self.task.mean_length / self.step_s / self.placement.gpus

    @property
    def bottleneck(self) -> str:
        """The pool that the step waits for, or the longest phase where pools take turns."""
        if self.placement.mode is RlMode.ASYNC:
            return "rollout pool" if self.rollout_pool_s > self.train_pool_s else "training pool"
        return max(self.phases_s, key=lambda name: self.phases_s[name])

    def idle_shares(self) -> dict[str, float]:
        """Return the share of the step in which the GPUs of each pool wait."""
        if self.placement.mode is RlMode.COLOCATED:
            busy = sum(self.phases_s[name] for name in self.phases_s if name not in ("reward", "overhead"))
            return {"all": max(1.0 - busy / self.step_s, 0.0)}
        pools_s = {"rollout": self.rollout_pool_s, "training": self.train_pool_s}
        return {name: max(1.0 - busy_s / self.step_s, 0.0) for name, busy_s in pools_s.items()}


def forecast_training(
    model: Model, cluster: Cluster, profile: RlProfile, task: RlTask, place: RlPlacement
) -> TrainingForecast:
    """Return the prediction of one optimizer step on *task.train_batch* sequences of their mean length.

    Packed responses attend to themselves alone, so a micro-batch is as many sequences of mean length as a pack holds.
    """
    given = dict(place.training)
    if place.train_gpus % place.model_ranks:
        raise ValueError(f"{place.train_gpus} training GPUs are not a multiple of tp x cp x pp = {place.model_ranks}")
    if int(str(given.get("ep", 1))) > 1:
        given.setdefault("expert_tp", 1)  # as RL recipes of Megatron do
    length = max(ceil(task.mean_length / ROUND) * ROUND, ROUND)
    pack = place.pack_tokens or max(task.response.most if task.response.most < 10**8 else length, length)
    sequences = max(int(pack // length), 1)
    accumulation = max(ceil(task.train_batch / (place.dp * sequences)), 1)
    sequences = max(ceil(task.train_batch / (place.dp * accumulation)), 1)
    defaults: FactDict = {"framework": profile.framework, "sharding": profile.sharding}
    chosen = {**defaults, **given, "seq": length, "micro_batch": sequences, "accumulation": accumulation}
    question = PredictQuestion(model=model, cluster=cluster, gpus=place.train_gpus, **chosen)
    run = settle(question.leave_unchecked(frozenset(given) | frozenset(defaults)))
    share = 1.0 / 4.0 if run.strategy.recompute.kind is RecomputeKind.FULL else 1.0 / 3.0
    return TrainingForecast(run.prediction, share)


def count_tensors(model: Model) -> int:
    """Return the weight tensors of a checkpoint, in which each expert has matrices of its own."""
    count = 3
    for block in model.blocks:
        for weight in model.block_weights(block):
            routed = block.feed_forward is FeedForward.EXPERTS and weight.part == "experts" and model.experts
            gate_and_up = 2 if routed and model.gated and "up" in weight.name else 1
            count += model.experts.count * gate_and_up if routed and model.experts else 1
    return count


def sync_seconds(
    model: Model, cluster: Cluster, profile: RlProfile, place: RlPlacement, in_buckets: bool = False
) -> float:
    """Return the seconds from trained weights to weights that generate, tensor by tensor or *in_buckets*, as checkpoint
    engines do.

    Each tensor is gathered from its shards, converted, and sent to every engine: inside a node over NVLink, else
    over the network, where all engines receive the same stream (NCCL broadcast).
    """
    size = model.parameters * place.formats.weight_bytes(experts=False)
    inside = place.gpus <= cluster.node.gpus * cluster.topology.scale_up_nodes
    link = cluster.node.fabric.link.bandwidth_bytes_per_s
    if not inside and cluster.node.nic is not None:
        link = cluster.node.nic.bandwidth_bytes_per_s
    each_s = profile.colocated_tensor_s if place.mode is RlMode.COLOCATED else profile.tensor_s
    tensors_s = 0.0 if in_buckets else count_tensors(model) * each_s
    return tensors_s + size / (link * profile.sync_links)


def forecast_step(
    model: Model,
    cluster: Cluster,
    profile: RlProfile,
    engine: EngineProfile,
    task: RlTask,
    place: RlPlacement,
    training: TrainingForecast | None = None,
) -> RlStep:
    """Return the forecast of a step; *training* is the prediction of its optimizer step where it is known already."""
    training = training or forecast_training(model, cluster, profile, task, place)
    layout, responses = place.rollout, ceil(task.responses * task.oversampling)
    ahead = AHEAD if place.partial_rollout else max(place.staleness, 1) if place.mode is RlMode.ASYNC else 1
    requests = GenerationTask(task.prompt, task.response, None, responses * ahead, task.group)
    host_s = profile.rollout_sequence_s * profile.host_pace.get(cluster.gpu.name, 1.0)
    busier = structs.replace(engine, sequence_s=engine.sequence_s + host_s)
    rollout = forecast_generation(model, cluster, layout, place.formats, busier, requests, place.memory_share)
    rollout = replace(rollout, engine=engine)
    assert rollout.seconds is not None
    generation_s = rollout.seconds / ahead
    longest = min(float(task.response.draw(task.responses).max()), task.response.most) + task.prompt.mean
    moved_s = profile.padded_token_s * task.responses * longest
    batches = task.responses / task.train_batch
    forward_s = training.forward_s * batches * profile.forward_pace + moved_s
    # A sequence is on one rank, and the longest of a batch may be longer than the share of a rank.
    lengths = task.prompt.mean + task.response.draw(task.train_batch)
    update_s = training.prediction.step_s * max(1.0, float(lengths.max()) * place.dp / float(lengths.sum()))
    passes = {"old log-probabilities": task.old_logprobs, "reference": task.reference, "critic values": task.critic}
    phases = {
        "generation": generation_s,
        "reward": task.reward_s + _late_rewards_s(task, rollout) / ahead,
        **{name: forward_s for name, wanted in passes.items() if wanted},
        "update": update_s * batches * task.epochs * (2.0 if task.critic else 1.0) * profile.train_pace + moved_s,
        "weight sync": sync_seconds(model, cluster, profile, place),
        "overhead": profile.step_s + profile.sequence_s * task.responses,
    }
    if place.mode is RlMode.COLOCATED and cluster.node.host:
        # Optimizer states and gradients move to the host before a rollout, and back after it.
        rate = copy_bytes_per_s(cluster.node.host, min(cluster.node.gpus, place.train_gpus))
        phases["offload"] = 2.0 * float(training.memory["optimizer"] + training.memory["gradients"]) / rate
    train_pool_s = sum(phases[name] for name in phases if name not in ("generation", "reward"))
    rollout_pool_s = generation_s + phases["reward"] + phases["weight sync"]
    step_s = max(train_pool_s, rollout_pool_s) if place.mode is RlMode.ASYNC else sum(phases.values())
    assumptions = [*rollout.assumptions, "log-probability passes run at the pace of the forward pass of training"]
    if place.mode is RlMode.COLOCATED and not cluster.node.host:
        assumptions.append(
            f"no time for moving optimizer states to the hosts of {cluster.name}, which it does not describe (--set "
            "node.host.memory and others, docs/offload.md)"
        )
    if host_s or moved_s:
        assumptions.append(
            f"{profile.name} takes {format_seconds(host_s)} of CPU time for each running sequence and decode step, and "
            f"{format_seconds(moved_s)} to move the batch of each pass: generate and predict leave them out"
        )
    if task.response.shape == "fixed":
        assumptions.append("all responses have the same length, so the rollout has no long tail (--response-length)")
    elif task.response.shape != "measured":
        assumptions.append(f"response lengths: {task.response}")
    if task.reward_latency is not None:
        assumptions.append("rewards are computed at once, however many responses wait for theirs")
    times_s = phases, step_s, rollout_pool_s, train_pool_s
    return RlStep(model, cluster, profile, task, place, *times_s, rollout, training, tuple(assumptions))


def _late_rewards_s(task: RlTask, rollout: GenerationForecast) -> float:
    """Return the seconds from the last response to the last reward, where each has a latency of its own."""
    if task.reward_latency is None:
        return 0.0
    latencies_s = task.reward_latency.draw(max(rollout.task.requests or 1, len(rollout.finish_s))) * MS
    latency_s = np.random.default_rng(REWARD_SEED).permutation(latencies_s)  # independent of response lengths
    return float((np.resize(rollout.finish_s, len(latency_s)) + latency_s).max() - max(rollout.finish_s))


def vary_spread(step: RlStep) -> dict[str, float]:
    """Return the step time for other spreads of the response lengths, where the distribution was assumed."""
    times = {}
    nouns = step.model, step.cluster, step.profile, step.generation.engine
    for cv in (0.3, 0.6, 1.0):
        task = replace(step.task, response=replace(step.task.response, shape="lognormal", cv=cv))
        times[f"cv {cv:g}"] = forecast_step(*nouns, task, step.placement, step.training).step_s
    return times
