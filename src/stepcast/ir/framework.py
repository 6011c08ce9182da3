"""The decisions of the software in a training step, whatever strategy a user chooses.

The values here are those of the profile ``megatron-core``; ``data/frameworks`` has that and others, and where
each is documented.

Optimizers differ in the states that each stores for a weight, and in the bytes that an update reads and writes:

- adamw: two moments (Loshchilov and Hutter 2019). 8-bit moments have a scale in fp32 for each block of 256
  (Dettmers et al. 2022; bitsandbytes, ``optim/optimizer.py``).
- sgd: none, or one with momentum (torch.optim.SGD).
- muon: one for the matrices of the layers, whose direction is made orthogonal by products; two, as AdamW, for
  all else (Jordan et al. 2024, github.com/KellerJordan/Muon; torch.optim.Muon).
- adafactor: of the second moment of a matrix the sums of its rows and columns (Shazeer and Stern 2018).
"""

from enum import StrEnum
from typing import NamedTuple

from stepcast.ir.strategy import Sharding, Strategy
from stepcast.ir.types import DType, Natural, dataclass, require
from stepcast.units import GIB


class OptimizerKind(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    MUON = "muon"
    ADAFACTOR = "adafactor"


@dataclass(frozen=True, slots=True)
class Passes:
    """The (reads, writes) by an update of each element that it touches."""

    weight: tuple[int, int] = (1, 1)
    gradient: int = 1  # reads
    moments: tuple[int, int] = (0, 0)  # of all moments together
    temporary: tuple[int, int] = (0, 0)  # in the format of the gradient
    narrow: tuple[int, int] = (0, 0)  # in bf16


class OptimizerFacts(NamedTuple):
    """The properties of a kind of optimizer."""

    moments: int  # of a weight; those of matrices alone are described where they are counted
    formats: tuple[str, ...]  # of moments, by their names
    listed: Passes  # operation by operation over lists of tensors: PyTorch's torch/optim/{adam,sgd,_muon,_adafactor}.py
    fused: Passes | None = None  # in one kernel, where there is one


# Formats of moments by the names that ask for them; fp16 and fp8 are Megatron-LM's --exp-avg-dtype.
FORMATS = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16, "fp8": DType.FP8, "8bit": DType.INT8}
WIDE = ("fp32", "bf16")
ADAMW_LISTED = Passes(weight=(2, 2), gradient=2, moments=(5, 3), temporary=(3, 3))
MUON_LISTED = Passes(weight=(2, 2), gradient=2, moments=(2, 1), temporary=(1, 1), narrow=(3, 2))
OPTIMIZERS: dict[OptimizerKind, OptimizerFacts] = {
    OptimizerKind.ADAMW: OptimizerFacts(2, tuple(FORMATS), ADAMW_LISTED, Passes(moments=(2, 2))),
    OptimizerKind.SGD: OptimizerFacts(0, (), Passes(), Passes()),
    OptimizerKind.SGD_MOMENTUM: OptimizerFacts(1, (*WIDE, "8bit"), Passes(moments=(3, 2)), Passes(moments=(1, 1))),
    OptimizerKind.MUON: OptimizerFacts(2, WIDE, MUON_LISTED),
    OptimizerKind.ADAFACTOR: OptimizerFacts(1, WIDE, Passes(weight=(2, 1), gradient=3, temporary=(6, 5))),
}
BLOCK = 256  # elements of an 8-bit moment that share a scale
ITERATIONS = 5  # of Newton and Schulz: three products each


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer and the states it stores for each parameter."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    moment_dtype: DType = DType.FP32
    # An fp32 copy of the weights where those are less precise.
    master_weights: bool = True
    # Updates all weights in one kernel; without, a temporary as large as one moment exists during the step.
    fused: bool = True
    # The norm of all gradients is computed before the update, to clip them by it.
    clips: bool = True

    def __post_init__(self) -> None:
        known = [FORMATS[name] for name in OPTIMIZERS[self.kind].formats or ("fp32",)]
        expected = ", ".join(map(str, known))
        require(self.moment_dtype in known, f"{self.kind} keeps no moments in {self.moment_dtype}; expected {expected}")

    @property
    def moments(self) -> int:
        """Moments of a weight that is no matrix."""
        return OPTIMIZERS[self.kind].moments

    @property
    def moment_bytes(self) -> float:
        """Bytes of one element of a moment, with its part of a scale."""
        scale = DType.FP32.bytes / BLOCK if self.moment_dtype is DType.INT8 else 0.0
        return self.moment_dtype.bytes + scale

    @property
    def passes(self) -> Passes:
        """The passes of an update; of matrices alone where the optimizer treats them apart."""
        facts = OPTIMIZERS[self.kind]
        return facts.fused or facts.listed if self.fused else facts.listed

    @property
    def knows_matrices(self) -> bool:
        """True if matrices are treated otherwise than the rest."""
        return self.kind in (OptimizerKind.MUON, OptimizerKind.ADAFACTOR)


