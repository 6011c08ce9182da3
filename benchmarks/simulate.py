"""The whole command: a step of 2.6 million tasks, a 16,384-GPU step, a trace of a million spans; and what a
caller who stays in Python pays for one more workload or forecast of a large model.

Bars: 0.6 s and 0.5 s for the commands (start-up included), 10 s for the trace, 0.25 s and 1 s for one more
workload and forecast. Seconds are those of this
machine; the ratio to a bare Python start tells how much of them is ours.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepcast.forecast.predict import predict
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Sharding, Strategy
from stepcast.ir.timeline import TimelineBuilder
from stepcast.models.catalog import load_model
from stepcast.outputs.perfetto import write

STAGES, CHUNKS, MICRO_BATCHES, LINES = 16, 2, 512, 64
SPANS = 1_000_000


def large_workload(path: Path) -> int:
    """A SimAI file whose step has 2.6 million tasks; the number of tasks."""
    degrees = f"model_parallel_NPU_group: 8 ep: 1 pp: {STAGES} vpp: {CHUNKS} ga: {MICRO_BATCHES}"
    header = f"HYBRID_TRANSFORMER {degrees} all_gpus: {8 * STAGES * 8} pp_comm: 33554432"
    line = "layer{}\t-1\t{}\tALLREDUCE\t33554432\t{}\tALLREDUCE\t33554432\t0\tNONE\t0\t0"
    lines = [line.format(at, 500_000 + 1000 * at, 1_000_000 + 1000 * at) for at in range(LINES)]
    path.write_text("\n".join([header, str(len(lines)), *lines, ""]))
    # Forward and backward of each line are a computation and a collective each, the backward one more.
    return STAGES * MICRO_BATCHES * LINES * 5


def seconds_of(*arguments: str, tries: int = 5) -> float:
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return min(times)


def write_spans() -> float:
    """Seconds to write a million spans."""
    builder = TimelineBuilder()
    lanes = [builder.lane(rank, "compute") for rank in range(16)]
    starts = np.arange(SPANS) * 1e-6
    for at, start in enumerate(starts.tolist()):
        builder.add(f"op {at % 50}", lanes[at % 16], start, 9e-7, micro_batch=at % 64)
    timeline = builder.build(measured=False)
    began = time.perf_counter()
    write(timeline)
    return time.perf_counter() - began


def again_s(first: Callable[[], object], then: Callable[[], object]) -> float:
    """Seconds of *then* when *first* has filled what is remembered."""
    first()
    began = time.perf_counter()
    then()
    return time.perf_counter() - began


def one_more_workload_s() -> float:
    model = load_model("llama-3.1-405b")
    strategy = Strategy(Layout(tp=8, pp=16, dp=128), 1, 2048, 8192, sequence_parallel=True, sharding=Sharding.ZERO_1)
    return again_s(lambda: generate(model, replace(strategy, seq=4096)), lambda: generate(model, strategy))


def one_more_forecast_s() -> float:
    """Of a hybrid of 550 billion parameters with experts, Mamba blocks and attention."""
    model, cluster = load_model("nemotron-3-ultra-550b-a55b"), load_cluster("gb200-nvl72")
    layout = Layout(tp=2, ep=64, dp=128, expert_tp=1)
    small, large = (Strategy(layout, 1, batch, 8192, sequence_parallel=True) for batch in (512, 1024))
    return again_s(lambda: predict(model, cluster, small), lambda: predict(model, cluster, large))


def run() -> None:
    bare = seconds_of("-c", "pass")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.txt"
        tasks = large_workload(path)
        took = seconds_of("-m", "stepcast", "simulate", str(path), "--cluster", "dgx-h100")
        print(f"simulate, {tasks / 1e6:.1f} million tasks: {took:.3f} s, {took / bare:.0f} x bare Python")
    llama = ("--model", "llama-3.1-405b", "--cluster", "dgx-h100", "--gpus", "16384")
    how = ("--tp", "8", "--pp", "16", "--seq", "8192", "--global-batch", "2048")
    took = seconds_of("-m", "stepcast", "predict", *llama, *how)
    print(f"predict, Llama-3.1-405B on 16,384 GPUs: {took:.3f} s, {took / bare:.0f} x bare Python")
    took = one_more_workload_s()
    print(f"one more workload of Llama-3.1-405B: {took:.3f} s, {took / bare:.1f} x bare Python")
    took = one_more_forecast_s()
    print(f"one more forecast of a hybrid of 550B: {took:.3f} s, {took / bare:.1f} x bare Python")
    took = write_spans()
    print(f"trace of {SPANS:,} spans: {took:.2f} s, {SPANS / took / 1e6:.2f} million spans per second")


if __name__ == "__main__":
    run()
