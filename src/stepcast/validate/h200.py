"""Rows of the h200 set in the words of the library: a model, a strategy and a framework.

All were measured in plain PyTorch or with torch.compile, weights, gradients and the moments of a fused AdamW
in one format, without clipping, on one batch of random tokens that are its targets too. Where such a model's
head is its embedding, initialised with unit variance as in PyTorch, it predicts each token from the first step on:
the loss and all gradients are zero (tools/measure_updates.py: 8.4 ps for each weight updated, as in these
rows, where gradients that are not zero take 5.2 to 5.5).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepcast.cost.compute import compute_price, step_load
from stepcast.cost.fits import ComputeFit, DispatchFit, default_dispatch, default_fit
from stepcast.cost.host import elapsed_s
from stepcast.cost.memory import memory
from stepcast.cost.power import ALONE, Load
from stepcast.forecast.predict import predict
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.gpu import Gpu
from stepcast.inputs.op_times import read_works
from stepcast.inputs.rows import csv_records
from stepcast.inputs.source import Source
from stepcast.ir.arrays import BoolArray
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Execution, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.optimizer import Optimizer
from stepcast.ir.strategy import Recompute, RecomputeKind, Strategy
from stepcast.ir.work import Compute
from stepcast.ir.workload import Op
from stepcast.models.catalog import model_of
from stepcast.validate.folds import Family, load_folds, price_kernels
from stepcast.validate.scoreboard import (
    PHASES,
    MeasuredColumns,
    Measurements,
    ScoredRow,
    columns_of,
    error_figures,
    split_phases_s,
    unseen_share,
)

# The h200 set: operators, transformer blocks and training steps that we measured on one H200.
#
# Training steps go through the public ``predict``, their peaks of memory through ``memory``. Operators that
# took part in the fit are predicted by constants learnt without their family of shapes; rows of another
# folder, and blocks and steps, by the committed constants.

Record = Mapping[str, str]
SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv", "ffn": "ffn"}
GPT = {
    "gated": False,
    "activation": "gelu",
    "norm": "layer+bias",
    "position": "learned",
    "biases": ["qkv", "attention_output", "mlp"],
}
POSITIONS = 1024  # at least, of those that are learnt
BLOCK_VOCAB = 1024  # of a model around a block, whose ends are left out


def row_model(row: Record) -> Model:
    """Return a GPT- or Llama-style model; a row of a block has one layer."""
    if row["kind"] not in ("gpt", "llama"):
        raise ValueError(f"kind must be gpt or llama, not {row['kind']!r}")
    seq, experts = int(row["seq"]), int(float(row.get("experts") or 0))
    table: dict[str, object] = {field: int(row.get(column) or 1) for field, column in SIZES.items()}
    table |= {"vocab": int(row.get("vocab") or BLOCK_VOCAB), "max_seq": seq, "tied": row.get("tied") == "True"}
    if row["kind"] == "gpt":
        table |= GPT | {"max_seq": max(POSITIONS, seq)}
    if experts:
        routed = {"count": experts, "top_k": int(float(row["topk"])), "ffn": table["ffn"]}
        table |= {"experts": routed, "ffn": 0}
    return model_of(row.get("model") or row["kind"], table)


def row_strategy(row: Record) -> Strategy:
    """Return the strategy on one GPU; a block has the shards of a tensor-parallel rank and accumulates gradients."""
    batch = int(row.get("batch") or row["micro_batch"])
    block = "micro_batch" in row
    full = row.get("recompute") == "full"
    seq = int(row["seq"])
    return Strategy(
        Layout(tp=int(row.get("tp") or 1)),
        batch,
        batch * int(row.get("steps") or (2 if block else 1)),
        seq,
        precision=DType(row["dtype"]),
        recompute=Recompute(RecomputeKind.FULL if full else RecomputeKind.NONE),
        zero_gradients=0.0 if block else _zero_gradients(row_model(row), batch * seq),
    )


def _zero_gradients(model: Model, tokens: int) -> float:
    return 1.0 if model.tied else unseen_share(model, tokens)


def row_framework(row: Record) -> Framework:
    """Return plain or compiled PyTorch."""
    dtype, compiled = DType(row["dtype"]), row.get("compiled", "0") in ("1", "True")
    return Framework(
        name="pytorch",
        kernels=Kernels.COMPILED if compiled else Kernels.PLAIN,
        execution=Execution.EAGER,
        gradient_dtype=dtype,
        optimizer=Optimizer(moment_dtype=dtype, master_weights=False, clips=False),
        flash_attention=row.get("attention", "flash") == "flash",
    )


# The time that the model gives a row of the h200 operator files.


def operator_s(row: Mapping[str, str], gpu: Gpu, fit: ComputeFit) -> float:
    """Return the seconds of the measured call.

    A second kernel queues behind the first; a lone backward waits for the autograd engine.
    """
    works = read_works(row)
    prices = [compute_price(work, gpu, fit, ALONE).seconds for work in works]
    hidden_s = gpu.launch_overhead_s + fit.stream("add").latency_s - fit.step_launch_s
    seconds = sum(prices) - hidden_s * (len(works) - 1)
    if row["op"] == "sdpa_bwd":
        return float((seconds**4 + fit.backward_call_s**4) ** 0.25)
    return seconds


# Seconds of one transformer block on one GPU, called again and again by a measuring loop.
#
# Its kernels are those of a generated step between embedding and head, without what ranks say to each other.

MEASURED_ROUNDS = 3  # the heat of a short piece depends on its own length: settle it in a few rounds


class BlockTime(NamedTuple):
    forward_s: float
    backward_s: float


class BlockKernels(NamedTuple):
    """Kernels, and how many each represents."""

    works: tuple[Compute, ...]
    counts: tuple[int, ...]

    def issue_s(self, dispatch: DispatchFit, backward: bool) -> list[float]:
        pairs = zip(self.works, self.counts, strict=True)
        return [dispatch.issue_s(work, backward) * count for work, count in pairs]


def block_time(
    model: Model, strategy: Strategy, framework: Framework, gpu: Gpu, fit: ComputeFit, dispatch: DispatchFit
) -> BlockTime:
    """Return forward and backward of a *model* of one layer, without its ends."""
    layers = [
        layer
        for layer in generate(model, strategy, framework).stages[0].body_layers()
        if layer.name.startswith(("attention", "mlp"))
    ]
    forward = _kernels([op for layer in layers for op in layer.forward])
    backward = _kernels([op for layer in reversed(layers) for op in (*layer.input_gradient, *layer.weight_gradient)])
    duty = step_load((*forward.works, *backward.works), gpu, fit).duty
    forward_s, backward_s = price_kernels(forward.works, gpu, fit, Load(1e-3, duty)), [0.0]
    for _ in range(MEASURED_ROUNDS):
        load = Load(max(1e-6, sum(forward_s) + sum(backward_s)), duty)
        forward_s, backward_s = (
            price_kernels(forward.works, gpu, fit, load),
            price_kernels(backward.works, gpu, fit, load),
        )
    forward_host, backward_host = forward.issue_s(dispatch, False), backward.issue_s(dispatch, True)
    return BlockTime(
        max(elapsed_s(forward_s, forward_host), dispatch.call_s + sum(forward_host)),
        elapsed_s(backward_s, backward_host),
    )


def _kernels(ops: Sequence[Op]) -> BlockKernels:
    kernels = [(op.work, op.kernels) for op in ops if isinstance(op.work, Compute)]
    return BlockKernels(tuple(work for work, _ in kernels), tuple(count for _, count in kernels))


Skipped = Counter[str]
Peak = tuple[float, float]
ATTENTION = {"sdpa_fwd": "attention forward", "sdpa_bwd": "attention backward"}
FITTED_FILES = ("ops.csv", "ops_batched.csv", "ops_fp8_grouped.csv")
FILES = ("ops*.csv", "blocks*.csv", "models*.csv", "eager_memory*.csv")
MEMORY_BOUND_FROM_S, LONG_S = 20e-6, 50e-6


def measure_h200(folder: str) -> Measurements:
    """Compare every row of the csv files in *folder* (or of that one file)."""
    path = Path(folder)
    files = sorted(file for name in FILES for file in path.glob(name)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no csv files; expected ops.csv, blocks.csv or models.csv as in the h200 set")
    rows: list[ScoredRow] = []
    skipped: Skipped = Counter()
    peaks: list[Peak] = []
    for file in files:
        rows += _rows_of(file, skipped, peaks)
    table = columns_of(rows)
    selections = _selections(table) if rows else {}
    figures = dict(error_figures("peak memory", peaks, "mean_abs_error", "worst_abs_error"))
    return Measurements(table, skipped, selections, figures, _notes(table))


def shipped_folder() -> Path:
    """Return the folder of the set inside the package."""
    return Path(str(resources.files("stepcast") / "data" / "h200"))


def family_of(row: Mapping[str, str]) -> tuple[str, Family]:
    """Return the kind and family of shapes that an operator row is left out of a fit with."""
    op = row["op"]
    if op == "linear":
        return f"linear {row['dtype']}", _numbers(row, "N", "K")
    if op == "bmm":
        return f"bmm {row['dtype']}", _numbers(row, "B", "N", "K")
    if op == "grouped_linear":
        return "grouped", _numbers(row, "B", "N", "K")
    if op in ATTENTION:
        return ATTENTION[op], _numbers(row, "heads", "kv", "D")
    return "memory-bound", _numbers(row, "rows", "cols", "numel")


def _numbers(row: Mapping[str, str], *names: str) -> Family:
    return tuple(round(float(row[name] or 0)) for name in names)


def _rows_of(file: Path, skipped: Skipped, peaks: list[Peak]) -> Iterator[ScoredRow]:
    names, records = csv_records(Source(file))
    kind = next((part for needed, part in KINDS.items() if set(needed) <= set(names)), None)
    if kind is None:
        skipped[f"{file.name}: columns of no known h200 file"] += 1
        return
    for number, record in enumerate(records, start=2):
        try:
            rows = list(kind(record))
            if "peak_alloc" in record:
                peaks.append(_peak(record))
        except (ValueError, KeyError, TypeError) as error:
            skipped[f"{file.name}:{number}: {error}"] += 1
            continue
        if not rows and kind is not _no_times:
            skipped[f"{file.name}: {UNMODELLED}"] += 1
        yield from rows


@lru_cache(maxsize=1)
def _fitted_rows() -> frozenset[tuple[str, ...]]:
    """Return the rows that the committed constants were learnt from, without their times."""
    shapes = set()
    for name in FITTED_FILES:
        shapes |= {_shape(record) for record in csv_records(Source(shipped_folder() / name))[1]}
    return frozenset(shapes)


def _shape(record: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(value for name, value in record.items() if name != "ms")


def _operator(record: Record) -> Iterator[ScoredRow]:
    kind, family = family_of(record)
    gpu, fit, seen = load_gpu("h200"), default_fit(), "never"
    if _shape(record) in _fitted_rows():
        left_out = load_folds().without(kind, family)
        fit, seen = (fit, "in the fit") if left_out is None else (left_out, "left out")
    measured_s = float(record["ms"]) * 1e-3
    sizes = [f"{name} {value}" for name, value in record.items() if value and name not in ("op", "dtype", "ms")]
    label = f"{record['op']} {record['dtype']}"
    tags = {"kind": label, "fit": seen}
    yield ScoredRow(f"{label} {' '.join(sizes)}", measured_s, operator_s(record, gpu, fit), tags)


def _block(record: Record) -> Iterator[ScoredRow]:
    model, strategy = row_model(record), row_strategy(record)
    time = block_time(model, strategy, row_framework(record), load_gpu("h200"), default_fit(), default_dispatch())
    name = (
        f"{record['kind']} block, hidden {model.hidden}, tp {strategy.layout.tp}, "
        f"micro-batch {strategy.micro_batch} x {strategy.seq}, {strategy.precision}"
    )
    tags = {"model": f"{record['kind']} block"}
    for phase, predicted_s in (("forward", time.forward_s), ("backward", time.backward_s)):
        measured_s = float(record[f"{phase[0]}wd_ms" if phase == "forward" else "bwd_ms"]) * 1e-3
        yield ScoredRow(f"{name} {phase}", measured_s, predicted_s, {**tags, "kind": f"block {phase}"})


def _step(record: Record) -> Iterator[ScoredRow]:
    if float(record.get("experts") or 0):
        return  # a Python loop over experts that waits for the GPU in each
    strategy, framework = row_strategy(record), row_framework(record)
    prediction = predict(row_model(record), load_cluster("hgx-h200"), strategy, framework)
    how = [
        record["attention"],
        f"recompute {record['recompute']}",
        "compiled" if framework.kernels is Kernels.COMPILED else "",
    ]
    name = f"{record['model']} step, {record['batch']} x {record['seq']}, {record['dtype']}, {', '.join(how)}"
    tags = {"kind": "step", "model": record["model"]}
    name = name.removesuffix(", ")
    yield ScoredRow(name, float(record["step_ms"]) * 1e-3, prediction.step_s, tags)
    predicted = split_phases_s(prediction)
    for phase, column in zip(PHASES, ("fwd_ms", "bwd_ms", "opt_ms"), strict=True):
        if record.get(column):
            measured_s = float(record[column]) * 1e-3
            yield ScoredRow(f"{name} {phase}", measured_s, predicted[phase], {**tags, "kind": f"step {phase}"})


def _no_times(record: Record) -> Iterator[ScoredRow]:
    """Yield nothing: only the memory of such a step was measured."""
    return iter(())


def _peak(record: Record) -> Peak:
    """Return the bytes of tensors at the peak, measured and predicted."""
    (stage,) = memory(row_model(record), row_strategy(record), load_gpu("h200"), row_framework(record))
    return float(record["peak_alloc"]), stage.allocated


UNMODELLED = "experts in a Python loop, which waits for the GPU at each expert, are not modelled"
# Columns that tell the files apart -> what a row of them is.
KINDS: dict[tuple[str, ...], Callable[[Record], Iterator[ScoredRow]]] = {
    ("op", "dtype", "ms"): _operator,
    ("kind", "hidden", "micro_batch", "fwd_ms", "bwd_ms"): _block,
    ("model", "layers", "batch", "step_ms"): _step,
    ("kind", "layers", "batch", "peak_alloc"): _no_times,
}


def _selections(table: MeasuredColumns) -> dict[str, BoolArray]:
    """Return the rows that our claims of accuracy are about."""
    kind, measured_s = table.tags["kind"], table.measured_s
    linear = kind == "linear bf16"
    matrix = np.isin(kind, [f"{op} {d}" for op in ("linear", "bmm", "grouped_linear") for d in DType])
    attention = np.char.startswith(kind, "sdpa")
    whole = np.char.startswith(kind, "block") | np.char.startswith(kind, "step")
    memory_bound: BoolArray = ~(matrix | attention | whole)
    return {
        "operators": ~whole,
        "matmul, every kind": matrix,
        "linear bf16": linear,
        "linear bf16 over 50 us": linear & (measured_s > LONG_S),
        "bmm bf16": kind == "bmm bf16",
        "attention": attention,
        "memory-bound": memory_bound,
        "memory-bound over 20 us": memory_bound & (measured_s > MEMORY_BOUND_FROM_S),
        "blocks forward": kind == "block forward",
        "blocks backward": kind == "block backward",
        "training steps": kind == "step",
        **{f"{phase} of training steps": kind == f"step {phase}" for phase in PHASES},
    }


def _notes(table: MeasuredColumns) -> tuple[str, ...]:
    notes = [load_folds().note] if load_folds().note else []
    fit = table.tags.get("fit", np.array([""]))
    left_out, unseen = int(np.sum(fit == "left out")), int(np.sum(fit == "never"))
    if left_out:
        notes.append(f"{left_out} operator rows by constants learnt without their family of shapes")
    if unseen:
        notes.append(f"{unseen} operator rows were never part of a fit")
    if np.any(fit == ""):
        notes.append("blocks and training steps by the committed constants: prices from operators, host "
                     "times from these rows")  # fmt: skip
    return tuple(notes)
