"""The options that spell a Strategy, shared by the verbs that take a model."""

import argparse

from stepcast.cli import words
from stepcast.cli.numbers import (
    BINARY,
    MOST_LAYERS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    amount,
    count,
    gpu_count,
)
from stepcast.cli.words import meaning
from stepcast.ir.limits import MICRO_BATCHES
from stepcast.ir.schedules import ScheduleKind

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
MOST_MICRO_BATCHES = MICRO_BATCHES.most
MOST_FURTHER_TOKENS = 64


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
