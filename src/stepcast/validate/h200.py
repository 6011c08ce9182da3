"""Rows of the h200 set in the words of the library: a model, a strategy and a framework.

All were measured in plain PyTorch or with torch.compile, weights, gradients and the moments of a fused AdamW
in one format, without clipping, on one batch of random tokens that are its targets too. Where such a model's
head is its embedding, initialised with unit variance as in PyTorch, it predicts each token from the first step on:
the loss and all gradients are zero (tools/measure_updates.py: 8.4 ps for each weight updated, as in these
rows, where gradients that are not zero take 5.2 to 5.5).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

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
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.model_table import model_of
from stepcast.inputs.op_times import read_works
from stepcast.inputs.source import DATA, Source, csv_records
from stepcast.ir.arrays import BoolArray
from stepcast.ir.framework import Execution, Framework, Kernels, Optimizer
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import Recompute, RecomputeKind, Strategy
from stepcast.ir.types import DType, require
from stepcast.ir.work import Compute
from stepcast.validate import scoreboard

# The h200 set: operators, transformer blocks and training steps that we measured on one H200.
#
# Training steps go through the public ``predict``, their peaks of memory through ``memory``. Operators that
# took part in the fit are predicted by constants learnt without their family of shapes; rows of another
# folder, and blocks and steps, by the committed constants.

SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv", "ffn": "ffn"}
GPT = {"gated": False, "activation": "gelu", "norm": "layer+bias", "position": "learned",
       "biases": ["qkv", "attention_output", "mlp"]}  # fmt: skip
POSITIONS = 1024  # at least, of those that are learnt
BLOCK_VOCAB = 1024  # of a model around a block, whose ends are left out


def row_model(row: scoreboard.Record) -> Model:
    """Return a GPT- or Llama-style model; a row of a block has one layer."""
    require(row["kind"] in ("gpt", "llama"), f"kind must be gpt or llama, not {row['kind']!r}")
    seq, experts = int(row["seq"]), int(float(row.get("experts") or 0))
    table: dict[str, object] = {field: int(row.get(column) or 1) for field, column in SIZES.items()}
    table |= {"vocab": int(row.get("vocab") or BLOCK_VOCAB), "max_seq": seq, "tied": row.get("tied") == "True"}
    if row["kind"] == "gpt":
        table |= GPT | {"max_seq": max(POSITIONS, seq)}
    if experts:
        table |= {"experts": {"count": experts, "top_k": int(float(row["topk"])), "ffn": table["ffn"]}, "ffn": 0}
    return model_of(row.get("model") or row["kind"], table)


def row_strategy(row: scoreboard.Record) -> Strategy:
    """Return the strategy on one GPU; a block has the shards of a tensor-parallel rank and accumulates gradients."""
    batch, seq = int(row.get("batch") or row["micro_batch"]), int(row["seq"])
    block, full = "micro_batch" in row, row.get("recompute") == "full"
    model = row_model(row)
    zeros = 0.0 if block else 1.0 if model.tied else scoreboard.unseen_share(model, batch * seq)
    layout, global_batch = Layout(tp=int(row.get("tp") or 1)), batch * int(row.get("steps") or (2 if block else 1))
    recompute, dtype = Recompute(RecomputeKind.FULL if full else RecomputeKind.NONE), DType(row["dtype"])
    return Strategy(layout, batch, global_batch, seq, precision=dtype, recompute=recompute, zero_gradients=zeros)


def row_framework(row: scoreboard.Record) -> Framework:
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


def operator_s(row: scoreboard.Record, gpu: Gpu, fit: ComputeFit) -> float:
    """Return the seconds that the model gives the call that a row of the operator files measured.

    A second kernel queues behind the first; a lone backward waits for the autograd engine.
    """
    prices = [compute_price(work, gpu, fit, ALONE).seconds for work in read_works(row)]
    hidden_s = gpu.launch_overhead_s + fit.stream("add").latency_s - fit.step_launch_s
    seconds = sum(prices) - hidden_s * (len(prices) - 1)
    return float((seconds**4 + fit.backward_call_s**4) ** 0.25) if row["op"] == "sdpa_bwd" else seconds


# Seconds of one transformer block on one GPU, called again and again by a measuring loop.
#
# Its kernels are those of a generated step between embedding and head, without what ranks say to each other.

MEASURED_ROUNDS = 3  # the heat of a short piece depends on its own length: settle it in a few rounds


def block_time(
    model: Model, strategy: Strategy, framework: Framework, gpu: Gpu, fit: ComputeFit, dispatch: DispatchFit
) -> scoreboard.Pair:
    """Return the seconds of forward and backward of a *model* of one layer, without its ends."""
    body = generate(model, strategy, framework).stages[0].body_layers()
    layers = [layer for layer in body if layer.name.startswith(("attention", "mlp"))]
    forward = [op for layer in layers for op in layer.forward]
    backward = [op for layer in reversed(layers) for op in (*layer.input_gradient, *layer.weight_gradient)]
    works: list[list[Compute]] = []
    host_s: list[list[float]] = []
    for is_backward, ops in enumerate((forward, backward)):
        kernels = [(op.work, op.kernels) for op in ops if isinstance(op.work, Compute)]
        works.append([work for work, _ in kernels])
        host_s.append([dispatch.issue_s(work, bool(is_backward)) * count for work, count in kernels])
    duty = step_load((*works[0], *works[1]), gpu, fit).duty
    seconds = [scoreboard.price_kernels(works[0], gpu, fit, Load(1e-3, duty)), [0.0]]
    for _ in range(MEASURED_ROUNDS):
        load = Load(max(1e-6, sum(map(sum, seconds))), duty)
        seconds = [scoreboard.price_kernels(of_pass, gpu, fit, load) for of_pass in works]
    forward_s, backward_s = (elapsed_s(*pair) for pair in zip(seconds, host_s, strict=True))
    return max(forward_s, dispatch.call_s + sum(host_s[0])), backward_s


FITTED_FILES = ("ops.csv", "ops_batched.csv", "ops_fp8_grouped.csv")
FILES = ("ops*.csv", "blocks*.csv", "models*.csv", "eager_memory*.csv")
MEMORY_BOUND_FROM_S, LONG_S = 20e-6, 50e-6


def measure_h200(folder: str) -> scoreboard.Measurements:
    """Compare every row of the csv files in *folder* (or of that one file)."""
    path = Path(folder)
    files = sorted(file for name in FILES for file in path.glob(name)) if path.is_dir() else [path]
    require(bool(files), f"{path}: no csv files; expected ops.csv, blocks.csv or models.csv as in the h200 set")
    skipped: Counter[str] = Counter()
    peaks: list[scoreboard.Pair] = []
    table = scoreboard.columns_of(row for file in files for row in _rows_of(file, skipped, peaks))
    figures = scoreboard.error_figures({"peak memory": peaks}, "mean_abs_error", "worst_abs_error")
    fit = table.labels("fit") if len(table) else np.array([""])
    left_out, unseen, others = (int(np.sum(fit == word)) for word in ("left out", "never", ""))
    committed = "prices from operators, host times from these rows"
    notes = {
        scoreboard.load_folds().note: bool(scoreboard.load_folds().note),
        f"{left_out} operator rows by constants learnt without their family of shapes": left_out,
        f"{unseen} operator rows were never part of a fit": unseen,
        f"blocks and training steps by the committed constants: {committed}": others,
    }
    noted = tuple(note for note, applies in notes.items() if applies)
    return scoreboard.Measurements(table, skipped, _selections(table), figures, noted)


def shipped_folder() -> Path:
    """Return the folder of the set inside the package."""
    return DATA / "h200"


# Operator -> kind of rows that are left out of a fit together, and the columns that make a family of shapes.
FAMILIES = {
    "linear": ("linear {dtype}", ("N", "K")),
    "bmm": ("bmm {dtype}", ("B", "N", "K")),
    "grouped_linear": ("grouped", ("B", "N", "K")),
    "sdpa_fwd": ("attention forward", ("heads", "kv", "D")),
    "sdpa_bwd": ("attention backward", ("heads", "kv", "D")),
}


def family_of(row: scoreboard.Record) -> tuple[str, scoreboard.Family]:
    """Return the kind and family of shapes that an operator row is left out of a fit with."""
    kind, columns = FAMILIES.get(row["op"], ("memory-bound", ("rows", "cols", "numel")))
    return kind.format(dtype=row.get("dtype")), tuple(round(float(row[name] or 0)) for name in columns)


def _rows_of(file: Path, skipped: Counter[str], peaks: list[scoreboard.Pair]) -> Iterator[scoreboard.ScoredRow]:
    names, records = csv_records(Source(file))
    kind = next((part for needed, part in KINDS.items() if set(needed) <= set(names)), None)
    if kind is None:
        skipped[f"{file.name}: columns of no known h200 file"] += 1
        return
    for number, record in enumerate(records, start=2):
        try:
            rows = list(kind(record))
            if "peak_alloc" in record:
                (stage,) = memory(row_model(record), row_strategy(record), load_gpu("h200"), row_framework(record))
                peaks.append((float(record["peak_alloc"]), stage.allocated))
        except (ValueError, KeyError, TypeError) as error:
            skipped[f"{file.name}:{number}: {error}"] += 1
            continue
        if not rows and "step_ms" in record:
            skipped[f"{file.name}: {UNMODELLED}"] += 1
        yield from rows


@lru_cache(maxsize=1)
def _fitted_rows() -> frozenset[tuple[str, ...]]:
    """Return the rows that the committed constants were learnt from, without their times."""
    files = (csv_records(Source(shipped_folder() / name))[1] for name in FITTED_FILES)
    return frozenset(_shape(record) for records in files for record in records)


def _shape(record: scoreboard.Record) -> tuple[str, ...]:
    return tuple(value for name, value in record.items() if name != "ms")


def _operator(record: scoreboard.Record) -> Iterator[scoreboard.ScoredRow]:
    fit, seen = default_fit(), "never"
    if _shape(record) in _fitted_rows():
        left_out = scoreboard.load_folds().families.get(family_of(record))
        fit, seen = (fit, "in the fit") if left_out is None else (left_out, "left out")
    sizes = [f"{name} {value}" for name, value in record.items() if value and name not in ("op", "dtype", "ms")]
    label, predicted_s = f"{record['op']} {record['dtype']}", operator_s(record, load_gpu("h200"), fit)
    tags = {"kind": label, "fit": seen}
    yield scoreboard.ScoredRow(f"{label} {' '.join(sizes)}", float(record["ms"]) * 1e-3, predicted_s, tags)


def _block(record: scoreboard.Record) -> Iterator[scoreboard.ScoredRow]:
    model, strategy = row_model(record), row_strategy(record)
    seconds = block_time(model, strategy, row_framework(record), load_gpu("h200"), default_fit(), default_dispatch())
    name = (
        f"{record['kind']} block, hidden {model.hidden}, tp {strategy.layout.tp}, "
        f"micro-batch {strategy.micro_batch} x {strategy.seq}, {strategy.precision}"
    )
    for phase, column, predicted_s in zip(scoreboard.PHASES, ("fwd_ms", "bwd_ms"), seconds, strict=False):
        tags = {"model": f"{record['kind']} block", "kind": f"block {phase}"}
        yield scoreboard.ScoredRow(f"{name} {phase}", float(record[column]) * 1e-3, predicted_s, tags)


def _step(record: scoreboard.Record) -> Iterator[scoreboard.ScoredRow]:
    if float(record.get("experts") or 0):
        return  # a Python loop over experts that waits for the GPU in each
    framework = row_framework(record)
    prediction = predict(row_model(record), load_cluster("hgx-h200"), row_strategy(record), framework)
    compiled = ", compiled" if framework.kernels is Kernels.COMPILED else ""
    how = f"{record['attention']}, recompute {record['recompute']}{compiled}"
    name = f"{record['model']} step, {record['batch']} x {record['seq']}, {record['dtype']}, {how}"
    phases = {f" {phase}": seconds for phase, seconds in scoreboard.split_phases_s(prediction).items()}
    predicted = {"": prediction.step_s, **phases}
    for (phase, predicted_s), column in zip(predicted.items(), ("step_ms", "fwd_ms", "bwd_ms", "opt_ms"), strict=True):
        if not phase or record.get(column):
            tags = {"kind": f"step{phase}", "model": record["model"]}
            yield scoreboard.ScoredRow(f"{name}{phase}", float(record[column]) * 1e-3, predicted_s, tags)


UNMODELLED = "experts in a Python loop, which waits for the GPU at each expert, are not modelled"
# Columns that tell the files apart -> what a row of them is.
KINDS: dict[tuple[str, ...], Callable[[scoreboard.Record], Iterator[scoreboard.ScoredRow]]] = {
    ("op", "dtype", "ms"): _operator,
    ("kind", "hidden", "micro_batch", "fwd_ms", "bwd_ms"): _block,
    ("model", "layers", "batch", "step_ms"): _step,
    ("kind", "layers", "batch", "peak_alloc"): lambda record: iter(()),  # only the memory of a step was measured
}


def _selections(table: scoreboard.MeasuredColumns) -> dict[str, BoolArray]:
    """Return the rows that our claims of accuracy are about."""
    kind, measured_s = table.labels("kind"), table.measured_s
    linear = kind == "linear bf16"
    matrix = np.isin(kind, [f"{op} {d}" for op in ("linear", "bmm", "grouped_linear") for d in DType])
    attention = np.char.startswith(kind, "sdpa")
    operators: BoolArray = ~(np.char.startswith(kind, "block") | np.char.startswith(kind, "step"))
    memory_bound = operators & ~(matrix | attention)
    return {
        "operators": operators,
        "matmul, every kind": matrix,
        "linear bf16": linear,
        "linear bf16 over 50 us": linear & (measured_s > LONG_S),
        "bmm bf16": kind == "bmm bf16",
        "attention": attention,
        "memory-bound": memory_bound,
        "memory-bound over 20 us": memory_bound & (measured_s > MEMORY_BOUND_FROM_S),
        **{f"blocks {phase}": kind == f"block {phase}" for phase in scoreboard.PHASES[:2]},
        "training steps": kind == "step",
        **{f"{phase} of training steps": kind == f"step {phase}" for phase in scoreboard.PHASES},
    }
