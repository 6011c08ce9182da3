"""How many micro-batches a stage holds at once when it is fullest.

What a schedule really holds is best counted from its order; these are the numbers its authors give.
"""

from functools import lru_cache

from stepcast.ir.schedules import Pipeline, ScheduleKind, facts_of
from stepcast.ir.strategy import Strategy


def default_in_flight(strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """Return, for each stage, the number of micro-batches that each of its pieces holds."""
    return held_in_flight(strategy.schedule, _pipeline_of(strategy), False)


def before_input_gradient(strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """Return, for each stage and piece, how many of them have not run their input gradient yet.

    The others wait for their weight gradient: of the loss they keep the gradient of the logits alone.
    """
    return held_in_flight(strategy.schedule, _pipeline_of(strategy), True)


def _pipeline_of(strategy: Strategy) -> Pipeline:
    layout = strategy.layout
    # A forward beside the backward of another micro-batch: one more is begun before the first ends. On a
    # single stage the one fills what the other empties, layer by layer.
    paired = strategy.pairs_micro_batches and layout.pp > 1
    return Pipeline(layout.pp, layout.vpp, strategy.micro_batches, ahead=1 if paired else 0)


@lru_cache(maxsize=1024)
def held_in_flight(
    schedule: ScheduleKind, pipeline: Pipeline, before_input: bool = False
) -> tuple[tuple[int, ...], ...]:
    """For each stage of *pipeline*, the micro-batches that each piece holds; with *before_input* those
    whose input gradient has not run.
    """
    facts, batches = facts_of(schedule, pipeline.stages), pipeline.micro_batches
    held = (facts.before_input_gradient if before_input else None) or facts.held
    return tuple(tuple(min(batches, number) for number in held(pipeline, stage)) for stage in range(pipeline.stages))
