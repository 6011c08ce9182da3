"""Lower bounds of the time and memory of candidates, for all of them at once.

Memory is that of the first stage, which holds the most micro-batches. Weights, optimizer states, gradients and
saved activations are sums over the parts of the model on it. While a layer runs backward, its workspace and what
it recomputes are added, and the allocator loses a share of all temporary memory.

Time is bounded in two steps. Rough bounds assume that every GPU is cool, which saves most cost estimates; tight
ones are computed on demand. No candidate can be faster than either:

- A stage computes all its micro-batches one after the other, with the communication its kernels wait for. Before
  the first one, its forward passes through the earlier stages, and after the last its backward returns through them.
- Gradients are reduced after the last backward of a stage has begun; or with each micro-batch, after the first
  one has passed through the whole model. The communication of one group is sequential.
- GPUs are as hot as the matrix kernels of the middle stage make them.
"""

from collections.abc import Sequence

import numpy as np

from stepcast.cost.fits import default_fit
from stepcast.cost.memory.stages import communication_bytes, default_in_flight, find_fragmentation, workspace_bytes
from stepcast.cost.memory.states import find_state_bytes, orientations
from stepcast.cost.pace import slowest
from stepcast.cost.power import cool_load
from stepcast.hardware import Cluster
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.framework import Framework, Kernels
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.limits import PRICED
from stepcast.ir.model import StagePiece, pieces_of_stage
from stepcast.ir.schedules import SCHEDULES, Pairs, PiecePlacement
from stepcast.ir.strategy import NO_OVERLAP, RecomputeKind
from stepcast.ir.types import FP32_BYTES, dataclass, replace
from stepcast.searching import space as candidates
from stepcast.searching.layers import (
    PartTime,
    block_kinds,
    count_parts,
    least_load,
    part_costs,
    part_layers,
    part_loads,
    price_exchanges,
)

# Weights are counted in whole numbers, which the parts of a stage round separately.
ROUNDED_DOWN = 1.0 - 1e-6
# Columns that decide whether micro-batches run in pairs (``Strategy.pairs_micro_batches``).
PAIRING = ("ep", "pp", "vpp", "schedule", "overlap")
# The middle stage heats the GPUs; it has neither end of the model, the last one, or both; COOL if unknown.
ALONE, WITH_HEAD, WITH_BOTH, COOL = range(4)


def bound_memory(
    columns: candidates.SpaceColumns, cluster: Cluster, framework: Framework
) -> tuple[BoolArray, FloatArray]:
    """Return which candidates are legal, and lower bounds of their memory (infinite for the others)."""
    legal = candidates.find_legal(columns, framework)
    memory_bytes = np.full(len(legal), np.inf)
    if len(rows := np.flatnonzero(legal)):
        memory_bytes[rows] = _MemoryBounds(columns, cluster, framework).bytes(rows)
    return legal, memory_bytes


