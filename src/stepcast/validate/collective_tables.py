"""The set of public tables of collectives: nccl-tests and rccl-tests on many machines."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from stepcast.inputs.collective_table import TableRow, read_rows
from stepcast.units import KIB, MIB, format_bytes
from stepcast.validate.collective_constants import changed_route, folds
from stepcast.validate.collective_rows import PricedRow, priced_row, row_route
from stepcast.validate.scoreboard import Measurements, Row, columns

FILE = "collectives.csv"
IN_A_NODE, BETWEEN_NODES = "in a node", "between nodes"
DECADE = 16  # sizes by powers of 16, from 64 KiB on


def measure_folder(folder: str) -> Measurements:
    """Every row of the table in *folder*, or of that file, priced on the hardware that it names."""
    path = os.path.join(folder, FILE) if os.path.isdir(folder) else folder
    skipped: Counter[str] = Counter()
    found: list[tuple[TableRow, PricedRow]] = []
    for row in read_rows(path):
        if reason := left_out(row):
            skipped[reason] += 1
            continue
        try:
            found.append((row, priced_row(row, row_route(row))))
        except ValueError as error:
            skipped[f"{row.table}: {error}"] += 1
    sizes = np.array([row.size_bytes for row, _ in found], dtype=np.float64)
    return Measurements(
        columns([_row(row, priced) for row, priced in found]),
        skipped,
        {"1 MiB and more": sizes >= MIB, "below 1 MiB": sizes < MIB},
        figures=_left_out_figures(found),
        notes=("left out: by constants that have not seen the row's machine, nor the entry fitted to it",),
        orders={"size": [name for _, name in _decades()]},
        details=("table", "system"),
    )


def _left_out_figures(found: Sequence[tuple[TableRow, PricedRow]]) -> dict[str, float]:
    """Mean errors of rows whose machine took part in no fit, together and by GPU from 1 MiB on."""
    errors: dict[str, list[float]] = {}
    for row, priced in found:
        seconds = priced.seconds
        if row.system in folds():
            seconds = priced_row(row, changed_route(row, folds()[row.system], own_entry=False)).seconds
        error = abs(seconds / row.measured_s - 1)
        if row.size_bytes < MIB:
            errors.setdefault("left out, below 1 MiB", []).append(error)
            continue
        for label in ("1 MiB and more", f"{row.gpu} {_way(priced)}"):
            errors.setdefault(f"left out, {label}", []).append(error)
    return {label: sum(each) / len(each) for label, each in sorted(errors.items())}


def _way(priced: PricedRow) -> str:
    return IN_A_NODE if priced.nodes == 1 else BETWEEN_NODES


def left_out(row: TableRow) -> str | None:
    """Why a row is not compared; None where it is."""
    if row.problem:
        return "marked as a problem by who gathered it"
    if row.outlier:
        return "marked as an outlier: a hiccup on one side, or slower than the next size"
    if not math.isfinite(row.measured_s) or row.measured_s <= 0 or row.size_bytes == 0:
        return "no time, or no size"
    return None


def _decades() -> list[tuple[float, str]]:
    """Upper ends and names of the size classes."""
    edges = [64 * KIB * DECADE**power for power in range(4)]
    names = [f"under {format_bytes(edges[0])}"]
    names += [f"{format_bytes(low)} to {format_bytes(high)}" for low, high in pairwise(edges)]
    return [*zip(edges, names, strict=True), (math.inf, f"{format_bytes(edges[-1])} and more")]


def _row(row: TableRow, priced: PricedRow) -> Row:
    way = _way(priced)
    return Row(
        f"{row.table} {format_bytes(row.size_bytes)}",
        row.measured_s,
        priced.seconds,
        {
            "gpu from 1 MiB": f"{row.gpu} {way}" if row.size_bytes >= MIB else "",
            "gpu below 1 MiB": f"{row.gpu} {way}" if row.size_bytes < MIB else "",
            "collective": row.collective,
            "size": next(name for edge, name in _decades() if row.size_bytes < edge),
            "algorithm": str(priced.algorithm or ""),
            "table": row.table,
            "system": row.system,
        },
    )
