"""Forecasts of generation: serving at a steady concurrency, or a batch of requests to completion."""

from dataclasses import asdict, replace

import numpy as np

from stepcast.generation.engine import EngineProfile
from stepcast.generation.lengths import Lengths
from stepcast.generation.placement import GenerationFormats, GenerationLayout, GenerationMemory, generation_memory
from stepcast.generation.rollout import Rollout, batch_limit, generate_batch
from stepcast.generation.steady import steady_serving
from stepcast.generation.steps import NO_SPECULATION, Speculation, StepTimes, step_times
from stepcast.hardware import Cluster
from stepcast.ir.dataclass import dataclass
from stepcast.ir.facts import FactDict
from stepcast.ir.model import Model

NOT_MODELLED = "preemption and prefix reuse between requests of different groups are not modelled"
CURVE_POINTS = 60
TIMES = ("ttft_s", "tpot_s", "tokens_per_s", "tokens_per_s_per_gpu", "decode_step_s", "prefill_s")


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """The requests: prompt and response lengths, and either clients at once or a number of requests in *groups* that
    share a prompt.
    """

    prompt: Lengths
    response: Lengths
    concurrency: int | None = None
    requests: int | None = None
    group: int = 1


@dataclass(frozen=True)
class GenerationForecast:
    """The forecast of generation on one or more engines; see ``facts`` for its numbers."""

    model: Model
    cluster: Cluster
    layout: GenerationLayout
    formats: GenerationFormats
    engine: EngineProfile
    task: GenerationTask
    memory: GenerationMemory
    running_limit: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    seconds: float | None = None  # of a batch to completion
    prefill_s: float | None = None
    tail_s: float | None = None
    mean_batch: float | None = None
    decode_step_s: float | None = None
    waiting: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    finish_s: tuple[float, ...] = ()  # of the requests of the engine that finishes last
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.layout.gpus

    def facts(self) -> FactDict:
        """Return the answer as its JSON."""
        memory = self.memory
        return {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "gpu": self.cluster.gpu.name,
            "gpus": self.layout.gpus,
            "engine": self.engine.name,
            "layout": asdict(self.layout),
            "weights": "int4" if self.formats.int4 else str(self.formats.dense),
            "kv_cache": str(self.formats.cache),
            "prompt": str(self.task.prompt),
            "response": str(self.task.response),
            "concurrency": self.task.concurrency,
            "requests": self.task.requests,
            **{name: getattr(self, name) for name in TIMES},
            "batch_s": self.seconds,
            **{name: getattr(self, name) for name in ("tail_s", "mean_batch", "waiting")},
            "concurrency_that_fits": self.running_limit * self.layout.dp * self.layout.replicas,
            "memory_bytes": {
                "weights": memory.weight_bytes,
                "reserved": memory.reserved_bytes,
                "cache": memory.cache_bytes,
                "cache_per_token": memory.token_bytes + sum(size for _, size in memory.window_bytes),
                "state_per_sequence": memory.sequence_bytes,
                "capacity": memory.gpu_bytes,
            },
            "curve": [{"time_s": time, "running": running} for time, running in self.curve],
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }


def check_layout(model: Model, layout: GenerationLayout) -> None:
    """Raise a ValueError for a layout that the model cannot have."""
    if model.heads % layout.tp:
        raise ValueError(f"tp {layout.tp} does not divide the {model.heads} attention heads of {model.name}")
    if layout.ep > 1 and (model.experts is None or model.experts.count % layout.ep):
        experts = 0 if model.experts is None else model.experts.count
        raise ValueError(f"ep {layout.ep} does not divide the {experts} experts of {model.name}")
    if layout.dp > 1 and model.experts is None:
        raise ValueError(f"{model.name} has no experts to share: use replicas instead of dp {layout.dp}")
    if layout.pp > model.layers:
        raise ValueError(f"pp {layout.pp} exceeds the {model.layers} layers of {model.name}")


