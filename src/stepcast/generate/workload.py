"""Model x Strategy x Framework -> Workload: every op of a step with its shapes, and every collective."""

from functools import lru_cache, partial
from itertools import chain, groupby, pairwise

from stepcast.generate.overlap import Unit, find_data_maker, offload_activations
from stepcast.generate.recompute import alternate_matmuls, prepend_backward, recompute_block, recompute_modules
from stepcast.ir.architecture import NOTHING, Shard
from stepcast.ir.dataclass import replace
from stepcast.ir.framework import MEGATRON_CORE, Execution, Framework
from stepcast.ir.layers.ends import SWITCH_KERNELS, embedding_layers, head_layers, next_token_layers
from stepcast.ir.layers.kernels import C, collective
from stepcast.ir.layers.kinds import KINDS, count_adapted, kinds_of
from stepcast.ir.layers.operators import rename_ops
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Group
from stepcast.ir.legality import check
from stepcast.ir.model import Model, StagePiece, count_frozen, held_shard, piece_kinds, trained_shard
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.saved import count_saved
from stepcast.ir.schedules import find_schedule
from stepcast.ir.sharding import Gathered, Reduced
from stepcast.ir.strategy import NO_RECOMPUTE, NO_TARGETS, Objective, ScheduleKind, Strategy, layer_view
from stepcast.ir.work import Elementwise
from stepcast.ir.workload import Layer, Phase, Role, Stage, Workload, fold_units

# One pipeline piece: its layers, what is recomputed, and the data-parallel communication around them.

# Layers whose sizes depend on the router: no captured graph can hold them (Megatron-Core's cuda_graph_scope).
UNCAPTURED = (Role.DISPATCH, Role.EXPERTS_UP, Role.EXPERTS_DOWN, Role.COMBINE)


class UnitMaker:
    """Makes units under the view of a layer, for all strategies that spread the same layers in any way."""

    def __init__(self, model: Model, view: Strategy, framework: Framework) -> None:
        self.model, self.view, self.framework = model, view, framework
        self.make_end, self.make_block = lru_cache(self._make_end), lru_cache(256)(self._make_block)

    def _make_end(self, embedding: bool, shared: bool = False) -> Unit:
        """Return the embedding or the head; a tied head with *shared* weights has none of its own."""
        layers = end_layers(self.model, self.view, self.framework, embedding)
        unit = self._make_unit(layers, StagePiece(range(0), embedding or shared, not embedding))
        if not embedding and self.view.trained_layers:
            unit = replace(unit, layers=tuple(replace(layer, weight_gradient=()) for layer in unit.layers))
        if shared:
            other = self.make_end(True)
            unit = replace(unit, held=_subtract(unit.held, other.held), trained=_subtract(unit.trained, other.trained))
        return unit

    def _make_block(self, block: LayerParts, recomputed: bool, wide: bool) -> Unit:
        """Return a layer of kind *block*, its products in the training precision or as *wide* as activations."""
        view = replace(self.view, precision=self.view.stored, fp8_parameters=False) if wide else self.view
        layers = block_layers(self.model, view, self.framework, block, recomputed)
        index = self.model.layers - 1 - self.model.blocks[::-1].index(block)  # the last, if any, is trained
        return self._make_unit(layers, StagePiece(range(index, index + 1), False, False))

    def _make_unit(self, layers: tuple[Layer, ...], piece: StagePiece) -> Unit:
        terms = (self.model, self.view, piece)
        return Unit(layers, held_shard(*terms), trained_shard(*terms))


_find_unit_maker = lru_cache(maxsize=1024)(UnitMaker)


