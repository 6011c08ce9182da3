"""What the offline fits share: rows of csv files, tables of constants by dotted key, the search, TOML."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from minimise import Vector, minimise

from stepcast.cost.fits import ComputeFit, compute_fit

OUT = Path(__file__).parents[1] / "src" / "stepcast" / "data" / "fits"

Row = dict[str, str]
Free = dict[str, tuple[float, float, float]]  # dotted key -> start, low, high


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def column(rows: list[Row], name: str) -> Vector:
    return np.array([float(row[name] or 1) for row in rows])


def with_values(table: dict[str, Any], keys: list[str], values: Vector) -> ComputeFit:
    changed = _copy(table)
    put(changed, dict(zip(keys, map(float, values), strict=True)))
    return compute_fit(changed)


def _copy(table: Any) -> Any:
    return {key: _copy(value) for key, value in table.items()} if isinstance(table, dict) else table


def fit_keys(
    table: dict[str, Any], free: Free, predict: Callable[[ComputeFit], Vector], measured: Vector, scale: float = 0.05
) -> dict[str, float]:
    keys = list(free)
    start, low, high = (np.array([free[key][i] for key in keys]) for i in range(3))
    best = minimise(lambda x: predict(with_values(table, keys, x)) / measured, start, low, high, scale)
    return dict(zip(keys, (float(f"{value:.4g}") for value in best), strict=True))


def put(table: dict[str, Any], values: dict[str, float]) -> None:
    for key, value in values.items():
        place, parts = table, key.split(".")
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value


def report(name: str, predicted: Vector, measured: Vector) -> None:
    error = np.abs(predicted / measured - 1.0)
    signed = float(np.mean(predicted / measured - 1.0))
    weighted = float(np.sum(np.abs(predicted - measured)) / np.sum(measured))
    parts = [f"{name}: rows {measured.size}, mean {error.mean():.2%}, signed {signed:+.2%}"]
    for label, edge in ((">20us", 2e-5), (">50us", 5e-5)):
        if (measured > edge).any():
            parts.append(f"{label} {error[measured > edge].mean():.2%}")
    print(", ".join(parts), f"time-weighted {weighted:.2%}, worst {error.max():.0%}")


def to_toml(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if prefix and plain:
        yield f"\n[{prefix}]"
    for key, value in plain.items():
        yield f"{key} = {literal(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from to_toml(value, f"{prefix}.{key}" if prefix else key)


def literal(value: Any) -> str:
    """Return a value of any depth as one line of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {literal(item)}" for key, item in value.items() if item != {}) + "}"
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    return repr(value)
