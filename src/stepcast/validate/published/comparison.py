"""Published training runs: step times, and peak memory where it was published, against predictions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepcast.cost.band import kind_of
from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.generate.flops import model_flops
from stepcast.ir.arrays import FloatArray
from stepcast.ir.types import DType, group_by_key, require
from stepcast.units import GIB, format_percent
from stepcast.validate import scoreboard
from stepcast.validate.published.setup import (
    CORRECTED,
    LEFT_OUT,
    PublishedRun,
    Record,
    Setup,
    complete_blanks,
    complete_heads,
    correct_records,
    load_corrections,
    read_run,
    read_setup,
)

FILE = "training_runs.csv"


class MemoryRow(NamedTuple):
    """Peak memory of the fullest GPU, or of the one that logs it; *measured_bytes* is 0 for a run out of memory.

    *fitted*: the framework's overhead was learnt from such runs.
    """

    name: str
    measured_bytes: float
    predicted_bytes: float
    fits: bool
    fitted: bool = False

    @property
    def out_of_memory(self) -> bool:
        return self.measured_bytes == 0.0

    @property
    def pair(self) -> scoreboard.Pair:
        return self.measured_bytes, self.predicted_bytes


class PublishedRows(NamedTuple):
    """Published runs with their predictions; *corrected* and *left_out* count rows that contradict their sources."""

    rows: Sequence[scoreboard.ScoredRow]
    records: Sequence[Record]  # of these rows, corrected
    memory_rows: Sequence[MemoryRow]
    skipped: Mapping[str, int]
    corrected: int
    left_out: int


def measure_published(*folders: str) -> scoreboard.Measurements:
    """Compare the runs in the csv files of *folders* (or in these csv files) together."""
    published = compare_records(records_of(*folders))
    table, notes = scoreboard.columns_of(published.rows), list[str]()
    if published.corrected or published.left_out:
        rows = "row" if published.corrected == 1 else "rows"
        notes.append(
            f"{published.corrected} {rows} corrected, {published.left_out} left out, where sources contradict "
            "themselves or say elsewhere what a row lacks: docs/published.md"
        )
    labels = table.labels(scoreboard.UNCLAIMED)
    for group in UNCLAIMED_GROUPS:
        if count := int((labels == group["name"]).sum()):
            notes.append(f"left out of claims: {group['name']} ({count} rows), since {group['reason']}")
    known = [row for row in published.memory_rows if not row.out_of_memory]
    if fitted := sum(row.fitted for row in known):
        notes.append(f"peak memory: of {len(known)} rows {fitted} have overheads that were fitted to such rows")
    figures, claimed = {**memory_figures(published), **dict(scoreboard.interval_figures(table))}, labels == ""
    dense = claimed & np.char.startswith(table.labels("kind"), "dense")
    selections = {} if claimed.all() else {"part of claims": claimed, "part of claims, dense": dense}
    return scoreboard.Measurements(table, published.skipped, selections, figures, tuple(notes), details=DETAILS)


CORRECTION = "correction"  # the label that tells what was corrected in a row, and why
COMMAND = "command"  # the label that tells what to type for the same prediction
DETAILS = (CORRECTION, COMMAND)
UNCLAIMED_GROUPS = scoreboard.load_table("rows/published")["unclaimed"]


def records_of(*paths: str) -> list[Record]:
    """Return the rows of csv files, or of the one in each folder."""
    others = (sorted(file.name for file in Path(path).glob("*.csv")) for path in paths)
    return [
        record
        for path, names in zip(paths, others, strict=True)
        for record in scoreboard.read_records(path, FILE, *names, needed=("model", "num_gpus"))
    ]


def compare_records(records: Iterable[Record]) -> PublishedRows:
    """Compare rows with their predictions; rows with the same prediction share it."""
    memories: list[MemoryRow] = []
    predicted: dict[tuple[object, ...], tuple[float, tuple[float, float] | None]] = {}
    records = list(correct_records(records, load_corrections()))

    def compare(record: Record) -> list[tuple[scoreboard.ScoredRow, Record]]:
        setup = read_setup(record)
        if setup.run.out_of_memory or setup.run.peak_memory_gib is not None:
            memories.append(memory_row(setup))
        require(not setup.run.out_of_memory, "ran out of memory: compared for memory alone")
        run, strategy = setup.run, setup.strategy
        key = (setup.model, strategy, setup.framework, setup.cluster)
        measured_s = measure_step_s(setup)
        step_s, ends = predicted[key] = predicted.get(key) or predict_step(setup)
        degrees = " ".join(f"{name} {getattr(strategy.layout, name)}" for name in ("tp", "pp", "dp"))
        batch = f"batch {strategy.micro_batch}/{run.global_batch}"
        name = f"{run.name} {run.model} {run.gpus} x {run.gpu} {degrees} {batch}"
        return [(scoreboard.ScoredRow(name, measured_s, step_s, _tags(setup), ends), record)]

    compared, skipped = scoreboard.compare_each(complete_heads(records), compare)
    left_out = sum(record.get("status") == LEFT_OUT for record in records)
    changed = sum(bool(record.get(CORRECTED)) for record in records) - left_out
    rows, own = [row for row, _ in compared], [record for _, record in compared]
    return PublishedRows(rows, own, memories, skipped, changed, left_out)


def measure_step_s(setup: Setup) -> float:
    """Return the seconds of a step as published, else from tokens or FLOP per second, or from the MFU.

    Operations are counted as the source counts them.
    """
    run, strategy = setup.run, setup.strategy
    if run.iteration_s is not None:
        return run.iteration_s
    if run.tokens_per_s_per_gpu is not None:
        return run.global_batch * strategy.seq / (run.tokens_per_s_per_gpu * run.gpus)
    flops_per_gpu = run.flops_per_gpu
    if flops_per_gpu is None and run.utilisation is not None:
        flops_per_gpu = run.utilisation * setup.cluster.gpu.matrix_peak_flops(DType.BF16)
    if flops_per_gpu is None:
        raise ValueError("no time, tokens per second or FLOP/s is published")
    causal = "causal" in run.tflops_kind and "non-causal" not in run.tflops_kind  # else the full square counts
    flops = model_flops(setup.model, strategy.seq, run.global_batch, causal=causal, lora_rank=strategy.lora_rank)
    if run.tflops_kind.startswith("hardware"):
        flops *= 4 / 3  # the forward once more
    return flops / (flops_per_gpu * run.gpus)


def predict_step(setup: Setup) -> tuple[float, tuple[float, float] | None]:
    """Return the seconds of a setup's step, scaled to the published batch, and the ends of their 90 % interval."""
    prediction = predict(setup.model, setup.cluster, setup.strategy, setup.framework)
    scale = setup.run.global_batch / setup.strategy.global_batch
    low_s, high_s = prediction.interval_s
    return prediction.step_s * scale, (low_s * scale, high_s * scale)


