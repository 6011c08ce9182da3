"""Which class of work a GPU kernel is, by its name."""

import re

from stepcast.ir.timeline import SpanKind, Timeline

MATMUL, ATTENTION, NORM, LOSS = "matmul", "attention", "norm", "softmax and loss"
OPTIMIZER, EMBEDDING, ELEMENTWISE, OTHER = "optimizer", "embedding and sort", "element-wise", "other"
COPY, COMMUNICATION = "copy", "communication"

# The first that fits: attention kernels are matmuls too, optimizers element-wise. Names of cuBLAS (nvjet,
# gemm, xmma), CUTLASS, cuDNN, FlashAttention, PyTorch's own, Apex, Transformer Engine, Triton and AMD's
# Tensile (Cijk).
CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (ATTENTION, r"flash|fmha|sdpa|attention|attn|compute_dot_do_o|convert_dq"),
        (OPTIMIZER, r"multi_tensor_apply|FusedOptimizer|adam|lamb_|optimizer"),
        (MATMUL, r"gemm|gemv|nvjet|xmma|cutlass|cublas|wgmma|_mm_|matmul|Cijk|splitKreduce|dot_kernel"),
        (
            NORM,
            r"layer_?norm|rms_?norm|rmsnorm|GammaBeta|batch_?norm|group_?norm|cuComputeGrad|ln_(?:fwd|bwd)",
        ),
        (LOSS, r"softmax|nll_loss|cross_entropy|logsumexp"),
        (
            EMBEDDING,
            r"embedding|gather_kernel|index|radix_?sort|scan|scatter|compute_grad_weight|segment|unique",
        ),
        (
            ELEMENTWISE,
            r"elementwise|vectorized|unrolled|CatArray|copy_kernel|fill|reduce_kernel|triton|dropout|"
            r"activation|gelu|silu|swiglu|rotary|rope|transpose|arange|cast",
        ),
    )
)


def kernel_class(name: str) -> str:
    return next((label for label, pattern in CLASSES if pattern.search(name)), OTHER)


def class_of_names(timeline: Timeline) -> tuple[str, ...]:
    """The class of every name of *timeline*, as far as it names computation."""
    return tuple(map(kernel_class, timeline.names))


def label(name_class: str, kind: int) -> str:
    """The class of a row: communication and copies are told by their kind, not by their name."""
    if kind == SpanKind.COMMUNICATION:
        return COMMUNICATION
    return COPY if kind == SpanKind.COPY else name_class
