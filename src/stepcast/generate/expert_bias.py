"""What biased experts add: kernels of their own around the grouped matmuls of Megatron-Core's TEGroupedMLP.

Transformer Engine adds the first bias inside the matmul. The gate of gpt-oss, the one published model with
biased experts, is clamped before its activation by PyTorch operators (``fused_bias_geglu.py``,
``weighted_bias_quick_geglu_impl``): they read and write slices of rows, and their backward compares with each
bound, joins masks and selects. The second bias is weighted by the router's probability, so
``TEGroupedMLP._apply_bias`` multiplies and adds it expert by expert and joins the results.

Each is one op of as many passes over its elements as it took an H200 (tools/measure_experts.py): about twice
what its operands alone would need.
"""

from stepcast.generate.parts import K, Ops
from stepcast.generate.sizes import Sizes
from stepcast.ir.work import Work, elementwise
from stepcast.ir.workload import Op, OpPart

# Passes over the inner width: 16.0 to 16.3 and 32.6 to 34.3 measured.
CLAMP_PASSES, CLAMP_BACKWARD_PASSES = 16, 33
# Passes over the experts' width: 9.5 to 11.3 and 15.4 to 23.8, the more the smaller the experts' parts.
BIAS_PASSES, BIAS_BACKWARD_PASSES = 10, 20


def clamped(sizes: Sizes, rows: int, inner: int) -> tuple[Ops, Ops]:
    """Both sides of the gate clamped and joined again; and the gradient of that."""
    return (
        (Op("clamp", _passes(sizes, rows, inner, CLAMP_PASSES), kernels=3, part=OpPart.ACTIVATION),),
        (Op("clamp gradient", _passes(sizes, rows, inner, CLAMP_BACKWARD_PASSES), kernels=7),),
    )


def weighted_bias(sizes: Sizes, rows: int, width: int, groups: int) -> tuple[Ops, Ops]:
    """The second bias times the router's probability, added to the result; and the gradients of all three."""
    # The host took 0.35 ms to issue the forward for 16 experts and 1.4 ms for the backward.
    return (
        (Op("weighted bias", _passes(sizes, rows, width, BIAS_PASSES), kernels=groups),),
        (Op("weighted bias gradient", _passes(sizes, rows, width, BIAS_BACKWARD_PASSES), kernels=2 * groups),),
    )


def _passes(sizes: Sizes, rows: int, columns: int, count: int) -> Work:
    """*count* reads and writes of all elements, a third of them writes."""
    writes = count // 3
    return elementwise(K.MUL, rows, columns, count - writes, writes, sizes.stored)
