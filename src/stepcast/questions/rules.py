"""Rules for choices that have no effect.

A choice that differs from its default and cannot change the answer is

- an error if the user surely meant something else: the message says why and what to do;
- a note if the answer is still the one that was asked for.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from stepcast.ir.dataclass import dataclass
from stepcast.ir.schedules import SCHEDULES, Pairs
from stepcast.questions.choices import option_of
from stepcast.questions.question import AUTOCASTS, MODULES

Facts = Mapping[str, Any]
"""The choices by name, and facts about the model, the cluster or the input files."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that have an effect only if *needs* returns True."""

    options: tuple[str, ...]
    needs: Callable[[Facts], bool]
    # Why there is none and what to do, with names of facts in braces.
    otherwise: str
    harmless: bool = False


def find_idle(rules: Iterable[Rule], given: Collection[str], facts: Facts) -> Iterator[tuple[str, Rule]]:
    """Yield the options among those *given* that have no effect, each with its rule."""
    for rule in rules:
        for option in rule.options:
            if option in given and not rule.needs(facts):
                yield option, rule


def check_rules(rules: Iterable[Rule], given: Collection[str], facts: Facts) -> tuple[str, ...]:
    """Raise a ValueError for the first option without effect; return notes for the harmless ones."""
    idle = list(find_idle(rules, given, facts))
    for option, rule in idle:
        if not rule.harmless:
            raise ValueError(_message(option, rule, facts))
    return tuple(_message(option, rule, facts) for option, rule in idle)


def _message(option: str, rule: Rule, facts: Facts) -> str:
    denied = f"no-{option}" if option == "sequence_parallel" and facts[option] is False else option
    return f"{option_of(denied)} has no effect: {rule.otherwise.format_map(facts)}"


WIDE_WEIGHTS = ("fp32", "tf32", *AUTOCASTS)
PIPELINED = tuple(str(kind) for kind, facts in SCHEDULES.items() if not facts.alone)
PAIRED = tuple(str(kind) for kind, facts in SCHEDULES.items() if facts.pairs is Pairs.OWN)
CORRECTIONS = Rule(
    ("calibration",),
    lambda f: f["corrects"],
    "{calibration} holds constants of runs and no corrections of operators; 'stepcast profile', or 'stepcast "
    "calibrate' with operator times, profiler or Megatron traces, writes them",
)
BACKGROUND = Rule(
    ("background",),
    lambda f: f["engine"] == "fluid",
    "only --engine fluid shares links with other jobs; use that as well, or leave it out",
)
PLACE = Rule(
    ("place",),
    lambda f: f["racks"],
    "no rack of {cluster} is one NVLink domain of several nodes; ranks fill nodes in order",
    harmless=True,
)
CLUSTER_CHANGES = Rule(
    ("set",), lambda f: f["cluster"] is not None, "it overrides fields of a cluster; use --cluster as well"
)
PRICE = Rule(
    ("price",),
    lambda f: any(f.get(name) is not None for name in ("tokens", "samples", "steps")),
    "it is the price of a training run; use --tokens as well, such as --tokens 1T, or --samples or --steps",
)
CURRENCY = Rule(("currency",), lambda f: f["price"] is not None, "use --price as well")


def _replicas(f: Facts) -> int:
    gpus: int = f["gpus"]
    return gpus // int(f["tp"] * f["pp"])


def _overlaps(f: Facts, word: str) -> bool:
    return word in (f["overlap"] or "").split(",")


def _recomputed(f: Facts) -> set[str]:
    """Return the modules that --recompute names."""
    kind, _, words = f["recompute"].partition(":")
    return set(words.split(",")) & set(MODULES) if kind == "selective" else set()


