"""Two kinds of GPUs in one cluster: which stages run on which, and how many layers each of them gets.

A stage lies on GPUs of one kind; the stages of a kind follow one another, and either kind may come first.
Layers are split so that no stage takes longer than it must. What a stage computes is priced by its own GPU;
what ranks exchange, by the slower links of both kinds. No step can be below the time in which all stages
together, each at its own speed, get through the layers of all micro-batches.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

import numpy as np

from stepcast.cost.compute import cool_load
from stepcast.cost.fits import default_fit
from stepcast.cost.memory import memory
from stepcast.forecast.options import DEFAULTS
from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster
from stepcast.hardware.cluster import Link
from stepcast.ir.arrays import FloatArray
from stepcast.ir.framework import Framework
from stepcast.ir.legality import is_legal
from stepcast.ir.schedules import SCHEDULES, PiecePlacement
from stepcast.ir.strategy import Strategy
from stepcast.searching.best import room_bytes
from stepcast.searching.columns import LAYER
from stepcast.searching.layers import TAKES, part_costs, part_layers
from stepcast.searching.objective import OBJECTIVES, Candidate
from stepcast.searching.result import Counts, Result, SimulatedCandidate, SpacePart, Watch

# All that rank like the step where all GPUs are used.
KNOWN = ("step", "throughput", "cost")


def joined(cluster: Cluster) -> Cluster:
    """*cluster* as all its ranks can count on it: the GPUs of the first kind, the slower links of both."""
    other = cluster.other
    if other is None:
        return cluster
    node, theirs = cluster.node, other.node
    fabric = replace(node.fabric, link=_slower(node.fabric.link, theirs.fabric.link))
    nic = _slower(node.nic, theirs.nic) if node.nic and theirs.nic else node.nic
    small = min(node.gpus, theirs.gpus)
    made = replace(node, gpus=small, fabric=fabric, nic=nic, nics=min(node.nics, theirs.nics) if nic else node.nics)
    assert cluster.nodes is not None
    assert other.nodes is not None
    every = cluster.nodes * node.gpus + other.nodes * theirs.gpus
    return replace(cluster, node=made, nodes=every // small, other=None)


def _slower(one: Link, two: Link) -> Link:
    return min(one, two, key=lambda link: link.effective_bytes_per_s)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A candidate with its stages on either kind."""

    bound_s: float
    at: int
    strategy: Strategy
    framework: Framework
    kinds: tuple[int, ...]  # of each stage, 0 or 1
    slower: float  # seconds of a layer on the second kind, over those on the first


def search_mixed(
    parts: Sequence[SpacePart],
    cluster: Cluster,
    top: int = 10,
    objective: str = "step",
    most_bytes: float | None = None,
    watch: Watch | None = None,
    most_s: float | None = None,
    reserve: float | None = None,
) -> Result:
    """The *top* best of *parts* on both kinds of *cluster*, with stages placed and layers split; after
    *most_s* seconds the best so far.
    """
    if objective not in KNOWN:
        raise ValueError(f"two kinds of GPUs are searched for {', '.join(KNOWN)}, not for {objective}")
    return _Mixing(parts, cluster, top, objective, most_bytes, watch, most_s, reserve).all()


