"""Intervals that are learnt from other sources: how many rows of a source that was left out lie inside them."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from stepcast.ir.arrays import BoolArray, FloatArray, TextArray
from stepcast.ir.band import LEVEL
from stepcast.validate.scoreboard import MeasuredColumns

FEWEST_OTHERS = 12
"""Rows of other sources that an interval is learnt from."""
FEWEST_SOURCES = 3
"""Sources of a kind that say more of a source that nobody has seen than those of all generations of GPUs do."""


def learn_interval(logs: FloatArray, source: TextArray) -> tuple[float, float, float]:
    """Return low end, middle and high end of the logarithms of measured over predicted.

    The ends are the 5 and 95 % quantiles, as many times farther from the middle as nine in ten rows of sources need
    that are left out one at a time (split conformal prediction).
    """

    def quantiles(rows: BoolArray) -> tuple[float, float, float]:
        low, middle, high = np.quantile(logs[rows], ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2), method="weibull")
        return float(low), float(middle), float(high)

    scales: list[float] = []
    for name in np.unique(source):
        own: BoolArray = source == name
        if (~own).sum() >= FEWEST_OTHERS:
            low, middle, high = quantiles(~own)
            side = np.where(logs[own] > middle, high, low)
            scales += ((logs[own] - middle) / (side - middle)).tolist()
    place = min(len(scales), int(np.ceil(LEVEL * (len(scales) + 1)))) - 1
    factor = max(1.0, sorted(scales)[place]) if len(scales) >= FEWEST_OTHERS else 1.0
    low, middle, high = quantiles(np.ones(len(logs), dtype=np.bool_))
    return middle + factor * (low - middle), middle, middle + factor * (high - middle)


def learn_kind(logs: FloatArray, source: TextArray, own: BoolArray, family: BoolArray) -> tuple[float, float, float]:
    """Return the ends of a kind's rows (*own*), at least those of its *family* where few sources have such rows."""
    low, middle, high = learn_interval(logs[own], source[own])
    if len(np.unique(source[own])) < FEWEST_SOURCES:
        lower, _, higher = learn_interval(logs[family], source[family])
        low, high = min(low, lower), max(high, higher)
    return low, middle, high


def family_of(kind: str) -> str:
    """Return dense, experts or one GPU, whatever the generation."""
    return kind.split(" on ")[0]


def interval_figures(table: MeasuredColumns) -> Iterator[tuple[str, float]]:
    """Yield how many rows are inside intervals learnt from the other sources' rows of their kind, and their width."""
    if "kind" not in table.tags:  # no row could be compared
        return
    kind, source = table.tags["kind"], table.tags["source"]
    logs, family = np.log(table.measured_s / table.predicted_s), np.array([family_of(name) for name in kind.tolist()])
    inside: dict[str, list[bool]] = defaultdict(list)
    widths: dict[str, list[float]] = defaultdict(list)
    for name, left_out in sorted(set(zip(kind.tolist(), source.tolist(), strict=True))):
        others, own = (kind == name) & (source != left_out), (kind == name) & (source == left_out)
        if others.sum() < FEWEST_OTHERS:
            continue
        low, _, high = learn_kind(logs, source, others, (family == family_of(name)) & (source != left_out))
        for label in ("all", name):
            inside[label] += ((logs[own] >= min(low, 0.0)) & (logs[own] <= max(high, 0.0))).tolist()
            widths[label] += [float(np.exp(high) - np.exp(low))] * int(own.sum())
    for label, rows in inside.items():
        yield f"inside the 90 % interval of other sources, {label}", float(np.mean(rows))
        yield f"width of that interval, {label}", float(np.mean(widths[label]))
