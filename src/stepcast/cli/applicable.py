"""Options of a verb that have no effect: an error, or a note where the answer is the one asked for.

Each verb calls ``check_applicable`` once it knows what it works on; ``questions.rules`` holds the policy.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from stepcast.cli.output import print_notes
from stepcast.cli.rules import (
    ANALYZE,
    CALIBRATE,
    COLLECTIVE,
    EDITS,
    OP,
    REPLAY,
    VALIDATE,
)
from stepcast.cli.rules_steps import PREDICT, SIMULATE
from stepcast.questions.rules import Rule, check_rules

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
