"""Configurations of other tools for a run: Megatron-LM, NeMo and Megatron-Bridge, torchtitan, DeepSpeed, accelerate.

Each writer is the inverse of its reader in ``inputs/configs``; ``questions/emitting.py`` reads every file back
and names what the tool has no key for.
"""

import json
from collections.abc import Callable, Mapping

from stepcast.inputs.configs.megatron import LATENT, MODULES, POSITIONS
from stepcast.inputs.configs.megatron import SHARDINGS as MEGATRON_SHARDINGS
from stepcast.inputs.configs.torchtitan import FAMILIES, FLAVOURS
from stepcast.inputs.model_table import part_words
from stepcast.inputs.source import read_words
from stepcast.ir.dataclass import dataclass
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Dispatcher, Execution, Framework, Kernels, LossKernel
from stepcast.ir.model import Model, pieces
from stepcast.ir.model_parts import Activation, NormKind, QkNorm
from stepcast.ir.strategy import ContextKind, RecomputeKind, Sharding, Strategy
from stepcast.outputs.plain import toml_rows

Value = str | int | float | bool | None
Table = dict[str, "Value | Table"]


@dataclass(frozen=True, slots=True)
class EmittedRun:
    """The run to be written; *gpus_per_node* is that of its cluster."""

    model: Model
    strategy: Strategy
    framework: Framework
    gpus_per_node: int
    title: str

    @property
    def per_node(self) -> int:
        """GPUs of a node that the run uses."""
        return min(self.gpus_per_node, self.strategy.layout.gpus)

    @property
    def nodes(self) -> int:
        return -(-self.strategy.layout.gpus // self.per_node)


# ---- Megatron-LM ------------------------------------------------------------------------------------------


def megatron_arguments(run: EmittedRun) -> Table:
    """Return the arguments of Megatron-LM's training scripts; True is a flag."""
    return {**_megatron_model(run.model), **_megatron_layout(run), **_megatron_execution(run)}


def _megatron_model(model: Model) -> Table:
    arguments: Table = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.heads,
        "vocab-size": model.vocab,
        "swiglu": model.gated and model.activation is Activation.SILU,
        "quick-geglu": model.gated and model.activation is Activation.GELU,
        "squared-relu": model.activation is Activation.SQUARED_RELU,
        "normalization": "RMSNorm" if model.norm.kind is NormKind.RMS else "LayerNorm",
        "position-embedding-type": {ours: theirs for theirs, ours in POSITIONS.items()}[part_words(model)["position"]],
        "untie-embeddings-and-output-weights": not model.tied,
        "disable-bias-linear": not model.biases.mlp,
        "add-qkv-bias": model.biases.qkv and not model.biases.mlp,
        "qk-layernorm": model.qk_norm is QkNorm.HEAD or model.latent is not None,
        "qk-l2-norm": model.qk_norm is QkNorm.PLAIN,
        "softmax-type": "learnable" if model.attention_sinks else None,
        "attention-output-gate": model.attention_gate,
    }
    if model.latent is not None:
        values = {name: getattr(model.latent, size.removeprefix("mla_")) for size, (name, _) in LATENT.items()}
        arguments |= {"multi-latent-attention": True, **values}
    else:
        arguments |= {"kv-channels": model.head_dim}
        if model.kv_heads != model.heads:
            arguments |= {"group-query-attention": True, "num-query-groups": model.kv_heads}
    if model.window is not None:
        local = [int(model.window.at(layer) is not None) for layer in range(model.layers)]
        arguments["window-size"] = f"{model.window.size - 1},0"
        arguments["window-attn-skip-freq"] = None if all(local) else str(local)
    if (experts := model.experts) is not None:
        routed, has_groups = [int(experts.at(layer)) for layer in range(model.layers)], experts.groups > 1
        arguments |= {
            "num-experts": experts.count,
            "moe-router-topk": experts.top_k,
            "moe-ffn-hidden-size": experts.ffn,
            "moe-shared-expert-intermediate-size": experts.shared_ffn or None,
            "moe-shared-expert-gate": experts.shared_gate,
            "moe-layer-freq": None if all(routed) else str(routed),
            "moe-router-num-groups": experts.groups if has_groups else None,
            "moe-router-group-topk": experts.top_groups if has_groups else None,
        }
    return arguments


