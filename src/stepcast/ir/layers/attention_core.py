"""The attention core: which kernels run it, alone or shared by context-parallel ranks.

Context parallelism is one of:

- ring (p2p): keys and values travel from rank to rank, one step during the attention to those at hand (Liu et
  al., Ring Attention, 2023). Each rank holds a slice from either end of the sequence, so that all work the
  same: half a square each step. The backward passes keys, values and their gradients.
- all-to-all: ranks exchange heads for positions before the core and back after it (Jacobs et al., DeepSpeed
  Ulysses, 2023).
- all-gather: keys and values are gathered before the core, their gradients reduced and scattered after it
  (Llama 3, 2024, section 3.3.2).

The facts about transformers are those of version 5.17: integrations/sdpa_attention.py, masking_utils.py and
models/*/modeling_*.py.
"""

from stepcast.ir.architecture import Architecture
from stepcast.ir.framework import AttentionKernel, Framework, Kernels, SelectiveRule
from stepcast.ir.layers.kernels import FP32, C, Ops, collective, list_kernels, make_layer
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Group
from stepcast.ir.model_parts import Activation, LayerParts, NormKind, PositionKind
from stepcast.ir.strategy import ContextKind, RecomputeModule, Strategy
from stepcast.ir.types import DType, dataclass, replace
from stepcast.ir.work import Attention, CollectiveKind, Direction, Transfer
from stepcast.ir.workload import Layer, Op, Role


def fuses_attention(model: Architecture, strategy: Strategy, framework: Framework) -> bool:
    """Return True if one kernel runs attention."""
    biased = model.attention_sinks or model.position.kind is PositionKind.ALIBI
    unfused = (framework.unfused_biases and biased) or falls_back(model, strategy, framework)
    return framework.flash_attention and not unfused


def recomputes_in_vain(model: Architecture, strategy: Strategy, framework: Framework) -> bool:
    """Return True if recomputing core attention, and nothing else, frees no memory.

    Fused attention stores no scores, and its inputs and result stay for the projections around it.
    """
    modules = framework.selective is SelectiveRule.MODULES
    core_only = strategy.recompute.selected == (RecomputeModule.CORE,)
    return modules and core_only and fuses_attention(model, strategy, framework)


def falls_back(model: Architecture, strategy: Strategy, framework: Framework) -> bool:
    """Return True if PyTorch runs its attention operation by operation, in fp32: heads that share keys in
    fp32, which no kernel takes, and Falcon's, whose code does not say that they are shared
    (_scaled_dot_product_attention_math, aten/src/ATen/native/transformers/attention.cpp).
    """
    if not (framework.grouped_fallback and framework.flash_attention):
        return False
    unstated = model.joined and not model.gated and model.kv_heads == 1
    rotary = model.position.kind is PositionKind.ROTARY
    return model.heads != model.kv_heads and rotary and (unstated or strategy.stored is DType.FP32)


def masks_window(window: int | None, strategy: Strategy, framework: Framework) -> bool:
    """Return True if a mask selects the pairs that count: for a window, which PyTorch's attention does not
    know, and for any model whose code is compiled, where a mask cannot be left out for what is in it. FlashAttention
    takes a window as a number.
    """
    if framework.attention is AttentionKernel.FLASH_2:
        return False
    compiled = framework.kernels is Kernels.COMPILED
    return framework.masks_windows and (compiled or (window is not None and window <= strategy.seq))


def selects_heads(model: Architecture) -> bool:
    """Return True if queries, keys and values are taken by index from the one tensor that a product made of
    them: BLOOM's code, whose gradients fill a tensor of that size each.
    """
    return model.activation is Activation.GELU_BLOOM


def widens_softmax(model: Architecture) -> bool:
    """Return True if eager attention has its softmax in fp32: all but GPT-2, OPT, GPT-NeoX and GPT-OSS."""
    biased = model.position.kind is PositionKind.ALIBI
    return (model.norm.kind is NormKind.RMS or biased) and not model.attention_sinks


