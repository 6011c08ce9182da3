"""Residuals: what frameworks take beyond their predictions, fitted to published rows, and their worth.

A residual belongs to one framework on one generation of GPUs, with or without experts, and is the median of
measured over predicted there. Scored on the rows it was fitted to it flatters; ``left_out_s`` fits those of
each source without it, so that a framework known from one source alone has no residual there.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from stepcast.frameworks.catalog import load_profile
from stepcast.ir.arrays import BoolArray, FloatArray, TextArray
from stepcast.ir.band import LEVEL, Residual
from stepcast.validate.scoreboard import MeasuredColumns, error_figures

FEWEST_OTHERS = 12
"""Rows of other sources that an interval is learnt from."""
FEWEST = 5
"""Rows of a framework on a generation that a median is taken of."""
WIDEST = 0.25
"""Rows that spread by more have no constant in common."""
Place = tuple[str, str]
"""Profile, and kind of run: "dense on hopper"."""


def fit_residuals(table: MeasuredColumns, rows: BoolArray | None = None) -> dict[Place, Residual]:
    """Return a residual for each profile and kind of which *rows* (or all) hold enough."""
    ratio, source = table.measured_s / table.predicted_s, table.tags["source"]
    known = np.ones(len(table), dtype=np.bool_) if rows is None else rows
    residuals = {}
    for place in dict.fromkeys(_places(table)):
        mask = known & _at(table, place)
        if mask.sum() < FEWEST:
            continue
        factor = round(float(np.exp(np.median(np.log(ratio[mask])))), 3)
        spread = round(float(np.median(np.abs(ratio[mask] / factor - 1.0))), 3)
        if spread <= WIDEST:
            model, _, generation = place[1].partition(" on ")
            sources = len(set(source[mask].tolist()))
            residuals[place] = Residual(generation, model == "experts", factor, int(mask.sum()), sources, spread)
    return residuals


def shipped_residuals(table: MeasuredColumns) -> dict[Place, Residual]:
    """Return the residuals that the profiles of these rows hold."""
    residuals = {}
    for place in dict.fromkeys(_places(table)):
        model, _, generation = place[1].partition(" on ")
        residual = load_profile(place[0]).residual(generation, model == "experts")
        if residual is not None:
            residuals[place] = residual
    return residuals


def correct_s(table: MeasuredColumns, residuals: dict[Place, Residual]) -> FloatArray:
    """Return predictions with the residuals of their own framework and generation."""
    factors = [residuals[place].factor if place in residuals else 1.0 for place in _places(table)]
    corrected: FloatArray = table.predicted_s * np.array(factors)
    return corrected


def leave_out_s(table: MeasuredColumns) -> FloatArray:
    """Return predictions with residuals that were fitted without any row of the same source."""
    predicted_s = table.predicted_s.copy()
    for source in sorted(set(table.tags["source"].tolist())):
        own = table.tags["source"] == source
        predicted_s[own] = correct_s(table, fit_residuals(table, ~own))[own]
    return predicted_s


def residual_figures(table: MeasuredColumns) -> Iterator[tuple[str, float]]:
    """Yield errors with the shipped residuals, and with each source's rows left out of them."""
    if not len(table):
        return
    ways = {
        "with --residual": correct_s(table, shipped_residuals(table)),
        "with residuals fitted without the row's source": leave_out_s(table),
    }
    for name, predicted_s in ways.items():
        pairs = list(zip(table.measured_s.tolist(), predicted_s.tolist(), strict=True))
        yield from error_figures(name, pairs, "mean_abs_error", "median_abs_error", "mean_error")


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


def interval_figures(table: MeasuredColumns) -> Iterator[tuple[str, float]]:
    """Yield how many rows are inside intervals learnt from the other sources' rows of their kind, and their width."""
    kind, source = table.tags["kind"], table.tags["source"]
    logs = np.log(table.measured_s / table.predicted_s)
    inside: dict[str, list[bool]] = defaultdict(list)
    widths: dict[str, list[float]] = defaultdict(list)
    for name, left_out in sorted(set(zip(kind.tolist(), source.tolist(), strict=True))):
        others, own = (kind == name) & (source != left_out), (kind == name) & (source == left_out)
        if others.sum() < FEWEST_OTHERS:
            continue
        low, _, high = learn_interval(logs[others], source[others])
        for label in ("all", name):
            inside[label] += ((logs[own] >= min(low, 0.0)) & (logs[own] <= max(high, 0.0))).tolist()
            widths[label] += [float(np.exp(high) - np.exp(low))] * int(own.sum())
    for label, rows in inside.items():
        yield f"inside the 90 % interval of other sources, {label}", float(np.mean(rows))
        yield f"width of that interval, {label}", float(np.mean(widths[label]))


def _places(table: MeasuredColumns) -> Sequence[Place]:
    return list(zip(table.tags["profile"].tolist(), table.tags["kind"].tolist(), strict=True))


def _at(table: MeasuredColumns, place: Place) -> BoolArray:
    mask: BoolArray = (table.tags["profile"] == place[0]) & (table.tags["kind"] == place[1])
    return mask
