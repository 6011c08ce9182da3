"""The best strategies of a model on a cluster, from the library."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepcast.hardware import Cluster
from stepcast.ir.dtype import DType
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.searching.best import room_bytes, search_parts
from stepcast.searching.columns import SpaceColumns
from stepcast.searching.refine import FEW, refined
from stepcast.searching.result import Result, SpacePart, Watch
from stepcast.searching.space import Axes, Space, space_of, useful_recomputes

Settle = Callable[[Layout, DType], tuple[Framework, Mapping[str, Any]]]
"""The software that runs a layout in a precision, and the fields of a Strategy that it settles."""
SETTLED_BY = ("pp", "vpp", "ep", "precision")


def search(
    model: Model,
    cluster: Cluster,
    gpus: int | Sequence[int],
    global_batch: int,
    seq: int,
    framework: Framework = MEGATRON_CORE,
    *,
    axes: Mapping[str, Sequence[Any]] | None = None,
    objective: str = "step",
    top: int = 10,
    most_bytes: float | None = None,
    reserve: float | None = None,
    watch: Watch | None = None,
    workers: int = 1,
    refine: int = FEW,
    most_s: float | None = None,
) -> Result:
    """The *top* best strategies; *axes* restrict choices by their names in Axes, as ``{"tp": (4, 8)}``.

    *workers* processes give the same answer as one. Of the best, the first *refine* are tried with uneven
    splits of layers and other placements too. A candidate may take *most_bytes* of a GPU and leaves
    the share *reserve* free (``room_bytes``). After *most_s* seconds the search ends with the best so far.
    """
    numbers = (gpus,) if isinstance(gpus, int) else tuple(gpus)
    usual = {"recompute": useful_recomputes(model, framework)}
    chosen = Axes(gpus=numbers, **{name: tuple(values) for name, values in (usual | dict(axes or {})).items()})
    space = space_of(model, chosen, global_batch, seq, cluster.domain_gpus)
    part = SpacePart(space, framework, np.arange(len(space)))
    most_bytes = room_bytes(cluster.gpu.memory_bytes, most_bytes, reserve)
    result = search_parts([part], cluster, top, objective, most_bytes, watch, workers, most_s=most_s)
    return refined(result, model, cluster, objective, most_bytes, refine)


def parts_of(space: Space, settle: Settle) -> list[SpacePart]:
    """*space* by what runs it: recipes differ between layouts."""
    distinct, member = SpaceColumns(space).distinct(np.arange(len(space)), SETTLED_BY)
    settled: list[tuple[Framework, Mapping[str, Any]]] = []
    of_key = np.zeros(len(distinct), dtype=np.int64)
    for number, row in enumerate(distinct.tolist()):
        pp, vpp, ep, precision = (int(space.columns[name][row]) for name in SETTLED_BY)
        made = settle(Layout(pp=pp, vpp=vpp, ep=ep), space.axes.precision[precision])
        if made not in settled:
            settled.append(made)
        of_key[number] = settled.index(made)
    which, parts = of_key[member], []
    for number, (framework, common) in enumerate(settled):
        rows = np.flatnonzero(which == number)
        parts.append(SpacePart(space.only(rows).having(common), framework, rows))
    return parts
