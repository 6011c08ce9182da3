"""Which candidates are legal, and the least time and memory that each of them takes: for all of them at once.

Whatever is asked depends on a few columns, so that it is worked out once for each distinct row of those and
spread over all. No candidate can be faster or smaller than its bounds:

- A stage computes all its micro-batches one after the other. Before the first of them, its forward has come
  through the stages before it, and after the last its backward goes back through them.
- Gradients are summed after the last backward of a stage has begun.
- Weights, optimizer states and what the micro-batches in flight keep are in memory at the same time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepcast.cost.memory.in_flight import default_in_flight
from stepcast.cost.memory.states import orientations, piece_states
from stepcast.hardware import Cluster
from stepcast.ir.framework import Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.legality import RULES, check
from stepcast.ir.model import Model
from stepcast.ir.schedules import SCHEDULES, Pairs, Placement
from stepcast.ir.stages import pieces, pieces_of_stage
from stepcast.ir.strategy import Strategy, StrategyError
from stepcast.searching.exchanges import exchanges
from stepcast.searching.layers import LayerCost, kinds_of, layer_cost
from stepcast.searching.space import Ints, Space

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LAYOUT = ("gpus", "tp", "cp", "ep", "expert_tp", "pp")
LAYER = ("tp", "cp", "ep", "expert_tp", "micro_batch", "recompute", "sequence_parallel", "precision")
PIPELINE = ("pp", "vpp", "schedule", "micro_batches")
STATES = (*LAYOUT, "vpp", "schedule", "sharding", "precision")


@dataclass(frozen=True)
class Bounds:
    """Of every candidate; those that are not legal have neither."""

    legal: Bools
    time_s: Floats
    computing_s: Floats  # of an average stage
    memory_bytes: Floats


def bounds(space: Space, cluster: Cluster, framework: Framework, most_bytes: float) -> Bounds:
    """Legality and memory of all candidates, and the time of those that may fit into *most_bytes*."""
    return Bounding(space, cluster, framework).all(most_bytes)


class Bounding:
    def __init__(self, space: Space, cluster: Cluster, framework: Framework) -> None:
        self.space, self.cluster, self.framework = space, cluster, framework
        self.model: Model = space.model
        self.kinds = kinds_of(self.model)

    def all(self, most_bytes: float) -> Bounds:
        space = self.space
        legal = self.legal()
        memory = np.full(len(space), np.inf)
        if len(rows := np.flatnonzero(legal)):
            memory[rows] = self.memory(rows)
        time_s = np.full(len(space), np.inf)
        rows = np.flatnonzero(legal & (memory <= most_bytes))
        time_s[rows] = self.time(rows)
        computing_s = np.full(len(space), np.inf)
        computing_s[rows] = self.computing(rows)
        return Bounds(legal, time_s, computing_s, memory)

    # ---- legality ------------------------------------------------------------------------------------

    def legal(self) -> Bools:
        """By the rules themselves, each asked of the columns that it reads."""
        space = self.space
        found = space.micro_batches > 0
        rows = np.flatnonzero(found)
        ok = self._spread(rows, PIPELINE, self._pipeline_is_legal)
        found[rows] &= ok
        rows = np.flatnonzero(found)
        columns = (*LAYOUT, "sequence_parallel", "sharding", "recompute", "precision")
        found[rows] &= self._spread(rows, columns, self._layout_is_legal)
        return found

    def _pipeline_is_legal(self, at: int) -> bool:
        strategy = self._built(at, layout=("pp", "vpp"))
        return strategy is not None and self._passes(strategy, RULES)

    def _layout_is_legal(self, at: int) -> bool:
        try:
            check(self.model, self.space.strategy(at), framework=self.framework)
        except StrategyError:
            return False
        return True

    def _built(self, at: int, layout: tuple[str, ...]) -> Strategy | None:
        """Row *at* with one replica of one rank, as far as *layout* does not say otherwise."""
        space = self.space
        row = space.values(at)
        try:
            return Strategy(
                Layout(**{name: row[name] for name in layout}),
                micro_batch=1,
                global_batch=int(space.micro_batches[at]),
                seq=space.seq,
                schedule=row["schedule"],
            )
        except (StrategyError, ValueError):
            return None

    def _passes(self, strategy: Strategy, rules: tuple[Callable[[Model, Strategy], str], ...]) -> bool:
        try:
            return not any(rule(self.model, strategy) for rule in rules)
        except StrategyError:
            return False

    # ---- memory --------------------------------------------------------------------------------------

    def memory(self, rows: Ints) -> Floats:
        """Of the first stage: states, and what its micro-batches in flight keep."""
        overhead = self.framework.overhead
        states = self._spread_many(rows, STATES, self._states)
        layers = self._layers(rows)
        held = self._spread_many(rows, PIPELINE, self._held)
        kept = (held * layers[:, 3 * len(self.kinds) : 4 * len(self.kinds)]).sum(axis=1)
        fixed, gradients = states[:, 0], states[:, 1]
        several = self.space.micro_batches[rows] > 1
        early = several | (self.framework.kernels is Kernels.FUSED)
        running = np.where(early, gradients, 0.0) + kept
        largest: Floats = fixed + np.maximum(gradients, running)
        return largest + (overhead.context_bytes + overhead.buffer_bytes)

    def _states(self, at: int) -> tuple[float, float]:
        strategy = self.space.strategy(at)
        model, framework = self.model, self.framework
        every, copies = pieces(model, strategy), orientations(strategy, self.cluster.gpu)
        fixed = gradients = 0.0
        for index in pieces_of_stage(strategy, 0):
            states = piece_states(model, strategy, framework, every[index], copies)
            fixed += states.parameters + states.optimizer
            gradients += states.gradients
        return fixed, gradients

    def _held(self, at: int) -> Floats:
        """Layers of each kind on the first stage, each as often as micro-batches of it are in flight."""
        strategy = self.space.strategy(at)
        counts = self._counts(strategy)
        flying = default_in_flight(strategy)[0]
        held = [
            counts[index] * flight for index, flight in zip(pieces_of_stage(strategy, 0), flying, strict=True)
        ]
        total: Floats = np.array(held).sum(axis=0)
        return total

    def _counts(self, strategy: Strategy) -> Floats:
        """Layers of each kind in each piece of the pipeline."""
        blocks = self.model.blocks
        return np.array(
            [
                [blocks[piece.layers.start : piece.layers.stop].count(kind) for kind in self.kinds]
                for piece in pieces(self.model, strategy)
            ],
            dtype=np.float64,
        )

    # ---- time ----------------------------------------------------------------------------------------

    def _layers(self, rows: Ints, paired: bool = False) -> Floats:
        """Forward, input gradient, weight gradient and kept bytes of each kind; then both ends."""
        # The stage in the middle decides how hot GPUs run: of three or more it has neither end of the model.
        # Weights that are gathered may be cast there, which cools it.
        splits = np.array([each.splits_parameters for each in self.space.axes.sharding])
        alone = (self.space.columns["pp"][rows] > 2) & ~splits[self.space.columns["sharding"][rows]]
        found = np.zeros((len(rows), 4 * len(self.kinds) + 4))
        for each in np.unique(alone):
            here = np.flatnonzero(alone == each)
            found[here] = self._spread_many(rows[here], LAYER, self._layer_of(paired, bool(each)))
        return found

    def _layer_of(self, paired: bool, alone: bool) -> Callable[[int], Floats]:
        return lambda at: self._layer(at, paired, alone)

    def _layer(self, at: int, paired: bool, alone: bool) -> Floats:
        strategy = self.space.strategy(at)
        cost: LayerCost = layer_cost(
            self.model, self.cluster, self.framework, strategy, paired=paired, alone=alone
        )
        each = (cost.forward_s, cost.input_s, cost.weight_s, cost.kept_bytes)
        return np.concatenate([*each, cost.first_s, cost.last_s])

    def time(self, rows: Ints) -> Floats:
        found = np.zeros(len(rows))
        beside = self._spread(rows, (*LAYOUT, "vpp", "schedule"), self._is_paired)
        for paired in np.unique(beside):
            here = np.flatnonzero(beside == paired)
            found[here] = self._time(rows[here], bool(paired))
        return found

    def computing(self, rows: Ints) -> Floats:
        """What kernels take on the average of the stages."""
        if not len(rows):
            return np.zeros(0)
        layers, count = self._layers(rows, paired=True), len(self.kinds)
        each = np.array([self.model.blocks.count(kind) for kind in self.kinds], dtype=np.float64)
        of_layers: Floats = (layers[:, : 3 * count].reshape(-1, 3, count) * each).sum(axis=(1, 2))
        whole = of_layers + layers[:, 4 * count :].sum(axis=1)
        mean: Floats = whole * self.space.micro_batches[rows] / self.space.columns["pp"][rows]
        return mean

    def _is_paired(self, at: int) -> bool:
        """Whether exchanges may hide behind kernels of another micro-batch."""
        strategy = self.space.strategy(at)
        own = SCHEDULES[strategy.schedule].pairs is Pairs.OWN and strategy.layout.pp > 1
        return own or strategy.pairs_micro_batches

    def _time(self, rows: Ints, paired: bool) -> Floats:
        layers, found = self._layers(rows, paired), np.zeros(len(rows))
        batches = self.space.micro_batches[rows].astype(np.float64)
        exchanged = self._spread_many(rows, STATES, self._exchanged)
        once_s, each_s = exchanged[:, 0], exchanged[:, 1]
        groups, member = self._distinct(rows, ("pp", "vpp", "schedule"))
        for number, first in enumerate(groups):
            here = np.flatnonzero(member == number)
            found[here] = self._pipeline_s(int(first), layers[here], batches[here], once_s[here])
        return np.maximum(found, batches * each_s)

    def _pipeline_s(self, at: int, layers: Floats, batches: Floats, sums_s: Floats) -> Floats:
        """The bound of candidates with the pieces and the schedule of row *at*."""
        strategy = self._built(at, ("pp", "vpp"))
        assert strategy is not None
        count, facts = len(self.kinds), SCHEDULES[strategy.schedule]
        stages, chunks = strategy.layout.pp, strategy.layout.vpp
        counts = self._counts(strategy).T  # kinds x pieces
        forward, inputs, weights = (layers[:, part * count : (part + 1) * count] for part in range(3))
        forward_s, backward_s = forward @ counts, (inputs + weights) @ counts
        ends = layers[:, 4 * count :]
        forward_s[:, 0] += ends[:, 0]
        forward_s[:, -1] += ends[:, 2]
        backward_s[:, 0] += ends[:, 1]
        backward_s[:, -1] += ends[:, 3]
        # Weight gradients that are put off may follow the last input gradient of a stage; else the stage
        # before waits for them, but for those of the layer that comes last.
        split = facts.splits_backward
        returned_s = inputs @ counts if split else backward_s - weights.max(axis=1)[:, None]
        returned_s = np.maximum(returned_s, 0.0)
        two_way = facts.placement is Placement.TWO_WAY and stages > 1
        rounds = batches / 2 if two_way else batches
        best = np.zeros(len(layers))
        for stage in range(stages):
            own = list(facts.pieces_of_stage(stage, stages, chunks))
            before = slice(0, min(stage, stages - 1 - stage) if two_way else stage)
            there_s, back_s = forward_s[:, before].sum(axis=1), returned_s[:, before].sum(axis=1)
            forwards_s, backwards_s = forward_s[:, own].sum(axis=1), backward_s[:, own].sum(axis=1)
            work_s = rounds * (forwards_s + backwards_s)
            if split:
                straight_s = rounds * (forwards_s + returned_s[:, own].sum(axis=1))
                best = np.maximum(best, there_s + np.maximum(work_s, straight_s + back_s))
            else:
                best = np.maximum(best, there_s + work_s + back_s)
                best = np.maximum(best, work_s - backwards_s + sums_s / chunks)
        return best

    def _exchanged(self, at: int) -> tuple[float, float]:
        """Gradients of the first stage, and its weights, as one message: which is faster than in several."""
        found = exchanges(self.model, self.cluster, self.framework, self.space.strategy(at))
        return found.once_s, found.each_s

    # ---- columns -------------------------------------------------------------------------------------

    def _distinct(self, rows: Ints, names: tuple[str, ...]) -> tuple[Ints, Ints]:
        """The first candidate of each distinct row of *names* among *rows*, and to which each belongs."""
        packed = np.zeros(len(rows), dtype=np.int64)
        for name in names:
            column = self.space.column(name)[rows]
            packed = packed * (int(column.max(initial=0)) + 1) + column
        _, first, member = np.unique(packed, return_index=True, return_inverse=True)
        return rows[first], member

    def _spread(self, rows: Ints, names: tuple[str, ...], holds: Callable[[int], bool]) -> Bools:
        first, member = self._distinct(rows, names)
        return np.array([holds(int(at)) for at in first], dtype=np.bool_)[member]

    def _spread_many(self, rows: Ints, names: tuple[str, ...], of: Callable[[int], object]) -> Floats:
        first, member = self._distinct(rows, names)
        values = [np.asarray(of(int(at)), dtype=np.float64) for at in first]
        return np.stack(values)[member]
