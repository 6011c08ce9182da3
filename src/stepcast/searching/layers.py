"""What layers cost, by the choices they depend on: seconds that nothing hides, and bytes that they keep."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepcast.cost.compute import Load, counted_load, priced_once
from stepcast.cost.fits import default_fit
from stepcast.cost.generations import as_run, slowed
from stepcast.cost.pricing import Pricer
from stepcast.generate.stage import block_layers, end_layers, layer_view
from stepcast.hardware import Cluster
from stepcast.ir.framework import Framework
from stepcast.ir.group import Group
from stepcast.ir.kept import layer_kept
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Block
from stepcast.ir.strategy import RecomputeKind, Strategy
from stepcast.ir.work import Collective, Compute, HostCopy, HostUpdate, Transfer
from stepcast.ir.workload import Layer, Op

Floats = NDArray[np.float64]
# Loads are rounded to a thousandth.
ROUNDED = 0.0011


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Of each kind of block: forward, input gradient and weight gradient in seconds, and bytes kept of a
    micro-batch; of the ends of the model alike.
    """

    forward_s: Floats
    input_s: Floats
    weight_s: Floats
    kept_bytes: Floats
    first_s: tuple[float, float]  # the embedding's forward and backward
    last_s: tuple[float, float]  # the final norm's, head's and loss's


def layer_cost(
    model: Model,
    cluster: Cluster,
    framework: Framework,
    strategy: Strategy,
    paired: bool = False,
    alone: bool = False,
) -> LayerCost:
    """The least that any strategy with layers like those of *strategy* spends on them.

    Whatever else a strategy adds comes on top. Kernels are priced as if matrix products left the GPU cool,
    which is the fastest they run; where layers are *alone* on the stage that heats it, as cool as they leave
    it. *paired* with another micro-batch, exchanges may hide behind its kernels.
    """
    view, kinds = layer_view(strategy), kinds_of(model)
    whole = strategy.recompute.kind is RecomputeKind.FULL
    blocks = [block_layers(model, view, framework, kind, whole) for kind in kinds]
    load = _least_load(cluster, blocks) if alone else Load(float("inf"), 0.0)
    seconds = _Seconds(cluster, strategy.layout, framework, not paired, load)
    layers = [_spent(seconds, block) for block in blocks]
    first, last = (
        _spent(seconds, end_layers(model, view, framework, embedding=embedding))
        for embedding in (True, False)
    )
    forward_s, input_s, weight_s = np.array(layers, dtype=np.float64).T
    kept = [layer_kept(model, strategy, kind, framework).after(whole) for kind in kinds]
    return LayerCost(
        forward_s,
        input_s,
        weight_s,
        np.array(kept, dtype=np.float64),
        (first[0], first[1] + first[2]),
        (last[0], last[1] + last[2]),
    )


def kinds_of(model: Model) -> tuple[Block, ...]:
    """The kinds of blocks of *model*, in the order in which they first appear."""
    return tuple(dict.fromkeys(model.blocks))


def _least_load(cluster: Cluster, blocks: Sequence[Sequence[Layer]]) -> Load:
    """The share of matrix kernels and the power of any mixture of *blocks*, at least: that of their least."""
    loads = []
    for layers in blocks:
        ops = (op.work for layer in layers for op in layer.all_ops)
        works = Counter(work for work in ops if isinstance(work, Compute))
        loads.append(counted_load(works, cluster.gpu, default_fit()))
    duty = max(0.0, min(load.duty for load in loads) - ROUNDED)
    wanted = [load.wanted - ROUNDED for load in loads if load.wanted is not None]
    return Load(float("inf"), duty, wanted=max(0.0, min(wanted)) if wanted else None)


def _spent(seconds: "_Seconds", layers: Sequence[Layer]) -> tuple[float, float, float]:
    return (
        sum(seconds(layer.forward) for layer in layers),
        sum(seconds(layer.input_gradient) for layer in layers),
        sum(seconds(layer.weight_gradient) for layer in layers),
    )


class _Seconds:
    """Of ops that stop the computing of a rank: its kernels, and tensor-parallel exchanges it waits for."""

    def __init__(
        self, cluster: Cluster, layout: Layout, framework: Framework, waits: bool, load: Load
    ) -> None:
        self.waits = waits
        gpu = cluster.gpu
        self.attention, self.architecture = framework.attention, gpu.architecture
        self.price = priced_once(gpu, default_fit(), load)
        self.pricer = Pricer(cluster, layout)

    def __call__(self, ops: Iterable[Op]) -> float:
        return sum(self._of(op) for op in ops)

    def _of(self, op: Op) -> float:
        work = op.work
        if isinstance(work, Collective):
            waits = self.waits and op.blocking and work.group is Group.TP
            return self.pricer.seconds(work) if waits else 0.0
        if isinstance(work, Transfer | HostCopy | HostUpdate):
            return 0.0
        return self._computing(work)

    def _computing(self, work: Compute) -> float:
        as_it_runs = as_run(work, self.attention)
        return slowed(self.price(as_it_runs), as_it_runs, self.attention, self.architecture).seconds
