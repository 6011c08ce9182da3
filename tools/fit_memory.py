"""Learn the 90 % interval of predicted memory (data/fits/memory.toml) from measured peaks.

    python tools/fit_memory.py RUNS.csv ... > src/stepcast/data/fits/memory.toml

One GPU: what PyTorch reserved in the shipped steps of the h200 and transformers sets. Several GPUs: peaks of
the published and MLPerf runs in RUNS.csv (allocated, reserved or total, whichever their authors print), but
not those to which overheads were fitted. Quantiles are of measured over predicted.
"""

import csv
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

import stepcast
from stepcast.cost.memory import memory
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.step import LEVEL
from stepcast.validate.h200 import row_framework, row_model, row_strategy
from stepcast.validate.published.comparison import compare_records, records_of
from stepcast.validate.transformers import Setting

SHIPPED = Path(stepcast.__file__).parent / "data"
TAIL = (1 - LEVEL) / 2


def one_gpu_ratios() -> Iterator[float]:
    """Yield measured over predicted reserved bytes of every shipped step that has them."""
    gpu = load_gpu("h200")
    for path in sorted((SHIPPED / "transformers").glob("steps*.csv")):
        for record in _records(path, "reserved_bytes"):
            try:
                setting = Setting(record, path.parent)
            except ValueError:
                continue
            (stage,) = memory(setting.model, setting.strategy, gpu, setting.framework)
            yield float(record["reserved_bytes"]) / stage.reserved
    for name in ("eager_memory.csv", "models.csv"):
        for record in _records(SHIPPED / "h200" / name, "peak_reserved"):
            (stage,) = memory(row_model(record), row_strategy(record), gpu, row_framework(record))
            yield float(record["peak_reserved"]) / stage.reserved


def several_gpu_ratios(paths: Iterable[str]) -> Iterator[float]:
    """Yield measured over predicted peaks of the runs in *paths*."""
    records = [record for record in records_of(*paths) if record.get("peak_mem_gib")]
    for row in compare_records(records).memory_rows:
        if not row.fitted and not row.out_of_memory:
            yield row.measured_bytes / row.predicted_bytes


def _records(path: Path, needed: str) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from (record for record in csv.DictReader(file) if record.get(needed))


def main() -> None:
    if not sys.argv[1:]:
        sys.exit("give the training_runs.csv of the sets published, published-more, published-new and mlperf")
    print('source = "tools/fit_memory.py: measured over predicted memory, 5 and 95 % quantiles"')
    kinds = {"one GPU": list(one_gpu_ratios()), "several GPUs": list(several_gpu_ratios(sys.argv[1:]))}
    for name, ratios in kinds.items():
        low, high = np.quantile(ratios, [TAIL, 1 - TAIL])
        print(f'\n[kinds."{name}"]\nlow = {low:.3f}\nhigh = {high:.3f}\nrows = {len(ratios)}')
        median, mean = np.median(ratios), np.mean(np.abs(1 / np.array(ratios) - 1))
        print(f"{name}: median {median:.3f}, mean error {mean:.1%}", file=sys.stderr)


if __name__ == "__main__":
    main()