class _MemoryBounds:
    """Lower bounds of the memory of the first stage."""

    def __init__(self, columns: candidates.SpaceColumns, cluster: Cluster, framework: Framework) -> None:
        self.columns, self.cluster, self.framework = columns, cluster, framework
        self.space, self.model = columns.space, columns.space.model
        self.kinds = block_kinds(self.model)

    def bytes(self, rows: IntArray) -> FloatArray:
        columns, overhead = self.columns, self.framework.overhead
        states = columns.spread(rows, candidates.STATES, self._states)  # (fixed, gradients) x parts, then two more
        counts = columns.spread(rows, (*candidates.PIECES, "micro_batches"), self._counts)
        activations = columns.spread(rows, candidates.SAVED, self._activations)
        parts = len(self.kinds) + 2
        on_stage, in_flight = counts[:, :parts], counts[:, parts:]
        fixed = (states[:, :parts] * on_stage).sum(axis=1) * ROUNDED_DOWN
        gradients = (states[:, parts : 2 * parts] * on_stage).sum(axis=1) * ROUNDED_DOWN
        splits, communication = states[:, 2 * parts], states[:, 2 * parts + 1]
        several = (self.space.micro_batches[rows] > 1) | (splits > 0)
        early_gradients = np.where(several | (self.framework.kernels is Kernels.FUSED), gradients, 0.0)
        has_pipeline = self.space.columns["pp"][rows] > 1
        working = activations[:, -3] + activations[:, -2] + np.where(has_pipeline, activations[:, -1], 0.0)
        temporary = (in_flight * activations[:, : len(self.kinds)]).sum(axis=1) + working
        # Optimizer moments and recomputation would add to the fragmentation.
        times, fragmentation, *_ = find_fragmentation(overhead, 0.0)
        fragmented = times * fragmentation * temporary
        largest: FloatArray = fixed + np.maximum(gradients, early_gradients + temporary) + fragmented
        return largest + overhead.context_bytes + communication

    def _states(self, row: int) -> FloatArray:
        """Return fixed states and gradients of each part, whether gradients are split, and buffers of communication."""
        strategy, framework, overhead = self.space.strategy(row), self.framework, self.framework.overhead
        copies = orientations(strategy, self.cluster.gpu)
        sizes = find_state_bytes(self.model, strategy, framework, copies)
        layers = [self.model.blocks.index(kind) for kind in self.kinds]
        parts = [StagePiece(range(layer, layer + 1), False, False) for layer in layers]
        parts += [StagePiece(range(0), True, False), StagePiece(range(0), False, True)]
        fixed, gradients = [], []
        for piece in map(sizes.find_piece, parts):
            more = piece.buckets + overhead.gradient_bytes * piece.trained
            more += overhead.step_bytes * piece.owned * (1 - strategy.offload.optimizer)
            more += FP32_BYTES * (piece.trained - piece.owned) if overhead.whole_master else 0.0
            fixed.append(piece.parameters + piece.optimizer + more)
            gradients.append(piece.gradients)
        communication = communication_bytes(replace(strategy, overlap=NO_OVERLAP), framework)
        return np.array([*fixed, *gradients, float(sizes.plan.splits_gradients), communication])

    def _counts(self, row: int) -> FloatArray:
        """Return how often each part is on the first stage, and how many blocks of each kind are in flight."""
        strategy, counts = self.space.strategy(row), count_parts(self.space, row)
        own = pieces_of_stage(strategy, 0)
        on_stage = counts[list(own)].sum(axis=0)
        if self.model.tied and on_stage[-1] and on_stage[-2]:
            on_stage[-1] = 0.0  # the head shares the weights of the embedding
        flights = zip(own, default_in_flight(strategy)[0], strict=True)
        in_flight = sum(counts[piece, : len(self.kinds)] * flight for piece, flight in flights)
        return np.concatenate([on_stage, in_flight])

    def _activations(self, row: int) -> FloatArray:
        """Return the activations each kind saves for a micro-batch; then workspace, gathers and messages."""
        strategy = self.space.strategy(row)
        full = strategy.recompute.kind is RecomputeKind.FULL
        kinds = [count_saved(self.model, strategy, kind, self.framework) for kind in self.kinds]
        on_host = strategy.offload.activations > 0
        saved = [0.0 if on_host else kind.after(full) for kind in kinds]
        recomputed = min((kind.saved - kind.input if full else kind.again) + kind.transient for kind in kinds)
        stream = strategy.local_tokens * self.model.hidden * strategy.stream.bytes
        gathered = 2 * stream if strategy.sequence_parallel else 0.0
        workspace = workspace_bytes(self.model, self.framework, self.cluster.gpu)
        return np.array([*saved, recomputed + workspace, gathered, 2 * stream / strategy.outer_ways])


