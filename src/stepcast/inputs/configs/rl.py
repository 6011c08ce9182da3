"""Configurations of RL post-training: NeMo RL YAML, verl overrides and YAML, OpenRLHF arguments, TRL GRPO configs.

Each tool is a table from our choices to its keys. Keys that no choice reads are listed, so that nobody believes they
had an effect.
"""

import os
import re
from collections.abc import Callable, Mapping

from stepcast.inputs.configs.keys import flat
from stepcast.inputs.configs.reader import parse_json, parse_yaml
from stepcast.inputs.configs.shell import read_flags
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import DESCRIPTION

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
PRODUCT = re.compile(r"\$\{mul:\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")
OVERRIDE = re.compile(r"(?:^|\s)\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=('[^']*'|\"[^\"]*\"|[^\s\\]+)")
MOST_ROUNDS = 8  # of references to references

# Our choice -> the tool's keys; the first one present counts.
NEMO_RL = {
    "model": "policy.model_name",
    "prompts": "grpo.num_prompts_per_step",
    "group": "grpo.num_generations_per_prompt",
    "train_batch": "policy.train_global_batch_size",
    "max_length": "policy.max_total_sequence_length",
    "pack_tokens": "policy.sequence_packing.train_mb_tokens policy.dynamic_batching.train_mb_tokens",
    "staleness": "grpo.async_grpo.max_trajectory_age_steps",
    "tp": "policy.megatron_cfg.tensor_model_parallel_size policy.dtensor_cfg.tensor_parallel_size",
    "cp": "policy.megatron_cfg.context_parallel_size policy.dtensor_cfg.context_parallel_size",
    "pp": "policy.megatron_cfg.pipeline_model_parallel_size",
    "ep": "policy.megatron_cfg.expert_model_parallel_size",
    "recompute": "policy.megatron_cfg.activation_checkpointing policy.dtensor_cfg.activation_checkpointing",
    "gen_tp": "policy.generation.vllm_cfg.tensor_parallel_size",
    "gen_pp": "policy.generation.vllm_cfg.pipeline_parallel_size",
    "gen_ep": "policy.generation.vllm_cfg.expert_parallel_size",
    "gen_weights": "policy.generation.vllm_cfg.precision policy.precision",
    "memory_share": "policy.generation.vllm_cfg.gpu_memory_utilization",
    "first_layers": "policy.megatron_cfg.num_layers_in_first_pipeline_stage",
    "last_layers": "policy.megatron_cfg.num_layers_in_last_pipeline_stage",
}
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
VERL = {
    "model": "actor_rollout_ref.model.path",
    "prompts": "data.train_batch_size data.gen_batch_size",
    "group": f"{ROLLOUT}.n",
    "prompt_length": "data.max_prompt_length",
    "max_response": "data.max_response_length",
    "mini_prompts": f"{ACTOR}.ppo_mini_batch_size",
    "epochs": f"{ACTOR}.ppo_epochs",
    "pack_tokens": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "staleness_share": "async_training.staleness_threshold",
    "partial_rollout": "async_training.partial_rollout",
    "engine": f"{ROLLOUT}.name",
    "reference": f"{ACTOR}.use_kl_loss algorithm.use_kl_in_reward",
    "algorithm": "algorithm.adv_estimator",
    "tp": f"{ACTOR}.megatron.tensor_model_parallel_size",
    "pp": f"{ACTOR}.megatron.pipeline_model_parallel_size",
    "ep": f"{ACTOR}.megatron.expert_model_parallel_size",
    "cp": f"{ACTOR}.megatron.context_parallel_size {ACTOR}.ulysses_sequence_parallel_size",
    "recompute": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "gen_tp": f"{ROLLOUT}.tensor_model_parallel_size",
    "gen_dp": f"{ROLLOUT}.data_parallel_size",
    "gen_ep": f"{ROLLOUT}.expert_parallel_size",
    "memory_share": f"{ROLLOUT}.gpu_memory_utilization",
}
OPENRLHF = {
    "model": "pretrain",
    "prompts": "rollout-batch-size",
    "group": "n-samples-per-prompt",
    "prompt_length": "prompt-max-len",
    "max_response": "generate-max-len",
    "train_batch": "train-batch-size",
    "epochs": "max-epochs",
    "algorithm": "advantage-estimator",
    "recompute": "gradient-checkpointing",
    "gen_tp": "vllm-tensor-parallel-size",
    "memory_share": "vllm-gpu-memory-utilization",
    "tp": "ds-tensor-parallel-size",
    "cp": "ring-attn-size",
}
TRL = {
    "model": "model_name_or_path",
    "group": "num_generations",
    "prompt_length": "max_prompt_length",
    "max_response": "max_completion_length",
    "epochs": "num_iterations",
    "recompute": "gradient_checkpointing",
    "gen_tp": "vllm_tensor_parallel_size",
    "memory_share": "vllm_gpu_memory_utilization",
}
ESTIMATORS = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "rloo", "group_norm": "grpo"}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm"}
WHOLE = ("prompts", "group", "train_batch", "max_length", "pack_tokens", "staleness", "tp", "cp", "pp", "ep", "gen_tp",
         "gen_pp", "gen_ep", "gen_dp", "prompt_length", "max_response", "mini_prompts", "epochs", "first_layers",
         "last_layers")  # fmt: skip