ADAM = Optimizer()


def parse_optimizer(text: str, master_weights: bool = True, clips: bool = True) -> Optimizer:
    """Return the optimizer that NAME or NAME:FORMAT asks for."""
    name, colon, form = text.partition(":")
    require(name in set(OptimizerKind), f"optimizer {name!r}: expected {', '.join(OptimizerKind)}")
    kind = OptimizerKind(name)
    formats = OPTIMIZERS[kind].formats
    hint = f"expected {', '.join(formats)}" if formats else f"it has none, give {name} alone"
    require(not colon or form in formats, f"optimizer {name} has no moments in {form!r}: {hint}")
    return Optimizer(kind, FORMATS[form or "fp32"], master_weights, clips=clips)


class Execution(StrEnum):
    """The way in which the host issues kernels."""

    BLOCKING = "blocking"  # one by one, each when the one before has ended (CUDA_LAUNCH_BLOCKING)
    EAGER = "eager"  # one by one
    PARTIAL_GRAPHS = "partial-graphs"  # captured but for routed experts, whose numbers of tokens change
    GRAPHS = "graphs"  # captured and replayed, so that the host costs nothing


class Kernels(StrEnum):
    """The fusion of memory-bound work, which decides how often it runs and what is saved for the backward."""

    PLAIN = "plain"  # PyTorch's own modules, gradients freed after each step
    COMPILED = "compiled"  # torch.compile
    FUSED = "fused"  # by hand, with flat gradient buffers: Megatron-LM with Transformer Engine


class AttentionKernel(StrEnum):
    """The generation of the attention's kernels; ``cost.pace`` has how much slower the earlier are."""

    CUDA_12 = "cuda-12"  # cuDNN's and cuBLAS's of early 2025, the first for Blackwell
    CUDA_11 = "cuda-11"  # products of cuBLAS one per head, where no kernel fuses them
    FLASH_1 = "flash-1"
    FLASH_2 = "flash-2"
    CURRENT = "current"  # cuDNN's, as PyTorch 2.11 calls them


class Dispatcher(StrEnum):
    """The way in which tokens reach their experts, in Megatron's words; former names are read too."""

    ALL_TO_ALL = "alltoall"  # once for each expert
    ALL_GATHER = "allgather"  # to all ranks, which choose; results are summed back by a reduce-scatter
    DEEPEP = "deepep"  # once for each rank and node, where ranks forward them
    HYBRIDEP = "hybridep"  # likewise, by TMA and into the experts' order

    @classmethod
    def _missing_(cls, value: object) -> "Dispatcher | None":
        return {"all-to-all": cls.ALL_TO_ALL, "forwarding": cls.DEEPEP}.get(str(value))

    @property
    def sends_once(self) -> bool:
        """True if a token is sent once to each rank; Megatron-Core's flex dispatcher then weighs results in fp32."""
        return self in (Dispatcher.DEEPEP, Dispatcher.HYBRIDEP)


class Offloaded(StrEnum):
    """The tensors that leave the GPU where the optimizer is offloaded to the host."""

    # Megatron-Core's HybridDeviceOptimizer: gradients are copied out once they are reduced.
    STATES = "states"
    # DeepSpeed's ZeRO-Offload: gradients that ranks split leave as they are reduced, during the backward.
    GRADIENTS = "gradients"
    # FSDP's CPUOffload: the weights that ranks split, too; each comes back before it is gathered.
    WEIGHTS = "weights"


