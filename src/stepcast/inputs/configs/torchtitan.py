"""torchtitan: the TOML of a training job (torchtitan/config/job_config.py)."""

from collections.abc import Mapping
from typing import Any

from stepcast.inputs.configs.keys import Keys, RunConfig, flat, said

# Model and flavour -> name; those that carry their size in the flavour are told by rule.
FLAVOURS = {
    ("llama4", "17bx16e"): "llama-4-scout",
    ("llama4", "17bx128e"): "llama-4-maverick",
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("deepseek_v3", "671b"): "deepseek-v3",
}
FAMILIES = {"llama3": "llama-3.1-", "qwen3": "qwen3-", "llama2": "llama-2-", "qwen3_next": "qwen3-next-"}
SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "gpipe": "gpipe",
    "interleavedzerobubble": "zb-h1",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe",
}
TABLES = ("parallelism", "activation_checkpoint", "training", "experimental")


def looks_like(table: Mapping[str, Any]) -> bool:
    model = table.get("model")
    return isinstance(model, dict) and "flavor" in model and any(name in table for name in TABLES)


def read(table: Mapping[str, Any]) -> RunConfig:
    keys = Keys(flat(table))
    tp = _degree(keys, "tensor_parallel_degree") or 1
    pp = _degree(keys, "pipeline_parallel_degree", "experimental.pipeline_parallel_degree") or 1
    cp = _degree(keys, "context_parallel_degree", "experimental.context_parallel_degree") or 1
    copies = _degree(keys, "data_parallel_replicate_degree") or 1
    shard = _degree(keys, "data_parallel_shard_degree")
    batch = keys.number("training.local_batch_size", "training.batch_size")
    whole = shard is not None and shard > 0
    replicas = copies * (shard or 1)
    global_batch = keys.number("training.global_batch_size")
    if (global_batch is None or global_batch < 0) and whole and batch:
        global_batch = batch * replicas
    micro = keys.number("parallelism.pipeline_parallel_microbatch_size") if pp > 1 else None
    options = said(
        gpus=replicas * tp * pp * cp if whole else None,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_degree(keys, "expert_parallel_degree"),
        expert_tp=_degree(keys, "expert_tensor_parallel_degree"),
        seq=keys.number("training.seq_len"),
        micro_batch=micro or (batch if pp == 1 else None),
        global_batch=global_batch if global_batch and global_batch > 0 else None,
        sharding=_sharding(keys, shard, copies),
        shard=shard if whole and copies > 1 else None,
        recompute=_recompute(keys),
        precision=_precision(keys),
        schedule=_schedule(keys, pp),
        kernels="compiled" if _compiled(keys) else "plain",
        reshard=_reshard(keys),
        overlap="gradients,parameters,tensor,transfers"
        if keys.flag("parallelism.enable_async_tensor_parallel") and tp > 1
        else None,
        clipping=False if keys.share("training.max_norm") == 0 else None,
    )
    return keys.config("torchtitan", "torchtitan", model=_model(keys), options=options)


def _compiled(keys: Keys) -> bool:
    """The model, not its loss alone."""
    parts = keys.raw("compile.components")
    whole = not isinstance(parts, list) or "model" in parts
    return bool(keys.flag("compile.enable", "training.compile")) and whole


def _degree(keys: Keys, *names: str) -> int | None:
    places = [
        place
        for name in names
        for place in ((name,) if "." in name else (f"parallelism.{name}", f"training.{name}"))
    ]
    return keys.number(*places)


def _model(keys: Keys) -> str:
    name, flavour = keys.text("model.name").lower(), keys.text("model.flavor").lower()
    if (name, flavour) in FLAVOURS:
        return FLAVOURS[name, flavour]
    return f"{FAMILIES[name]}{flavour}" if name in FAMILIES and flavour[:1].isdigit() else f"{name} {flavour}"


def _sharding(keys: Keys, shard: int | None, copies: int) -> str | None:
    if shard == 1:
        return "none"
    return "hybrid-fsdp" if copies > 1 and shard is not None and shard > 1 else "fsdp"


def _recompute(keys: Keys) -> str | None:
    """Selective without an operator list keeps every n-th layer, which is told as far as it can be."""
    kind = keys.text("activation_checkpoint.mode").lower()
    keys.raw("activation_checkpoint.selective_ac_option")
    return kind if kind in ("none", "selective", "full") else None


def _precision(keys: Keys) -> str:
    converters = keys.raw("model.converters")
    words = " ".join(map(str, converters)) if isinstance(converters, list) else str(converters or "")
    old = keys.flag("float8.enable_float8_linear", "float8.enable_fsdp_float8_all_gather")
    keys.raw("training.mixed_precision_param", "training.dtype")
    if "mx" in words:
        return "mxfp8"
    return "fp8" if "float8" in words or (old and "model.converters" not in keys) else "bf16"


def _schedule(keys: Keys, pp: int) -> str | None:
    places = ("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    return SCHEDULES.get(keys.text(*places).lower()) if pp > 1 else None


def _reshard(keys: Keys) -> bool | None:
    return {"always": True, "never": False}.get(keys.text("parallelism.fsdp_reshard_after_forward").lower())
