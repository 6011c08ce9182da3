"""What options of verbs need to have an effect, and the check of it; questions/rules.py has those of steps.

Each verb calls ``check_applicable`` once it knows what it works on.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from stepcast.cli.output import print_notes
from stepcast.ir.group import Group
from stepcast.questions.rules import BACKGROUND, CORRECTIONS, PIPELINED, PLACE, Facts, Rule, check_rules

# ---- what several verbs share ------------------------------------------------------------------------

JITTER = Rule(
    ("runs", "seed"),
    lambda f: f["jitter"] is not None,
    "it is for --jitter; give --jitter X as well, such as 0.05, or leave it out",
)
DRAWING = Rule(
    ("gantt", "explain_memory"),
    lambda f: not f["json"],
    "it is text, and --json prints one JSON object alone",
    harmless=True,
)
EDITS = Rule(
    ("repeat_layers", "backward_factor"),
    lambda f: "Workload" in f["kinds"],
    "it changes a workload, and {file} says what happened; leave it out",
)
CLUSTER_CHANGES = Rule(
    ("set",), lambda f: f["cluster"] is not None, "it changes a cluster, and none is named; give --cluster as well"
)


# ---- collective and op -------------------------------------------------------------------------------

COLLECTIVE = (
    PLACE,
    Rule(
        ("place",),
        lambda f: f["ranks_per_node"] is None,
        "--ranks-per-node says how many each rack holds; leave one of them out",
    ),
    Rule(
        ("imbalance",), lambda f: f["kind"] == "all-to-all", "every rank of {kind} sends the same; it is for all-to-all"
    ),
    Rule(
        ("algorithm",), lambda f: f["kind"] not in ("send-receive", "barrier"), "{kind} has one algorithm; leave it out"
    ),
    Rule(("size", "sweep"), lambda f: f["kind"] != "barrier", "a barrier carries no data", harmless=True),
    Rule(
        ("algorithm", "imbalance", "ranks_per_thread"),
        lambda f: f["ranks"] > 1,
        "one rank exchanges nothing",
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
    """Names of the sizes that an operator of *kind* has."""
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
        "the gradients of {kind} are two matmuls; ask for (m, k, n) and for (k, n, m)",
    ),
    Rule(("backward",), lambda f: f["kind"] not in WITHOUT_GRADIENT, "{kind} has no gradient; leave it out"),
    Rule(("no_causal",), lambda f: f["kind"] == "attention", "{kind} has no mask; it is for attention"),
    Rule(("to",), lambda f: f["kind"] == "cast", "{kind} writes the format it reads; it is for cast alone"),
)


# ---- measured runs -----------------------------------------------------------------------------------

ANALYZE = (
    Rule(
        ("verbose",),
        lambda f: f["detailed"] and not f["json"],
        "everything that is known of {file} is shown already",
        harmless=True,
    ),
    Rule(
        ("trace",),
        lambda f: f["format"] != "kineto",
        "the trace is one already; write it for Perfetto with 'stepcast convert {file} OUT --to perfetto'",
    ),
    Rule(
        ("trace",),
        lambda f: f["format"] != "optimus",
        "an OptimusPrime log tells how long layers took and not when; leave it out",
    ),
    Rule(
        ("trace",),
        lambda f: f["format"] != "nccl-tests",
        "an nccl-tests log tells how long collectives took and not when; leave it out",
    ),
    Rule(
        ("trace",),
        lambda f: f["format"] == "megatron",
        "it writes the waits of Megatron traces, and this is {format}; leave it out",
    ),
    Rule(("cluster", "set"), lambda f: f["format"] != "kineto", "a profiler trace is analysed by itself; leave it out"),
    Rule(
        ("cluster", "set"),
        lambda f: f["format"] in ("megatron", "optimus", "nccl-tests"),
        "{format} is analysed by itself; leave it out",
    ),
    Rule(
        ("calibration",),
        lambda f: f["format"] == "optimus",
        "it holds constants of OptimusPrime runs, and this is {format}; leave it out",
    ),
    Rule(("set",), lambda f: f["format"] == "optimus" or f["cluster"] is not None, CLUSTER_CHANGES.otherwise),
)

REPLAY = (
    CLUSTER_CHANGES,
    Rule(
        ("gpu",),
        lambda f: any(change.startswith("gpu") for change in f["changes"]),
        "it is compared with the GPU of --what-if gpu=NAME, and no such change is asked for",
        harmless=True,
    ),
    Rule(
        ("cluster",),
        lambda f: any(change.startswith(("gpu", "dp")) for change in f["changes"]),
        "it prices what was not measured, for --what-if dp=N or gpu=NAME, and neither is asked for",
        harmless=True,
    ),
)

CALIBRATE = (
    Rule(
        ("gpu",),
        lambda f: f["source"] not in ("optimus", "nccl-tests"),
        "runs of {source} take their GPU from the cluster; give --cluster instead",
    ),
    Rule(
        ("cluster",),
        lambda f: f["source"] in ("megatron", "optimus", "nccl-tests"),
        "{source} times operators of one GPU; give --gpu instead",
    ),
    Rule(
        ("model",),
        lambda f: f["source"] in ("megatron", "optimus"),
        "{source} holds operators, of whatever model; leave it out",
    ),
    Rule(
        ("sequence",),
        lambda f: f["source"] == "optimus",
        "it is for OptimusPrime logs, which do not tell their lengths; leave it out",
    ),
)

VALIDATE = (
    Rule(
        ("cluster",),
        lambda f: "nccl-tests" in f["sets"],
        "it says where nccl-tests ran; validate that set, with --set nccl-tests, or leave it out",
    ),
    Rule(
        ("calibration",),
        lambda f: "transformers" in f["sets"],
        "steps of the set transformers take it; validate that set, with --set transformers, or leave it out",
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
    Rule(FAST_NAMES, lambda f: f["engine"] != "simai", "--engine simai does not know it; leave one of them out"),
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
        ("all_reduce",), lambda f: f["all_reduces"], "no all-reduce of this workload joins several ranks; leave it out"
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
    Rule(("body", "messages"), lambda f: f["stages"] > 1, "this workload has one pipeline stage", harmless=True),
    PLACE,
    JITTER,
    DRAWING,
)


def _named(f: Facts) -> set[str]:
    """The groups that --slow-group, or SimAI's --overlap, names; others are no groups at all."""
    words = {entry.partition("=")[0] for entry in f["slow_group"] + f["overlap"]}
    return {word.replace("dp_ep", Group.EXPERT_DP) for word in words} & set(Group)


# ---- the check ---------------------------------------------------------------------------------------

RULES: Mapping[str, tuple[Rule, ...]] = {
    "show": (EDITS,),
    "convert": (EDITS,),
    "predict": PREDICT,
    "simulate": SIMULATE,
    "analyze": ANALYZE,
    "replay": REPLAY,
    "collective": COLLECTIVE,
    "op": OP,
    "calibrate": CALIBRATE,
    "validate": VALIDATE,
}


def check_applicable(args: argparse.Namespace, **facts: Any) -> None:
    """Raise a ValueError for the first option given in vain; print notes for those that do no harm."""
    notes = check_rules(RULES[args.verb], args.given, {**vars(args), **facts})
    if not getattr(args, "quiet", False):  # as of runs that are only tried
        print_notes(notes)


def has_racks(args: argparse.Namespace) -> bool:
    """Return True if nodes of the cluster share a scale-up domain; load it only if --place is given."""
    from stepcast.hardware import load_cluster

    if "place" not in args.given or args.cluster is None:
        return False
    return load_cluster(args.cluster, args.set).topology.scale_up_nodes > 1
