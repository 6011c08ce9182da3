"""The attention core, alone or shared by context-parallel ranks.

- ring: keys and values travel from rank to rank, one step beside the attention to those at hand (Liu et al.,
  Ring Attention, 2023). Each rank holds a slice from either end of the sequence, so that all work the same:
  half a square each step. The backward passes keys, values and their gradients.
- all-to-all: ranks exchange heads for positions before the core and back after it (Jacobs et al., DeepSpeed
  Ulysses, 2023).
- all-gather: keys and values are gathered before the core, their gradients reduced and scattered after it
  (Llama 3, 2024, section 3.3.2).
"""

from dataclasses import dataclass, replace

from stepcast.generate.parts import K, Ops, cast, collective, dropped, dropped_gradient, layer
from stepcast.generate.sizes import Sizes
from stepcast.generate.written_attention import WrittenCore
from stepcast.ir.coded import fuses_attention, lies_by_heads, masks_window
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Kernels, Modules
from stepcast.ir.group import Group
from stepcast.ir.model_parts import LayerParts
from stepcast.ir.strategy import ContextKind
from stepcast.ir.work import Attention, CollectiveKind, Direction, Matmul, Transfer, elementwise
from stepcast.ir.workload import Layer, Op, Role


def core_layer(sizes: Sizes, block: LayerParts) -> Layer:
    """Scores, softmax and weighted sum, with the communication of context parallelism."""
    if sizes.cp == 1:
        core = _whole(sizes, block, sizes.heads, sizes.kv_heads)
        return layer(Role.CORE, core.forward(), core.backward())
    match sizes.strategy.context:
        case ContextKind.RING:
            return _ring(sizes, block)
        case ContextKind.ALL_TO_ALL:
            return _all_to_all(sizes, block)
        case ContextKind.ALL_GATHER:
            return _all_gather(sizes, block)


