"""Growth: how processor time grows with the size of a question or of a profiler trace, as exponents.

Each row doubles one size several times and fits time ~ size ** exponent to the upper half, where fixed costs matter
least; an exponent of 1 is proportional, 0 independent. Warm times are those of the same question asked again, first
times those of a layout that was not asked before. Exponents hold on any machine; none should exceed 1.1.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from statistics import median

from benchmarks.reader_kineto import grow
from stepcast.analyze.kineto.analysis import analyze_kineto
from stepcast.forecast.predict import predict
from stepcast.hardware import load_cluster
from stepcast.inputs.table import read
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import ScheduleKind, Sharding, Strategy
from stepcast.models.catalog import load_model

TRIES = 5
CLUSTER = load_cluster("dgx-h100")
DENSE, MIXTURE = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b")


def ask(model: Model, layout: Layout, global_batch: int, schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B) -> None:
    strategy = Strategy(layout, 1, global_batch, 4096, schedule=schedule, sharding=Sharding.ZERO_1)
    _ = predict(model, CLUSTER, strategy).report


def ask_layers(layers: int) -> None:
    ask(DENSE.with_layers(layers), Layout(dp=8), 64)


def ask_stages(stages: int) -> None:
    ask(DENSE.with_layers(256), Layout(pp=stages), 4 * stages)


def ask_micro_batches(micro_batches: int) -> None:
    ask(DENSE, Layout(pp=4), micro_batches)


def ask_turning(micro_batches: int) -> None:
    """Schedules that turn around in the middle are run slot by slot."""
    ask(DENSE, Layout(pp=4), micro_batches, ScheduleKind.GPIPE)


def ask_gpus(gpus: int) -> None:
    ask(DENSE, Layout(tp=8, pp=4, dp=gpus // 32), gpus // 4)


def ask_expert_ranks(ranks: int) -> None:
    ask(MIXTURE, Layout(ep=ranks, dp=128), 1024)


ROWS: tuple[tuple[str, Callable[[int], None], Sequence[int]], ...] = (
    ("layers", ask_layers, (16, 32, 64, 128, 256, 512)),
    ("pipeline stages", ask_stages, (4, 8, 16, 32, 64)),
    ("micro-batches, 1F1B", ask_micro_batches, (64, 256, 1024, 4096, 16384, 65536)),
    ("micro-batches, gpipe", ask_turning, (64, 256, 1024, 4096, 16384)),
    ("GPUs", ask_gpus, (2**8, 2**12, 2**16, 2**20, 2**24)),
    ("expert parallel ranks", ask_expert_ranks, (4, 8, 16, 32, 64, 128)),
)
TRACE_MB = (1, 4, 16, 64, 256)


def _spent_s(run: Callable[[int], object], size: int) -> float:
    began = time.process_time()
    run(size)
    return time.process_time() - began


def _exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of the upper half of the sizes in a plot with two logarithmic axes."""
    first = len(sizes) // 2 - 1
    return (log2(seconds[-1]) - log2(seconds[first])) / (log2(sizes[-1]) - log2(sizes[first]))


def run() -> None:
    ask_layers(24)  # what every first prediction loads
    with tempfile.TemporaryDirectory() as folder:
        traces = {megabytes: Path(folder, f"{megabytes}.json") for megabytes in TRACE_MB}
        for megabytes, path in traces.items():
            grow(megabytes * 1_000_000, path)
        _print_rows((*ROWS, ("trace, MB", lambda size: analyze_kineto(read(str(traces[size]))), TRACE_MB)))


def _print_rows(rows: Sequence[tuple[str, Callable[[int], object], Sequence[int]]]) -> None:
    print(f"{'size':24} {'from':>6} {'to':>10} {'first, ms':>18} {'exponent':>9} {'again, ms':>16} {'exponent':>9}")
    for name, ask_size, sizes in rows:
        first_s = [_spent_s(ask_size, size) for size in sizes]
        again_s = [median(_spent_s(ask_size, size) for _ in range(TRIES)) for size in sizes]
        cells = [
            f"{seconds[0] * 1e3:7.1f} -> {seconds[-1] * 1e3:6.1f} {_exponent(sizes, seconds):9.2f}"
            for seconds in (first_s, again_s)
        ]
        print(f"{name:24} {sizes[0]:6} {sizes[-1]:10,} {cells[0]} {cells[1]}", flush=True)


if __name__ == "__main__":
    run()
