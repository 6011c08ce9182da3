"""Configurations of RL post-training: NeMo RL YAML, verl overrides and YAML, OpenRLHF arguments, TRL GRPO configs.

``data/configs/rl`` has a table from our choices to the keys of each tool. Keys that no choice reads are listed, so that
nobody believes they had an effect.
"""

import math
import os
import re
from collections.abc import Mapping

from stepcast.inputs.configs.keys import Keys, flat, is_on, known_keys, option_keys
from stepcast.inputs.configs.reader import parse_json, parse_yaml
from stepcast.inputs.configs.shell import read_flags
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import DESCRIPTION
from stepcast.ir.types import dataclass

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
PRODUCT = re.compile(r"\$\{mul:\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")
OVERRIDE = re.compile(r"(?:^|\s)\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=('[^']*'|\"[^\"]*\"|[^\s\\]+)")
MOST_ROUNDS = 8  # of references to references

ACTOR = "actor_rollout_ref.actor"
PROCESSES = "num_processes"
MOST = 10**9


@dataclass(frozen=True, slots=True)
class RlConfig:
    """The choices of ``stepcast rl`` that a configuration makes, and its keys that none of them read."""

    tool: str
    choices: Mapping[str, object]
    unread: tuple[str, ...]
    assumed: tuple[str, ...] = ()


class _RlKeys(Keys):
    """The keys of a tool, with references replaced; numbers that are none are refused."""

    def __init__(self, values: Mapping[str, object], tool: str) -> None:
        resolved = {key: resolve(value, values) for key, value in values.items()}
        known = {key: None if value in ("", "null", "None") else value for key, value in resolved.items()}
        super().__init__(known, f"rl/{tool}")

    def number(self, *names: str) -> int | None:
        number, value = super().number(*names), self.raw(*names)
        if value is not None and (number is None or not 0 <= number < MOST):
            raise FormatError(f"{names[0]}: expected a whole number, not {str(value)[:40]!r}")
        return number

    def share(self, *names: str) -> float | None:
        share, value = super().share(*names), self.raw(*names)
        if value is not None and (share is None or not math.isfinite(share)):
            raise FormatError(f"{names[0]}: {str(value)[:40]!r} is no number")
        return share


def resolve(value: object, values: Mapping[str, object]) -> object:
    """Return *value* with references ``${a.b}`` and products ``${mul:2, 3}`` replaced."""
    for _ in range(MOST_ROUNDS):
        if not isinstance(value, str) or "${" not in value:
            return value
        value = REFERENCE.sub(lambda match: str(values.get(match[1], match[0])), value)
        value = PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), value)
    return value


def read_rl_config(path: str | os.PathLike[str], gpus: int | None = None) -> RlConfig:
    """Return the RL step that a configuration describes, on *gpus* where given; its tool is recognised by its keys."""
    path = os.fspath(path)
    try:
        return read_rl_text(Source(path).text(DESCRIPTION), path, gpus)
    except FormatError as error:
        raise error.in_file(path) from None


def read_rl_text(text: str, path: str = "", gpus: int | None = None) -> RlConfig:
    """Return the RL step of a text: YAML, JSON, or a command with overrides or arguments."""
    if text.lstrip().startswith("{"):
        values = flat(parse_json(text))
    elif path.endswith((".yaml", ".yml")):
        values = flat(parse_yaml(text))
    elif overrides := OVERRIDE.findall(text):
        values = {key: value.strip("'\"") for key, value in overrides}
    else:
        values = dict(read_flags(text))
    return read_rl_values(values, gpus)


def read_rl_values(values: Mapping[str, object], gpus: int | None = None) -> RlConfig:
    """Return the RL step of dotted keys."""
    for tool, finish in TOOLS.items():
        table = known_keys(f"rl/{tool}").table
        if any(key.startswith(tuple(table["marks"].split())) for key in values):
            optional = table.get("optional", "").split()
            off = tuple(f"{name}." for name in optional if not is_on(values.get(f"{name}.enabled", True)))
            keys = _RlKeys({key: value for key, value in values.items() if not key.startswith(off)}, tool)
            if gpus:
                keys.values[PROCESSES] = gpus
            choices: dict[str, object] = {**keys.options()}
            for name, key in option_keys(keys.tool).items():
                if key.words and name not in choices and (word := keys.text(*key.names)):
                    keys.assume(f"{key.names[0]} {word[:40]!r} is not known here, and left out (--{name})")
            finish(keys, choices)
            for name, value in table.get("defaults", {}).items():
                if name not in choices:
                    choices[name] = value
                    keys.assume(f"{name.replace('_', ' ')} {value}, the default of {tool}")
            config = keys.config(tool, "", {})
            unread = tuple(sorted({*values} - {*config.understood, *config.unset}))
            return RlConfig(tool, {"software": tool, **choices}, unread, config.assumed)
    raise FormatError("no configuration of NeMo RL, verl, OpenRLHF or TRL's GRPO is recognised")


