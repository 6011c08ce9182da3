"""One pipeline piece: its layers, what is recomputed, and the data-parallel communication beside them."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from stepcast.generate.attention import attention_layers
from stepcast.generate.data import StepEnd, epilogue
from stepcast.generate.delta import delta_layers
from stepcast.generate.ends import embedding_layers, head_layers
from stepcast.generate.further import entry_layers, exit_layers
from stepcast.generate.mamba import mamba_layers
from stepcast.generate.mlp import dense_layers, expert_layers
from stepcast.generate.offload import offloading
from stepcast.generate.overlap import gathering, once_per_step, reducing
from stepcast.generate.parts import Ops, collective, renamed
from stepcast.generate.recompute import before, recomputed, run_again
from stepcast.generate.selective import selective_layers
from stepcast.generate.sizes import Sizes
from stepcast.generate.units import Unit
from stepcast.ir.framework import Execution, Framework, SelectiveRule
from stepcast.ir.group import Group
from stepcast.ir.model import Model
from stepcast.ir.model_parts import FeedForward, Mixer
from stepcast.ir.model_parts import LayerParts as Kind
from stepcast.ir.saved import count_saved
from stepcast.ir.sharding import Gathered, Reduced
from stepcast.ir.stages import StagePiece
from stepcast.ir.strategy import NO_OFFLOAD, RecomputeKind, ScheduleKind, Sharding, Strategy, TrainingKind
from stepcast.ir.trainable import held_shard, trained_matrices, trained_shard
from stepcast.ir.weights import NOTHING, Shard, WeightPart
from stepcast.ir.work import Collective, CollectiveKind, Elementwise, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Op, OpPart, Role, Stage, fold_units

# Layers whose sizes depend on the router: no captured graph can hold them (Megatron-Core's cuda_graph_scope).
UNCAPTURED = (Role.DISPATCH, Role.EXPERTS_UP, Role.EXPERTS_DOWN, Role.COMBINE)
RECURRENT = (
    Role.MAMBA_NORM,
    Role.MAMBA_IN,
    Role.MAMBA_STEPS,
    Role.MAMBA_SCAN,
    Role.MAMBA_GROUP_NORM,
    Role.MAMBA_OUT,
    Role.MAMBA_POST_NORM,
    Role.DELTA_NORM,
    Role.DELTA_IN,
    Role.DELTA_RULE,
    Role.DELTA_GATE_NORM,
    Role.DELTA_OUT,
    Role.DELTA_POST_NORM,
)


class StageMaker:
    """Makes stages, one object for all pieces that run the same: what follows from it is worked out once."""

    def __init__(self, model: Model, strategy: Strategy, framework: Framework) -> None:
        self.model, self.strategy, self.framework = model, strategy, framework
        self.sizes = Sizes(model, strategy, framework)
        self._alike = layer_view(strategy)
        self._known: dict[tuple[Kind, bool, bool, bool], Unit] = {}
        self._blocks = model.blocks
        self._stages: dict[tuple[tuple[int, ...], int, bool, bool], Stage] = {}

    def stage(self, piece: StagePiece) -> Stage:
        # Blocks of a kind are one object.
        blocks = tuple(map(id, self._blocks[piece.layers.start : piece.layers.stop]))
        key = (blocks, len(piece.layers) - self._narrow(piece), piece.embedding, piece.head)
        if key not in self._stages:
            self._stages[key] = self._made(piece)
        return self._stages[key]

    def _narrow(self, piece: StagePiece) -> int:
        """Layers of *piece* that multiply in the training precision; the model's last may stay wide."""
        wide = self.framework.wide_layers if self.strategy.precision.scaled else 0
        return min(len(piece.layers), max(0, self.model.layers - wide - piece.layers.start))

    def _made(self, piece: StagePiece) -> Stage:
        units = self._units(piece)
        if self.strategy.offload.activations:
            units = offloading(units)
        if self.sizes.gathers_boundary:
            units = _arriving(self.sizes, piece, units)
        plan = self.sizes.plan
        if plan.gathered in (Gathered.EACH_PASS, Gathered.EACH_MICRO_BATCH):
            units = gathering(self.sizes, units)
        if plan.reduced is Reduced.EACH_MICRO_BATCH:
            units = reducing(self.sizes, units)
        once = once_per_step(self.sizes, units, first_piece=piece.embedding)
        return Stage(
            body=tuple(fold_units([unit.layers for unit in units])),
            epilogue=epilogue(self.sizes, self._end(piece), once.reduce, once.gather),
            variations=once.variations,
            in_turn=True,
        )

    def _units(self, piece: StagePiece) -> list[Unit]:
        """Embedding, transformer layers and head as far as the piece holds them."""
        none, start = range(piece.layers.start, piece.layers.start), piece.layers.start
        units = []
        if piece.embedding:
            layers = end_layers(self.model, self._alike, self.framework, embedding=True)
            units.append(self._unit(layers, StagePiece(none, True, False)))
        whole = self.strategy.recompute.whole_layers(len(piece.layers))
        on_host = self.strategy.offload.layers(len(piece.layers))
        blocks = self.model.blocks[start : piece.layers.stop]
        # Most layers are like the one before.
        narrow = self._narrow(piece)
        kinds = ((kind, at < whole, at < on_host, at >= narrow) for at, kind in enumerate(blocks))
        for key, run in groupby(kinds):
            units += [self._block(*key)] * len(list(run))
        if piece.head:
            # A tied head that shares its stage with the embedding has no weights of its own.
            shared = self.model.tied and piece.embedding
            held = StagePiece(none, shared, True)
            unit = self._unit(end_layers(self.model, self._alike, self.framework, embedding=False), held)
            if shared:
                ends = units[0]
                unit = replace(unit, held=_less(unit.held, ends.held), trained=_less(unit.trained, ends.trained))
            units.append(unit)
            if self.strategy.further_tokens:
                units += [self._further()] * self.strategy.further_tokens
        return units

    def _block(self, kind: Kind, again: bool, on_host: bool, wide: bool) -> Unit:
        """A layer of *kind*, recomputed as a whole or not, its activations sent to the host or not, its
        products in the training precision or as *wide* as activations.
        """
        if (kind, again, on_host, wide) not in self._known:
            view = replace(self._alike, precision=self._alike.stored) if wide else self._alike
            layers = block_layers(self.model, view, self.framework, kind, again)
            at = self.model.blocks.index(kind)
            unit = self._unit(layers, StagePiece(range(at, at + 1), False, False))
            if on_host:
                kept = count_saved(self.model, self.strategy, kind, self.framework)
                unit = replace(unit, leaving=round(kept.after(again)))
            self._known[kind, again, on_host, wide] = unit
        return self._known[kind, again, on_host, wide]

    def _further(self) -> Unit:
        """One further token; the head's unit holds the module's weights, which all of them share."""
        blocks = (
            layer
            for kind in self.model.next_token_blocks
            for layer in block_layers(self.model, self._alike, self.framework, kind, False)
        )
        return Unit((*entry_layers(self.sizes), *blocks, *exit_layers(self.sizes)), NOTHING, NOTHING)

    def _unit(self, layers: tuple[Layer, ...], piece: StagePiece) -> Unit:
        model, strategy = self.model, self.strategy
        return Unit(layers, held_shard(model, strategy, piece), trained_shard(model, strategy, piece))

    def _end(self, piece: StagePiece) -> StepEnd:
        model, strategy, layout = self.model, self.strategy, self.strategy.layout
        optimizer = self.framework.optimizer
        full = strategy.training is TrainingKind.FULL
        norms = _norms(model, piece.layers.start, piece.layers.stop)
        apart = model.tied and layout.pp > 1 and piece.embedding != piece.head
        width = model.embedding_width or model.hidden
        return StepEnd(
            held=held_shard(model, strategy, piece),
            trained=trained_shard(model, strategy, piece),
            norms=norms if full else 0,
            tied_embedding=self.sizes.vocab * width if apart and full else 0,
            matrices=trained_matrices(model, strategy, piece) if optimizer.knows_matrices else (),
        )


