"""What is to be run, as plain values that pass to other processes."""

from dataclasses import dataclass
from typing import NamedTuple

from stepcast.ir.layout import Layout
from stepcast.ir.work import GroupedMatmul, Matmul
from stepcast.ir.workload import Phase, Stage


class Turn(NamedTuple):
    """One slot of a stage's order: forward, backward, or one half of a backward."""

    kind: str
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class RunPlan:
    """A workload with the order in which each stage runs it."""

    stages: tuple[Stage, ...]
    layout: Layout
    orders: tuple[tuple[Turn, ...], ...]
    boundary_bytes: int = 0
    steps: int = 3

    def stage_of(self, stage: int, chunk: int) -> Stage:
        return self.stages[0] if len(self.stages) == 1 else self.stages[chunk * self.layout.pp + stage]

    def stage_of_rank(self, rank: int) -> int:
        return rank // (self.layout.gpus // self.layout.pp)

    def weight_sizes(self, stage: int) -> list[int]:
        """Elements of each weight of *stage*: the results of its weight gradients."""
        found: list[int] = []
        for chunk in range(self.layout.vpp):
            for layer, count in self.stage_of(stage, chunk).counted_layers(1):
                works = [op.work for op in layer.ops(Phase.WEIGHT_GRADIENT)]
                found += count * [
                    size
                    for work in works
                    if isinstance(work, Matmul | GroupedMatmul)
                    for size in ([work.m * work.n * work.batch] if isinstance(work, Matmul)
                                 else [work.n * work.k] * work.groups)
                ]  # fmt: skip
        return found

    def neighbour(self, stage: int, chunk: int, step: int) -> tuple[int, int] | None:
        """Where a micro-batch is before (-1) or after (+1) this place; None at the ends of the model."""
        place = chunk * self.layout.pp + stage + step
        if not 0 <= place < self.layout.pp * self.layout.vpp:
            return None
        return place % self.layout.pp, place // self.layout.pp


class Record(NamedTuple):
    """One op as it ran, in seconds from the step's start."""

    rank: int
    lane: str
    name: str
    start_s: float
    duration_s: float
    micro_batch: int
    step: int
    work: object = None
