"""DeepSpeed's JSON (deepspeed.ai/docs/config-json) and accelerate's YAML (huggingface.co/docs/accelerate)."""

import os
import re
from collections.abc import Mapping

from stepcast.inputs.configs.keys import Keys, OptionValue, RunConfig, flat, given_options
from stepcast.inputs.source import read_words

DEEPSPEED = "deepspeed-transformers"
DEEPSPEED_ONLY = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
# Key of accelerate that names a file of DeepSpeed, and the stage that the names of such files have.
FILE = "deepspeed_config.deepspeed_config_file"
STAGE = re.compile(r"(?:zero|stage|z)[_-]?([0-3])|([0-3])$", re.IGNORECASE)
# Values of keys that are "auto", which Hugging Face's Trainer fills in.
TRAINER = read_words("configs")["trainer"]


def read_deepspeed(table: Mapping[str, object]) -> RunConfig:
    keys = Keys(flat(table), "deepspeed")
    options, rounds = keys.options(), keys.number("gradient_accumulation_steps")
    batch, micro, tp, pp = (int(options.get(name, 0)) for name in ("global-batch", "micro-batch", "tp", "pp"))
    gpus = batch // (micro * (rounds or 1)) * (tp or 1) * (pp or 1) if batch and micro else None
    if rounds is None and "gradient_accumulation_steps" not in keys:
        basis = f", so that train_batch_size means {gpus:,} GPUs (--gpus)" if gpus else ", DeepSpeed's default"
        keys.assume(f"no gradient_accumulation_steps: taken for 1{basis}")
    stage = keys.number("zero_optimization.stage") or 0
    precision, size = _deepspeed_precision(keys), "zero_optimization.reduce_bucket_size"
    bucket, width = keys.share(size), 4 if precision == "fp32" else 2  # elements of the training precision
    norm = keys.share("gradient_clipping")
    states = "zero_optimization.offload_optimizer"
    device, share = keys.word(f"{states}.device"), keys.share(f"{states}.ratio")
    offloads = keys.flag("zero_optimization.cpu_offload") or device in ("cpu", "nvme")
    keys.raw(f"{states}.pin_memory")
    if device == "nvme":
        keys.report("predicted in the host's memory, not on NVMe", f"{states}.device")
    options |= given_options(
        accumulation=None if batch else rounds or 1,
        gpus=gpus,
        precision=precision,
        sharding=f"zero-{stage}" if stage else "none",
        offload=("optimizer" if share in (None, 1.0) else f"optimizer={share:g}") if offloads else None,
        overlap=_overlap(stage, keys.flag("zero_optimization.overlap_comm")),
        bucket_mb="auto" if keys.is_unset(size) else bucket and round(bucket * width / 1e6, 3),
        clipping=keys.is_unset("gradient_clipping") if norm is None else norm > 0,
    )
    for name, value in TRAINER.items():
        if keys.is_unset(name):
            keys.assume(f'{name} "auto": {value}')
    return keys.config("deepspeed", DEEPSPEED, options)


def _overlap(stage: int, overlap_comm: bool | None) -> str:
    """Return what communication overlaps: gathers of ZeRO-3 use a stream of their own where reductions do.

    overlap_comm is on for stage 3 unless it is set (deepspeed/runtime/zero/config.py, overlap_comm_valid).
    """
    if not (stage == 3 if overlap_comm is None else overlap_comm):
        return "none"
    return "gradients,parameters" if stage == 3 else "gradients"


def _deepspeed_precision(keys: Keys) -> str:
    switches = {f"{name}.enabled": name for name in ("bf16", "bfloat16", "fp16")}
    for switch, name in switches.items():
        if keys.flag(switch):
            return "fp16" if name == "fp16" else "bf16"
    open_keys = [switch for switch in switches if keys.is_unset(switch)]
    if not open_keys:
        return "fp32"
    # Where bf16 is left open, callers switch it on; Trainer sets one of the two at most.
    precision = "fp16" if open_keys == ["fp16.enabled"] else "bf16"
    keys.assume(f'{" and ".join(open_keys)} "auto": taken for {precision} (--precision)')
    return precision


# accelerate: how many processes, FSDP or DeepSpeed. A strategy is written by its number or by its name.
SHARDINGS = read_words("configs")["accelerate_sharding"]
# Strategies that keep gathered parameters until the backward pass.
WITHOUT_RESHARD = ("2", "shard_grad_op", "5", "hybrid_shard_zero2")
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32", "false": "fp32", "": "fp32"}


