"""accelerate's YAML: how many processes, FSDP or DeepSpeed (huggingface.co/docs/accelerate)."""

from collections.abc import Mapping
from typing import Any

from stepcast.inputs.configs import deepspeed
from stepcast.inputs.configs.keys import Keys, RunConfig, flat, said

SHARDINGS = {
    "1": "fsdp",
    "full_shard": "fsdp",
    "2": "fsdp",
    "shard_grad_op": "fsdp",
    "3": "none",
    "no_shard": "none",
    "4": "hybrid-fsdp",
    "hybrid_shard": "hybrid-fsdp",
    "5": "hybrid-fsdp",
    "hybrid_shard_zero2": "hybrid-fsdp",
}
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}
FULLY_SHARDED = ("fsdp", "hybrid-fsdp")
# Strategies that keep gathered parameters until the backward.
KEEPING = ("2", "shard_grad_op", "5", "hybrid_shard_zero2")


def looks_like(table: Mapping[str, Any]) -> bool:
    return "distributed_type" in table or "fsdp_config" in table


def read(table: Mapping[str, Any]) -> RunConfig:
    keys = Keys(flat(table), "accelerate")
    kind = keys.text("distributed_type").upper()
    gpus, machines = keys.number("num_processes"), keys.number("num_machines") or 1
    stage = (keys.number("deepspeed_config.zero_stage") or 0) if kind == "DEEPSPEED" else 0
    sharding = _fsdp(keys) if kind == "FSDP" else f"zero-{stage}" if stage else "none"
    copies = keys.number("parallelism_config.parallelism_config_dp_replicate_size") or 1
    split = keys.number("parallelism_config.parallelism_config_dp_shard_size") or 1
    if sharding == "hybrid-fsdp" and machines == 1:
        sharding = "fsdp"  # copies are one to a machine
    shard = gpus // machines if sharding == "hybrid-fsdp" and gpus else None
    if copies > 1 and kind == "FSDP":
        sharding, shard = ("hybrid-fsdp", split) if split > 1 else ("none", None)
    tp = keys.number("tp_config.tp_size", "parallelism_config.parallelism_config_tp_size")
    rounds = keys.number("deepspeed_config.gradient_accumulation_steps", "gradient_accumulation_steps")
    if rounds is None:
        keys.assume("gradient accumulation of 1 step (--accumulation), accelerate's default")
    options = said(
        gpus=gpus,
        tp=tp,
        cp=keys.number("parallelism_config.parallelism_config_cp_size"),
        accumulation=rounds or 1,
        sharding=sharding,
        shard=shard,
        reshard=_reshard(keys),
        recompute="full" if keys.flag("fsdp_config.fsdp_activation_checkpointing") else None,
        offload=_offload(keys),
        kernels="compiled"
        if keys.text("dynamo_config.dynamo_backend", "dynamo_backend").lower() == "inductor"
        else None,
        **_precision(keys, kind, sharding),
        **(_deepspeed(keys, stage) if kind == "DEEPSPEED" else {}),
    )
    framework = deepspeed.FRAMEWORK if kind == "DEEPSPEED" else "transformers"
    return keys.config("accelerate", framework, options=options)


def _fsdp(keys: Keys) -> str:
    keys.number("fsdp_config.fsdp_version")
    kind = keys.text("fsdp_config.fsdp_sharding_strategy").lower()
    for name in ("backward", "forward"):
        keys.raw(f"fsdp_config.fsdp_{name}_prefetch")
    if keys.text("fsdp_config.fsdp_backward_prefetch").upper() in ("NO_PREFETCH", "BACKWARD_POST"):
        keys.report("parameters are predicted as gathered ahead", "fsdp_config.fsdp_backward_prefetch")
    return SHARDINGS.get(kind, "fsdp")


def _deepspeed(keys: Keys, stage: int) -> dict[str, Any]:
    """Return what accelerate's DeepSpeed plugin sets (accelerate/utils/dataclasses.py, DeepSpeedPlugin)."""
    norm = keys.share("deepspeed_config.gradient_clipping")
    return {"overlap": deepspeed.overlap_of(stage, None), "clipping": None if norm is None else norm > 0}


def _precision(keys: Keys, kind: str, sharding: str) -> dict[str, Any]:
    """Return the format of matmuls, and of the weights and states that are saved.

    accelerate/accelerator.py, prepare_model: FSDP upcasts the sharded parameters to fp32 and gathers them in
    the lower precision; without it, autocast casts fp32 weights for each use. DeepSpeed keeps fp32 weights.
    """
    word = keys.text("mixed_precision").lower()
    if "mixed_precision" not in keys:
        keys.assume("no mixed_precision: the model's own precision is taken for bf16 (--precision)")
        return {}
    precision = PRECISIONS.get("no" if word in ("false", "") else word)
    if precision not in ("bf16", "fp16") or kind == "DEEPSPEED":
        return {"precision": precision}
    if sharding in FULLY_SHARDED:
        # Reduced in the lower precision, saved in fp32 as the parameters are.
        return {"precision": precision, "master_weights": True, "optimizer": "adamw:fp32"}
    return {"precision": f"autocast-{precision}"}


def _reshard(keys: Keys) -> bool | None:
    after = keys.text("fsdp_config.fsdp_reshard_after_forward").lower()
    if keys.text("fsdp_config.fsdp_sharding_strategy").lower() in KEEPING:
        return False
    return {"true": True, "false": False, "full_shard": True, "shard_grad_op": False}.get(after)


def _offload(keys: Keys) -> str | None:
    parameters = keys.flag("fsdp_config.fsdp_offload_params")
    states = keys.text("deepspeed_config.offload_optimizer_device").lower()
    return "optimizer" if parameters or states in ("cpu", "nvme") else None
