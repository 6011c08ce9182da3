"""The errors of predictions: the figures in which every measurement set is summed up, and the table of sets.

A set gives Measurements: measured and predicted seconds side by side with labels to group them by, and what
it had to leave out. ``build_scoreboard`` turns them into means, medians and the worst rows. Errors are fractions
of the measured time; a positive error is a prediction that is too slow.

For cross-validation ``tools/fit_folds.py`` repeats the fits of the operator prices with one family of shapes, or one
GPU, left out at a time and writes what it found to ``data/fits/folds.toml``, so that no row is predicted by its own
fit. The digest there says which fit it belongs to. Intervals are learnt from other sources than the one left out.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from stepcast.cost.compute import compute_price
from stepcast.cost.fits import ComputeFit, compute_fit, merge_tables
from stepcast.cost.power import Load
from stepcast.forecast.prediction import Prediction
from stepcast.hardware import Cluster, Gpu, load_cluster
from stepcast.hardware.catalog import load_data, load_fit
from stepcast.inputs.source import FormatError, Source, csv_records
from stepcast.ir.arrays import BoolArray, FloatArray, TextArray
from stepcast.ir.model import Model
from stepcast.ir.progress import report_progress
from stepcast.ir.step import LEVEL
from stepcast.ir.types import dataclass, pick, require
from stepcast.ir.work import Compute

Item = TypeVar("Item")
Compared = TypeVar("Compared")
Record = Mapping[str, str]  # a row of a csv file, by its columns
Pair = tuple[float, float]  # measured and predicted
WORST = 10
# Measured times: launches decide the first, the hardware the last.
TIME_EDGES_S = (20e-6, 50e-6, 1e-3, 10e-3)
TIME_NAMES = ("under 20 us", "20 to 50 us", "50 us to 1 ms", "1 to 10 ms", "10 ms and more")


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One measurement and its prediction, in seconds or bytes.

    *tags* group it, such as kind -> linear; *ends* are those of the prediction's interval, where it has one.
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
        """Return the signed error as a share of the measured time."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class MeasuredColumns:
    """Many rows, one array per field; names are made on demand, since only the worst are printed."""

    measured_s: FloatArray
    predicted_s: FloatArray
    tags: Mapping[str, TextArray]
    name: Callable[[int], str]
    # Low and high ends of the predictions' intervals, not a number where a row has none; None: no row has.
    ends: tuple[FloatArray, FloatArray] | None = None

    def __post_init__(self) -> None:
        lengths = {self.measured_s.size, self.predicted_s.size, *(tag.size for tag in self.tags.values())}
        require(len(lengths) <= 1, "every column needs as many entries as there are measured times")
        if not (np.all(self.measured_s > 0) and np.all(self.predicted_s >= 0)):
            raise ValueError("measured times must be above zero and predictions not negative")

    def __len__(self) -> int:
        return int(self.measured_s.size)

    def labels(self, tag: str) -> TextArray:
        """Return the labels of a tag, blank for rows without one."""
        return self.tags.get(tag, np.full(len(self), ""))

    def select(self, tag: str, *labels: str) -> dict[str, BoolArray]:
        """Return the rows that have each of these *labels* of a tag."""
        return {label: self.labels(tag) == label for label in labels}

    @property
    def error(self) -> FloatArray:
        """Return the signed errors as shares of the measured times."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def inside(self) -> FloatArray:
        """Return 1 where the measured time is within the interval, 0 where it is not, nan without an interval."""
        if self.ends is None:
            return np.full(len(self), np.nan)
        low_s, high_s = self.ends
        within = (self.measured_s >= low_s) & (self.measured_s <= high_s)
        return np.where(np.isnan(low_s), np.nan, within.astype(np.float64))

    def row(self, index: int) -> ScoredRow:
        """Return one row."""
        tags = {name: str(labels[index]) for name, labels in self.tags.items() if labels[index]}
        return ScoredRow(self.name(index), float(self.measured_s[index]), float(self.predicted_s[index]), tags)


@dataclass(frozen=True, slots=True)
class Measurements:
    """A measurement set with its predictions."""

    columns: MeasuredColumns
    skipped: Mapping[str, int]  # reason -> rows
    selections: Mapping[str, BoolArray] = field(default_factory=dict)  # rows that a claim is about
    figures: Mapping[str, float] = field(default_factory=dict)  # more figures of the set, as fractions
    notes: tuple[str, ...] = ()
    orders: Mapping[str, Sequence[str]] = field(default_factory=dict)  # labels of a tag in the order to show
    details: tuple[str, ...] = ()  # tags that describe single rows and group none
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
    time_weighted_error: float  # sum of the absolute differences over the sum of the times
    coverage: float | None = None  # of the rows with an interval, the share measured inside it


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


load_table = lru_cache(maxsize=8)(load_data)  # of the package's data, such as ``rows/sets``


@lru_cache(maxsize=64)
def cluster_of(gpu: str) -> Cluster:
    """Return the usual cluster of a GPU that is named by one word."""
    words = dict(load_table("rows/published")["clusters"]).get(gpu.lower())
    if words is None:
        raise ValueError(f"GPU {gpu!r} is not stated or not known")
    name, *changes = words.split()
    return load_cluster(name, changes)


def read_records(place: str | Path, *files: str, needed: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of the csv file *place*, or of the first of *files* that is in that folder."""
    path = Path(place)
    file = path if path.is_file() else next((path / name for name in files if (path / name).is_file()), None)
    if file is None:
        raise ValueError(f"{path}: expected {files[0]}, or a csv file with its columns")
    names, records = csv_records(Source(file))
    if missing := [name for name in needed if name not in names]:
        raise FormatError(f"no column {missing[0]}; expected the columns of {files[0]}", str(file))
    return list(records)


