"""Forecasts of generation: serving at a steady concurrency, or a batch of requests to completion."""

import heapq
from dataclasses import asdict, replace

import numpy as np

from stepcast.generation import engine as engines
from stepcast.generation.engine import EngineProfile, GenerationFormats, GenerationLayout, GenerationMemory, StepTimes
from stepcast.generation.lengths import Lengths
from stepcast.hardware import Cluster
from stepcast.ir.arrays import FloatArray
from stepcast.ir.model import Model
from stepcast.ir.types import DType, FactDict, dataclass, pick, require
from stepcast.views.answer import Answer

# ---- A batch of requests generated to completion, from event to event -------------------------------------
# Every running sequence gets one token in each step, so the order of events depends on steps alone: a request joins
# where another finishes. Events are found first, by a heap of finishing steps; all steps between two events are equal
# but for their growing context and are priced together, thousands of intervals in one call.

KNOTS = 160  # batch sizes at which steps are priced; between them times are interpolated


@dataclass(frozen=True, slots=True)
class Rollout:
    """The generation of a batch on one engine.

    *finish_s* are the times at which its requests finish, in the order given. *batch* sequences ran in the
    interval that ended at each of *ends_s*. *tail_s* are spent with less than half of the largest batch.
    """

    seconds: float
    prefill_s: float
    ttft_s: float  # mean of the requests, with their wait for a place
    finish_s: FloatArray
    ends_s: FloatArray
    batch: FloatArray
    tail_s: float
    largest_batch: int
    tokens: float


def batch_limit(steps: StepTimes, memory: GenerationMemory, prompt: float, response: float) -> int:
    """Return the sequences that run at once on one attention rank: those that fit at their mean length."""
    fit = memory.sequences_that_fit(prompt + response / 2.0)
    if fit < 1.0:
        weights, reserved, left = (size / 2**30 for size in memory.parts)
        need = memory.held_bytes(prompt + response / 2.0) / 2**30
        raise ValueError(
            f"no sequence fits: weights take {weights:.1f} GiB, the engine reserves {reserved:.1f} GiB, {left:.2f} GiB "
            f"are left of what it may use of {memory.gpu_bytes / 2**30:.1f} GiB (--memory-share), and a sequence needs "
            f"{need:.2f} GiB; use more tensor or expert parallel ranks, narrower weights, or a larger share"
        )
    return int(min(fit, steps.engine.sequences))


def generate_batch(
    steps: StepTimes, prompts: FloatArray, responses: FloatArray, limit: int, shared_prompts: int = 1
) -> Rollout:
    """Return the generation of requests on one attention rank that runs *limit* of them at once.

    *shared_prompts* requests have the same prompt, which is prefilled once (prefix caching).
    """
    count = len(prompts)
    join_step, finish_step = np.zeros(count), np.zeros(count)
    running: list[tuple[float, int]] = []
    step, offset_sum, index = 0.0, 0.0, 0
    # Of each interval: first step, last step, batch, sum of prompt minus join; at its start: tokens to prefill, prompts
    # and requests.
    intervals: list[tuple[float, ...]] = []
    while running or index < count:
        tokens, new_prompts, before = 0.0, 0, index
        while index < count and len(running) < limit:
            heapq.heappush(running, (step + float(responses[index]), index))
            join_step[index] = step
            offset_sum += float(prompts[index]) - step
            if index % shared_prompts == 0:
                tokens, new_prompts = tokens + float(prompts[index]), new_prompts + 1
            index += 1
        until = running[0][0]
        intervals.append((step, until, float(len(running)), offset_sum, tokens, new_prompts, index - before))
        step = until
        while running and running[0][0] <= step:
            _, done = heapq.heappop(running)
            finish_step[done] = step
            offset_sum -= float(prompts[done]) - join_step[done]
    first, last, batch, offsets, tokens_joined, prompts_joined, joined = np.array(intervals).T
    context = offsets / batch + (first + last) / 2.0
    seconds = (last - first) * _decode_s(steps, batch, context)
    prefill_s = _prefill_s(steps, tokens_joined, float(np.mean(prompts)))
    largest, spans = int(batch.max()), seconds + prefill_s
    ends = np.cumsum(spans)
    # Prompts that join together are prefilled one after the other: the k-th of n waits for k / n of the time.
    first_s = ends - spans + prefill_s * (1.0 + 1.0 / np.maximum(prompts_joined, 1.0)) / 2.0
    return Rollout(
        seconds=float(ends[-1]),
        prefill_s=float(prefill_s.sum()),
        ttft_s=float((joined * first_s).sum() / count),
        finish_s=np.interp(finish_step, last, ends),
        ends_s=ends,
        batch=batch,
        tail_s=float(spans[batch < largest / 2.0].sum()),
        largest_batch=largest,
        tokens=float(responses.sum()),
    )


