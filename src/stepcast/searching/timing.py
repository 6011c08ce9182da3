"""The least time that candidates take, in two steps.

Rough bounds take every GPU for cool, which saves most prices; tight ones are worked out for those that are
asked for. No candidate can be faster than either:

- A stage computes all its micro-batches one after the other, with the exchanges that its kernels wait for.
  Before the first of them, its forward has come through the stages before it, and after the last its backward
  goes back through them.
- Gradients are summed after the last backward of a stage has begun; or with each micro-batch, after the first
  one has come through the whole model. What one group exchanges follows one another.
- GPUs are as hot as the matrix kernels of the stage in the middle leave them.
"""

import numpy as np

from stepcast.cost.compute import cool_load
from stepcast.cost.fits import default_fit
from stepcast.hardware import Cluster
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.framework import Framework, Kernels
from stepcast.ir.limits import PRICED
from stepcast.ir.schedules import SCHEDULES, Pairs, PiecePlacement
from stepcast.searching.columns import LAYER, PIECES, STATES, Lazily, SpaceColumns
from stepcast.searching.exchanges import exchanges
from stepcast.searching.layers import TAKES, kinds_of, least_load, part_costs, part_layers, part_loads
from stepcast.searching.legal import pipeline_of
from stepcast.searching.parts import counts_of

# What decides whether micro-batches run in pairs (``Strategy.pairs_micro_batches``).
PAIRING = ("ep", "pp", "vpp", "schedule", "overlap")
# What heats GPUs: the stage in the middle has neither end of the model, the last one, both; or nothing known.
ALONE, WITH_HEAD, WITH_BOTH, COOL = range(4)


