"""RMS norms written out in PyTorch, as transformers has them: a kernel for each operation of

    x = x.to(float32); x = x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps); return weight * x.to(input_dtype)

and of what autograd makes of it (models/llama/modeling_llama.py, LlamaRMSNorm).
"""

from stepcast.generate.sizes import Sizes
from stepcast.ir.dtype import DType
from stepcast.ir.work import Elementwise, ElementwiseKind, streamed
from stepcast.ir.workload import Op

K = ElementwiseKind
WIDE = DType.FP32
# Kernels over one number for each row: the mean's epsilon and its root; of the backward, the root's gradient
# (two products and a power) and the mean's share of it.
ROW_KERNELS, ROW_GRADIENT_KERNELS = 2, 4


def written_norm(sizes: Sizes, name: str, rows: int, width: int) -> tuple[Op, ...]:
    ops = [
        Op(f"{name} square", streamed(K.MUL, rows, width, 1, 1, WIDE)),
        Op(f"{name} mean", streamed(K.OTHER, rows, width, 1, 0, WIDE)),
        _on_rows(f"{name} root", rows, ROW_KERNELS),
        Op(f"{name} scale", streamed(K.MUL, rows, width, 1, 1, WIDE)),
        Op(f"{name} weight", streamed(K.MUL, rows, width, 1, 1, _weighted(sizes))),
    ]
    if sizes.stream is not WIDE:
        ops.insert(0, _cast(f"{name} widen", rows, width, sizes.stream, WIDE))
        at = len(ops) if sizes.model.wide_norms else -1
        ops.insert(at, _cast(f"{name} narrow", rows, width, WIDE, sizes.stream))
    return tuple(ops)


def _weighted(sizes: Sizes) -> DType:
    """The format in which the norm is multiplied by its weight."""
    return WIDE if sizes.model.wide_norms else sizes.stream


def written_norm_gradient(sizes: Sizes, name: str, rows: int, width: int) -> tuple[Op, ...]:
    """Of the weight: a product, summed over all rows. Of the input: through the scale, and through the root
    of the mean of squares, whose gradient each element gets a share of; the two added up.
    """
    weighted = _weighted(sizes)
    ops = [
        Op(f"{name} weight product", streamed(K.MUL, rows, width, 2, 1, weighted)),
        Op(f"{name} weight gradient", streamed(K.OTHER, rows, width, 1, 0, weighted)),
        Op(f"{name} gradient weighted", streamed(K.MUL, rows, width, 1, 1, weighted)),
        Op(f"{name} gradient scaled", streamed(K.MUL, rows, width, 1, 1, WIDE)),
        Op(f"{name} root product", streamed(K.MUL, rows, width, 2, 1, WIDE)),
        Op(f"{name} root gradient", streamed(K.OTHER, rows, width, 1, 0, WIDE)),
        _on_rows(f"{name} root gradient rows", rows, ROW_GRADIENT_KERNELS),
        Op(f"{name} mean gradient", streamed(K.FILL, rows, width, 0, 1, WIDE)),
        Op(f"{name} square gradient", streamed(K.MUL, rows, width, 1, 1, WIDE)),
        Op(f"{name} square gradient product", streamed(K.MUL, rows, width, 2, 1, WIDE)),
        Op(f"{name} gradient sum", streamed(K.ADD, rows, width, 2, 1, WIDE)),
    ]
    if sizes.stream is not WIDE:
        at = 0 if weighted is WIDE else 3
        ops.insert(at, _cast(f"{name} gradient widen", rows, width, sizes.stream, WIDE))
        ops.append(_cast(f"{name} gradient narrow", rows, width, WIDE, sizes.stream))
    return tuple(ops)


def _on_rows(name: str, rows: int, kernels: int) -> Op:
    return Op(name, streamed(K.OTHER, rows, 1, 1, 1, WIDE), kernels=kernels)


def _cast(name: str, rows: int, width: int, before: DType, after: DType) -> Op:
    elements = float(rows * width)
    work = Elementwise(K.CAST, rows, width, before.bytes * elements, after.bytes * elements, False, before)
    return Op(name, work)
