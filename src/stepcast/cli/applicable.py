"""Options given in vain: what each needs to have an effect, and one policy for those that have none.

The policy. An option that was given, with another value than its default, and cannot change the answer is

- an error, exit status 2, where the user surely meant something else: the message says why and what to do;
- a note on standard error, where the answer is still the one that was asked for: the option states what
  is so anyway, or asks for text beside ``--json``.

Each verb calls ``check_applicable`` once it knows what it works on; the rules stand in ``RULES``.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stepcast.cli.output import print_notes
from stepcast.ir.group import Group

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


def check_applicable(args: argparse.Namespace, **found: Any) -> None:
    """A ValueError for the first option given in vain; notes for those that do no harm."""
    facts = {**vars(args), **found}
    vain = list(_in_vain(args, facts))
    for option, rule in vain:
        if not rule.harmless:
            raise ValueError(_message(option, rule, facts))
    print_notes(_message(option, rule, facts) for option, rule in vain)


def _in_vain(args: argparse.Namespace, facts: Facts) -> Iterator[tuple[str, Rule]]:
    for rule in RULES[args.verb]:
        for option in rule.options:
            if option in args.given and not rule.needs(facts):
                yield option, rule


def _message(option: str, rule: Rule, facts: Facts) -> str:
    return f"--{option.replace('_', '-')} has no effect: {rule.otherwise.format_map(facts)}"


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
CORRECTIONS = Rule(
    ("calibration",),
    lambda f: f["corrects"],
    "{calibration} holds constants of runs and corrects no operator; 'stepcast calibrate' on operator times, "
    "profiler or Megatron traces, or 'stepcast profile', writes one that does",
)
CLUSTER_CHANGES = Rule(
    ("set",),
    lambda f: f["cluster"] is not None,
    "it changes a cluster, and none is named; give --cluster as well",
)


# ---- predict and simulate ----------------------------------------------------------------------------

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


# ---- collective and op -------------------------------------------------------------------------------

COLLECTIVE = (
    Rule(
        ("imbalance",),
        lambda f: f["kind"] == "all-to-all",
        "every rank of {kind} sends the same; it is for all-to-all",
    ),
    Rule(
        ("algorithm",),
        lambda f: f["kind"] not in ("send-receive", "barrier"),
        "{kind} has one algorithm; leave it out",
    ),
    Rule(
        ("size", "sweep"),
        lambda f: f["kind"] != "barrier",
        "a barrier carries no data",
        harmless=True,
    ),
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
        (name,),
        lambda f: name in sizes_of(f["kind"]),
        "the sizes of {kind} are {size_list}; did you mean one of them?",
    )


OP = (
    CORRECTIONS,
    *map(_size_rule, sorted({name for names in SIZES.values() for name in names} | {*ELEMENTWISE_SIZES})),
    Rule(
        ("backward",),
        lambda f: f["kind"] not in ("matmul", "bmm", "grouped"),
        "the gradients of {kind} are two matmuls; ask for (m, k, n) and for (k, n, m)",
    ),
    Rule(
        ("backward",),
        lambda f: f["kind"] not in WITHOUT_GRADIENT,
        "{kind} has no gradient; leave it out",
    ),
    Rule(
        ("no_causal",),
        lambda f: f["kind"] == "attention",
        "{kind} has no mask; it is for attention",
    ),
    Rule(
        ("to",),
        lambda f: f["kind"] == "cast",
        "{kind} writes the format it reads; it is for cast alone",
    ),
)


# ---- measured runs -----------------------------------------------------------------------------------

ANALYZE = (
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
        ("cluster", "set"),
        lambda f: f["format"] != "kineto",
        "a profiler trace is analysed by itself; leave it out",
    ),
    Rule(
        ("calibration",),
        lambda f: f["format"] == "optimus",
        "it holds constants of OptimusPrime runs, and this is {format}; leave it out",
    ),
    Rule(
        ("set",),
        lambda f: f["format"] == "optimus" or f["cluster"] is not None,
        CLUSTER_CHANGES.otherwise,
    ),
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
        lambda f: f["source"] != "optimus",
        "OptimusPrime runs take their GPU from the cluster; give --cluster instead",
    ),
    Rule(
        ("cluster",),
        lambda f: f["source"] in ("megatron", "optimus"),
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
)

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
