"""Rules for choices that have no effect, as ``data/rules.toml`` states them.

A choice that differs from its default and cannot change the answer is

- an error if the user surely meant something else: the message says why and what to do;
- a note if the answer is still the one that was asked for.
"""

from collections.abc import Collection
from functools import cache

from stepcast.inputs.expression import Filter
from stepcast.inputs.source import DATA, read_toml
from stepcast.ir.dataclass import dataclass
from stepcast.ir.facts import Facts
from stepcast.ir.schedules import SCHEDULES, Pairs
from stepcast.questions.choices import option_of
from stepcast.questions.question import MODULES

"""The choices by name, and facts about the model, the cluster or the input files."""
PIPELINED = tuple(str(kind) for kind, facts in SCHEDULES.items() if not facts.alone)
PAIRED = tuple(str(kind) for kind, facts in SCHEDULES.items() if facts.pairs is Pairs.OWN)


@dataclass(frozen=True, slots=True)
class Rule:
    """Options that have an effect only where a condition holds; *otherwise* is why there is none and what to do."""

    options: tuple[str, ...]
    condition: str
    otherwise: str
    harmless: bool = False

    def holds(self, option: str, facts: Facts) -> bool:
        """Return True if *option* has an effect."""
        return _read_condition(self.condition)({**facts, **_derive(facts), "option": option})


@cache
def _read_condition(text: str) -> Filter:
    return Filter(text)


def _derive(facts: Facts) -> dict[str, object]:
    """Return the lists of words in choices, and the schedules of pipelines."""
    kind, _, modules = (facts.get("recompute") or "").partition(":")
    words = facts.get("overlap")
    return {
        "overlapped": words.split(",") if isinstance(words, str) else (),
        "recomputed": set(modules.split(",")) & set(MODULES) if kind == "selective" else set(),
        "pipelined": PIPELINED,
        "paired": PAIRED,
    }


_load_tables = cache(read_toml)


@cache
def rules_of(name: str) -> tuple[Rule, ...]:
    """Return the rules of a verb, and the shared ones that it uses."""
    table = _load_tables(str(DATA / "rules.toml"))[name]
    own = [
        Rule(tuple(options.split()), condition, otherwise, harmless)
        for key, harmless in (("rules", False), ("notes", True))
        for options, condition, otherwise in table.get(key, ())
    ]
    return (*own, *(rule for shared in table.get("uses", ()) for rule in rules_of(shared)))


def check_rules(name: str, given: Collection[str], facts: Facts) -> tuple[str, ...]:
    """Raise a ValueError for the first option of a verb without effect; return notes for the harmless ones."""
    idle = [
        (option, rule)
        for rule in rules_of(name)
        for option in rule.options
        if option in given and not rule.holds(option, facts)
    ]
    for option, rule in idle:
        if not rule.harmless:
            raise ValueError(_message(option, rule, facts))
    return tuple(_message(option, rule, facts) for option, rule in idle)


def _message(option: str, rule: Rule, facts: Facts) -> str:
    denied = f"no-{option}" if option == "sequence_parallel" and facts[option] is False else option
    reason = rule.otherwise.format_map({"paired_list": " or ".join(PAIRED), **facts})
    return f"{option_of(denied)} has no effect: {reason}"
