"""The options that spell a Strategy, shared by the verbs that take a model."""

import argparse

from stepcast.cli import words
from stepcast.cli.options import add_options
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
    add_options(
        batch,
        """
        --micro-batch N   sequences a replica runs at once (default: 1)
        --global-batch N  sequences in a step (default: 8 micro-batches for each stage and replica)
        --accumulation N  gradient accumulation steps (micro-batches of each replica in a step), instead of
                          --global-batch
        --seq N           tokens in a sequence, as 8192 or 8k (default: the framework's, 4096, or the model's
                          longest)
        """,
        micro_batch=1,
    )
    how = parser.add_argument_group("execution")
    _add_schedule(how)
    _add_experts(how)
    _add_numbers_and_kernels(how)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    layout = parser.add_argument_group("layout (data parallelism takes the GPUs that are left)")
    add_options(
        layout,
        """
        --gpus N                GPUs in all
        --nodes N               or whole nodes in all
        --dp N                  or replicas, of tp x cp x pp GPUs each (default: the rest)
        --tp N                  tensor parallel ranks (default: 1)
        --cp N                  context parallel ranks (default: 1)
        --ep N                  expert parallel ranks (default: 1)
        --pp N                  pipeline parallel ranks (default: 1)
        --vpp N                 model chunks per pipeline stage; default 1
        --expert-tp N           tensor parallel of experts (default: tp)
        --shard N               ranks that split states in hybrid FSDP
        --replicate N           copies of the states in hybrid FSDP, instead of --shard: dp x cp / shard
        --stage-layers A,B,...  layers of each stage and chunk, in model order
        """,
        **dict.fromkeys(("tp", "cp", "ep", "pp"), 1),
        expert_tp=0,
        shard=0,
        replicate=0,
    )


def _add_schedule(how: "argparse._ArgumentGroup") -> None:
    add_options(
        how,
        f"""
        --schedule NAME         {", ".join(SCHEDULES)}; default: interleaved with vpp, else 1f1b
        --precision NAME        {", ".join((*PRECISIONS, *AUTOCASTS))}; autocast keeps weights in fp32 and
                                casts them to use (default: the framework's, bf16)
        --sharding NAME         {", ".join(SHARDINGS)}; default: the framework's, zero-1
        --[no-]reshard          ZeRO-3, FSDP: free gathered parameters after each forward; default: yes, but
                                in a pipeline
        --fp8-params            keep and gather parameters in fp8, without a bf16 copy
        --zero-gradients SHARE  weights that never had a gradient: of unseen tokens; 1: a toy that learns
                                nothing
        --recompute KIND        none, selective, full, block:N, or selective:A,B,... with modules out of
                                {", ".join(MODULES)}
        --offload A[=X],B[=X]   optimizer, activations, or a share X of either, kept in the memory of the host
        --context               how context parallel ranks exchange
        """,
        schedule={"type": meaning(words.SCHEDULES), "choices": SCHEDULES},
        precision=(*PRECISIONS, *AUTOCASTS),
        sharding=SHARDINGS,
        zero_gradients=0.0,
        context=CONTEXTS,
    )
    for word, what in (
        ("sequence-parallel", "with tp: keep norms whole on each rank"),
        ("flash-attention", "store the scores of attention"),
    ):
        name = f"no_{word.replace('-', '_')}"
        how.add_argument(f"--no-{word}", dest=name, action="store_const", const=True, help=what)
        how.add_argument(f"--{word}", dest=name, action="store_const", const=False)
    add_options(
        how,
        f"""
        --overlap A,B,...  what runs beside computation: {", ".join(OVERLAPS)}, or none
        --bucket-mb X      size of gradient buckets; 0: one for a stage
        """,
    )


def _add_experts(how: "argparse._ArgumentGroup") -> None:
    add_options(
        how,
        """
        --expert-imbalance X  busiest expert rank over the mean
        --expert-capacity X   most tokens an expert rank takes, over the mean
        --[no-]fused-experts  biases, activation and quantisation inside the experts' products
        --dispatcher          how tokens reach their experts
        """,
        expert_imbalance=1.0,
        dispatcher=DISPATCHERS,
    )


def _add_numbers_and_kernels(how: "argparse._ArgumentGroup") -> None:
    add_options(
        how,
        f"""
        --lora-rank N              train low-rank adapters alone
        --further-tokens N         tokens predicted beyond the next (multi-token prediction)
        --[no-]dropout             on attention probabilities and residuals
        --[no-]fp8-activations     fused kernels keep the inputs of activations in fp8
        --[no-]fp8-attention       attention multiplies in fp8 where linear layers do
        --wide-layers N            of the last layers, stay out of fp8 and fp4
        --loss                     how fused kernels come from logits to a loss
        --deferred-gradients N     micro-batches whose gradient of the output projection waits until the
                                   pipeline empties
        --gradients                format in which gradients are summed and reduced
        --optimizer NAME[:FORMAT]  {", ".join(OPTIMIZERS)}; moments in fp32, bf16, fp16, fp8 or 8bit
        --[no-]master-weights      an fp32 copy of weights that are less precise
        --[no-]clipping            of gradients by the norm of all
        --kernels
        --ssm-kernels              what runs the scans of Mamba-2 layers: mamba-ssm and causal-conv1d, or the
                                   PyTorch operations of transformers without them (default: fused)
        --execution                how the host issues kernels: captured, but for routed experts, one by one,
                                   or each waited for
        """,
        lora_rank=0,
        loss=LOSSES,
        gradients=GRADIENTS,
        kernels=("fused", "plain", "compiled"),
        ssm_kernels=("fused", "eager"),
        execution=EXECUTIONS,
    )
