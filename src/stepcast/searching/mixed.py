"""Two kinds of GPUs in one cluster: which stages run on which, and how many layers each of them gets.

A stage runs on GPUs of one kind; the stages of a kind are adjacent, and either kind may come first. Layers are
split to minimise the time of the slowest stage. A stage's computation is estimated for its own GPU, communication
for the slower links of both kinds. No step can be below the time in which all stages together, each at its own
speed, process the layers of all micro-batches.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from operator import attrgetter

import numpy as np

from stepcast.cost.fits import default_fit
from stepcast.cost.memory import memory
from stepcast.cost.power import cool_load
from stepcast.forecast.options import DEFAULTS
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster
from stepcast.hardware.cluster import Link
from stepcast.ir.arrays import FloatArray
from stepcast.ir.framework import Framework
from stepcast.ir.legality import is_legal
from stepcast.ir.schedules import SCHEDULES, PiecePlacement
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import dataclass
from stepcast.searching import result
from stepcast.searching.best import usable_memory_bytes
from stepcast.searching.layers import PartTime, part_costs, part_layers
from stepcast.searching.space import LAYER, SpacePart

# Objectives that rank like the step time if all GPUs are used.
MIXED_OBJECTIVES = ("step", "throughput", "cost")


def join_gpu_kinds(cluster: Cluster) -> Cluster:
    """Return *cluster* as one kind: the GPUs of the first, the slower links of both."""
    other = cluster.other
    if other is None:
        return cluster

    def slower(first: Link, second: Link) -> Link:
        return min(first, second, key=lambda link: link.effective_bytes_per_s)

    node, theirs = cluster.node, other.node
    fabric = replace(node.fabric, link=slower(node.fabric.link, theirs.fabric.link))
    nic = slower(node.nic, theirs.nic) if node.nic and theirs.nic else node.nic
    small = min(node.gpus, theirs.gpus)
    joined = replace(node, gpus=small, fabric=fabric, nic=nic, nics=min(node.nics, theirs.nics) if nic else node.nics)
    return replace(cluster, node=joined, nodes=(_count_gpus(cluster) + _count_gpus(other)) // small, other=None)


def _count_gpus(cluster: Cluster) -> int:
    """Return the GPUs of the first kind."""
    assert cluster.nodes is not None
    return cluster.nodes * cluster.node.gpus


@dataclass(frozen=True, slots=True)
class _MixedCandidate:
    """A candidate with its stages on either kind."""

    bound_s: float
    number: int
    strategy: Strategy
    framework: Framework
    kinds: tuple[int, ...]  # 0 or 1 for each stage
    slowdown: float  # seconds of a layer on the second kind, divided by those on the first


def search_mixed(
    parts: Sequence[SpacePart],
    cluster: Cluster,
    top: int = 10,
    objective: str = "step",
    most_bytes: float | None = None,
    watch: result.SearchWatch | None = None,
    most_s: float | None = None,
    reserve: float | None = None,
) -> result.SearchResult:
    """Return the *top* best of *parts* on both kinds of *cluster*, with stages placed and layers split.

    After *most_s* seconds the best so far is returned.
    """
    if objective not in MIXED_OBJECTIVES:
        raise ValueError(f"two kinds of GPUs are searched for {', '.join(MIXED_OBJECTIVES)}, not for {objective}")
    assert cluster.other is not None
    kinds = (cluster, cluster.other)
    limits = [usable_memory_bytes(kind.gpu.memory_bytes, most_bytes, reserve) for kind in kinds]
    return _MixedSearch(parts, kinds, limits, top, objective).run(watch, most_s)


class _MixedSearch:
    def __init__(
        self, parts: Sequence[SpacePart], kinds: tuple[Cluster, Cluster], limits: Sequence[float], top: int, goal: str
    ) -> None:
        self.parts, self.cluster, self.kinds, self.limits, self.top = parts, kinds[0], kinds, limits, top
        self.joined, self.objective = join_gpu_kinds(kinds[0]), result.OBJECTIVES[goal]
        self.alone = tuple(replace(kind, nodes=None, other=None) for kind in kinds)
        self.costs: dict[tuple[object, ...], tuple[FloatArray, FloatArray]] = {}
        self.considered = sum(len(part.space) for part in parts)
        self.legal = self.too_large = 0
        self.simulated: list[result.SimulatedCandidate] = []
        self.best: list[result.SimulatedCandidate] = []

    def run(self, watch: result.SearchWatch | None, most_s: float | None) -> result.SearchResult:
        deadline = np.inf if most_s is None else time.monotonic() + most_s
        order = sorted(self._candidates(), key=attrgetter("bound_s", "number", "kinds"))
        left, complete, out_of_time = len(order), True, False
        try:
            for candidate in order:
                if len(self.best) == self.top and candidate.bound_s > self.best[-1].step_s:
                    break
                if out_of_time := time.monotonic() > deadline:
                    complete = False
                    break
                left -= 1
                self._try(candidate)
                if watch:
                    watch(self._counts(left, False), self.best[0] if self.best else None)
        except KeyboardInterrupt:
            complete = False
        counts = self._counts(left, complete)
        if not complete:
            counts = replace(counts, pruned=0, unseen=left, out_of_time=out_of_time)
        return result.SearchResult(tuple(self.best), tuple(self.simulated), counts)

    def _counts(self, left: int, complete: bool) -> result.SearchCounts:
        """Count each legal candidate twice, with either kind first."""
        twice, illegal = self.considered + self.legal, self.considered - self.legal
        return result.SearchCounts(twice, illegal, self.too_large, left, len(self.simulated), complete)

    def _candidates(self) -> Iterator[_MixedCandidate]:
        """Yield every legal candidate whose stages have one kind each, with either kind first."""
        first, every = _count_gpus(self.kinds[0]), sum(map(_count_gpus, self.kinds))
        for part in self.parts:
            space = part.space
            loops = [SCHEDULES[kind].placement is PiecePlacement.LOOP for kind in space.axes.schedule]
            fits = (space.micro_batches > 0) & (space.columns["pp"] > 1)
            fits &= np.array(loops)[space.columns["schedule"]]
            per_stage = space.columns["gpus"] // space.columns["pp"]
            fits &= (space.columns["gpus"] == every) & (first % per_stage == 0)
            for row in np.flatnonzero(fits).tolist():
                try:
                    strategy = space.strategy(row)
                except ValueError:
                    continue
                if not is_legal(space.model, strategy, part.framework):
                    continue
                self.legal += 1
                mine, stages = first // int(per_stage[row]), strategy.layout.pp
                seconds, kernels = self._layer_s(part, row, strategy)
                # All stages together, each at its own speed.
                pace = mine / seconds[0] + (stages - mine) / seconds[1]
                bound_s = strategy.micro_batches * space.model.layers / pace
                number, slowdown = int(part.rows[row]), float(kernels[1] / kernels[0])
                for kinds in ((0,) * mine + (1,) * (stages - mine), (1,) * (stages - mine) + (0,) * mine):
                    yield _MixedCandidate(bound_s, number, strategy, part.framework, kinds, slowdown)

    def _layer_s(self, part: SpacePart, row: int, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
        """Return for each kind of GPU the least seconds of the cheapest block: both passes, and kernels alone."""
        sums = strategy.micro_batches > 1, strategy.splits_each_gradient
        key = (id(part), *(int(part.space.column(name)[row]) for name in LAYER), *sums)
        if key not in self.costs:
            model = part.space.model
            layers = part_layers(model, part.framework, strategy)[:-2]
            loads = [(kind, cool_load(kind.gpu, default_fit())) for kind in self.alone]
            costs = np.stack([part_costs(model, kind, part.framework, strategy, layers, load) for kind, load in loads])
            halves = costs[:, :, PartTime.INPUT_GRADIENTS] + costs[:, :, PartTime.WEIGHT_GRADIENTS]
            seconds = costs[:, :, PartTime.FORWARD] + np.minimum(costs[:, :, PartTime.BACKWARD], halves)
            self.costs[key] = seconds.min(axis=1), costs[:, :, PartTime.KERNELS].min(axis=1)
        return self.costs[key]

    def _try(self, candidate: _MixedCandidate) -> None:
        strategy, model, framework = candidate.strategy, self.parts[0].space.model, candidate.framework
        paces = [candidate.slowdown if kind else 1.0 for kind in candidate.kinds]
        strategy = replace(strategy, stage_layers=balance_layers(model.layers, paces, strategy.layout.vpp))
        if not is_legal(model, strategy, framework):
            self.too_large += 1
            return
        sizes = [stage.total for stage in memory(model, strategy, self.cluster.gpu, framework)]
        if any(size > self.limits[kind] for size, kind in zip(sizes, candidate.kinds, strict=True)):
            self.too_large += 1
            return
        slow = {stage: pace for stage, pace in enumerate(paces) if candidate.kinds[stage]}
        options = replace(DEFAULTS, conditions=replace(DEFAULTS.conditions, slow_stages=slow))
        prediction = predict(model, self.joined, strategy, framework, options)
        score = self.objective.score(result.ScoredPrediction(prediction, max(sizes), strategy.layout.gpus))
        results = (prediction.step_s, max(sizes), score, candidate.bound_s, options)
        names = tuple(self.kinds[kind].gpu.name for kind in candidate.kinds)
        simulated = result.SimulatedCandidate(candidate.number, strategy, framework, *results, names)
        self.simulated.append(simulated)
        self.best = nsmallest(self.top, (*self.best, simulated), key=attrgetter("rank"))


def balance_layers(layers: int, paces: Sequence[float], chunks: int = 1) -> tuple[int, ...]:
    """Return the layers of each piece that minimise the time of the slowest stage.

    Each layer goes to the stage that finishes it first.
    """
    stages = len(paces)
    counts = [[0] * stages for _ in range(chunks)]
    totals = [0] * stages
    for _ in range(layers):
        stage = min(range(stages), key=lambda index: ((totals[index] + 1) * paces[index], index))
        chunk = min(range(chunks), key=lambda index: (counts[index][stage], index))
        counts[chunk][stage] += 1
        totals[stage] += 1
    return tuple(size for row in counts for size in row)


def describe_gpu_kinds(kinds: Sequence[str]) -> Mapping[str, str]:
    """Return the stages of each GPU, as ``{"h100-sxm": "stages 0-3", "a100-sxm-80gb": "stage 4"}``."""
    stages = {}
    for kind in dict.fromkeys(kinds):
        first, last = kinds.index(kind), len(kinds) - 1 - kinds[::-1].index(kind)
        stages[kind] = f"stages {first}-{last}" if last > first else f"stage {first}"
    return stages
