"""Intervals that are learnt from other sources: how many rows of a source that was left out lie inside them."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from stepcast.ir.arrays import FloatArray, TextArray
from stepcast.ir.step import LEVEL
from stepcast.validate.scoreboard import MeasuredColumns

FEWEST_OTHERS = 12
"""Rows of other sources that an interval is learnt from."""
UNCLAIMED = "left out of claims"  # the label of rows that no claim is about


def learn_interval(logs: FloatArray, source: TextArray) -> tuple[float, float, float]:
    """Return low end, middle and high end of the logarithms of measured over predicted.

    The ends are as far from the middle as the 5 and 95 % quantiles of how far rows are from the middle of the other
    sources, corrected for their number so that they hold the next row with 90 % probability (jackknife conformal
    prediction, one source at a time).
    """
    middles = {name: np.median(logs[source != name] if (source != name).any() else logs) for name in np.unique(source)}
    away = logs - np.array([middles[name] for name in source])
    low, high = np.quantile(away, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), method="weibull")
    middle = float(np.median(logs))
    return middle + float(low), middle, middle + float(high)


def family_of(kind: str) -> str:
    """Return dense, experts or one GPU, whatever the generation: sources are too few to tell generations apart."""
    return kind.split(" on ")[0]


def interval_figures(table: MeasuredColumns) -> Iterator[tuple[str, float]]:
    """Yield how many rows are inside intervals learnt from the other sources' rows of their family, and their width."""
    if "kind" not in table.tags:  # no row could be compared
        return
    claimed = table.tags[UNCLAIMED] == "" if UNCLAIMED in table.tags else np.full(len(table.measured_s), True)
    kind, source = table.tags["kind"][claimed], table.tags["source"][claimed]
    logs = np.log(table.measured_s / table.predicted_s)[claimed]
    family = np.array([family_of(name) for name in kind.tolist()])
    inside: dict[str, list[bool]] = defaultdict(list)
    widths: dict[str, list[float]] = defaultdict(list)
    for name, left_out in sorted(set(zip(kind.tolist(), source.tolist(), strict=True))):
        others, own = (family == family_of(name)) & (source != left_out), (kind == name) & (source == left_out)
        if others.sum() < FEWEST_OTHERS:
            continue
        low, _, high = learn_interval(logs[others], source[others])
        for label in ("all", name):
            inside[label] += ((logs[own] >= min(low, 0.0)) & (logs[own] <= max(high, 0.0))).tolist()
            widths[label] += [float(np.exp(high) - np.exp(low))] * int(own.sum())
    for label, rows in inside.items():
        yield f"inside the 90 % interval of other sources, {label}", float(np.mean(rows))
        yield f"median width of that interval, {label}", float(np.median(widths[label]))
