"""The kernels of a whole eager training step: embedding, blocks, loss, and the optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass

from stepcast.ir.dtype import DType
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul
from stepcast.validate.h200.eager_blocks import (
    EagerBlock,
    Kernel,
    backward_kernels,
    forward_kernels,
    weight_sizes,
)

K = ElementwiseKind
ADAM_TENSORS = 4  # weight, gradient and two moments are read; all but the gradient are written


@dataclass(frozen=True, slots=True)
class EagerModel:
    """A decoder of equal blocks, trained on one GPU."""

    block: EagerBlock
    layers: int
    vocab: int
    tied: bool
    recompute: bool = False  # every block runs forward again before its backward

    @property
    def head_width(self) -> int:
        """Columns of the logits; a compiler pads them so that rows start on 16-byte boundaries."""
        return -(-self.vocab // 8) * 8 if self.block.compiled else self.vocab

    @property
    def positions(self) -> int:
        """Learnt position embeddings; rotary models have none."""
        return 0 if self.block.gated else 1024


def forward_step(model: EagerModel) -> tuple[Kernel, ...]:
    return (*_embedding(model), *(forward_kernels(model.block) * model.layers), *_head(model))


def backward_step(model: EagerModel) -> tuple[Kernel, ...]:
    block = backward_kernels(model.block)
    if model.recompute:
        # Checkpointing stops once the last saved input is back: the last linear and sum are not run again.
        block = (*forward_kernels(model.block)[:-2], *block)
    return (*_head_backward(model), *(block * model.layers), *_embedding_backward(model))


def optimizer_step(model: EagerModel) -> tuple[Kernel, ...]:
    """One fused AdamW kernel per list of tensors; priced as one stream over all weights."""
    sizes = weight_sizes(model.block) * model.layers
    elements = sum(sizes) + model.block.hidden * (
        model.vocab * (1 if model.tied else 2) + model.positions + 1
    )
    size = elements * model.block.dtype.bytes
    return (Elementwise(K.OPTIMIZER, 1, elements, ADAM_TENSORS * size, 3 * size, False, model.block.dtype),)


def _streamed(
    kind: ElementwiseKind, rows: int, columns: int, read: float, write: float, dtype: DType
) -> Kernel:
    """*read* and *write* are bytes per element."""
    elements = rows * columns
    return Elementwise(kind, rows, columns, read * elements, write * elements, False, dtype)


def _embedding(model: EagerModel) -> Iterator[Kernel]:
    tokens, hidden, dtype = model.block.tokens, model.block.hidden, model.block.dtype
    yield _streamed(K.EMBEDDING, tokens, hidden, dtype.bytes, dtype.bytes, dtype)
    if model.positions:
        yield _streamed(K.ADD, tokens, hidden, 2 * dtype.bytes, dtype.bytes, dtype)


def _norm(model: EagerModel, backward: bool) -> Kernel:
    block = model.block
    kind = K.RMS_NORM if block.gated else K.LAYER_NORM
    size = block.tokens * block.hidden * block.dtype.bytes
    return Elementwise(
        kind, block.tokens, block.hidden, (2 if backward else 1) * size, size, backward, block.dtype
    )


def _head(model: EagerModel) -> Iterator[Kernel]:
    """Logits, raised to fp32, and their cross entropy: three passes to read the row, one to write it.

    Compiled, the logits are read twice as they are and nothing is written.
    """
    tokens, dtype = model.block.tokens, model.block.dtype
    yield _norm(model, backward=False)
    yield Matmul(tokens, model.head_width, model.block.hidden, 1, dtype)
    if model.block.compiled:
        yield _streamed(K.ADD, tokens, model.vocab, 2 * dtype.bytes, 0, dtype)
        return
    if dtype is not DType.FP32:
        yield _streamed(K.CAST, tokens, model.vocab, dtype.bytes, 4, dtype)
    yield _streamed(K.CROSS_ENTROPY, tokens, model.vocab, 12, 4, DType.FP32)


def _head_backward(model: EagerModel) -> Iterator[Kernel]:
    block, dtype = model.block, model.block.dtype
    elements = block.tokens * model.vocab
    if block.compiled:
        yield _streamed(K.ADD, block.tokens, model.vocab, dtype.bytes, dtype.bytes, dtype)
    else:
        yield _streamed(K.FILL, block.tokens, model.vocab, 0, 4, DType.FP32)
        yield Elementwise(
            K.CROSS_ENTROPY, block.tokens, model.vocab, 8.0 * elements, 4.0 * elements, True, DType.FP32
        )
        if dtype is not DType.FP32:
            yield _streamed(K.CAST, block.tokens, model.vocab, 4, dtype.bytes, dtype)
    yield Matmul(block.hidden, model.head_width, block.tokens, 1, dtype)
    yield Matmul(block.tokens, block.hidden, model.head_width, 1, dtype)
    yield _norm(model, backward=True)


def _embedding_backward(model: EagerModel) -> Iterator[Kernel]:
    """Rows are sorted by token, summed into a zero-filled gradient, and added to the head's where tied."""
    block, dtype = model.block, model.block.dtype
    size = block.tokens * block.hidden * dtype.bytes
    yield _streamed(K.FILL, model.vocab, block.hidden, 0, dtype.bytes, dtype)
    yield Elementwise(K.EMBEDDING, block.tokens, block.hidden, 2 * size, size, True, dtype)
    if model.tied:
        yield _streamed(K.ADD, model.vocab, block.hidden, 2 * dtype.bytes, dtype.bytes, dtype)
