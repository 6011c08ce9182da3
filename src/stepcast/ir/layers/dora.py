"""DoRA's magnitudes around a pair of adapters (Liu et al. 2024), a kernel for each operation of peft's code.

    weight_norm = norm(weight + scaling * (lora_B.weight @ lora_A.weight)); mag_norm_scale = magnitude / weight_norm
    result = result + (mag_norm_scale - 1) * result + mag_norm_scale * lora_result * scaling

(peft 0.21, tuners/lora/dora.py, DoraLinearLayer.forward, and variants.py, which make the product of both matrices by
multiplying an identity.) Magnitudes have the format of the adapters, so products with them do too. It is modelled for
that code alone (``ir.legality``).
"""

from stepcast.ir.dtype import DType
from stepcast.ir.layers.ops import K, moved_op
from stepcast.ir.work import Matmul
from stepcast.ir.workload import Op

# Bytes that the L2 cache of an NVIDIA GPU fetches for one access: a sector. Sums with a transposed input take 7.6 ms in
# a traced step of Llama 3.2 1B on an H200, predicted 9.2.
FETCH_BYTES = 32


def weigh(name: str, inputs: int, outputs: int, rank: int, stored: DType, wide: DType) -> tuple[Op, ...]:
    """Return the product of both matrices and the norms of the rows of its sum with the weights. *wide*: the format of
    the adapters' inputs.
    """
    name, size, narrow = f"{name} dora", wide.bytes, stored.bytes
    casts = 0 if wide is stored else 2
    return (
        moved_op(f"{name} identity", K.COPY, inputs, inputs, size, 2 * size, wide, kernels=3),
        Op(f"{name} down", Matmul(inputs, rank, inputs, 1, stored), kernels=2),
        Op(f"{name} up", Matmul(inputs, outputs, rank, 1, stored), kernels=2),
        *(moved_op(f"{name} widen", K.CAST, outputs, inputs, narrow, size, stored) for _ in range(casts)),
        moved_op(f"{name} scaled", K.MUL, outputs, inputs, size, size, wide),
        # One input is transposed: each number of it is read with its neighbours in memory.
        moved_op(f"{name} total", K.STRIDED, outputs, inputs, size + FETCH_BYTES, size, wide),
        moved_op(f"{name} norms", K.MUL, outputs, inputs, size, 0, wide, kernels=4),
    )


def forward(name: str, rows: int, outputs: int, stored: DType, wide: DType) -> tuple[Op, ...]:
    """Return both products with magnitudes, the scaling and the sums."""
    name, shape, size, narrow = f"{name} dora", (rows, outputs), wide.bytes, stored.bytes
    # Operands of two formats keep PyTorch from reading several elements at once: 265 us for 67 million on an H200.
    mixed = K.MUL if wide is stored else K.STRIDED
    return (
        moved_op(f"{name} result", mixed, *shape, narrow, size, wide),
        moved_op(f"{name} adapters", mixed, *shape, narrow, size, wide),
        moved_op(f"{name} scale", K.MUL, *shape, size, size, wide),
        moved_op(f"{name} sum", K.ADD, *shape, 2 * size, size, wide),
        moved_op(f"{name} result sum", mixed, *shape, narrow + size, size, wide),
        *([] if wide is stored else [moved_op(f"{name} narrow", K.CAST, *shape, size, narrow, stored)]),
    )


def backward(name: str, rows: int, outputs: int, stored: DType, wide: DType) -> tuple[Op, ...]:
    """Return the gradients of both products: of the result and of the adapters' output, scaled and cast, and of the
    magnitudes, sums over tokens of products with what the forward multiplied.
    """
    name, shape, size, narrow = f"{name} dora", (rows, outputs), wide.bytes, stored.bytes
    casts = [] if wide is stored else [moved_op(f"{name} gradient narrow", K.CAST, *shape, size, narrow, stored)]
    product = K.MUL if wide is stored else K.CAST
    return (
        *(moved_op(f"{name} gradient widen", K.CAST, *shape, narrow, size, stored) for _ in casts),
        *(3 * casts),
        moved_op(f"{name} gradient scale", K.MUL, *shape, size, size, wide),
        *(moved_op(f"{name} gradient {way}", K.BROADCAST, *shape, size, size, wide) for way in ("result", "adapters")),
        # These read the gradient too, which takes less time than one element after the other.
        *(moved_op(f"{name} magnitude {way}", product, *shape, narrow, size, stored) for way in ("result", "adapters")),
        moved_op(f"{name} magnitude sums", K.MUL, *shape, 2 * size, 0, wide, kernels=6),
        moved_op(f"{name} gradient sum", K.ADD, *shape, 2 * narrow, narrow, stored),
    )
