"""Serving at steady concurrency: time to first token and time per output token in closed form.

*concurrency* clients each send the next request when their last one is finished, as benchmark clients of vLLM,
SGLang and TensorRT-LLM do with a concurrency limit. While one request decodes, each other client starts one
request on average, whose prefill delays it.
"""

from dataclasses import replace

import numpy as np

from stepcast.generation.engine import EngineProfile
from stepcast.generation.placement import GenerationMemory
from stepcast.generation.steps import StepTimes
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dataclass import dataclass

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


def serve(
    served: SteadyServing, request_s: float, first_s: FloatArray, burst_s: FloatArray, output: float
) -> SteadyServing:
    """Return *served* with what all clients wait for: the first wave of requests, and room in the cache."""
    cycle_s = output * served.tpot_s + first_s
    ttft_s = request_s + first_s + burst_s + served.waiting / served.running * cycle_s
    return replace(served, ttft_s=ttft_s, requests_per_s=served.requests_per_s * served.running / cycle_s)


def prefill_steps(
    steps: StepTimes, prompt: float, batch: FloatArray, context: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of the steps that prefill a prompt, and by how much they delay the running sequences."""
    starts = np.arange(0.0, prompt, steps.engine.prefill_tokens)[:, np.newaxis]
    chunks = np.minimum(prompt - starts, steps.engine.prefill_tokens)
    if not steps.engine.mixes_prefill:
        alone = steps.mixed_s(np.zeros_like(starts), np.zeros_like(starts), chunks, starts).sum(axis=0)
        return np.broadcast_to(alone, batch.shape), np.broadcast_to(alone, batch.shape)
    seconds = steps.mixed_s(batch, context, chunks, starts)
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
    prompt_s, delay_s = prefill_steps(steps, prompt, batch - 1.0, context)
    tpot_s = decode_s + np.maximum(running - 1.0, 0.0) / dp * delay_s / output
    first_s = queue_s(running, output * tpot_s, prompt_s, dp) + decode_s / 2.0
    replicas = np.asarray(float(steps.layout.replicas))
    served = SteadyServing(first_s, tpot_s, running, concurrency - running, prompt_s, decode_s, replicas)
    burst_s = np.maximum(running / dp - 1.0, 0.0) / 2.0 * prompt_s / engine.waves
    return serve(served, engine.request_s, first_s, burst_s, output)


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
    prompt_s, _ = prefill_steps(prefill, prompt, np.zeros(running.shape), context)
    # Short prompts that wait share a step.
    together, none = max(1.0, prefill.engine.prefill_tokens // prompt), np.zeros(1)
    filled_s = prefill.mixed_s(none, none, none + prompt, none, together) / together if together > 1.0 else prompt_s
    busy = running * filled_s / (output * tpot_s + prompt_s) / prefill.layout.dp
    engines = np.maximum(busy / BALANCED, 1.0) if workers[0] is None else np.full(running.shape, workers[0])
    ranks, nic = min(prefill.layout.tp, decode.layout.tp), prefill.cluster.node.nic
    moved_s = memory.held_bytes(prompt) * decode.layout.tp / ranks / nic.bandwidth_bytes_per_s if nic else 0.0
    servers = engines * prefill.layout.dp
    queued_s = queue_s(running, output * tpot_s + moved_s, filled_s, servers) - filled_s
    first_s = queued_s + prompt_s + moved_s
    replicas = np.asarray(float(decode.layout.replicas))
    served = SteadyServing(first_s, tpot_s, running, concurrency - running, prompt_s, tpot_s, replicas)
    others = np.maximum(running / servers - 1.0, 0.0)
    # Prompts of one step get their first tokens together, finish within a short time and share a step once more.
    burst_s = (others / 2.0 / SPLIT_WAVES + np.minimum(SAME_STEP * others, together - 1.0)) * filled_s
    return serve(served, max(prefill.engine.request_s, ROUTER_S), first_s, burst_s, output)


def _most_running(memory: GenerationMemory, engine: EngineProfile, prompt: float, output: float) -> float:
    """Return the sequences that one attention rank runs at most."""
    return max(min(memory.sequences_that_fit(prompt + output / 2.0), float(engine.sequences)), 1.0)
