"""RMS norms written out in PyTorch, as transformers has them: a kernel for each operation of

    x = x.to(float32); x = x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps); return weight * x.to(input_dtype)

and of what autograd makes of it (models/llama/modeling_llama.py, LlamaRMSNorm).
"""

from stepcast.generate.sizes import Sizes
from stepcast.ir.dtype import DType
from stepcast.ir.work import Elementwise, ElementwiseKind, elementwise
from stepcast.ir.workload import Op

K = ElementwiseKind
Ops = tuple[Op, ...]
WIDE = DType.FP32
# Kernels over one number for each row: the mean's epsilon and its root; of the backward, the root's gradient
# (two products and a power).
ROW_KERNELS, ROW_GRADIENT_KERNELS = 2, 3
# On a weight that multiplies in fp32: a cast, and the 1 that Gemma adds.
WEIGHT_KERNELS = 2


def written_norm(sizes: Sizes, name: str, rows: int, width: int, narrow: DType) -> Ops:
    """*narrow*: the format of what is normed and of the result."""
    weighted = _weighted(sizes, narrow)
    ops = [
        Op(f"{name} square", elementwise(K.MUL, rows, width, 1, 1, WIDE)),
        Op(f"{name} mean", elementwise(K.ROW_SUM, rows, width, 1, 0, WIDE)),
        _on_rows(f"{name} root", rows, ROW_KERNELS),
        Op(f"{name} scale", elementwise(K.BROADCAST, rows, width, 1, 1, WIDE)),
        Op(f"{name} weight", elementwise(K.BROADCAST, rows, width, 1, 1, weighted)),
    ]
    if weighted is WIDE:
        ops.insert(-1, Op(f"{name} weight widen", elementwise(K.MUL, 1, width, 1, 1, WIDE), kernels=WEIGHT_KERNELS))
    if narrow is not WIDE:
        ops.insert(0, _cast(f"{name} widen", rows, width, narrow, WIDE))
        at = len(ops) if weighted is WIDE else -1
        ops.insert(at, _cast(f"{name} narrow", rows, width, WIDE, narrow))
    return tuple(ops)


def _weighted(sizes: Sizes, narrow: DType) -> DType:
    """The format in which the norm is multiplied by its weight."""
    return WIDE if sizes.model.wide_norms else narrow


def written_norm_gradient(sizes: Sizes, name: str, rows: int, width: int, narrow: DType, swapped: bool = False) -> Ops:
    """Of the weight: a product, summed over all rows. Of the input: through the scale, and through the root
    of the mean of squares, whose gradient each element gets a share of; the two added up. *swapped*: the
    gradient arrives with tokens and heads in another order than the input.
    """
    weighted, product = _weighted(sizes, narrow), K.STRIDED if swapped else K.MUL
    ops = [
        Op(f"{name} gradient weighted", elementwise(K.BROADCAST, rows, width, 1, 1, weighted)),
        Op(f"{name} weight product", elementwise(product, rows, width, 2, 1, weighted)),
        Op(f"{name} weight gradient", elementwise(K.COLUMN_SUM, rows, width, 1, 0, weighted)),
        Op(f"{name} root product", elementwise(product, rows, width, 2, 1, WIDE)),
        Op(f"{name} gradient scaled", elementwise(K.BROADCAST, rows, width, 1, 1, WIDE)),
        Op(f"{name} root gradient", elementwise(K.ROW_SUM, rows, width, 1, 0, WIDE)),
        _on_rows(f"{name} root gradient rows", rows, ROW_GRADIENT_KERNELS),
        Op(f"{name} mean gradient", elementwise(K.MASK, rows, width, 0, 1, WIDE)),
        # The square's own power, 1, is a copy.
        Op(f"{name} square gradient power", elementwise(K.COPY, rows, width, 1, 1, WIDE)),
        Op(f"{name} square gradient", elementwise(K.MUL, rows, width, 1, 1, WIDE)),
        Op(f"{name} square gradient product", elementwise(K.MUL, rows, width, 2, 1, WIDE)),
        Op(f"{name} gradient sum", elementwise(K.STRIDED if swapped else K.ADD, rows, width, 2, 1, WIDE)),
    ]
    if narrow is not WIDE:
        at = 0 if weighted is WIDE else 3
        ops.insert(at, _cast(f"{name} gradient widen", rows, width, narrow, WIDE))
        ops.append(_cast(f"{name} gradient narrow", rows, width, WIDE, narrow))
    return tuple(ops)


def _on_rows(name: str, rows: int, kernels: int) -> Op:
    return Op(name, elementwise(K.OTHER, rows, 1, 1, 1, WIDE), kernels=kernels)


def _cast(name: str, rows: int, width: int, before: DType, after: DType) -> Op:
    elements = float(rows * width)
    work = Elementwise(K.CAST, rows, width, before.bytes * elements, after.bytes * elements, False, before)
    return Op(name, work)