def read_accelerate(table: Mapping[str, object]) -> RunConfig:
    values = flat(table)
    file_values = {name: values.pop(name) for name in [*values] if name.startswith(f"{FILE}.")}
    inner_values = {name.removeprefix(f"{FILE}."): value for name, value in file_values.items()}
    inner = read_deepspeed(inner_values) if inner_values else None
    keys = Keys(values, "accelerate")
    kind = keys.text("distributed_type").upper()
    options, machines = keys.options(), keys.number("num_machines") or 1
    gpus = int(options.get("gpus", 0))
    stage = 0
    if kind == "DEEPSPEED" and inner is None:  # ZeRO-2 unless a stage is given, or that of a file by its name
        path, stated = keys.text(FILE), keys.number("deepspeed_config.zero_stage")
        stage = stage_by_name(keys, path) if path else 2 if stated is None else stated
    sharding = f"zero-{stage}" if stage else "none"
    if kind == "FSDP":
        keys.number("fsdp_config.fsdp_version")
        keys.raw("fsdp_config.fsdp_forward_prefetch")
        if keys.word("fsdp_config.fsdp_backward_prefetch") in ("no_prefetch", "backward_post"):
            keys.report("parameters are predicted as gathered ahead", "fsdp_config.fsdp_backward_prefetch")
        sharding = SHARDINGS.get(keys.word("fsdp_config.fsdp_sharding_strategy"), "fsdp")
    copies = keys.number("parallelism_config.parallelism_config_dp_replicate_size") or 1
    split = keys.number("parallelism_config.parallelism_config_dp_shard_size") or 1
    if sharding == "hybrid-fsdp" and machines == 1:
        sharding = "fsdp"  # copies are one to a machine
    shard = gpus // machines if sharding == "hybrid-fsdp" and gpus else None
    if copies > 1 and kind == "FSDP":
        sharding, shard = ("hybrid-fsdp", split) if split > 1 else ("none", None)
    rounds = keys.number("deepspeed_config.gradient_accumulation_steps", "gradient_accumulation_steps")
    if rounds is None and inner is None:
        keys.assume("gradient accumulation of 1 step (--accumulation), accelerate's default")
    if keys.word("fsdp_config.fsdp_sharding_strategy") in WITHOUT_RESHARD:
        options["reshard"] = False
    offloads_parameters = keys.flag("fsdp_config.fsdp_offload_params")
    offloads_states = keys.word("deepspeed_config.offload_optimizer_device") in ("cpu", "nvme")
    options |= given_options(
        accumulation=rounds or 1,
        sharding=sharding,
        shard=shard,
        offload="optimizer" if offloads_parameters or offloads_states else None,
    )
    # A DeepSpeed file may leave its format to accelerate, which names one.
    is_open = inner is None or ("mixed_precision" in keys and any(name.endswith("16.enabled") for name in inner.unset))
    own = given_options(**_accelerate_precision(keys, kind, sharding)) if is_open else {}
    if kind == "DEEPSPEED":  # accelerate/utils/dataclasses.py, DeepSpeedPlugin
        norm = keys.share("deepspeed_config.gradient_clipping")
        options |= given_options(overlap=_overlap(stage, None), clipping=None if norm is None else norm > 0)
    if inner is not None:  # the file says all of it
        options = {**options, **inner.options, **given_options(gpus=options.get("gpus"))}
        options.pop("accumulation" if "global-batch" in options else "", None)
        for text in inner.assumed:
            if not (own and "16.enabled" in text):
                keys.assume(text)
    config = keys.config("accelerate", DEEPSPEED if kind == "DEEPSPEED" else "transformers", {**options, **own})
    return config if inner is None else config.add_inner(FILE, inner)


def stage_by_name(keys: Keys, path: str) -> int:
    """Return the stage that the name of a DeepSpeed file carries; 3 if it has none."""
    match = STAGE.search(os.path.basename(path))
    stage = int(match[1] or match[2]) if match else 3
    keys.assume(f"{path}: no such file here, taken for ZeRO-{stage} by its name (--sharding, --offload)")
    return stage


def guess_accelerate(path: str) -> dict[str, object]:
    """Return what a file of accelerate that is not here holds by its name, such as TRL's zero3.yaml and fsdp2.yaml."""
    name = os.path.basename(path).lower()
    if "fsdp" in name:
        return {"distributed_type": "FSDP"}
    if match := re.search(r"zero[_-]?([1-3])", name):
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": int(match[1])}}
    return {"distributed_type": "MULTI_GPU"} if "multi_gpu" in name else {}


def _accelerate_precision(keys: Keys, kind: str, sharding: str) -> dict[str, OptionValue | None]:
    """Return the format of matmuls, and of the weights and states that are saved.

    accelerate/accelerator.py, prepare_model: FSDP upcasts the sharded parameters to fp32 and gathers them in
    the lower precision; without it, autocast casts fp32 weights for each use. DeepSpeed keeps fp32 weights.
    """
    word = keys.word("mixed_precision")
    if "mixed_precision" not in keys:
        keys.assume("no mixed_precision: the model's own precision is taken for bf16 (--precision)")
        return {}
    precision = PRECISIONS.get(word)
    if precision not in ("bf16", "fp16") or kind == "DEEPSPEED":
        return {"precision": precision}
    if sharding in ("fsdp", "hybrid-fsdp"):
        # Reduced in the lower precision, saved in fp32 as the parameters are.
        return {"precision": precision, "master_weights": True, "optimizer": "adamw:fp32"}
    return {"precision": f"autocast-{precision}"}
