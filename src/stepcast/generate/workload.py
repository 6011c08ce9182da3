"""Model x Strategy x Framework -> Workload: every op of a step with its shapes, and every collective."""

from dataclasses import replace
from functools import lru_cache

from stepcast.generate.stage import StageMaker
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.legality import check
from stepcast.ir.model import Model
from stepcast.ir.schedules import facts_of
from stepcast.ir.stages import pieces
from stepcast.ir.strategy import ScheduleKind, Strategy
from stepcast.ir.workload import Workload


def generate(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> Workload:
    """What *model* must run in one step under *strategy*: one stage per pipeline piece, in model order."""
    check(model, strategy, framework=framework)
    maker = _maker(model, _stage_view(strategy), framework)
    return Workload(
        stages=tuple(map(maker.stage, pieces(model, strategy))),
        layout=replace(strategy.layout),
        micro_batches=strategy.micro_batches,
        boundary_bytes=maker.sizes.boundary_bytes if strategy.layout.pp > 1 else None,
        name=model.name,
        source="generated",
        notes=(
            ("model", model.name),
            ("micro_batch", str(strategy.micro_batch)),
            ("global_batch", str(strategy.global_batch)),
            ("seq", str(strategy.seq)),
        ),
    )


def _stage_view(strategy: Strategy) -> Strategy:
    """Return *strategy* as far as what one stage runs depends on it: on whether another stage holds a copy of
    its layers, but not on how stages follow one another.
    """
    layout, overlap = strategy.layout, strategy.overlap
    if layout.pp > 2 or layout.vpp > 1:
        layout = replace(layout, pp=min(2, layout.pp), vpp=1)
    if overlap.experts or not overlap.transfers:
        overlap = replace(overlap, transfers=True, experts=False)
    copied = facts_of(strategy.schedule, layout.pp).copies > 1
    schedule = strategy.schedule if copied else ScheduleKind.ONE_F_ONE_B
    return replace(strategy, layout=layout, schedule=schedule, stage_layers=(), overlap=overlap)


@lru_cache(maxsize=1024)
def _maker(model: Model, strategy: Strategy, framework: Framework) -> StageMaker:
    """The same one for strategies whose stages run the same."""
    return StageMaker(model, strategy, framework)
