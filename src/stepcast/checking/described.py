"""The choices of a run, read from the objects that a training script has: no file, no command line.

Nothing is imported from these libraries: a Trainer of transformers or TRL, an Accelerator, a configuration of
torchtitan and Megatron-LM's arguments are recognised by what they have.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from stepcast.inputs.configs import megatron, torchtitan, tuning
from stepcast.inputs.configs.keys import RunConfig
from stepcast.inputs.huggingface.reader import read_config

LOOKED_AT = 64  # samples of a data set
# Choices that follow from the format of trained weights.
FORMATS: dict[str, dict[str, object]] = {
    "torch.bfloat16": {"precision": "bf16"},
    "torch.float32": {"stored_fp32": True},
}


def describe(script: Any, model: Any = None) -> dict[str, Any]:
    """Return the choices of ``predict`` that a Trainer, an Accelerator, a configuration or arguments make."""
    if script is None:
        choices: dict[str, Any] = {}
    elif hasattr(script, "args") and hasattr(script.args, "per_device_train_batch_size"):
        return _describe_trainer(script)
    elif hasattr(script, "gradient_accumulation_steps") and hasattr(script, "state"):
        choices = _options(tuning.read_accelerate(_accelerate_table(script)))
    elif hasattr(script, "tensor_model_parallel_size") and hasattr(script, "micro_batch_size"):
        flags = {f"--{name}": value for name, value in vars(script).items() if isinstance(value, str | int | float)}
        choices = {**_options(megatron.read_test(flags)), "gpus": getattr(script, "world_size", None)}
    elif titan := _titan_table(script):
        choices = _options(torchtitan.read(titan))
    else:
        raise TypeError(
            f"check() knows no {type(script).__name__}: give a Trainer, an Accelerator, torchtitan's job_config, "
            "Megatron-LM's arguments, or the choices of stepcast.predict as keywords"
        )
    return {**choices, **(_describe_model(model) if hasattr(model, "config") else {})}


def _options(config: RunConfig) -> dict[str, Any]:
    model = {"model": config.model} if config.model else {}
    return {**model, "framework": config.framework, **config.options}


def _describe_trainer(trainer: Any) -> dict[str, Any]:
    """Return the choices of a Trainer: its arguments, the model it has, and the samples that it will see."""
    table = {name: value for name, value in trainer.args.to_dict().items() if value is not None}
    deepspeed = getattr(trainer.args, "hf_deepspeed_config", None)
    if deepspeed is not None:
        table["deepspeed"] = deepspeed.config
    kind = type(trainer).__name__.lower()
    table["trainer_kind"] = next((task for task in ("dpo", "reward") if task in kind), "")
    choices = _options(tuning.read(table, "trainer"))
    for name in ("epochs", "steps", "samples", "gpus", "batching"):
        choices.pop(name, None)
    choices |= _describe_model(trainer.model, choices.get("framework", ""))
    world = max(1, int(getattr(trainer.args, "world_size", 1)))
    choices["gpus"] = world
    choices |= _describe_samples(trainer, choices)
    return {**choices, "steps": _count_steps(trainer, choices, world)}


def _describe_model(model: Any, framework: str = "") -> dict[str, Any]:
    """Return the model, its adapters and the format of its weights."""
    table = model.config.to_dict()
    name = str(table.get("_name_or_path") or table.get("name_or_path") or table.get("model_type") or "model")
    kinds = (str, int, float, list, dict, type(None))
    plain = {key: value for key, value in table.items() if isinstance(value, kinds)}
    choices: dict[str, Any] = {"model": read_config(json.dumps(plain, default=str), name)}
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if adapters := getattr(model, "peft_config", None):
        config = next(iter(adapters.values()))
        choices |= {"lora_rank": config.r, "lora_dropout": float(config.lora_dropout or 0.0)}
        if isinstance(config.target_modules, list | tuple | set):
            choices["lora_targets"] = ",".join(sorted(config.target_modules))
        choices["dora"] = bool(getattr(config, "use_dora", False)) or None
        formats = {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}
        choices["base_weights"] = next((word for word, flag in formats.items() if getattr(model, flag, False)), None)
        wide = any(str(parameter.dtype) == "torch.float32" for parameter in trained)
        if framework in ("", "peft", "trainer"):
            choices["framework"] = "peft" if wide else "trainer"
    elif trained and str(trained[0].dtype) in FORMATS:
        choices |= FORMATS[str(trained[0].dtype)]
    return choices


def _describe_samples(trainer: Any, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the length of sequences: the tool's, or that of some samples of the data set."""
    longest = choices.get("seq")
    data: Any = getattr(trainer, "train_dataset", None)
    size = len(data) if hasattr(data, "__getitem__") and hasattr(data, "__len__") else 0
    step = max(1, size // LOOKED_AT)
    samples = [data[index] for index in range(0, min(size, LOOKED_AT * step), step)]
    ids = [sample["input_ids"] for sample in samples if isinstance(sample, Mapping) and "input_ids" in sample]
    lengths = [len(tokens) for tokens in ids if tokens is not None]
    if not lengths:
        return {"seq": longest} if longest else {}
    if min(lengths) == max(lengths):
        return {"seq": min(max(lengths), longest or max(lengths))}
    counts = ",".join(f"{length}:{count}" for length, count in sorted(Counter(lengths).items()))
    return {"seq": longest or max(lengths), "lengths": counts}


def _count_steps(trainer: Any, choices: Mapping[str, Any], world: int) -> int | None:
    if trainer.args.max_steps and trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    data = getattr(trainer, "train_dataset", None)
    if data is None or not hasattr(data, "__len__"):
        return None
    per_step: int = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps * world
    return max(1, math.ceil(len(data) / per_step * float(trainer.args.num_train_epochs)))


def _accelerate_table(accelerator: Any) -> dict[str, object]:
    """Return an Accelerator as the keys of accelerate's YAML."""
    state = accelerator.state
    kind = str(getattr(state, "distributed_type", "NO")).rpartition(".")[2].upper()
    table: dict[str, object] = {
        "distributed_type": kind,
        "num_processes": int(state.num_processes),
        "mixed_precision": str(getattr(state, "mixed_precision", "no")),
        "gradient_accumulation_steps": int(accelerator.gradient_accumulation_steps),
    }
    plugin = getattr(state, f"{kind.lower()}_plugin", None)
    if kind == "DEEPSPEED" and plugin is not None:
        table["deepspeed_config"] = {"zero_stage": int(getattr(plugin, "zero_stage", 0) or 0)}
    if kind == "FSDP" and plugin is not None:
        reshard = str(getattr(plugin, "reshard_after_forward", True))
        version = getattr(plugin, "fsdp_version", 2)
        table["fsdp_config"] = {"fsdp_version": version, "fsdp_reshard_after_forward": reshard}
    return table


def _titan_table(script: Any) -> dict[str, Any] | None:
    """Return torchtitan's configuration as the tables of its TOML, if *script* is or has one."""
    config = getattr(script, "job_config", script)
    table = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    return table if isinstance(table, dict) and torchtitan.looks_like(table) else None
