"""Learn the band of predicted steps (data/fits/band.toml) from rows that ``stepcast validate`` wrote.

    stepcast validate --set published --set mlperf --set transformers -o rows.csv
    python tools/fit_band.py rows.csv > src/stepcast/data/fits/band.toml

Kinds are those of ``cost/band.py``; each gets the ends of measured over predicted between which nine in ten rows lie
of sources that were left out (validate/scoreboard.py). Rows that no claim is
about are left out. Whatever widens a band is found by leaving out sources, generations of GPUs, and of each
generation the rows with the most GPUs or the longest sequences: as much as nine in ten of them all need, and of each
generation that has many.
"""

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from stepcast.ir.step import LEVEL
from stepcast.validate.scoreboard import UNCLAIMED, MeasuredColumns, family_of, interval_figures, learn_interval

FEWEST = 12
"""Rows of a kind that has a band of its own."""
FARTHEST = 4
"""Rows with more than the most GPUs, or the longest sequence, over this stand for those beyond."""
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

    @property
    def generation(self) -> str:
        return self.kind.split(" on ")[1]


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
            if row.get("phase") not in (None, "", "step") or row.get(UNCLAIMED):
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
    logs, sources = np.log([run.ratio for run in runs]), np.array([run.source for run in runs])
    return Quantiles(*learn_interval(logs, sources))


def by_label(runs: Iterable[Run], label: str = "family") -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[getattr(run, label)].append(run)
    return {value: rows for value, rows in sorted(found.items()) if len(rows) >= FEWEST}


Scales = dict[str, list[float]]
"""By what was left out: how wide each of its rows needs the band to be."""


def needed(scales: Scales) -> float:
    """The factor at which nine in ten of what was left out has nine in ten of its rows inside."""
    ends = [float(np.quantile(rows, LEVEL)) for rows in scales.values()]
    return round(max(1.0, float(np.quantile(ends, LEVEL, method="higher"))), 2)


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


def left_out(runs: Sequence[Run], label: str) -> Scales:
    """For rows of each label, by the band that was learnt without them."""
    scales: Scales = {}
    for each in sorted({getattr(run, label) for run in runs}):
        known = by_label(run for run in runs if getattr(run, label) != each)
        bands = {family: quantiles(rows) for family, rows in known.items()}
        for run in runs:
            if getattr(run, label) == each and run.family in bands:
                scales.setdefault(each, []).append(bands[run.family].scale(float(np.log(run.ratio))))
    return scales


def farthest(runs: Sequence[Run], size: str) -> Scales:
    """For the rows of each kind that are largest, by the band of those a quarter as large at most."""
    scales: Scales = {}
    for kind, rows in by_label(runs, "kind").items():
        most = max(getattr(run, size) for run in rows)
        near = [run for run in rows if getattr(run, size) * FARTHEST <= most]
        if len(near) >= FEWEST:
            band = quantiles(near)
            far = (run for run in rows if getattr(run, size) * FARTHEST > most)
            scales[kind] = [band.scale(float(np.log(run.ratio))) for run in far]
    return scales


def table(name: str, rows: Sequence[Run]) -> str:
    ends = asdict(quantiles(rows))
    lines = [f'[kinds."{name}"]', *(f"{side} = {np.exp(log):.3f}" for side, log in ends.items())]
    lines += [f"rows = {len(rows)}", f"gpus = {max(run.gpus for run in rows)}", f"seq = {max(run.seq for run in rows)}"]
    for label in ("framework", "generation"):
        names = ", ".join(f'"{value}"' for value in sorted({getattr(run, label) for run in rows}))
        lines.append(f"{label}s = [{names}]")
    return "\n".join(lines)


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
    framework, generation = needed(sources), needed(left_out(several, "kind"))
    size = max(needed_by_rows(farthest(several, name)) for name in ("gpus", "seq"))
    print(f"framework = {framework}")
    # Of a new generation as little is known as of a new framework, and more beyond both sizes than within.
    print(f"generation = {max(framework, generation)}")
    print(f"gpus = {size}")
    print(f"seq = {size}")
    for kind, rows in by_label(runs).items():
        print("\n" + table(kind, rows))
    print("\n".join(covered(several)), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
