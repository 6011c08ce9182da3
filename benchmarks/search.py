"""Search: GPT-3 175B on 1,024 A100 with a global batch of 1,536, more than two million candidates.

The bar is a million in 60 s on two cores, and 3 GB. Seconds are of the processor: of this process, which
works alone for some of them, and of its workers, which share theirs. The last lines hold on any machine: how
long a plain loop over ``predict_many`` takes for all that fit, from a sample of them, over what the search
takes, and what Calculon takes for as many candidates by the figure known of it. All schedules but DualPipe,
behind whose pairs of micro-batches much can hide, so that its bounds are loose.

``python -m benchmarks.search exhaust`` compares the ten best with those of exhaustion in three spaces of
3,000 candidates and more, which takes many minutes. ``python -m benchmarks.search 1`` has one worker.
"""

import resource
import sys
import time

import numpy as np

from stepcast.forecast.predict import predict, predict_many
from stepcast.hardware import load_cluster
from stepcast.ir.framework import MEGATRON_CORE
from stepcast.ir.schedules import ScheduleKind
from stepcast.models.catalog import load_model
from stepcast.searching.best import search_parts
from stepcast.searching.result import SearchCounts, SimulatedCandidate
from stepcast.searching.space import SearchAxes, SpacePart, build_space
from tests.searching.spaces import bound_candidates, dense, experts, sharded

GPUS, GLOBAL_BATCH, SEQ = 1024, 1536, 2048
WORKERS = 2
SAMPLE = 40
SEED = 1
# Calculon (Isaev et al., SC 2023), as measured by others on a machine like this; it is not installed here.
CALCULON_S = (4e-3, 8e-3)
AXES = SearchAxes(
    gpus=(GPUS,),
    tp=(1, 2, 4, 8, 16, 32),
    cp=(1, 2, 4, 8, 16),
    vpp=tuple(range(1, 97)),
    micro_batch=tuple(each for each in range(1, 385) if GLOBAL_BATCH % each == 0),
    schedule=tuple(kind for kind in ScheduleKind if kind is not ScheduleKind.DUALPIPE),
)


def _used_s() -> tuple[float, float]:
    """Seconds of this process, and of those it has ended."""
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, others.ru_utime + others.ru_stime


def run() -> None:
    workers = int(sys.argv[1]) if sys.argv[1:2] and sys.argv[1].isdigit() else WORKERS
    model, cluster = load_model("gpt3-175b"), load_cluster("dgx-a100")
    told = [0]

    def watch(counts: SearchCounts, best: SimulatedCandidate | None) -> None:
        if counts.simulated >= told[0] + 100 and best:
            told[0] = counts.simulated
            print(f"  {counts.simulated} simulated, best {best.step_s:.3f} s", flush=True)

    began, clock_s = _used_s(), time.monotonic()
    space = build_space(model, AXES, GLOBAL_BATCH, SEQ, cluster.domain_gpus)
    part = SpacePart(space, MEGATRON_CORE, np.arange(len(space)))
    found = search_parts([part], cluster, watch=watch, workers=workers, looks_around=False)
    own_s, others_s = (after - before for after, before in zip(_used_s(), began, strict=True))
    best, counts = found.best[0], found.counts
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{counts.considered:,} candidates with {workers} worker(s): {counts.facts()}")
    print(f"processor: {own_s:.1f} s of this process, {others_s:.1f} s of its workers; ", end="")
    print(f"{own_s + others_s / workers:.1f} s where each has a core; clock {time.monotonic() - clock_s:.1f} s")
    print(f"peak memory of the largest process: {peak / 1e6:.2f} GB")
    chosen = best.strategy
    print(f"best: {best.step_s:.3f} s, {chosen.layout}, {chosen.schedule}, {chosen.sharding}")

    limits = bound_candidates(space, cluster, MEGATRON_CORE, cluster.gpu.memory_bytes)
    fit = np.flatnonzero(np.isfinite(limits.time_s))
    some = np.random.default_rng(SEED).choice(fit, SAMPLE, replace=False)
    one_s = time.process_time()
    for prediction in predict_many(model, cluster, (space.strategy(int(at)) for at in some)):
        assert prediction.step_s > 0
    one_s = (time.process_time() - one_s) / SAMPLE
    took_s, all_s = own_s + others_s, one_s * len(fit)
    print(f"a plain loop: {one_s * 1e3:.1f} ms each, {all_s / 3600:.1f} h for the {len(fit):,} that may fit")
    print(f"a plain loop takes {all_s / took_s:,.0f} times the processor time")
    low, high = (each * counts.considered / took_s for each in CALCULON_S)
    print(f"Calculon, at 4 to 8 ms a candidate: {low:,.0f} to {high:,.0f} times")


def exhaust() -> None:
    """The ten best of all that fit, each simulated, beside those of the search."""
    for made in (dense, experts, sharded):
        space, cluster, framework = made(wide=True)
        began = time.process_time()
        found = search_parts([SpacePart(space, framework, np.arange(len(space)))], cluster)
        took_s = time.process_time() - began
        rows = np.flatnonzero(np.isfinite(bound_candidates(space, cluster, framework, cluster.gpu.memory_bytes).time_s))
        began, steps = time.process_time(), []
        for at in rows.tolist():
            prediction = predict(space.model, cluster, space.strategy(at), framework)
            if max(stage.total for stage in prediction.memory) <= cluster.gpu.memory_bytes:
                steps.append((prediction.step_s, at))
        all_s = time.process_time() - began
        same = [(each.step_s, each.number) for each in found.best] == sorted(steps)[:10]
        print(f"{made.__name__}: {len(space):,} candidates, {len(steps):,} simulated in {all_s:.0f} s; ", end="")
        print(f"search {found.counts.simulated:,} in {took_s:.0f} s, ten best {'equal' if same else 'DIFFER'}")


if __name__ == "__main__":
    exhaust() if "exhaust" in sys.argv[1:] else run()
