"""Which candidates are legal, by the rules themselves, each asked of the columns that it reads."""

import numpy as np

from stepcast.ir.arrays import BoolArray
from stepcast.ir.framework import Framework
from stepcast.ir.layout import Layout
from stepcast.ir.legality import RULES, check
from stepcast.ir.strategy import Strategy, StrategyError
from stepcast.searching.columns import LAYOUT, PIECES, SpaceColumns
from stepcast.searching.space import Space


def legal(columns: SpaceColumns, framework: Framework) -> BoolArray:
    """Of every candidate."""
    space = columns.space
    found = space.micro_batches > 0
    rows = np.flatnonzero(found)
    found[rows] &= columns.holds(rows, (*PIECES, "micro_batches"), lambda at: _pipeline_is_legal(space, at))
    rows = np.flatnonzero(found)
    names = (*LAYOUT, "sequence_parallel", "sharding", "recompute", "precision", "overlap")
    found[rows] &= columns.holds(rows, names, lambda at: _layout_is_legal(space, framework, at))
    return found


def pipeline_of(space: Space, at: int) -> Strategy:
    """Row *at* with one replica of one rank for each stage."""
    row = space.values(at)
    return Strategy(
        Layout(pp=row["pp"], vpp=row["vpp"]),
        micro_batch=1,
        global_batch=max(1, int(space.micro_batches[at])),
        seq=space.seq,
        schedule=row["schedule"],
        **space.placed,
    )


def _pipeline_is_legal(space: Space, at: int) -> bool:
    try:
        strategy = pipeline_of(space, at)
        return not any(rule(space.model, strategy) for rule in RULES)
    except ValueError:
        return False


def _layout_is_legal(space: Space, framework: Framework, at: int) -> bool:
    try:
        check(space.model, space.strategy(at), framework=framework)
    except StrategyError:
        return False
    return True
