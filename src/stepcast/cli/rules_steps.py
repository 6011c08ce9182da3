"""What options of ``predict`` and ``simulate`` need to have an effect."""

from stepcast.cli.rules import CORRECTIONS, DRAWING, JITTER, Facts, Rule
from stepcast.ir.group import Group

PIPELINED = ("interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe")
SIMAI_NAMES = ("nvlink_gb_per_s", "nic_gb_per_s", "gpus_per_server", "nics_per_server", "overlap")
FAST_NAMES = (
    "set",
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


PREDICT = (
    Rule(
        ("context",),
        lambda f: f["cp"] > 1,
        "it says how context-parallel ranks exchange, and cp is 1; give --cp 2 or more, or leave it out",
    ),
    Rule(
        ("expert_tp", "expert_imbalance", "expert_capacity"),
        lambda f: f["experts"],
        "{model} has no experts; leave it out, or choose a model that has",
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
        lambda f: f["tp"] > 1 or not _overlaps(f, "tensor"),
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
        ("bucket_mb",),
        lambda f: _replicas(f) > 1,
        "one replica reduces no gradients",
        harmless=True,
    ),
    CORRECTIONS,
    JITTER,
    DRAWING,
)

SIMULATE = (
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
    JITTER,
    DRAWING,
)


def _named(f: Facts) -> set[str]:
    """The groups that --slow-group, or SimAI's --overlap, names; others are no groups at all."""
    words = {entry.partition("=")[0] for entry in f["slow_group"] + f["overlap"]}
    return {word.replace("dp_ep", Group.EXPERT_DP) for word in words} & set(Group)
