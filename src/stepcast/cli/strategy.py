"""The options that spell a Strategy, shared by the verbs that take a model."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from stepcast.cli.numbers import (
    MOST_LAYERS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    amount,
    check_multiple,
    count,
    gpu_count,
)
from stepcast.ir.schedules import ScheduleKind, usual_kind

if TYPE_CHECKING:
    from stepcast.ir.layout import Layout
    from stepcast.ir.model import Model
    from stepcast.ir.strategy import Recompute, RecomputeModule, Strategy

SCHEDULES = tuple(str(kind) for kind in ScheduleKind)
SHARDINGS = ("none", "zero-1", "zero-2", "zero-3", "fsdp", "hybrid-fsdp")
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")
AUTOCASTS = ("autocast-bf16", "autocast-fp16")
GRADIENTS = ("fp32", "bf16", "fp16")
CONTEXTS = ("ring", "all-to-all", "all-gather")
OVERLAPS = ("gradients", "parameters", "tensor", "tensor-gradients", "transfers", "experts")
MODULES = ("core-attention", "latent-up", "norms", "mlp", "expert-activation", "experts")
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "muon", "adafactor")
EXECUTIONS = ("graphs", "partial-graphs", "eager")
# Micro-batches per stage when no global batch is given: enough to keep the bubble near a tenth.
MICRO_BATCHES_PER_STAGE = 8
USUAL_SEQ = 4096
MOST_MICRO_BATCHES = 1_000_000
MOST_FURTHER_TOKENS = 64


def add_strategy_arguments(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    batch = parser.add_argument_group("batch")
    sequences = count(1, MOST_SEQUENCES)
    batch.add_argument("--micro-batch", type=sequences, default=1, metavar="N")
    batch.add_argument("--global-batch", type=sequences, metavar="N", help="sequences in a step")
    batch.add_argument("--seq", type=count(1, MOST_TOKENS), metavar="N", help="tokens in a sequence")
    how = parser.add_argument_group("execution")
    _add_schedule(how)
    _add_experts(how)
    _add_numbers_and_kernels(how)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_argument_group("layout (data parallelism takes the GPUs that are left)")
    layout.add_argument("--gpus", type=gpu_count, required=True, metavar="N", help="GPUs in all")
    for name, what in (("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("pp", "pipeline")):
        layout.add_argument(f"--{name}", type=gpu_count, default=1, metavar="N", help=f"{what} parallel")
    layout.add_argument(
        "--vpp", type=count(1, MOST_LAYERS), default=1, metavar="N", help="model chunks per pipeline stage"
    )
    layout.add_argument(
        "--expert-tp", type=gpu_count, default=0, metavar="N", help="tensor parallel of experts (default: tp)"
    )
    layout.add_argument(
        "--shard", type=gpu_count, default=0, metavar="N", help="ranks that split states in hybrid FSDP"
    )
    layout.add_argument(
        "--stage-layers", metavar="A,B,...", help="layers of each stage and chunk, in model order"
    )


def _add_schedule(how: "argparse._ArgumentGroup") -> None:
    how.add_argument(
        "--schedule",
        choices=SCHEDULES,
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)}; default: interleaved with vpp, else 1f1b",
    )
    how.add_argument(
        "--precision",
        choices=(*PRECISIONS, *AUTOCASTS),
        default="bf16",
        metavar="NAME",
        help=f"{', '.join((*PRECISIONS, *AUTOCASTS))}; autocast keeps weights in fp32 and casts them to use",
    )
    how.add_argument(
        "--sharding",
        choices=SHARDINGS,
        default="zero-1",
        metavar="NAME",
        help=f"{', '.join(SHARDINGS)}; default zero-1, the distributed optimizer",
    )
    how.add_argument(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        help="ZeRO-3, FSDP: free gathered parameters after each forward; default: yes, but in a pipeline",
    )
    how.add_argument(
        "--fp8-params", action="store_true", help="keep and gather parameters in fp8, without a bf16 copy"
    )
    how.add_argument(
        "--recompute",
        default="none",
        metavar="KIND",
        help="none, selective, full, block:N, or selective:A,B,... with modules out of " + ", ".join(MODULES),
    )
    how.add_argument(
        "--context", choices=CONTEXTS, default="ring", help="how context parallel ranks exchange"
    )
    how.add_argument(
        "--no-sequence-parallel", action="store_true", help="with tp: keep norms whole on each rank"
    )
    how.add_argument("--no-flash-attention", action="store_true")
    how.add_argument(
        "--overlap", metavar="A,B,...", help=f"what runs beside computation: {', '.join(OVERLAPS)}, or none"
    )
    how.add_argument(
        "--bucket-mb", type=amount, metavar="X", help="size of gradient buckets; 0: one for a stage"
    )


def _add_experts(how: "argparse._ArgumentGroup") -> None:
    how.add_argument(
        "--expert-imbalance", type=amount, default=1.0, metavar="X", help="busiest expert rank over the mean"
    )
    how.add_argument(
        "--expert-capacity", type=amount, metavar="X", help="most tokens an expert rank takes, over the mean"
    )
    how.add_argument(
        "--fused-experts",
        action="store_true",
        help="biases, activation and quantisation inside the experts' products",
    )


def _add_numbers_and_kernels(how: "argparse._ArgumentGroup") -> None:
    how.add_argument(
        "--lora-rank",
        type=count(0, MOST_TOKENS),
        default=0,
        metavar="N",
        help="train low-rank adapters alone",
    )
    how.add_argument(
        "--further-tokens",
        type=count(0, MOST_FURTHER_TOKENS),
        default=0,
        metavar="N",
        help="tokens predicted beyond the next (multi-token prediction)",
    )
    how.add_argument("--dropout", action="store_true", help="on attention probabilities and residuals")
    how.add_argument(
        "--gradients",
        choices=GRADIENTS,
        default="fp32",
        help="format in which gradients are summed and reduced",
    )
    how.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME[:FORMAT]",
        help=f"{', '.join(OPTIMIZERS)}; moments in fp32, bf16, fp16, fp8 or 8bit (default fp32)",
    )
    how.add_argument(
        "--master-weights",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="an fp32 copy of weights that are less precise",
    )
    how.add_argument(
        "--clipping",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of gradients by the norm of all",
    )
    how.add_argument("--kernels", choices=("fused", "plain", "compiled"), default="fused")
    how.add_argument(
        "--execution",
        choices=EXECUTIONS,
        default="graphs",
        help="how the host issues kernels: captured, but for routed experts, or one by one",
    )


def strategy_of(args: argparse.Namespace, model: "Model", assumptions: list[str]) -> "Strategy":
    """The Strategy that *args* spell; what they leave out is assumed and said."""
    from stepcast.ir.dtype import DType
    from stepcast.ir.optimizer import optimizer_named
    from stepcast.ir.strategy import (
        ContextKind,
        Execution,
        Kernels,
        Sharding,
        Strategy,
        TrainingKind,
    )

    layout = _layout(args)
    seq, global_batch = _batch(args, model, layout, assumptions)
    strategy = Strategy(
        layout=layout,
        micro_batch=args.micro_batch,
        global_batch=global_batch,
        seq=seq,
        sequence_parallel=layout.tp > 1 and not args.no_sequence_parallel,
        context=ContextKind(args.context),
        schedule=ScheduleKind(args.schedule) if args.schedule else usual_kind(layout.vpp),
        stage_layers=() if args.stage_layers is None else _numbers(args.stage_layers),
        sharding=Sharding(args.sharding),
        recompute=_recompute(args.recompute),
        precision=DType(args.precision.removeprefix("autocast-")),
        autocast=args.precision in AUTOCASTS,
        training=TrainingKind.LORA if args.lora_rank else TrainingKind.FULL,
        lora_rank=args.lora_rank,
        flash_attention=not args.no_flash_attention,
        execution=Execution(args.execution),
        kernels=Kernels(args.kernels),
        gradient_dtype=DType(args.gradients),
        optimizer=optimizer_named(args.optimizer, args.master_weights, args.clipping),
        expert_imbalance=args.expert_imbalance,
        expert_capacity=args.expert_capacity,
        dropout=args.dropout,
        fused_experts=args.fused_experts,
        further_tokens=args.further_tokens,
        reshard=args.reshard,
        fp8_parameters=args.fp8_params,
    )
    if strategy.micro_batches > MOST_MICRO_BATCHES:
        raise ValueError(
            f"{strategy.micro_batches:,} micro-batches in a step are more than {MOST_MICRO_BATCHES:,}: "
            "lower --global-batch, or raise --micro-batch or --gpus"
        )
    return _with_overlap(strategy, args)


def _batch(
    args: argparse.Namespace, model: "Model", layout: "Layout", assumptions: list[str]
) -> tuple[int, int]:
    """Tokens of a sequence, and sequences of a step."""
    seq, global_batch = args.seq, args.global_batch
    if seq is None:
        seq = min(model.max_seq, USUAL_SEQ)
        assumptions.append(f"sequences of {seq} tokens (--seq)")
    if global_batch is None:
        global_batch = layout.dp * args.micro_batch * MICRO_BATCHES_PER_STAGE * layout.pp
        assumptions.append(f"a global batch of {global_batch} sequences (--global-batch)")
    return seq, global_batch


def _layout(args: argparse.Namespace) -> "Layout":
    from stepcast.ir.layout import Layout

    model_gpus = args.tp * args.cp * args.pp
    check_multiple(args.gpus, model_gpus)
    return Layout(
        tp=args.tp,
        cp=args.cp,
        ep=args.ep,
        dp=args.gpus // model_gpus,
        pp=args.pp,
        vpp=args.vpp,
        expert_tp=args.expert_tp,
        shard=args.shard,
    )


def _with_overlap(strategy: "Strategy", args: argparse.Namespace) -> "Strategy":
    from stepcast.ir.strategy import Overlap

    if args.overlap is not None:
        words = set() if args.overlap == "none" else set(args.overlap.split(","))
        if unknown := sorted(words - set(OVERLAPS)):
            raise ValueError(f"--overlap {unknown[0]!r}: expected {', '.join(OVERLAPS)}, or none")
        chosen = {name.replace("-", "_"): name in words for name in OVERLAPS}
        strategy = replace(strategy, overlap=Overlap(**chosen))
    if args.bucket_mb is not None:
        strategy = replace(strategy, bucket_bytes=round(args.bucket_mb * 1e6))
    return strategy


def _recompute(text: str) -> "Recompute":
    from stepcast.ir.strategy import Recompute, RecomputeKind

    kind, colon, rest = text.partition(":")
    if kind == RecomputeKind.SELECTIVE and colon:
        return Recompute(RecomputeKind.SELECTIVE, modules=_modules(rest))
    if kind not in set(RecomputeKind) or (rest and not (rest.isascii() and rest.isdigit())):
        raise ValueError(
            f"--recompute {text!r}: expected none, selective, full, or block:N, or selective:A,B,..."
        )
    return Recompute(RecomputeKind(kind), int(rest or 0))


def _modules(text: str) -> "tuple[RecomputeModule, ...]":
    """Modules by name, each once."""
    from stepcast.ir.strategy import RecomputeModule

    words = dict.fromkeys(text.split(","))
    if unknown := sorted(set(words) - set(MODULES)):
        raise ValueError(f"--recompute selective: {unknown[0]!r} is no module; expected {', '.join(MODULES)}")
    return tuple(map(RecomputeModule, words))


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ValueError(f"--stage-layers {text!r}: expected whole numbers, such as 7,8,8,7")
    return tuple(int(part) for part in parts)