def _decode_s(steps: StepTimes, batch: FloatArray, context: FloatArray) -> FloatArray:
    """Return decode steps; where there are many, everything but attention is interpolated over batch sizes."""
    if len(batch) <= KNOTS:
        return steps.decode_s(batch, context)
    knots = np.unique(np.rint(np.geomspace(batch.min(), batch.max(), KNOTS)))
    nothing = np.zeros_like(knots)
    rest_s = steps.decode_s(knots, nothing) - steps.attention_s(knots, nothing)
    return np.interp(batch, knots, rest_s) + steps.attention_s(batch, context)


def _prefill_s(steps: StepTimes, tokens: FloatArray, prompt: float) -> FloatArray:
    """Return the seconds that prefilling *tokens* of new prompts adds to each interval."""
    seconds = np.zeros_like(tokens)
    some = np.flatnonzero(tokens)
    if not len(some):
        return seconds
    chunks = np.ceil(tokens[some] / float(steps.engine.prefill_tokens))
    size = tokens[some] / chunks
    none = np.zeros_like(size)
    seconds[some] = chunks * steps.mixed_s(none, none, np.minimum(size, prompt), none, np.maximum(size / prompt, 1.0))
    return seconds


# ---- serving at steady concurrency: time to first token and time per output token in closed form ----------
# *concurrency* clients each send the next request when their last one is finished, as benchmark clients of vLLM,
# SGLang and TensorRT-LLM do with a concurrency limit. While one request decodes, each other client starts one request
# on average, whose prefill delays it.

BALANCED = 1.15  # demand over rate of prefill engines whose number is not stated: clients wait for them (fitted)
SPLIT_WAVES = 7.0  # requests of a client in runs with engines apart (fitted; as EngineProfile.waves)
SAME_STEP = 0.12  # share of an engine's clients that meet a request in its prefill step again (fitted)
ROUTER_S = 0.12  # the way of a request through the router between the pools, at least (fitted)
QUEUE_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class SteadyServing:
    """Mean times of serving, an entry for each concurrency; *running* of the clients' requests are in the batch, the
    rest wait for memory.
    """

    ttft_s: FloatArray
    tpot_s: FloatArray
    running: FloatArray
    waiting: FloatArray
    prompt_s: FloatArray
    decode_step_s: FloatArray
    requests_per_s: FloatArray


def add_waits(served: SteadyServing, request_s: float, burst_s: FloatArray, output: float) -> SteadyServing:
    """Return *served* with what all clients wait for: the first wave of requests, and room in the cache.

    Each client sends its next request when it has all tokens of its last one, so the rate follows by Little's law.
    """
    cycle_s = output * served.tpot_s + served.ttft_s
    ttft_s = request_s + served.ttft_s + burst_s + served.waiting / served.running * cycle_s
    latency_s = ttft_s + (output - 1.0) * served.tpot_s
    requests_per_s = served.requests_per_s * (served.running + served.waiting) / latency_s
    return replace(served, ttft_s=ttft_s, requests_per_s=requests_per_s)