def _megatron_layout(run: EmittedRun) -> Table:
    strategy, layout = run.strategy, run.strategy.layout
    arguments: Table = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep if run.model.experts else None,
        "expert-tensor-parallel-size": layout.expert_tp or None,
        "seq-length": strategy.seq,
        "max-position-embeddings": max(run.model.max_seq, strategy.seq),
        "micro-batch-size": strategy.micro_batch,
        "global-batch-size": strategy.global_batch,
        "sequence-parallel": strategy.sequence_parallel,
        "make-vocab-size-divisible-by": run.model.vocab_multiple or 1,
    }
    if layout.cp > 1:
        kinds = {ContextKind.RING: "p2p", ContextKind.ALL_TO_ALL: "a2a", ContextKind.ALL_GATHER: "allgather"}
        arguments["cp-comm-type"] = kinds.get(strategy.context)
    layers = tuple(len(piece.layers) for piece in pieces(run.model, strategy))
    if strategy.stage_layers or len(set(layers)) > 1:  # Megatron splits only layers that divide by itself
        # E is the embedding, L the loss.
        stages = ["t" * count for count in layers]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        arguments["pipeline-model-parallel-layout"] = "|".join(stages)
    elif layout.vpp > 1:
        arguments["num-virtual-stages-per-pipeline-rank"] = layout.vpp
    return arguments


def _megatron_execution(run: EmittedRun) -> Table:
    strategy, framework = run.strategy, run.framework
    recompute, overlap, optimizer = strategy.recompute, strategy.overlap, framework.optimizer
    names = {ours: theirs for theirs, ours in MODULES.items()}
    wide = framework.gradient_dtype is DType.FP32
    precision: dict[DType, Table] = {
        DType.FP8: {"bf16": True, "fp8-format": "hybrid"},
        DType.MXFP8: {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "mxfp8"},
        DType.NVFP4: {"bf16": True, "fp4-format": "e2m1"},
        DType.FP16: {"fp16": True},
    }
    arguments: Table = {
        **precision.get(strategy.precision, {"bf16": True}),
        **(sharding := _megatron_sharding(strategy)),
        "overlap-grad-reduce": overlap.gradients or overlap.parameters,
        "overlap-param-gather": overlap.parameters and "use-distributed-optimizer" in sharding,
        "tp-comm-overlap": overlap.tensor and strategy.sequence_parallel,
        "no-async-tensor-model-parallel-allreduce": strategy.layout.tp > 1 and not overlap.tensor_gradients,
        "no-overlap-p2p-communication": strategy.layout.pp > 1 and not overlap.transfers,
        "overlap-moe-expert-parallel-comm": overlap.experts,
        "accumulate-allreduce-grads-in-fp32" if wide else "grad-reduce-in-bf16": True,
        "attention-dropout": 0.1 if framework.dropout else 0.0,
        "hidden-dropout": 0.1 if framework.dropout else 0.0,
        "clip-grad": 1.0 if optimizer.clips else 0.0,
        "mtp-num-layers": strategy.further_tokens or None,
    }
    if recompute.kind is RecomputeKind.SELECTIVE:
        modules = " ".join(names[module] for module in recompute.modules if module in names)
        arguments |= {"recompute-granularity": "selective", "recompute-modules": modules or None}
    elif recompute.kind is not RecomputeKind.NONE:
        method = "block" if recompute.kind is RecomputeKind.BLOCK else "uniform"
        arguments |= {"recompute-granularity": "full", "recompute-method": method}
        arguments["recompute-num-layers"] = recompute.layers or 1
    if run.model.experts is not None:
        dispatcher = framework.dispatcher
        arguments |= {"moe-token-dispatcher-type": "flex" if dispatcher.sends_once else str(dispatcher)}
        if dispatcher is Dispatcher.HYBRIDEP:
            arguments["moe-flex-dispatcher-backend"] = "hybridep"
        arguments["moe-enable-deepep"] = dispatcher is Dispatcher.DEEPEP
        arguments["moe-expert-capacity-factor"] = strategy.expert_capacity
    if framework.loss in (LossKernel.COMPILED, LossKernel.ENGINE):
        kind = "te" if framework.loss is LossKernel.ENGINE else "native"
        arguments |= {"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": kind}
    if framework.bucket_bytes is not None:
        arguments["ddp-bucket-size"] = framework.bucket_bytes // (4 if wide else 2)
    whole = recompute.kind in (RecomputeKind.FULL, RecomputeKind.BLOCK)  # which Megatron does not capture
    if framework.execution in (Execution.GRAPHS, Execution.PARTIAL_GRAPHS) and not whole:
        arguments["enable-cuda-graph"] = True
        full = framework.execution is Execution.GRAPHS and run.model.experts is not None
        arguments |= {"cuda-graph-scope": "full_iteration" if full else None, "no-check-for-nan-in-loss-and-grad": full}
    return arguments


