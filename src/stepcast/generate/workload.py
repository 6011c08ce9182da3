"""Model x Strategy x Framework -> Workload: every op of a step with its shapes, and every collective."""

from dataclasses import replace

from stepcast.generate.stage import StageMaker
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.legality import check
from stepcast.ir.model import Model
from stepcast.ir.stages import Piece, pieces
from stepcast.ir.strategy import Strategy
from stepcast.ir.workload import Stage, Workload


def generate(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> Workload:
    """What *model* must run in one step under *strategy*: one stage per pipeline piece, in model order."""
    check(model, strategy, framework=framework)
    maker = StageMaker(model, strategy, framework)
    known: dict[tuple[object, ...], Stage] = {}
    stages = []
    for piece in pieces(model, strategy):
        key = _signature(model, piece)
        if key not in known:
            known[key] = maker.stage(piece)
        stages.append(known[key])
    return Workload(
        stages=tuple(stages),
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


def _signature(model: Model, piece: Piece) -> tuple[object, ...]:
    """Pieces with the same one run the same."""
    return (model.blocks[piece.layers.start : piece.layers.stop], piece.embedding, piece.head)
