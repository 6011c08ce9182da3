"""NeuSight's set (ASPLOS'25): fp32 operators on five GPUs, and models beside NeuSight's own predictions.

An operator on a GPU of that set is predicted by constants learnt without that GPU; one on any other GPU by
the committed constants, which have not seen it either. Models took part in no fit.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from stepcast.cost.calibration import fit_correction
from stepcast.cost.compute import step_load
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.fits import neusight_fit
from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.gpu import Gpu
from stepcast.inputs.rows import csv_rows
from stepcast.inputs.source import Source
from stepcast.validate.folds import GpuFold, load_folds
from stepcast.validate.neusight.models import neusight_kernels
from stepcast.validate.neusight.ops import MATRIX, OPERATORS, FP32Rows, reported_s
from stepcast.validate.priced import priced
from stepcast.validate.scoreboard import Array, Columns, Measurements, Row, columns

OPERATOR_FILES = ("ops_fp32.csv.gz", "ops_fp32.csv")
MODEL_FILES = ("models_fp32.csv.gz", "models_fp32.csv")
CALIBRATING_POINTS = 20
Skipped = Counter[str]
Table = Mapping[str, Sequence[str]]


def measure_folder(folder: str) -> Measurements:
    """The operators and models in *folder*, or in that one file."""
    path = Path(folder)
    skipped: Skipped = Counter()
    cells: list[Cell] = []
    models: list[Row] = []
    figures: dict[str, float] = {}
    for file in _files(path):
        table = _read(file)
        if "op" in table:
            found = list(_cells(table, skipped, file.name))
            figures |= _cell_figures(found)
            cells += found
        elif "model" in table:
            found_models = list(_models(table, skipped, file.name))
            figures |= _model_figures(found_models)
            models += [model.row for model in found_models]
        else:
            raise ValueError(f"{file}: expected the columns of NeuSight's ops_fp32.csv or models_fp32.csv")
    joined = _joined(cells, columns(models))
    is_model = joined.tags["model"] != ""
    selections = {
        "operators": ~is_model,
        "linear and bmm": np.isin(joined.tags["kind"], MATRIX),
        "models": is_model,
    }
    return Measurements(joined, skipped, selections, figures, _notes(cells))


def _notes(cells: Sequence["Cell"]) -> tuple[str, ...]:
    folds = load_folds()
    gpus = sorted({cell.points.gpu.name for cell in cells})
    left_out = [name for name in gpus if name in folds.gpus]
    notes = [folds.note] if folds.note else []
    if left_out:
        notes.append(f"operators on {', '.join(left_out)} by constants learnt without that GPU")
    notes.append("models by the committed constants, which no model was part of")
    return tuple(notes)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [next((path / name for name in names if (path / name).is_file()), None)
             for names in (OPERATOR_FILES, MODEL_FILES)]  # fmt: skip
    files = [file for file in found if file is not None]
    if not files:
        raise ValueError(f"{path}: expected ops_fp32.csv.gz or models_fp32.csv, as in NeuSight's set")
    return files


def _read(file: Path) -> Table:
    """The columns of a csv file."""
    lines = csv_rows(Source(file))
    names = next(lines, [])
    rows = [row for row in lines if len(row) == len(names)]
    return dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())


# ---- operators ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """The rows of one operator on one GPU."""

    points: FP32Rows
    measured_s: Array
    predicted_s: Array

    @property
    def mean_abs_error(self) -> float:
        return float(np.mean(np.abs(self.predicted_s / self.measured_s - 1.0)))

    def calibrated_error(self, points: int) -> float:
        """Mean error on the other rows once *points* of them have been measured on this GPU."""
        size = self.measured_s.size
        seen = np.random.default_rng(1).choice(size, min(points, size // 2), replace=False)
        rest = np.ones(size, dtype=bool)
        rest[seen] = False
        correction = fit_correction(self.predicted_s[seen], self.measured_s[seen])
        better = np.asarray(correction.applied_s(self.predicted_s[rest]))
        return float(np.mean(np.abs(better / self.measured_s[rest] - 1.0)))

    def name(self, at: int) -> str:
        p = self.points
        sizes = f"{p.rows[at]:.0f} x {p.columns[at]:.0f}"
        if p.op in MATRIX:
            sizes = f"{sizes} x {p.depth[at]:.0f}" + (f", batch {p.batch[at]:.0f}" if p.op == "bmm" else "")
        return f"{p.op} {sizes} on {p.gpu.name}"


def _cells(table: Table, skipped: Skipped, file: str) -> Iterator[Cell]:
    ops, devices = np.array(table["op"]), np.array(table["device"])
    measured_s = _numbers(table, "ms") * 1e-3
    sizes = {name: _numbers(table, name) for name in ("b", "m", "n", "k", "h")}
    broken = ~(measured_s > 0)
    for device in np.unique(devices):
        on_device = devices == device
        gpu = _gpu(str(device))
        if gpu is None:
            skipped[f"{file}: unknown GPU {device}"] += int(np.sum(on_device))
            continue
        for op in np.unique(ops[on_device]):
            chosen = on_device & (ops == op)
            if op not in OPERATORS:
                skipped[f"{file}: unknown operator {op}"] += int(np.sum(chosen))
                continue
            if np.any(chosen & broken):
                skipped[f"{file}: no measured time"] += int(np.sum(chosen & broken))
                chosen &= ~broken
            at = np.flatnonzero(chosen)
            if at.size:
                points = _points(str(op), gpu, {name: column[at] for name, column in sizes.items()})
                yield Cell(points, measured_s[at], _predicted_s(points, _fold(gpu)))


def _predicted_s(points: FP32Rows, fold: GpuFold) -> Array:
    return reported_s(points, fold.fit, fold.added_s[points.op], fold.least_s[points.op])


def _points(op: str, gpu: Gpu, sizes: Mapping[str, Array]) -> FP32Rows:
    """Their (m, n) by (n, k) as our rows, columns and depth."""
    if op in MATRIX:
        return FP32Rows(op, gpu, sizes["m"], sizes["k"], sizes["n"], sizes["b"])
    ones = np.ones_like(sizes["b"])
    return FP32Rows(op, gpu, sizes["b"], sizes["h"], sizes["h"], ones)


def _fold(gpu: Gpu) -> GpuFold:
    fit, added_s, least_s = neusight_fit()
    return load_folds().gpus.get(gpu.name) or GpuFold(fit, added_s, least_s)


def _numbers(table: Table, name: str) -> Array:
    """Blank entries count as 1: a linear has no batch."""
    return np.array([value or "1" for value in table[name]], dtype=np.float64)


@lru_cache(maxsize=64)
def _gpu(device: str) -> Gpu | None:
    try:
        return load_gpu(device)
    except ValueError:
        return None


def _cell_figures(cells: Sequence[Cell]) -> dict[str, float]:
    if not cells:
        return {}
    calibrated = [cell.calibrated_error(CALIBRATING_POINTS) for cell in cells if cell.measured_s.size >= 4]
    matrix = [cell.mean_abs_error for cell in cells if cell.points.op in MATRIX]
    return {
        "operators_mean_over_cells": float(np.mean([cell.mean_abs_error for cell in cells])),
        "matmuls_mean_over_cells": float(np.mean(matrix)) if matrix else 0.0,
        f"operators_mean_over_cells_with_{CALIBRATING_POINTS}_points": float(np.mean(calibrated)),
    }


def _joined(cells: Sequence[Cell], models: Columns) -> Columns:
    """Operators and models in one table; names are made when a row is printed."""
    starts = np.cumsum([0, *(cell.measured_s.size for cell in cells)])
    operators = int(starts[-1])

    def labels(tag: str, of_cell: Sequence[str]) -> list[str]:
        own = [label for cell, label in zip(cells, of_cell, strict=True) for _ in range(cell.measured_s.size)]
        blank = [""] * len(models)
        return [*own, *(models.tags[tag].tolist() if tag in models.tags else blank)]

    def name(at: int) -> str:
        if at >= operators:
            return models.name(at - operators)
        which = int(np.searchsorted(starts, at, side="right")) - 1
        return cells[which].name(at - int(starts[which]))

    tags = {
        "kind": labels("kind", [cell.points.op for cell in cells]),
        "gpu": labels("gpu", [cell.points.gpu.name for cell in cells]),
        "model": labels("model", [""] * len(cells)),
    }
    return Columns(
        np.concatenate([*(cell.measured_s for cell in cells), models.measured_s]),
        np.concatenate([*(cell.predicted_s for cell in cells), models.predicted_s]),
        {tag: np.array(values, dtype=np.str_) for tag, values in tags.items()},
        name,
    )


# ---- models ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """One model on one GPU: our prediction, with the GPU in the fit and without it, and NeuSight's own."""

    row: Row
    unseen_s: float
    neusight_s: float  # 0: not published