class Timing:
    """The times of *rows*, or of some of them, when they are asked for."""

    def __init__(self, columns: SpaceColumns, cluster: Cluster, framework: Framework, rows: IntArray) -> None:
        self.columns, self.cluster, self.framework = columns, cluster, framework
        self.space, self.model = columns.space, columns.space.model
        self.kinds = kinds_of(self.model)
        self._known_counts: dict[tuple[int, ...], FloatArray] = {}
        heat, names = np.full(len(self.space), COOL), (*LAYER, "several")
        heat[rows] = self._heat(rows)
        columns.further |= {"heat": heat, "several": (self.space.micro_batches > 1).astype(np.int64)}
        columns.further["lies"] = self._lies(rows)
        self.cool = Lazily(columns, rows, names, self._cool_cost)
        self.hot = Lazily(columns, rows, (*names, "heat"), self._cost)
        if len(self.hot.first) > PRICED.most:
            raise ValueError(f"{PRICED.said}: fix some choices, or ask for fewer numbers of GPUs")
        self.exchanged = Lazily(columns, rows, (*STATES, "copies", "lies"), self._exchanged)
        self.paired = Lazily(columns, rows, PAIRING, self._is_paired)

    @property
    def priced(self) -> int:
        """Kinds of layers that were priced."""
        return int(self.cool.known.sum()) + int(self.hot.known.sum())

    def times(self, rows: IntArray, rough: bool = False) -> tuple[FloatArray, FloatArray]:
        """The whole of each, and what kernels take on the average of its stages."""
        if not len(rows):
            return np.zeros(0), np.zeros(0)
        costs, batches = (self.cool if rough else self.hot).at(rows), self.space.micro_batches[rows] * 1.0
        exchanged, paired = self.exchanged.at(rows), self.paired.at(rows) > 0
        found, mean = np.zeros(len(rows)), np.zeros(len(rows))
        pipelines: list[tuple[int, IntArray]] = self.columns.several(rows, PIECES)
        for first, here in pipelines:
            counts = self._counts(first)
            computing_s = costs[here, :, TAKES.computing] @ counts.sum(axis=0)
            mean[here] = batches[here] * computing_s / self.space.columns["pp"][first]
            for each in (False, True):
                some = here[paired[here] == each]
                if len(some):
                    found[some] = self._pipeline_s(first, counts, costs[some], batches[some], exchanged[some], each)
        return found, mean

    def _counts(self, at: int) -> FloatArray:
        """As ``counts_of``, once for each pipeline."""
        key = tuple(int(self.space.columns[name][at]) for name in PIECES)
        if key not in self._known_counts:
            self._known_counts[key] = counts_of(self.space, at)
        return self._known_counts[key]

    # ---- layers --------------------------------------------------------------------------------------

    def _heat(self, rows: IntArray) -> IntArray:
        """What lies on the piece in the middle, which decides how hot GPUs run."""
        space = self.space
        many = space.columns["pp"][rows] * space.columns["vpp"][rows]
        found = np.where(many > 2, ALONE, np.where(many == 2, WITH_HEAD, WITH_BOTH))
        if space.common.get("further_tokens"):
            found = np.where(many > 2, ALONE, COOL)
        # Weights that are gathered, and gradients that are split, may be copied there, which cools it.
        sharding = space.axes.sharding
        copied = [
            (each.splits_gradients and self.framework.kernels is Kernels.COMPILED)
            or (each.splits_parameters and bool(self.model.experts))
            for each in sharding
        ]
        lonely = [each.splits_parameters for each in sharding]
        which = space.columns["sharding"][rows]
        replicas = space.dp[rows] * space.columns["cp"][rows]
        cool = np.array(copied)[which] | (np.array(lonely)[which] & (replicas == 1))
        return np.where(cool, COOL, found)

    def _cool_cost(self, at: int) -> FloatArray:
        """parts x takes on a GPU that nothing heats, which is no slower than one at work."""
        strategy = self.space.strategy(at)
        parts = part_layers(self.model, self.framework, strategy)
        load = cool_load(self.cluster.gpu, default_fit())
        return part_costs(self.model, self.cluster, self.framework, strategy, parts, load)

    def _cost(self, at: int) -> FloatArray:
        heat = int(self.columns.further["heat"][at])
        if heat == COOL:
            known = self.cool.get(at)
            return self._cool_cost(at) if known is None else known
        strategy = self.space.strategy(at)
        parts = part_layers(self.model, self.framework, strategy)
        loads = part_loads(self.cluster, parts)
        # A mixture of kinds is no cooler than its coolest.
        mixtures = loads[: len(self.kinds)] if heat == ALONE else self._counts(at)[-1:] @ loads
        load = least_load(self.cluster, mixtures)
        return part_costs(self.model, self.cluster, self.framework, strategy, parts, load)

    # ---- pipelines -----------------------------------------------------------------------------------

    def _is_paired(self, at: int) -> FloatArray:
        """1 where exchanges may hide behind kernels of another micro-batch."""
        strategy = self.space.strategy(at)
        own = SCHEDULES[strategy.schedule].pairs is Pairs.OWN and strategy.layout.pp > 1
        return np.array(float(own or strategy.pairs_micro_batches))

    def _pipeline_s(
        self, at: int, counts: FloatArray, costs: FloatArray, batches: FloatArray, exchanged: FloatArray, paired: bool
    ) -> FloatArray:
        """The bound of candidates with the pieces and the schedule of row *at*."""
        strategy = pipeline_of(self.space, at)
        facts, stages, chunks = SCHEDULES[strategy.schedule], strategy.layout.pp, strategy.layout.vpp
        split, two_way = facts.splits_backward, facts.placement is PiecePlacement.TWO_WAY and stages > 1

        def of_pieces(take: int) -> FloatArray:
            return costs[:, :, take] @ counts.T

        forward_s = of_pieces(TAKES.forward)
        # Weight gradients that are put off may follow the last input gradient of a stage.
        returned_s = of_pieces(TAKES.inputs) if split else of_pieces(TAKES.whole)
        backward_s = returned_s + of_pieces(TAKES.weights) if split else returned_s
        rounds = batches / 2 if two_way else batches
        best = np.zeros(len(costs))
        before_s, each_s, each_reduced_s, once_s = exchanged.T
        for stage in range(stages):
            own = list(facts.pieces_of_stage(stage, stages, chunks))
            before = slice(0, min(stage, stages - 1 - stage) if two_way else stage)
            there_s, back_s = forward_s[:, before].sum(axis=1), returned_s[:, before].sum(axis=1)
            if paired:
                single = stages + abs(stages // 2 - 1 - before.stop) if two_way else 0
                best = np.maximum(best, there_s + _pairs_s(costs, counts[own], rounds, single))
                continue
            forwards_s, backwards_s = forward_s[:, own].sum(axis=1), backward_s[:, own].sum(axis=1)
            work_s = rounds * (forwards_s + backwards_s)
            if split:
                straight_s = rounds * (forwards_s + returned_s[:, own].sum(axis=1))
                best = np.maximum(best, there_s + np.maximum(work_s, straight_s + back_s))
            else:
                best = np.maximum(best, there_s + work_s + back_s)
                best = np.maximum(best, work_s - backwards_s + once_s / chunks)
        through_s = forward_s.sum(axis=1)
        lane_s = np.maximum(before_s + batches * each_s, through_s + batches * each_reduced_s)
        longest: FloatArray = np.maximum(best, lane_s)
        return longest

    # ---- exchanges -----------------------------------------------------------------------------------

    def _lies(self, rows: IntArray) -> IntArray:
        """A number for each content of the first stage; also how many copies of the model there are."""
        found, copies = np.zeros(len(self.space), dtype=np.int64), np.ones(len(self.space), dtype=np.int64)
        known: dict[bytes, int] = {}
        for first, here in self.columns.several(rows, PIECES):
            strategy = pipeline_of(self.space, first)
            facts, layout = SCHEDULES[strategy.schedule], strategy.layout
            own = list(facts.pieces_of_stage(0, layout.pp, layout.vpp))
            lies = self._counts(first)[own].sum(axis=0)
            found[rows[here]] = known.setdefault(lies.tobytes(), len(known))
            copies[rows[here]] = facts.copies if layout.pp > 1 else 1
        self.columns.further["copies"] = copies
        return found

    def _exchanged(self, at: int) -> FloatArray:
        """Gradients of the first stage, and its weights, as one message: which is faster than in several."""
        found = exchanges(self.model, self.cluster, self.framework, self.space.strategy(at))
        return np.array(found.values())


def _pairs_s(costs: FloatArray, own: FloatArray, rounds: FloatArray, single: int) -> FloatArray:
    """Forwards and backwards side by side on a stage that holds pieces with *own* parts: kernels, each
    group's exchanges, and backwards by themselves; *single* forwards and backwards have no partner, before
    the first backward and after the last forward.
    """
    spent = np.einsum("rpt,p->rt", costs[:, :, TAKES.computing : TAKES.ahead], own.sum(axis=0))
    side_by_side = rounds * spent.max(axis=1)
    waits = costs[:, :, TAKES.ahead] + costs[:, :, TAKES.back] - costs[:, :, TAKES.computing]
    alone = np.minimum(2 * rounds, single) * (waits @ own.T).min(axis=1)
    longest: FloatArray = np.maximum(side_by_side, rounds * spent[:, 0] + alone)
    return longest