class SelectiveRule(StrEnum):
    """The rule by which selective recomputation chooses what to run again."""

    MODULES = "modules"  # the attention core, or the modules that are named
    # Element-wise work, gathers and every second matmul, whatever the modules: torchtitan's policy.
    ALTERNATE_MATMULS = "alternate-matmuls"


class LossKernel(StrEnum):
    """The path from logits to a loss, which decides how often logits exist at once."""

    IN_PLACE = "in-place"  # Megatron-LM's vocab_parallel_cross_entropy: one fp32 copy, worked on in place
    COMPILED = "compiled"  # its fused_vocab_parallel_cross_entropy: a softmax next to that copy
    ENGINE = "engine"  # Transformer Engine's: the gradient is written over the logits
    COMPOSER = "composer"  # flash-attn's, the gradient next to the logits; two metrics repeat the loss in fp32
    # TRL's chunked_nll: products and loss of 256 tokens at a time, run again in the backward, from weights that are
    # cast to fp32 and, by autocast, back; or (DeepSpeed has no autocast) multiplied in fp32.
    CHUNKED = "chunked"
    CHUNKED_FP32 = "chunked-fp32"


class Modules(StrEnum):
    """The library whose modules plain PyTorch runs."""

    TORCH = "torch"  # torch.nn: a kernel for each norm, one product for queries, keys and values
    # Hugging Face transformers: RMS norms in fp32 operation by operation, a product for each projection.
    TRANSFORMERS = "transformers"
    CAPTURED = "captured"  # of a captured program: views and modules are counted too


class SsmKernels(StrEnum):
    """The kernels of the scans of Mamba-2 layers."""

    FUSED = "fused"  # mamba-ssm and causal-conv1d
    EAGER = "eager"  # PyTorch operations, which transformers falls back to where these are not installed


class Peak(StrEnum):
    """The peak of memory that a framework's authors print."""

    ALLOCATED = "allocated"  # torch.cuda.max_memory_allocated
    RESERVED = "reserved"  # torch.cuda.max_memory_reserved
    TOTAL = "total"  # nvidia-smi


@dataclass(frozen=True, slots=True)
class Overhead:
    """The memory a process takes on a GPU beyond the tensors of its model.

    *context_bytes*: the driver's context with the kernels it loaded. *communicator_bytes*: buffers of one group of the
    communication library. *buffer_bytes*: flat buffers the framework allocates for any model; *bucket_buffers*: those
    of the size of a bucket of gradients. *fragmentation*: of activations and temporaries, the share that the allocator
    reserves on top because freed blocks do not fit the next request. *displaced*: the same share of optimizer moments
    and of the temporaries of their update, which take the blocks of freed activations. *expandable_segments*: the
    allocator grows segments in place (PyTorch's expandable_segments:True). *step_bytes*: per parameter whose states a
    rank keeps, what the optimizer copies for its step in large pieces, for which no freed activation is large enough.
    *gradient_bytes*: per parameter a rank holds, more copies of its gradient. *exchanged_tensors*: of each layer and
    micro-batch in flight, the tensors of tensor-parallel collectives whose memory an eager host that runs ahead cannot
    use again yet (PyTorch's record_stream); short of memory, the allocator waits for them. *whole_master*: each rank
    keeps the fp32 weights of all its parameters and updates a part of them. *bucket_copies*: gradients that ranks sum
    complete exist a second time, in buckets (PyTorch's DDP without gradient_as_bucket_view). *fitted*: some of these
    figures were learnt from peaks of published runs, which are then no test of them.
    """

    context_bytes: float = 0.8e9
    communicator_bytes: float = 0.3 * GIB
    fragmentation: float = 0.05
    displaced: float = 0.2
    expandable_segments: bool = False
    buffer_bytes: float = 0.0
    bucket_buffers: float = 0.0
    step_bytes: float = 0.0
    gradient_bytes: float = 0.0
    exchanged_tensors: float = 0.0
    whole_master: bool = False
    bucket_copies: bool = False
    fitted: bool = False

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require(getattr(self, name) >= 0, f"memory overhead: {name} is below 0")


USUAL_OVERHEAD = Overhead()


