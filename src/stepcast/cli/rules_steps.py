"""What options of ``predict``, ``plan`` and ``simulate`` need to have an effect."""

from stepcast.cli.rules import BACKGROUND, CORRECTIONS, DRAWING, JITTER, PLACE, Facts, Rule
from stepcast.cli.strategy_options import AUTOCASTS, MODULES
from stepcast.ir.group import Group
from stepcast.ir.schedules import SCHEDULES, Pairs

WIDE_WEIGHTS = ("fp32", "tf32", *AUTOCASTS)
PIPELINED = tuple(str(kind) for kind, facts in SCHEDULES.items() if not facts.alone)
PAIRED = tuple(str(kind) for kind, facts in SCHEDULES.items() if facts.pairs is Pairs.OWN)
SIMAI_NAMES = ("nvlink_gb_per_s", "nic_gb_per_s", "gpus_per_server", "nics_per_server", "overlap")
FAST_NAMES = (
    "set",
    "place",
    "schedule",
    "body",
    "messages",
    "ideal_communication",
    "all_reduce",
    "slow_stage",
    "slow_rank",
    "slow_group",
    "jitter",
    "trace",
    "gantt",
    "critical_path",
)


def _replicas(f: Facts) -> int:
    gpus: int = f["gpus"]
    return gpus // int(f["tp"] * f["pp"])


def _overlaps(f: Facts, word: str) -> bool:
    return word in (f["overlap"] or "").split(",")


def _again(f: Facts) -> set[str]:
    """The modules that --recompute names; others are no modules at all."""
    kind, _, words = f["recompute"].partition(":")
    return set(words.split(",")) & set(MODULES) if kind == "selective" else set()


STRATEGY = (
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
        ("no_sequence_parallel",),
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
    Rule(
        ("bucket_mb",),
        lambda f: _replicas(f) > 1,
        "one replica reduces no gradients",
        harmless=True,
    ),
    Rule(
        ("ignore_unknown",),
        lambda f: getattr(f.get("described"), "config", None) is not None,
        "it is for keys of a configuration; give --config as well, or leave it out",
    ),
    Rule(
        ("replicate",),
        lambda f: f["sharding"] != "none",
        "it splits states among ranks, and --sharding is none; choose zero-1 or hybrid-fsdp, or leave it out",
    ),
    PLACE,
    CORRECTIONS,
)
PRICE = Rule(
    ("price",), lambda f: f["tokens"] is not None, "it is of a whole run; give --tokens as well, such as 1T"
)
CURRENCY = Rule(("currency",), lambda f: f["price"] is not None, "give --price as well")
PREDICT = (*STRATEGY, PRICE, CURRENCY, JITTER, DRAWING, BACKGROUND)
PLAN = STRATEGY

SIMULATE = (
    BACKGROUND,
    Rule(
        FAST_NAMES,
        lambda f: f["engine"] != "simai",
        "--engine simai does not know it; leave one of them out",
    ),
    Rule(
        SIMAI_NAMES,
        lambda f: f["engine"] == "simai",
        "only --engine simai knows it; leave it out, or choose that engine",
    ),
    Rule(
        ("cluster",),
        lambda f: f["engine"] != "simai",
        "--engine simai takes its network from --nvlink-gb-per-s and --nic-gb-per-s",
        harmless=True,
    ),
    Rule(
        ("slow_group", "overlap"),
        lambda f: _named(f) <= set(f["groups"]),
        "this workload exchanges nothing over such a group; it has {group_list}",
    ),
    Rule(
        ("all_reduce",),
        lambda f: f["all_reduces"],
        "no all-reduce of this workload joins several ranks; leave it out",
    ),
    Rule(
        ("all_reduce",),
        lambda f: not f["ideal_communication"],
        "--ideal-communication knows links and no algorithms; leave one of them out",
    ),
    Rule(
        ("schedule",),
        lambda f: f["stages"] > 1 or f["schedule"] not in PIPELINED,
        "{schedule} orders the work of pipeline stages, and this workload has one; leave it out",
    ),
    Rule(
        ("body", "messages"),
        lambda f: f["stages"] > 1,
        "this workload has one pipeline stage",
        harmless=True,
    ),
    PLACE,
    JITTER,
    DRAWING,
)


def _named(f: Facts) -> set[str]:
    """The groups that --slow-group, or SimAI's --overlap, names; others are no groups at all."""
    words = {entry.partition("=")[0] for entry in f["slow_group"] + f["overlap"]}
    return {word.replace("dp_ep", Group.EXPERT_DP) for word in words} & set(Group)