def forecast_generation(
    model: Model,
    cluster: Cluster,
    layout: GenerationLayout,
    formats: GenerationFormats,
    engine: EngineProfile,
    task: GenerationTask,
    memory_share: float | None = None,
    speculation: Speculation = NO_SPECULATION,
) -> GenerationForecast:
    """Return the forecast of *task* by engines of *layout*."""
    check_layout(model, layout)
    steps = step_times(model, cluster, layout, formats, engine, speculation)
    memory = generation_memory(model, layout, formats, cluster.gpu, engine, memory_share)
    limit = batch_limit(steps, memory, task.prompt.mean, task.response.mean)
    assumptions = [NOT_MODELLED]
    if speculation.tokens:
        assumptions.append(f"drafted tokens are accepted with a chance of {speculation.acceptance:g}")
    if layout.dp > 1 or layout.ep > 1:
        assumptions.append("tokens are routed evenly over experts")
    shared = GenerationForecast(
        model, cluster, layout, formats, engine, task, memory, limit, 0.0, 0.0, 0.0, assumptions=tuple(assumptions)
    )
    if task.requests is not None:
        return _forecast_batch(shared, spread_requests(steps, limit, task))
    clients = task.concurrency or 1
    served = steady_serving(steps, memory, np.array([clients / layout.replicas]), task.prompt.mean, task.response.mean)
    waiting = float(served.waiting[0]) * layout.replicas
    warnings = () if waiting < 1 else (f"{waiting:,.0f} of {clients:,} requests wait for cache memory on average",)
    return replace(
        shared,
        ttft_s=float(served.ttft_s[0]),
        tpot_s=float(served.tpot_s[0]),
        tokens_per_s=float(served.requests_per_s[0]) * task.response.mean,
        decode_step_s=float(served.decode_step_s[0]),
        prefill_s=float(served.prompt_s[0]),
        mean_batch=float(served.running[0]) / layout.dp,
        waiting=waiting,
        warnings=warnings,
    )


def spread_requests(steps: StepTimes, limit: int, task: GenerationTask) -> list[Rollout]:
    """Return the rollouts of the engines' attention ranks, which share the requests evenly, a group on one rank.

    Ranks with equally many requests differ by the lengths they happen to get; few are simulated where many.
    """
    layout, requests = steps.layout, task.requests or 1
    ranks = layout.replicas * layout.dp
    prompts, responses = task.prompt.draw(requests), task.response.draw(requests)
    groups = -(-requests // task.group)
    owner = (np.arange(groups) * ranks // max(groups, 1) if groups >= ranks else np.arange(groups)).repeat(task.group)
    owner = owner[:requests]
    totals = np.bincount(owner, weights=responses, minlength=ranks)
    longest = np.zeros(ranks)
    np.maximum.at(longest, owner, responses)
    # The last rank to finish has the most tokens or the longest response: simulate those that may be it.
    chosen = set(np.argsort(-totals)[:4].tolist()) | set(np.argsort(-longest)[:4].tolist())
    chosen = {rank for rank in chosen if totals[rank] > 0}
    return [
        generate_batch(steps, prompts[owner == rank], responses[owner == rank], limit, task.group)
        for rank in sorted(chosen)
    ]


def _forecast_batch(shared: GenerationForecast, rollouts: list[Rollout]) -> GenerationForecast:
    slowest = max(rollouts, key=lambda rollout: rollout.seconds)
    requests, response = shared.task.requests or 1, shared.task.response.mean
    spans = np.diff(slowest.ends_s, prepend=0.0)
    steps_taken = (slowest.batch * spans).sum() / max(slowest.tokens, 1.0)
    shown = np.unique(np.linspace(0, len(spans) - 1, CURVE_POINTS).astype(int))
    return replace(
        shared,
        seconds=slowest.seconds,
        prefill_s=slowest.prefill_s,
        tail_s=slowest.tail_s,
        mean_batch=float((slowest.batch * spans).sum() / spans.sum()),
        ttft_s=slowest.prefill_s / 2.0,  # requests that start together wait for half of all prefills on average
        tpot_s=float(steps_taken),
        tokens_per_s=requests * response / slowest.seconds,
        curve=tuple(zip(slowest.ends_s[shown].tolist(), slowest.batch[shown].tolist(), strict=True)),
        finish_s=tuple(slowest.finish_s.tolist()),
    )
