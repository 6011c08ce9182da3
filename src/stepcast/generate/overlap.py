"""Data-parallel communication and activation offload: the layers and micro-batches that they overlap with."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain, groupby
from typing import TypeVar

from stepcast.generate.data import (
    Buckets,
    broadcast_ops,
    epilogue,
    fill_buckets,
    gather_ops,
    issue_buckets,
    reduce_ops,
    tensors_of_layer,
)
from stepcast.generate.update import copy_op, own_parameters, send_gradients
from stepcast.ir.architecture import Shard
from stepcast.ir.framework import Execution, Framework, Kernels
from stepcast.ir.layers.kernels import K, Ops
from stepcast.ir.layers.operators import wait_for
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import HostWay
from stepcast.ir.model import Model, StagePiece, trained_shard
from stepcast.ir.sharding import Gathered, Reduced, gathered_bytes, states_view
from stepcast.ir.strategy import RecomputeKind, Strategy
from stepcast.ir.types import ByIdentity, DType, assign, dataclass, replace
from stepcast.ir.work import Elementwise
from stepcast.ir.workload import (
    FIRST,
    LAST,
    ChangedBlocks,
    ChangedUnit,
    Layer,
    NumberedRuns,
    Op,
    Phase,
    VariedBodies,
    intern_layers,
)

Result = TypeVar("Result")
BetweenUnits = Callable[["Unit | None", "Unit", "Unit | None"], Result]


@dataclass(frozen=True, slots=True)
class Unit:
    """A transformer layer, or an end of the model: gathered, reduced, recomputed and offloaded together."""

    layers: tuple[Layer, ...]
    held: Shard
    trained: Shard
    # Bytes of activations that the host keeps from the forward until the backward.
    leaving: int = 0

    def __post_init__(self) -> None:  # one object in all units with the same layers
        assign(self, "layers", intern_layers(self.layers))

    @property
    def has_backward(self) -> bool:
        """Return False for layers of a frozen reference, which run forward only."""
        return any(layer.input_gradient or layer.weight_gradient for layer in self.layers)


Units = list[tuple[Unit, int]]
"""Units, and how often each follows itself."""


def _prefetch(ops: Ops, own: Ops, following: Ops, begins: bool) -> Ops:
    """Return *ops* that wait for their *own* gathers, requested here if a unit *begins* with them, and then
    request those of what runs next.
    """
    names = tuple(op.name for op in own)
    return (*(own if begins else ()), *wait_for(ops[:1], names), *following, *ops[1:])


def offload_activations(units: Units) -> Units:
    """Return units that send their activations after the forward and have them back for the backward.

    Activations of a layer are sent while the next one runs; that ends once they have gone, so that no more
    than two layers' are on the GPU. They are fetched while the layer after theirs runs backward (Transformer
    Engine, ``pytorch/cpu_offload.py``; Megatron-Core's fine-grained activation offloading).
    """

    def move(before: Unit | None, unit: Unit, after: Unit | None) -> Unit:
        last, own, earlier = unit.layers[-1], unit.leaving, before.leaving if before else 0

        def make() -> Layer:
            layer = last
            if own:
                ready = wait_for(layer.forward[-1:], ("activations out",))
                sent = copy_op("activations out", HostWay.OUT, own)
                layer = replace(layer, forward=(*layer.forward[:-1], *ready, sent))
            fetched, following = (
                (copy_op("activations in", HostWay.IN, size),) if size else () for size in (own, earlier)
            )
            return replace(layer, input_gradient=_prefetch(layer.input_gradient, fetched, following, after is None))

        moved = LAYERS.get((last,), make, own, earlier, after is None)
        return replace(unit, layers=(*unit.layers[:-1], moved))

    return map_neighbours(move, units)


def map_neighbours(function: "BetweenUnits[Result]", units: Units) -> list[tuple[Result, int]]:
    """Return the results of *function* for each unit with those before and after it."""
    results: list[tuple[Result, int]] = []
    before = None
    followers = [*[unit for unit, _ in units[1:]], None]
    for (unit, count), after in zip(units, followers, strict=False):  # a stage may have no units
        if count > 1:
            results.append((function(before, unit, unit), 1))
            before = unit
        if count > 2:
            results.append((function(unit, unit, unit), count - 2))
        results.append((function(before, unit, after), 1))
        before = unit
    return results


OpsRun = tuple[Ops, int]
"""Ops that are added to a unit, and to how many one after another."""


@dataclass(frozen=True, slots=True)
class OncePerStep:
    """The collectives of all parameters and gradients of a stage: those with which the first forward of each unit
    begins or its last backward ends, if any overlaps with them, and what runs after all micro-batches.
    """

    gathers: NumberedRuns[Ops]
    reductions: NumberedRuns[Ops]
    epilogue: tuple[Layer, ...]


class DataMaker:
    """Makes what data parallelism adds to stages, for all strategies that split, gather and reduce the same states in
    the same way, whatever they run in a micro-batch.
    """

    def __init__(self, model: Model, view: Strategy, framework: Framework) -> None:
        self.model, self.sizes = model, Sizes(model, view, framework)
        self.reduce, self.gather = lru_cache(1024)(self._reduce), lru_cache(1024)(self._gather)
        self.unpack, self.buckets_of = lru_cache(1024)(self._unpack), lru_cache(1024)(self._buckets_of)
        self.gather_buckets = lru_cache(1024)(self._gather_buckets)
        self._once: dict[StagePiece, OncePerStep] = {}
        # DeepSpeed of 2021 fetches a module's tensors when it begins, and then waits for the GPU (stage3.py,
        # fetch_sub_module, _synchronize_communication); what it prefetches, 5e7 elements, holds no large weight.
        ahead = view.overlap.parameters and not framework.listed_gathers
        # A recomputed layer is gathered for its second forward, as the first is.
        late = framework.late_gathers and view.recompute.kind is not RecomputeKind.FULL
        self._gathers = {Phase.FORWARD: ("forward", ahead), Phase.INPUT_GRADIENT: ("backward", ahead and not late)}

    def gather_units(self, units: Units) -> Units:
        """ZeRO-3 and FSDP: gather parameters for the forward of each unit, and again for its backward where they
        are freed in between. Overlapped, they are gathered while the unit before runs, so that only the first
        wait is exposed.
        """
        is_again = self.sizes.plan.gathered is Gathered.EACH_PASS

        def gather(before: Unit | None, unit: Unit, after: Unit | None) -> Unit:
            layers = list(_begin_with(unit.layers, self._begin_unit(before, unit, after)).written_out())
            if is_again and unit.has_backward:
                layers[-1] = self._request(Phase.INPUT_GRADIENT, layers[-1], after, unit, before)
            return replace(unit, layers=tuple(layers))

        return map_neighbours(gather, units)

    def _begin_unit(self, before: Unit | None, unit: Unit, after: Unit | None) -> Layer:
        """Return the first layer of *unit* with a forward, which then begins with its gathers."""
        return self._request(Phase.FORWARD, unit.layers[_find_first(unit.layers)], before, unit, after)

    def _request(self, phase: Phase, layer: Layer, earlier: Unit | None, unit: Unit, later: Unit | None) -> Layer:
        """Return *layer*, with which *unit* begins a *phase* between the *earlier* unit and the *later* one: the
        first of all asks for its own parameters and for those of the next one.
        """
        name, overlaps = self._gathers[phase]
        begins = not overlaps or earlier is None
        own = self.gather(f"{name} first" if overlaps and begins else name, Buckets(unit.held), not overlaps)
        following: Ops = ()
        if overlaps and later is not None and (phase is Phase.FORWARD or later.has_backward):
            following = self.gather(name, Buckets(later.held), not overlaps)
        return _begin(layer, phase, self.unpack(unit.held), own, following, begins)

    def _gather(self, name: str, buckets: Buckets, blocking: bool, early: bool = False) -> Ops:
        ops = gather_ops(self.sizes, name, buckets, blocking)
        return _intern(tuple([replace(op, early=True) for op in ops]) if early else ops)

    def reduce_units(self, units: Units) -> Units:
        """ZeRO 2 and 3, FSDP: reduce gradients with every micro-batch, when a unit's backward is done."""
        ends = [(ChangedUnit(unit.layers, self.reduce(self.buckets_of(unit.trained))), unit, n) for unit, n in units]
        return [(replace(unit, layers=end.written_out()), count) for end, unit, count in ends]

    def _buckets_of(self, shard: Shard) -> tuple[Buckets, ...]:
        """Return the gradients of one unit, in buckets of its own."""
        limit = self.sizes.framework.bucket_parameters(self.sizes.strategy, first_piece=False)
        return tuple([buckets for _, buckets in fill_buckets(limit, (shard,), tensors_of_layer(self.sizes))])

    def _reduce(self, buckets: tuple[Buckets, ...]) -> Ops:
        """Return the ops that reduce the gradients in *buckets*."""
        sizes, framework, ops = self.sizes, self.sizes.framework, list[Op]()
        blocking = not sizes.strategy.overlap.gradients
        checks = framework.checks_gradients and framework.execution is not Execution.GRAPHS
        for number, issued in enumerate(issue_buckets(sizes, buckets)):
            shard, times = issued
            split = sizes.plan.unreduced(shard).total * times
            if split and framework.copies_gradients:
                # In the format of their sum: FSDP2's chunk_cat, the backward of FSDP1's split of a flat parameter,
                # DeepSpeed's contiguous_gradients (stage_1_and_2.py, stage3.py).
                moved = float(split * sizes.element), float(split * sizes.gradient)
                ops.append(Op("gradients copy in", Elementwise(K.COPY, 1, split, *moved, dtype=sizes.stored)))
            if checks:  # the norms of buckets, which an eager host reads (Megatron-Core's check_grads)
                total = shard.total * times
                norm = Elementwise(K.OTHER, 1, total, float(total * sizes.gradient), 0.0, dtype=sizes.stored)
                ops.append(Op(f"gradients {number} check", norm, kernels=CHECK_KERNELS * times, host_reads=True))
            reduced = reduce_ops(sizes, f"gradients {number}", issued, blocking)
            own = own_parameters(sizes, shard) * times
            ops += [*reduced, *send_gradients(sizes, number, own, reduced, blocking)]
        return _intern(tuple(ops))

    def _unpack(self, shard: Shard) -> Ops:
        """Return what a rank does with gathered weights. FSDP2 splits each parameter by itself and copies it to where
        the layers expect it (PyTorch, torch/distributed/fsdp/_fully_shard: split_with_sizes_copy); a rank that shares
        with nobody casts its fp32 weights.
        """
        sizes, ops = self.sizes, list[Op]()
        casts = sizes.framework.keeps_fp32_weights(sizes.strategy) and sizes.strategy.weights is not DType.FP32
        for part, weights in sizes.plan.kinds(shard):
            size, total = float(gathered_bytes(sizes.strategy, weights)), weights.total
            name = "expert parameters" if weights.experts else "parameters"
            if part.ways > 1 and sizes.framework.kernels is Kernels.COMPILED:
                ops.append(Op(f"{name} copy out", Elementwise(K.COPY, 1, total, size, size, dtype=sizes.stored)))
            elif part.ways == 1 and part.collected and casts:
                read = DType.FP32.bytes * total
                ops.append(Op(f"{name} cast", Elementwise(K.CAST, 1, total, read, size, dtype=DType.FP32)))
        return _intern(tuple(ops))

    def once_per_step(self, piece: StagePiece, units: Units) -> OncePerStep:
        """Overlap gradients of *piece* that are reduced once with the last backward, and parameters that are gathered
        once with the first forward, bucket by bucket or unit by unit; or either with nothing.
        """
        if piece not in self._once:
            plan, overlap, filled = self.sizes.plan, self.sizes.strategy.overlap, self._fill_buckets(units, piece)
            gathers, reductions, gathered = list[OpsRun](), list[OpsRun](), tuple[Op, ...]()
            if plan.reduced is Reduced.ONCE:
                reductions = [(self.reduce(buckets), count) for buckets, count in filled]
            if plan.gathered is Gathered.AFTER_UPDATE:
                if self.sizes.framework.owners_broadcast:
                    gathered = broadcast_ops(self.sizes, trained_shard(self.model, self.sizes.strategy, piece))
                else:
                    gathers = [(self.gather_buckets(buckets), count) for buckets, count in filled]
            if not overlap.parameters:
                gathers, gathered = [], gathered or _unfold(gathers)
            reduced: Ops = ()
            if not overlap.gradients:
                reductions, reduced = [], _unfold(reversed(reductions))
            ending = epilogue(self.sizes, self.model, piece, reduced, gathered)
            self._once[piece] = OncePerStep(NumberedRuns.of(gathers), NumberedRuns.of(reductions), ending)
        return self._once[piece]

    def vary(self, runs: NumberedRuns[tuple[Layer, ...]], units: Units, once: OncePerStep) -> VariedBodies:
        """Return the bodies of the micro-batches that differ from the usual one, which has *runs* of *units*."""
        varied: VariedBodies = ()
        if self.sizes.plan.gathered is Gathered.ONCE:
            begun = NumberedRuns.of(map_neighbours(self._begin_unit, units))
            varied += ((FIRST, ChangedBlocks(runs, begun, _begin_with)),)
        if any(once.gathers.values):
            varied += ((FIRST, ChangedBlocks(runs, once.gathers, _begin_forward)),)
        if any(once.reductions.values):
            varied += ((LAST, ChangedBlocks(runs, once.reductions, ChangedUnit)),)
        return varied

    def _fill_buckets(self, units: Units, piece: StagePiece) -> list[tuple[tuple[Buckets, ...], int]]:
        """Return the buckets that each unit's backward completes, and with which its forward begins: its own, or those
        that gradients fill from the last unit to the first.
        """
        sizes = self.sizes
        if sizes.plan.by_unit:
            return [(self.buckets_of(unit.trained), count) for unit, count in units]
        # Parameters are gathered in the buckets of their gradients; what is split is reduced layer by layer.
        limit = sizes.framework.bucket_parameters(sizes.strategy, piece.embedding and not sizes.plan.splits_gradients)
        trained = [unit.trained for unit, count in reversed(units) for _ in range(count)]
        filled: list[tuple[Buckets, ...]] = [()] * len(trained)
        other = sum([shard.unquantised for shard in trained]) if sizes.strategy.fp8_parameters else 0
        if 0 < other < sum([shard.total for shard in trained]):
            # Embeddings, the output projection and norms have buffers of their own, whose buckets are reduced and
            # gathered with the last of the fp8 ones (Megatron-Core, param_and_grad_buffer.py, partition_buckets).
            trained = [Shard(shard.dense - shard.unquantised, shard.experts) for shard in trained]
            filled[0] = (Buckets(Shard(other, 0, other)),)
        for index, buckets in fill_buckets(limit, tuple(trained), tensors_of_layer(sizes)):
            filled[-1 - index] += (buckets,)
        return [(buckets, len(list(run))) for buckets, run in groupby(filled)]

    def _gather_buckets(self, buckets: tuple[Buckets, ...]) -> Ops:
        """Return the gathers of *buckets* after the update, or with which a unit begins.

        Every stage asks for all its parameters when the step begins, not when its first micro-batch comes
        (Megatron-LM, --align-param-gather).
        """
        overlaps, issued = self.sizes.strategy.overlap.parameters, issue_buckets(self.sizes, reversed(buckets))
        parts = [self.gather(f"parameters {number}", own, not overlaps, overlaps) for number, own in enumerate(issued)]
        return _intern(tuple(chain.from_iterable(parts)))


