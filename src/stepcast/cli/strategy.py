"""The options that spell a Strategy, shared by the verbs that take a model."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from stepcast.cli import words
from stepcast.cli.numbers import (
    BINARY,
    MOST_LAYERS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    amount,
    check_multiple,
    count,
    gpu_count,
)
from stepcast.cli.words import meaning
from stepcast.ir.limits import MICRO_BATCHES
from stepcast.ir.schedules import ScheduleKind, usual_kind

if TYPE_CHECKING:
    from stepcast.frameworks.profile import Profile, Settled
    from stepcast.hardware import Cluster
    from stepcast.ir.layout import Layout
    from stepcast.ir.model import Model
    from stepcast.ir.optimizer import Optimizer
    from stepcast.ir.strategy import Strategy

SCHEDULES = tuple(str(kind) for kind in ScheduleKind)
SHARDINGS = ("none", "zero-1", "zero-2", "zero-3", "fsdp", "hybrid-fsdp")
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")
AUTOCASTS = ("autocast-bf16", "autocast-fp16")
GRADIENTS = ("fp32", "bf16", "fp16")
CONTEXTS = ("ring", "all-to-all", "all-gather")
OVERLAPS = ("gradients", "parameters", "tensor", "tensor-gradients", "transfers", "experts")
MODULES = ("core-attention", "latent-up", "norms", "mlp", "expert-activation", "experts")
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "muon", "adafactor")
LOSSES = ("in-place", "compiled", "engine")
DISPATCHERS = ("all-to-all", "forwarding")
EXECUTIONS = ("graphs", "partial-graphs", "eager", "blocking")
# Micro-batches per stage when no global batch is given: enough to keep the bubble near a tenth.
MICRO_BATCHES_PER_STAGE = 8
MOST_MICRO_BATCHES = MICRO_BATCHES.most
MOST_FURTHER_TOKENS = 64
USUAL_FRAMEWORK = "megatron-core"


def add_strategy_arguments(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    batch = parser.add_argument_group("batch")
    sequences = count(1, MOST_SEQUENCES, BINARY)
    batch.add_argument(
        "--micro-batch",
        type=sequences,
        default=1,
        metavar="N",
        help="sequences a replica runs at once (default: 1)",
    )
    batch.add_argument(
        "--global-batch",
        type=sequences,
        metavar="N",
        help="sequences in a step (default: 8 micro-batches for each stage and replica)",
    )
    batch.add_argument(
        "--seq",
        type=count(1, MOST_TOKENS, BINARY),
        metavar="N",
        help="tokens in a sequence, as 8192 or 8k (default: the framework's, 4096, or the model's longest)",
    )
    how = parser.add_argument_group("execution")
    _add_schedule(how)
    _add_experts(how)
    _add_numbers_and_kernels(how)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_argument_group("layout (data parallelism takes the GPUs that are left)")
    layout.add_argument("--gpus", type=gpu_count, metavar="N", help="GPUs in all")
    layout.add_argument("--nodes", type=gpu_count, metavar="N", help="or whole nodes in all")
    layout.add_argument(
        "--dp",
        type=gpu_count,
        metavar="N",
        help="or replicas, of tp x cp x pp GPUs each (default: the rest)",
    )
    for name, what in (("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("pp", "pipeline")):
        layout.add_argument(
            f"--{name}", type=gpu_count, default=1, metavar="N", help=f"{what} parallel ranks (default: 1)"
        )
    layout.add_argument(
        "--vpp", type=count(1, MOST_LAYERS), metavar="N", help="model chunks per pipeline stage; default 1"
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
        type=meaning(words.SCHEDULES),
        choices=SCHEDULES,
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)}; default: interleaved with vpp, else 1f1b",
    )
    how.add_argument(
        "--precision",
        type=meaning(words.PRECISIONS),
        choices=(*PRECISIONS, *AUTOCASTS),
        metavar="NAME",
        help=f"{', '.join((*PRECISIONS, *AUTOCASTS))}; autocast keeps weights in fp32 and casts them to use "
        "(default: the framework's, bf16)",
    )
    how.add_argument(
        "--sharding",
        type=words.sharding_word,
        choices=SHARDINGS,
        metavar="NAME",
        help=f"{', '.join(SHARDINGS)}; default: the framework's, zero-1",
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
        "--zero-gradients",
        type=amount,
        default=0.0,
        metavar="SHARE",
        help="weights that never had a gradient: of unseen tokens; 1: a toy that learns nothing",
    )
    how.add_argument(
        "--recompute",
        type=words.recompute_text,
        metavar="KIND",
        help="none, selective, full, block:N, or selective:A,B,... with modules out of " + ", ".join(MODULES),
    )
    how.add_argument(
        "--offload",
        metavar="A[=X],B[=X]",
        help="optimizer, activations, or a share X of either, kept in the memory of the host",
    )
    how.add_argument("--context", choices=CONTEXTS, help="how context parallel ranks exchange")
    for word, what in (
        ("sequence-parallel", "with tp: keep norms whole on each rank"),
        ("flash-attention", "store the scores of attention"),
    ):
        name = f"no_{word.replace('-', '_')}"
        how.add_argument(f"--no-{word}", dest=name, action="store_const", const=True, help=what)
        how.add_argument(f"--{word}", dest=name, action="store_const", const=False)
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
        action=argparse.BooleanOptionalAction,
        help="biases, activation and quantisation inside the experts' products",
    )
    how.add_argument("--dispatcher", choices=DISPATCHERS, help="how tokens reach their experts")


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
        metavar="N",
        help="tokens predicted beyond the next (multi-token prediction)",
    )
    how.add_argument(
        "--dropout", action=argparse.BooleanOptionalAction, help="on attention probabilities and residuals"
    )
    how.add_argument(
        "--fp8-activations",
        action=argparse.BooleanOptionalAction,
        help="fused kernels keep the inputs of activations in fp8",
    )
    how.add_argument(
        "--fp8-attention",
        action=argparse.BooleanOptionalAction,
        help="attention multiplies in fp8 where linear layers do",
    )
    how.add_argument(
        "--wide-layers",
        type=count(0, MOST_LAYERS),
        metavar="N",
        help="of the last layers, stay out of fp8 and fp4",
    )
    how.add_argument("--loss", choices=LOSSES, help="how fused kernels come from logits to a loss")
    how.add_argument(
        "--deferred-gradients",
        type=count(0, MOST_MICRO_BATCHES),
        metavar="N",
        help="micro-batches whose gradient of the output projection waits until the pipeline empties",
    )
    how.add_argument(
        "--gradients",
        type=meaning(words.PRECISIONS),
        choices=GRADIENTS,
        help="format in which gradients are summed and reduced",
    )
    how.add_argument(
        "--optimizer",
        metavar="NAME[:FORMAT]",
        help=f"{', '.join(OPTIMIZERS)}; moments in fp32, bf16, fp16, fp8 or 8bit",
    )
    how.add_argument(
        "--master-weights",
        action=argparse.BooleanOptionalAction,
        help="an fp32 copy of weights that are less precise",
    )
    how.add_argument(
        "--clipping", action=argparse.BooleanOptionalAction, help="of gradients by the norm of all"
    )
    how.add_argument("--kernels", choices=("fused", "plain", "compiled"))
    how.add_argument(
        "--execution",
        choices=EXECUTIONS,
        help="how the host issues kernels: captured, but for routed experts, one by one, or each waited for",
    )


def layout_of(args: argparse.Namespace, profile: "Profile", model: "Model", gpu: str) -> "Layout":
    """How the GPUs are split; an interleaved schedule takes the framework's chunks where none are given."""
    from stepcast.ir.layout import Layout

    model_gpus = args.tp * args.cp * args.pp
    check_multiple(args.gpus, model_gpus, _other_ways(args, model), model.heads % args.tp == 0)
    layout = Layout(
        tp=args.tp,
        cp=args.cp,
        ep=args.ep,
        dp=args.gpus // model_gpus,
        pp=args.pp,
        vpp=args.vpp or 1,
        expert_tp=args.expert_tp,
        shard=args.shard,
    )
    if args.vpp is None and args.schedule == "interleaved" and args.pp > 1:
        layout = replace(layout, vpp=profile.chunks(model, gpu, layout)[0] or 1)
    return layout


