"""DoRA's magnitudes around a pair of adapters (Liu et al. 2024), a kernel for each operation of peft's code.

    weight_norm = norm(weight + scaling * (lora_B.weight @ lora_A.weight)); mag_norm_scale = magnitude / weight_norm
    result = (mag_norm_scale - 1) * base_result + mag_norm_scale * lora_result * scaling

(peft 0.21, tuners/lora/dora.py, DoraLinearLayer.forward, which makes the product of both matrices by multiplying an
identity.) It is modelled for that code alone (``ir.legality``).
"""

from stepcast.ir.dtype import DType
from stepcast.ir.work import Elementwise, Matmul, elementwise
from stepcast.ir.work import ElementwiseKind as K
from stepcast.ir.workload import Op


def forward(name: str, rows: int, inputs: int, outputs: int, rank: int, stored: DType, wide: DType) -> tuple[Op, ...]:
    """Return what DoRA adds to a forward: the product of both matrices, the norms of the rows of their sum with the
    weights, and the outputs scaled by magnitudes over norms. *wide*: the format of the adapters' inputs.
    """
    name, elements = f"{name} dora", float(inputs * outputs)

    def pass_over(what: str, kind: K, rows: int, columns: int, reads: float, writes: float, kernels: int = 1) -> Op:
        return Op(f"{name} {what}", elementwise(kind, rows, columns, reads, writes, wide), kernels=kernels)

    widen = Elementwise(K.CAST, outputs, inputs, stored.bytes * elements, wide.bytes * elements, False, stored)
    return (
        pass_over("identity", K.COPY, inputs, inputs, 1, 2, kernels=3),
        Op(f"{name} down", Matmul(inputs, rank, inputs, 1, stored), kernels=2),
        Op(f"{name} up", Matmul(inputs, outputs, rank, 1, stored), kernels=2),
        *(Op(f"{name} widen", widen) for _ in range(0 if wide is stored else 2)),
        pass_over("scaled", K.MUL, outputs, inputs, 1, 1),
        # One input is transposed, so that each number of it reads a sector of memory.
        pass_over("total", K.STRIDED, outputs, inputs, 9, 1),
        pass_over("norms", K.MUL, outputs, inputs, 1, 0, kernels=4),
        pass_over("outputs", K.MUL, rows, outputs, 3, 3, kernels=4),
    )


def backward(name: str, rows: int, outputs: int, wide: DType) -> Op:
    """Return the gradients of both products with magnitudes, and the sums over tokens for the magnitudes' own."""
    return Op(f"{name} lora magnitude gradient", elementwise(K.MUL, rows, outputs, 5, 4, wide), kernels=10)
