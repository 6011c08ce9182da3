"""Bytes of parameters, gradients and optimizer states on one rank, and of a checkpoint of them.

Per parameter of mixed-precision Adam: 2 for the weight, 4 (or 2) for its gradient, 12 for the fp32 copy and
two moments. ZeRO 1 splits the last over data-parallel ranks, ZeRO 2 the gradients as well, ZeRO 3 and FSDP
all (Rajbhandari et al. 2020, section 5); FSDP keeps one copy, in fp32, and gathers it in training precision.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from stepcast.hardware.cluster import Gpu
from stepcast.ir.architecture import Shard, WeightPart
from stepcast.ir.framework import Framework, Kernels, Modules, Offloaded, OptimizerKind
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model, StageKind, StagePiece, held_shard, trained_matrices, trained_shard
from stepcast.ir.sharding import Gathered, Reduced, ShardingPlan, gathered_bytes, plan_of, states_view
from stepcast.ir.strategy import BaseWeights, Objective, Strategy, TrainingKind
from stepcast.ir.types import FP32_BYTES, ByIdentity, DType

# Formats whose weights fused kernels keep quantised from one micro-batch to the next.
QUANTISED = (DType.FP8, DType.MXFP8, DType.NVFP4)
# GPUs whose matrix units multiply fp8 in either orientation.
EITHER_ORIENTATION = ("blackwell", "blackwell-ultra")


class PieceStates(NamedTuple):
    """Bytes of a piece on one rank, and parameters where named so."""

    parameters: float
    gradients: float
    optimizer: float
    host: float  # in the memory of the host instead
    buckets: float  # of gradients, which exist in addition to them
    trained: float  # parameters
    owned: float  # parameters whose states the rank keeps
    first_gradients: float  # of the first layer
    unsharded: float  # weights at the fullest moment
    unreduced: float  # gradients beyond the rank's share then


class StageStates(NamedTuple):
    """Bytes of a stage on one rank."""

    parameters: float
    gradients: float
    more_gradients: float  # copies of them
    optimizer: float
    host: float  # in the memory of the host instead
    buckets: float
    first_gradients: float  # of the first layer
    unsharded: float  # weights at the fullest moment
    unreduced: float  # gradients then
    lasting: float  # what the optimizer allocates in its first step and holds from then on
    update: float  # temporaries of an optimizer that is not fused


class UnitBytes(NamedTuple):
    """Bytes of a layer or an end of the model."""

    gathered: float
    unreduced: int  # parameters whose gradients wait to be reduced
    gradients: float


class StateBytes:
    """The states of a model under one strategy. The bytes of a parameter are found once for all pieces, in pairs: those
    of weights that products read quantised, and those of others.
    """

    def __init__(self, model: Model, strategy: Strategy, framework: Framework, orientations: int) -> None:
        """*orientations*: copies of each quantised weight."""
        self.model, self.strategy, self.framework = model, strategy, framework
        self.plan, self.offloaded = plan_of(strategy, framework), strategy.offload.optimizer
        stored, is_wide = strategy.weights.bytes, framework.keeps_fp32_weights(strategy)
        is_flat, optimizer = framework.kernels is Kernels.FUSED, framework.optimizer
        # As the layers use them: fused kernels keep them quantised from one micro-batch to the next, in addition to the
        # stored ones or, with parameters in fp8, instead of them.
        quantised = 0.0
        if strategy.precision in QUANTISED:
            quantised = (orientations if is_flat else int(strategy.fp8_parameters)) * strategy.precision.bytes
        self.unsharded = (quantised if strategy.fp8_parameters else stored + quantised, stored)
        # As the ranks that split them keep them.
        self.sharded = (strategy.precision.bytes if strategy.fp8_parameters else stored, stored)
        if strategy.base_weights is not BaseWeights.TRAINED:
            self.unsharded = self.sharded = (strategy.base_weights.bytes, stored)
        elif is_wide:
            self.sharded = (FP32_BYTES, FP32_BYTES)
        self.stored = FP32_BYTES if is_wide else stored
        self.adapter = FP32_BYTES if framework.fp32_adapters else self.stored
        # PyTorch's FSDP casts what it reduced to the format of the sharded weights (torch.distributed.fsdp,
        # MixedPrecisionPolicy); flat buffers keep theirs.
        casts = self.plan.splits_gradients and is_wide and not is_flat
        self.gradient = FP32_BYTES if casts else framework.gradient_dtype.bytes
        is_summed = self.plan.dense.ways * self.plan.dense.copies > 1 and not self.plan.splits_gradients
        self.copies_buckets = framework.overhead.bucket_copies and is_summed
        # The optimizer has weights of its own, besides those that layers use or ranks split.
        self.copies = optimizer.master_weights and strategy.weights is not DType.FP32 and not is_wide
        self.moments, self.moment = optimizer.moments, optimizer.moment_bytes
        self.find_unit = lru_cache(maxsize=256)(self._count_unit)

    def of_stages(self, kinds: list[StageKind]) -> list[StageStates]:
        """Return the states of each kind of stage, counted once for each list of them and for each piece."""
        return _STAGES.of(kinds, lambda kinds, sizes: [_join_pieces(kind.pieces, sizes) for kind in kinds], self)

    def find_piece(self, piece: StagePiece) -> PieceStates:
        """Return the states of *piece*."""
        held, trained = self.find_shards(piece)
        unsharded = self.unsharded_bytes(piece, held, trained)
        owned = self.plan.share(trained)
        first_gradients = self._find_layer(piece.layers[0]).gradients if piece.layers else 0.0
        states = self.states(piece, held, trained, owned)
        return PieceStates(*states, trained.total, owned, first_gradients, *unsharded)

    def _find_layer(self, layer: int) -> UnitBytes:
        """Return the bytes of a layer: those of the first of its kind, unless some are frozen."""
        layer = layer if self.strategy.trained_layers else self.model.blocks.index(self.model.blocks[layer])
        return self.find_unit(StagePiece(range(layer, layer + 1), False, False))

    def _count_unit(self, unit: StagePiece) -> UnitBytes:
        held, trained = self.find_shards(unit)
        part = self.plan.gathered_part(held)
        gathered = _weigh(part, self.unsharded) + gathered_bytes(self.strategy, part)
        return UnitBytes(gathered, self.plan.unreduced(trained).total, self.gradients(trained))

    def find_shards(self, piece: StagePiece) -> tuple[Shard, Shard]:
        """Return the weights that one rank holds of *piece*, and those that it trains."""
        shard = held_shard(self.model, self.strategy, piece)
        return shard, shard if self.strategy.trains_all_weights else trained_shard(self.model, self.strategy, piece)

    def states(
        self, piece: StagePiece, held: Shard, trained: Shard, owned: float
    ) -> tuple[float, float, float, float, float]:
        """Return the first five of PieceStates, which one rank keeps all the time; gradients as if none were freed."""
        parameters = 0.0
        for part, shard in self.plan.kinds(held):
            if part.collected:
                parameters += _weigh(shard, self.sharded) / part.ways
            else:
                parameters += _weigh(shard, self.unsharded)
        if self.strategy.training is TrainingKind.LORA:
            for part, shard in self.plan.kinds(trained):
                parameters += self.adapter * shard.total / (part.ways if part.collected else 1)
        elif self.strategy.objective is Objective.DPO:
            parameters *= 2  # the reference; under LoRA it is the model without its adapters
        gradients, optimizer, host = self.gradients(trained), self.optimizer(piece, owned), 0.0
        if self.offloaded:
            # The host has weights, moments and fp32 gradients of what it updates (Megatron-Core's
            # HybridDeviceOptimizer, DeepSpeed's ZeRO-Offload: 16 bytes a parameter); the GPU keeps what the software
            # does not move.
            weights = 0.0 if self.copies else self.stored
            host = self.offloaded * (optimizer + owned * (FP32_BYTES + weights))
            optimizer *= 1 - self.offloaded
            parameters = 0.0 if self.framework.offloaded is Offloaded.WEIGHTS else parameters
        return parameters, gradients, optimizer, host, gradients if self.copies_buckets else 0.0

    def gradients(self, trained: Shard) -> float:
        """Return the bytes of all gradients that one rank keeps."""
        total, is_split = 0.0, self.plan.splits_gradients
        for part, shard in self.plan.kinds(trained):
            total += self.gradient * shard.total / (part.ways if is_split else 1)
        moves = is_split and self.framework.offloaded is not Offloaded.STATES
        return total * (1 - self.offloaded) if moves else total

    def optimizer(self, piece: StagePiece, owned: float) -> float:
        """Return the bytes of moments of *owned* parameters and, where the stored weights are less precise, of the fp32
        copy.
        """
        optimizer, moments, wide = self.framework.optimizer, self.moments * owned, 0.0
        if optimizer.knows_matrices:
            for matrices in trained_matrices(self.model, self.strategy, piece):
                part = self.plan.experts if matrices.part is WeightPart.EXPERTS else self.plan.dense
                if optimizer.kind is OptimizerKind.MUON:  # one moment of two
                    spared = matrices.elements if matrices.inside else 0
                else:  # all but the sums of rows and of columns
                    spared = matrices.elements - matrices.count * (matrices.rows + matrices.columns)
                moments -= spared / part.ways
        if piece.embedding and optimizer.moment_dtype is DType.INT8 and self.framework.modules is Modules.TRANSFORMERS:
            # Embeddings keep 32-bit moments (transformers, Trainer: register_module_override of bitsandbytes).
            width = self.model.word_width
            words = self.model.vocab * width / self.strategy.layout.tp / self.plan.dense.ways
            trained = self.strategy.training is TrainingKind.FULL
            wide = words * self.moments * (FP32_BYTES - self.moment) if trained else 0.0
        return moments * self.moment + wide + (FP32_BYTES * owned if self.copies else 0.0)

    def unsharded_bytes(self, piece: StagePiece, held: Shard, trained: Shard) -> tuple[float, float]:
        """Return the bytes that are unsharded at the fullest moment: weights, and gradients beyond the rank's share."""
        plan = self.plan
        if not (plan.by_unit or plan.splits_gradients):
            return 0.0, 0.0
        units = self._list_units(piece)
        weights = 0.0
        if keeps_weights(plan):
            weights = _weigh(plan.gathered_part(held), self.unsharded)
        elif plan.gathered is Gathered.EACH_PASS:
            # The unit at work and, as it was gathered, the next one.
            weights = max([unit.gathered for unit in units], default=0.0)
        # Gradients of the unit at work, as they are computed, and where they are reduced once all sums so far.
        gradients = max([unit.unreduced for unit in units], default=0) * self.strategy.stored.bytes
        if plan.reduced is not Reduced.EACH_MICRO_BATCH:
            split = plan.unreduced(trained)
            gradients += (split.total - plan.share(split)) * self.framework.gradient_dtype.bytes
        return weights, gradients

    def _list_units(self, piece: StagePiece) -> list[UnitBytes]:
        """Return one of each kind that is gathered and reduced by itself: layers, and either end."""
        kinds = dict(zip(self.model.blocks[piece.layers.start : piece.layers.stop], piece.layers, strict=True))
        units = [self._find_layer(layer) for layer in kinds.values()]
        if piece.embedding:
            units.append(self.find_unit(StagePiece(range(0), True, False)))
        if piece.head:
            units.append(self.find_unit(StagePiece(range(0), False, True, piece.copy)))
        return units