def settle_gpus(args: argparse.Namespace, cluster: "Cluster", assumptions: list[str]) -> None:
    """How many GPUs *args* mean, into ``args.gpus``: said outright, as nodes or as replicas."""
    model_gpus = args.tp * args.cp * args.pp
    said = {
        "--gpus": args.gpus,
        "--nodes": args.nodes and args.nodes * cluster.node.gpus,
        "--dp": args.dp and args.dp * model_gpus,
    }
    counts = {option: number for option, number in said.items() if number}
    if len(set(counts.values())) > 1:
        told = " and ".join(f"{option} means {number:,}" for option, number in counts.items())
        raise ValueError(f"{told} GPUs, with tp x cp x pp = {model_gpus:,}: leave one of them out")
    if counts:
        args.gpus = next(iter(counts.values()))
    elif args.gpu is not None:
        args.gpus = model_gpus
    elif cluster.gpus is not None:
        args.gpus = cluster.gpus // model_gpus * model_gpus or model_gpus
        assumptions.append(f"all {args.gpus:,} GPUs of {cluster.name} (--gpus)")
    else:
        raise ValueError(
            f"say how many GPUs of {cluster.name}: --gpus 64, --nodes 8, or --dp with the ways of the model"
        )
    if cluster.gpus is not None and args.gpus > cluster.gpus:
        raise ValueError(
            f"{args.gpus:,} GPUs are more than the {cluster.gpus:,} of {cluster.name}{_larger(cluster)}"
        )


