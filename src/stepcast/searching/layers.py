"""What layers take, by the choices they depend on: seconds that nothing hides."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from stepcast.cost.compute import Load, cool_seconds, load_of, priced_once
from stepcast.cost.fits import default_fit
from stepcast.cost.generations import as_run, slowed
from stepcast.cost.pricing import Pricer
from stepcast.cost.slowest import least_pace, paced_s
from stepcast.generate.stage import block_layers, end_layers, layer_view
from stepcast.hardware import Cluster
from stepcast.ir.arrays import FloatArray
from stepcast.ir.framework import Dispatcher, Framework
from stepcast.ir.group import Channel, Group
from stepcast.ir.model import Model
from stepcast.ir.model_parts import LayerParts, Routing
from stepcast.ir.strategy import RecomputeKind, Strategy
from stepcast.ir.work import Collective, Communication, Compute, HostUpdate, Transfer
from stepcast.ir.workload import Layer, Op

# Loads are rounded to a thousandth.
ROUNDED = 0.0011
LANES = (Group.TP, Group.CP, Group.EP, Group.EXPERT_TP)


class Takes(NamedTuple):
    """Places of what is known of a part of the model: a kind of block, the embedding, the head.

    The first four are seconds from begin to end, kernels and the exchanges they wait for; *whole* is the
    backward in one go. The others may hide behind another micro-batch: *computing*, kernels alone; *back*, a
    backward and *ahead* a forward, from the first kernel to the last; *lanes*, what each group exchanges.
    """

    forward: int = 0
    whole: int = 1
    inputs: int = 2
    weights: int = 3
    computing: int = 4
    back: int = 5
    lanes: int = 6
    ahead: int = 10


TAKES = Takes()
ALL_TAKES = TAKES.lanes + len(LANES) + 1
assert TAKES.ahead == ALL_TAKES - 1


def kinds_of(model: Model) -> tuple[LayerParts, ...]:
    """The kinds of blocks of *model*, in the order in which they first appear."""
    return tuple(dict.fromkeys(model.blocks))


def part_layers(model: Model, framework: Framework, strategy: Strategy) -> list[tuple[Layer, ...]]:
    """The layers of each kind of block, of the embedding and of the head."""
    view, whole = layer_view(strategy), strategy.recompute.kind is RecomputeKind.FULL
    blocks = [block_layers(model, view, framework, kind, whole) for kind in kinds_of(model)]
    ends = [end_layers(model, view, framework, embedding=embedding) for embedding in (True, False)]
    return [*blocks, *ends]


def part_loads(cluster: Cluster, parts: Sequence[Sequence[Layer]]) -> FloatArray:
    """Of each part, seconds of a cool GPU in matrix kernels and in all, and what their energy would last."""
    found = np.zeros((len(parts), 3))
    for part, layers in enumerate(parts):
        ops = (op.work for layer in layers for op in layer.all_ops)
        works = Counter(work for work in ops if isinstance(work, Compute))
        found[part] = cool_seconds(works, cluster.gpu, default_fit())
    return found


def least_load(cluster: Cluster, mixtures: FloatArray) -> Load:
    """A load that is no more than that of any of *mixtures*, nor of what they are mixed from."""
    gpu, fit = cluster.gpu, default_fit()
    loads = [load_of(matrix_s, total_s, energy_s, gpu, fit) for matrix_s, total_s, energy_s in mixtures.tolist()]
    duty = max(0.0, min(load.duty for load in loads) - ROUNDED)
    wanted = [load.wanted for load in loads if load.wanted is not None]
    return replace(loads[0], duty=duty, wanted=max(0.0, min(wanted) - ROUNDED) if wanted else None)


def part_costs(
    model: Model,
    cluster: Cluster,
    framework: Framework,
    strategy: Strategy,
    parts: Sequence[Sequence[Layer]],
    load: Load,
) -> FloatArray:
    """parts x takes: the least that any strategy with such layers spends on them.

    Whatever else a strategy adds comes on top. The GPU has *load* at least, which heats it.
    """
    forwards = model.experts if framework.dispatcher is Dispatcher.FORWARDING else None
    seconds = _Seconds(cluster, strategy, framework, load, forwards.routing if forwards else None)
    found = np.zeros((len(parts), ALL_TAKES))
    for part, layers in enumerate(parts):
        forward = [op for layer in layers for op in layer.forward]
        inputs = [op for layer in reversed(layers) for op in layer.input_gradient]
        weights = [op for layer in reversed(layers) for op in layer.weight_gradient]
        whole = [op for layer in reversed(layers) for op in (*layer.input_gradient, *layer.weight_gradient)]
        walks = [seconds.walk(ops) for ops in (forward, whole, inputs, weights)]
        found[part, :4] = [walk.end_s for walk in walks]
        found[part, TAKES.computing] = walks[0].computing_s + walks[1].computing_s
        found[part, TAKES.ahead] = walks[0].inner_s
        found[part, TAKES.back] = min(walks[1].inner_s, walks[2].inner_s + walks[3].inner_s)
        for lane, group in enumerate(LANES):
            found[part, TAKES.lanes + lane] = sum(walk.lanes_s.get(group, 0.0) for walk in walks[:2])
    return found


class _Walk(NamedTuple):
    end_s: float
    inner_s: float  # from the begin of the first kernel to the end of the last
    computing_s: float
    lanes_s: dict[Channel, float]


class _Seconds:
    """Ops one after the other, as the simulation runs them on a rank that has nothing else to do.

    Kernels and blocking communication follow one another; other communication runs beside, in a lane of its
    group, and holds up what waits for it. Where more runs, lanes are later, and nothing is sooner.
    """

    def __init__(
        self, cluster: Cluster, strategy: Strategy, framework: Framework, load: Load, once_per_node: Routing | None
    ) -> None:
        gpu = cluster.gpu
        self.attention, self.architecture = framework.attention, gpu.architecture
        self.price = priced_once(gpu, default_fit(), load)
        self.pace = least_pace(strategy.layout, strategy.micro_batches)
        self.pricer = Pricer(cluster, strategy.layout, once_per_node=once_per_node)
        self.alone = {group for group in LANES if strategy.layout.size(group) == 1}
        # By the objects: ops of a backward are walked twice, and layers are kept meanwhile.
        self.known: dict[int, float] = {}

    def walk(self, ops: Iterable[Op]) -> _Walk:
        done_s = computing_s = last_s = 0.0
        first_s: float | None = None
        lanes_s: dict[Channel, float] = {}
        busy_s: dict[Channel, float] = {}
        ended_s: dict[str, float] = {}
        for op in ops:
            work = op.work
            start_s = max([done_s, *(ended_s.get(name, 0.0) for name in op.after)]) if op.after else done_s
            spent = self.known.get(id(work))
            if not isinstance(work, Communication):
                if spent is None:
                    spent = 0.0 if isinstance(work, HostUpdate) else self._computing(work)
                    self.known[id(work)] = spent
                spent_s = spent
                ended_s[op.name] = done_s = last_s = start_s + spent_s
                first_s = start_s if first_s is None else first_s
                computing_s += spent_s
                continue
            if spent is None:
                spent = self.known[id(work)] = self._communicating(work)
            spent_s = spent
            if spent_s <= 0.0 or op.early:
                continue
            group = work.group
            end_s = max(start_s, lanes_s.get(group, 0.0)) + spent_s
            lanes_s[group] = ended_s[op.name] = end_s
            busy_s[group] = busy_s.get(group, 0.0) + spent_s
            if op.blocking:
                done_s = end_s
        return _Walk(done_s, last_s - (first_s or 0.0), computing_s, busy_s)

    def _communicating(self, work: Communication) -> float:
        if not isinstance(work, Collective | Transfer) or work.group not in LANES:
            return 0.0
        runs = work.group not in self.alone and work.size_bytes > 0
        return self.pricer.seconds(work) if runs else 0.0

    def _computing(self, work: Compute) -> float:
        as_it_runs = as_run(work, self.attention)
        price = slowed(self.price(as_it_runs), as_it_runs, self.attention, self.architecture)
        return paced_s(price.seconds, as_it_runs, self.pace)
