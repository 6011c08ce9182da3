"""Published training runs: step times, and peak memory where it was published, against predictions."""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepcast.cost.memory import memory
from stepcast.cost.memory.overhead import OVERHEADS
from stepcast.forecast.predict import predict
from stepcast.generate.flops import model_flops
from stepcast.hardware import Cluster
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy
from stepcast.models.columns import model_of_columns
from stepcast.units import GIB
from stepcast.validate.published.cluster import cluster_of
from stepcast.validate.published.defaults import defaults_of
from stepcast.validate.published.run import NotComparableError, PublishedRun, run_of
from stepcast.validate.published.software import calibration_of
from stepcast.validate.published.strategy import strategy_of
from stepcast.validate.scoreboard import Measurements, Row, columns, summary

FILE = "training_runs.csv"
Record = Mapping[str, str | None]
Skipped = Counter[str]


@dataclass(frozen=True, slots=True)
class Setup:
    """A published run in our nouns, and what its row left open."""

    run: PublishedRun
    model: Model
    cluster: Cluster
    strategy: Strategy
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Peak memory of the fullest GPU; *measured_bytes* is 0 for a run that ran out of memory."""

    name: str
    measured_bytes: float
    predicted_bytes: float
    fits: bool

    @property
    def out_of_memory(self) -> bool:
        return self.measured_bytes == 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that a file of published runs could be compared with."""

    rows: tuple[Row, ...]
    memory_rows: tuple[MemoryRow, ...]
    skipped: Mapping[str, int]


def measure_folder(folder: str) -> Measurements:
    """The runs in *folder*'s csv file, or in that one csv file."""
    found = measure(Path(folder))
    return Measurements(columns(found.rows), found.skipped, figures=dict(_figures(found)), notes=NOTES)


def rows(path: str) -> tuple[tuple[Row, ...], Mapping[str, int]]:
    """Measured and predicted step times, and why rows were left out: reason -> rows."""
    found = measure(Path(path))
    return found.rows, found.skipped


NOTES = (
    "what a row leaves open is taken from its framework's documented defaults (docs/published.md)",
    "no constant was fitted to these rows; their frameworks' kernels were chosen with the rows in sight",
)


def measure(path: Path) -> Found:
    times: list[Row] = []
    memories: list[MemoryRow] = []
    skipped: Skipped = Counter()
    predicted: dict[tuple[Model, Strategy, Cluster], float] = {}
    for record in completed(list(_records(path))):
        try:
            setup = setup_of(record)
            if setup.run.out_of_memory or setup.run.peak_memory_gib is not None:
                memories.append(_memory_row(setup))
            if setup.run.out_of_memory:
                skipped["ran out of memory: compared for memory alone"] += 1
                continue
            key = (setup.model, setup.strategy, setup.cluster)
            measured_s = measured_step_s(setup)
            if key not in predicted:
                predicted[key] = predicted_step_s(setup)
            times.append(Row(_label(setup), measured_s, predicted[key], _tags(setup)))
        except ValueError as error:
            skipped[_reason(error)] += 1
    return Found(tuple(times), tuple(memories), skipped)


def completed(records: Sequence[Record]) -> Iterator[Record]:
    """*records* with blank heads as most runs of the same source and hidden size have them."""
    known: dict[tuple[str | None, str | None], Counter[str]] = {}
    for record in records:
        if heads := record.get("heads"):
            known.setdefault((record.get("source"), record.get("hidden")), Counter())[heads] += 1
    for record in records:
        usual = known.get((record.get("source"), record.get("hidden")))
        blank = not record.get("heads") and record.get("hidden") and usual
        yield {**record, "heads": usual.most_common(1)[0][0]} if blank and usual else record


def setup_of(record: Record) -> Setup:
    """The model, cluster and strategy of one row; a ValueError where it states too little."""
    run = run_of(record)
    model = model_of_columns(run.model, record)
    assumptions: list[str] = []
    strategy = strategy_of(run, model, assumptions)
    if strategy.seq > model.max_seq:
        model = model.with_max_seq(strategy.seq)
    cluster = cluster_of(run, assumptions)
    return Setup(run, model, cluster, strategy, tuple(assumptions))