@dataclass(frozen=True, slots=True)
class Framework:
    """The software that runs a step: its kernels, formats, buffers and defaults."""

    name: str = "megatron-core"
    kernels: Kernels = Kernels.FUSED
    execution: Execution = Execution.GRAPHS
    modules: Modules = Modules.TORCH
    # An eager host goes on to the next step while the GPU still runs this one, or waits for its end.
    runs_ahead: bool = False
    # The format in which gradients are accumulated and reduced.
    gradient_dtype: DType = DType.FP32
    optimizer: Optimizer = ADAM
    # Of gradients reduced together; 0: all of a stage's. None: as many as Megatron-Core takes by itself, see
    # bucket_parameters.
    bucket_bytes: int | None = None
    bucket_elements: int = 0  # in place of those; 0: by ranks
    flash_attention: bool = True
    # Attention with sinks, or biased by distance (ALiBi), never runs as one kernel.
    unfused_biases: bool = False
    # Attention whose heads share keys runs as single operations in fp32 where no kernel takes it.
    grouped_fallback: bool = False
    # Attention to a window runs by a mask over all pairs, and so does all attention that is compiled.
    masks_windows: bool = False
    attention: AttentionKernel = AttentionKernel.CURRENT
    selective: SelectiveRule = SelectiveRule.MODULES
    # Plain PyTorch ends a recomputation once the backward has what it needs, as it does since 2.1.
    stops_early: bool = True
    # The logits outlive a loss that is not compiled, or are freed with it.
    keeps_logits: bool = False
    loss: LossKernel = LossKernel.IN_PLACE
    # Fused kernels save the input of an activation in fp8 (Megatron-Core's activation_func_fp8_input_store).
    fp8_activations: bool = False
    # Fused attention multiplies in fp8 where linear layers do (Transformer Engine's fp8_dpa,
    # Megatron-Core's fp8_dot_product_attention).
    fp8_attention: bool = False
    # Transformer Engine's fused operations: a gate's backward is one pass, products add up adapters (Megatron-Core's
    # use_transformer_engine_op_fuser; MLPerf's use_te_ops).
    op_fuser: bool = False
    # Number of the last layers that stay out of fp8 and fp4 (Megatron-Core's num_layers_at_end_in_bf16).
    wide_layers: Natural = 0
    # Micro-batches whose gradient of the output projection is made when the pipeline empties, and which keep
    # that of their logits until then (Megatron-Core's defer_embedding_wgrad_compute); 0: none.
    deferred_gradients: Natural = 0
    # On attention probabilities and before each residual, as GPT-2 and -3 were trained; later models are not.
    dropout: bool = False
    # The weight gradient's matmul adds to the sum of the micro-batches, or kernels of their own do.
    fused_accumulation: bool = True
    # Without sequence parallelism: each tensor rank sends a part to the next stage, which gathers them
    # (Narayanan et al. 2021, section 4.1; DeepSpeed's pipeline engine), or all send everything.
    boundary_scattered: bool = False
    # Host microseconds that a collective of tensor parallelism takes beyond its issue: the Python of the layer around
    # it. As many more for each tensor-parallel rank where stages are on different nodes (crossing), and for each more
    # node that the tensor-parallel ranks are on (spanning).
    tensor_issue_us: Natural = 0
    crossing_issue_us: Natural = 0
    spanning_issue_us: Natural = 0
    # Milliseconds by which each message between stages may be late where the CPU waits for it: in some runs all are.
    late_message_ms: Natural = 0
    # ZeRO 1 and 2: each rank owns complete tensors and sends them to the others after its update, one rank after
    # the other and overlapping nothing (InternEvo's HybridZeroOptimizer), or all are split and gathered.
    owners_broadcast: bool = False
    # ZeRO 3: each tensor is gathered by itself when it is needed, and the part of each rank copied to its
    # place by a kernel of its own (DeepSpeed of 2021, whose partition_parameters.py calls
    # torch.distributed.all_gather with lists), or those of a layer together, ahead and into one buffer.
    listed_gathers: bool = False
    # ZeRO 3 and FSDP: parameters of the next layer are gathered for its backward when that of this one has ended, which
    # hides nothing (PyTorch's BackwardPrefetch.BACKWARD_POST), or while it runs.
    late_gathers: bool = False
    # An eager host reads the norm of each bucket of gradients before it is reduced (Megatron-Core's
    # check_for_nan_in_grad); a captured graph cannot.
    checks_gradients: bool = False
    # The experts' matmuls add the bias, apply the activation and quantise its result and gradient
    # themselves (Transformer Engine's fused grouped MLP with cuDNN's kernels), or other kernels do.
    fused_experts: bool = False
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    ssm_kernels: SsmKernels = SsmKernels.FUSED
    offloaded: Offloaded = Offloaded.STATES
    # Kernels that an eager host could issue while the training loop works between micro-batches, the GPU being idle.
    loop_kernels: int = 0
    # Norms, rotations and gates of transformers' modules are Liger's kernels, one for each, and its loss multiplies by
    # the output projection itself, a part of the tokens at a time (linkedin/Liger-Kernel).
    liger: bool = False
    # Adapters are stored in fp32 and cast for each use under autocast (peft's autocast_adapter_dtype), inputs too.
    fp32_adapters: bool = False
    # Under sequence parallelism, tensor ranks exchange what adapters of products split by rows add, or gather it
    # (NeMo's a2a_experimental).
    exchanges_adapters: bool = False
    overhead: Overhead = USUAL_OVERHEAD
    peak: Peak = Peak.ALLOCATED

    def __post_init__(self) -> None:
        require(
            self.bucket_bytes is None or self.bucket_bytes >= 0,
            f"gradient buckets hold at least 1 byte, or 0 for one bucket, not {self.bucket_bytes}",
        )

    def __hash__(self) -> int:
        """Hash what most often differs: hashes are asked for far more often than values are made."""
        return hash((self.name, self.bucket_bytes, self.kernels, self.execution, self.gradient_dtype))

    def bucket_parameters(self, strategy: Strategy, first_piece: bool) -> int | None:
        """Parameters whose gradients are reduced together; None: all of a stage's.

        By default, buckets have a size of their own or grow with the ranks that reduce them, and only the
        first chunk of the first stage has any, where reductions overlap: the other stages end before it
        (Megatron-Core's distributed_data_parallel.py).
        """
        if self.bucket_bytes is not None:
            return -(-self.bucket_bytes // int(self.gradient_dtype.bytes)) or None
        if not (first_piece and strategy.overlap.gradients):
            return None
        return self.bucket_elements or max(40_000_000, 1_000_000 * strategy.layout.dp * strategy.layout.cp)

    def flat_bytes(self, strategy: Strategy) -> float:
        """Return the bytes of flat buffers: those that any model has, and those of buckets under ZeRO.

        Where reductions overlap, ZeRO 1 and 2 fill a second one (deepspeed/runtime/zero/stage_1_and_2.py, backward).
        """
        buffers, sharding = self.overhead.bucket_buffers, strategy.sharding
        if sharding in (Sharding.ZERO_1, Sharding.ZERO_2) and strategy.overlap.gradients:
            buffers *= 2
        return self.overhead.buffer_bytes + (buffers * (self.bucket_bytes or 0) if sharding is not Sharding.NONE else 0)

    @property
    def writes_out(self) -> bool:
        """True if every operation of its modules' source is a kernel, and saves what its gradient needs."""
        return self.modules is Modules.TRANSFORMERS and self.kernels is Kernels.PLAIN

    @property
    def copies_gradients(self) -> bool:
        """True if gradients that ranks split are copied into a buffer first; Megatron-FSDP's products write there."""
        return self.kernels is not Kernels.FUSED or not self.fused_accumulation

    @property
    def chunks_loss(self) -> bool:
        """True if the loss of transformers' models is TRL's chunked one."""
        return self.loss in (LossKernel.CHUNKED, LossKernel.CHUNKED_FP32) and self.writes_out and not self.liger

    @property
    def runs_liger(self) -> bool:
        """True if transformers' norms, rotations, gates and loss are Liger's kernels."""
        return self.liger and self.writes_out

    def keeps_fp32_weights(self, strategy: Strategy) -> bool:
        """Return True if the weights that are stored are the optimizer's (FSDP), cast before they are gathered."""
        fsdp = strategy.sharding in (Sharding.FSDP, Sharding.HYBRID_FSDP)
        return fsdp and self.optimizer.master_weights


MEGATRON_CORE = Framework()