def prefill_steps(
    steps: StepTimes, prompt: float, batch: FloatArray, context: FloatArray, prompts: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of the steps that prefill *prompts* together, and by how much they delay the running
    sequences.
    """
    starts = np.arange(0.0, prompt, steps.engine.prefill_tokens)[:, np.newaxis]
    chunks, is_mixed = np.minimum(prompt - starts, steps.engine.prefill_tokens), steps.engine.mixes_prefill
    seconds = delay_s = steps.mixed_s(batch if is_mixed else np.zeros_like(batch), context, chunks, starts, prompts)
    if is_mixed:
        delay_s = np.maximum(seconds - steps.decode_s(np.maximum(batch, 1.0), context), 0.0)
    return seconds.sum(axis=0), delay_s.sum(axis=0)


def queue_s(clients: FloatArray, think_s: FloatArray, service_s: FloatArray, servers: FloatArray | float) -> FloatArray:
    """Return the mean seconds of a request in one of *servers* and in the queue before them, where each of *clients*
    comes back *think_s* after it was served.

    Mean value analysis by Schweitzer's fixed point (Lazowska et al., Quantitative System Performance, 1984, chapter 6)
    with constant service; several servers are one of their joint rate and a delay (Seidmann et al., 1987).
    """
    own_s = service_s / servers
    delay_s, others = service_s - own_s, np.maximum(clients - 1.0, 0.0) / np.maximum(clients, 1.0)
    waited_s = own_s
    for _ in range(QUEUE_ROUNDS):
        rate = clients / (think_s + delay_s + waited_s)
        met = others * (rate * waited_s - np.minimum(rate * own_s, 1.0) / 2.0)
        waited_s = (waited_s + own_s * (1.0 + np.maximum(met, 0.0))) / 2.0
    return delay_s + waited_s


def steady_serving(
    steps: StepTimes, memory: GenerationMemory, concurrency: FloatArray, prompt: float, output: float
) -> SteadyServing:
    """Return the mean times of serving requests of *prompt* and *output* tokens to each *concurrency* of clients.

    Sequences and prompts are shared by the engine's attention data-parallel ranks, which step together.
    """
    dp, engine = float(steps.layout.dp), steps.engine
    context = np.full(concurrency.shape, prompt + output / 2.0)
    running = np.minimum(concurrency, _most_running(memory, engine, prompt, output) * dp)
    batch = np.maximum(running / dp, 1.0)
    decode_s = steps.decode_s(batch, context)
    most = max(1.0, engine.prefill_tokens // prompt)  # prompts that wait share a step
    prompt_s, delay_s = prefill_steps(steps, prompt, batch - 1.0, context, np.ones(batch.shape))
    filled_s = prefill_steps(steps, prompt, batch - 1.0, context, np.full(batch.shape, most))[0] / most
    tpot_s = decode_s + np.maximum(running - 1.0, 0.0) / dp * delay_s / output
    queued_s = queue_s(running, output * tpot_s, filled_s, dp) - filled_s
    # A request that comes while others decode waits for half of their step.
    first_s = queued_s + prompt_s + decode_s / 2.0 * np.clip(running - 1.0, 0.0, 1.0)
    replicas = np.asarray(float(steps.layout.replicas))
    served = SteadyServing(first_s, tpot_s, running, concurrency - running, prompt_s, decode_s, replicas)
    burst_s = np.maximum(running / dp - 1.0, 0.0) / 2.0 * filled_s / engine.waves
    return add_waits(served, engine.request_s, burst_s, output)


def split_serving(
    prefill: StepTimes,
    decode: StepTimes,
    memory: GenerationMemory,
    workers: tuple[float | None, float | None],
    concurrency: FloatArray,
    prompt: float,
    output: float,
) -> SteadyServing:
    """Return the mean times where *workers* engines prefill and others decode (disaggregated serving).

    Without a stated number of prefill engines the demand is BALANCED of what they can do (a fraction of an engine
    counts), without one of decode engines as many as hold the sequences of all clients. A stated number of them runs
    batches of 2^n or 3 x 2^n sequences on each attention rank, for which CUDA graphs are captured; others wait.
    A prompt's cache goes from one to the other over the network, a NIC of each GPU of the smaller engine.
    """
    most, dp = _most_running(memory, decode.engine, prompt, output), decode.layout.dp
    decoding = np.ceil(concurrency / (most * dp)) if workers[1] is None else np.full(concurrency.shape, workers[1])
    batch, context = np.clip(concurrency / decoding / dp, 1.0, most), np.full(concurrency.shape, prompt + output / 2)
    if workers[1] is not None:
        power = 2.0 ** np.floor(np.log2(batch))
        batch = np.where((power > 1.0) & (batch >= 1.5 * power), 1.5 * power, power)
    running = np.minimum(concurrency, batch * decoding * dp)
    tpot_s = decode.decode_s(batch, context)
    none, together = np.zeros(running.shape), max(1.0, prefill.engine.prefill_tokens // prompt)  # prompts of a step
    prompt_s = prefill_steps(prefill, prompt, none, context, none + 1.0)[0]
    filled_s = prefill_steps(prefill, prompt, none, context, none + together)[0] / together
    busy = running * filled_s / (output * tpot_s + prompt_s) / prefill.layout.dp
    prefilling = np.maximum(busy / BALANCED, 1.0) if workers[0] is None else np.full(running.shape, workers[0])
    ranks, nic = min(prefill.layout.tp, decode.layout.tp), prefill.cluster.node.nic
    moved_s = memory.held_bytes(prompt) * decode.layout.tp / ranks / nic.bandwidth_bytes_per_s if nic else 0.0
    servers = prefilling * prefill.layout.dp
    queued_s = queue_s(running, output * tpot_s + moved_s, filled_s, servers) - filled_s
    first_s = queued_s + prompt_s + moved_s
    replicas = np.asarray(float(decode.layout.replicas))
    served = SteadyServing(first_s, tpot_s, running, concurrency - running, prompt_s, tpot_s, replicas)
    others = np.maximum(running / servers - 1.0, 0.0)
    # Prompts of one step get their first tokens together, finish within a short time and share a step once more.
    burst_s = (others / 2.0 / SPLIT_WAVES + np.minimum(SAME_STEP * others, together - 1.0)) * filled_s
    return add_waits(served, max(prefill.engine.request_s, ROUTER_S), burst_s, output)


def _most_running(memory: GenerationMemory, engine: EngineProfile, prompt: float, output: float) -> float:
    """Return the sequences that one attention rank runs at most."""
    return max(min(memory.sequences_that_fit(prompt + output / 2.0), float(engine.sequences)), 1.0)


NOT_MODELLED = "preemption and prefix reuse between requests of different groups are not modelled"
CURVE_POINTS = 60


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
class GenerationForecast(Answer):
    """The forecast of generation on one or more engines; see ``facts`` for its numbers."""

    view, title = "generation.generation_view", "generate"
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

    def warn(self, warning: str) -> "GenerationForecast":
        """Return the forecast with one more warning."""
        return replace(self, warnings=(*self.warnings, warning))

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.layout.gpus

    def facts(self) -> FactDict:
        """Return the answer as its JSON."""
        memory = self.memory
        return {
            **pick(self, "model=model.name cluster=cluster.name gpu=cluster.gpu.name"),
            **pick(self, "gpus=layout.gpus engine=engine.name"),
            "layout": asdict(self.layout),
            "weights": self.formats.word,
            "kv_cache": str(self.formats.cache),
            "prompt": str(self.task.prompt),
            "response": str(self.task.response),
            **pick(self.task, "concurrency requests"),
            **pick(self, "ttft_s tpot_s tokens_per_s tokens_per_s_per_gpu decode_step_s prefill_s"),
            **pick(self, "batch_s=seconds tail_s mean_batch waiting"),
            "concurrency_that_fits": self.running_limit * self.layout.dp * self.layout.replicas,
            "memory_bytes": {
                **pick(memory, "weights=weight_bytes reserved=reserved_bytes cache=cache_bytes"),
                "cache_per_token": memory.token_bytes + sum(size for _, size in memory.window_bytes),
                **pick(memory, "state_per_sequence=sequence_bytes capacity=gpu_bytes"),
            },
            "curve": [{"time_s": time, "running": running} for time, running in self.curve],
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }


def check_layout(model: Model, layout: GenerationLayout) -> None:
    """Raise a ValueError for a layout that the model cannot have."""
    name, experts = model.name, model.experts.count if model.experts else 0
    require(model.heads % layout.tp == 0, f"tp {layout.tp} does not divide the {model.heads} attention heads of {name}")
    is_split = layout.ep == 1 or (experts > 0 and experts % layout.ep == 0)
    require(is_split, f"ep {layout.ep} does not divide the {experts} experts of {name}")
    require(layout.dp == 1 or experts > 0, f"{name} has no experts to share: use replicas instead of dp {layout.dp}")
    require(layout.pp <= model.layers, f"pp {layout.pp} exceeds the {model.layers} layers of {name}")


def forecast_generation(
    model: Model,
    cluster: Cluster,
    layout: GenerationLayout,
    formats: GenerationFormats,
    engine: EngineProfile,
    task: GenerationTask,
    memory_share: float | None = None,
    speculation: engines.Speculation = engines.NO_SPECULATION,
) -> GenerationForecast:
    """Return the forecast of *task* by engines of *layout*."""
    check_layout(model, layout)
    steps = engines.step_times(model, cluster, layout, formats, engine, speculation)
    memory = engines.generation_memory(model, layout, formats, cluster.gpu, engine, memory_share)
    limit = batch_limit(steps, memory, task.prompt.mean, task.response.mean)
    assumptions, gpu, half = [NOT_MODELLED, *model.unread], cluster.gpu, cluster.gpu.half_format
    for stored, part in ((formats.dense, "weights"), (formats.cache, "KV cache")):
        if stored not in gpu.matrix_flops:
            meant = half if stored is DType.BF16 else stored
            assumptions.append(f"{gpu.name} has no {stored} matrix units: {meant} {part}, products in {half}")
    if speculation.tokens:
        assumptions.append(f"drafted tokens are accepted with a chance of {speculation.acceptance:g}")
        if not model.next_token_layers:
            assumptions.append(f"{model.name} has no module that drafts: one is priced as a layer and the output layer")
    if layout.dp > 1 or layout.ep > 1:
        assumptions.append("tokens are routed evenly over experts")
    parts = model, cluster, layout, formats, engine, task, memory, limit
    doubts = tuple(cluster.list_doubts())
    shared = GenerationForecast(*parts, 0.0, 0.0, 0.0, assumptions=tuple(assumptions), warnings=doubts)
    if (length := task.prompt.mean + task.response.mean) > model.max_seq:
        shared = shared.warn(f"requests of {length:,.0f} tokens are longer than the {model.max_seq:,} of {model.name}")
    if task.response.mean <= 1:
        shared = shared.warn("a response of one token comes from its prefill: the time per output token has no meaning")
    if task.requests is not None:
        return _forecast_batch(shared, spread_requests(steps, limit, task))
    clients = task.concurrency or 1
    served = steady_serving(steps, memory, np.array([clients / layout.replicas]), task.prompt.mean, task.response.mean)
    waiting = float(served.waiting[0]) * layout.replicas
    if waiting >= 1:
        shared = shared.warn(f"{waiting:,.0f} of {clients:,} requests wait for cache memory on average")
    names = "ttft_s tpot_s decode_step_s prefill_s=prompt_s tokens_per_s=requests_per_s mean_batch=running"
    times: FactDict = {name: float(column[0]) for name, column in pick(served, names).items()}
    times["tokens_per_s"] *= task.response.mean
    times["mean_batch"] /= layout.dp
    return replace(shared, **times, waiting=waiting)


def spread_requests(steps: StepTimes, limit: int, task: GenerationTask) -> list[Rollout]:
    """Return the rollouts of the engines' attention ranks, which share the requests evenly, a group on one rank.

    Ranks with equally many requests differ by the lengths they happen to get; few are simulated where many.
    """
    layout, requests = steps.layout, task.requests or 1
    ranks = layout.replicas * layout.dp
    prompts, responses = task.prompt.draw(requests), task.response.draw(requests)
    groups = -(-requests // task.group)
    owner = np.arange(groups) * ranks // max(groups, 1) if groups >= ranks else np.arange(groups)
    owner = owner.repeat(task.group)[:requests]
    totals = np.bincount(owner, weights=responses, minlength=ranks)
    longest = np.zeros(ranks)
    np.maximum.at(longest, owner, responses)
    # The last rank to finish has the most tokens or the longest response: simulate those that may be it.
    chosen = {*np.argsort(-totals)[:4].tolist(), *np.argsort(-longest)[:4].tolist()}
    return [
        generate_batch(steps, prompts[owner == rank], responses[owner == rank], limit, task.group)
        for rank in sorted(chosen)
        if totals[rank] > 0
    ]


def _forecast_batch(shared: GenerationForecast, rollouts: list[Rollout]) -> GenerationForecast:
    slowest = max(rollouts, key=lambda rollout: rollout.seconds)
    requests, response = shared.task.requests or 1, shared.task.response.mean
    spans = np.diff(slowest.ends_s, prepend=0.0)
    shown = np.unique(np.linspace(0, len(spans) - 1, CURVE_POINTS).astype(int))
    return replace(
        shared,
        **pick(slowest, "seconds prefill_s tail_s ttft_s"),
        mean_batch=float((slowest.batch * spans).sum() / spans.sum()),
        tpot_s=float((slowest.finish_s - slowest.ttft_s).sum() / max(slowest.tokens, 1.0)),
        tokens_per_s=requests * response / slowest.seconds,
        curve=tuple(zip(slowest.ends_s[shown].tolist(), slowest.batch[shown].tolist(), strict=True)),
        finish_s=tuple(slowest.finish_s.tolist()),
    )