def _megatron_sharding(strategy: Strategy) -> Table:
    """Return the flags of a sharding, with those that Megatron's checks of its arguments ask for."""
    sharding, names = strategy.sharding, {ours: theirs for theirs, ours in MEGATRON_SHARDINGS.items()}
    if sharding is Sharding.ZERO_1:
        return {"use-distributed-optimizer": True}
    if sharding is Sharding.FSDP and strategy.layout.ep == 1:
        return {"use-torch-fsdp2": True, "no-gradient-accumulation-fusion": True, "ckpt-format": "torch_dist"}
    if sharding is Sharding.NONE:
        return {}
    kind = names.get(str(sharding), "optim_grads_params")
    fsdp: Table = {"use-distributed-optimizer": True, "use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}
    return {**fsdp, "data-parallel-sharding-strategy": kind}


def write_megatron(run: EmittedRun) -> str:
    """Return a launch script of Megatron-LM."""
    arguments = megatron_arguments(run)
    lines = ["#!/bin/bash", f"# {run.title}"]
    if run.strategy.layout.tp * run.strategy.layout.cp > 1 and "ckpt-format" not in arguments:
        lines += ["export CUDA_DEVICE_MAX_CONNECTIONS=1"]  # required before Blackwell, not with FSDP
    lines += [f"torchrun --nproc-per-node {run.per_node} --nnodes {run.nodes} pretrain_gpt.py \\"]
    flags = [
        f"    --{name}" if value is True else f"    --{name} {_quote(value)}"
        for name, value in arguments.items()
        if value is not None and value is not False
    ]
    return "\n".join([*lines, " \\\n".join(flags)]) + "\n"


def _quote(value: object) -> str:
    text = str(value)
    return f'"{text}"' if set(text) & set("()[]*|") else text


# ---- NeMo and Megatron-Bridge -----------------------------------------------------------------------------

TRAIN_KEYS = ("micro-batch-size", "global-batch-size")
DDP_KEYS = (
    *("overlap-grad-reduce", "overlap-param-gather", "use-distributed-optimizer", "grad-reduce-in-fp32"),
    "data-parallel-sharding-strategy",
)


def write_nemo(run: EmittedRun) -> str:
    """Return the YAML of NeMo, or of Megatron-Bridge for its profile: Megatron's names with underscores."""
    is_bridge = run.framework.name == "megatron-bridge"
    arguments = {name: value for name, value in megatron_arguments(run).items() if value is not None}
    if arguments.pop("no-overlap-p2p-communication"):
        arguments["overlap-p2p-comm"] = False
    arguments.pop("no-async-tensor-model-parallel-allreduce")
    arguments["share-embeddings-and-output-weights"] = not arguments.pop("untie-embeddings-and-output-weights")
    arguments["add-bias-linear" if is_bridge else "bias"] = not arguments.pop("disable-bias-linear")
    activations = {"swiglu": "fast-swiglu", "quick-geglu": "geglu", "squared-relu": "squared-relu"}
    kinds = [name for name in activations if arguments.pop(name)]
    if is_bridge:
        arguments["gated-linear-unit"] = run.model.gated
    else:
        arguments["activation"] = activations[kinds[0]] if kinds else "gelu"
    arguments.pop("group-query-attention", None)
    arguments["grad-reduce-in-fp32"] = "accumulate-allreduce-grads-in-fp32" in arguments
    for name in ("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "bf16", "fp16"):
        arguments.pop(name, None)
    modules = arguments.get("recompute-modules")
    if isinstance(modules, str):
        arguments["recompute-modules"] = f"[{', '.join(modules.split())}]"
    precision = "16-mixed" if run.strategy.precision is DType.FP16 else "bf16-mixed"
    tables: Table = {}
    if not is_bridge:
        tables["trainer"] = {"num_nodes": run.nodes, "devices": run.per_node, "precision": precision}
    places = {"train": TRAIN_KEYS, "ddp": DDP_KEYS} if is_bridge else {}
    moved = {name: table for table, names in places.items() for name in names}
    for name, value in arguments.items():
        table = tables.setdefault(moved.get(name, "model"), {})
        assert isinstance(table, dict)
        table[name.replace("-", "_")] = value
    if is_bridge:
        tables["mixed_precision"] = {"precision": precision} if run.strategy.precision is DType.FP16 else {"bf16": True}
    return f"# {run.title}\n" + _write_yaml(tables)


def _write_yaml(table: Table, indent: str = "") -> str:
    lines = []
    for name, value in table.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:\n{_write_yaml(value, indent + '  ')}")
        elif value is not None:
            text = value if isinstance(value, str) and value.startswith("[") else json.dumps(value)
            lines.append(f"{indent}{name}: {text}\n")
    return "".join(lines)


# ---- torchtitan -------------------------------------------------------------------------------------------


def write_torchtitan(run: EmittedRun) -> str:
    """Return the TOML of a torchtitan job."""
    strategy, layout = run.strategy, run.strategy.layout
    shards = layout.dp * layout.cp if strategy.sharding in (Sharding.FSDP, Sharding.HYBRID_FSDP) else 1
    copies = layout.dp * layout.cp // (layout.shard or shards) if shards > 1 else layout.dp
    split = (layout.shard or shards) // (layout.cp if shards > 1 else 1)
    name, flavour = _titan_model(run.model.name)
    schedules = {ours: theirs for theirs, ours in read_words("configs")["torchtitan_schedules"].items()}
    rotation = "allgather" if strategy.context is ContextKind.ALL_GATHER else "alltoall"
    fp8 = {DType.FP8: ["float8"], DType.MXFP8: ["mx"]}.get(strategy.precision, [])
    tables: Table = {
        "job": {"description": run.title},
        "model": {"name": name, "flavor": flavour, "converters": json.dumps(fp8) if fp8 else None},
        "optimizer": {"name": "AdamW"},
        "training": {
            "local_batch_size": strategy.micro_batch
            if layout.pp == 1
            else strategy.micro_batch * strategy.micro_batches,
            "global_batch_size": strategy.global_batch,
            "seq_len": strategy.seq,
            "max_norm": 1.0 if run.framework.optimizer.clips else 0.0,
            "enable_cpu_offload": True if strategy.offload.optimizer else None,
        },
        "parallelism": {
            "data_parallel_replicate_degree": max(1, copies),
            "data_parallel_shard_degree": max(1, split),
            "tensor_parallel_degree": layout.tp,
            "pipeline_parallel_degree": layout.pp,
            "context_parallel_degree": layout.cp,
            "expert_parallel_degree": layout.ep if run.model.experts else None,
            "enable_async_tensor_parallel": True if strategy.overlap.tensor and layout.tp > 1 else None,
            "pipeline_parallel_schedule": schedules.get(str(strategy.schedule), "1F1B") if layout.pp > 1 else None,
            "pipeline_parallel_microbatch_size": strategy.micro_batch if layout.pp > 1 else None,
            "fsdp_reshard_after_forward": {True: "always", False: "never", None: None}[strategy.reshard],
            "context_parallel_rotate_method": rotation if layout.cp > 1 else None,
        },
        "activation_checkpoint": {"mode": str(strategy.recompute.kind)},
        "compile": {"enable": run.framework.kernels is Kernels.COMPILED},
    }
    return "\n".join(f"[{title}]\n{toml_rows(table)}" for title, table in tables.items() if isinstance(table, dict))


def _titan_model(name: str) -> tuple[str, str]:
    """Return torchtitan's name and flavour of a model of the catalogue."""
    for pair, ours in FLAVOURS.items():
        if ours == name:
            return pair
    for family, start in FAMILIES.items():
        if name.startswith(start):
            return family, name.removeprefix(start).upper()
    raise ValueError(
        f"torchtitan has no model {name}; it has {', '.join(sorted({*FLAVOURS.values(), *FAMILIES.values()}))}"
    )


# ---- DeepSpeed and accelerate -----------------------------------------------------------------------------

STAGES = {Sharding.NONE: 0, Sharding.ZERO_1: 1, Sharding.ZERO_2: 2, Sharding.ZERO_3: 3}


def write_deepspeed(run: EmittedRun) -> str:
    """Return DeepSpeed's JSON."""
    strategy, layout = run.strategy, run.strategy.layout
    if strategy.sharding not in STAGES:
        raise ValueError(f"DeepSpeed has no {strategy.sharding}: predict with --sharding zero-3")
    zero: Table = {"stage": STAGES[strategy.sharding], "overlap_comm": strategy.overlap.gradients}
    if run.framework.bucket_bytes is not None:
        zero["reduce_bucket_size"] = run.framework.bucket_bytes // 2
    if strategy.offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": strategy.offload.optimizer}
    table: Table = {
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.micro_batches,
        "train_batch_size": strategy.global_batch,
        "gradient_clipping": 1.0 if run.framework.optimizer.clips else 0.0,
        "zero_optimization": zero,
    }
    if strategy.precision in (DType.BF16, DType.FP16):
        table[str(strategy.precision)] = {"enabled": True}
    if layout.tp > 1:
        table["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.pp > 1:
        table["pipeline"] = {"stages": layout.pp}
    return json.dumps(table, indent=2) + "\n"


def write_accelerate(run: EmittedRun) -> str:
    """Return accelerate's YAML: FSDP, DeepSpeed's ZeRO, or DDP."""
    strategy, layout = run.strategy, run.strategy.layout
    if layout.pp > 1:
        raise ValueError("accelerate has no pipelines: predict with --pp 1, or emit megatron or torchtitan")
    is_fsdp = strategy.sharding in (Sharding.FSDP, Sharding.HYBRID_FSDP)
    stage = 0 if is_fsdp else STAGES[strategy.sharding]
    several = "MULTI_GPU" if layout.gpus > 1 else "NO"
    narrow = strategy.precision in (DType.BF16, DType.FP16)
    # Mixed precision of FSDP stores fp32 weights, that of DDP is autocast; without it the model keeps its precision.
    is_mixed = bool(stage) or not narrow or (run.framework.optimizer.master_weights if is_fsdp else strategy.autocast)
    table: Table = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_fsdp else "DEEPSPEED" if stage else several,
        "mixed_precision": (str(strategy.precision) if narrow else "no") if is_mixed else None,
        "num_machines": run.nodes,
        "num_processes": layout.gpus,
        "gradient_accumulation_steps": strategy.micro_batches,
    }
    if stage:
        table["deepspeed_config"] = {
            "zero_stage": stage,
            "gradient_clipping": 1.0 if run.framework.optimizer.clips else 0.0,
            "offload_optimizer_device": "cpu" if strategy.offload.optimizer else "none",
        }
    if is_fsdp:
        table["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_sharding_strategy": "HYBRID_SHARD" if strategy.sharding is Sharding.HYBRID_FSDP else None,
            "fsdp_reshard_after_forward": strategy.reshard,
            "fsdp_activation_checkpointing": strategy.recompute.kind is RecomputeKind.FULL,
            "fsdp_offload_params": bool(strategy.offload.optimizer),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
    if run.framework.kernels is Kernels.COMPILED:
        table["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    parallel = {"tp": layout.tp, "cp": layout.cp}
    if any(degree > 1 for degree in parallel.values()):
        table["parallelism_config"] = {f"parallelism_config_{axis}_size": degree for axis, degree in parallel.items()}
    return f"# {run.title}\n" + _write_yaml(table)


WRITERS: Mapping[str, tuple[str, Callable[[EmittedRun], str]]] = {
    "megatron": (".sh", write_megatron),
    "torchtitan": (".toml", write_torchtitan),
    "nemo": (".yaml", write_nemo),
    "deepspeed": (".json", write_deepspeed),
    "accelerate": (".yaml", write_accelerate),
}
