"""Sweeps: points a second beside the plain library, what a chunk costs, and a million rows read back.

Ratios hold on any machine. ``python -m benchmarks.sweep whole`` answers all 100,000 points of the spec, which
takes a quarter of an hour; without it some thousands of them are.
"""

import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from stepcast.cli.sweep_points import answers, digest, program, shared_values
from stepcast.forecast.predict import predict_many
from stepcast.ir.legality import check
from stepcast.questions.choices import build_question
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import settle
from stepcast.sweep.engines import AnsweredChunk, Answers, PointChunk
from stepcast.sweep.spec import Words, read_spec
from stepcast.sweep.store import Store, rows_of, status_facts, sweep

SPEC = """
where = "tp * pp * cp <= gpus"
[fixed]
global-batch = 4096
seq = 4096
[[axis]]
model = [
  "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "deepseek-v2",
  "qwen2.5-14b", "mixtral-8x7b", "llama-2-13b", "llama-2-70b",
]
[[axis]]
cluster = ["dgx-h100", "dgx-a100", "dgx-h200", "dgx-b200"]
[[axis]]
gpus = "128..1024"
[[axis]]
tp = [1, 2, 4, 8]
[[axis]]
pp = [1, 2]
[[axis]]
cp = [1, 2, 4]
[[axis]]
micro-batch = [1, 2, 4, 8]
[[axis]]
recompute = ["none", "selective", "full"]
[[axis]]
sharding = ["zero-1", "zero-2", "none"]
"""
# Points that the library alone answers: neighbours, from the beginning of each model.
PLAIN, RUNS = 2_000, 8
MILLION = 1_000_000
WORKERS = 2


def run() -> None:
    whole = "whole" in sys.argv
    spec = read_spec(
        SPEC if whole else SPEC.replace('"128..1024"', "[512]").replace('["none", "selective", "full"]', '["full"]')
    )
    points = [words for _, words in spec.points()]
    print(f"{len(points):,} points")
    every = len(points) // RUNS
    plain = _plain([each for at in range(RUNS) for each in points[at * every :][: PLAIN // RUNS]])
    print(f"plain predict_many, one process: {plain:,.1f} points a second", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        before = _processor_s()
        done = sweep(spec, folder, answers, digest, program(), workers=WORKERS)
        per_core = done.points / (_processor_s() - before)
    print(f"sweep, {WORKERS} workers: {done.rate:,.1f} points a second, {done.errors:,} errors")
    print(f"a second of a core: {per_core:,.1f} points, {per_core / plain:.0%} of the library (bar 70 %)", flush=True)
    _chunks()
    _read_back()


def _processor_s() -> float:
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _plain(points: Sequence[Words]) -> float:
    """Points a second of the library alone, on legal values made before the clock starts."""
    asked = []
    for words in points:
        with contextlib.suppress(ValueError):
            one = settle(build_question(PredictQuestion, words))
            check(one.model, one.strategy, framework=one.framework)
            asked.append(one)
    began = time.process_time()
    for _, group in groupby(asked, key=shared_values):
        several = list(group)
        first = several[0]
        strategies = [each.strategy for each in several]
        for prediction in predict_many(first.model, first.cluster, strategies, first.framework):
            assert prediction.step_s > 0
            assert prediction.memory
    return len(asked) / (time.process_time() - began)


def nothing(ask: str, points: Sequence[Words]) -> Answers:
    return [{"step_s": 1.0} for _ in points]


def _chunks() -> None:
    """What a point and a chunk cost beside their answers."""
    spec = read_spec("[[axis]]\ntp = " + str(list(range(20_000))))
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = sweep(spec, folder, nothing, lambda name, value: repr(value), "p", workers=WORKERS)
        took = time.perf_counter() - began
    print(f"empty answers: {done.points / took:,.0f} points a second, start included")
    chunk_s = []
    with tempfile.TemporaryDirectory() as folder, Store(folder, writes=True) as store:
        store.ask(("tp",), ((at, at.to_bytes(16, "big"), {"tp": at}) for at in range(200)))
        for at in range(200):
            words: Words = {"tp": at}
            began = time.perf_counter()
            store.add(AnsweredChunk(PointChunk("predict", (at.to_bytes(16, "big"),), (words,)), [{"step_s": 1.0}], 0.0))
            chunk_s.append(time.perf_counter() - began)
    chunk_s.sort()
    print(f"a chunk into the store: {chunk_s[100] * 1e3:.2f} ms (median)")


def _read_back() -> None:
    """A million rows, summarised and sorted."""
    with tempfile.TemporaryDirectory() as folder:
        with Store(folder, writes=True) as store:
            names = ("model", "tp", "pp")
            keys = [(at * 2654435761 % 2**64).to_bytes(16, "big") for at in range(MILLION)]
            store.ask(
                names, ((at, key, {"model": f"m{at % 8}", "tp": at % 7, "pp": at % 5}) for at, key in enumerate(keys))
            )
            for first in range(0, MILLION, 10_000):
                some = keys[first : first + 10_000]
                chunk = PointChunk("predict", tuple(some), tuple({} for _ in some))
                rows = [
                    {"step_s": 1.0 + at % 997, "mfu": (at % 89) / 100, "fits": at % 2, "memory_bytes": 1e9}
                    for at in range(len(some))
                ]
                store.add(AnsweredChunk(chunk, rows, 1.0))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        began = time.perf_counter()
        with Store(folder) as store:
            found = status_facts(store)
            best = rows_of(store, "mfu > 0.4", "step_s", 20)
        took = time.perf_counter() - began
    assert found["answered"] == MILLION
    assert len(best) == 20
    print(f"{MILLION:,} rows ({size / 1e6:,.0f} MB) summarised, filtered and sorted in {took:.2f} s (bar 5 s)")


if __name__ == "__main__":
    run()