@lru_cache(maxsize=1024)
def _norms(model: Model, start: int, stop: int) -> int:
    """Parameters of the norms of some layers."""
    return sum(
        count * weight.elements
        for block, count in Counter(model.blocks[start:stop]).items()
        for weight in model.block_weights(block)
        if weight.part is WeightPart.NORM
    )


def layer_view(strategy: Strategy) -> Strategy:
    """*strategy* as far as what one layer computes depends on it: the same for all that spread the same
    layers over more replicas or other stages.
    """
    return replace(
        strategy,
        layout=replace(strategy.layout, dp=1, pp=1, vpp=1, shard=0),
        # One micro-batch or several: the sum of gradients needs kernels of its own from the second on.
        global_batch=strategy.micro_batch * min(2, strategy.micro_batches),
        schedule=ScheduleKind.ONE_F_ONE_B,
        stage_layers=(),
        sharding=Sharding.NONE,
        reshard=None,
        offload=NO_OFFLOAD,
        overlap=replace(strategy.overlap, gradients=True, parameters=True, transfers=True, experts=False),
    )


@lru_cache(maxsize=1024)
def end_layers(model: Model, strategy: Strategy, framework: Framework, embedding: bool) -> tuple[Layer, ...]:
    """The layers of one end of the model, under the view of a layer."""
    sizes = Sizes(model, strategy, framework)
    layers = embedding_layers(sizes) if embedding else head_layers(sizes)
    return _waited_for(layers) if framework.execution is Execution.BLOCKING else layers


@lru_cache(maxsize=4096)
def block_layers(model: Model, strategy: Strategy, framework: Framework, kind: Kind, whole: bool) -> tuple[Layer, ...]:
    """One transformer layer, recomputed as a *whole* or not, under the view of a layer."""
    sizes = Sizes(model, strategy, framework)
    layers = _recomputed(sizes, _halves(sizes, kind), whole)
    if framework.execution is Execution.PARTIAL_GRAPHS:
        layers = tuple(replace(layer, captured=layer.role not in UNCAPTURED) for layer in layers)
    return _waited_for(layers) if framework.execution is Execution.BLOCKING else layers


