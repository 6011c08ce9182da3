"""Megatron-LM: argument files, launch scripts, and the YAML of its functional tests.

Names of arguments as in megatron/training/arguments.py; NeMo and Megatron-Bridge call most of them the same.
"""

from collections.abc import Mapping
from typing import Any

from stepcast.inputs.configs.keys import Keys, RunConfig, said
from stepcast.inputs.configs.shell import flags_of

MODULES = {
    "core_attn": "core-attention",
    "mla_up_proj": "latent-up",
    "layernorm": "norms",
    "mlp": "mlp",
    "moe_act": "expert-activation",
    "moe": "experts",
}
SHARDINGS = {"optim": "zero-1", "optim_grads": "zero-2", "optim_grads_params": "zero-3", "no_shard": "none"}
FP8 = {"hybrid": "fp8", "e4m3": "fp8"}
DISPATCHERS = {"alltoall": "all-to-all", "flex": "forwarding"}
NODES = ("nnodes", "num-nodes", "$NNODES", "$NUM_NODES", "$NODES", "$SLURM_NNODES", "$NODE_NUM")
PER_NODE = (
    *("nproc-per-node", "$GPUS_PER_NODE", "$NPROC_PER_NODE", "$NGPU_PER_NODE", "$NUM_GPU_PER_NODE"),
    *("$GPU_NUM", "$SLURM_GPUS_ON_NODE"),
)


def read_script(text: str) -> RunConfig:
    """A launch script, or a file of arguments."""
    found = read_arguments(flags_of(text), "megatron-lm", "megatron-core")
    # Variables of a script say nothing beyond the flags that they stand in.
    kept = tuple(name for name in found.ignored if not name.startswith("$"))
    used = tuple(name for name in found.understood if not name.startswith("$"))
    unset = tuple(name for name in found.unset if not name.startswith("$"))
    return RunConfig(
        found.format, found.framework, found.sizes, found.model, found.options, used, kept, unset
    )


def read_test(table: Mapping[str, Any]) -> RunConfig:
    """A functional test: ``MODEL_ARGS`` holds the flags."""
    flags = {str(name).lstrip("-").replace("_", "-"): value for name, value in table["MODEL_ARGS"].items()}
    found = {name: value for name, value in flags.items() if value is not False}
    return read_arguments(found, "megatron-lm", "megatron-core")


def read_arguments(flags: Mapping[str, Any], format_name: str, framework: str) -> RunConfig:
    keys = Keys(flags)
    sizes = sizes_of(keys)
    options = options_of(keys, sizes)
    # Without sizes a checkpoint's name may tell the model.
    named = "" if sizes.get("hidden") else keys.text("model", "load")
    return keys.config(format_name, framework, sizes=sizes, model=named, options=options)


def sizes_of(keys: Keys) -> dict[str, int]:
    grouped = keys.flag("group-query-attention")
    heads = keys.number("num-attention-heads")
    groups = keys.number("num-query-groups")
    latent = keys.flag("multi-latent-attention")
    sizes = {
        "layers": keys.number("num-layers"),
        "hidden": keys.number("hidden-size"),
        "heads": heads,
        "kv_heads": (groups or heads) if grouped is not False and not latent else None,
        "ffn": keys.number("ffn-hidden-size"),
        "vocab": keys.number("vocab-size", "padded-vocab-size"),
        "moe_experts": keys.number("num-experts", "num-moe-experts"),
    }
    if sizes["moe_experts"]:
        sizes["moe_topk"] = keys.number("moe-router-topk") or 2
        sizes["moe_ffn"] = keys.number("moe-ffn-hidden-size") or sizes["ffn"]
        sizes["moe_shared_ffn"] = keys.number("moe-shared-expert-intermediate-size")
        sizes["moe_dense_layers"] = _dense_layers(keys.text("moe-layer-freq"))
    for name in ("kv-channels", "swiglu", "normalization", "position-embedding-type", "qk-layernorm"):
        keys.raw(name)  # told by the model that these sizes are of
    for name in ("max-position-embeddings", "untie-embeddings-and-output-weights", "disable-bias-linear"):
        keys.raw(name)
    return {name: value for name, value in sizes.items() if value}


def _dense_layers(pattern: str) -> int | None:
    """``([0]*3+[1]*58)``: the first three layers are dense."""
    import re

    found = re.match(r"\(?\[0\]\*?(\d*)\+\[1\]", pattern.replace(" ", ""))
    return int(found[1] or 1) if found else None


def options_of(keys: Keys, sizes: Mapping[str, int]) -> dict[str, Any]:
    tp = keys.number("tensor-model-parallel-size")
    pp = keys.number("pipeline-model-parallel-size")
    sequences, precision = keys.flag("sequence-parallel"), _precision(keys)
    gathered = keys.flag("fp8-param-gather", "fp8-param")
    nodes, per_node = keys.number(*NODES), keys.number(*PER_NODE)
    # A script that names its GPUs and not its nodes runs on one.
    gpus = per_node * (nodes or 1) if per_node else keys.number("$WORLD_SIZE")
    return said(
        gpus=gpus,
        tp=tp,
        pp=pp,
        cp=keys.number("context-parallel-size"),
        ep=keys.number("expert-model-parallel-size", "expert-parallel-size"),
        expert_tp=keys.number("expert-tensor-parallel-size"),
        vpp=_chunks(keys, sizes.get("layers", 0), pp or 1),
        seq=keys.number("seq-length", "encoder-seq-length", "sequence-length", "max-length"),
        micro_batch=keys.number("micro-batch-size"),
        global_batch=keys.number("global-batch-size"),
        sequence_parallel=sequences if (tp or 1) > 1 else None,
        precision=precision,
        fp8_params=True if gathered and precision in ("fp8", "mxfp8") else None,
        sharding=_sharding(keys),
        recompute=_recompute(keys),
        overlap=_overlap(keys, tp or 1, pp or 1),
        gradients=_gradients(keys),
        dropout=_dropout(keys),
        dispatcher=_dispatcher(keys, sizes),
        further_tokens=keys.number("mtp-num-layers"),
        expert_capacity=keys.share("moe-expert-capacity-factor"),
        offload=_offload(keys),
        clipping=False if keys.share("clip-grad") == 0 else None,
        execution=_execution(keys),
        optimizer=_optimizer(keys),
        lora_rank=keys.number("lora-rank") if keys.text("train-type", "tuner-type") == "lora" else None,
    )


