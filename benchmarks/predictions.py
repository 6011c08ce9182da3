"""Forecasts in the library: single ones once warm, a thousand mixed ones, and what their reports cost.

Bars: 8 ms for Llama-3.1-70B on 512 GPUs at pp 1, 4 and 16, 3 ms for each of a thousand mixed strategies with
their memory, on the machine where it took 118 ms at pp 1 before; 2 s and 500 MB for 256 stages of 512
micro-batches, and no more for a million of them. Seconds are those of this machine; the ratio to ten million
additions in Python tells them from another one's.

On a machine where the code of that time takes 302 ms at pp 1, 2.6 times as long as there: 2.5, 4 and 7 ms at pp 1, 4
and 16 (the bar times 2.6: 20 ms); for each of the mixed strategies 7.0 ms, 4.7 ms when they are asked for again, with
other work on the machine (the bar times 2.6: 7.7 ms). Since programs are shared by steps that differ in their costs
alone: 1.7, 2.7 and 4.7 ms, and for each of 1,000 mixed strategies of two models 8.6 and 3.4 ms of processor time (5.8
before, when asked again), where ten million additions take 0.57 s. Then 5.9 and 1.0 ms, with other work on the machine.
Since strategies pass the phases of a prediction together: 5.1 and 0.86 ms without other work, where the additions take
0.66 s (6.2 and 0.94 ms in an hour of much other work, in which 7.2 and 1.26 ms were measured before). Since the terms
of collectives are found once for all sizes and stages are summed block by block: 4.9 and 0.84 ms, where they take 0.57
s. 942 of the 1,000 programs differ in their structure, so that few could be shared as a whole; 584 differ in their
pieces. Both models have 70 kinds of layers, 75 schedules and 114 kinds of sequences of ops, but 2,646 different bodies
of stages. No function takes more than 6 %: putting programs together takes 20 %, pricing, lowering and running 16 %
each, generating 14 %, memory 8 %, power and pace 4 %. Since programs share chains of pieces and a run is kept
only where its times are asked for, 0.95 and 0.91 times as long as before, measured in turn (5.5 and 0.93 ms with much
other work on the machine). 2,600 chains serve all programs, and works have 2,300 different values. Without what is
built once for all (templates, chains, layers) another 1,000 take 0.8 times as long as the first; of that generating
stages is 22 %, putting programs together 24 %, pricing 16 % and folding and running 19 %. Since programs that
differ in repeats and calls alone share their pieces (585 sets of pieces for 1,000 programs, 731 chains in place of
2,604): 0.95 times as long as before when first asked for and 1.02 times when asked again, measured in turn. Since what
data parallelism adds to stages is made once for all micro-batches and recomputation (1,519 ends of steps in place of
2,944): 0.94 and 1.01 times as long as before, measured in turn.

The first prediction of a pipeline, in a process that has predicted another one (bar: 25 ms): 9.8, 15, 17 and 40 ms at
pp 1, 4, 16 and 64, where the additions take 0.57 s, with other work on the machine (10.7, 16, 17 and 48 ms in the same
hour before repeated periods ran over their finite terms alone and the calls of all stages were ordered together). Since
compiled kernels are opened as libraries: 8.2, 10.9, 10.6 and 24.9 ms (median of five, the additions take 0.57 s, with
other work on the machine).
"""

import random
import resource
import time
from collections.abc import Iterator
from itertools import islice, product

from benchmarks.timing import best_of
from stepcast.forecast.predict import predict, predict_many
from stepcast.hardware import Cluster, load_cluster
from stepcast.ir.layout import Layout
from stepcast.ir.legality import is_legal
from stepcast.ir.model import Model
from stepcast.ir.strategy import Recompute, RecomputeKind, ScheduleKind, Sharding, Strategy, StrategyError
from stepcast.models.catalog import load_model

GPUS, SEQ, GLOBAL_BATCH = 512, 8192, 1024
MIXED, MODELS = 500, ("gpt3-175b", "llama-3.1-70b")  # strategies of each model


