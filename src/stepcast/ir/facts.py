"""The facts of answers, typed: text, pages and JSON are made of them.

One dictionary for each answer, in the words of the JSON contract. Keys that only some callers add are marked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypedDict

from stepcast.units import format_percent

Fact = Any
"""The value of one fact: a number, a text, or facts inside facts, as JSON has them."""
Facts = Mapping[str, Fact]
"""The facts of an answer or of one of its rows, by the names of the JSON contract."""
FactDict = dict[str, Fact]
"""Facts that are being collected."""


def pick(source: object, spec: str) -> FactDict:
    """Return attributes of *source* as facts, such as ``gpus time_s=seconds gpu=cluster.gpu.name``."""
    pairs = (word.partition("=") for word in spec.split())
    return {name: attrgetter(path or name)(source) for name, _, path in pairs}


class OperatorFacts(TypedDict):
    """All runs of one operator in a step, on an average GPU."""

    name: str
    kind: str
    dtype: str
    count: float
    flops: float
    bytes: float
    seconds: float
    bound: str


class RooflineFacts(TypedDict):
    gpu: str
    dtype: str
    peak_flops: float
    bytes_per_s: float
    operators: list[OperatorFacts]


class ChangeFacts(TypedDict):
    """The same step with one choice made otherwise."""

    change: str
    step_s: float
    memory_bytes: float | None
    fits: bool
    command: str


class PointFacts(TypedDict):
    """A measurement and its prediction, in seconds or bytes."""

    name: str
    measured: float
    predicted: float


class IntervalFacts(NamedTuple):
    """The interval that holds the true value, *level* of the time where that is known."""

    low_s: float
    high_s: float
    level: float | None

    @property
    def words(self) -> str:
        """Return the name of the band, such as ``90 % interval``."""
        return "interval" if self.level is None else f"{format_percent(self.level, 0)} interval"


def read_interval(facts: Facts) -> IntervalFacts:
    """Return the band of a step, wherever its facts come from: the one place that reads it."""
    band = facts.get("uncertainty") or facts
    return IntervalFacts(float(band["low_s"]), float(band["high_s"]), band.get("level"))


# Answers that cannot be true: numbers carry their units in their names, so that one place can look at all.

LONGEST_S = 1e9  # thirty years; no cluster is used as long
SHARES = ("mfu", "efficiency")
REMEDY = "look for a nonsense value in the input"


def find_doubts(facts: Mapping[str, object]) -> list[str]:
    """Return warnings of values in an answer that cannot be true; raise a ValueError for a value that is no number."""
    doubts, timed = [], False
    for name, seconds, value in _numbers(facts, "", False):
        if not math.isfinite(value):
            raise ValueError(f"{name} comes out as {value}, which is no answer; {REMEDY}")
        if name in SHARES and value > 1:
            doubts.append(f"{name} is {value:.3g}, and no GPU does more than its peak: {REMEDY}")
        if seconds and value > LONGEST_S and not timed:  # its parts are as long
            timed = True
            doubts.append(f"{name} is {value:.3g} s, longer than thirty years: {REMEDY}")
    return list(dict.fromkeys(doubts))


def _numbers(value: object, name: str, seconds: bool) -> Iterator[tuple[str, bool, float]]:
    """Yield every number within *value*, its name, and True if it is in seconds, as all within ``breakdown_s``."""
    if isinstance(value, float):
        yield name, seconds, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            timed = str(key).endswith("_s") and not str(key).endswith("per_s")
            yield from _numbers(item, str(key), seconds or timed)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _numbers(item, name, seconds)
