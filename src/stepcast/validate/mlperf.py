"""MLPerf Training runs of language models: steps and, where logs tell it, peak memory, through ``predict``.

The rows have the columns of published runs and some of their own (``validate.published.run``). Layouts that
were worked out from a log alone, and GPUs that the catalogue lacks, are told apart or left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from stepcast.validate import residual
from stepcast.validate.published.comparison import DETAILS, PublishedRows, figures, measure, records_of
from stepcast.validate.published.rows import Record
from stepcast.validate.scoreboard import Measurements, ScoredRow, columns

SOURCE = "MLPerf"
NOTES = (
    "steps as logged, evaluation excluded; they are no MLPerf metric",
    "what a row leaves open is taken from its framework's documented defaults (docs/mlperf.md)",
)


def measure_folder(*folders: str) -> Measurements:
    """The runs in ``training_runs.csv`` of *folders*, or in these files."""
    records = records_of(*folders)
    known = [record for record in records if (record.get("gpu_in_catalogue") or "1") != "0"]
    found = measure(map(_published, known))
    skipped = dict(found.skipped)
    if missing := len(records) - len(known):
        skipped["the GPU is not in the catalogue"] = missing
    rows = tuple(_tagged(found, {str(record.get("id")): record for record in records}))
    table = columns(rows)
    stated = {"layout stated": table.tags["layout"] == "stated"} if rows else {}
    known_figures = {**dict(figures(found)), **dict(residual.figures(table))}
    return Measurements(table, skipped, stated, known_figures, NOTES, details=DETAILS)


def _published(record: Record) -> Record:
    """The same run in the columns of published runs."""
    return {**record, "table": record.get("bench")}


def _tagged(found: PublishedRows, records: Mapping[str, Record]) -> Iterator[ScoredRow]:
    for row in found.rows:
        record = records[row.name.split()[0]]
        kept = {name: tag for name, tag in row.tags.items() if name not in ("values", "time from", "framework")}
        own = {
            "source": SOURCE,
            "bench": record.get("bench") or "",
            "round": record.get("round") or "",
            "graphs": record.get("cuda_graphs") or "not stated",
            "layout": "stated" if record.get("parallel_from") == "config" else "worked out from the log",
        }
        yield replace(row, tags={**kept, **own})
