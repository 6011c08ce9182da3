"""What options of ``simulate``, and of answers, need to have an effect."""

from stepcast.cli.rules import DRAWING, JITTER
from stepcast.ir.group import Group
from stepcast.questions.rules import BACKGROUND, PIPELINED, PLACE, Facts, Rule

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