PREDICT: tuple[Rule, ...] = (
    Rule(
        ("residual",),
        lambda f: f["residual_known"],
        "no measured run of a model like {model} with {framework} on {generation} GPUs is known; leave it out "
        "(docs/frameworks.md lists the known ones)",
    ),
    Rule(
        ("cp_comm",),
        lambda f: f["cp"] > 1,
        "there is no context parallelism to exchange, cp is 1; use --cp 2 or more, or leave it out",
    ),
    Rule(
        ("expert_tp", "expert_imbalance", "expert_load", "expert_capacity", "fused_experts", "dispatcher"),
        lambda f: f["experts"],
        "{model} has no experts; leave it out, or choose a mixture-of-experts model",
    ),
    Rule(
        ("ssm_kernels",),
        lambda f: f["mamba"],
        "{model} has no Mamba-2 layers; leave it out, or choose a model with them",
    ),
    Rule(
        ("overlap",),
        lambda f: f["experts"] or not _overlaps(f, "experts"),
        "{model} has no experts; leave the word experts out",
    ),
    Rule(
        ("expert_replicas",),
        lambda f: f["expert_load"] not in (None, "balanced"),
        "it needs the loads of experts: use --expert-load power-law:1.2 or a file, or leave it out",
    ),
    Rule(
        ("expert_load",),
        lambda f: f["expert_imbalance"] == 1.0,
        "--expert-imbalance states the busiest rank already; leave one of them out",
    ),
    Rule(
        ("expert_imbalance", "expert_load"),
        lambda f: not f["experts"] or f["ep"] > 1,
        "there are no expert-parallel ranks to compare, ep is 1; use --ep 2 or more, or leave it out",
    ),
    Rule(
        ("fused_experts",),
        lambda f: f["kernels"] == "fused",
        "it is a kernel of Transformer Engine, and --kernels is {kernels}; leave one of them out",
    ),
    Rule(
        ("execution",),
        lambda f: f["experts"] or f["execution"] != "partial-graphs",
        "{model} has no experts to leave out of its CUDA graphs; choose graphs or eager",
    ),
    Rule(
        ("mtp_layers",),
        lambda f: f["has_mtp"],
        "{model} has no module for multi-token prediction (MTP); leave it out, or choose a model with one",
    ),
    Rule(
        ("recompute",),
        lambda f: not _recomputed(f) or f["selective"] != "alternate-matmuls",
        "{framework} saves every second matmul whatever the modules; use --recompute selective",
    ),
    Rule(
        ("recompute",),
        lambda f: _recomputed(f) <= f["modules"],
        "{model} lacks one of these modules; choose from {module_list}",
    ),
    Rule(
        ("recompute",),
        lambda f: not f["fused_experts"] or "expert-activation" not in _recomputed(f),
        "--fused-experts has no separate activation kernel; leave the word expert-activation out",
    ),
    Rule(
        ("recompute",),
        lambda f: not {"experts", "expert-activation"} <= _recomputed(f),
        "recomputing experts includes their activation, so expert-activation adds nothing",
        harmless=True,
    ),
    Rule(
        ("overlap",),
        lambda f: f["tp"] == 1 or f["kernels"] == "fused" or not _overlaps(f, "tensor-gradients"),
        "{kernels} kernels reduce input gradients without overlap; leave the word tensor-gradients out",
    ),
    Rule(
        ("overlap",),
        lambda f: f["pp"] == 1 or f["vpp"] > 1 or f["schedule"] in PAIRED or not _overlaps(f, "experts"),
        "pipeline stages with one model chunk never run two micro-batches at a time; use --vpp 2 or more, "
        f"--schedule {' or '.join(PAIRED)}, or leave the word experts out",
    ),
    Rule(
        ("schedule",),
        lambda f: f["pp"] > 1 or f["schedule"] not in PIPELINED,
        "{schedule} is a pipeline schedule, and pp is 1; use --pp 2 or more, or leave it out",
    ),
    Rule(("sequence_parallel",), lambda f: f["tp"] > 1, "sequence parallelism needs tensor parallelism", harmless=True),
    Rule(
        ("overlap",),
        lambda f: f["tp"] > 1 or not (_overlaps(f, "tensor") or _overlaps(f, "tensor-gradients")),
        "there is no tensor-parallel communication to overlap, tp is 1",
        harmless=True,
    ),
    Rule(
        ("sharding",),
        lambda f: _replicas(f) > 1 or f["sharding"] not in ("zero-2", "zero-3"),
        "a single replica has no other rank to share its states with",
        harmless=True,
    ),
    Rule(
        ("reshard",),
        lambda f: f["sharding"] in ("zero-3", "fsdp", "hybrid-fsdp"),
        "it frees gathered parameters, and --sharding {sharding} does not shard them; leave one of them out",
    ),
    Rule(
        ("fp8_params",),
        lambda f: f["precision"] in ("fp8", "mxfp8"),
        "{precision} does not multiply in fp8; use --precision fp8 or mxfp8, or leave it out",
    ),
    Rule(
        ("master_weights",),
        lambda f: f["precision"] not in WIDE_WEIGHTS,
        "--precision {precision} stores the weights themselves in fp32; leave it out",
    ),
    Rule(("bucket_mb",), lambda f: _replicas(f) > 1, "a single replica reduces no gradients", harmless=True),
    Rule(
        ("replicate",),
        lambda f: f["sharding"] != "none",
        "it shards states among ranks, and --sharding is none; choose zero-1 or hybrid-fsdp, or leave it out",
    ),
    Rule(
        ("lora_targets", "lora_dropout"), lambda f: f["lora_rank"] > 0, "there are no adapters; use --lora-rank as well"
    ),
    Rule(
        ("batching",),
        lambda f: f["lengths"] is not None,
        "all samples are as long as --seq; describe their lengths, such as --lengths mean=600,max=4096",
    ),
    Rule(("epochs",), lambda f: f["samples"] is not None, "it counts passes over samples; use --samples as well"),
    Rule(
        ("samples", "steps"),
        lambda f: sum(f[name] is not None for name in ("tokens", "samples", "steps")) == 1,
        "--tokens, --samples and --steps each say how long to train; use one of them",
    ),
    PLACE,
    CORRECTIONS,
    PRICE,
    CURRENCY,
    BACKGROUND,
)
