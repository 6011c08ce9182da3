"""How far predictions lie from measurements: the figures in which every measurement set is summed up.

A set gives Measurements: measured and predicted seconds side by side with labels to group them by, and what
it had to leave out. ``scoreboard`` turns them into means, medians and the worst rows. Errors are fractions
of the measured time; a positive error is a prediction that is too slow.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np

from stepcast.forecast.prediction import Prediction
from stepcast.inputs.source import FormatError
from stepcast.ir.arrays import BoolArray, FloatArray, TextArray
from stepcast.ir.model import Model
from stepcast.ir.progress import report_progress

Item = TypeVar("Item")
Compared = TypeVar("Compared")
WORST = 10
# Measured times: launches decide the first, the hardware the last.
TIME_EDGES_S = (20e-6, 50e-6, 1e-3, 10e-3)
TIME_NAMES = ("under 20 us", "20 to 50 us", "50 us to 1 ms", "1 to 10 ms", "10 ms and more")


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One measurement and its prediction; *tags* group it, such as kind -> linear. *ends* are those of the
    prediction's band, where it has one.
    """

    name: str
    measured_s: float
    predicted_s: float
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    ends: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not (self.measured_s > 0 and self.predicted_s >= 0):
            raise ValueError(f"{self.name}: a measured time must be above zero and a prediction not negative")

    @property
    def error(self) -> float:
        """Signed, as a share of the measured time."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class MeasuredColumns:
    """Many rows, one array per field; names are made on demand, since only the worst are printed."""

    measured_s: FloatArray
    predicted_s: FloatArray
    tags: Mapping[str, TextArray]
    name: Callable[[int], str]
    # Low and high ends of the predictions' bands, not a number where a row has none; None: no row has.
    ends: tuple[FloatArray, FloatArray] | None = None

    def __post_init__(self) -> None:
        lengths = {self.measured_s.size, self.predicted_s.size, *(tag.size for tag in self.tags.values())}
        if len(lengths) > 1:
            raise ValueError("every column needs as many entries as there are measured times")
        if not (np.all(self.measured_s > 0) and np.all(self.predicted_s >= 0)):
            raise ValueError("measured times must be above zero and predictions not negative")

    def __len__(self) -> int:
        return int(self.measured_s.size)

    @property
    def error(self) -> FloatArray:
        """Signed, as a share of the measured time."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def inside(self) -> FloatArray:
        """1 where the measured time lies in the band, 0 where it does not, not a number without a band."""
        if self.ends is None:
            return np.full(len(self), np.nan)
        low_s, high_s = self.ends
        within = (self.measured_s >= low_s) & (self.measured_s <= high_s)
        return np.where(np.isnan(low_s), np.nan, within.astype(np.float64))

    def row(self, at: int) -> ScoredRow:
        tags = {name: str(labels[at]) for name, labels in self.tags.items() if labels[at]}
        return ScoredRow(self.name(at), float(self.measured_s[at]), float(self.predicted_s[at]), tags)


@dataclass(frozen=True, slots=True)
class Measurements:
    """A measurement set with its predictions."""

    columns: MeasuredColumns
    skipped: Mapping[str, int]  # reason -> rows
    selections: Mapping[str, BoolArray] = field(default_factory=dict)  # rows that a claim is about
    figures: Mapping[str, float] = field(default_factory=dict)  # further figures of the set, fractions
    notes: tuple[str, ...] = ()
    orders: Mapping[str, Sequence[str]] = field(default_factory=dict)  # labels of a tag in the order to show
    details: tuple[str, ...] = ()  # tags that tell about single rows and group none
    unit: str = "s"  # or bytes: what is measured and predicted, whatever the columns' names say


@dataclass(frozen=True, slots=True)
class Summary:
    """The errors of some rows, as fractions."""

    rows: int
    mean_abs_error: float
    median_abs_error: float
    p90_abs_error: float
    worst_abs_error: float
    mean_error: float  # signed: above zero where predictions are too slow
    time_weighted_error: float  # sum of the differences without their signs over the sum of the times
    coverage: float | None = None  # of the rows with a band, the share measured inside it


@dataclass(frozen=True, slots=True)
class Scoreboard:
    """One measurement set summed up."""

    summary: Summary | None  # None where no row could be compared
    skipped: Mapping[str, int]
    groups: Mapping[str, Mapping[str, Summary]]  # grouping -> label -> errors
    selections: Mapping[str, Summary]
    worst: tuple[ScoredRow, ...]
    figures: Mapping[str, float]
    notes: tuple[str, ...]
    unit: str = "s"


def compare_each(
    items: Iterable[Item], compare: Callable[[Item], Compared], where: Callable[[Item], str] | None = None
) -> tuple[list[Compared], Counter[str]]:
    """Compare every item with its prediction, and count why the others could not be compared.

    *compare* raises a ValueError (or a KeyError for a column that is not there) for an item that it has no
    prediction for; *where* names the file that the reason is put after.
    """
    compared: list[Compared] = []
    skipped: Counter[str] = Counter()
    for item in report_progress(items):
        try:
            compared.append(compare(item))
        except (ValueError, KeyError) as error:
            reason = error.message if isinstance(error, FormatError) else str(error)
            skipped[f"{where(item)}: {reason}" if where else reason] += 1
    return compared, skipped


