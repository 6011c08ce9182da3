"""Model x Strategy x Framework -> Workload: every op of a step with its shapes, and every collective."""

from functools import lru_cache
from itertools import chain, pairwise

from stepcast.generate.overlap import Unit, Units, find_data_maker, map_neighbours, offload_activations
from stepcast.generate.recompute import alternate_matmuls, prepend_backward, recompute_block, recompute_modules
from stepcast.ir.architecture import NOTHING, Shard
from stepcast.ir.framework import MEGATRON_CORE, Execution, Framework
from stepcast.ir.layers.ends import SWITCH_KERNELS, embedding_layers, head_layers, next_token_layers
from stepcast.ir.layers.kernels import C, collective
from stepcast.ir.layers.kinds import KINDS, count_adapted, count_saved, kinds_of
from stepcast.ir.layers.operators import rename_ops
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Group
from stepcast.ir.legality import check
from stepcast.ir.model import (
    Model,
    StagePiece,
    count_blocks,
    count_frozen,
    held_shard,
    piece_kinds,
    shares_words,
    trained_shard,
)
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.sharding import Gathered, Reduced
from stepcast.ir.strategy import NO_RECOMPUTE, NO_TARGETS, Objective, Strategy, layer_view
from stepcast.ir.types import ByIdentity, replace
from stepcast.ir.work import Elementwise
from stepcast.ir.workload import Layer, NumberedRuns, Phase, Role, Stage, Workload, fold_runs

# Layers whose sizes depend on the router: no captured graph can hold them (Megatron-Core's cuda_graph_scope).
UNCAPTURED = (Role.DISPATCH, Role.EXPERTS_UP, Role.EXPERTS_DOWN, Role.COMBINE)


class UnitMaker:
    """Makes units under the view of a layer, for all strategies that spread the same layers in any way."""

    def __init__(self, model: Model, view: Strategy, framework: Framework) -> None:
        self.model, self.view, self.framework = model, view, framework
        self.make_end, self.make_block = lru_cache(self._make_end), lru_cache(256)(self._make_block)

    def _make_end(self, piece: StagePiece, embedding: bool, frozen: bool = False) -> Unit:
        """Return the embedding or the head of *piece*; a tied head next to its embedding has no weights of its own."""
        both, view = piece.embedding and piece.head, replace(self.view, recompute=NO_RECOMPUTE)
        tied, shared = both and shares_words(self.model, view), both and self.model.tied and not embedding
        layers = end_layers(self.model, view, self.framework, piece.layers if embedding else None, tied and embedding)
        unit = self._make_unit(layers, StagePiece(range(0), embedding or shared, not embedding, piece.copy))
        if not embedding and self.view.trained_layers:
            unit = replace(unit, layers=tuple(replace(layer, weight_gradient=()) for layer in unit.layers))
        if shared:
            other = self.make_end(piece, True)
            unit = replace(unit, held=_subtract(unit.held, other.held), trained=_subtract(unit.trained, other.trained))
        return _forward_only(unit) if frozen else unit

    def _make_block(self, block: LayerParts, recomputed: bool, leaves: bool, frozen: bool, wide: bool) -> Unit:
        """Return a layer of kind *block*, its products in the training precision or as *wide* as activations, whose
        activations may leave for the host.
        """
        view = replace(self.view, precision=self.view.stored, fp8_parameters=False) if wide else self.view
        layers = block_layers(self.model, view, self.framework, block, recomputed)
        index = self.model.layers - 1 - self.model.blocks[::-1].index(block)  # the last, if any, is trained
        unit = self._make_unit(layers, StagePiece(range(index, index + 1), False, False))
        if leaves:
            saved = count_saved(self.model, self.view, block, self.framework)
            unit = replace(unit, leaving=round(saved.after(recomputed)))
        return _forward_only(unit) if frozen else unit

    def _make_unit(self, layers: tuple[Layer, ...], piece: StagePiece) -> Unit:
        terms = (self.model, self.view, piece)
        return Unit(layers, held_shard(*terms), trained_shard(*terms))


@lru_cache(maxsize=1024)
def _make_next_token(model: Model, view: Strategy, framework: Framework) -> Unit:
    """Return one module for multi-token prediction, without its weights: the head has those, once for all of them."""
    parts = [block_layers(model, view, framework, block, False) for block in model.next_token_blocks]
    layers = next_token_layers(Sizes(model, view, framework), tuple(chain.from_iterable(parts)))
    return Unit(layers, NOTHING, NOTHING)


