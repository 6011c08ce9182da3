"""The least memory that candidates take: on the first stage, which holds the most micro-batches.

Weights, optimizer states and gradients are sums over the parts of the model that lie there, as is what each
micro-batch in flight keeps. While a layer runs backward, its working space and what it computes again are
there too, and of all that comes and goes the allocator loses a share.
"""

import numpy as np

from stepcast.cost.memory.in_flight import default_in_flight
from stepcast.cost.memory.overhead import communicators, fragmented_bytes
from stepcast.cost.memory.stages import workspace_bytes
from stepcast.cost.memory.states import orientations, piece_states
from stepcast.hardware import Cluster
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.dtype import FP32_BYTES
from stepcast.ir.framework import Framework, Kernels
from stepcast.ir.saved import count_saved
from stepcast.ir.sharding import plan_of
from stepcast.ir.stages import StagePiece, pieces_of_stage
from stepcast.ir.strategy import RecomputeKind
from stepcast.ir.trainable import trained_shard
from stepcast.searching.columns import KEPT, PIECES, STATES, SpaceColumns
from stepcast.searching.layers import kinds_of
from stepcast.searching.parts import counts_of

# Weights are counted in whole numbers, which parts of a stage round by themselves.
WHOLE = 1.0 - 1e-6


class Fitting:
    """Bytes of the first stage, at least."""

    def __init__(self, columns: SpaceColumns, cluster: Cluster, framework: Framework) -> None:
        self.columns, self.cluster, self.framework = columns, cluster, framework
        self.space, self.model = columns.space, columns.space.model
        self.kinds = kinds_of(self.model)

    def bytes(self, rows: IntArray) -> FloatArray:
        columns, overhead = self.columns, self.framework.overhead
        states = columns.spread(rows, STATES, self._states)  # (fixed, gradients) x parts, then two more
        held = columns.spread(rows, (*PIECES, "micro_batches"), self._held)
        kept = columns.spread(rows, KEPT, self._kept)
        parts = len(self.kinds) + 2
        lies, flies = held[:, :parts], held[:, parts:]
        fixed = (states[:, :parts] * lies).sum(axis=1) * WHOLE
        gradients = (states[:, parts : 2 * parts] * lies).sum(axis=1) * WHOLE
        splits, groups = states[:, 2 * parts], states[:, 2 * parts + 1]
        several = (self.space.micro_batches[rows] > 1) | (splits > 0)
        early = np.where(several | (self.framework.kernels is Kernels.FUSED), gradients, 0.0)
        piped = self.space.columns["pp"][rows] > 1
        working = kept[:, -3] + kept[:, -2] + np.where(piped, kept[:, -1], 0.0)
        loose = (flies * kept[:, : len(self.kinds)]).sum(axis=1) + working
        # At least: optimizer moments and recomputation add to it.
        lost = fragmented_bytes(overhead, 1.0, 0.0, 0.0, 0.0) * loose
        largest: FloatArray = fixed + np.maximum(gradients, early + loose) + lost
        return largest + (overhead.context_bytes + overhead.buffer_bytes + overhead.communicator_bytes * groups)

    def _states(self, at: int) -> FloatArray:
        strategy, model, framework = self.space.strategy(at), self.model, self.framework
        copies, plan, overhead = (
            orientations(strategy, self.cluster.gpu),
            plan_of(strategy, framework),
            framework.overhead,
        )
        lone = [model.blocks.index(kind) for kind in self.kinds]
        parts = [StagePiece(range(at, at + 1), False, False) for at in lone]
        parts += [StagePiece(range(0), True, False), StagePiece(range(0), False, True)]
        fixed, gradients = [], []
        for part in parts:
            states, trained = (
                piece_states(model, strategy, framework, part, copies),
                trained_shard(model, strategy, part),
            )
            owned = plan.share(trained)
            more = overhead.gradient_bytes * trained.total
            more += overhead.step_bytes * owned * (1 - strategy.offload.optimizer)
            more += FP32_BYTES * (trained.total - owned) if overhead.whole_master else 0.0
            fixed.append(states.parameters + states.optimizer + more)
            gradients.append(states.gradients)
        return np.array([*fixed, *gradients, float(plan.splits_gradients), communicators(strategy)])

    def _held(self, at: int) -> FloatArray:
        """How often each part lies on the first stage, and each kind of block is kept in flight."""
        strategy, counts = self.space.strategy(at), counts_of(self.space, at)
        own = pieces_of_stage(strategy, 0)
        lies = counts[list(own)].sum(axis=0)
        if self.model.tied and lies[-1] and lies[-2]:
            lies[-1] = 0.0  # the head has the weights of the embedding
        flies = sum(
            counts[piece, : len(self.kinds)] * flight
            for piece, flight in zip(own, default_in_flight(strategy)[0], strict=True)
        )
        return np.concatenate([lies, flies])

    def _kept(self, at: int) -> FloatArray:
        """Of each kind what a micro-batch keeps; then working space and messages to others."""
        strategy = self.space.strategy(at)
        whole = strategy.recompute.kind is RecomputeKind.FULL
        kinds = [count_saved(self.model, strategy, kind, self.framework) for kind in self.kinds]
        on_host = strategy.offload.activations > 0
        kept = [0.0 if on_host else kind.after(whole) for kind in kinds]
        again = min((each.saved - each.input if whole else each.again) + each.transient for each in kinds)
        stream = strategy.local_tokens * self.model.hidden * strategy.stream.bytes
        gathered = 2 * stream if strategy.sequence_parallel else 0.0
        space = workspace_bytes(self.model, self.framework, self.cluster.gpu)
        return np.array([*kept, again + space, gathered, 2 * stream / strategy.outer_ways])