class _Mixing:
    def __init__(
        self,
        parts: Sequence[SpacePart],
        cluster: Cluster,
        top: int,
        objective: str,
        most_bytes: float | None,
        watch: Watch | None,
        most_s: float | None,
        reserve: float | None,
    ) -> None:
        assert cluster.other is not None
        self.deadline = np.inf if most_s is None else time.monotonic() + most_s
        self.parts, self.cluster, self.top, self.watch = parts, cluster, top, watch
        self.joined, self.objective = joined(cluster), OBJECTIVES[objective]
        self.gpus = (cluster, cluster.other)
        self.alone = tuple(replace(each, nodes=None, other=None) for each in self.gpus)
        self.rooms = [room_bytes(each.gpu.memory_bytes, most_bytes, reserve) for each in self.gpus]
        self.costs: dict[tuple[object, ...], tuple[FloatArray, FloatArray]] = {}
        self.considered = sum(len(part.space) for part in parts)
        self.legal = self.too_large = 0
        self.simulated: list[SimulatedCandidate] = []
        self.kept: list[SimulatedCandidate] = []

    def all(self) -> Result:
        order = sorted(self._layouts(), key=lambda each: (each.bound_s, each.at, each.kinds))
        left, complete, out_of_time = len(order), True, False
        try:
            for each in order:
                if len(self.kept) == self.top and each.bound_s > self.kept[-1].step_s:
                    break
                if out_of_time := time.monotonic() > self.deadline:
                    complete = False
                    break
                left -= 1
                self._try(each)
                if self.watch:
                    self.watch(self._counts(left, False), self.kept[0] if self.kept else None)
        except KeyboardInterrupt:
            complete = False
        counts = self._counts(left, complete)
        if not complete:
            counts = replace(counts, pruned=0, unseen=left, out_of_time=out_of_time)
        return Result(tuple(self.kept), tuple(self.simulated), counts)

    def _counts(self, left: int, complete: bool) -> Counts:
        """Each candidate that is legal counts twice, with either kind first."""
        return Counts(
            self.considered + self.legal,
            self.considered - self.legal,
            self.too_large,
            left,
            len(self.simulated),
            complete,
        )

    def _layouts(self) -> Iterator[_Layout]:
        """Every legal candidate whose stages fall on one kind each, with either kind first."""
        first = self._gpus_of(self.gpus[0])
        for part in self.parts:
            space = part.space
            loops = [SCHEDULES[kind].placement is PiecePlacement.LOOP for kind in space.axes.schedule]
            whole = (space.micro_batches > 0) & (space.columns["pp"] > 1)
            whole &= np.array(loops)[space.columns["schedule"]]
            each = space.columns["gpus"] // space.columns["pp"]
            every = first + self._gpus_of(self.gpus[1])
            fits = whole & (space.columns["gpus"] == every) & (first % each == 0)
            for at in np.flatnonzero(fits).tolist():
                try:
                    strategy = space.strategy(at)
                except ValueError:
                    continue
                if not is_legal(space.model, strategy, part.framework):
                    continue
                self.legal += 1
                mine = first // int(each[at])
                seconds, computing = self._layer_s(part, at, strategy)
                stages = strategy.layout.pp
                # All stages together, each at its own speed.
                pace = mine / seconds[0] + (stages - mine) / seconds[1]
                bound_s = strategy.micro_batches * space.model.layers / pace
                number, slower = int(part.rows[at]), float(computing[1] / computing[0])
                for kinds in ((0,) * mine + (1,) * (stages - mine), (1,) * (stages - mine) + (0,) * mine):
                    yield _Layout(bound_s, number, strategy, part.framework, kinds, slower)

    def _gpus_of(self, cluster: Cluster) -> int:
        assert cluster.nodes is not None
        return cluster.nodes * cluster.node.gpus

    def _layer_s(self, part: SpacePart, at: int, strategy: Strategy) -> tuple[FloatArray, FloatArray]:
        """Of the cheapest kind of block on either GPU: forward and backward at least, and kernels alone."""
        key = (id(part), *(int(part.space.column(name)[at]) for name in LAYER), strategy.micro_batches > 1)
        if key not in self.costs:
            model = part.space.model
            layers = part_layers(model, part.framework, strategy)[:-2]
            costs = np.stack(
                [
                    part_costs(model, each, part.framework, strategy, layers, cool_load(each.gpu, default_fit()))
                    for each in self.alone
                ]
            )
            halves = costs[:, :, TAKES.inputs] + costs[:, :, TAKES.weights]
            takes = costs[:, :, TAKES.forward] + np.minimum(costs[:, :, TAKES.whole], halves)
            self.costs[key] = takes.min(axis=1), costs[:, :, TAKES.computing].min(axis=1)
        return self.costs[key]

    def _try(self, layout: _Layout) -> None:
        strategy, model = layout.strategy, self.parts[0].space.model
        stages, chunks = strategy.layout.pp, strategy.layout.vpp
        takes = [layout.slower if kind else 1.0 for kind in layout.kinds]
        split = balanced(model.layers, takes, chunks)
        strategy = replace(strategy, stage_layers=split)
        if not is_legal(model, strategy, layout.framework):
            self.too_large += 1
            return
        held = memory(model, strategy, self.cluster.gpu, layout.framework)
        if any(stage.total > self.rooms[kind] for stage, kind in zip(held, layout.kinds, strict=True)):
            self.too_large += 1
            return
        slow = {stage: takes[stage] for stage in range(stages) if layout.kinds[stage]}
        options = replace(DEFAULTS, conditions=replace(DEFAULTS.conditions, slow_stages=slow))
        prediction = predict(model, self.joined, strategy, layout.framework, options)
        largest = max(stage.total for stage in held)
        found = SimulatedCandidate(
            layout.at,
            strategy,
            layout.framework,
            prediction.step_s,
            largest,
            self.objective.score(Candidate(prediction, largest, strategy.layout.gpus, self.joined)),
            layout.bound_s,
            options,
            tuple(self.gpus[kind].gpu.name for kind in layout.kinds),
        )
        self.simulated.append(found)
        self.kept = nsmallest(self.top, (*self.kept, found), key=lambda each: each.rank)


def balanced(layers: int, takes: Sequence[float], chunks: int = 1) -> tuple[int, ...]:
    """Layers of each piece, so that the stage which takes longest takes least: one layer at a time to the
    stage that is done first with it.
    """
    stages = len(takes)
    counts = [[0] * stages for _ in range(chunks)]
    totals = [0] * stages
    for _ in range(layers):
        stage = min(range(stages), key=lambda at: ((totals[at] + 1) * takes[at], at))
        chunk = min(range(chunks), key=lambda at: (counts[at][stage], at))
        counts[chunk][stage] += 1
        totals[stage] += 1
    return tuple(size for row in counts for size in row)


def words_of(kinds: Sequence[str]) -> Mapping[str, str]:
    """``{"h100-sxm": "stages 0-3", "a100-sxm-80gb": "stage 4"}``."""
    found = {}
    for kind in dict.fromkeys(kinds):
        first, last = kinds.index(kind), len(kinds) - 1 - kinds[::-1].index(kind)
        found[kind] = f"stages {first}-{last}" if last > first else f"stage {first}"
    return found
