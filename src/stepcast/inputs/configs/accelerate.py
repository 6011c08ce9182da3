"""accelerate's YAML: how many processes, FSDP or DeepSpeed (huggingface.co/docs/accelerate)."""

from collections.abc import Mapping
from typing import Any

from stepcast.inputs.configs.keys import Keys, RunConfig, flat, said

SHARDINGS = {
    "1": "fsdp",
    "full_shard": "fsdp",
    "2": "zero-2",
    "shard_grad_op": "zero-2",
    "3": "none",
    "no_shard": "none",
    "4": "hybrid-fsdp",
    "hybrid_shard": "hybrid-fsdp",
    "5": "hybrid-fsdp",
    "hybrid_shard_zero2": "hybrid-fsdp",
}
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}


def looks_like(table: Mapping[str, Any]) -> bool:
    return "distributed_type" in table or "fsdp_config" in table


def read(table: Mapping[str, Any]) -> RunConfig:
    keys = Keys(flat(table))
    kind = keys.text("distributed_type").upper()
    gpus, machines = keys.number("num_processes"), keys.number("num_machines")
    sharding = _deepspeed(keys) if kind == "DEEPSPEED" else _fsdp(keys) if kind == "FSDP" else "none"
    copies = keys.number("parallelism_config.parallelism_config_dp_replicate_size") or 1
    split = keys.number("parallelism_config.parallelism_config_dp_shard_size") or 1
    shard = gpus // machines if sharding == "hybrid-fsdp" and gpus and machines and machines > 1 else None
    if copies > 1 and kind == "FSDP":
        sharding, shard = ("hybrid-fsdp", split) if split > 1 else ("none", None)
    tp = keys.number("tp_config.tp_size", "parallelism_config.parallelism_config_tp_size")
    options = said(
        gpus=gpus,
        tp=tp,
        cp=keys.number("parallelism_config.parallelism_config_cp_size"),
        precision=_precision(keys),
        sharding=sharding,
        shard=shard,
        reshard=_reshard(keys),
        recompute="full" if keys.flag("fsdp_config.fsdp_activation_checkpointing") else None,
        offload=_offload(keys),
        kernels="compiled" if keys.text("dynamo_config.dynamo_backend").lower() == "inductor" else None,
    )
    framework = "deepspeed-zero" if kind == "DEEPSPEED" else "transformers"
    return keys.config("accelerate", framework, options=options)


def _fsdp(keys: Keys) -> str:
    keys.number("fsdp_config.fsdp_version")
    kind = keys.text("fsdp_config.fsdp_sharding_strategy").lower()
    return SHARDINGS.get(kind, "fsdp")


def _deepspeed(keys: Keys) -> str | None:
    stage = keys.number("deepspeed_config.zero_stage")
    return None if stage is None else f"zero-{stage}" if stage else "none"


def _precision(keys: Keys) -> str | None:
    """Of products; FSDP and DeepSpeed keep the fp32 weights themselves."""
    word = keys.text("mixed_precision").lower()
    if "mixed_precision" not in keys:
        return None
    return PRECISIONS.get("no" if word in ("false", "") else word)


def _reshard(keys: Keys) -> bool | None:
    after = keys.text("fsdp_config.fsdp_reshard_after_forward").lower()
    return {"true": True, "false": False, "full_shard": True, "shard_grad_op": False}.get(after)


def _offload(keys: Keys) -> str | None:
    whole = keys.flag("fsdp_config.fsdp_offload_params")
    states = keys.text("deepspeed_config.offload_optimizer_device").lower()
    return "optimizer" if whole or states == "cpu" else None
