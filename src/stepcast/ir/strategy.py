"""Strategy: the spread of a model over GPUs, the choices of its run, and the words for them on command lines and in
profiles.
"""

from collections.abc import Iterable
from dataclasses import fields
from enum import StrEnum
from operator import attrgetter

from stepcast.ir.layout import Layout
from stepcast.ir.schedules import SCHEDULES, Pairs
from stepcast.ir.schedules import ScheduleKind as ScheduleKind
from stepcast.ir.types import ByIdentity, DType, Facts, Natural, Remembered, Size, assign, dataclass, replace, require
from stepcast.units import nearest


class StrategyError(ValueError):
    """A strategy that cannot run; says which rule it breaks and the nearest value that keeps it."""


class RecomputeKind(StrEnum):
    """The part that a backward computes again instead of loading it from memory."""

    NONE = "none"
    SELECTIVE = "selective"  # the attention core (Korthikanti et al. 2022)
    FULL = "full"  # whole layers
    BLOCK = "block"  # the first n layers of each stage


class RecomputeModule(StrEnum):
    """A part of a layer that selective recomputation runs again (Megatron-Core's recompute_modules)."""

    CORE = "core-attention"  # core_attn
    LATENT_UP = "latent-up"  # mla_up_proj: from the latent to queries, keys and values
    NORMS = "norms"  # layernorm, where it is a kernel of its own
    MLP = "mlp"  # of dense layers
    EXPERT_ACTIVATION = "expert-activation"  # moe_act
    EXPERTS = "experts"  # moe: router, exchange, experts and shared experts


@dataclass(frozen=True, slots=True)
class Recompute:
    kind: RecomputeKind = RecomputeKind.NONE
    # Layers of each stage (or chunk) that are recomputed, for BLOCK alone.
    layers: Natural = 0
    # The modules that SELECTIVE recomputes; empty means the attention core.
    modules: tuple[RecomputeModule, ...] = ()

    def __post_init__(self) -> None:
        require(
            (self.layers > 0) == (self.kind is RecomputeKind.BLOCK),
            "a number of recomputed layers goes with recompute 'block', and only with it",
        )
        require(
            not self.modules or self.kind is RecomputeKind.SELECTIVE,
            "recomputed modules go with recompute 'selective', and only with it",
        )

    @property
    def selected(self) -> tuple[RecomputeModule, ...]:
        """The modules that are recomputed where layers are not as a whole."""
        return self.modules or (RecomputeModule.CORE,) if self.kind is RecomputeKind.SELECTIVE else ()

    def whole_layers(self, layers: int) -> int:
        """Return how many of a piece's *layers* are completely recomputed."""
        if self.kind is RecomputeKind.BLOCK:
            return min(self.layers, layers)
        return layers if self.kind is RecomputeKind.FULL else 0


@dataclass(frozen=True, slots=True)
class Offload:
    """The shares that are stored in the memory of the host instead of the GPU's.

    *optimizer*: of the parameters, those whose optimizer states the host keeps and updates.
    *activations*: of the layers of each stage (or chunk), from the first on, those that keep theirs there.
    """

    optimizer: float = 0.0
    activations: float = 0.0

    def __post_init__(self) -> None:
        for name in ("optimizer", "activations"):
            share = getattr(self, name)
            require(0 <= share <= 1, f"the share of {name} on the host is between 0 and 1, not {share}")

    def layers(self, layers: int) -> int:
        """Return how many of a piece's *layers* keep their activations on the host."""
        return round(self.activations * layers)


class Sharding(StrEnum):
    """The states that data-parallel ranks split among them instead of each storing all of them."""

    NONE = "none"
    ZERO_1 = "zero-1"  # optimizer states (Megatron's distributed optimizer)
    ZERO_2 = "zero-2"  # and gradients
    ZERO_3 = "zero-3"  # and parameters
    FSDP = "fsdp"  # as ZeRO-3; the sharded weights are the fp32 ones, gathered in the training precision
    HYBRID_FSDP = "hybrid-fsdp"  # FSDP inside a node, replicas across nodes; experts likewise

    @property
    def splits_gradients(self) -> bool:
        return self not in (Sharding.NONE, Sharding.ZERO_1)

    @property
    def splits_parameters(self) -> bool:
        return self in (Sharding.ZERO_3, Sharding.FSDP, Sharding.HYBRID_FSDP)


class ContextKind(StrEnum):
    """The way in which context-parallel ranks see the keys and values of the others; former names are read too."""

    RING = "p2p"  # passed on step by step while attention runs
    ALL_TO_ALL = "a2a"  # heads exchanged for positions (DeepSpeed Ulysses)
    ALL_GATHER = "allgather"  # keys and values gathered before the attention (Llama 3)

    @classmethod
    def _missing_(cls, value: object) -> "ContextKind | None":
        former = {"ring": cls.RING, "all-to-all": cls.ALL_TO_ALL, "ulysses": cls.ALL_TO_ALL}
        return {**former, "all-gather": cls.ALL_GATHER}.get(str(value))


class TrainingKind(StrEnum):
    FULL = "full"
    LORA = "lora"


class Objective(StrEnum):
    """The loss of fine-tuning, which decides how many sequences one sample has and who else runs forward."""

    SFT = "sft"  # the next token, as in pre-training
    DPO = "dpo"  # a chosen and a rejected answer, under the policy and under a frozen reference (Rafailov et al. 2023)
    REWARD = "reward"  # a chosen and a rejected answer, a number for each instead of logits

    @property
    def sequences(self) -> int:
        """The sequences of one sample."""
        return 1 if self is Objective.SFT else 2


class BaseWeights(StrEnum):
    """The format in which frozen weights of linear layers are stored; each product dequantises them first.

    NF4 stores 4 bits and, for each block of 64, a scale: in fp32, or itself quantised to 8 bits with an fp32 scale
    for each 256 blocks (Dettmers et al., QLoRA, 2023, section 3; bitsandbytes, Params4bit). LLM.int8 stores 8 bits and
    a scale for each row; its forward multiplies in int8 (Dettmers et al., 2022; bitsandbytes, MatMul8bitLt).
    """

    TRAINED = "trained"  # as the training precision stores them
    NF4 = "nf4"  # with double quantisation
    NF4_SINGLE = "nf4-single"
    INT8 = "int8"

    @property
    def bytes(self) -> float:
        """Bytes of one weight, with its part of the scales."""
        if self is BaseWeights.INT8:
            return 1.0
        return 0.5 + (1 / 64 + 4 / (64 * 256) if self is BaseWeights.NF4 else 4 / 64)


@dataclass(frozen=True, slots=True)
class Overlap:
    """The communication that overlaps computation."""

    gradients: bool = True  # data-parallel reduction during the backward
    parameters: bool = True  # parameter gathering during the forward
    tensor: bool = False  # tensor-parallel collectives during the matmul next to them
    # Sums of input gradients over tensor ranks during the weight gradients; Megatron-LM does since 2022.
    tensor_gradients: bool = True
    transfers: bool = True  # sends between stages during the next micro-batch
    # Dispatch and combine during another micro-batch: see Strategy.pairs_micro_batches.
    experts: bool = False


