"""What each framework does unless told otherwise; a published row rarely says."""

from dataclasses import dataclass, replace

from stepcast.ir.dtype import DType
from stepcast.ir.strategy import (
    NO_OVERLAP,
    USUAL_OVERLAP,
    ContextKind,
    Execution,
    Kernels,
    Overlap,
    Recompute,
    RecomputeKind,
    Sharding,
)
from stepcast.validate.published.software import AttentionKernel

NONE, FULL = Recompute(), Recompute(RecomputeKind.FULL)
SELECTIVE = Recompute(RecomputeKind.SELECTIVE)
# Autograd's own order, Megatron-LM's before 2022: both gradients of a matmul, then the sum over tensor ranks.
EARLY_OVERLAP = NO_OVERLAP


@dataclass(frozen=True, slots=True)
class Defaults:
    """Of a framework at the time of its runs; *about* names where they are documented."""

    about: str
    precision: DType = DType.BF16
    sharding: Sharding = Sharding.NONE
    gradient_dtype: DType = DType.FP32
    sequence_parallel: bool = False
    flash_attention: bool = True
    recompute: Recompute = NONE
    overlap: Overlap = USUAL_OVERLAP
    kernels: Kernels = Kernels.FUSED
    execution: Execution = Execution.EAGER
    context: ContextKind = ContextKind.RING
    seq: int = 2048
    # Model chunks per stage where the row speaks of an interleaved schedule without a number.
    chunks: int = 2
    attention: AttentionKernel = AttentionKernel.CURRENT
    # Megatron-LM of 2021 and what was built on it: see Strategy.
    dropout: bool = False
    fused_accumulation: bool = True
    boundary_scattered: bool = False
    owners_broadcast: bool = False
    stops_early: bool = True
    memory: str = "megatron"  # the framework's overhead in cost.memory.overhead
    peak: str = "allocated"  # which peak its authors print: allocated, reserved, or total as nvidia-smi does


# NVIDIA's performance recipes.
RECIPES = Defaults(
    "Megatron-Bridge scripts/performance: gradients reduced in bf16, tensor-parallel communication "
    "overlapped, kernels captured in graphs",
    sharding=Sharding.ZERO_1,
    gradient_dtype=DType.BF16,
    sequence_parallel=True,
    overlap=Overlap(tensor=True),
    execution=Execution.GRAPHS,
    seq=8192,
)
# What was built on Megatron-LM of 2021.
EARLY = Defaults(
    "Megatron-LM v2 (Narayanan et al. 2021): fused kernels, unfused attention, gradients all-reduced "
    "in fp16 after the last backward",
    precision=DType.FP16,
    gradient_dtype=DType.FP16,
    flash_attention=False,
    recompute=FULL,
    overlap=EARLY_OVERLAP,
    dropout=True,
    fused_accumulation=False,
    boundary_scattered=True,
    attention=AttentionKernel.NONE,
)

# The first entry that the framework's name starts with decides.
DEFAULTS: tuple[tuple[str, Defaults], ...] = (
    ("megatron-bridge", RECIPES),
    (
        "nemo",
        replace(
            RECIPES,
            about="NeMo performance recipes: gradients reduced in bf16, tensor-parallel communication "
            "overlapped",
        ),
    ),
    (
        "megatron-core",
        Defaults(
            "Megatron-LM README: overlapped gradients, parameters and tensor-parallel communication",
            sharding=Sharding.ZERO_1,
            sequence_parallel=True,
            overlap=Overlap(tensor=True),
            seq=4096,
        ),
    ),
    (
        "megatron-deepspeed",
        replace(
            EARLY,
            about="Megatron-DeepSpeed of 2021: fused kernels, unfused attention, nothing overlapped",
            memory="deepspeed",
            peak="total",
        ),
    ),
    (
        "megatron-lm 2023",
        Defaults(
            "Megatron-LM of January 2023 (commit 285068c8, README and arguments.py): selective recomputation "
            "and sequence parallelism for models of this size, distributed optimizer, nothing overlapped but "
            "sums over tensor ranks, dropout",
            sharding=Sharding.ZERO_1,
            sequence_parallel=True,
            flash_attention=False,
            recompute=SELECTIVE,
            overlap=NO_OVERLAP,
            dropout=True,
            attention=AttentionKernel.NONE,
        ),
    ),
    (
        "megatron-lm 2",  # a commit of the present, named after it
        Defaults(
            "Megatron-LM with Transformer Engine: distributed optimizer, nothing overlapped unless asked, "
            "context parallelism by all-to-all (SimuMax, docs/b200)",
            sharding=Sharding.ZERO_1,
            sequence_parallel=True,
            overlap=replace(NO_OVERLAP, tensor_gradients=True),
            context=ContextKind.ALL_TO_ALL,
            seq=4096,
        ),
    ),
    ("megatron-lm", replace(EARLY, seq=1024)),
    (
        "deepspeed",
        Defaults(
            "DeepSpeed ZeRO-3 (Narayanan et al. 2021, section 5.2)",
            precision=DType.FP16,
            sharding=Sharding.ZERO_3,
            gradient_dtype=DType.FP16,
            flash_attention=False,
            recompute=FULL,
            dropout=True,
            fused_accumulation=False,
            attention=AttentionKernel.NONE,
            memory="deepspeed",
        ),
    ),
    (
        "llm-foundry",
        Defaults(
            "llm-foundry's MPT configurations before PyTorch 2: FSDP, eager modules, FlashAttention 1",
            sharding=Sharding.FSDP,
            kernels=Kernels.PLAIN,
            attention=AttentionKernel.FLASH_1,
            stops_early=False,
            memory="pytorch",
        ),
    ),
    (
        "torchtitan",
        Defaults(
            "torchtitan's Llama configurations: FSDP2, torch.compile, gradients reduced in fp32",
            sharding=Sharding.FSDP,
            sequence_parallel=True,
            recompute=SELECTIVE,
            kernels=Kernels.COMPILED,
            context=ContextKind.ALL_GATHER,
            attention=AttentionKernel.FLASH_2,
            seq=8192,
            memory="pytorch",
            peak="reserved",
        ),
    ),
    (
        "megascale",
        Defaults(
            "Jiang et al. 2024, sections 3.2 and 3.3: optimizer states sharded, tensor, data and pipeline "
            "communication overlapped, FlashAttention 2",
            sharding=Sharding.ZERO_1,
            sequence_parallel=True,
            overlap=Overlap(tensor=True),
            attention=AttentionKernel.FLASH_2,
        ),
    ),
    (
        "internevo",
        Defaults(
            "InternLM's 7B configuration of 2023: ZeRO-1 with whole tensors, which their owners broadcast "
            "(overlap_sync_grad, not overlap_sync_param), PyTorch's own kernels, FlashAttention 1",
            sharding=Sharding.ZERO_1,
            gradient_dtype=DType.BF16,
            overlap=replace(USUAL_OVERLAP, parameters=False),
            owners_broadcast=True,
            stops_early=False,
            kernels=Kernels.PLAIN,
            attention=AttentionKernel.FLASH_1,
        ),
    ),
)
UNKNOWN = Defaults("those of present Megatron-LM", sharding=Sharding.ZERO_1, sequence_parallel=True)


def defaults_of(framework: str) -> Defaults:
    word = framework.lower()
    return next((each for start, each in DEFAULTS if word.startswith(start)), UNKNOWN)
