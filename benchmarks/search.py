"""Search: GPT-3 175B on 1,024 A100 with a global batch of 1,536, more than a million candidates.

The bar is 60 s and 3 GB. Seconds are of the processor. The last line holds on any machine: how long a plain
loop over ``predict_many`` takes for all that fit, from a sample of them, over what the search takes.
Schedules are those of Megatron-LM and of zero bubbles; what DualPipe hides makes its bounds loose.
``python -m benchmarks.search exhaust`` compares the ten best with those of exhaustion in three spaces of
3,000 candidates and more, which takes many minutes.
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
from stepcast.searching.best import Counts, Found, Part, search_parts
from stepcast.searching.bound import bounds
from stepcast.searching.space import Axes, space_of
from tests.searching.spaces import dense, experts, sharded

GPUS, GLOBAL_BATCH, SEQ = 1024, 1536, 2048
SAMPLE = 40
SEED = 1
AXES = Axes(
    gpus=(GPUS,),
    tp=(1, 2, 4, 8, 16, 32),
    cp=(1, 2, 4, 8, 16),
    vpp=tuple(range(1, 97)),
    micro_batch=tuple(each for each in range(1, 385) if GLOBAL_BATCH % each == 0),
    schedule=(ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED, ScheduleKind.ZB_H1, ScheduleKind.ZB_V),
)


def run() -> None:
    model, cluster = load_model("gpt3-175b"), load_cluster("dgx-a100")
    began = time.process_time()
    space = space_of(model, AXES, GLOBAL_BATCH, SEQ, cluster.domain_gpus)
    limits = bounds(space, cluster, MEGATRON_CORE, cluster.gpu.memory_bytes)
    bounding_s = time.process_time() - began
    fit = np.flatnonzero(np.isfinite(limits.time_s))
    print(
        f"{len(space):,} candidates: {len(space) - int(limits.legal.sum()):,} illegal, {len(fit):,} may fit"
    )
    print(f"made and bounded in {bounding_s:.1f} s, {bounding_s / len(space) * 1e6:.1f} us each", flush=True)
    del limits
    chosen = np.random.default_rng(SEED).choice(fit, SAMPLE, replace=False)
    one_s = time.process_time()
    for prediction in predict_many(model, cluster, (space.strategy(int(at)) for at in chosen)):
        assert prediction.step_s > 0
    one_s = (time.process_time() - one_s) / SAMPLE
    print(f"a plain loop: {one_s * 1e3:.1f} ms each, {one_s * len(fit) / 3600:.1f} h for those that may fit")

    told = [0]

    def watch(counts: Counts, best: Found | None) -> None:
        if counts.simulated >= told[0] + 100 and best:
            told[0] = counts.simulated
            print(f"  {counts.simulated} simulated, best {best.step_s:.3f} s", flush=True)

    began = time.process_time()
    found = search_parts([Part(space, MEGATRON_CORE, np.arange(len(space)))], cluster, watch=watch)
    took_s = time.process_time() - began
    best, peak = found.best[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"searched in {took_s:.1f} s, peak memory {peak:.2f} GB: {found.counts.facts()}")
    print(f"best: {best.step_s:.3f} s, {best.strategy}")
    print(f"a plain loop takes {one_s * len(fit) / took_s:,.0f} times as long")


def exhaust() -> None:
    """The ten best of all that fit, each simulated, beside those of the search."""
    for made in (dense, experts, sharded):
        space, cluster, framework = made(wide=True)
        began = time.process_time()
        found = search_parts([Part(space, framework, np.arange(len(space)))], cluster)
        took_s = time.process_time() - began
        rows = np.flatnonzero(np.isfinite(bounds(space, cluster, framework, cluster.gpu.memory_bytes).time_s))
        began, steps = time.process_time(), []
        for at in rows.tolist():
            prediction = predict(space.model, cluster, space.strategy(at), framework)
            if max(stage.total for stage in prediction.memory) <= cluster.gpu.memory_bytes:
                steps.append((prediction.step_s, at))
        all_s = time.process_time() - began
        same = [(each.step_s, each.at) for each in found.best] == sorted(steps)[:10]
        print(
            f"{made.__name__}: {len(space):,} candidates, {len(steps):,} simulated in {all_s:.0f} s; ", end=""
        )
        print(
            f"search {found.counts.simulated:,} in {took_s:.0f} s, ten best {'equal' if same else 'DIFFER'}"
        )


if __name__ == "__main__":
    exhaust() if "exhaust" in sys.argv[1:] else run()