def key_value_bytes(sizes: Sizes) -> int:
    """Keys and values of a micro-batch on this rank."""
    return sizes.tokens * (sizes.key_width + sizes.value_width) * sizes.element


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

    def forward(self, name: str = "core") -> Ops:
        if self._fused:
            ahead = self.sizes.by_operation and lies_by_heads(self.sizes.model)
            return (*self._by_mask(), Op(name, self._flash(False)), *(self._written.joined() if ahead else ()))
        return self._written.forward() if self.sizes.by_operation else self._unfused()

    def backward(self, name: str = "core gradient") -> Ops:
        if self._fused:
            back = self._written.repeated_gradient() if self._by_mask() else ()
            return (Op(name, self._flash(True)), *back)
        return self._written.backward() if self.sizes.by_operation else self._unfused_gradient()

    @property
    def _fused(self) -> bool:
        return fuses_attention(self.sizes.model, self.sizes.strategy, self.sizes.framework)

    @property
    def _narrow(self) -> bool:
        """NVFP4 leaves attention as it is (Transformer Engine: NVTE_DPA_FP8_RECIPE is F16 unless set)."""
        return self.sizes.framework.fp8_attention and self.sizes.dtype in (DType.FP8, DType.MXFP8)

    def _flash(self, backward: bool) -> Attention:
        model = self.sizes.model
        return Attention(
            batch=self.sizes.strategy.micro_batch,
            query_len=self.query_len,
            key_len=self.key_len,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=model.head_dim,
            value_dim=model.value_dim,
            causal=self.causal,
            backward=backward,
            dtype=DType.FP8 if self._narrow else self.sizes.unquantised,
            masked=self.masked,
            drops=model.drops_attention and self.sizes.framework.dropout,
        )

    def _by_mask(self) -> Ops:
        """Keys and values for each head, and the mask as numbers to add: what a tensor of pairs needs.

        A compiler makes the mask once for all layers.
        """
        if not self.masked or self.sizes.framework.modules is not Modules.TRANSFORMERS:
            return ()
        if not self.sizes.by_operation:
            return self._written.repeated()
        rows = self.sizes.strategy.micro_batch * self.query_len
        mask = Op("mask", elementwise(K.MASK, rows, self.key_len, 0.5, 1, self.sizes.unquantised))
        return (*self._written.repeated(), mask)

    @property
    def _written(self) -> WrittenCore:
        return WrittenCore(self.sizes, self.query_len, self.key_len, self.heads, self.kv_heads)

    def _unfused(self) -> Ops:
        """The whole square is computed and stored; a mask hides the future."""
        sizes, dtype = self.sizes, self.sizes.unquantised
        batch = sizes.strategy.micro_batch * self.heads
        rows, columns = batch * self.query_len, self.key_len
        scores = Matmul(self.query_len, self.key_len, sizes.model.head_dim, batch, dtype)
        values = Matmul(self.query_len, sizes.model.value_dim, self.key_len, batch, dtype)
        seen = self._seen
        wide = sizes.stream if sizes.strategy.autocast else dtype
        softmax: Ops = (Op("softmax", elementwise(K.SOFTMAX, rows, columns, seen, 1, wide)),)
        softmax = self._widened("softmax", rows, softmax)
        if not sizes.fused:
            softmax = (Op("scale", elementwise(K.MUL, rows, columns, 1, 1, dtype)), *self._masked(rows, ""), *softmax)
        if sizes.framework.dropout:
            softmax += (dropped(sizes, "dropout", rows, columns),)
        return (Op("scores", scores), *softmax, Op("values", values), *self._heads_joined(""))

    def _widened(self, name: str, rows: int, ops: Ops) -> Ops:
        """Autocast runs *ops* in fp32, and products before and after them do not."""
        sizes, columns = self.sizes, self.key_len
        if not sizes.casts:
            return ops
        wide = cast(sizes, f"{name} cast", rows, columns, sizes.stored, sizes.stream)
        narrow = cast(sizes, f"{name} cast back", rows, columns, sizes.stream, sizes.stored)
        return (wide, *ops, narrow)

    def _masked(self, rows: int, suffix: str) -> Ops:
        """masked_fill writes into a copy, by a mask that all heads share."""
        dtype = self.sizes.unquantised
        return (
            Op(f"mask copy{suffix}", elementwise(K.COPY, rows, self.key_len, 1, 1, dtype)),
            Op(f"mask{suffix}", elementwise(K.MASK, rows, self.key_len, 1, 1, dtype)),
        )

    def _heads_joined(self, suffix: str) -> Ops:
        """The heads of a token brought side by side, where no kernel writes them so."""
        sizes = self.sizes
        if sizes.fused:
            return ()
        width = self.heads * sizes.model.value_dim
        rows = sizes.strategy.micro_batch * self.query_len
        return (Op(f"join heads{suffix}", elementwise(K.COPY, rows, width, 1, 1, sizes.unquantised)),)

    @property
    def _seen(self) -> float:
        """Share of the square that the softmax reads: Megatron's fused kernel skips what the mask hides."""
        return 0.5 if self.sizes.fused and self.causal else 1.0

    def _unfused_gradient(self) -> Ops:
        sizes, dtype = self.sizes, self.sizes.unquantised
        batch = sizes.strategy.micro_batch * self.heads
        rows, columns = batch * self.query_len, self.key_len
        query_len, key_len = self.query_len, self.key_len
        head, value = sizes.model.head_dim, sizes.model.value_dim
        seen = 2 * self._seen
        wide = sizes.stream if sizes.strategy.autocast else dtype
        softmax: Ops = (Op("softmax gradient", elementwise(K.SOFTMAX, rows, columns, seen, 1, wide, backward=True)),)
        softmax = self._widened("softmax gradient", rows, softmax)
        if sizes.framework.dropout:
            softmax = (dropped_gradient(sizes, "dropout gradient", rows, columns), *softmax)
        if not sizes.fused:
            softmax += (
                *self._masked(rows, " gradient"),
                Op("scale gradient", elementwise(K.MUL, rows, columns, 1, 1, dtype)),
            )
        return (
            Op("probability gradient", Matmul(query_len, key_len, value, batch, dtype)),
            Op("value gradient", Matmul(key_len, value, query_len, batch, dtype)),
            *softmax,
            Op("query gradient", Matmul(query_len, head, key_len, batch, dtype)),
            Op("key gradient", Matmul(key_len, head, query_len, batch, dtype)),
            *self._heads_joined(" gradient"),
        )