def measured_step_s(setup: Setup) -> float:
    """Seconds of a step as published, else from tokens or floating-point operations per second."""
    run, strategy = setup.run, setup.strategy
    if run.iteration_s is not None:
        return run.iteration_s
    if run.tokens_per_s_per_gpu is not None:
        return run.global_batch * strategy.seq / (run.tokens_per_s_per_gpu * run.gpus)
    if run.flops_per_gpu is not None:
        flops = model_flops(setup.model, strategy.seq, run.global_batch, lora_rank=strategy.lora_rank)
        if run.tflops_kind.startswith("hardware"):
            flops *= 4 / 3  # the forward once more
        return flops / (run.flops_per_gpu * run.gpus)
    raise NotComparableError("no time, tokens per second or FLOP/s is published")


def predicted_step_s(setup: Setup) -> float:
    gpu = setup.cluster.gpu
    kernel = defaults_of(setup.run.framework).attention
    calibration = calibration_of(kernel, gpu.name, gpu.architecture)
    report = predict(setup.model, setup.cluster, setup.strategy, calibration=calibration).report
    return report.step_s * setup.run.global_batch / setup.strategy.global_batch


def _memory_row(setup: Setup) -> MemoryRow:
    run, known = setup.run, defaults_of(setup.run.framework)
    overhead = OVERHEADS.get(f"{known.memory}-bf16" if "bf16-optimizer" in run.sharding else known.memory)
    stages = memory(setup.model, setup.strategy, setup.cluster.gpu, overhead=overhead)
    fullest = max(stages, key=lambda stage: stage.total)
    measured = 0.0 if run.out_of_memory else (run.peak_memory_gib or 0.0) * GIB
    return MemoryRow(run.name, measured, getattr(fullest, known.peak), all(stage.fits for stage in stages))


def _label(setup: Setup) -> str:
    run, layout = setup.run, setup.strategy.layout
    return (
        f"{run.name} {run.model} {run.gpus} x {run.gpu} tp {layout.tp} pp {layout.pp} dp {layout.dp} "
        f"batch {setup.strategy.micro_batch}/{run.global_batch}"
    )


def _tags(setup: Setup) -> dict[str, str]:
    run, strategy = setup.run, setup.strategy
    return {
        "framework": run.framework,
        "gpu": setup.cluster.gpu.name,
        "precision": str(strategy.precision),
        "model": run.model.split("-")[0],
        "parallelism": _parallelism(strategy),
        "recompute": str(strategy.recompute.kind),
        "time from": "derived" if run.derived or run.iteration_s is None else "stated",
    }


def _parallelism(strategy: Strategy) -> str:
    layout = strategy.layout
    used = [name for name in ("tp", "cp", "ep", "pp") if getattr(layout, name) > 1]
    if strategy.sharding.splits_parameters:
        used.append("fsdp")
    return " ".join(used) or "dp"


def _reason(error: ValueError) -> str:
    return str(error)


def _figures(found: Found) -> Iterator[tuple[str, float]]:
    from numpy import array

    known = [row for row in found.memory_rows if not row.out_of_memory]
    one = summary(
        array([row.measured_bytes for row in known], dtype=float),
        array([row.predicted_bytes for row in known], dtype=float),
    )
    if one is not None:
        yield "peak memory: mean_abs_error", one.mean_abs_error
        yield "peak memory: median_abs_error", one.median_abs_error
        yield "peak memory: worst_abs_error", one.worst_abs_error
        yield "peak memory: mean_error", one.mean_error
    over = [row for row in found.memory_rows if row.out_of_memory]
    if over:
        yield "out of memory, predicted not to fit", sum(not row.fits for row in over) / len(over)


def _records(path: Path) -> Iterable[Record]:
    file = path if path.is_file() else path / FILE
    if not file.is_file():
        others = sorted(path.glob("*.csv")) if path.is_dir() else []
        if not others:
            raise ValueError(f"{path}: expected {FILE}, or a csv file with its columns")
        file = others[0]
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if "model" not in (reader.fieldnames or ()) or "num_gpus" not in (reader.fieldnames or ()):
            raise ValueError(f"{file}: expected the columns of {FILE}, such as model, num_gpus, iter_time_s")
        yield from reader
