"""What choices need to have an effect: one policy for those that have none.

A choice that was made, with another value than its default, and cannot change the answer is

- an error where the user surely meant something else: the message says why and what to do;
- a note where the answer is still the one that was asked for: the choice states what is so anyway.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stepcast.ir.schedules import SCHEDULES, Pairs
from stepcast.questions.choices import option_of
from stepcast.questions.question import AUTOCASTS, MODULES

Facts = Mapping[str, Any]
"""The verb's arguments by name, and what it found out about its input."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that have an effect only where *needs* holds."""

    options: tuple[str, ...]
    needs: Callable[[Facts], bool]
    # Why there is none and what to do; names of facts stand in braces.
    otherwise: str
    harmless: bool = False


def find_idle(rules: Iterable[Rule], given: Collection[str], facts: Facts) -> Iterator[tuple[str, Rule]]:
    """Yield the options among those *given* that have no effect, each with the rule that says so."""
    for rule in rules:
        for option in rule.options:
            if option in given and not rule.needs(facts):
                yield option, rule


def check_rules(rules: Iterable[Rule], given: Collection[str], facts: Facts) -> tuple[str, ...]:
    """Raise a ValueError for the first option without effect; return notes for those that do no harm."""
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
    "{calibration} holds constants of runs and corrects no operator; 'stepcast calibrate' on operator times, "
    "profiler or Megatron traces, or 'stepcast profile', writes one that does",
)
BACKGROUND = Rule(
    ("background",),
    lambda f: f["engine"] == "fluid",
    "only --engine fluid shares links with others; give that as well, or leave it out",
)
PLACE = Rule(
    ("place",),
    lambda f: f["racks"],
    "nodes of {cluster} form no racks with one scale-up domain; ranks fill them in order",
    harmless=True,
)
PRICE = Rule(("price",), lambda f: f["tokens"] is not None, "it is of a whole run; give --tokens as well, such as 1T")
CURRENCY = Rule(("currency",), lambda f: f["price"] is not None, "give --price as well")


def _replicas(f: Facts) -> int:
    gpus: int = f["gpus"]
    return gpus // int(f["tp"] * f["pp"])


def _overlaps(f: Facts, word: str) -> bool:
    return word in (f["overlap"] or "").split(",")


def _again(f: Facts) -> set[str]:
    """The modules that --recompute names; others are no modules at all."""
    kind, _, words = f["recompute"].partition(":")
    return set(words.split(",")) & set(MODULES) if kind == "selective" else set()


PREDICT: tuple[Rule, ...] = (
    Rule(
        ("residual",),
        lambda f: f["residual_known"],
        "no run like {model} under {framework} on GPUs of {generation} was measured; leave it out, or see in "
        "docs/frameworks.md where some were",
    ),
    Rule(
        ("context",),
        lambda f: f["cp"] > 1,
        "it says how context-parallel ranks exchange, and cp is 1; give --cp 2 or more, or leave it out",
    ),
    Rule(
        ("expert_tp", "expert_imbalance", "expert_capacity", "fused_experts", "dispatcher"),
        lambda f: f["experts"],
        "{model} has no experts; leave it out, or choose a model that has",
    ),
    Rule(
        ("ssm_kernels",),
        lambda f: f["mamba"],
        "{model} has no Mamba-2 layers; leave it out, or choose a model that has",
    ),
    Rule(
        ("overlap",),
        lambda f: f["experts"] or not _overlaps(f, "experts"),
        "{model} has no experts to exchange; leave the word experts out",
    ),
    Rule(
        ("expert_imbalance",),
        lambda f: not f["experts"] or f["ep"] > 1,
        "it compares expert-parallel ranks, and ep is 1; give --ep 2 or more, or leave it out",
    ),
    Rule(
        ("fused_experts",),
        lambda f: f["kernels"] == "fused",
        "it is a kernel of Transformer Engine, and --kernels is {kernels}; leave one of them out",
    ),
    Rule(
        ("execution",),
        lambda f: f["experts"] or f["execution"] != "partial-graphs",
        "{model} has no experts to leave out of its graphs; choose graphs or eager",
    ),
    Rule(
        ("further_tokens",),
        lambda f: f["predicts_further"],
        "{model} has no module that predicts further tokens; leave it out, or choose a model that has",
    ),
    Rule(
        ("recompute",),
        lambda f: not _again(f) or f["selective"] != "alternate-matmuls",
        "{framework} keeps every second product whatever the modules; give --recompute selective",
    ),
    Rule(
        ("recompute",),
        lambda f: _again(f) <= f["modules"],
        "{model} lacks a module that is named; leave its word out, or choose among {module_list}",
    ),
    Rule(
        ("recompute",),
        lambda f: not f["fused_experts"] or "expert-activation" not in _again(f),
        "--fused-experts leaves the activation no kernel of its own; leave the word expert-activation out",
    ),
    Rule(
        ("recompute",),
        lambda f: not {"experts", "expert-activation"} <= _again(f),
        "recomputed experts hold their activation already, so expert-activation adds nothing",
        harmless=True,
    ),
    Rule(
        ("overlap",),
        lambda f: f["tp"] == 1 or f["kernels"] == "fused" or not _overlaps(f, "tensor-gradients"),
        "{kernels} kernels sum input gradients beside nothing; leave the word tensor-gradients out",
    ),
    Rule(
        ("overlap",),
        lambda f: f["pp"] == 1 or f["vpp"] > 1 or f["schedule"] in PAIRED or not _overlaps(f, "experts"),
        "stages of one chunk run no two micro-batches beside each other; give --vpp 2 or more, "
        f"--schedule {' or '.join(PAIRED)}, or leave the word experts out",
    ),
    Rule(
        ("schedule",),
        lambda f: f["pp"] > 1 or f["schedule"] not in PIPELINED,
        "{schedule} orders the work of pipeline stages, and pp is 1; give --pp 2 or more, or leave it out",
    ),
    Rule(
        ("sequence_parallel",),
        lambda f: f["tp"] > 1,
        "there is no sequence parallelism without tensor parallelism",
        harmless=True,
    ),
    Rule(
        ("overlap",),
        lambda f: f["tp"] > 1 or not (_overlaps(f, "tensor") or _overlaps(f, "tensor-gradients")),
        "there is no tensor-parallel communication to overlap, tp is 1",
        harmless=True,
    ),
    Rule(
        ("sharding",),
        lambda f: _replicas(f) > 1 or f["sharding"] not in ("zero-2", "zero-3"),
        "one replica has nobody to share its states with",
        harmless=True,
    ),
    Rule(
        ("reshard",),
        lambda f: f["sharding"] in ("zero-3", "fsdp", "hybrid-fsdp"),
        "it frees gathered parameters, and --sharding {sharding} keeps them whole; leave one of them out",
    ),
    Rule(
        ("fp8_params",),
        lambda f: f["precision"] in ("fp8", "mxfp8"),
        "{precision} multiplies nothing in fp8; give --precision fp8 or mxfp8, or leave it out",
    ),
    Rule(
        ("master_weights",),
        lambda f: f["precision"] not in WIDE_WEIGHTS,
        "--precision {precision} keeps the weights themselves in fp32; leave it out",
    ),
    Rule(("bucket_mb",), lambda f: _replicas(f) > 1, "one replica reduces no gradients", harmless=True),
    Rule(
        ("replicate",),
        lambda f: f["sharding"] != "none",
        "it splits states among ranks, and --sharding is none; choose zero-1 or hybrid-fsdp, or leave it out",
    ),
    PLACE,
    CORRECTIONS,
    PRICE,
    CURRENCY,
    BACKGROUND,
)
