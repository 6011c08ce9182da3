"""Serving at steady concurrency: time to first token and time per output token in closed form.

*concurrency* clients each send the next request when their last one is finished, as benchmark clients of vLLM,
SGLang and TensorRT-LLM do with a concurrency limit. While one request decodes, each other client starts one
request on average, whose prefill delays it.
"""

import numpy as np

from stepcast.generation.placement import GenerationMemory
from stepcast.generation.steps import StepTimes
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dataclass import dataclass

BALANCED = 0.7  # load of prefill engines that somebody sized
WAVES = 10  # requests of each client in a benchmark: the first of them arrive all at once


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


def steady_serving(
    steps: StepTimes, memory: GenerationMemory, concurrency: FloatArray, prompt: float, output: float
) -> SteadyServing:
    """Return the mean times of serving requests of *prompt* and *output* tokens to each *concurrency* of clients.

    Sequences and prompts are shared by the engine's attention data-parallel ranks, which step together.
    """
    dp, engine = steps.layout.dp, steps.engine
    context = np.full(concurrency.shape, prompt + output / 2.0)
    most = min(memory.sequences_that_fit(prompt + output / 2.0), float(engine.sequences)) * dp
    running = np.minimum(concurrency, max(most, 1.0))
    batch = np.maximum(running / dp, 1.0)
    decode_s = steps.decode_s(batch, context)
    prompt_s, delay_s = prefill_steps(steps, prompt, batch - 1.0, context)
    tpot_s = decode_s + np.maximum(running - 1.0, 0.0) / dp * delay_s / output
    cycle_s = output * tpot_s + prompt_s
    load = np.minimum(running / dp * prompt_s / cycle_s, 0.95)
    queue_s = load / (2.0 * (1.0 - load)) * prompt_s * (1.0 - 1.0 / np.maximum(running, 1.0))
    burst_s = np.maximum(running / dp - 1.0, 0.0) / 2.0 * prompt_s / WAVES
    waiting = concurrency - running
    ttft_s = engine.request_s + decode_s / 2.0 + prompt_s + queue_s + burst_s + waiting / running * cycle_s
    rate = running / cycle_s * steps.layout.replicas
    return SteadyServing(ttft_s, tpot_s, running, waiting, prompt_s, decode_s, rate)


def split_serving(
    prefill: StepTimes,
    decode: StepTimes,
    memory: GenerationMemory,
    workers: tuple[float | None, float],
    concurrency: FloatArray,
    prompt: float,
    output: float,
) -> SteadyServing:
    """Return the mean times where *workers* engines prefill and others decode (disaggregated serving).

    Without a stated number of prefill engines there are as many as keep them busy BALANCED of the time.
    A prompt's cache goes from one to the other over the network, a NIC of each GPU of the smaller engine.
    """
    decode_ranks = workers[1] * decode.layout.dp
    most = min(memory.sequences_that_fit(prompt + output / 2.0), float(decode.engine.sequences)) * decode_ranks
    running = np.minimum(concurrency, max(most, 1.0))
    batch, context = np.maximum(running / decode_ranks, 1.0), np.full(concurrency.shape, prompt + output / 2.0)
    tpot_s = decode.decode_s(batch, context)
    nothing = np.zeros(concurrency.shape)
    prompt_s, _ = prefill_steps(prefill, prompt, nothing, context)
    own_cycle_s = output * tpot_s + prompt_s
    engines = np.full(concurrency.shape, workers[0] or 1.0)
    if workers[0] is None:
        engines = np.maximum(np.ceil(running * prompt_s / own_cycle_s / BALANCED / prefill.layout.dp), 1.0)
    prefill_ranks = engines * prefill.layout.dp
    nic = prefill.cluster.node.nic
    ranks = min(prefill.layout.tp, decode.layout.tp)
    moved_s = memory.held_bytes(prompt) * decode.layout.tp / ranks / nic.bandwidth_bytes_per_s if nic else 0.0
    # The prefill engines can limit the rate: clients then wait for them instead of decoding.
    cycle_s = np.maximum(own_cycle_s + moved_s, running * prompt_s / prefill_ranks)
    load = np.minimum(running * prompt_s / prefill_ranks / cycle_s, 0.95)
    queue_s = load / (2.0 * (1.0 - load)) * prompt_s * (1.0 - 1.0 / np.maximum(running, 1.0))
    burst_s = np.maximum(running / prefill_ranks - 1.0, 0.0) / 2.0 * prompt_s / WAVES
    waiting = concurrency - running
    ttft_s = prefill.engine.request_s + prompt_s + moved_s + queue_s + burst_s + waiting / running * cycle_s
    ttft_s = np.maximum(ttft_s, cycle_s - output * tpot_s)
    return SteadyServing(ttft_s, tpot_s, running, waiting, prompt_s, tpot_s, running / cycle_s)