_find_unit_maker = lru_cache(maxsize=1024)(UnitMaker)
_STAGES: ByIdentity[Stage] = ByIdentity(8192)
"""One object for all pieces of all strategies that run the same: what follows from it is worked out once."""
_MODEL_STAGES: ByIdentity[tuple[tuple[Stage, ...], int | None]] = ByIdentity(2048)
"""The stages of a strategy, and the bytes that they send to one another."""


class StageMaker:
    """Makes the stages of a strategy."""

    def __init__(self, model: Model, strategy: Strategy, framework: Framework) -> None:
        self.model, self.strategy, self.framework = model, strategy, framework
        self.sizes = Sizes(model, strategy, framework)
        self.unit_maker = _find_unit_maker(model, layer_view(strategy), framework)
        self.data_maker = find_data_maker(model, strategy, framework)

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages in model order."""
        every, first = piece_kinds(self.model, self.strategy)
        if self.strategy.precision.scaled:  # layers may differ by their place in the model
            return tuple(map(self.stage, every))
        known = {index: self.stage(every[index]) for index in set(first)}
        return tuple([known[index] for index in first])

    def stage(self, piece: StagePiece) -> Stage:
        runs = [*self._reference_units(piece), *self._units(piece)]
        units, counts = [unit for unit, _ in runs], [count for _, count in runs]
        return _STAGES.get((self.data_maker, *units), lambda: self._make_stage(piece, runs), *counts)

    def _make_stage(self, piece: StagePiece, units: Units) -> Stage:
        if self.strategy.offload.activations:
            units = offload_activations(units)
        if self.sizes.gathers_boundary:
            units = _gather_arrivals(self.sizes, piece, units)
        plan = self.data_maker.sizes.plan
        if plan.gathered in (Gathered.EACH_PASS, Gathered.EACH_MICRO_BATCH):
            units = self.data_maker.gather_units(units)
        if plan.reduced is Reduced.EACH_MICRO_BATCH:
            units = self.data_maker.reduce_units(units)
        once = self.data_maker.once_per_step(piece, units)
        own = NumberedRuns.of([(unit.layers, count) for unit, count in units])
        return Stage(tuple(fold_runs(own)), epilogue=once.epilogue, varied=self.data_maker.vary(own, units, once))

    def _reference_units(self, piece: StagePiece) -> Units:
        """Return the forward of DPO's frozen reference: the model as it was, or without its adapters."""
        if self.strategy.objective is not Objective.DPO:
            return []
        without = NO_TARGETS if self.strategy.lora_rank else ()
        frozen = replace(self.strategy, objective=Objective.SFT, lora_targets=without, recompute=NO_RECOMPUTE)
        units = StageMaker(self.model, frozen, replace(self.framework, loop_kernels=0))._units(piece)
        # Adapters are switched off before the reference runs, and on again after it.
        switches = piece.embedding and self.strategy.lora_rank and self.sizes.eager_modules
        visits = SWITCH_KERNELS * count_adapted(self.model, self.strategy.lora_targets, piece.layers) if switches else 0
        every = enumerate(units)
        return [
            (_REFERENCES.of(unit, _make_reference, 0 if index else visits), count) for index, (unit, count) in every
        ]

    def _units(self, piece: StagePiece) -> Units:
        """Return embedding, transformer layers and head as far as the piece holds them."""
        model, strategy, layers = self.model, self.strategy, piece.layers
        count, frozen = len(layers), count_frozen(model, strategy.trained_layers, layers)
        recomputed, leaving = strategy.recompute.whole_layers(count), strategy.offload.layers(count)
        quantised = count
        if strategy.precision.scaled:  # the model's last layers may multiply in the format of activations
            quantised = min(count, max(0, model.layers - self.framework.wide_layers - layers.start))
        units: Units = []
        # Layers matter to a training loop alone, which visits them.
        ends = replace(piece, layers=layers if self.framework.loop_kernels else range(0))
        if piece.embedding:
            units.append((self.unit_maker.make_end(ends, True, frozen=strategy.trained_layers > 0), 1))
        for start, stop in pairwise(sorted({0, recomputed, leaving, frozen, quantised, count})):
            flags = start < recomputed, start < leaving, start < frozen, start >= quantised
            for block, repeat in count_blocks(model, layers[start:stop]):
                units.append((self.unit_maker.make_block(block, *flags), repeat))
        if piece.head:
            units.append((self.unit_maker.make_end(ends, False), 1))
            if strategy.mtp_layers:
                units.append((_make_next_token(model, self.unit_maker.view, self.framework), strategy.mtp_layers))
        return units