def _larger(cluster: "Cluster") -> str:
    from stepcast.hardware.catalog import clusters_of

    others = [name for name in clusters_of(cluster.gpu.name) if name not in (cluster.name, "pcie-node")]
    one = f", which is {cluster.description}" if cluster.name == cluster.gpu.name else ""
    return f"{one}; as many as you like: --cluster {' or '.join(others[:2])}" if others else one


def _other_ways(args: argparse.Namespace, model: "Model") -> list[str]:
    """Ways to split the model that are near the given ones and divide the GPUs."""
    found = []
    ways = {"tp": args.tp, "cp": args.cp, "pp": args.pp}
    most = {"tp": model.heads, "cp": args.gpus, "pp": model.layers}
    for name, wanted in ways.items():
        rest = prod(ways.values()) // wanted
        if wanted == 1 or args.gpus % rest:
            continue
        whole = gcd(args.gpus // rest, most[name]) if name == "tp" else args.gpus // rest
        legal = [each for each in range(1, min(whole, most[name]) + 1) if whole % each == 0]
        below, above = [each for each in legal if each < wanted], [each for each in legal if each > wanted]
        near = [*below[-1:], *above[:1]]
        if near:
            found.append(f"--{name} {' or '.join(map(str, near))}")
    return found


def given_by(args: argparse.Namespace) -> dict[str, Any]:
    """What *args* say themselves, by fields of a Strategy or a Framework."""
    from stepcast.frameworks.words import offload_of, overlap_of, recompute_of
    from stepcast.ir.dtype import DType
    from stepcast.ir.framework import Dispatcher, Execution, Kernels, LossKernel
    from stepcast.ir.strategy import ContextKind, Sharding

    read: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "precision": (args.precision, lambda name: DType(name.removeprefix("autocast-"))),
        "autocast": (args.precision, AUTOCASTS.__contains__),
        "sharding": (args.sharding, Sharding),
        "context": (args.context, ContextKind),
        "recompute": (args.recompute, lambda text: _said("--recompute", recompute_of, text)),
        "offload": (args.offload, lambda text: _said("--offload", offload_of, text)),
        "overlap": (args.overlap, lambda text: _said("--overlap", overlap_of, _words(text))),
        "sequence_parallel": (args.no_sequence_parallel, lambda no: not no),
        "further_tokens": (args.further_tokens, int),
        "stage_layers": (args.stage_layers, _numbers),
        "flash_attention": (args.no_flash_attention, lambda no: not no),
        "execution": (args.execution, Execution),
        "kernels": (args.kernels, Kernels),
        "gradient_dtype": (args.gradients, DType),
        "dispatcher": (args.dispatcher, Dispatcher),
        "dropout": (args.dropout, bool),
        "loss": (args.loss, LossKernel),
        "fp8_activations": (args.fp8_activations, bool),
        "fp8_attention": (args.fp8_attention, bool),
        "wide_layers": (args.wide_layers, int),
        "deferred_gradients": (args.deferred_gradients, int),
        "fused_experts": (args.fused_experts, bool),
        "bucket_bytes": (args.bucket_mb, lambda megabytes: round(megabytes * 1e6)),
    }
    return {name: meaning(value) for name, (value, meaning) in read.items() if value is not None}


