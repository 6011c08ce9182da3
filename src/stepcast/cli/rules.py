"""Rules for options of verbs that have no effect; questions/rules.py has those of questions.

Each verb calls ``check_applicable`` once it knows its input.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from stepcast.cli.output import print_notes
from stepcast.ir.group import Group
from stepcast.questions.rules import BACKGROUND, CORRECTIONS, PIPELINED, PLACE, Facts, Rule, check_rules

# ---- shared by several verbs --------------------------------------------------------------------------

JITTER = Rule(
    ("runs", "seed"),
    lambda f: f["jitter"] is not None,
    "it is for --jitter; use --jitter X as well, such as --jitter 0.05, or leave it out",
)
DRAWING = Rule(
    ("gantt", "explain_memory"),
    lambda f: not f["json"],
    "it prints text, and --json prints one JSON object only",
    harmless=True,
)
EDITS = Rule(
    ("repeat_layers", "backward_factor"),
    lambda f: "Workload" in f["kinds"],
    "it changes a workload, and {file} is a measured run; leave it out",
)


# ---- collective and op -------------------------------------------------------------------------------

COLLECTIVE = (
    PLACE,
    Rule(("place",), lambda f: f["ranks_per_node"] is None, "--ranks-per-node places the ranks; leave one of them out"),
    Rule(
        ("imbalance",),
        lambda f: f["kind"] == "all-to-all",
        "every rank of {kind} sends the same amount; it is for all-to-all",
    ),
    Rule(
        ("algorithm",),
        lambda f: f["kind"] not in ("send-receive", "barrier"),
        "{kind} has only one algorithm; leave it out",
    ),
    Rule(("size", "sweep"), lambda f: f["kind"] != "barrier", "a barrier carries no data", harmless=True),
    Rule(
        ("algorithm", "imbalance", "ranks_per_thread"),
        lambda f: f["ranks"] > 1,
        "a single rank exchanges nothing",
        harmless=True,
    ),
)

SIZES = {
    "matmul": ("m", "n", "k", "batch"),
    "bmm": ("batch", "m", "n", "k"),
    "grouped": ("groups", "m", "n", "k"),
    "attention": ("seq", "keys", "batch", "heads", "kv_heads", "head_dim"),
}
ELEMENTWISE_SIZES = ("rows", "columns")
WITHOUT_GRADIENT = ("optimizer", "cast", "fill")


def sizes_of(kind: str) -> tuple[str, ...]:
    """Return the names of the sizes of an operator."""
    return SIZES.get(kind, ELEMENTWISE_SIZES)


def _size_rule(name: str) -> Rule:
    return Rule(
        (name,), lambda f: name in sizes_of(f["kind"]), "the sizes of {kind} are {size_list}; did you mean one of them?"
    )


OP = (
    CORRECTIONS,
    *map(_size_rule, sorted({name for names in SIZES.values() for name in names} | {*ELEMENTWISE_SIZES})),
    Rule(
        ("backward",),
        lambda f: f["kind"] not in ("matmul", "bmm", "grouped"),
        "the gradients of {kind} are two matmuls; use (m, k, n) and (k, n, m)",
    ),
    Rule(("backward",), lambda f: f["kind"] not in WITHOUT_GRADIENT, "{kind} has no gradient; leave it out"),
    Rule(("no_causal",), lambda f: f["kind"] == "attention", "{kind} has no mask; it is for attention"),
    Rule(("to",), lambda f: f["kind"] == "cast", "{kind} writes the data type it reads; it is for cast only"),
)


# ---- measured runs -----------------------------------------------------------------------------------

CALIBRATE = (
    Rule(
        ("gpu",),
        lambda f: f["source"] not in ("optimus", "nccl-tests"),
        "the GPU of {source} runs is that of the cluster; use --cluster instead",
    ),
    Rule(
        ("cluster",),
        lambda f: f["source"] in ("megatron", "optimus", "nccl-tests"),
        "{source} files have operators of one GPU; use --gpu instead",
    ),
    Rule(
        ("model",),
        lambda f: f["source"] in ("megatron", "optimus"),
        "{source} files have operators without a model; leave it out",
    ),
    Rule(
        ("sequence",),
        lambda f: f["source"] == "optimus",
        "it is for OptimusPrime logs, which lack sequence lengths; leave it out",
    ),
)

VALIDATE = (
    Rule(
        ("cluster",),
        lambda f: "nccl-tests" in f["sets"],
        "it is the cluster of the set nccl-tests; use --set nccl-tests as well, or leave it out",
    ),
    Rule(
        ("calibration",),
        lambda f: "transformers" in f["sets"],
        "it is for the set transformers; use --set transformers as well, or leave it out",
    ),
)


# ---- simulate and answers ----------------------------------------------------------------------------

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


PREDICT = (JITTER, DRAWING)
SIMULATE = (
    BACKGROUND,
    Rule(FAST_NAMES, lambda f: f["engine"] != "simai", "--engine simai does not support it; leave one of them out"),
    Rule(
        SIMAI_NAMES,
        lambda f: f["engine"] == "simai",
        "only --engine simai supports it; leave it out, or use that engine",
    ),
    Rule(
        ("cluster",),
        lambda f: f["engine"] != "simai",
        "--engine simai takes its network from --nvlink-gb-per-s and --nic-gb-per-s",
        harmless=True,
    ),
    Rule(
        ("slow_group", "overlap"),
        lambda f: _named_groups(f) <= set(f["groups"]),
        "this workload has no communication in that group; it has {group_list}",
    ),
    Rule(
        ("all_reduce",), lambda f: f["all_reduces"], "this workload has no all-reduce over several ranks; leave it out"
    ),
    Rule(
        ("all_reduce",),
        lambda f: not f["ideal_communication"],
        "--ideal-communication has links without algorithms; leave one of them out",
    ),
    Rule(
        ("schedule",),
        lambda f: f["stages"] > 1 or f["schedule"] not in PIPELINED,
        "{schedule} is a pipeline schedule, and this workload has one stage; leave it out",
    ),
    Rule(("body", "messages"), lambda f: f["stages"] > 1, "this workload has one pipeline stage", harmless=True),
    PLACE,
    JITTER,
    DRAWING,
)


def _named_groups(f: Facts) -> set[str]:
    """Return the groups that --slow-group, or --overlap of SimAI, names."""
    words = {entry.partition("=")[0] for entry in f["slow_group"] + f["overlap"]}
    return {word.replace("dp_ep", Group.EXPERT_DP) for word in words} & set(Group)


# ---- the check ---------------------------------------------------------------------------------------

RULES: Mapping[str, tuple[Rule, ...]] = {
    "show": (EDITS,),
    "convert": (EDITS,),
    "predict": PREDICT,
    "simulate": SIMULATE,
    "collective": COLLECTIVE,
    "op": OP,
    "calibrate": CALIBRATE,
    "validate": VALIDATE,
}


def check_applicable(args: argparse.Namespace, **facts: Any) -> None:
    """Raise a ValueError for the first option without effect; print notes for the harmless ones."""
    print_notes(check_rules(RULES[args.verb], args.given, {**vars(args), **facts}))


def has_racks(args: argparse.Namespace) -> bool:
    """Return True if nodes of the cluster share a scale-up domain; load it only if --place is given."""
    from stepcast.hardware import load_cluster

    if "place" not in args.given or args.cluster is None:
        return False
    return load_cluster(args.cluster, args.set).topology.scale_up_nodes > 1
