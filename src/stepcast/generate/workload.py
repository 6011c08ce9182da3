"""Model x Strategy x Framework -> Workload: every op of a step with its shapes, and every collective."""

from dataclasses import replace
from functools import lru_cache

from stepcast.generate.sizes import Sizes
from stepcast.generate.stage import StageMaker
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.legality import check
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Block
from stepcast.ir.stages import Piece, pieces
from stepcast.ir.strategy import ScheduleKind, Strategy
from stepcast.ir.workload import Stage, Workload


def generate(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> Workload:
    """What *model* must run in one step under *strategy*: one stage per pipeline piece, in model order."""
    check(model, strategy, framework=framework)
    view = _stage_view(strategy)
    stages = tuple(
        _stage(
            model,
            view,
            framework,
            model.blocks[piece.layers.start : piece.layers.stop],
            piece.embedding,
            piece.head,
        )
        for piece in pieces(model, strategy)
    )
    return Workload(
        stages=stages,
        layout=replace(strategy.layout),
        micro_batches=strategy.micro_batches,
        boundary_bytes=Sizes(model, strategy, framework).boundary_bytes if strategy.layout.pp > 1 else None,
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
    """*strategy* as far as what one stage runs depends on it: not on how stages follow one another."""
    return replace(
        strategy,
        layout=replace(strategy.layout, pp=min(2, strategy.layout.pp), vpp=1),
        schedule=ScheduleKind.ONE_F_ONE_B,
        stage_layers=(),
        overlap=replace(strategy.overlap, transfers=True, experts=False),
    )


@lru_cache(maxsize=2048)
def _stage(
    model: Model,
    strategy: Strategy,
    framework: Framework,
    blocks: tuple[Block, ...],
    embedding: bool,
    head: bool,
) -> Stage:
    """The same object for pieces that run the same, so that what follows from it is worked out once."""
    at = _place(model, blocks)
    piece = Piece(range(at, at + len(blocks)), embedding, head)
    return StageMaker(model, strategy, framework).stage(piece)


def _place(model: Model, blocks: tuple[Block, ...]) -> int:
    """Where in the model these *blocks* stand for the first time."""
    return next(at for at in range(model.layers + 1) if model.blocks[at : at + len(blocks)] == blocks)