def _whole(sizes: Sizes, block: LayerParts, heads: int, kv_heads: int) -> _Core:
    """The whole sequence on one rank; a window leaves a rectangle with as many pairs as its band."""
    seq = sizes.strategy.seq
    if masks_window(block.window, sizes.strategy, sizes.framework):
        return _Core(sizes, seq, seq, False, heads, kv_heads, masked=True)
    keys = window_keys(seq, block)
    return _Core(sizes, seq, keys or seq, keys is None, heads, kv_heads)


def _ring(sizes: Sizes, block: LayerParts) -> Layer:
    seq, size = sizes.seq, key_value_bytes(sizes)
    keys = window_keys(sizes.strategy.seq, block)
    if keys is None:
        own = _Core(sizes, seq, seq, True, sizes.heads, sizes.kv_heads)
        other = replace(own, key_len=max(1, seq // 2), causal=False)
    else:
        own = other = _Core(sizes, seq, max(1, round(keys / sizes.cp)), False, sizes.heads, sizes.kv_heads)
    forward: list[Op] = []
    backward: list[Op] = []
    for step in range(sizes.cp):
        core = own if step == 0 else other
        # Each step passes on what it works with; the last has nobody left to pass it to.
        if step < sizes.cp - 1:
            forward.append(_pass_on(f"ring {step + 1}", size))
            backward.append(_pass_on(f"ring gradient {step + 1}", 2 * size))
        waits = (f"ring {step}",) if step else ()
        forward += [Op(op.name, op.work, after=waits) for op in core.forward(f"core {step}")]
        waits = (f"ring gradient {step}",) if step else ()
        backward += [Op(op.name, op.work, after=waits) for op in core.backward(f"core gradient {step}")]
    # The gradients of keys and values still have to go home.
    last = Transfer(Direction.SEND, size, Group.CP)
    backward.append(Op("ring gradient home", last))
    return layer(Role.CORE, tuple(forward), tuple(backward))


def _pass_on(name: str, size_bytes: int) -> Op:
    """Sent to the next rank while as much arrives from the previous one."""
    return Op(name, Transfer(Direction.SEND, size_bytes, Group.CP), blocking=False)


def _all_to_all(sizes: Sizes, block: LayerParts) -> Layer:
    core = _whole(sizes, block, sizes.heads // sizes.cp, max(1, sizes.kv_heads // sizes.cp))
    kind = CollectiveKind.ALL_TO_ALL
    inside = sizes.tokens * sizes.query_width * sizes.element + key_value_bytes(sizes)
    outside = sizes.tokens * sizes.output_width * sizes.element
    return layer(
        Role.CORE,
        (
            collective("cp all-to-all qkv", kind, inside, Group.CP),
            *core.forward(),
            collective("cp all-to-all output", kind, outside, Group.CP),
        ),
        (
            collective("cp all-to-all output gradient", kind, outside, Group.CP),
            *core.backward(),
            collective("cp all-to-all qkv gradient", kind, inside, Group.CP),
        ),
    )


def _all_gather(sizes: Sizes, block: LayerParts) -> Layer:
    seq = sizes.strategy.seq
    # Slices from either end of the sequence see half of all keys between them: as many pairs as a rectangle.
    keys = window_keys(seq, block) or max(1, seq // 2)
    core = _Core(sizes, sizes.seq, keys, False, sizes.heads, sizes.kv_heads)
    size = key_value_bytes(sizes) * sizes.cp
    if sizes.framework.kernels is not Kernels.FUSED:
        # PyTorch's context parallelism knows no heads that share keys: they are repeated before it is asked
        # (pytorch/torchtitan, models/llama/model.py, repeat_kv).
        size = size * sizes.heads // sizes.kv_heads
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    return layer(
        Role.CORE,
        (collective("cp all-gather", gather, size, Group.CP), *core.forward()),
        (
            collective("cp all-gather again", gather, size, Group.CP),
            *core.backward(),
            collective("cp reduce-scatter", scatter, size, Group.CP),
        ),
    )