def compare_each(
    items: Iterable[Item],
    compare: Callable[[Item], Sequence[Compared]],
    where: Callable[[Item], str] | None = None,
    count: Callable[[Item], int] = lambda item: 1,
) -> tuple[list[Compared], Counter[str]]:
    """Compare every item with its prediction, and count why the others could not be compared.

    *compare* gives the results of an item, and raises a ValueError (or a KeyError for a missing column) where it has no
    prediction; *where* names the file that the reason is put after; *count* is the number of rows of an item.
    """
    compared: list[Compared] = []
    skipped: Counter[str] = Counter()
    for item in report_progress(items):
        try:
            compared += compare(item)
        except (ValueError, KeyError) as error:
            reason = error.message if isinstance(error, FormatError) else str(error)
            skipped[f"{where(item)}: {reason}" if where else reason] += count(item)
    return compared, skipped


def columns_of(scored: Iterable[ScoredRow]) -> MeasuredColumns:
    """Return rows as columns; a tag that a row lacks is blank there."""
    rows = list(scored)
    tags = dict.fromkeys(tag for row in rows for tag in row.tags)
    ends = np.array([row.ends or (np.nan, np.nan) for row in rows], dtype=np.float64)
    return MeasuredColumns(
        np.array([row.measured_s for row in rows], dtype=np.float64),
        np.array([row.predicted_s for row in rows], dtype=np.float64),
        {tag: np.array([row.tags.get(tag, "") for row in rows], dtype=np.str_) for tag in tags},
        lambda index: rows[index].name,
        None if all(row.ends is None for row in rows) else (ends[:, 0], ends[:, 1]),
    )


def join_columns(pieces: Sequence[MeasuredColumns]) -> MeasuredColumns:
    """Return the rows of all *pieces*, without intervals; a tag that a piece lacks is blank there."""
    starts = np.cumsum([0, *map(len, pieces)])
    tags = dict.fromkeys(tag for piece in pieces for tag in piece.tags)

    def name(index: int) -> str:
        which = int(np.searchsorted(starts, index, side="right")) - 1
        return pieces[which].name(index - int(starts[which]))

    return MeasuredColumns(
        np.concatenate([np.empty(0), *(piece.measured_s for piece in pieces)]),
        np.concatenate([np.empty(0), *(piece.predicted_s for piece in pieces)]),
        {tag: np.concatenate([piece.labels(tag) for piece in pieces]) for tag in tags},
        name,
    )


