"""Two kinds of GPUs in one cluster: which stages run on which, and how many layers each of them gets.

A stage runs on GPUs of one kind; the stages of a kind are adjacent, and either kind may come first. Layers are
split to minimise the time of the slowest stage. A stage's computation is estimated for its own GPU, communication
for the slower links of both kinds. No step can be below the time in which all stages together, each at its own
speed, process the layers of all micro-batches.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest
from operator import attrgetter
from statistics import fmean

import numpy as np

from stepcast.cost.fits import default_fit
from stepcast.cost.memory import memory
from stepcast.cost.power import cool_load
from stepcast.forecast.options import DEFAULTS
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster, Gpu
from stepcast.hardware.cluster import FabricKind, Node
from stepcast.ir.arrays import FloatArray
from stepcast.ir.framework import Framework
from stepcast.ir.legality import is_legal
from stepcast.ir.model import Model
from stepcast.ir.schedules import SCHEDULES, PiecePlacement
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import dataclass, pick
from stepcast.searching import result
from stepcast.searching.best import usable_memory_bytes
from stepcast.searching.layers import PartTime, least_load, part_costs, part_layers, part_loads
from stepcast.searching.space import LAYER, SpacePart
from stepcast.units import TFLOPS

# Objectives that rank like the step time if all GPUs are used.
MIXED_OBJECTIVES = ("step", "throughput", "cost")


def order_kinds(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return the kinds of *cluster*, the one with the faster GPU first, in whichever order its file names them."""
    kinds = [replace(cluster, other=None), cluster.other] if cluster.other else [cluster]

    def slowness(kind: Cluster) -> tuple[float, float]:
        return -max(kind.gpu.matrix_flops.values()), -kind.gpu.memory_bandwidth_bytes_per_s

    return tuple(sorted(kinds, key=slowness))