def _waited_for(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """*layers* under a host that issues an op when the one before it has ended."""
    return tuple(
        replace(
            layer,
            forward=_read(layer.forward),
            input_gradient=_read(layer.input_gradient),
            weight_gradient=_read(layer.weight_gradient),
        )
        for layer in layers
    )


def _read(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(replace(op, host_reads=True) for op in ops)


def _halves(sizes: Sizes, kind: Kind) -> tuple[Layer, ...]:
    """Mixer and feed-forward, each made once for all kinds of blocks that have it."""
    model, view, framework = sizes.model, sizes.strategy, sizes.framework
    # How experts are spread does not change what mixes tokens.
    alone = view if view.layout.ep == 1 else replace(view, layout=replace(view.layout, ep=1, expert_tp=0))
    layers = _mixing(model, alone, framework, replace(kind, feed_forward=FeedForward.DENSE))
    layers += _feeding(model, view, framework, kind.feed_forward)
    if model.shared_norm and kind.mixer is Mixer.ATTENTION:
        layers = tuple(layer for layer in layers if layer.role not in (Role.MLP_NORM, Role.EXPERTS_NORM))
    return layers


@lru_cache(maxsize=4096)
def _mixing(model: Model, view: Strategy, framework: Framework, kind: Kind) -> tuple[Layer, ...]:
    sizes = Sizes(model, view, framework)
    match kind.mixer:
        case Mixer.ATTENTION:
            return attention_layers(sizes, kind)
        case Mixer.MAMBA:
            return mamba_layers(sizes)
        case Mixer.SELECTIVE:
            return selective_layers(sizes)
        case Mixer.DELTA:
            return delta_layers(sizes)
    return ()


@lru_cache(maxsize=4096)
def _feeding(model: Model, view: Strategy, framework: Framework, kind: FeedForward) -> tuple[Layer, ...]:
    sizes = Sizes(model, view, framework)
    match kind:
        case FeedForward.DENSE:
            return dense_layers(sizes)
        case FeedForward.EXPERTS:
            return expert_layers(sizes)
    return ()


def _recomputed(sizes: Sizes, layers: tuple[Layer, ...], whole: bool) -> tuple[Layer, ...]:
    """The backward of what is recomputed starts with its forward."""
    recompute = sizes.strategy.recompute
    if whole:
        return run_again(layers, stops_early=not sizes.fused and sizes.framework.stops_early)
    alternate = sizes.framework.selective is SelectiveRule.ALTERNATE_MATMULS
    if recompute.kind is RecomputeKind.SELECTIVE and alternate:
        return (*layers[:-1], before(layers[-1], renamed("recompute", _cheap_half(sizes, layers))))
    return recomputed(layers, recompute.selected)


def _cheap_half(sizes: Sizes, layers: tuple[Layer, ...]) -> Ops:
    """What torchtitan's selective recomputation runs again: element-wise work, gathers and every second
    matmul, that is key, output and up projections; attention and reductions are kept. It knows no Mamba
    blocks and no delta nets, which keep everything.
    """
    again: list[Op] = []
    for role, op in ((layer.role, op) for layer in layers if layer.role not in RECURRENT for op in layer.forward):
        match op.work:
            case Elementwise() if op.part not in (OpPart.RESIDUAL, OpPart.SUM):
                again.append(op)
            case Collective(kind=CollectiveKind.ALL_GATHER):
                again.append(op)
            case Matmul() | GroupedMatmul() if op.part is OpPart.PRODUCT:
                if role is Role.QKV:
                    again.append(replace(op, work=replace(op.work, n=sizes.key_width)))
                elif role is Role.ATTENTION_OUTPUT:
                    again.append(op)
                elif role in (Role.MLP_UP, Role.EXPERTS_UP, Role.SHARED_UP) and sizes.model.gated:
                    again.append(replace(op, work=replace(op.work, n=op.work.n // 2)))
    return tuple(again)


def _arriving(sizes: Sizes, piece: StagePiece, units: list[Unit]) -> list[Unit]:
    """What other stages send is gathered from the tensor ranks before it is used."""
    size = sizes.activation_bytes
    if not units:  # an empty piece hands on what arrives
        return units
    if not piece.embedding:
        layers = units[0].layers
        gather = collective("arriving tp all-gather", CollectiveKind.ALL_GATHER, size, Group.TP)
        first = replace(layers[0], forward=(gather, *layers[0].forward))
        units = [replace(units[0], layers=(first, *layers[1:])), *units[1:]]
    if not piece.head:
        layers = units[-1].layers
        gather = collective("arriving gradient tp all-gather", CollectiveKind.ALL_GATHER, size, Group.TP)
        units = [*units[:-1], replace(units[-1], layers=(*layers[:-1], before(layers[-1], (gather,))))]
    return units


def _less(shard: Shard, other: Shard) -> Shard:
    rest = shard - other
    return Shard(max(0, rest.dense), rest.experts, max(0, rest.unquantised))
