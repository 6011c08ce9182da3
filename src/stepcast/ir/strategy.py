"""How a model is spread over GPUs and run."""

from dataclasses import dataclass
from enum import StrEnum

from stepcast.ir.check import require, require_counts
from stepcast.ir.dtype import DType
from stepcast.ir.layout import Layout


class ScheduleKind(StrEnum):
    """Order in which a pipeline stage runs its forwards and backwards."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    DUALPIPE = "dualpipe"


class RecomputeKind(StrEnum):
    """What a backward computes again instead of keeping it."""

    NONE = "none"
    SELECTIVE = "selective"  # the attention core (Korthikanti et al. 2022)
    FULL = "full"  # whole layers
    BLOCK = "block"  # the first n layers of each stage


@dataclass(frozen=True, slots=True)
class Recompute:
    kind: RecomputeKind = RecomputeKind.NONE
    # Layers of each stage that are recomputed, for BLOCK alone.
    layers: int = 0

    def __post_init__(self) -> None:
        require_counts(self, 0, "layers")
        require(
            (self.layers > 0) == (self.kind is RecomputeKind.BLOCK),
            "a number of recomputed layers goes with recompute 'block', and only with it",
        )


class Sharding(StrEnum):
    """What data-parallel ranks split among them instead of each keeping it whole."""

    NONE = "none"
    ZERO_1 = "zero-1"  # optimizer states
    ZERO_2 = "zero-2"  # and gradients
    ZERO_3 = "zero-3"  # and parameters
    FSDP = "fsdp"  # as ZeRO-3, gathered layer by layer
    HYBRID_FSDP = "hybrid-fsdp"  # FSDP inside a node, replicas across nodes


class ContextKind(StrEnum):
    """How context-parallel ranks see the keys and values of the others."""

    RING = "ring"  # passed on step by step beside the attention
    ALL_TO_ALL = "all-to-all"  # heads exchanged for positions (DeepSpeed Ulysses)
    ALL_GATHER = "all-gather"  # keys and values gathered before the attention (Llama 3)


class TrainingKind(StrEnum):
    FULL = "full"
    LORA = "lora"


class Execution(StrEnum):
    """How the host issues kernels."""

    EAGER = "eager"  # one by one
    COMPILED = "compiled"  # fused by a compiler
    GRAPHS = "graphs"  # captured and replayed, so that the host costs nothing


@dataclass(frozen=True, slots=True)
class Overlap:
    """Which communication runs beside computation."""

    gradients: bool = True  # data-parallel reduction beside the backward
    parameters: bool = True  # parameter gathering beside the forward
    tensor: bool = False  # tensor-parallel collectives beside the matmul next to them
    transfers: bool = True  # sends between stages beside the next micro-batch
    experts: bool = False  # dispatch and combine beside another micro-batch


NO_OVERLAP = Overlap(gradients=False, parameters=False, transfers=False)
USUAL_OVERLAP = Overlap()
NO_RECOMPUTE = Recompute()
PRECISIONS = (DType.BF16, DType.FP16, DType.FP32, DType.TF32, DType.FP8, DType.MXFP8, DType.NVFP4)
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Strategy:
    """Everything a user chooses about a training step, apart from the model and the cluster."""

    layout: Layout
    micro_batch: int
    global_batch: int
    seq: int
    sequence_parallel: bool = False
    context: ContextKind = ContextKind.RING
    expert_tp: int = 1
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    # Layers of each stage and chunk in model order; empty means an even split.
    stage_layers: tuple[int, ...] = ()
    sharding: Sharding = Sharding.NONE
    recompute: Recompute = NO_RECOMPUTE
    precision: DType = DType.BF16
    gradient_dtype: DType = DType.FP32
    training: TrainingKind = TrainingKind.FULL
    lora_rank: int = 0
    flash_attention: bool = True
    overlap: Overlap = USUAL_OVERLAP
    # None: one reduction for all gradients. Megatron-LM's default grows with dp; DDP's is 25 MiB.
    bucket_bytes: int | None = 40_000_000 * 4
    execution: Execution = Execution.GRAPHS
    expert_imbalance: float = 1.0
    # Tokens an expert takes at most, as a multiple of an even share; None drops none.
    expert_capacity: float | None = None

    def __post_init__(self) -> None:
        require_counts(self, 1, "micro_batch", "global_batch", "seq", "expert_tp")
        require_counts(self, 0, "lora_rank")
        require(
            self.precision in PRECISIONS, f"precision {self.precision} cannot train; use one of {PRECISIONS}"
        )
        per_round = self.micro_batch * self.layout.dp
        require(
            self.global_batch % per_round == 0,
            f"global batch {self.global_batch} is not a multiple of micro-batch x dp = {per_round}: "
            f"the nearest that is: {max(1, round(self.global_batch / per_round)) * per_round}",
        )
        chunks = self.layout.pp * self.layout.vpp
        require(
            len(self.stage_layers) in (0, chunks),
            f"stage layers need pp x vpp = {chunks} numbers, not {len(self.stage_layers)}",
        )
        require(
            self.layout.vpp == 1 or self.layout.pp > 1,
            "vpp splits pipeline stages into chunks and needs pp > 1",
        )
        require(
            (self.lora_rank > 0) == (self.training is TrainingKind.LORA),
            "lora_rank goes with training 'lora', and only with it",
        )
        require(
            self.expert_imbalance >= 1, f"expert imbalance is 1 (even) or more, not {self.expert_imbalance}"
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches each pipeline runs in a step."""
        return self.global_batch // (self.micro_batch * self.layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq
