"""The question of ``stepcast predict``: every choice of a training step, declared once."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec

from stepcast.frameworks.words import (
    OFFLOADS,
    OVERLAPS,
    offload_of,
    offload_word,
    overlap_of,
    overlap_words,
    recompute_of,
    recompute_word,
)
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Dispatcher, Execution, Kernels, LossKernel, SsmKernels
from stepcast.ir.limits import MICRO_BATCHES
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import ContextKind, RecomputeModule, Sharding
from stepcast.questions.choices import Choice, read_precision, read_recompute, read_schedule, read_sharding
from stepcast.questions.numbers import (
    BINARY,
    MOST_LAYERS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    amount,
    count,
    gpu_count,
    positive,
)
from stepcast.questions.numbers import currency as read_currency
from stepcast.questions.numbers import price as read_price
from stepcast.units import DEFAULT_CURRENCY, parse_count

if TYPE_CHECKING:
    from stepcast.cost.calibration import Calibration
    from stepcast.hardware import Cluster
    from stepcast.ir.framework import Framework
    from stepcast.ir.model import Model

DEFAULT_FRAMEWORK = "megatron-core"
SCHEDULES = tuple(map(str, ScheduleKind))
SHARDINGS = tuple(map(str, Sharding))
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")
AUTOCASTS = ("autocast-bf16", "autocast-fp16")
MODULES = tuple(map(str, RecomputeModule))
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "muon", "adafactor")
PLACES = ("even", "packed")  # a test compares them with hardware.Place
ENGINES = ("fast", "fluid")  # a test compares them with forecast.options.Engine
ENGINE_HELP = "fluid: communication that runs side by side shares the links of the network"
MOST_FURTHER_TOKENS = 64
# Headings of the help.
WHAT = "what runs, and where"
LAYOUT = "layout (data parallelism takes the GPUs that are left)"
BATCH = "batch"
EXECUTION = "execution"
PRICES = "prices"
# Choices about a whole run of training, which a saved step leaves open.
ABOUT_TRAINING = ("tokens", "price", "currency")


def _read_by(option: str, meaning: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return *meaning* with errors that name the *option* before the wrong word."""

    def read(value: Any) -> Any:
        try:
            return meaning(value)
        except ValueError as error:
            message = str(error)
            named = f"{option} {message}" if message.startswith(("'", "selective: ")) else message
            raise ValueError(named) from None

    return read


def _read_stage_layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ValueError(f"--stage-layers {text!r}: expected whole numbers, such as 7,8,8,7")
    return tuple(int(part) for part in parts)


def _ranks(help_text: str, aliases: str = "") -> Choice:
    return Choice(group=LAYOUT, metavar="N", help=help_text, read=gpu_count, aliases=aliases)


def _number(
    help_text: str,
    read: Callable[[str], float],
    *,
    group: str = EXECUTION,
    metavar: str = "N",
    aliases: str = "",
    sets: str = "",
) -> Choice:
    return Choice(group=group, metavar=metavar, help=help_text, read=read, aliases=aliases, sets=sets)


def _flag(help_text: str, sets: str, aliases: str = "") -> Choice:
    return Choice(group=EXECUTION, help=help_text, deniable=True, sets=sets, aliases=aliases)


def _one_of(help_text: str, sets: str, values: type) -> Choice:
    words = tuple(map(str, values))  # type: ignore[call-overload]
    return Choice(group=EXECUTION, help=help_text, values=words, sets=sets, means=values)


class PredictQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a prediction; None, or the default, leaves a choice to the framework and the model."""

    # fmt: off
    model: Annotated["Model | str | None", Choice(group=WHAT, metavar="M",
        help="name in the catalogue, or a config.json",
        aliases="model-name arch architecture model-name-or-path hf-model model-id")] = None
    cluster: Annotated["Cluster | str | None", Choice(group=WHAT, metavar="C",
        help="name in the catalogue, a GPU (one node of it), or a TOML file",
        aliases="system machine hardware platform cluster-name")] = None
    gpu: Annotated[str | None, Choice(group=WHAT, metavar="G",
        help="or GPUs of one node: one, or as many as --gpus says",
        aliases="gpu-type gpu-name accelerator device")] = None
    set: Annotated[tuple[str, ...], Choice(group=WHAT, metavar="KEY=VALUE",
        help="override a cluster field, e.g. node.nics=4", aliases="override overrides")] = ()
    place: Annotated[str, Choice(group=WHAT,
        help="racks that are one NVLink domain: spread nodes evenly over them, or fill each in turn",
        values=PLACES)] = "even"
    framework: Annotated["Framework | str | None", Choice(group=WHAT, metavar="F",
        help="framework whose defaults fill unset options: a name in the catalogue, or a TOML file "
        f"(default: {DEFAULT_FRAMEWORK})", aliases="software backend stack trainer library")] = None
    gpus: Annotated[int | None, _ranks("total number of GPUs",
        "num-gpus ngpus n-gpus gpu-count world-size nproc devices num-devices")] = None
    nodes: Annotated[int | None, _ranks("number of nodes (instead of --gpus)",
        "nnodes num-nodes hosts servers")] = None
    dp: Annotated[int | None, _ranks("replicas of tp x cp x pp GPUs each (instead of --gpus)",
        "data-parallel data-parallel-size data-parallelism replicas")] = None
    tp: Annotated[int, _ranks("tensor parallel ranks (default: 1)",
        "tensor-parallel tensor-parallel-size tensor-model-parallel-size tensor-parallelism")] = 1
    cp: Annotated[int, _ranks("context parallel ranks (default: 1)",
        "context-parallel context-parallel-size ring-size")] = 1
    ep: Annotated[int, _ranks("expert parallel ranks (default: 1)",
        "expert-parallel expert-parallel-size expert-model-parallel-size")] = 1
    pp: Annotated[int, _ranks("pipeline parallel ranks (default: 1)",
        "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pipeline-stages")] = 1
    vpp: Annotated[int | None, _number("model chunks per pipeline stage; default 1", count(1, MOST_LAYERS),
        group=LAYOUT,
        aliases="virtual-pipeline virtual-pipeline-model-parallel-size model-chunks vp interleave")] = None
    expert_tp: Annotated[int, _ranks("tensor parallel of experts (default: tp)",
        "etp expert-tensor-parallel expert-tensor-parallel-size")] = 0
    shard: Annotated[int, _ranks("ranks that split states in hybrid FSDP")] = 0
    replicate: Annotated[int, _ranks(
        "copies of the states in hybrid FSDP, instead of --shard: dp x cp / shard")] = 0
    stage_layers: Annotated[str | None, Choice(group=LAYOUT, metavar="A,B,...",
        help="layers of each stage and chunk, in model order", sets="stage_layers", means=_read_stage_layers,
        write=lambda layers: ",".join(map(str, layers)))] = None
    micro_batch: Annotated[int, _number("sequences a replica runs at once (default: 1)",
        count(1, MOST_SEQUENCES, BINARY), group=BATCH,
        aliases="micro-batch-size mbs microbatch microbatch-size per-device-train-batch-size")] = 1
    global_batch: Annotated[int | None, _number(
        "sequences in a step (default: 8 micro-batches for each stage and replica)",
        count(1, MOST_SEQUENCES, BINARY), group=BATCH,
        aliases="global-batch-size gbs batch-size batch train-batch-size globalbatch")] = None
    accumulation: Annotated[int | None, _number(
        "gradient accumulation steps (micro-batches of each replica in a step), instead of --global-batch",
        count(1, MICRO_BATCHES.most), group=BATCH)] = None
    seq: Annotated[int | None, _number(
        "tokens in a sequence, as 8192 or 8k (default: the framework's, 4096, or the model's longest)",
        count(1, MOST_TOKENS, BINARY), group=BATCH,
        aliases="seq-length seq-len sequence-length seqlen sequence max-seq-len context-length ctx")] = None
    schedule: Annotated[str | None, Choice(group=EXECUTION, metavar="NAME",
        help=f"{', '.join(SCHEDULES)}; default: interleaved with vpp, else 1f1b", read=read_schedule,
        values=SCHEDULES, aliases="pipeline-schedule pp-schedule",
        flags={"interleaved": "interleaved", "dualpipe": "dualpipe"}, sets="schedule",
        means=ScheduleKind)] = None
    precision: Annotated[str | None, Choice(group=EXECUTION, metavar="NAME",
        help=f"{', '.join((*PRECISIONS, *AUTOCASTS))}; autocast keeps weights in fp32 and casts them for "
        "use (default: the framework's, bf16)", read=read_precision, values=(*PRECISIONS, *AUTOCASTS),
        aliases="dtype mixed-precision data-type compute-dtype number-format",
        flags={**{name: name for name in PRECISIONS}, "nvfp4": "nvfp4 fp4", "autocast-bf16": "amp"})] = None
    sharding: Annotated[str | None, Choice(group=EXECUTION, metavar="NAME",
        help=f"{', '.join(SHARDINGS)}; default: the framework's, zero-1", read=read_sharding,
        values=SHARDINGS,
        aliases="zero zero-stage shard-states sharding-strategy data-parallel-sharding-strategy",
        flags={"fsdp": "fsdp fsdp2", "hybrid-fsdp": "hsdp", "none": "ddp", "zero-2": "zero2 zero-2",
               "zero-1": "zero1 zero-1 distributed-optimizer use-distributed-optimizer",
               "zero-3": "zero3 zero-3"},
        sets="sharding", means=Sharding)] = None
    reshard: Annotated[bool | None, _flag(
        "ZeRO-3, FSDP: free gathered parameters after each forward; default: yes, but in a pipeline",
        "reshard")] = None
    fp8_params: Annotated[bool, Choice(group=EXECUTION,
        help="keep and gather parameters in fp8, without a bf16 copy", sets="fp8_parameters")] = False
    zero_gradients: Annotated[float, _number(
        "weights that never had a gradient: of unseen tokens; 1: a toy that learns nothing", amount,
        sets="zero_gradients", metavar="SHARE")] = 0.0
    recompute: Annotated[str | None, Choice(group=EXECUTION, metavar="KIND",
        help=f"none, selective, full, block:N, or selective:A,B,... with modules out of {', '.join(MODULES)}",
        read=read_recompute,
        aliases="recompute-granularity activation-recompute activation-recomputation recomputation",
        flags={"full": "activation-checkpointing gradient-checkpointing full-recompute "
               "checkpoint-activations", "selective": "recompute-activations selective-recompute"},
        sets="recompute", means=_read_by("--recompute", recompute_of), write=recompute_word)] = None
    offload: Annotated[str | None, Choice(group=EXECUTION, metavar="A[=X],B[=X]",
        help=f"{', '.join(OFFLOADS)}, or a share X of either, kept in the memory of the host",
        flags={"optimizer": "cpu-offload offload-optimizer"}, sets="offload",
        means=_read_by("--offload", offload_of), write=offload_word)] = None
    context: Annotated[str | None, _one_of("how context parallel ranks exchange", "context",
        ContextKind)] = None
    sequence_parallel: Annotated[bool | None, _flag(
        "with tp: split norms over the ranks too; without, each rank runs them all", "sequence_parallel",
        "sp")] = None
    flash_attention: Annotated[bool | None, _flag("fused attention, which stores no scores",
        "flash_attention", "use-flash-attn flash-attn")] = None
    overlap: Annotated[str | None, Choice(group=EXECUTION, metavar="A,B,...",
        help=f"communication that overlaps computation: {', '.join(OVERLAPS)}, or none", sets="overlap",
        means=_read_by("--overlap", lambda text: overlap_of([] if text == "none" else text.split(","))),
        write=lambda overlap: ",".join(overlap_words(overlap)) or "none")] = None
    bucket_mb: Annotated[float | None, Choice(group=EXECUTION, metavar="X",
        help="size of gradient buckets; 0: one for a stage", read=amount, sets="bucket_bytes",
        means=lambda megabytes: round(megabytes * 1e6),
        write=lambda size_bytes: repr(size_bytes / 1e6))] = None
    expert_imbalance: Annotated[float, _number("busiest expert rank over the mean", amount,
        sets="expert_imbalance", metavar="X")] = 1.0
    expert_capacity: Annotated[float | None, _number("most tokens an expert rank takes, over the mean",
        amount, sets="expert_capacity", metavar="X")] = None
    fused_experts: Annotated[bool | None, _flag(
        "biases, activation and quantisation inside the experts' products", "fused_experts")] = None
    dispatcher: Annotated[str | None, _one_of("how tokens reach their experts", "dispatcher",
        Dispatcher)] = None
    lora_rank: Annotated[int, _number("train low-rank adapters alone", count(0, MOST_TOKENS),
        aliases="lora lora-r lora-dim", sets="lora_rank")] = 0
    further_tokens: Annotated[int | None, _number("tokens predicted beyond the next (multi-token prediction)",
        count(0, MOST_FURTHER_TOKENS), sets="further_tokens")] = None
    dropout: Annotated[bool | None, _flag("dropout on attention probabilities and residuals",
        "dropout")] = None
    fp8_activations: Annotated[bool | None, _flag("fused kernels keep the inputs of activations in fp8",
        "fp8_activations")] = None
    fp8_attention: Annotated[bool | None, _flag("attention multiplies in fp8 where linear layers do",
        "fp8_attention")] = None
    wide_layers: Annotated[int | None, _number("number of final layers kept in bf16, out of fp8 and fp4",
        count(0, MOST_LAYERS), sets="wide_layers")] = None
    loss: Annotated[str | None, _one_of("how fused kernels come from logits to a loss", "loss",
        LossKernel)] = None
    deferred_gradients: Annotated[int | None, _number(
        "micro-batches whose gradient of the output projection waits until the pipeline empties",
        count(0, MICRO_BATCHES.most), sets="deferred_gradients")] = None
    gradients: Annotated[str | None, Choice(group=EXECUTION,
        help="format in which gradients are summed and reduced", read=read_precision,
        values=("fp32", "bf16", "fp16"), aliases="grad-dtype gradient-dtype grad-reduce-dtype",
        sets="gradient_dtype", means=DType)] = None
    optimizer: Annotated[str | None, Choice(group=EXECUTION, metavar="NAME[:FORMAT]",
        help=f"{', '.join(OPTIMIZERS)}; moments in fp32, bf16, fp16, fp8 or 8bit", aliases="optim")] = None
    master_weights: Annotated[bool | None, _flag("an fp32 copy of weights that are less precise", "")] = None
    clipping: Annotated[bool | None, _flag("clip gradients by global norm", "")] = None
    kernels: Annotated[str | None, Choice(group=EXECUTION, values=("fused", "plain", "compiled"),
        flags={"compiled": "compile torch-compile"}, sets="kernels", means=Kernels)] = None
    ssm_kernels: Annotated[str | None, _one_of("scans of Mamba-2 layers: mamba-ssm and causal-conv1d, or "
        "the PyTorch operations of transformers without them (default: fused)", "ssm_kernels",
        SsmKernels)] = None
    execution: Annotated[str | None, Choice(group=EXECUTION,
        help="how the host issues kernels: captured, captured but for routed experts, one by one, or each "
        "waited for", values=("graphs", "partial-graphs", "eager", "blocking"),
        flags={"eager": "eager", "graphs": "cuda-graphs"}, sets="execution", means=Execution)] = None
    calibration: Annotated["Calibration | str | None", Choice(group=PRICES, metavar="FILE",
        help="your GPU as 'stepcast profile' measured it", aliases="calibrate calib")] = None
    residual: Annotated[bool, Choice(group=PRICES, help="correct the step by what published runs of this "
        "framework on such GPUs took beyond predictions")] = False
    engine: Annotated[str, Choice(help=f"{ENGINE_HELP} (default: fast)", values=ENGINES)] = "fast"
    background: Annotated[str | None, Choice(metavar="JOB.toml",
        help="other jobs, or plain flows, that share the network meanwhile (by the fluid engine)")] = None
    tokens: Annotated[float | None, Choice(metavar="N",
        help="also tell days and GPU-hours for so many, as 15T", read=positive(parse_count),
        aliases="train-tokens total-tokens num-tokens training-tokens")] = None
    price: Annotated[float | None, Choice(metavar="X", help="price per GPU-hour (with --tokens)",
        read=read_price,
        aliases="cost-per-gpu-hour gpu-price price-per-gpu-hour gpu-hour-price usd-per-gpu-hour")] = None
    currency: Annotated[str, Choice(metavar="C", help="currency of --price, a symbol or a code (default $)",
        read=read_currency)] = DEFAULT_CURRENCY
    # fmt: on

    file: str = ""
    """The file that describes the run, if one does."""
    unchecked: frozenset[str] = frozenset()
    """Choices that may be without effect: a file made them, or the framework makes them anyway."""

    @property
    def given(self) -> frozenset[str]:
        """The choices that a person made, other than the default, and that must have an effect."""
        return frozenset(
            name for name, default in DEFAULTS.items() if name not in self.unchecked and getattr(self, name) != default
        )

    @property
    def choices(self) -> dict[str, Any]:
        """The choices of the step that differ from their defaults, in the order of the help."""
        found = {name: getattr(self, name) for name in CHOICES if name not in ABOUT_TRAINING}
        return {name: value for name, value in found.items() if value != DEFAULTS[name]}

    def change(self, choices: Mapping[str, Any]) -> "PredictQuestion":
        """Return the question with other *choices*, as the question holds them."""
        changed = {**choices, **({"accumulation": None} if "global_batch" in choices else {})}
        return msgspec.structs.replace(self, **changed, unchecked=self.unchecked - set(choices))

    def leave_unchecked(self, names: "frozenset[str]") -> "PredictQuestion":
        """Return the question with choices that may be without effect."""
        return msgspec.structs.replace(self, unchecked=self.unchecked | names) if names else self


CHOICES: Mapping[str, Choice] = {
    name: annotation.__metadata__[0]
    for name, annotation in PredictQuestion.__annotations__.items()
    if hasattr(annotation, "__metadata__")
}
DEFAULTS: Mapping[str, Any] = {
    name: default
    for name, default in zip(PredictQuestion.__struct_fields__, PredictQuestion.__struct_defaults__, strict=True)
    if name in CHOICES
}
# Choices whose values may be made by hand instead of being named.
NOUNS = ("model", "cluster", "framework", "calibration")


class StepChoices(TypedDict, total=False):
    """The choices of a step as keywords of Python functions; text is read as on the command line."""

    gpu: str | None
    set: list[str] | tuple[str, ...] | str | None
    place: str | None
    gpus: int | str | None
    nodes: int | str | None
    dp: int | str | None
    tp: int | str | None
    cp: int | str | None
    ep: int | str | None
    pp: int | str | None
    vpp: int | str | None
    expert_tp: int | str | None
    shard: int | str | None
    replicate: int | str | None
    stage_layers: list[int] | tuple[int, ...] | str | None
    micro_batch: int | str | None
    global_batch: int | str | None
    accumulation: int | str | None
    seq: int | str | None
    schedule: str | None
    precision: str | None
    sharding: int | str | None
    reshard: bool | None
    fp8_params: bool | None
    zero_gradients: float | str | None
    recompute: str | None
    offload: str | None
    context: str | None
    sequence_parallel: bool | None
    flash_attention: bool | None
    overlap: list[str] | tuple[str, ...] | str | None
    bucket_mb: float | str | None
    expert_imbalance: float | str | None
    expert_capacity: float | str | None
    fused_experts: bool | None
    dispatcher: str | None
    lora_rank: int | str | None
    further_tokens: int | str | None
    dropout: bool | None
    fp8_activations: bool | None
    fp8_attention: bool | None
    wide_layers: int | str | None
    loss: str | None
    deferred_gradients: int | str | None
    gradients: str | None
    optimizer: str | None
    master_weights: bool | None
    clipping: bool | None
    kernels: str | None
    ssm_kernels: str | None
    execution: str | None
    residual: bool | None


class PredictChoices(StepChoices, total=False):
    """The choices of a question as keywords of Python functions."""

    engine: str | None
    background: str | os.PathLike[str] | None
    tokens: float | str | None
    price: float | str | None
    currency: str | None
