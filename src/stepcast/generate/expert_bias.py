"""What biased experts add: kernels of their own around the grouped matmuls of Megatron-Core's TEGroupedMLP.

Transformer Engine adds the first bias inside the matmul. The gate of gpt-oss, the one published model with
biased experts, is clamped before its activation by PyTorch operators (``fused_bias_geglu.py``,
``weighted_bias_quick_geglu_impl``). The second bias is weighted by the router's probability, so
``TEGroupedMLP._apply_bias`` multiplies and adds it expert by expert and joins the results.
"""

from stepcast.generate.parts import K, Ops
from stepcast.generate.sizes import Sizes
from stepcast.ir.work import Elementwise, streamed
from stepcast.ir.workload import Op

MASK_BYTES = 1.0


def clamped(sizes: Sizes, rows: int, inner: int) -> tuple[Ops, Ops]:
    """Both sides of the gate clamped and joined again; and the gradient of that.

    PyTorch compares with each bound, joins the two masks of the side that has two bounds, and selects
    (``clamp_backward`` in its FunctionsManual.cpp).
    """
    dtype, elements = sizes.stored, float(rows * inner)
    element = sizes.element
    masks = Elementwise(
        K.OTHER,
        rows,
        3 * inner,  # one bound of the gate, two of the other side
        3 * element * elements + 2 * MASK_BYTES * elements,
        4 * MASK_BYTES * elements,
        dtype=dtype,
    )
    select = Elementwise(
        K.OTHER, rows, 2 * inner, 2 * (element + MASK_BYTES) * elements, 2 * element * elements, dtype=dtype
    )
    forward = (
        Op("clamp", streamed(K.OTHER, rows, 2 * inner, 1, 1, dtype)),
        Op("clamp join", streamed(K.COPY, rows, 2 * inner, 1, 1, dtype)),
    )
    backward = (
        Op("clamp masks", masks),
        Op("clamp select", select),
        Op("clamp gradient join", streamed(K.COPY, rows, 2 * inner, 1, 1, dtype)),
    )
    return forward, backward


def weighted_bias(sizes: Sizes, rows: int, width: int) -> tuple[Ops, Ops]:
    """The second bias times the router's probability, added to the result; and the gradients of all three."""
    dtype = sizes.stored
    forward = (
        Op("bias product", streamed(K.OTHER, rows, width, 0, 1, dtype)),
        Op("bias sum", streamed(K.ADD, rows, width, 2, 1, dtype)),
        Op("bias join", streamed(K.COPY, rows, width, 1, 1, dtype)),
    )
    backward = (
        Op("bias gradient product", streamed(K.MUL, rows, width, 1, 1, dtype)),
        Op("bias gradient sum", streamed(K.OTHER, rows, width, 1, 0, dtype, backward=True)),
        Op("probability gradient product", streamed(K.MUL, rows, width, 1, 1, dtype)),
        Op("probability gradient sum", streamed(K.OTHER, rows, width, 1, 0, dtype, backward=True)),
        Op("bias gradient join", streamed(K.COPY, rows, width, 1, 1, dtype)),
    )
    return forward, backward
