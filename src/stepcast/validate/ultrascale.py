"""The sweep behind Hugging Face's Ultra-Scale Playbook: step times, what fits into memory, and which strategy wins.

A cell is a model on a number of GPUs with a batch: every strategy in it does the same work, so the one that we rank
first should be the measured best. Its regret is how much longer it took than that.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.units import format_percent
from stepcast.validate.published.comparison import DETAILS, MemoryRow, compare_records, memory_row, records_of
from stepcast.validate.published.rows import Record
from stepcast.validate.published.setup import read_setup
from stepcast.validate.scoreboard import Measurements, ScoredRow, columns_of, error_figures

FILE = "runs.csv"
CLEAN_MFU = 20.0
"""Per cent of MFU from which single iterations repeat well; most slower ones waited for something else."""
FEWEST_STRATEGIES = 5
WITHIN = 0.1
FAILED = "failed"


def measure_ultrascale(*folders: str) -> Measurements:
    """Compare the runs in ``runs.csv`` of *folders*, or in these files."""
    paths = [Path(folder) for folder in folders]
    records = records_of(*(str(path / FILE if path.is_dir() else path) for path in paths))
    records = [{**record, "memory_of": "first stage"} for record in records]
    failed = [record for record in records if (record.get("status") or "").startswith(FAILED)]
    timed = [record for record in records if not (record.get("status") or "").startswith(FAILED)]
    compared = compare_records(timed)
    by_id = {str(record["id"]): record for record in timed}
    rows = [_label(row, by_id[row.name.split()[0]]) for row in compared.rows]
    table = columns_of(rows)
    clean = np.array([float(by_id[row.name.split()[0]].get("mfu_pct") or 0) >= CLEAN_MFU for row in rows], dtype=bool)
    figures = {
        **dict(rank_figures(rows)),
        **dict(verdict_figures(compared.memory_rows, failed, timed)),
        **dict(
            error_figures(
                "peak memory",
                [(row.measured_bytes, row.predicted_bytes) for row in compared.memory_rows],
                *("mean_abs_error", "median_abs_error", "mean_error"),
            )
        ),
    }
    skipped = {**compared.skipped, "failed: compared for memory alone": len(failed)}
    selections = {f"MFU of {CLEAN_MFU:.0f} % and more": clean} if rows else {}
    return Measurements(table, skipped, selections, figures, details=DETAILS)


def _label(row: ScoredRow, record: Record) -> ScoredRow:
    tags = {name: row.tags[name] for name in ("parallelism", *DETAILS) if name in row.tags}
    degrees = {f"{name} degree": str(record.get(name)) for name in ("tp", "pp")}
    cell = f"{record.get('model')} on {record.get('num_gpus')}, batch {record.get('global_batch')}"
    return ScoredRow(row.name, row.measured_s, row.predicted_s, {"cell": cell, **degrees, **tags}, row.ends)


def rank_cell(measured_s: FloatArray, predicted_s: FloatArray) -> tuple[float, float]:
    """Return the regret of our first choice in a cell, and the rank correlation of all its strategies."""
    regret = float(measured_s[np.argmin(predicted_s)] / np.min(measured_s) - 1.0)
    measured, predicted = (np.argsort(np.argsort(seconds)) for seconds in (measured_s, predicted_s))
    return regret, float(np.corrcoef(measured, predicted)[0, 1])


def rank_figures(rows: Iterable[ScoredRow]) -> Iterator[tuple[str, float]]:
    """Yield regret and rank correlation over cells with enough strategies, and of each."""
    cells: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        cells[row.tags["cell"]].append(row)
    ranks = {
        cell: rank_cell(np.array([row.measured_s for row in group]), np.array([row.predicted_s for row in group]))
        for cell, group in sorted(cells.items())
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
    proofs = [_Sizes.of(record) for record in timed]
    refused, elsewhere = [], 0
    for record in failed:
        sizes = _Sizes.of(record)
        if sizes.has_few_micro_batches or any(proof.needs_no_less(sizes) for proof in proofs):
            elsewhere += 1
        else:
            refused.append(not _can_run(record))
    if refused:
        yield "failed, predicted not to fit", float(np.mean(refused))
        yield "failed, not for lack of memory", elsewhere / (elsewhere + len(refused))


def _can_run(record: Record) -> bool:
    try:
        return memory_row(read_setup(record)).fits
    except ValueError:
        return False


class _Sizes(NamedTuple):
    """The sizes of a run that its memory depends on."""

    model: str
    seq: int
    pp: int
    tp: int
    dp: int
    micro_batch: int
    global_batch: int
    shards: bool  # splits its optimizer states (ZeRO 1)

    @classmethod
    def of(cls, record: Record) -> "_Sizes":
        seq, pp, tp, dp, micro_batch, global_batch = (int(float(record.get(name) or 0)) for name in cls._fields[1:-1])
        shards = record.get("zero_fsdp") != "zero0"
        return cls(record.get("model") or "", seq, pp, tp, dp, micro_batch, global_batch, shards)

    @property
    def has_few_micro_batches(self) -> bool:
        """Return True if nanotron's 1F1B engine refuses the run (parallel/pipeline_parallel/engine.py)."""
        return self.global_batch < (self.pp - 1) * self.dp * self.micro_batch

    def needs_no_less(self, other: "_Sizes") -> bool:
        """Return True if every tensor of this run is as large as that of the *other*."""
        return (
            (self.model, self.seq, self.pp) == (other.model, other.seq, other.pp)
            and self.tp <= other.tp
            and self.micro_batch >= other.micro_batch
            and (not self.shards or (other.shards and self.dp <= other.dp))
        )
