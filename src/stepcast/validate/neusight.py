"""Rows of NeuSight's fp32 operator set and their predicted times.

Their linear and bmm multiply (m, n) by (n, k): the grids of the recorded kernels cover m by k. A time they
report holds the kernel and what their measuring adds, and never falls below a least time of the host.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from stepcast.cost.calibration import fit_correction
from stepcast.cost.compute import step_load
from stepcast.cost.fits import ComputeFit, neusight_fit
from stepcast.cost.matmul import matmul_seconds
from stepcast.cost.memory_bound import softmax_key, stream_seconds
from stepcast.cost.power import Load
from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.operator_tables import OperatorTable, read_operator_table
from stepcast.inputs.source import prefix_errors
from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.types import DType, dataclass, require
from stepcast.ir.work import Elementwise, ElementwiseKind, Matmul
from stepcast.validate import scoreboard

MATRIX = ("linear", "bmm")
INPUTS = {"add": 2, "mul": 2, "div": 2, "pow": 2}  # all others read one tensor
UNARY = ("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh", "softmax", "ln")
OPERATORS = (*MATRIX, *INPUTS, *UNARY)
REPEATED = Load(0.0, repeats=25)  # they call an operator 25 times, waiting for the GPU after each
SHARPNESS = 8  # of the smooth maximum of kernel and least time


@dataclass(frozen=True, slots=True)
class FP32Rows:
    """One operator on one GPU: *batch* products (rows, depth) by (depth, columns), or rows x columns."""

    op: str
    gpu: Gpu
    rows: FloatArray
    columns: FloatArray
    depth: FloatArray
    batch: FloatArray

    def __post_init__(self) -> None:
        require(self.op in OPERATORS, f"unknown operator {self.op!r}; known are {', '.join(OPERATORS)}")


def kernel_s(points: FP32Rows, fit: ComputeFit) -> FloatArray:
    """Return the seconds of the kernels themselves."""
    rows, columns, gpu = points.rows, points.columns, points.gpu
    if points.op in MATRIX:
        return np.asarray(matmul_seconds(rows, columns, points.depth, points.batch, DType.FP32, gpu, fit, REPEATED))
    written = 4.0 * rows * columns
    read, seconds = written * INPUTS.get(points.op, 1), np.empty_like(rows)
    if points.op == "softmax":
        keys = np.array([softmax_key(int(width)) for width in columns])
    else:
        keys = np.full(len(rows), "layer-norm" if points.op == "ln" else "add")
    for key in np.unique(keys):
        i = keys == key
        seconds[i] = stream_seconds(str(key), rows[i], columns[i], read[i], written[i], gpu, fit, REPEATED)
    return seconds


def reported_s(points: FP32Rows, fit: ComputeFit, added_s: float, least_s: float) -> FloatArray:
    """Return the seconds as that set reports them."""
    return np.asarray(((kernel_s(points, fit) + added_s) ** SHARPNESS + least_s**SHARPNESS) ** (1.0 / SHARPNESS))


# The kernels of the models in NeuSight's set, as eager fp32 PyTorch runs the Hugging Face code of that time.
#
# Attention stores its scores; gelu_new is spelled out in eight element-wise kernels; heads are split and
# merged by copies.

Kernel = Matmul | Elementwise
K = ElementwiseKind
FP32 = DType.FP32


class NeusightShape(msgspec.Struct, frozen=True):
    """The sizes in a configuration; *inner* is the width of all heads together."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    activation_kernels: int  # element-wise kernels of the activation function
    mask_kernels: int  # between the scores and their softmax: scale, mask, clamp
    inner: int = 0
    fused_qkv: bool = False
    head_dense: bool = False  # a dense layer with activation and norm before the decoder
    decoder_layers: int = 0  # with cross attention, besides the *layers* of the encoder
    norm_kernels: int = 1  # a norm spelled out in element-wise kernels takes several


ARCHITECTURES = msgspec.convert(scoreboard.load_table("rows/neusight"), dict[str, NeusightShape])