def _join_pieces(pieces: list[StagePiece], sizes: StateBytes) -> StageStates:
    every = [_PIECES.of(piece, lambda piece, sizes: sizes.find_piece(piece), sizes) for piece in pieces]
    *sums, first_gradients, weights, unreduced = zip(*every, strict=True)
    parameters, gradients, states, host, buckets, trained, owned = map(sum, sums)
    overhead, optimizer = sizes.framework.overhead, sizes.framework.optimizer
    updated = owned * (1 - sizes.offloaded)  # by the rank itself
    copies = FP32_BYTES * (trained - owned) if overhead.whole_master else 0.0
    optimizer_bytes = states + overhead.step_bytes * updated + copies
    # Without fusion the root of AdamW's second moment exists for all weights at once.
    unfused = not optimizer.fused and optimizer.kind is OptimizerKind.ADAMW
    gathered = sum(weights) if keeps_weights(sizes.plan) else max(weights)
    left = sum(unreduced) if sizes.plan.reduced is Reduced.ONCE else max(unreduced)
    states_bytes = (parameters, gradients, overhead.gradient_bytes * trained, optimizer_bytes, host, buckets)
    lasting, update = updated * sizes.moments * sizes.moment, updated * sizes.moment if unfused else 0.0
    return StageStates(*states_bytes, first_gradients[0], gathered, left, lasting, update)


