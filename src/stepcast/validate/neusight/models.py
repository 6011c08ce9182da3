"""The kernels of the models in NeuSight's set, as eager fp32 PyTorch runs the Hugging Face code of that time.

Attention stores its scores; gelu_new is spelled out in eight element-wise kernels; heads are split and merged
by copies. Sizes: the model configurations of NeuSight (ASPLOS'25 artefact).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stepcast.ir.dtype import DType
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul

Kernel = Matmul | Elementwise
K = ElementwiseKind
FP32 = DType.FP32


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the configuration says; *inner* is the width of all heads together."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    activation_kernels: int  # element-wise kernels of the activation function
    mask_kernels: int  # between the scores and their softmax: scale, mask, clamp
    inner: int = 0
    fused_qkv: bool = False
    head_dense: bool = False  # a dense layer with activation and norm before the decoder
    decoder_layers: int = 0  # with cross attention, besides the *layers* of the encoder
    norm_kernels: int = 1  # a norm spelled out in element-wise kernels takes several

    @property
    def width(self) -> int:
        return self.inner or self.hidden


ARCHITECTURES = {
    "bert_large": Architecture(24, 1024, 16, 4096, 30522, 1, 2, head_dense=True),
    "gpt2_large": Architecture(36, 1280, 20, 5120, 50257, 8, 2, fused_qkv=True),
    "gpt3_xl": Architecture(24, 3072, 24, 12288, 50257, 8, 2, fused_qkv=True),
    "gpt3_27": Architecture(32, 2560, 32, 10240, 50257, 8, 2, fused_qkv=True),
    "opt_13": Architecture(24, 2048, 32, 8192, 50272, 1, 2),
    "switchxl4": Architecture(
        24, 1024, 32, 16384, 32128, 1, 1, inner=4096, decoder_layers=24, norm_kernels=4
    ),
}


def neusight_kernels(
    model: str, seq: int, batch: int, training: bool
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Forward and, when *training*, backward kernels; ValueError for a model whose sizes are not known."""
    if model not in ARCHITECTURES:
        raise ValueError(f"unknown model {model!r}; known are {', '.join(ARCHITECTURES)}")
    shape = ARCHITECTURES[model]
    forward = tuple(_model(shape, seq, batch, training))
    return forward, tuple(_backward(forward)) if training else ()


def _wave(
    kind: ElementwiseKind, rows: int, columns: int, inputs: int = 1, backward: bool = False
) -> Elementwise:
    size = 4.0 * rows * columns
    return Elementwise(kind, rows, columns, inputs * size, size, backward, FP32)


def _norm(shape: Architecture, tokens: int) -> Iterator[Kernel]:
    if shape.norm_kernels == 1:
        yield _wave(K.LAYER_NORM, tokens, shape.hidden)
        return
    for _ in range(shape.norm_kernels):
        yield _wave(K.ADD, tokens, shape.hidden)


def _attention(shape: Architecture, seq: int, batch: int, training: bool) -> Iterator[Kernel]:
    tokens, width, heads = seq * batch, shape.width, shape.heads
    if shape.fused_qkv:
        yield Matmul(tokens, 3 * width, shape.hidden, 1, FP32)
    else:
        for _ in range(3):
            yield Matmul(tokens, width, shape.hidden, 1, FP32)
    for _ in range(3):
        yield _wave(K.COPY, tokens, width)  # split into heads
    rows = batch * heads * seq
    yield Matmul(seq, seq, width // heads, batch * heads, FP32)
    for _ in range(shape.mask_kernels):
        yield _wave(K.ADD, rows, seq)
    yield _wave(K.SOFTMAX, rows, seq)
    if training:
        yield _wave(K.DROPOUT, rows, seq)
    yield Matmul(seq, width // heads, seq, batch * heads, FP32)
    yield _wave(K.COPY, tokens, width)  # merge heads
    yield Matmul(tokens, shape.hidden, width, 1, FP32)
    if training:
        yield _wave(K.DROPOUT, tokens, shape.hidden)
    yield _wave(K.ADD, tokens, shape.hidden, 2)
    yield from _norm(shape, tokens)


def _mlp(shape: Architecture, tokens: int, training: bool) -> Iterator[Kernel]:
    yield Matmul(tokens, shape.ffn, shape.hidden, 1, FP32)
    for index in range(shape.activation_kernels):
        yield _wave(K.ADD, tokens, shape.ffn, 2 if index >= 6 else 1)
    yield Matmul(tokens, shape.hidden, shape.ffn, 1, FP32)
    if training:
        yield _wave(K.DROPOUT, tokens, shape.hidden)
    yield _wave(K.ADD, tokens, shape.hidden, 2)
    yield from _norm(shape, tokens)


def _model(shape: Architecture, seq: int, batch: int, training: bool) -> Iterator[Kernel]:
    tokens = seq * batch
    yield _wave(K.EMBEDDING, tokens, shape.hidden)
    for _ in range(shape.layers):
        yield from _attention(shape, seq, batch, training)
        yield from _mlp(shape, tokens, training)
    for _ in range(shape.decoder_layers):
        yield from _attention(shape, seq, batch, training)
        yield from _attention(shape, seq, batch, training)
        yield from _mlp(shape, tokens, training)
    if shape.head_dense:
        yield Matmul(tokens, shape.hidden, shape.hidden, 1, FP32)
        yield _wave(K.ADD, tokens, shape.hidden)
        yield _wave(K.LAYER_NORM, tokens, shape.hidden)
    yield Matmul(tokens, shape.vocab, shape.hidden, 1, FP32)


def _backward(forward: tuple[Kernel, ...]) -> Iterator[Kernel]:
    """Two products for each product; element-wise kernels read the gradient and what was saved."""
    for work in reversed(forward):
        if isinstance(work, Matmul):
            yield Matmul(work.m, work.k, work.n, work.batch, FP32)
            yield Matmul(work.k, work.n, work.m, work.batch, FP32)
        else:
            kind = K.ADD if work.kind is K.LAYER_NORM else work.kind
            inputs = 4 if work.kind is K.LAYER_NORM else 2
            yield _wave(kind, work.rows, work.columns, inputs, work.kind in (K.SOFTMAX, K.EMBEDDING))
