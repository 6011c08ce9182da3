"""Shared parts of all analyses: the base of their results, slow ranks and medians."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import msgspec
import numpy as np

from stepcast.hardware.catalog import load_data
from stepcast.ir.arrays import BoolArray
from stepcast.ir.timeline import Timeline
from stepcast.ir.types import Fact, FactDict
from stepcast.views.answer import Answer


@cache
def load_rules() -> FactDict:
    """Return what analyses look for (``data/analysis.toml``), by topic."""
    return load_data("analysis")


SLOW_FACTOR = 1.1  # a rank that computes this many times as long as the median of the others is a straggler


class AnalysisResult(Answer, msgspec.Struct, frozen=True, kw_only=True):
    """The result of an analysis; its fields are the keys of the JSON, and ``result["key"]`` gives plain values."""

    format: str | msgspec.UnsetType = msgspec.UNSET  # of the files that were read

    def __getitem__(self, key: str) -> Fact:
        return self.facts()[key]

    def facts(self) -> FactDict:
        """Return the result as plain values with the keys of its JSON."""
        facts: FactDict = msgspec.to_builtins(self)
        return facts


def find_slow(compute_s: Mapping[int, float]) -> list[tuple[int, float, float]]:
    """Return (rank, factor, seconds beyond the median of the other ranks) of each straggler, the slowest first."""
    slow = []
    for rank, seconds in compute_s.items():
        others = [other_s for other, other_s in compute_s.items() if other != rank]
        usual_s = median_of_known(others) or 0.0
        if usual_s and seconds >= SLOW_FACTOR * usual_s:
            slow.append((rank, seconds / usual_s, seconds - usual_s))
    return sorted(slow, key=lambda straggler: -straggler[1])


def median_of_known(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    known = sorted(value for value in values if value is not None)
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else None


def percentile_of(values: Sequence[float], share: float) -> float:
    """Return what ``np.percentile`` does, which would import numpy.ma."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below, above = ordered[int(place)], ordered[min(int(place) + 1, len(values) - 1)]
    return below + (place - int(place)) * (above - below)


def list_ranks(ranks: Iterable[int]) -> str:
    """Return the first eight ranks as text."""
    listed = list(ranks)
    return ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")


def longest_names(timeline: Timeline, rows: BoolArray, most: int) -> list[tuple[str, int, float]]:
    """Return the names of *rows* with the longest total time, the rows of each and their seconds."""
    names, count = timeline.name_of[rows], len(timeline.names)
    seconds = np.bincount(names, weights=timeline.duration_s[rows], minlength=count)
    counts = np.bincount(names, minlength=count)
    order = np.argsort(-seconds, kind="stable")[:most].tolist()
    return [(timeline.names[name], int(counts[name]), float(seconds[name])) for name in order if counts[name]]
