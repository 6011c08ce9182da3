"""Strategies: how many of them a search can make, check against a model and count the memory of in a second.

The bar is 10,000 in 10 s. A dense model on 1,024 GPUs and one of experts on 2,048, in layouts of powers of
two with the micro-batches, shardings and recomputations that people try: the first 10,000 of each. The last
column holds on any machine: how many of them take as long as to generate the workload of one, which is what a
search gains that counts memory first.
"""

import time
from collections.abc import Iterator
from itertools import islice, product

from stepcast.cost.memory import memory
from stepcast.generate.workload import generate
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.layout import Layout
from stepcast.ir.legality import is_legal
from stepcast.ir.model import Model, spread_layers
from stepcast.ir.strategy import NO_RECOMPUTE, Recompute, RecomputeKind, ScheduleKind, Sharding, Strategy
from stepcast.models.catalog import load_model

CASES = (("llama-3.1-70b", "h100-sxm", 1024, 8192), ("deepseek-v3", "h800-sxm", 2048, 4096))
WANTED = 10_000
GLOBAL_BATCH = 4096
BATCHES = (1, 2, 4, 8, 16)
WAYS = (1, 2, 4, 8, 16, 32, 64)
SHARDINGS = (Sharding.ZERO_1, Sharding.NONE, Sharding.FSDP, Sharding.ZERO_3)
RECOMPUTES = (NO_RECOMPUTE, Recompute(RecomputeKind.SELECTIVE), Recompute(RecomputeKind.FULL))


def candidates(model: Model, gpus: int, seq: int) -> Iterator[Strategy]:
    """Strategies that fill the GPUs; not all of them suit the model."""
    experts = WAYS if model.experts is not None else (1,)
    grid = product((1, 2, 4, 8), (1, 2, 4), experts, WAYS[:5], (1, 2, 4), BATCHES, SHARDINGS, RECOMPUTES)
    for tp, cp, ep, pp, vpp, micro_batch, sharding, recompute in grid:
        pieces, dp = pp * vpp, gpus // (tp * cp * pp)
        if pieces > model.layers or GLOBAL_BATCH % (dp * micro_batch):
            continue
        yield Strategy(
            Layout(tp=tp, cp=cp, ep=ep, pp=pp, dp=dp, vpp=vpp, expert_tp=1 if ep > 1 else 0),
            micro_batch,
            GLOBAL_BATCH,
            seq,
            sequence_parallel=tp > 1,
            sharding=sharding,
            recompute=recompute,
            schedule=ScheduleKind.INTERLEAVED if vpp > 1 else ScheduleKind.ONE_F_ONE_B,
            stage_layers=() if model.layers % pieces == 0 else spread_layers(model.layers, pieces),
        )


def generating_s(model: Model, gpus: int, seq: int) -> float:
    """Seconds to generate the workload of a legal strategy, over every hundredth of them."""
    legal = (each for each in candidates(model, gpus, seq) if is_legal(model, each))
    chosen = list(islice(legal, 0, 2000, 100))
    began = time.perf_counter()
    for strategy in chosen:
        generate(model, strategy)
    return (time.perf_counter() - began) / len(chosen)


def run() -> None:
    print(f"{'model':16} {'made':>7} {'legal':>7} {'fit':>7} {'seconds':>8} {'a second':>9} {'a workload':>11}")
    for name, gpu_name, gpus, seq in CASES:
        model, gpu = load_model(name), load_gpu(gpu_name)
        made = legal = fitting = 0
        began = time.perf_counter()
        for strategy in islice(candidates(model, gpus, seq), WANTED):
            made += 1
            if is_legal(model, strategy):
                legal += 1
                fitting += all(stage.fits for stage in memory(model, strategy, gpu))
        took = time.perf_counter() - began
        rate, worth = made / took, generating_s(model, gpus, seq) * made / took
        print(f"{name:16} {made:7,} {legal:7,} {fitting:7,} {took:8.2f} {rate:9,.0f} {worth:11,.0f}")


if __name__ == "__main__":
    run()
