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
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw"}
TABLES = ("parallelism", "activation_checkpoint", "training", "experimental")


def looks_like(table: Mapping[str, Any]) -> bool:
    model = table.get("model")
    return isinstance(model, dict) and "flavor" in model and any(name in table for name in TABLES)


def read(table: Mapping[str, Any]) -> RunConfig:
    keys = Keys(flat(table), "torchtitan")
    tp = _degree(keys, "tensor_parallel_degree") or 1
    pp = _degree(keys, "pipeline_parallel_degree", "experimental.pipeline_parallel_degree") or 1
    cp = _degree(keys, "context_parallel_degree", "experimental.context_parallel_degree") or 1
    copies = _degree(keys, "data_parallel_replicate_degree") or 1
    shard = _degree(keys, "data_parallel_shard_degree")
    fixed = shard is not None and shard > 0
    global_batch = keys.number("training.global_batch_size") or -1
    batch = keys.number("training.local_batch_size", "training.batch_size")
    micro = _micro_batch(keys, pp)
    if batch is None and global_batch < 1:
        keys.assume("no local_batch_size: taken for 8, torchtitan's default")
    batch = batch or 8
    options = said(
        gpus=copies * shard * tp * pp * cp if shard is not None and fixed else None,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_degree(keys, "expert_parallel_degree"),
        expert_tp=_degree(keys, "expert_tensor_parallel_degree"),
        seq=keys.number("training.seq_len"),
        micro_batch=micro if pp > 1 else batch,
        global_batch=global_batch if global_batch > 0 else None,
        accumulation=None if global_batch > 0 else batch // micro if pp > 1 else 1,
        **_sharding(shard, copies),
        recompute=_recompute(keys),
        precision=_precision(keys),
        schedule=_schedule(keys, pp),
        kernels="compiled" if _compiled(keys) else "plain",
        reshard=_reshard(keys),
        overlap="gradients,parameters,tensor,transfers"
        if keys.flag("parallelism.enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel") and tp > 1
        else None,
        context=_context(keys, cp),
        offload="optimizer" if keys.flag("training.enable_cpu_offload") else None,
        optimizer=OPTIMIZERS.get(keys.text("optimizer.name").lower()),
        clipping=False if keys.share("training.max_norm") == 0 else None,
    )
    _report_loss(keys, tp)
    if (name := keys.text("optimizer.name").lower()) and name not in OPTIMIZERS:
        keys.report("predicted as AdamW", "optimizer.name")
    return keys.config("torchtitan", "torchtitan", model=_model(keys), options=options)


def _micro_batch(keys: Keys, pp: int) -> int:
    """Return the sequences of a micro-batch in a pipeline; torchtitan cuts the local batch into them."""
    size = keys.number("parallelism.pipeline_parallel_microbatch_size")
    if pp == 1:
        keys.report_without_effect("parallelism.pipeline_parallel_microbatch_size")
    return size or 1


def _context(keys: Keys, cp: int) -> str | None:
    places = [f"{table}.context_parallel_rotate_method" for table in ("parallelism", "experimental")]
    if cp == 1:
        keys.raw(*places)
        keys.report_without_effect(*places)
        return None
    return {"alltoall": "ring", "allgather": "all-gather"}.get(keys.text(*places).lower())


def _report_loss(keys: Keys, tp: int) -> None:
    """Logits stay split over tensor parallel ranks unless that is switched off."""
    off = [f"{table}.disable_loss_parallel" for table in ("parallelism", "training")]
    on = [f"{table}.enable_loss_parallel" for table in ("parallelism", "training")]
    gathered = keys.flag(*off) or keys.flag(*on) is False
    if tp == 1:
        keys.report_without_effect(*off, *on)
    elif gathered:
        keys.report("the loss is predicted on logits split over tensor parallel ranks", *off, *on)


def _compiled(keys: Keys) -> bool:
    """The model, not its loss alone."""
    parts = keys.raw("compile.components")
    whole = not isinstance(parts, list) or "model" in parts
    return bool(keys.flag("compile.enable", "training.compile")) and whole


def _degree(keys: Keys, *names: str) -> int | None:
    places = [
        place for name in names for place in ((name,) if "." in name else (f"parallelism.{name}", f"training.{name}"))
    ]
    return keys.number(*places)


def _model(keys: Keys) -> str:
    name, flavour = keys.text("model.name").lower(), keys.text("model.flavor").lower()
    if (name, flavour) in FLAVOURS:
        return FLAVOURS[name, flavour]
    return f"{FAMILIES[name]}{flavour}" if name in FAMILIES and flavour[:1].isdigit() else f"{name} {flavour}"


def _sharding(shard: int | None, copies: int) -> dict[str, Any]:
    """Return FSDP over the ranks that are left (shard -1), with copies of it HSDP, or plain replicas."""
    if shard == 1:
        return {"sharding": "none"}
    return {"sharding": "hybrid-fsdp", "replicate": copies} if copies > 1 else {"sharding": "fsdp"}


def _recompute(keys: Keys) -> str | None:
    """Return the kind of recomputation; selective by operators saves every second matmul."""
    kind = keys.text("activation_checkpoint.mode").lower()
    option = keys.text("activation_checkpoint.selective_ac_option")
    if kind != "selective":
        keys.report_without_effect("activation_checkpoint.selective_ac_option")
    elif option.isdigit():
        why = f"predicted as every second matmul recomputed, not as every {option}. layer"
        keys.report(why, "activation_checkpoint.selective_ac_option")
    return kind if kind in ("none", "selective", "full") else None


def _precision(keys: Keys) -> str:
    """Return the format of matmuls: ``[float8]`` acts through its converter, until 2024 by its own switch."""
    converters = keys.raw("model.converters")
    words = " ".join(map(str, converters)) if isinstance(converters, list) else str(converters or "")
    old = keys.flag("float8.enable_float8_linear") or keys.flag("training.enable_fp8_linear")
    keys.raw("training.mixed_precision_param", "training.dtype")
    fp8 = "float8" in words or bool(old)
    gathers = [name for name in keys.values if name.endswith("float8_all_gather")]
    if fp8 and any(keys.flag(name) for name in gathers):
        keys.report("parameters are predicted as gathered in bf16", *gathers)
    else:
        keys.report_without_effect(*gathers, "float8.enable_float8_linear")
    if "mx" in words:
        return "mxfp8"
    return "fp8" if fp8 else "bf16"


def _schedule(keys: Keys, pp: int) -> str | None:
    places = ("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    name = keys.text(*places).lower()
    if pp == 1:
        keys.report_without_effect(*places)
        return None
    if name and name not in SCHEDULES:
        keys.report("predicted as 1F1B", *places)
    return SCHEDULES.get(name)


def _reshard(keys: Keys) -> bool | None:
    return {"always": True, "never": False}.get(keys.text("parallelism.fsdp_reshard_after_forward").lower())