def strategy(pp: int) -> Strategy:
    layout = Layout(tp=8, pp=pp, dp=GPUS // 8 // pp)
    return Strategy(layout, 1, 512, SEQ, sequence_parallel=True, sharding=Sharding.ZERO_1)


def mixed(model: Model) -> Iterator[Strategy]:
    """Legal strategies of all kinds, in no order."""
    kinds = (RecomputeKind.NONE, RecomputeKind.SELECTIVE, RecomputeKind.FULL)
    shardings = (Sharding.NONE, Sharding.ZERO_1, Sharding.FSDP)
    grid = list(product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2), (1, 2, 4), kinds, shardings))
    random.Random(1).shuffle(grid)
    for tp, pp, vpp, cp, micro_batch, kind, sharding in grid:
        layout = Layout(tp=tp, cp=cp, pp=pp, vpp=vpp, dp=GPUS // (tp * cp * pp))
        schedule = ScheduleKind.INTERLEAVED if vpp > 1 else ScheduleKind.ONE_F_ONE_B
        try:
            made = Strategy(
                layout,
                micro_batch,
                GLOBAL_BATCH,
                min(SEQ, model.max_seq),
                sequence_parallel=tp > 1,
                sharding=sharding,
                recompute=Recompute(kind),
                schedule=schedule,
            )
        except StrategyError:
            continue
        if is_legal(model, made):
            yield made


def additions() -> int:
    total = 0
    for number in range(10_000_000):
        total += number
    return total


def growth(model: Model, cluster: Cluster, bare_s: float) -> None:
    """Long and deep pipelines, each with its report, and the most memory that any of them took so far."""
    for pp, micro_batches in ((64, 128), (128, 256), (256, 512), (8, 10_000), (8, 1_000_000)):
        layout = Layout(tp=8, pp=pp)
        chosen = Strategy(layout, 1, micro_batches, SEQ, sequence_parallel=True)
        began = time.process_time()
        _ = predict(model.with_layers(max(pp, model.layers)), cluster, chosen).report
        took_s = time.process_time() - began
        most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"pp {pp:3} x {micro_batches:9,} micro-batches: {took_s:.2f} s, {took_s / bare_s:.0%} of that; "
            f"{most_mb:.0f} MB"
        )


def first_calls(model: Model, cluster: Cluster) -> None:
    """First predictions, in a process that has predicted another strategy; one alone takes a little longer."""
    predict(model, cluster, strategy(2))
    for pp in (1, 4, 16, 64):
        began = time.process_time()
        predict(model, cluster, strategy(pp))
        print(f"Llama-3.1-70B, 512 GPUs, pp {pp:2}, first time: {(time.process_time() - began) * 1e3:.1f} ms")


def run() -> None:
    model, cluster = load_model("llama-3.1-70b"), load_cluster("dgx-h100")
    bare_s = best_of(additions, 3)
    print(f"ten million additions in Python: {bare_s:.2f} s")
    first_calls(model, cluster)
    growth(model, cluster, bare_s)
    for pp in (1, 4, 16):
        chosen = strategy(pp)
        predict(model, cluster, chosen)
        step_s = best_of(lambda chosen=chosen: predict(model, cluster, chosen))  # type: ignore[misc]
        whole_s = best_of(lambda chosen=chosen: predict(model, cluster, chosen).report)  # type: ignore[misc]
        print(
            f"Llama-3.1-70B, 512 GPUs, pp {pp:2}: {step_s * 1e3:5.1f} ms, {step_s / bare_s:.1%} of that; "
            f"with its report {whole_s * 1e3:5.1f} ms"
        )
    sets = [(each, list(islice(mixed(each), MIXED))) for each in map(load_model, MODELS)]
    count = sum(len(strategies) for _, strategies in sets)
    for when in ("first", "again"):
        began = time.process_time()
        fitting = sum(each.fits for model, chosen in sets for each in predict_many(model, cluster, chosen))
        each_s = (time.process_time() - began) / count
        print(f"{count} mixed strategies, {when}: {each_s * 1e3:.2f} ms each, {each_s / bare_s:.2%} of that")
    print(f"{fitting} of them fit")


if __name__ == "__main__":
    run()