def summarise(measured_s: FloatArray, predicted_s: FloatArray, inside: FloatArray | None = None) -> Summary | None:
    """Return the errors of rows; None where there are no rows."""
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


def error_figures(pairs: Mapping[str, Sequence[Pair]], *names: str) -> dict[str, float]:
    """Return the fields *names* of the Summary of measured and predicted *pairs*, by what they are of."""
    figures: dict[str, float] = {}
    for what, of_rows in pairs.items():
        summary = summarise(*np.array(of_rows, dtype=np.float64).reshape(-1, 2).T)
        figures |= {f"{what}: {name}": getattr(summary, name) for name in names if summary}
    return figures


def build_scoreboard(measurements: Measurements) -> Scoreboard:
    """Return the errors of a set: of all rows, of selections and groups, and its worst rows."""
    table = measurements.columns
    measured_s, predicted_s, inside = table.measured_s, table.predicted_s, table.inside

    def summarise_rows(mask: BoolArray) -> Summary | None:
        return summarise(measured_s[mask], predicted_s[mask], inside[mask])

    def summarise_group(labels: TextArray, order: Sequence[str] | None) -> dict[str, Summary]:
        """Return summaries by label, in *order* or sorted; rows without a label are in no group."""
        names = sorted(map(str, np.unique(labels)), key=_sort_numbers) if order is None else order
        return {name: summary for name in names if name and (summary := summarise_rows(labels == name))}

    groups = {
        tag: summarise_group(labels, measurements.orders.get(tag))
        for tag, labels in table.tags.items()
        if tag not in measurements.details
    }
    if measurements.unit == "s":
        groups["time"] = summarise_group(np.array(TIME_NAMES)[np.digitize(measured_s, TIME_EDGES_S)], TIME_NAMES)
    return Scoreboard(
        summary=summarise(measured_s, predicted_s, inside),
        groups={tag: group for tag, group in groups.items() if len(group) > 1},
        selections={
            name: summary for name, mask in measurements.selections.items() if (summary := summarise_rows(mask))
        },
        worst=tuple(table.row(int(index)) for index in np.argsort(-np.abs(table.error), kind="stable")[:WORST]),
        **pick(measurements, "skipped figures notes unit"),
    )


def _sort_numbers(label: str) -> list[tuple[int, int, str]]:
    """Return the key that sorts numbers inside labels by value: 2 ranks before 16 ranks."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", label) if part]


PHASES = ("forward", "backward", "optimizer")


def split_phases_s(prediction: Prediction) -> dict[str, float]:
    """Return the seconds of forward, backward and update of a predicted step on one GPU.

    Each begins when the last kernel before it ends, as events on the GPU's own clock tell them apart.
    """
    timeline = prediction.timeline
    computes = np.array([lane.name == "compute" for lane in timeline.lanes], dtype=bool)[timeline.lane_of]
    ends = [0.0]
    for letter in ("F", "B"):
        slots = [slot.get("slot", "").startswith(letter) for slot in timeline.details]
        rows = computes & np.array([*slots, False], dtype=bool)[timeline.detail_of]
        ends.append(float(np.max(timeline.end_s[rows], initial=0.0)))
    return dict(zip(PHASES, np.diff([*ends, prediction.step_s]).tolist(), strict=True))


def unseen_share(model: Model, tokens: int) -> float:
    """Return the share of weights that a benchmark of a few steps never gives a gradient.

    They are the rows of an embedding whose tokens are not among *tokens* sampled uniformly, the same in every step; a
    tied embedding has gradients as the head.
    """
    if model.tied:
        return 0.0
    rows = model.vocab * (1.0 - 1.0 / model.vocab) ** tokens
    return round(rows * model.hidden / model.parameters, 3)


class MeasurementSet(NamedTuple):
    """A set that we check ourselves against: an entry of ``data/rows/sets.toml``."""

    name: str
    about: str
    function: str  # module:function below stepcast.validate; takes folders and options, returns Measurements
    folders: tuple[str, ...]
    when_named: bool = False
    notes: tuple[str, ...] = ()

    def measure(self, *folders: str, **options: str) -> Measurements:
        """Return the rows of *folders* with their predictions."""
        module, _, function = self.function.partition(":")
        measure: Callable[..., Measurements] = getattr(import_module(f"stepcast.validate.{module}"), function)
        measurements = measure(*folders, **options)
        return replace(measurements, notes=(*self.notes, *measurements.notes))


MEASUREMENT_SETS = {name: MeasurementSet(name, **entry) for name, entry in load_table("rows/sets").items()}


def price_kernels(kernels: Sequence[Compute], gpu: Gpu, fit: ComputeFit, load: Load) -> list[float]:
    """Return the seconds of each kernel; equal kernels are estimated once."""
    seconds = {work: compute_price(work, gpu, fit, load).seconds for work in set(kernels)}
    return [seconds[work] for work in kernels]


Family = tuple[int, ...]
STALE = (
    "the cross-validated constants belong to another fit (run tools/fit_folds.py): "
    "every row is predicted by constants that have seen it"
)


class GpuFold(NamedTuple):
    """Constants for NeuSight's set, learnt without one GPU."""

    fit: ComputeFit
    added_s: Mapping[str, float]
    least_s: Mapping[str, float]


