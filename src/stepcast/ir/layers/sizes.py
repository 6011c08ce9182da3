"""Sizes that one rank sees of a model under a strategy: tokens, heads and widths after every split."""

from typing import NamedTuple, TypeVar

from stepcast.ir.architecture import Architecture
from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels, Modules, SelectiveRule
from stepcast.ir.model_parts import NormKind
from stepcast.ir.sharding import ShardingPlan, plan_of
from stepcast.ir.strategy import BaseWeights, RecomputeKind, RecomputeModule, Strategy
from stepcast.ir.types import DType, cached_property, dataclass

MASK_BYTES = 1.0  # of one element in dropout's mask
Part = TypeVar("Part")


def present(part: Part | None) -> Part:
    """Return a part of a model that those with this kind of layer have."""
    assert part is not None
    return part


class SavedTensor(NamedTuple):
    """A tensor saved for the backward; recomputing any of the modules in *freed_by* frees it."""

    name: str
    size_bytes: float
    freed_by: tuple[RecomputeModule, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """Sizes on one rank of a stage; *plan* says how states are split, gathered and reduced."""

    model: Architecture
    strategy: Strategy
    framework: Framework = MEGATRON_CORE

    @cached_property
    def plan(self) -> ShardingPlan:
        return plan_of(self.strategy, self.framework)

    @property
    def tp(self) -> int:
        return self.strategy.layout.tp

    @property
    def cp(self) -> int:
        return self.strategy.layout.cp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch inside tensor-parallel regions."""
        return self.strategy.local_tokens

    @property
    def outer_tokens(self) -> int:
        """Tokens outside tensor-parallel regions: sequence parallelism splits these over tp."""
        return self.tokens // self.strategy.outer_ways

    @property
    def outer_share(self) -> float:
        """The same as a share that may not divide evenly, as memory counts it."""
        return self.tokens / self.strategy.outer_ways

    @property
    def seq(self) -> int:
        return self.strategy.seq // self.cp

    @property
    def dtype(self) -> DType:
        """The format matmuls run in."""
        return self.strategy.precision

    @property
    def stored(self) -> DType:
        """The format of activations in memory, and of weights unless they are cast for each use."""
        return self.strategy.stored

    @property
    def stream(self) -> DType:
        """The format of the residual stream, of norms and of embeddings."""
        return self.strategy.stream

    @property
    def unquantised(self) -> DType:
        """The format of matmuls that stay out of fp8 and fp4: attention and the logits."""
        return DType.TF32 if self.dtype is DType.TF32 else self.stored

    @property
    def element(self) -> int:
        return int(self.stored.bytes)

    @property
    def matmul_bytes(self) -> float:
        """Bytes of an element as a matmul saves its input."""
        return min(self.strategy.precision.bytes, self.stored.bytes)

    @property
    def mask_bytes(self) -> float:
        """Bytes of an element of dropout's mask; 0 without dropout."""
        return MASK_BYTES if self.framework.dropout else 0.0

    @property
    def gradient(self) -> int:
        """Bytes of one reduced gradient."""
        return int(self.framework.gradient_dtype.bytes)

    @property
    def fused(self) -> bool:
        return self.framework.kernels is not Kernels.PLAIN

    @property
    def fused_by_hand(self) -> bool:
        """Return True if kernels are Transformer Engine's."""
        return self.framework.kernels is Kernels.FUSED

    @property
    def eager_modules(self) -> bool:
        """Return True if modules are those of transformers, one kernel for each operation of their source."""
        return self.framework.writes_out

    @property
    def casts_activations(self) -> bool:
        """Return True if autocast turns activations from one format into another by kernels of their own."""
        return self.strategy.autocast and not self.fused

    @property
    def trains_norms(self) -> bool:
        """Return True if norms have gradients, and so save what they need of their inputs."""
        return self.strategy.lora_rank == 0

    @property
    def writes_out_norms(self) -> bool:
        """Return True if RMS norms run operation by operation, in fp32."""
        return self.eager_modules and self.model.norm.kind is NormKind.RMS and not self.framework.runs_liger

    @property
    def casts_adapter_inputs(self) -> bool:
        """Return True if each pair of adapters casts its input to fp32 and autocast back: peft without 4-bit layers."""
        plain = self.strategy.base_weights is BaseWeights.TRAINED
        return self.strategy.lora_rank > 0 and self.eager_modules and self.framework.fp32_adapters and plain

    def count_adapted(self, *names: str) -> int:
        """Return how many of the linear layers *names* have adapters."""
        targets = self.strategy.lora_targets
        return sum(not targets or name in targets for name in names) if self.strategy.lora_rank else 0

    def input_copies(self, *names: str) -> int:
        """Return the copies of one input that the linear layers *names* save: frozen ones none, adapters that
        cast it one each; all others share it.
        """
        if self.trains_norms or not self.eager_modules:
            # Autocast casts the input of each separate projection by itself.
            casts_each = self.strategy.autocast and self.eager_modules and not self.model.joined
            return max(1, len(names)) if casts_each else 1
        adapted = self.count_adapted(*names)
        return adapted if self.casts_adapter_inputs and not self.model.joined else min(1, adapted)

    @property
    def separate_projections(self) -> bool:
        """Return True if queries, keys, values, gate and up are products of their own."""
        return self.framework.modules is Modules.TRANSFORMERS and not self.model.joined

    @property
    def plain_gradients(self) -> bool:
        """Return True if gradients are added up, summed over rows and joined by kernels of their own."""
        return not (self.fused and self.framework.fused_accumulation)

    @property
    def adds_in_place(self) -> bool:
        """Return True if weight gradients are added to a buffer of all of a rank's, whatever the micro-batch."""
        return self.fused_by_hand and self.framework.fused_accumulation and not self.plan.splits_gradients

    @property
    def alternates_matmuls(self) -> bool:
        """Return True if selective recomputation runs every second matmul again, as torchtitan does."""
        alternate = self.framework.selective is SelectiveRule.ALTERNATE_MATMULS
        return alternate and self.strategy.recompute.kind is RecomputeKind.SELECTIVE

    @property
    def heads(self) -> int:
        return self.model.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """The kv heads that the rank's queries look at; with fewer of them than ranks, several share one."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def shares_kv_heads(self) -> bool:
        return self.tp > self.model.kv_heads

    @property
    def qkv_width(self) -> int:
        """Queries, their gate, keys and values of all tensor ranks."""
        model = self.model
        query = model.heads * model.head_dim * (2 if model.attention_gate else 1)
        return query + model.kv_heads * (model.head_dim + model.value_dim)

    @property
    def query_width(self) -> int:
        return self.heads * self.model.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.model.head_dim

    @property
    def value_width(self) -> int:
        return self.kv_heads * self.model.value_dim

    @property
    def output_width(self) -> int:
        """Width of the attention's result before its output projection."""
        return self.heads * self.model.value_dim

    @property
    def logits_width(self) -> int:
        """Columns of the logits as they are multiplied. Compilers pad them to 16 bytes (PyTorch Inductor's
        shape padding), Megatron-LM pads the vocabulary; plain PyTorch multiplies what is there.
        """
        multiple = 16 // self.element if self.fused else 1
        return -(-self.vocab // multiple) * multiple

    @property
    def vocab(self) -> int:
        return -(-self.model.padded_vocab(self.tp) // self.tp)

    @property
    def activation_bytes(self) -> int:
        """The residual stream of a micro-batch, not split over tp."""
        return self.tokens * self.model.hidden * int(self.stream.bytes)

    @property
    def boundary_bytes(self) -> int:
        """Bytes a tensor rank sends to the next stage: its part where they share the work, else everything."""
        parts = self.tp if self.gathers_boundary else 1
        return -(-self.outer_tokens * self.model.hidden * int(self.stream.bytes) // parts)

    @property
    def gathers_boundary(self) -> bool:
        """Return True if what arrives from another stage is gathered from the tensor ranks."""
        scattered = self.framework.boundary_scattered and not self.strategy.sequence_parallel
        return scattered and self.tp > 1 and self.strategy.layout.pp > 1