@dataclass(frozen=True, slots=True)
class RlConfig:
    """The choices of ``stepcast rl`` that a configuration makes, and its keys that none of them read."""

    tool: str
    choices: Mapping[str, object]
    unread: tuple[str, ...]


class _Values:
    """Dotted keys with their values; those that were read are remembered."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values = {key: resolve(value, values) for key, value in values.items()}
        self.seen: set[str] = set()

    def raw(self, names: str) -> object:
        for name in names.split():
            if name in self.values:
                self.seen.add(name)
                if self.values[name] not in (None, "", "null", "None"):
                    return self.values[name]
        return None

    def flag(self, names: str) -> bool:
        return str(self.raw(names)).lower() in ("true", "1", "yes")

    def number(self, names: str) -> float | None:
        value = self.raw(names)
        if value is None or isinstance(value, bool):
            return None
        try:
            return float(str(value))
        except ValueError:
            raise FormatError(f"{names.split()[0]}: {str(value)[:40]!r} is no number") from None


def resolve(value: object, values: Mapping[str, object]) -> object:
    """Return *value* with references ``${a.b}`` and products ``${mul:2, 3}`` replaced."""
    for _ in range(MOST_ROUNDS):
        if not isinstance(value, str) or "${" not in value:
            return value
        value = REFERENCE.sub(lambda match: str(values.get(match[1], match[0])), value)
        value = PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), value)
    return value


def read_rl_config(path: str | os.PathLike[str]) -> RlConfig:
    """Return the RL step that a configuration describes; its tool is recognised by its keys."""
    path = os.fspath(path)
    try:
        return read_rl_text(Source(path).text(DESCRIPTION), path)
    except FormatError as error:
        raise error.at(path) from None


def read_rl_text(text: str, path: str = "") -> RlConfig:
    """Return the RL step of a text: YAML, JSON, or a command with overrides or arguments."""
    if text.lstrip().startswith("{"):
        values = flat(parse_json(text))
    elif path.endswith((".yaml", ".yml")):
        values = flat(parse_yaml(text))
    elif overrides := OVERRIDE.findall(text):
        values = {key: value.strip("'\"") for key, value in overrides}
    else:
        values = dict(read_flags(text))
    return read_rl_values(values)


def read_rl_values(values: Mapping[str, object]) -> RlConfig:
    """Return the RL step of dotted keys."""
    for tool, (mark, keys, finish) in TOOLS.items():
        if any(key.startswith(mark) for key in values):
            found = _Values(values)
            choices = {name: value for name, names in keys.items() if (value := _read(found, name, names)) is not None}
            finish(found, choices)
            unread = tuple(sorted(set(values) - found.seen))
            return RlConfig(tool, {"software": tool, **choices}, unread)
    raise FormatError("no configuration of NeMo RL, verl, OpenRLHF or TRL's GRPO is recognised")


def _read(values: _Values, name: str, names: str) -> object:
    if name in WHOLE:
        number = values.number(names)
        if number is not None and not (0 <= number < 10**9 and number == int(number)):
            raise FormatError(f"{names.split()[0]}: expected a whole number, not {number:g}")
        return None if number is None else int(number)
    if name in ("memory_share", "staleness_share"):
        return values.number(names)
    if name == "recompute":
        return None if values.raw(names) is None else "full" if values.flag(names) else "none"
    if name in ("partial_rollout", "reference"):
        return values.flag(names) or any(values.flag(each) for each in names.split())
    value = values.raw(names)
    if value is None:
        return None
    if name == "algorithm":
        return ESTIMATORS.get(str(value))
    if name == "engine":
        return ENGINES.get(str(value))
    if name == "gen_weights":
        return "fp8" if "fp8" in str(value) else "bf16"
    return str(value)


def _finish_nemo(values: _Values, choices: dict[str, object]) -> None:
    per_node, nodes = values.number("cluster.gpus_per_node"), values.number("cluster.num_nodes")
    total = int((per_node or 8) * (nodes or 1))
    choices["algorithm"] = "grpo"
    own = values.number("policy.generation.colocated.resources.num_nodes")
    held = values.number("policy.generation.colocated.resources.gpus_per_node") or per_node or 8
    colocated = values.raw("policy.generation.colocated.enabled")
    asynchronous = values.flag("grpo.async_grpo.enabled")
    if str(colocated).lower() == "false":
        rollout = int(held * (own or 1)) if (nodes or 1) > 1 or own else int(held)
        choices |= {"mode": "async" if asynchronous else "split", "rollout_gpus": rollout, "gpus": total - rollout}
    else:
        choices |= {"mode": "colocated", "gpus": total}
    if not asynchronous:
        choices.pop("staleness", None)
    if values.flag("policy.megatron_cfg.fp8_cfg.enabled"):
        choices["precision"] = "fp8"
    first, last = choices.pop("first_layers", None), choices.pop("last_layers", None)
    if first or last:
        choices["stage_ends"] = (first or 0, last or 0)
    choices["reference"] = not values.flag("grpo.skip_reference_policy_logprobs_calculation")


def _finish_verl(values: _Values, choices: dict[str, object]) -> None:
    total = int((values.number("trainer.n_gpus_per_node") or 8) * (values.number("trainer.nnodes") or 1))
    choices["gpus"] = total
    if rollout_nodes := values.number("rollout.nnodes"):
        per_node = values.number("rollout.n_gpus_per_node") or values.number("trainer.n_gpus_per_node") or 8
        choices |= {"mode": "async", "rollout_gpus": int(rollout_nodes * per_node), "staleness": 1}
    share = choices.pop("staleness_share", None)
    if share and "rollout_gpus" in choices:
        choices["staleness"] = max(1, round(float(str(share)) + 0.5))
    mini, group = choices.pop("mini_prompts", None), int(str(choices.get("group", 1)))
    if mini:
        choices["train_batch"] = int(str(mini)) * group
    choices.setdefault("recompute", "full")  # verl's default
    strategy = str(values.raw(f"{ACTOR}.strategy") or "fsdp")
    choices["framework"] = "megatron-core" if "megatron" in strategy or "pp" in choices else "pytorch-fsdp"


def _finish_openrlhf(values: _Values, choices: dict[str, object]) -> None:
    gpus = (values.number("actor-num-nodes") or 1) * (values.number("actor-num-gpus-per-node") or 8)
    choices["gpus"] = int(gpus)
    if not values.flag("colocate-all-models"):
        engines = values.number("vllm-num-engines") or 1
        rollout = int(engines * float(str(choices.get("gen_tp", 1))))
        choices |= {"mode": "async" if values.flag("async-train") else "split", "rollout_gpus": rollout}
    if values.raw("critic-pretrain") is not None:
        choices["critic"] = True
    choices["reference"] = (values.number("init-kl-coef") or 0.0) > 0
    if stage := values.number("zero-stage"):
        choices["sharding"] = f"zero-{stage:.0f}"


def _finish_trl(values: _Values, choices: dict[str, object]) -> None:
    gpus = int(values.number("num_processes") or 0)
    each, accumulated = (
        values.number("per_device_train_batch_size") or 8,
        values.number("gradient_accumulation_steps") or 1,
    )
    choices |= {"reference": (values.number("beta") or 0.0) > 0, "algorithm": "grpo"}
    if str(values.raw("vllm_mode")) == "server":
        choices["mode"] = "split"
    if gpus:
        choices |= {"gpus": gpus, "train_batch": int(each * accumulated * gpus)}
        responses = values.number("generation_batch_size")
        responses = responses or each * (values.number("steps_per_generation") or accumulated) * gpus
        choices["prompts"] = max(int(responses // float(str(choices.get("group", 8)))), 1)


Finish = Callable[[_Values, dict[str, object]], None]
# How each tool is recognised, its keys, and the choices that follow from several keys.
TOOLS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str], Finish]] = {
    "nemo-rl": (("grpo.", "policy."), NEMO_RL, _finish_nemo),
    "verl": (("actor_rollout_ref.",), VERL, _finish_verl),
    "openrlhf": (("rollout-batch-size", "n-samples-per-prompt", "vllm-num-engines"), OPENRLHF, _finish_openrlhf),
    "trl": (("num_generations", "max_completion_length"), TRL, _finish_trl),
}
