"""What a training job printed: totals per stage, layer and step, without start times."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepcast.ir.layout import Layout


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Forward time of one layer's modules on one rank, summed over a step's micro-batches."""

    rank: int
    stage: int
    step: int
    layer: str
    total_s: float
    ops: int


@dataclass(frozen=True, slots=True)
class BatchTime:
    """One progress line: wall time per batch as the last stage saw it."""

    epoch: int
    index: int
    batch_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class RunLog:
    """A job's log. *blocks* counts the per-rank reports found, whole or glued to others."""

    layout: Layout
    micro_batch: int
    micro_batches: int
    global_batch: int
    parameters: int
    layer_times: tuple[LayerTime, ...]
    batches: tuple[BatchTime, ...]
    blocks: int
    # The last module of each stage, in stage order: where the model was cut.
    stage_ends: tuple[str, ...] = ()
    source: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
