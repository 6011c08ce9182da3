"""Embedding before the first layer; norm, output projection and loss after the last."""

from stepcast.generate.by_operation import capped
from stepcast.generate.parts import K, Linear, Ops, add, collective, layer, norm_backward, norm_forward, norm_layer
from stepcast.generate.sizes import Sizes
from stepcast.generate.tensor import GATHER, REDUCE, SCATTER, column_layer, column_waits
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Kernels
from stepcast.ir.group import Group
from stepcast.ir.model_parts import PositionKind
from stepcast.ir.strategy import TrainingKind
from stepcast.ir.work import Elementwise, elementwise
from stepcast.ir.workload import Layer, Op, Role

# What an eager host could issue while it makes positions, masks and angles before the first layer of a model
# of transformers, having waited for the GPU to tell whether sequences are packed (masking_utils.py): the GPU
# of traced forwards is idle for 1.2 to 1.7 ms.
BEGINNING_KERNELS = 80


def embedding_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """Rows looked up where this rank holds them, summed over tp; positions and norm where there are any."""
    model, dtype = sizes.model, sizes.stream
    width = model.embedding_width or model.hidden
    begins = BEGINNING_KERNELS if sizes.by_operation else 0
    lookup = elementwise(K.EMBEDDING, sizes.tokens, width, 1, 1, dtype)
    forward: list[Op] = [Op("lookup", lookup, kernels=1 + begins)]
    weight: list[Op] = []
    backward: list[Op] = []
    if sizes.tp > 1:
        size = sizes.activation_bytes
        if sizes.strategy.sequence_parallel:
            forward.append(collective("embedding tp reduce-scatter", SCATTER, size, Group.TP))
            backward.append(collective("embedding tp all-gather", GATHER, size, Group.TP))
        else:
            forward.append(collective("embedding tp all-reduce", REDUCE, size, Group.TP))
    if width != model.hidden:
        project = Linear("project in", sizes.outer_tokens, width, model.hidden, sizes.dtype, adapted=False)
        forward += project.forward(sizes)
        backward += project.input_gradient(sizes)
        weight += project.weight_gradient(sizes)
    if model.position.kind is PositionKind.LEARNED:
        forward.append(add(sizes, "positions", sizes.outer_tokens, model.hidden))
    if model.embedding_norm:
        forward += norm_forward(sizes, "norm", sizes.outer_tokens, model.hidden)
        backward = [*norm_backward(sizes, "norm", sizes.outer_tokens, model.hidden), *backward]
    if sizes.strategy.training is TrainingKind.FULL:
        weight += _lookup_gradient(sizes, width)
    return (layer(Role.EMBEDDING, tuple(forward), tuple(backward), tuple(weight)),)


def _lookup_gradient(sizes: Sizes, width: int) -> Ops:
    """Rows sorted by token and summed. Plain PyTorch sums them into a gradient of zeros for the whole table
    (embedding_dense_backward), which is added to the head's where the two share their weights.
    """
    dtype = sizes.stream
    ops: Ops = (Op("lookup gradient", elementwise(K.EMBEDDING, sizes.tokens, width, 2, 1, dtype, backward=True)),)
    if sizes.fused:
        return ops
    ops = (Op("lookup gradient fill", elementwise(K.FILL, sizes.vocab, width, 0, 1, dtype)), *ops)
    if sizes.model.tied and sizes.strategy.layout.pp == 1:
        ops += (Op("tied gradients", elementwise(K.ADD, sizes.vocab, width, 2, 1, dtype)),)
    return ops


def head_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """Final norm, logits and cross entropy over a vocabulary that tensor ranks share."""
    model = sizes.model
    width = model.embedding_width or model.hidden
    layers = []
    if model.final_norm:
        waits = column_waits(sizes, Role.HEAD)
        layers.append(norm_layer(sizes, Role.FINAL_NORM, sizes.outer_tokens, waits, branches=False))
    if width != model.hidden:
        project = Linear("project out", sizes.outer_tokens, model.hidden, width, sizes.dtype, adapted=False)
        layers.append(
            layer(
                Role.HEAD_PROJECTION,
                project.forward(sizes),
                project.input_gradient(sizes),
                project.weight_gradient(sizes),
            )
        )
    logits = Linear("logits", sizes.tokens, width, sizes.logits_width, sizes.unquantised, adapted=False)
    head = column_layer(sizes, Role.HEAD, (logits,), width=width)
    return (*layers, head, _loss(sizes))


def _loss(sizes: Sizes) -> Layer:
    """Logits raised to fp32; each rank's maximum, exponential sum and target logit are summed over tp.

    Source: Shoeybi et al. 2019, section 3: scalars per token travel instead of logits.
    """
    tokens, vocab = sizes.tokens, sizes.vocab
    if sizes.framework.kernels is Kernels.COMPILED and sizes.tp == 1:
        return _compiled_loss(sizes)
    forward: list[Op] = []
    backward: list[Op] = []
    caps: tuple[Ops, Ops] = ((), ())
    if sizes.by_operation and sizes.model.logit_softcap:
        caps = capped("logits", tokens, vocab, sizes.stored)
    forward += caps[0]
    if sizes.stored is not DType.FP32:
        forward.append(Op("cast", _cast(sizes, sizes.element, 4)))
    forward.append(Op("cross entropy", elementwise(K.CROSS_ENTROPY, tokens, vocab, 3, 1, DType.FP32)))
    forward += _reductions(sizes)
    if not sizes.fused:
        # The likelihood's gradient is written into zeros before the softmax's is computed from it.
        backward.append(Op("loss gradient fill", elementwise(K.FILL, tokens, vocab, 0, 1, DType.FP32)))
    backward.append(
        Op("cross entropy gradient", elementwise(K.CROSS_ENTROPY, tokens, vocab, 2, 1, DType.FP32, backward=True))
    )
    if sizes.stored is not DType.FP32:
        backward.append(Op("cast gradient", _cast(sizes, 4, sizes.element)))
    backward += caps[1]
    return layer(Role.LOSS, tuple(forward), tuple(backward))


def _compiled_loss(sizes: Sizes) -> Layer:
    """One pass over the logits, which it widens on the way; backward another, which writes their gradient
    over zeros that are filled in first (PyTorch Inductor's kernels of log_softmax and nll_loss).
    """
    tokens, vocab, dtype = sizes.tokens, sizes.vocab, sizes.stored
    return layer(
        Role.LOSS,
        (Op("cross entropy", elementwise(K.FUSED_LOSS, tokens, vocab, 1, 0, dtype)),),
        (
            Op("loss gradient fill", elementwise(K.FILL, tokens, vocab, 0, 1, dtype)),
            Op("cross entropy gradient", elementwise(K.FUSED_LOSS, tokens, vocab, 1, 1, dtype, backward=True)),
        ),
    )


def _reductions(sizes: Sizes) -> Ops:
    if sizes.tp == 1:
        return ()
    names = ("maximum", "target logit", "exponential sum")
    return tuple(collective(f"loss tp all-reduce {name}", REDUCE, 4 * sizes.tokens, Group.TP) for name in names)


def _cast(sizes: Sizes, read: int, write: int) -> Elementwise:
    """Logits in another format: *read* and *write* are bytes per element."""
    rows, columns = sizes.tokens, sizes.vocab
    elements = float(rows * columns)
    return Elementwise(K.CAST, rows, columns, read * elements, write * elements, False, sizes.stored)
