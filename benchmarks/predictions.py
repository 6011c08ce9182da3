"""Forecasts in the library: single ones once warm, a thousand mixed ones, and what their reports cost.

Bars, in processor time: first predictions of a pipeline at most 25 ms, in a process that has predicted another one;
once warm 1.5, 2, 3 and 6 ms at pp 1, 4, 16 and 64; 12 ms with the report at pp 4; 1 ms for each of a thousand mixed
strategies of two models. The ratio to ten million additions in Python tells machines apart.

On a core of an x86-64 server where the additions take 0.51 s: 6.6, 8.4, 8.3 and 17.5 ms for first predictions; 0.2,
0.3 and 0.4 ms warm (7.2, 7.9 and 10.1 ms with their reports); 2.35 ms for each of the mixed strategies, 0.40 ms when
they are asked for again, which is 0.46 and 0.08 % of the additions. A million micro-batches on 8 stages take 10 ms with
their report, 512 on 256 stages 0.34 s.

The bar of the mixed strategies, 0.213 % of the additions, is missed. No part dominates their time: the compiled
engine takes 8 %, and no function more than 3 % by itself. Both models have 70 kinds of layers, 75 schedules and 82
ways in which reductions and gathers are spread over layers, but nearly 1,000 different plans, because what data
parallelism adds depends on how layers are spread. So stages, lists of ops and pieces are put together from parts that
strategies share: layers, the ops that are added to them, calls of slots and of rounds, shapes of pieces, routes and
terms of collectives. What is left is spread over making these lists, chains and prices for each strategy in Python.
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