class TimeBounds:
    """Lower bounds of the times of *rows*, computed when they are asked for."""

    def __init__(
        self, columns: candidates.SpaceColumns, cluster: Cluster, framework: Framework, rows: IntArray
    ) -> None:
        self.columns, self.cluster, self.framework = columns, cluster, framework
        self.space, self.model = columns.space, columns.space.model
        self.kinds = block_kinds(self.model)
        self._known_counts: dict[tuple[int, ...], FloatArray] = {}
        heat, names = np.full(len(self.space), COOL), (*candidates.LAYER, "added")
        heat[rows] = self._heat(rows)
        # How layers add up gradients: see Strategy.splits_each_gradient.
        space = self.space
        facts = [(kind.splits_gradients, kind.splits_parameters) for kind in space.axes.sharding]
        splits, gathers = np.array(facts)[space.columns["sharding"]].T & (space.dp * space.columns["cp"] > 1)
        added = (space.micro_batches > 1) + 2 * splits + 4 * (gathers & (space.columns["pp"] > 1))
        columns.derived |= {"heat": heat, "added": added, "content": self._first_stages(rows)}
        self.cool = candidates.LazyColumn(columns, rows, names, lambda row: self._cost(row, COOL))
        self.hot = candidates.LazyColumn(columns, rows, (*names, "heat"), self._hot_cost)
        if len(self.hot.first) > PRICED.most:
            raise ValueError(f"{PRICED.message}: fix some choices, or ask for fewer numbers of GPUs")
        self.exchanged = candidates.LazyColumn(columns, rows, (*candidates.STATES, "content"), self._exchanged)
        self.paired = candidates.LazyColumn(columns, rows, PAIRING, self._is_paired)

    @property
    def priced(self) -> int:
        """The number of kinds of layers that were priced."""
        return int(self.cool.known.sum()) + int(self.hot.known.sum())

    def times(self, rows: IntArray, rough: bool = False) -> tuple[FloatArray, FloatArray]:
        """Return lower bounds in seconds for each of *rows*: of the step, and of the kernels of the mean stage."""
        if not len(rows):
            return np.zeros(0), np.zeros(0)
        costs, batches = (self.cool if rough else self.hot).look_up(rows), self.space.micro_batches[rows] * 1.0
        exchanged, paired = self.exchanged.look_up(rows), self.paired.look_up(rows) > 0
        step_s, computing_s = np.zeros(len(rows)), np.zeros(len(rows))
        for first, here in self.columns.several(rows, candidates.PIECES):
            counts, uneven = self._counts(first), self._uneven(first, rows[here])
            kernels_s = costs[here, :, PartTime.KERNELS] @ counts.sum(axis=0)
            computing_s[here] = uneven * batches[here] * kernels_s / self.space.columns["pp"][first]
            for is_paired in (False, True):
                which = paired[here] == is_paired
                if len(some := here[which]):
                    args = costs[some], batches[some], exchanged[some]
                    step_s[some] = self._pipeline_s(first, counts, *args, uneven[which], is_paired)
        return step_s, computing_s

    def _uneven(self, first: int, rows: IntArray) -> FloatArray:
        """Return for each of *rows* the least time of uneven stages over that of even ones, which is at most 1.

        Even stages wait for the slowest GPU of all; if one stage has more work, only its GPUs may matter. All rows have
        the pipeline of row *first*.
        """
        stages = int(self.space.columns["pp"][first])
        gpus, which = np.unique(self.space.columns["gpus"][rows], return_inverse=True)
        least: FloatArray = np.array([slowest(int(count), stages) / slowest(int(count)) for count in gpus])[which]
        return least

    def _counts(self, row: int) -> FloatArray:
        """Return the parts of each piece (``count_parts``), computed once for each pipeline."""
        key = tuple(int(self.space.columns[name][row]) for name in candidates.PIECES)
        if key not in self._known_counts:
            self._known_counts[key] = count_parts(self.space, row)
        return self._known_counts[key]

    # ---- layers --------------------------------------------------------------------------------------

    def _heat(self, rows: IntArray) -> IntArray:
        """Return the content of the middle piece, which decides how hot GPUs run."""
        space = self.space
        pieces = space.columns["pp"][rows] * space.columns["vpp"][rows]
        heat = np.where(pieces > 2, ALONE, np.where(pieces == 2, WITH_HEAD, WITH_BOTH))
        if space.common.get("mtp_layers"):
            heat = np.where(pieces > 2, ALONE, COOL)
        # Gathered weights and split gradients may be copied there, which cools the GPU.
        sharding = space.axes.sharding
        copies, routed = self.framework.copies_gradients, bool(self.model.experts)
        copied = [(kind.splits_gradients and copies) or (kind.splits_parameters and routed) for kind in sharding]
        alone = [kind.splits_parameters for kind in sharding]
        which = space.columns["sharding"][rows]
        replicas = space.dp[rows] * space.columns["cp"][rows]
        cool = np.array(copied)[which] | (np.array(alone)[which] & (replicas == 1))
        return np.where(cool, COOL, heat)

    def _hot_cost(self, row: int) -> FloatArray:
        heat = int(self.columns.derived["heat"][row])
        known = self.cool.get(row) if heat == COOL else None
        return self._cost(row, heat) if known is None else known

    def _cost(self, row: int, heat: int) -> FloatArray:
        """Return parts x times on a GPU with that *heat*; a cool one is no slower than one under load."""
        strategy, load = self.space.strategy(row), cool_load(self.cluster.gpu, default_fit())
        parts = part_layers(self.model, self.framework, strategy)
        if heat != COOL:
            loads = part_loads(self.cluster, parts)
            # A mixture of kinds is no cooler than its coolest.
            mixtures = loads[: len(self.kinds)] if heat == ALONE else self._counts(row)[-1:] @ loads
            load = least_load(self.cluster, mixtures)
        return part_costs(self.model, self.cluster, self.framework, strategy, parts, load)

    # ---- pipelines -----------------------------------------------------------------------------------

    def _is_paired(self, row: int) -> FloatArray:
        """Return 1 if communication may hide behind kernels of another micro-batch."""
        strategy = self.space.strategy(row)
        own = SCHEDULES[strategy.schedule].pairs is Pairs.OWN and strategy.layout.pp > 1
        return np.array(float(own or strategy.pairs_micro_batches))

    def _pipeline_s(
        self,
        row: int,
        counts: FloatArray,
        costs: FloatArray,
        batches: FloatArray,
        exchanged: FloatArray,
        uneven: FloatArray,
        paired: bool,
    ) -> FloatArray:
        """Return lower bounds of the step in seconds, for candidates with the pieces and the schedule of *row*.

        Args:
            row: a candidate with this pipeline.
            counts: pieces x parts.
            costs: candidates x parts x PartTime, in seconds.
            batches: the micro-batches of each candidate.
            exchanged: candidates x fields of ExchangeSeconds.
            uneven: the factor of each candidate that ``_uneven`` returns.
            paired: whether communication may hide behind kernels of another micro-batch.
        """
        strategy = candidates.pipeline_strategy(self.space, row)
        facts, stages, chunks = SCHEDULES[strategy.schedule], strategy.layout.pp, strategy.layout.vpp
        split, two_way = facts.splits_backward, facts.placement is PiecePlacement.TWO_WAY and stages > 1

        def of_pieces(time: PartTime) -> FloatArray:
            return costs[:, :, time] @ counts.T

        forward_s = of_pieces(PartTime.FORWARD)
        # Delayed weight gradients may follow the last input gradient of a stage.
        returned_s = of_pieces(PartTime.INPUT_GRADIENTS) if split else of_pieces(PartTime.BACKWARD)
        backward_s = returned_s + of_pieces(PartTime.WEIGHT_GRADIENTS) if split else returned_s
        rounds = batches / 2 if two_way else batches
        best = np.zeros(len(costs))
        before_s, per_batch_s, per_batch_reduced_s, once_s = exchanged.T
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
        lane_s = np.maximum(before_s + batches * per_batch_s, through_s + batches * per_batch_reduced_s)
        longest: FloatArray = np.maximum(uneven * best, lane_s)
        return longest

    # ---- gradients and weights -----------------------------------------------------------------------

    def _first_stages(self, rows: IntArray) -> IntArray:
        """Return a number for each content of the first stage; both copies of the model are part of it."""
        content = np.zeros(len(self.space), dtype=np.int64)
        known: dict[bytes, int] = {}
        for first, here in self.columns.several(rows, candidates.PIECES):
            strategy = candidates.pipeline_strategy(self.space, first)
            facts, layout = SCHEDULES[strategy.schedule], strategy.layout
            own = list(facts.pieces_of_stage(0, layout.pp, layout.vpp))
            parts = self._counts(first)[own].sum(axis=0)
            content[rows[here]] = known.setdefault(parts.tobytes(), len(known))
        return content

    def _exchanged(self, row: int) -> FloatArray:
        """Return the seconds for the first stage's gradients and weights, each as one message."""
        return np.array(price_exchanges(self.model, self.cluster, self.framework, self.space.strategy(row)))