class StageMaker:
    """Makes stages, one object for all pieces that run the same: what follows from it is worked out once."""

    def __init__(self, model: Model, strategy: Strategy, framework: Framework) -> None:
        self.model, self.strategy, self.framework = model, strategy, framework
        self.sizes = Sizes(model, strategy, framework)
        self.unit_maker = _find_unit_maker(model, layer_view(strategy), framework)
        self.data_maker = find_data_maker(model, strategy, framework)
        self._blocks = model.blocks
        self._count_frozen = partial(count_frozen, model, strategy.trained_layers)
        self._stages: dict[tuple[tuple[int, ...], int, int, bool, bool], Stage] = {}

    def stages(self, strategy: Strategy) -> tuple[Stage, ...]:
        """Return the stages of *strategy* in model order."""
        every, first = piece_kinds(self.model, strategy)
        if strategy.precision.scaled:  # layers may differ by their place in the model
            return tuple(map(self.stage, every))
        known = {index: self.stage(every[index]) for index in set(first)}
        return tuple([known[index] for index in first])

    def stage(self, piece: StagePiece) -> Stage:
        # Blocks of a kind are one object.
        blocks = tuple(map(id, self._blocks[piece.layers.start : piece.layers.stop]))
        wide, frozen = len(piece.layers) - self._quantised_layers(piece), self._count_frozen(piece.layers)
        key = (blocks, wide, frozen, piece.embedding, piece.head)
        if key not in self._stages:
            self._stages[key] = self._make_stage(piece)
        return self._stages[key]

    def _quantised_layers(self, piece: StagePiece) -> int:
        """Return the layers of *piece* that multiply in the training precision; the model's last may stay wide."""
        if not self.strategy.precision.scaled:
            return len(piece.layers)
        return min(len(piece.layers), max(0, self.model.layers - self.framework.wide_layers - piece.layers.start))

    def _make_stage(self, piece: StagePiece) -> Stage:
        units = [*self._reference_units(piece), *self._units(piece)]
        if self.strategy.offload.activations:
            units = offload_activations(units)
        if self.sizes.gathers_boundary:
            units = _gather_arrivals(self.sizes, piece, units)
        plan = self.sizes.plan
        if plan.gathered in (Gathered.EACH_PASS, Gathered.EACH_MICRO_BATCH):
            units = self.data_maker.gather_units(units)
        if plan.reduced is Reduced.EACH_MICRO_BATCH:
            units = self.data_maker.reduce_units(units)
        once = self.data_maker.once_per_step(piece, units)
        body = tuple(fold_units([unit.layers for unit in units]))
        return Stage(body, epilogue=once.epilogue, varied=self.data_maker.vary(body, units, once))

    def _reference_units(self, piece: StagePiece) -> list[Unit]:
        """Return the forward of DPO's frozen reference: the model as it was, or without its adapters."""
        if self.strategy.objective is not Objective.DPO:
            return []
        without = NO_TARGETS if self.strategy.lora_rank else ()
        frozen = replace(self.strategy, objective=Objective.SFT, lora_targets=without, recompute=NO_RECOMPUTE)
        units = StageMaker(self.model, frozen, replace(self.framework, loop_kernels=0))._units(piece)
        known = {id(unit): _forward_only(unit, "reference") for unit in units}
        units = [known[id(unit)] for unit in units]
        if piece.embedding and self.strategy.lora_rank and self.sizes.eager_modules:
            # Adapters are switched off before the reference runs, and on again after it.
            visits = SWITCH_KERNELS * count_adapted(self.model, self.strategy.lora_targets)
            first, *layers = units[0].layers
            *ops, last = first.forward
            switched = replace(first, forward=(*ops, replace(last, kernels=last.kernels + visits)))
            units[0] = replace(units[0], layers=(switched, *layers))
        return units

    def _units(self, piece: StagePiece) -> list[Unit]:
        """Return embedding, transformer layers and head as far as the piece holds them."""
        units = [self.unit_maker.make_end(True)] if piece.embedding else []
        recomputed = self.strategy.recompute.whole_layers(len(piece.layers))
        on_host = self.strategy.offload.layers(len(piece.layers))
        quantised = self._quantised_layers(piece)
        blocks = self._blocks[piece.layers.start : piece.layers.stop]
        for start, stop in pairwise(sorted({0, recomputed, on_host, quantised, len(blocks)})):
            for block, run in groupby(blocks[start:stop]):  # most layers are like the one before
                unit = self.unit_maker.make_block(block, start < recomputed, start >= quantised)
                if start < on_host:
                    saved = count_saved(self.model, self.strategy, block, self.framework)
                    unit = replace(unit, leaving=round(saved.after(start < recomputed)))
                units += [unit] * len(list(run))
        frozen = self._count_frozen(piece.layers) + piece.embedding if self.strategy.trained_layers else 0
        passive = {id(unit): _forward_only(unit) for unit in units[:frozen]}
        units[:frozen] = [passive[id(unit)] for unit in units[:frozen]]
        if piece.head:
            # A tied head that shares its stage with the embedding has no weights of its own.
            units.append(self.unit_maker.make_end(False, self.model.tied and piece.embedding))
            if self.strategy.mtp_layers:  # the head's unit holds the module's weights, which all of them share
                terms = (self.model, self.unit_maker.view, self.framework)
                parts = [block_layers(*terms, block, False) for block in self.model.next_token_blocks]
                layers = next_token_layers(self.sizes, tuple(chain.from_iterable(parts)))
                units += [Unit(layers, NOTHING, NOTHING)] * self.strategy.mtp_layers
        return units


