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

from stepcast.cli import words
from stepcast.cli.engine import ENGINES
from stepcast.cli.engine import HELP as ENGINE
from stepcast.cli.numbers import (
    BINARY,
    MOST_LAYERS,
    MOST_RUNS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    amount,
    count,
    currency,
    gpu_count,
    positive,
    price,
    rate,
    share,
)
from stepcast.cli.output import new_file
from stepcast.cli.place import PLACES
from stepcast.ir.limits import MICRO_BATCHES, STEPS
from stepcast.units import parse_count, parse_size_bytes

MOST_FURTHER_TOKENS = 64
ROW = re.compile(
    r"(?P<names>-\S+(?:, -\S+)*|[a-z_]+)(?: (?P<word>\S+))?(?P<often> \.\.\.)?(?:  +(?P<help>.+))?"
)
TYPES: Mapping[str, Callable[[str], Any]] = {
    name: kind
    for names, kind in (
        ("output trace html save to-file to-workload", new_file),
        ("gpus nodes dp tp cp ep pp expert-tp shard replicate gpus-per-server nics-per-server", gpu_count),
        ("ranks ranks-per-node ranks-per-thread", gpu_count),
        ("vpp repeat-layers", count(1, MOST_LAYERS)),
        ("wide-layers", count(0, MOST_LAYERS)),
        ("micro-batch global-batch", count(1, MOST_SEQUENCES, BINARY)),
        ("seq", count(1, MOST_TOKENS, BINARY)),
        ("lora-rank", count(0, MOST_TOKENS)),
        ("further-tokens", count(0, MOST_FURTHER_TOKENS)),
        ("deferred-gradients", count(0, MICRO_BATCHES.most)),
        ("accumulation", count(1, MICRO_BATCHES.most)),
        ("steps", count(1, STEPS.most)),
        ("runs", count(1, MOST_RUNS)),
        ("seed", count(0, 2**63)),
        ("tokens tokens-per-batch", positive(parse_count)),
        ("max-memory checkpoint-size", positive(parse_size_bytes)),
        ("bucket-mb expert-capacity expert-imbalance imbalance zero-gradients host-power", amount),
        ("memory-reserve", share),
        ("nvlink-gb-per-s nic-gb-per-s step-s", rate),
        ("jitter backward-factor", float),
        ("price", price),
        ("currency", currency),
        ("precision gradients", words.meaning(words.PRECISIONS)),
        ("sharding", words.sharding_word),
        ("recompute", words.recompute_text),
    )
    for name in names.split()
}

# Rows that several verbs have, with what argparse is to know of them; in a table their names suffice.
SHARED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "--html": ("--html FILE  write the answer as a page: one file, without a network", {}),
    "--json": ("--json  print one JSON object", {}),
    "--set": ("--set KEY=VALUE ...  change the cluster, as node.nics=4", {}),
    "--place": (
        "--place  racks that are one NVLink domain: whole nodes and groups in equal parts, or fill each in "
        "turn",
        {"choices": PLACES, "default": "even"},
    ),
    "--engine": (f"--engine  {ENGINE} (default: fast)", {"choices": ENGINES, "default": "fast"}),
    "--currency": ("--currency C  currency of --price, a symbol or a code (default $)", {"default": "$"}),
    "--background": (
        "--background JOB.toml  other jobs, or plain flows, that share the network meanwhile (by the fluid "
        "engine)",
        {},
    ),
}


def option_of(name: str) -> str:
    """How an argument is typed."""
    return f"--{name.replace('_', '-')}"


def add_options(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup", table: str, **further: Any
) -> None:
    """The rows of *table*; by name, *further*: a default, the choices in a tuple, another type, or in a
    mapping what argparse is to know.
    """
    for row in _rows(table):
        text, usual = SHARED.get(row, (row, {}))
        found = ROW.fullmatch(text)
        assert found, f"no option: {row!r}"
        names = found["names"].replace("[no-]", "").split(", ")
        known = {**usual, **_settings(further.pop(names[-1].lstrip("-").replace("-", "_"), {}))}
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