class Folds(NamedTuple):
    """Fits that have not seen some rows."""

    families: Mapping[tuple[str, Family], ComputeFit]  # kind of rows and their family -> fit without it
    gpus: Mapping[str, GpuFold]  # GPU -> fit without it
    note: str = ""


def fit_digest() -> str:
    """Return the digest of the committed fit of operators, without the host's times."""
    tables = [load_fit("compute"), load_fit("neusight")]
    del tables[0]["dispatch"]
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def load_folds() -> Folds:
    """Return the folds of the committed fit; none, with a note, where they belong to another."""
    table = load_fit("folds")
    if table["fit"] != fit_digest():
        return Folds({}, {}, STALE)
    families: dict[tuple[str, Family], ComputeFit] = {}
    gpus: dict[str, GpuFold] = {}
    compute, own = load_fit("compute"), load_fit("neusight")
    for fold in table["family"]:
        fit = compute_fit(merge_tables(compute, fold["values"]))
        families |= {(fold["kind"], tuple(family)): fit for family in fold["held"]}
    base = merge_tables(compute, {section: own[section] for section in ("matmul", "stream")})
    for fold in table["gpu"]:
        added_s, least_s = (own[name] | fold[name] for name in ("added_s", "least_s"))
        gpus[fold["held"]] = GpuFold(compute_fit(merge_tables(base, fold["values"])), added_s, least_s)
    return Folds(families, gpus)


FEWEST_OTHERS = 12  # rows of other sources that an interval is learnt from
UNCLAIMED = "left out of claims"  # the label of rows that no claim is about


def learn_interval(logs: FloatArray, source: TextArray) -> tuple[float, float, float]:
    """Return low end, middle and high end of the logarithms of measured over predicted.

    The ends are as far from the middle as the 5 and 95 % quantiles of how far rows are from the middle of the other
    sources, corrected for their number so that they hold the next row with 90 % probability (jackknife conformal
    prediction, one source at a time).
    """
    middles = {name: np.median(logs[source != name] if (source != name).any() else logs) for name in np.unique(source)}
    away = logs - np.array([middles[name] for name in source])
    low, high = np.quantile(away, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), method="weibull").tolist()
    middle = float(np.median(logs))
    return middle + low, middle, middle + high


def family_of(kind: str) -> str:
    """Return dense, experts or one GPU, whatever the generation: sources are too few to tell generations apart."""
    return kind.split(" on ")[0]


def interval_figures(table: MeasuredColumns) -> Iterator[tuple[str, float]]:
    """Yield how many rows are inside intervals learnt from the other sources' rows of their family, and their width."""
    claimed = table.labels(UNCLAIMED) == ""
    kind, source = table.labels("kind")[claimed], table.labels("source")[claimed]
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
    for label in inside:
        yield f"inside the 90 % interval of other sources, {label}", float(np.mean(inside[label]))
        yield f"median width of that interval, {label}", float(np.median(widths[label]))
