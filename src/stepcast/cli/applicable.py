"""Options given in vain: one policy for those that have no effect.

The policy. An option that was given, with another value than its default, and cannot change the answer is

- an error, exit status 2, where the user surely meant something else: the message says why and what to do;
- a note on standard error, where the answer is still the one that was asked for: the option states what
  is so anyway, or asks for text beside ``--json``.

Each verb calls ``check_applicable`` once it knows what it works on; ``rules`` says what each option needs.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from stepcast.cli.options import option_of
from stepcast.cli.output import print_notes
from stepcast.cli.rules import (
    ANALYZE,
    CALIBRATE,
    COLLECTIVE,
    EDITS,
    OP,
    REPLAY,
    VALIDATE,
    Facts,
    Rule,
)
from stepcast.cli.rules_steps import PLAN, PREDICT, SIMULATE, STRATEGY

LISTS = ("overlap", "recompute")  # options whose words have an effect each
RULES: Mapping[str, tuple[Rule, ...]] = {
    "show": (EDITS,),
    "convert": (EDITS,),
    "predict": PREDICT,
    "run": STRATEGY,
    "network": STRATEGY,
    "plan": PLAN,
    "simulate": SIMULATE,
    "analyze": ANALYZE,
    "replay": REPLAY,
    "collective": COLLECTIVE,
    "op": OP,
    "calibrate": CALIBRATE,
    "validate": VALIDATE,
}


def check_applicable(args: argparse.Namespace, **found: Any) -> None:
    """A ValueError for the first option given in vain; notes for those that do no harm."""
    facts = {**vars(args), **found}
    vain = list(_in_vain(args, facts))
    for option, rule in vain:
        if not rule.harmless:
            raise ValueError(_message(option, rule, facts))
    if not getattr(args, "quiet", False):  # as of runs that are only tried
        print_notes(_message(option, rule, facts) for option, rule in vain)


def left_of_file(args: argparse.Namespace, **found: Any) -> dict[str, Any]:
    """Return the options of a file that have no effect, each with what is left of it: the words of a list
    that have one, else its default. What a file asks for in vain is no mistake of the user's.
    """
    facts, left = {**vars(args), **found}, {}
    for option in sorted({option for rule in RULES[args.verb] for option in rule.options} - args.given):
        rules = [rule for rule in RULES[args.verb] if option in rule.options and not rule.harmless]
        usual = args.own.get_default(option)
        if getattr(args, option, usual) == usual or all(rule.needs(facts) for rule in rules):
            continue
        kind, colon, words = str(getattr(args, option)).rpartition(":")
        applying = [
            word
            for word in words.split(",")
            if all(rule.needs({**facts, option: f"{kind}{colon}{word}"}) for rule in rules)
        ]
        words = f"{kind}{colon}{','.join(applying)}" if applying else "none"
        left[option] = words if option in LISTS else usual
    return left


def _in_vain(args: argparse.Namespace, facts: Facts) -> Iterator[tuple[str, Rule]]:
    for rule in RULES[args.verb]:
        for option in rule.options:
            if option in args.given and not rule.needs(facts):
                yield option, rule


def _message(option: str, rule: Rule, facts: Facts) -> str:
    return f"{option_of(option)} has no effect: {rule.otherwise.format_map(facts)}"
