"""Megatron-LM's argument parser and its checks of arguments, from a list of its options."""

import argparse
import shlex
import tomllib
from collections.abc import Iterator

from tests.shared import ROOT

LISTED = ROOT / "tests" / "data" / "megatron_arguments.toml"


def megatron_parser() -> argparse.ArgumentParser:
    """Return a parser with the options that Megatron-LM has; it exits at others, as Megatron-LM does."""
    listed = tomllib.loads(LISTED.read_text())
    parser, choices = argparse.ArgumentParser(allow_abbrev=False), listed["choices"]
    names = {kind: listed[kind].split() for kind in ("flags", "integers", "numbers", "words", "lists")}
    for name in names["flags"]:
        parser.add_argument(f"--{name}", action="store_true")
    for kind, type_ in (("integers", int), ("numbers", float), ("words", str)):
        for name in names[kind]:
            parser.add_argument(f"--{name}", type=type_)
    for name in names["lists"]:
        parser.add_argument(f"--{name}", nargs="*", choices=choices.get(name))
    for name, words in choices.items():
        if name not in names["lists"]:
            parser.add_argument(f"--{name}", choices=words)
    return parser


def parse_script(text: str) -> argparse.Namespace:
    """Return the arguments of a launch script."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return megatron_parser().parse_args(words[words.index("pretrain_gpt.py") + 1 :])


def failed_checks(args: argparse.Namespace, gpus: int, script: str) -> Iterator[str]:
    """Yield the checks of ``validate_args`` and of TransformerConfig that fail."""
    pp, tp, cp = args.pipeline_model_parallel_size, args.tensor_model_parallel_size, args.context_parallel_size
    layout, chunks = args.pipeline_model_parallel_layout, args.num_virtual_stages_per_pipeline_rank
    fsdp, ep = args.use_torch_fsdp2 or args.use_megatron_fsdp, args.expert_model_parallel_size or 1
    stages, groups = layout.split("|") if layout else [], args.num_query_groups or args.num_attention_heads
    vpp = len(stages) // pp if layout else chunks or 1
    replicas = gpus // (tp * pp * cp)
    checks = {
        "tp x pp x cp divides the GPUs": gpus % (tp * pp * cp) == 0,
        "micro-batches fill the batch": args.global_batch_size % (args.micro_batch_size * replicas) == 0,
        "one way to split layers": not (layout and chunks),
        "stages of the layout": not layout or len(stages) % pp == 0,
        "layers of the layout": not layout or layout.count("t") == args.num_layers,
        "ends of the layout": not layout or (stages[0][0] == "E" and stages[-1][-1] == "L"),
        "layers divide": bool(layout) or args.num_layers % (pp * vpp) == 0,
        "interleaving needs a pipeline": vpp == 1 or pp > (2 if args.no_overlap_p2p_communication else 1),
        "interleaved micro-batches": vpp == 1 or args.global_batch_size // (args.micro_batch_size * replicas) >= pp,
        "gathers of a sharded optimizer": not args.overlap_param_gather
        or ((args.use_distributed_optimizer or args.use_megatron_fsdp) and args.overlap_grad_reduce),
        "torch FSDP2": not args.use_torch_fsdp2
        or (
            pp == 1
            and ep == 1
            and not args.use_distributed_optimizer
            and args.no_gradient_accumulation_fusion
            and args.ckpt_format in ("torch_dist", "torch_dcp")
            and args.untie_embeddings_and_output_weights
            and not args.fp16
        ),
        "Megatron FSDP": not args.use_megatron_fsdp or args.ckpt_format == "fsdp_dtensor",
        "sharding needs Megatron FSDP": args.data_parallel_sharding_strategy is None or args.use_megatron_fsdp,
        "one precision": not (args.fp16 and args.bf16) and not (args.fp8_format and args.fp4_format),
        "sizes are given": all((args.num_layers, args.hidden_size, args.num_attention_heads)),
        "ring of sequences": cp == 1 or args.seq_length % (2 * cp) == 0,
        "positions": args.max_position_embeddings >= args.seq_length,
        "selective has no method": args.recompute_granularity != "selective" or args.recompute_method is None,
        "modules need selective": not args.recompute_modules or args.recompute_granularity == "selective",
        "full needs a method": args.recompute_granularity != "full" or args.recompute_method is not None,
        "overlap needs sequence parallelism": not args.tp_comm_overlap or args.sequence_parallel,
        "sequence parallelism needs tp": not args.sequence_parallel or tp > 1,
        "experts divide": ep == 1 or (args.num_experts is not None and args.num_experts % ep == 0),
        "experts in fp16": ep == 1 or not args.fp16,
        "tp with experts needs sequence parallelism": not args.num_experts or tp == 1 or args.sequence_parallel,
        "deepep needs flex": not args.moe_enable_deepep or args.moe_token_dispatcher_type == "flex",
        "graphs of an iteration": args.cuda_graph_scope != "full_iteration" or args.no_check_for_nan_in_loss_and_grad,
        "graphs and recomputation": not args.enable_cuda_graph or args.recompute_granularity != "full",
        "mtp positions": not args.mtp_num_layers or args.position_embedding_type in ("rope", "none"),
        "connections": fsdp or tp * cp == 1 or "CUDA_DEVICE_MAX_CONNECTIONS=1" in script,
        "heads divide": args.num_attention_heads % tp == 0,
        "query groups divide": groups % tp == 0 or tp % groups == 0,
    }
    yield from (name for name, holds in checks.items() if not holds)