def neusight_kernels(model: str, seq: int, batch: int, training: bool) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Return forward and, when *training*, backward kernels; ValueError for a model of unknown sizes."""
    require(model in ARCHITECTURES, f"unknown model {model!r}; known are {', '.join(ARCHITECTURES)}")
    forward = tuple(_forward(ARCHITECTURES[model], seq, batch, training))
    return forward, tuple(_backward(forward)) if training else ()


def _wave(kind: ElementwiseKind, rows: int, columns: int, inputs: int = 1, backward: bool = False) -> Elementwise:
    size = 4.0 * rows * columns
    return Elementwise(kind, rows, columns, inputs * size, size, backward, FP32)


def _forward(shape: NeusightShape, seq: int, batch: int, training: bool) -> list[Kernel]:
    """Return the kernels of a forward pass; each branch is added to the stream, with dropout in training, and the sum
    is normed.
    """
    tokens, hidden, heads, norms = seq * batch, shape.hidden, shape.heads, shape.norm_kernels
    rows, products, width = batch * heads * seq, 1 if shape.fused_qkv else 3, shape.inner or hidden
    norm = _wave(K.LAYER_NORM if norms == 1 else K.ADD, tokens, hidden)
    ends = [_wave(K.DROPOUT, tokens, hidden)] * training + [_wave(K.ADD, tokens, hidden, 2)] + [norm] * norms
    attention: list[Kernel] = [
        *[Matmul(tokens, 3 * width // products, hidden, 1, FP32)] * products,
        *[_wave(K.COPY, tokens, width)] * 3,  # split into heads
        Matmul(seq, seq, width // heads, batch * heads, FP32),
        *[_wave(K.ADD, rows, seq)] * shape.mask_kernels,
        _wave(K.SOFTMAX, rows, seq),
        *[_wave(K.DROPOUT, rows, seq)] * training,
        Matmul(seq, width // heads, seq, batch * heads, FP32),
        _wave(K.COPY, tokens, width),  # merge heads
        Matmul(tokens, hidden, width, 1, FP32),
        *ends,
    ]
    mlp: list[Kernel] = [
        Matmul(tokens, shape.ffn, hidden, 1, FP32),
        *[_wave(K.ADD, tokens, shape.ffn, 2 if index >= 6 else 1) for index in range(shape.activation_kernels)],
        Matmul(tokens, hidden, shape.ffn, 1, FP32),
        *ends,
    ]
    head: list[Kernel] = [_wave(K.ADD, tokens, hidden), _wave(K.LAYER_NORM, tokens, hidden)]
    return [
        _wave(K.EMBEDDING, tokens, hidden),
        *[*attention, *mlp] * shape.layers,
        *[*attention, *attention, *mlp] * shape.decoder_layers,
        *([Matmul(tokens, hidden, hidden, 1, FP32), *head] if shape.head_dense else ()),
        Matmul(tokens, shape.vocab, hidden, 1, FP32),
    ]


def _backward(forward: tuple[Kernel, ...]) -> Iterator[Kernel]:
    """Yield two products for each product; element-wise kernels read the gradient and the saved tensor."""
    for work in reversed(forward):
        if isinstance(work, Matmul):
            yield Matmul(work.m, work.k, work.n, work.batch, FP32)
            yield Matmul(work.k, work.n, work.m, work.batch, FP32)
        else:
            kind, inputs = (K.ADD, 4) if work.kind is K.LAYER_NORM else (work.kind, 2)
            yield _wave(kind, work.rows, work.columns, inputs, work.kind in (K.SOFTMAX, K.EMBEDDING))


# NeuSight's set (ASPLOS'25): fp32 operators on five GPUs, and models, compared with NeuSight's own predictions.
#
# An operator on a GPU of that set is predicted by constants learnt without that GPU; one on any other GPU by
# the committed constants, which have not seen it either. Models took part in no fit.

FILES = ("ops_fp32.csv", "models_fp32.csv")
CALIBRATING_POINTS = 20


def measure_neusight(folder: str) -> scoreboard.Measurements:
    """Compare the operators and models in *folder*, or in that one file."""
    skipped: Counter[str] = Counter()
    pieces: list[scoreboard.MeasuredColumns] = []
    figures: dict[str, float] = {}
    path = Path(folder)
    places = ((path / f"{name}.gz", path / name) for name in FILES)
    files = [file for names in places if (file := next(filter(Path.is_file, names), None))]
    require(bool(files) or path.is_file(), f"{path}: expected ops_fp32.csv.gz or models_fp32.csv, as in NeuSight's set")
    for file in files or [path]:
        table = read_operator_table(str(file))
        if "op" in table.columns:
            if cells := list(_compare_operators(table, skipped, file.name)):
                figures |= _cell_figures(cells)
                pieces += cells
        elif "model" in table.columns:
            pieces.append(_compare_models(file, skipped, figures))
        else:
            raise ValueError(f"{file}: expected the columns of NeuSight's ops_fp32.csv or models_fp32.csv")
    joined = scoreboard.join_columns(pieces)
    operators: BoolArray = joined.labels("model") == ""
    matrix = np.isin(joined.labels("kind"), MATRIX)
    selections = {"operators": operators, "linear and bmm": matrix, "models": ~operators}
    folds = scoreboard.load_folds()
    left_out = [name for name in np.unique(joined.labels("gpu")[operators]).tolist() if name in folds.gpus]
    notes = [folds.note] if folds.note else []
    if left_out:
        notes.append(f"operators on {', '.join(left_out)} by constants learnt without that GPU")
    notes.append("models by the committed constants, which no model was part of")
    return scoreboard.Measurements(joined, skipped, selections, figures, tuple(notes))


@lru_cache(maxsize=64)
def _gpu(device: str) -> Gpu | None:
    with suppress(ValueError):
        return load_gpu(device)
    return None


def _fold(gpu: Gpu) -> scoreboard.GpuFold:
    return scoreboard.load_folds().gpus.get(gpu.name) or scoreboard.GpuFold(*neusight_fit())


def _compare_operators(table: OperatorTable, skipped: Counter[str], file: str) -> Iterator[scoreboard.MeasuredColumns]:
    """Yield the rows of each operator on each GPU."""
    # A blank counts as 1: a linear has no batch.
    sizes = {name: np.where(table.columns[name] == "", "1", table.columns[name]) for name in ("ms", *"bmnkh")}
    for rows in replace(table, columns={**table.columns, **sizes}).split(("device", "op")):
        op, gpu = rows.word("op"), _gpu(rows.word("device"))
        if gpu is None or op not in OPERATORS:
            unknown = f"unknown operator {op}" if gpu else f"unknown GPU {rows.word('device')}"
            skipped[f"{file}: {unknown}"] += len(rows)
            continue
        timed = rows.numbers("ms") > 0
        if not timed.all():
            skipped[f"{file}: no measured time"] += int(np.sum(~timed))
        if timed.any():
            yield _compare_cell(op, gpu, {name: rows.numbers(name)[timed] for name in sizes})


def _compare_cell(op: str, gpu: Gpu, sizes: Mapping[str, FloatArray]) -> scoreboard.MeasuredColumns:
    """Return one operator on one GPU; their (m, n) by (n, k) are our rows, columns and depth."""
    b, m, n, k, h = (sizes[name] for name in "bmnkh")
    points = FP32Rows(op, gpu, m, k, n, b) if op in MATRIX else FP32Rows(op, gpu, b, h, h, np.ones_like(b))

    def name(index: int) -> str:
        words = f"{points.rows[index]:.0f} x {points.columns[index]:.0f}"
        if op in MATRIX:
            words += f" x {points.depth[index]:.0f}" + (f", batch {points.batch[index]:.0f}" if op == "bmm" else "")
        return f"{op} {words} on {gpu.name}"

    fold = _fold(gpu)
    predicted_s = reported_s(points, fold.fit, fold.added_s[op], fold.least_s[op])
    tags = {tag: np.full(len(b), word) for tag, word in (("kind", op), ("gpu", gpu.name), ("model", ""))}
    return scoreboard.MeasuredColumns(sizes["ms"] * 1e-3, predicted_s, tags, name)


def _calibrated_error(cell: scoreboard.MeasuredColumns) -> float:
    """Return the mean error on the other rows once some have been measured on this GPU."""
    order = np.random.default_rng(1).choice(len(cell), min(CALIBRATING_POINTS, len(cell) // 2), replace=False)
    correction = fit_correction(cell.predicted_s[order], cell.measured_s[order])
    predicted_s, measured_s = (np.delete(seconds, order) for seconds in (cell.predicted_s, cell.measured_s))
    return float(np.mean(np.abs(np.asarray(correction.applied_s(predicted_s)) / measured_s - 1.0)))


def _cell_figures(cells: Sequence[scoreboard.MeasuredColumns]) -> dict[str, float]:
    errors = [float(np.mean(np.abs(cell.error))) for cell in cells]
    matrix = [error for cell, error in zip(cells, errors, strict=True) if cell.tags["kind"][0] in MATRIX]
    calibrated = [_calibrated_error(cell) for cell in cells if len(cell) >= 4]
    return {
        "operators_mean_over_cells": float(np.mean(errors)),
        "matmuls_mean_over_cells": float(np.mean(matrix)) if matrix else 0.0,
        f"operators_mean_over_cells_with_{CALIBRATING_POINTS}_points": float(np.mean(calibrated)),
    }


def _compare_models(path: Path, skipped: Counter[str], figures: dict[str, float]) -> scoreboard.MeasuredColumns:
    """Return the models; *figures* gains errors with the GPU left out of the fit, and of NeuSight's own predictions."""
    unseen: list[float] = []
    theirs: list[tuple[float, float]] = []

    def compare(numbered: tuple[int, scoreboard.Record]) -> list[scoreboard.ScoredRow]:
        number, record = numbered
        gpu = _gpu(record["device"])
        if gpu is None:
            raise ValueError(f"{path.name}: unknown GPU {record['device']}")
        require(not record.get("option"), f"{path.name}: option {record.get('option')} is not modelled")
        seq, batch, training = int(record["seq"]), int(record["batch"]), record["mode"] == "train"
        with prefix_errors(f"{path.name}:{number}"):
            kernels = sum(neusight_kernels(record["model"], seq, batch, training), ())
        mode, measured_s = "training" if training else "inference", float(record["measured_ms"]) * 1e-3
        predicted_s, unseen_s = (
            sum(scoreboard.price_kernels(kernels, gpu, fit, step_load(kernels, gpu, fit)))
            for fit in (neusight_fit()[0], _fold(gpu).fit)
        )
        name = f"{record['model']} {mode}, {batch} x {seq} on {gpu.name}"
        tags = {"kind": f"model {mode}", "gpu": gpu.name, "model": record["model"]}
        row = scoreboard.ScoredRow(name, measured_s, predicted_s, tags)
        unseen.append(abs(unseen_s / measured_s - 1.0))
        if record.get("neusight_ms"):
            theirs.append((abs(row.error), abs(float(record["neusight_ms"]) * 1e-3 / measured_s - 1.0)))
        return [row]

    rows, left_out = scoreboard.compare_each(enumerate(scoreboard.read_records(path), start=2), compare)
    skipped.update(left_out)
    if unseen:
        figures["models_mean_abs_error_gpu_left_out"] = float(np.mean(unseen))
    if theirs:
        names = ("models_mean_abs_error_where_neusight_has_one", "models_mean_abs_error_of_neusight")
        figures.update(zip(names, np.mean(theirs, axis=0).tolist(), strict=True))
    return scoreboard.columns_of(rows)
