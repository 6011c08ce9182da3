"""What a training job printed: totals per stage, layer and step, without start times.

Long jobs print millions of layer times, so they are kept as columns; a LayerTime is a view of one row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stepcast.ir.arrays import FloatArray, Int32Array
from stepcast.ir.check import require, require_amounts, require_counts
from stepcast.ir.layout import Layout

# The first step compiles, allocates and connects; it says nothing about the others.
FIRST_WARM_STEP = 2


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Forward time of one layer's modules on one rank, summed over a step's micro-batches."""

    rank: int
    stage: int
    step: int
    layer: str
    total_s: float
    ops: int


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Columns of layer times; ``layer_of`` points into *layers*, ``block_of`` numbers the reports."""

    layers: tuple[str, ...]
    rank_of: Int32Array
    stage_of: Int32Array
    step_of: Int32Array
    layer_of: Int32Array
    block_of: Int32Array
    ops_of: Int32Array
    total_s: FloatArray

    def __post_init__(self) -> None:
        columns = (self.rank_of, self.stage_of, self.step_of, self.layer_of, self.block_of, self.ops_of)
        require(all(len(column) == len(self.total_s) for column in columns), "all columns need one length")
        require(bool(np.isfinite(self.total_s).all() and (self.total_s >= 0).all()), "times must be finite")

    def __len__(self) -> int:
        return len(self.total_s)

    def __getitem__(self, index: int) -> LayerTime:
        return LayerTime(
            rank=int(self.rank_of[index]),
            stage=int(self.stage_of[index]),
            step=int(self.step_of[index]),
            layer=self.layers[self.layer_of[index]],
            total_s=float(self.total_s[index]),
            ops=int(self.ops_of[index]),
        )

    def __iter__(self) -> Iterator[LayerTime]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True, slots=True)
class BatchTime:
    """One progress line: wall time per batch as the last stage saw it."""

    epoch: int
    index: int
    batch_s: float
    loss: float

    def __post_init__(self) -> None:
        require_counts(self, 0, "epoch", "index")
        require_amounts(self, "batch_s")


@dataclass(frozen=True, slots=True)
class Median:
    """The middle of *count* measured times, and the first and last step (or batch) they are from."""

    seconds: float
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class RunLog:
    """A job's log. *blocks* counts the per-rank reports found, whole or glued to others."""

    layout: Layout
    micro_batch: int
    micro_batches: int
    global_batch: int
    parameters: int
    layer_times: LayerTimes
    batches: tuple[BatchTime, ...]
    blocks: int
    # The last module of each stage, in stage order: where the model was cut.
    stage_ends: tuple[str, ...] = ()
    source: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_counts(self, 1, "micro_batch", "micro_batches", "global_batch")
        require_counts(self, 0, "parameters", "blocks")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that any rank reported."""
        return tuple(np.unique(self.layer_times.step_of).tolist())

    def stage_forward(self, first_step: int = FIRST_WARM_STEP) -> dict[int, Median]:
        """Median forward time of one micro-batch on each stage, all its layers, steps from *first_step*."""
        return self._medians(np.ones(len(self.layer_times), dtype=bool), first_step)

    def layer_forward(self, layer: str, first_step: int = FIRST_WARM_STEP) -> dict[int, Median]:
        """As `stage_forward`, for one layer alone; a cut layer has an entry for each stage it is on."""
        times = self.layer_times
        number = times.layers.index(layer)
        return self._medians(np.equal(times.layer_of, number), first_step)

    def batch_time(self, first_index: int = FIRST_WARM_STEP) -> Median | None:
        """Median wall time of a batch from *first_index* on; None where no such batch was printed.

        Every tensor-parallel rank of the last stage prints a line, and each counts.
        """
        used = [batch for batch in self.batches if batch.index >= first_index]
        if not used:
            return None
        indices = [batch.index for batch in used]
        seconds = float(np.median([batch.batch_s for batch in used]))
        return Median(seconds, min(indices), max(indices), len(used))

    def _medians(self, rows: npt.NDArray[np.bool_], first_step: int) -> dict[int, Median]:
        times = self.layer_times
        rows = rows & np.greater_equal(times.step_of, first_step)
        blocks, first_row, block = np.unique(times.block_of[rows], return_index=True, return_inverse=True)
        sums_s = np.bincount(block, weights=times.total_s[rows], minlength=len(blocks)) / self.micro_batches
        stages, steps = times.stage_of[rows][first_row], times.step_of[rows][first_row]
        medians = {}
        for stage in np.unique(stages).tolist():
            mine = stages == stage
            medians[stage] = Median(
                seconds=float(np.median(sums_s[mine])),
                first=int(steps[mine].min()),
                last=int(steps[mine].max()),
                count=int(mine.sum()),
            )
        return medians
