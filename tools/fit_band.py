"""Learn the band of predicted steps (data/fits/band.toml) from rows that ``stepcast validate`` wrote.

    stepcast validate --set published --set mlperf --set transformers -o rows.csv
    python tools/fit_band.py rows.csv > src/stepcast/data/fits/band.toml

Kinds are those of ``cost/band.py``; each gets the 5 and 95 % quantiles of measured over predicted, with the
plotting positions under which the next row of the kind lies between them nine times in ten, and is then made as
much wider as rows of sources that were left out of it need (split conformal prediction, one source at a time).
Whatever else widens a band is found by leaving out generations of GPUs, and the rows with the most GPUs or the
longest sequences of each kind: as much as nine in ten of them all need, and of each kind that has many.
"""

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stepcast.ir.band import LEVEL
from stepcast.validate.intervals import family_of, interval_figures, learn_kind
from stepcast.validate.scoreboard import MeasuredColumns

FEWEST = 12
"""Rows of a kind that has a band of its own."""
FARTHEST = 4
"""Rows with more than the most GPUs, or the longest sequence, over this stand for those beyond."""
TAIL = (1 - LEVEL) / 2
HEAD = """\
source = "tools/fit_band.py: measured over predicted in the sets published, mlperf and transformers"

# By how much wider a band must be for nine in ten of the rows left out of it to lie inside: each source, each
# generation of GPUs, and of each kind those with the most GPUs or the longest sequences."""


@dataclass(frozen=True)
class Run:
    kind: str
    source: str
    framework: str
    gpus: int
    seq: int
    ratio: float

    @property
    def family(self) -> str:
        return family_of(self.kind)


@dataclass(frozen=True)
class Quantiles:
    """Logarithms of measured over predicted."""

    low: float
    middle: float
    high: float

    def scale(self, log_ratio: float) -> float:
        """How many times as wide the band must be for this row to lie inside."""
        side = self.high if log_ratio > self.middle else self.low
        return (log_ratio - self.middle) / (side - self.middle)


def runs_of(path: str) -> Iterable[Run]:
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            words = row["command"]
            if row.get("phase") not in (None, "", "step"):
                continue
            gpus = int(_word(words, "gpus") or 0)
            yield Run(
                row["kind"],
                row.get("source") or row["set"],
                row.get("profile") or _word(words, "framework") or "",
                gpus,
                int(_word(words, "seq") or 0),
                float(row["measured_s"]) / float(row["predicted_s"]),
            )


def _word(command: str, option: str) -> str | None:
    found = re.search(rf"--{option} (\S+)", command)
    return found[1] if found else None


def quantiles(runs: Sequence[Run]) -> Quantiles:
    logs = np.log([run.ratio for run in runs])
    return Quantiles(*np.quantile(logs, (TAIL, 0.5, 1 - TAIL), method="weibull").tolist())


def by_kind(runs: Iterable[Run], family: bool = False) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.family if family else run.kind].append(run)
    return {kind: rows for kind, rows in sorted(found.items()) if len(rows) >= FEWEST}


Scales = dict[str, list[float]]
"""By what was left out: how wide each of its rows needs the band to be."""


def needed(scales: Scales) -> float:
    """The factor at which nine in ten of left-out rows lie inside, what was left out counting alike."""
    pairs = sorted((scale, 1 / len(rows)) for rows in scales.values() for scale in rows)
    if not pairs:
        return 1.0
    reached = np.cumsum([weight for _, weight in pairs]) / len(scales)
    at = min(int(np.searchsorted(reached, LEVEL)), len(pairs) - 1)
    return round(max(1.0, pairs[at][0]), 2)


def needed_by_rows(scales: Scales) -> float:
    """The factor at which nine in ten of all left-out rows lie inside, and of those of each kind that has many.

    A share of kinds would hang on the middle of the worst one, since there are four.
    """
    groups = [[scale for rows in scales.values() for scale in rows], *(rows for rows in scales.values())]
    ends = [
        sorted(rows)[min(len(rows), int(np.ceil(LEVEL * (len(rows) + 1)))) - 1]
        for rows in groups
        if len(rows) >= FEWEST
    ]
    return round(max([1.0, *ends]), 2)


def left_out(runs: Sequence[Run], label: str, family: bool = False) -> Scales:
    """For rows of each label, by the band that was learnt without them."""
    scales: Scales = {}
    for each in sorted({getattr(run, label) for run in runs}):
        known = by_kind((run for run in runs if getattr(run, label) != each), family)
        bands = {kind: quantiles(rows) for kind, rows in known.items()}
        for run in runs:
            kind = run.family if family else run.kind
            if getattr(run, label) == each and kind in bands:
                scales.setdefault(each, []).append(bands[kind].scale(float(np.log(run.ratio))))
    return scales


def farthest(runs: Sequence[Run], size: str) -> Scales:
    """For the rows of each kind that are largest, by the band of those a quarter as large at most."""
    scales: Scales = {}
    for kind, rows in by_kind(runs).items():
        most = max(getattr(run, size) for run in rows)
        near = [run for run in rows if getattr(run, size) * FARTHEST <= most]
        if len(near) >= FEWEST:
            band = quantiles(near)
            far = (run for run in rows if getattr(run, size) * FARTHEST > most)
            scales[kind] = [band.scale(float(np.log(run.ratio))) for run in far]
    return scales


def table(name: str, rows: Sequence[Run], runs: Sequence[Run]) -> str:
    logs, sources = np.log([run.ratio for run in runs]), np.array([run.source for run in runs])
    own, families = np.array([run in rows for run in runs]), {run.family for run in rows}
    family = np.array([run.family in families for run in runs])
    sides = dict(zip(("low", "middle", "high"), learn_kind(logs, sources, own, family), strict=True))
    lines = [f'[kinds."{name}"]', *(f"{side} = {np.exp(log):.3f}" for side, log in sides.items())]
    lines += [f"rows = {len(rows)}", f"gpus = {max(run.gpus for run in rows)}", f"seq = {max(run.seq for run in rows)}"]
    names = ", ".join(f'"{name}"' for name in sorted({run.framework for run in rows}))
    return "\n".join([*lines, f"frameworks = [{names}]"])


def covered(runs: Sequence[Run]) -> Iterable[str]:
    """Yield by kind the share of rows inside the interval of the other sources, and its width."""
    tags = {name: np.array([getattr(run, name) for run in runs]) for name in ("kind", "source")}
    ratio = np.array([run.ratio for run in runs])
    figures = interval_figures(MeasuredColumns(ratio, np.ones(len(runs)), tags, str))
    return (f"{name}: {value:.3f}" for name, value in figures)


def main(paths: Sequence[str]) -> None:
    runs = [run for path in paths for run in runs_of(path)]
    several = [run for run in runs if run.family != "one GPU"]
    sources = left_out(several, "source")
    print(HEAD)
    print("[widened]")
    framework, generation = needed(sources), needed(left_out(several, "kind", family=True))
    size = max(needed_by_rows(farthest(several, name)) for name in ("gpus", "seq"))
    print(f"framework = {framework}")
    # Of a new generation as little is known as of a new framework, and more beyond both sizes than within.
    print(f"generation = {max(framework, generation)}")
    print(f"gpus = {size}")
    print(f"seq = {size}")
    for kind, rows in by_kind(runs).items():
        print("\n" + table(kind, rows, runs))
    for kind, rows in by_kind(several, family=True).items():
        print("\n" + table(f"{kind} elsewhere", rows, runs))
    print("\n".join(covered(several)), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
