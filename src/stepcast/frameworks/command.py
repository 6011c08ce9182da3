"""The options of ``stepcast predict`` for a strategy under a framework: what differs from its habits."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from stepcast.frameworks.profile import DECISIONS, Profile, settle
from stepcast.frameworks.words import offload_word, overlap_words, recompute_word
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.strategy import ScheduleKind, Strategy


class UnsaidError(ValueError):
    """A setting that no option says."""


def _flag(name: str) -> Callable[[Any], list[str]]:
    return lambda on: [f"--{name}" if on else f"--no-{name}"]


def _word(name: str) -> Callable[[Any], list[str]]:
    return lambda value: [f"--{name}", str(value)]


# Field of a Framework or a Strategy -> the words that set it.
SPELLED: dict[str, Callable[[Any], list[str]]] = {
    "kernels": _word("kernels"),
    "execution": _word("execution"),
    "gradient_dtype": _word("gradients"),
    "dispatcher": _word("dispatcher"),
    "bucket_bytes": lambda size: ["--bucket-mb", repr(size / 1e6)],
    "flash_attention": _flag("flash-attention"),
    "ssm_kernels": _word("ssm-kernels"),
    "dropout": _flag("dropout"),
    "loss": _word("loss"),
    "fp8_activations": _flag("fp8-activations"),
    "fp8_attention": _flag("fp8-attention"),
    "wide_layers": _word("wide-layers"),
    "deferred_gradients": _word("deferred-gradients"),
    "fused_experts": _flag("fused-experts"),
    "sharding": _word("sharding"),
    "context": _word("context"),
    "sequence_parallel": _flag("sequence-parallel"),
    "recompute": lambda value: ["--recompute", recompute_word(value)],
    "offload": lambda value: ["--offload", offload_word(value)],
    "overlap": lambda value: ["--overlap", ",".join(overlap_words(value)) or "none"],
    "further_tokens": _word("further-tokens"),
    "stage_layers": lambda layers: ["--stage-layers", ",".join(map(str, layers))],
    "lora_rank": _word("lora-rank"),
    "expert_imbalance": _word("expert-imbalance"),
    "expert_capacity": _word("expert-capacity"),
    "reshard": _flag("reshard"),
    "fp8_parameters": lambda _: ["--fp8-params"],
    "zero_gradients": _word("zero-gradients"),
    "schedule": _word("schedule"),
}
# What other words say: the layout and the batch, adapters by their rank, the profile by its name.
ELSEWHERE = {"layout", "micro_batch", "global_batch", "seq", "precision", "training", "name"}


def predict_words(
    profile: Profile, model: Model, gpu: str, strategy: Strategy, framework: Framework
) -> list[str]:
    """Layout, batch and every option that differs from what *profile* does on *gpu* anyway."""
    layout = strategy.layout
    words = ["--framework", profile.name, "--gpus", str(layout.gpus)]
    for name in ("tp", "cp", "ep", "pp", "vpp"):
        if getattr(layout, name) > 1:
            words += [f"--{name}", str(getattr(layout, name))]
    for name in ("expert_tp", "shard"):
        if getattr(layout, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(layout, name))]
    for name in ("micro_batch", "global_batch", "seq"):
        words += [f"--{name.replace('_', '-')}", str(getattr(strategy, name))]
    if strategy.precision is not profile.defaults.precision:
        words += ["--precision", str(strategy.precision)]
    # Presets and formats depend on the precision, so what differs is told with it said.
    settled = settle(profile, model, gpu, layout, {"precision": strategy.precision})
    usual = settled.strategy(layout, strategy.micro_batch, strategy.global_batch, strategy.seq)
    usual = replace(usual, schedule=ScheduleKind.INTERLEAVED if layout.vpp > 1 else ScheduleKind.ONE_F_ONE_B)
    for wanted, known in ((strategy, usual), (framework, settled.framework)):
        for name in (field.name for field in fields(wanted) if field.name not in ELSEWHERE):
            if getattr(wanted, name) != getattr(known, name):
                words += _spelled(name, getattr(wanted, name))
    return words


def _spelled(name: str, value: object) -> list[str]:
    if name not in SPELLED or value is None or (name == "stage_layers" and not value):
        kind = "the framework" if name in DECISIONS else "the strategy"
        raise UnsaidError(f"no option sets {name} of {kind} to {value!r}")
    return SPELLED[name](value)
