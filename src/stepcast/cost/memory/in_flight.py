"""How many micro-batches a stage holds at once when it is fullest.

What a schedule really holds is best counted from its order; these are the numbers its authors give.
"""

from functools import lru_cache

from stepcast.ir.schedules import Pipeline, ScheduleKind, facts_of
from stepcast.ir.strategy import Strategy


def default_in_flight(strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """For each stage, the micro-batches that each of its pieces holds."""
    layout = strategy.layout
    # A forward beside the backward of another micro-batch: one more is begun before the first ends. On a
    # single stage the one fills what the other empties, layer by layer.
    paired = strategy.pairs_micro_batches and layout.pp > 1
    pipeline = Pipeline(layout.pp, layout.vpp, strategy.micro_batches, ahead=1 if paired else 0)
    return _held(strategy.schedule, pipeline)


@lru_cache(maxsize=1024)
def _held(schedule: ScheduleKind, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    facts, batches = facts_of(schedule, pipeline.stages), pipeline.micro_batches
    return tuple(
        tuple(min(batches, number) for number in facts.held(pipeline, stage))
        for stage in range(pipeline.stages)
    )