def _pairs_s(costs: FloatArray, own: FloatArray, rounds: FloatArray, single: int) -> FloatArray:
    """Return the seconds of paired forwards and backwards on a stage whose pieces have *own* parts.

    Bounded by the kernels, the communication of each group, and the backwards. *single* forwards and backwards
    have no partner, before the first backward and after the last forward.
    """
    spent = np.einsum("rpt,p->rt", costs[:, :, PartTime.KERNELS : PartTime.FORWARD_SPAN], own.sum(axis=0))
    paired_s = rounds * spent.max(axis=1)
    waits = costs[:, :, PartTime.FORWARD_SPAN] + costs[:, :, PartTime.BACKWARD_SPAN] - costs[:, :, PartTime.KERNELS]
    alone = np.minimum(2 * rounds, single) * (waits @ own.T).min(axis=1)
    longest: FloatArray = np.maximum(paired_s, rounds * spent[:, 0] + alone)
    return longest


@dataclass(frozen=True)
class CandidateBounds:
    """Lower bounds of time and memory; infinite for candidates that are not legal."""

    time_s: FloatArray
    computing_s: FloatArray  # kernels of the mean stage
    memory_bytes: FloatArray


# Rules of thumb that order candidates before their bounds are known.
RECOMPUTE_WORK = {"none": 1.0, "selective": 1.02, "full": 4 / 3}
COMMUNICATION_PER_DOUBLING, BETWEEN_DOMAINS = 0.03, 5.0
RIDGE_TOKENS = 300  # tokens of an expert that take as long to multiply as its weights to read: 989 TFLOP/s, 3.35 TB/s
COMFORTABLE_SHARE = 0.85  # lower bounds of memory beyond this share of the capacity often do not fit


