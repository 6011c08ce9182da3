"""Published training runs: step times, and peak memory where it was published, against predictions."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepcast.cost.band import kind_of
from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.generate.flops import model_flops
from stepcast.hardware import Cluster
from stepcast.inputs.rows import csv_records
from stepcast.inputs.source import Source
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy
from stepcast.units import GIB
from stepcast.validate import residual
from stepcast.validate.published.rows import CORRECTED, LEFT_OUT, NotComparableError, Record, corrected, corrections
from stepcast.validate.published.setup import Setup, completed, setup_of
from stepcast.validate.scoreboard import Measurements, ScoredRow, columns, compare_each, error_figures

FILE = "training_runs.csv"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Peak memory of the fullest GPU, or of the one that logs it; *measured_bytes* is 0 for a run that
    ran out of memory. *fitted*: the framework's overhead was learnt from runs such as this.
    """

    name: str
    measured_bytes: float
    predicted_bytes: float
    fits: bool
    fitted: bool = False

    @property
    def out_of_memory(self) -> bool:
        return self.measured_bytes == 0.0


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Everything that files of published runs could be compared with; *corrected* and *left_out* are numbers
    of rows that contradict their sources.
    """

    rows: tuple[ScoredRow, ...]
    memory_rows: tuple[MemoryRow, ...]
    skipped: Mapping[str, int]
    corrected: int = 0
    left_out: int = 0


def measure_folder(*folders: str) -> Measurements:
    """The runs in the csv files of *folders* (or in these csv files) together."""
    found = measure(records_of(*folders))
    table = columns(found.rows)
    return Measurements(
        table,
        found.skipped,
        figures={**dict(figures(found)), **dict(residual.figures(table))},
        notes=(*NOTES, *_corrections_note(found), *_memory_note(found)),
        details=DETAILS,
    )


def rows(*paths: str) -> tuple[tuple[ScoredRow, ...], Mapping[str, int]]:
    """Measured and predicted step times, and why rows were left out: reason -> rows."""
    found = measure(records_of(*paths))
    return found.rows, found.skipped


CORRECTION = "correction"  # the label that tells what was corrected in a row, and why
COMMAND = "command"  # the label that tells what to type for the same prediction
DETAILS = (CORRECTION, COMMAND)
NOTES = (
    "what a row leaves open is taken from its framework's documented defaults (docs/published.md)",
    "the energy of a product on Blackwell and the host's time for a module's product were chosen with these "
    "rows in sight, no other constant of times was fitted to them; their frameworks' kernels were chosen "
    "with them in sight too",
)


def _corrections_note(found: PublishedRows) -> Iterator[str]:
    if found.corrected or found.left_out:
        many = "row" if found.corrected == 1 else "rows"
        yield (
            f"{found.corrected} {many} corrected, {found.left_out} left out, where sources contradict "
            "themselves or say elsewhere what a row lacks: docs/published.md"
        )


def _memory_note(found: PublishedRows) -> Iterator[str]:
    known = [row for row in found.memory_rows if not row.out_of_memory]
    fitted = sum(row.fitted for row in known)
    if fitted:
        yield f"peak memory: of {len(known)} rows {fitted} have overheads that were fitted to such rows"


def records_of(*paths: str) -> list[Record]:
    """The rows of csv files, or of the one in each folder."""
    return [record for path in map(Path, paths) for record in _records(path)]


def measure(records: Iterable[Record]) -> PublishedRows:
    memories: list[MemoryRow] = []
    predicted: dict[tuple[Model, Strategy, Framework, Cluster], Predicted] = {}
    records = list(corrected(records, corrections()))

    def compare(record: Record) -> ScoredRow:
        setup = setup_of(record)
        if setup.run.out_of_memory or setup.run.peak_memory_gib is not None:
            memories.append(_memory_row(setup))
        if setup.run.out_of_memory:
            raise NotComparableError("ran out of memory: compared for memory alone")
        key = (setup.model, setup.strategy, setup.framework, setup.cluster)
        measured_s = measured_step_s(setup)
        if key not in predicted:
            predicted[key] = predicted_step(setup)
        one = predicted[key]
        return ScoredRow(_label(setup), measured_s, one.step_s, _tags(setup), one.ends)

    times, skipped = compare_each(completed(records), compare)
    left_out = sum(record.get("status") == LEFT_OUT for record in records)
    changed = sum(bool(record.get(CORRECTED)) for record in records) - left_out
    return PublishedRows(tuple(times), tuple(memories), skipped, changed, left_out)


def measured_step_s(setup: Setup) -> float:
    """Seconds of a step as published, else from tokens or floating-point operations per second, or from the
    share that these are of a GPU's bf16 peak; operations are counted as the source counts them.
    """
    run, strategy = setup.run, setup.strategy
    if run.iteration_s is not None:
        return run.iteration_s
    if run.tokens_per_s_per_gpu is not None:
        return run.global_batch * strategy.seq / (run.tokens_per_s_per_gpu * run.gpus)
    flops_per_gpu = run.flops_per_gpu
    if flops_per_gpu is None and run.utilisation is not None:
        flops_per_gpu = run.utilisation * setup.cluster.gpu.matrix_peak_flops(DType.BF16)
    if flops_per_gpu is not None:
        flops = model_flops(
            setup.model, strategy.seq, run.global_batch, causal=run.counts_causal, lora_rank=strategy.lora_rank
        )
        if run.tflops_kind.startswith("hardware"):
            flops *= 4 / 3  # the forward once more
        return flops / (flops_per_gpu * run.gpus)
    raise NotComparableError("no time, tokens per second or FLOP/s is published")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step, and of the measured steps of its kind nine in ten around them."""

    step_s: float
    ends: tuple[float, float] | None


