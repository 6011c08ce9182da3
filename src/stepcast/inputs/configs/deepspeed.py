"""DeepSpeed's JSON: batch sizes, precision, ZeRO and offload (deepspeed.ai/docs/config-json)."""

from collections.abc import Mapping
from typing import Any

from stepcast.inputs.configs.keys import Keys, RunConfig, flat, said

FRAMEWORK = "deepspeed-transformers"
SOLE = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "muon": "muon"}
PRECISIONS = ("bf16", "bfloat16", "fp16")
# Hugging Face's Trainer fills in "auto" (transformers, integrations/deepspeed.py, trainer_config_process).
TRAINER = {
    "train_micro_batch_size_per_gpu": "1 (--micro-batch), not Trainer's per_device_train_batch_size",
    "gradient_accumulation_steps": "1 (--accumulation), the default of Trainer",
    "train_batch_size": "micro-batch x accumulation x data-parallel ranks",
    "gradient_clipping": "clipped at a norm of 1.0, the default of Trainer's max_grad_norm",
    "zero_optimization.reduce_bucket_size": "DeepSpeed's 5e8 elements; Trainer takes the hidden size squared",
}


def looks_like(table: Mapping[str, Any]) -> bool:
    return any(name in table for name in SOLE)


def read(table: Mapping[str, Any]) -> RunConfig:
    keys = Keys(flat(table), "deepspeed")
    micro = keys.number("train_micro_batch_size_per_gpu")
    batch = keys.number("train_batch_size")
    rounds = keys.number("gradient_accumulation_steps")
    tp = keys.number("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
    pp = keys.number("pipeline.stages")
    gpus = batch // (micro * (rounds or 1)) * (tp or 1) * (pp or 1) if batch and micro else None
    if rounds is None and "gradient_accumulation_steps" not in keys:
        meant = f", so that train_batch_size means {gpus:,} GPUs (--gpus)" if gpus else ", DeepSpeed's default"
        keys.assume(f"no gradient_accumulation_steps: taken for 1{meant}")
    stage = keys.number("zero_optimization.stage") or 0
    options = said(
        micro_batch=micro,
        global_batch=batch,
        accumulation=None if batch else rounds or 1,
        gpus=gpus,
        tp=tp,
        pp=pp,
        precision=_precision(keys),
        sharding=f"zero-{stage}" if stage else "none",
        offload=_offload(keys),
        overlap=overlap_of(stage, keys.flag("zero_optimization.overlap_comm")),
        bucket_mb=_bucket(keys),
        clipping=_clipping(keys),
        optimizer=OPTIMIZERS.get(keys.text("optimizer.type").lower()),
        gradients={"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}.get(keys.text("data_types.grad_accum_dtype")),
    )
    if (name := keys.text("optimizer.type").lower()) and name not in OPTIMIZERS:
        keys.report("predicted as AdamW", "optimizer.type")
    for name, taken in TRAINER.items():
        if keys.is_unset(name):
            keys.assume(f'{name} "auto": {taken}')
    return keys.config("deepspeed", FRAMEWORK, options=options)


def overlap_of(stage: int, asked: bool | None) -> str:
    """Return what communication overlaps: gathers of ZeRO-3 use a stream of their own where reductions do.

    overlap_comm is on for stage 3 unless it is set (deepspeed/runtime/zero/config.py, overlap_comm_valid).
    """
    if not (stage == 3 if asked is None else asked):
        return "none"
    return "gradients,parameters" if stage == 3 else "gradients"


def _precision(keys: Keys) -> str:
    for name in PRECISIONS:
        if keys.flag(f"{name}.enabled"):
            return "fp16" if name == "fp16" else "bf16"
    open_keys = [f"{name}.enabled" for name in PRECISIONS if keys.is_unset(f"{name}.enabled")]
    if not open_keys:
        return "fp32"
    # Where bf16 is left open, callers switch it on; Trainer sets one of the two at most.
    taken = "fp16" if open_keys == ["fp16.enabled"] else "bf16"
    keys.assume(f'{" and ".join(open_keys)} "auto": taken for {taken} (--precision)')
    return taken


def _offload(keys: Keys) -> str | None:
    where = keys.text("zero_optimization.offload_optimizer.device").lower()
    old = keys.flag("zero_optimization.cpu_offload")
    keys.raw("zero_optimization.offload_optimizer.pin_memory")
    share = keys.share("zero_optimization.offload_optimizer.ratio")
    if where == "nvme":
        keys.report("predicted in the host's memory, not on NVMe", "zero_optimization.offload_optimizer.device")
    if where not in ("cpu", "nvme") and not old:
        return None
    return "optimizer" if share in (None, 1.0) else f"optimizer={share:g}"


def _bucket(keys: Keys) -> float | None:
    """DeepSpeed counts elements, which are reduced in two bytes each."""
    elements = keys.share("zero_optimization.reduce_bucket_size")
    return None if elements is None else round(elements * 2 / 1e6, 3)


def _clipping(keys: Keys) -> bool:
    norm = keys.share("gradient_clipping")
    return keys.is_unset("gradient_clipping") if norm is None else norm > 0