_find_stage_maker = lru_cache(maxsize=1024)(StageMaker)
"""The same one for strategies whose stages run the same."""


@lru_cache(maxsize=1024)
def end_layers(model: Model, strategy: Strategy, framework: Framework, embedding: bool) -> tuple[Layer, ...]:
    """Return the layers of one end of the model, under the view of a layer."""
    sizes = Sizes(model, strategy, framework)
    layers = embedding_layers(sizes) if embedding else head_layers(sizes)
    return _block_host(layers) if framework.execution is Execution.BLOCKING else layers


@lru_cache(maxsize=4096)
def block_layers(
    model: Model, strategy: Strategy, framework: Framework, block: LayerParts, recomputed: bool
) -> tuple[Layer, ...]:
    """Return one transformer layer, completely *recomputed* or not, under the view of a layer."""
    sizes = Sizes(model, strategy, framework)
    mixer, feed_forward = _halves(sizes, block)
    layers = mixer + feed_forward
    if recomputed:
        layers = recompute_block(layers, not sizes.fused and framework.stops_early, hooks=sizes.eager_modules)
    elif sizes.alternates_matmuls:
        # It knows no recurrent mixers, which save everything.
        known = layers if block.mixer is Mixer.NONE or KINDS[block.mixer].alternates else feed_forward
        layers = (*layers[:-1], prepend_backward(layers[-1], alternate_matmuls(sizes, known)))
    elif strategy.recompute.selected:
        layers = recompute_modules(layers, strategy.recompute.selected)
    if framework.execution is Execution.PARTIAL_GRAPHS:
        layers = tuple(replace(layer, captured=layer.role not in UNCAPTURED) for layer in layers)
    return _block_host(layers) if framework.execution is Execution.BLOCKING else layers