def predicted_step(setup: Setup) -> Predicted:
    prediction = predict(setup.model, setup.cluster, setup.strategy, setup.framework)
    step_s = prediction.step_s * setup.run.global_batch / setup.strategy.global_batch
    return Predicted(step_s, prediction.band.around(step_s) if prediction.band else None)


def _memory_row(setup: Setup) -> MemoryRow:
    run, framework = setup.run, setup.framework
    stages = memory(setup.model, setup.strategy, setup.cluster.gpu, framework)
    fullest = stages[0] if run.logged_by_first else max(stages, key=lambda stage: stage.total)
    measured = 0.0 if run.out_of_memory else (run.peak_memory_gib or 0.0) * GIB
    fits = all(stage.fits for stage in stages)
    return MemoryRow(run.name, measured, getattr(fullest, framework.peak), fits, framework.overhead.fitted)


def _label(setup: Setup) -> str:
    run, layout = setup.run, setup.strategy.layout
    return (
        f"{run.name} {run.model} {run.gpus} x {run.gpu} tp {layout.tp} pp {layout.pp} dp {layout.dp} "
        f"batch {setup.strategy.micro_batch}/{run.global_batch}"
    )


def _tags(setup: Setup) -> dict[str, str]:
    run, strategy = setup.run, setup.strategy
    return {
        "source": run.source.split()[0].partition("@")[0] if run.source else "",
        "framework": run.framework,
        "profile": setup.profile.name,
        "gpu": setup.cluster.gpu.name,
        "precision": str(strategy.precision),
        "kind": kind_of(setup.model, setup.cluster, strategy),
        "model": run.model.split("-")[0],
        "parallelism": _parallelism(strategy),
        "recompute": str(strategy.recompute.kind),
        "time from": "derived" if run.derived or run.iteration_s is None else "stated",
        "values": "corrected" if run.corrected else "as published",
        CORRECTION: run.corrected,
        COMMAND: setup.command,
    }


def _parallelism(strategy: Strategy) -> str:
    layout = strategy.layout
    used = [name for name in ("tp", "cp", "ep", "pp") if getattr(layout, name) > 1]
    if strategy.sharding.splits_parameters:
        used.append("fsdp")
    return " ".join(used) or "dp"


def figures(found: PublishedRows) -> Iterator[tuple[str, float]]:
    known = [row for row in found.memory_rows if not row.out_of_memory]
    parts = (
        ("peak memory", known),
        ("peak memory, overhead fitted to such rows", [row for row in known if row.fitted]),
        ("peak memory, nothing fitted", [row for row in known if not row.fitted]),
    )
    names = ("mean_abs_error", "median_abs_error", "worst_abs_error", "mean_error")
    for what, some in parts:
        yield from error_figures(what, [(row.measured_bytes, row.predicted_bytes) for row in some], *names)
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
    names, records = csv_records(Source(file))
    if "model" not in names or "num_gpus" not in names:
        raise ValueError(f"{file}: expected the columns of {FILE}, such as model, num_gpus, iter_time_s")
    return records