NO_OVERLAP = Overlap(gradients=False, parameters=False, tensor_gradients=False, transfers=False)
USUAL_OVERLAP = Overlap()
NO_RECOMPUTE = Recompute()
NO_OFFLOAD = Offload()
NO_TARGETS = ("none",)  # adapters that are switched off
# The format in which weights and activations are stored, by the format of the matmuls.
STORED_AS: dict[DType, DType] = {
    **{dtype: dtype for dtype in (DType.BF16, DType.FP16, DType.FP32)},
    DType.TF32: DType.FP32,
    **dict.fromkeys((DType.FP8, DType.MXFP8, DType.NVFP4), DType.BF16),
}
PRECISIONS = tuple(STORED_AS)
# Formats to which torch.autocast casts.
AUTOCAST = (DType.BF16, DType.FP16)
# Formats in which weights can be stored without a bf16 copy (Megatron-LM's --fp8-param-gather).
PARAMETER_FORMATS = (DType.FP8, DType.MXFP8)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Everything a user chooses about a training step, apart from the model, the software and the cluster.

    A Strategy is consistent in itself; ``ir.legality.check`` says whether it suits a model.
    """

    layout: Layout
    micro_batch: Size
    global_batch: Size
    seq: Size
    sequence_parallel: bool = False
    context: ContextKind = ContextKind.RING
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    # Layers of each stage and chunk in model order, none of them where it is 0; empty means an even split.
    stage_layers: tuple[int, ...] = ()
    sharding: Sharding = Sharding.NONE
    recompute: Recompute = NO_RECOMPUTE
    offload: Offload = NO_OFFLOAD
    precision: DType = DType.BF16
    training: TrainingKind = TrainingKind.FULL
    lora_rank: Natural = 0
    # Linear layers with adapters; empty: all. *lora_separate*: projections that other software fuses have adapters of
    # their own (peft). *lora_dropout*: dropout before each pair.
    lora_targets: tuple[str, ...] = ()
    lora_separate: bool = False
    lora_dropout: bool = False
    dora: bool = False  # adapters change the direction of weights, whose norms are trained too (Liu et al. 2024)
    # Final layers that are trained, without embeddings and head; 0: everything is.
    trained_layers: Natural = 0
    base_weights: BaseWeights = BaseWeights.TRAINED
    objective: Objective = Objective.SFT
    # Tokens of a document in packed sequences, the mean weighted by tokens: attention stays within it. 0: not packed.
    document: Natural = 0
    # Tokens of the longest sequences, which decide memory where *seq* is a mean over padded ones; 0: all are equal.
    longest: Natural = 0
    # Share of a step's tokens that are samples' own: others are padding, and the wait for ranks with longer ones.
    filled: float = 1.0
    overlap: Overlap = USUAL_OVERLAP
    # Tokens of the busiest expert rank as a multiple of an even share.
    expert_imbalance: float = 1.0
    # Rows of the largest expert over the mean of all, and blocks of rows that experts of a rank fill over equal ones'.
    largest_expert: float = 1.0
    expert_blocks: float = 1.0
    # Tokens an expert takes at most, as a multiple of an even share; None drops none.
    expert_capacity: float | None = None
    # Number of runs of the model's module for further tokens (multi-token prediction, DeepSeek-V3, 2024,
    # section 2.2); 0 leaves it out.
    mtp_layers: Natural = 0
    # ZeRO 3 and FSDP: free a layer's gathered parameters after each forward and gather them again for its
    # backward, or keep them. None: free them but in a pipeline (torchtitan's fsdp_reshard_after_forward).
    reshard: bool | None = None
    # Weights of matmuls are stored and gathered in fp8, with no bf16 copy; the optimizer's stay as they are.
    fp8_parameters: bool = False
    # torch.autocast: weights and gradients in fp32, a cast to *precision* for each use of a weight.
    autocast: bool = False
    # Share of the weights whose gradients are zero, and always were: rows of an embedding that no batch had,
    # or, where it is 1, all of them, as of a benchmark that has nothing to learn.
    zero_gradients: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in WORDS.items():
            if type(getattr(self, name)) is str:  # a word from a user's program, checked here and not later
                assign(self, name, _word(kind, name, getattr(self, name)))
        zeros = self.zero_gradients
        require(0 <= zeros <= 1, f"the share of zero gradients is between 0 and 1, not {zeros}")
        per_round = self.micro_batch * self.layout.dp
        if self.precision not in PRECISIONS:
            raise StrategyError(f"precision {self.precision} cannot train; use one of {', '.join(PRECISIONS)}")
        if self.fp8_parameters and self.precision not in PARAMETER_FORMATS:
            raise StrategyError(
                f"parameters in fp8 go with precision {' or '.join(PARAMETER_FORMATS)}, not {self.precision}"
            )
        if self.autocast and self.precision not in AUTOCAST:
            raise StrategyError(f"autocast goes with precision {' or '.join(AUTOCAST)}, not {self.precision}")
        if self.global_batch % per_round:
            nearest = max(1, round(self.global_batch / per_round)) * per_round
            raise StrategyError(
                f"global batch {self.global_batch} is not a multiple of micro-batch x dp = "
                f"{self.micro_batch} x {self.layout.dp} = {per_round}: the nearest is {nearest}"
            )
        chunks = self.layout.pp * self.layout.vpp
        if len(self.stage_layers) not in (0, chunks):
            raise StrategyError(f"stage layers need pp x vpp = {chunks} numbers, not {len(self.stage_layers)}")
        if min(self.stage_layers, default=0) < 0:
            raise StrategyError(f"a stage holds 0 layers or more, not {min(self.stage_layers)}")
        if (self.lora_rank > 0) != (self.training is TrainingKind.LORA):
            raise StrategyError("lora_rank goes with training 'lora', and only with it")
        if self.base_weights is not BaseWeights.TRAINED and not self.lora_rank:
            raise StrategyError(f"weights in {self.base_weights} are frozen: train adapters on them, such as --lora 16")
        if self.lora_rank and self.trained_layers:
            raise StrategyError(
                "adapters and whole layers are not trained together: leave --lora or --train-layers out"
            )
        if self.expert_imbalance < 1:
            raise StrategyError(f"expert imbalance is 1 (even) or more, not {self.expert_imbalance}")
        if self.expert_capacity is not None and self.expert_capacity <= 0:
            raise StrategyError(f"expert capacity is above 0, not {self.expert_capacity}")

    def __hash__(self) -> int:
        """Hash what most often differs: hashes are asked for far more often than values are made."""
        return hash((self.layout, self.micro_batch, self.global_batch, self.seq, self.sharding, self.recompute))

    @property
    def trains_all_weights(self) -> bool:
        """Return True if no weight is frozen: there are no adapters and no frozen layers."""
        return self.training is TrainingKind.FULL and not self.trained_layers

    def facts(self) -> Facts:
        """Return the choices of a row in a table of strategies."""
        layout, kind, modules = self.layout, self.recompute.kind, self.recompute.modules
        return {
            **layout.facts(),
            "expert_tp": layout.expert_tp,
            "schedule": str(self.schedule),
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "recompute": f"{kind}:{','.join(modules)}" if modules else str(kind),
            "sharding": str(self.sharding),
            "sequence_parallel": self.sequence_parallel,
            "precision": str(self.precision),
        }

    @property
    def micro_batches(self) -> int:
        """Micro-batches each pipeline runs in a step."""
        return self.global_batch // (self.micro_batch * self.layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens of one step, without padding."""
        return round(self.global_batch * self.seq * self.filled)

    @property
    def stored(self) -> DType:
        """The format of activations, and of weights unless they are cast for each use."""
        return STORED_AS[self.precision]

    @property
    def weights(self) -> DType:
        """The format in which weights are stored."""
        return DType.FP32 if self.autocast else self.stored

    @property
    def stream(self) -> DType:
        """The format of the residual stream: autocast leaves embeddings, norms and sums in the weights'."""
        return self.weights

    @property
    def reshards(self) -> bool:
        """True if gathered parameters are freed after each forward."""
        return self.layout.pp == 1 if self.reshard is None else self.reshard

    @property
    def splits_each_gradient(self) -> bool:
        """True if ranks reduce and split the gradients of each micro-batch, so that none adds up complete ones."""
        once = self.sharding.splits_parameters and not self.reshards and self.layout.pp > 1
        return self.sharding.splits_gradients and not once and self.layout.shard_size > 1

    @property
    def outer_ways(self) -> int:
        """The parts in which sequence parallelism splits tokens outside tensor-parallel regions."""
        return self.layout.tp if self.sequence_parallel else 1

    @property
    def busiest_share(self) -> float:
        """Tokens at the busiest expert rank as a multiple of an even share: imbalance, capacity at most."""
        share = self.expert_imbalance if self.layout.ep > 1 else 1.0
        return share if self.expert_capacity is None else min(share, self.expert_capacity)

    @property
    def pairs_micro_batches(self) -> bool:
        """True if forwards overlap backwards of other micro-batches, to hide the experts' exchanges.

        Without chunks a pipeline's stages would wait for each other pair by pair; Megatron-Core refuses it
        (overlap_moe_expert_parallel_comm). DualPipe has pairs of its own.
        """
        layout = self.layout
        can = layout.pp == 1 or (layout.vpp > 1 and SCHEDULES[self.schedule].pairs is Pairs.ASKED)
        return self.overlap.experts and layout.ep > 1 and can

    @property
    def processed_share(self) -> float:
        """The largest share of the routed tokens that experts process; tokens beyond their capacity are dropped."""
        return 1.0 if self.expert_capacity is None else min(1.0, self.expert_capacity)

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch * self.seq // self.layout.cp


