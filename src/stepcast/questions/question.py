"""The question of ``stepcast predict``: every choice of a training step, declared once."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from stepcast.ir import strategy
from stepcast.ir.dtype import DType
from stepcast.ir.facts import FactDict
from stepcast.ir.framework import AttentionKernel, Dispatcher, Execution, Kernels, LossKernel, SsmKernels
from stepcast.ir.limits import MICRO_BATCHES
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import BaseWeights, ContextKind, Objective, RecomputeModule, Sharding
from stepcast.questions import choices as readers
from stepcast.questions import numbers
from stepcast.questions.choices import Choice, Question, choices_of, defaults_of
from stepcast.questions.numbers import amount, count, gpu_count, positive
from stepcast.units import DEFAULT_CURRENCY, parse_count

if TYPE_CHECKING:
    from stepcast.cost.calibration import Calibration
    from stepcast.hardware import Cluster
    from stepcast.ir.framework import Framework
    from stepcast.ir.model import Model

DEFAULT_FRAMEWORK = "megatron-core"
TUNING_FRAMEWORK = "peft"  # of LoRA on GPUs that each hold a whole model
SCHEDULES = tuple(map(str, ScheduleKind))
SHARDINGS = tuple(map(str, Sharding))
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")
AUTOCASTS = ("autocast-bf16", "autocast-fp16")
MODULES = tuple(map(str, RecomputeModule))
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "muon", "adafactor")
# Exchanges without a model of their own, each with the one that predicts it; as Megatron-LM scripts are read.
PREDICTED_AS = {"cp_comm": {"a2a+p2p": "p2p"}}
PLACES = ("even", "packed")  # a test compares them with hardware.Place
ENGINES = ("fast", "fluid")  # a test compares them with forecast.options.Engine
ENGINE_HELP = "fluid: concurrent communication shares the links of the network"
MOST_MTP_LAYERS = 64
# Headings of the help.
WHAT = "model, cluster and framework"
LAYOUT = "parallelism (data parallelism uses the remaining GPUs)"
BATCH = "batch"
EXECUTION = "execution"
TUNING = "fine-tuning"
PRICES = "cost estimates"
NETWORK = "network simulation"
TRAINING = "training run"
# Choices about a whole run of training, which a saved step leaves open.
ABOUT_TRAINING = ("tokens", "samples", "epochs", "steps", "price", "currency")


def _read_by(option: str, meaning: Callable[[str], object]) -> Callable[[str], object]:
    """Return *meaning* with errors that name the *option* before the wrong word."""

    def read(text: str) -> object:
        try:
            return meaning(text)
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


def _check_lengths(text: str) -> str:
    """Return *text* if lengths of samples can be read from it."""
    from stepcast.questions.lengths import read_lengths  # numpy is needed for these questions alone

    read_lengths(text)
    return text


def _exchange(name: str, kind: type) -> Callable[[str], object]:
    """Return what an exchange is predicted as."""
    return lambda word: kind(PREDICTED_AS[name].get(word, word))


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
    **known: Any,
) -> Choice:
    return Choice(group=group, metavar=metavar, help=help_text, read=read, aliases=aliases, sets=sets, **known)


def _flag(help_text: str, sets: str, aliases: str = "") -> Choice:
    return Choice(group=EXECUTION, help=help_text, deniable=True, sets=sets, aliases=aliases)


def _one_of(help_text: str, sets: str, values: type) -> Choice:
    known = tuple(map(str, values))  # type: ignore[call-overload]
    return Choice(group=EXECUTION, help=help_text, values=known, sets=sets, means=values)


class PredictQuestion(Question, frozen=True, kw_only=True):
    """A question about one training step; a default leaves the choice to the framework and the model."""

    # fmt: off
    model: Annotated["Model | str | None", Choice(group=WHAT, metavar="M",
        help="model: a name from 'stepcast list models', or a Hugging Face config.json",
        aliases="model-name arch architecture model-name-or-path hf-model model-id")] = None
    cluster: Annotated["Cluster | str | None", Choice(group=WHAT, metavar="C",
        help="cluster: a name from 'stepcast list clusters', a GPU (one node of it), or a TOML file; A,B compares "
        "them (predict, search, plan)", several=True, aliases="system machine hardware platform cluster-name")] = None
    gpu: Annotated[str | None, Choice(group=WHAT, metavar="G",
        help="GPU, instead of --cluster: a single one, or --gpus of them in one node", several=True,
        aliases="gpu-type gpu-name accelerator device")] = None
    set: Annotated[tuple[str, ...], Choice(group=WHAT, metavar="KEY=VALUE",
        help="override a cluster field, e.g. node.nics=4", aliases="override overrides")] = ()
    place: Annotated[str, Choice(group=WHAT,
        help="racks with one NVLink domain: spread nodes evenly over them, or fill one after the other "
        "(default: even)", values=PLACES)] = "even"
    framework: Annotated["Framework | str | None", Choice(group=WHAT, metavar="F",
        help="framework whose defaults fill unset options: a name from 'stepcast list frameworks', or a TOML file "
        f"(default: {DEFAULT_FRAMEWORK}; {TUNING_FRAMEWORK} for LoRA without --tp, --pp, --cp, --ep)",
        several=True, aliases="software backend stack trainer library")] = None
    gpus: Annotated[int | None, replace(_ranks("total number of GPUs",
        "num-gpus ngpus n-gpus gpu-count world-size nproc devices num-devices"), several=True)] = None
    nodes: Annotated[int | None, _ranks("number of nodes (instead of --gpus)",
        "nnodes num-nodes hosts servers")] = None
    dp: Annotated[int | None, _ranks("data-parallel replicas, of tp x cp x pp GPUs each (instead of --gpus)",
        "data-parallel data-parallel-size data-parallelism replicas")] = None
    tp: Annotated[int, _ranks("tensor-parallel ranks (default: 1)",
        "tensor-parallel tensor-parallel-size tensor-model-parallel-size tensor-parallelism "
        "tensor-parallel-degree")] = 1
    cp: Annotated[int, _ranks("context-parallel ranks (default: 1)",
        "context-parallel context-parallel-size context-parallel-degree ring-size")] = 1
    ep: Annotated[int, _ranks("expert-parallel ranks (default: 1)",
        "expert-parallel expert-parallel-size expert-model-parallel-size expert-parallel-degree")] = 1
    pp: Annotated[int, _ranks("pipeline-parallel ranks (default: 1)",
        "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pipeline-parallel-degree "
        "pipeline-stages")] = 1
    vpp: Annotated[int | None, _number("virtual pipeline stages (model chunks) per pipeline rank (default: 1)",
        count(1, numbers.MOST_LAYERS), group=LAYOUT,
        aliases="virtual-pipeline virtual-pipeline-model-parallel-size model-chunks vp interleave")] = None
    expert_tp: Annotated[int, _ranks("tensor-parallel ranks of experts (default: tp)",
        "etp expert-tensor-parallel expert-tensor-parallel-size expert-tensor-parallel-degree")] = 0
    shard: Annotated[int, _ranks("hybrid FSDP: ranks that share one copy of the states")] = 0
    replicate: Annotated[int, _ranks("hybrid FSDP: copies of the states (instead of --shard)",
        "data-parallel-replicate-degree")] = 0
    stage_layers: Annotated[str | None, Choice(group=LAYOUT, metavar="A,B,...",
        help="layers of each pipeline stage and model chunk, in model order (default: even)",
        sets="stage_layers", means=_read_stage_layers,
        write=lambda layers: ",".join(map(str, layers)))] = None
    micro_batch: Annotated[int, _number("micro-batch size of a replica, in sequences (default: 1)",
        count(1, numbers.MOST_SEQUENCES, numbers.BINARY), group=BATCH,
        aliases="micro-batch-size mbs microbatch microbatch-size per-device-train-batch-size "
        "train-micro-batch-size-per-gpu")] = 1
    global_batch: Annotated[int | None, _number(
        "global batch size, in sequences per step (default: 8 micro-batches per pipeline stage and replica)",
        count(1, numbers.MOST_SEQUENCES, numbers.BINARY), group=BATCH,
        aliases="global-batch-size gbs batch-size batch train-batch-size globalbatch")] = None
    accumulation: Annotated[int | None, _number(
        "gradient accumulation steps: micro-batches of each replica per step (instead of --global-batch)",
        count(1, MICRO_BATCHES.most), group=BATCH,
        aliases="gradient-accumulation-steps gradient-accumulation grad-accumulation grad-accum "
        "accumulation-steps")] = None
    seq: Annotated[int | None, _number(
        "sequence length in tokens, e.g. 8192 or 8k (default: that of the framework, 4096, or the model's maximum)",
        count(1, numbers.MOST_TOKENS, numbers.BINARY), group=BATCH,
        aliases="seq-length seq-len sequence-length seqlen sequence max-seq-len context-length ctx")] = None
    schedule: Annotated[str | None, Choice(group=EXECUTION, metavar="NAME",
        help=f"pipeline schedule: {', '.join(SCHEDULES)} (default: interleaved with --vpp, else 1f1b)",
        read=readers.read_schedule, values=SCHEDULES,
        aliases="pipeline-schedule pp-schedule pipeline-parallel-schedule",
        flags={"interleaved": "interleaved", "dualpipe": "dualpipe"}, sets="schedule",
        means=ScheduleKind)] = None
    precision: Annotated[str | None, Choice(group=EXECUTION, metavar="NAME",
        help=f"training precision: {', '.join((*PRECISIONS, *AUTOCASTS))}; autocast stores weights in fp32 and casts "
        "them for use (default: that of the framework, usually bf16)", read=readers.read_precision,
        values=(*PRECISIONS, *AUTOCASTS),
        aliases="dtype mixed-precision data-type compute-dtype number-format",
        flags={**{name: name for name in PRECISIONS}, "nvfp4": "nvfp4 fp4", "autocast-bf16": "amp"})] = None
    sharding: Annotated[str | None, Choice(group=EXECUTION, metavar="NAME",
        help=f"sharding of optimizer states, gradients and parameters: {', '.join(SHARDINGS)}; none is DDP (default: "
        "that of the framework, usually zero-1)", read=readers.read_sharding, values=SHARDINGS,
        aliases="zero zero-stage shard-states sharding-strategy data-parallel-sharding-strategy",
        flags={"fsdp": "fsdp fsdp2 use-torch-fsdp2", "hybrid-fsdp": "hsdp", "none": "ddp", "zero-2": "zero2 zero-2",
               "zero-1": "zero1 zero-1 distributed-optimizer use-distributed-optimizer",
               "zero-3": "zero3 zero-3"},
        sets="sharding", means=Sharding)] = None
    reshard: Annotated[bool | None, _flag(
        "ZeRO-3 and FSDP: free gathered parameters after the forward pass of each layer (default: yes, except in a "
        "pipeline)", "reshard", "reshard-after-forward")] = None
    fp8_params: Annotated[bool, Choice(group=EXECUTION,
        help="store and gather parameters in fp8, without a bf16 copy", sets="fp8_parameters",
        aliases="fp8-param-gather")] = False
    zero_gradients: Annotated[float, _number(
        "share of weights whose gradient is always zero, such as embeddings of tokens that never occur (default: 0)",
        amount, sets="zero_gradients", metavar="SHARE")] = 0.0
    recompute: Annotated[str | None, Choice(group=EXECUTION, metavar="KIND",
        help="activation recomputation: none, selective, full, block:N (the first N layers of a stage), or "
        f"selective:A,B,... with modules of {', '.join(MODULES)} (default: that of the framework)",
        read=readers.read_recompute,
        aliases="recompute-granularity activation-recompute activation-recomputation recomputation",
        flags={"full": "activation-checkpointing gradient-checkpointing full-recompute "
               "checkpoint-activations", "selective": "recompute-activations selective-recompute"},
        sets="recompute", means=_read_by("--recompute", strategy.recompute_of), write=strategy.recompute_word)] = None
    offload: Annotated[str | None, Choice(group=EXECUTION, metavar="A[=X],B[=X]",
        help=f"store {' or '.join(strategy.OFFLOADS)}, or a share X of either, in host memory (default: none)",
        flags={"optimizer": "cpu-offload offload-optimizer optimizer-cpu-offload"}, sets="offload",
        means=_read_by("--offload", strategy.offload_of), write=strategy.offload_word)] = None
    cp_comm: Annotated[str | None, Choice(group=EXECUTION,
        help="exchange of context-parallel ranks: ring (p2p), Ulysses (a2a), gathered keys and values (allgather), or "
        "both (a2a+p2p, predicted as p2p) (default: that of the framework)",
        values=("p2p", "a2a", "allgather", "a2a+p2p"), read=readers.read_cp_comm,
        aliases="context cp-comm-type", sets="context", means=_exchange("cp_comm", ContextKind))] = None
    sequence_parallel: Annotated[bool | None, _flag(
        "with --tp: also split norms and residuals over the tensor-parallel ranks (default: that of the framework)",
        "sequence_parallel", "sp")] = None
    flash_attention: Annotated[bool | None, _flag("fused attention, which stores no attention scores",
        "flash_attention", "use-flash-attn flash-attn")] = None
    attention_kernel: Annotated[str | None, _one_of("generation of fused attention: flash-2 is FlashAttention 2, "
        "current cuDNN's or FlashAttention 3 (default: that of the framework)", "attention", AttentionKernel)] = None
    overlap: Annotated[str | None, Choice(group=EXECUTION, metavar="A,B,...",
        help=f"communication that overlaps computation: {', '.join(strategy.OVERLAPS)}, or none (default: that of the "
        "framework)", sets="overlap",
        means=_read_by("--overlap", lambda text: strategy.overlap_of([] if text == "none" else text.split(","))),
        write=lambda overlap: ",".join(strategy.overlap_words(overlap)) or "none")] = None
    bucket_mb: Annotated[float | None, Choice(group=EXECUTION, metavar="X",
        help="size of gradient buckets in MB; 0: a single bucket per stage (default: that of the framework)",
        read=amount, sets="bucket_bytes",
        means=lambda megabytes: round(megabytes * 1e6),
        write=lambda size_bytes: repr(size_bytes / 1e6))] = None
    expert_imbalance: Annotated[float, _number("tokens of the busiest expert-parallel rank over the mean "
        "(default: 1)", amount, sets="expert_imbalance", metavar="X")] = 1.0
    expert_load: Annotated[str | None, Choice(group=EXECUTION, metavar="LAW|FILE",
        help="tokens per expert, which give --expert-imbalance: balanced, power-law:ALPHA (1.2 is skewed), or a "
        "file with a number for each expert or rank, such as the JSON of stepcast analyze")] = None
    expert_replicas: Annotated[int, _number("number of the hottest experts with a second copy on another rank "
        "(with --expert-load; default: 0)", count(0, numbers.MOST_LAYERS))] = 0
    expert_capacity: Annotated[float | None, _number("maximum tokens of an expert-parallel rank over the mean; the "
        "rest is dropped (default: no limit)", amount, sets="expert_capacity", metavar="X",
        aliases="moe-expert-capacity-factor capacity-factor")] = None
    fused_experts: Annotated[bool | None, _flag(
        "fuse biases, activation and quantisation into the grouped matmuls of experts", "fused_experts")] = None
    dispatcher: Annotated[str | None, Choice(group=EXECUTION,
        help="token dispatcher of experts: alltoall sends a token once per expert, deepep and hybridep once per rank "
        "and node, allgather to all ranks (default: that of the framework)",
        values=("alltoall", "allgather", "deepep", "hybridep"), read=readers.read_dispatcher,
        aliases="moe-token-dispatcher-type token-dispatcher expert-parallel-comm-backend",
        sets="dispatcher", means=Dispatcher)] = None
    lora: Annotated[str | None, Choice(group=TUNING, metavar="RANK[,ALPHA[,TARGETS[,DROPOUT]]]", read=readers.read_lora,
        help="train LoRA adapters only, e.g. 16 or 16,32,all-linear,0.05; ALPHA has no effect on time or memory, "
        "TARGETS are joined by + (instead of --lora-rank, --lora-targets and --lora-dropout)", aliases="peft")] = None
    lora_rank: Annotated[int, _number("rank of LoRA adapters; only they are trained (default: 0, full training)",
        count(0, numbers.MOST_TOKENS), aliases="lora-r lora-dim", sets="lora_rank", group=TUNING)] = 0
    lora_targets: Annotated[str | None, Choice(group=TUNING, metavar="A,B,...", read=readers.read_targets,
        sets="lora_targets", help=f"linear layers with adapters: {', '.join(readers.TARGETS)}, names of modules such "
        "as q_proj, attention, mlp, or all-linear (default)", means=lambda text: tuple(text.split(",")) if text else (),
        write=",".join, aliases="lora-target lora-target-modules target-modules")] = None
    lora_dropout: Annotated[float, _number("dropout before LoRA adapters (default: 0)", amount, sets="lora_dropout",
        metavar="P", group=TUNING, means=bool, write=lambda drops: "0.1" if drops else "0")] = 0.0
    dora: Annotated[bool | None, Choice(group=TUNING, sets="dora", deniable=True, aliases="use-dora",
        help="train the norms of adapted weights too (DoRA, as peft computes it; default: no)")] = None
    liger: Annotated[bool | None, Choice(group=TUNING, sets="liger", deniable=True,
        aliases="use-liger-kernel enable-liger-kernel",
        help="Liger's kernels for norms, rotations, gates and loss of transformers' modules (default: no)")] = None
    lora_a2a: Annotated[bool | None, Choice(group=TUNING, deniable=True, sets="exchanges_adapters",
        help="exchange the outputs of row-parallel adapters among tensor-parallel ranks instead of gathering them "
        "(Megatron-Core)", aliases="a2a-experimental")] = None
    train_layers: Annotated[int, _number("number of final layers that are trained; embeddings, head and all other "
        "layers are frozen (default: 0, everything is trained)", count(0, numbers.MOST_LAYERS), sets="trained_layers",
        aliases="freeze-trainable-layers trained-layers", group=TUNING)] = 0
    base_weights: Annotated[str | None, Choice(group=TUNING, values=("nf4", "nf4-single", "int8"), sets="base_weights",
        help="format of the frozen weights under LoRA: nf4 is QLoRA's, with double quantisation, nf4-single without, "
        "int8 is LLM.int8 (default: the training precision)", means=BaseWeights,
        flags={"nf4": "qlora load-in-4bit", "int8": "load-in-8bit"})] = None
    task: Annotated[str | None, Choice(group=TUNING, values=tuple(map(str, Objective)), sets="objective",
        help="sft trains on the next token; dpo on pairs of answers, with the forward pass of a frozen reference; "
        "reward on pairs of answers, with one number instead of logits (default: sft)", means=Objective,
        flags={"dpo": "dpo", "reward": "reward-model"})] = None
    lengths: Annotated[str | None, Choice(group=TUNING, metavar="DISTRIBUTION", read=_check_lengths,
        help="lengths of samples in tokens: mean=600,max=4096 (std=X too), a histogram 256:0.3,1024:0.7, or a .jsonl, "
        ".json or .parquet file, with FILE@TOKENIZER counted by transformers (default: all as long as --seq)",
        aliases="sample-lengths length-distribution")] = None
    batching: Annotated[str | None, Choice(group=TUNING, values=("padded", "grouped", "packed"),
        help="with --lengths: pad each micro-batch to its longest sample, group samples by length first, or pack "
        "several into a sequence of --seq tokens (default: padded)",
        flags={"packed": "packing sample-packing", "grouped": "group-by-length"})] = None
    mtp_layers: Annotated[int | None, _number("multi-token prediction (MTP) layers, one per additional token "
        "(default: that of the framework, usually 0)", count(0, MOST_MTP_LAYERS), sets="further_tokens",
        aliases="further-tokens mtp-num-layers mtp num-mtp-modules num-nextn-predict-layers")] = None
    dropout: Annotated[bool | None, _flag("dropout on attention probabilities and residuals (default: that of the "
        "framework)", "dropout")] = None
    fp8_activations: Annotated[bool | None, _flag("save the inputs of activation functions in fp8 (fused kernels)",
        "fp8_activations")] = None
    fp8_attention: Annotated[bool | None, _flag("attention multiplies in fp8 if linear layers do",
        "fp8_attention", "fp8-dot-product-attention fp8-dpa")] = None
    op_fuser: Annotated[bool | None, _flag("Transformer Engine's fused operations in MLPs and adapters (fused kernels)",
        "op_fuser", "use-transformer-engine-op-fuser use-te-ops te-op-fuser")] = None
    check_gradients: Annotated[bool | None, _flag("read the norm of each gradient bucket before it is reduced (eager "
        "Megatron-Core)", "checks_gradients", "check-for-nan-in-grad")] = None
    bf16_final_layers: Annotated[int | None, _number("number of final layers kept in bf16 when training in fp8 or "
        "fp4 (default: that of the framework, usually 0)", count(0, numbers.MOST_LAYERS), sets="wide_layers",
        aliases="wide-layers num-layers-at-end-in-bf16")] = None
    loss: Annotated[str | None, _one_of("kernel of the cross-entropy loss (default: that of the framework)", "loss",
        LossKernel)] = None
    deferred_gradients: Annotated[int | None, _number(
        "micro-batches whose output-projection gradient is computed after the pipeline drains (default: 0)",
        count(0, MICRO_BATCHES.most), sets="deferred_gradients")] = None
    gradients: Annotated[str | None, Choice(group=EXECUTION,
        help="data type in which gradients are accumulated and reduced (default: that of the framework)",
        read=readers.read_precision, values=("fp32", "bf16", "fp16"),
        aliases="grad-dtype gradient-dtype grad-reduce-dtype mixed-precision-reduce",
        sets="gradient_dtype", means=DType)] = None
    optimizer: Annotated[str | None, Choice(group=EXECUTION, metavar="NAME[:FORMAT]",
        help=f"optimizer: {', '.join(OPTIMIZERS)}; FORMAT of its moments: fp32, bf16, fp16, fp8 or 8bit (default: "
        "that of the framework, usually adamw)", aliases="optim")] = None
    master_weights: Annotated[bool | None, _flag("store an fp32 copy of the weights (default: that of the framework)",
        "")] = None
    clipping: Annotated[bool | None, _flag("clip gradients by global norm (default: that of the framework)", "")] = None
    kernels: Annotated[str | None, Choice(group=EXECUTION, values=("fused", "plain", "compiled"),
        help="memory-bound kernels: Transformer Engine (fused), PyTorch (plain) or torch.compile (compiled) (default: "
        "that of the framework)", flags={"compiled": "compile torch-compile"}, sets="kernels", means=Kernels)] = None
    ssm_kernels: Annotated[str | None, _one_of("scans of Mamba-2 layers: mamba-ssm and causal-conv1d (fused), or "
        "the PyTorch operations of transformers without them (default: fused)", "ssm_kernels",
        SsmKernels)] = None
    execution: Annotated[str | None, Choice(group=EXECUTION,
        help="how the CPU launches kernels: CUDA graphs, CUDA graphs except for routed experts (partial-graphs), "
        "eager, or waiting for each kernel (blocking) (default: that of the framework)",
        values=("graphs", "partial-graphs", "eager", "blocking"),
        flags={"eager": "eager", "graphs": "cuda-graphs"}, sets="execution", means=Execution)] = None
    calibration: Annotated["Calibration | str | None", Choice(group=PRICES, metavar="FILE",
        help="measurements of your GPU, written by 'stepcast profile'", aliases="calibrate calib")] = None
    engine: Annotated[str, Choice(group=NETWORK, help=f"{ENGINE_HELP} (default: fast)", values=ENGINES)] = "fast"
    background: Annotated[str | None, Choice(group=NETWORK, metavar="JOB.toml",
        help="other jobs, or flows, that share the network during the step (with --engine fluid)")] = None
    tokens: Annotated[float | None, Choice(group=TRAINING, metavar="N",
        help="tokens to train on, e.g. 15T: also report days and GPU-hours", read=positive(parse_count),
        aliases="train-tokens total-tokens num-tokens training-tokens")] = None
    samples: Annotated[float | None, Choice(group=TRAINING, metavar="N",
        help="samples of the data set, e.g. 50k (pairs for --task dpo and reward; instead of --tokens)",
        read=positive(parse_count),
        aliases="num-samples train-samples dataset-size max-samples")] = None
    epochs: Annotated[float | None, Choice(group=TRAINING, metavar="X", help="passes over the samples (default: 1)",
        read=positive(float), aliases="num-epochs num-train-epochs")] = None
    steps: Annotated[float | None, Choice(group=TRAINING, metavar="N", help="steps to train for (instead of --tokens)",
        read=positive(parse_count), aliases="max-steps train-steps")] = None
    price: Annotated[float | str | None, Choice(group=TRAINING, metavar="X", several=True,
        help="price per GPU-hour (with --tokens, --samples or --steps), one for each cluster that is compared, or "
        "auto: from 'stepcast list prices'", read=numbers.price,
        aliases="cost-per-gpu-hour gpu-price price-per-gpu-hour gpu-hour-price usd-per-gpu-hour")] = None
    currency: Annotated[str, Choice(group=TRAINING, metavar="C",
        help=f"currency of --price, a symbol or a code (default: {DEFAULT_CURRENCY})",
        read=numbers.currency)] = DEFAULT_CURRENCY
    # fmt: on

    @property
    def choices(self) -> FactDict:
        """Return the choices of the step that differ from their defaults, in the order of the help."""
        values = {name: getattr(self, name) for name in CHOICES if name not in ABOUT_TRAINING}
        return {name: value for name, value in values.items() if value != DEFAULTS[name]}


CHOICES = choices_of(PredictQuestion)
DEFAULTS = defaults_of(PredictQuestion)


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
    cp_comm: str | None
    sequence_parallel: bool | None
    flash_attention: bool | None
    attention_kernel: str | None
    overlap: list[str] | tuple[str, ...] | str | None
    bucket_mb: float | str | None
    expert_imbalance: float | str | None
    expert_load: str | None
    expert_replicas: int | str | None
    expert_capacity: float | str | None
    fused_experts: bool | None
    dispatcher: str | None
    lora: int | str | None
    lora_rank: int | str | None
    lora_targets: list[str] | tuple[str, ...] | str | None
    lora_dropout: float | str | None
    dora: bool | None
    liger: bool | None
    lora_a2a: bool | None
    train_layers: int | str | None
    base_weights: str | None
    task: str | None
    lengths: str | None
    batching: str | None
    mtp_layers: int | str | None
    dropout: bool | None
    fp8_activations: bool | None
    fp8_attention: bool | None
    op_fuser: bool | None
    check_gradients: bool | None
    bf16_final_layers: int | str | None
    loss: str | None
    deferred_gradients: int | str | None
    gradients: str | None
    optimizer: str | None
    master_weights: bool | None
    clipping: bool | None
    kernels: str | None
    ssm_kernels: str | None
    execution: str | None


class TrainingChoices(StepChoices, total=False):
    """The choices of a step and of a run of such steps."""

    engine: str | None
    background: str | os.PathLike[str] | None
    tokens: float | str | None
    samples: float | str | None
    epochs: float | str | None
    steps: float | str | None
    price: float | str | None


class PredictChoices(TrainingChoices, total=False):
    """The choices of a question as keywords of Python functions."""

    currency: str | None