def memory_row(setup: Setup) -> MemoryRow:
    """Return measured and predicted peak memory of a run, and whether it is predicted to fit."""
    run, framework = setup.run, setup.framework
    stages = memory(setup.model, setup.strategy, setup.cluster.gpu, framework)
    fullest = stages[0] if run.logged_by_first else max(stages, key=lambda stage: stage.total)
    measured = 0.0 if run.out_of_memory else (run.peak_memory_gib or 0.0) * GIB
    fits = all(stage.fits for stage in stages)
    return MemoryRow(run.name, measured, getattr(fullest, framework.peak), fits, framework.overhead.fitted)


def _tags(setup: Setup) -> dict[str, str]:
    run, strategy = setup.run, setup.strategy
    used = [name for name in ("tp", "cp", "ep", "pp") if getattr(strategy.layout, name) > 1]
    used += ["fsdp"] * strategy.sharding.splits_parameters
    tags = {
        "source": run.source.split()[0].partition("@")[0] if run.source else "",
        "framework": run.framework,
        "profile": setup.profile.name,
        "gpu": setup.cluster.gpu.name,
        "precision": str(strategy.precision),
        "kind": kind_of(setup.model, setup.cluster, strategy),
        "model": run.model.split("-")[0],
        "parallelism": " ".join(used) or "dp",
        "recompute": str(strategy.recompute.kind),
        "time from": "derived" if run.derived or run.iteration_s is None else "stated",
        "values": "corrected" if run.corrected else "as published",
        CORRECTION: run.corrected,
        COMMAND: setup.command,
    }
    groups = (
        group["name"]
        for group in UNCLAIMED_GROUPS
        if all(label == tags[tag] or label in tags[tag].split() for tag, label in group["rows"].items())
    )
    return {**tags, scoreboard.UNCLAIMED: next(groups, "")}