class BoundedCandidates:
    """The candidates of several parts as one table, those that may fit first, with the bounds known so far."""

    def __init__(
        self,
        parts: Sequence[candidates.SpacePart],
        cluster: Cluster,
        capacity: float,
        near: float,
        workers: int = 1,
        tick: candidates.Tick | None = None,
    ) -> None:
        self.parts, self.capacity, self.domain_gpus = parts, capacity, cluster.domain_gpus
        columns = [candidates.SpaceColumns(part.space, workers, tick) for part in parts]
        tables = [bound_memory(column, cluster, part.framework) for column, part in zip(columns, parts, strict=True)]
        self.legal = sum(int(legal.sum()) for legal, _ in tables)
        self.smallest_bytes = min(float(sizes.min(initial=np.inf)) for _, sizes in tables) if self.legal else None
        fitting = [np.flatnonzero(legal & (sizes <= capacity)) for legal, sizes in tables]
        nearly = [np.flatnonzero(legal & (sizes > capacity) & (sizes <= near)) for legal, sizes in tables]
        self.fitting = sum(map(len, fitting))
        both = [*enumerate(fitting), *enumerate(nearly)]
        self.part = np.concatenate([np.full(len(rows), number) for number, rows in both])
        self.row: IntArray = np.concatenate([rows for _, rows in both])
        self.ranks: IntArray = np.concatenate([parts[number].rows[rows] for number, rows in both])
        self.gpus: IntArray = np.concatenate([parts[number].space.columns["gpus"][rows] for number, rows in both])
        self.memory_bytes: FloatArray = np.concatenate([tables[number][1][rows] for number, rows in both])
        self.time_s: FloatArray = np.full(len(self.row), np.inf)
        self.computing_s: FloatArray = np.full(len(self.row), np.inf)
        self.timings: list[TimeBounds] = []
        self.kinds: IntArray = np.zeros(len(self.row), dtype=np.int64)
        kinds = 0
        for number, part in enumerate(parts):
            here = self.part == number
            timing = TimeBounds(columns[number], cluster, part.framework, np.sort(self.row[here]))
            self.timings.append(timing)
            self.kinds[here] = kinds + timing.hot.kind[self.row[here]]
            kinds += len(timing.hot.first)

    @property
    def priced(self) -> int:
        """The number of kinds of layers that were priced."""
        return sum(timing.priced for timing in self.timings)

    def promising(self) -> IntArray:
        """Return candidates that may fit, one of each layout and sharding, those that tend to be fast first.

        The order decides which bounds are computed first when time is short. Full recomputation is a third more
        work, the bubble is (pp - 1) / (vpp x micro-batches) (Narayanan et al. 2021), and each doubling of the
        ranks that exchange activations costs a little, more between NVLink domains. Experts with few tokens wait for
        their weights. Pipelines and shardings take turns.
        """
        order: FloatArray = np.zeros(self.fitting)
        layout: IntArray = np.zeros(self.fitting, dtype=np.int64)
        turn: IntArray = np.zeros(self.fitting, dtype=np.int64)
        for which, part in enumerate(self.parts):
            here = np.flatnonzero(self.part[: self.fitting] == which)
            space, rows = part.space, self.row[here]
            names = (*candidates.LAYOUT, "sharding", "vpp", "recompute", "micro_batch")
            column = {name: space.column(name)[rows] for name in names}
            kinds = [getattr(choice, "kind", choice) for choice in space.axes.recompute]
            work = np.array([RECOMPUTE_WORK[str(kind)] for kind in kinds])[column["recompute"]]
            bubble = (column["pp"] - 1) / (column["vpp"] * space.micro_batches[rows])
            ranks = column["tp"] * column["cp"] * column["ep"]
            doublings = np.log2(ranks) + BETWEEN_DOMAINS * np.log2(np.maximum(1, ranks / self.domain_gpus))
            order[here] = work * (1 + bubble) * (1 + COMMUNICATION_PER_DOUBLING * doublings)
            if experts := space.model.experts:
                tokens = column["micro_batch"] * space.seq * column["ep"] / (column["tp"] * column["cp"])
                order[here] *= 1 + RIDGE_TOKENS * experts.count / (tokens * experts.top_k)
            turn[here] = column["pp"] * len(space.axes.sharding) + column["sharding"]
            layout[here] = turn[here]
            for name in candidates.LAYOUT:
                layout[here] = layout[here] * (int(column[name].max(initial=0)) + 1) + column[name]
        order[self.memory_bytes[: self.fitting] > COMFORTABLE_SHARE * self.capacity] += RECOMPUTE_WORK["full"]
        ranked = np.argsort(order, kind="stable")
        ranked = ranked[np.sort(np.unique(layout[ranked], return_index=True)[1])]
        by_turn = np.argsort(turn[ranked], kind="stable")
        _, starts, counts = np.unique(turn[ranked][by_turn], return_index=True, return_counts=True)
        place = np.empty(len(ranked), dtype=np.int64)
        place[by_turn] = np.arange(len(ranked)) - np.repeat(starts, counts)
        promising: IntArray = ranked[np.argsort(place, kind="stable")]
        return promising

    def place(self, number: int) -> tuple[candidates.SpacePart, int]:
        """Return the part of a candidate, and its row there."""
        return self.parts[int(self.part[number])], int(self.row[number])

    def bound(self, numbers: IntArray, rough: bool = False) -> CandidateBounds:
        """Compute, store and return the bounds of some candidates: tight ones, or *rough* ones."""
        for which, timing in enumerate(self.timings):
            here = numbers[self.part[numbers] == which]
            self.time_s[here], self.computing_s[here] = timing.times(self.row[here], rough)
        return self.known(numbers)

    def known(self, numbers: IntArray) -> CandidateBounds:
        """Return the bounds of some candidates that were computed last."""
        return CandidateBounds(self.time_s[numbers], self.computing_s[numbers], self.memory_bytes[numbers])