def _block_host(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return *layers* under a host that issues an op when the one before it has ended."""
    blocking = []
    for layer in layers:
        phases = [tuple([replace(op, host_reads=True) for op in layer.ops(phase)]) for phase in Phase]
        blocking.append(replace(layer, forward=phases[0], input_gradient=phases[1], weight_gradient=phases[2]))
    return tuple(blocking)


def _halves(sizes: Sizes, block: LayerParts) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Return mixer and feed-forward, each made once for all kinds of blocks that have it."""
    model, view, framework = sizes.model, sizes.strategy, sizes.framework
    # How experts are spread does not change the mixer.
    dense = view if view.layout.ep == 1 else replace(view, layout=replace(view.layout, ep=1, expert_tp=0))
    mixer = _half_layers(Sizes(model, dense, framework), replace(block, feed_forward=FeedForward.NONE))
    feed_forward = _half_layers(sizes, LayerParts(Mixer.NONE, block.feed_forward))
    if model.shared_norm and block.mixer is Mixer.ATTENTION:
        norms = (Role.MLP_NORM, Role.EXPERTS_NORM)
        feed_forward = tuple(layer for layer in feed_forward if layer.role not in norms)
    return mixer, feed_forward


@lru_cache(maxsize=8192)
def _half_layers(sizes: Sizes, half: LayerParts) -> tuple[Layer, ...]:
    return tuple(layer for kind in kinds_of(half.mixer, half.feed_forward) for layer in kind.operators(sizes, half))


def _gather_arrivals(sizes: Sizes, piece: StagePiece, units: list[Unit]) -> list[Unit]:
    """Gather from the tensor ranks what other stages send, before it is used."""
    size = sizes.activation_bytes
    if not units:  # an empty piece hands on what arrives
        return units
    if not piece.embedding:
        layers = units[0].layers
        gather = collective("arriving tp all-gather", C.ALL_GATHER, size, Group.TP)
        first = replace(layers[0], forward=(gather, *layers[0].forward))
        units = [replace(units[0], layers=(first, *layers[1:])), *units[1:]]
    if not piece.head:
        layers = units[-1].layers
        gather = collective("arriving gradient tp all-gather", C.ALL_GATHER, size, Group.TP)
        units = [*units[:-1], replace(units[-1], layers=(*layers[:-1], prepend_backward(layers[-1], (gather,))))]
    return units


def _forward_only(unit: Unit, prefix: str = "") -> Unit:
    """Return *unit* frozen, without a backward, its ops named with *prefix* if they run next to the trained ones.

    These record nothing for a backward: a host issues a layer in 0.75 of the time (Qwen3 0.6B and Llama 3.2 1B with 64
    tokens, host of an H200), as if every second element-wise kernel were free.
    """
    layers = []
    for layer in unit.layers:
        ops = enumerate(rename_ops(prefix, layer.forward) if prefix else ())
        renamed = tuple(
            replace(op, kernels=(op.kernels + index % 2) // 2) if isinstance(op.work, Elementwise) else op
            for index, op in ops
        )
        layers.append(replace(layer, forward=renamed or layer.forward, input_gradient=(), weight_gradient=()))
    return Unit(tuple(layers), unit.held, NOTHING)


def _subtract(shard: Shard, other: Shard) -> Shard:
    rest = shard - other
    return Shard(max(0, rest.dense), rest.experts, max(0, rest.unquantised))


def generate(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> Workload:
    """Return the work of *model* in one step under *strategy*: one stage per pipeline piece, in model order."""
    check(model, strategy, framework=framework)
    maker = _find_stage_maker(model, _stage_view(strategy), framework)
    return Workload(
        stages=maker.stages(strategy),
        layout=strategy.layout,
        micro_batches=strategy.micro_batches,
        boundary_bytes=maker.sizes.boundary_bytes if strategy.layout.pp > 1 else None,
        name=model.name,
        source="generated",
        notes=(
            ("model", model.name),
            ("micro_batch", str(strategy.micro_batch)),
            ("global_batch", str(strategy.global_batch)),
            ("seq", str(strategy.seq)),
        ),
    )


def _stage_view(strategy: Strategy) -> Strategy:
    """Return *strategy* as far as what one stage runs depends on it: on whether another stage holds a copy of
    its layers, but not on how stages follow one another.
    """
    layout, overlap = strategy.layout, strategy.overlap
    if layout.pp > 2 or layout.vpp > 1:
        layout = replace(layout, pp=min(2, layout.pp), vpp=1)
    if overlap.experts or not overlap.transfers:
        overlap = replace(overlap, transfers=True, experts=False)
    copied = find_schedule(strategy.schedule, layout.pp).copies > 1
    schedule = strategy.schedule if copied else ScheduleKind.ONE_F_ONE_B
    return replace(strategy, layout=layout, schedule=schedule, stage_layers=(), overlap=overlap)
