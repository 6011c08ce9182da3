"""The kernels that eager PyTorch runs for a GPT- or Llama-style block and for a whole training step.

The order and kinds follow a PyTorch profiler trace of Llama-3.2-1B on an H200 (the ``h200`` set): one fused
linear for q, k and v and one for gate and up, rotary embedding written with slices and concatenation, fused
attention, the loss on logits raised to fp32, and a fused AdamW. Nothing is fused that eager mode does not
fuse; that is what separates these lists from an ideal operator count.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stepcast.ir.dtype import DType
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, Matmul, streamed

Kernel = Matmul | Attention | Elementwise

K = ElementwiseKind


@dataclass(frozen=True, slots=True)
class EagerBlock:
    """One transformer block as one tensor-parallel rank holds it."""

    kind: str  # "gpt" or "llama"
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    batch: int
    seq: int
    tp: int = 1
    dtype: DType = DType.BF16
    flash: bool = True
    head_dim: int = 0  # 0: hidden / heads
    compiled: bool = False  # chains of element-wise kernels are fused into one

    def __post_init__(self) -> None:
        if self.kind not in ("gpt", "llama"):
            raise ValueError(f"kind must be gpt or llama, not {self.kind!r}")
        if self.heads % self.tp or self.ffn % self.tp:
            raise ValueError(f"heads and ffn must divide by tp {self.tp}")

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def local_heads(self) -> int:
        return self.heads // self.tp

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.tp)

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        return self.local_heads * self.dim

    @property
    def key_width(self) -> int:
        return self.local_kv_heads * self.dim

    @property
    def qkv_width(self) -> int:
        return self.query_width + 2 * self.key_width

    @property
    def local_ffn(self) -> int:
        return self.ffn // self.tp

    @property
    def gated(self) -> bool:
        return self.kind == "llama"


def forward_kernels(block: EagerBlock) -> tuple[Kernel, ...]:
    return (*_attention_forward(block), *_mlp_forward(block))


def backward_kernels(block: EagerBlock, accumulate: bool = False) -> tuple[Kernel, ...]:
    """*accumulate*: gradients are added to those already there, one kernel per weight."""
    added = _accumulation(block) if accumulate else ()
    return (*_mlp_backward(block), *_attention_backward(block), *added)


def weight_sizes(block: EagerBlock) -> tuple[int, ...]:
    """Elements of each weight tensor of the block."""
    hidden, ffn = block.hidden, block.local_ffn
    up = 2 * ffn if block.gated else ffn
    matrices = (block.qkv_width * hidden, hidden * block.query_width, up * hidden, hidden * ffn)
    if block.gated:
        return (*matrices, hidden, hidden)
    biases = (block.qkv_width, hidden, ffn, hidden)
    return (*matrices, *biases, hidden, hidden, hidden, hidden)


def _accumulation(block: EagerBlock) -> Iterator[Kernel]:
    for size in weight_sizes(block):
        yield streamed(K.ADD, 1, size, 2, 1, block.dtype)


def _linear(block: EagerBlock, rows: int, outputs: int, inputs: int) -> Matmul:
    return Matmul(rows, outputs, inputs, 1, block.dtype)


def _linear_backward(block: EagerBlock, rows: int, outputs: int, inputs: int) -> Iterator[Kernel]:
    """Weight gradient, input gradient and, where there is a bias, its gradient (a column sum)."""
    yield Matmul(inputs, outputs, rows, 1, block.dtype)
    yield Matmul(rows, inputs, outputs, 1, block.dtype)
    if not block.gated:
        yield streamed(K.OTHER, rows, outputs, 1, 0, block.dtype)


def _norm(block: EagerBlock, backward: bool = False) -> Iterator[Kernel]:
    kind = K.RMS_NORM if block.gated else K.LAYER_NORM
    if not backward:
        yield streamed(kind, block.tokens, block.hidden, 1, 1, block.dtype)
        return
    yield streamed(kind, block.tokens, block.hidden, 2, 1, block.dtype, backward=True)
    yield streamed(K.OTHER, block.tokens, block.hidden, 2, 0, block.dtype, backward=True)


def _rotary(block: EagerBlock, width: int, backward: bool = False) -> Iterator[Kernel]:
    """x * cos + rotate_half(x) * sin over strided halves."""
    tokens, dtype = block.tokens, block.dtype
    if block.compiled:
        yield streamed(K.ADD, tokens, width, 1, 1, dtype)
        return
    if not backward:
        yield streamed(K.ROTARY, tokens, width, 1, 1, dtype)  # x * cos
        yield streamed(K.ROTARY, tokens, width // 2, 1, 1, dtype)  # -x of the second half
        yield streamed(K.ROTARY, tokens, width, 1, 1, dtype)  # concatenate the halves
        yield streamed(K.ROTARY, tokens, width, 1, 1, dtype)  # * sin
        yield streamed(K.ROTARY, tokens, width, 2, 1, dtype)  # sum
        return
    yield streamed(K.ROTARY, tokens, width, 1, 1, dtype)  # gradient * sin
    for _ in range(2):  # each half goes back into a zero-filled whole
        yield streamed(K.FILL, tokens, width, 0, 1, dtype)
        yield streamed(K.ROTARY, tokens, width // 2, 1, 1, dtype)
    yield streamed(K.ROTARY, tokens, width // 2, 1, 1, dtype)  # the sign of the second half
    yield streamed(K.ADD, tokens, width, 2, 1, dtype)
    yield streamed(K.ROTARY, tokens, width, 1, 1, dtype)  # gradient * cos
    yield streamed(K.ROTARY, tokens, width, 2, 1, dtype)  # sum
    yield streamed(K.ROTARY, tokens, width, 1, 1, dtype)  # to contiguous


def _attention(block: EagerBlock, backward: bool) -> Attention:
    return Attention(
        block.batch,
        block.seq,
        block.seq,
        block.local_heads,
        block.local_kv_heads,
        block.dim,
        block.dim,
        causal=True,
        backward=backward,
        dtype=block.dtype,
    )


def _unfused_attention(block: EagerBlock, backward: bool) -> Iterator[Kernel]:
    """Scores, scale, mask, softmax and weighted sum, each stored; softmax in the dtype of the block."""
    heads, seq, dim, dtype = block.batch * block.local_heads, block.seq, block.dim, block.dtype
    rows = heads * seq
    scores = Matmul(seq, seq, dim, heads, dtype)
    values = Matmul(seq, dim, seq, heads, dtype)
    if not backward:
        yield scores
        yield streamed(K.MUL, rows, seq, 1, 1, dtype)
        yield streamed(K.COPY, rows, seq, 1, 1, dtype)
        yield streamed(K.MASK, rows, seq, 1, 1, dtype)  # a mask shared by all heads: strided
        yield streamed(K.SOFTMAX, rows, seq, 1, 1, dtype)
        yield values
        yield streamed(K.COPY, block.tokens, block.query_width, 1, 1, dtype)
        return
    yield scores  # gradient of the probabilities
    yield Matmul(seq, dim, seq, heads, dtype)  # gradient of the values
    yield streamed(K.SOFTMAX, rows, seq, 2, 1, dtype, backward=True)
    yield streamed(K.COPY, rows, seq, 1, 1, dtype)
    yield streamed(K.MASK, rows, seq, 1, 1, dtype)
    yield streamed(K.MUL, rows, seq, 1, 1, dtype)
    yield values
    yield Matmul(seq, dim, seq, heads, dtype)
    yield streamed(K.COPY, block.tokens, block.query_width, 1, 1, dtype)


def _attention_forward(block: EagerBlock) -> Iterator[Kernel]:
    yield from _norm(block)
    yield _linear(block, block.tokens, block.qkv_width, block.hidden)
    if block.gated:
        yield from _rotary(block, block.query_width)
        yield from _rotary(block, block.key_width)
    if block.flash:
        yield _attention(block, backward=False)
    else:
        yield from _unfused_attention(block, backward=False)
    yield _linear(block, block.tokens, block.hidden, block.query_width)
    yield streamed(K.ADD, block.tokens, block.hidden, 2, 1, block.dtype)


def _attention_backward(block: EagerBlock) -> Iterator[Kernel]:
    yield from _linear_backward(block, block.tokens, block.hidden, block.query_width)
    if block.flash:
        yield _attention(block, backward=True)
    else:
        yield from _unfused_attention(block, backward=True)
    if block.gated:
        yield from _rotary(block, block.key_width, backward=True)
        yield from _rotary(block, block.query_width, backward=True)
    yield streamed(K.COPY, block.tokens, block.qkv_width, 1, 1, block.dtype)  # gradients side by side
    yield from _linear_backward(block, block.tokens, block.qkv_width, block.hidden)
    yield from _norm(block, backward=True)
    yield streamed(K.ADD, block.tokens, block.hidden, 2, 1, block.dtype)


def _mlp_forward(block: EagerBlock) -> Iterator[Kernel]:
    tokens, ffn, hidden, dtype = block.tokens, block.local_ffn, block.hidden, block.dtype
    yield from _norm(block)
    if block.gated:
        yield _linear(block, tokens, 2 * ffn, hidden)
        if not block.compiled:
            yield streamed(K.SWIGLU, tokens, ffn, 1, 1, dtype)
        yield streamed(K.ADD if block.compiled else K.SWIGLU, tokens, ffn, 2, 1, dtype)
    else:
        yield _linear(block, tokens, ffn, hidden)
        yield streamed(K.GELU, tokens, ffn, 1, 1, dtype)
    yield _linear(block, tokens, hidden, ffn)
    yield streamed(K.ADD, tokens, hidden, 2, 1, dtype)


def _mlp_backward(block: EagerBlock) -> Iterator[Kernel]:
    tokens, ffn, hidden, dtype = block.tokens, block.local_ffn, block.hidden, block.dtype
    yield from _linear_backward(block, tokens, hidden, ffn)
    if block.gated and block.compiled:
        yield streamed(K.ADD, tokens, ffn, 3, 2, dtype)
        yield from _linear_backward(block, tokens, 2 * ffn, hidden)
    elif block.gated:
        yield streamed(K.MUL, tokens, ffn, 2, 1, dtype)
        yield streamed(K.SWIGLU, tokens, ffn, 2, 1, dtype)
        yield streamed(K.SWIGLU, tokens, ffn, 2, 1, dtype)
        yield streamed(K.COPY, tokens, 2 * ffn, 1, 1, dtype)
        yield from _linear_backward(block, tokens, 2 * ffn, hidden)
    else:
        yield streamed(K.GELU, tokens, ffn, 2, 1, dtype, backward=True)
        yield from _linear_backward(block, tokens, ffn, hidden)
    yield from _norm(block, backward=True)
    yield streamed(K.ADD, tokens, hidden, 2, 1, dtype)
