"""Fit the constants of collectives to public nccl-tests tables, and again without each machine in turn.

    python tools/fit_collectives.py FOLDER [--folds]

The loss is the mean error of sizes of 1 MiB and more, a third of that of smaller ones, and a little for every
constant that leaves what was published: one that the tables do not tell stays there. The search moves one
constant at a time. With --folds the values without each machine go to data/fits/collective_folds.toml.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepcast.units import MIB
from stepcast.validate.collectives import (
    CONSTANTS,
    FILE,
    TableConstant,
    TableRow,
    change_route,
    find_exclusion,
    match_hardware,
    price_row,
    read_rows,
)

SMALL_WEIGHT, PULL = 0.35, 0.0006
ROUNDS, FOLD_ROUNDS = 8, 4
OUT = Path(__file__).parents[1] / "src" / "stepcast" / "data" / "fits" / "collective_folds.toml"
Values = Mapping[str, float]


@dataclass
class Table:
    """Rows of one table, which share a route, and the errors of the last values that concern it."""

    rows: list[TableRow]
    concerned: frozenset[str]

    def errors(self, values: Values, known: dict[tuple[object, ...], np.ndarray]) -> np.ndarray:
        own = tuple((name, values[name]) for name in sorted(self.concerned))
        key = (id(self), own)
        if key not in known:
            # An entry of its own differs between nodes; within one its links are those of others.
            route = change_route(self.rows[0], values, own_entry=self.rows[0].nodes > 1)
            times = [price_row(row, route).seconds / row.measured_s - 1 for row in self.rows]
            known[key] = np.abs(np.array(times))
        return known[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help=f"holds {FILE}")
    parser.add_argument("--folds", action="store_true", help="fit without each machine instead, and write that")
    args = parser.parse_args()
    tables = read_tables(args.folder)
    shipped = {constant.name: constant.value for constant in CONSTANTS}
    if args.folds:
        write(tables, shipped)
        return
    fitted = fit(tables, shipped, ROUNDS, {})
    print(f"{'constant':28s} {'published':>9s} {'shipped':>9s} {'fitted':>9s}")
    for constant in CONSTANTS:
        name = constant.name
        print(f"{name:28s} {constant.published:9.4g} {shipped[name]:9.4g} {fitted[name]:9.4g}")
    for label, values in (("shipped", shipped), ("fitted", fitted)):
        print(label, "from 1 MiB {:.2%}, below {:.2%}".format(*mean_errors(tables, values, {})))


def read_tables(folder: str) -> list[Table]:
    found: dict[tuple[str, ...], list[TableRow]] = {}
    for row in read_rows(f"{folder}/{FILE}"):
        if find_exclusion(row) is None:
            found.setdefault((row.table, row.collective, row.algorithm), []).append(row)
    tables = []
    for rows in found.values():
        hardware = match_hardware(rows[0], own_entry=rows[0].nodes > 1)
        names = frozenset(constant.name for constant in CONSTANTS if constant.concerns(rows[0], hardware))
        tables.append(Table(rows, names))
    return tables


def mean_errors(
    tables: Sequence[Table], values: Values, known: dict[tuple[object, ...], np.ndarray]
) -> tuple[float, float]:
    """Of sizes of 1 MiB and more, and of smaller ones."""
    errors = np.concatenate([table.errors(values, known) for table in tables])
    large = np.array([row.size_bytes >= MIB for table in tables for row in table.rows])
    return float(errors[large].mean()), float(errors[~large].mean())


def fit(
    tables: Sequence[Table], start: Values, rounds: int, known: dict[tuple[object, ...], np.ndarray]
) -> dict[str, float]:

    def loss(values: Values) -> float:
        large, small = mean_errors(tables, values, known)
        pulls = (abs(values[one.name] - one.published) / one.scale for one in CONSTANTS)
        return large + SMALL_WEIGHT * small + PULL * sum(pulls)

    values, steps = dict(start), {constant.name: 0.25 * constant.scale for constant in CONSTANTS}
    best = loss(values)
    for _ in range(rounds):
        for constant in CONSTANTS:
            for new in trials(constant, values[constant.name], steps[constant.name]):
                tried = values | {constant.name: new}
                if (lost := loss(tried)) < best - 1e-7:
                    values, best = tried, lost
                    steps[constant.name] *= 1.5
                    break
            else:
                steps[constant.name] /= 2
    return values


def trials(constant: TableConstant, value: float, step: float) -> list[float]:
    """A step either way, and what was published; shares stay at most 1."""
    most = 1.0 if max(constant.value, constant.published) <= 1 and "us" not in constant.name else np.inf
    tried = [constant.published, value + step, value - step]
    return [new for new in tried if 0 <= new <= most and new != value]


def write(tables: Sequence[Table], shipped: Values) -> None:
    """The folds, each from the fit to all tables on."""
    lines = [
        "# Constants of collectives without one machine's tables: written by tools/fit_collectives.py,",
        "# read by stepcast.validate.collectives.",
    ]
    errors: dict[tuple[object, ...], np.ndarray] = {}
    fitted = fit(tables, shipped, ROUNDS, errors)
    for held in sorted({table.rows[0].system for table in tables}):
        others = [table for table in tables if table.rows[0].system != held]
        # What none of them concerns is as published, or as in the transport that is most like it.
        known = frozenset().union(*(table.concerned for table in others))
        start = {one.name: fitted[one.name] if one.name in known else one.published for one in CONSTANTS}
        values = fit(others, start, FOLD_ROUNDS, errors)
        pairs = ", ".join(f'"{name}" = {value:.4g}' for name, value in values.items())
        lines += ["", "[[fold]]", f'held = "{held}"', f"values = {{ {pairs} }}"]
        print("without", held, flush=True)
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