def join_gpu_kinds(cluster: Cluster) -> Cluster:
    """Return *cluster* as one kind: the faster GPUs, with the slower fabric and the slower NICs per GPU of both. Its
    nodes divide those of both kinds.
    """
    if cluster.other is None:
        return cluster
    kinds = order_kinds(cluster)
    nodes = [kind.node for kind in kinds]
    gpus = math.gcd(*(node.gpus for node in nodes))

    def fabric_rate(kind: Cluster) -> float:
        return kind.node.fabric.among(range(kind.node.gpus), kind.node.gpus).effective_bytes_per_s

    def nic_rate(node: Node) -> float:
        return node.nics / node.gpus * node.nic.effective_bytes_per_s if node.nic else 0.0

    within, slow = min(kinds, key=fabric_rate), min(nodes, key=nic_rate)
    assert slow.nic is not None, "nodes of two kinds have checked that they have NICs"
    in_switch = all(node.fabric.in_switch_reduction for node in nodes)
    fabric = within.node.fabric
    fabric = replace(fabric, in_switch_reduction=in_switch, sockets=min(fabric.sockets, gpus))
    nics = slow.nics * gpus / slow.gpus
    node = replace(nodes[0], gpus=gpus, fabric=fabric, nics=math.ceil(nics), nic=slow.nic.scale(nics / math.ceil(nics)))
    # Switches and pods have as many GPUs as before.
    times, sizes = cluster.node.gpus // gpus, pick(cluster.topology, "leaf_nodes pod_nodes")
    sizes = {name: size and size * times for name, size in sizes.items()}
    domain = math.gcd(*(kind.domain_gpus for kind in kinds)) if fabric.kind is FabricKind.NVSWITCH else gpus
    topology = replace(cluster.topology, **sizes, scale_up_nodes=domain // gpus)
    shared = replace(cluster, topology=topology, communication=within.communication, other=None)
    return replace(shared, node=node, nodes=sum(kind.gpus or 0 for kind in kinds) // gpus)


@dataclass(frozen=True, slots=True)
class _MixedCandidate:
    """A candidate with its stages on either kind."""

    bound_s: float
    number: int
    strategy: Strategy
    framework: Framework
    kinds: tuple[int, ...]  # 0 or 1 for each stage
    slowdown: float  # seconds of a layer on the second kind, divided by those on the first
    ends: tuple[float, float]  # seconds of embedding and head, divided by those of a layer


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
    limits = [usable_memory_bytes(kind.gpu.memory_bytes, most_bytes, reserve) for kind in order_kinds(cluster)]
    return _MixedSearch(parts, cluster, limits, top, objective).run(watch, most_s)


class _MixedSearch:
    def __init__(
        self, parts: Sequence[SpacePart], cluster: Cluster, limits: Sequence[float], top: int, goal: str
    ) -> None:
        self.parts, self.kinds, self.limits, self.top = parts, order_kinds(cluster), limits, top
        self.joined, self.objective = join_gpu_kinds(cluster), result.OBJECTIVES[goal]
        self.alone = tuple(replace(kind, nodes=None) for kind in self.kinds)
        self.gpus = [kind.gpu for kind in self.kinds]
        self.orders = len(dict.fromkeys(self.gpus))  # either kind first, unless both have the same GPU
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
        """Count each legal candidate once for each order of the kinds."""
        illegal = self.considered - self.legal
        considered = illegal + self.orders * self.legal
        return result.SearchCounts(considered, illegal, self.too_large, left, len(self.simulated), complete)

    def _candidates(self) -> Iterator[_MixedCandidate]:
        """Yield every legal candidate whose stages have one kind each, with either kind first."""
        first, second = (kind.gpus or 0 for kind in self.kinds)
        for part in self.parts:
            space = part.space
            loops = [SCHEDULES[kind].placement is PiecePlacement.LOOP for kind in space.axes.schedule]
            fits = (space.micro_batches > 0) & (space.columns["pp"] > 1)
            fits &= np.array(loops)[space.columns["schedule"]]
            per_stage = space.columns["gpus"] // space.columns["pp"]
            fits &= (space.columns["gpus"] == first + second) & (first % per_stage == 0)
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
                number, least = int(part.rows[row]), kernels[:, :-2].min(axis=1)
                slowdown, ends = float(least[1] / least[0]), tuple((kernels[0, -2:] / least[0]).tolist())
                orders = (0,) * mine + (1,) * (stages - mine), (1,) * (stages - mine) + (0,) * mine
                for kinds in orders[: self.orders]:
                    yield _MixedCandidate(bound_s, number, strategy, part.framework, kinds, slowdown, ends)

    def _layer_s(self, part: SpacePart, row: int, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
        """Return for each kind of GPU the least seconds of the cheapest block in both passes, and those of the kernels
        of each block, of the embedding and of the head on a GPU that they keep busy.
        """
        sums = strategy.micro_batches > 1, strategy.splits_each_gradient
        key = (id(part), *(int(part.space.column(name)[row]) for name in LAYER), *sums)
        if key not in self.costs:
            model = part.space.model
            layers = part_layers(model, part.framework, strategy)
            loads = [(kind, cool_load(kind.gpu, default_fit())) for kind in self.alone]
            loads += [(kind, least_load(kind, part_loads(kind, layers[:-2]))) for kind in self.alone]
            costs = np.stack([part_costs(model, kind, part.framework, strategy, layers, load) for kind, load in loads])
            cool = costs[:2, :-2]
            halves = cool[:, :, PartTime.INPUT_GRADIENTS] + cool[:, :, PartTime.WEIGHT_GRADIENTS]
            seconds = cool[:, :, PartTime.FORWARD] + np.minimum(cool[:, :, PartTime.BACKWARD], halves)
            self.costs[key] = seconds.min(axis=1), costs[2:, :, PartTime.KERNELS]
        return self.costs[key]

    def _try(self, candidate: _MixedCandidate) -> None:
        strategy, model, framework = candidate.strategy, self.parts[0].space.model, candidate.framework
        paces = [candidate.slowdown if kind else 1.0 for kind in candidate.kinds]
        strategy = replace(
            strategy, stage_layers=balance_layers(model.layers, paces, strategy.layout.vpp, candidate.ends)
        )
        if not is_legal(model, strategy, framework):
            self.too_large += 1
            return
        sizes = [stage.total for stage in memory(model, strategy, self.kinds[0].gpu, framework)]
        if any(size > self.limits[kind] for size, kind in zip(sizes, candidate.kinds, strict=True)):
            self.too_large += 1
            return
        slow = {stage: pace for stage, pace in enumerate(paces) if candidate.kinds[stage]}
        options = replace(DEFAULTS, conditions=replace(DEFAULTS.conditions, slow_stages=slow))
        prediction = predict(model, self.joined, strategy, framework, options)
        score = self.objective.score(result.ScoredPrediction(prediction, max(sizes), strategy.layout.gpus))
        results = (prediction.step_s, max(sizes), score, candidate.bound_s, options)
        gpus = tuple(self.gpus[kind] for kind in candidate.kinds)
        simulated = result.SimulatedCandidate(candidate.number, strategy, framework, *results, gpus)
        self.simulated.append(simulated)
        self.best = nsmallest(self.top, (*self.best, simulated), key=attrgetter("rank"))


def balance_layers(
    layers: int, paces: Sequence[float], chunks: int = 1, ends: tuple[float, float] = (0.0, 0.0)
) -> tuple[int, ...]:
    """Return the layers of each piece that minimise the time of the slowest stage.

    Each layer goes to the stage that finishes it first. *ends*: the time of embedding and head, in layers.
    """
    stages = len(paces)
    counts = [[0] * stages for _ in range(chunks)]
    works = [[0.0] * stages for _ in range(chunks)]
    works[0][0], works[-1][-1] = ends[0], works[-1][-1] + ends[1]
    totals = [sum(work) for work in zip(*works, strict=True)]
    for _ in range(layers):
        stage = min(range(stages), key=lambda index: ((totals[index] + 1) * paces[index], index))
        chunk = min(range(chunks), key=lambda index: (works[index][stage], index))
        counts[chunk][stage] += 1
        works[chunk][stage] += 1
        totals[stage] += 1
    return tuple(size for row in counts for size in row)


def describe_gpu_kinds(kinds: Sequence[Gpu]) -> str:
    """Return the stages of each GPU, as ``stages 0-3 on h100-sxm, stage 4 on a100-sxm-80gb``."""
    stages = []
    for kind in dict.fromkeys(kinds):
        first, last = kinds.index(kind), len(kinds) - 1 - kinds[::-1].index(kind)
        stages.append(f"stages {first}-{last} on {kind.name}" if last > first else f"stage {first} on {kind.name}")
    return ", ".join(stages)


def rate_by_mean_peak(report: StepReport, candidate: result.SimulatedCandidate) -> StepReport:
    """Return *report* with the MFU of the mean peak of its stages' GPUs if these are of two kinds."""
    if not candidate.kinds or report.throughput is None:
        return report
    peak = fmean(gpu.matrix_peak_flops(str(candidate.strategy.precision)) for gpu in candidate.kinds)
    mfu = report.throughput.tflops_per_gpu * TFLOPS / peak
    return replace(report, throughput=replace(report.throughput, mfu=mfu))


def find_free_bytes(candidate: result.SimulatedCandidate, model: Model, gpu: Gpu) -> float:
    """Return the least memory that a GPU of any stage has left."""
    if not candidate.kinds:
        return gpu.memory_bytes - candidate.memory_bytes
    stages = memory(model, candidate.strategy, candidate.kinds[0], candidate.framework)
    return min(kind.memory_bytes - stage.total for kind, stage in zip(candidate.kinds, stages, strict=True))