def _chunks(keys: Keys, layers: int, pp: int) -> int | None:
    given = keys.number("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank")
    per_chunk = keys.number("num-layers-per-virtual-pipeline-stage")
    if pp == 1:
        return None
    return given or (layers // pp // per_chunk if per_chunk and layers else None)


def _precision(keys: Keys) -> str | None:
    plain = {name: keys.flag(name) for name in ("bf16", "fp16")}
    fp8 = keys.text("fp8-format", "fp8").lower()
    on = fp8 not in ("false", "no", "none")  # NeMo's files keep the format of an fp8 that they switch off
    recipe = keys.text("fp8-recipe").lower()
    if keys.text("fp4-format", "fp4").lower() not in ("", "false", "none"):
        return "nvfp4"
    if recipe == "mxfp8" and on:
        return "mxfp8"
    formats = [keys.flag(name) for name in ("fp8-hybrid", "fp8-e4m3")]
    if on and (fp8 in FP8 or fp8 == "true" or any(formats)):
        return "fp8"
    words = keys.text("precision", "mixed-precision").lower()
    for name, short in (("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8", "fp8")):
        if name in words:
            return short
    for name, short in (("bf16", "bf16"), ("16", "fp16"), ("32", "fp32")):
        if name in words or (words == "bf16-mixed" and short == "bf16"):
            return short
    return next((name for name, on in plain.items() if on), None)


def _sharding(keys: Keys) -> str | None:
    strategy = keys.text("data-parallel-sharding-strategy").lower()
    whole = keys.flag("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2", "fsdp")
    if strategy in SHARDINGS:
        return SHARDINGS[strategy]
    if whole:
        return "fsdp"
    split = keys.flag("use-distributed-optimizer")
    return "zero-1" if split else None if split is None and not keys.values else "none"


def _recompute(keys: Keys) -> str | None:
    kind = keys.text("recompute-granularity", "activations-checkpoint-granularity").lower()
    method = keys.text("recompute-method", "activations-checkpoint-method").lower()
    layers = keys.number("recompute-num-layers", "activations-checkpoint-num-layers")
    modules = keys.raw("recompute-modules")
    if keys.flag("recompute-activations"):
        kind = "selective"
    if kind == "full" and method == "block" and layers:
        return f"block:{layers}"
    if kind == "selective" and modules:
        words = modules if isinstance(modules, list) else str(modules).replace(",", " ").split()
        known = [MODULES[str(word)] for word in words if str(word) in MODULES]
        return f"selective:{','.join(known)}" if known else "selective"
    return kind if kind in ("full", "selective") else None


def _overlap(keys: Keys, tp: int, pp: int) -> str:
    asked = {
        "gradients": keys.flag("overlap-grad-reduce", "overlap-grad-sync"),
        "parameters": keys.flag("overlap-param-gather", "overlap-param-sync"),
        "tensor": keys.flag("tp-comm-overlap", "ub-tp-comm-overlap") and tp > 1,
        # Sums of input gradients run beside the weight gradients unless switched off.
        "tensor-gradients": tp > 1 and not keys.flag("no-async-tensor-model-parallel-allreduce"),
        "transfers": keys.flag("overlap-p2p-communication", "overlap-p2p-comm") is not False and pp > 1,
        "experts": keys.flag("overlap-moe-expert-parallel-comm"),
    }
    return ",".join(name for name, on in asked.items() if on) or "none"


def _gradients(keys: Keys) -> str | None:
    if keys.flag("grad-reduce-in-bf16"):
        return "bf16"
    wide = keys.flag("grad-reduce-in-fp32", "accumulate-allreduce-grads-in-fp32")
    return None if wide is None else "fp32" if wide else "bf16"


def _dropout(keys: Keys) -> bool | None:
    shares = [keys.share(name) for name in ("attention-dropout", "hidden-dropout")]
    told = [share for share in shares if share is not None]
    return any(told) if told else None


def _dispatcher(keys: Keys, sizes: Mapping[str, int]) -> str | None:
    """Exchanges once for each node are DeepEP's, through the flexible dispatcher."""
    kind = keys.text("moe-token-dispatcher-type").lower()
    keys.raw("moe-enable-deepep", "moe-flex-dispatcher-backend")
    return DISPATCHERS.get(kind) if "moe_experts" in sizes else None


def _offload(keys: Keys) -> str | None:
    if not keys.flag("optimizer-cpu-offload"):
        return None
    share = keys.share("optimizer-offload-fraction")
    return "optimizer" if share is None else f"optimizer={share:g}"


def _execution(keys: Keys) -> str | None:
    kind = keys.text("cuda-graph-impl").lower()
    if keys.flag("enable-cuda-graph", "external-cuda-graph") or kind not in ("", "none"):
        return "graphs"
    return None


def _optimizer(keys: Keys) -> str | None:
    name = keys.text("optimizer").lower()
    return {"adam": None, "sgd": "sgd-momentum", "muon": "muon", "dist_muon": "muon"}.get(name)