def _models(table: Table, skipped: Skipped, file: str) -> Iterator[Model]:
    names = list(table)
    for number, values in enumerate(zip(*table.values(), strict=True), start=2):
        record = dict(zip(names, values, strict=True))
        gpu = _gpu(record["device"])
        if gpu is None:
            skipped[f"{file}: unknown GPU {record['device']}"] += 1
            continue
        if record.get("option"):
            skipped[f"{file}: option {record['option']} is not modelled"] += 1
            continue
        try:
            yield _model(record, gpu)
        except ValueError as error:
            skipped[f"{file}:{number}: {error}"] += 1


def _model(record: Mapping[str, str], gpu: Gpu) -> Model:
    seq, batch, training = int(record["seq"]), int(record["batch"]), record["mode"] == "train"
    kernels = sum(neusight_kernels(record["model"], seq, batch, training), ())

    def seconds(fit: ComputeFit) -> float:
        return sum(priced(kernels, gpu, fit, step_load(kernels, gpu, fit)))

    mode = "training" if training else "inference"
    row = Row(
        f"{record['model']} {mode}, {batch} x {seq} on {gpu.name}",
        float(record["measured_ms"]) * 1e-3,
        seconds(neusight_fit()[0]),
        {"kind": f"model {mode}", "gpu": gpu.name, "model": record["model"]},
    )
    theirs = float(record.get("neusight_ms") or 0) * 1e-3
    return Model(row, seconds(_fold(gpu).fit), theirs)


def _model_figures(models: Sequence[Model]) -> dict[str, float]:
    if not models:
        return {}
    unseen = [abs(model.unseen_s / model.row.measured_s - 1.0) for model in models]
    figures = {"models_mean_abs_error_gpu_left_out": float(np.mean(unseen))}
    same = [model for model in models if model.neusight_s]
    if same:
        theirs = [abs(model.neusight_s / model.row.measured_s - 1.0) for model in same]
        figures["models_mean_abs_error_where_neusight_has_one"] = float(
            np.mean([abs(model.row.error) for model in same])
        )
        figures["models_mean_abs_error_of_neusight"] = float(np.mean(theirs))
    return figures