_STAGES: ByIdentity[list[StageStates]] = ByIdentity(4096)
_PIECES: ByIdentity[PieceStates] = ByIdentity(4096)


def _weigh(shard: Shard, widths: tuple[float, float]) -> float:
    return widths[0] * shard.quantised + widths[1] * shard.unquantised


_make_bytes = lru_cache(maxsize=1024)(StateBytes)


def find_state_bytes(model: Model, strategy: Strategy, framework: Framework, orientations: int) -> StateBytes:
    """Return the one for all strategies that keep the same states, with *orientations* copies of quantised weights."""
    return _make_bytes(model, states_view(strategy, framework), framework, orientations)


def orientations(strategy: Strategy, gpu: Gpu) -> int:
    """Return the copies of each quantised weight: forward and backward products read it along different axes.

    Scales of blocks differ between the two; with one scale a copy is transposed for matrix units that need
    it (Transformer Engine, is_non_tn_fp8_gemm_supported).
    """
    return 1 if strategy.precision is DType.FP8 and gpu.architecture in EITHER_ORIENTATION else 2


def checkpoint_bytes(model: Model, strategy: Strategy, framework: Framework) -> float:
    """Return the bytes of a checkpoint: all weights, or the adapters alone, and the states of the optimizer, once.

    BLOOM's is an example: 2 bytes of bf16 weights, 4 of their fp32 copy and 8 of moments for each of 176 billion
    parameters are 2.24 TiB, and its authors report 2.3 TB (BigScience 176B model, engineering side).
    """
    single = replace(strategy, layout=Layout(), stage_layers=(), micro_batch=1, global_batch=1)
    piece = StagePiece(range(model.layers), embedding=True, head=True)
    sizes = StateBytes(model, single, framework, orientations=1)
    held, trained = sizes.find_shards(piece)
    states = sizes.optimizer(piece, sizes.plan.share(trained))
    if single.training is TrainingKind.LORA:
        return sizes.adapter * trained.total + states
    return sizes.stored * held.total + states


def keeps_weights(plan: ShardingPlan) -> bool:
    """Return whether gathered weights of all layers, and so of all pieces, exist at the same time."""
    return plan.gathered in (Gathered.EACH_MICRO_BATCH, Gathered.ONCE)
