"""Answers that cannot be: numbers carry their units in their names, so that one place can look at all."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LONGEST_S = 1e9  # thirty years; no cluster is used as long
SHARES = ("mfu", "efficiency")
REMEDY = "look for a nonsense value in the input"


def doubts(facts: Mapping[str, Any]) -> list[str]:
    """What in an answer nobody should believe, as warnings; a ValueError for what is no number at all."""
    found, timed = [], False
    for name, seconds, value in _numbers(facts, "", False):
        if not math.isfinite(value):
            raise ValueError(f"{name} comes out as {value}, which is no answer; {REMEDY}")
        if name in SHARES and value > 1:
            found.append(f"{name} is {value:.3g}, and no GPU does more than its peak: {REMEDY}")
        if seconds and value > LONGEST_S and not timed:  # its parts are as long
            timed = True
            found.append(f"{name} is {value:.3g} s, longer than thirty years: {REMEDY}")
    return list(dict.fromkeys(found))


def _numbers(value: Any, name: str, seconds: bool) -> Iterator[tuple[str, bool, float]]:
    """Every number within *value*, its name, and whether it is in seconds, as all within ``breakdown_s``."""
    if isinstance(value, float):
        yield name, seconds, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            timed = str(key).endswith("_s") and not str(key).endswith("per_s")
            yield from _numbers(each, str(key), seconds or timed)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for each in value:
            yield from _numbers(each, name, seconds)