def columns(rows: Sequence[ScoredRow]) -> MeasuredColumns:
    """*rows* as columns; a tag that a row lacks is left blank there."""
    tags = dict.fromkeys(tag for row in rows for tag in row.tags)
    return MeasuredColumns(
        np.array([row.measured_s for row in rows], dtype=np.float64),
        np.array([row.predicted_s for row in rows], dtype=np.float64),
        {tag: np.array([row.tags.get(tag, "") for row in rows], dtype=np.str_) for tag in tags},
        lambda at: rows[at].name,
        _ends(rows),
    )


def _ends(rows: Sequence[ScoredRow]) -> tuple[FloatArray, FloatArray] | None:
    if all(row.ends is None for row in rows):
        return None
    table = np.array([row.ends or (np.nan, np.nan) for row in rows], dtype=np.float64)
    return table[:, 0], table[:, 1]


def summary(measured_s: FloatArray, predicted_s: FloatArray, inside: FloatArray | None = None) -> Summary | None:
    """None where there are no rows."""
    if not measured_s.size:
        return None
    signed = predicted_s / measured_s - 1.0
    error = np.abs(signed)
    return Summary(
        rows=int(error.size),
        mean_abs_error=float(np.mean(error)),
        median_abs_error=float(np.median(error)),
        p90_abs_error=float(np.quantile(error, 0.9)),
        worst_abs_error=float(np.max(error)),
        mean_error=float(np.mean(signed)),
        time_weighted_error=float(np.sum(np.abs(predicted_s - measured_s)) / np.sum(measured_s)),
        coverage=None if inside is None or np.isnan(inside).all() else float(np.nanmean(inside)),
    )


def error_figures(what: str, pairs: Sequence[tuple[float, float]], *names: str) -> Iterator[tuple[str, float]]:
    """The fields *names* of the Summary of measured and predicted *pairs*, told as figures of *what*."""
    one = summary(*(np.array([pair[side] for pair in pairs], dtype=np.float64) for side in (0, 1)))
    if one is not None:
        yield from ((f"{what}: {name}", getattr(one, name)) for name in names)


def _summed(table: MeasuredColumns, mask: BoolArray) -> Summary | None:
    return summary(table.measured_s[mask], table.predicted_s[mask], table.inside[mask])


def scoreboard(found: Measurements) -> Scoreboard:
    table = found.columns
    order = np.argsort(-np.abs(table.error), kind="stable")[:WORST]
    groups = {
        tag: _grouped(table, labels, found.orders.get(tag))
        for tag, labels in table.tags.items()
        if tag not in found.details
    }
    if found.unit == "s":
        groups["time"] = _grouped(table, time_labels(table.measured_s), TIME_NAMES)
    return Scoreboard(
        summary=_summed(table, np.ones(len(table), dtype=np.bool_)),
        skipped=found.skipped,
        groups={tag: group for tag, group in groups.items() if len(group) > 1},
        selections=_selected(table, found.selections),
        worst=tuple(table.row(int(at)) for at in order),
        figures=found.figures,
        notes=found.notes,
        unit=found.unit,
    )


def time_labels(measured_s: FloatArray) -> TextArray:
    return np.array(TIME_NAMES)[np.digitize(measured_s, TIME_EDGES_S)]


def _selected(table: MeasuredColumns, selections: Mapping[str, BoolArray]) -> dict[str, Summary]:
    found = {name: _summed(table, mask) for name, mask in selections.items()}
    return {name: one for name, one in found.items() if one is not None}


def _grouped(table: MeasuredColumns, labels: TextArray, order: Sequence[str] | None = None) -> dict[str, Summary]:
    """By label, in *order* or sorted; rows without a label are in no group."""
    found = {}
    names = sorted(map(str, np.unique(labels)), key=_natural) if order is None else order
    for name in names:
        mask = labels == name
        one = _summed(table, mask)
        if name and one is not None:
            found[name] = one
    return found


def _natural(label: str) -> list[tuple[int, int, str]]:
    """Numbers inside labels by their value: 2 ranks before 16 ranks."""
    parts = re.split(r"(\d+)", label)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


# The phases of a predicted step on one GPU, as events on its own clock would tell them apart.

PHASES = ("forward", "backward", "optimizer")


def phases_s(prediction: Prediction) -> dict[str, float]:
    """Seconds of forward, backward and update; each begins when the last kernel before it ends."""
    timeline = prediction.timeline
    computes = np.array([lane.name == "compute" for lane in timeline.lanes], dtype=bool)[timeline.lane_of]
    ends_s = timeline.start_s + timeline.duration_s
    ends = []
    for letter in ("F", "B"):
        slots = [slot.get("slot", "").startswith(letter) for slot in timeline.details]
        found = computes & np.array([*slots, False], dtype=bool)[timeline.detail_of]
        ends.append(float(np.max(ends_s[found], initial=0.0)))
    bounds = (0.0, *ends, prediction.step_s)
    spans = (after - before for before, after in pairwise(bounds))
    return dict(zip(PHASES, spans, strict=True))


# Weights that a benchmark of a few steps never gives a gradient.


def unseen_share(model: Model, tokens: int) -> float:
    """Of all weights, the rows of an embedding whose tokens are not among *tokens* drawn evenly, again and
    again the same; a tied one has gradients as the head.
    """
    if model.tied:
        return 0.0
    rows = model.vocab * (1.0 - 1.0 / model.vocab) ** tokens
    return round(rows * model.hidden / model.parameters, 3)
