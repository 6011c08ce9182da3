"""Options of verbs as tables that read like their help.

A row is an option, the word for its value, and, behind two spaces, what it does; indented lines go on with
that. ``--[no-]NAME`` may be denied, ``WORD ...`` given several times, and an option without a word is a
switch. Values of one name are read alike in every verb, as ``TYPES`` says.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from textwrap import dedent
from typing import Any

from stepcast.cli.output import new_file
from stepcast.ir.limits import STEPS
from stepcast.questions.choices import option_of as option_of
from stepcast.questions.numbers import MOST_LAYERS, MOST_RUNS, amount, count, gpu_count, positive, rate, share
from stepcast.questions.question import CHOICES, DEFAULTS
from stepcast.units import parse_count, parse_size_bytes

ROW = re.compile(r"(?P<names>-\S+(?:, -\S+)*|[a-z_]+)(?: (?P<word>\S+))?(?P<often> \.\.\.)?(?:  +(?P<help>.+))?")
TYPES: Mapping[str, Callable[[str], Any]] = {
    **{name.replace("_", "-"): choice.read for name, choice in CHOICES.items() if choice.read is not str},
    **{
        name: kind
        for names, kind in (
            ("output trace html save to-file to-workload", new_file),
            ("gpus-per-server nics-per-server ranks ranks-per-node ranks-per-thread", gpu_count),
            ("repeat-layers", count(1, MOST_LAYERS)),
            ("steps", count(1, STEPS.most)),
            ("runs", count(1, MOST_RUNS)),
            ("seed", count(0, 2**63)),
            ("tokens-per-batch", positive(parse_count)),
            ("max-memory checkpoint-size", positive(parse_size_bytes)),
            ("imbalance host-power", amount),
            ("memory-reserve", share),
            ("nvlink-gb-per-s nic-gb-per-s step-s", rate),
            ("jitter backward-factor", float),
        )
        for name in names.split()
    },
}

# Rows that several verbs have; in a table their names suffice, as do those of the choices of a question.
SHARED: Mapping[str, str] = {
    "--html": "--html FILE  write the answer as a page: one file, without a network",
    "--json": "--json  print one JSON object",
}


def add_choice(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", name: str) -> None:
    """Add the option of a choice of a question."""
    choice, default = CHOICES[name], DEFAULTS[name]
    known: dict[str, Any] = {"help": choice.help or None, "default": default}
    if choice.deniable:
        known["action"] = argparse.BooleanOptionalAction
    elif default is False:
        known["action"] = "store_true"
    else:
        known |= {"metavar": choice.metavar} if choice.metavar else {}
        known |= {"choices": choice.values} if choice.values else {}
        known |= {"type": choice.read} if choice.read is not str else {}
        known |= {"action": "append", "default": []} if default == () else {}
    parser.add_argument(option_of(name), **known)


def add_options(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", table: str, **further: Any) -> None:
    """The rows of *table*; by name, *further*: a default, the choices in a tuple, another type, or in a
    mapping what argparse is to know.
    """
    for row in _rows(table):
        if row not in SHARED and row[2:].replace("-", "_") in CHOICES.keys() - further.keys():
            add_choice(parser, row[2:].replace("-", "_"))
            continue
        found = ROW.fullmatch(SHARED.get(row, row))
        assert found, f"no option: {row!r}"
        names = found["names"].replace("[no-]", "").split(", ")
        known = _settings(further.pop(names[-1].lstrip("-").replace("-", "_"), {}))
        if found["word"]:
            known.setdefault("metavar", found["word"])
        if found["often"]:
            known |= {"action": "append", "default": []}
        elif "[no-]" in found["names"]:
            known["action"] = argparse.BooleanOptionalAction
        elif names[-1][2:] in TYPES and "action" not in known:
            known.setdefault("type", TYPES[names[-1][2:]])
        elif names[0].startswith("-") and not known:
            known["action"] = "store_true"
        parser.add_argument(*names, help=(found["help"] or "").replace("%", "%%"), **known)
    assert not further, f"no such options: {', '.join(further)}"


def _settings(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    name = "type" if callable(given) else "choices" if isinstance(given, tuple | list) else "default"
    return {name: given}


def _rows(table: str) -> Iterator[str]:
    """Each row on one line."""
    row = ""
    for line in dedent(table).strip().splitlines():
        if line.startswith(" "):
            row = f"{row}{' ' if '  ' in row else '  '}{line.strip()}"
        else:
            if row:
                yield row
            row = line
    yield row