def layer_view(strategy: Strategy) -> Strategy:
    """Return *strategy* as far as the computation of one layer depends on it: one object for all that spread the
    same layers over more replicas or other stages.
    """
    return _VIEW_OF.of(strategy, _find_view, None)


def _find_view(strategy: Strategy, _: None) -> Strategy:
    # One micro-batch or several: the sum of gradients needs kernels of its own from the second on.
    batches, splits = min(2, strategy.micro_batches), strategy.splits_each_gradient
    key = (batches, splits, _VIEWED(strategy))
    if key not in _VIEWS:
        _VIEWS[key] = replace(
            strategy,
            layout=replace(strategy.layout, dp=1, pp=1, vpp=1, shard=0),
            global_batch=strategy.micro_batch * batches,
            schedule=ScheduleKind.ONE_F_ONE_B,
            stage_layers=(),
            sharding=Sharding.ZERO_2 if splits else Sharding.NONE,
            reshard=None,
            offload=NO_OFFLOAD,
            overlap=replace(strategy.overlap, gradients=True, parameters=True, transfers=True, experts=False),
        )
    return _VIEWS[key]


_VIEW_OF: ByIdentity[Strategy] = ByIdentity(2048)
_VIEWS = Remembered[object, Strategy]()
_UNSEEN = ("layout", "global_batch", "schedule", "stage_layers", "sharding", "reshard", "offload", "overlap")
_SEEN_PARTS = ("layout.tp", "layout.cp", "layout.ep", "layout.expert_tp", "overlap.tensor", "overlap.tensor_gradients")
_VIEWED = attrgetter(
    *_SEEN_PARTS, *[strategy_field.name for strategy_field in fields(Strategy) if strategy_field.name not in _UNSEEN]
)


