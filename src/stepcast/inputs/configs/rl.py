"""Configurations of RL post-training: NeMo RL YAML, verl overrides and YAML, OpenRLHF arguments, TRL GRPO configs.

``data/configs/rl.toml`` has a table from our choices to the keys of each tool. Keys that no choice reads are listed,
so that nobody believes they had an effect.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from stepcast.inputs.configs.keys import DATA, flat, is_on
from stepcast.inputs.configs.reader import parse_json, parse_yaml
from stepcast.inputs.configs.shell import read_flags
from stepcast.inputs.source import FormatError, Source, read_toml
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import DESCRIPTION

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
PRODUCT = re.compile(r"\$\{mul:\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")
OVERRIDE = re.compile(r"(?:^|\s)\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=('[^']*'|\"[^\"]*\"|[^\s\\]+)")
MOST_ROUNDS = 8  # of references to references

# Choices whose values are no whole numbers.
SHARES = ("memory_share", "staleness_share")
FLAGS = ("partial_rollout", "reference")
TEXTS = ("model", "algorithm", "engine", "gen_weights")
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, slots=True)
class RlConfig:
    """The choices of ``stepcast rl`` that a configuration makes, and its keys that none of them read."""

    tool: str
    choices: Mapping[str, object]
    unread: tuple[str, ...]
    assumed: tuple[str, ...] = ()


class _Values:
    """Dotted keys with their values, and the GPUs if others were asked for; keys that were read are remembered."""

    def __init__(self, values: Mapping[str, object], gpus: int | None) -> None:
        self.values = {key: resolve(value, values) for key, value in values.items()}
        self.gpus = gpus
        self.seen: set[str] = set()
        self.assumed: list[str] = []

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
        number = math.nan
        with suppress(ValueError):
            number = float(str(value))
        if not math.isfinite(number):
            raise FormatError(f"{names.split()[0]}: {str(value)[:40]!r} is no number")
        return number


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
        raise error.at(path) from None


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
    tables = read_toml(DATA / "rl.toml")
    for tool, finish in TOOLS.items():
        if any(key.startswith(tuple(tables[tool]["marks"].split())) for key in values):
            optional = tables[tool].get("optional", "").split()
            off = tuple(f"{name}." for name in optional if not is_on(values.get(f"{name}.enabled", True)))
            found = _Values({key: value for key, value in values.items() if not key.startswith(off)}, gpus)
            choices: dict[str, object] = {}
            for name, names in tables[tool]["keys"].items():
                if (value := _read(found, name, names, tables["words"])) is not None:
                    choices[name] = value
            finish(found, choices)
            for name, value in tables[tool].get("defaults", {}).items():
                if name not in choices:
                    choices[name] = value
                    found.assumed.append(f"{name.replace('_', ' ')} {value}, the default of {tool}")
            unread = tuple(sorted(set(values) - found.seen))
            return RlConfig(tool, {"software": tool, **choices}, unread, tuple(found.assumed))
    raise FormatError("no configuration of NeMo RL, verl, OpenRLHF or TRL's GRPO is recognised")


def _read(values: _Values, name: str, names: str, words: Mapping[str, Mapping[str, str]]) -> object:
    if name == "recompute":
        return None if values.raw(names) is None else "full" if values.flag(names) else "none"
    if name in FLAGS:
        return values.flag(names) or any(values.flag(each) for each in names.split())
    if name not in TEXTS:
        number = values.number(names)
        if number is None or name in SHARES:
            return number
        if not (0 <= number < 10**9 and number == int(number)):
            raise FormatError(f"{names.split()[0]}: expected a whole number, not {number:g}")
        return int(number)
    value = values.raw(names)
    if value is None:
        return None
    if name == "gen_weights":
        return "fp8" if "fp8" in str(value) else "bf16"
    if name in words and str(value) not in words[name]:
        values.assumed.append(f"{names.split()[0]} {str(value)[:40]!r} is not known here, and left out (--{name})")
        return None
    return words[name][str(value)] if name in words else str(value)


def _finish_nemo(values: _Values, choices: dict[str, object]) -> None:
    per_node, nodes = values.number("cluster.gpus_per_node"), values.number("cluster.num_nodes")
    total = int((per_node or 8) * (nodes or 1))
    choices["algorithm"] = "grpo"
    if choices.get("max_response", 0) == choices.get("max_length"):  # as its examples have it: prompt and response
        choices.pop("max_response", None)
    if values.flag("policy.dtensor_cfg.enabled"):
        choices |= {"framework": "pytorch-fsdp", "sharding": "fsdp"}
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
    values.raw("critic-pretrain")  # PPO has a critic, others none
    weight = values.number("init-kl-coef")
    choices["reference"] = weight is None or weight > 0
    if stage := values.number("zero-stage"):
        choices["sharding"] = f"zero-{stage:.0f}"


def _finish_trl(values: _Values, choices: dict[str, object]) -> None:
    gpus = values.gpus or int(values.number("num_processes") or 0)
    each = values.number("per_device_train_batch_size") or 8
    accumulated = values.number("gradient_accumulation_steps") or 1
    choices |= {"reference": (values.number("beta") or 0.0) > 0, "algorithm": "grpo"}
    # The defaults of GRPOConfig.
    group = int(str(choices.setdefault("group", 8)))
    choices.setdefault("max_response", 256)
    if not values.flag("use_vllm"):
        values.assumed.append("use_vllm is off: generation is predicted with vLLM, and takes far longer without")
    if str(values.raw("vllm_mode")) == "server":
        choices["mode"] = "split"
    if gpus:
        choices |= {"gpus": gpus, "train_batch": int(each * accumulated * gpus)}
        responses = values.number("generation_batch_size")
        responses = responses or each * (values.number("steps_per_generation") or accumulated) * gpus
        choices["prompts"] = max(int(responses // max(group, 1)), 1)


Finish = Callable[[_Values, dict[str, object]], None]
# The choices of each tool that follow from several keys.
TOOLS: Mapping[str, Finish] = {
    "nemo-rl": _finish_nemo,
    "verl": _finish_verl,
    "openrlhf": _finish_openrlhf,
    "trl": _finish_trl,
}