def optimizer_of(args: argparse.Namespace, usual: "Optimizer") -> dict[str, "Optimizer"]:
    """The optimizer where *args* say anything of it; the rest is as *usual*."""
    from stepcast.ir.optimizer import optimizer_named

    said = {"master_weights": args.master_weights, "clips": args.clipping}
    changed = {name: value for name, value in said.items() if value is not None}
    if args.optimizer is None and not changed:
        return {}
    chosen = usual
    if args.optimizer is not None:
        named = optimizer_named(args.optimizer, usual.master_weights, usual.clips)
        chosen = replace(named, fused=usual.fused)
    return {"optimizer": replace(chosen, **changed)}


def settled_facts(settled: "Settled") -> dict[str, Any]:
    """What rules about options need to know, in the options' words."""
    from stepcast.frameworks.words import recompute_word

    choices, framework = settled.choices, settled.framework
    autocast = "autocast-" if choices.get("autocast") else ""
    return {
        "precision": f"{autocast}{choices['precision']}",
        "sharding": str(choices["sharding"]),
        "context": str(choices["context"]),
        "gradients": str(framework.gradient_dtype),
        "dispatcher": str(framework.dispatcher),
        "recompute": recompute_word(choices["recompute"]),
        "kernels": str(framework.kernels),
        "execution": str(framework.execution),
        "fused_experts": framework.fused_experts,
        "dropout": framework.dropout,
        "further_tokens": choices["further_tokens"],
        "selective": str(framework.selective),
    }


def strategy_of(
    args: argparse.Namespace,
    model: "Model",
    layout: "Layout",
    settled: "Settled",
    usual_seq: int,
    assumptions: list[str],
) -> "Strategy":
    """The Strategy that *args* spell; what they leave out is assumed and said."""
    from stepcast.ir.strategy import TrainingKind

    seq, global_batch = _batch(args, model, layout, usual_seq, assumptions)
    choices = {
        **settled.choices,
        "schedule": ScheduleKind(args.schedule) if args.schedule else usual_kind(layout.vpp),
        "training": TrainingKind.LORA if args.lora_rank else TrainingKind.FULL,
        "lora_rank": args.lora_rank,
        "expert_imbalance": args.expert_imbalance,
        "expert_capacity": args.expert_capacity,
        "reshard": args.reshard,
        "fp8_parameters": args.fp8_params,
        "zero_gradients": args.zero_gradients,
    }
    strategy = replace(settled, choices=choices).strategy(layout, args.micro_batch, global_batch, seq)
    if strategy.micro_batches > MOST_MICRO_BATCHES:
        raise ValueError(
            f"{strategy.micro_batches:,} micro-batches in a step are more than {MOST_MICRO_BATCHES:,}: "
            "lower --global-batch, or raise --micro-batch or --gpus"
        )
    return strategy


def _batch(
    args: argparse.Namespace, model: "Model", layout: "Layout", usual_seq: int, assumptions: list[str]
) -> tuple[int, int]:
    """Tokens of a sequence, and sequences of a step."""
    seq, global_batch = args.seq, args.global_batch
    if seq is None:
        seq = min(model.max_seq, usual_seq)
        assumptions.append(f"sequences of {seq} tokens (--seq)")
    if global_batch is None:
        global_batch = layout.dp * args.micro_batch * MICRO_BATCHES_PER_STAGE * layout.pp
        assumptions.append(f"a global batch of {global_batch} sequences (--global-batch)")
    return seq, global_batch


def _said(option: str, meaning: Callable[[Any], Any], text: Any) -> Any:
    try:
        return meaning(text)
    except ValueError as error:
        message = str(error)
        raise ValueError(
            f"{option} {message}" if message.startswith(("'", "selective: ")) else message
        ) from None


def _words(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ValueError(f"--stage-layers {text!r}: expected whole numbers, such as 7,8,8,7")
    return tuple(int(part) for part in parts)
