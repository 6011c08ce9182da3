"""A batch of requests generated to completion, from event to event.

Every running sequence gets one token in each step, so the order of events depends on steps alone: a request joins
where another finishes. Events are found first, by a heap of finishing steps; all steps between two events are equal
but for their growing context and are priced together, thousands of intervals in one call.
"""

import heapq

import numpy as np

from stepcast.generation.placement import GenerationMemory
from stepcast.generation.steps import StepTimes
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dataclass import dataclass

KNOTS = 160  # batch sizes at which steps are priced; between them times are interpolated


@dataclass(frozen=True, slots=True)
class Rollout:
    """The generation of a batch on one engine.

    *finish_s* are the times at which its requests finish, in the order given. *batch* sequences ran in the
    interval that ended at each of *ends_s*. *tail_s* are spent with less than half of the largest batch.
    """

    seconds: float
    prefill_s: float
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
        need = memory.held_bytes(prompt + response / 2.0) / 2**30
        raise ValueError(
            f"no sequence fits: weights take {memory.weight_bytes / 2**30:.1f} GiB of "
            f"{memory.gpu_bytes / 2**30:.1f} GiB, a sequence needs {need:.2f} GiB; use more tensor or expert "
            "parallel ranks, or narrower weights"
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
    bounds: list[tuple[float, float, float, float]] = []  # first step, last step, batch, sum of prompt minus join
    fresh: list[float] = []  # prompt tokens to prefill at the start of each interval
    while running or index < count:
        joined = 0.0
        while index < count and len(running) < limit:
            heapq.heappush(running, (step + float(responses[index]), index))
            join_step[index] = step
            offset_sum += float(prompts[index]) - step
            joined += float(prompts[index]) if index % shared_prompts == 0 else 0.0
            index += 1
        until = running[0][0]
        bounds.append((step, until, float(len(running)), offset_sum))
        fresh.append(joined)
        step = until
        while running and running[0][0] <= step:
            _, done = heapq.heappop(running)
            finish_step[done] = step
            offset_sum -= float(prompts[done]) - join_step[done]
    first, last, batch, offsets = np.array(bounds).T
    context = offsets / batch + (first + last) / 2.0
    seconds = (last - first) * _decode_s(steps, batch, context)
    prefill_s = _prefill_s(steps, np.array(fresh), float(np.mean(prompts)))
    ends = np.cumsum(seconds + prefill_s)
    largest, spans = int(batch.max()), seconds + prefill_s
    return Rollout(
        seconds=float(ends[-1]),
        prefill_s=float(prefill_s.sum()),
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
    limit = float(steps.engine.prefill_tokens)
    chunks = np.ceil(tokens[some] / limit)
    size = tokens[some] / chunks
    none = np.zeros_like(size)
    alone = steps.mixed_s(none, none, np.minimum(size, prompt), none, np.maximum(size / prompt, 1.0))
    seconds[some] = chunks * alone
    return seconds
