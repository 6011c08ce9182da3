"""Rotary embeddings written out in PyTorch, as transformers has them: a kernel for each operation of

    q * cos + cat((-q2, q1)) * sin

where q1 and q2 are the halves of each head (models/llama/modeling_llama.py, apply_rotary_pos_emb), and of
what autograd makes of it. Queries and keys have tokens and heads swapped, of which their kernels take notice.
"""

from stepcast.generate.sizes import Sizes
from stepcast.ir.coded import selects_heads
from stepcast.ir.dtype import DType
from stepcast.ir.work import Elementwise, ElementwiseKind, elementwise
from stepcast.ir.workload import Op

K = ElementwiseKind
Ops = tuple[Op, ...]
WIDE = DType.FP32


def written_rotary(sizes: Sizes, width: int, name: str) -> Ops:
    """Of *width* elements of every token; autocast leaves the angles, and so the result, in fp32."""
    tokens, dtype = sizes.tokens, WIDE if sizes.casts else sizes.stored
    turned = max(1, round(width * sizes.model.position.share))
    half = max(1, turned // 2)

    def op(what: str, kind: ElementwiseKind, columns: int, reads: float) -> Op:
        return Op(f"{name}rotary {what}", elementwise(kind, tokens, columns, reads, 1, dtype))

    if sizes.model.attention_sinks:  # each half by itself: models/gpt_oss/modeling_gpt_oss.py
        ops = [op(f"product {at}", K.STRIDED, half, 1) for at in range(4)]
        ops += [op("difference", K.ADD, half, 2), op("sum", K.ADD, half, 2), op("join", K.JOIN, turned, 1)]
    else:
        ops = [
            op("cos", K.STRIDED, turned, 1),
            op("negate", K.BROADCAST, half, 1),
            op("join", K.JOIN, turned, 1),
            op("sin", K.BROADCAST, turned, 1),
            op("sum", K.STRIDED, turned, 2),
        ]
    if sizes.model.position.tailed:
        ops.append(op("tail", K.JOIN, width, 1))
    if dtype is not sizes.stored:
        ops.append(_cast(f"{name}rotary narrow", tokens, width, dtype, sizes.stored))
    return tuple(ops)


def written_rotary_gradient(sizes: Sizes, width: int, name: str) -> Ops:
    """Each half goes back into a whole filled with zeros, the second with its sign turned."""
    tokens, dtype = sizes.tokens, WIDE if sizes.casts else sizes.stored
    position = sizes.model.position
    turned = max(1, round(width * position.share))
    half = max(1, turned // 2)

    def op(what: str, kind: ElementwiseKind, columns: int, reads: float) -> Op:
        return Op(f"{name}rotary gradient {what}", elementwise(kind, tokens, columns, reads, 1, dtype))

    ops = []
    if dtype is not sizes.stored:
        ops.append(_cast(f"{name}rotary gradient widen", tokens, width, sizes.stored, dtype))
    if sizes.model.attention_sinks:
        ops += [op(f"product {at}", K.STRIDED, half, 1) for at in range(4)]
        ops += [op("negate", K.BROADCAST, half, 1), op("difference", K.ADD, half, 2), op("sum", K.ADD, half, 2)]
        ops.append(op("join", K.COPY, turned, 1))
    else:
        ops += [
            op("sin", K.STRIDED, turned, 1),
            op("negate", K.BROADCAST, half, 1),
            op("second fill", K.FILL, turned, 0),
            op("second half", K.BROADCAST, half, 1),
            op("first fill", K.FILL, turned, 0),
            op("first half", K.BROADCAST, half, 1),
            op("add", K.ADD, turned, 2),
            op("cos", K.STRIDED, turned, 1),
            op("sum", K.ADD if position.tailed else K.STRIDED, turned, 2),
        ]
    if position.tailed:
        ops += [
            op("tail fill", K.FILL, width, 0),
            op("tail", K.BROADCAST, max(1, width - turned), 1),
            op("turned fill", K.FILL, width, 0),
            op("turned", K.BROADCAST, turned, 1),
            op("tail add", K.ADD, width, 2),
        ]
    if not sizes.model.joined:
        ops.append(op("copy", K.STRIDED, width, 1))
    return tuple(ops)


def written_joining(sizes: Sizes) -> Ops:
    """The gradients of queries, keys and values, which one product made, in one tensor again.

    Slices of it are each filled into zeros and added up (Phi-3, BLOOM), or heads are joined and their order
    swapped (GPT-NeoX), or parts that lie as they should are joined (GPT-2).
    """
    widths = (sizes.query_width, sizes.key_width, sizes.value_width)
    tokens, whole, dtype = sizes.tokens, sum(widths), sizes.stored

    def op(what: str, kind: ElementwiseKind, columns: int, reads: float) -> Op:
        return Op(f"join gradients {what}".strip(), elementwise(kind, tokens, columns, reads, 1, dtype))

    if sizes.model.gated or selects_heads(sizes.model):
        parts = [op(f"fill {at}", K.FILL, whole, 0) for at in range(3)]
        parts += [op(f"slice {at}", K.BROADCAST, width, 1) for at, width in enumerate(widths)]
        return (*parts, *(op(f"add {at}", K.ADD, whole, 2) for at in range(2)))
    if sizes.model.position.tailed:
        return op("", K.JOIN, whole, 1), op("swap", K.BROADCAST, whole, 1)
    return (op("", K.COPY, whole, 1),)


def _cast(name: str, rows: int, width: int, before: DType, after: DType) -> Op:
    elements = float(rows * width)
    work = Elementwise(K.CAST, rows, width, before.bytes * elements, after.bytes * elements, False, before)
    return Op(name, work)
