"""DeepSpeed's JSON: batch sizes, precision, ZeRO and offload (deepspeed.ai/docs/config-json)."""

from collections.abc import Mapping
from typing import Any

from stepcast.inputs.configs.keys import Keys, RunConfig, flat, said

SOLE = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "muon": "muon"}


def looks_like(table: Mapping[str, Any]) -> bool:
    return any(name in table for name in SOLE)


def read(table: Mapping[str, Any]) -> RunConfig:
    keys = Keys(flat(table))
    micro = keys.number("train_micro_batch_size_per_gpu")
    whole = keys.number("train_batch_size")
    rounds = keys.number("gradient_accumulation_steps")
    gpus = whole // (micro * (rounds or 1)) if whole and micro else None
    tp = keys.number("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
    pp = keys.number("pipeline.stages")
    options = said(
        micro_batch=micro,
        global_batch=whole,
        gpus=gpus * (tp or 1) * (pp or 1) if gpus else None,
        tp=tp,
        pp=pp,
        precision=_precision(keys),
        sharding=_sharding(keys),
        offload=_offload(keys),
        overlap=_overlap(keys),
        bucket_mb=_bucket(keys),
        clipping=_clipping(keys),
        optimizer=OPTIMIZERS.get(keys.text("optimizer.type").lower()),
        gradients={"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}.get(
            keys.text("data_types.grad_accum_dtype")
        ),
    )
    return keys.config("deepspeed", "deepspeed-zero", options=options)


def _precision(keys: Keys) -> str | None:
    for name in ("bf16", "bfloat16", "fp16"):
        if keys.flag(f"{name}.enabled"):
            return "fp16" if name == "fp16" else "bf16"
    told = [f"{name}.enabled" in keys for name in ("bf16", "bfloat16", "fp16")]
    unset = any(keys.values.get(f"{name}.enabled") == "auto" for name in ("bf16", "fp16"))
    return "fp32" if any(told) and not unset else None


def _sharding(keys: Keys) -> str | None:
    stage = keys.number("zero_optimization.stage")
    return None if stage is None else f"zero-{stage}" if stage else "none"


def _offload(keys: Keys) -> str | None:
    where = keys.text("zero_optimization.offload_optimizer.device").lower()
    old = keys.flag("zero_optimization.cpu_offload")
    keys.raw("zero_optimization.offload_optimizer.pin_memory")
    share = keys.share("zero_optimization.offload_optimizer.ratio")
    if where != "cpu" and not old:
        return None
    return "optimizer" if share in (None, 1.0) else f"optimizer={share:g}"


def _overlap(keys: Keys) -> str | None:
    beside = keys.flag("zero_optimization.overlap_comm")
    return None if beside is not False else "none"


def _bucket(keys: Keys) -> float | None:
    """DeepSpeed counts elements, which are reduced in two bytes each."""
    elements = keys.share("zero_optimization.reduce_bucket_size")
    return None if elements is None else round(elements * 2 / 1e6, 3)


def _clipping(keys: Keys) -> bool | None:
    norm = keys.share("gradient_clipping")
    return None if norm is None else norm > 0
