"""What the options that spell a Strategy mean for a model on a cluster."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from stepcast.cli.numbers import (
    check_multiple,
)
from stepcast.cli.strategy_options import AUTOCASTS, MOST_MICRO_BATCHES
from stepcast.ir.schedules import ScheduleKind, usual_kind

if TYPE_CHECKING:
    from stepcast.frameworks.profile import Profile, Settled
    from stepcast.hardware import Cluster
    from stepcast.ir.layout import Layout
    from stepcast.ir.model import Model
    from stepcast.ir.optimizer import Optimizer
    from stepcast.ir.strategy import Strategy

USUAL_FRAMEWORK = "megatron-core"
# Micro-batches per stage when no global batch is given: enough to keep the bubble near a tenth.
MICRO_BATCHES_PER_STAGE = 8


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
        shard=args.shard or _shard(args, args.gpus // (args.tp * args.pp)),
    )
    if args.vpp is None and args.schedule == "interleaved" and args.pp > 1:
        layout = replace(layout, vpp=profile.chunks(model, gpu, layout)[0] or 1)
    return layout


def _shard(args: argparse.Namespace, ranks: int) -> int:
    """Return the ranks that share one of ``--replicate`` copies of the states; 0 where it is not given."""
    copies = args.replicate
    if copies and ranks % copies:
        near = max(ways for ways in range(1, min(copies, ranks) + 1) if ranks % ways == 0)
        raise ValueError(f"--replicate {copies} does not divide dp x cp = {ranks:,}: use {near}")
    return ranks // copies if copies else 0


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
    from stepcast.ir.framework import Dispatcher, Execution, Kernels, LossKernel, SsmKernels
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
        "ssm_kernels": (args.ssm_kernels, SsmKernels),
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
    split = layout.dp * layout.cp > 1 and strategy.sharding.splits_parameters
    if split and layout.pp > 1 and strategy.reshard is None:
        kept = "stages keep gathered weights and whole gradients through the step"
        assumptions.append(f"{kept} (--reshard frees them)")
    return strategy


def _batch(
    args: argparse.Namespace, model: "Model", layout: "Layout", usual_seq: int, assumptions: list[str]
) -> tuple[int, int]:
    """Tokens of a sequence, and sequences of a step."""
    seq, global_batch = args.seq, args.global_batch
    if seq is None:
        seq = min(model.max_seq, usual_seq)
        assumptions.append(f"sequences of {seq} tokens (--seq)")
    if args.accumulation is not None:
        accumulated = layout.dp * args.micro_batch * args.accumulation
        if global_batch not in (None, accumulated):
            raise ValueError(
                f"--accumulation {args.accumulation} means a global batch of {accumulated:,} (micro-batch x "
                f"accumulation x dp), and --global-batch is {global_batch:,}: leave one of them out"
            )
        global_batch = accumulated
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