def core_layer(sizes: Sizes, block: LayerParts) -> Layer:
    """Return scores, softmax and weighted sum, with the communication of context parallelism."""
    if sizes.cp == 1:
        core = _local_core(sizes, block, sizes.heads, sizes.kv_heads)
        return make_layer(Role.CORE, core.forward(), core.backward())
    match sizes.strategy.context:
        case ContextKind.RING:
            return _ring(sizes, block)
        case ContextKind.ALL_TO_ALL:
            return _all_to_all(sizes, block)
        case ContextKind.ALL_GATHER:
            return _all_gather(sizes, block)


def window_keys(seq: int, block: LayerParts) -> int | None:
    """Return the keys a query sees on average within its window or chunk; None where that does not bind.

    In a window the first queries see fewer: sum over positions of min(position + 1, window). In a chunk all
    see the half before them; the last chunk may be shorter.
    """
    window = block.window
    if window is None or window >= seq:
        return None
    if block.chunked:
        chunks, rest = divmod(seq, window)
        return max(1, round((chunks * window * (window + 1) + rest * (rest + 1)) / (2 * seq)))
    return max(1, round(window - window * (window - 1) / (2 * seq)))


def _key_value_bytes(sizes: Sizes) -> int:
    """Return the bytes of keys and values of a micro-batch on this rank."""
    return sizes.tokens * (sizes.key_width + sizes.value_width) * sizes.element


def _local_core(sizes: Sizes, block: LayerParts, heads: int, kv_heads: int) -> "_Core":
    """Return attention of all tokens on one rank; a window leaves a rectangle with as many pairs as its band."""
    seq = sizes.strategy.seq
    if masks_window(block.window, sizes.strategy, sizes.framework):
        return _Core(sizes, seq, seq, False, heads, kv_heads, masked=True)
    document = min(sizes.strategy.document or seq, seq)
    keys, documents = window_keys(document, block), max(1, round(seq / document))
    return _Core(sizes, document, keys or document, keys is None, heads, kv_heads, documents=documents)