def memory_figures(published: PublishedRows) -> dict[str, float]:
    """Return the errors of peak memory, and the share of runs out of memory that are predicted not to fit."""
    known = [row for row in published.memory_rows if not row.out_of_memory]
    pairs = {
        "peak memory": [row.pair for row in known],
        "peak memory, overhead fitted to such rows": [row.pair for row in known if row.fitted],
        "peak memory, nothing fitted": [row.pair for row in known if not row.fitted],
    }
    figures = scoreboard.error_figures(pairs, "mean_abs_error", "median_abs_error", "worst_abs_error", "mean_error")
    if over := [row for row in published.memory_rows if row.out_of_memory]:
        figures["out of memory, predicted not to fit"] = sum(not row.fits for row in over) / len(over)
    return figures


# ---- MLPerf Training runs: the columns of published runs, and some of their own ------------------------------


STATED_GRAPHS = "stated graphs"  # the column of graphs before blanks are filled


def measure_mlperf(*folders: str) -> scoreboard.Measurements:
    """Compare the runs in ``training_runs.csv`` of *folders*, or in these files.

    Layouts that were worked out from a log alone are listed separately; GPUs that the catalogue lacks are left out.
    """
    records = records_of(*folders)
    known = [record for record in records if (record.get("gpu_in_catalogue") or "1") != "0"]
    named = [{**record, "table": record.get("bench"), STATED_GRAPHS: record.get("cuda_graphs")} for record in known]
    published = compare_records(complete_blanks(named, "cuda_graphs", "bench", "round", "gpu", "tp", "cp"))
    skipped = dict(published.skipped)
    if missing := len(records) - len(known):
        skipped["the GPU is not in the catalogue"] = missing
    rows = []
    for row, record in zip(published.rows, published.records, strict=True):
        tags = {name: tag for name, tag in row.tags.items() if name not in ("values", "time from", "framework")}
        tags |= {"source": "MLPerf", "bench": record.get("bench") or "", "round": record.get("round") or ""}
        tags["graphs"] = record.get(STATED_GRAPHS) or "not stated"
        tags["layout"] = "stated" if record.get("parallel_from") == "config" else "worked out from the log"
        rows.append(replace(row, tags=tags))
    table = scoreboard.columns_of(rows)
    stated = {"layout stated": table.labels("layout") == "stated"}
    return scoreboard.Measurements(table, skipped, stated, memory_figures(published), details=DETAILS)


# ---- the sweep behind Hugging Face's Ultra-Scale Playbook -----------------------------------------------------
#
# A cell is a model on a number of GPUs with a batch: every strategy in it does the same work, so the one that we rank
# first should be the measured best. Its regret is how much longer it took than that.


CLEAN_MFU = 20.0  # per cent of MFU from which single iterations repeat well; most slower ones waited for something else
FEWEST_STRATEGIES = 5
WITHIN = 0.1
FAILED, UNSHARDED = "failed", "zero0"