def _unfold(runs: Iterable[OpsRun]) -> Ops:
    return tuple(chain.from_iterable([ops * count for ops, count in runs]))


_intern: Callable[[Ops], Ops] = lru_cache(maxsize=4096)(lambda ops: ops)
"""One object for equal ops, so that layers with them are made once."""
_make_once = lru_cache(maxsize=1024)(DataMaker)


def find_data_maker(model: Model, strategy: Strategy, framework: Framework) -> DataMaker:
    """Return the one for all strategies whose collectives of parameters and gradients are those of *strategy*."""
    return _make_once(model, states_view(strategy, framework), framework)


# Kernels that an eager host issues to check a bucket of gradients: its norm, whether that is NaN or infinite, and two
# copies of the answers.
CHECK_KERNELS = 6


# Remembered from one forecast to the next: layers that are one object are worked out once.
LAYERS: ByIdentity[Layer] = ByIdentity(4 * 4096)


def _begin(layer: Layer, phase: Phase, copies: Ops, own: Ops, following: Ops, begins: bool) -> Layer:
    """Return *layer* whose *phase* waits for its *own* gathers and requests the *following* ones."""

    def make() -> Layer:
        ops = _prefetch(copies + layer.ops(phase), own, following, begins)
        return replace(layer, forward=ops) if phase is Phase.FORWARD else replace(layer, input_gradient=ops)

    return LAYERS.get((layer, copies, own, following), make, phase, begins)


def _begin_forward(layers: tuple[Layer, ...], ops: Ops) -> ChangedUnit:
    """Return the *layers* of a unit whose forward begins with the gathers *ops*."""
    layer = layers[_find_first(layers)]
    return _begin_with(layers, _begin(layer, Phase.FORWARD, (), ops, (), True) if ops else None)


def _begin_with(layers: tuple[Layer, ...], layer: Layer | None) -> ChangedUnit:
    """Return the *layers* of a unit with this *layer* as the first that has a forward."""
    return ChangedUnit(layers, (), layer, _find_first(layers))


def _find_first(layers: tuple[Layer, ...]) -> int:
    """Return the first of *layers* with a forward: without norms before its halves, that of a block is empty."""
    return 0 if layers[0].forward else next((index for index, layer in enumerate(layers) if layer.forward), 0)
