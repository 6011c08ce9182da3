"""Configurations of other tools for a run: Megatron-LM, NeMo and Megatron-Bridge, torchtitan, DeepSpeed, accelerate.

``data/configs/TOOL.toml`` has the keys: ``[options]``, by which ``inputs/configs`` reads them too, and ``[written]``,
the keys that state a value of a choice. What follows from several choices is written here. ``questions/runs.py``
reads every file back and names what the tool has no key for.
"""

import json
from collections.abc import Callable, Mapping

from stepcast.inputs.configs.keys import known_keys, option_keys
from stepcast.inputs.configs.megatron import LATENT, MODULES, POSITIONS
from stepcast.inputs.configs.torchtitan import FAMILIES, FLAVOURS
from stepcast.inputs.model_table import part_words
from stepcast.ir.framework import FORMATS, OPTIMIZERS, Execution, Framework, OptimizerKind
from stepcast.ir.model import Model, pieces
from stepcast.ir.model_parts import Activation, QkNorm
from stepcast.ir.strategy import RecomputeKind, Sharding, Strategy
from stepcast.ir.types import DType, Facts, dataclass, require
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
    choices: Facts
    """The choices of the run in words, by option, without those that its model or its layout has no use for."""

    @property
    def per_node(self) -> int:
        """GPUs of a node that the run uses."""
        return min(self.gpus_per_node, self.strategy.layout.gpus)

    @property
    def nodes(self) -> int:
        return -(-self.strategy.layout.gpus // self.per_node)


def write_choices(tool: str, choices: Facts) -> Table:
    """Return the keys of *tool* that state *choices*, one by one."""
    keys: Table = {}
    for name, key in option_keys(tool).items():
        value = choices.get(name)
        if key.words:
            word = next((word for word, ours in key.words.items() if ours == value), None)
            value = {"true": True, "false": False}.get(str(word), word)
        if value is not None:
            keys[key.names[0]] = value
    for name, spellings in known_keys(tool).table["written"].items():
        keys |= spellings.get(str(choices.get(name)).partition(":")[0].lower(), {})
    return keys


def nest(keys: Table) -> Table:
    """Return dotted keys as tables in tables, without those that have no value."""
    tables: Table = {}
    for name, value in keys.items():
        *path, last = name.split(".")
        table = tables
        for part in path:
            inner = table.setdefault(part, {})
            assert isinstance(inner, dict)
            table = inner
        if value is not None:
            table[last] = value
    return tables


def megatron_arguments(run: EmittedRun) -> Table:
    """Return the arguments of Megatron-LM's training scripts; True is a flag."""
    choices, strategy, layout = run.choices, run.strategy, run.strategy.layout
    if choices["sharding"] == "fsdp" and layout.ep > 1:
        choices = {**choices, "sharding": "zero-3"}  # FSDP2 has no expert parallelism
    arguments: Table = {
        **_megatron_model(run.model),
        **write_choices("megatron", choices),
        "max-position-embeddings": max(run.model.max_seq, strategy.seq),
        "make-vocab-size-divisible-by": run.model.vocab_multiple or 1,
    }
    layers = tuple(len(piece.layers) for piece in pieces(run.model, strategy))
    if strategy.stage_layers or len(set(layers)) > 1:  # Megatron splits only layers that divide by itself
        # E is the embedding, L the loss.
        stages = ["t" * count for count in layers]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        arguments["pipeline-model-parallel-layout"] = "|".join(stages)
    elif layout.vpp > 1:
        arguments["num-virtual-stages-per-pipeline-rank"] = layout.vpp
    return {**arguments, **_megatron_execution(run, arguments), **_megatron_optimizer(run)}


def _megatron_optimizer(run: EmittedRun) -> Table:
    """Return the arguments of the optimizer; refuse one that Megatron does not have.

    Muon has a distributed optimizer of its own, but no FSDP (training/arguments.py); formats of moments need the
    distributed optimizer (core/optimizer/optimizer_config.py).
    """
    optimizer, sharding = run.framework.optimizer, run.strategy.sharding
    formats = OPTIMIZERS[optimizer.kind].formats
    formats = tuple(name for name in formats if name != "fp32" and FORMATS[name] is optimizer.moment_dtype)
    word, known = ":".join([optimizer.kind, *formats]), known_keys("megatron").table["optimizers"]
    require(word in known, f"Megatron has no {word} optimizer: use --optimizer {' or '.join(known)}")
    is_muon, is_distributed = word == "muon", sharding not in (Sharding.NONE, Sharding.FSDP)
    fits = sharding in (Sharding.NONE, Sharding.ZERO_1) if is_muon else is_distributed or not formats
    require(fits, f"Megatron has no {word} optimizer with --sharding {sharding}: use --sharding zero-1")
    return dict(known[word])


def _megatron_model(model: Model) -> Table:
    parts = part_words(model)
    arguments: Table = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.heads,
        "vocab-size": model.vocab,
        "normalization": {"rms": "RMSNorm"}.get(parts["norm"], "LayerNorm"),
        "swiglu": model.gated and model.activation is Activation.SILU,
        "quick-geglu": model.gated and model.activation is Activation.GELU,
        "squared-relu": model.activation is Activation.SQUARED_RELU,
        "position-embedding-type": {ours: theirs for theirs, ours in POSITIONS.items()}[parts["position"]],
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
        local = [int(model.window.size_at(layer) is not None) for layer in range(model.layers)]
        arguments["window-size"] = f"{model.window.size - 1},0"
        arguments["window-attn-skip-freq"] = None if all(local) else str(local)
    if (experts := model.experts) is not None:
        routed, has_groups = [int(experts.is_expert_layer(layer)) for layer in range(model.layers)], experts.groups > 1
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


def _megatron_execution(run: EmittedRun, stated: Table) -> Table:
    """Return the arguments about execution that follow from several choices; *stated* are those of one each."""
    strategy, framework = run.strategy, run.framework
    recompute, overlap = strategy.recompute, strategy.overlap
    names = {ours: theirs for theirs, ours in MODULES.items()}
    arguments: Table = {
        "overlap-grad-reduce": overlap.gradients or overlap.parameters,
        "overlap-param-gather": overlap.parameters and "use-distributed-optimizer" in stated,
        "tp-comm-overlap": overlap.tensor and strategy.sequence_parallel,
        "no-async-tensor-model-parallel-allreduce": strategy.layout.tp > 1 and not overlap.tensor_gradients,
        "no-overlap-p2p-communication": strategy.layout.pp > 1 and not overlap.transfers,
        "overlap-moe-expert-parallel-comm": overlap.experts,
    }
    if recompute.kind is RecomputeKind.SELECTIVE:
        modules = " ".join(names[module] for module in recompute.modules if module in names)
        arguments["recompute-modules"] = modules or None
    elif recompute.kind is RecomputeKind.BLOCK:
        arguments["recompute-num-layers"] = recompute.layers
    if framework.bucket_bytes is not None:
        arguments["ddp-bucket-size"] = framework.bucket_bytes // (2 if "grad-reduce-in-bf16" in stated else 4)
    recomputes_layers = recompute.kind in (RecomputeKind.FULL, RecomputeKind.BLOCK)  # which Megatron does not capture
    if framework.execution in (Execution.GRAPHS, Execution.PARTIAL_GRAPHS) and not recomputes_layers:
        arguments["enable-cuda-graph"] = True
        full = framework.execution is Execution.GRAPHS and run.model.experts is not None
        arguments |= {"cuda-graph-scope": "full_iteration" if full else None, "no-check-for-nan-in-loss-and-grad": full}
    return arguments


def write_megatron(run: EmittedRun) -> str:
    """Return a launch script of Megatron-LM."""
    arguments = megatron_arguments(run)
    lines = ["#!/bin/bash", f"# {run.title}"]
    if run.strategy.layout.tp * run.strategy.layout.cp > 1 and "ckpt-format" not in arguments:
        lines += ["export CUDA_DEVICE_MAX_CONNECTIONS=1"]  # required before Blackwell, not with FSDP
    lines += [f"torchrun --nproc-per-node {run.per_node} --nnodes {run.nodes} pretrain_gpt.py \\"]
    texts = {name: str(value) for name, value in arguments.items() if value is not None and value is not False}
    quoted = {name: f' "{text}"' if set(text) & set("()[]*|") else f" {text}" for name, text in texts.items()}
    flags = [f"    --{name}{'' if arguments[name] is True else text}" for name, text in quoted.items()]
    return "\n".join([*lines, " \\\n".join(flags)]) + "\n"


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
    if arguments.pop("no-gradient-accumulation-fusion", False):
        arguments["gradient-accumulation-fusion"] = False
    arguments["share-embeddings-and-output-weights"] = not arguments.pop("untie-embeddings-and-output-weights")
    arguments["add-bias-linear" if is_bridge else "bias"] = not arguments.pop("disable-bias-linear")
    activations = {"swiglu": "fast-swiglu", "quick-geglu": "geglu", "squared-relu": "squared-relu"}
    kinds = [kind for name, kind in activations.items() if arguments.pop(name)]
    arguments |= {"gated-linear-unit": run.model.gated} if is_bridge else {"activation": [*kinds, "gelu"][0]}
    arguments.pop("group-query-attention", None)
    arguments["grad-reduce-in-fp32"] = "accumulate-allreduce-grads-in-fp32" in arguments
    moments = ("use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype")  # no data types of YAML
    for name in ("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "bf16", "fp16", *moments):
        arguments.pop(name, None)
    own: Table = {}
    if not is_bridge and "optimizer" in arguments:
        kind = arguments.pop("optimizer")
        require(kind == "sgd", f"NeMo's YAML has no {kind} optimizer: predict with --optimizer adamw")
        own = {"optim": {"name": kind, "momentum": arguments.pop("sgd-momentum")}}
    modules = arguments.get("recompute-modules")
    if isinstance(modules, str):
        arguments["recompute-modules"] = f"[{', '.join(modules.split())}]"
    precision = "16-mixed" if run.strategy.precision is DType.FP16 else "bf16-mixed"
    trainer: Table = {"num_nodes": run.nodes, "devices": run.per_node, "precision": precision}
    tables: Table = {} if is_bridge else {"trainer": trainer, "model": own}
    moved = {**dict.fromkeys(TRAIN_KEYS, "train"), **dict.fromkeys(DDP_KEYS, "ddp")} if is_bridge else {}
    moved |= {"optimizer": "optimizer", "sgd-momentum": "optimizer"}
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


def write_torchtitan(run: EmittedRun) -> str:
    """Return the TOML of a torchtitan job."""
    strategy, layout = run.strategy, run.strategy.layout
    shards = layout.dp * layout.cp if strategy.sharding in (Sharding.FSDP, Sharding.HYBRID_FSDP) else 1
    copies = layout.dp * layout.cp // (layout.shard or shards) if shards > 1 else layout.dp
    split = (layout.shard or shards) // (layout.cp if shards > 1 else 1)
    model = run.model.name
    sizes = {family: model.removeprefix(start) for family, start in FAMILIES.items() if model.startswith(start)}
    named = [words for words, ours in FLAVOURS.items() if ours == model]
    named += [f"{family} {size.upper()}" for family, size in sizes.items()]
    if not named:
        known = sorted({*FLAVOURS.values(), *FAMILIES.values()})
        raise ValueError(f"torchtitan has no model {model}; it has {', '.join(known)}")
    if run.framework.optimizer.kind is OptimizerKind.MUON:
        raise ValueError("torchtitan's TOML has no Muon, which its Python recipes have: predict with --optimizer adamw")
    name, _, flavour = named[0].partition(" ")
    keys: Table = {
        "job.description": run.title,
        "model.name": name,
        "model.flavor": flavour,
        "optimizer.name": "AdamW",
        "training.local_batch_size": strategy.micro_batch * (1 if layout.pp == 1 else strategy.micro_batches),
        "parallelism.data_parallel_replicate_degree": max(1, copies),
        "parallelism.data_parallel_shard_degree": max(1, split),
        "parallelism.enable_async_tensor_parallel": True if strategy.overlap.tensor and layout.tp > 1 else None,
        "parallelism.pipeline_parallel_microbatch_size": strategy.micro_batch if layout.pp > 1 else None,
        **write_choices("torchtitan", run.choices),
    }
    return "\n".join(f"[{title}]\n{toml_rows(table)}" for title, table in nest(keys).items() if isinstance(table, dict))


def _drop_single(choices: Facts) -> Facts:
    """Return *choices* without degrees of 1, for which these tools have no key, or need none."""
    return {name: value for name, value in choices.items() if value != 1 or name not in ("tp", "pp", "cp")}


def write_deepspeed(run: EmittedRun) -> str:
    """Return DeepSpeed's JSON."""
    strategy, zero = run.strategy, "zero_optimization"
    keys = write_choices("deepspeed", _drop_single(run.choices))
    require(f"{zero}.stage" in keys, f"DeepSpeed has no {strategy.sharding}: predict with --sharding zero-3")
    keys |= {"gradient_accumulation_steps": strategy.micro_batches, f"{zero}.overlap_comm": strategy.overlap.gradients}
    if run.framework.bucket_bytes is not None:
        keys[f"{zero}.reduce_bucket_size"] = run.framework.bucket_bytes // 2
    if strategy.offload.optimizer:
        keys |= {f"{zero}.offload_optimizer.device": "cpu", f"{zero}.offload_optimizer.pin_memory": True}
        keys[f"{zero}.offload_optimizer.ratio"] = strategy.offload.optimizer
    return json.dumps(nest(keys), indent=2) + "\n"


def write_accelerate(run: EmittedRun) -> str:
    """Return accelerate's YAML: FSDP, DeepSpeed's ZeRO, or DDP."""
    strategy, layout = run.strategy, run.strategy.layout
    require(layout.pp <= 1, "accelerate has no pipelines: predict with --pp 1, or emit megatron or torchtitan")
    choices = dict(_drop_single(run.choices))
    # Only FSDP1 has a key for late gathers, and frees parameters by its strategy.
    is_late = run.framework.late_gathers and choices.get("reshard") is not False
    choices.pop("reshard" if is_late else "backward-prefetch", None)
    keys = write_choices("accelerate", choices)
    narrow, kind = strategy.precision in (DType.BF16, DType.FP16), keys["distributed_type"]
    # Mixed precision of FSDP stores fp32 weights, that of DDP is autocast; without it the model keeps its precision.
    mixed = {"FSDP": run.framework.optimizer.master_weights, "DEEPSPEED": True}
    is_mixed = not narrow or mixed.get(str(kind), strategy.autocast)
    keys |= {
        "distributed_type": "NO" if layout.gpus == 1 and str(kind) not in mixed else kind,
        "mixed_precision": (str(strategy.precision) if narrow else "no") if is_mixed else None,
        "num_machines": run.nodes,
        "gradient_accumulation_steps": strategy.micro_batches,
        "deepspeed_config.offload_optimizer_device": "cpu" if strategy.offload.optimizer else "none",
        "fsdp_config.fsdp_offload_params": bool(strategy.offload.optimizer),
    }
    others = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}
    own_keys = {name: value for name, value in keys.items() if others.get(name.partition(".")[0], kind) == kind}
    return f"# {run.title}\n" + _write_yaml(nest(own_keys))


WRITERS: Mapping[str, tuple[str, Callable[[EmittedRun], str]]] = {
    "megatron": (".sh", write_megatron),
    "torchtitan": (".toml", write_torchtitan),
    "nemo": (".yaml", write_nemo),
    "deepspeed": (".json", write_deepspeed),
    "accelerate": (".yaml", write_accelerate),
}