def measure_ultrascale(*folders: str) -> scoreboard.Measurements:
    """Compare the runs in ``runs.csv`` of *folders*, or in these files."""
    paths = [Path(folder) for folder in folders]
    records = records_of(*(str(path / "runs.csv" if path.is_dir() else path) for path in paths))
    by_end = group_by_key(
        ((record.get("status") or "").startswith(FAILED), {**record, "memory_of": "first stage"}) for record in records
    )
    failed, timed = by_end.get(True, []), by_end.get(False, [])
    compared = compare_records(timed)
    rows = []
    for row, record in zip(compared.rows, compared.records, strict=True):
        cell = f"{record.get('model')} on {record.get('num_gpus')}, batch {record.get('global_batch')}"
        degrees = {f"{name} degree": str(record.get(name)) for name in ("tp", "pp")}
        own = {name: row.tags[name] for name in ("parallelism", *DETAILS) if name in row.tags}
        rows.append(replace(row, tags={"cell": cell, **degrees, **own}))
    clean = np.array([float(record.get("mfu_pct") or 0) >= CLEAN_MFU for record in compared.records], dtype=bool)
    peaks = {"peak memory": [row.pair for row in compared.memory_rows]}
    figures = {
        **dict(rank_figures(rows)),
        **dict(verdict_figures(compared.memory_rows, failed, timed)),
        **scoreboard.error_figures(peaks, "mean_abs_error", "median_abs_error", "mean_error"),
    }
    skipped = {**compared.skipped, "failed: compared for memory alone": len(failed)}
    selections = {f"MFU of {CLEAN_MFU:.0f} % and more": clean}
    return scoreboard.Measurements(scoreboard.columns_of(rows), skipped, selections, figures, details=DETAILS)


def rank_cell(measured_s: FloatArray, predicted_s: FloatArray) -> tuple[float, float]:
    """Return the regret of our first choice in a cell, and the rank correlation of all its strategies."""
    regret = float(measured_s[np.argmin(predicted_s)] / np.min(measured_s) - 1.0)
    measured, predicted = (np.argsort(np.argsort(seconds)) for seconds in (measured_s, predicted_s))
    return regret, float(np.corrcoef(measured, predicted)[0, 1])


def rank_figures(rows: Iterable[scoreboard.ScoredRow]) -> Iterator[tuple[str, float]]:
    """Yield regret and rank correlation over cells with enough strategies, and of each."""
    ranks = {
        cell: rank_cell(np.array([row.measured_s for row in group]), np.array([row.predicted_s for row in group]))
        for cell, group in sorted(group_by_key((row.tags["cell"], row) for row in rows).items())
        if len(group) >= FEWEST_STRATEGIES
    }
    if not ranks:
        return
    regrets, correlations = np.array(list(ranks.values())).T
    yield "regret: median of cells", float(np.median(regrets))
    yield f"cells with a regret of at most {format_percent(WITHIN, 0)}", float(np.mean(regrets <= WITHIN))
    yield "rank correlation: mean of cells", float(np.mean(correlations))
    for cell, (regret, correlation) in ranks.items():
        yield f"regret: {cell}", regret
        yield f"rank correlation: {cell}", correlation


def verdict_figures(
    ran: Iterable[MemoryRow], failed: Iterable[Record], timed: Iterable[Record]
) -> Iterator[tuple[str, float]]:
    """Yield the shares of runs that ran and are predicted to fit, and that failed and are predicted not to."""
    fits = [row.fits for row in ran]
    if fits:
        yield "ran, predicted to fit", float(np.mean(fits))
    proofs = [read_run(record) for record in timed]
    refused, elsewhere = [], 0
    for record in failed:
        run, fits_memory = read_run(record), False
        # Nanotron's 1F1B engine refuses fewer micro-batches (parallel/pipeline_parallel/engine.py).
        is_refused = run.global_batch < (run.pp - 1) * run.dp * (run.micro_batch or 0)
        if is_refused or any(_needs_no_less(proof, run) for proof in proofs):
            elsewhere += 1
            continue
        with suppress(ValueError):
            fits_memory = memory_row(read_setup(record)).fits
        refused.append(not fits_memory)
    if refused:
        yield "failed, predicted not to fit", float(np.mean(refused))
        yield "failed, not for lack of memory", elsewhere / (elsewhere + len(refused))


def _needs_no_less(run: PublishedRun, other: PublishedRun) -> bool:
    """Return True if every tensor of *run* is as large as that of the *other*."""
    shards, other_shards = run.sharding != UNSHARDED, other.sharding != UNSHARDED
    return (
        (run.model, run.seq, run.pp) == (other.model, other.seq, other.pp)
        and run.tp <= other.tp
        and (run.micro_batch or 0) >= (other.micro_batch or 0)
        and (not shards or (other_shards and run.dp <= other.dp))
    )