WORDS: dict[str, type[StrEnum]] = {
    "context": ContextKind,
    "schedule": ScheduleKind,
    "sharding": Sharding,
    "precision": DType,
    "training": TrainingKind,
    "base_weights": BaseWeights,
    "objective": Objective,
}


def _word(kind: type[StrEnum], name: str, text: str) -> StrEnum:
    try:
        return kind(text)
    except ValueError:
        hint = nearest(text.lower(), kind, 2, 0.6) or f"; use one of {', '.join(kind)}"
        raise StrategyError(f"{name} {text!r} is not known{hint}") from None


OFFLOADS = ("optimizer", "activations")
OVERLAPS = ("gradients", "parameters", "tensor", "tensor-gradients", "transfers", "experts")


def recompute_of(text: str) -> Recompute:
    """Read ``none``, ``selective``, ``full``, ``block:N`` or ``selective:A,B``; the error starts with the word."""
    kind, colon, rest = text.partition(":")
    if kind == RecomputeKind.SELECTIVE and colon:
        words, known = dict.fromkeys(rest.split(",")), [str(module) for module in RecomputeModule]
        if unknown := sorted(set(words) - set(known)):
            raise ValueError(f"selective: {unknown[0]!r} is not a module; expected {', '.join(known)}")
        return Recompute(RecomputeKind.SELECTIVE, modules=tuple(map(RecomputeModule, words)))
    if kind not in set(RecomputeKind) or (rest and not (rest.isascii() and rest.isdigit())):
        raise ValueError(f"{text!r}: expected none, selective, full, or block:N, or selective:A,B,...")
    return Recompute(RecomputeKind(kind), int(rest or 0))


def recompute_word(recompute: Recompute) -> str:
    if recompute.kind is RecomputeKind.BLOCK:
        return f"{recompute.kind}:{recompute.layers}"
    return f"{recompute.kind}:{','.join(recompute.modules)}" if recompute.modules else str(recompute.kind)


def offload_of(text: str) -> Offload:
    """Read ``none``, or ``optimizer`` and ``activations``, each alone or with a share: ``optimizer=0.5``."""
    shares: dict[str, float] = {}
    for word in [] if text == "none" else text.split(","):
        name, equals, share = word.partition("=")
        if name not in OFFLOADS or name in shares:
            raise ValueError(f"{text!r}: expected {' or '.join(OFFLOADS)}, each once, with =SHARE or without")
        try:
            shares[name] = float(share) if equals else 1.0
        except ValueError:
            raise ValueError(f"{text!r}: expected a share between 0 and 1, such as {name}=0.5") from None
    return Offload(**shares)


def offload_word(offload: Offload) -> str:
    shares = {name: getattr(offload, name) for name in OFFLOADS}
    words = [name if share == 1 else f"{name}={share!r}" for name, share in shares.items() if share]
    return ",".join(words) or "none"


def overlap_of(words: Iterable[str]) -> Overlap:
    """Read words for overlapped communication; the error starts with the wrong word."""
    chosen = set(words)
    if unknown := sorted(chosen - set(OVERLAPS)):
        raise ValueError(f"{unknown[0]!r}: expected {', '.join(OVERLAPS)}, or none")
    return Overlap(**{name.replace("-", "_"): name in chosen for name in OVERLAPS})


def overlap_words(overlap: Overlap) -> tuple[str, ...]:
    return tuple(name for name in OVERLAPS if getattr(overlap, name.replace("-", "_")))