@lru_cache(maxsize=1024)
def end_layers(
    model: Model, strategy: Strategy, framework: Framework, embeds: range | None, tied: bool = False
) -> tuple[Layer, ...]:
    """Return the head, or the embedding of a stage that holds the layers *embeds*, under the view of a layer."""
    sizes = Sizes(model, strategy, framework)
    layers = head_layers(sizes) if embeds is None else embedding_layers(sizes, tied, embeds)
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
    # What is recomputed changes neither half by itself, and how experts are spread not the mixer.
    view = replace(view, recompute=NO_RECOMPUTE)
    dense = view if view.layout.ep == 1 else replace(view, layout=replace(view.layout, ep=1, expert_tp=0))
    mixer = _half_layers(Sizes(model, dense, framework), replace(block, feed_forward=FeedForward.NONE))
    feed_forward = _half_layers(Sizes(model, view, framework), LayerParts(Mixer.NONE, block.feed_forward))
    if model.shared_norm and block.mixer is Mixer.ATTENTION:
        norms = (Role.MLP_NORM, Role.EXPERTS_NORM)
        feed_forward = tuple(layer for layer in feed_forward if layer.role not in norms)
    return mixer, feed_forward


@lru_cache(maxsize=8192)
def _half_layers(sizes: Sizes, half: LayerParts) -> tuple[Layer, ...]:
    return tuple(layer for kind in kinds_of(half.mixer, half.feed_forward) for layer in kind.operators(sizes, half))


def _gather_arrivals(sizes: Sizes, piece: StagePiece, units: Units) -> Units:
    """Gather from the tensor ranks what other stages send, before it is used."""

    def gather(before: Unit | None, unit: Unit, after: Unit | None) -> Unit:
        layers, size = list(unit.layers), sizes.activation_bytes
        if before is None and not piece.embedding:
            arriving = collective("arriving tp all-gather", C.ALL_GATHER, size, Group.TP)
            layers[0] = replace(layers[0], forward=(arriving, *layers[0].forward))
        if after is None and not piece.head:
            arriving = collective("arriving gradient tp all-gather", C.ALL_GATHER, size, Group.TP)
            layers[-1] = prepend_backward(layers[-1], (arriving,))
        return replace(unit, layers=tuple(layers))

    return map_neighbours(gather, units)


def _forward_only(unit: Unit) -> Unit:
    """Return *unit* frozen, without a backward."""
    layers = tuple(replace(layer, input_gradient=(), weight_gradient=()) for layer in unit.layers)
    return Unit(layers, unit.held, NOTHING)


def _make_reference(unit: Unit, visits: int) -> Unit:
    """Return *unit* without a backward, its ops named so that they can run next to the trained ones; its host issues so
    many kernels more after the first layer (*visits*).

    It records nothing for a backward: a host issues a layer in 0.75 of the time (Qwen3 0.6B and Llama 3.2 1B with 64
    tokens, host of an H200), as if every second element-wise kernel were free.
    """
    forwards = []
    for layer in unit.layers:
        ops = enumerate(rename_ops("reference", layer.forward))
        forwards.append(
            [
                replace(op, kernels=(op.kernels + index % 2) // 2) if isinstance(op.work, Elementwise) else op
                for index, op in ops
            ]
        )
    if visits:
        forwards[0][-1] = replace(forwards[0][-1], kernels=forwards[0][-1].kernels + visits)
    pairs = zip(unit.layers, forwards, strict=True)
    layers = tuple(replace(layer, forward=tuple(forward)) for layer, forward in pairs)
    return _forward_only(replace(unit, layers=layers))


_REFERENCES: ByIdentity[Unit] = ByIdentity(4096)


def _subtract(shard: Shard, other: Shard) -> Shard:
    rest = shard - other
    return Shard(max(0, rest.dense), rest.experts, max(0, rest.unquantised))


def generate(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> Workload:
    """Return the work of *model* in one step under *strategy*: one stage per pipeline piece, in model order."""
    check(model, strategy, framework=framework)

    def make() -> tuple[tuple[Stage, ...], int | None]:
        maker = StageMaker(model, strategy, framework)
        return maker.stages(), maker.sizes.boundary_bytes if strategy.layout.pp > 1 else None

    stages, boundary_bytes = _MODEL_STAGES.get((model, strategy, framework), make)
    return Workload(
        stages=stages,
        layout=strategy.layout,
        micro_batches=strategy.micro_batches,
        boundary_bytes=boundary_bytes,
        name=model.name,
        source="generated",
        notes=(
            ("model", model.name),
            ("micro_batch", str(strategy.micro_batch)),
            ("global_batch", str(strategy.global_batch)),
            ("seq", str(strategy.seq)),
        ),
    )
