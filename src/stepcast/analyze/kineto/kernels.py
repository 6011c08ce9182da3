"""Which class of work a GPU kernel is, by its name."""

import re
from functools import cache

from stepcast.ir.timeline import SpanKind, Timeline

MATMUL, ATTENTION, NORM, LOSS = "matmul", "attention", "norm", "softmax and loss"
OPTIMIZER, EMBEDDING, ELEMENTWISE, OTHER = "optimizer", "embedding and sort", "element-wise", "other"
SCAN = "state-space scan"
COPY, COMMUNICATION = "copy", "communication"

# Libraries whose own names hold the word of a class: FBGEMM's tables and quantisation are no products (its
# products say gemm once more), nor are FlashInfer's norms attention.
LIBRARIES = re.compile(r"fbgemm(?:_gpu)?|flashinfer", re.IGNORECASE)
# Inductor names a kernel after the operators it came from, products too, but says first what it is: only a
# template ("tem") multiplies; pointwise ("poi"), for each tensor ("for"), reductions ("red", "per").
INDUCTOR = re.compile(r"triton_(poi|for|red|per|split_scan)_")
POINTWISE = ("poi", "for")
PRODUCTS = (MATMUL, ATTENTION)

# The first that fits: attention kernels are matmuls too, optimizers element-wise. Names of cuBLAS (nvjet,
# gemm, xmma), CUTLASS, cuDNN, FlashAttention, FlashInfer, PyTorch's own, FBGEMM, Apex, Transformer Engine,
# Mamba, Triton and AMD's Tensile (Cijk) and CK.
CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (EMBEDDING, r"(?:split|dense|ssd)_embedding|embedding_(?:bag|codegen)|bounds_check_indices"),
        (ATTENTION, r"flash|fmha|sdpa|attention|attn|(?:Paged|Ragged)KVCache|compute_dot_do_o|convert_dq"),
        (OPTIMIZER, r"multi_tensor_apply|FusedOptimizer|adam|adagrad|lamb_|fused_sgd|optimizer"),
        (SCAN, r"selective_scan|chunk_(?:scan|state|cumsum)|bmm_chunk|state_passing|causal_conv1d"),
        (
            MATMUL,
            r"gemm|gemv|nvjet|xmma|cutlass|cublas|wgmma|(?:_|add|_b|baddb)mm(?![a-z])|matmul|fused_moe|Cijk|"
            r"splitKreduce|dot_kernel",
        ),
        (
            NORM,
            r"layer_?norm|rms_?norm|rmsnorm|GammaBeta|batch_?norm|group_?norm|cuComputeGrad|ln_(?:fwd|bwd)",
        ),
        (LOSS, r"softmax|nll_loss|cross_entropy|logsumexp"),
        (
            EMBEDDING,
            r"(?<!rotary_)(?<!rotary_pos_)embedding|gather_kernel|index|sort|top_?k|scan|scatter|"
            r"compute_grad_weight|segment|unique|permut",
        ),
        (
            ELEMENTWISE,
            r"elementwise|vectorized|unrolled|CatArray|copy_kernel|fill|reduce_kernel|triton|dropout|"
            r"activation|act_and_mul|gelu|silu|swiglu|rotary|rope(?![a-z])|transpose|arange|cast|"
            r"quanti[sz]e|_to_(?:float|half|bf16|fp8|bfloat16)",
        ),
    )
)


@cache
def kernel_class(name: str) -> str:
    inductor = INDUCTOR.match(name)
    if inductor is not None and inductor[1] in POINTWISE:
        return ELEMENTWISE
    words = LIBRARIES.sub("", name)
    classes = (label for label, pattern in CLASSES if pattern.search(words))
    return next((label for label in classes if inductor is None or label not in PRODUCTS), OTHER)


def class_of_names(timeline: Timeline) -> tuple[str, ...]:
    """The class of every name of *timeline*, as far as it names computation."""
    return tuple(map(kernel_class, timeline.names))


def label(name_class: str, kind: int) -> str:
    """The class of a row: communication and copies are told by their kind, not by their name."""
    if kind == SpanKind.COMMUNICATION:
        return COMMUNICATION
    return COPY if kind == SpanKind.COPY else name_class