def _finish_nemo(keys: _RlKeys, choices: dict[str, object]) -> None:
    per_node, nodes = keys.number("cluster.gpus_per_node") or 8, keys.number("cluster.num_nodes") or 1
    choices["algorithm"] = "grpo"
    if "gen_weights" in choices:
        choices["gen_weights"] = "fp8" if "fp8" in str(choices["gen_weights"]) else "bf16"
    if choices.get("max_response", 0) == choices.get("max_length"):  # as its examples have it: prompt and response
        choices.pop("max_response", None)
    if keys.flag("policy.dtensor_cfg.enabled"):
        choices |= {"framework": "pytorch-fsdp", "sharding": "fsdp"}
    rollout_nodes = keys.number("policy.generation.colocated.resources.num_nodes")
    gpus_per_node = keys.number("policy.generation.colocated.resources.gpus_per_node") or per_node
    colocated = keys.raw("policy.generation.colocated.enabled")
    asynchronous = keys.flag("grpo.async_grpo.enabled")
    if str(colocated).lower() == "false":
        rollout, mode = gpus_per_node * (rollout_nodes or 1), "async" if asynchronous else "split"
        choices |= {"mode": mode, "rollout_gpus": rollout, "gpus": per_node * nodes - rollout}
    else:
        choices |= {"mode": "colocated", "gpus": per_node * nodes}
    if not asynchronous:
        choices.pop("staleness", None)
    if keys.flag("policy.megatron_cfg.fp8_cfg.enabled"):
        choices["precision"] = "fp8"
    first, last = choices.pop("first_layers", None), choices.pop("last_layers", None)
    if first or last:
        choices["stage_ends"] = (first or 0, last or 0)
    choices["reference"] = not keys.flag("grpo.skip_reference_policy_logprobs_calculation")


def _finish_verl(keys: _RlKeys, choices: dict[str, object]) -> None:
    per_node = keys.number("trainer.n_gpus_per_node") or 8
    choices["gpus"] = per_node * (keys.number("trainer.nnodes") or 1)
    if rollout_nodes := keys.number("rollout.nnodes"):
        gpus_per_node = keys.number("rollout.n_gpus_per_node") or per_node
        choices |= {"mode": "async", "rollout_gpus": rollout_nodes * gpus_per_node, "staleness": 1}
    penalties = [keys.flag(name) for name in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")]
    choices["reference"] = any(penalties)
    share = choices.pop("staleness_share", None)
    if share and "rollout_gpus" in choices:
        choices["staleness"] = math.ceil(float(str(share)))  # batches beyond the one that is trained
    mini, group = choices.pop("mini_prompts", None), int(str(choices.get("group", 1)))
    if mini:
        choices["train_batch"] = int(str(mini)) * group
    choices.setdefault("recompute", "full")  # verl's default
    strategy = str(keys.raw(f"{ACTOR}.strategy") or "fsdp")
    choices["framework"] = "megatron-core" if "megatron" in strategy or "pp" in choices else "pytorch-fsdp"


def _finish_openrlhf(keys: _RlKeys, choices: dict[str, object]) -> None:
    choices["gpus"] = (keys.number("actor-num-nodes") or 1) * (keys.number("actor-num-gpus-per-node") or 8)
    if not keys.flag("colocate-all-models"):
        rollout = (keys.number("vllm-num-engines") or 1) * int(str(choices.get("gen_tp", 1)))
        choices |= {"mode": "async" if keys.flag("async-train") else "split", "rollout_gpus": rollout}
    keys.raw("critic-pretrain")  # PPO has a critic, others none
    weight = keys.share("init-kl-coef")
    choices["reference"] = weight is None or weight > 0
    if stage := keys.number("zero-stage"):
        choices["sharding"] = f"zero-{stage}"


def _finish_trl(keys: _RlKeys, choices: dict[str, object]) -> None:
    gpus = keys.number(PROCESSES)
    batch = keys.number("per_device_train_batch_size") or 8
    accumulated = keys.number("gradient_accumulation_steps") or 1
    choices |= {"reference": (keys.share("beta") or 0.0) > 0, "algorithm": "grpo"}
    # The defaults of GRPOConfig.
    group = int(str(choices.setdefault("group", 8)))
    choices.setdefault("max_response", 256)
    if not keys.flag("use_vllm"):
        keys.assume("use_vllm is off: generation is predicted with vLLM, and takes far longer without")
    if str(keys.raw("vllm_mode")) == "server":
        choices["mode"] = "split"
    if gpus:
        choices |= {"gpus": gpus, "train_batch": batch * accumulated * gpus}
        responses = keys.number("generation_batch_size")
        responses = responses or batch * (keys.number("steps_per_generation") or accumulated) * gpus
        choices["prompts"] = max(responses // max(group, 1), 1)


# The choices of each tool that follow from several keys.
TOOLS = {"nemo-rl": _finish_nemo, "verl": _finish_verl, "openrlhf": _finish_openrlhf, "trl": _finish_trl}