def _ring(sizes: Sizes, block: LayerParts) -> Layer:
    seq, size = sizes.seq, _key_value_bytes(sizes)
    keys = window_keys(sizes.strategy.seq, block)
    if keys is None:
        diagonal = _Core(sizes, seq, seq, True, sizes.heads, sizes.kv_heads)
        off_diagonal = replace(diagonal, key_len=max(1, seq // 2), causal=False)
    else:
        diagonal = off_diagonal = _Core(sizes, seq, max(1, round(keys / sizes.cp)), False, sizes.heads, sizes.kv_heads)
    forward: list[Op] = []
    backward: list[Op] = []
    for step in range(sizes.cp):
        core = diagonal if step == 0 else off_diagonal
        # Each step passes on what it works with while as much arrives; the last has nobody left to pass it to.
        if step < sizes.cp - 1:
            forward.append(Op(f"ring {step + 1}", Transfer(Direction.SEND, size, Group.CP), blocking=False))
            gradients = Transfer(Direction.SEND, 2 * size, Group.CP)
            backward.append(Op(f"ring gradient {step + 1}", gradients, blocking=False))
        waits = (f"ring {step}",) if step else ()
        forward += [Op(op.name, op.work, after=waits) for op in core.forward(f"core {step}")]
        waits = (f"ring gradient {step}",) if step else ()
        backward += [Op(op.name, op.work, after=waits) for op in core.backward(f"core gradient {step}")]
    # The gradients of keys and values still have to return to their rank.
    backward.append(Op("ring gradient home", Transfer(Direction.SEND, size, Group.CP)))
    return make_layer(Role.CORE, tuple(forward), tuple(backward))


def _all_to_all(sizes: Sizes, block: LayerParts) -> Layer:
    core = _local_core(sizes, block, sizes.heads // sizes.cp, max(1, sizes.kv_heads // sizes.cp))
    kind = CollectiveKind.ALL_TO_ALL
    qkv_bytes = sizes.tokens * sizes.query_width * sizes.element + _key_value_bytes(sizes)
    output_bytes = sizes.tokens * sizes.output_width * sizes.element
    return make_layer(
        Role.CORE,
        (
            collective("cp all-to-all qkv", kind, qkv_bytes, Group.CP),
            *core.forward(),
            collective("cp all-to-all output", kind, output_bytes, Group.CP),
        ),
        (
            collective("cp all-to-all output gradient", kind, output_bytes, Group.CP),
            *core.backward(),
            collective("cp all-to-all qkv gradient", kind, qkv_bytes, Group.CP),
        ),
    )


def _all_gather(sizes: Sizes, block: LayerParts) -> Layer:
    seq = sizes.strategy.seq
    # Slices from either end of the sequence see half of all keys between them: as many pairs as a rectangle.
    keys = window_keys(seq, block) or max(1, seq // 2)
    core = _Core(sizes, sizes.seq, keys, False, sizes.heads, sizes.kv_heads)
    size = _key_value_bytes(sizes) * sizes.cp
    if not sizes.fused_by_hand:
        # PyTorch's context parallelism knows no heads that share keys: they are repeated before it is asked
        # (pytorch/torchtitan, models/llama/model.py, repeat_kv).
        size = size * sizes.heads // sizes.kv_heads
    return make_layer(
        Role.CORE,
        (collective("cp all-gather", C.ALL_GATHER, size, Group.CP), *core.forward()),
        (
            collective("cp all-gather again", C.ALL_GATHER, size, Group.CP),
            *core.backward(),
            collective("cp reduce-scatter", C.REDUCE_SCATTER, size, Group.CP),
        ),
    )


def _exchanged_bytes(sizes: Sizes) -> tuple[float, float, float]:
    """Return the bytes of this rank's queries, of its keys and values, and of the attention's result."""
    model, element, heads = sizes.model, sizes.tokens * sizes.stored.bytes, sizes.model.heads / sizes.tp
    shared = sizes.fused_by_hand or sizes.strategy.context is not ContextKind.ALL_GATHER
    pairs = max(model.kv_heads / sizes.tp, 1) if shared else heads
    return (
        element * heads * model.head_dim,
        element * pairs * (model.head_dim + model.value_dim),
        element * heads * model.value_dim,
    )


def context_saved_bytes(sizes: Sizes) -> float:
    """Return what context parallelism saves on top: the result before it is put together or exchanged,
    besides the one that the output projection saves (Transformer Engine, attention/dot_product_attention/
    context_parallel.py: out_per_step of the all-gather, out_part of the all-to-all), and repeated keys. The
    ring saves the block it received last in place of its own.
    """
    model = sizes.model
    _, pairs, output = _exchanged_bytes(sizes)
    once = sizes.tokens * max(model.kv_heads / sizes.tp, 1) * (model.head_dim + model.value_dim)
    saved = max(0.0, pairs - once * sizes.stored.bytes)
    if sizes.fused_by_hand and sizes.strategy.context is not ContextKind.RING:
        saved += output
    return saved


def context_transient(sizes: Sizes, gradients: float) -> float:
    """Return the most that the exchange of context-parallel ranks and the attention's *gradients* take at once.

    Fused is Transformer Engine's context_parallel.py:

    - ring: the forward holds the blocks of all ranks (p2p_comm_buffers), a result of each step and their sum
      in fp32; the backward two buffers of keys and values with their gradients.
    - all-gather: the backward holds gathered keys and values, as large sums of their gradients (dk, dv), and
      the gradients of two steps, whose ranges are 2 cp + 1 of 2 cp slices together.
    - all-to-all: gradients of queries, keys and values are copied to be received; the result's arrive first.

    Otherwise it is PyTorch's (torch/distributed/tensor/experimental/_attention.py): keys and values gathered
    or one block received, and gradients in two blocks.
    """
    query, pairs, output = _exchanged_bytes(sizes)
    cp = sizes.cp
    match sizes.strategy.context:
        case ContextKind.RING:
            forward = cp * (pairs + output) + 2 * output if sizes.fused_by_hand else 0.0
            return max(gradients + 4 * pairs, forward)
        case ContextKind.ALL_GATHER:
            return gradients + ((3 * cp + 0.5) if sizes.fused_by_hand else (cp + 2)) * pairs
        case ContextKind.ALL_TO_ALL:
            return gradients + query + pairs + output


@dataclass(frozen=True, slots=True)
class _Core:
    """One piece of attention: its kernels forward and backward."""

    sizes: Sizes
    query_len: int
    key_len: int
    causal: bool
    heads: int
    kv_heads: int
    masked: bool = False
    documents: int = 1  # of one sequence, whose tokens do not see each other's

    def forward(self, name: str = "core") -> Ops:
        if not self._fused:
            return self._list(f"{self._code} attention")
        # Code that joins the parts of queries has them head by head, not token by token.
        by_heads = self.sizes.model.position.tailed or self.sizes.model.latent is not None
        joined = self._list("joined heads") if self.sizes.eager_modules and by_heads else ()
        return (*(self._list("mask") if self.masked else ()), Op(name, self._flash(False)), *joined)

    def backward(self, name: str = "core gradient") -> Ops:
        if not self._fused:
            return self._list(f"{self._code} attention gradient")
        return (Op(name, self._flash(True)), *(self._list("repeated keys gradient") if self.masked else ()))

    @property
    def _fused(self) -> bool:
        return fuses_attention(self.sizes.model, self.sizes.strategy, self.sizes.framework)

    @property
    def _code(self) -> str:
        return "eager" if self.sizes.eager_modules else "unfused"

    def _flash(self, backward: bool) -> Attention:
        model, sizes = self.sizes.model, self.sizes
        # With NVFP4 and context parallelism attention stays in bf16 (MLPerf 5.1: NVTE_DPA_FP8_RECIPE=F16).
        formats = (DType.FP8, DType.MXFP8) if sizes.strategy.layout.cp > 1 else (DType.FP8, DType.MXFP8, DType.NVFP4)
        narrow = sizes.framework.fp8_attention and sizes.dtype in formats
        return Attention(
            batch=sizes.strategy.micro_batch * self.documents,
            query_len=self.query_len,
            key_len=self.key_len,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=model.head_dim,
            value_dim=model.value_dim,
            causal=self.causal,
            backward=backward,
            dtype=DType.FP8 if narrow else sizes.unquantised,
            masked=self.masked,
            drops=model.drops_attention and sizes.framework.dropout,
        )

    def _list(self, name: str) -> Ops:
        """Return the kernels of the list *name*, with the sizes of this piece."""
        sizes, model, framework = self.sizes, self.sizes.model, self.sizes.framework
        eager, sinks, micro_batch = sizes.eager_modules, model.attention_sinks, sizes.strategy.micro_batch
        fallen = eager and falls_back(model, sizes.strategy, framework)
        dtype, batch = FP32 if fallen else sizes.unquantised, micro_batch * self.heads
        return list_kernels(
            name,
            sizes,
            batch * self.query_len,
            self.key_len,
            dtype,
            batch=batch,
            heads=self.heads,
            queries=self.query_len,
            keys=self.key_len,
            row=self.key_len + sinks,
            tokens=micro_batch * self.query_len,
            key_tokens=micro_batch * self.key_len,
            seen=0.5 if sizes.fused and self.causal else 1.0,
            soft=sizes.stream if sizes.strategy.autocast else sizes.unquantised,
            narrowed=sizes.unquantised is not FP32,
            alibi=model.position.kind is PositionKind.ALIBI,
            shared=self.heads != self.kv_heads,
            widened=not sinks and widens_softmax(model) and dtype is not FP32,
            scaled=not (selects_heads(model) or fallen),
            dropped=framework.dropout and (model.drops_attention or not eager),
            fallen=fallen,
        )
